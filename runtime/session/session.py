"""A model that trains by a plan: its exchange, what watches over it, and how another plan takes its place.

What happens in one step is told in `runtime.core.backward`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.checks.delay import SHARED_STEP_TAKES_NOTHING_OVER, afterwards, find_late_plan, synchronous
from runtime.checks.optimizer import find_optimizer_misfit, inner_optimizer, warn_of_selection
from runtime.checks.plan import find_late_step, find_plan_misfit, trainable_parameters
from runtime.checks.topology import adapt, find_topology_misfit
from runtime.comm.collectives import has_phases
from runtime.comm.communicator import Communicator
from runtime.comm.node_groups import Grid
from runtime.comm.parcel import Sent
from runtime.comm.phased_communicator import make_phased_communicator
from runtime.comm.topology import Position, Topology
from runtime.comm.world import Credentials, World, agree, first_line
from runtime.core.backward import BackwardLife
from runtime.core.buffers import BufferSync
from runtime.core.closures import LossAveraging
from runtime.core.exchange import Exchange
from runtime.core.watch import ModelWatch
from runtime.delay.stages import Delay
from runtime.errors import FallbackWarning, InputError
from runtime.monitor.clock import make_clock
from runtime.monitor.drift import DriftGuard
from runtime.monitor.recorder import Recorder
from runtime.monitor.trial import make_trial
from runtime.plan import Plan, load_plan
from runtime.session.exchanges import make_exchange
from runtime.session.report import Report, make_report
from runtime.session.updates import Updates
from runtime.sparse.guard import Guard, Sampled, without
from runtime.sparse.residuals import carried_part
from runtime.torch_compat import OUTSIDE, current_backward_id, is_out_of_memory, leave_uncompiled
from runtime.version import __version__

attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Session:
    """A model that trains by a plan; made by `attach`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        plan: Plan,
        world: World,
        *,
        broadcast_buffers: bool = True,
        communicate: bool = True,
        drift: bool = False,
        loss_scale: Callable[[], float] | None = None,
        guard: bool = False,
    ) -> None:
        """Use `attach`. With `communicate` False everything happens but the exchange of gradients (for measuring)."""
        self.plan, self.world, self.model = plan, world, model
        self._given, optimizer = optimizer, inner_optimizer(optimizer)
        self.step = 0
        """How many steps have been exchanged, which is the number of the next one."""
        self._pending: tuple[int, Exchange] | None = None
        self._elsewhere: Callable[[], AbstractContextManager[None]] | None = None
        """The `no_sync` of what trains the model while the session is aside."""
        self._communicate = communicate
        self.parameters = trainable_parameters(model)
        self._backward = BackwardLife(
            model, ModelWatch(model, self.parameters), lambda: self._exchange, self._step_done
        )
        leave_uncompiled()
        self._device = next(iter(self.parameters.values())).device
        self.recorder = Recorder(make_clock(self._device), len(plan.buckets), len(plan.gradients))
        self.drift = DriftGuard(world.rank, self.recorder.clock)
        """Compares steps with the prediction now and then; `drift.verdict` is what came out."""
        self.trial = make_trial(plan, world, self.recorder.clock) if guard else None
        """Tries a lossy plan against the exact one beside it, if any; `trial.verdict` is what came out."""
        self._tried: dict[str, str] = {}  # by the run that this one continues
        self._guards, self._loss_scale, self._optimizer = drift, loss_scale, optimizer
        self._guarded, self._broadcast_buffers = guard, broadcast_buffers
        self._grid: Grid | None = None
        self._exchange = self._make_exchange(plan)
        self._connect(self._exchange)
        self._guard = self._make_guard()
        self._handles: list[Any] = []
        # Before `Updates`: of a step that owners have done, nothing is left for a shared one.
        self.delay = self._make_delay(optimizer) if communicate else None
        """The stages of a plan with delay."""
        self._updates = Updates(optimizer if communicate else None, self.parameters, world, self.recorder.clock)
        self._updates.follow(plan, self._exchange)
        if broadcast_buffers:
            self._handles += BufferSync(
                world, model, lambda: self._backward.synchronizing, lambda: self.delay is not None and self.delay.active
            ).install()
        # Hooked later and run before: the recorder's forward includes the exchange of buffers.
        self._handles += self.recorder.observe(model, optimizer)
        if communicate:
            self._handles += LossAveraging(world).install(optimizer)
        self._backward.admit_to(self._exchange)
        self._handles += self._backward.install()
        if drift and self.delay is None:
            self.drift.begin(plan)
        if self.delay is not None:
            self.delay.start()
        attached.add(model)

    def _make_delay(self, optimizer: torch.optim.Optimizer | None) -> Delay | None:
        if self.plan.delay is None or optimizer is None or self.world.ranks == 1:
            return None
        delay = Delay(
            self.plan, optimizer, self.world, self.parameters,
            lambda: list(self.model.buffers()) if self._broadcast_buffers else [], self.recorder,
            put=self._put, steps_done=lambda: self.step, loss_scale=self._loss_scale, guard=self._guarded,
        )  # fmt: skip
        self._handles += delay.install()
        return delay

    def _make_exchange(self, plan: Plan) -> Exchange:
        """Buckets of a plan, not yet hooked; of one with a delay, those of its synchronous steps."""
        return make_exchange(
            synchronous(plan), self.parameters, self.world, self.recorder, self._device,
            Position(self._topology, self.world.rank), communicate=self._communicate, loss_scale=self._loss_scale,
        )  # fmt: skip

    @property
    def _topology(self) -> Topology:
        found = self.world.topology
        return found if isinstance(found, Topology) else Topology.of_one_rank_each(self.world.ranks)

    def _connect(self, exchange: Exchange) -> None:
        """Gives an exchange whose collectives have phases its communicator; all ranks are here, for groups are made."""
        if not self._communicate or self.world.group is None or not has_phases(exchange.plan):
            return
        self._grid = self._grid or Grid.make(self.world, self._topology)
        exchange.launcher.communicator = make_phased_communicator(self._grid, exchange.plan, self._device)

    def _step_done(self) -> None:
        """All gradients of a step are there; the optimizer's step comes next."""
        self.step += 1
        if self.delay is not None:
            self.delay.step_done()
        if self._pending is None and (following := self._judged()) is not None:
            self._pending = self._laid_out(following)
        due = self._pending is not None and self._pending[0] <= self.step
        if self.delay is not None and self.delay.has_to_end and not due:
            self.delay.end()
            self._put(None)
        if due:
            self._change_over()
        else:
            self.drift.step_done(self.recorder.steps)

    def _laid_out(self, plan: Plan) -> tuple[int, Exchange] | None:
        """A plan's buckets, to begin with the next step; None on all ranks alike where one has no memory for them."""
        prepared, problem = self._prepare(plan, self.step)
        problems = [one for one in self.world.gather(problem, "changing plans") if one]
        if problems or prepared is None:
            self.trial = None
            warnings.warn(f"the run stays with its plan: {problems[0]}", FallbackWarning, stacklevel=2)
            return None
        return self.step, prepared

    def _make_guard(self) -> Guard | None:
        watched = self._exchange.carried.watched() if self._guarded else []
        return Guard(watched, self.world, self.recorder.clock) if watched else None

    def _judged(self) -> Plan | None:
        """The plan that the last steps speak for, the same on all ranks; None: the present one."""
        if self.delay is not None and self.delay.has_to_end:
            return afterwards(self.plan)
        if self.trial is not None and self.trial.verdict is None:
            return self.trial.step_done()
        if self._guard is None or (harmful := self._guard.step_done(self.step)) is None:
            return None
        following = without(self.plan, harmful, self._guard.samples[harmful])
        if self.delay is None or not self.delay.push_whole(harmful):
            return following
        self.plan, self._guard = following, self._make_guard()
        return None

    def _change_over(self) -> None:
        """Between two steps: the next one is the pending plan's. `.grad`s are not touched."""
        assert self._pending is not None
        (_, following), self._pending = self._pending, None
        if self.delay is not None:
            self.delay.end()
        self.plan = following.plan
        self._put(following)

    def _put(self, following: Exchange | None) -> None:
        """Another exchange, None: a synchronous one of the plan, takes the place of the present one."""
        following = following or self._make_exchange(self.plan)
        self._connect(following)
        before, self._exchange = self._exchange, following
        following.follow(before)
        before.close()
        self._backward.admit_to(following)
        self._guard = self._make_guard()
        self.recorder.restart(len(self.plan.buckets), len(self.plan.gradients))
        self._updates.follow(self.plan, following)
        predicted = self.plan.delay is None or (self.delay is not None and self.delay.active)
        self.drift.begin(self.plan if self._guards and predicted else None)

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

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside, the model has the synchronized weights and buffers: to evaluate, and to save them.

        Only plans with a delay leave ranks with weights of their own; with others nothing happens. Every rank calls it
        between the same two steps. What a script changes inside is lost.

        Raises:
            InputError: called inside a backward, or after `detach`.
            CommunicationError: a rank did not come within the deadline.
        """
        self.pause("session.global_weights")
        with nullcontext() if self.delay is None else self.delay.global_weights():
            yield

    def switch(self, plan: Plan | str | Path, at_step: int | None = None) -> None:
        """Changes over to another plan on all ranks at one step; no step, gradient or update is lost.

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
        self.pause("session.switch")
        at_step = self.step if at_step is None else at_step
        prepared, problem = self._prepare(plan, at_step)
        digest = "" if prepared is None else prepared.plan.digest()
        mine = Credentials(__version__, torch.__version__, digest, problem=problem, step=self.step, at_step=at_step)
        agree(self.world, mine)
        assert prepared is not None
        self._pending = (at_step, prepared)
        self.trial = make_trial(prepared.plan, self.world, self.recorder.clock) if self._guarded else None
        if at_step == self.step:
            self._change_over()

    def pause(self, what: str) -> None:
        """Makes sure that the link is quiet: called before ranks exchange something else between two steps.

        Raises InputError where the session is detached or a backward runs; `what` is what the user called.
        """
        if not self._handles:
            raise InputError(f"{what}: the session is detached; expected an attached one: call planner.attach first")
        if current_backward_id() != OUTSIDE:
            raise InputError(f"{what} was called while a backward runs; expected between two steps: call it after it")
        self._backward.forget_abandoned()
        self._exchange.launcher.communicator.wait()

    def _prepare(self, plan: Plan | str | Path, at_step: int) -> tuple[Exchange | None, str | None]:
        """The new plan's buckets, or what is wrong on this rank: it is told to all ranks."""
        try:
            loaded = plan if isinstance(plan, Plan) else load_plan(plan)
            problem = (
                find_late_step(at_step, self.step)
                or find_plan_misfit(self.parameters, loaded, self.world.ranks)
                or find_optimizer_misfit(loaded, self._given, self.parameters)
                or find_late_plan(loaded, carries=self.plan.accuracy != "exact" or self._exchange.carried.active)
                or find_topology_misfit(loaded, self.world.topology)
            )
            if problem:
                return None, problem
            if self.world.rank == 0 and self.world.ranks > 1:
                warn_of_selection(loaded, self._optimizer)
            return self._make_exchange(adapt(loaded, self.world, self.parameters)), None
        except InputError as error:
            return None, str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None, f"the plan's buckets cannot be laid out: {first_line(error)}"

    def report(self) -> Report:
        """Predicted against measured, over the last steps of this run on this rank."""
        updates = self._updates.report(), self._updates.step_report()
        return make_report(self.plan, self.recorder, self.world, self.samples, *updates)

    @property
    def samples(self) -> dict[int, list[Sampled]]:
        """What lossy buckets, by their index, left behind when it was looked at; see `runtime.sparse.guard`."""
        return {} if self._guard is None else self._guard.samples

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides model and optimizer; every rank has its own.

        An exact plan carries nothing from step to step. A lossy one carries what its buckets have yet to send
        (`carried`), and a checkpoint without it loses that part of the gradients. One with a delay carries this rank's
        part of the global weights and momenta, and its own weights (`delay`).
        """
        state: dict[str, Any] = {"plan": self.plan.digest(), "ranks": self.world.ranks}
        state |= self._tried if self.trial is None or not self.trial.verdict else {"tried": self.trial.lossy.digest()}
        if self.delay is not None and self.plan.delay is not None:
            return state | {"rank": self.world.rank, "delay": self.delay.state()}
        carried = self._exchange.carried.state()
        return state | ({"rank": self.world.rank, "carried": carried} if carried else {})

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's whole `state_dict()`, on the host where ranks share its step; all ranks must call this.

        `optimizer.load_state_dict` takes it on any number of ranks, before or after `attach`. Raises InputError without
        an optimizer, in a backward and after `detach`, CommunicationError where a rank does not come in time.
        """
        self.pause("session.optimizer_state_dict")
        if self._given is not self._optimizer:  # a wrapper's, which never is of a part
            return self._given.state_dict()  # type: ignore[union-attr]
        return self._updates.optimizer_state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Continues from `state_dict()`, before the first step, with the same plan bit for bit.

        A trial of this plan that was over is not repeated; buckets that went dense begin lossy again. Another plan may
        continue, too: what its buckets send in full travels with the next step. With a delay, load model and optimizer
        first: the session's weights count.

        Args:
            state: this rank's; or, on every rank alike, those of all ranks in order of rank, for a run on another
                number of ranks (without a delay): each takes a share, and their sum stays what it was.

        Raises:
            InputError: other state, of other parameters, or of another number of ranks than there are; with a delay
                also of other buckets.
        """
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        if self.delay is not None:
            self.step = self.delay.load(state)
            return
        held = carried_part(state, self.world.rank, self.world.ranks, shapes)
        if self.plan.sharded and held.get("residuals"):
            raise InputError(f"the state: {SHARED_STEP_TAKES_NOTHING_OVER}")
        self._exchange.carried.take_over(held, self.parameters)
        one = state if isinstance(state, dict) else state[0]
        if self.trial is not None and one.get("tried") == self.plan.digest():
            fallback, self.trial, self._tried = self.plan.fallback, None, {"tried": self.plan.digest()}
            if fallback is not None and one["plan"] == fallback.digest():
                self._pending = self.step, self._make_exchange(fallback)
                self._change_over()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """What was given to `attach`."""
        return self._optimizer

    @contextmanager
    def aside(self, what: str, no_sync: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Inside, the model is plain, as after `detach`; afterwards the session goes on where it was (for measuring).

        Every rank calls it between the same two steps. `report()` begins anew.

        Args:
            what: the user called.
            no_sync: stands in for the session's own inside.

        Raises:
            InputError: the session has a delay, or a switch waits; it is detached, or a backward runs.
        """
        self.pause(what)
        if self.delay is not None:
            raise InputError(
                f"{what}: the session has a delay, so that ranks have weights of their own; expected one without: "
                f"attach an exact plan, and name the one with a delay in this call"
            )
        if self._pending is not None:
            raise InputError(
                f"{what}: session.switch waits for step {self._pending[0]}; expected a session without: call it after "
                f"that step"
            )
        state, step = self.state_dict(), self.step
        self.detach(leave=False)
        self._elsewhere = no_sync
        try:
            yield
        finally:
            Session.__init__(
                self, self.model, self._optimizer, self.plan, self.world, broadcast_buffers=self._broadcast_buffers,
                communicate=self._communicate, drift=self._guards, loss_scale=self._loss_scale, guard=self._guarded,
            )  # fmt: skip
            self.load_state_dict(state)
            self.step, self._tried = step, {"tried": state["tried"]} if "tried" in state else {}

    def exchange_alone(self) -> None:
        """Sends every bucket once, as it is, with no backward beside it (for measuring)."""
        for bucket in self._exchange.buckets:
            self._exchange.launcher.communicator.launch(bucket.parcel, Sent())
        self._exchange.launcher.communicator.wait()

    def use_communicator(self, communicator: Communicator) -> None:
        """Sends buckets through another communicator from the next step on (for measuring)."""
        self._exchange.launcher.communicator.close()
        self._exchange.launcher.communicator = communicator

    def detach(self, *, leave: bool = True) -> None:
        """Makes the model plain again; gradients stay, as tensors of their own.

        Args:
            leave: give the process group back; False where the caller made it and goes on with it.
        """
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._pending = None
        self._exchange.close()
        if self.delay is not None:
            self.delay.close()
        self._exchange.give_gradients_away()
        if self._grid is not None:
            self._grid.leave()
        attached.discard(self.model)
        try:
            self._updates.leave()
        finally:
            if leave:
                self.world.leave()
