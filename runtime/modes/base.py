"""The interface between a session and a mode (a way to synchronize); its defaults are synchronous training.

A mode is one module and one line of the registry, `runtime.checks.modes.MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from runtime.comm.by_device import make_communicator
from runtime.comm.collectives import collective_of, has_phases
from runtime.comm.communicator import Communicator, NullCommunicator
from runtime.comm.topology import Topology, nodes_problem
from runtime.comm.world import World, first_line
from runtime.core.all_reduce import AllReduce
from runtime.core.buckets import BucketBuffer
from runtime.core.exchange import Exchange
from runtime.core.options import AttachOptions
from runtime.errors import AccuracyWarning, FallbackWarning, InputError
from runtime.monitor.recorder import Recorder
from runtime.monitor.step_report import StepReport
from runtime.plan import Plan
from runtime.plan.combinations import SYNCHRONOUS
from runtime.sparse.layout import make_buckets
from runtime.sparse.residuals import ErrorFeedbackState, state_of_rank
from runtime.torch_compat import is_out_of_memory

T = TypeVar("T")


class Host(Protocol):
    """The part of a session that its mode sees."""

    model: nn.Module
    world: World
    recorder: Recorder
    parameters: dict[str, nn.Parameter]
    device: torch.device
    options: AttachOptions

    @property
    def step(self) -> int:
        """Number of steps that have been exchanged."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Optimizer of the model, without what wraps it; None where there are several."""
        ...

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Return all optimizers of the model in the order of `attach`, without what wraps them."""
        ...

    @property
    def topology(self) -> Topology: ...
    @property
    def exchange(self) -> Exchange: ...

    def synced_buffers(self) -> list[Tensor]:
        """Return the model's buffers that follow rank 0."""
        ...

    def put(self, exchange: Exchange) -> None:
        """Replace the active exchange between two steps; all ranks call this."""
        ...


class StepHooks:
    """Called around forwards of the model and the optimizer's step; by default nothing happens."""

    def before_forward(self) -> None:
        """Handle the beginning of a forward of the model."""

    def wait_for_weights(self) -> None:
        """Block until this rank has all ranks' weights; see `Session.wait_for_weights`."""

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the beginning of the optimizer's step, or of that of its base class in it; hooks on it come next."""

    def before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Return what the optimizer's step is called with in place of these arguments, or None for the same."""
        return None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the end of an optimizer's step."""

    def begin_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the beginning of a step of another optimizer than the session's, of this model or of any other."""


NO_HOOKS = StepHooks()


