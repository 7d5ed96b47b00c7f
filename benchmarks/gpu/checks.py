"""The kernels against their references, bit for bit, on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.inputs import FAMILIES, family, steady_residual
from benchmarks.gpu.timing import captured
from benchmarks.gpu.wire_results import same, wire_results
from planner.profile.bench import synchronize
from runtime.kernels import (
    ALL_AT_ONCE,
    ONE_BY_ONE,
    Shape,
    TopkState,
    ef_topk_,
    ef_topk_torch,
    make_state,
    ms_topk_,
    ms_topk_torch,
    unpack_,
    unpack_torch,
)
from runtime.kernels.backend import backend_for
from runtime.kernels.checks import FLOATS
from runtime.kernels.state import WARM
from runtime.plan import CompressorSpec
from runtime.sparse.compressors.wire import EIGHT_BITS, WIRE_DTYPES, make_wire

Found = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Scale:
    """How much is checked."""

    elements: tuple[int, ...] = (1, 31, 33, 4093, 4096, 4097, 200_003, 1 << 20, (1 << 20) + 1)
    family_elements: int = 300_007
    steps: int = 200
    repeats: int = 100
    shapes: tuple[Shape, ...] = (
        Shape(), Shape(threads=256), Shape(threads=128, vectors=1), Shape(threads=512, vectors=4),
        Shape(threads=1024, vectors=2, min_blocks=1), Shape(threads=64, vectors=3),
    )  # fmt: skip
    large: tuple[int, ...] = (1 << 24, (1 << 26) + 1, 1 << 28, (1 << 29) + 5)
    """Where there is memory for the reference; the last one is of more than 2 GiB: byte offsets beyond 32 bits."""
    families: tuple[str, ...] = tuple(FAMILIES)
    streams: int = 4


SMALL = Scale(
    elements=(1, 33, 4097), family_elements=4203, steps=6, repeats=2, shapes=(Shape(),), large=(1 << 16,),
    families=("normal", "few values", "nan", "all equal", "infinities", "any bits"), streams=2,
)  # fmt: skip
"""On a CPU, and under a sanitizer, which takes a hundred times as long."""
REFERENCE_BYTES = 72
"""Of an element, what it takes to select from it in torch, at the most."""


def select(state: TopkState, gradient: Tensor, residual: Tensor, launches: int = ALL_AT_ONCE) -> Found:
    """(values, indices, new residual)."""
    found = (
        torch.full((state.k,), 7, dtype=residual.dtype, device=residual.device),
        torch.full((state.k,), -1, dtype=torch.int32, device=residual.device),
        torch.full_like(residual, 7),
    )
    ef_topk_(gradient, (residual, found[2]), found[:2], state, launches=launches)
    return found


class Checks:
    """Counts comparisons, and keeps the names of those that failed."""

    def __init__(self, device: torch.device, scale: Scale) -> None:
        self.device, self.scale = device, scale
        self.made = 0
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def all(self) -> None:
        """Every check."""
        for check in (
            self.numbers_of_elements, self.kinds_of_input, self.wrong_predictions, self.shapes, self.segments,
            self.mstopk, self.unpacking, self.steady_state, self.graph, self.streams, self.wire, self.large,
        ):  # fmt: skip
            print(f"checking {check.__name__.replace('_', ' ')}", flush=True)
            check()

    def expect(self, name: str, found: Found, expected: Found) -> None:
        """One comparison."""
        self.made += 1
        if not same(found, expected):
            self.failed.append(name)

    def family(self, name: str, elements: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One input, on the device."""
        return family(name, elements, seed, dtype).to(self.device)

    def state(self, elements: int, k: int, shape: Shape | None = None, capacity: int | None = None) -> TopkState:
        """Of one segment."""
        return make_state([elements], [k], self.device, shape=shape, capacity=capacity)

    def numbers_of_elements(self) -> None:
        """From one element on, also where tensors begin at odd places."""
        for n in self.scale.elements:
            for k in sorted({k for k in (1, 2, 31, n // 1000, n // 100, n // 10, n - 1, n) if 1 <= k <= n}):
                state, residual = self.state(n, k), torch.zeros(n, device=self.device)
                for shift in (0, 1):
                    gradient = self.family("normal", n + 1, shift)[shift : shift + n]
                    found = select(state, gradient, residual)
                    self.expect(f"{k} of {n}, from {shift}", found, ef_topk_torch(gradient, residual, k))
                    residual = found[2]

    def kinds_of_input(self) -> None:
        """All families, dtypes and some k, cold and warm."""
        n = self.scale.family_elements
        for name in self.scale.families:
            for gradient_dtype in FLOATS:
                for dtype in FLOATS:
                    for k in (1, n // 1000, n // 100, n // 3):
                        state, residual = self.state(n, k), torch.zeros(n, dtype=dtype, device=self.device)
                        for seed in range(2):
                            gradient = self.family(name, n, seed, gradient_dtype)
                            found = select(state, gradient, residual)
                            what = f"{name}, {gradient_dtype}, {dtype}, k = {k}, step {seed}"
                            self.expect(what, found, ef_topk_torch(gradient, residual, k))
                            residual = torch.where(found[2].isfinite(), found[2], 0.0)

    def wrong_predictions(self) -> None:
        """Each fallback, and any state."""
        n, k = self.scale.family_elements, self.scale.family_elements // 200
        generator = torch.Generator().manual_seed(1)
        for capacity in (None, k, 3 * k):
            state = self.state(n, k, capacity=capacity)
            for seed in range(12):
                if seed % 2:
                    garbage = torch.randint(-(2**31), 2**31, (len(WARM),), generator=generator)
                    state.warm.copy_(garbage.to(torch.int32))
                gradient = self.family(("normal", "all equal", "two values")[seed % 3], n, seed)
                residual = self.family("normal", n, seed + 50)
                found = select(state, gradient, residual, (ALL_AT_ONCE, ONE_BY_ONE)[seed // 6])
                self.expect(f"capacity {capacity}, state {seed}", found, ef_topk_torch(gradient, residual, k))

    def shapes(self) -> None:
        """Results, and what is left for the next step, do not depend on threads, tiles and launches."""
        n, k = self.scale.family_elements, self.scale.family_elements // 100
        gradient, residual = self.family("few values", n, 1), self.family("normal", n, 2)
        expected = ef_topk_torch(gradient, residual, k)
        for shape in self.scale.shapes:
            for launches in (ALL_AT_ONCE, ONE_BY_ONE):
                state = self.state(n, k, shape)
                for _ in range(2):
                    self.expect(f"{shape}, launches {launches}", select(state, gradient, residual, launches), expected)

    def segments(self) -> None:
        """Many in one launch."""
        sizes = [1, 700, 33, self.scale.family_elements, 3, 4093, 8192, 64, *range(60, 100)]
        k = [max(1, size // 50) for size in sizes]
        state = make_state(sizes, k, self.device)
        residual = torch.zeros(sum(sizes), device=self.device)
        for step in range(4):
            parts = [self.family(("normal", "few values")[i % 2], size, 7 * step + i) for i, size in enumerate(sizes)]
            one_by_one = [
                ef_topk_torch(part, held, kept)
                for part, held, kept in zip(parts, residual.split(sizes), k, strict=True)
            ]
            starts = torch.tensor([0, *sizes[:-1]]).cumsum(0).tolist()
            expected = (
                torch.cat([one[0] for one in one_by_one]),
                torch.cat([one[1] + start for one, start in zip(one_by_one, starts, strict=True)]),
                torch.cat([one[2] for one in one_by_one]),
            )
            found = select(state, torch.cat(parts), residual)
            self.expect(f"{len(sizes)} segments, step {step}", found, expected)
            residual = found[2]

    def mstopk(self) -> None:
        """Thresholds, and runs of what lies between them."""
        n, k = self.scale.family_elements, self.scale.family_elements // 100
        for name in ("normal", "narrow", "all equal", "lognormal"):
            state = self.state(n, k)
            for seed in range(3):
                gradient, residual = self.family(name, n, seed), self.family("normal", n, 9)
                values = torch.empty(k, device=self.device)
                indices, new = torch.empty(k, dtype=torch.int32, device=self.device), torch.empty_like(residual)
                ms_topk_(gradient, (residual, new), (values, indices), state, seed=seed)
                self.expect(
                    f"MSTopK, {name}, step {seed}",
                    (values, indices, new),
                    ms_topk_torch(gradient, residual, k, seed=seed),
                )

    def unpacking(self) -> None:
        """Messages of many ranks. The reference runs on the host, where sums have an order."""
        n, k = self.scale.family_elements, self.scale.family_elements // 100
        generator = torch.Generator().manual_seed(3)
        for ranks in (1, 4, 64):
            indices = torch.stack([torch.randperm(n, generator=generator)[:k].sort().values for _ in range(ranks)])
            values, indices = torch.randn(ranks, k, generator=generator), indices.to(torch.int32)
            sums = torch.empty(n, device=self.device)
            unpack_(sums, values.to(self.device), indices.to(self.device), factor=1 / ranks)
            expected = unpack_torch(values, indices, n, factor=1 / ranks, dtype=torch.float32).to(self.device)
            self.expect(f"unpacking of {ranks} ranks", (sums,) * 3, (expected,) * 3)

    def steady_state(self) -> None:
        """A long run of error feedback, with shocks; most steps read everything once."""
        n = self.scale.family_elements
        for density in (0.01, 0.001):
            k = int(density * n)
            state, residual = self.state(n, k), steady_residual(n, k, self.scale.steps).to(self.device)
            for step in range(self.scale.steps):
                scale = {self.scale.steps // 3: 10.0, self.scale.steps // 2: 0.1}.get(step, 1.0)
                gradient = scale * self.family("normal", n, step)
                found = select(state, gradient, residual)
                self.expect(
                    f"steady state, density {density}, step {step}", found, ef_topk_torch(gradient, residual, k)
                )
                residual = found[2]
            if backend_for(self.device) is None:
                continue  # references predict nothing
            (counters,) = state.counters()
            self.made += 1
            if counters["hits"] < 0.9 * self.scale.steps - 4:
                self.failed.append(f"steady state, density {density}: {counters}")

    def graph(self) -> None:
        """A captured call, replayed, gives the same bits every time."""
        n, k = self.scale.family_elements, self.scale.family_elements // 100
        gradient, residual = self.family("laplace", n, 1), self.family("normal", n, 2)
        expected, state = ef_topk_torch(gradient, residual, k), self.state(n, k)
        found = select(state, gradient, residual)
        replay = captured(lambda: ef_topk_(gradient, (residual, found[2]), found[:2], state), self.device)
        for repeat in range(self.scale.repeats):
            for tensor in found:
                tensor.zero_()
            replay()
            self.expect(f"graph, replay {repeat}", found, expected)

    def streams(self) -> None:
        """Selections that run at the same time on streams of their own, beside products of matrices."""
        n, k = self.scale.family_elements, self.scale.family_elements // 50
        count, on_device = self.scale.streams, self.device.type == "cuda"
        gradients = [self.family("normal", n, seed) for seed in range(count)]
        residuals = [self.family("laplace", n, 100 + seed) for seed in range(count)]
        expected = [ef_topk_torch(*pair, k) for pair in zip(gradients, residuals, strict=True)]
        states, other = [self.state(n, k) for _ in range(count)], torch.randn(512, 512, device=self.device)
        lanes = [torch.cuda.Stream(self.device) if on_device else None for _ in range(count)]
        synchronize(self.device)
        for repeat in range(self.scale.repeats):
            found: list[Found] = []
            for lane, state, gradient, residual in zip(lanes, states, gradients, residuals, strict=True):
                with torch.cuda.stream(lane):
                    other @ other
                    found.append(select(state, gradient, residual))
            synchronize(self.device)
            for stream, (one, right) in enumerate(zip(found, expected, strict=True)):
                self.expect(f"stream {stream} of {count}, repeat {repeat}", one, right)

    def wire(self) -> None:
        """All that a narrow format does, against torch on the host."""
        for code in WIRE_DTYPES:
            for block in (None, 64, 512) if code in EIGHT_BITS else (None,):
                spec = CompressorSpec(name="wire", dtype=code, block=block)
                for name in self.scale.families:
                    for parts, n in ((1, 1024), (3, self.scale.family_elements)):
                        for dtype in FLOATS:
                            what = f"{code}, {block}, {name}, {parts} parts"
                            for swapped in (False, True):
                                self._wire(what, spec, parts, name, n, dtype, swapped)

    def _wire(
        self, what: str, spec: CompressorSpec, parts: int, name: str, n: int, dtype: torch.dtype, swapped: bool
    ) -> None:
        wholes = family(name, n + 1, 1, dtype), family("normal", n + 1, 2, torch.float32)
        compressor = make_wire(spec, parts)
        if self.device.type == "cuda" and not compressor.runs_on(self.device, compressor.cut(n, parts, torch.float32)):
            self.failed.append(f"{what}: no kernel runs")
            return
        flag = torch.tensor([int(swapped)], dtype=torch.int32, device=self.device) if swapped else None
        expected = wire_results(compressor, parts, wholes[0][1:], wholes[1][1:])
        if self.device.type != "cuda":
            flag = None  # nothing but kernels looks at it
        there = [whole.to(self.device)[1:] for whole in wholes]
        found = wire_results(compressor, parts, there[0], there[1], flag)
        self.made += 1
        if not same(tuple(one.cpu() for one in found), expected):
            self.failed.append(f"{what}, {dtype}, swapped {swapped}")

    def large(self) -> None:
        """Sizes of merged buckets and beyond: begun at an odd place, with NaN, and all equal; cold, then warm."""
        for n in self.scale.large:
            if self.device.type == "cuda" and torch.cuda.mem_get_info(self.device)[0] < REFERENCE_BYTES * n + (4 << 30):
                self.skipped.append(f"{n:,} elements: the reference finds no memory")
                continue
            k = max(1, n // 1000)
            for what in ("normal", "nan", "all equal"):
                whole = torch.randn(n + 1, device=self.device)
                if what == "nan":
                    whole[:: max(2, n // 64)] = torch.nan
                elif what == "all equal":
                    whole.fill_(-1.25)
                gradient, residual = whole[1:], torch.zeros(n, device=self.device)
                state = self.state(n, k)
                for heat in ("cold", "warm"):
                    found = select(state, gradient, residual)
                    self.expect(f"{n:,} elements, {what}, {heat}", found, ef_topk_torch(gradient, residual, k))
                    residual = torch.where(found[2].isfinite(), found[2], 0.0)
                    del found
