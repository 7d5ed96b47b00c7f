"""Narrow codes by kernels: on the host, against what torch makes of the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import FAMILIES, FLOATS, expect_equal_wire, family
from kernel_host import HostBackend, needs_compiler, small_library

from runtime.kernels.source import WIRE_CODES
from runtime.plan import CompressorSpec

pytestmark = needs_compiler


def host(seed: int = 1) -> HostBackend:
    return HostBackend(small_library(), grid=3, resident=2, seed=seed)


def spec_of(code: str, block: int | None = None) -> CompressorSpec:
    return CompressorSpec(name="wire", dtype=code, block=block if code in ("int8", "float8_e4m3fn") else None)


@pytest.mark.parametrize("code", WIRE_CODES)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_kind_of_input(name: str, code: str) -> None:
    """Over steps, whose residuals go on; blocks of a width that is a multiple of four, and not."""
    for parts, n, block in ((1, 1024, 128), (3, 2 * 3 * 153 - 2, None)):
        residual = torch.zeros(n)
        for step in range(2):
            for dtype in FLOATS:
                gradient = family(name, n, step, dtype)
                found = expect_equal_wire(
                    host(step), spec_of(code, block), parts, gradient, residual, swapped=step == 1
                )
            residual = torch.where(found.isfinite(), found, 0.0).clone()


@settings(max_examples=80, deadline=None)
@given(
    code=st.sampled_from(WIRE_CODES),
    name=st.sampled_from(["normal", "any bits", "few values", "signed zeros", "layers", "infinities", "overflow"]),
    n=st.integers(1, 2500),
    parts=st.integers(1, 5),
    block=st.integers(64, 512),
    begins=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 1000),
)
def test_every_shape(code: str, name: str, n: int, parts: int, block: int, begins: tuple[int, int], seed: int) -> None:
    """Tensors may begin anywhere, parts be shorter than others, or empty."""
    gradient, residual = (family(name, n + 4, seed + i, torch.float32)[at : at + n] for i, at in enumerate(begins))
    residual = residual.nan_to_num(0.0, 0.0, 0.0)
    for dtype in FLOATS:
        expect_equal_wire(host(seed), spec_of(code, block), parts, gradient.to(dtype), residual, swapped=bool(seed % 2))


@pytest.mark.parametrize("code", WIRE_CODES)
def test_numbers_around_every_power_of_two(code: str) -> None:
    """As the largest of a block and as a small one; ties, subnormal codes and the ends of the range among them."""
    near = torch.tensor([1, 1 + 2.0**-23, 1 + 2.0**-8, 1 + 2.0**-4, 1.25, 1 + 3 * 2.0**-4, 2 - 2.0**-8, 2 - 2.0**-23])
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    values = (powers[:, None] * near.double()).float()
    rolled = torch.cat([values.view(-1), *(values.roll(by, 0).view(-1) * sign for by, sign in ((9, -1), (20, 1)))])
    gradient = torch.stack((rolled, -rolled.flip(0)), 1).reshape(-1)
    expect_equal_wire(host(), spec_of(code, 64), 4, gradient, torch.zeros_like(gradient))
    expect_equal_wire(host(), spec_of(code, 64), 1, values.view(-1), torch.zeros(values.numel()))