class Mode:
    """One way to train by one plan, on all ranks of a session alike."""

    name: ClassVar[str]
    """Name in `runtime.plan.combinations`."""
    what: ClassVar[str] = "synchronous steps"
    """Name of the mode in messages, as what follows "the plan has"."""
    relaxed: ClassVar[bool] = False
    """Whether plans have to say that their accuracy is relaxed."""
    attach_reason: ClassVar[str | None] = None
    """Reason why no session can train in this mode; None: sessions can."""
    several: ClassVar[bool] = False
    """Whether several optimizers may take their steps where it owns them."""
    late_reason: ClassVar[str | None] = None
    """Reason why a run that has begun cannot switch to it; None: it can."""
    aside_reason: ClassVar[str | None] = None
    """Reason why nothing else may train the model while the session is put aside; None: it may."""
    residual_reason: ClassVar[str | None] = None
    """Reason why residuals cannot be in units of updates (`residual_unit`); None: they can."""
    weight_reason: ClassVar[str | None] = None
    """Reason why ranks cannot have weights; None: they can."""
    has_workers: ClassVar[bool] = False
    """Whether the nodes of a plan are its workers, where they are fewer than ranks; else each rank is one."""
    sends: ClassVar[str | None] = None
    """The collective of all buckets; None: what each of them says."""

    def __init__(self, plan: Plan, host: Host) -> None:
        """Prepare the mode; all ranks call this, and nothing has changed yet."""
        self.plan, self.host = plan, host

    # What is refused, before anything is changed; the class is asked.

    @classmethod
    def check_plan(cls, plan: Plan, parameters: Mapping[str, nn.Parameter]) -> str | None:
        """Return why the plan cannot be carried out, or None; `runtime.plan.combinations` is looked at elsewhere."""
        return None

    @classmethod
    def check_optimizer(
        cls, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], planned: Mapping[str, nn.Parameter]
    ) -> str | None:
        """Return why these optimizers of these parameters cannot train so, or None."""
        return None

    @classmethod
    def check_topology(cls, plan: Plan, topology: Topology | str | None) -> str | None:
        """Return why ranks on these nodes (or why these are not known) cannot carry out the plan, or None."""
        nodes, ranks = plan.world.nodes or plan.world.ranks, plan.world.ranks
        if nodes == ranks or not cls.has_workers:
            return None
        return nodes_problem(f"the plan has {cls.what} between {nodes} nodes", (nodes,), ranks, topology)

    @classmethod
    def owned_step(cls, plan: Plan) -> str | None:
        """Return the work that it does in place of the optimizer's step, as what follows "the plan", of which no
        wrapper may do a part; None: there is none.
        """
        return None

    @property
    def synchronous_plan(self) -> Plan:
        """Plan of its synchronous steps."""
        return self.plan

    # From attach to detach.

    def make_exchange(self) -> Exchange:
        """Lay out the plan's buckets, which are not hooked yet; may raise where there is no memory for them.

        One whose collectives have phases gets its communicator when it is put in place: all ranks have to be there.
        """
        plan, host = self.synchronous_plan, self.host
        world, scale = host.world, host.options.loss_scale
        rate = host.options.learning_rate
        carried = ErrorFeedbackState(loss_scale=scale, parameters=host.parameters, learning_rate=rate)
        buckets: list[BucketBuffer] = []
        communicator: Communicator = NullCommunicator()
        if host.options.communicate and not has_phases(plan):
            communicator = make_communicator(world, [collective_of(bucket) for bucket in plan.buckets], host.device)
        flags = None
        # One rank alone has no buckets: its `.grad`s are averages already.
        if world.ranks > 1 or not host.options.communicate:
            buckets, flags, lossy = make_buckets(plan, host.parameters, world.ranks, host.topology, world.rank)
            carried = ErrorFeedbackState(buckets, lossy, scale, learning_rate=rate)
        exact = plan.accuracy == "exact"
        launcher = AllReduce(buckets, flags, communicator, carried, host.recorder, exact=exact)
        return Exchange(plan, host.parameters, buckets, launcher, carried, host.recorder)

    def begin(self, exchange: Exchange) -> None:
        """Begin with an exchange that is in place; all ranks call this between the same two steps."""

    @property
    def own_weights(self) -> bool:
        """True while ranks have weights and buffers of their own."""
        return False

    @property
    def predicted(self) -> bool:
        """True while the plan's prediction is of the steps that are made."""
        return True

    @property
    def hooks(self) -> StepHooks:
        """Called around forwards and the optimizer's step."""
        return NO_HOOKS

    def exchanged(self) -> None:
        """Handle a step whose gradients have been exchanged and counted in `Host.step`; the optimizer's step comes
        next.
        """

    @property
    def over(self) -> bool:
        """True if the step that has been exchanged is to be the last one, on all ranks alike."""
        return False

    def afterwards(self) -> Plan | None:
        """Return what a run continues with where the mode is over; None: with its own buckets, synchronous."""
        return self.plan.fallback

    def go_on(self) -> None:
        """Continue, synchronous where the mode is over: no other plan follows the step that has been exchanged."""
        if self.over:
            self.end()
            self.host.put(self.make_exchange())

    def send_as(self, bucket: int, following: Plan) -> bool:
        """Return whether the mode itself sees to it that a bucket is sent as `following` says from now on."""
        return False

    def report(self) -> StepReport | None:
        """Return what it does in place of the optimizer's step took; None where it does nothing, or has not yet."""
        return None

    def global_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the plan: what `load` continues from."""
        carried = self.host.exchange.carried.state()
        return {"rank": self.host.world.rank, "carried": carried} if carried else {}

    def load(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> int:
        """Continue from what `Session.load_state_dict` was given; return the next step's number. Raises InputError."""
        shapes = {name: parameter.shape for name, parameter in self.host.parameters.items()}
        carried = state_of_rank(state, self.host.world.rank, self.host.world.ranks, shapes)
        given = [state] if isinstance(state, dict) else state
        step: int = given[0].get("step", self.host.step)
        self.resume_at(step)
        if saved := [one["weights"] for one in given if one.get("weights")]:
            self.take_weights(saved)
        self.host.exchange.carried.load_state(carried, self.host.parameters)
        return step

    def resume_at(self, step: int) -> None:
        """Prepare to continue a run whose next step has this number; all ranks call this between two steps."""

    def take_weights(self, saved: Sequence[dict[str, Any]]) -> None:
        """Continue with the weights before rounding that a state has, or those of all ranks. Raises InputError."""
        raise InputError(
            "the state: found weights in float32 of a run that gathered them in bfloat16 (updates.step.weights), of "
            "which ranks keep no parts here; expected a plan that gathers them so, on several ranks: go on with that, "
            "or save the model inside session.global_weights() there, and load the state without its weights"
        )

    def whole_optimizer_state(self) -> AbstractContextManager[None]:
        """Return a context in which the optimizer has the whole state; see `Session.whole_optimizer_state`."""
        return nullcontext()

    lingers: ClassVar[bool] = False
    """Whether it has to be asked around the optimizer's steps, and closed, also when another mode has followed it."""

    def end(self) -> None:
        """Leave all ranks the same weights and the whole state, for another mode; all of them call this at once."""

    def close(self) -> None:
        """Release the mode of a session that is detached; its exchange is closed."""


