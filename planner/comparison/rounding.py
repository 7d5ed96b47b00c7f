"""DDP with sums in another order, as a communication hook: averages differ by rounding alone.

Annotations are objects, not text: DDP looks at those of a hook.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from planner.jobs.training import SEED


@dataclass(frozen=True)
class RoundingState:
    """The ranks of `rounding_hook`, and a generator of each bucket, the same on all of them."""

    group: Any
    generators: dict[int, torch.Generator]

    def signs(self, bucket: Any) -> Tensor:
        """Return −1, 0 or 1 for each element of a `torch.distributed.GradBucket`."""
        flat = bucket.buffer()
        found = self.generators.get(bucket.index())
        if found is None:
            found = self.generators[bucket.index()] = torch.Generator(flat.device).manual_seed(SEED + bucket.index())
        return torch.randint(-1, 2, flat.shape, generator=found, device=flat.device, dtype=torch.int8)


def rounding_hook(state: RoundingState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket of DDP as without a hook, then round each element one unit up, down, or not at all."""
    signs = state.signs(bucket)
    flat = bucket.buffer()
    epsilon = torch.finfo(flat.dtype).eps

    def rounded(done: torch.futures.Future[Tensor]) -> Tensor:
        averaged = done.value()
        return averaged.mul_(1.0 + epsilon * signs.to(averaged.dtype))

    return default_hooks.allreduce_hook(state.group, bucket).then(rounded)
