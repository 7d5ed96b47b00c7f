"""Names of algorithms, codecs and modes are looked up in their registries, not compared as strings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import planner
from planner.model.codecs import BY_NAME
from planner.model.modes import MODES
from runtime.plan.combinations import COMBINATIONS, FEATURES_OF_CODECS
from runtime.plan.transports import TRANSPORTS
from runtime.sparse.compressors import COMPRESSORS

ROOT = Path(planner.__file__).parents[1]

NAMES = {transport.algorithm for transport in TRANSPORTS.values()} | set(COMPRESSORS) - {"none"} | set(COMBINATIONS)
FIELDS = {"algorithm", "compressor", "codec", "transport"}
"""Fields and variables that hold such a name, or a value that has it as its `name`: no string is compared with them."""

OWN = (
    "planner/model/codecs/*.py", "planner/model/modes/*.py", "runtime/plan/combinations.py",
    "runtime/plan/transports.py", "runtime/comm/collectives/*.py", "runtime/modes/*.py",
    "runtime/sparse/compressors/*.py",
)  # fmt: skip
"""Modules of transports, codecs and modes."""
OTHERS = ("planner/cost/nccl.py", "planner/cost/nccl_fit.py", "planner/documents/nccl*.py")
"""NCCL's own algorithms, some of which have the same names."""


def compared_strings(node: ast.Compare) -> set[str]:
    """Strings that something is compared with, alone or as one of several; not keys that something may have."""
    found: set[str] = set()
    for operator, operand in zip(node.ops, node.comparators, strict=True):
        sides = [node.left, operand] if isinstance(operator, ast.Eq | ast.NotEq) else []
        if isinstance(operator, ast.In | ast.NotIn) and isinstance(operand, ast.Tuple | ast.List | ast.Set):
            sides = operand.elts
        found |= {side.value for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)}
    return found


def compared_fields(node: ast.Compare) -> set[str]:
    """Names of the fields and variables that are compared, of `bucket.compressor.name` "compressor"."""
    return {field_of(side) for side in (node.left, *node.comparators)}


def field_of(side: ast.expr) -> str:
    if isinstance(side, ast.Attribute):
        return field_of(side.value) if side.attr == "name" else side.attr
    return side.id if isinstance(side, ast.Name) else ""


def name_comparisons(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        strings = compared_strings(node) if isinstance(node, ast.Compare) else set()
        if isinstance(node, ast.Compare) and strings and (strings & NAMES or compared_fields(node) & FIELDS):
            yield f"{node.lineno}: {ast.unparse(node)}"


def other_files() -> list[Path]:
    left_out = {path for pattern in (*OWN, *OTHERS) for path in ROOT.glob(pattern)}
    files = (path for package in ("planner", "runtime") for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in files if path not in left_out)


@pytest.mark.parametrize("path", other_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_name_is_compared_as_a_string(path: Path) -> None:
    found = list(name_comparisons(path.read_text(encoding="utf-8")))
    assert found == [], f"look it up in a registry, or ask a trait of the transport, the codec or the mode: {found}"


@pytest.mark.parametrize(
    "source",
    ["b.algorithm == 'ring'", "x in ('library', y)", "b.compressor.name != 'none'", "'topk' == x", "mode == 'delay'"],
)
def test_the_check_sees_comparisons(source: str) -> None:
    assert list(name_comparisons(source))


@pytest.mark.parametrize("source", ["'delay' in checkpoint", "x == 'wires'", "b.transport == TREE", "cause == 'none'"])
def test_the_check_leaves_other_comparisons(source: str) -> None:
    assert not list(name_comparisons(source))


def test_both_sides_know_the_same_names() -> None:
    assert set(FEATURES_OF_CODECS) == set(COMPRESSORS) == {"none", *BY_NAME}
    assert {mode.name for mode in MODES} == set(COMBINATIONS)
