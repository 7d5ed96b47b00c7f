"""Weights that are gathered during the next forward: half of every all-reduce hides there (DeAR; Zhang et al., ICDCS
2023).

optimizer.step()    this rank's parts are updated, and all gathers launched, in the plan's order, in a process group of
                    their own: collectives are in one order on all ranks, whatever scripts do next or leave out
until one has come  its parameters are `AwaitedParameter`s: what torch does with their numbers waits for them
a module's forward  waits for the module's own parameters, on behalf of C++ that is handed them past torch

Waiting is a rank's own affair and always right, so where a read may be unseen, the step itself waits:
where a tensor besides the parameter looks at its memory, where a script has moved it, or a compiled program runs.
"""

from __future__ import annotations

import atexit
import math
import os
import statistics
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.comm.by_device import make_communicator
from runtime.comm.collectives.direct import by_message
from runtime.comm.collectives.exchange import all_gather
from runtime.comm.collectives.phases import Works
from runtime.comm.communicator import CommTiming, Communicator, Payload
from runtime.comm.world import World
from runtime.core.hooks import ModulePreHook
from runtime.monitor.clock import Clock
from runtime.monitor.recorder import KEPT_STEPS
from runtime.monitor.step_report import GatherReport, StepReport
from runtime.sharded.awaited import GatherWaiter, make_plain, wait_from_now
from runtime.sharded.exchange import ReduceScatter
from runtime.sharded.part import OwnPart
from runtime.sharded.state import state_bytes
from runtime.sharded.step import ParamStorage, ShardedStep
from runtime.torch_compat import is_in_compiled_code, runs_without_python, storage_uses

HOST_PACKED_BYTES = 2**20
"""Size below which messages are packed on hosts."""