class Synchronous(Mode):
    """Every `.grad` is the average over ranks, to which some buckets may send a part alone.

    Before the plan's `from_step` all buckets are sent as they are; from then on they are those of the plan.
    """

    name = SYNCHRONOUS

    def __init__(self, plan: Plan, host: Host) -> None:
        super().__init__(plan, host)
        self._exact_until = plan.from_step or 0
        """First step whose buckets are compressed; 0 where a rank has no memory for them."""
        self._compresses = plan.from_step is None or host.step >= plan.from_step

    @property
    def synchronous_plan(self) -> Plan:
        return self.plan if self._compresses else self.plan.uncompressed()

    @property
    def predicted(self) -> bool:
        return self._compresses

    def begin(self, exchange: Exchange) -> None:
        self.go_on()  # a run may switch to the plan behind its exact steps

    def go_on(self) -> None:
        """See `Mode.go_on`: steps are compressed from `from_step` on, if all ranks have memory for it."""
        if self._compresses or self.host.step < self._exact_until:
            return
        self._compresses = True
        warning = "steps stay exact: no memory to compress buckets"
        exchange = make_on_all_ranks(self.make_exchange, self.host.world, "beginning to compress", warning)
        if exchange is None:
            self.plan, self._exact_until = self.plan.uncompressed(), 0
            return
        self.host.put(exchange)

    def state(self) -> dict[str, Any]:
        """See `Mode.state`; with the number of the step where the plan depends on it."""
        return super().state() | ({"step": self.host.step} if self.plan.from_step is not None else {})

    def resume_at(self, step: int) -> None:
        """See `Mode.resume_at`: in the buckets of that step."""
        compresses = step >= self._exact_until
        if compresses is not self._compresses:
            self._compresses = compresses
            self.host.put(self.make_exchange())


def make_on_all_ranks(make: Callable[[], T], world: World, doing: str, warning: str) -> T | None:
    """Return what `make` returns if every rank has memory for it; otherwise warn on rank 0 and return None on all.

    Args:
        make: allocates this rank's part.
        world: the ranks, all of which call this.
        doing: names the exchange in errors.
        warning: text of the `FallbackWarning`, which the first rank's error follows.

    Raises:
        CommunicationError: a rank did not come within the deadline.
    """
    made, problem = None, None
    try:
        made = make()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = first_line(error)
    problems = [one for one in world.gather(problem, doing) if one]
    if problems:
        world.warn(f"{warning} ({problems[0]})", FallbackWarning)
        return None
    return made


def warn_of_scales(host: Host) -> None:
    """Warn where ranks that have trained alone scale losses differently; all ranks call this."""
    scale = host.options.loss_scale or (lambda: 1.0)
    scales = host.world.gather(scale(), "comparing loss scales")
    if len(set(scales)) > 1:
        host.world.warn(
            f"ranks scale losses differently now ({', '.join(f'{scale:g}' for scale in scales)}), and synchronous "
            f"steps average their gradients: give all scalers one scale, scaler.update(new_scale=…)",
            AccuracyWarning,
        )


def check_one_dtype(plan: Plan, parameters: Mapping[str, nn.Parameter], why_one: str) -> str | None:
    """Return a message about the first compressed bucket with gradients of several dtypes, or None.

    Args:
        plan: the plan to check.
        parameters: trainable parameters by name.
        why_one: what the mode does with the bucket that needs one dtype, as a clause of the message.
    """
    for index, bucket in enumerate(plan.buckets):
        if not bucket.dense and len({parameters[gradient].dtype for gradient in bucket.gradients}) > 1:
            return (
                f"bucket {index} has the compressor {bucket.compressor.name!r} and several dtypes, {why_one}; expected "
                f"one dtype in it: divide it"
            )
    return None
