"""Regions of a compiled model: where gradients become ready, and what the cuts between them cost.

The model is compiled twice: with a cut at every block, at most 48 of them, and as one graph. Times of regions are those
of the first, less the difference of both, which is shared out evenly among the cuts. Equal blocks are compiled once by
backends that cache graphs (inductor).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean

from planner.documents.cut_costs import CompiledProfile
from planner.documents.profile import ComputeProfile
from planner.documents.text import ms, pluralize
from planner.model.regions import find_cuts
from planner.profile.bench import Bench
from planner.profile.compute import Training, combine, measure_again
from planner.profile.request import Phases
from runtime.core.compiled import CompiledModel, CompileOptions, blocks_of, modules_by_name
from runtime.plan.names import canonical_name

MOST_CUTS = 48
"""Blocks at which the graph is cut while it is measured; of more blocks every second one, or every third, and so on."""
COMPILING_STEPS = 2
"""Steps in which graphs are compiled."""
ROUNDS = 2
"""Times that one graph and all cuts are measured, interleaved."""
TIMES = ("forward_us", "backward_us")


@dataclass(frozen=True)
class Regions:
    """A model that is compiled in the regions between its blocks."""

    compiled: CompiledModel
    blocks: tuple[str, ...]
    backend: str

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
        regions.cut(training, chosen)
        yield regions
    finally:
        compiled.remove()


def with_costs(
    found: ComputeProfile, training: Training, bench: Bench, phases: Phases, regions: Regions
) -> ComputeProfile:
    """Return the times of a step that was measured with all cuts as those of one without, and what each cut costs.

    Args:
        found: the times with all cuts.
        training, bench: the step and its ranks; all of them call it.
        phases: reports what is done.
        regions: the cuts. Afterwards the model is compiled with them again.
    """
    compile_s = regions.cut(training, ())
    whole, cut_up = list[ComputeProfile](), list[ComputeProfile]()
    for _ in range(ROUNDS):  # interleaved: the machine may be slower for a while
        for blocks, times in (((), whole), (regions.blocks, cut_up)):
            regions.cut(training, blocks)
            times.append(combine(measure_again(training, bench), training.parameters))
    cuts = find_cuts(found.gradients, _parameters_of(training, regions.blocks))
    count = max(1, len(cuts))
    forwards_us, backwards_us = (
        [fmean(getattr(one, name) for one in form) for form in (whole, cut_up)] for name in TIMES
    )
    forward_us, backward_us = (max(0.0, many - one) / count for one, many in (forwards_us, backwards_us))
    whole_us = forwards_us[0] + backwards_us[0]
    phases.say(
        f"{pluralize(len(cuts), 'cut')} of the graph: forward and backward take "
        f"{ms(forwards_us[1] + backwards_us[1])}, those of one graph {ms(whole_us)}"
    )
    gradients = list(found.gradients)
    for cut in cuts:  # the region that the cut ends has paid for it
        start = max((other.after for other in cuts if other.after < cut.after), default=0)
        index = max(range(start, cut.after), key=lambda at: gradients[at].backward_us)
        less_us = max(0.0, gradients[index].backward_us - backward_us)
        gradients[index] = replace(gradients[index], backward_us=round(less_us, 3))
    return replace(
        found,
        forward_us=round(found.forward_us - forward_us * len(cuts), 3),
        gradients=tuple(gradients),
        compiled=CompiledProfile(
            backend=regions.backend,
            cuts=tuple(
                replace(cut, forward_us=round(forward_us, 3), backward_us=round(backward_us, 3)) for cut in cuts
            ),
            whole_us=round(whole_us, 3),
            compile_s=round(compile_s, 3),
        ),
    )


def _parameters_of(training: Training, blocks: Sequence[str]) -> dict[str, set[str]]:
    modules = modules_by_name(training.model)
    own = {id(parameter): name for name, parameter in training.parameters.items()}
    return {
        block: {own.get(id(one), canonical_name(name)) for name, one in modules[block].named_parameters()}
        for block in blocks
    }
