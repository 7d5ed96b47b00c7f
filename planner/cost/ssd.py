"""SSD-SGD's own model of its step (arXiv 2012.05396, Eq. 4): the mean over k steps, in closed form.

A step computes for C = T_f + T_b + h_loc. Its pushes (Σ h_s) begin with the first gradient, at T_f + h_b^L, and are
sent during backward and the next step. After every k-th step the pull follows: pushes, sync, update and pull together
take T_c, and have to end before the local update of the next step, 2·T_f + 2·T_b + h_loc after the step's begin. What
they are later than that, L = T_c + h_b^L − T_f − 2·T_b − h_loc, is exposed once in k steps.

| case | holds where | mean step |
| --- | --- | --- |
| 1 | Σ h_s < C and L > 0: pushes hide, the pull does not | C + L / k |
| 2 | Σ h_s ≥ C: the network is never idle, and sets the pace | Σ h_s + (T_c + h_b^L − T_b − Σ h_s) / k |
| 3 | Σ h_s < C and L ≤ 0: nothing is exposed any more | C |

The paper prints the condition of case 1 as Σ h_s < T_b + T_f + h_loc^1; what separates it from case 3 is the sign of L,
for case 1 would otherwise be faster than computation alone. Its h_loc^1 is the local update of the first layer, the
others being updated during backward; here the local update follows backward as a whole.

The closed form knows nothing of a backlog: it takes the network as idle when the k-th step begins to push, and messages
as following one another without a gap. In case 2 it takes T_b − h_b^L off every cycle, which a network that is never
idle cannot save. So without contention it is never above what `planner.model.delay` simulates, and equal to it for one
bucket (h_b^L = T_b), where every one of its assumptions holds and neither packing pushes nor taking pulled weights
costs anything: it knows nothing of these either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Terms of Eq. 4; the paper's letters in brackets."""

    forward_us: float
    """[T_f]"""
    backward_us: float
    """[T_b]"""
    first_us: float
    """[h_b^L] From the start of backward until the first bucket is ready."""
    push_us: float
    """[Σ h_s] All pushes of a step, and the owners' update behind them."""
    exchange_us: float
    """[T_c] All pushes, sync, the owners' update, and all pulls."""
    local_update_us: float
    """[h_loc]"""

    @property
    def compute_us(self) -> float:
        """[C] A step without communication."""
        return self.forward_us + self.backward_us + self.local_update_us

    @property
    def late_us(self) -> float:
        """[L] By how much the pull comes too late for the local update of the next step; negative: earlier."""
        begun_us = self.forward_us + self.first_us
        return begun_us + self.exchange_us - (self.compute_us + self.forward_us + self.backward_us)

    @property
    def case(self) -> Literal[1, 2, 3]:
        """Return the case of Eq. 4 that holds; the same for every k."""
        if self.push_us >= self.compute_us:
            return 2
        return 1 if self.late_us > 0.0 else 3


def mean_step_us(terms: Terms, k: int) -> float:
    """Eq. 4."""
    if terms.case == 3:
        return terms.compute_us
    if terms.case == 1:
        return terms.compute_us + terms.late_us / k
    once_us = terms.exchange_us + terms.first_us - terms.backward_us - terms.push_us
    return terms.push_us + once_us / k
