"""Lossy buckets whose device has kernels do what others do, bit for bit: here the device is the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_cases import bits, same
from kernel_host import HostBackend, needs_compiler, usual_library
from torch import Tensor, nn

from runtime.comm.communicator import CommTiming, NullCommunicator
from runtime.core.buckets import BucketBuffer, Slot, lay_out
from runtime.kernels.backend import installed
from runtime.kernels.source import WIRE_CODES
from runtime.plan import CompressorSpec
from runtime.sparse.compressed import CompressedBucket
from runtime.sparse.compressors import sparse
from runtime.sparse.layout import make_lossy
from runtime.sparse.narrowing import TwoShots
from runtime.sparse.selection import Selection

pytestmark = needs_compiler
RANKS = 2
LAYERS = {"b": (30, 100), "a": (4000,), "c": (7,)}
TOPK = CompressorSpec(name="topk", density=0.02, scope="layer")


@pytest.fixture
def on_host() -> Iterator[None]:
    with installed("cpu", HostBackend(usual_library(), grid=2, resident=2)):
        yield


def make(spec: CompressorSpec, tail: Tensor | None = None) -> CompressedBucket:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in LAYERS.values()]
    slots = [Slot(f"{name}.weight", i, p) for i, (name, p) in enumerate(zip(LAYERS, parameters, strict=True))]
    lossy = make_lossy(BucketBuffer(0, slots, lay_out(slots), "a bucket"), spec, RANKS, tail)
    assert isinstance(lossy.encoding, Selection)
    return lossy


def step(
    lossy: CompressedBucket, seed: int, *, spoiled: float | None = None, before: float = 0.0
) -> tuple[Tensor, ...]:
    """One step of two ranks that are alike; returns (message, sums, residual after it)."""
    gradient = lossy.feedback.bucket.messages[0].flat
    gradient.copy_(torch.randn(gradient.numel(), generator=torch.Generator().manual_seed(seed)))
    if spoiled is not None:
        gradient[11] = spoiled
    lossy.pack(seed)
    lossy.packed.gathered.copy_(lossy.packed.flat.repeat(RANKS))
    message = lossy.packed.flat.clone()
    finite = lossy.unpack()
    assert bool(finite) == (spoiled is None)
    lossy.feedback.commit(finite)
    return message, lossy.feedback.gradient().clone(), lossy.feedback.residual.clone() if before else torch.zeros(0)


STEPS = [None, None, float("inf"), None, float("nan"), float("nan"), None, None]


@pytest.mark.parametrize("spec", [TOPK, CompressorSpec(name="topk", density=0.01)], ids=["layers", "whole"])
@pytest.mark.parametrize("looks", [0.0, 1.0], ids=["nobody looks at residuals", "residuals are looked at"])
def test_buckets_are_the_same_bit_for_bit(spec: CompressorSpec, looks: float) -> None:
    """Steps that are not finite leave residuals as they were, without anything being copied."""
    plain, found = make(spec, torch.zeros(3)), []
    expected = [step(plain, i, spoiled=spoiled, before=looks) for i, spoiled in enumerate(STEPS)]
    with installed("cpu", HostBackend(usual_library(), grid=2, resident=2)):
        kernel = make(spec, torch.zeros(3))
        assert kernel.feedback.buffers.for_kernels() is not None
        found = [step(kernel, i, spoiled=spoiled, before=looks) for i, spoiled in enumerate(STEPS)]
        residual = kernel.feedback.residual
    for one, other, spoiled in zip(found, expected, STEPS, strict=True):
        if spoiled is None:
            assert same(one, other)
    assert torch.equal(bits(residual), bits(plain.feedback.residual))


def narrowed(spec: CompressorSpec) -> list[CompressedBucket]:
    """One of each rank."""
    found = []
    for rank in range(RANKS):
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in LAYERS.values()]
        slots = [Slot(f"{name}.weight", i, p) for i, (name, p) in enumerate(zip(LAYERS, parameters, strict=True))]
        buffer = BucketBuffer(0, slots, lay_out(slots), "a bucket")
        found.append(make_lossy(buffer, spec, RANKS, torch.zeros(3), rank=rank))
    assert all(isinstance(bucket.encoding, TwoShots) for bucket in found)
    return found  # type: ignore[return-value]


def narrowed_step(buckets: list[CompressedBucket], seed: int, spoiled: float | None, looks: bool) -> tuple[Tensor, ...]:
    """As `step`, of ranks that differ; returns sums and, with `looks`, residuals after it."""
    for rank, bucket in enumerate(buckets):
        gradient = bucket.feedback.bucket.messages[0].flat
        gradient.copy_(torch.randn(gradient.numel(), generator=torch.Generator().manual_seed(10 * seed + rank)))
        if spoiled is not None and rank == 1:
            gradient[11] = spoiled
        bucket.pack(seed)
    for rank, bucket in enumerate(buckets):
        bucket.packed.received.copy_(torch.stack([other.packed.rows[rank] for other in buckets]))
        bucket.packed.narrow()
    for bucket in buckets:
        bucket.packed.gathered.copy_(torch.cat([other.packed.own for other in buckets]))
        finite = bucket.unpack()
        assert bool(finite) == (spoiled is None)
        bucket.feedback.commit(finite)
    sums = [bucket.feedback.gradient().clone() for bucket in buckets]
    return *sums, *(bucket.feedback.residual.clone() for bucket in buckets if looks and bucket.feedback.residuals())


@pytest.mark.parametrize("looks", [False, True], ids=["nobody looks at residuals", "residuals are looked at"])
@pytest.mark.parametrize("dtype", WIRE_CODES)
def test_narrow_buckets_are_the_same_bit_for_bit(dtype: str, looks: bool) -> None:
    for feedback in (True, False):
        spec = CompressorSpec(name="wire", dtype=dtype, error_feedback=feedback)
        plain, found = narrowed(spec), []
        expected = [narrowed_step(plain, i, spoiled, looks) for i, spoiled in enumerate(STEPS)]
        with installed("cpu", HostBackend(usual_library(), grid=2, resident=2)):
            kernel = narrowed(spec)
            found = [narrowed_step(kernel, i, spoiled, looks) for i, spoiled in enumerate(STEPS)]
            residuals = [bucket.feedback.residual for bucket in kernel]
        for one, other, spoiled in zip(found, expected, STEPS, strict=True):
            assert same(one[RANKS:], other[RANKS:])
            assert spoiled is not None or same(one, other)
        assert same(tuple(residuals), tuple(bucket.feedback.residual for bucket in plain))


@pytest.mark.usefixtures("on_host")
def test_a_residual_that_is_looked_at_in_the_middle_of_a_step_is_the_one_before() -> None:
    lossy = make(TOPK)
    step(lossy, 0)
    before = lossy.feedback.residual.clone()
    gradient = lossy.feedback.bucket.messages[0].flat
    gradient.normal_()
    added = before + gradient
    lossy.pack(1)
    assert torch.equal(lossy.feedback.residual, before)
    lossy.packed.gathered.copy_(lossy.packed.flat.repeat(RANKS))
    lossy.feedback.commit(lossy.unpack())
    after = lossy.feedback.residual
    sent = lossy.feedback.gradient() / RANKS
    assert torch.equal(after + sent, added)


@pytest.mark.usefixtures("on_host")
def test_a_step_that_was_given_up_leaves_the_residual() -> None:
    lossy = make(TOPK)
    for seed in (0, 1):
        step(lossy, seed)
    before = lossy.feedback.residual.clone()
    lossy.feedback.bucket.messages[0].flat.normal_()
    lossy.pack(2)
    lossy.feedback.buffers.drop()
    assert torch.equal(lossy.feedback.residual, before)
    lossy.feedback.residual.mul_(2.0)
    assert torch.equal(lossy.feedback.residual, 2.0 * before)


def test_mstopk_keeps_what_it_does_not_send() -> None:
    with installed("cpu", HostBackend(usual_library(), grid=2, resident=2)):
        lossy = make(CompressorSpec(name="topk", selector="mstopk", density=0.05))
        flat = lossy.feedback.bucket.messages[0].flat
        total = torch.zeros_like(flat, dtype=torch.float64)
        for seed in range(4):
            step(lossy, seed)
            total += torch.randn(flat.numel(), generator=torch.Generator().manual_seed(seed))
            total -= lossy.feedback.gradient() / RANKS
        assert torch.allclose(lossy.feedback.residual.double(), total, atol=1e-5)


def test_buckets_in_double_precision_do_without() -> None:
    with installed("cpu", HostBackend(usual_library())):
        parameter = nn.Parameter(torch.zeros(50, dtype=torch.float64))
        slots = [Slot("w", 0, parameter)]
        lossy = make_lossy(BucketBuffer(0, slots, lay_out(slots), "double"), TOPK, RANKS, None)
        assert lossy.feedback.buffers.for_kernels() is None
        lossy.pack(0)


def test_where_kernels_do_not_work_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch.device("cuda", 0)
    monkeypatch.setattr(sparse, "usable", lambda found: "no compiler" if found == where else None)
    sparse._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="selection on cuda:0 .* no compiler; `planner doctor`"):
        assert not sparse.has_kernels(where, torch.float32)
    assert not sparse.has_kernels(where, torch.float32)
    assert not sparse.has_kernels(where, torch.float64)


def test_buckets_are_filled_by_whoever_sends_them() -> None:
    """On a device that is the side stream, so that selection runs beside backward."""
    done: list[str] = []
    slots = [Slot("w", 0, nn.Parameter(torch.zeros(5)))]
    NullCommunicator().launch(
        BucketBuffer(0, slots, lay_out(slots), "one").payload, CommTiming(), lambda: done.append("filled")
    )
    assert done == ["filled"]
