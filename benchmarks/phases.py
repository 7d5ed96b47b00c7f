"""A plan in phases, rehearsed: the predicted total of three phases against that of one run, and its weights.

After CommLib's DAWNBench record (MLSys 2021, Table 4): ResNet-50 with images of 96, 128 and 224 pixels, of which
computation takes a share by their area; gradients are the same. One launch measures the links, decides, predicts, and
only then trains: by the plan in phases, and by hand, with the plan of each phase in a session of its own.

sudo python -m benchmarks.phases --write    # less than four minutes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import runtime
from benchmarks.marked import publish
from planner import optimize
from planner.comparison.trained import TrainedJob
from planner.decide.phases import join_phases
from planner.documents.profile import Cluster, Profile
from planner.jobs.launch import LocalWorld, run_ranks
from planner.model.what_if import WhatIf
from planner.profile.bench import Bench, Progress
from planner.profile.step import decided_by_first, joined
from planner.rehearse.asked import AskedPlan, Target, ask_plan, find_target
from planner.rehearse.bucketed_ranks import BucketRehearser
from planner.rehearse.ranks import CPU, TIMEOUT_S, begin, say
from planner.rehearse.scale import Scale, scaled_plan
from planner.testbed.hosts import check_namespaces
from runtime.checks.plan import model_fingerprint
from runtime.optimizers.kinds import Optimizers
from runtime.plan import Plan

DOCUMENT = Path("docs/results/phases.md")
MODEL, HOSTS, MINUTES = "resnet50@v100-16x8-25gbe", "4x1", 3.5
PIXELS = {96: 13, 128: 11, 224: 3}
"""Pixels of a side → epochs (Table 4)."""
FULL_PIXELS = 224
STEPS_PER_EPOCH = 2
STEPS = [epochs * STEPS_PER_EPOCH for epochs in PIXELS.values()]
RUN_SHARE = 0.5
"""Share of the minutes that both trainings may take by the dilation that is chosen."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The measurements of one rank; times are of the cluster itself."""

    scale: Scale
    whole: Plan
    """The plan in phases, with predictions."""
    phases_s: Sequence[float]
    """Seconds of the steps of each phase in the run in phases, the switch at its end included."""
    elements: int
    differing: int
    """Elements of the weights that have other bits than after three runs by hand."""


class PhaseRehearser(BucketRehearser):
    """A rehearsal of a plan in phases, on this rank."""

    @staticmethod
    def most_dilate(asked: AskedPlan, left_s: float) -> float:
        """Return the dilation at which both trainings take their share of what is left, by the constants."""
        return max(1.0, RUN_SHARE * left_s / (2 * total_s(plans_of(asked.slowest, asked.links))))

    def plan(self) -> Plan:
        """Time messages alone, and return the plan in phases for the scaled model; every rank calls it."""
        _, update_us = self._own_us()
        cluster = self._measured_cluster()
        asked, fingerprint = self.asked, model_fingerprint(self._model)

        def decided() -> Plan:
            plans = plans_of(asked.slowest, cluster, update_us)
            scaled = [scaled_plan(plan, self.scale, asked.profile.compute, fingerprint) for plan in plans]
            return join_phases(scaled, list(PIXELS.values()), [STEPS_PER_EPOCH])

        return decided_by_first(self.world, decided, "deciding")

    def train(self, whole: Plan) -> Found:
        """Train by the plan in phases, then by hand, from the same weights; every rank calls it."""
        assert whole.phases is not None
        job = TrainedJob(self._built)
        with job.restored(optimizer := job.optimizer()):
            session = self._attached(optimizer, whole)
            phases_s = [
                self._steps(job, optimizer, count, share(pixels)) for pixels, count in zip(PIXELS, STEPS, strict=True)
            ]
            session.detach()
            in_phases = self._weights()
        with job.restored(optimizer := job.optimizer()):
            for phase, count in zip(whole.phases, STEPS, strict=True):
                session = self._attached(optimizer, phase.plan)
                self._steps(job, optimizer, count, 0.0)  # weights do not depend on how long computation takes
                session.detach()
            by_hand = self._weights()
        return Found(
            scale=self.scale, whole=whole, phases_s=[each / self.scale.dilate for each in phases_s],
            elements=by_hand.numel(), differing=int((in_phases != by_hand).sum()),
        )  # fmt: skip

    def _attached(self, optimizer: Optimizers, plan: Plan) -> runtime.Session:
        return runtime.attach(
            self._model, optimizer, plan, self.world.group, timeout_s=TIMEOUT_S, drift=False, guard=False
        )

    def _steps(self, job: TrainedJob, optimizer: Optimizers, count: int, factor: float) -> float:
        """Make steps whose computation takes a factor of the profile's, and return their seconds, dilated."""
        self._model.batch_factor = factor
        self.bench.meet()
        start_s = time.perf_counter()
        for step in range(count):
            job.step(self._model, optimizer, step)
        return time.perf_counter() - start_s

    def _weights(self) -> torch.Tensor:
        return torch.cat([weight.detach().flatten().view(torch.int32) for weight in self._model.parameters()])


