"""A rank's share of the samples of a job's batches, where a plan has shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from planner.frontend.call import map_leaves
from runtime.errors import InputError

BatchOf = Callable[[int, int], Any]
"""(step, rank) → batch of a job."""
HINT = "give them so, on every rank as many, or use a plan made without --global-batch"


@dataclass(frozen=True)
class BatchShare:
    """Batches of one rank, of as many samples as its share.

    batch(0, 0), batch(0, 1), …, batch(1, 0), … are one sequence of samples, of which each step takes as many as all
    shares hold: so a step has the samples that it has without shares, if those are as many.
    """

    shares: Mapping[str, int]
    """Samples of each rank in a step, by rank."""
    rank: int
    batch_of: BatchOf
    where: str
    """Prefix of the messages of errors."""
    samples: int | None = None
    """Samples that the job says its batches have; None: the first dimension of the first tensor in one."""

    @property
    def weight(self) -> float:
        """Return the number of this rank's samples."""
        return float(self.shares[str(self.rank)])

    @property
    def factor(self) -> float:
        """Return this rank's samples over the mean of all ranks': its loss times this is a part of the mean."""
        return self.weight * len(self.shares) / sum(self.shares.values())

    def batch(self, step: int) -> Any:
        """Return this rank's batch of one step.

        Raises:
            InputError: on all ranks alike in the first step: samples are not the rows of all tensors that differ from
                batch to batch; and where a later batch has another number of them.
        """
        rows, counts = self._rows, list(self.shares.values())
        start = step * sum(counts) + sum(counts[: self.rank])
        stop = start + counts[self.rank]
        parts = []
        for number in range(start // rows, -(-stop // rows)):
            leaves, whole = self._leaves(number)
            if _count(leaves) != rows:
                raise self._problem(f"a batch of {_count(leaves)} samples after one of {rows}")
            parts.append((leaves, whole, slice(max(0, start - number * rows), min(rows, stop - number * rows))))
        return self._joined(parts, rows)

    @cached_property
    def _rows(self) -> int:
        """Return the number of samples of a batch of the job, of which two are looked at."""
        two = [self._leaves(number) for number in range(2)]
        rows = _count(two[0][0])
        if self.samples not in (None, rows):
            raise self._problem(f"{self.samples} samples in tensors of {rows} rows")
        if not rows:
            raise self._problem("no tensor with rows")
        self._joined([(*one, slice(None)) for one in two], rows)
        return rows

    def _leaves(self, number: int) -> tuple[list[Any], Any]:
        """Return the leaves of a batch in the sequence of all ranks' batches, and the batch."""
        whole, leaves = self.batch_of(*divmod(number, len(self.shares))), list[Any]()
        map_leaves(whole, _is_leaf, leaves.append)
        return leaves, whole

    def _joined(self, parts: Sequence[tuple[list[Any], Any, slice]], rows: int) -> Any:
        """Return rows of some batches as one batch; `rows`: of each whole one. Raises InputError."""
        if len({len(leaves) for leaves, _, _ in parts}) > 1:
            raise self._problem("batches with unlike numbers of tensors")
        found = []
        for column in zip(*(leaves for leaves, _, _ in parts), strict=True):
            first = column[0]
            if all(_has_rows(leaf, rows) for leaf in column):
                if len({(leaf.shape[1:], leaf.dtype) for leaf in column}) > 1:
                    raise self._problem(f"samples of unlike shapes, as {tuple(first.shape[1:])}, or unlike dtypes")
                pieces = [leaf[cut] for leaf, (_, _, cut) in zip(column, parts, strict=True)]
                found.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
            elif all(_is_same(leaf, first) for leaf in column):
                found.append(first)
            else:
                what = next((leaf for leaf in column if isinstance(leaf, Tensor)), None)
                named = type(first).__name__ if what is None else f"tensor of shape {tuple(what.shape)}"
                raise self._problem(f"a {named} that differs between batches and has not {rows} rows in each")
        leaves = iter(found)
        return map_leaves(parts[0][1], _is_leaf, lambda _: next(leaves))

    def _problem(self, found: str) -> InputError:
        return InputError(
            f"{self.where}: found {found}, of which ranks cannot have the plan's shares; expected batches whose "
            f"tensors have samples as rows: {HINT}"
        )


def _is_leaf(value: Any) -> bool:
    nested = isinstance(value, MutableMapping | list | tuple) or (is_dataclass(value) and not isinstance(value, type))
    return not nested


def _count(leaves: Sequence[Any]) -> int:
    """Return the first dimension of the first tensor; 0 where there is none."""
    return next((int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.dim() > 0 and leaf.shape[0] == rows


def _is_same(leaf: Any, other: Any) -> bool:
    if leaf is other:
        return True
    if isinstance(leaf, Tensor) or isinstance(other, Tensor):
        both = isinstance(leaf, Tensor) and isinstance(other, Tensor) and leaf.layout == other.layout == torch.strided
        return both and torch.equal(leaf, other)
    try:
        return bool(leaf == other)
    except (TypeError, ValueError, RuntimeError):  # arrays
        return False
