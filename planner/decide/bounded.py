"""Where more than exact plans are allowed: the best of each class beside the best exact one, and which of them it is.

A riskier class has to win by 2 % of the predicted step over the best less risky one; if none does, the plan stays exact
and says what they would give. Passes find them, and say what is to be said of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from planner.decide.pipeline import AfterPass, run_passes, with_options
from planner.documents.text import ms
from planner.emit.lower import lower
from planner.ir import ACCURACIES, TIE, Schedule
from planner.model.codecs import LOSSY, LowRank, TopK, by_codec, codec_of
from planner.model.compression import check_max_ratio
from planner.model.modes import step_us
from planner.model.norms import update_us
from planner.model.problem import Problem
from planner.passes.base import GAIN, Bound, Frontier, Pass, Point, Result
from planner.passes.delay import Delay, check_max_delay
from planner.passes.joint import DEFAULT_COMPRESS, Joint, check_compress, check_max_rank
from planner.passes.local_async import LocalAsync
from planner.passes.sparsify import Sparsify
from planner.search.cpsat_joint import MAX_PLACES, fits, solve_joint
from runtime.errors import InputError
from runtime.pages import page
from runtime.plan import Accuracy, Plan
from runtime.plan.predicted import Certificate, FrontierPoint, SolverBound


def split_passes(
    passes: Sequence[Pass],
    accuracy: Accuracy,
    max_ratio: float | None = None,
    protect: str | None = None,
    max_delay: int | None = None,
    compress: str | None = None,
    max_rank: int | None = None,
) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """(exact passes, lossy ones with the options given; default `joint`, `delay` and `local_async`, as far as they are
    allowed).

    Raises:
        InputError: a pass, or an option of one, of a riskier class than is allowed; an option is wrong.
    """
    exact = tuple(each for each in passes if each.accuracy == "exact")
    if max_ratio is not None:
        check_max_ratio(max_ratio)
    if max_delay is not None:
        check_max_delay(max_delay)
    if max_rank is not None:
        check_max_rank(max_rank)
    selects = compress is None or TopK in check_compress(compress)
    given = {
        "--compress": compress, "--max-ratio": max_ratio, "--max-rank": max_rank, "--protect": protect,
        "--max-delay": max_delay,
    }  # fmt: skip
    options = [option for option, value in given.items() if value is not None]
    needs = [(option, "relaxed" if option == "--max-delay" else "bounded") for option in options]
    needs += [(f"the pass {each.name}", each.accuracy) for each in passes]
    allowed = ACCURACIES[: ACCURACIES.index(accuracy) + 1]
    if riskier := {what: risk for what, risk in needs if risk not in allowed}:
        why = "exact plans leave nothing out" if accuracy == "exact" else "bounded plans synchronize in every step"
        hint = "relaxed" if "relaxed" in riskier.values() else "bounded"
        raise InputError(
            f"--accuracy {accuracy}: found {' and '.join(riskier)}, expected "
            f"{'none' if len(riskier) == 1 else 'neither'}, for {why}; add --accuracy {hint}"
        )
    if not selects and any(each.name == Sparsify.name for each in passes):
        raise InputError(
            f"--compress {compress}: found the pass {Sparsify.name}, which sends selected elements; expected one of "
            f"them: leave the pass or the option out"
        )
    lossy: list[Pass] = []
    defaults: dict[str, list[Pass]] = {"bounded": [Joint()], "relaxed": [Delay(), LocalAsync()]}
    for risk, usual in defaults.items():
        if risk in allowed:
            lossy += [each for each in passes if each.accuracy == risk] or usual
    lossy = list(
        with_options(
            lossy, max_ratio=max_ratio, protect=protect, max_delay=max_delay, compress=compress, max_rank=max_rank
        )
    )
    for option, value, needed in (("--max-ratio", max_ratio, TopK), ("--max-rank", max_rank, LowRank)):
        if value is not None and not any(needed in each.codecs for each in lossy):
            raise InputError(
                f"{option} {value:g}: found it with --compress {compress or DEFAULT_COMPRESS}, which plans none of "
                f"what it limits; expected {needed.option} or all: add --compress {needed.option}, or leave {option} "
                f"out"
            )
    return exact, tuple(lossy)


MORE = "bounded:all"
"""The alternative that says what `--compress all` would give, where less is planned by default."""

NO_GAIN = "nothing to gain: "
"""How the note begins that the plan is hardly shorter than what users have without one."""

ALLOWED = " was allowed, but "
"""In the note that says why no plan of the class was taken."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The best plan found of one class."""

    accuracy: Accuracy
    what: str
    """What it does, in a word or two: compression, delay, local updaters."""
    plan: Plan | None
    """None: nothing of this class makes the step shorter."""
    step_us: float
    """What the plan is judged by; without one, the exact plan's step."""
    batch_prep_us: float = 0.0
    """Of that, what steps of other classes leave out: making the minibatch."""
    why_not: str = ""
    """Why there is no plan, where it is not that none makes the step shorter."""
    required: bool = False
    """Whether the plan is taken, however long its step is."""

    @property
    def own_us(self) -> float:
        """What compares with steps of other classes."""
        return self.step_us - self.batch_prep_us


