"""The table of accelerators: devices as drivers name them, and ratios against published pairs."""

from __future__ import annotations

import pytest

from planner.documents.accelerators import ACCELERATORS, SCALED_WITHIN, find_accelerator, kind_of, speed_ratio
from planner.documents.nccl import GPUS


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("Tesla V100 32 GB", "v100"), ("Tesla V100-SXM2-16GB", "v100-16gb"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("AMD Instinct MI300X", "mi300x"), ("Tesla K80", "k80"),
        ("NVIDIA A1000", None), ("NVIDIA GH200 480GB", None), ("NVIDIA RTX A4000", None), ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("cpu", None), (None, None),
    ],
)  # fmt: skip
def test_devices_as_drivers_name_them(device: str | None, name: str | None) -> None:
    assert find_accelerator(device) == name


def test_every_name_finds_itself_and_covers_nccl() -> None:
    assert all(find_accelerator(name) == name for name in ACCELERATORS)
    assert all(kind_of(name) in ACCELERATORS for name in ACCELERATORS)
    assert set(GPUS) <= set(ACCELERATORS)


@pytest.mark.parametrize(
    ("old", "new", "published"),
    [
        # ResNet-50, images/s of one GPU: NVIDIA DeepLearningExamples (PyTorch, resnet50v1.5), FP32 to TF32, and AMP.
        ("v100", "a100", 938 / 356), ("v100", "a100", 2470 / 1156),
        # The same in FP32, against B-Caffe's 76.85 images/s on a K80.
        ("k80", "v100", 356 / 76.85),
        # MPT-1b, -7b and -70b: share of the peak times the peak (llm-foundry).
        ("a100", "h100", 989.4 * 0.418 / (312 * 0.562)), ("a100", "h100", 989.4 * 0.464 / (312 * 0.642)),
        ("a100", "h100", 989.4 * 0.578 / (312 * 0.69)),
    ],
)  # fmt: skip
def test_ratios_against_published_pairs(old: str, new: str, published: float) -> None:
    ratio = speed_ratio(old, new) / published
    assert 1.0 / (1.0 + SCALED_WITHIN) < ratio < 1.0 + SCALED_WITHIN
    assert speed_ratio(new, old) == pytest.approx(1.0 / speed_ratio(old, new))
