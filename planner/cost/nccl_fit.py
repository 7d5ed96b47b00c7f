"""Fit the constants of `planner.cost.nccl` to measured collectives, and say how far predictions may be off.

Few numbers are measured and many predicted, so NCCL's constants are the start: launch, overlap, and for each algorithm
and protocol one multiplier of its latency and one of its transfer are moved only as far as measurements ask
(squared logarithms, with priors). Algorithms that were not measured move with the mean of those that were. Where a log
shows another choice than the tuner's (a plugin, or variables that were set), changes are moved to other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost import nccl
from planner.cost.nccl import Shape
from planner.documents.nccl import Family, Interval, Nccl, NcclFit
from planner.documents.text import pluralize
from runtime.errors import InputError

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Progress = Callable[[str], None]
"""Gets a line about what is done next."""

NOISE = 0.05
"""Spread of repeated measurements, as a logarithm."""
LAUNCH_PRIOR, OVERLAP_PRIOR = 0.7, 0.15
LATENCY_PRIOR, LATENCY_OWN_PRIOR = 0.7, 0.5
TRANSFER_PRIOR, TRANSFER_OWN_PRIOR, HALVES_PRIOR = 0.3, 0.25, 0.2
"""Largest distances (as logarithms) of constants from NCCL's: all together, an algorithm from the others, and its
reduce-scatters and all-gathers from its all-reduces."""
OUTLIER = 3.0
"""Residuals beyond so many times the noise count by their distance, not its square."""
USUAL_COST = 1.5
"""Cost of a row that the model explains; only beyond are other choices than the tuner's looked for."""
DEPARTURE_COST, MAX_ROUNDS = 12.0, 6
"""Cost of a run of sizes that departs from the tuner, and most rounds of such changes."""
CONVERGED, MAX_STEPS, MOST_DAMPING = 1e-9, 400, 1e12
"""Bounds of least squares: smaller changes of constants are none, so that processors, which add in different orders,
agree on the digits that are kept; most steps; and the damping beyond which no step gains."""
MOVES_SOLVED, ROUGHLY = 8, 1e-3
"""Other choices that are solved for in a round: those which a step of least squares finds best; and how far, to find
the best of them."""
SHIFTS = (-8, -4, -2, -1, 1, 2, 4, 8)
SHARE, LEAST_INTERVAL = 0.9, 0.03
USELESS = 0.4
"""A fit so far off for half of the samples, as a logarithm, is none."""
UNKNOWN, ENOUGH = 0.3, 10
"""An interval where nothing shows one, and from how many samples on residuals do: 9 of 10 takes ten."""


@dataclass(frozen=True)
class Measured:
    """One collective on one number of nodes."""

    collective: str
    nodes: int
    per_node: int
    samples: tuple[tuple[float, float], ...]
    """(bytes, µs)."""

    @property
    def key(self) -> tuple[str, int]:
        return self.collective, self.nodes * self.per_node


@dataclass(frozen=True)
class _Solution:
    values: Floats
    """Logarithms: launch, overlap between nodes and inside (over their defaults), latency and transfer of all, then
    of each family over those latency, transfer, and transfer of its halves."""
    cost: float


@dataclass(frozen=True)
class Trial:
    """One description of the machines, fitted."""

    machine: Nccl
    cost: float
    """Least squares, priors and departures: of two descriptions the one with less explains the logs better."""


def fit(machine: Nccl, logs: Sequence[Measured]) -> Nccl:
    """Return the machine with what was fitted to `logs`: `attempt`, then `finish`."""
    return finish(attempt(machine, logs), logs)


def attempt(machine: Nccl, logs: Sequence[Measured]) -> Trial:
    """Fit, without an interval.

    Raises InputError: nothing was measured, or on one rank only.
    """
    used = _used(logs)
    plain = replace(machine, fit=None)
    found, cost = _best(plain, used)
    return Trial(replace(plain, fit=found), cost)


