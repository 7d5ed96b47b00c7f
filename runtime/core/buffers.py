"""Buffers (BatchNorm statistics) follow rank 0, by DDP's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.comm.communicator import raise_failure
from runtime.comm.world import World
from runtime.core.members import exchanged_buffers, named_buffers
from runtime.core.watch import Tables
from runtime.errors import InputError
from runtime.torch_compat import ModuleHook, hook_before_forward

ALIGNMENT_BYTES = 16
"""Bytes of the largest element there is, so that any dtype may begin at a multiple of it."""

RESHAPED, CHANGED = 0, 1
"""Bytes at the head of a message in which rank 0 reports: its buffers have another form than ranks agreed on, and no
values follow; their values have changed since all ranks had the same.
"""

Form = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of each buffer."""


class BufferSync:
    """Overwrites all buffers with rank 0's, in one message, wherever DDP would before the next forward.

    DDP does so before each forward that comes after one with gradients and outside of `no_sync`. Here they are aligned
    as soon as all ranks are known to be there: behind the exchange of gradients. So whoever evaluates next, alone too,
    has the buffers that an evaluation with DDP begins with. What a script changes afterwards is still rank 0's in the
    next training forward: on hosts rank 0 says before it whether its buffers have changed, in a few bytes; a device
    would have to be waited for to read them, and is sent all buffers.

    Forwards without gradients, or with no part of the model in training mode, exchange nothing and change nothing of
    this, so that one rank may evaluate alone. As with DDP a model that has no buffers at first has none that follow.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        device: torch.device,
        synchronizing: Callable[[], bool],
        apart: Callable[[], bool],
        followed: Callable[[], None],
    ) -> None:
        """`synchronizing` is asked in a forward: whether it is followed by an exchange; `apart`: whether ranks' buffers
        are their own now. `followed` is called in a forward in which they have been exchanged. Messages are on
        `device`.
        """
        self._world, self._model, self._device = world, model, device
        self._synchronizing, self._apart, self._followed = synchronizing, apart, followed
        self._on_host = device.type == "cpu"
        self._follows = world.group is not None and bool(exchanged_buffers(model))
        self._due = True
        """Whether DDP would align buffers before the next forward."""
        self._aligned = False
        """Whether they have been aligned since the last forward that may have changed them."""
        self._asks = self._on_host
        """Whether the next training forward first asks rank 0 if anything has changed: it had not, the last time."""
        self._take()
        self._agreed: Form | None = None
        self._reshaped = False
        """Whether they have another form than ranks agreed on."""
        self._versions: list[int] | None = None
        """Versions of the buffers when they were aligned; None: they are others now."""

    def install(self) -> list[Any]:
        """Hook the model's forward; returns the handles. Nothing to do without buffers or with one rank."""
        if not self._follows:
            return []
        return [hook_before_forward(self._model, ModuleHook(self._before_forward))]

    def align(self, source: int = 0) -> bool:
        """Align buffers with those of rank `source` behind an exchange of gradients, in which all ranks take part.
        Return whether needed.
        """
        if not (self._follows and self._due) or self._apart():
            return False
        self._exchange(source=source)
        self._aligned = True
        if self._on_host:
            self._versions = self._versions_now()
        return True

    def _before_forward(self, _module: nn.Module, _arguments: Any) -> None:
        if not (torch.is_grad_enabled() and any(module.training for module in self._modules)):
            return
        if self._due and not self._apart():
            if self._aligned and self._on_host:
                self._follow_changes()
            else:
                self._exchange()
            self._followed()
        self._due, self._aligned = self._synchronizing(), False

    @torch.no_grad()
    def _follow_changes(self) -> None:
        """Take rank 0's buffers again if those have changed since they were aligned, and else put back one's own."""
        self._collect()
        changed = self._versions is None or self._versions_now() != self._versions
        if self._asks:
            if self._world.rank == 0:
                self._flat[CHANGED] = changed
            self._broadcast(self._flat[:ALIGNMENT_BYTES], 0)
            if not self._flat[CHANGED]:
                if changed:
                    self._unpack(0)
                return
        self._exchange(changed)
        self._asks = not self._flat[CHANGED]

    @torch.no_grad()
    def _exchange(self, changed: bool = False, source: int = 0) -> None:
        self._collect()
        if self._agreed is None or (self._reshaped and not self._on_host):
            self._agree()
        if self._world.rank == source:
            if self._on_host:
                self._flat[RESHAPED], self._flat[CHANGED] = self._reshaped, changed
            if not self._reshaped:
                torch._foreach_copy_(self._views, self._buffers)
        self._broadcast(self._flat, source)
        if self._on_host and self._flat[RESHAPED]:
            self._agreed = None
            self._exchange(changed, source)
        else:
            self._unpack(source)

    def _broadcast(self, message: Tensor, source: int) -> None:
        what = "the broadcast of buffers"
        try:
            work = dist.broadcast(message, group=self._world.group, group_src=source, async_op=True)
            self._world.wait(work, what, message.device)
        except RuntimeError as error:
            raise_failure(self._world, what, error)

    def _unpack(self, source: int) -> None:
        """Overwrite this rank's buffers with those that came last. Raises InputError for other ones."""
        if self._world.rank == source:
            return
        if self._reshaped:
            assert self._agreed is not None
            _raise_difference(self._world.rank, _form(self._named), self._agreed)
        # By `.data`, as no change that autograd counts: a graph of an earlier forward may have saved the buffers.
        torch._foreach_copy_([buffer.data for buffer in self._buffers], self._views)

    # Which buffers there are.

    def _take(self) -> None:
        self._modules = list(self._model.modules())
        self._tables = Tables(self._modules, "_buffers")
        self._named = [one for one in named_buffers(self._model) if not one[1].is_meta]
        self._buffers = [buffer for _, buffer in self._named]
        self._shapes = [buffer.shape for buffer in self._buffers]

    def _collect(self) -> None:
        """Take the buffers that the model has now."""
        if not self._tables.unchanged() or [buffer.shape for buffer in self._buffers] != self._shapes:
            self._take()
            self._versions, self._reshaped = None, _form(self._named) != self._agreed

    def _versions_now(self) -> list[int]:
        return [buffer._version for buffer in self._buffers]

    def _agree(self) -> None:
        """Compare the form of all ranks' buffers, and lay out the message. Raises InputError on all ranks alike."""
        mine = _form(self._named)
        everyone: list[Form] = self._world.gather(mine, "comparing buffers")
        for rank, form in enumerate(everyone):
            if form != everyone[0]:
                _raise_difference(rank, form, everyone[0])
        self._agreed, self._reshaped = mine, False
        self._flat, self._views = _pack(self._buffers, self._device)


