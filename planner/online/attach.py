"""`planner.attach(model, optimizer)`: a replacement of DistributedDataParallel, with a plan or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from planner.decide.plan_request import check_allow
from planner.documents.text import as_names, pluralize
from planner.ir import ACCURACIES
from planner.model.codecs import BY_NAME
from planner.online.ddp import AS_DDP
from planner.online.opening import IN_RUN, Opener, Opening, asked_way, check_classes, warn_unused
from planner.online.pilot import Pilot
from planner.passes.joint import check_compress
from planner.profile.request import LOGGER, heard
from planner.profile.step import joined
from planner.report.accumulation import per_optimizer_step
from planner.report.listing import make_console
from planner.report.page import page_text
from planner.report.tables import print_plan
from planner.search.shares import follow_shares
from runtime.checks.attach import ModelFacts
from runtime.comm.world import RankInfo, World, deadlines
from runtime.core.options import AttachOptions, CompileArgument, ResidualUnit
from runtime.errors import CommunicationError, InputError, PlanMismatch, PlannerError
from runtime.plan import Accuracy, Plan, load_plan
from runtime.plan.files import write_text
from runtime.plan.names import shorten
from runtime.session.attaching import PlanToMake, attach_as, compare_ranks
from runtime.session.session import Session
from runtime.torch_compat import OUTSIDE, current_backward_id

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PAGE = Path("planner.html")
LEAST_GAIN = 0.05
"""Share of the slowest rank's time by which other shares of the batch have to be faster."""