def finish(trial: Trial, logs: Sequence[Measured], progress: Progress | None = None) -> Nccl:
    """Return the fitted machine with its interval: residuals, and what leaving out one number of nodes shows."""
    used, fitted = _used(logs), trial.machine
    plain, found = replace(fitted, fit=None), fitted.fit
    assert found is not None
    errors = _errors(fitted, used)
    inside = _quantile(errors)
    middle = float(np.median(np.abs(errors)))
    if middle > USELESS:
        raise InputError(
            f"found times of which NCCL's cost model explains half within a factor of {math.exp(middle):.3g} only, "
            f"expected within {math.exp(USELESS):.1f}; check the logs, and that they were made on these machines"
        )
    counts = sorted({log.nodes for log in used})
    if len(counts) > 1:
        beyond = inside
        for nodes in counts:
            if progress is not None:
                progress(f"fitting without the logs of {pluralize(nodes, 'node')}, for the interval")
            without = replace(plain, fit=_best(plain, [log for log in used if log.nodes != nodes])[0])
            beyond = max(beyond, _quantile(_errors(without, [log for log in used if log.nodes == nodes])))
    else:
        beyond = max(3.0 * inside, UNKNOWN)  # nothing shows how times change with the number of nodes
    if len(errors) < ENOUGH:
        inside, beyond = max(inside, UNKNOWN), max(beyond, UNKNOWN)
    beyond = min(beyond, 10.0)
    interval = Interval(inside=_rounded(inside), beyond=_rounded(beyond))
    mean_error = _rounded(float(np.mean(np.abs(np.expm1(errors)))))
    return replace(plain, fit=replace(found, interval=interval, mean_error=mean_error))


def _used(logs: Sequence[Measured]) -> list[Measured]:
    used = [log for log in logs if log.samples and log.nodes * log.per_node > 1]
    if not used:
        raise InputError("found no measured collective on two or more ranks; expected at least one: run nccl-tests")
    merged: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for log in used:
        merged.setdefault((log.collective, log.nodes, log.per_node), []).extend(log.samples)
    return [Measured(*key, tuple(sorted(samples))) for key, samples in merged.items()]


def _best(machine: Nccl, logs: Sequence[Measured]) -> tuple[NcclFit, float]:
    """Return the fit with the tuner's choice, or with its changes at other sizes if that explains logs much better."""
    problem = _Problem.of(machine, logs)
    chosen = problem.tuned
    best = problem.solve(chosen, np.zeros(len(problem.priors)))
    for _ in range(MAX_ROUNDS):
        if best.cost <= USUAL_COST * len(chosen):
            break
        moves = [moved for run in problem.runs for moved in _moves(run, chosen)]
        tried = []
        for at in np.argsort(problem.estimates(chosen, moves, best.values), kind="stable")[:MOVES_SOLVED]:
            solved = problem.solve(moves[at], best.values, ROUGHLY)
            tried.append((solved.cost + DEPARTURE_COST * problem.departures(moves[at]), solved.values, moves[at]))
        cost, values, current = min(tried, key=lambda trial: trial[0], default=(best.cost, best.values, chosen))
        if cost >= best.cost - 1e-6:
            break
        best, chosen = problem.solve(current, values), current
        best = replace(best, cost=best.cost + DEPARTURE_COST * problem.departures(chosen))
    return _record(problem, best, chosen), best.cost


def _sizes(log: Measured) -> Floats:
    return np.array([size for size, _ in log.samples])


