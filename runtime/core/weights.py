"""Weights of ranks: the average of gradients is Σ nᵢ gᵢ / Σ nᵢ, where n is the number of samples or tokens of a loss.

    weight(n)             ─▶ kept for the next backward
    first gradient of it  ─▶ in the first backward ranks agree on n₀, the mean of their weights; later each takes n / n₀
    each gradient         ─▶ times n / n₀ before autograd adds it to `.grad`; zeros where n is 0
    a step begins         ─▶ Σ n / n₀ and the number of micro-batches are sent to all ranks, on a group of their own;
                             where whole buckets are summed on hosts, from the first step on in which those of a rank
                             are not 1, which it marks in its last bucket
    all buckets are here  ─▶ the averages are multiplied by (micro-batches of all ranks) / (Σ n / n₀ of all ranks)

So with equal weights every factor is 1 and nothing is multiplied. With accumulation the sum is over all micro-batches,
times their number on a rank, as with DDP: scripts divide the loss by that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.world import World
from runtime.core.usage import UsageFlags
from runtime.errors import InputError
from runtime.torch_compat import all_gather_on

GATHERING = "gathering the weights of ranks"
MEETING = "agreeing on weights in session.batches or in a backward, which has to reach a parameter on every rank"
BACKWARD, BATCHES, SAMPLER = PLACES = ("a backward", "session.batches", "session.sampler")
"""The places at which ranks exchange numbers. A message begins with its place: a rank at another one is an error."""
HINT = "call session.weight(n) on every rank before each backward, from the first step on, or on no rank"


class Weights:
    """Weights of this rank's backwards, and those of all ranks in the last step."""

    def __init__(self, world: World, ask: Callable[[], float] | None, updated: Collection[int]) -> None:
        """`ask` returns the weight of the next backward; None: it is given, if there are any. `updated`: ids of the
        parameters that an optimizer updates; empty: not known.
        """
        self._world, self._ask, self.updated = world, ask, updated
        self.each_given = ask is None
        """Whether `give` is called before each backward; False, for good, once `session.batches` gives some."""
        self.wanted = ask is not None
        """Whether this rank has given a weight, or will."""
        self.unit: float | None = None
        """Agreed weight n₀, equal on all ranks; None: ranks have no weights, or have not agreed on it yet."""
        self._resumed: float | None = None
        """Unit of the run that this one continues."""
        self._agreed = False
        self._given: float | None = None
        self.default: float | None = None
        """Weight of backwards for which none is given; None: one has to be."""
        self.idle = False
        """Whether this rank has no batch left, so that its weights are 0."""
        self.factor: float | None = None
        """Weight of the present backward over n₀; None: it has brought no gradient yet."""
        self._sum, self._micro_batches = 0.0, 0
        self._control: World | None = None
        self._in_flight: list[tuple[dist.Work, Tensor, Tensor]] = []
        self._unequal = False
        """Whether a step has had other weights than n₀: from then on they are sent in each; equal on all ranks."""
        self.unsent: list[float] | None = None
        """Σ n / n₀ and micro-batches of this rank in the last step; None: all ranks have been sent them."""
        self._sums: list[float] | None = None
        """Σ n / n₀ of every rank in the last step, once it is complete."""
        self._correction = 1.0

    @property
    def active(self) -> bool:
        """True if ranks have agreed to weigh their gradients; equal on all ranks."""
        return self.unit is not None

    @property
    def changes_none(self) -> bool:
        """True if the weight that is given is n₀, for the first micro-batch of a step."""
        return self._given is not None and self._given == self.unit and self.accumulated is None

    @property
    def accumulated(self) -> float | None:
        """Σ n / n₀ of the micro-batches so far, between two of a step; else None."""
        return self._sum if self.factor is None and self._micro_batches else None

    def give(self, n: float) -> float:
        """Keep the weight of the next backward; return what counts. Raises InputError."""
        checked = check_weight(n, "session.weight")
        self._given = 0.0 if self.idle else checked
        return self._given

    def want(self, what: str) -> bool:
        """Weigh gradients from now on, for `what` the user called; return whether that is new. Raises InputError."""
        if self._agreed and not self.active:
            raise InputError(
                f"{what}: found a first step without weights before it; expected them from the first step on: {HINT}"
            )
        before, self.wanted = self.wanted, True
        return not before

    def take(self) -> float:
        """Return n / n₀ of the present backward; all ranks meet here in the first one. Raises InputError."""
        if self.factor is None:
            n = self._weight() if self._agreed else self._agree()
            if n is None:
                raise InputError(f"found no weight for this backward, but weights for others; {HINT}")
            assert self.unit is not None  # else ranks have refused each other
            self.factor = n / self.unit
            self._sum += self.factor
            self._micro_batches += 1
        return self.factor

    def _weight(self) -> float | None:
        given, self._given = self._given, None
        if self.idle:
            return 0.0
        if given is None and self._ask is not None:
            return check_weight(self._ask(), "attach(…, weight=…)")
        return self.default if given is None else given

    def _agree(self) -> float | None:
        """Agree on n₀ with all ranks, of which each calls this once, and return this rank's weight. Raises InputError
        on all of them alike.
        """
        n: float | None = None
        problem: str | None = None
        try:
            n = self._weight() if self.wanted else None
        except InputError as error:
            problem = str(error)
        found = self._meet(BACKWARD, n, problem)
        everyone, units = [one for _, one, *_ in found], {unit for *_, unit, _ in found}
        self._agreed = True
        if all(one is None for one in everyone):
            return n
        if None in everyone:
            missing = [rank for rank, one in enumerate(everyone) if one is None]
            self._agreed = False
            raise InputError(
                f"found weights on some ranks alone: none on rank {', '.join(map(str, missing))} of "
                f"{self._world.ranks}; expected a weight on every rank in the first step, or on none: {HINT}"
            )
        self.connect()
        if len(units) == 1:  # all ranks continue from one run
            self.unit = units.pop()
        if self.unit is None:
            positive = [one for one in everyone if one]
            equal = len(set(positive)) == 1  # their mean may be rounded
            self.unit = (positive[0] if equal else math.fsum(positive) / len(positive)) if positive else 1.0
        self._unequal = any(one != self.unit for one in everyone)
        return n

    def _meet(self, place: str, n: float | None = None, problem: str | None = None) -> list[tuple[Any, ...]]:
        """Return place, weight and resumed unit of every rank, all of which come here at first. Raises InputError on
        all alike, where one has a problem or is at another of the `PLACES`.
        """
        found = self._world.gather((place, n, self._resumed, problem), MEETING)
        _check_places([one for one, *_ in found])
        if problem := next((one for *_, one in found if one), None):
            raise InputError(problem)
        return found

    def connect(self) -> World:
        """Return the ranks' group for weights, made at the first call, which is at the same place on all of them.

        Weights are sent when a backward begins, while other messages of the step may be in flight or not: so they have
        a group of their own, on hosts, which waits for no device.
        """
        if self._control is None:
            self._control = self._world.split([range(self._world.ranks)], backend="gloo")
        return self._control

    def gather(self, place: str, mine: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, in order of rank; all ranks call this between two steps, at one of the `PLACES`.
        Raises InputError where some are at another one.
        """
        if self._world.ranks == 1:
            return [[*mine]]
        if self._control is None:
            self._meet(place)
        self._send(place, mine)
        return [row[: len(mine)] for row in self._received()]

    def _send(self, place: str, mine: Sequence[float]) -> None:
        control = self.connect()
        assert control.group is not None
        row = [PLACES.index(place), *mine]
        row += [0.0] * (1 + max(2, self._world.ranks) - len(row))  # as long at each place, for ranks may be at others
        part = torch.tensor(row, dtype=torch.float64)
        whole = part.new_empty(self._world.ranks * len(part))
        with control.error_context(GATHERING):
            self._in_flight.append((all_gather_on(control.group, whole, part), part, whole))

    def _received(self) -> list[list[float]]:
        """Return what all ranks have sent last; a step that was given up leaves its message."""
        control, rows = self.connect(), list[list[float]]()
        while self._in_flight:
            work, _, whole = self._in_flight.pop(0)
            with control.error_context(GATHERING):
                control.wait(work, GATHERING)
            rows = whole.view(self._world.ranks, -1).tolist()
            _check_places([PLACES[int(place)] for place, *_ in rows])
        return [row[1:] for row in rows]

    # One step, in the order in which it happens.

    def begin_step(self, can_mark: bool) -> None:
        """Send what this rank's micro-batches weigh, before any bucket of the step is sent, unless it is what others
        expect, who learn by marks where it is not.
        """
        if not self._agreed:
            self._agree()
        if not self.active:
            return
        self._sums, self.unsent = None, [self._sum, float(self._micro_batches)]
        self._sum, self._micro_batches = 0.0, 0
        if self._unequal or not can_mark:
            self._send_sums()

    def _send_sums(self) -> None:
        assert self.unsent is not None
        self._send(BACKWARD, self.unsent)
        self.unsent = None

    def end_backward(self) -> None:
        """Forget the weight of the present backward."""
        self.factor = None

    def correction(self, flags: UsageFlags | None) -> float:
        """Return what averages have to be multiplied by, in a step whose buckets are all here. Raises InputError on all
        ranks alike where all weights of the step are 0. `flags`: that ranks mark; None: there are none.
        """
        if not self.active:
            return 1.0
        if self._sums is None:
            if self.unsent is not None and flags is not None and flags.marked():
                self._unequal = True
                self._send_sums()
            rows = self._received() if self.unsent is None else [[1.0, 1.0]] * self._world.ranks
            self._sums = [one for one, *_ in rows]
            total = math.fsum(self._sums)
            if not total:
                raise InputError(
                    f"found weights of 0 on all {self._world.ranks} ranks in one step, whose gradient is 0 / 0; "
                    f"expected a positive one on at least one rank: leave such a step out on every rank"
                )
            self._correction = sum(micro_batches for _, micro_batches, *_ in rows) / total
        return self._correction

    @property
    def source(self) -> int:
        """Return the lowest rank with a positive weight in the last step: buffers follow it. Equal on all ranks."""
        return next((rank for rank, one in enumerate(self._sums or ()) if one), 0)

    @property
    def share(self) -> float:
        """Return this rank's weight in the last step over the mean of all ranks'."""
        if self._sums is None:
            return 1.0
        return self._sums[self._world.rank] * self._world.ranks / math.fsum(self._sums)

    def take_back(self) -> bool:
        """Forget the present backward, which an exception ended; return whether micro-batches before it are left."""
        if self.factor is not None:
            self._sum, self._micro_batches, self.factor = self._sum - self.factor, self._micro_batches - 1, None
        return self._micro_batches > 0

    def abort(self) -> None:
        """Forget the micro-batches of a step: an exception ended its backward, or the script has left it out."""
        self.factor, self._sum, self._micro_batches = None, 0.0, 0

    def state(self) -> dict[str, float]:
        """Return what `load` continues from: residuals are in this unit."""
        return {} if self.unit is None else {"weight_unit": self.unit}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue with the unit of another run, if ranks have not agreed on one yet."""
        self._resumed = state.get("weight_unit")

    def leave(self) -> None:
        if self._control is not None:
            self._control.leave()
            self._control = None


def _check_places(found: Sequence[str]) -> None:
    if len(set(found)) > 1:
        where = ", ".join(f"rank {rank} at {place}" for rank, place in enumerate(found))
        raise InputError(
            f"found ranks at unlike places: {where}; expected all of them at the same one: call session.batches and "
            f"session.sampler on every rank, and train as many steps on each"
        )


def check_weight(n: Any, where: str) -> float:
    """Return a weight as a number; raises InputError, which begins with `where`, for what is none."""
    try:
        value = float(n)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise InputError(
            f"{where}: found {n!r}, expected the number of samples or tokens in this rank's micro-batch, finite and at "
            f"least 0; pass 0 where the rank contributes nothing"
        )
    return value
