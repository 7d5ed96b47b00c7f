"""`planner.attach(model, optimizer)`: in place of DistributedDataParallel, with a plan or with none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
import torch.distributed as dist
from torch import nn

from planner.decide.sharded_step import check_allow
from planner.documents.text import as_names, pluralize
from planner.online.cache import Cache, Key, Remembered, cache_folder, parse_remembered
from planner.online.ddp import AS_DDP, ddp_plan
from planner.online.pilot import Opening, Pilot, Way
from planner.profile.measuring import count_nodes
from planner.profile.step import check_same_model, joined, refuse_alike
from planner.report.accumulation import per_optimizer_step
from planner.report.page import page_text
from planner.report.tables import make_console, print_plan
from runtime.checks.plan import check_model, parameters_fingerprint, trainable_parameters
from runtime.comm.topology import node_name
from runtime.comm.world import deadlines
from runtime.errors import CacheWarning, CommunicationError, InputError, PlanMismatch, PlannerError
from runtime.optimizers.kinds import inner_optimizer
from runtime.plan import Accuracy, ModelReference, Plan, PlanWorld, load_plan
from runtime.plan.files import write_text
from runtime.plan.names import shorten
from runtime.session.attaching import attach_as
from runtime.session.session import Session
from runtime.torch_compat import OUTSIDE, current_backward_id
from runtime.version import __version__

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PAGE = Path("planner.html")
CLASSES: tuple[Accuracy, ...] = ("exact", "bounded", "relaxed")


class PlannedSession(Session):
    """A session that `planner.attach` made; without a plan it has a pilot, which finds one."""

    pilot: Pilot | None = None
    _page: Path | None = None
    """Where this session has put its page."""

    begin_again: Callable[[Iterable[nn.Parameter]], _Beginning] | None = None
    """Agrees with all ranks on how a run begins in which these parameters train, too; with a pilot."""

    def thawed(self, names: Sequence[str]) -> bool:
        """See `Session.thawed`: the run begins again with all parameters, unless the caller decides on plans.

        Every rank comes here before the same step.
        """
        if self.pilot is None or self.director is None or self.begin_again is None or current_backward_id() != OUTSIDE:
            return False
        try:
            beginning = self.begin_again(self.parameters.values())
        except CommunicationError as error:
            raise CommunicationError(
                f"{shorten(names)}: requires_grad was set on this rank before step {self.step}, which every rank has "
                f"to do before the same step, so that gradients can be averaged; {error}"
            ) from error
        before = self.pilot
        before.close()
        self.take_in(trainable_parameters(self.model, self.parameters.values()), beginning.plan)
        before.tell(f"{pluralize(len(names), 'parameter')} more to train ({shorten(names)}): planned again", aloud=True)
        self._fly(beginning, watches=before.watches, story=before.story)
        return True

    def _fly(self, beginning: _Beginning, *, watches: bool, story: Sequence[str] = ()) -> None:
        """Have the run planned from its next step on."""
        opening = _begin_with_remembered(self, beginning.opening)
        self.recorder.each_gradient = True  # in the first step, whose order DDP's buckets follow
        self.director = self.pilot = Pilot(
            self, opening, beginning.cache, beginning.other, watches=watches, story=list(story)
        )

    def switch(self, plan: Plan | str | Path, at_step: int | None = None) -> None:
        """See `Session.switch`; from then on the caller decides, and the run plans no more."""
        super().switch(plan, at_step)
        if self.pilot is not None and self.director is not None:
            self.pilot.tell("session.switch was called: planned no more")
            self.pilot.close()
            self.director = None

    def detach(self, *, leave: bool = True) -> None:
        """See `Session.detach`."""
        if leave and self.pilot is not None:
            self.pilot.close()
            self.director = None
        super().detach(leave=leave)

    def explain(self, path: str | Path | None = PAGE) -> str:
        """Return what happened, the plan and the measured step in words; rank 0 prints that and saves a page.

        Args:
            path: where the page goes, None for none; default: planner.html, or planner-2.html and so on where there is
                a file that is not this session's. It needs plotly; without, that is said in place of it.
        """
        story = tuple(self.pilot.story) if self.pilot is not None else ()
        plan, decided = self.plan, self.pilot.decided if self.pilot is not None else None
        ddp = None if decided is None else (decided.baselines or {}).get("ddp")
        if plan.predicted is None and decided is not None and ddp is not None and ddp.buckets == len(plan.buckets):
            sources = {**(decided.sources or {}), **(plan.sources or {})}
            plan = replace(plan, predicted=ddp, baselines=decided.baselines, sources=sources)
        report = self.report()
        plan = per_optimizer_step(plan, *report.micro_batches)
        stage = [] if self.pilot is None or self.pilot.stage is None else [self.pilot.stage]
        lines = [*story, *stage, _plan_text(plan), str(report)]
        plan = replace(plan, notes=(*plan.notes, *story, *stage))
        if self.world.rank != 0:
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
    if plan.predicted is None and plan.buckets[0].reason and plan.buckets[0].reason.startswith(AS_DDP):
        return f"{pluralize(len(plan.buckets), 'bucket')}, {plan.buckets[0].reason}; nothing is predicted of them"
    console = make_console()
    with console.capture() as shown:
        print_plan(plan, console, buckets=True)
    return shown.get().rstrip()


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan | str | Path | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    accuracy: Accuracy | None = None,
    allow: str | Sequence[str] | None = None,
    sync: bool = True,
    broadcast_buffers: bool = True,
    timeout_s: float | None = None,
    drift: bool = True,
    loss_scale: Callable[[], float] | None = None,
    guard: bool = True,
    mesh: DeviceMesh | None = None,
) -> PlannedSession:
    """Make `backward()` of a plain model exchange its gradients, as a plan says or as one that is found in the run.

    Without a plan training begins with the buckets of DistributedDataParallel. Steps are measured as they are, beside
    few messages of its own; another process of rank 0 decides; the new plan is tried against the present one in
    interleaved blocks of steps, and the faster one stays. What was found is remembered for the next run with this
    model, torch and cluster, and looked for again where steps become longer or shorter. Where the last run differed in
    its number of ranks alone, its measurements are scaled to this one, and their plan is the first to be tried. Results
    are DDP's throughout.

    PLANNER=off in the environment keeps to DDP's buckets, PLANNER=report says what it would do and never switches;
    PLANNER_CACHE is the folder of what is remembered. Rank 0's count.

    Args:
        model, optimizer, process_group, sync, broadcast_buffers, loss_scale, guard, mesh: see `runtime.attach`.
        plan: a plan, or the path of plan.json, which is executed as it is.
        accuracy: the riskiest class of plan; default: the given plan's, without one exact.
        allow: further interfaces (or one), as for `optimize`; default: the given plan's, without one none.
        timeout_s: deadline of every wait; default: the process group's own (see `runtime.attach`).
        drift: warn where steps become longer than the plan predicts (with a plan), or plan again (without).

    Raises:
        PlanMismatch, InputError, EnvironmentFailure: as `runtime.attach`; the plan asks for more than `accuracy` and
            `allow` permit; a riskier class than exact without a plan, whose costs a run does not measure.
    """
    if plan is not None:
        loaded = plan
        with suppress(InputError):  # a file that cannot be read is reported to all ranks where they agree on the plan
            loaded = plan if isinstance(plan, Plan) else load_plan(plan)
        if isinstance(loaded, Plan):
            _check_permitted(loaded, accuracy, allow)
        return attach_as(
            PlannedSession, model, optimizer, loaded, process_group, sync=sync, broadcast_buffers=broadcast_buffers,
            timeout_s=timeout_s, drift=drift, loss_scale=loss_scale, guard=guard, mesh=mesh,
        )  # fmt: skip
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: found a {type(model).__name__}, expected a torch.nn.Module; call planner.attach(model, optimizer)"
        )
    begin = partial(_begin, model, optimizer, process_group, timeout_s, accuracy or "exact", as_names(allow or ()))
    beginning = begin()
    session = attach_as(
        PlannedSession, model, optimizer, beginning.plan, process_group, sync=sync,
        broadcast_buffers=broadcast_buffers, timeout_s=timeout_s, drift=False, loss_scale=loss_scale, guard=guard,
        mesh=mesh,
    )  # fmt: skip
    if session.world.ranks > 1:
        session.begin_again = begin
        session._fly(beginning, watches=drift)
    return session


def _begin_with_remembered(session: PlannedSession, opening: Opening) -> Opening:
    """Switch to the remembered plan before the first step. Where it is none that this run could have found, or does not
    fit model, optimizer or cluster, all ranks stay with DDP's buckets alike, and rank 0 warns.
    """
    if opening.remembered is None:
        return opening
    plan, key = opening.remembered.plan, opening.key
    try:
        _check_permitted(plan, key.accuracy, key.allow)
        if missing := session.parameters.keys() - set(plan.gradients):
            raise PlanMismatch(f"the plan has no bucket with {sorted(missing)[0]}, expected one for each parameter")
        session.switch(plan)
    except PlanMismatch as error:
        if session.world.rank == 0:
            _warn_unused(error)
        return replace(opening, remembered=None)
    return opening


def _check_permitted(plan: Plan, accuracy: Accuracy | None, allow: str | Sequence[str] | None) -> None:
    if accuracy is not None and accuracy not in CLASSES:
        raise InputError(f"accuracy: found {accuracy!r}, expected one of: {', '.join(CLASSES)}; or leave it out")
    if accuracy is not None and CLASSES.index(plan.accuracy) > CLASSES.index(accuracy):
        raise PlanMismatch(
            f"the plan's accuracy is {plan.accuracy}, expected at most {accuracy}; pass accuracy={plan.accuracy!r} if "
            f"that is meant, or make the plan with `planner optimize --accuracy {accuracy}`"
        )
    asked = [] if allow is None else [name for name in plan.interfaces if name not in check_allow(allow)]
    if asked:
        raise PlanMismatch(
            f"the plan's interface has {', '.join(asked)}, expected nothing beside what allow= names; add it there if "
            f"the script is made for it, or make the plan without `--allow`"
        )


@dataclass(frozen=True)
class _Mine:
    """What one rank brings."""

    problem: str | None
    fingerprint: str
    node: str
    way: str


@dataclass(frozen=True)
class _Beginning:
    plan: Plan
    opening: Opening
    cache: Cache | None
    other: Remembered | None
    """On rank 0, what a run on another number of ranks left."""


def _begin(
    model: nn.Module, optimizer: object, group: dist.ProcessGroup | None, timeout_s: float | None, accuracy: Accuracy,
    allow: tuple[str, ...], also: Iterable[nn.Parameter] = (),
) -> _Beginning:  # fmt: skip
    """Agree with all ranks on how the run begins: rank 0's environment and cache count. `also` are parameters that are
    trained, though they are frozen now.
    """
    way, problem, fingerprint = os.environ.get("PLANNER", "auto").strip().lower() or "auto", None, ""
    parameters: dict[str, nn.Parameter] = {}
    try:
        problem = check_model(model)
        parameters = {} if problem else trainable_parameters(model, also)
        fingerprint = parameters_fingerprint(parameters)
        check_allow(allow)
        if way not in get_args(Way):
            raise InputError(f"PLANNER: found {way!r}, expected one of: {', '.join(get_args(Way))}; or leave it out")
        if accuracy != "exact":
            raise InputError(
                f"accuracy: found {accuracy!r} without a plan, expected exact: what riskier plans need is measured by "
                f"`planner profile --for {accuracy}`; make a plan from that and attach it"
            )
    except InputError as error:
        problem = problem or str(error)
    problem = problem or (None if parameters else "the model has no trainable parameter; expected at least one")
    cache: Cache | None = None
    with joined(group, *deadlines(timeout_s, group)) as world:
        everyone: list[_Mine] = world.gather(_Mine(problem, fingerprint, node_name(), way), "comparing models")
        refuse_alike([one.problem for one in everyone])
        check_same_model([one.fingerprint for one in everyone])
        nodes = count_nodes([one.node for one in everyone])
        device = next(iter(parameters.values())).device
        key = Key(
            model=fingerprint, ranks=world.ranks, nodes=nodes, backend=world.backend,
            device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
            cores=os.cpu_count() or 0, torch=torch.__version__, planner=__version__, accuracy=accuracy, allow=allow,
            optimizer=_class_name(optimizer),
        )  # fmt: skip
        found: Remembered | None = None
        other: Remembered | None = None
        if world.rank == 0 and world.ranks > 1:
            cache, found, other = _read_cache(key)
        answer: tuple[str, Key, object, int | None] = world.gather(
            (way, key, found.to_document() if found else None, other.key.ranks if other else None),
            "asking what rank 0 remembers",
        )[0]
    chosen, key, document, measured_on = answer
    remembered = None
    if document is not None and chosen == "auto":
        remembered = found or parse_remembered(document, key, "rank 0's cache")
    reference = ModelReference(name=type(model).__name__.lower(), fingerprint=fingerprint)
    where = PlanWorld(ranks=key.ranks, nodes=key.nodes, torch=key.torch)
    first = ddp_plan(parameters, list(reversed(parameters)), reference, where)
    return _Beginning(
        plan=first,
        opening=Opening(
            way=chosen, key=key, remembered=remembered, measured_on=measured_on, allow=allow,  # type: ignore[arg-type]
        ),
        cache=cache,
        other=other,
    )  # fmt: skip


def _read_cache(key: Key) -> tuple[Cache | None, Remembered | None, Remembered | None]:
    """Return rank 0's cache, what it holds, and where that is nothing what it holds for another number of ranks; where
    it cannot be used that is said once, and training goes on.
    """
    cache: Cache | None = None
    try:
        cache = Cache(cache_folder())
        found = cache.read(key)
        return cache, found, cache.read_other_ranks(key) if found is None else None
    except Exception as error:  # the other ranks wait for what is read here
        _warn_unused(error)
        return cache, None, None


def _warn_unused(error: Exception) -> None:
    warnings.warn(f"what earlier runs found is not used: {error}", CacheWarning, stacklevel=4)


def _class_name(optimizer: object) -> str:
    """Return the class of an optimizer, after that of what wraps it."""
    kinds = [type(one) for one in (optimizer, inner_optimizer(optimizer))]
    return " of ".join(dict.fromkeys(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))
