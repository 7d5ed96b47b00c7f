"""Choice of the cuts of a compiled graph: the fewest cuts whose step is as short as the best one's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from planner.decide.strategies import best_baseline
from planner.documents.text import ms, pluralize
from planner.model.modes import step_us
from planner.model.problem import Problem
from planner.model.regions import is_whole, with_assumed_cuts, with_cuts
from planner.passes.merge import Merge
from planner.search.cuts import best_cuts

EQUAL = 0.005
"""Share of the step by which fewer cuts may be slower: each compiles a graph more."""
CLOSE = 0.02
"""Share of the shortest end without contention within which cuts are judged with it."""


@dataclass(frozen=True)
class CutChoice:
    """The problem with the chosen cuts, and the steps with one graph and with them, merged as is best for each."""

    problem: Problem
    whole_us: float
    step_us: float

    @property
    def note(self) -> str:
        """Return what the cuts win, for readers of the plan."""
        cuts = self.problem.cuts or ()
        if not cuts:
            return f"one compiled graph ({ms(self.whole_us)}): no cut makes the step shorter"
        return (
            f"the compiled graph {'could be' if self.assumed else 'is'} cut at {pluralize(len(cuts), 'module')}: "
            f"{ms(self.step_us)} in place of {ms(self.whole_us)} with one graph{self.assumed}; attach with compile= "
            f"executes that"
        )

    @property
    def assumed(self) -> str:
        """Return that costs of cuts are assumed; empty where they were measured."""
        compiled = None if self.problem.uncut is None else self.problem.uncut.profile.compute.compiled
        if compiled is None or compiled.measured or not compiled.cuts:
            return ""
        cut = compiled.cuts[0]
        return f", if a cut costs {ms(cut.forward_us + cut.backward_us)}, which was not measured"


@lru_cache(maxsize=8)
def choose_cuts(problem: Problem) -> CutChoice | None:
    """Return the cuts of a compiled model's graph; None where its profile has no places for them.

    The search is exact without contention; its best choice for each number of cuts is then judged by the simulator,
    with the best buckets for it. Of steps within 0.5 % of the shortest, the one with the fewest cuts is taken.
    """
    if problem.profile.compute.compiled is None:
        return None
    found = best_cuts(problem)
    limit_us = min(end_us for end_us, _ in found) * (1.0 + CLOSE)
    judged = [
        (_merged_us(cut), cut)
        for index, (end_us, modules) in enumerate(found)
        if index == 0 or end_us <= limit_us
        for cut in [with_cuts(problem, modules)]
    ]
    limit_us = min(step for step, _ in judged) * (1.0 + EQUAL)
    step, cut = next(one for one in judged if one[0] <= limit_us)
    return CutChoice(cut, judged[0][0], step)


def cut_problem(problem: Problem) -> Problem:
    """Return the problem with the chosen cuts; itself where there are none to choose."""
    choice = choose_cuts(problem)
    return problem if choice is None else choice.problem


def _merged_us(problem: Problem) -> float:
    return step_us(problem, Merge().apply(best_baseline(problem), problem).schedule)


def possible_cuts(problem: Problem) -> CutChoice | None:
    """Return the cuts that would win where a model is compiled as one graph, at costs that are assumed; None where it
    is not, or the names of its gradients have no blocks.
    """
    if problem.cuts is not None or not is_whole(problem.profile.compute):
        return None
    profile = with_assumed_cuts(problem.profile)
    return None if profile is None else choose_cuts(replace(problem, profile=profile))
