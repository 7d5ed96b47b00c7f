"""Some fifty small training jobs of many kinds, which tracing and planning have to bear. Nothing is downloaded."""

from . import controlflow, convolutions, foreign_text, foreign_vision, recurrent, special, structured, transformer
from .registry import ZOO, Member

__all__ = [
    "ZOO",
    "Member",
    "controlflow",
    "convolutions",
    "foreign_text",
    "foreign_vision",
    "recurrent",
    "special",
    "structured",
    "transformer",
]