class PlannedSession(Session):
    """A session that `planner.attach` made; without a plan it has a pilot, which finds one."""

    _pilot: Pilot | None = None
    _page: Path | None = None
    """Path of the page that this session has written."""

    _opener: Opener | None = None
    """Opens the run again when more parameters train; None without a pilot."""

    def _thawed(self, names: Sequence[str]) -> bool:
        """See `Session._thawed`: the run begins again with all parameters, unless the caller decides on plans.

        Every rank comes here before the same step.
        """
        if self._pilot is None or self._director is None or self._opener is None or current_backward_id() != OUTSIDE:
            return False
        facts = ModelFacts.of(self.model, self._parameters.values())
        group, problem = self._options.process_group, facts.problem or self._opener.problem
        try:
            with joined(group, *deadlines(self._options.timeout_s, group)) as world:
                everyone = compare_ranks(world, self.model, facts, None, problem, self._options)
                opening = self._opener.open(world, facts, everyone)
        except CommunicationError as error:
            raise CommunicationError(
                f"{shorten(names)}: requires_grad was set on this rank before step {self.step}, which every rank has "
                f"to do before the same step, so that gradients can be averaged; {error}"
            ) from error
        before = self._pilot
        before.close()
        self._take_in(facts.parameters, opening.plan)
        before.tell(f"{pluralize(len(names), 'parameter')} more to train ({shorten(names)}): planned again", aloud=True)
        self._fly(opening, watches=before.watches, story=before.story)
        return True

    def _fly(self, opening: Opening, *, watches: bool, story: Sequence[str] = ()) -> None:
        """Have the run planned from its next step on."""
        opening = _begin_with_remembered(self, opening)
        self._recorder.each_gradient = True  # in the first step, whose order DDP's buckets follow
        self._operators.observe()
        self._director = self._pilot = Pilot(self, opening, watches=watches, story=list(story))

    def _decide_shares(self, shares: Sequence[int], compute_us: Sequence[float], most: Sequence[int]) -> Sequence[int]:
        """See `Session._decide_shares`: shares follow times, where PLANNER lets the run change."""
        if asked_way() != "auto":
            return shares
        found: list[int] = follow_shares(np.array(shares), np.array(compute_us), np.array(most), LEAST_GAIN).tolist()
        if found != list(shares) and self._world.rank == 0:
            with heard():
                LOGGER.info("planner: after %d steps: shares of the batch are %s, were %s", self.step, found, shares)
        return found

    def switch(self, plan: Plan | str | Path, at_step: int | None = None) -> None:
        """Switch as `Session.switch` does; from then on the caller decides, and the run plans no more.

        Args:
            plan: a plan for the same parameters and ranks, or the path of plan.json; the same on every rank.
            at_step: the first step with the new plan, counted from 0; default: the next one.

        Raises:
            PlanMismatch: on all ranks alike, and nothing has changed: as `Session.switch`.
            InputError: called inside a backward, or after `detach`.
            CommunicationError: a rank did not come within the deadline.
        """
        super().switch(plan, at_step)
        if self._pilot is not None and self._director is not None:
            self._pilot.tell("session.switch was called: planned no more")
            self._pilot.is_overruled = True
            self._pilot.close()
            self._director = None

    def detach(self, *, leave: bool = True) -> None:
        """Detach, as `Session.detach` does, and end planning.

        Args:
            leave: give the process group back; False if the caller made it and continues to use it.
        """
        if leave and self._pilot is not None:
            if self.is_attached and self._director is not None and self._pilot.is_unplanned:
                self._pilot.tell(self._pilot.summary(ended=True), aloud=True)
            self._pilot.close()
            self._director = None
        super().detach(leave=leave)

    def metrics(self) -> dict[str, float]:
        """Return figures of the last steps as plain numbers by name; see `Session.metrics`. A run without a plan adds
        `plans_tried`, `planning_us` (what planning has cost) and `planning_steps_left` (an estimate).
        """
        return super().metrics() | ({} if self._pilot is None else self._pilot.metrics())

    def explain(self, path: str | Path | None = PAGE) -> str:
        """Return what happened, the plan and the measured step in words; rank 0 prints that and saves a page.

        Args:
            path: where the page goes, None for none; default: planner.html, or planner-2.html and so on where there is
                a file that is not this session's. It needs plotly; without, the text reports that.

        Returns:
            The text, which rank 0 has printed.
        """
        story = (*self._pilot.story, *self._pilot.possible_cuts()) if self._pilot is not None else ()
        plan, decided = self.plan, self._pilot.decided if self._pilot is not None else None
        ddp = None if decided is None else (decided.baselines or {}).get("ddp")
        if plan.predicted is None and decided is not None and ddp is not None and ddp.buckets == len(plan.buckets):
            sources = {**(decided.sources or {}), **(plan.sources or {})}
            plan = replace(plan, predicted=ddp, baselines=decided.baselines, sources=sources)
        report = self.report()
        plan = per_optimizer_step(plan, *report.micro_batches)
        stage = [] if self._pilot is None or self._pilot.stage is None else [self._pilot.stage]
        plans = self._pilot is not None and not self._pilot.is_overruled
        summary = [self._pilot.summary(ended=not self.is_attached)] if self._pilot is not None and plans else []
        lines = [*summary, *story, *stage, _plan_text(plan), str(report)]
        plan = replace(plan, notes=(*plan.notes, *story, *stage))
        if self._world.rank != 0:
            return "\n".join(lines)
        if path is PAGE:
            path = self._page = self._page or _unused(PAGE)
        if path is not None:
            try:
                write_text(path, page_text(plan, report.measured if report.steps else None))
                lines.append(f"wrote {path}")
            except PlannerError as error:
                lines.append(f"no page was written: {error}")
        print("\n".join(lines))
        return "\n".join(lines)


def _unused(path: Path) -> Path:
    """Return a path at which there is no file yet: this one, or with a number behind the name."""
    paths = chain([path], (path.with_stem(f"{path.stem}-{number}") for number in count(2)))
    return next(one for one in paths if not one.exists())


