"""The step of a compiled model by its cuts: gradients of a region are ready when its backward has ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from planner.model.problem import Problem


def with_cuts(problem: Problem, modules: Collection[str]) -> Problem:
    """Return the problem of the model with its graph cut at these modules, of those that its profile has.

    Forward and backward are longer by what each cut costs; in backward that counts to the region which the cut ends.
    """
    compute = problem.profile.compute
    if compute.compiled is None:
        return problem
    chosen = compute.compiled.chosen(modules)
    stops = {cut.after: cut.backward_us for cut in chosen.cuts} | {len(compute.gradients): 0.0}
    gradients, start = list(compute.gradients), 0
    for stop, cut_us in stops.items():
        region_us = sum(gradient.backward_us for gradient in gradients[start:stop]) + cut_us
        gradients[start] = replace(gradients[start], backward_us=region_us)
        gradients[start + 1 : stop] = [replace(each, backward_us=0.0) for each in gradients[start + 1 : stop]]
        start = stop
    forward_us = compute.forward_us + sum(cut.forward_us for cut in chosen.cuts)
    compute = replace(compute, forward_us=forward_us, gradients=tuple(gradients), compiled=None)
    return replace(
        problem,
        profile=replace(problem.profile, compute=compute),
        cuts=tuple(cut.module for cut in reversed(chosen.cuts)),
    )
