"""The request for a plan: all options of `planner optimize`, as one checked record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.decide.batch_shares import ShareChoice, choose_shares
from planner.decide.cut_choice import CutChoice, choose_cuts
from planner.decide.defaults import DEFAULT_PASSES
from planner.decide.pipeline import AfterPass, parse_passes, with_options
from planner.decide.solvers import check_solver
from planner.documents.accelerators import check_memory
from planner.documents.catalog import find_cluster, find_profile, name_of
from planner.documents.profile import Cluster, Profile
from planner.documents.text import as_names
from planner.ir import ACCURACIES, Schedule
from planner.model.codecs import LowRank, TopK
from planner.model.compression import check_max_ratio
from planner.model.problem import Problem, make_problem
from planner.passes.base import Pass, check_count
from planner.passes.delay import Delay, check_max_delay
from planner.passes.joint import DEFAULT_COMPRESS, Joint, check_compress, check_max_rank
from planner.passes.late_gather import LateGathers
from planner.passes.local_async import LocalAsync
from planner.passes.outer import Outer, check_max_period
from planner.passes.shard_updates import ShardUpdates
from planner.passes.sparsify import Sparsify
from runtime.errors import InputError
from runtime.pages import page
from runtime.plan import Accuracy
from runtime.plan.interfaces import BFLOAT16_WEIGHTS, INTERFACES, LATE_GATHER, SHARDED_STEP, granted, name_problem

MAX_STEPS = 10**9
"""More steps than any run has."""

LOSSY_OPTIONS: dict[str, tuple[Accuracy, Callable[[Any], object]]] = {
    "compress": ("bounded", check_compress),
    "max_ratio": ("bounded", check_max_ratio),
    "max_rank": ("bounded", check_max_rank),
    "protect": ("bounded", str),
    "from_step": ("bounded", lambda step: check_count(step, "--from-step", "steps", MAX_STEPS)),
    "steps": ("bounded", lambda steps: check_count(steps, "--steps", "steps", MAX_STEPS)),
    "max_delay": ("relaxed", check_max_delay),
    "max_period": ("relaxed", check_max_period),
}
"""Options for lossy passes: the class of plan that each is about, and its check."""

USUAL: dict[Accuracy, tuple[Pass, ...]] = {"bounded": (Joint(),), "relaxed": (Delay(), LocalAsync(), Outer())}
"""The lossy passes of each class, where none is named."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The profile and cluster of a plan, and the limits on it; see `planner.optimize` for the fields.

    Raises:
        InputError: an option is unknown or wrong, or a pass or option is of a riskier class or interface than allowed.
    """

    profile: Profile | str | Path
    cluster: Cluster | str | Path | None = None
    accuracy: Accuracy = "exact"
    allow: str | Sequence[str] = ()
    passes: str | Sequence[Pass] = DEFAULT_PASSES
    after_pass: AfterPass | None = None
    solver: str = "dp"
    solver_limit: float | None = None
    compress: str | None = None
    max_ratio: float | None = None
    max_rank: int | None = None
    protect: str | None = None
    from_step: int | None = None
    steps: int | None = None
    max_delay: int | None = None
    max_period: int | None = None
    max_memory_mib: float | None = None
    global_batch: int | None = None
    given: Schedule | None = None
    """A schedule that the plan has to have (`--from-schedule`)."""

    def __post_init__(self) -> None:
        check_accuracy(self.accuracy)
        check_solver(self.solver, self.solver_limit)
        if self.global_batch is not None and self.accuracy == "relaxed":
            raise InputError(
                "--accuracy relaxed: found it with --global-batch, whose shares count by weights of ranks, which "
                "delays, outer steps and local updaters do not have; expected exact or bounded: leave one of them out"
            )
        self._check_classes()
        self._check_interfaces()

    @cached_property
    def cpsat_limit(self) -> float | None:
        """Return the deterministic time of the constraint program; None where it is not asked."""
        return check_solver(self.solver, self.solver_limit) if self.solver == "cpsat" else None

    @cached_property
    def problem(self) -> Problem:
        """Return the profile on the cluster, a compiled graph with the chosen cuts. Raises InputError: a document is
        wrong, or there is no cluster.
        """
        return self._uncut if self.cut is None else self.cut.problem

    @cached_property
    def cut(self) -> CutChoice | None:
        """Return the cuts of the compiled graph; None where the profile has none to choose from."""
        return choose_cuts(self._uncut)

    @cached_property
    def _uncut(self) -> Problem:
        machines = None if self.cluster is None else find_cluster(self.cluster)
        if self.shares is not None:
            return make_problem(self.shares.profile, self.shares.cluster, where=self.where)
        return make_problem(find_profile(self.profile), machines, where=self.where)

    @cached_property
    def shares(self) -> ShareChoice | None:
        """Return the shares of the global batch, where it is given. Raises InputError: ranks cannot share it."""
        if self.global_batch is None:
            return None
        profile = find_profile(self.profile)
        cluster = profile.cluster if self.cluster is None else find_cluster(self.cluster)
        if cluster is None:
            make_problem(profile, where=self.where)  # raises: there is none
            return None
        return choose_shares(profile, cluster, self.global_batch, check_memory(self.max_memory_mib))

    @property
    def where(self) -> str:
        """Return the name of the document that has the cluster."""
        return name_of(self.profile if self.cluster is None else self.cluster)

    @cached_property
    def interfaces(self) -> tuple[str, ...]:
        """Return the interfaces that are allowed besides drop-in, with those that they imply."""
        return check_allow(self.allow)

    @cached_property
    def all_passes(self) -> tuple[Pass, ...]:
        """Return all passes that were asked for."""
        return tuple(parse_passes(self.passes) if isinstance(self.passes, str) else self.passes)

    @cached_property
    def exact(self) -> tuple[Pass, ...]:
        """Return the exact passes whose interface is allowed; no step is sharded where that is not."""
        passes = [each for each in self._exact if not each.interface or each.interface in self.interfaces]
        if SHARDED_STEP in self.interfaces:
            return tuple(passes)
        return tuple(replace(each, step="never") if isinstance(each, ShardUpdates) else each for each in passes)

    @cached_property
    def sharding(self) -> ShardUpdates | None:
        """Return the pass that knows sharded steps, allowed or not; None where it is not among the passes."""
        return next((each for each in self._exact if isinstance(each, ShardUpdates)), None)

    @cached_property
    def _exact(self) -> tuple[Pass, ...]:
        passes = [each for each in self.all_passes if each.accuracy == "exact"]
        return with_options(passes, memory_mib=check_memory(self.max_memory_mib))

    @cached_property
    def lossy(self) -> tuple[Pass, ...]:
        """Return the lossy passes of the allowed classes, by default the usual ones, with the options given."""
        found: list[Pass] = []
        for accuracy, usual in USUAL.items():
            if accuracy in self._classes:
                found += [each for each in self.all_passes if each.accuracy == accuracy] or usual
        found = [each for each in found if not each.interface or each.interface in self.interfaces]
        if SHARDED_STEP not in self.interfaces:
            found = [replace(each, step="never") if isinstance(each, Outer) else each for each in found]
        options = {option: getattr(self, option) for option in LOSSY_OPTIONS}
        return with_options(found, memory_mib=check_memory(self.max_memory_mib), **options)

    @property
    def _classes(self) -> tuple[Accuracy, ...]:
        return ACCURACIES[: ACCURACIES.index(self.accuracy) + 1]

    def _check_classes(self) -> None:
        """Refuse options and passes of a riskier class than is allowed, and options that limit nothing."""
        given = {option: getattr(self, option) for option in LOSSY_OPTIONS if getattr(self, option) is not None}
        needs: list[tuple[str, Accuracy]] = []
        for option, value in given.items():
            accuracy, check = LOSSY_OPTIONS[option]
            check(value)
            needs.append((f"--{option.replace('_', '-')}", accuracy))
        needs += [(f"the pass {each.name}", each.accuracy) for each in self.all_passes]
        if riskier := {what: risk for what, risk in needs if risk not in self._classes}:
            exact = self.accuracy == "exact"
            why = "exact plans leave nothing out" if exact else "bounded plans synchronize in every step"
            hint = "relaxed" if "relaxed" in riskier.values() else "bounded"
            raise InputError(
                f"--accuracy {self.accuracy}: found {' and '.join(riskier)}, expected "
                f"{'none' if len(riskier) == 1 else 'neither'}, for {why}; add --accuracy {hint}"
            )
        selects = self.compress is None or TopK in check_compress(self.compress)
        if not selects and any(isinstance(each, Sparsify) for each in self.all_passes):
            raise InputError(
                f"--compress {self.compress}: found the pass {Sparsify.name}, which sends selected elements; expected "
                f"one of them: leave the pass or the option out"
            )
        for option, codec in (("max_ratio", TopK), ("max_rank", LowRank)):
            if option in given and not any(codec in each.codecs for each in self.lossy):
                named = f"--{option.replace('_', '-')}"
                raise InputError(
                    f"{named} {given[option]:g}: found it with --compress {self.compress or DEFAULT_COMPRESS}, which "
                    f"plans none of what it limits; expected {codec.option} or all: add --compress {codec.option}, or "
                    f"leave {named} out"
                )
        if "max_period" in given and not any(isinstance(each, Outer) for each in self.lossy):
            raise InputError(
                f"--max-period {given['max_period']}: found it without --allow {Outer.interface}, so that no outer "
                f"steps are planned, whose H it limits; expected both: add that, or leave --max-period out"
            )

    def _check_interfaces(self) -> None:
        """Refuse options of passes that demand what is not allowed."""
        if LATE_GATHER not in self.interfaces and any(
            isinstance(each, LateGathers) and each.when == "always" for each in self._exact
        ):
            raise InputError(
                f"--passes: found late_gather{{when=always}}, where new weights arrive during the next forward, so "
                f"that some lines which work with DDP do not; expected --allow {LATE_GATHER} with it: add that, or "
                f"leave when=always out"
            )
        if SHARDED_STEP not in self.interfaces and self.sharding is not None and self.sharding.step == "always":
            raise InputError(
                f"--passes: found shard_updates{{step=always}}, where ranks share the optimizer's step, so that some "
                f"lines which work with DDP do not ({page('concepts/sharded-step')}); expected --allow {SHARDED_STEP} "
                f"with it: add that, or leave step=always out"
            )


def check_accuracy(accuracy: str) -> Accuracy:
    """Return a class of plans. Raises InputError where it is unknown."""
    if accuracy not in ACCURACIES:
        raise InputError(f"--accuracy: found {accuracy!r}, expected one of: {', '.join(ACCURACIES)}")
    return accuracy


def check_allow(allow: str | Sequence[str]) -> tuple[str, ...]:
    """Return interfaces, given by one or several names, with those that they imply.

    Raises:
        InputError: a name is unknown, or of an interface that is not planned.
    """
    allow = as_names(allow)
    for name in allow:
        if (problem := name_problem(name)) is not None:
            raise InputError(f"--allow: {problem}; correct it, or leave it out: plans then are drop-in")
        if name == BFLOAT16_WEIGHTS:
            raise InputError(
                f"--allow: found {name}, which no plan of `planner optimize` asks for yet; expected none of it: leave "
                f"it out, and write updates.step.weights into a plan yourself ({page('concepts/sharded-step')})"
            )
    return tuple(name for name in INTERFACES if name in granted(allow))
