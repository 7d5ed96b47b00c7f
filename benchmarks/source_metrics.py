"""Counts what says how large and how tangled the sources are: `python -m benchmarks.source_metrics`.

`tests/null/test_source_metrics.py` holds limits for these numbers, which only fall. `--list METRIC` prints the places
that a metric counts.

A docstring counts as a fragment if it begins with a word of `FRAGMENT_WORDS` or in lower case, or is nothing but a
reference (`See X.`); "Whether …" is a sentence of its own for a field, not for a function. A function's docstring is
not imperative if it begins with an article or a word of quantity.
"""

from __future__ import annotations

import argparse
import ast
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner", "runtime")
MANY_PARAMETERS = 6
SAME_FILE_NAME = 4

FRAGMENT_WORDS = frozenset(
    re.findall(
        r"\w+",
        """After Also And As At Below Beside Between Both But By For From How If In Inside Its Likewise Not Nobody
        Nothing Of On Once Or Over See Since So Some Somebody Than That Those To Until What When Where Whether Which
        While Who Whom Whose Why With Without""",
    )
)
NOUN_WORDS = frozenset({"A", "All", "An", "Another", "Each", "Every", "No", "One", "The", "This", "Three", "Two"})

TRANSPORTS = ("flat", "hitopk", "library", "naive_all_gather", "native", "tree", "torus_2d", "two_shot")
CODECS = ("powersgd", "randomk", "topk", "wire")
MODES = ("delay", "late_gather", "local_updaters", "sharded", "synchronous")
NAMED_FIELDS = frozenset({"algorithm", "codec", "collective", "compressor", "transport"})
REGISTRIES = (
    "runtime/comm/collectives/", "runtime/sparse/compressors/", "runtime/plan/combinations.py", "planner/cost/nccl",
    "planner/documents/nccl",
)  # fmt: skip
"""Where names may be compared: the registries themselves; and NCCL's algorithms, which are not planner's."""


@lru_cache(maxsize=1)
def sources() -> Mapping[str, tuple[Path, ast.Module]]:
    """Return the path and the parsed text of every module of both packages, by name."""
    found = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    return found


def place(path: Path, line: int) -> str:
    """Return a place in the sources, as tools print it."""
    return f"{path.relative_to(ROOT)}:{line}"


def code_lines() -> list[str]:
    """List a place for each line of code: without blank lines, comments and docstrings."""
    found = []
    for path, tree in sources().values():
        docstrings = {line for node, _ in docstrings_of(tree) for line in range(node.lineno, end_of(node) + 1)}
        lines: set[int] = set()
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type not in _NO_CODE:
                    lines.update(range(token.start[0], token.end[0] + 1))
        found += [place(path, line) for line in sorted(lines - docstrings)]
    return found


_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
)  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


def end_of(node: ast.stmt) -> int:
    """Return the last line of a statement."""
    return node.end_lineno or node.lineno


