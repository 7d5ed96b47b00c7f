"""`planner.compare`: a script compares its own step with DDP's; and the command that starts such a script."""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from planner.comparison.contestants import MARGIN_PERCENT, SEEDS, Learn, check_keeps, make_contestants, predicted_on
from planner.comparison.learned import Learned, summarize_learned
from planner.comparison.learners import ScriptSource
from planner.comparison.learning import learn_all
from planner.comparison.measure import VariantRunner, measure_all
from planner.comparison.report import Comparison, summarize
from planner.comparison.trained import TrainedScript
from planner.comparison.variants import PLAN, Rounds, make_lineup
from planner.documents.profile import Profile, load_profile
from planner.documents.text import as_names
from planner.jobs.job import find_job, in_library
from planner.jobs.training import attribute_user_errors
from planner.model.problem import make_problem
from planner.profile.bench import Bench, Progress
from planner.profile.step import decided_by_first, joined
from runtime.errors import InputError
from runtime.plan import Plan, load_plan
from runtime.session.session import Session

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

STEPS, ROUNDS, MAX_STEPS = 25, 5, 10**9

HINT = """put these lines before its loop, where step(model) makes one training step of the model that it is given:
    session = planner.attach(model, optimizer, planner.load_plan("plan.json"))
    print(planner.compare(session, step))"""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of `planner compare script.py`, in place of those of the script's own call."""

    plan: Plan
    profile: Profile | None
    strategies: Sequence[str]
    rounds: Rounds
    timeout_s: float | None
    show_progress: bool = True
    learn: Learn | None = None
    """Options of learning, in place of measuring steps."""
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """The plans that learn, by name."""


class _Answered(BaseException):
    """Ends a script that the command has started once it has compared. No script catches it by chance."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__("measured")
        self.comparison = comparison


_asked: Asked | None = None
"""The options in the ranks of the command."""


def compare(
    session: Session,
    step: Callable[..., object],
    *,
    plan: Plan | str | Path | None = None,
    profile: Profile | str | Path | None = None,
    strategies: str | Sequence[str] = (),
    steps: int = STEPS,
    rounds: int | None = None,
    also: Stateful | Sequence[Stateful] = (),
    timeout_s: float | None = None,
    learn: int | None = None,
    seeds: int = SEEDS,
    margin: float = MARGIN_PERCENT,
    on: str | None = None,
    metric: Callable[[nn.Module], float] | None = None,
) -> Comparison:
    """Measure no communication, DDP, its hooks and a plan in interleaved blocks, with the step of a running script; or,
    with `learn`, the losses of DDP and the plan over the same batches.

    Every rank calls this between the same two steps. Model, `.grad`, optimizer and random generators are left as found,
    and the session continues where it was; `session.report()` begins anew.

    Args:
        session: attached, with an optimizer; without a delay.
        step: makes one whole training step of the model that it is given, which is the script's own or DDP around it:
            zero_grad, forward, backward, the optimizer's step, all with the same batch in each call. It may return the
            loss, a number or a tensor of one element. `session.no_sync()` works inside. With `learn` it has to be
            `step(model, number)`, which makes the step of batch `number` (from 0) and returns the loss.
        plan: to judge, or its path; default: the session's.
        profile: for predictions of what is not the plan, and for `strategies`; or its path.
        strategies: further ones, by name.
        steps: measured ones of each variant.
        rounds: number of rounds of these steps; default: 5, or as many as steps.
        also: other objects that `step` changes, such as a scheduler or a GradScaler; restored by their state_dict.
        timeout_s: deadline of every wait; default 300 s.
        learn: number of steps that DDP and the plan train from the present state, one after the other; the model is
            left as found. What is measured is written into `plan`, if that is a path.
        seeds: number of times that they do so; seed s has batches from s · `learn` on, and random generators of its
            own.
        margin: percentage of DDP's last loss within which the plan learns as DDP does.
        on: cluster for whose predicted steps times are shown; it takes `profile`.
        metric: (model in evaluation mode) → number, after the last step.

    Returns:
        The comparison, the same on every rank; `print` it, `same_training` of its rows, `differences`. With `learn` a
        `planner.comparison.learned.Learned`: `verdict` of its rows, `curves`.

    Raises:
        InputError: there is one rank, no optimizer, or a delay; `step` raises, or calls another model than it is given.
        PlanMismatch: the plan does not fit.
        CommunicationError: a rank did not come within the deadline.
    """
    asked = _asked or _of_call(session, plan, profile, as_names(strategies), check_rounds(steps, rounds), timeout_s)
    if _asked is None and learn is not None:
        learned = Learn(steps=learn, seeds=seeds, margin_percent=margin, on=on)
        asked = replace(asked, learn=learned, plans={PLAN: asked.plan})
    elif _asked is None and (seeds, margin, on, metric) != (SEEDS, MARGIN_PERCENT, None, None):
        raise InputError(
            "planner.compare: found seeds, margin, on or metric without learn, expected learn=STEPS, too; add it"
        )
    keeps = plan if isinstance(plan, str | Path) and learn is not None and _asked is None else None
    if session._world.ranks == 1:
        raise InputError("planner.compare: found one rank, which sends nothing; expected at least 2: use torchrun")
    if not session.optimizers:
        raise InputError("planner.compare: found no optimizer; expected planner.attach(model, optimizer, plan)")
    problem = None if asked.profile is None else make_problem(asked.profile)
    changed = also if isinstance(also, Sequence) else (also,)
    trained = TrainedScript(session.model, session.optimizer or session.optimizers, step, changed, metric)
    trained.compile = session._options.compile
    if asked.learn is not None and not trained.takes_number:
        raise InputError(
            f"{trained.name}: found no parameter called number, expected step(model, number): with learn each step "
            f"has a batch of its own, the same in each call with this number; add it"
        )
    comparison: Comparison
    with (
        session._aside("planner.compare", lambda: trained.no_sync()),
        joined(session._world.group, asked.timeout_s) as world,
    ):
        bench = Bench(world, session._device, Progress(asked.show_progress and world.rank == 0))
        # Batches are the script's, which has its share from the session.
        if asked.learn is None:
            lineup = make_lineup(replace(asked.plan, shares=None), problem, asked.strategies)
            mine = measure_all(VariantRunner(trained, bench, asked.timeout_s), lineup, asked.rounds)
            comparison = summarize(world.gather(mine, "collecting what ranks measured"))
        else:
            if keeps is not None:
                decided_by_first(world, lambda: check_keeps(str(keeps), asked.plan), "looking at the plan's file")
            plans = {name: replace(one, shares=None) for name, one in asked.plans.items()}
            begun = session.step > 0
            contestants = make_contestants(plans, problem, asked.strategies, asked.learn.steps, begun=begun)
            predicted = predicted_on(asked.learn.on, asked.profile, contestants)
            learnt = learn_all(
                ScriptSource(trained, bench, asked.timeout_s, asked.learn.steps), contestants, asked.learn
            )
            gathered = world.gather(learnt, "collecting what ranks learnt")
            comparison = summarize_learned(gathered, asked.learn, predicted)
    if _asked is not None:
        raise _Answered(comparison)
    if isinstance(comparison, Learned) and keeps is not None and session._world.rank == 0:
        comparison.measured(asked.plan, PLAN, Path(sys.argv[0]).name or "script").save(keeps)
    return comparison


def _of_call(
    session: Session, plan: Plan | str | Path | None, profile: Profile | str | Path | None, strategies: Sequence[str],
    rounds: Rounds, timeout_s: float | None,
) -> Asked:  # fmt: skip
    """Return the options of a script's own call."""
    return Asked(
        plan=session.plan if plan is None else plan if isinstance(plan, Plan) else load_plan(plan),
        profile=profile if profile is None or isinstance(profile, Profile) else load_profile(profile),
        strategies=strategies,
        rounds=rounds,
        timeout_s=timeout_s,
    )


