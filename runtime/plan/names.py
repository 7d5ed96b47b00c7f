"""Names and fingerprints of parameters, the same for a plain, a compiled and a wrapped model. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts of wrappers (`torch.compile`: `_orig_mod.`, DDP: `module.`)."""
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def shorten(names: Sequence[str], shown: int = 5) -> str:
    """Return the first names in words, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def layer_of(name: str) -> str:
    """Return the layer that owns a parameter: its name up to the last dot (the name itself if it has none)."""
    return name.rpartition(".")[0] or name


def numbered(layers: Iterable[str]) -> list[str]:
    """Names that tell runs of gradients of one layer apart, where it comes back: `conv`, `conv#2`."""
    names: list[str] = []
    seen: dict[str, int] = {}
    for layer in layers:
        seen[layer] = seen.get(layer, 0) + 1
        names.append(layer if seen[layer] == 1 else f"{layer}#{seen[layer]}")
    return names


def fingerprint(parameters: Iterable[tuple[str, Sequence[int], str]]) -> str:
    """SHA-256 of the compact JSON of the sorted `[name, shape, dtype]` of all trainable parameters.

    Args:
        parameters: (canonical name, shape, dtype as in `"float32"`) of each.
    """
    rows = sorted([name, list(shape), dtype] for name, shape, dtype in parameters)
    text = json.dumps(rows, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
