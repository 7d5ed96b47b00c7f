"""The optimizer's step shared by ranks (ZeRO-1; Rajbhandari et al., SC 2020): each updates its part of the weights.

while ranks share   parameters lie in flat buffers, one for each message, which are cut into equal parts, or between
                    parameters, where whole ones have owners: matrix optimizers need whole matrices
optimizer.step()    in the groups of the user's own optimizer this rank's pieces stand in for parameters until it is
                    done, or raises; afterwards the buffers are all-gathered, which makes them the weights of all ranks
between steps       groups, schedulers and hooks on the step see parameters; the optimizer's state is that of this
                    rank's part alone (`ShardedState`), and what a script puts in its place, by `load_state_dict` say,
                    is cut in the next step; `whole_optimizer_state` puts the whole together

Where the plan gathers weights in bfloat16, all ranks, the owner too, see and compute with rounded weights as long as
the step is sharded, from its beginning on. Each rank's optimizer updates its part in float32 (`OwnPart.master`): a
checkpoint has it in the session's state, `global_weights` shows all of them, and the end leaves them whole on all
ranks (after an error, the rounded ones). What a script changes of the rounded weights counts from the next step on.
"""

from __future__ import annotations

import functools
import statistics
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from runtime.comm.world import World
from runtime.core.buckets import Slot
from runtime.core.closures import after_backward
from runtime.errors import InputError
from runtime.modes.base import StepHooks
from runtime.monitor.clock import Clock
from runtime.monitor.recorder import KEPT_STEPS
from runtime.monitor.step_report import StepReport
from runtime.sharded.applied_updates import AppliedUpdates
from runtime.sharded.exchange import ReduceScatter
from runtime.sharded.gradient import ShardedGradient
from runtime.sharded.optimizer_state import ShardedState
from runtime.sharded.part import OwnPart
from runtime.sharded.state import Masters, gathered_state, load_masters, master_state, piece_of, state_bytes
from runtime.torch_compat import OUTSIDE, current_backward_id, storage_uses

HOST = torch.device("cpu")
NEVER = "`planner optimize` without --allow sharded-step"


