"""Regions of a compiled model: where gradients become ready, and what the cuts between them cost.

The model is compiled with a cut at every block, at most 48 of them, and as one graph. The difference is what all cuts
cost. Cuts at unlike blocks, in at most three groups, are also measured group by group, unless one graph took a minute
to compile. Equal blocks are compiled once by backends that cache graphs (inductor).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import fmean

import torch

from planner.documents.cut_costs import CompiledProfile, Cut
from planner.documents.profile import ComputeProfile
from planner.documents.text import ms, pluralize
from planner.model.regions import find_breaks, find_cuts
from planner.profile.bench import Bench
from planner.profile.compute import Training, combine, measure_again
from planner.profile.request import CUTS, Phases
from runtime.core.compiled import CompiledModel, CompileOptions, blocks_of, modules_by_name
from runtime.plan.names import canonical_name

MOST_CUTS = 48
"""Blocks at which the graph is cut while it is measured; of more blocks every second one, or every third, and so on."""
COMPILING_STEPS = 2
"""Steps in which graphs are compiled."""
ROUNDS = 2
"""Most times that one graph, groups of cuts and all cuts are measured, interleaved."""
FEWEST_STEPS, ENOUGH_STEPS, MOST_STEPS = 3, 8, 13
"""Steps of a form each time: the fewest, those from which groups of cuts are measured, and the most."""
MOST_GROUPS, MOST_COMPILE_S = 3, 60.0
"""Groups of cuts that are measured by themselves, and the seconds of compiling one graph above which none is."""
TIMES = ("forward_us", "backward_us")


@dataclass(frozen=True)
class Regions:
    """A model that is compiled in the regions between its blocks."""

    compiled: CompiledModel
    blocks: tuple[str, ...]
    backend: str
    compile_s: float = 0.0
    """Seconds of compiling with all cuts."""

    def cut(self, training: Training, blocks: Sequence[str]) -> float:
        """Compile the model anew, and return the seconds of its first steps."""
        self.compiled.cut(blocks)
        started = time.perf_counter()
        for _ in range(COMPILING_STEPS):
            training.step(lambda: None)
        return time.perf_counter() - started


@contextmanager
def regions_of(training: Training) -> Iterator[Regions | None]:
    """Compile the model of a step inside, cut at its blocks; None where it is not to be compiled."""
    if training.compile is None:
        yield None
        return
    compiled, blocks = CompiledModel(training.model, training.compile), blocks_of(training.model)
    chosen = tuple(blocks[:: -(-len(blocks) // MOST_CUTS) or 1])
    regions = Regions(compiled, chosen, CompileOptions.of(training.compile).name)
    try:
        yield replace(regions, compile_s=regions.cut(training, chosen))
    finally:
        compiled.remove()


def with_costs(
    found: ComputeProfile, training: Training, bench: Bench, phases: Phases, regions: Regions
) -> ComputeProfile:
    """Return the times of a step that was measured with all cuts as those of one without, and what each cut costs.

    Where steps are long only one graph is measured, once; groups of cuts where there is time for all of them.

    Args:
        found: the times with all cuts.
        training, bench: the step and its ranks; all of them call it.
        phases: has the time for this, which compiling is no part of, and reports what is done.
        regions: the cuts. Afterwards the model is compiled with them again.
    """
    allowed_s, compile_s = phases.begin(CUTS, bench.world), [regions.compile_s]

    def compiled(blocks: Sequence[str]) -> None:
        compile_s.append(max(bench.world.gather(regions.cut(training, blocks), "comparing times of compiling")))
        phases.leave_out(compile_s[-1])

    compiled(())
    cuts = find_cuts(found.gradients, _parameters_of(training, regions.blocks))
    steps, groups = allowed_s * 1e6 / max(found.step_us, 1.0), _groups(training, cuts)
    if compile_s[-1] >= MOST_COMPILE_S or steps < ROUNDS * (2 + len(groups)) * ENOUGH_STEPS:
        groups = [cuts]
    alone = [tuple(cut.module for cut in group) for group in groups if group is not cuts]
    forms = [(), *alone, regions.blocks] if steps >= 2 * FEWEST_STEPS else [()]
    for blocks in alone:
        compiled(blocks)
    each = min(MOST_STEPS, max(FEWEST_STEPS, int(steps / (ROUNDS * len(forms)))))
    measured: list[list[ComputeProfile]] = [[] for _ in forms]
    begun_s, spent_s, rounds = time.perf_counter(), 0.0, 0
    while rounds < ROUNDS and (rounds + 1) * spent_s <= rounds * allowed_s:
        for blocks, times in zip(forms, measured, strict=True):  # interleaved: the machine may be slower for a while
            regions.compiled.cut(blocks)
            times.append(combine(measure_again(training, bench, each), training.parameters))
        rounds += 1
        spent_s = max(bench.world.gather(time.perf_counter() - begun_s, "comparing clocks"))
    regions.compiled.cut(regions.blocks)
    measured += [[found]] * (len(forms) == 1)
    forwards_us, backwards_us = ([fmean(getattr(one, name) for one in form) for form in measured] for name in TIMES)
    counts = [len(group) for group in groups]
    costs = zip(groups, cut_costs(forwards_us, counts), cut_costs(backwards_us, counts), strict=True)
    cuts = tuple(
        replace(cut, forward_us=round(forward_us, 3), backward_us=round(backward_us, 3))
        for group, forward_us, backward_us in costs
        for cut in group
    )
    whole_us = forwards_us[0] + backwards_us[0]
    phases.say(
        f"{pluralize(len(cuts), 'cut')} of the graph: forward and backward take "
        f"{ms(forwards_us[-1] + backwards_us[-1])}, those of one graph {ms(whole_us)}; compiling took "
        f"{sum(compile_s):.0f} s, which is no part of the budget"
    )
    gradients = list(found.gradients)
    for cut in cuts:  # the region that the cut ends has paid for it
        start = max((other.after for other in cuts if other.after < cut.after), default=0)
        index = max(range(start, cut.after), key=lambda at: gradients[at].backward_us)
        less_us = max(0.0, gradients[index].backward_us - cut.backward_us)
        gradients[index] = replace(gradients[index], backward_us=round(less_us, 3))
    return replace(
        found,
        forward_us=round(max(0.0, found.forward_us - sum(cut.forward_us for cut in cuts)), 3),
        gradients=tuple(gradients),
        compiled=CompiledProfile(
            backend=regions.backend,
            cuts=cuts,
            breaks=find_breaks(gradients, measured[0][-1]),
            whole_us=round(whole_us, 3),
            compile_s=round(sum(compile_s), 3),
        ),
    )


def _groups(training: Training, cuts: tuple[Cut, ...]) -> list[tuple[Cut, ...]]:
    """Return runs of cuts at blocks with equal parameters; of more than three runs three parts of equal length."""
    modules = modules_by_name(training.model)

    def shapes(cut: Cut) -> list[torch.Size]:
        return [parameter.shape for parameter in modules[cut.module].parameters()]

    runs = [tuple(run) for _, run in groupby(cuts, key=shapes)]
    if len(runs) <= MOST_GROUPS:
        return runs if len(runs) > 1 else [cuts]
    stops = [len(cuts) * part // MOST_GROUPS for part in range(MOST_GROUPS + 1)]
    return [cuts[start:stop] for start, stop in pairwise(stops)]


def cut_costs(times_us: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return what a cut of each group costs, in microseconds, by least squares; never less than nothing.

    Args:
        times_us: with one graph, with the cuts of each group alone (of several groups), and with all cuts.
        counts: the number of cuts of each group.
    """
    whole_us, *alone_us, all_us = times_us
    parts_us = [alone - whole_us for alone in alone_us] or [all_us - whole_us]
    more_us = (all_us - whole_us - sum(parts_us)) / (len(parts_us) + 1)
    return [max(0.0, part + more_us) / max(1, count) for part, count in zip(parts_us, counts, strict=True)]


def _parameters_of(training: Training, blocks: Sequence[str]) -> dict[str, set[str]]:
    modules = modules_by_name(training.model)
    own = {id(parameter): name for name, parameter in training.parameters.items()}
    return {
        block: {own.get(id(one), canonical_name(name)) for name, one in modules[block].named_parameters()}
        for block in blocks
    }
