"""What is decided for devices, and how streams are used, without any: by what torch would be told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.jobs.world import choose_backend
from runtime.checks import backend as checks
from runtime.comm.world import World
from runtime.core.usage import GatheredUsage
from runtime.errors import InputError
from runtime.monitor.clock import CudaClock
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld
from runtime.torch_compat import queued_to

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("devices", "ranks", "device", "expected"),
    [
        (1, 1, "cuda", "nccl"),
        (1, 2, "cuda", "gloo"),
        (8, 8, "cuda", "nccl"),
        (2, 4, "cuda", "gloo"),
        (8, 2, "cpu", "gloo"),
    ],
)
def test_nccl_is_chosen_where_each_rank_has_a_device(
    monkeypatch: pytest.MonkeyPatch, devices: int, ranks: int, device: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert choose_backend(None, device, ranks) == expected
    assert choose_backend("gloo", device, ranks) == "gloo"


def test_nccl_is_refused_where_ranks_would_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match=r"found 2 ranks on 1 GPUs.*--ranks 1.*--backend gloo"):
        choose_backend("nccl", "cuda", 2)


@pytest.mark.parametrize(
    ("device", "backend", "refused"), [(CUDA, "gloo", True), (CUDA, "nccl", False), (CPU, "gloo", False)]
)
def test_what_gloo_cannot_send_from_a_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, backend: str, refused: bool
) -> None:
    monkeypatch.setattr(checks, "backend_of", lambda group, of: backend)
    group: Any = object()
    library, tree = (
        Plan(
            model=ModelReference(name="test"), world=PlanWorld(ranks=2), accuracy="exact",
            buckets=(PlanBucket(gradients=("a",), algorithm=algorithm),),
        )
        for algorithm in ("library", "tree")
    )  # fmt: skip
    world = World(ranks=2, group=group)
    assert checks.check_backend(library, world, device) is None
    found = checks.check_backend(tree, world, device)
    assert (found is not None) == refused
    assert not refused or "bucket 0 is sent by all_reduce/tree, from rank to rank" in str(found)


def test_a_group_that_carries_nothing_from_the_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(group: Any, of: torch.device) -> str:
        raise RuntimeError(f"No backend type associated with device type {of.type}")

    monkeypatch.setattr(checks, "backend_of", nothing)
    group: Any = object()
    plan = Plan(model=ModelReference(name="test"), world=PlanWorld(ranks=2), accuracy="exact", buckets=(
        PlanBucket(gradients=("a",)),
    ))  # fmt: skip
    found = checks.check_backend(plan, World(ranks=2, group=group, backend="nccl"), CPU)
    assert "is of nccl, which carries nothing from cpu" in str(found)


def test_times_between_events_wait_for_both() -> None:
    """Of two streams either event may be the later one, and torch raises for one that is not there yet."""
    waited: list[str] = []

    def event(name: str) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(name), elapsed_time=lambda other: 1.5)

    assert CudaClock(CUDA).between_us(event("start"), event("end")) == 1500.0
    assert sorted(waited) == ["end", "start"]


def test_usage_that_ranks_gather_is_written_by_device_operations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is a list of the host's would be copied, and waited for, in every backward."""
    copied: list[list[int]] = []

    def watched(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied.append(tensor.tolist())
        return queued_to(tensor, device)

    monkeypatch.setattr("runtime.core.usage.queued_to", watched)
    usage = GatheredUsage(4, 2, CPU)
    for unused in ([], [0, 2]):
        usage.write(unused)
        assert usage._own.tolist() == [int(index not in unused) for index in range(4)] + [0]
    assert copied == [[0, 2]]
