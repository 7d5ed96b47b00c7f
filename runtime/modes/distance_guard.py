"""The distance of workers from the global weights while they train on their own, and its bounds.

At each pull of a delay, and each round of outer steps, a worker knows how far its own weights have gone from the global
ones, and sends that to the others with a later message. Two measures say whether that is far: the weights themselves,
and what synchronous training moved them by in a period of k steps at the end of the warm-up (a mean of several
periods), per unit of learning rate, which schedulers change. Where workers stay too far by both for some pulls, k is
halved; with k = 1 the run goes back to synchronous steps. All ranks have the same figures at the same step, and decide
alike.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import AccuracyWarning
from runtime.modes.chunks import CHUNK, chunks

MOVEMENT_BOUND, SHARE_BOUND, PULLS = 30.0, 0.05, 3
"""Workers are too far when in so many pulls in a row their mean distance is above this many times the warm-up's
movement, and above this share of the weights: after convergence a single noisy step is many times what a step moves
by. The first is more than twice what healthy runs came to, and what diverges passes both within a few pulls
(docs/results/delay.md has the figures)."""
WINDOWS = 8
"""Number of times k steps at the end of the warm-up over which its movement is averaged."""
KEPT = 1000
NO_DISTANCE = (0.0, 0.0, 0.0)
"""Sent in steps without a pull: (whether there is a distance, per unit of learning rate, as a share of the weights)."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """The distance of all ranks at one pull."""

    step: int
    mean: float
    """‖own weights − global weights‖ per unit of learning rate, mean over ranks."""
    largest: float
    relative: float
    """The mean over what the weights moved by in as many steps of the warm-up."""
    share: float
    """‖own weights − global weights‖ / ‖global weights‖, mean over ranks."""


def norm(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> float:
    """‖tensors − others‖ over all of the names in `others`; without any, ‖tensors‖."""
    mine = [_real(tensors[name]) for name in (tensors if others is None else others)]
    if others is None:
        apart = (part for (parts,) in chunks(mine) for part in parts)
    else:
        theirs = [_real(other.to(one.device)) for one, other in zip(mine, others.values(), strict=True)]
        apart = (one - other for pair in chunks(mine, theirs) for one, other in zip(*pair, strict=True))
    squares = [_square(part) for part in apart]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _square(part: Tensor) -> Tensor:
    """‖part‖²: of few elements in single precision, whatever theirs is; of many, or on a device, in double."""
    if part.device.type != "cpu" or part.numel() > CHUNK:
        square: Tensor = torch.linalg.vector_norm(part, dtype=torch.float64) ** 2
        return square
    flat = part.reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    return torch.dot(flat, flat).double()


class DistanceGuard:
    """Distances of one run."""

    def __init__(self, *, warns: bool = True, taken: str = "pulled") -> None:
        """Watch a run.

        Args:
            warns: whether this rank warns of what all ranks find alike.
            taken: what happens to weights once in a period, for that warning.
        """
        self._warns, self._taken = warns, taken
        self._snapshot: dict[str, Tensor] | None = None
        self._lr_since = 0.0
        self._moved: list[float] = []
        """Movement in each k of the last steps of the warm-up, per unit of learning rate."""
        self.base: float | None = None
        """Mean of that; None: the first distance is taken for it."""
        self._alarms = 0
        """Pulls in a row in which ranks were too far."""
        self._squares = (0.0, 0.0)
        """‖own weights − global weights‖² and ‖global weights‖² of the parts that have been added."""
        self.samples: deque[Distance] = deque(maxlen=KEPT)

    def state(self) -> dict[str, Any]:
        return {
            "base": self.base, "alarms": self._alarms, "snapshot": copy.deepcopy(self._snapshot),
            "lr_since": self._lr_since, "moved": list(self._moved), "squares": self._squares,
            "samples": [asdict(sample) for sample in self.samples],
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        self.base, self._alarms = state["base"], state["alarms"]
        self._snapshot, self._lr_since = copy.deepcopy(state["snapshot"]), state["lr_since"]
        self._moved, self._squares = list(state["moved"]), state.get("squares", (0.0, 0.0))
        self.samples = deque((Distance(**sample) for sample in state["samples"]), maxlen=KEPT)

    def see_warmup(self, parameters: Mapping[str, nn.Parameter], lr: float, *, left: int, steps: int) -> None:
        """Note a step of the warm-up, whose learning rates add up to `lr`; `left` more follow, `steps` is k."""
        if left > WINDOWS * steps:
            return
        self._lr_since += lr
        if left % steps == 0:
            if self._snapshot is not None and self._lr_since > 0.0:
                self._moved.append(norm(parameters, self._snapshot) / self._lr_since)
            self._snapshot = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            self._lr_since = 0.0
        if left <= 0:
            self.base = sum(self._moved) / len(self._moved) if any(self._moved) else None
            self._snapshot = None

    def measure(
        self, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor], lr_sum: float
    ) -> tuple[float, float, float]:
        """Return how far this rank's weights are from the global ones, for the others; `lr_sum` of the same steps."""
        self.add(parameters, weights)
        return self.measured(lr_sum)

    def add(self, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
        """Add a part of the global weights, by name, which comes by itself."""
        apart, size = self._squares
        self._squares = apart + norm(parameters, weights) ** 2, size + norm(weights) ** 2

    def measured(self, lr_sum: float) -> tuple[float, float, float]:
        """Return the distance of all parts that were added, and begin anew; see `measure`."""
        (apart, size), self._squares = map(math.sqrt, self._squares), (0.0, 0.0)
        if lr_sum <= 0.0:
            return NO_DISTANCE
        return 1.0, apart / lr_sum, apart / size if size > 0.0 else math.inf

    def judge(self, reported: Tensor, step: int, steps: int) -> int:
        """Return k from now on, 0 for synchronous steps, by what ranks measured (shape (ranks, 3)); warn if changed."""
        fresh = reported[:, 0] > 0.0
        if not bool(fresh.any()):
            return steps
        distances = reported[fresh, 1]
        mean = float(distances.mean())
        if self.base is None and math.isfinite(mean) and mean > 0.0:  # no warm-up: by the first pull
            self.base = mean
        relative = mean / self.base if self.base else math.inf if not math.isfinite(mean) else 0.0
        share = float(reported[fresh, 2].mean())
        found = Distance(step=step, mean=mean, largest=float(distances.max()), relative=relative, share=share)
        self.samples.append(found)
        # `not … <=`: a share that is NaN is too far, too.
        self._alarms = self._alarms + 1 if relative > MOVEMENT_BOUND and not share <= SHARE_BOUND else 0
        if self._alarms < PULLS:
            return steps
        self._alarms, last = 0, list(self.samples)[-PULLS:]
        following = steps // 2
        when = f"every {following} steps" if following > 1 else "in every step"
        if not self._warns:
            return following
        values = ", ".join(f"{sample.relative:.1f} ({sample.share:.0%})" for sample in last)
        warnings.warn(
            f"ranks' weights are far from the global ones (by {values} times what the warm-up moved them by, expected "
            f"at most {MOVEMENT_BOUND:g} or {SHARE_BOUND:.0%} of the weights): from step {step + 1} on "
            f"{f'weights are {self._taken} {when}' if following else 'steps are synchronous'}, and take longer than "
            f"predicted",
            AccuracyWarning,
            stacklevel=2,
        )
        return following
