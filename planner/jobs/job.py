"""TrainingJob: what a user hands over to be profiled and trained; and how one is found by name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from runtime.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training task, without a loop.

    Examples:
        >>> TrainingJob(  # doctest: +SKIP
        ...     model=nn.Linear(4, 1),
        ...     loss=lambda model, batch: model(batch).square().mean(),
        ...     batch=lambda step, rank: torch.full((8, 4), float(step + rank)),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ... )
    """

    model: nn.Module
    """The model, equal on every rank; the command line moves it to the rank's device."""
    loss: Callable[[nn.Module, Any], Tensor]
    """(model, batch) → scalar."""
    batch: Callable[[int, int], Any]
    """(step, rank) → batch, deterministic. Local updaters (`local_async` of a plan) call it without a process group:
    there WORLD_SIZE in the environment says how many ranks there are."""
    optimizer: Callable[[Iterable[Any]], Optimizer | Sequence[Optimizer]]
    """(parameters) → their optimizer, or a sequence of several with disjoint parameters. Trainable parameters, or pairs
    of name and parameter where the function's parameter is called `named`."""
    dataset: Any = None
    """The map-style dataset that batches come from, if `planner profile` is to time loading (`runtime.datacache`)."""
    metric: Callable[[nn.Module], float] | None = None
    """(model in evaluation mode) → number, such as the accuracy on held-out data, for `planner compare --learn`."""
    compile: str | Mapping[str, Any] | None = None
    """Arguments of `torch.compile` for the model: a backend's name, or `backend`, `mode`, `options` and `dynamic` by
    name. `planner profile` then measures where its graph can be cut, and a plan's `cuts` are executed."""
    batch_samples: int | None = None
    """Samples of a batch; default: the first dimension of the first tensor in one."""


def load_job(spec: str) -> TrainingJob:
    """Call the function that `path/to/file.py:name` or `package.module:name` points at.

    From then on `sys.argv` of this process is the job's: its file or module, without arguments.

    Raises InputError: the file, module or name is not found; the function raises or returns something else; the model
    has no trainable parameter.
    """
    where, name = find_job(spec)
    # As when Python runs it: what parses arguments there must not get the command line of planner.
    sys.argv = [where]
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=3)
        hint = f"; it has {', '.join(near)}" if near else ""
        raise InputError(f"{where}: has no {name!r}, expected a function that returns a TrainingJob{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise InputError(
            f"{spec}: found a {type(function).__name__}, expected a function that returns a TrainingJob; name one"
        )
    try:
        job = function()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{spec}: raised {described(error)}; expected it to return a TrainingJob: correct it"
        ) from error
    if not isinstance(job, TrainingJob):
        raise InputError(f"{spec}: returned {type(job).__name__}, expected a planner.TrainingJob; return one")
    _check(spec, job)
    return job


def find_job(spec: str) -> tuple[str, str]:
    """Return (file or module, name) of a job, before anything is imported or started.

    Raises InputError where it is not of that form, or there is no such file.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise InputError(
            f"found the job {spec!r}, expected path/to/file.py:name or package.module:name; name a file and a function"
        )
    if where.endswith(".py") and not Path(where).is_file():
        raise InputError(f"{where}: no such file; expected path/to/file.py:name: check the path")
    return where, name


def _check(spec: str, job: TrainingJob) -> None:
    for field in ("loss", "batch", "optimizer"):
        if not callable(getattr(job, field)):
            found = type(getattr(job, field)).__name__
            raise InputError(f"{spec}: {field} is a {found}, expected a function; see planner.TrainingJob")
    if job.metric is not None and not callable(job.metric):
        raise InputError(f"{spec}: metric is a {type(job.metric).__name__}, expected a function or None; leave it out")
    count = job.batch_samples
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise InputError(f"{spec}: batch_samples is {count!r}, expected a number of samples, at least 1; correct it")
    if not callable(getattr(job.model, "parameters", None)):
        raise InputError(f"{spec}: model is a {type(job.model).__name__}, expected a torch.nn.Module; make one")
    parameters = list(job.model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise InputError(
            f"{spec}: the model has no trainable parameter, expected at least one with requires_grad; unfreeze one"
        )
    if any(getattr(parameter, "is_meta", False) for parameter in parameters):
        raise InputError(
            f"{spec}: found parameters on the meta device, expected ones with values; build the model on the CPU"
        )


def described(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero (job.py, line 7)`: what was raised, and where in the user's files.

    What a library raises is placed where the user's code called it; what was raised before the user's code began (a
    call with wrong arguments) has no place there.
    """
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _within(frame.filename, _OURS)]
    if isinstance(error, SyntaxError) or not frames:
        return text  # a syntax error says where by itself
    theirs = [frame for frame in frames if not in_library(frame.filename)] or frames
    return f"{text} ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})"


_OURS = tuple(Path(__file__).resolve().parents[2] / name for name in ("planner", "runtime"))
_STDLIB = Path(sysconfig.get_path("stdlib"))


def _within(filename: str, folders: Iterable[Path]) -> bool:
    return any(Path(filename).is_relative_to(folder) for folder in folders)


def in_library(filename: str) -> bool:
    """Return whether a file is Python's or of an installed package, in this environment or one that it adds."""
    return _within(filename, [_STDLIB]) or not {"site-packages", "dist-packages"}.isdisjoint(Path(filename).parts)


def _load_file(path: Path) -> ModuleType:
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"_planner_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up
    # A script finds its neighbours, as when Python runs it.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        hidden = ""
        if isinstance(error, ImportError | AttributeError):
            # The job may mean a file beside it of the name of one of our packages, and get the package, which was
            # imported first.
            for ours, place in product(_OURS, (".py", "/__init__.py")):
                theirs = path.resolve().parent / f"{ours.name}{place}"
                if theirs.is_file() and theirs.parent != ours:
                    hidden = hidden or f"; {theirs} is hidden by planner's package {ours.name!r}: rename it"
        raise InputError(_failed_import(str(path), error) + hidden) from error
    return module


def _failed_import(where: str, error: BaseException) -> str:
    kind = type(error).__name__
    what = described(error).removeprefix(kind)
    return f"{where}: raised {kind} while being imported{what}; expected a file that can be imported: correct it"


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise InputError(f"no module {name!r}; expected package.module:name or path/to/file.py:name") from None
        raise InputError(f"{name}: needs the module {error.name!r}, which is not installed; install it") from error
    except (Exception, SystemExit) as error:
        raise InputError(_failed_import(name, error)) from error
