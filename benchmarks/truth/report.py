"""The figures of all cells as docs/results/truth.md, and whether they meet the targets."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import torch

from benchmarks.marked import replace_part
from benchmarks.truth.cells import Cell, Result, Seen
from planner.comparison.variants import NO_COMMUNICATION

WORTH_HIDING = 0.1
"""Share of the step of `single`: where less could be hidden, the difference of two steps says nothing about it."""

TAU, NOT_SLOWER, HIDDEN = 0.9, 1.01, 0.85
"""Targets: Kendall's τ, the chosen plan against its rivals, hidden share."""


@dataclass(frozen=True)
class Kind:
    """Cells that belong into one table."""

    part: str
    """Of the document."""
    mean_error: float
    p95_error: float
    rivals: str
    """What the chosen plan is held against."""
    user_error: float = 0.05
    """Of predictions as users have them; see `Seen.user_us`."""
    user_p95: float = 0.12
    hides: bool = True
    """Whether the chosen plan sends as many bytes as `single`, so that what it hides can be told from the two."""


EXACT = Kind("measured", 0.02, 0.05, "tuned DDP")
FOREIGN = replace(EXACT, part="foreign")
LOSSY = Kind("lossy", 0.03, 0.08, "the best exact plan", hides=False)
DELAYED = replace(EXACT, part="delayed", hides=False)


def errors(result: Result) -> list[float]:
    """Of the plans; the no-communication baseline has no communication to predict."""
    return [seen.error for seen in result.seen if seen.name != NO_COMMUNICATION]


def tau(result: Result) -> float | None:
    """Kendall's τ over the pairs that differ by more than the noise: 1 is all in the measured order."""
    predicted = {seen.name: seen.predicted_us for seen in result.seen}
    if not result.distinct_pairs:
        return None
    signs = [np.sign(predicted[slower] - predicted[faster]) for faster, slower in result.distinct_pairs]
    return float(np.mean(signs))


def lost(result: Result) -> float:
    """What trusting the prediction costs: the plan predicted best against the one measured best."""
    plans = [seen for seen in result.seen if seen.name != NO_COMMUNICATION]
    chosen = min(plans, key=lambda seen: seen.predicted_us)
    return chosen.measured_us / min(seen.measured_us for seen in plans) - 1.0


def hidden(result: Result) -> float | None:
    """Of the communication that could be hidden, the share that the plan predicted best hides: by so much its step is
    shorter than with one message behind backward, which hides nothing and else costs the same.

    None where that is so little of a step that noise is more, or plans do not send the same bytes.
    """
    plans = {seen.name: seen for seen in result.seen if seen.name != NO_COMMUNICATION}
    chosen, single = min(plans.values(), key=lambda seen: seen.predicted_us), plans.get("single")
    if single is None or single.alone_us is None or not kind_of(result.cell).hides:
        return None
    could_us = min(single.alone_us, result.backward_us)
    worth = could_us >= WORTH_HIDING * single.measured_us
    return (single.measured_us - chosen.measured_us) / could_us if worth else None


def kind_of(cell: Cell) -> Kind:
    """Which cells it belongs to."""
    if cell.lossy or cell.delayed:
        return LOSSY if cell.lossy else DELAYED
    return FOREIGN if cell.foreign else EXACT


def summary(results: Sequence[Result]) -> Iterator[str]:
    """The targets, one line each, met or not."""
    kind = kind_of(results[0].cell)
    every = np.abs([error for result in results for error in errors(result)])
    repeat = float(np.mean([result.repeat_error for result in results]))
    taus = [value for result in results if (value := tau(result)) is not None]
    slower = [result for result in results if result.chosen_against_best_ddp[1] > NOT_SLOWER]
    shares = [share for result in results if (share := hidden(result)) is not None]
    limit = max(kind.mean_error, repeat)
    mean, high = float(every.mean()), float(np.quantile(every, 0.95))
    rows = [
        ("mean absolute error", f"{mean:.1%}", f"≤ {limit:.1%} (repeat error {repeat:.1%})", mean <= limit),
        ("95th percentile", f"{high:.1%}", f"≤ {kind.p95_error:.0%}", high <= kind.p95_error),
        (f"cells where the chosen plan is slower than {kind.rivals}", str(len(slower)), "0", not slower),
        ("lost by trusting the prediction, mean", f"{np.mean([lost(r) for r in results]):.1%}", "", True),
    ]
    ours = np.abs([one.user_us / one.measured_us - 1.0 for one in _seen_by_users(results) if one.user_us])
    if ours.size:
        bare = [one.user_us / one.measured_us - 1.0 for one in _seen_by_users(results, bare=True) if one.user_us]
        for what, found, most in (
            ("mean absolute error", float(ours.mean()), kind.user_error),
            ("95th percentile", float(np.quantile(ours, 0.95)), kind.user_p95),
        ):
            rows.append((f"as users have it: {what}", f"{found:.1%}", f"≤ {most:.0%}", found <= most))
        rows.append(("as users have it: the bare loop", f"{min(bare):+.1%} to {max(bare):+.1%}", "", True))
    ratios = [result.user_against_best_ddp[0] for result in results if result.user_against_best_ddp]
    if ratios:
        middle = float(np.median(ratios))
        rows.append((f"a user's plan / {kind.rivals}, median", f"{middle:.3f}", "≤ 1.00", middle <= 1.0))
    if taus:
        rank = float(np.mean(taus))
        rows.append(("Kendall's τ beyond the noise, mean", f"{rank:.2f}", f"≥ {TAU}", rank >= TAU))
    if shares:
        share = float(np.mean(shares))
        rows.append(("hidden share, mean", f"{share:.0%}", f"≥ {HIDDEN:.0%}", share >= HIDDEN))
    yield "| figure | measured | target | met |"
    yield "| --- | --- | --- | --- |"
    for what, measured, target, met in rows:
        yield f"| {what} | {measured} | {target} | {'yes' if met else '**no**'} |"


