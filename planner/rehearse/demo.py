"""`planner demo`: DDP as it comes and a plan, rehearsed in about a minute, without root.

The cluster is emulated: computation is timed waits, and connections between local ranks are held to the scaled rate of
the link. DDP, the runtime, their hooks and every message are real. Bytes are not shrunk: DDP is torch's default.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.comparison.report import Row, values_by_name
from planner.comparison.statistics import Interval, ratio_interval, verdict
from planner.comparison.variants import BEST_DDP, DDP, NO_COMMUNICATION, PLAN, BucketVariant
from planner.documents.catalog import find_profile
from planner.documents.estimate import scale_compute
from planner.documents.profile import Cluster, Link
from planner.documents.text import mebibytes, milliseconds
from planner.jobs.rank_options import RankOptions, under_torchrun
from planner.jobs.world import on_ranks
from planner.rehearse.asked import AskedPlan, Target, ask_plan
from planner.rehearse.bucketed_ranks import BucketRehearser
from planner.rehearse.ranks import Rehearsed, rehearse_rank
from planner.rehearse.rehearsal import Rehearsal, summarize_rehearsal
from runtime.errors import InputError

MODEL = "googlenet"
FASTER = 5.0
"""Ratio of the emulated accelerator's speed to that of the K80 that the model's times were measured on."""
BITS_PER_S = 10e9
START_UP_US = 50.0
"""Start-up time of a message between hosts."""
DILATE = 10.0
"""Factor of times: steps are so long that a busy machine disturbs them little."""
HELD_SHARE = 0.9
"""Share of DDP's step by the link's constants below which the link was faster than it should have been."""
BUSY_CORES = 0.3
"""Cores that other programs use, from which the result names them."""
BAR_CHARACTERS = 56
NAMES = {DDP: "DDP", PLAN: "planner"}


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """DDP's default and the plan."""

    rehearsal: Rehearsal
    ratio: Interval
    """Step with the plan over DDP's."""
    variants: dict[str, BucketVariant]
    """The compared variants, by name."""
    other_cores: float
    """Number of cores that other programs used meanwhile."""

    @property
    def rows(self) -> dict[str, Row]:
        """Return the measured rows by name."""
        return {row.name: row for row in self.rehearsal.comparison.rows if isinstance(row, Row)}

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types: a rehearsal's, with the ratio."""
        comparison = self.rehearsal.comparison
        return self.rehearsal.to_document() | {
            "ratio": self.ratio.value, "ratio_ci95": (self.ratio.low, self.ratio.high),
            "rounds": comparison.rounds, "steps": comparison.steps, "other_cores": self.other_cores,
        }  # fmt: skip


def run_demo(where: RankOptions, minutes: float, show_progress: bool) -> DemoResult:
    """Rehearse DDP's default and a plan on local ranks, each of which stands for a machine; see `planner demo`.

    Args:
        where: the ranks; by default two.
        minutes: time of all of it from when ranks have started, if the ratio is not known well enough before.
        show_progress: whether lines are written on standard error.

    Raises:
        InputError: an option that an emulated accelerator has no use for, or too few minutes.
        EnvironmentFailure: a rank died, or the kernel cannot hold connections to a rate.
    """
    asked = make_request(where, minutes)
    where = replace(where, device="cpu", backend="gloo")
    busy_s, own_s, begun_s = _busy_s(), _own_s(), time.monotonic()
    ranks = on_ranks(where, rehearse_rank, BucketRehearser, asked, None, show_progress)
    passed_s = time.monotonic() - begun_s
    other_cores = max(0.0, (_busy_s() - busy_s) - (_own_s() - own_s)) / passed_s
    return summarize_demo(asked, ranks, other_cores)


def make_request(where: RankOptions, minutes: float) -> AskedPlan:
    """Return the rehearsal that the demo is. Raises InputError as `run_demo`."""
    for option, found, expected in (("device", where.device, "cpu"), ("backend", where.backend, "gloo")):
        if found not in (None, "auto", expected):
            raise InputError(
                f"--{option}: found {found}, expected {expected}: the demo's accelerator is emulated; leave it out, "
                f"and measure on GPUs with `planner compare JOB --plan PLAN`"
            )
    emulation = where.emulation
    if emulation is not None and emulation.ranks_per_host > 1:
        raise InputError(f"--emulate: found {emulation.spec}, expected hosts of one rank, such as 2x1@10gbit")
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if under_torchrun() else where.local_ranks
    if ranks < 2:
        raise InputError(f"--ranks: found {ranks}, expected 2 or more: one rank alone sends nothing; leave it out")
    bits_per_s = BITS_PER_S if emulation is None else emulation.bits_per_s
    profile = find_profile(MODEL)
    compute = scale_compute(profile.compute, 1.0 / FASTER, 1.0 / FASTER)
    cluster = Cluster(
        name=f"{bits_per_s / 1e9:g} Gbit/s", nodes=ranks, ranks_per_node=1,
        inter=Link(alpha_us=START_UP_US, beta_us_per_byte=8e6 / bits_per_s),
    )  # fmt: skip
    target = Target(
        name=MODEL, profile=replace(profile, compute=compute), cluster=cluster, minutes=minutes, dilate=DILATE,
        shrink=1.0,
    )  # fmt: skip
    return replace(ask_plan(target, strategies=()), only_default=True)


