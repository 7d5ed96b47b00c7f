"""What narrow buckets put on the wire, beside float32: bytes that the kernel's interface counters say were sent.

    python -m benchmarks.wire_bytes            # as root; exit code 1 where a way sends more than LIMITS of float32

Four emulated hosts train one vector; every way takes as many steps. Frames and acknowledgements are counted, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import runtime
from planner.jobs.launch import LocalWorld, run_ranks
from planner.testbed.hosts import check_namespaces, parse_emulation
from runtime.plan import NO_COMPRESSION, CompressorSpec, ModelReference, OuterSpec, Plan, PlanBucket, PlanWorld
from runtime.sparse.compressors.wire import WIRE_DTYPES

HOSTS = 4
ELEMENTS, WARM_UPS, STEPS = 4_000_000, 2, 5
PERIOD = 30
OUTER = f"int8, outer H = {PERIOD}"
LIMITS = {"int8": 0.26, OUTER: 0.01}
"""What ways, in blocks of 256, may send of what float32 does."""

WAYS = {
    "float32": NO_COMPRESSION,
    **{dtype: CompressorSpec(name="wire", dtype=dtype) for dtype in WIRE_DTYPES},
    "rank 4": CompressorSpec(name="powersgd", rank=4),
    OUTER: CompressorSpec(name="wire", dtype="int8"),
}


class Weights(nn.Module):
    """One square matrix, whose gradient is drawn anew in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS // 2000, 2000))

    def forward(self, drawn: torch.Tensor) -> torch.Tensor:
        """() whose gradient is `drawn`."""
        return (self.weight * drawn).sum()


def sent_bytes() -> int:
    """What this host's interfaces have sent, the loopback's aside."""
    rows = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    cells = [row.replace(":", " ").split() for row in rows]
    return sum(int(cell[9]) for cell in cells if cell[0] != "lo")


def count() -> dict[str, float]:
    """Bytes of a step that all hosts sent together, by way."""
    found = {}
    for way, compressor in WAYS.items():
        model = Weights()
        whole, outer = compressor is NO_COMPRESSION, OuterSpec(every=PERIOD) if way == OUTER else None
        algorithm = "two_shot" if compressor.name == "wire" else "library"
        plan = Plan(
            model=ModelReference(name="vector"), world=PlanWorld(ranks=HOSTS),
            accuracy="relaxed" if outer else "exact" if whole else "bounded", outer=outer,
            buckets=(PlanBucket(gradients=("weight",), algorithm=algorithm, compressor=compressor),),
        )  # fmt: skip
        steps = PERIOD if outer else STEPS
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = runtime.attach(model, optimizer, plan, drift=False)
        before = 0
        for step in range(WARM_UPS + steps):
            if step == WARM_UPS:
                dist.barrier()
                before = sent_bytes()
            model(torch.randn_like(model.weight)).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        total = torch.tensor(float(sent_bytes() - before))
        dist.all_reduce(total)
        session.detach()
        found[way] = float(total) / steps
    return found


def main() -> int:
    """Prints a row for each way."""
    check_namespaces()
    found = run_ranks(LocalWorld(ranks=HOSTS, emulation=parse_emulation(f"{HOSTS}x1@10gbit")), count)[0]
    print("| way | MB sent in a step by all hosts | of float32 |\n| --- | ---: | ---: |")
    for way, size_bytes in found.items():
        print(f"| {way} | {size_bytes / 1e6:.2f} | {size_bytes / found['float32']:.4f} |")
    return 1 if any(found[way] > limit * found["float32"] for way, limit in LIMITS.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