def _seen_by_users(results: Sequence[Result], *, bare: bool = False) -> Iterator[Seen]:
    """Plans, or the bare loops."""
    for result in results:
        yield from (seen for seen in result.seen if (seen.name == NO_COMMUNICATION) == bare)


def group_lines(results: Sequence[Result]) -> Iterator[str]:
    """One row for each number of hosts and link."""
    yield "| hosts, link | cells | mean error | 95th percentile | repeat error | τ | lost | hidden |"
    yield "| --- " * 8 + "|"
    for hosts, rate in dict.fromkeys((result.cell.hosts, result.cell.rate) for result in results):
        group = [result for result in results if (result.cell.hosts, result.cell.rate) == (hosts, rate)]
        every = np.abs([error for result in group for error in errors(result)])
        taus = [value for result in group if (value := tau(result)) is not None]
        shares = [share for result in group if (share := hidden(result)) is not None]
        yield (
            f"| {hosts} × {rate} | {len(group)} | {every.mean():.1%} | {np.quantile(every, 0.95):.1%} | "
            f"{np.mean([result.repeat_error for result in group]):.1%} | {f'{np.mean(taus):.2f}' if taus else ''} | "
            f"{np.mean([lost(result) for result in group]):.1%} | {f'{np.mean(shares):.0%}' if shares else ''} |"
        )


def cell_lines(results: Sequence[Result]) -> Iterator[str]:
    """One row per cell."""
    yield (
        "| model, hosts, link | no communication (ms) | repeat error | profiles apart | mean error | largest error | τ "
        "| lost | chosen / rival (95 %) | hidden |"
    )
    yield "| --- " * 10 + "|"
    for result in results:
        bare = next(seen for seen in result.seen if seen.name == NO_COMMUNICATION)
        found = np.abs(errors(result))
        rank, share = tau(result), hidden(result)
        value, low, high = result.chosen_against_best_ddp
        yield (
            f"| {result.cell.model} {result.cell.hosts} × {result.cell.rate} | {bare.measured_us / 1e3:.1f} | "
            f"{result.repeat_error:.1%} | {result.profiles_apart:.1%} | {found.mean():.1%} | {found.max():.1%} | "
            f"{'' if rank is None else f'{rank:.2f}'} | {lost(result):.1%} | {value:.3f} ({low:.3f} to {high:.3f}) | "
            f"{'' if share is None else f'{share:.0%}'} |"
        )


def plan_lines(results: Sequence[Result]) -> Iterator[str]:
    """One row per plan of each cell."""
    yield "| cell | plan | buckets | predicted (ms) | measured (ms) | 95 % interval | error | as users have it |"
    yield "| --- " * 8 + "|"
    for result in results:
        for seen in result.seen:
            low, high = (value / 1e3 for value in seen.ci95_us)
            of_plan = seen.name != NO_COMMUNICATION
            predicted, error = (f"{seen.predicted_us / 1e3:.2f}", f"{seen.error:+.1%}") if of_plan else ("", "")
            users = "" if seen.user_us is None else f"{seen.user_us / seen.measured_us - 1.0:+.1%}"
            yield (
                f"| {result.cell.key} | {seen.name} | {seen.buckets or ''} | {predicted} | "
                f"{seen.measured_us / 1e3:.2f} | {low:.2f} to {high:.2f} | {error} | {users} |"
            )


def document(results: Sequence[Result]) -> str:
    """What stands between the marks in docs/results/truth.md."""
    versions = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo"
    where = f"Measured on {date.today().isoformat()}: {versions}, {len(results)} cells."
    tables = (summary(results), group_lines(results), cell_lines(results), plan_lines(results))
    parts = [where, *(line for table in tables for line in ("", *table))]
    return "\n".join(parts)


def write_into(text: str, results: Sequence[Result]) -> str:
    """The document with the part of these results replaced, which are all of one kind."""
    return replace_part(text, kind_of(results[0].cell).part, document(results))
