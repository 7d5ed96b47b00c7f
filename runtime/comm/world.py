"""The ranks that share a plan: a private process group with a deadline, and agreement before the first collective."""

from __future__ import annotations

import math
import os
import pickle
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.topology import NodeInfo, Topology
from runtime.comm.waits import RankProcess, wait_watched, work_is_over
from runtime.errors import CommunicationError, EnvironmentFailure, InputError, PlanMismatch, PlannerError
from runtime.torch_compat import (
    all_gather_single,
    backend_of,
    break_off,
    is_of_backend,
    object_device,
    timeout_of,
    wait_for,
)

MIN_TIMEOUT_S = 30.0
SHORTEST_TIMEOUT_S, LONGEST_TIMEOUT_S = 1.0, 7 * 24 * 3600.0
"""Range of deadlines in seconds: less fails on any busy machine, more is as good as none."""
_CHUNK_BYTES = 64 * 1024 * 1024
T = TypeVar("T")


def check_timeout_s(timeout_s: float, name: str = "timeout_s") -> float:
    """Return the deadline. Raises InputError, which calls it `name`, where it is none."""
    if math.isfinite(timeout_s) and SHORTEST_TIMEOUT_S <= timeout_s <= LONGEST_TIMEOUT_S:
        return timeout_s
    raise InputError(
        f"{name}: found {timeout_s:g}, expected a deadline of {SHORTEST_TIMEOUT_S:g} to {LONGEST_TIMEOUT_S:.0f} seconds"
    )


def check_joined() -> None:
    """Raise InputError where a launcher started several ranks, and this one has no process group: it would train alone,
    as each of the others, without a word.
    """
    found = os.environ.get("WORLD_SIZE", "").strip()
    if not found.isdecimal() or int(found) < 2 or (dist.is_available() and dist.is_initialized()):
        return
    raise InputError(
        f"found no process group, but WORLD_SIZE is {found} in the environment (torchrun sets it): each of the {found} "
        f"ranks would train alone; expected a group of them: call torch.distributed.init_process_group() first, with "
        f'"nccl" or "gloo"; for a process that is meant to be alone unset WORLD_SIZE'
    )


def check_still_alone() -> None:
    """Raise InputError where a process that had no process group at attach has one of several ranks now."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise InputError(
            f"the model was attached before torch.distributed.init_process_group, so that this rank would train alone, "
            f"but {dist.get_world_size()} ranks have a process group now; expected attach behind it: call "
            f"session.detach() and attach again, or attach with process_group= of one rank if that is meant"
        )


def bounded_timeout_s(seconds: float) -> float:
    """Return a default deadline: what was computed, or the least or longest one that may be given."""
    return min(max(seconds, MIN_TIMEOUT_S), LONGEST_TIMEOUT_S)


def deadlines(
    timeout_s: float | None, process_group: dist.ProcessGroup | None = None, expected_s: float = 0.0
) -> tuple[float, float | None]:
    """Return the deadline of every wait of ranks, and the seconds after which a wait is long (None: no wait is).

    Args:
        timeout_s: the deadline in seconds, which is exact; None: that of the script's group, as for DDP, so that a rank
            may be busy for long outside of a step.
        process_group: the script's group; default: all ranks.
        expected_s: expected seconds of a wait: without a `timeout_s` a wait is long from that, and 30 s, on.

    Raises:
        InputError: the deadline is out of range.
    """
    if timeout_s is not None:
        return check_timeout_s(timeout_s), None
    if not dist.is_available() or not dist.is_initialized():
        return MIN_TIMEOUT_S, None
    group = process_group or dist.group.WORLD
    assert group is not None
    limit_s = min(max(timeout_of(group).total_seconds(), SHORTEST_TIMEOUT_S), LONGEST_TIMEOUT_S)
    return limit_s, bounded_timeout_s(expected_s)


_dropped: deque[dist.ProcessGroup] = deque()
"""Groups of worlds that were garbage-collected."""
_private: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The groups that worlds have made, as long as they are in memory."""
_of_parent: list[dist.ProcessGroup] = []