def docstrings_of(tree: ast.Module) -> Iterator[tuple[ast.Expr, ast.AST]]:
    """Yield every docstring with its owner: a module, a class or a function; itself, where it is about a field."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.Module | ast.ClassDef | Function):
            for position, node in enumerate(owner.body):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    yield node, owner if position == 0 else node


def long_signatures() -> list[str]:
    """List functions with more than `MANY_PARAMETERS` parameters, besides `self` and `cls`."""
    found = []
    for path, tree in sources().values():
        for node in (node for node in ast.walk(tree) if isinstance(node, Function)):
            given = node.args
            names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            names += [each.arg for each in (given.vararg, given.kwarg) if each is not None]
            if len(names) - (names[:1] in (["self"], ["cls"])) > MANY_PARAMETERS:
                found.append(f"{place(path, node.lineno)} {node.name}")
    return found


def lazy_imports() -> list[str]:
    """List imports inside of functions."""
    return [
        place(path, node.lineno)
        for path, tree in sources().values()
        for function in ast.walk(tree)
        if isinstance(function, Function)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def imports_of(name: str, tree: ast.Module) -> set[str]:
    """Return the modules of both packages that a module imports, anywhere but for type checkers alone."""
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {member if member in sources() else node.module for member in members}
    return {module for module in found if module in sources() and module != name}


def import_cycles() -> list[str]:
    """List groups of modules that import one another, lazy imports included."""
    graph = {name: imports_of(name, tree) for name, (_, tree) in sources().items()}
    reach = {name: _reachable(graph, name) for name in graph}
    groups = {frozenset({name, *(other for other in reach[name] if name in reach[other])}) for name in graph}
    return [" ↔ ".join(sorted(group)) for group in sorted(groups, key=min) if len(group) > 1]


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def fragments() -> list[str]:
    """List docstrings that are no sentence; see above."""
    return [f"{where} {text}" for where, text, owner in _docstring_texts() if is_fragment(text, owner)]


def not_imperative() -> list[str]:
    """List docstrings of functions that name a thing in place of saying what the function does."""
    return [
        f"{where} {text}"
        for where, text, owner in _docstring_texts()
        if isinstance(owner, Function) and _first_word(text) in NOUN_WORDS
    ]


def docstrings() -> list[str]:
    """List all docstrings."""
    return [f"{where} {text}" for where, text, _ in _docstring_texts()]


@lru_cache(maxsize=1)
def _docstring_texts() -> list[tuple[str, str, ast.AST]]:
    """Return place, first line and owner of each docstring."""
    found = []
    for path, tree in sources().values():
        for node, owner in docstrings_of(tree):
            assert isinstance(node.value, ast.Constant)
            found.append((place(path, node.lineno), str(node.value.value).strip().partition("\n")[0], owner))
    return found


def _first_word(text: str) -> str:
    return re.split(r"[\s,;:.]", text, maxsplit=1)[0]


def is_fragment(text: str, owner: ast.AST) -> bool:
    """Return whether a docstring is no sentence; `owner` is a function, a class or a module, else a field is meant."""
    word = _first_word(text)
    if word == "See":
        return re.fullmatch(r"See `[^`]+`( and `[^`]+`)?\.", text) is not None
    if word == "Whether" and not isinstance(owner, Function):
        return False
    return word in FRAGMENT_WORDS or word[:1].islower()


def repeated_file_names() -> list[str]:
    """List names of files that occur more than `SAME_FILE_NAME` times."""
    names = Counter(path.name for path, _ in sources().values() if path.name != "__init__.py")
    return [f"{name}: {count}" for name, count in sorted(names.items()) if count > SAME_FILE_NAME]


def shared_file_names() -> list[str]:
    """List names of files that occur more than once."""
    names = Counter(path.name for path, _ in sources().values() if path.name != "__init__.py")
    return [f"{name}: {count}" for name, count in sorted(names.items()) if count > 1]


def compared_names() -> list[str]:
    """List comparisons of names of codecs, transports and modes outside of their registries."""
    found = []
    for path, tree in sources().values():
        if str(path.relative_to(ROOT)).startswith(REGISTRIES):
            continue
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
            sides = [side for each in (node.left, *node.comparators) for side in _members(each)]
            if any(_is_name(side) for side in sides) or (
                any(_is_named_field(side) for side in sides) and any(map(_is_constant, sides))
            ):
                found.append(f"{place(path, node.lineno)} {ast.unparse(node)}")
    return found


def _members(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple | ast.Set | ast.List) else [node]


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (*TRANSPORTS, *CODECS, *MODES)


def _is_named_field(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "name":  # of `bucket.compressor.name`
        node = node.value
    return (
        isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id) in NAMED_FIELDS
    )


def _is_constant(node: ast.expr) -> bool:
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or (isinstance(node, ast.Name) and node.id.isupper())


METRICS: Mapping[str, Callable[[], list[str]]] = {
    "code lines": code_lines,
    "functions with more than six parameters": long_signatures,
    "imports inside of functions": lazy_imports,
    "import cycles": import_cycles,
    "docstrings": docstrings,
    "docstrings that are fragments": fragments,
    "functions described by a noun": not_imperative,
    "file names more than four times": repeated_file_names,
    "file names more than once": shared_file_names,
    "comparisons with registered names": compared_names,
}
"""Metric → the places that it counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", choices=METRICS, metavar="METRIC", help="print the places that a metric counts")
    listed = parser.parse_args().list
    if listed is not None:
        print("\n".join(METRICS[listed]()))
        return
    for name, places in METRICS.items():
        print(f"{len(places()):>7,}  {name}")


if __name__ == "__main__":
    main()
