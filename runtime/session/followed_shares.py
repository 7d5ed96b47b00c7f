"""Shares of the batch while a session trains: those of the plan, until measured times of ranks speak for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from runtime.core.weights import Weights
from runtime.errors import InputError
from runtime.monitor.arrivals import Arrivals

Decide = Callable[[Sequence[int], Sequence[float], int], Sequence[int]]
"""(shares, compute times of ranks with them in microseconds, largest share) → shares of the next pass."""


class Shares:
    """Samples of each rank in a step, equal on all ranks."""

    def __init__(self, planned: Mapping[str, int] | None, weights: Weights, rank: int) -> None:
        self._planned, self._weights, self._rank = planned, weights, rank
        self.present: tuple[int, ...] | None = None
        """Samples of each rank, in order of rank; None: the script decides."""
        self._take(planned)

    def _take(self, planned: Mapping[str, int] | None) -> None:
        if planned is not None:
            self.present = tuple(planned.values())

    @property
    def mine(self) -> int | None:
        """Samples of this rank; None: the script decides."""
        return None if self.present is None else self.present[self._rank]

    def plan_changed(self, planned: Mapping[str, int] | None) -> None:
        """Take the shares of another plan, if they are not those of the last one."""
        if planned != self._planned:
            self._planned = planned
            self._take(planned)

    def begin(self, global_batch: int | None, ranks: int) -> None:
        """Begin to sample: with equal shares where the plan has none. Raises InputError."""
        if self.present is None and global_batch is None:
            raise InputError(
                "session.sampler: found a plan without shares, expected global_batch, the samples of a step over all "
                "ranks: pass it, or make the plan with `planner optimize --global-batch`"
            )
        if global_batch is None or self.present is not None:
            if global_batch is not None and self.present is not None and global_batch != sum(self.present):
                raise InputError(
                    f"session.sampler: found global_batch={global_batch}, and shares of {sum(self.present)} samples in "
                    f"the plan; expected the same: leave it out, or plan with --global-batch {global_batch}"
                )
            return
        if global_batch < ranks:
            raise InputError(
                f"session.sampler: found global_batch={global_batch}, fewer samples than the {ranks} ranks; expected "
                f"at least one for each: give more, or use fewer ranks"
            )
        self.present = tuple((global_batch + ranks - 1 - rank) // ranks for rank in range(ranks))

    def next_pass(self, arrivals: Arrivals, decide: Decide, most: int | None) -> tuple[int, ...]:
        """Return the shares of the pass that begins; all ranks call this at the same place.

        Ranks have compared their times with the present shares, or not, all alike: if they have, the first rank's
        decision counts, which takes a control message.
        """
        assert self.present is not None
        times_us, arrivals.compute_us = arrivals.compute_us, ()
        if times_us:
            total = sum(self.present)
            decided = decide(self.present, times_us, total if most is None else most)
            self.present = tuple(int(one) for one in self._weights.gather([float(one) for one in decided])[0])
        return self.present

    def load(self, shares: Sequence[int]) -> None:
        """Continue with the shares of another run, if they are of as many ranks."""
        if self.present is not None and len(shares) == len(self.present):
            self.present = tuple(shares)