# A forked process (a DataLoader worker) keeps all groups: one that its garbage collector found would wait, when it is
# taken down, for threads that a fork does not copy.
os.register_at_fork(after_in_child=lambda: _of_parent.extend(_private))


@dataclass
class World:
    """This rank's view of the ranks that work together. One rank needs no process group."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    backend: str = "none"
    timeout_s: float = MIN_TIMEOUT_S
    notice_s: float | None = None
    """Seconds after which a wait is long, so that this rank looks at others and warns; None: no wait is."""
    noticed: bool = False
    """Whether a long wait has been said."""
    neighbours: tuple[RankProcess, ...] = ()
    """The processes of the other ranks that are on this machine; known where `notice_s` is."""
    last: str = ""
    """The last exchange that this rank completed: says in an error how far the ranks had got."""
    topology: Topology | str | None = None
    """Ranks of each node, or the reason why they are not known; None: ranks have not agreed on them."""
    before_group: bool = False
    """Whether this process is alone, for torch.distributed had no process group yet."""
    _owned: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self._owned and self.group is not None:
            self._dropped = weakref.finalize(self, _dropped.append, self.group)
            self._dropped.atexit = False

    @classmethod
    def join(
        cls, process_group: dist.ProcessGroup | None = None, timeout_s: float = MIN_TIMEOUT_S,
        notice_s: float | None = None, *, alone: bool = False,
    ) -> World:  # fmt: skip
        """Make a private group over the ranks of `process_group` (default: all), with a deadline on every wait.

        Private, so that nothing the user sends can come between the buckets. All its ranks must call this.

        Args:
            process_group: the ranks; default: all of torch.distributed, or this process alone.
            timeout_s: deadline of every wait, in seconds; see `deadlines`.
            notice_s: seconds after which a wait is long; None: no wait is.
            alone: whether a process may do without the others if a launcher started several and they have no group.

        Returns:
            This rank's view of the group.

        Raises:
            InputError: the deadline is none, or a launcher started several ranks and they have no process group.
            CommunicationError: not all ranks came within the deadline.
        """
        check_timeout_s(timeout_s)
        if not alone:
            check_joined()
        parent = cls.over(process_group, timeout_s, notice_s)
        if parent.group is None:
            return parent
        parent.meet()  # whichever deadlines ranks were given: else some would wait here, others in `new_group`
        whole = parent.ranks == dist.get_world_size()
        try:
            group = dist.new_group(
                ranks=dist.get_process_group_ranks(parent.group),
                timeout=timedelta(seconds=timeout_s),
                backend=parent.backend,
                use_local_synchronization=not whole,  # only members of a subgroup are here
            )
        except RuntimeError as error:
            if not is_of_backend(error):
                raise
            raise CommunicationError(
                f"rank {parent.rank}: not all {parent.ranks} ranks came to make a process group, {parent.others} did "
                f"not within {timeout_s:g} s; every rank has to call this at the same place ({first_line(error)})"
            ) from error
        # torch names a locally made group after its ranks and the number of groups: given back, its name, and with it
        # stale addresses, would come again. Such a group stays until the process ends.
        _private.add(group)
        return replace(parent, rank=dist.get_rank(group), group=group, _owned=whole)

    @classmethod
    def over(
        cls, process_group: dist.ProcessGroup | None = None, timeout_s: float = MIN_TIMEOUT_S,
        notice_s: float | None = None,
    ) -> World:  # fmt: skip
        """Take the group of `process_group` (default: all) itself: what is sent on it has to be in order."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(timeout_s=timeout_s, before_group=True)
        if dist.get_world_size(process_group) == 1:
            return cls(timeout_s=timeout_s)
        group = process_group or dist.group.WORLD
        return cls(
            rank=dist.get_rank(group),
            ranks=dist.get_world_size(group),
            group=group,
            backend=dist.get_backend(group),
            timeout_s=timeout_s,
            notice_s=notice_s,
        )

    def meet(self) -> World:
        """Wait for the other ranks, and learn which of their processes run on this machine; all ranks must call this.

        On the script's group a rank that died is detected at once, and a straggler is waited for.
        """
        here = RankProcess.here(self.rank)
        found = self.gather(here, "making a process group, which all ranks do at the same place")
        self.neighbours = tuple(one for one in found if one and here and one.is_neighbour_of(here))
        return self

    def leave(self) -> None:
        """Give the private group back."""
        if self._owned and self.group is not None:
            self._dropped.detach()
            if dist.is_initialized():
                dist.destroy_process_group(self.group)
        self._owned = False

    def take_down_dropped(self) -> None:
        """Take down the groups of worlds that were dropped without `leave`, once no rank has them any more. Every rank
        calls this at the same place, with all of torch.distributed's ranks: they collect garbage when each of them
        likes, on any thread, and torch names some groups by how many there are.
        """
        if not self._owned:
            return
        here = {}
        for group in [_dropped.popleft() for _ in range(len(_dropped))]:
            with suppress(KeyError, ValueError):  # the script has ended torch.distributed meanwhile
                here[str(group.group_name)] = (dist.get_process_group_ranks(group), group)
        rank = dist.get_rank()
        mine = (rank, {name: ranks for name, (ranks, _) in here.items()})
        everyone = dict(self.gather(mine, "telling which sessions are gone"))
        for name, (ranks, group) in here.items():
            if all(name in everyone[one] for one in ranks):
                dist.destroy_process_group(group)
            else:
                _dropped.append(group)

    def split(self, parts: Sequence[Sequence[int]], backend: str | None = None) -> World:
        """Make a group of this rank's part of ranks that are split into disjoint parts; all ranks must call this.
        `backend`: of the group, by default this one's.
        """
        if self.group is None:
            return World(timeout_s=self.timeout_s)
        known = dist.get_process_group_ranks(self.group)
        whole = len(known) == dist.get_world_size()
        mine = next(part for part in parts if self.rank in part)
        for part in parts:
            if not whole and part is not mine:
                continue
            with self.error_context("making a group of some of the ranks"):
                made = dist.new_group(
                    ranks=[known[rank] for rank in part],
                    timeout=timedelta(seconds=self.timeout_s),
                    backend=backend or self.backend,
                    use_local_synchronization=not whole,
                )
            if part is mine:
                group = made
                _private.add(made)
        return World(
            rank=mine.index(self.rank),
            ranks=len(mine),
            group=group if len(mine) > 1 else None,
            backend=backend or self.backend,
            timeout_s=self.timeout_s,
            notice_s=self.notice_s,
            neighbours=tuple(replace(one, rank=mine.index(one.rank)) for one in self.neighbours if one.rank in mine),
            _owned=whole and len(mine) > 1,
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the group of these ranks, of which there are several."""
        assert self.group is not None
        return self.group

    @property
    def others(self) -> str:
        """Name of the ranks that may have failed when a collective does: a number if there is only one."""
        return f"rank {1 - self.rank}" if self.ranks == 2 else "another rank"

    @contextmanager
    def error_context(self, what: str) -> Iterator[None]:
        """Turn a backend's error inside into a CommunicationError that names this rank and `what`, the exchange. Other
        errors of operations on tensors get a note.
        """
        try:
            yield
        except PlannerError:
            raise
        except RuntimeError as error:
            if not is_of_backend(error):
                note(error, self, what)
                raise
            after = f", after {self.last!r}" if self.last else ""
            raise CommunicationError(
                f"rank {self.rank}: {what}{after}: {self.others} died or did not answer within {self.timeout_s:g} s "
                f"({first_line(error)})"
            ) from error

    def wait(self, work: dist.Work, what: str, device: torch.device | None = None) -> None:
        """Return when the backend has done what it carries: at a deadline on the host (default), else where the device
        has queued what comes next. Raises what the backend raised, or CommunicationError.
        """
        if device is None or device.type == "cpu":
            wait_watched(partial(work_is_over, work), self, what)
        else:
            wait_for(work)

    def break_off(self, rank: int) -> None:
        """Let all fail that worlds have under way with a lost rank: no thread of the backend waits for it then."""
        lost = dist.get_process_group_ranks(self.process_group)[rank]
        for group in list(_private):
            with suppress(KeyError, ValueError, RuntimeError):  # ended meanwhile, or of devices alone
                ranks = dist.get_process_group_ranks(group)
                if lost in ranks and backend_of(group, torch.device("cpu")) == "gloo":
                    break_off(group, ranks.index(lost))

    def warn(self, text: str, category: type[Warning]) -> None:
        """Warn on rank 0 of what every rank has found alike."""
        if self.rank == 0:
            warnings.warn(text, category, stacklevel=3)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gather every rank's picklable value; all ranks must call this.

        Args:
            value: of this rank.
            what: names the exchange in errors.

        Returns:
            The values, in order of rank.

        Raises:
            CommunicationError: a rank died or missed the deadline.
        """
        if self.group is None:
            return [value]
        device = object_device(self.group)
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.gather_parts(torch.tensor([own.numel()], device=device), what).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: own.numel()] = own
        rows = self.gather_parts(padded.to(device), what).cpu().view(self.ranks, -1)
        self.last = what
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def gather_parts(self, part: Tensor, what: str, out: Tensor | None = None) -> Tensor:
        """Gather every rank's part, one after the other.

        Args:
            part: 1-D, of equal length and dtype on all ranks.
            what: names the exchange in errors.
            out: memory for the result, of which `part` may be this rank's; default: new memory.

        Returns:
            All parts, in order of rank. Shape (ranks · elements of a part,).

        Raises:
            CommunicationError: a rank died or missed the deadline.
        """
        whole = part.new_empty(self.ranks * part.numel()) if out is None else out
        with self.error_context(what):
            # As bytes: backends know few dtypes.
            given = part.contiguous().view(torch.uint8)
            work = all_gather_single(whole.view(torch.uint8), given, group=self.group, async_op=True)
            self.wait(work, what, part.device)
        return whole

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with rank 0's, whatever their layout; in messages of up to 64 MiB per dtype. Those on
        the device meta have no values.
        """
        if self.group is None:
            return
        for chunk in _chunks(tensor for tensor in tensors if not tensor.is_meta):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
            what = "the broadcast of rank 0's parameters and buffers"
            with self.error_context(what):
                # As bytes: backends know few dtypes.
                work = dist.broadcast(flat.view(torch.uint8), group=self.group, group_src=0, async_op=True)
                self.wait(work, what, flat.device)
            if self.rank != 0:
                parts = flat.split([tensor.numel() for tensor in chunk])
                with torch.no_grad():
                    for tensor, part in zip(chunk, parts, strict=True):
                        tensor.copy_(part.view(tensor.shape))


@dataclass(frozen=True)
class Grid:
    """The groups of hierarchical collectives: the ranks of a node, and those of one local rank on all nodes."""

    world: World
    topology: Topology
    inside: World
    between: World
    """The ranks with this one's local rank."""

    @classmethod
    def make(cls, world: World, topology: Topology) -> Grid:
        """Make the groups; all ranks call this at the same place."""
        return cls(world, topology, world.split(topology.nodes), world.split(topology.cross_node_groups))

    def leave(self) -> None:
        self.inside.leave()
        self.between.leave()


