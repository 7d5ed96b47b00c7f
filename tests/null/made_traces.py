"""Traces as torch.profiler exports them of DDP on accelerators, made from a step that is known."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STREAM, NETWORK_STREAM, MAIN, AUTOGRAD = 7, 20, 100, 101


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model on ranks: its gradients in readiness order, and what everything takes in microseconds."""

    sizes: tuple[int, ...] = (1000, 64_000, 512, 512, 2_000_000, 512, 900_000, 64)
    buckets: tuple[int, ...] = (2, 5, 8)
    """Where each bucket ends."""
    world: int = 2
    steps: int = 3
    micro_batches: int = 1
    layer_us: float = 400.0
    update_us: float = 300.0
    launch_us: float = 10.0
    host_us: float = 0.0
    """What the host takes before each launch beyond that."""
    alpha_us: float = 50.0
    beta_us_per_byte: float = 0.0005
    late_us: tuple[float, ...] = (0.0, 0.0)
    """By how much each rank's backward is late."""
    shapes: bool = True
    copies: bool = True
    metadata: bool = True
    compiled: bool = False
    inside: bool = False
    """Whether a compiled backward sends each gradient itself."""
    modules: tuple[str, ...] = ()
    """FSDP2's group of each bucket; the root's has no name."""
    extra: tuple[str, ...] = ()
    """Collectives of other groups in each backward, such as all_to_all."""

    def cost_us(self, numel: int) -> float:
        """Return what an all-reduce of so many elements takes."""
        return self.alpha_us + self.beta_us_per_byte * 4 * numel


