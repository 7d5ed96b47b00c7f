"""All elements in a narrower dtype; what rounding loses is kept for the next step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.sparse.compressors.magnitudes import CHUNK, accumulate

WIRE_DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class WireCompressor:
    """Sends residual + gradient rounded to `dtype`.

    Finite values stay finite, also in a sum over all ranks in the wire's dtype: they saturate at its largest number /
    ranks, for more than two ranks at half of that, since adding x may raise a rounded sum by 2x. The rest stays in the
    residual. NaN and ±Inf are sent as they are, so that all ranks see them.

    Sent + new residual is residual + gradient bit for bit (−0 may become 0), though each is rounded. Below saturation
    the difference of a number and its rounded self is a multiple of the number's last place and smaller, so it is
    exact. So is number − limit while the number's last place (ulp) divides the limit. Above that, number − limit is
    rounded by less than half an ulp, and adding the limit rounds back, but for one case: the limit is an odd multiple
    of ulp/2, where the rounding may go either way. There the limit without its last bit is sent, which the ulp
    divides.
    """

    def __init__(self, dtype: torch.dtype, ranks: int) -> None:
        self.dtype = dtype
        self.limit = _round_down(torch.finfo(dtype).max / (ranks if ranks <= 2 else 2 * ranks), dtype)
        """The largest finite magnitude that is sent."""
        self._last_bit = _lowest_bit(self.limit)

    def compress(self, gradient: Tensor, residual: Tensor, new_residual: Tensor, step: int) -> Tensor:
        """Return what is sent: 1-D, in the wire's dtype. Arguments as with `SparseCompressor.compress`."""
        sent = torch.empty(gradient.numel(), dtype=self.dtype, device=gradient.device)
        size = CHUNK if gradient.device.type == "cpu" else max(1, gradient.numel())
        for start in range(0, gradient.numel(), size):
            part = slice(start, start + size)
            self._round(accumulate(residual[part], gradient[part], new_residual[part]), sent[part])
        return sent

    def _round(self, total: Tensor, sent: Tensor) -> None:
        """Move what the wire can carry from `total` to `sent`."""
        if total.device.type == "cpu" and bool(total.abs().amax() <= self.limit):  # not where it is NaN
            sent.copy_(total)
            total.sub_(sent)
            return
        total_magnitude = total.abs()
        first = self._last_bit / torch.finfo(total.dtype).eps * 2
        doubtful = (total_magnitude >= first) & (total_magnitude < 2 * first)
        limit = torch.where(doubtful, self.limit - self._last_bit, self.limit).to(total.dtype)
        sent.copy_(torch.where(total.isfinite(), total.clamp(-limit, limit), total))
        total.sub_(sent).nan_to_num_(nan=0.0)  # Inf − Inf: it is sent, nothing is left


def _round_down(value: float, dtype: torch.dtype) -> float:
    rounded = torch.tensor(value, dtype=torch.float64).to(dtype)
    if float(rounded) > value:
        rounded = torch.nextafter(rounded, torch.zeros_like(rounded))
    return float(rounded)


def _lowest_bit(value: float) -> float:
    """The largest power of two that divides a number."""
    numerator, denominator = value.as_integer_ratio()
    return math.ldexp(1.0, (numerator & -numerator).bit_length() - 1) / denominator
