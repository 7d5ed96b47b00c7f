"""`planner doctor`: what is installed, which backends work here, and the cure for what does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass

from planner.testbed.namespaces import Namespace, NoNamespaces
from runtime.errors import PlannerError
from runtime.version import __version__

NEEDED = ("torch", "numpy", "scipy", "ortools", "pydantic", "typer", "rich")
OPTIONAL = {
    "scikit-learn": "`planner demo` needs it: pip install 'commplanner[demo]'",
    "plotly": "`planner explain --html` needs it: pip install 'commplanner[pages]'",
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    what: str
    ok: bool
    found: str
    cure: str = ""
    required: bool = True


def examine() -> list[Finding]:
    """Look at everything worth knowing; slow checks (starting two ranks) last."""
    version = platform.python_version()
    findings = [
        Finding("python", sys.version_info >= (3, 11), version, "use Python 3.11 or newer"),
        Finding("commplanner", True, __version__),
    ]
    findings += [_package(name) for name in NEEDED]
    findings += [_package(name, cure, required=False) for name, cure in OPTIONAL.items()]
    if all(finding.ok for finding in findings if finding.what == "torch"):
        findings += [_device(), _kernels(), *_backends()]
    findings += _emulation()
    if any(finding.what == "gloo" for finding in findings):
        findings.append(_two_ranks())
    return findings


def _package(name: str, cure: str = "", *, required: bool = True) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", cure or f"pip install {name}", required)
    if name == "torch" and tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < (2, 11):
        return Finding(name, False, version, "pip install 'torch>=2.11'")
    return Finding(name, True, version, required=required)


def _device() -> Finding:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "this torch is built without CUDA" if built is None else f"no device for CUDA {built}"
        cure = "fine for CPU training; for GPUs install a CUDA build of torch and a driver"
        return Finding("cuda", False, f"{why}; {cores} CPU cores", cure, required=False)
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Finding("cuda", True, names, required=False)


def _kernels() -> Finding:
    """What selects elements of sparse gradients on a GPU."""
    import torch

    from runtime.kernels.cuda import why_not, working
    from runtime.kernels.nvrtc import compiler

    cure = "fine for CPU training; on GPUs lossy plans select several times slower without them"
    why = why_not() or working(torch.cuda.current_device())
    if why is not None:
        found = f"none: {why}; torch's own operations select instead"
        return Finding("kernels", False, found, cure, required=False)
    return Finding("kernels", True, f"CUDA C++, compiled by NVRTC {compiler().version}", required=False)


def _backends() -> list[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        return [Finding("torch.distributed", False, "not built in", "install an official build of torch")]
    told = {True: "available", False: "not available"}
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    return [
        Finding("gloo", gloo, told[gloo], "needed on CPUs: official torch has it"),
        Finding("nccl", nccl, told[nccl], "only for several GPUs", required=False),
    ]


def _emulation() -> list[Finding]:
    """What `--emulate` needs."""
    tools = {tool: shutil.which(tool) for tool in ("ip", "tc")}
    found = [
        Finding(tool, path is not None, path or "not found", "--emulate needs it: apt-get install iproute2", False)
        for tool, path in tools.items()
    ]
    user = Finding("root", os.geteuid() == 0, f"user {os.geteuid()}", "--emulate needs it: sudo -E", required=False)
    try:
        Namespace.make().close()
    except NoNamespaces as error:
        return [*found, user, Finding("network namespaces", False, "cannot be made", str(error), required=False)]
    return [*found, user, Finding("network namespaces", True, "can be made: --emulate works", required=False)]


def _two_ranks() -> Finding:
    from planner.jobs.launch import LocalWorld, run_ranks

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
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return float(value)
