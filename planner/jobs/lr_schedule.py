"""Learning-rate recipe of a run: scaling by the batch of all ranks, warm-up, decay. Torch-free.

After "Scaling the Wild: Decentralizing Hogwild!-style Shared-memory SGD" (Chatterjee, Kungurtsev, Alistarh, 2022): the
job's rate is that of one batch; a run of Q ranks with minibatches of B begins with it and reaches B·Q / batch times as
much at the end of a linear warm-up, with blocks (LPP-SGD) 1.25 times that, and decays by a cosine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from runtime.errors import InputError

BLOCKS_FACTOR = 1.25
"""Factor of the rate where updaters alternate between blocks and the model (LPP-SGD)."""

USAGE = "scale:BATCH, warmup:STEPS and cosine, comma-separated"


@dataclass(frozen=True)
class LrSchedule:
    """Factors of the learning rates that a job's optimizer has."""

    scale_batch: int | None = None
    """Batch that the job's rate is for; None: the rate is not scaled."""
    warmup_steps: int = 0
    """Steps in which the rate moves from the job's to the scaled one; from 0 to the job's where it is not scaled."""
    cosine: bool = False
    """Whether the rate decays to 0 after the warm-up, by half a cosine."""
    peak: float = 1.0
    """Factor at the end of the warm-up; `scaled` sets it."""

    @classmethod
    def parse(cls, text: str) -> LrSchedule:
        """Read `--lr-schedule`. Raises InputError where it is none."""
        found = cls()
        for part in filter(None, text.split(",")):
            name, _, value = part.strip().partition(":")
            number = int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0
            if name == "scale" and number:
                found = replace(found, scale_batch=number)
            elif name == "warmup" and number:
                found = replace(found, warmup_steps=number)
            elif name == "cosine" and not value:
                found = replace(found, cosine=True)
            else:
                raise InputError(
                    f"--lr-schedule: found {part.strip()!r}, expected {USAGE}, such as warmup:100; correct it"
                )
        return found

    def scaled(self, samples: int, ranks: int, *, blocks: bool) -> LrSchedule:
        """Return the schedule with its peak.

        Args:
            samples: B, samples of a minibatch.
            ranks: Q, number of ranks.
            blocks: whether updaters have blocks.
        """
        if self.scale_batch is None:
            return self
        return replace(self, peak=samples * ranks / self.scale_batch * (BLOCKS_FACTOR if blocks else 1.0))

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of the job's rate in a step, from 0, of a run of `steps`."""
        if step < self.warmup_steps:
            start = 0.0 if self.scale_batch is None else 1.0
            return start + (self.peak - start) * step / self.warmup_steps
        if not self.cosine:
            return self.peak
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.peak * (1.0 + math.cos(math.pi * min(1.0, done))) / 2.0


CONSTANT = LrSchedule()
"""The job's own learning rates."""


@dataclass(frozen=True)
class Course:
    """Steps that a job trains, and the factors of its learning rates."""

    steps: int
    lr_schedule: LrSchedule = CONSTANT