class ShardedStep(StepHooks):
    """The step of one session's optimizer while ranks share it."""

    gathers_in_step: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer, exchange: ReduceScatter, world: World, clock: Clock) -> None:
        """Take over weights and state, which are the same on all ranks; each keeps its part of the state. Messages of
        other optimizers are left alone.
        """
        self._optimizer, self._exchange, self._world, self._clock = optimizer, exchange, world, clock
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._parts_of = [
            [part for part in parts if id(part.message.slots[0].parameter) in held] for parts in exchange.parts_of
        ]
        self._parts = [part for parts in self._parts_of for part in parts]
        slots = sorted((slot for part in self._parts for slot in part.message.slots), key=lambda slot: slot.index)
        self._slots = {id(slot.parameter): slot for slot in slots}
        pieces = ((slot, piece) for part in self._parts for slot, piece in _pieces_of(part))
        self._pieces = {id(slot.parameter): nn.Parameter(piece) for slot, piece in pieces}
        """Parts of the weights, of each parameter of which this rank has one."""
        self._storages = [ParamStorage(part) for part in self._parts]
        for storage in self._storages:
            storage.part.begin_master()
            storage.copy_to_params()
        self._groups: list[list[nn.Parameter]] | None = None
        """The parameters of the optimizer's groups, while pieces stand in for them."""
        self._marks: deque[list[Any]] = deque(maxlen=KEPT_STEPS)
        """Marks of each step: before its first all-gather, and after that of each bucket."""
        self._gathering = False
        self._own_state: defaultdict[Any, Any] = defaultdict(dict)
        """The optimizer's, by piece."""
        self._state = ShardedState(optimizer, self._own_state, self._slots, self._pieces, self._parts)
        self._updates = AppliedUpdates.of(optimizer, self._parts, self._slots, world) if self.gathers_in_step else None
        self._take_state()
        self._step_before, self._guarded = vars(optimizer).get("step"), self._guarded_step()
        optimizer.step = self._guarded  # type: ignore[method-assign]
        optimizer.__getstate__ = _refuse_copy  # type: ignore[method-assign]
        self._handle = optimizer.register_state_dict_pre_hook(self._refuse_part)

    # One step, in the order in which it happens.

    def _guarded_step(self) -> Any:
        """Return the optimizer's step, after which no piece stands in for a parameter."""
        step, me = self._optimizer.step, weakref.ref(self)

        @functools.wraps(getattr(step, "__func__", step))  # with what schedulers have noted there
        def guarded(_: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
            try:
                return step(*arguments, **keywords)
            except BaseException:  # torch calls no hook then
                if (sharded := me()) is not None:
                    sharded._give_up()
                raise

        return types.MethodType(guarded, self._optimizer)  # schedulers wrap methods only

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hooks on a step come next, and look at parameters: also in the step of a base class, and after a step has
        raised that was called past the instance.
        """
        self._give_up()

    def before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Return other arguments for the optimizer's step, or None. Raises InputError in a backward."""
        if current_backward_id() != OUTSIDE:
            raise InputError(
                "the optimizer's step was called while a backward runs (in a hook, say), but ranks share it and have "
                "not added gradients up yet; expected it after backward: call it then, or plan without sharing "
                "(`planner optimize` without --allow sharded-step)"
            )
        return after_backward(self._swap_in, arguments, keywords, self._swap_back)

    @torch.no_grad()
    def _swap_in(self) -> None:
        self._collect_weights()
        self._take_state()
        self._state.begin_step()
        self._optimizer.state = self._own_state
        for key, piece in self._pieces.items():
            piece.grad = self._exchange.gradient_of(self._slots[key])
        groups = self._optimizer.param_groups
        if self._updates is not None:
            self._updates.begin(self._pieces)
        self._groups = [group["params"] for group in groups]
        for group, parameters in zip(groups, self._groups, strict=True):
            group["params"] = [one for parameter in parameters for one in self._optimizer_params(parameter)]

    def _optimizer_params(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """Return what the optimizer updates in place of a parameter; itself, where the plan does not know it."""
        key = id(parameter)
        if key not in self._slots:
            return [parameter]
        return [self._pieces[key]] if key in self._pieces else []

    def _swap_back(self) -> None:
        if self._groups is None:
            return
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self._groups = None
        if self._updates is not None:
            self._updates.end()
        self._take_state()
        for piece in self._pieces.values():
            piece.grad = None  # else a second name of the bucket's memory

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every rank all parts, of which the optimizer has updated this rank's, unless the step of its base class
        has done so.
        """
        if self._groups is None:
            return
        self._swap_back()
        self._gather_weights()
        # As any optimizer's step, so that autograd refuses a backward through what has changed.
        torch.autograd.graph.increment_version([slot.parameter for slot in self._slots.values()])

    def _gather_weights(self) -> None:
        marks = [self._clock.mark()]
        doing = "gathering the weights that ranks have updated; each has to call optimizer.step()"
        for parts in self._parts_of:
            for part in parts:
                if self._updates is None:
                    part.gather_weights(self._world, doing)
                else:
                    self._updates.gather(part, doing)
            marks.append(self._clock.mark())
        if self._updates is not None and not self._updates.finish():
            self._updates = None
        self._copy_to_params()
        self._marks.append(marks)

    def _copy_to_params(self) -> None:
        """Copy the buffers to parameters that lie elsewhere."""
        for storage in self._storages:
            storage.copy_to_params()

    @torch.no_grad()
    def _give_up(self) -> None:
        """End a step in the middle: groups have their parameters again, with this rank's part as it is."""
        began = self._groups is not None
        self._swap_back()
        for storage in self._storages if began else ():
            storage.part.round_own()
            storage.copy_to_params()

    def _collect_weights(self) -> None:
        """Copy weights to the buffers, wherever a script has put them, and what it has changed of rounded ones to their
        masters. Raises InputError for other tensors.
        """
        relocated = [storage for storage in self._storages if storage.is_relocated]
        if relocated:
            parameters = {slot.name: slot.parameter for slot in self._slots.values()}
            if (problem := find_shared_memory(parameters)) is not None:
                raise InputError(problem)
        for storage in relocated:
            if storage.collect():
                for slot, piece in _pieces_of(storage.part):
                    self._pieces[id(slot.parameter)].data = piece
        for part in self._parts:
            part.collect_changes()

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Let parameters be all ranks' master weights inside, if there are any; all ranks call this. What a script
        changes inside is lost.
        """
        self.wait_for_weights()
        if not self._rounds:
            yield
            return
        with torch.no_grad():
            self._collect_weights()
            kept = [part.whole.clone() for part in self._parts]
            self._gather_masters()
        try:
            yield
        finally:
            with torch.no_grad():
                for part, whole in zip(self._parts, kept, strict=True):
                    part.whole.copy_(whole)
                self._copy_to_params()

    @property
    def _rounds(self) -> bool:
        """True if any weights are gathered in fewer bits than they are kept in."""
        return any(part.master is not None for part in self._parts)

    def _gather_masters(self) -> None:
        for part in self._parts:
            part.gather_master(self._world)
        self._copy_to_params()

    # Master weights in checkpoints.

    def master_state(self) -> Masters:
        """Return copies of this rank's master weights, by parameter; empty where weights are not rounded."""
        return master_state(self._parts)

    @torch.no_grad()
    def load_masters(self, states: Sequence[Masters]) -> None:
        """Continue with master weights of as many ranks as were saved. Raises InputError where some are missing."""
        self.wait_for_weights()
        load_masters(self._parts, states)

    # State.

    def _take_state(self) -> None:
        """Show the state of this rank's parts as the optimizer's; what a script, or the step itself, has put in its
        place, as `load_state_dict` does, is cut to them.
        """
        given: Any = self._optimizer.state
        if given is not self._state and given is not self._own_state:
            self._own_state.clear()
            for key, value in given.items():
                self._state[key] = value
        self._optimizer.state = self._state  # type: ignore[assignment]

    def _refuse_part(self, _: torch.optim.Optimizer) -> None:
        if not self._gathering:
            raise _refusal("optimizer.state_dict()")

    def _whole_state(
        self, device: torch.device | None, others: torch.device | None = None
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the state by parameter, of all ranks' pieces; all ranks must call this. See `gathered_state`."""
        self._take_state()
        owned = {slot.index: self._pieces[key] for key, slot in self._slots.items() if key in self._pieces}
        state = self._own_state
        mine = {index: dict(state[piece]) for index, piece in owned.items() if state.get(piece)}
        found = gathered_state(self._parts, mine, self._world, device, others)
        return {self._exchange.slots[index].parameter: values for index, values in found.items()}

    @contextmanager
    def whole_optimizer_state(self) -> Iterator[None]:
        """Give the optimizer the state of all ranks inside, on the host, in the order of its parameters; all ranks must
        call this.
        """
        self._swap_back()
        whole = self._whole_state(HOST, HOST)
        self._optimizer.state, self._gathering = self._with_others(whole), True
        try:
            yield
        finally:
            self._gathering = False
            self._optimizer.state = self._state  # type: ignore[assignment]

    def _with_others(self, whole: Mapping[nn.Parameter, dict[str, Any]]) -> defaultdict[Any, Any]:
        """Return a whole state, with that of parameters which are not in the plan, in the order of the groups."""
        mine = {*self._slots, *map(id, self._pieces.values())}
        others = {one: value for one, value in self._own_state.items() if id(one) not in mine}
        listed = [one for group in self._optimizer.param_groups for one in group["params"]]
        found: dict[Any, dict[str, Any]] = {**others, **whole}
        ordered = {one: found.pop(one) for one in listed if one in found}
        return defaultdict(dict, {**ordered, **found})

    # The end, and what a report says.

    def end(self, device: torch.device | None = None) -> None:
        """Make the optimizer plain, with the whole state (none after an error), and gradients whole; all ranks call
        this. `device`: where the state by element is to be until another step cuts it; default: where it is.
        """
        self._swap_back()
        self._handle.remove()
        if vars(self._optimizer).get("step") is self._guarded:  # if a script has wrapped it since, it does nothing
            if self._step_before is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._step_before  # type: ignore[method-assign]
        del self._optimizer.__getstate__
        whole: dict[nn.Parameter, dict[str, Any]] = {}
        gradients: dict[int, Tensor] = {}
        try:
            if self._rounds:
                with torch.no_grad():
                    self._collect_weights()
                    self._gather_masters()
            whole = self._whole_state(device)
            for part in self._parts:
                views = part.views(part.gathered(self._world, part.total, "gathering the gradients that ranks share"))
                gradients.update((slot.index, views[slot.name].clone()) for slot in part.message.slots)
        finally:
            self._optimizer.state = self._with_others(whole)
            self._leave(gradients)

    @torch.no_grad()
    def _leave(self, gradients: Mapping[int, Tensor]) -> None:
        for storage in self._storages:
            storage.leave()
        for slot in self._slots.values():
            if isinstance(slot.parameter.grad, ShardedGradient):
                gradient = gradients.get(slot.index)  # a script may have converted the parameter
                slot.parameter.grad = None if gradient is None else gradient.to(slot.parameter.dtype)
            elif slot.parameter.grad is slot.view:
                slot.parameter.grad = slot.view.clone()

    def report(self, predicted_gather_us: float | None) -> StepReport | None:
        """Return what the last steps took; None where there were none."""
        if not self._marks:
            return None
        between = self._clock.between_us
        steps = [[between(start, end) for start, end in pairwise(marks)] for marks in self._marks]
        return StepReport(
            gather_us=statistics.median(map(sum, steps)),
            gathers_us=tuple(map(statistics.median, zip(*steps, strict=True))),
            predicted_gather_us=predicted_gather_us,
            state_bytes=state_bytes(self._own_state),
        )


def find_shared_memory(parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Return why the step of parameters cannot be sharded of which two lie in the same memory, or None."""
    places = sorted((p.data_ptr(), name) for name, p in parameters.items() if p.numel())
    for (start, name), (following, other) in pairwise(places):
        tensor = parameters[name]
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if following < start + (1 + steps) * tensor.element_size():
            return (
                f"found {name} and {other} in the same memory (`.data` of one is the other's), expected each parameter "
                f"in memory of its own, for ranks share the optimizer's step: make them one parameter, or plan without "
                f"sharing ({NEVER})"
            )
    return None


def _refusal(what: str) -> InputError:
    return InputError(
        f"{what}: ranks share the optimizer's step, so each has its part of the state alone; expected "
        f"session.optimizer_state_dict(), called on every rank: it gives the whole state, in the same form"
    )


def _refuse_copy() -> dict[str, Any]:
    # The optimizer's `__getstate__`: a copy would be of pieces of parameters, which nothing belongs to.
    raise _refusal("a copy of the optimizer (copy.deepcopy, pickle, torch.save)")


def _pieces_of(part: OwnPart) -> Iterator[tuple[Slot, Tensor]]:
    """Return this rank's parts of the message's weights; views of its buffer."""
    for slot in part.message.slots:
        if slot.index in part.places:
            yield slot, piece_of(part, part.weights, slot)


def _uses_of_one() -> int:
    tensor = torch.zeros(1)  # which has to be alive while its memory is asked
    return storage_uses(tensor.untyped_storage())


_ALONE = _uses_of_one()
"""Result of `storage_uses` for memory that one tensor looks at."""


class ParamStorage:
    """The memory of the parameters of one message: the buffer of all weights, or where a script has put them. Each has
    a storage of its own, also in the buffer.

    `parameter.data = …` gives a parameter other memory, and the place that it leaves may be another parameter's from
    then on (`a.data, b.data = b.data, a.data`) or a tensor of the script's (an EMA that has changed places with it). So
    the first time a step finds a parameter elsewhere, the message gets another buffer, to which and from which weights
    are copied: every parameter keeps the memory that it has, as in any other training.
    """

    @torch.no_grad()
    def __init__(self, part: OwnPart) -> None:
        """Move parameters to the buffer, but for those whose memory a script looks at; their values stay."""
        self.part, self._apart = part, False
        self._lay_out()
        for slot, view in self._views:
            _check_form(slot, view)
            view.copy_(slot.parameter)
            if storage_uses(slot.parameter.untyped_storage()) > _ALONE:
                self._apart = True
        if not self._apart:
            for slot, view in self._views:
                slot.parameter.data = view
        self._addresses = [slot.parameter.data_ptr() for slot, _ in self._views]

    def _lay_out(self) -> None:
        views = self.part.views(self.part.whole, alone=True)  # else writers of checkpoints take them for tied
        self._views = [(slot, views[slot.name]) for slot in self.part.message.slots]
        self.memory = [self.part.whole.untyped_storage(), *(view.untyped_storage() for _, view in self._views)]
        """All that weights lie in: the buffer, and of every parameter its part of it."""

    @property
    def apart(self) -> bool:
        """True if weights are copied to where parameters lie when all ranks' are there."""
        return self._apart

    @property
    def is_relocated(self) -> bool:
        """True if parameters lie elsewhere than in the buffer."""
        return self._apart or [slot.parameter.data_ptr() for slot, _ in self._views] != self._addresses

    @torch.no_grad()
    def collect(self) -> bool:
        """Copy parameters that lie elsewhere to the buffer; return whether that is another one than before."""
        for slot, view in self._views:
            _check_form(slot, view)
        before, self._apart = self._apart, True
        if not before:
            self.part.whole = torch.zeros_like(self.part.whole)
            self._lay_out()
        torch._foreach_copy_([view for _, view in self._views], [slot.parameter for slot, _ in self._views])
        return not before

    @torch.no_grad()
    def copy_to_params(self) -> None:
        if self._apart:
            torch._foreach_copy_([slot.parameter for slot, _ in self._views], [view for _, view in self._views])

    def leave(self) -> None:
        for slot, view in self._views:
            if slot.parameter.data_ptr() == view.data_ptr():
                slot.parameter.data = slot.parameter.data.clone()


def _check_form(slot: Slot, view: Tensor) -> None:
    """Raise InputError where a parameter has become another tensor than it was."""
    parameter = slot.parameter
    found = (tuple(parameter.shape), parameter.dtype, parameter.device)
    expected = (tuple(view.shape), view.dtype, view.device)
    if found != expected:
        raise InputError(
            f"{slot.name}: found {found[1]} {found[0]} on {found[2]}, expected {expected[1]} {expected[0]} on "
            f"{expected[2]}, as at attach, for ranks share the optimizer's step: convert the model before attach"
        )
