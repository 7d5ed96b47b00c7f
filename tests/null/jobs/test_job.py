"""Finding a job by name: every way in which that can fail has its own message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.jobs.job import TrainingJob, load_job
from runtime.errors import InputError

SOUND = """
from types import SimpleNamespace
from planner import TrainingJob

def job():
    weight = SimpleNamespace(requires_grad=True)
    frozen = SimpleNamespace(requires_grad=False)
    model = SimpleNamespace(parameters=lambda: [frozen, weight])
    return TrainingJob(model=model, loss=len, batch=divmod, optimizer=list)

def frozen():
    model = SimpleNamespace(parameters=lambda: [SimpleNamespace(requires_grad=False)])
    return TrainingJob(model=model, loss=len, batch=divmod, optimizer=list)

def nothing():
    return None

def needs(argument):
    return None

def broken():
    return 1 / 0

def leaving():
    raise SystemExit("no data")

number = 3
"""


@pytest.fixture(autouse=True)
def _clean_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder with jobs.py and a package; what is imported is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    (tmp_path / "jobs.py").write_text(SOUND)
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").touch()
    (tmp_path / "kit" / "inner.py").write_text(SOUND)
    (tmp_path / "kit" / "hungry.py").write_text("import no_such_library\n")
    (tmp_path / "kit" / "sick.py").write_text("raise OSError('no data')\n")
    (tmp_path / "kit" / "leaving.py").write_text("raise SystemExit('no data')\n")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("spec", ["jobs.py:job", "./jobs.py:job", "kit/inner.py:job", "kit.inner:job"])
def test_job_is_found(spec: str) -> None:
    job = load_job(spec)
    assert isinstance(job, TrainingJob)
    assert (job.loss, job.batch, job.optimizer) == (len, divmod, list)


def test_absolute_path(tmp_path: Path) -> None:
    assert isinstance(load_job(f"{tmp_path}/jobs.py:job"), TrainingJob)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("jobs.py", "found the job 'jobs.py', expected path/to/file.py:name or package.module:name"),
        ("jobs.py:", "found the job 'jobs.py:', expected path"),
        (":job", "found the job ':job', expected path"),
        ("", "found the job '', expected path"),
        ("absent.py:job", "absent.py: no such file; expected path/to/file.py:name"),
        ("kit/absent.py:job", "absent.py: no such file"),
        ("jobs.py:jbo", "jobs.py: has no 'jbo', expected a function that returns a TrainingJob; it has job"),
        ("jobs.py:number", "jobs.py:number: found a int, expected a function"),
        ("jobs.py:nothing", "jobs.py:nothing: returned NoneType, expected a planner.TrainingJob"),
        ("jobs.py:needs", "jobs.py:needs: raised TypeError: .*argument"),
        ("jobs.py:broken", "jobs.py:broken: raised ZeroDivisionError: division by zero"),
        ("jobs.py:leaving", "jobs.py:leaving: raised SystemExit: no data"),
        ("jobs.py:frozen", "jobs.py:frozen: the model has no trainable parameter"),
        ("absent:job", "no module 'absent'; expected package.module:name or path/to/file.py:name"),
        ("kit.absent:job", "no module 'kit.absent'"),
        ("absent.inner:job", "no module 'absent.inner'"),
        ("kit.inner:jbo", "kit.inner: has no 'jbo'"),
        ("kit.hungry:job", "kit.hungry: needs the module 'no_such_library', which is not installed"),
        ("kit.sick:job", "kit.sick: raised OSError while being imported: no data"),
        ("kit.leaving:job", "kit.leaving: raised SystemExit while being imported: no data"),
        ("kit/sick.py:job", "sick.py: raised OSError while being imported: no data"),
        (".inner:job", "inner: raised TypeError while being imported"),
    ],
)
def test_what_can_go_wrong(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_job(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def job(:\n", "raised SyntaxError while being imported"),
        ("import sys\nsys.exit('usage: me')\n", "raised SystemExit while being imported: usage: me"),
        ("import no_such_library\n", "raised ModuleNotFoundError while being imported: No module named"),
    ],
)
def test_scripts_that_do_not_import(tmp_path: Path, text: str, message: str) -> None:
    """A failed import leaves no half-made module behind."""
    (tmp_path / "script.py").write_text(text)
    with pytest.raises(InputError, match=message):
        load_job("script.py:job")
    assert "script" not in sys.modules


@pytest.mark.parametrize("text", ["from runtime import steps\n", "import runtime\nruntime.steps\n"])
def test_a_file_of_the_job_that_a_package_hides_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "runtime.py").write_text("steps = 3\n")
    with pytest.raises(InputError, match=r"runtime\.py is hidden by planner's package 'runtime': rename it"):
        load_job("script.py:job")


def test_jobs_that_are_half_made(tmp_path: Path) -> None:
    """Found out before anything is started with them, with the line that raised."""
    fields = {"model": "torch.nn.Linear(1, 1)", "loss": "len", "batch": "divmod", "optimizer": "list"}
    cases = {
        "loss": ("3", "loss is a int, expected a function"),
        "batch": ("None", "batch is a NoneType, expected a function"),
        "optimizer": ("[]", "optimizer is a list, expected a function"),
        "model": ("'net'", "model is a str, expected a torch.nn.Module"),
    }
    for field, (value, words) in {**cases, "meta": ("", "on the meta device, expected ones with values")}.items():
        changed = fields | ({"model": "torch.nn.Linear(1, 1, device='meta')"} if field == "meta" else {field: value})
        arguments = ", ".join(f"{name}={value}" for name, value in changed.items())
        path = tmp_path / f"job_{field}.py"
        path.write_text(
            f"import torch\nfrom planner import TrainingJob\ndef job():\n    return TrainingJob({arguments})\n"
        )
        with pytest.raises(InputError, match=words):
            load_job(f"{path}:job")
    (tmp_path / "raises.py").write_text("def job():\n\n    open('/absent/data')\n")
    with pytest.raises(InputError, match=r"raised FileNotFoundError: .*/absent/data.* \(raises.py, line 3\); expected"):
        load_job(f"{tmp_path}/raises.py:job")
    (tmp_path / "within.py").write_text("import json\n\ndef job():\n    return json.loads('{')\n")
    with pytest.raises(InputError, match=r"raised JSONDecodeError: .* \(within.py, line 4\); expected"):
        load_job(f"{tmp_path}/within.py:job")
    with pytest.raises(InputError, match=r"raised TypeError: .*'argument'; expected"):
        load_job("jobs.py:needs")  # raised by the call: no line of theirs, and none of ours
    (tmp_path / "syntax.py").write_text("x = 1\ndef job(:\n")
    with pytest.raises(InputError, match=r"syntax.py: raised SyntaxError .*\(syntax.py, line 2\); expected a file"):
        load_job(f"{tmp_path}/syntax.py:job")


def test_script_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "helper_of_job.py").write_text(SOUND)
    (tmp_path / "deep" / "main_job.py").write_text("from helper_of_job import job\n")
    assert isinstance(load_job("deep/main_job.py:job"), TrainingJob)


def test_script_may_be_called_like_an_imported_module(tmp_path: Path) -> None:
    """json.py in the user's folder is loaded, and the real json stays what it is."""
    import json

    (tmp_path / "json.py").write_text(SOUND)
    (tmp_path / "my-job 1.py").write_text(SOUND)
    assert isinstance(load_job("json.py:job"), TrainingJob)
    assert isinstance(load_job("my-job 1.py:job"), TrainingJob)
    assert sys.modules["json"] is json


def test_a_job_that_parses_arguments_gets_none_of_planners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["planner", "run", "parses.py:job", "--ranks", "2"])
    path = tmp_path / "parses.py"
    parsing = "import argparse\nfound = argparse.ArgumentParser().parse_known_args()[1]\n"
    path.write_text(f"{parsing}{SOUND}\nassert found == []\n")
    assert isinstance(load_job(f"{path}:job"), TrainingJob)
    assert sys.argv == [str(path)]
