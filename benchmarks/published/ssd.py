"""SSD-SGD (arXiv 2012.05396), Eq. 4: the mean step over k steps of delay, against the speeds the paper prints.

h_loc, the local update, is not printed. It is set so that one row (ResNet-50, batch 32, k = 5) comes out, and checked
on ResNet-50 with batch 64, where compute is another and communication the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from benchmarks.published.common import DATA, Comparison

GPUS, MACHINES = 16, 4
LOCAL_UPDATE_S = 0.028


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Seconds; backward is taken as twice forward."""

    compute_s: float
    """T_f + T_b on one GPU, from the linear ("optimal") speed."""
    exchange_s: float
    """T_c + h_b^L: what a synchronous step takes beyond forward where communication bounds it (Eq. 2)."""
    local_update_s: float = LOCAL_UPDATE_S

    @property
    def forward_s(self) -> float:
        return self.compute_s / 3

    @property
    def backward_s(self) -> float:
        return self.compute_s * 2 / 3

    @property
    def synchronous_s(self) -> float:
        """Eq. 2 where communication bounds the step."""
        return self.forward_s + self.exchange_s


def case_1_s(terms: Terms, k: int) -> float:
    """Eq. 4, case 1: pushes hide behind compute; every k-th step waits for the pull, or gains what it does not."""
    hidden_s = case_3_s(terms)
    return hidden_s + (terms.exchange_s - terms.backward_s - hidden_s) / k


PUSH_SHARE = 0.5
"""Pushes' share of T_c: pulls have as many bytes."""
BOUND_BY_COMMUNICATION = {"AlexNet, batch 64": "ssd-034", "AlexNet, batch 32": "ssd-035", "VGG-11": "ssd-036"}
"""Models of which no compute time is printed → record of Fig. 7."""


def case_2(k: int) -> float:
    """Eq. 4, case 2, Σh_s + (T_c + h_b^L − T_b − Σh_s)/k, as a share of S-SGD's step, where compute takes nothing: the
    network is never idle.
    """
    return PUSH_SHARE + (1.0 - PUSH_SHARE) / k


def case_3_s(terms: Terms) -> float:
    """Eq. 4, case 3: pushes and pulls hide altogether."""
    return terms.compute_s + terms.local_update_s


@cache
def record(name: str) -> float:
    """The value of a record of `paper_tables.json`."""
    records = json.loads((DATA / "paper_tables.json").read_text(encoding="utf-8"))
    [value] = [item["value"] for item in records if item["id"] == name]
    return float(value)


def batch_32() -> Terms:
    """ResNet-50, 32 images on each GPU: compute from the linear speed, exchange from the speed-up of k = 5."""
    compute_s = GPUS * 32 / record("ssd-025")
    return Terms(compute_s=compute_s, exchange_s=measured_k5_s() * (1 + record("ssd-033") / 100) - compute_s / 3)


def measured_k5_s() -> float:
    """The step of SSD-SGD, k = 5, from the speed of one machine."""
    return GPUS / MACHINES * 32 / record("ssd-019")


def comparisons() -> list[Comparison]:
    """What Eq. 4 says, beside what was measured."""
    small = batch_32()
    large = Terms(compute_s=GPUS * 64 / record("ssd-026"), exchange_s=small.exchange_s)
    return [
        Comparison(
            what="ResNet-50, batch 32: step at k = 5 (case 1)",
            published=measured_k5_s(),
            ours=case_1_s(small, 5),
            by_construction=True,
        ),
        *(
            Comparison(
                what=f"ResNet-50, batch 64: S-SGD over SSD-SGD, k = {k} (case 3)",
                published=1 + record(name) / 100,
                ours=large.synchronous_s / case_3_s(large),
                unit="×",
            )
            for k, name in ((2, "ssd-032"), (5, "ssd-037"))
        ),
        *(
            Comparison(
                what=f"{what}: S-SGD over SSD-SGD, k = 5 (case 2, bound by communication alone)",
                published=1 + record(name) / 100,
                ours=1.0 / case_2(5),
                unit="×",
            )
            for what, name in BOUND_BY_COMMUNICATION.items()
        ),
    ]
