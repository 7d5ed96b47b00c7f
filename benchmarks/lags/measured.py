"""Eq. 20 against measured steps: LAGS and SLGS with the same share of every layer, on emulated links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.lags.bound import DENSITY, at_once, bound, layer_wise
from benchmarks.steps import measure_rank
from planner.comparison.report import values_by_name
from planner.comparison.statistics import median_interval, ratio_interval
from planner.comparison.variants import NO_COMMUNICATION
from planner.ir import Schedule
from planner.jobs.rank_options import RankOptions
from planner.jobs.world import on_ranks
from planner.model.modes import simulate_schedule
from planner.model.problem import Problem, make_problem

LINKS = ("2x1@1gbit", "2x1@200mbit", "2x1@100mbit", "2x1@50mbit", "2x1@20mbit")
SLGS, LAGS = "SLGS", "LAGS"
STEPS = 4


@dataclass(frozen=True)
class Measured:
    """One link."""

    link: str
    ratio: float
    """r = t_c / t_b: SLGS's message alone over backward alone, both measured."""
    bound: float
    simulated: float
    """From the profile, with what selecting costs and contention."""
    measured: tuple[float, float, float]
    """SLGS's step over LAGS's, with its 95 % interval."""


def schedules(problem: Problem) -> Mapping[str, Schedule]:
    """The two, with the same share of every layer."""
    return {SLGS: at_once(problem, DENSITY), LAGS: layer_wise(problem, DENSITY)}


def on_link(job: str, link: str, rounds: int) -> Measured:
    """One start of emulated hosts."""
    ranks = on_ranks(RankOptions(None, emulate=link), measure_rank, job, schedules, rounds, STEPS, "cpu", "bounded")
    measured, problem = ranks[0].measured, make_problem(ranks[0].profile)
    values = values_by_name([rank.measured for rank in ranks])
    message_us = max(record.alone_us or 0.0 for record in measured.records if record.variant.name == SLGS)
    forward_us = median_interval(values[NO_COMMUNICATION]).value - measured.backward_us
    simulated = {name: simulate_schedule(problem, made).iteration_us for name, made in schedules(problem).items()}
    ratio = ratio_interval(values[SLGS], values[LAGS])
    return Measured(
        link=link,
        ratio=message_us / measured.backward_us,
        bound=bound(forward_us, measured.backward_us, message_us),
        simulated=simulated[SLGS] / simulated[LAGS],
        measured=(ratio.value, ratio.low, ratio.high),
    )


def lines(rows: Sequence[Measured]) -> Iterator[str]:
    """One row per link."""
    yield "| link | r = t_c / t_b | Eq. 20 | simulated from the profile | measured (95 %) |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        value, low, high = row.measured
        yield (
            f"| {row.link} | {row.ratio:.2f} | {row.bound:.3f} | {row.simulated:.3f} "
            f"| {value:.3f} ({low:.3f} to {high:.3f}) |"
        )