def share(pixels: int) -> float:
    """Return the time of forward and backward over that with images of full size: by the area."""
    return (pixels / FULL_PIXELS) ** 2


def plans_of(whole: Profile, cluster: Cluster, update_us: float = 0.0) -> list[Plan]:
    """Return the plan of each phase of a training whose update takes some microseconds more than the profile's."""
    compute = replace(whole.compute, update_us=whole.compute.update_us + update_us)
    whole = replace(whole, compute=compute)
    return [optimize(WhatIf(batch=share(pixels)).profile(whole), cluster) for pixels in PIXELS]


def predicted_s(plans: Sequence[Plan]) -> list[float]:
    """Return the predicted seconds of each phase."""
    predicted = [plan.predicted for plan in plans]
    return [count * each.iteration_us / 1e6 for count, each in zip(STEPS, predicted, strict=True) if each is not None]


def total_s(plans: Sequence[Plan]) -> float:
    """Return the predicted seconds of all phases."""
    return sum(predicted_s(plans))


def target(minutes: float) -> Target:
    """Return the model with images of full size, on the emulated hosts."""
    return find_target(MODEL, None, HOSTS, minutes)


def rehearse_phases(asked: AskedPlan, started_s: float) -> Found:
    """Rehearse on this rank; every rank calls it."""
    with joined(None, TIMEOUT_S) as world:
        bench = Bench(world, CPU, Progress(world.rank == 0))
        left_s = asked.left_s(started_s)
        scale = begin(bench, asked, lambda: PhaseRehearser.most_dilate(asked, left_s), PhaseRehearser.COPIES)
        rehearser = PhaseRehearser(asked, bench, scale)
        whole = rehearser.plan()
        assert whole.predicted is not None
        say(world, f"predicted {sum(STEPS) * whole.predicted.iteration_us / 1e6:.4g} s for {sum(STEPS)} steps")
        return rehearser.train(whole)


def lines(ranks: Sequence[Found]) -> Iterator[str]:
    """Yield a row per phase, one for the total, and what became of the weights."""
    first = ranks[0]
    assert first.whole.phases is not None
    plans = [phase.plan for phase in first.whole.phases]
    measured = [max(each) for each in zip(*(rank.phases_s for rank in ranks), strict=True)]
    predicted = predicted_s(plans)
    names, buckets = [f"{pixels} px" for pixels in PIXELS], [str(len(plan.buckets)) for plan in plans]
    yield "| phase | steps | buckets | predicted, s | measured, s | error |"
    yield "| --- |" + " --: |" * 5
    rows = [*zip(names, STEPS, buckets, predicted, measured, strict=True)]
    rows.append(("total", sum(STEPS), "", sum(predicted), max(sum(rank.phases_s) for rank in ranks)))
    for name, count, held, said_s, found_s in rows:
        yield f"| {name} | {count} | {held} | {said_s:.4g} | {found_s:.4g} | {said_s / found_s - 1.0:+.1%} |"
    yield ""
    differing = sum(rank.differing for rank in ranks)
    yield (
        f"D = {first.scale.dilate:g}, S = {first.scale.shrink:g}. Weights after all steps, against a session for each "
        f"phase by hand: {differing:,} of {sum(rank.elements for rank in ranks):,} elements on {len(ranks)} ranks have "
        f"other bits."
    )


def main() -> int:
    """Measures, prints, writes; 0 even where the prediction is off: the document says so."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of the whole; default {MINUTES:g}")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT}")
    options = parser.parse_args()
    check_namespaces()
    asked = ask_plan(target(options.minutes), strategies=())
    world = LocalWorld(ranks=asked.cluster.ranks, emulation=asked.emulation)
    text = "\n".join(lines(run_ranks(world, rehearse_phases, asked, time.time())))
    publish(DOCUMENT if options.write else None, {"phases": text})
    return 0


if __name__ == "__main__":
    sys.exit(main())
