"""Is the step bound by its input, and does a cache help: what a plan says of loading. Torch-free."""

from __future__ import annotations

import math

from runtime.plan import Plan
from runtime.plan.predicted import Loading

ALIGNMENT = 64
"""Alignment in bytes of samples in the memory of a node."""
TABLE_BYTES = 16
"""Size in bytes of a sample's entry there."""
AMPLE = 0.8
"""Share of the memory that is available now which a cache may take: the run itself will want some."""


def node_memory_bytes(loading: Loading) -> int:
    """Return the bytes of the largest part of a dataset that a node's memory holds if every sample is in one."""
    samples = -(-loading.samples // loading.nodes)
    return samples * (-(-loading.decoded_bytes // ALIGNMENT) * ALIGNMENT + TABLE_BYTES)


def workers_needed(loading: Loading, sample_us: float, step_us: float) -> int:
    """Return the number of processes of a rank that load a batch in the time of a step."""
    return max(1, math.ceil(loading.batch_samples * sample_us / step_us)) if step_us > 0.0 else 1


def levels(loading: Loading) -> dict[str, float]:
    """Return the time of one sample in µs by where it comes from."""
    return {"storage": loading.cold_us, "local disk": loading.disk_us, "memory": loading.memory_us}


def loading_lines(plan: Plan) -> list[str]:
    """Return time and memory of loading, and whether a cache fits; nothing without a dataset."""
    loading = plan.loading
    if loading is None or plan.predicted is None:
        return []
    return [
        _times(loading, plan.predicted.iteration_us),
        _verdict(loading, plan.predicted.iteration_us),
        _memory(loading),
    ]


def _times(loading: Loading, step_us: float) -> str:
    listed = ", ".join(
        f"{loading.batch_samples * sample_us / 1000:,.4g} ms from {name}" for name, sample_us in levels(loading).items()
    )
    return (
        f"input: a batch of {loading.batch_samples} takes one worker {listed}; the step takes {step_us / 1000:,.4g} ms"
    )


def _verdict(loading: Loading, step_us: float) -> str:
    """Return from which levels one worker keeps up, and the number of workers that the others take."""
    needed = {name: workers_needed(loading, sample_us, step_us) for name, sample_us in levels(loading).items()}
    bound = {name: workers for name, workers in needed.items() if workers > 1}
    if "storage" not in bound:
        return "input: the step is not input-bound: one worker a rank keeps up with it from the storage"
    listed = ", ".join(f"{workers} workers a rank from {name}" for name, workers in bound.items())
    enough = [name for name in needed if name not in bound]
    kept = f"; one is enough from {' or '.join(enough)}" if enough else ""
    return (
        f"input: the step is input-bound with fewer than {listed}{kept}; workers help as far as cores and storage "
        f"serve them all at once"
    )


def _memory(loading: Loading) -> str:
    need_bytes, there_bytes = node_memory_bytes(loading), loading.memory_available_bytes
    disk_bytes = -(-loading.samples // loading.nodes) * loading.raw_bytes
    spread = "on one node" if loading.nodes == 1 else f"over {loading.nodes} nodes"
    text = (
        f"input: runtime.datacache needs memory_bytes={need_bytes} ({_gib(need_bytes)}) on each node for all "
        f"{loading.samples:,} decoded samples {spread}, and {_gib(disk_bytes)} of its disk for raw ones; "
        f"{_gib(there_bytes)} of memory are available: "
    )
    if need_bytes <= AMPLE * there_bytes:
        return text + "it fits"
    share = AMPLE * there_bytes / need_bytes
    return text + f"it does not fit; memory_bytes={int(AMPLE * there_bytes)} would hold {share:.0%} of the samples"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:,.3g} GiB"
