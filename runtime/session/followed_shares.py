"""Shares of the batch while a session trains: those of the plan, until measured times of ranks speak for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.core.weights import Weights
from runtime.errors import InputError
from runtime.monitor.arrivals import Arrivals
from runtime.plan import Plan

Decide = Callable[[Sequence[int], Sequence[float], int], Sequence[int]]
"""(shares, compute times of ranks with them in microseconds, largest share) → shares of the next pass."""


class Shares:
    """Samples of each rank in a step, equal on all ranks."""

    def __init__(self, plan: Plan, weights: Weights, rank: int) -> None:
        self._weights, self._rank = weights, rank
        self.present: tuple[int, ...] | None = None
        """Samples of each rank, in order of rank; None: the script decides."""
        self.most: int | None = None
        """Largest share that a rank has memory for, by the plan and the script; None: any."""
        self._take(plan)

    def _take(self, plan: Plan) -> None:
        self._planned = plan.shares
        if plan.shares is not None:
            self.present = tuple(plan.shares.values())
            self.most = _tighter(self.most, plan.largest_share)

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
        limit = _tighter(self.most, most)
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
            decided = decide(self.present, times_us, self.most or sum(self.present))
            before = self.present
            self.present = tuple(int(one) for one in self._weights.gather([float(one) for one in decided])[0])
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


def _tighter(most: int | None, other: int | None) -> int | None:
    return min((one for one in (most, other) if one is not None), default=None)


def _check_largest(shares: Sequence[int], most: int | None, where: str) -> None:
    if most is not None and max(shares) > most:
        raise InputError(
            f"{where}: found a share of {max(shares)} samples, expected at most {most}, for which a rank has memory "
            f"(most=, or the plan's largest_share): give fewer samples in all, or more memory"
        )
