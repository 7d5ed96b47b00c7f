"""The base of LARS and LAMB: which layers they adapt, how these are grouped, and which rank computes the norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.world import World, deadlines
from runtime.errors import InputError
from runtime.monitor.clock import Clock
from runtime.optimizers.norms import LayerNorms, norm_dtype
from runtime.optimizers.pto import Split
from runtime.plan.lpt import longest_first

Closure = Callable[[], Any]
"""Runs forward and backward again, and returns the loss."""


@dataclass(frozen=True)
class Batch:
    """Parameters of one group that are updated alike; lists have one tensor for each."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    group: Mapping[str, Any]
    weight_decay: float
    adapted: bool
    """Whether each layer's step is scaled by its norms."""


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer that scales the step of each layer by two norms.

    A layer is a parameter. Two options of each parameter group say which are adapted: `adapt` (none where False), and
    `exclude_1d`: scalars and vectors, which biases and the weights of normalization layers are, are neither adapted nor
    decayed. Others can be excluded by a group of their own with `adapt=False` and `weight_decay=0.0`.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._norms, self._own_world = LayerNorms(), World()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Share no norms in a copy, or after unpickling: the ranks may be others."""
        super().__setstate__(state)
        self._norms, self._own_world = LayerNorms(), World()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.add_param_group`. Raises InputError: an option is out of its range."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except InputError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise InputError where an option of a group is out of its range."""
        raise NotImplementedError

    def _update(self, batches: list[Batch], layers: list[Tensor], dtype: torch.dtype) -> None:
        """Update the parameters of all batches; `layers` are the adapted ones in their order."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Update once; return the loss of `closure`, which evaluates the model again.

        Raises:
            InputError: a gradient is sparse, or parameters are on several devices.
            CommunicationError: norms are shared, and another rank died or missed the deadline.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = list(self._batches())
        layers = [parameter for batch in batches if batch.adapted for parameter in batch.parameters]
        if batches or self._norms.split is not None:
            self._update(batches, layers, norm_dtype(self.adapted()))
        return loss

    def adapted(self) -> list[Tensor]:
        """Return the parameters whose steps are scaled by norms, whether they have a gradient or not."""
        return [p for group in self.param_groups for p in group["params"] if _is_adapted(p, group)]

    def _batches(self) -> Iterator[Batch]:
        """Yield the parameters that have a gradient: of each group those that are adapted, then the others."""
        devices = set()
        for group in self.param_groups:
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            for adapted in (True, False):
                for excluded in (False, True):
                    chosen = [
                        p for p in present
                        if _is_adapted(p, group) == adapted and _is_excluded(p, group) == excluded
                    ]  # fmt: skip
                    if chosen:
                        decay = 0.0 if excluded else group["weight_decay"]
                        yield Batch(chosen, [p.grad for p in chosen], group, decay, adapted)
            devices |= {parameter.device for parameter in present}
            sparse = next((p for p in present if p.grad.layout != torch.strided), None)
            if sparse is not None:
                raise InputError(
                    f"{type(self).__name__}: found a sparse gradient of a parameter of shape {tuple(sparse.shape)}, "
                    f"expected dense ones; use sparse=False, or another optimizer for that parameter"
                )
        if len(devices) > 1:
            listed = ", ".join(sorted(map(str, devices)))
            raise InputError(
                f"{type(self).__name__}: found parameters on several devices ({listed}), expected one; make an "
                f"optimizer for each"
            )

    # The ranks that compute norms.

    def share_norms(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float | None = None) -> None:
        """Share the work of computing norms from the next step on (PTO), whose results stay the same bit for bit.

        Weights and gradients have to be the same on all ranks, as they are with data parallelism. Each rank gets a
        share by number of elements. Sessions do this by themselves where their plan says that it pays.

        Args:
            process_group: the ranks; default: all of torch.distributed. Each of them has to call this.
            timeout_s: deadline of every wait; default: the group's own.

        Raises:
            InputError: ranks hold other parameters, or norms are shared already.
            CommunicationError: not all ranks came within the deadline.
        """
        if self._norms.split is not None:
            raise InputError("norms are shared already; call stop_sharing() first")
        world = World.join(process_group, *deadlines(timeout_s, process_group))
        try:
            layers = self.adapted()
            sizes = [layer.numel() for layer in layers]
            everyone = world.gather(sizes, "comparing the layers whose norms are to be shared")
            odd = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
            if odd is not None:
                raise InputError(
                    f"ranks 0 and {odd} adapt other layers ({len(everyone[0])} and {len(everyone[odd])} of other "
                    f"sizes), expected the same on all ranks; give every rank's optimizer the same parameters"
                )
            self.share_over(world, dict(zip(layers, longest_first(sizes, world.ranks), strict=True)))
            self._own_world = world
        except BaseException:
            world.leave()
            raise

    def share_over(self, world: World, owners: Mapping[Tensor, int]) -> None:
        """Share norms over ranks that know each other, with the rank of each layer; others stay replicated."""
        layers = [layer for layer in self.adapted() if layer in owners]
        if world.group is None or not layers:
            self._norms.share(None)
            return
        dtype = norm_dtype(self.adapted())
        split = Split(world, [owners[layer] for layer in layers], [(2,)] * len(layers), dtype, layers[0].device)
        self._norms.share(split, layers)

    def stop_sharing(self) -> None:
        """Let every rank compute all norms again."""
        self._norms.share(None)
        self._own_world.leave()
        self._own_world = World()

    @property
    def sharing(self) -> Split | None:
        """Split of the norms over ranks; None: each rank computes all of them."""
        return self._norms.split

    def observe_norms(self, clock: Clock | None) -> None:
        """Mark, from now on, what norms take in each step (see `runtime.monitor.clock.make_clock`); None: no more."""
        self._norms.observe(clock)

    def norm_times_us(self) -> list[float]:
        """Return what norms took in each of the last steps, in microseconds, once they are observed."""
        return self._norms.times_us()


def _is_excluded(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    return bool(group["exclude_1d"]) and parameter.ndim <= 1


def _is_adapted(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    return bool(group["adapt"]) and not _is_excluded(parameter, group)


def check_range(where: str, value: Any, low: float, high: float = math.inf, *, open_end: bool = False) -> None:
    """Raise InputError where an option, named in `where`, is no number in its range; tensors are taken as they are."""
    if isinstance(value, Tensor):
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (open_end and value == high):
        until = f"from {low:g} to {'below ' if open_end else ''}{high:g}"
        until = f"of at least {low:g}" if high == math.inf else until
        raise InputError(f"{where}: found {value!r}, expected a number {until}; correct it")