def choose_offer(exact_us: float, offers: Sequence[Offer]) -> tuple[Offer | None, dict[str, str]]:
    """The offer that is taken (None: the exact plan), and why each other one, by `what`, was refused.

    Offers come from the least risky to the riskiest; each has to win by 2 % over the best less risky one.
    """
    chosen: Offer | None = None
    best_us, best = exact_us, ""
    refused: dict[str, str] = {}
    for offer in offers:
        than_us = best_us + offer.batch_prep_us
        gain = 1.0 - offer.step_us / than_us if than_us > 0.0 else 0.0
        if offer.plan is None:
            refused[offer.what] = offer.why_not or f"no {offer.what} would make the step shorter"
            continue
        if offer.required or offer.step_us <= than_us * (1.0 - GAIN):
            chosen = offer
        elif gain < 0.0:
            refused[offer.what] = f"{offer.what} would gain less than {best}"
        else:
            than = f" than {best} does" if best else ""
            text = f"{offer.what} would make the step {gain:.2%} shorter{than}, and has to win {GAIN:.0%}"
            refused[offer.what] = text
        if offer.step_us < than_us:
            best_us, best = offer.own_us, offer.what
    return chosen, refused


def choose(
    problem: Problem,
    exact: Plan,
    schedule: Schedule,
    accuracy: Accuracy,
    passes: Sequence[Pass],
    after_pass: AfterPass | None = None,
    solver_limit: float | None = None,
) -> Plan:
    """The plan of the riskiest class that wins by enough, with the exact one as its fallback; else the exact one, which
    says so.

    `exact` is complete but for what is said of lossy plans. `solver_limit` is the deterministic time in which the
    constraint program bounds the lossy plan (None: not asked for).
    """
    bounded = [each for each in passes if each.accuracy == "bounded"]
    offer, fields = _bounded_offer(problem, schedule, bounded, after_pass, solver_limit)
    more = _more_offer(problem, schedule, bounded, offer)
    beyond = [] if more is None else [_more_note(problem, offer, more)]
    offers = [offer]
    relaxed = [each for each in passes if each.accuracy == "relaxed"]
    for each in relaxed:
        result = run_passes([each], schedule, problem, after_pass, accuracy="relaxed")
        fields |= result.plan_fields
        if result.measured or len(relaxed) == 1:
            offers.append(_relaxed_offer(problem, schedule, each, result))
    # A plan file says once what holds for every plan in it.
    beside = replace(exact, baselines=None, scaling=None, sources=None, notes=())
    exact = replace(exact, **fields)
    chosen, refused = choose_offer(step_us(problem, schedule), offers)
    if chosen is None or chosen.plan is None:
        why = f"{accuracy}{ALLOWED}{', and '.join(refused.values())}: the plan is exact"
        return replace(exact, alternatives=_others(offers, "exact", more) or None, notes=(*exact.notes, why, *beyond))
    riskier = [refused[offer.what] for offer in offers[offers.index(chosen) + 1 :] if offer.what in refused]
    beyond += [f"relaxed{ALLOWED}{', and '.join(riskier)}"] if riskier else []
    return replace(
        chosen.plan,
        baselines=exact.baselines,
        scaling=exact.scaling,
        sources=exact.sources,
        **fields,
        fallback=beside,
        alternatives={"exact": beside, **_others(offers, chosen.accuracy, more)},
        # What holds of the exact plan does not of this one.
        notes=(
            *(note.replace(NO_GAIN, f"exact plans have {NO_GAIN}") for note in exact.notes),
            *chosen.plan.notes,
            *beyond,
        ),
    )