def _plan_text(plan: Plan) -> str:
    """Return the plan's tables; of buckets that were made in the run, of which nothing is predicted, a line."""
    made_in_run = plan.cuts is not None or (plan.buckets[0].reason or "").startswith(AS_DDP)
    if plan.predicted is None and plan.buckets[0].reason and made_in_run:
        return f"{pluralize(len(plan.buckets), 'bucket')}, {plan.buckets[0].reason}; nothing is predicted of them"
    console = make_console()
    with console.capture() as shown:
        print_plan(plan, console, buckets=True)
    return shown.get().rstrip()


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    plan: Plan | str | Path | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    accuracy: Accuracy | None = None,
    compress: str | None = None,
    allow: str | Sequence[str] | None = None,
    sync: bool = True,
    broadcast_buffers: bool = True,
    timeout_s: float | None = None,
    drift: bool = True,
    loss_scale: Callable[[], float] | None = None,
    guard: bool = True,
    mesh: DeviceMesh | None = None,
    weight: Callable[[], float] | None = None,
    residual_unit: ResidualUnit = "gradient",
    compile: CompileArgument | None = None,
) -> PlannedSession:
    """Make `backward()` of a plain model exchange its gradients by a plan, which is given or found in the run.

    Without a plan training begins with the buckets of DistributedDataParallel. Steps are measured as they are, besides
    few messages of its own; another process of rank 0 decides; the new plan is tried against the present one in
    interleaved blocks of steps, and the faster one stays. What was found is remembered for the next run with this
    model, torch and cluster, and looked for again where steps become longer or shorter. Where the last run differed in
    its number of ranks alone, its measurements are scaled to this one, and their plan is the first to be tried. Results
    are DDP's throughout.

    With `accuracy="bounded"` DDP's buckets in 8 bits are tried first, where messages take long. Then the run also times
    encoding in narrow dtypes and the messages that carry them. The best bounded plans are tried against the best exact
    one, and stay if they are at least 2 % faster. Residuals keep what
    rounding loses, and buckets that do harm are sent in a wider dtype. With `accuracy="relaxed",
    allow=("outer",)` outer steps are tried, too, over whole periods and from step 500 on.

    PLANNER=off in the environment keeps to DDP's buckets; PLANNER=report reports what it would do, and what bounded
    plans would bring, and never switches; PLANNER_CACHE is the folder of what is remembered. Rank 0's count.

    Args:
        model: the bare module on its device, not wrapped in DDP; the same on every rank.
        optimizer: its optimizer, or a sequence of several with disjoint parameters; None if the script updates weights
            by itself.
        plan: a plan, or the path of plan.json, which is executed as it is; default: planned in the run.
        process_group: the ranks that train together; default: all of torch.distributed, or this process alone.
        accuracy: the riskiest class of plan; default: the given plan's, without one exact. Without a plan `exact`,
            `bounded`, or with `outer` allowed `relaxed`.
        compress: what bounded plans may do to a bucket, as for `optimize`; default: what the given plan does, without
            one `wire`. Without a plan `wire` or `none`.
        allow: further interfaces (or one), as for `optimize`; default: the given plan's, without one none.
        sync: overwrite parameters and buffers with rank 0's, as DDP does.
        broadcast_buffers: overwrite buffers (BatchNorm) with rank 0's in each step, as DDP does.
        timeout_s: deadline of every wait in seconds; default: the process group's own (see `runtime.attach`).
        drift: warn where steps become longer than the plan predicts (with a plan), or plan again (without).
        loss_scale: `scaler.get_scale` of a GradScaler; only plans that are not exact need it.
        guard: try a lossy plan against its exact fallback, and watch its residuals (see `runtime.attach`).
        mesh: the ranks as rows of nodes; default: what torchrun reports, or the machines' names.
        weight: returns the number of samples or tokens of this rank in the next backward, in place of
            `session.weight(n)` before each; default: all ranks count alike, unless the script calls that.
        residual_unit: what lossy buckets hold back: gradients, or `"update"`, gradients times their learning rate.
        compile: compile the model, or compile again what `torch.compile` has made of it, in regions that end where the
            plan's `cuts` are: a backend of `torch.compile` by name (`"inductor"`), or a mapping of its arguments
            `backend`, `mode`, `options` and `dynamic`. Gradients then come region by region. A plan without `cuts` has
            regions of DDP's sizes. Default: the model stays as it is.

    Returns:
        The session; `.grad` is the average over ranks whenever `backward()` returns. `session.explain()` reports what
        was decided, and why.

    Raises:
        PlanMismatch: as `runtime.attach`; also if the plan asks for more than `accuracy`, `compress` and `allow`
            permit.
        InputError: as `runtime.attach`; also without a plan for a class or encodings whose costs a run does not
            measure.
        EnvironmentFailure: a rank did not come within the deadline.

    Examples:
        >>> session = planner.attach(model, optimizer)  # doctest: +SKIP
        >>> session = planner.attach(model, optimizer, accuracy="bounded")  # doctest: +SKIP
        >>> session = planner.attach(model, optimizer, "plan.json", accuracy="bounded")  # doctest: +SKIP
    """
    options = AttachOptions(
        process_group=process_group, sync=sync, broadcast_buffers=broadcast_buffers, timeout_s=timeout_s, drift=drift,
        loss_scale=loss_scale, guard=guard, mesh=mesh, weight=weight, residual_unit=residual_unit, compile=compile,
    )  # fmt: skip
    if plan is not None:
        loaded = plan
        with suppress(InputError):  # a file that cannot be read is reported to all ranks where they agree on the plan
            loaded = plan if isinstance(plan, Plan) else load_plan(plan)
        if isinstance(loaded, Plan):
            _check_permitted(loaded, accuracy, compress, allow)
        return attach_as(PlannedSession, model, optimizer, loaded, options)
    opener = Opener(model, optimizer, accuracy or "exact", compress, as_names(allow or ()), compile)
    openings: list[Opening] = []

    def first_plan(world: World, facts: ModelFacts, everyone: Sequence[RankInfo]) -> Plan:
        openings.append(opener.open(world, facts, everyone))
        return openings[0].plan

    to_make = PlanToMake(opener.problem, first_plan)
    session = attach_as(PlannedSession, model, optimizer, to_make, replace(options, drift=False))
    if session._world.ranks > 1:
        session._opener = opener
        session._fly(openings[0], watches=drift)
    return session


