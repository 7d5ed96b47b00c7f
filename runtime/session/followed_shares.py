"""Shares of the batch while a session trains: those of the plan, until measured times of ranks speak for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.core.weights import SAMPLER, Weights
from runtime.errors import InputError
from runtime.monitor.arrivals import Arrivals
from runtime.plan import Plan

Decide = Callable[[Sequence[int], Sequence[float], Sequence[int]], Sequence[int]]
"""(shares, compute times of ranks with them in microseconds, largest shares) → shares of the next pass."""
Largest = tuple[int, ...] | None
"""Largest share of each rank; None: any."""


class Shares:
    """Samples of each rank in a step, equal on all ranks."""

    def __init__(self, plan: Plan, weights: Weights, rank: int) -> None:
        self._weights, self._rank = weights, rank
        self.present: tuple[int, ...] | None = None
        """Samples of each rank, in order of rank; None: the script decides."""
        self.most: Largest = None
        """Largest share that each rank has memory for, by the plan and the script; None: any."""
        self._take(plan)

    def _take(self, plan: Plan) -> None:
        self._planned = plan.shares
        if plan.shares is not None:
            self.present = tuple(plan.shares.values())
            self.most = _tighter(self.most, tuple((plan.largest_shares or {}).values()) or None)

    @property
    def mine(self) -> int | None:
        """Samples of this rank; None: the script decides."""
        return None if self.present is None else self.present[self._rank]

    def plan_changed(self, plan: Plan) -> None:
        """Take the shares of another plan, if they are not those of the last one."""
        if plan.shares != self._planned:
            self._take(plan)

    def begin(self, global_batch: int | None, ranks: int, most: int | None = None) -> None:
        """Begin to sample: with equal shares where the plan has none. Raises InputError."""
        if self.present is None and global_batch is None:
            raise InputError(
                "session.sampler: found a plan without shares, expected global_batch, the samples of a step over all "
                "ranks: pass it, or make the plan with `planner optimize --global-batch`"
            )
        if global_batch is not None and self.present is not None and global_batch != sum(self.present):
            raise InputError(
                f"session.sampler: found global_batch={global_batch}, and shares of {sum(self.present)} samples in "
                f"the plan; expected the same: leave it out, or plan with --global-batch {global_batch}"
            )
        if global_batch is not None and global_batch < ranks:
            raise InputError(
                f"session.sampler: found global_batch={global_batch}, fewer samples than the {ranks} ranks; expected "
                f"at least one for each: give more, or use fewer ranks"
            )
        present = self.present or tuple(((global_batch or 0) + ranks - 1 - rank) // ranks for rank in range(ranks))
        limit = _tighter(self.most, None if most is None else (most,) * ranks)
        _check_largest(present, limit, "session.sampler")
        self.present, self.most = present, limit

    def next_pass(self, arrivals: Arrivals, decide: Decide) -> tuple[int, ...]:
        """Return the shares of the pass that begins; all ranks call this at the same place.

        Ranks have compared their times with the present shares, or not, all alike: if they have, the first rank's
        decision counts, which takes a control message.
        """
        assert self.present is not None
        times_us, arrivals.compute_us = arrivals.compute_us, ()
        if times_us:
            decided = decide(self.present, times_us, self.most or (sum(self.present),) * len(self.present))
            before = self.present
            self.present = tuple(int(one) for one in self._weights.gather(SAMPLER, decided)[0])
            if self.present != before:
                arrivals.postpone()
        return self.present

    def load(self, shares: Sequence[int]) -> None:
        """Continue with the shares of another run, if they are of as many ranks. Raises InputError for other totals."""
        if self.present is None or len(shares) != len(self.present):
            return
        if sum(shares) != sum(self.present):
            raise InputError(
                f"state of the sampler: found shares of {sum(shares)} samples, and here a step of {sum(self.present)}; "
                f"expected the same: sample with global_batch={sum(shares)}, or begin the pass anew"
            )
        _check_largest(shares, self.most, "state of the sampler")
        self.present = tuple(shares)


def _tighter(most: Largest, other: Largest) -> Largest:
    return most or other if most is None or other is None else tuple(map(min, most, other))


def _check_largest(shares: Sequence[int], most: Largest, where: str) -> None:
    for rank, (share, largest) in enumerate(zip(shares, most or (), strict=False)):
        if share > largest:
            raise InputError(
                f"{where}: found a share of {share} samples, expected at most {largest}, for which rank {rank} has "
                f"memory (most=, or largest_shares of the plan): give fewer samples in all, or more memory"
            )
