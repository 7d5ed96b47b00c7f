"""Ways to select, each on buffers of its own, in error feedback's steady state."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources

import torch

from runtime.kernels import ONE_BY_ONE, Shape, TopkState, ef_topk_, make_state, ms_topk_, unpack_
from runtime.kernels.backend import Backend, backend_for

MEAN = 0.1
"""Of the elements' lasting means, beside noise of 1."""
WARM_UPS = 300
"""Steps of error feedback before anything is timed."""
ROUNDS = 30


@dataclass
class Buffers:
    """Two steps of error feedback: the residual goes forth, and back again. Tensors of shape (elements,) and (k,)."""

    elements: tuple[int, ...]
    k: tuple[int, ...]
    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of gradients and residuals."""
    shape: Shape = field(default_factory=Shape)
    warm_ups: int = WARM_UPS

    def __post_init__(self) -> None:
        gradient_dtype, dtype = self.dtypes
        n = sum(self.elements)
        mean = MEAN * torch.randn(n, device=self.device)
        self.residuals = [torch.zeros(n, dtype=dtype, device=self.device) for _ in range(2)]
        self.values = torch.empty(sum(self.k), dtype=dtype, device=self.device)
        self.indices = torch.empty(sum(self.k), dtype=torch.int32, device=self.device)
        self.state: TopkState = make_state(self.elements, self.k, self.device, shape=self.shape)
        self.gradients = [torch.empty(n, dtype=gradient_dtype, device=self.device) for _ in range(2)]
        for step in range(self.warm_ups):
            noise = torch.randn(n, device=self.device).add_(mean)
            self.gradients[step % 2].copy_(noise)
            self.step(step % 2)

    def step(self, parity: int) -> None:
        """One step by the kernel."""
        one, other = self.residuals[parity], self.residuals[1 - parity]
        ef_topk_(self.gradients[parity], (one, other), (self.values, self.indices), self.state)

    def cold(self, parity: int) -> None:
        """As if it were the first step."""
        self.state.reset()
        self.step(parity)

    def by_phases(self, parity: int) -> None:
        """A radix select of a kernel for each pass, as RadiK's: digits of 12 bits, from a cold start."""
        self.state.reset()
        one, other = self.residuals[parity], self.residuals[1 - parity]
        gradient = self.gradients[parity]
        ef_topk_(gradient, (one, other), (self.values, self.indices), self.state, launches=ONE_BY_ONE)

    def missed(self, parity: int) -> None:
        """As if the last step had been an octave larger."""
        self.state.warm[:, 0] += 1 << 23
        self.step(parity)

    def by_torch(self, parity: int) -> None:
        """torch's own operations, with as little memory traffic as they allow."""
        residual, k = self.residuals[0], self.values.numel()
        residual.add_(self.gradients[parity])
        chosen = residual.abs().topk(k, sorted=False).indices
        torch.index_select(residual, 0, chosen, out=self.values)
        residual.index_fill_(0, chosen, 0.0)

    def topk(self, parity: int) -> None:
        """torch.topk of magnitudes that are there already: no error feedback, nothing is written back."""
        torch.topk(self._magnitudes, self.values.numel(), sorted=False)

    @cached_property
    def _magnitudes(self) -> torch.Tensor:
        return self.residuals[0].abs()

    def add(self, parity: int) -> None:
        """residual + gradient alone: nobody can go below."""
        torch.add(self.residuals[parity], self.gradients[parity], out=self.residuals[1 - parity])


@dataclass(frozen=True)
class RoundsProgram:
    """`rounds.cu`, in the place of a `runtime.kernels.source.Program`."""

    name: str = "rounds"
    shape: Shape = field(default_factory=Shape)

    @cached_property
    def text(self) -> str:
        """CUDA C++."""
        return resources.files("benchmarks.gpu").joinpath("rounds.cu").read_text(encoding="utf-8")

    def fingerprint(self, *more: str) -> str:
        """Of the text."""
        return hashlib.sha256("\n".join((*more, self.text)).encode()).hexdigest()


class Rounds:
    """MSTopK with 30 rounds of separate kernels."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers, self.program = buffers, RoundsProgram()
        self.backend: Backend | None = backend_for(buffers.device)
        self.search = torch.zeros(32, dtype=torch.int32, device=buffers.device)

    def step(self, parity: int) -> None:
        """One step; without kernels that of the reference."""
        b = self.buffers
        if self.backend is None:
            residuals = (b.residuals[0], b.residuals[1])
            ms_topk_(b.gradients[parity], residuals, (b.values, b.indices), b.state, seed=parity)
            return
        tensors = (b.gradients[parity], b.residuals[0], b.values, b.indices, self.search)
        words = [*(tensor.data_ptr() for tensor in tensors), b.residuals[0].numel(), b.values.numel()]
        arguments = (ctypes.c_uint64 * len(words))(*words)
        for name in ("begin", "accumulate", *["count"] * ROUNDS, "emit"):
            grid = 1 if name == "begin" else self.backend.blocks(self.program, name)  # type: ignore[arg-type]
            self.backend.launch(self.program, name, grid, arguments)  # type: ignore[arg-type]


@dataclass
class Unpacking:
    """Messages of some ranks, and their sum."""

    elements: int
    k: int
    ranks: int
    device: torch.device

    def __post_init__(self) -> None:
        keys = [torch.randperm(self.elements, device=self.device)[: self.k].sort().values for _ in range(self.ranks)]
        self.indices = torch.stack(keys).to(torch.int32)
        self.values = torch.randn(self.ranks, self.k, device=self.device)
        self.sums = torch.empty(self.elements, device=self.device)

    def by_kernel(self, parity: int) -> None:
        """In one launch."""
        unpack_(self.sums, self.values, self.indices, factor=1 / self.ranks)

    def by_torch(self, parity: int) -> None:
        """One operation for each rank."""
        self.sums.zero_()
        for rank in range(self.ranks):
            self.sums.index_add_(0, self.indices[rank], self.values[rank])
        self.sums.mul_(1 / self.ranks)


Step = Callable[[int], None]


def resnet50_like() -> Sequence[int]:
    """161 segments as of ResNet-50: convolutions, two vectors of each normalization, a classifier. 25.6 million."""
    sizes, width = [64 * 3 * 49, 64, 64], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            sizes += [
                width * inner,
                inner,
                inner,
                9 * inner * inner,
                inner,
                inner,
                inner * 4 * inner,
                4 * inner,
                4 * inner,
            ]
            if block == 0:
                sizes += [width * 4 * inner, 4 * inner, 4 * inner]
            width = 4 * inner
    return [*sizes, 2048 * 1000, 1000]
