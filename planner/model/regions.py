"""The step of a compiled model by its cuts: gradients of a region are ready when its backward has ended."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import fmean

from planner.documents.cut_costs import MAX_CUTS, CompiledProfile, Cut
from planner.documents.profile import ComputeProfile, Gradient, Profile
from planner.model.problem import Problem

ASSUMED = "assumed"
"""Backend of a profile whose cuts were not measured."""
ASSUMED_CUT_US = 100.0
"""Time that a cut is assumed to add to forward, and again to backward, where that was not measured."""
AT_ONCE = 0.95
"""Part of backward behind which a gradient is ready at its end."""
_BLOCK = re.compile(r"((?:[^.]+\.)*?(?:[^.]*_)?)([0-9]+)\.")
"""The first numbered module in the name of a gradient: `h.3.`, `encoder_layer_3.`."""
MOST_LAYERS = 24
"""Places of cuts where blocks are not known."""
NEARLY_ALL = 0.9
"""Share of the gradients that are ready at the end of a backward that was compiled as one graph."""


def with_cuts(problem: Problem, modules: Collection[str]) -> Problem:
    """Return the problem of the model with its graph cut at these modules, of those that its profile has.

    Forward and backward are longer by what each cut costs; in backward that counts to the region which the cut ends.
    """
    whole = problem.uncut or problem
    compiled = whole.profile.compute.compiled
    if compiled is None:
        return problem
    chosen = compiled.chosen(modules).cuts
    return _in_regions(whole, chosen, whole.profile.compute.gradients, tuple(cut.module for cut in reversed(chosen)))


def cut_behind(problem: Problem, buckets: Iterable[Sequence[int]]) -> Problem:
    """Return the problem with the graph cut where buckets end, as `torch.compile(DistributedDataParallel(model))` does;
    itself where no cuts are known. Each cut costs the mean of those of the profile.

    Within the regions that were measured backward counts by elements.
    """
    whole = problem.uncut or problem
    compute = whole.profile.compute
    if (compiled := compute.compiled) is None:
        return problem
    forward_us, backward_us = (
        fmean([getattr(cut, name) for cut in compiled.cuts] or [0.0]) for name in ("forward_us", "backward_us")
    )
    ends = sorted({max(bucket) + 1 for bucket in buckets} - {len(compute.gradients)})
    cuts = [Cut(module=f"bucket {end}", after=end, forward_us=forward_us, backward_us=backward_us) for end in ends]
    gradients = by_elements(compute.gradients, compiled.cuts) if compiled.measured else compute.gradients
    return _in_regions(whole, cuts, gradients, problem.cuts)


def _in_regions(
    whole: Problem, cuts: Sequence[Cut], timed: Sequence[Gradient], modules: tuple[str, ...] | None
) -> Problem:
    """Return the problem in the regions between cuts and graph breaks of the model's own; `timed`: gradients with the
    times without cuts.
    """
    compute, gradients, start = whole.profile.compute, list(timed), 0
    breaks = () if compute.compiled is None else compute.compiled.breaks
    stops = dict.fromkeys((*breaks, len(gradients)), 0.0) | {cut.after: cut.backward_us for cut in cuts}
    for stop, cut_us in sorted(stops.items()):
        region_us = sum(gradient.backward_us for gradient in gradients[start:stop]) + cut_us
        gradients[start] = replace(gradients[start], backward_us=region_us)
        gradients[start + 1 : stop] = [replace(each, backward_us=0.0) for each in gradients[start + 1 : stop]]
        start = stop
    forward_us = compute.forward_us + sum(cut.forward_us for cut in cuts)
    compute = replace(compute, forward_us=forward_us, gradients=tuple(gradients), compiled=None)
    return replace(whole, profile=replace(whole.profile, compute=compute), cuts=modules, uncut=whole)


def by_elements(gradients: Sequence[Gradient], cuts: Sequence[Cut]) -> list[Gradient]:
    """Return gradients with the time of each region divided among them by their elements."""
    found: list[Gradient] = []
    for start, stop in pairwise((0, *(cut.after for cut in cuts), len(gradients))):
        region = gradients[start:stop]
        each_us = sum(one.backward_us for one in region) / (sum(one.numel for one in region) or 1)
        found += [replace(one, backward_us=each_us * one.numel) for one in region]
    return found


def is_whole(compute: ComputeProfile) -> bool:
    """Return whether nearly all gradients are ready at the end of backward, as of one compiled graph."""
    late, left_us = 0, compute.backward_us
    for gradient in compute.gradients:
        left_us -= gradient.backward_us
        late += left_us < (1.0 - AT_ONCE) * compute.backward_us
    return len(compute.gradients) > 2 and late > NEARLY_ALL * len(compute.gradients)


def with_assumed_cuts(profile: Profile) -> Profile | None:
    """Return the profile with a place for a cut at each block by the names of gradients, or at some of the layers where
    no name has a number; itself where cuts were measured, None where no block is behind another.

    Where all its gradients are ready at once, backward is assumed to go by elements.
    """
    compute = profile.compute
    if compute.compiled is not None:
        return profile
    gradients: Sequence[Gradient] = compute.gradients
    if is_whole(compute):  # in an order that need not be that of backward
        gradients = by_elements(gradients if _from_the_back(gradients) else gradients[::-1], ())
    found = {gradient.name: _BLOCK.match(gradient.name) for gradient in gradients}
    numbered = any(found.values())
    blocks: dict[str, list[str]] = {}
    for gradient in gradients:
        if (block := found[gradient.name]) is not None or not numbered:
            blocks.setdefault(gradient.layer if block is None else block[0][:-1], []).append(gradient.name)
    cuts = find_cuts(gradients, blocks) if _from_the_back(gradients) else ()
    if not cuts:
        return None
    cuts = cuts[-MAX_CUTS:] if numbered else cuts[:: -(-len(cuts) // MOST_LAYERS)]
    cuts = tuple(replace(cut, forward_us=ASSUMED_CUT_US, backward_us=ASSUMED_CUT_US) for cut in cuts)
    compiled = CompiledProfile(backend=ASSUMED, cuts=cuts)
    return replace(profile, compute=replace(compute, gradients=tuple(gradients), compiled=compiled))


def _from_the_back(gradients: Sequence[Gradient]) -> bool:
    """Return whether the numbers of blocks never rise in the order of gradients."""
    numbers: dict[str, list[int]] = {}
    for gradient in gradients:
        if (block := _BLOCK.match(gradient.name)) is not None:
            numbers.setdefault(block[1], []).append(int(block[2]))
    return all(first >= second for of in numbers.values() for first, second in pairwise(of))


def find_breaks(gradients: Sequence[Gradient], whole: ComputeProfile) -> tuple[int, ...]:
    """Return how many of the gradients are ready in the uncut form clearly before all others, by its graph breaks."""
    names = [gradient.name for gradient in whole.gradients]
    ready_us = dict(zip(names, accumulate(gradient.backward_us for gradient in whole.gradients), strict=True))
    times_us = [ready_us.get(gradient.name, whole.backward_us) for gradient in gradients]
    latest_us, first_us = list(accumulate(times_us, max)), list(accumulate(times_us[::-1], min))[::-1]
    gap_us = (1.0 - AT_ONCE) * whole.backward_us
    return tuple(at for at in range(1, len(times_us)) if latest_us[at - 1] + gap_us < first_us[at])


def find_cuts(gradients: Sequence[Gradient], blocks: Mapping[str, Collection[str]]) -> tuple[Cut, ...]:
    """Return the place of each block's cut among gradients, which came region by region.

    What is computed between two blocks belongs to the region of the one that is earlier in forward, but the gradients
    between theirs may be of either: the cut is where the longest time passed, that of the earlier region.
    """
    places = {
        block: [index for index, gradient in enumerate(gradients) if gradient.name in names]
        for block, names in blocks.items()
    }
    order = sorted((block for block in places if places[block]), key=lambda block: places[block][0])
    cuts: list[Cut] = []
    for position, block in enumerate(order):
        first = places[block][-1] + 1
        last = places[order[position + 1]][0] if position + 1 < len(order) else len(gradients) - 1
        if not (cuts[-1].after if cuts else 0) < first <= last:
            continue  # nothing is behind it in backward, or a shared parameter is in several blocks
        after = max(range(first, last + 1), key=lambda index: gradients[index].backward_us)
        cuts.append(Cut(module=block, after=after))
    return tuple(cuts)
