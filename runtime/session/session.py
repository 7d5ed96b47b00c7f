"""A model that trains by a plan: its mode and exchange, what watches over it, and how another plan takes its place.

`runtime.core.backward` has the sequence of one step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from runtime.checks.attach import check_executable
from runtime.checks.modes import asked_modes, make_mode
from runtime.checks.optimizer import holders_of, warn_of_accuracy
from runtime.checks.plan import check_switch, trainable_parameters
from runtime.checks.topology import adapt
from runtime.comm.collectives import has_phases
from runtime.comm.communicator import CommTiming, Communicator
from runtime.comm.phased_communicator import make_phased_communicator
from runtime.comm.topology import Topology
from runtime.comm.world import Grid, RankInfo, World, agree, check_still_alone, first_line
from runtime.core.backward import BackwardTracker
from runtime.core.buffers import BufferSync
from runtime.core.closures import LossAveraging
from runtime.core.compiled import CompiledModel, report_regions
from runtime.core.exchange import Exchange
from runtime.core.hooks import UpdateHooks
from runtime.core.members import exchanged_buffers
from runtime.core.options import AttachOptions
from runtime.core.watch import ModelWatch
from runtime.core.weights import Weights
from runtime.errors import FallbackWarning, InputError
from runtime.modes.base import Mode, Synchronous
from runtime.monitor.clock import make_clock
from runtime.monitor.recorder import Recorder
from runtime.optimizers.kinds import inner_optimizers
from runtime.optimizers.planned_norms import PlannedNorms
from runtime.optimizers.planned_operators import PlannedOperators
from runtime.outer.saved_state import as_synchronous
from runtime.plan import Plan, load_plan
from runtime.plan.document import PhasePlan
from runtime.session.followed_shares import Shares
from runtime.session.monitor import Monitor
from runtime.session.phases import Phases
from runtime.session.report import Report, make_report
from runtime.session.share_sampler import ShareBatches
from runtime.session.uneven import even_batches
from runtime.sparse.samples import Sampled
from runtime.torch_compat import (
    OUTSIDE,
    ModuleHook,
    current_backward_id,
    hook_before_forward,
    is_out_of_memory,
    leave_uncompiled,
)
from runtime.version import __version__

T = TypeVar("T")

attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()

FREED_BYTES = 31 * 1024 * 1024
"""Size of a block that is allocated on a host and freed at once, untouched: from then on glibc keeps twice as much free
memory at the end of its heap. It keeps twice the largest block that was freed, up to 32 MiB; where layers' outputs are
small, what backward frees goes back to the system in every step, and the next forward takes thousands of page faults.
"""


class Director(Protocol):
    """Decides on plans while a session trains."""

    def step_done(self) -> Plan | None:
        """Return the plan of the next step, alike on all ranks, which may meet here; None: the present one continues.

        Called when all gradients of a step are there, before the optimizer's step.
        """
        ...


class SessionHost:
    """The part of a session that its modes see: the `runtime.modes.base.Host`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.model, self.world, self.options = session.model, session._world, session._options
        self.recorder, self.parameters, self.device = session._recorder, session._parameters, session._device

    @property
    def step(self) -> int:
        """Number of steps that have been exchanged."""
        return self._session.step

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Optimizer of the model, without what wraps it; None where there are several."""
        return self._session.optimizer

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Return all optimizers of the model in the order of `attach`, without what wraps them."""
        return self._session.optimizers

    @property
    def exchange(self) -> Exchange:
        """Exchange of the present plan."""
        return self._session._exchange

    @property
    def topology(self) -> Topology:
        """Ranks of each node; if they are not known, each is a node of its own."""
        found = self.world.topology
        return found if isinstance(found, Topology) else Topology.of_one_rank_each(self.world.ranks)

    def synced_buffers(self) -> list[Tensor]:
        """Return the model's buffers that follow rank 0."""
        return exchanged_buffers(self.model) if self.options.broadcast_buffers else []

    def put(self, exchange: Exchange) -> None:
        """Replace the active exchange between two steps; all ranks call this."""
        self._session._put(exchange)


