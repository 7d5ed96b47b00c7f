"""The one place where candidates are held against less risky ones: by memory, and by what they have to win."""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir import GAIN
from planner.model.problem import Problem
from planner.passes.base import Candidate


def select(
    problem: Problem, candidates: Sequence[Candidate], limit_bytes: int | None = None
) -> tuple[Candidate, dict[str, str]]:
    """Choose among candidates, given from the least risky to the riskiest.

    Each candidate has to win by 2 % of the step over the shortest less risky one; or, if the one that it would replace
    does not fit into memory, to need less.

    Args:
        problem: the step.
        candidates: the first is chosen unless another one wins.
        limit_bytes: memory of a rank; None: not known.

    Returns:
        The chosen candidate, and why others were refused, by `Candidate.what`.
    """
    chosen = first = candidates[0]
    best_us, best = first.step_us(problem), ""
    refused: dict[str, str] = {}
    for candidate in candidates[1:]:
        step_us, than_us = candidate.step_us(problem), best_us + candidate.batch_prep_us
        gain = 1.0 - step_us / than_us if than_us > 0.0 else 0.0
        fits = _fits(candidate, chosen, limit_bytes)
        if candidate.required or fits:
            chosen = candidate
        elif candidate.kind == first.kind:
            refused[candidate.what] = candidate.why_not or f"no {candidate.what} would make the step shorter"
            continue
        elif step_us <= than_us * (1.0 - GAIN) and candidate.measured and fits is None:
            chosen = candidate
        elif gain < 0.0:
            refused[candidate.what] = f"{candidate.what} would gain less than {best}"
        else:
            than = f" than {best} does" if best else ""
            text = f"{candidate.what} would make the step {gain:.2%} shorter{than}, and has to win {GAIN:.0%}"
            refused[candidate.what] = text
        if step_us < than_us:
            best_us, best = candidate.own_us(problem), candidate.what
    return chosen, refused


def _fits(candidate: Candidate, chosen: Candidate, limit_bytes: int | None) -> bool | None:
    """Return whether memory alone decides for the candidate, or against it; None if it decides nothing."""
    needs, present = candidate.memory_bytes, chosen.memory_bytes
    if limit_bytes is None or needs is None or present is None:
        return None
    if needs < present > limit_bytes:
        return True
    return False if needs > max(limit_bytes, present) else None