@dataclass(frozen=True)
class _Problem:
    """Logs as arrays: each sample's latency and transfer by family, as logarithms. A choice is a family's index in
    `names` for each sample."""

    logs: Sequence[Measured]
    names: list[Family]
    runs: list[slice]
    """The samples of each log, by size."""
    tuned: Indices
    """Choice of the tuner."""
    measured_us: Floats
    latency: Floats
    transfer: Floats
    inside: NDArray[np.bool_]
    half: NDArray[np.bool_]
    priors: Floats

    @classmethod
    def of(cls, machine: Nccl, logs: Sequence[Measured]) -> _Problem:
        shapes = [Shape(machine, log.nodes, log.per_node) for log in logs]
        tuned = [nccl.choice(log.collective, shape, _sizes(log)) for log, shape in zip(logs, shapes, strict=True)]
        names = sorted({family for taken in tuned for family in taken})
        ends = np.cumsum([len(log.samples) for log in logs]).tolist()
        runs = [slice(end - len(log.samples), end) for end, log in zip(ends, logs, strict=True)]
        latency = np.full((ends[-1], len(names)), np.nan)
        transfer = latency.copy()
        for log, shape, run, taken in zip(logs, shapes, runs, tuned, strict=True):
            for family in set(taken):  # changes between others do not move
                at = names.index(family)
                latency[run, at] = np.log(nccl.latency_us(family, log.collective, shape))
                transfer[run, at] = np.log(_sizes(log) / nccl.bytes_per_us(family, log.collective, shape))
        lengths = [len(log.samples) for log in logs]
        return cls(
            logs, names, runs, np.array([names.index(family) for taken in tuned for family in taken]),
            np.array([time for log in logs for _, time in log.samples]), latency, transfer,
            np.repeat([log.nodes == 1 for log in logs], lengths),
            np.repeat([log.collective != "all_reduce" for log in logs], lengths),
            np.array(
                [LAUNCH_PRIOR, OVERLAP_PRIOR, OVERLAP_PRIOR, LATENCY_PRIOR, TRANSFER_PRIOR]
                + [LATENCY_OWN_PRIOR, TRANSFER_OWN_PRIOR, HALVES_PRIOR] * len(names)
            ),
        )  # fmt: skip

    def residuals(self, chosen: Indices, values: Floats, where: Indices | slice) -> tuple[Floats, Floats]:
        """Return log(predicted / measured) over the noise of the samples `where`, and its derivatives by `values`.

        With w and m the logarithms of the multiplied latency and transfer and p the overlap, a call takes
        launch + exp(s), s = log(exp(p·w) + exp(p·m)) / p.
        """
        taken, inside, half = chosen[where], self.inside[where], self.half[where]
        rows, own = np.arange(len(taken)), 5 + 3 * taken
        launch_us, starts = nccl.LAUNCH_US * math.exp(values[0]), np.where(inside, 2, 1)
        power = np.where(inside, nccl.OVERLAP_INSIDE, nccl.OVERLAP_BETWEEN) * np.exp(values[starts])
        wait = self.latency[where][rows, taken] + values[3] + values[own]
        move = self.transfer[where][rows, taken] + values[4] + values[own + 1] + half * values[own + 2]
        larger, apart = np.maximum(wait, move), power * (wait - move)
        total = larger + np.log1p(np.exp(-np.abs(apart))) / power
        share = 0.5 * (1.0 + np.tanh(0.5 * apart))  # of the latency
        sum_us = np.exp(total)
        predicted = launch_us + sum_us
        weight = sum_us / predicted / NOISE
        slopes = np.zeros((len(taken), len(values)))
        slopes[:, 0] = launch_us / predicted / NOISE
        slopes[rows, starts] = weight * (share * wait + (1.0 - share) * move - total)
        slopes[:, 3] = slopes[rows, own] = weight * share
        slopes[:, 4] = slopes[rows, own + 1] = weight * (1.0 - share)
        slopes[rows, own + 2] = half * slopes[:, 4]
        return np.log(predicted / self.measured_us[where]) / NOISE, slopes

    def solve(self, chosen: Indices, start: Floats, close: float = CONVERGED) -> _Solution:
        """Least squares of logarithms, with priors: Levenberg and Marquardt's method, reweighted for outliers."""
        lowest = np.full(len(start), -np.inf)
        lowest[1:3] = -np.log([nccl.OVERLAP_BETWEEN, nccl.OVERLAP_INSIDE])  # an exponent of less than 1 is none
        values, everything, damping = start, slice(None), 1e-3
        apart, slopes = self.residuals(chosen, values, everything)
        cost = _cost(apart, values / self.priors)
        for _ in range(MAX_STEPS):
            weighted = _weights(apart)[:, None] * slopes
            gradient = weighted.T @ apart + values / self.priors**2
            matrix = weighted.T @ slopes + np.diag(1.0 / self.priors**2)
            free = (values > lowest) | (gradient < 0.0)
            step = np.zeros(len(values))
            step[free] = np.linalg.solve((matrix + damping * np.diag(np.diag(matrix)))[free][:, free], -gradient[free])
            moved = np.maximum(values + step, lowest)
            there, slopes_there = self.residuals(chosen, moved, everything)
            reached = _cost(there, moved / self.priors)
            if reached > cost:
                if damping > MOST_DAMPING:
                    break
                damping *= 8.0
                continue
            done = np.max(np.abs(moved - values)) < close
            values, apart, slopes, cost, damping = moved, there, slopes_there, reached, damping / 8.0
            if done:
                break
        return _Solution(values, cost)

    def estimates(self, chosen: Indices, moves: Sequence[Indices], values: Floats) -> Floats:
        """Return what each choice would cost after one step of least squares from `values`, with its departures."""
        apart, slopes = self.residuals(chosen, values, slice(None))
        weighted = _weights(apart)[:, None] * slopes
        gradient = weighted.T @ apart + values / self.priors**2
        matrix = weighted.T @ slopes + np.diag(1.0 / self.priors**2)
        cost = _cost(apart, values / self.priors)
        found = []
        for moved in moves:
            where = np.flatnonzero(moved != chosen)
            there, slopes_there = self.residuals(moved, values, where)
            weighted_there = _weights(there)[:, None] * slopes_there
            changed = gradient + weighted_there.T @ there - weighted[where].T @ apart[where]
            bent = matrix + weighted_there.T @ slopes_there - weighted[where].T @ slopes[where]
            gained = changed @ np.linalg.solve(bent, changed)
            more = _loss(there).sum() - _loss(apart[where]).sum()
            found.append(cost + more - gained + DEPARTURE_COST * self.departures(moved))
        return np.array(found)

    def departures(self, chosen: Indices) -> int:
        """Return the number of runs of sizes that depart from the tuner's choice."""
        apart = np.where(chosen == self.tuned, -1, chosen)
        before = np.concatenate([[-1], apart[:-1]])
        before[[run.start for run in self.runs]] = -1
        return int(np.sum((apart >= 0) & (apart != before)))