def summarize_demo(asked: AskedPlan, ranks: Sequence[Rehearsed], other_cores: float) -> DemoResult:
    """Return the result of all ranks' measurements, in order of rank."""
    values = values_by_name([rank.measured for rank in ranks])
    return DemoResult(
        rehearsal=summarize_rehearsal(asked, ranks), ratio=ratio_interval(values[PLAN], values[DDP]),
        variants={record.variant.name: record.variant for record in ranks[0].measured.records},
        other_cores=other_cores,
    )  # fmt: skip


def demo_lines(result: DemoResult) -> list[str]:
    """Return the result in words: what was compared, a bar for each way to train, the gain, and what to type next."""
    rows, comparison = result.rows, result.rehearsal.comparison
    longest_us = max(row.median_us or 0.0 for row in rows.values())
    scale = BAR_CHARACTERS / longest_us
    computing = round((rows[NO_COMMUNICATION].median_us or 0.0) * scale)

    def bar(name: str) -> str:
        row = rows[name]
        shown = "█" * computing + "░" * (round((row.median_us or 0.0) * scale) - computing)
        return (
            f"{NAMES[name]:<8}{shown:<{BAR_CHARACTERS}} {milliseconds(row.median_us):>6} ms a step "
            f"(predicted {milliseconds(row.predicted_us)})"
        )

    steps = f"{comparison.steps} steps each in {comparison.rounds} interleaved rounds"
    return [
        *plan_lines(result),
        *[f"note: {note}" for note in [*comparison.differences, *noise_notes(result)]],
        "",
        bar(DDP),
        bar(PLAN),
        f"{'':8}█ computation  ░ waiting for gradients",
        "",
        f"{gain_line(result)}; {steps}",
        "In your own script: session = planner.attach(model, optimizer) in place of DistributedDataParallel(model).",
        f"Next, type: {_command()} docs tutorial",
    ]


def gain_line(result: DemoResult) -> str:
    """Return the gain if it is beyond the noise, else that it is not, with the steps that would show one."""
    ratio, steps = result.ratio, result.rehearsal.comparison.steps // max(1, result.rehearsal.comparison.rounds)
    if ratio.low <= 1.0:
        around = f"{1.0 / ratio.high:.2f} to {1.0 / ratio.low:.2f}"
        if ratio.high < 1.0:
            return f"planner's step is {1.0 / ratio.value:.2f} times as fast as DDP's (95 % interval {around})"
    return verdict(ratio, "planner", DDP, steps)


def plan_lines(result: DemoResult) -> list[str]:
    """Return what the plan did, and that it trains as DDP does."""
    numel = {one.name: one.size_bytes for one in result.rehearsal.asked.profile.compute.gradients}

    def buckets(name: str) -> tuple[int, str]:
        plan = result.variants[name].plan
        assert plan is not None
        last = plan.buckets[-1].gradients
        return len(plan.buckets), mebibytes(sum(numel[gradient] for gradient in last))

    (count, last), (planned, planned_last) = buckets(DDP), buckets(PLAN)
    lines = [
        f"DDP's default (1 MiB, then 25 MiB) makes {count} buckets; the last one, {last}, is sent after backward.",
        f"The plan has {planned}, chosen for this model and link; its last one is {planned_last}, and the others are "
        f"sent during backward.",
    ]
    tuned_us = [us for name, us in result.rehearsal.figures["from_constants_us"].items() if name.startswith(BEST_DDP)]
    if tuned_us:
        lines.append(
            f"DDP with the best of its bucket sizes is predicted to take {milliseconds(min(tuned_us))} ms: the plan "
            f"needs no such search."
        )
    if result.rows[PLAN].same_training:
        lines.append("Nothing is compressed or delayed: first update and losses were those of DDP.")
    return lines


def noise_notes(result: DemoResult) -> list[str]:
    """Return what disturbed the measurement."""
    notes = []
    if result.other_cores >= BUSY_CORES:
        notes.append(
            f"other programs used {result.other_cores:.1f} of the {os.cpu_count()} cores meanwhile, so that intervals "
            f"are wider"
        )
    row, expected_us = result.rows[DDP], result.rehearsal.figures["from_constants_us"].get(DDP)
    if row.median_us is not None and expected_us is not None and row.median_us < HELD_SHARE * expected_us:
        notes.append(
            f"this kernel does not hold connections to a rate: DDP took {milliseconds(row.median_us)} ms a step, and "
            f"{milliseconds(expected_us)} were expected on the emulated link; as root, add --emulate 2x1@10gbit"
        )
    return notes


def _command() -> str:
    """Return what to type for `planner`: its path if it is not found without."""
    found = shutil.which("planner")
    return "planner" if found else os.path.relpath(Path(sys.executable).with_name("planner"))


def _busy_s() -> float:
    """Return the seconds that all cores together have worked since the machine started; 0 where that is not known."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return 0.0
    user, nice, system, _, _, *others = map(int, first.split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the seconds that this process and its ended ranks have worked."""
    return sum(os.times()[:4])