def _more_offer(problem: Problem, schedule: Schedule, passes: Sequence[Pass], offer: Offer) -> Offer | None:
    """What `--compress all` would give in place of what is planned by default; None where that is not 2 % more, or
    passes were told what to look at.
    """
    passes = [each for each in passes if not each.required]
    every = [
        replace(each, compress="all") if isinstance(each, Joint) and not each.compress else each for each in passes
    ]
    if every == passes:
        return None
    more, _ = _bounded_offer(problem, schedule, every, None, None)
    return more if more.plan is not None and more.step_us <= offer.step_us * (1.0 - GAIN) else None


def _more_note(problem: Problem, offer: Offer, more: Offer) -> str:
    optimizer, why = problem.profile.compute.optimizer, ""
    if optimizer is not None and optimizer.adaptive:
        why = (
            f"; selected elements train a worse model with {optimizer.name}, which divides gradients by their own size "
            f"({page('results/lags')})"
        )
    return (
        f"--compress all would take {ms(more.step_us)} in place of {ms(offer.step_us)}, by low rank or by sending "
        f"selected elements, which may cost much of the loss: compare first ({page('concepts/compression')}){why}"
    )


def _others(offers: Sequence[Offer], taken: str, more: Offer | None) -> dict[str, Plan]:
    """The best plan of each class that was looked at, but for the one that was taken; and what `all` would give."""
    found: dict[str, Offer] = {}
    for offer in offers:
        before = found.get(offer.accuracy)
        if offer.plan is not None and offer.accuracy != taken and (before is None or offer.own_us < before.own_us):
            found[offer.accuracy] = offer
    if more is not None:
        found[MORE] = more
    return {accuracy: replace(offer.plan, notes=()) for accuracy, offer in found.items() if offer.plan is not None}


def _bounded_offer(
    problem: Problem,
    schedule: Schedule,
    passes: Sequence[Pass],
    after_pass: AfterPass | None,
    solver_limit: float | None,
) -> tuple[Offer, dict[str, Any]]:
    """The best bounded plan found, beginning with the best exact schedule, and speed over compression."""
    result = run_passes(passes, schedule, problem, after_pass, accuracy="bounded")
    found, frontier = result.schedule, result.frontier
    assert frontier is not None
    # The passes do not see that norms are shared, which makes every step shorter by as much.
    saved_us = problem.update_us - update_us(problem, schedule)
    if saved_us:
        shorter = tuple(replace(point, iteration_us=point.iteration_us - saved_us) for point in frontier.points)
        frontier = replace(frontier, points=shorter, bound_us=frontier.bound_us - saved_us)
    fields = {"frontier": tuple(_point(problem, point) for point in frontier.points)}
    exact_us, found_us = step_us(problem, schedule), step_us(problem, found)
    required = any(each.required for each in passes)
    offer = partial(Offer, accuracy="bounded", what="compression", required=required)
    if len(frontier.points) == 1 and problem.ranks > 1 and not required:
        why_not = "no compression was looked at (--compress none, or every gradient is protected)"
        return offer(plan=None, step_us=exact_us, why_not=why_not), fields
    if all(bucket.whole for bucket in found.buckets):
        return offer(plan=None, step_us=exact_us), fields
    bound = _bound(problem, frontier, passes)
    outside = required and found_us < bound.step_us * (1.0 - TIE)  # what is given need not be of the bound's class
    certificate = None if outside else bound.certificate(found_us)
    gain = 1.0 - found_us / exact_us if exact_us > 0.0 else 0.0
    notes = tuple(_notes(problem, found, frontier, gain))
    plan = replace(lower(problem, found), certificate=certificate, notes=notes)
    if solver_limit is not None and certificate is not None:
        plan = _solved(plan, certificate, frontier, solver_limit)
    return offer(plan=plan, step_us=found_us), fields


def _point(problem: Problem, point: Point) -> FrontierPoint:
    codec, buckets = point.form.codec, point.schedule.buckets
    counts: dict[str, Any] = {of.counted_as: sum(isinstance(b.codec, of) for b in buckets) for of in LOSSY}
    return FrontierPoint(
        max_ratio=point.form.ratio,
        algorithm=point.form.transport.algorithm,
        iteration_us=point.iteration_us,
        buckets=len(buckets),
        sent_share=sent_share(problem, point.schedule),
        **counts,
        **codec.point_fields(),
    )