def find_trained(named: str, arguments: Sequence[str]) -> tuple[str, bool]:
    """Return (file or module, whether it is a script) of what a command names, before anything is started.

    Raises:
        InputError: there is no such file, a job is given a script's arguments, or a script calls `planner.compare`
            nowhere and would train to its end for nothing.
    """
    if not named.endswith(".py"):
        if arguments:
            raise InputError(f"{named}: found {' '.join(arguments)}, which only a script takes; leave it out")
        return find_job(named)[0], False
    if not Path(named).is_file():
        raise InputError(f"{named}: no such file; expected a script, or a job path/to/file.py:name: check the path")
    if not _may_compare(Path(named)):
        raise InputError(
            f"{named}: found the word compare neither there nor in what it imports, expected a call of "
            f"planner.compare: {HINT}\nor, where it is called from elsewhere, name planner.compare in a comment"
        )
    return named, True


COMPARE, DYNAMIC = re.compile(r"\bcompare\b"), re.compile(r"\b(importlib|__import__|runpy|exec|eval)\b")


def _may_compare(script: Path) -> bool:
    """Return whether a script may call `planner.compare`, also in modules that it imports but for installed libraries.

    It may if they contain the word, or if what they run cannot be known from their text.
    """
    todo, seen = [script], set[Path]()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError):  # running it tells
            return True
        if COMPARE.search(text) or DYNAMIC.search(text):
            return True
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                level = node.level if isinstance(node, ast.ImportFrom) else 0
                folder = path.parents[level - 1] if level else script.parent
                base = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
                for alias in node.names:
                    todo += _sources(f"{base}{alias.name}".split("."), folder)
    return False


def _sources(parts: Sequence[str], folder: Path) -> Iterator[Path]:
    """Yield the files that importing a module runs: below `folder`, or of a package that is installed from its sources.

    Args:
        parts: of the module's dotted name.
        folder: where the import looks first.
    """
    if not any((folder / f"{parts[0]}{ending}").exists() for ending in ("", ".py")):
        try:
            spec = importlib.util.find_spec(parts[0])
        except (ImportError, ValueError):
            return
        origin = Path(spec.origin) if spec is not None and spec.origin is not None else None
        if origin is None or origin.suffix != ".py" or parts[0] in ("planner", "runtime"):
            return
        if in_library(str(origin)):
            return
        folder = origin.parents[1 if origin.name == "__init__.py" else 0]
    for depth in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:depth])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                yield path


def check_rounds(steps: int, rounds: int | None) -> Rounds:
    """Return the rounds that measured steps are spread over, by default 5 or as many as steps.

    Raises:
        InputError: there are less than two rounds, or less steps than rounds.
    """
    spread = min(ROUNDS, steps) if rounds is None else rounds
    if not 2 <= spread <= steps <= MAX_STEPS:
        raise InputError(
            f"--rounds {spread} --steps {steps}: expected at least 2 rounds and a step for each, at most {MAX_STEPS}; "
            f"correct them"
        )
    return Rounds(count=spread, steps=steps // spread)


def script_rank(path: str, arguments: Sequence[str], asked: Asked) -> Comparison:
    """Run a script as `python path arguments` would, up to its call of `planner.compare`; on every rank.

    Raises:
        InputError: the script raises, or ends without that call.
    """
    global _asked
    _asked = asked
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with attribute_user_errors(path):
            runpy.run_path(path, run_name="__main__")
    except _Answered as answer:
        return answer.comparison
    raise InputError(f"{path}: ended without a call of planner.compare, expected one: {HINT}")
