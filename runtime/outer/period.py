"""H, the local steps between two rounds of a fragment, and the guard that halves it where workers are too far apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.modes.distance_guard import NO_DISTANCE, DistanceGuard


class Period:
    """The period of one run, the same on all workers."""

    def __init__(self, every: int, *, guarded: bool, warns: bool) -> None:
        """Begin with a plan's `every`.

        Args:
            every: H.
            guarded: whether distances are measured, and shorten it.
            warns: whether this rank warns of that.
        """
        self.every = every
        """H; 0 where steps are synchronous from the next one on."""
        self.guarded = guarded
        """Whether distances are measured, and shorten it; the same on all workers."""
        self.distances = DistanceGuard(warns=warns, taken="averaged")
        self.report = NO_DISTANCE
        """This worker's last distance, which other workers get with the next round."""
        self._lrs: deque[float] = deque(maxlen=every)
        """Sums of the learning rates of the last steps."""

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Note the learning rates of a step; where they are on a device, this waits for it."""
        if self.guarded:
            self._lrs.append(sum(float(group["lr"]) for one in optimizers for group in one.param_groups))

    def see_warmup(self, parameters: Mapping[str, nn.Parameter], left: int) -> None:
        """Note a synchronous step, behind `step`, before local ones; see `DistanceGuard.see_warmup`."""
        if self.guarded:
            self.distances.see_warmup(parameters, self._lrs[-1], left=left, steps=self.every)

    def add(self, parameters: Mapping[str, nn.Parameter], anchors: Mapping[str, Tensor]) -> None:
        """Add anchors that have come, by name, to the distance of this round."""
        if self.guarded:
            self.distances.add(parameters, anchors)

    def measure(self) -> None:
        """End the distance of a round of all fragments: it is reported with the next one."""
        if self.guarded:
            self.report = self.distances.measured(sum(self._lrs))

    def judge(self, reported: Tensor, step: int) -> None:
        """Shorten the period where the distances of all workers, shape (workers, 3), ask for it."""
        if self.every and self.guarded:
            self.shorten(self.distances.judge(reported, step, self.every))

    def shorten(self, every: int) -> None:
        """Take rounds after this many steps from now on; 0: steps are synchronous from the next one on."""
        self.every = every
        if every:
            self._lrs = deque(self._lrs, maxlen=every)

    def state(self) -> dict[str, Any]:
        return {
            "every": self.every, "lrs": list(self._lrs), "distances": self.distances.state(), "report": self.report,
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, but for H."""
        self._lrs, self.report = deque(state["lrs"], maxlen=self._lrs.maxlen), state["report"]
        self.distances.load(state["distances"])
