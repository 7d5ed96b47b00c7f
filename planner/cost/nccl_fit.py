"""Fit the constants of `planner.cost.nccl` to measured collectives, and say how far predictions may be off.

Few numbers are measured and many predicted, so NCCL's constants are the start: launch, overlap, and for each algorithm
and protocol one multiplier of its latency and one of its transfer are moved only as far as measurements ask
(squared logarithms, with priors). Algorithms that nobody measured move with the mean of those that were. Where a log
shows another choice than the tuner's (a plugin, or variables that were set), changes are moved to other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost import nccl
from planner.cost.nccl import Shape
from planner.documents.nccl import Family, Interval, Nccl, NcclFit
from runtime.errors import InputError

Floats = NDArray[np.float64]

NOISE = 0.05
"""Spread of repeated measurements, as a logarithm."""
LAUNCH_PRIOR, OVERLAP_PRIOR = 0.7, 0.15
LATENCY_PRIOR, LATENCY_OWN_PRIOR = 0.7, 0.5
TRANSFER_PRIOR, TRANSFER_OWN_PRIOR, HALVES_PRIOR = 0.3, 0.25, 0.2
"""How far (as logarithms) constants may lie from NCCL's: all together, an algorithm from the others, and its
reduce-scatters and all-gathers from its all-reduces."""
OUTLIER = 3.0
"""Residuals beyond so many times the noise count by their distance, not its square."""
USUAL_COST = 1.5
"""Of a row that the model explains; only beyond are other choices than the tuner's looked for."""
DEPARTURE_COST, MAX_ROUNDS = 12.0, 6
"""Of a run of sizes that departs from the tuner."""
CONVERGED = 1e-11
"""Of least squares: smaller relative changes of cost and constants are none."""
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
class _Row:
    """All sizes of one log that take one algorithm and protocol."""

    family: Family
    half: bool
    inside: bool
    latency_us: float
    transfer_us: Floats
    measured_us: Floats


@dataclass(frozen=True)
class _Solution:
    values: Floats
    """Logarithms: launch, overlap between nodes and inside (over their defaults), latency and transfer of all, then
    of each family over those latency, transfer, and transfer of its halves."""
    names: list[Family]
    cost: float


Chosen = dict[tuple[str, int], list[Family]]


@dataclass(frozen=True)
class Trial:
    """One description of the machines, fitted."""

    machine: Nccl
    cost: float
    """Least squares, priors and departures: of two descriptions the one with less explains the logs better."""


def fit(machine: Nccl, logs: Sequence[Measured]) -> Nccl:
    """Return the machine with what was fitted to `logs`, which `attempt` and `finish` do in turn."""
    return finish(attempt(machine, logs), logs)


def attempt(machine: Nccl, logs: Sequence[Measured]) -> Trial:
    """Fit, without an interval.

    Raises InputError: nothing was measured, or on one rank only.
    """
    used = _used(logs)
    plain = replace(machine, fit=None)
    found, cost = _best(plain, used)
    return Trial(replace(plain, fit=found), cost)


def finish(trial: Trial, logs: Sequence[Measured]) -> Nccl:
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
    """The fit with the tuner's choice, or with its changes at other sizes where that explains the logs much better."""
    shapes = {log.key: Shape(machine, log.nodes, log.per_node) for log in logs}
    told: Chosen = {log.key: nccl.choice(log.collective, shapes[log.key], _sizes(log)) for log in logs}
    best, chosen = _solve(machine, logs, told), told
    rows = sum(len(log.samples) for log in logs)
    for _ in range(MAX_ROUNDS):
        if best.cost <= USUAL_COST * rows:
            break
        tried = []
        for log in logs:
            for moved in _moves(log, chosen[log.key]):
                other = chosen | {log.key: moved}
                solved = _solve(machine, logs, other)
                departures = sum(_departures(other[key], told[key]) for key in told)
                tried.append((replace(solved, cost=solved.cost + DEPARTURE_COST * departures), other))
        solution, current = min(tried, key=lambda trial: trial[0].cost, default=(best, chosen))
        if solution.cost >= best.cost - 1e-6:
            break
        best, chosen = solution, current
    changed = {collective for collective, ranks in told if chosen[collective, ranks] != told[collective, ranks]}
    return _record(best, logs, {key: chosen[key] for key in chosen if key[0] in changed}), best.cost


def _sizes(log: Measured) -> Floats:
    return np.array([size for size, _ in log.samples])


def _departures(chosen: Sequence[Family], told: Sequence[Family]) -> int:
    """How many runs of sizes depart from what the tuner says."""
    runs, before = 0, None
    for mine, other in zip(chosen, told, strict=True):
        now = None if mine == other else mine
        runs += now is not None and now != before
        before = now
    return runs


