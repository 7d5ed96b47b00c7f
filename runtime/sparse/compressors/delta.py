"""δ of LAGS-SGD's Assumption 1 (Shi et al., Eq. 21): is top-k of each rank as good as random-k of the sum would be?"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def delta(accumulated_sum: Tensor, sent_sum: Tensor, k: int) -> float:
    """‖Σacc − Σsent‖² / E‖Σacc − RandK(Σacc)‖²; the assumption, and with it convergence, holds while δ ≤ 1.

    RandK keeps each of n elements with probability k/n, so the expectation is (1 − k/n)·‖Σacc‖²: nothing is drawn.

    Args:
        accumulated_sum: the sum over ranks of residual + gradient.
        sent_sum: the sum over ranks of what was sent, zero where nothing was.
        k: elements that each rank sent.

    Returns:
        0 where nothing was left behind; +∞ where something was though random-k would leave nothing; NaN where the sums
        are not finite.
    """
    elements = accumulated_sum.numel()
    if sent_sum.shape != accumulated_sum.shape or not 0 <= k <= elements:
        raise ValueError(
            f"delta: found k = {k} of tensors of {tuple(accumulated_sum.shape)} and {tuple(sent_sum.shape)}; expected "
            f"two of one shape and k between 0 and their elements"
        )
    left = float(torch.linalg.vector_norm(accumulated_sum - sent_sum, dtype=torch.float64)) ** 2
    if left == 0.0:
        return 0.0
    whole = float(torch.linalg.vector_norm(accumulated_sum, dtype=torch.float64)) ** 2
    expected = (1.0 - k / elements) * whole
    return left / expected if expected else math.inf
