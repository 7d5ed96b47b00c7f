"""OMGS-SGD (INFOCOM 2020): sparsified training on 16 P102-100 over 1 Gbit/s, split into its parts.

SLGS selects once after backward and sends one message; OMGS-SGD merges layers into messages that are sent while
backward continues. From the SLGS row and a trace of the model's readiness we predict the best merged schedule: each
gradient's share of the selection delays backward by its size, and the row's communication is a line with the authors'
own start-up, log2(P)·α, whose slope the row gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.published.common import Comparison, model, predict_s, table
from planner.documents.profile import Cluster, Line, SelectionLine

MODELS = {"ResNet-50": "resnet50", "VGG-16": "vgg16", "Inception-v4": "inception-v4"}
NUMEL = {"ResNet-50": 25557032, "Inception-v4": 42679816, "LSTM-PTB": 66034000}
"""Parameters of the models whose size is known for this testbed (VGG-16 there is a Cifar-10 variant)."""

ALPHA_US = 1744.0
"""α in the authors' released solver (utils.py)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of each part of one step."""

    forward_s: float
    backward_s: float
    select_s: float
    communicate_s: float
    ranks: int

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.select_s + self.communicate_s

    @property
    def bound(self) -> float:
        """Eq. 20 of LAGS-SGD: no schedule gains more over SLGS, as selection is part of what computes."""
        computing_s = self.backward_s + self.select_s
        return self.step_s / (self.forward_s + max(computing_s, self.communicate_s))


def measured(name: str, method: str) -> Row:
    """A row of the breakdown; `method` begins with SLGS or OMGS."""
    [line] = [
        line
        for line in table("omgs_infocom20/breakdown_16xP102_1gbe.csv")
        if line["model"] == name and line["method"].startswith(method)
    ]
    return Row(
        forward_s=float(line["forward_s"]),
        backward_s=float(line["backward_s"]),
        select_s=float(line["sparsification_s"]),
        communicate_s=float(line["communication_exposed_s"]),
        ranks=int(line["gpus"]),
    )


def sparsify_line(names: tuple[str, ...]) -> SelectionLine:
    """Selection time per dense byte, the mean over models."""
    rates = [measured(name, "SLGS").select_s * 1e6 / (4 * NUMEL[name]) for name in names]
    return SelectionLine(alpha_us=0.0, beta_us_per_byte=float(f"{sum(rates) / len(rates):.4g}"))


def predicted_selection_s() -> float:
    """ResNet-50's selection by the line of the two other models."""
    return sparsify_line(("Inception-v4", "LSTM-PTB")).beta_us_per_byte * 4 * NUMEL["ResNet-50"] / 1e6


def predicted_speed_up(name: str) -> float:
    """SLGS's step over the best merged one, both predicted from the SLGS row."""
    row, profile = measured(name, "SLGS"), model(MODELS[name])
    gradients = profile.compute.gradients
    backward_us = sum(gradient.backward_us for gradient in gradients)
    numel = sum(gradient.numel for gradient in gradients)
    timed = tuple(
        replace(
            gradient,
            backward_us=gradient.backward_us / backward_us * row.backward_s * 1e6
            + gradient.numel / numel * row.select_s * 1e6,
        )
        for gradient in gradients
    )
    start_up_us = math.log2(row.ranks) * ALPHA_US
    line = Line(alpha_us=start_up_us, beta_us_per_byte=(row.communicate_s * 1e6 - start_up_us) / (4 * numel))
    compute = replace(profile.compute, forward_us=row.forward_s * 1e6, gradients=timed)
    cluster = Cluster(nodes=row.ranks, collectives={"all_reduce": line})
    step = replace(profile, compute=compute)
    return predict_s(step, cluster, "single") / predict_s(step, cluster, "optimal")


def comparisons() -> list[Comparison]:
    """Measured and predicted speed-up of OMGS-SGD over SLGS."""
    return [
        Comparison(
            what=f"{name}: OMGS-SGD over SLGS",
            published=measured(name, "SLGS").step_s / measured(name, "OMGS").step_s,
            ours=predicted_speed_up(name),
            unit="×",
        )
        for name in ("ResNet-50", "VGG-16")
    ]
