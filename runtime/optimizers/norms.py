"""Two norms for each layer, which every rank computes for itself, or which ranks share."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.monitor.clock import Clock
from runtime.optimizers.pto import Pending, Split

KEPT_STEPS = 60
"""Number of steps whose times are kept, as by `runtime.monitor.recorder`."""

Pair = tuple[Tensor, Tensor]
"""A layer's weights, and what the other norm is of: its gradient (LARS) or its update (LAMB)."""


class NormMarks(NamedTuple):
    """Marks of a clock around what norms took in one step: computing and sending, then waiting for the others'."""

    begin: Any
    sent: Any
    wait: Any
    end: Any


def pair_norms(pairs: Sequence[Pair], dtype: torch.dtype) -> Tensor:
    """Return the Euclidean norms of each pair. Shape (pairs, 2); added up in `dtype`, and of it.

    A row depends on its pair alone, so that it does not matter which rank computes it, or together with which others.
    """
    tensors = [tensor for pair in pairs for tensor in pair]
    return torch.stack(torch._foreach_norm(tensors, 2.0, dtype=dtype)).view(-1, 2)


def norm_dtype(parameters: Sequence[Tensor]) -> torch.dtype:
    """Return what norms are added up in: float64 where a parameter needs it, else float32."""
    wide = (torch.float64, torch.complex128)
    return torch.float64 if any(parameter.dtype in wide for parameter in parameters) else torch.float32


class LayerNorms:
    """Computes norms of layers, alone or shared; kept by one optimizer."""

    def __init__(self) -> None:
        self.split: Split | None = None
        """Split of the norms over ranks; None: each computes all of them."""
        self._places: dict[Tensor, int] = {}
        self._clock: Clock | None = None
        self.marks: deque[NormMarks] = deque(maxlen=KEPT_STEPS)

    def share(self, split: Split | None, parameters: Sequence[Tensor] = ()) -> None:
        """Share the norms of these parameters, the items of the split; None: share nothing any more."""
        self.split = split
        self._places = {parameter: place for place, parameter in enumerate(parameters)} if split else {}
        self.marks.clear()

    def observe(self, clock: Clock | None) -> None:
        self._clock = clock
        self.marks.clear()

    def times_us(self) -> list[float]:
        # Waiting for others counts, what was done meanwhile does not.
        clock = self._clock
        if clock is None:
            return []
        return [clock.between_us(m.begin, m.sent) + clock.between_us(m.wait, m.end) for m in self.marks]

    def mine(self, parameter: Tensor, dtype: torch.dtype) -> bool:
        """Tell whether this rank computes the norms of a layer by itself, of norms in `dtype`."""
        split, place = self._split_for(dtype), self._places.get(parameter)
        return split is None or place is None or split.owners[place] == split.world.rank

    def _split_for(self, dtype: torch.dtype) -> Split | None:
        """None also where the dtype has changed since norms were shared, which it does on all ranks alike."""
        return self.split if self.split is not None and self.split.dtype == dtype else None

    def start(self, layers: Sequence[Tensor], pairs: Mapping[Tensor, Pair], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Compute this rank's share of the norms and send it; returns what waits and gives a row for each layer.
        `pairs`: of the layers that this rank computes (see `mine`); others are not looked at.
        """
        mark = self._clock.mark if self._clock else lambda: None
        begin, split = mark(), self._split_for(dtype)
        pending: Pending | None = None
        if split is not None:
            pending = split.start(lambda own: _rows(own, split), [pairs.get(layer) for layer in self._places])
        local = [layer for layer in layers if split is None or layer not in self._places]
        rows = pair_norms([pairs[layer] for layer in local], dtype) if local else None
        sent = mark()

        def wait() -> Tensor:
            waiting = mark()
            if pending is None:
                result = torch.empty((0, 2)) if rows is None else rows
            else:
                result = self._arranged(layers, local, rows, pending.wait())
            if self._clock:
                self.marks.append(NormMarks(begin, sent, waiting, mark()))
            return result

        return wait

    def _arranged(
        self, layers: Sequence[Tensor], local: Sequence[Tensor], rows: Tensor | None, gathered: Tensor
    ) -> Tensor:
        """Return the rows of all layers, from those computed here and those gathered."""
        if len(layers) == len(self._places) and all(map(operator.is_, layers, self._places)):
            return gathered
        here = {layer: place for place, layer in enumerate(local)}
        each = [rows[here[p]] if rows is not None and p in here else gathered[self._places[p]] for p in layers]
        return torch.stack(each) if each else gathered[:0]


def _rows(own: Sequence[Pair | None], split: Split) -> Tensor:
    """Return norms of this rank's share; zeros for layers that got no gradient in this step."""
    present = [pair for pair in own if pair is not None]
    if len(present) == len(own):
        return pair_norms(present, split.dtype)
    result = torch.zeros((len(own), 2), dtype=split.dtype, device=split.device)
    if present:
        places = torch.tensor([place for place, pair in enumerate(own) if pair is not None], device=split.device)
        result[places] = pair_norms(present, split.dtype)
    return result