def _loss(apart: Floats) -> Floats:
    """Huber's; priors have none, for they are not to be robust."""
    size = np.abs(apart)
    return np.where(size > OUTLIER, OUTLIER * (2.0 * np.maximum(size, OUTLIER) - OUTLIER), size**2)


def _weights(apart: Floats) -> Floats:
    """Return the weights of squares that touch `_loss` from above."""
    return OUTLIER / np.maximum(np.abs(apart), OUTLIER)


def _cost(apart: Floats, from_priors: Floats) -> float:
    return float(np.sum(_loss(apart)) + np.sum(from_priors**2))


def _moves(run: slice, chosen: Indices) -> Iterator[Indices]:
    """Yield every choice in which one change between two algorithms of a log comes some sizes earlier or later."""
    for at in range(run.start + 1, run.stop):
        before, after = chosen[at - 1], chosen[at]
        if before == after:
            continue
        for shift in SHIFTS:
            moved = chosen.copy()
            if shift > 0:
                moved[at : min(at + shift, run.stop)] = before
            else:
                moved[max(run.start, at + shift) : at] = after
            yield moved


def _record(problem: _Problem, solution: _Solution, chosen: Indices) -> NcclFit:
    values, logs = solution.values, problem.logs
    used = {problem.names[at]: values[5 + 3 * at : 8 + 3 * at] for at in sorted(set(chosen.tolist()))}
    taken = [[problem.names[at] for at in chosen[run]] for run in problem.runs]
    changed = {
        log.collective for log, run in zip(logs, problem.runs, strict=True) if np.any(chosen[run] != problem.tuned[run])
    }
    choice: dict[str, dict[str, tuple[tuple[float, Family], ...]]] = {}
    for log, families in zip(logs, taken, strict=True):
        if log.collective in changed:
            choice.setdefault(log.collective, {})[str(log.key[1])] = _table(log, families)
    return NcclFit(
        launch_us=_rounded(nccl.LAUNCH_US * math.exp(values[0])),
        overlap=_rounded(nccl.OVERLAP_BETWEEN * math.exp(values[1])),
        overlap_inside=_rounded(nccl.OVERLAP_INSIDE * math.exp(values[2])),
        latency={family: _rounded(math.exp(values[3] + own[0])) for family, own in used.items()},
        transfer={family: _rounded(math.exp(values[4] + own[1])) for family, own in used.items()},
        halves={family: _rounded(math.exp(own[2])) for family, own in used.items() if abs(own[2]) > 1e-5},
        other_latency=_rounded(math.exp(values[3])), other_transfer=_rounded(math.exp(values[4])),
        choice=choice or None, interval=Interval(inside=0.0, beyond=0.0),
        measured_on=tuple(sorted({log.key[1] for log in logs})), samples=sum(len(log.samples) for log in logs),
        mean_error=0.0,
    )  # fmt: skip


def _table(log: Measured, chosen: Sequence[Family]) -> tuple[tuple[float, Family], ...]:
    """Segments; each ends between the last size that takes it and the first that does not."""
    pairs = sorted(zip(_sizes(log).tolist(), chosen, strict=True))
    found: list[tuple[float, Family]] = []
    for (size, family), (following, other) in pairwise(pairs):
        if family != other:
            found.append((float(f"{math.sqrt(size * following):.6g}"), family))
    return (*found, (2.0**60, pairs[-1][1]))


def _errors(machine: Nccl, logs: Sequence[Measured]) -> Floats:
    """Return log(predicted / measured) of every sample."""
    parts = []
    for log in logs:
        predicted = nccl.times_us(log.collective, Shape(machine, log.nodes, log.per_node), _sizes(log))
        parts.append(np.log(predicted / np.array([time for _, time in log.samples])))
    return np.concatenate(parts)


def _quantile(errors: Floats) -> float:
    return max(LEAST_INTERVAL, float(np.quantile(np.abs(errors), SHARE)))


def _rounded(value: float) -> float:
    """Five digits, in which platforms hardly ever differ."""
    return float(f"{value:.5g}")