class _Rank:
    """What one rank's profiler records."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.events = job, rank, list[dict[str, Any]]()
        self.host_us = self.device_us = 1e9 + 7.0 * rank
        self.network_us, self._link = 0.0, 1000 * (rank + 1)

    def event(self, category: str, name: str, start: float, duration: float, thread: int, **arguments: Any) -> None:
        """Record an event."""
        device = category in ("kernel", "gpu_memcpy")
        self.events.append(
            {
                "ph": "X", "cat": category, "name": name, "pid": 0 if device else 4242, "tid": thread,
                "ts": round(start, 3), "dur": round(duration, 3), "args": arguments,
            }
        )  # fmt: skip

    def launch(self, category: str, name: str, duration: float, thread: int, **arguments: Any) -> None:
        """Launch a kernel or a copy on the compute stream."""
        self._link += 1
        self.host_us += self.job.launch_us + self.job.host_us
        self.event("cuda_runtime", "cudaLaunchKernel", self.host_us - 5.0, 4.0, thread, correlation=self._link)
        start = max(self.device_us, self.host_us)
        self.device_us = start + duration
        self.event(category, name, start, duration, STREAM, stream=STREAM, correlation=self._link, **arguments)

    def hook(self, call: str, module: str, thread: int) -> None:
        """Record a hook of FSDP2."""
        name = f"FSDP::{call} ({module})" if module else f"FSDP::{call}"
        self.event("user_annotation", name, self.host_us, 1.0, thread)
        self.host_us += 2.0

    def call(self, name: str, numel: int, ready: float, group: str = "0") -> tuple[float, dict[str, Any], int]:
        """Call a collective; return when it can start, its metadata and its launch."""
        self._link += 1
        self.host_us += 2.0
        says: dict[str, Any] = {
            "Collective name": name, "In msg nelems": numel, "Out msg nelems": numel, "Group size": self.job.world,
            "dtype": "Float", "Process Group Name": group, "Process Group Description": "default_pg",
        } if self.job.metadata else {}  # fmt: skip
        self.event("cpu_op", "record_param_comms", self.host_us, 6.0, AUTOGRAD, **says)
        self.event("cuda_runtime", "cudaLaunchKernelExC", self.host_us + 2.0, 3.0, AUTOGRAD, correlation=self._link)
        return max(ready, self.network_us, self.host_us + 5.0), says, self._link

    def document(self, steps: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
        """Return the trace."""
        for number, start, end in steps:
            self.event("user_annotation", f"ProfilerStep#{number}", start, end - start, MAIN)
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-40GB", "totalGlobalMem": 42_297_524_224}] * 8,
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.job.world},
            "traceEvents": self.events,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": 1_711_964_646_000_000_000,
        }


def make_traces(job: Job) -> list[dict[str, Any]]:
    """Return the trace of every rank of a job."""
    ranks = [_Rank(job, rank) for rank in range(job.world)]
    marks: list[list[tuple[int, float, float]]] = [[] for _ in ranks]
    for number in range(job.steps):
        began = [rank.host_us for rank in ranks]
        for micro in range(job.micro_batches):
            _forward(job, ranks)
            _backward(job, ranks, sends=micro == job.micro_batches - 1)
        for rank, started, mark in zip(ranks, began, marks, strict=True):
            rank.device_us = max(rank.device_us, rank.network_us)
            rank.event("user_annotation", "Optimizer.step#SGD.step", rank.host_us, 20.0, MAIN)
            rank.launch("kernel", "multi_tensor_apply", job.update_us, MAIN, grid=[99, 1, 1])
            # The script reads its loss, which waits for the accelerator.
            rank.host_us = rank.device_us + 30.0
            mark.append((10 + number, started, rank.host_us - 1.0))
    return [rank.document(mark) for rank, mark in zip(ranks, marks, strict=True)]


def _forward(job: Job, ranks: Sequence[_Rank]) -> None:
    for bucket, (first, stop) in reversed(list(enumerate(zip([0, *job.buckets], job.buckets, strict=False)))):
        if job.modules:
            _send(job, ranks, "_allgather_base", sum(job.sizes[first:stop]), "0")
        for rank in ranks:
            if job.modules:
                rank.device_us = max(rank.device_us, rank.network_us)
                rank.hook("pre_forward", job.modules[bucket], MAIN)
            for layer in range(first, stop):
                recorded = {"Sequence number": layer, "Fwd thread id": 0}
                rank.event("cpu_op", "aten::conv2d", rank.host_us, 9.0, MAIN, **recorded)
                rank.launch("kernel", "forward_kernel", job.layer_us / 2, MAIN, grid=[layer, 1, 1])
            if job.modules:
                rank.hook("post_forward", job.modules[bucket], MAIN)


def _backward(job: Job, ranks: Sequence[_Rank], *, sends: bool) -> None:
    ends = list(job.buckets)
    for rank in ranks:
        rank.host_us = max(rank.host_us, rank.device_us - 50.0)
        rank.event(
            "cpu_op", "autograd::engine::evaluate_function: LossBackward0", rank.host_us, 5.0, AUTOGRAD,
        )  # fmt: skip
        late = job.late_us[rank.rank] if rank.rank < len(job.late_us) else 0.0
        rank.launch("kernel", "loss_backward", 40.0 + late, AUTOGRAD, grid=[1, 1, 1])
        if job.compiled:
            rank.launch("kernel", "triton_backward", job.layer_us * len(job.sizes), AUTOGRAD, grid=[2, 1, 1])
    _send_inside(job, ranks)
    for index, numel in enumerate(job.sizes):
        bucket = sum(index >= end for end in ends)
        for rank in ranks:
            if job.modules and index in (0, *ends):
                rank.hook("pre_backward", job.modules[bucket], AUTOGRAD)
            if not job.compiled:
                rank.event(
                    "cpu_op", "autograd::engine::evaluate_function: ConvolutionBackward0", rank.host_us, 9.0, AUTOGRAD,
                )  # fmt: skip
                rank.launch("kernel", "backward_kernel", job.layer_us, AUTOGRAD, grid=[index, 1, 1])
            shapes = {"Input Dims": [[numel]], "Input type": ["float"]} if job.shapes else {}
            rank.host_us += 3.0
            rank.event(
                "cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", rank.host_us, 8.0,
                AUTOGRAD,
            )  # fmt: skip
            rank.event("cpu_op", "torch::autograd::AccumulateGrad", rank.host_us + 1.0, 3.0, AUTOGRAD, **shapes)
            rank.host_us += 1.5
        if sends and index + 1 in ends and not job.inside:
            first = [0, *ends][ends.index(index + 1)]
            for extra in job.extra:
                _send(job, ranks, extra, 5000, "1")
            for rank in ranks:
                if job.modules:
                    rank.hook("post_backward_reshard", job.modules[bucket], AUTOGRAD)
            _send(
                job,
                ranks,
                "_reduce_scatter_base" if job.modules else "allreduce",
                sum(job.sizes[first : index + 1]),
                "0",
            )
    if job.copies and sends:
        for rank in ranks:
            rank.host_us = max(rank.host_us, rank.network_us)
            for numel in job.sizes:
                began = rank.host_us
                rank.launch("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 2.0, AUTOGRAD, bytes=4 * numel)
                rank.event(
                    "cpu_op", "torch.distributed.ddp.reducer::copy_bucket_to_grad", began, rank.host_us - began + 1.0,
                    AUTOGRAD,
                )  # fmt: skip
                rank.host_us += 2.0


def _send_inside(job: Job, ranks: Sequence[_Rank]) -> None:
    """Copy and send each gradient, as a compiled backward may."""
    for numel in job.sizes if job.inside else ():
        for rank in ranks:
            rank.launch("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 2.0, AUTOGRAD, bytes=4 * numel)
        _send(job, ranks, "allreduce", numel, "0")


def _send(job: Job, ranks: Sequence[_Rank], name: str, numel: int, group: str) -> None:
    """Send a message on all ranks: it ends on all of them at once, behind the last arrival."""
    calls = [rank.call(name, numel, rank.device_us, group) for rank in ranks]
    # Clocks of ranks are some microseconds apart.
    end = max(start - 7.0 * rank.rank for rank, (start, *_) in zip(ranks, calls, strict=True)) + job.cost_us(numel)
    for rank, (start, says, link) in zip(ranks, calls, strict=True):
        rank.network_us = end + 7.0 * rank.rank
        kernel = "ncclDevKernel_SendRecv" if name == "all_to_all" else "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        rank.event(
            "kernel", kernel, start, rank.network_us - start, NETWORK_STREAM, stream=NETWORK_STREAM, correlation=link,
            **says,
        )  # fmt: skip


def write_trace(path: Path, document: Any) -> str:
    """Write a trace, compressed where the name says so; return its path."""
    data = json.dumps(document, indent=2).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)