def _form(named: Sequence[tuple[str, Tensor]]) -> Form:
    return [(name, tuple(buffer.shape), str(buffer.dtype).removeprefix("torch.")) for name, buffer in named]


def _raise_difference(rank: int, form: Form, first: Form) -> NoReturn:
    here, there = {one[0]: one[1:] for one in form}, {one[0]: one[1:] for one in first}
    name = next((name for name in [*there, *here] if here.get(name) != there.get(name)), None)
    told = (
        "other orders of them"
        if name is None
        else " and ".join(
            f"{f'no {name}' if found is None else f'{name} of {found[1]} {found[0]}'} on rank {of}"
            for of, found in ((0, there.get(name)), (rank, here.get(name)))
        )
    )
    raise InputError(
        f"buffers follow those of rank 0, but ranks have different ones: found {told}; expected the same buffers, of "
        f"the same shapes and dtypes, on every rank at this place: change them alike, or leave each rank its own by "
        f"attach(…, broadcast_buffers=False)"
    )


def _pack(buffers: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Make one run of bytes that holds all buffers, whatever their dtypes, behind what rank 0 says of them; and a view
    of it for each.
    """
    sizes = [-(-buffer.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for buffer in buffers]
    flat = torch.zeros(ALIGNMENT_BYTES + sum(sizes), dtype=torch.uint8, device=device)
    parts = zip(buffers, flat[ALIGNMENT_BYTES:].split(sizes), strict=True)
    return flat, [part[: buffer.nbytes].view(buffer.dtype).view(buffer.shape) for buffer, part in parts]
