"""Every way that a bucket may travel, from the registries, with every dtype, and gradients whose sums are exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor, nn

from runtime.checks.plan import check_plan
from runtime.comm.collectives import COLLECTIVES, PHASED
from runtime.plan import CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld, StepPlan, UpdatePlan
from runtime.plan.transports import Transport
from runtime.sparse.compressors import COMPRESSORS, Family
from runtime.sparse.compressors.sparse import SELECTORS
from runtime.sparse.compressors.wire import WIRE_DTYPES

DENSITY = 0.3
STEPS = 3

REAL = {
    torch.float64: torch.float64, torch.float32: torch.float32, torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16, torch.complex128: torch.float64, torch.complex64: torch.float32,
}  # fmt: skip
"""Of what each number of a dtype consists."""
UNKNOWN = (torch.complex32, torch.float8_e4m3fn)
"""Dtypes that torch has no sums of on a CPU."""
KINDS: dict[str, tuple[torch.dtype, ...]] = {str(dtype).removeprefix("torch."): (dtype,) for dtype in (*REAL, *UNKNOWN)}
KINDS |= {
    "float32 and float64": (torch.float32, torch.float64),
    "bfloat16, float32 and float16": (torch.bfloat16, torch.float32, torch.float16),
    "float32 and complex64": (torch.float32, torch.complex64),
}
"""The dtypes of a model's parameters, taken in turn."""

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (5, 7), "one": (1,), "none": (0, 3), "vector": (11,), "scalar": (), "row": (1, 9), "nothing": (0,),
}  # fmt: skip
LAYOUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "several": (("matrix", "one", "none"), ("scalar",), ("row", "nothing", "vector")),
    "one element last": (("row", "vector", "nothing", "matrix"), ("none", "one"), ("scalar",)),
    "no element last": (("vector", "scalar", "matrix"), ("one", "row"), ("none", "nothing")),
}
"""The gradients of each bucket, the last of which carries the usage flags."""


@dataclass(frozen=True)
class Cell:
    """One way, one kind of model."""

    transport: Transport
    spec: CompressorSpec
    kind: str
    layout: str
    shared: bool = False
    """Whether ranks share the optimizer's step."""

    @property
    def name(self) -> str:
        spec = self.spec
        given = (
            *(spec.selector, spec.dtype, spec.scope, spec.block),
            *(spec.rounding, spec.error_feedback, spec.links, spec.rank),
        )
        options = " ".join(str(one) for one in given if one is not None)
        shared = ", shared step" if self.shared else ""
        return f"{self.transport} {spec.name} {options}, {self.kind}, {self.layout}{shared}"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return KINDS[self.kind]

    @property
    def mixed(self) -> bool:
        """Whether a bucket has several dtypes."""
        of = dict(zip(SHAPES, cycle(self.dtypes), strict=False))
        return any(len({of[name] for name in names}) > 1 for names in LAYOUTS[self.layout])

    def plan(self, ranks: int, **changes: Any) -> Plan:
        """All buckets travel that way."""
        buckets = tuple(
            PlanBucket(gradients=names).sent_by(self.transport, self.spec) for names in LAYOUTS[self.layout]
        )
        accuracy = "exact" if self.spec.name == "none" else "bounded"
        values: dict[str, Any] = {"model": ModelReference(name="test"), "world": PlanWorld(ranks=ranks)}
        if self.shared:
            values |= {"updates": UpdatePlan(step=StepPlan(sharded=True)), "interface": ("sharded-step",)}
        return Plan(**(values | {"accuracy": accuracy, "buckets": buckets} | changes))


def specs_of(name: str, family: Family) -> Iterator[CompressorSpec]:
    """Each of a compressor's variants once."""
    if "dtype" in family.options:
        yield from (CompressorSpec(name=name, dtype=dtype) for dtype in WIRE_DTYPES)
        yield CompressorSpec(name=name, dtype="int8", block=64, rounding="stochastic")
        yield CompressorSpec(name=name, dtype="bfloat16", rounding="stochastic", error_feedback=False)
        yield CompressorSpec(name=name, dtype="int8", rounding="stochastic", links="inter")
        yield CompressorSpec(name=name, dtype="bfloat16", error_feedback=False, links="inter")
    elif "selector" in family.options:
        yield from (CompressorSpec(name=name, selector=selector, density=DENSITY) for selector in SELECTORS)
        yield CompressorSpec(name=name, density=DENSITY, scope="layer")
    elif "density" in family.options:
        yield CompressorSpec(name=name, density=DENSITY)
    elif "rank" in family.options:
        yield from (CompressorSpec(name=name, rank=rank) for rank in (1, 2))
    else:
        yield CompressorSpec(name=name)


SENT_BY = sorted((*COLLECTIVES, *PHASED), key=str)
SPECS = [spec for name, family in COMPRESSORS.items() for spec in specs_of(name, family)]


def carried(transport: Transport, spec: CompressorSpec, shared: bool = False) -> bool:
    """Whether a plan may say so at all."""
    cell = Cell(transport, spec, "float32", "several", shared)
    return check_plan(dict(Given(cell.dtypes).named_parameters()), cell.plan(2), 2) is None


def cells(kind: str, turn: int) -> Iterator[Cell]:
    """Of one kind of model, all ways that a plan may say, each with one of the layouts, which take turns."""
    ways = (way for shared in (False, True) for way in product(SENT_BY, SPECS, (shared,)) if carried(*way))
    for index, (transport, spec, shared) in enumerate(ways):
        yield Cell(transport, spec, kind, list(LAYOUTS)[(index + turn) % len(LAYOUTS)], shared)


class Given(nn.Module):
    """Parameters that get the gradients that they are given, to the bit."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        for index, (name, shape) in enumerate(SHAPES.items()):
            dtype = dtypes[index % len(dtypes)]
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype, device="cpu")))

    def forward(self, x: Tensor) -> Tensor:
        """Nothing is computed."""
        return x

    def backward(self, gradients: dict[str, Tensor]) -> None:
        """One backward that makes these gradients."""
        parameters = dict(self.named_parameters())
        outputs = [parameters[name] * 1 for name in gradients]
        torch.autograd.backward(outputs, list(gradients.values()))


def gradients_of(dtypes: Sequence[torch.dtype], rank: int, ranks: int, step: int) -> dict[str, Tensor]:
    """A rank's gradients of a step. All sums of all ranks' over all steps are exact, in any order, also divided by the
    number of ranks: multiples of one power of two that use as much of a number's bits as that leaves.

    The matrix is used by rank 0 alone in step 1; in step 0 nobody uses the vector.
    """
    generator = torch.Generator(device="cpu").manual_seed(1000 * step + rank)
    found = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        dtype = dtypes[index % len(dtypes)]
        numbers = _numbers(shape, REAL[dtype], ranks, generator)
        if dtype.is_complex:
            numbers = torch.complex(numbers, _numbers(shape, REAL[dtype], ranks, generator))
        unused = (step, name) == (0, "vector") or (step == 1 and name == "matrix" and rank > 0)
        if not unused:
            found[name] = numbers
    return found


def _numbers(shape: Sequence[int], dtype: torch.dtype, ranks: int, generator: torch.Generator) -> Tensor:
    spare = (ranks * STEPS).bit_length()
    bits = round(-torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64, device="cpu").log2().item()) + 1 - spare
    whole = torch.randint(-(2**bits) + 1, 2**bits, tuple(shape), generator=generator, device="cpu")
    return (whole.to(torch.float64) * ranks * 2.0**-bits).to(dtype)