def _rows(machine: Nccl, logs: Sequence[Measured], chosen: Mapping[tuple[str, int], Sequence[Family]]) -> list[_Row]:
    rows = []
    for log in logs:
        shape = Shape(machine, log.nodes, log.per_node)
        sizes, times = (np.array(column) for column in zip(*log.samples, strict=True))
        taken = np.array(chosen[log.key])
        for family in dict.fromkeys(taken.tolist()):
            here = taken == family
            rows.append(_row(family, log, shape, sizes[here], times[here]))
    return rows


def _row(family: Family, log: Measured, shape: Shape, sizes: Floats, times: Floats) -> _Row:
    return _Row(
        family=family,
        half=log.collective != "all_reduce",
        inside=log.nodes == 1,
        latency_us=nccl.latency_us(family, log.collective, shape),
        transfer_us=sizes / nccl.bytes_per_us(family, log.collective, shape),
        measured_us=times,
    )


def _solve(machine: Nccl, logs: Sequence[Measured], chosen: Mapping[tuple[str, int], Sequence[Family]]) -> _Solution:
    """Least squares of logarithms, with priors."""
    from scipy.optimize import least_squares

    rows = _rows(machine, logs, chosen)
    names = sorted({row.family for row in rows})
    priors = np.array(
        [LAUNCH_PRIOR, OVERLAP_PRIOR, OVERLAP_PRIOR, LATENCY_PRIOR, TRANSFER_PRIOR]
        + [LATENCY_OWN_PRIOR, TRANSFER_OWN_PRIOR, HALVES_PRIOR] * len(names)
    )

    def residuals(values: Floats) -> Floats:
        parts = [np.log(_predicted(values, names, row) / row.measured_us) / NOISE for row in rows]
        apart = np.concatenate(parts)
        return np.concatenate([np.sign(apart) * np.sqrt(_loss(apart)), values / priors])

    # Converged so far that processors, which add in different orders, agree on the digits that are kept.
    close = {"ftol": CONVERGED, "xtol": CONVERGED, "gtol": CONVERGED}
    found = least_squares(residuals, np.zeros(len(priors)), method="trf", max_nfev=400, **close)
    return _Solution(found.x, names, float(2.0 * found.cost))


def _loss(apart: Floats) -> Floats:
    """Huber's; priors have none, for they are not to be robust."""
    size = np.abs(apart)
    return np.where(size > OUTLIER, OUTLIER * (2.0 * np.maximum(size, OUTLIER) - OUTLIER), size**2)


def _predicted(values: Floats, names: Sequence[Family], row: _Row) -> Floats:
    launch, overlap, factors = _constants(values, names, row.family, row.inside, row.half)
    return nccl.family_us(row.latency_us, row.transfer_us, launch, overlap, factors)


def _constants(
    values: Floats, names: Sequence[Family], family: Family, inside: bool = False, half: bool = False
) -> tuple[float, float, tuple[float, float]]:
    launch = nccl.LAUNCH_US * math.exp(values[0])
    overlap = (nccl.OVERLAP_INSIDE if inside else nccl.OVERLAP_BETWEEN) * math.exp(values[2 if inside else 1])
    latency, transfer = values[3], values[4]
    if family in names:
        at = 5 + 3 * names.index(family)
        latency, transfer = latency + values[at], transfer + values[at + 1] + half * values[at + 2]
    return launch, max(1.0, overlap), (math.exp(latency), math.exp(transfer))


def _moves(log: Measured, chosen: Sequence[Family]) -> Iterator[list[Family]]:
    """Every choice in which one change between two algorithms comes some sizes earlier or later."""
    order = np.argsort(_sizes(log), kind="stable").tolist()
    for at in range(1, len(order)):
        before, after = chosen[order[at - 1]], chosen[order[at]]
        if before == after:
            continue
        for shift in SHIFTS:
            moved = list(chosen)
            for place in order[at : at + shift]:
                moved[place] = before
            for place in order[max(0, at + shift) : at]:
                moved[place] = after
            yield moved


def _record(solution: _Solution, logs: Sequence[Measured], changed: Mapping[tuple[str, int], list[Family]]) -> NcclFit:
    values, names = solution.values, solution.names
    factors = {family: _constants(values, names, family)[2] for family in names}
    launch, overlap, _ = _constants(values, names, names[0])
    halves = {family: float(values[5 + 3 * at + 2]) for at, family in enumerate(names)}
    choice: dict[str, dict[str, tuple[tuple[float, Family], ...]]] = {}
    for log in logs:
        if log.key in changed:
            choice.setdefault(log.collective, {})[str(log.key[1])] = _table(log, changed[log.key])
    return NcclFit(
        launch_us=_rounded(launch), overlap=_rounded(overlap),
        overlap_inside=_rounded(_constants(values, names, names[0], True)[1]),
        latency={family: _rounded(waits) for family, (waits, _) in factors.items()},
        transfer={family: _rounded(moves) for family, (_, moves) in factors.items()},
        halves={family: _rounded(math.exp(value)) for family, value in halves.items() if abs(value) > 1e-5},
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
    """log(predicted / measured)."""
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