def _begin_with_remembered(session: PlannedSession, opening: Opening) -> Opening:
    """Switch to the remembered plan before the first step. Where it is none that this run could have found, or does not
    fit model, optimizer or cluster, all ranks stay with DDP's buckets alike, and rank 0 warns.
    """
    if opening.remembered is None:
        return opening
    plan, key = opening.remembered.plan, opening.key
    try:
        _check_permitted(plan, key.accuracy, None if key.accuracy == "exact" else IN_RUN, key.allow)
        if missing := session._parameters.keys() - set(plan.gradients):
            raise PlanMismatch(f"the plan has no bucket with {sorted(missing)[0]}, expected one for each parameter")
        session.switch(plan)
        session._monitor.trial = None  # an earlier run has tried it against its fallback
    except PlanMismatch as error:
        if session._world.rank == 0:
            warn_unused(error)
        return replace(opening, remembered=None)
    return opening


def _check_permitted(
    plan: Plan, accuracy: Accuracy | None, compress: str | None, allow: str | Sequence[str] | None
) -> None:
    check_classes(accuracy, compress)
    if accuracy is not None and ACCURACIES.index(plan.accuracy) > ACCURACIES.index(accuracy):
        raise PlanMismatch(
            f"the plan's accuracy is {plan.accuracy}, expected at most {accuracy}; pass accuracy={plan.accuracy!r} if "
            f"that is meant, or make the plan with `planner optimize --accuracy {accuracy}`"
        )
    buckets = [bucket for phase in plan.all_phases for bucket in phase.buckets if not bucket.dense]
    codecs = {BY_NAME.get(bucket.compressor.name) for bucket in buckets}
    if compress is not None and (more := [codec for codec in codecs if codec not in check_compress(compress)]):
        named = ", ".join(sorted("another encoding" if codec is None else codec.option for codec in more))
        raise PlanMismatch(
            f"the plan's buckets need compress={named!r}, expected {compress!r} alone; add it there if that is meant, "
            f"or make the plan with `planner optimize --accuracy bounded --compress {compress}`"
        )
    asked = [] if allow is None else [name for name in plan.interfaces if name not in check_allow(allow)]
    if asked:
        raise PlanMismatch(
            f"the plan's interface has {', '.join(asked)}, expected nothing beside what allow= names; add it there if "
            f"the script is made for it, or make the plan without `--allow`"
        )
