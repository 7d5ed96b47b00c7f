"""What ranks gain by sharing the optimizer's step (as ZeRO-1), against every rank doing all of it.

    python -m benchmarks.sharded_step

Both ways train the same parameters in the same processes, in turn: a backward that costs next to nothing, the exchange
of gradients, and the update. A step counts as long as its slowest rank takes. Weights have to be the same afterwards.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

import runtime
from benchmarks.pto import CASES, RANKS, STEPS, WARM_UP
from planner.jobs.launch import LocalWorld, run_ranks
from runtime.checks.plan import trainable_parameters
from runtime.comm.world import World
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld, StepPlan, UpdatePlan
from runtime.plan.interfaces import SHARDED_STEP
from runtime.sharded.state import state_bytes

BUCKET_BYTES = 25 * 2**20


class Layers(nn.Module):
    """Parameters of a benchmark's case; the gradient of each is its value."""

    def __init__(self, case: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ParameterList([torch.randn(shape) for shape in CASES[case].shapes()])

    def forward(self) -> torch.Tensor:
        """A scalar."""
        return torch.stack([layer.square().sum() for layer in self.layers]).sum() / 2


def plan_of(model: nn.Module, ranks: int, *, shared: bool) -> Plan:
    """Buckets of 25 MiB, as DDP's."""
    buckets: list[list[str]] = [[]]
    size_bytes = 0
    for name, parameter in reversed(list(trainable_parameters(model).items())):
        if buckets[-1] and size_bytes > BUCKET_BYTES:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(name)
        size_bytes += parameter.numel() * parameter.element_size()
    return Plan(
        model=ModelReference(name="layers"), world=PlanWorld(ranks=ranks), accuracy="exact",
        buckets=tuple(PlanBucket(gradients=tuple(names)) for names in buckets),
        updates=UpdatePlan(step=StepPlan(sharded=True)) if shared else None,
        interface=(SHARDED_STEP,) if shared else None,
    )  # fmt: skip


def measure(case: int) -> tuple[list[float], list[float], int, int]:
    """(milliseconds of each step replicated and shared, of the slowest rank; bytes of state on this rank of both)."""
    world = World.join(None, timeout_s=120.0)
    ways: list[tuple[nn.Module, torch.optim.Optimizer, Any]] = []
    for shared in (False, True):
        made = Layers(case)
        adamw = torch.optim.AdamW(made.parameters(), lr=1e-3)
        ways.append((made, adamw, runtime.attach(made, adamw, plan_of(made, world.ranks, shared=shared))))
    times_ms: list[list[float]] = [[], []]
    for step in range(WARM_UP + STEPS // 4):
        for way in (0, 1) if step % 2 else (1, 0):
            model, optimizer, _ = ways[way]
            optimizer.zero_grad()
            world.gather(None, "beginning a step together")
            start = time.perf_counter()
            model().backward()
            optimizer.step()
            times_ms[way].append((time.perf_counter() - start) * 1e3)
    pairs = zip(ways[0][0].parameters(), ways[1][0].parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs), "weights differ"
    everyone = world.gather(times_ms, "comparing times")
    slowest = [[max(column) for column in zip(*(rank[way] for rank in everyone), strict=True)] for way in (0, 1)]
    part = ways[1][2].report().step.state_bytes
    return slowest[0][WARM_UP:], slowest[1][WARM_UP:], state_bytes(ways[0][1].state), part


def main() -> None:
    """Prints one line for each model."""
    for case in (4, 0):
        one, other, whole, part = run_ranks(LocalWorld(ranks=RANKS), measure, case)[0]
        ratio = statistics.median(b / a for a, b in zip(one, other, strict=True))
        print(
            f"{CASES[case].name.partition(',')[0]}, AdamW, {RANKS} ranks: {statistics.median(one):.1f} ms a step by "
            f"every rank, {statistics.median(other):.1f} ms shared ({ratio:.3f} ×); state {whole / 2**20:.1f} MiB, "
            f"{part / 2**20:.1f} MiB on a rank"
        )


if __name__ == "__main__":
    main()
