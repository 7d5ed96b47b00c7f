"""Sources stay as small and as untangled as they are: numbers of `benchmarks.source_metrics` have limits."""

from __future__ import annotations

import ast
import re

import pytest

from benchmarks.source_metrics import METRICS, PACKAGES, ROOT, is_fragment, sources

LIMITS = {
    "code lines": 50_891,
    "functions with more than six parameters": 18,
    "imports inside of functions": 22,
    "import cycles": 0,
    "docstrings that are fragments": 57,
    "functions described by a noun": 28,
    "file names more than four times": 0,
    "file names more than once": 43,
    "comparisons with registered names": 0,
}
"""Metric → the most that it may be. Limits only fall: whoever makes a number smaller lowers its limit. The number of
lines alone rises, with what planner can do."""


@pytest.mark.parametrize("metric", LIMITS)
def test_no_number_is_above_its_limit(metric: str) -> None:
    """`python -m benchmarks.source_metrics --list METRIC` prints what is counted."""
    assert len(METRICS[metric]()) <= LIMITS[metric], metric


@pytest.mark.parametrize(
    ("text", "function", "field"),
    [
        ("Return the number of ranks.", False, False),
        ("Number of ranks.", False, False),
        ("Whether ranks wait.", True, False),
        ("What ranks wait for.", True, True),
        ("Likewise.", True, True),
        ("See `Session.attach`.", True, True),
        ("See `Session.attach`; returns at once.", False, False),
        ("of a bucket", True, True),
    ],
)
def test_what_a_fragment_is(text: str, function: bool, field: bool) -> None:
    owner = ast.parse("def f(): ...").body[0]
    assert is_fragment(text, owner) == function
    assert is_fragment(text, ast.Expr(ast.Constant(text))) == field


ENTRIES = re.compile(r"planner\.(__main__|integrations\.(?!attaching)\w+)")
"""Modules that scripts import, and no module of ours; what they define frameworks and scripts call."""

FOR_USERS = {
    "parse_schedule": "reads what `str` of a schedule prints",
    "share_norms": "of an optimizer without a plan", "stop_sharing": "of an optimizer without a plan",
    "FEATURES": "the rows of a table that a page shows",
    "next_phase": "of a session", "optimizer_state_dict": "of a session",
    "create_args_for_root": "of torch.fx", "supports_higher_order_operators": "of torch",
}  # fmt: skip
"""Names that nothing of ours uses but tests → who does."""


def test_every_module_is_imported_by_another_one() -> None:
    used = {name for name in sources() if ENTRIES.fullmatch(name)}
    for name, (_, tree) in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names} - {name}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                used |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} - {name}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # packages import by name
                used |= {node.value} - {name}
    unused = {name for name, (path, _) in sources().items() if name not in used and path.name != "__init__.py"}
    assert unused == set()


def test_every_function_and_class_is_used_outside_of_tests() -> None:
    """By name alone: a name that is used anywhere counts as used."""
    trees = [tree for _, tree in sources().values()]
    for folder in ("benchmarks", "examples"):
        trees += [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / folder).rglob("*.py")]
    used = {*FOR_USERS, "main"}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.alias):
                used.add(node.name)
            elif isinstance(node, ast.keyword) and node.arg is not None:
                used.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                used.add(node.value)
    unused = [
        f"{module}: {node.name}"
        for module, (_, tree) in sources().items()
        if not ENTRIES.fullmatch(module)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if node.name not in used and not node.name.startswith("__") and not node.decorator_list
    ]
    assert unused == []
    assert {name.partition(".")[0] for name in sources()} == set(PACKAGES)
