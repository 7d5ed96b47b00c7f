"""What `planner doctor` finds out about torch."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from planner.jobs.finding import Finding
from planner.jobs.launch import LocalWorld, run_ranks
from runtime.errors import PlannerError
from runtime.kernels.cuda import why_not, working
from runtime.kernels.nvrtc import compiler


def device() -> Finding:
    """Look for CUDA devices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "this torch is built without CUDA" if built is None else f"no device for CUDA {built}"
        cure = "fine for CPU training; for GPUs install a CUDA build of torch and a driver"
        return Finding("cuda", False, f"{why}; {cores} CPU cores", cure, required=False)
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Finding("cuda", True, names, required=False)


def kernels() -> Finding:
    """Look at what selects elements of sparse gradients on a GPU."""
    cure = "fine for CPU training; on GPUs lossy plans select several times slower without them"
    why = why_not() or working(torch.cuda.current_device())
    if why is not None:
        found = f"none: {why}; torch's own operations select instead"
        return Finding("kernels", False, found, cure, required=False)
    return Finding("kernels", True, f"CUDA C++, compiled by NVRTC {compiler().version}", required=False)


def backends() -> list[Finding]:
    """Look for backends of torch.distributed."""
    if not dist.is_available():
        return [Finding("torch.distributed", False, "not built in", "install an official build of torch")]
    told = {True: "available", False: "not available"}
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    return [
        Finding("gloo", gloo, told[gloo], "needed on CPUs: official torch has it"),
        Finding("nccl", nccl, told[nccl], "only for several GPUs", required=False),
    ]


def two_ranks() -> Finding:
    """Try an all-reduce between two local ranks."""
    what, cure = "two local ranks", "is loopback networking allowed here? GLOO_SOCKET_IFNAME names the interface to use"
    try:
        totals = run_ranks(LocalWorld(ranks=2, timeout_s=60.0), sum_of_ranks)
    except PlannerError as error:
        return Finding(what, False, str(error).splitlines()[0], cure)
    if totals != [1.0, 1.0]:
        return Finding(what, False, f"an all-reduce of 0 and 1 gives {totals[0]:g} and {totals[1]:g}, not 1", cure)
    return Finding(what, True, "an all-reduce gives both the sum")


def sum_of_ranks() -> float:
    """Add up every rank's number by an all-reduce."""
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return float(value)
