"""Simulator of FSDP2's step: starts and ends of messages and computations, on accelerators or on hosts.

Computation, and each communicator, work through what they were given in order. On an accelerator the host runs ahead:
a message waits for streams alone, as FSDP2 makes them wait. On a host that waits for messages itself they begin where
its program begins them; stock FSDP2 there does nothing beside them (`BLOCKING`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from planner.fsdp2.program import (
    BACKWARD,
    FORWARD,
    GATHER,
    RECYCLE,
    REDUCE,
    SCATTER,
    WAIT,
    Program,
    Shape,
    host_program,
)
from planner.model.engine import Op, Ops, Run, run, run_alone
from runtime.plan import FullyShardPlan

Executor = Literal["accelerator", "hosts", "blocking"]
COMPUTE, NETWORK, BETWEEN, INSIDE, HOST = range(5)
"""Lanes: computation; the communicator of a copy's ranks; between copies; among ranks that share kept parameters; what
a host does itself before it begins a message."""
LANES = ("compute", "network", "between copies", "inside nodes", "host")
Cost = Callable[[float], float]
"""Bytes → µs."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of messages over a group's whole bytes, and factors by which they and computation slow each other down."""

    gather_us: Cost
    scatter_us: Cost
    reduce_us: Cost | None = None
    """Cost of the all-reduce between copies, over a rank's part (HSDP)."""
    gather_inside_us: Cost | None = None
    """Cost of a gather among the ranks of a node."""
    compute_factor: float = 1.0
    """Slow-down of computation during a message."""
    network_factor: float = 1.0
    """Slow-down of a message during computation."""
    update_us: float = 0.0
    """Time of the update of a rank's own part of the weights."""
    host_us: float = 0.0
    """Time of a host that waits for messages itself before each: hooks, and copies into and out of buffers."""

    @property
    def contended(self) -> bool:
        return (self.compute_factor, self.network_factor) != (1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A message or a computation, when it went on."""

    kind: str
    lane: int
    group: int
    leaf: int
    start_us: float
    end_us: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, with the optimizer's update."""

    iteration_us: float
    compute_us: float
    """Time of forward and backward alone."""
    network_us: float
    """Time of messages alone, on the busiest communicator."""
    peak_bytes: int
    bars: tuple[Bar, ...]
    groups: tuple[str, ...]
    memory: tuple[tuple[float, int], ...] = ()
    """(time, bytes from then on), in the order of the host's program."""
    update_us: float = 0.0

    @property
    def exposed_us(self) -> float:
        """Time that messages add to computation and update."""
        return max(0.0, self.iteration_us - self.compute_us - self.update_us)


class _Ops:
    """Ops, and what each of them is, by number."""

    def __init__(self) -> None:
        self.ops = Ops()
        self.what: list[tuple[str, int, int, int, int]] = []
        """(kind, lane, group, leaf, bytes)."""

    def add(
        self, lane: int, kind: str, time_us: float, after: int, group: int = -1, leaf: int = -1,
        size_bytes: int = 0, factors: tuple[float, float] = (1.0, 1.0),
    ) -> int:  # fmt: skip
        """Append an op that waits for the op `after`, and return its number."""
        self.what.append((kind, lane, group, leaf, size_bytes))
        return self.ops.add(Op(LANES[lane], time_us, () if after == NOTHING else (after,), kind, factors=factors))


NOTHING = -1


def lay_out(shape: Shape, program: Program, costs: Costs, executor: Executor) -> _Ops:
    """Return the ops of a step."""
    ops = _Ops()
    factors = (costs.compute_factor, costs.network_factor)
    gate = copied = last = NOTHING
    """The op that gathers wait for; the last copy-out in forward; the last op of computation."""
    gathered: dict[int, int] = {}
    scattered: dict[int, int] = {}
    left = len(shape.leaves)
    """Forwards that are still to come: then the buffer that forward has kept is free."""

    def begun() -> int:
        """Return the op after which the host begins a message."""
        return ops.add(HOST, WAIT, costs.host_us, last) if costs.host_us else last

    whole = max((action.of for action in program.actions), default=0)
    for kind, group, leaf, size_bytes, among in program.actions:
        if kind == GATHER:
            inside = bool(among) and among < whole
            lane, cost = (INSIDE, costs.gather_inside_us) if inside else (NETWORK, costs.gather_us)
            assert cost is not None
            after = gate if executor == "accelerator" else begun()
            gathered[group] = ops.add(lane, kind, cost(size_bytes), after, group, -1, size_bytes, factors)
        elif kind == WAIT:
            before, last = copied, ops.add(COMPUTE, kind, 0.0, gathered.pop(group), group)
            gate, copied = (before, last) if left else (last, last)
        elif kind == FORWARD:
            last = ops.add(COMPUTE, kind, shape.leaves[leaf].forward_us, NOTHING, -1, leaf)
            left -= 1
            gate = gate if left else copied
        elif kind == BACKWARD:
            last = ops.add(COMPUTE, kind, shape.leaves[leaf].backward_us, NOTHING, -1, leaf)
        elif kind == RECYCLE:
            if executor != "blocking":
                last = ops.add(COMPUTE, kind, 0.0, scattered[group], group)
        elif kind == SCATTER:
            time_us = costs.scatter_us(size_bytes)
            scattered[group] = ops.add(NETWORK, kind, time_us, begun(), group, -1, size_bytes, factors)
            if executor == "blocking":
                last = ops.add(COMPUTE, WAIT, 0.0, scattered[group], group)
        elif kind == REDUCE:
            assert costs.reduce_us is not None
            time_us = costs.reduce_us(size_bytes)
            reduced = ops.add(BETWEEN, kind, time_us, scattered[group], group, -1, size_bytes, factors)
            if executor == "blocking":
                last = ops.add(COMPUTE, WAIT, 0.0, reduced, group)
        if kind == GATHER and executor == "blocking":
            last = ops.add(COMPUTE, WAIT, 0.0, gathered[group], group)
    return ops


def simulate(
    shape: Shape, plan: FullyShardPlan, costs: Costs, executor: Executor = "accelerator", *, bars: bool = True
) -> Step:
    """Return one step of a model that is wrapped as the plan says.

    Raises ValueError: as `host_program`.
    """
    program = host_program(shape, plan, waits=executor == "hosts")
    laid_out = lay_out(shape, program, costs, executor)
    ran = (run if costs.contended else run_alone)(laid_out.ops)
    found: list[Bar] = []
    if bars:
        for (kind, lane, group, leaf, size_bytes), start_us, end_us in zip(
            laid_out.what, ran.start_us, ran.end_us, strict=True
        ):
            if kind not in (WAIT, RECYCLE):
                found.append(Bar(
                    kind=kind, lane=lane, group=group, leaf=leaf, start_us=start_us, end_us=end_us,
                    size_bytes=size_bytes,
                ))  # fmt: skip
    messages = LANES[NETWORK:HOST]
    return Step(
        iteration_us=ran.total_us + costs.update_us,
        compute_us=sum(leaf.forward_us + leaf.backward_us for leaf in shape.leaves),
        network_us=max(sum(op.time_us for op in ran.ops if op.lane == lane) for lane in messages),
        peak_bytes=program.peak_bytes,
        bars=tuple(sorted(found, key=lambda bar: (bar.start_us, bar.lane))),
        groups=program.groups,
        memory=_over_time(program, ran) if bars else (),
        update_us=costs.update_us,
    )


def _over_time(program: Program, ran: Run) -> tuple[tuple[float, int], ...]:
    """Memory by the time at which computation comes to that point of the host's program."""
    points: list[tuple[float, int]] = []
    place, now_us, computed = 0, 0.0, ran.lanes[LANES[COMPUTE]]
    for action, most in zip(program.actions, program.memory_bytes, strict=True):
        if place < len(computed) and ran.ops[computed[place]].kind == action.kind:
            now_us = ran.start_us[computed[place]]
            place += 1
        points.append((now_us, most))
    return tuple(points)
