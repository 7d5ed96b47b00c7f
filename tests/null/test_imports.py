"""What may import what: deciding never touches torch, the runtime never touches the planner."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import usual_document, write

import planner

ROOT = Path(planner.__file__).parents[1]

HEAVY = ("torch", "ortools", "networkx", "sklearn", "scipy")

LAZY = (*HEAVY, "plotly")
"""What only the function that needs it may import."""

DECIDING = (
    "planner/__init__.py", "planner/__main__.py", "planner/ir.py", "planner/verify.py", "planner/cli/*.py",
    "planner/documents/*.py", "planner/cost/*.py", "planner/model/*.py", "planner/model/modes/*.py",
    "planner/model/codecs/*.py", "planner/search/*.py",
    "planner/strategies/*.py", "planner/passes/*.py", "planner/fsdp2/*.py", "planner/decide/*.py", "planner/emit/*.py",
    "planner/export/*.py", "planner/report/*.py", "planner/traces/*.py", "planner/testbed/[!s]*.py",
    "planner/jobs/job.py", "planner/jobs/finding.py",
    "planner/jobs/rank_options.py", "planner/online/cache.py", "planner/online/deciding.py", "planner/online/trying.py",
    "runtime/__init__.py", "runtime/errors.py", "runtime/version.py", "runtime/pages.py", "runtime/debug.py",
    "runtime/lazy.py", "runtime/plan/*.py",
)  # fmt: skip
"""Files that have to work where torch is not installed: whole folders, but for one file that needs
torch."""

CHECK = f"""
import json, sys
def heavy():
    return sorted({{name.partition(".")[0] for name in sys.modules}} & {set(HEAVY)!r})
"""


def loaded_after(code: str, folder: Path) -> list[str]:
    """Which heavy packages a fresh Python holds after running `code` in a folder."""
    program = f"{CHECK}\nsys.path.insert(0, {str(ROOT)!r})\n{code}\nprint('\\n' + json.dumps(heavy()))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    result: list[str] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_importing_the_packages_is_light(tmp_path: Path) -> None:
    names = "planner.optimize, planner.simulate, planner.TrainingJob, runtime.load_plan, runtime.parse_plan"
    assert loaded_after(f"import planner, runtime, planner.cli.app; {names}", tmp_path) == []


def test_everything_public_is_handed_out_by_planner() -> None:
    import runtime

    for name in planner.__all__:
        assert getattr(planner, name) is not None
    assert set(runtime.__all__) <= set(planner.__all__)


@pytest.mark.parametrize("shadow", ["runtime.py", "runtime/__init__.py"])
def test_a_file_that_hides_the_runtime_is_named(tmp_path: Path, shadow: str) -> None:
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).write_text("steps = 3\n")
    (tmp_path / "train.py").write_text("import planner\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (["train.py"], ["-m", "planner", "--version"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0
        assert f"found {tmp_path / shadow} under the name 'runtime'" in done.stderr
        assert "rename it" in done.stderr


def test_the_check_sees_torch(tmp_path: Path) -> None:
    """The other way round, so that the checks above can fail."""
    assert "torch" in loaded_after("import runtime; runtime.attach", tmp_path)


RUN = """
from planner.cli.app import main
for arguments in {calls!r}:
    try:
        main(arguments)
    except SystemExit as error:
        assert not error.code, (arguments, error.code)
"""


def test_deciding_from_end_to_end_is_light(tmp_path: Path) -> None:
    """optimize, simulate and explain, in words, as JSON and in pictures."""
    write(tmp_path / "p.json", usual_document())
    calls = [
        ["optimize", "p.json"],
        ["optimize", "p.json", "--json"],
        ["simulate", "p.json", "--ranks", "4,8"],
        ["simulate", "p.json", "--json"],
        ["explain", "plan.json", "--json"],
        ["export", "plan.json", "--to", "ddp", "--profile", "p.json"],
        ["optimize", "p.json", "--parallel", "fsdp2", "-o", "fsdp2.json"],
        ["explain", "fsdp2.json"],
        ["--help"],
        *([name, "--help"] for name in ("profile", "run", "compare", "rehearse", "demo", "doctor")),
    ]
    assert loaded_after(RUN.format(calls=calls), tmp_path) == []
    assert (tmp_path / "plan.json").is_file()
    shown = [["explain", "plan.json"], ["explain", "plan.json", "--trace", "trace.json", "--html", "page.html"]]
    assert loaded_after(RUN.format(calls=shown), tmp_path) == ["networkx"]  # for slack and the critical path


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs on import: not the bodies of functions, not what is for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from top_level(node)


def deciding_files() -> list[Path]:
    return sorted(path for pattern in DECIDING for path in ROOT.glob(pattern))


@pytest.mark.parametrize("path", sorted((ROOT / "runtime").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_runtime_never_imports_the_planner(path: Path) -> None:
    """Anywhere: at the top, in a function, for types, or by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        assert not [name for name in modules_of(node) if name.partition(".")[0] == "planner"]
        if isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            assert "planner" not in ast.unparse(node)


@pytest.mark.parametrize("path", deciding_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_deciding_files_do_not_import_heavy_packages(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {name.partition(".")[0] for node in top_level(tree) for name in modules_of(node)}
    assert not found & set(LAZY)


ORDER = {
    "planner": (
        "ir", "documents", "cost", "model", "verify", "search", "strategies", "emit", "passes", "fsdp2", "decide",
        "export", "report", "traces", "frontend", "testbed", "profile", "jobs", "online", "integrations", "comparison",
        "rehearse", "cli", "__main__", "__init__",
    ),
    "runtime": (
        "errors", "version", "pages", "debug", "lazy", "torch_compat", "plan", "kernels", "comm", "monitor", "core",
        "sparse", "optimizers", "modes", "delay", "sharded", "outer", "checks", "fully_sharded", "session", "datacache",
        "local_async", "__init__",
    ),
}  # fmt: skip
"""Folders and modules at the top of each package, lowest first: imports go down this list only."""


def modules(package: str) -> dict[str, Path]:
    """Name → file of every module of a package."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str:
    """The folder or the module at the top of the package that a module is in."""
    return module.split(".")[1] if "." in module else "__init__"


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_down_the_list(package: str) -> None:
    """Wherever they stand: at the top, in a function, for type checkers. So there is no circle between folders."""
    order, known, upward = ORDER[package], modules(package), []
    assert {room_of(name) for name in known} == set(order)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for imported in modules_of(node):
                if imported.partition(".")[0] == package and order.index(room_of(imported)) > order.index(
                    room_of(name)
                ):
                    upward.append(f"{name}: {imported}")
    assert upward == []


def test_the_map_of_folders_has_the_order_of_the_list() -> None:
    """The page says that each folder imports only what is above it in its map."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    listed: dict[str, list[str]] = {}
    for line in page.splitlines():
        if not line.startswith(" "):
            rows = listed.setdefault(line.partition("/")[0], [])
        elif not line.startswith("   "):
            names = re.split(r"\s{2,}", line.strip())[0].removesuffix(" †").split(", ")
            rows += [name.removesuffix(".py").removesuffix("/") for name in names]
    for package, order in ORDER.items():
        assert listed[package] == [name for name in order if not name.startswith("__")]


def test_the_list_of_deciding_files_is_complete() -> None:
    """Each pattern matches, and together they cover what the three commands load."""
    assert all(list(ROOT.glob(pattern)) for pattern in DECIDING)
    assert len(deciding_files()) == len(set(deciding_files())) > 30