class Session:
    """A model that trains by a plan; made by `attach`."""

    model: nn.Module
    """The model, which stays plain."""
    optimizer: torch.optim.Optimizer | None
    """Optimizer of the model, without what wraps it; None where there are several."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    """All optimizers of the model in the order of `attach`, without what wraps them."""
    step: int
    """Number of steps that have been exchanged, which is the number of the next one."""

    _director: Director | None = None
    """Decides on the plans of following steps, besides `switch`; a switch that waits comes first."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        plan: Plan,
        world: World,
        options: AttachOptions,
        parameters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Use `attach`. `parameters` are those that ranks train together, by canonical name."""
        self.model, self._world, self._options = model, world, options
        self._given, self.optimizers = optimizer, inner_optimizers(optimizer)
        self.optimizer = self.optimizers[0] if len(self.optimizers) == 1 else None
        self.step = 0
        self._elsewhere: Callable[[], AbstractContextManager[None]] | None = None
        """The `no_sync` of what trains the model while the session is aside."""
        self._parameters = dict(trainable_parameters(model) if parameters is None else parameters)
        self._device = next(iter(self._parameters.values())).device
        updated = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        self._weights = Weights(world, options.weight, updated)
        self._shares = Shares(plan, self._weights, world.rank)
        self._compiled = None if options.compile is None else CompiledModel(model, options.compile)
        leave_uncompiled()
        if self._device.type == "cpu":
            torch.empty(FREED_BYTES, dtype=torch.uint8)
        self._recorder = Recorder(make_clock(self._device), len(plan.buckets), len(plan.gradients))
        self._host = SessionHost(self)
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        """Begin to train by a plan: lay out its buckets, and hook the model and its optimizer."""
        model, world, options = self.model, self._world, self._options
        self._pending: tuple[int, Mode, Exchange] | None = None
        watch = ModelWatch(model, self._parameters, lambda names: self._thawed(names))
        self._backward = BackwardTracker(model, watch, lambda: self._exchange, self._step_done)
        self._monitor = Monitor(plan, world, self._recorder, options)
        self._grid: Grid | None = None
        self._handles: list[Any] = []
        self._modes = [make_mode(plan, self._host)]
        """The present one at last; before it those that have ended and have something left to do."""
        self._exchange: Exchange = self._mode.make_exchange()
        self._connect(self._exchange)
        updated = self.optimizers if options.communicate else ()
        self._norms = PlannedNorms(updated, self._parameters, world, self._recorder.clock)
        self._norms.follow(plan)
        self._operators = PlannedOperators(updated, self._parameters, world, self._recorder.clock)
        self._operators.follow(plan)
        if updated and world.ranks > 1:
            self._handles.append(UpdateHooks(updated, self._begin_update, self._before_update, self._after_update))
            self._handles.append(hook_before_forward(model, ModuleHook(self._before_forward)))
        self._buffers: BufferSync | None = None
        if options.broadcast_buffers:
            synchronizing, own = lambda: self._backward.synchronizing, lambda: self._mode.own_weights
            followed = self._recorder.buffers_followed
            self._buffers = BufferSync(world, model, self._device, synchronizing, own, followed)
            self._handles += self._buffers.install()
        # Hooked later and run before: the recorder's forward includes the exchange of buffers. Its update includes what
        # a mode does around the optimizer's step.
        self._handles += self._recorder.observe(model, self.optimizers)
        if options.communicate:
            self._handles += LossAveraging(world, self._device, self._weights).install(self.optimizers)
        self._backward.install_exchange(self._exchange)
        self._handles += self._backward.install()
        if world.before_group:
            self._handles.append(hook_before_forward(model, ModuleHook(lambda *_: check_still_alone())))
        self._monitor.begin(self._mode, self._exchange)
        self._mode.begin(self._exchange)
        if self._compiled is not None:
            self._handles.append(self._compiled)
            self._cut(self._compiled, plan)
        attached.add(model)

    @property
    def _mode(self) -> Mode:
        """Mode in which ranks train now."""
        return self._modes[-1]

    @property
    def plan(self) -> Plan:
        """Plan of the next step."""
        return self._mode.plan

    @property
    def share(self) -> int | None:
        """Samples of this rank in a step, where the plan has shares, or `sampler` has them; else None."""
        return self._shares.mine

    @property
    def is_attached(self) -> bool:
        """True until `detach`: the model trains by this session."""
        return bool(self._handles)

    def _connect(self, exchange: Exchange) -> None:
        """Give an exchange whose collectives have phases its communicator; all ranks are here, for groups are made."""
        if not self._options.communicate or self._world.group is None:
            return
        if self._mode.weight_reason is None:
            exchange.launcher.rank_weights = self._weights
        if not has_phases(exchange.plan):
            return
        self._grid = self._grid or Grid.make(self._world, self._host.topology)
        exchange.launcher.communicator = make_phased_communicator(self._grid, exchange.plan, self._device)

    def _before_forward(self, *_: Any) -> None:
        self._mode.hooks.before_forward()

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._operators.begin_step()
        for mode in self._modes:
            if any(optimizer is one for one in self.optimizers):
                mode.hooks.begin_step(optimizer)
            else:
                mode.hooks.begin_other_step(optimizer)

    def _before_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        replaced = None
        for mode in self._modes:
            replaced = mode.hooks.before_step(optimizer, arguments, keywords) or replaced
        given = replaced or (arguments, keywords)
        return self._operators.before_step(optimizer, *given) or replaced

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._operators.after_step(optimizer)
        for mode in self._modes:
            mode.hooks.after_step(optimizer)

    def _step_done(self) -> None:
        """End the exchange of a step, whose gradients are all there; the optimizer's step comes next."""
        if self._buffers is not None and self._buffers.align(self._weights.source):
            self._recorder.buffers_aligned()
        self.step += 1
        self._mode.exchanged()
        if self._pending is None:
            over = self._mode.over
            following = self._mode.afterwards() if over else self._monitor.judge(self._mode, self._exchange, self.step)
            if following is None and self._director is not None:
                following = self._director.step_done()
            if following is not None:
                self._prepare_following(following)
        if self._pending is not None and self._pending[0] <= self.step:
            self._change_over()
        else:
            self._mode.go_on()
            self._monitor.drift.step_done(self._recorder.steps)

    def _prepare_following(self, plan: Plan) -> None:
        """Let a plan begin with the next step, unless a rank has no memory for its buckets."""
        prepared, problem = self._prepare(plan, self.step)
        problems = [one for one in self._world.gather(problem, "changing plans") if one]
        if prepared is not None and not problems:
            self._pending = self.step, *prepared
            return
        self._monitor.trial = None
        self._world.warn(f"the run stays with its plan: {problems[0]}", FallbackWarning)

    def _change_over(self) -> None:
        """Switch to the pending plan between two steps; `.grad`s are not touched."""
        assert self._pending is not None
        (_, mode, exchange), self._pending = self._pending, None
        self._mode.end()
        self._modes = [*(one for one in self._modes if one.lingers), mode]
        self._norms.follow(mode.plan)
        self._operators.follow(mode.plan)
        self._shares.plan_changed(mode.plan)
        self._put(exchange)
        if self._compiled is not None:
            self._cut(self._compiled, mode.plan)
        mode.begin(exchange)

    def _cut(self, compiled: CompiledModel, plan: Plan) -> None:
        """Compile the model in the plan's regions: what `torch.compile` has made of it gets another `forward`."""
        compiled.cut(plan.cuts)
        self._backward.calls.install()

    def _put(self, exchange: Exchange) -> None:
        """Replace the active exchange between two steps; all ranks call this."""
        self._connect(exchange)
        before, self._exchange = self._exchange, exchange
        exchange.inherit_state(before)
        before.close()
        self._backward.install_exchange(exchange)
        self._monitor.begin(self._mode, exchange)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside only accumulate into `.grad`; the next one outside exchanges the sum, as with DDP.

        As with DDP the forward decides: put it inside. Where the model's own is not called, the backward decides.
        """
        if self._elsewhere is not None:
            with self._elsewhere():
                yield
            return
        before, self._backward.synchronizing = self._backward.synchronizing, False
        try:
            yield
        finally:
            self._backward.synchronizing = before

    def weight(self, n: float) -> float:
        """Give this rank's weight in the next backward: the number of samples or tokens that its loss is a mean over.

        The gradient is Σ nᵢ gᵢ / Σ nᵢ over ranks, as of one process that has all their samples. Call it before each
        backward, also those in `no_sync`, on every rank, from the first step on, and after what a script writes to
        `.grad`s. `.grad` inside `no_sync` is a weighted sum. With accumulation the sum is over all micro-batches, times
        their number: divide the loss by that, as with DDP. Residuals of lossy buckets count with the weights of the
        step that sends them. One rank alone adds its micro-batches up as they are.

        Args:
            n: at least 0; 0 lets this rank contribute zeros, whatever its gradients are.

        Returns:
            The weight that counts: 0 in a batch that `batches` repeats, else `n`.

        Raises:
            InputError: a negative or no number, a weight after a first step without, or a plan with a delay. In
                backward: no weight on this rank; on all ranks alike weights on some of them alone in the first step,
                or all of them 0.

        Example:
            for tokens, labels in loader:
                session.weight(labels.ne(-100).sum())
                loss_of(model, tokens, labels).backward()
        """
        self._want_weights("session.weight")
        self._backward.forget_abandoned()
        counts = self._weights.give(n)
        self._exchange.weigh_again(n0=self._weights.changes_none)
        return counts

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Return an iterator over a rank's batches that ends on all ranks at once, when the last one has none left.

        A rank without another batch gets its last one again, with a weight of 0: so schedulers, clipping and the
        optimizer stay in step, and nothing counts twice. A rank weighs 1 where the script gives no weight; with
        `weight(n)` each sample counts alike. All ranks call this at the same place; it costs a control message a batch.

        Args:
            loader: this rank's batches: at least one, or a DataLoader, whose first sample then stands in.

        Raises:
            InputError: on all ranks alike, where a rank has no batch at all, and no sample; a plan with a delay.
            CommunicationError: a rank did not come within the deadline.

        Example:
            for x, y in session.batches(loader):
                session.weight(len(x))
                loss_of(model, x, y).backward()
                optimizer.step()
        """
        self._want_weights("session.batches")
        self._weights.each_given = False
        self._exchange.weigh_again(n0=False)
        return even_batches(self._weights, loader, self._recorder)

    def sampler(
        self, dataset: Sized, global_batch: int | None = None, *, most: int | None = None, shuffle: bool = True,
        seed: int = 0, drop_last: bool = False,
    ) -> ShareBatches:  # fmt: skip
        """Return the `batch_sampler` of a DataLoader that gives each rank its share of every batch.

        Shares are the plan's; equal ones, if it has none. They follow measured times of ranks from pass to pass, unless
        PLANNER=report or off is in the environment of rank 0. Weigh by `weight(len(batch))`. Every rank calls this,
        and begins passes at the same places.

        Args:
            dataset: has a length.
            global_batch: samples of a step over all ranks; default: of the plan's shares.
            most: largest share that a rank has memory for; default: the largest one of the plan, if it has one.
            shuffle: whether samples are drawn in a random order.
            seed: of the order, equal on all ranks.
            drop_last: leave out the samples behind the last whole batch.

        Raises:
            InputError: neither shares nor `global_batch`, or both with other totals; fewer samples than ranks; a share
                above `most`.

        Example:
            sampler = session.sampler(dataset, 512)
            loader = DataLoader(dataset, batch_sampler=sampler)
            for epoch in range(epochs):
                sampler.set_epoch(epoch)
                for x, y in session.batches(loader):
                    session.weight(len(x))
        """
        self._shares.begin(global_batch, self._world.ranks, most)
        return ShareBatches(
            dataset, self._shares, lambda: self._shares.next_pass(self._monitor.arrivals, self._decide_shares),
            self._world.rank, shuffle=shuffle, seed=seed, drop_last=drop_last,
        )  # fmt: skip

    def _decide_shares(self, shares: Sequence[int], compute_us: Sequence[float], most: Sequence[int]) -> Sequence[int]:
        """Return the shares of the next pass by times of ranks with the present ones; see `Shares.next_pass`."""
        return shares

    def _want_weights(self, what: str) -> None:
        """Weigh gradients from now on, for `what` the user called. Raises InputError."""
        if self._mode.weight_reason is not None:
            raise InputError(f"{what}: {self._mode.weight_reason}")
        if self._weights.want(what) and self._exchange.launcher.rank_weights is not None:
            self._exchange.weigh_gradients()

    @contextmanager
    def sync_in_backward(self) -> Iterator[None]:
        """Backwards inside exchange what has accumulated, also where all their forwards were in `no_sync`.

        Forwards inside are as outside of `no_sync`. Every rank calls it for the same backward.
        """
        tracker = self._backward
        before = tracker.synchronizing, tracker.forced
        tracker.synchronizing = tracker.forced = True
        try:
            yield
        finally:
            tracker.synchronizing, tracker.forced = before

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Give the model the synchronized weights and buffers inside: to evaluate, and to save them.

        Plans with a delay or outer steps leave ranks with weights of their own, and some with the sharded step round
        them (`updates.step.weights`), which inside they are not; with others nothing happens. Every rank calls it
        between the same two steps. What a script changes inside is lost.

        Raises:
            InputError: called inside a backward, or after `detach`.
            CommunicationError: a rank did not come within the deadline.
        """
        self._pause("session.global_weights")
        with self._mode.global_weights():
            yield

    def wait_for_weights(self) -> None:
        """Block until the weights of the last step are here, if the plan gathers them during the next forward.

        Whoever reads a parameter through torch waits for it by itself: modules and any other forward, `state_dict`,
        copies, moving averages, `p.data`. Call this before what does not ask a parameter's class: a CUDA graph's
        replay, C++ that is handed a parameter outside of a module's call, another CUDA stream than the step's,
        `torch.tensor(p)` and its like, `q.data = p`, `torch.func` of a bare parameter; docs/concepts/sharded-step.md
        has all. Any rank may call it, at any time; on a GPU the current stream waits. Raises CommunicationError where a
        rank did not come within the deadline.
        """
        self._mode.hooks.wait_for_weights()

    def switch(self, plan: Plan | str | Path, at_step: int | None = None) -> None:
        """Switch to another plan on all ranks at one step; no step, gradient or update is lost.

        Every rank calls this between the same two steps. Buckets are laid out now, so that what can fail does so
        here, and put in place when step `at_step` begins. `.grad`s, also those accumulated in `no_sync`, stay what
        they are; `report()` begins anew. Another switch that has not happened yet is replaced. Deadlines stay those of
        `attach`, and so does `guard`: a lossy plan is tried against its `fallback` from its first step on.

        Args:
            plan: a plan for the same parameters and ranks, or the path of plan.json; the same on every rank.
            at_step: the first step with the new plan, counted from 0 as `session.step` does; default: the next one.

        Raises:
            PlanMismatch: on all ranks alike, and nothing has changed: the plan does not fit, ranks hold different
                plans or are at different steps, or `at_step` is past.
            InputError: called inside a backward, or after `detach`.
            CommunicationError: a rank did not come within the deadline.
        """
        self._pause("session.switch")
        at_step = self.step if at_step is None else at_step
        prepared, problem = self._prepare(plan, at_step)
        digest = "" if prepared is None else prepared[0].plan.digest()
        holders = () if prepared is None else holders_of(prepared[0].plan, self._given, self._parameters)
        mine = RankInfo(
            __version__, torch.__version__, digest, problem=problem, step=self.step, at_step=at_step, holders=holders
        )
        agree(self._world, mine)
        assert prepared is not None
        if isinstance(self._director, Phases):
            self._director = None  # from now on the caller decides
        self._pending = (at_step, *prepared)
        self._monitor.try_plan(prepared[0].plan)
        if at_step == self.step:
            self._change_over()

    def next_phase(self) -> None:
        """Begin the next phase of a plan with the next step; every rank calls this between the same two steps.

        Later phases end where the plan says, counted in steps from the beginning of the run. A call of `switch` ends
        phases.

        Raises:
            InputError: the plan has no phases, or this is the last one; called inside a backward, or after `detach`.
            PlanMismatch: on all ranks alike, as `switch`.
            CommunicationError: a rank did not come within the deadline.
        """
        phases = self._director
        if not isinstance(phases, Phases):
            raise InputError("session.next_phase: found a plan without phases, expected one by `planner optimize A B`")
        self._begin_phase(phases, phases.index + 1)

    @property
    def phase(self) -> int:
        """Number of the present phase of a plan in phases, counted from 0; 0 with any other plan."""
        return self._director.index if isinstance(self._director, Phases) else 0

    def _begin_phase(self, phases: Phases, index: int) -> None:
        """Switch to a phase between two steps; raises as `switch`, and then the present one continues."""
        self.switch(phases[index])
        phases.index, self._director = index, phases

    def _follow(self, phases: Sequence[PhasePlan]) -> None:
        """Train by these phases, of which the first is the present plan."""
        self._director = Phases(phases, lambda: self.step, lambda plan: self._monitor.try_plan(plan))

    def _thawed(self, names: Sequence[str]) -> bool:
        """Return whether parameters that have become trainable since attach are in buckets from now on; called before a
        forward, or in a backward. A given plan stays as it is.
        """
        return False

    def _take_in(self, parameters: Mapping[str, nn.Parameter], plan: Plan) -> None:
        """Train these parameters from the next step on, by a plan of all of them; see `switch`."""
        before = dict(self._parameters)
        self._set_parameters(parameters)
        try:
            Session.switch(self, plan)
        except BaseException:
            self._set_parameters(before)
            raise

    def _set_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        # In place: the exchange, the optimizer's norms and the watch look there.
        self._parameters.clear()
        self._parameters.update(parameters)

    def _pause(self, what: str) -> None:
        """Make the link quiet between two steps, for `what` the user called. Raises InputError in a backward, or after
        `detach`.
        """
        if not self._handles:
            raise InputError(f"{what}: the session is detached; expected an attached one: call planner.attach first")
        if current_backward_id() != OUTSIDE:
            raise InputError(f"{what} was called while a backward runs; expected between two steps: call it after it")
        self._backward.forget_abandoned()
        self._exchange.launcher.communicator.wait()
        self._mode.hooks.wait_for_weights()

    def _prepare(self, plan: Plan | str | Path, at_step: int) -> tuple[tuple[Mode, Exchange] | None, str | None]:
        """Return the new plan's mode and buckets, or what is wrong on this rank: it is reported to all ranks."""
        try:
            loaded = plan if isinstance(plan, Plan) else load_plan(plan)
            problem = (
                check_executable(loaded, self.model, self._given, self._parameters, self._world, self._options)
                or check_switch(loaded, at_step, self.step)
                or (asked_modes(loaded)[0].weight_reason if self._weights.wanted else None)
            )
            if problem:
                return None, problem
            warn_of_accuracy(loaded, self.optimizers, self._world, guarded=self._options.guard)
            mode = make_mode(adapt(loaded, self._world, self._parameters), self._host)
            return (mode, mode.make_exchange()), None
        except InputError as error:
            return None, str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None, f"the plan's buckets cannot be laid out: {first_line(error)}"

    def report(self) -> Report:
        """Return predicted and measured times, in µs, of the last steps of this run on this rank."""
        in_run = self._director is not None and not isinstance(self._director, Phases)
        mode = self._mode  # first steps of another kind have no prediction
        plan = mode.plan if mode.predicted else replace(mode.synchronous_plan, predicted=None)
        report = make_report(plan, self._recorder, self._world, self.samples, mode.sends, in_run=in_run)
        found = self._monitor.arrivals
        compiled = report_regions(self.model, self._compiled, plan.cuts, report.wait_us)
        shared: dict[str, Any] = {
            "compiled": compiled,
            "norms": self._norms.report(),
            "operators": self._operators.report(),
        }
        return replace(report, step=mode.report(), arrivals=found.rows, messages=found.messages, **shared)

    def arrival_figures(self) -> list[list[float]]:
        """Return this rank's figures of each recorded step but the first; see `runtime.plan.last_ranks.rank_arrivals`,
        which compares those of all ranks.
        """
        return self._monitor.arrivals.figures(self._recorder.steps)

    def metrics(self) -> dict[str, float]:
        """Return figures of the last steps on this rank as plain numbers by name, for TensorBoard and the like.

        Times are of one step of the optimizer, in microseconds: `step_us` and its parts, `predicted_us` and so on;
        docs/howto/metrics.md describes each name. What is not known is left out. As `report()`, it takes some ms.

        Example:
            for name, value in session.metrics().items():
                writer.add_scalar(f"planner/{name}", value, session.step)
        """
        return {"step": self.step} | self.report().metrics()

    @property
    def samples(self) -> dict[int, list[Sampled]]:
        """Samples of compressed buckets, by their index; see `runtime.sparse.samples`."""
        return self._monitor.samples

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides model and optimizer; every rank has its own.

        An exact plan carries nothing from step to step. A lossy one carries its buckets' residuals (`carried`),
        and a checkpoint without it loses that part of the gradients. One that gathers rounded weights carries this
        rank's part of them before rounding (`weights`), a run with weights of ranks their unit (`weight_unit`), one
        with a delay its part of the global weights and momenta, and its own weights (`delay`), one with outer steps
        these and its optimizers' state (`outer`; with a sharded step ranks of a node call this together), one in phases
        its `step` and `phase`.
        """
        named: dict[str, Any] = {"plan": self.plan.digest(), "ranks": self._world.ranks}
        if isinstance(self._director, Phases):
            named |= {"step": self.step, "phase": self._director.index}
        return named | self._weights.state() | self._monitor.state() | self._mode.state()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's whole `state_dict()`, on the host where its step is sharded; all ranks call this.

        `optimizer.load_state_dict` takes it on any number of ranks, before or after `attach`. Of several optimizers the
        result has that of each by its position in `attach`. Raises InputError without
        an optimizer, in a backward and after `detach`, CommunicationError where a rank does not come in time.
        """
        if self._given is None:
            raise InputError(
                "session.optimizer_state_dict: found no optimizer; expected attach(model, optimizer, plan)"
            )
        with self.whole_optimizer_state():
            if isinstance(self._given, Sequence):
                return {str(position): one.state_dict() for position, one in enumerate(self._given)}
            return self._given.state_dict()

    @contextmanager
    def whole_optimizer_state(self) -> Iterator[None]:
        """Let `optimizer.state_dict()` return what `optimizer_state_dict` returns inside: for code that calls it by
        itself.

        Every rank calls it between the same two steps; inside, a rank may read the state alone. Nothing happens unless
        the step is sharded. Raises InputError in a backward and after `detach`, CommunicationError where a rank does
        not come in time.
        """
        self._pause("session.whole_optimizer_state")
        with self._mode.whole_optimizer_state():
            yield

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Continue from `state_dict()`, before the first step, with the same plan bit for bit.

        A trial of this plan that was over is not repeated; buckets that did harm begin as planned again. A plan with
        `from_step` or phases continues with the step, and in the phase, that was saved. Another plan may
        continue, too: residuals of buckets that it sends in full are sent with the next step. With a delay, load model
        and optimizer first: the session's weights count.

        Args:
            state: this rank's; or, on every rank alike, those of all ranks in order of rank, for a run on another
                number of ranks (without a delay): each takes a share, and their sum stays what it was. With
                outer steps also for another plan: training continues with the mean of weights and optimizer states.

        Raises:
            InputError: other state, of other parameters, or of another number of ranks than there are; with a delay
                also of other buckets.
        """
        phases = self._director
        if isinstance(phases, Phases) and (index := phases.saved_in(state)) != phases.index:
            self._begin_phase(phases, index)
        if isinstance(self._mode, Synchronous):
            state = as_synchronous(state, self._host)
        self.step = self._mode.load(state)
        first = state if isinstance(state, dict) else state[0]
        self._weights.load(first)
        following = self._monitor.load(first, self.plan)
        if following is not None:
            mode = make_mode(following, self._host)
            self._pending = self.step, mode, mode.make_exchange()
            self._change_over()

    @contextmanager
    def _aside(self, what: str, no_sync: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Make the model plain inside, as after `detach`; afterwards the session continues where it was (for
        measuring).

        Every rank calls it between the same two steps. `report()` begins anew.

        Args:
            what: the user called.
            no_sync: stands in for the session's own inside.

        Raises:
            InputError: the session has a delay, or a switch waits; it is detached, or a backward runs.
        """
        self._pause(what)
        if self._mode.aside_reason is not None:
            raise InputError(f"{what}: {self._mode.aside_reason}")
        if self._pending is not None:
            raise InputError(
                f"{what}: session.switch waits for step {self._pending[0]}; expected a session without: call it after "
                f"that step"
            )
        state = self.state_dict()
        self.detach(leave=False)
        self._elsewhere = no_sync
        try:
            yield
        finally:
            self._elsewhere = None
            # Those that have been frozen meanwhile are in the plan, too.
            self._set_parameters(trainable_parameters(self.model, self._parameters.values()))
            self._start(self.plan)
            self.load_state_dict(state)
            self._monitor.tried = state.get("tried")

    def _exchange_alone(self) -> None:
        """Send every bucket once, as it is, without a backward (for measuring)."""
        for bucket in self._exchange.buckets:
            self._exchange.launcher.communicator.launch(bucket.payload, CommTiming())
        self._exchange.launcher.communicator.wait()

    def _use_communicator(self, communicator: Communicator) -> None:
        """Send buckets through another communicator from the next step on (for measuring)."""
        self._exchange.launcher.communicator.close()
        self._exchange.launcher.communicator = communicator

    def detach(self, *, leave: bool = True) -> None:
        """Make the model plain again; gradients stay, as tensors of their own.

        Args:
            leave: give the process group back; False if the caller made it and continues to use it.
        """
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._pending = None
        self._exchange.close()
        self._exchange.detach_grads()
        if self._grid is not None:
            self._grid.leave()
        attached.discard(self.model)
        try:
            self._norms.leave()
            self._operators.leave()
            for mode in self._modes:
                mode.close()
        finally:
            if leave:
                self._weights.leave()
                self._world.leave()
