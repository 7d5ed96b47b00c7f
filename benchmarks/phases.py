"""A plan in phases, rehearsed: the predicted total time of three phases against that of the steps that were run.

After CommLib's DAWNBench record (MLSys 2021, Table 4): ResNet-50 with images of 96, 128 and 224 pixels, of which
computation takes a share by their area; gradients are the same.

python -m benchmarks.phases --results phases.jsonl    # 12 minutes; needs root; resumable
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.resumable import kept
from planner import optimize
from planner.decide.phases import join_phases
from planner.documents.profile import Profile
from planner.model.what_if import WhatIf
from planner.rehearse.asked import Target, ask_plan, find_target
from planner.rehearse.rehearsal import rehearse
from runtime.plan import Plan

MODEL, HOSTS = "resnet50@v100-16x8-25gbe", "4x1"
PIXELS = {96: 13, 128: 11, 224: 3}
"""Pixels of a side → epochs (Table 4)."""
FULL_PIXELS = 224
STEPS_PER_EPOCH = 1000


def target(pixels: int, minutes: float) -> Target:
    """Return the model with images of this number of pixels a side, on the emulated hosts."""
    found = find_target(MODEL, None, HOSTS, minutes)
    return replace(found, profile=profile(found.profile, pixels))


def profile(whole: Profile, pixels: int) -> Profile:
    """Return the profile of a step with smaller images: forward and backward by their area."""
    return WhatIf(batch=(pixels / FULL_PIXELS) ** 2).profile(whole)


def plans(minutes: float = 4.0) -> list[Plan]:
    """Return the plan of each phase."""
    targets = [target(pixels, minutes) for pixels in PIXELS]
    return [optimize(each.profile, each.cluster) for each in targets]


def measure(pixels: int, minutes: float) -> dict[str, Any]:
    """Rehearse the exact plan of one phase; return what `planner rehearse --json` prints."""
    return rehearse(ask_plan(target(pixels, minutes), strategies=()), show_progress=True).to_document()


def step_us(record: Mapping[str, Any]) -> float:
    """Return the measured step of the plan."""
    return float(next(row["median_us"] for row in record["rows"] if row["name"] == "plan"))


def lines(records: Mapping[int, Mapping[str, Any]], phases: Sequence[Plan]) -> Iterator[str]:
    """Yield a row per phase, and one for the total."""
    whole = join_phases(phases, list(PIXELS.values()), [STEPS_PER_EPOCH])
    steps = [epochs * STEPS_PER_EPOCH for epochs in PIXELS.values()]
    assert whole.predicted is not None
    yield "| phase | steps | predicted, s | rehearsed, s | error |"
    yield "| --- " * 5 + "|"
    total_s = 0.0
    for (pixels, record), plan, count in zip(records.items(), phases, steps, strict=True):
        assert plan.predicted is not None
        said_s, found_s = (count * each / 1e6 for each in (plan.predicted.iteration_us, step_us(record)))
        total_s += found_s
        yield f"| {pixels} px | {count:,} | {said_s:.4g} | {found_s:.4g} | {said_s / found_s - 1.0:+.1%} |"
    said_s = whole.predicted.iteration_us * sum(steps) / 1e6
    yield f"| total | {sum(steps):,} | {said_s:.4g} | {total_s:.4g} | {said_s / total_s - 1.0:+.1%} |"


def main() -> int:
    """Measures what is missing, and prints the table once all phases are known."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--results", type=Path, default=None, help="JSON lines: not measured again")
    parser.add_argument("--minutes", type=float, default=4.0, help="of each phase")
    options = parser.parse_args()
    wanted = {f"{MODEL} {HOSTS} {pixels} px": partial(measure, pixels, options.minutes) for pixels in PIXELS}
    records = kept(options.results, wanted)
    if len(records) < len(PIXELS):
        return 3
    print("\n".join(lines(dict(zip(PIXELS, records, strict=True)), plans(options.minutes))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