def _relaxed_offer(problem: Problem, schedule: Schedule, made_by: Pass, result: Result) -> Offer:
    """The plan of what a relaxed pass found, beside the best exact schedule."""
    found, found_us = result.schedule, step_us(problem, result.schedule)
    exact_us = step_us(problem, schedule) + result.batch_prep_us
    offer = partial(
        Offer,
        accuracy="relaxed",
        what=made_by.what,
        batch_prep_us=result.batch_prep_us,
        required=made_by.required,
    )
    if found.accuracy != "relaxed":
        return offer(plan=None, step_us=exact_us, why_not=result.why_not)
    gain = f"relaxed: predicted {_shorter(1.0 - found_us / exact_us)} than the best exact plan, which is the fallback"
    certificate = None if result.bound is None else result.bound.certificate(found_us)
    plan = replace(lower(problem, found), certificate=certificate, notes=(gain, *result.notes))
    return offer(plan=plan, step_us=found_us if result.judged_us is None else result.judged_us)


def _shorter(gain: float) -> str:
    """Return by what share of another step one is shorter, or longer."""
    return f"{gain:.1%} shorter" if gain >= 0.0 else f"{-gain:.1%} longer"


def sent_share(problem: Problem, schedule: Schedule) -> float:
    """Return of all elements the share that is sent in a step, factors in place of what they stand for."""
    total = max(1, int(problem.numel.sum()))
    kept_back = sum(problem.elements(b) - codec_of(b).sent_elements(problem, b) for b in schedule.buckets)
    return 1.0 - kept_back / total


def _bound(problem: Problem, frontier: Frontier, passes: Sequence[Pass]) -> Bound:
    forms = [point.form for point in frontier.points[1:]]
    ways = ["are dense"]
    for codec in LOSSY:
        if tried := [form for form in forms if isinstance(form.codec, codec)]:
            ways.append(codec.forms_text(tried))
    notes = [f"among plans whose buckets {' or '.join(filter(None, (', '.join(ways[:-1]), ways[-1])))}"]
    if problem.contended:
        notes.append("the bound is for a machine where compute and network do not slow each other down")
    if all(each.name != Joint.name for each in passes):
        notes.append(f"decided by {', '.join(each.name for each in passes)}, which does not look at all of them")
    method = "labels over merging and compression"
    method += "" if frontier.points[-1].exact else ", a part of them, and local search"
    return Bound(step_us=frontier.bound_us, method=method, note="; ".join(notes))


def _solved(plan: Plan, certificate: Certificate, frontier: Frontier, limit: float) -> Plan:
    """The plan with the constraint program's bound in its certificate."""
    tables = frontier.tables
    if tables is None or not fits(tables):
        note = f"CP-SAT was not asked: up to {MAX_PLACES - 1} gradients and no contention are what its model can take"
        return replace(plan, certificate=replace(certificate, note=f"{certificate.note}; {note}"))
    iteration_us = plan.predicted.iteration_us if plan.predicted else 0.0
    updating_us = plan.predicted.update_us if plan.predicted and plan.predicted.update_us else 0.0
    solution = solve_joint(tables, len(tables.cost_us), iteration_us - updating_us, limit)
    solver_us = min(solution.bound_us + updating_us, iteration_us)
    bound_us = max(certificate.lower_bound_us, solver_us)
    bound = Bound(step_us=bound_us, method=f"{certificate.method}, then CP-SAT", note=certificate.note)
    solver = SolverBound("cpsat", solver_us, solution.proven, limit)
    return replace(plan, certificate=replace(bound.certificate(iteration_us), solver=solver))


def _notes(problem: Problem, schedule: Schedule, frontier: Frontier, gain: float) -> list[str]:
    notes = [
        f"bounded: predicted {_shorter(gain)} than the best exact plan, which is the fallback",
        *(
            note
            for codec, of in by_codec(schedule.buckets)
            for note in codec.notes(problem, schedule, of, frontier.limits)
        ),
        "step by what is allowed at the most: "
        + ", ".join(f"{point.form.codec.form_text(point.form)} {ms(point.iteration_us)}" for point in frontier.points),
    ]
    shortest_us = frontier.best.iteration_us
    if schedule == frontier.chosen.schedule and frontier.chosen.iteration_us > shortest_us:
        notes.append(f"the least compression within {GAIN:.0%} of the shortest step, which is {ms(shortest_us)}")
    return notes