class Gather:
    """One all-gather of weights: messages as they lie, or packed into one where they are small, or rounded."""

    def __init__(
        self, index: int, buckets: tuple[int, ...], storages: Sequence[ParamStorage], scratch: Tensor | None
    ) -> None:
        """`storages`: of the buckets' messages; `scratch`: where it `packs`, bytes (uint8), `packed_bytes` or more."""
        self.index, self.buckets, self.storages, self._scratch = index, buckets, storages, scratch
        self.parameters = [slot.parameter for part in self.parts for slot in part.message.slots]
        first, *_, last = [slot.name for part in self.parts for slot in part.message.slots] * 2
        which = f"bucket{'s' if buckets[1:] else ''} {', '.join(map(str, buckets))}"
        label = f"gathering the weights that ranks have updated ({which}, {first} … {last})"
        self.payload = Payload(index, f"{label}; each has to call optimizer.step()", [self])
        self.sent = CommTiming()
        self.awaited = False
        """Whether its parameters have to be waited for."""
        self.modules: list[nn.Module] = []
        """Modules that have some of its parameters."""
        self._uses = 0

    @property
    def parts(self) -> list[OwnPart]:
        return [storage.part for storage in self.storages]  # whose buffers may become others

    @staticmethod
    def packed_bytes(storages: Sequence[ParamStorage]) -> int:
        """Return how much memory a message needs that is packed: this rank's part, and all ranks'."""
        return sum(storage.part.sent_weights_bytes for storage in storages) * (storages[0].part.ranks + 1)

    @staticmethod
    def packs(storages: Sequence[ParamStorage]) -> bool:
        """Return whether weights are sent in another layout than they have: rounded, or several messages as one.

        On hosts a large message costs more to copy there and back than its own start-up.
        """
        parts = [storage.part for storage in storages]
        small = min(part.whole.nbytes for part in parts) < HOST_PACKED_BYTES
        on_host = parts[0].whole.device.type == "cpu"
        if any(len(set(part.sizes)) > 1 for part in parts):  # rows of which have other lengths on other ranks
            return False
        return any(part.master is not None for part in parts) or (len(parts) > 1 and (small or not on_host))

    def phases(self, group: dist.ProcessGroup) -> Works:
        if self._scratch is None:
            for part in self.parts:
                yield from part.gather_phases(group)
            return
        own, rows = self._packed(self._scratch)
        torch.cat([part.sent_weights() for part in self.parts], out=own)
        yield all_gather(rows.view(-1), own, group)
        self._unpack(rows)

    def _packed(self, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the scratch memory, shapes (bytes of a part,) and (ranks, bytes of a part)."""
        ranks = self.parts[0].ranks
        size = self.packed_bytes(self.storages) // (ranks + 1)
        return scratch[:size], scratch[size : size * (ranks + 1)].view(ranks, size)

    def _unpack(self, rows: Tensor) -> None:
        start = 0
        for part in self.parts:
            stop = start + part.sent_weights_bytes
            part.take_weights(rows[:, start:stop])
            start = stop

    # Whether its weights may be read unseen.

    def remember(self) -> None:
        """Remember the number of tensors that look at the buffers now, when only this package has any."""
        self._uses = self._count_uses()

    def _count_uses(self) -> int:
        return sum(storage_uses(one) + sys.getrefcount(one) for storage in self.storages for one in storage.memory)

    @property
    def seen_through(self) -> bool:
        """True if all reads of its parameters go through torch and the parameters themselves."""
        return (
            not any(storage.apart for storage in self.storages)
            and self._count_uses() <= self._uses
            and all(type(parameter) is nn.Parameter for parameter in self.parameters)
        )


@dataclass(eq=False)
class _Marks:
    """Marks of one step's gathers."""

    begun: Any
    done: Any
    """The optimizer's step is over."""
    sent: list[CommTiming]
    waited: list[tuple[Any, Any]] = field(default_factory=list)


class LateStep(ShardedStep):
    """A sharded step that ends before all ranks' weights have been gathered."""

    gathers_in_step = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, exchange: ReduceScatter, world: World, clock: Clock, model: nn.Module,
        groups: Sequence[tuple[int, ...]],
    ) -> None:  # fmt: skip
        """Begin to shard the step; all ranks call this. `groups`: the buckets of each gather, in the order of their
        launches.

        Raises CommunicationError where a rank does not come.
        """
        self._gather_world = World.join(world.group, world.timeout_s, world.notice_s)
        super().__init__(optimizer, exchange, world, clock)
        self._model, self._compiled = model, False
        self._lock = threading.RLock()
        self._late_marks: deque[_Marks] = deque(maxlen=KEPT_STEPS)
        storages = {id(storage.part): storage for storage in self._storages}
        listed = ([storages.get(id(one)) for bucket in group for one in exchange.parts_of[bucket]] for group in groups)
        found = [(group, [one for one in of if one]) for group, of in zip(groups, listed, strict=True)]
        members = [(group, one) for group, one in found if one]  # others are of other optimizers
        packed = [Gather.packed_bytes(one) for _, one in members if Gather.packs(one)]
        device = exchange.parts[0].whole.device
        # One for all gathers: they are sent one at a time.
        scratch = torch.empty(max(packed), dtype=torch.uint8, device=device) if packed else None
        self._gathers = [
            Gather(index, group, one, scratch if Gather.packs(one) else None)
            for index, (group, one) in enumerate(members)
        ]
        self._hook = ModulePreHook(self._before_module)
        self._needs: dict[nn.Module, list[Gather]] = {}
        """Gathers of a module's own parameters, for every module that has parameters somewhere."""
        self._find_modules()
        self._communicator: Communicator = make_communicator(
            self._gather_world, [by_message] * len(self._gathers), device, world, across_steps=True
        )
        for gather in self._gathers:
            gather.remember()
        _running[self._communicator] = device
        _steps.add(self)
        # In a process that multiprocessing has started, where nothing else is called at its end.
        self._at_exit = Finalize(
            self._communicator, _finish, args=(weakref.ref(self._communicator), device), exitpriority=0
        )

    def _find_modules(self) -> None:
        of = {id(parameter): gather for gather in self._gathers for parameter in gather.parameters}
        for module in self._model.modules():
            own = [of[id(one)] for one in module._parameters.values() if one is not None and id(one) in of]
            if own or any(id(one) in of for one in module.parameters()):
                self._needs[module] = list(dict.fromkeys(own))
            for gather in self._needs.get(module, ()):
                gather.modules.append(module)

    # One step, in the order in which it happens.

    def before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """See `ShardedStep.before_step`. Raises CommunicationError where the last weights have not come."""
        self.wait_for_weights()
        self._communicator.wait()
        return super().before_step(optimizer, arguments, keywords)

    def _gather_weights(self) -> None:
        begun = self._clock.mark()
        unseen = self._compiled or any(map(runs_without_python, self._model.modules()))
        late = [gather for gather in self._gathers if not unseen and gather.seen_through]
        for gather in self._gathers:
            gather.sent = CommTiming()
            self._communicator.launch(gather.payload, gather.sent)
        for gather in late:
            self._await_later(gather)
        for gather in self._gathers:
            if not gather.awaited:
                self._communicator.wait(gather.sent)
                for storage in gather.storages:
                    storage.copy_to_params()
        marks = _Marks(begun, self._clock.mark(), [gather.sent for gather in self._gathers])
        self._late_marks.append(marks)

    def _await_later(self, gather: Gather) -> None:
        gather.awaited = True
        me: weakref.ref[GatherWaiter] = weakref.ref(self)
        for parameter in gather.parameters:
            wait_from_now(parameter, me, gather.index)
        for module in gather.modules:
            self._hook.put_on(module)
        for module, own in self._needs.items():
            if not own:
                self._hook.put_on(module)

    def before_forward(self) -> None:
        """Wait for everything if a compiled program calls the model; from now on within the optimizer's step."""
        if is_in_compiled_code():
            self._compiled = True
            self.wait_for_weights()

    def _before_module(self, module: nn.Module, _arguments: Any) -> None:
        if not torch.is_grad_enabled():  # no gather hides behind an evaluation, which may go another way without hooks
            self.wait_for_weights()
        for gather in self._needs.get(module, ()):
            self.wait_for(gather.index)

    def wait_for_weights(self) -> None:
        """Block until all ranks' weights are here. Raises CommunicationError."""
        for gather in self._gathers:
            self.wait_for(gather.index)

    def wait_for(self, gather: int) -> None:
        """See `runtime.sharded.awaited.GatherWaiter`. Any thread may call this."""
        with self._lock:
            here = self._gathers[gather]
            if not here.awaited:
                return
            before = self._clock.mark()
            self._communicator.wait(here.sent)
            self._late_marks[-1].waited.append((before, self._clock.mark()))
            self._come(here)

    def _come(self, gather: Gather) -> None:
        """Make a gather's parameters plain."""
        gather.awaited = False
        for parameter in gather.parameters:
            make_plain(parameter)
        over = not any(one.awaited for one in self._gathers)
        for module in self._needs if over else gather.modules:
            if over or not any(one.awaited for one in self._needs[module]):
                self._hook.take_off(module)

    # The end, and what a report says.

    def end(self, device: torch.device | None = None) -> None:
        """See `ShardedStep.end`. Weights that have not come become NaN, so that no script continues with old ones."""
        self._at_exit.cancel()
        try:
            self.wait_for_weights()
        finally:
            self._lose_late_ones()
            try:
                super().end(device)
            finally:
                self._communicator.close()
                self._gather_world.leave()

    @torch.no_grad()
    def _lose_late_ones(self) -> None:
        for gather in self._gathers:
            if gather.awaited:
                self._come(gather)
                for part in gather.parts:
                    part.whole.fill_(math.nan)

    def report(self, predicted_gather_us: float | None) -> StepReport | None:
        """Return the times of the last steps; see `ShardedStep.report`."""
        between = self._clock.between_us
        steps = [marks for marks in self._late_marks if all(one.end is not None for one in marks.sent)]
        if not steps:
            return None
        times = [[(between(m.done, one.start), between(m.done, one.end)) for one in m.sent] for m in steps]
        spans = [tuple(map(statistics.median, zip(*of, strict=True))) for of in zip(*times, strict=True)]
        return StepReport(
            gather_us=statistics.median(between(marks.begun, marks.done) for marks in steps),
            gathers_us=(),
            late=tuple(
                GatherReport(buckets=gather.buckets, start_us=start_us, end_us=end_us)
                for gather, (start_us, end_us) in zip(self._gathers, spans, strict=True)
            ),
            waited_us=statistics.median(sum(between(*wait) for wait in marks.waited) for marks in steps),
            predicted_gather_us=predicted_gather_us,
            state_bytes=state_bytes(self._own_state),
        )


_running: weakref.WeakKeyDictionary[Communicator, torch.device] = weakref.WeakKeyDictionary()
"""Communicators that gather, also of models that are gone."""


_steps: weakref.WeakSet[LateStep] = weakref.WeakSet()


def _before_fork() -> None:
    """Have all weights here before the process is copied: no gather ends in the copy, a DataLoader's worker, say."""
    for step in list(_steps):
        step.wait_for_weights()


os.register_at_fork(before=_before_fork)


def _finish(communicator: weakref.ref[Communicator], device: torch.device) -> None:
    """Complete, at the end of a script, gathers that other ranks may wait for, unless an exception ends it."""
    here, error = communicator(), sys.exc_info()[1] or getattr(sys, "last_exc", None)
    if here is None or not (error is None or isinstance(error, SystemExit)):
        return
    with suppress(Exception):  # whoever waits for this rank says so
        here.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@atexit.register  # later than the communicators' own, and so called before it: that starts nothing more
def _finish_all() -> None:
    for communicator, device in list(_running.items()):
        _finish(weakref.ref(communicator), device)
