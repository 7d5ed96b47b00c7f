"""A distributed sampler whose ranks have unlike shares of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import Sampler

from runtime.errors import InputError
from runtime.session.followed_shares import Shares


class ShareSampler(Sampler[int]):
    """Indices of one rank's shares of the batches of a data set; in place of `DistributedSampler`.

    Each batch of all ranks is a run of the epoch's order, of which every rank gets its share; a `DataLoader` with
    `batch_size` of this rank's share makes one batch of each. What is left at the end is shared alike, at least one for
    each rank while there are as many: the last batches are smaller, or, of fewer samples, missing on some ranks. Train
    by `session.batches(loader)` there, or pass `drop_last`. No sample is drawn twice in an epoch. The order is that of
    (seed, epoch), on any number of ranks.
    """

    def __init__(
        self, dataset: Sized, shares: Sequence[int], rank: int, *, shuffle: bool = True, seed: int = 0,
        drop_last: bool = False,
    ) -> None:  # fmt: skip
        """Share a data set.

        Args:
            dataset: has a length.
            shares: samples of each rank in a batch, in order of rank, such as `plan.shares.values()`.
            rank: this rank.
            shuffle: whether samples are drawn in a random order.
            seed: of the order, equal on all ranks.
            drop_last: leave out the samples behind the last whole batch.

        Raises:
            InputError: no shares, one below 1, a rank that has none, or fewer samples than ranks.
        """
        self.shares, self.rank = [int(share) for share in shares], rank
        if not self.shares or min(self.shares) < 1 or not 0 <= rank < len(self.shares):
            raise InputError(
                f"ShareSampler: found the shares {self.shares} and rank {rank}, expected a share of at least 1 for "
                f"each rank: pass list(plan.shares.values()) and the rank"
            )
        if len(dataset) < (sum(self.shares) if drop_last else len(self.shares)):
            raise InputError(
                f"ShareSampler: found {len(dataset)} samples for {len(self.shares)} ranks, expected at least one for "
                f"each (with drop_last a whole batch of {sum(self.shares)}): use fewer ranks"
            )
        self._samples, self._shuffle, self._seed, self._drop_last = len(dataset), shuffle, seed, drop_last
        self.epoch = self.consumed = 0
        """Number of the pass, and of its samples that ranks have had before this iteration began."""
        self._over = False
        """Whether an iteration has come to the end of the pass."""

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration's pass. One that a state left in the middle continues there.

        Args:
            epoch: number of the pass, from 0; decides the order.
        """
        if self._over or epoch != self.epoch:
            self.consumed = 0
        self.epoch, self._over = epoch, False

    def state_dict(self, batches: int = 0) -> dict[str, int]:
        """Return what `load_state_dict` continues from, with any shares.

        Args:
            batches: batches of this pass that have been trained since it began, or was continued.

        Returns:
            The number of the pass, and of its samples that ranks have had.
        """
        consumed = min(self._samples, self.consumed + batches * sum(self.shares))
        return {"epoch": self.epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the middle of a pass.

        Args:
            state: what `state_dict` returned, of a run with these shares or others.
        """
        self.epoch, self.consumed, self._over = int(state["epoch"]), int(state["consumed"]), False

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of this rank's samples in the epoch's order, for each batch."""
        whole, ranks, ends = sum(self.shares), len(self.shares), [0, *accumulate(self.shares)]
        for start in range(self.consumed, self._samples, whole):
            size = min(whole, self._samples - start)
            if size < whole and self._drop_last:
                return
            least = int(size >= ranks)  # of each rank, which has its share of the others
            left, most = size - least * ranks, max(1, whole - least * ranks)
            here = (self.rank, self.rank + 1)
            first, stop = (start + least * at + (ends[at] - least * at) * left // most for at in here)
            yield first, stop

    def order(self) -> list[int]:
        """Return the order of all samples in this pass, the same on all ranks."""
        if not self._shuffle:
            return list(range(self._samples))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        order: list[int] = torch.randperm(self._samples, generator=generator).tolist()
        return order

    def batches(self) -> Iterator[list[int]]:
        """Yield this rank's part of each batch that is left of the pass; of one that is over, of the whole."""
        self.set_epoch(self.epoch)
        order = self.order()
        for start, stop in self.parts():
            yield order[start:stop]
        self._over = True

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches():
            yield from batch

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.parts())


class ShareBatches(Sampler[list[int]]):
    """Batches of one rank's shares, as `Session.sampler` makes them: a `DataLoader`'s `batch_sampler`.

    Shares change between two passes alone, equally on all ranks; so a pass continues from its state bit for bit.
    """

    def __init__(
        self, dataset: Sized, shares: Shares, next_pass: Callable[[], Sequence[int]], rank: int, **options: Any
    ) -> None:
        """Sample by `shares`; `next_pass` returns those of the pass that begins. Options are those of `ShareSampler`.

        Raises InputError as that.
        """
        assert shares.present is not None
        self._shares, self._next_pass = shares, next_pass
        self._sampler = ShareSampler(dataset, shares.present, rank, **options)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in a batch of the present pass, in order of rank."""
        return tuple(self._sampler.shares)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration's pass, from 0. One that a state left in the middle continues
        there.
        """
        self._sampler.set_epoch(epoch)

    def state_dict(self, batches: int = 0) -> dict[str, Any]:
        """Return what `load_state_dict` continues from; `batches` as of `ShareSampler.state_dict`."""
        return {**self._sampler.state_dict(batches), "shares": list(self.shares)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the middle of a pass: with its shares on as many ranks, else with those that there are. Raises
        InputError where those are of other batches, or too large for the memory of a rank.
        """
        self._shares.load(state.get("shares", ()))
        self._sampler.load_state_dict(state)

    def __iter__(self) -> Iterator[list[int]]:
        self._sampler.shares = list(self._next_pass())
        yield from filter(None, self._sampler.batches())

    def __len__(self) -> int:
        return sum(stop > start for start, stop in self._sampler.parts())