def _chunks(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        chunks = by_kind.setdefault(kind, [[]])
        size_bytes = tensor.numel() * tensor.element_size()
        if chunks[-1] and filled[kind] + size_bytes > _CHUNK_BYTES:
            chunks.append([])
            filled[kind] = 0
        chunks[-1].append(tensor)
        filled[kind] = filled.get(kind, 0) + size_bytes
    return [chunk for chunks in by_kind.values() for chunk in chunks]


def note(error: Exception, world: World, label: str) -> None:
    """Add to an error that came up in this process where it did, and that other ranks are not its cause."""
    error.add_note(
        f"rank {world.rank}: {label}: this error came up in this process itself, not by another rank or the network"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@dataclass(frozen=True)
class RankInfo:
    """Facts that have to be equal on all ranks before the first collective, and the problem of this one."""

    version: str
    torch: str
    plan_digest: str
    model: str = ""
    parameters: tuple[str, ...] = ()
    """Names in the order of the flat buffers."""
    device: str = ""
    problem: str | None = None
    step: int = 0
    """Number of steps that this rank has done with the session."""
    at_step: int = 0
    local_async: str = "null"
    """Local updaters of the plan, as text."""
    compile: str | None = None
    """Arguments of `torch.compile` that the model is compiled with, as text."""
    where: NodeInfo | None = None
    followed: str = ""
    """Fingerprint of the parameters and buffers that follow rank 0 at attach."""
    holders: tuple[str, ...] = ()
    """Optimizer and group of each parameter, where ranks share the optimizer's work."""


def agree(world: World, mine: RankInfo) -> list[RankInfo]:
    """Compare what has to be equal on all ranks, and return all of it; every rank comes to the same verdict.

    Raises:
        PlanMismatch: a rank has a problem of its own, or ranks differ in plan, model, version or device.
        CommunicationError: a rank died or missed the deadline.
    """
    everyone: list[RankInfo] = world.gather(mine, "agreeing on the plan")
    problems = [f"rank {rank}: {one.problem}" for rank, one in enumerate(everyone) if one.problem]
    if problems:
        same = {one.problem for one in everyone}
        raise PlanMismatch(everyone[0].problem if len(same) == 1 and everyone[0].problem else "\n".join(problems))
    for attribute, what, hint in (
        ("version", "versions of this package", "install the same one everywhere"),
        ("torch", "versions of torch", "install the same one everywhere"),
        ("local_async", "local_async in their plans", "give every rank the same plan.json"),
        ("plan_digest", "plans", "give every rank the same plan.json"),
        ("model", "models (fingerprints of the trainable parameters)", "build the same model on every rank"),
        (
            "followed",
            "parameters and buffers (names, shapes, dtypes) that follow rank 0, frozen ones too",
            "build the same model on every rank, or have DDP ignore those that are a rank's own "
            "(DistributedDataParallel._set_params_and_buffers_to_ignore_for_model)",
        ),
        ("parameters", "orders of parameters", "give every rank the same plan.json"),
        ("device", "kinds of device", "use one kind of device"),
        ("compile", "arguments of compile=", "pass the same on every rank"),
        ("step", "numbers of steps done", "call switch between the same two steps on every rank"),
        ("at_step", "steps to change plans at", "give every rank the same at_step"),
    ):
        values = [getattr(one, attribute) for one in everyone]
        if len(set(values)) > 1:
            shown = [str(value) if len(str(value)) <= 80 else str(value)[:80] + "…" for value in values]
            listed = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(shown[:8]))
            more = f", and {len(shown) - 8} more" if len(shown) > 8 else ""
            raise PlanMismatch(f"ranks hold different {what}: {listed}{more}; {hint}")
    for rank, one in enumerate(everyone):
        pairs = zip(everyone[0].holders, one.holders, strict=False)
        if odd := next((pair for pair in pairs if pair[0] != pair[1]), None):
            raise PlanMismatch(
                f"ranks hold different optimizers: rank 0: {odd[0]}, rank {rank}: {odd[1]}; expected the same, for "
                f"ranks share their work: give every rank the same groups"
            )
    return everyone


def agreed(world: World, what: str, make: Callable[[], T], who: str = "the job") -> T:
    """Return what `make` makes on this rank, once all ranks have made theirs; every rank calls it. `what` names the
    exchange in errors, `who` what has raised where that is none of our errors.

    Raises InputError, on all ranks alike, where it raised on some; EnvironmentFailure where every rank that raised said
    so.
    """
    value, problem = None, None
    cause: Exception | None = None
    try:
        value = make()
    except PlannerError as error:
        problem, cause = str(error), error
    except Exception as error:
        problem, cause = f"{who} raised {type(error).__name__}: {error}", error
    everyone: list[tuple[str | None, bool]] = world.gather((problem, isinstance(cause, EnvironmentFailure)), what)
    raised = [(rank, text) for rank, (text, _) in enumerate(everyone) if text is not None]
    if raised:
        same = len(raised) == world.ranks and len({text for _, text in raised}) == 1
        text = raised[0][1] if same else "\n".join(f"rank {rank}: {text}" for rank, text in raised)
        raise (EnvironmentFailure if all(everyone[rank][1] for rank, _ in raised) else InputError)(text) from cause
    assert value is not None
    return value
