"""Parts of a traced run's steps: who waits for whom, and what would change them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from planner.decide.strategies import make_schedule
from planner.documents.profile import Profile
from planner.documents.text import SENTENCE_CHARACTERS, mebibytes, milliseconds, pluralize, sanitize
from planner.emit.lower import predict
from planner.fsdp2.decide import WrappingRequest, optimize_wrapping
from planner.model.problem import make_problem
from planner.report.listing import Listing
from planner.report.who_waits import arrival_tables
from planner.traces.events import Run, Step
from planner.traces.replayed import OFF, Replay, own_schedule, replay
from runtime.errors import InputError
from runtime.plan.last_ranks import MessageArrival, RankArrival, compare_arrivals, with_causes

STRATEGIES = {
    "optimal": "merging as planner optimize does",
    "ddp": "DDP's default buckets",
    "wfbp": "a message for every gradient",
    "single": "one message",
    "wire:bfloat16": "gradients sent as bfloat16 (bounded)",
    "optimal:late-gather": "a sharded step with late gathers (another interface)",
}
"""Strategies that are predicted of the run, in words."""
NOTHING = "nothing is sent between ranks, so that there is nothing to plan"
PARTS = {
    "step": "span_us", "forward": "forward_us", "backward": "backward_us", "update": "update_us",
    "compute": "compute_us", "communication": "communication_us", "exposed": "exposed_us", "hidden": "hidden_us",
    "idle": "idle_us", "input": "input_us", "between steps": "gap_us",
}  # fmt: skip
"""Parts of a step, and where a `Step` has them."""


@dataclass(frozen=True, kw_only=True)
class MessageRow:
    """One message of a step: medians over the traced steps, in microseconds from the first kernel."""

    collective: str
    group: str
    bytes: int | None
    dtype: str | None
    gradients: int
    """Gradients that it holds; 0 where it holds none."""
    ready_us: float
    start_us: float
    duration_us: float
    exposed_us: float
    waited_us: float | None
    """Time from the first rank's arrival to the last one's; None of a single traced rank."""
    last_rank: int | None
    """The rank that was last most often."""
    replayed_end_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another way to communicate, and the step that is predicted of it."""

    strategy: str
    what: str
    step_us: float | None = None
    """None where it cannot be predicted."""
    gain: float | None = None
    """Share that is saved of the predicted step with the run's own buckets."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything that `planner explain TRACE` reports."""

    run: Run
    profile: Profile
    replay: Replay | None
    parts_us: dict[str, float | None]
    messages: tuple[MessageRow, ...]
    ranks: tuple[RankArrival, ...]
    arrivals: tuple[MessageArrival, ...]
    """Traced ranks at each message of gradients, medians over the steps."""
    changes: tuple[Change, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        return (*(self.profile.notes or ()), *self.run.unplanned)

    @property
    def doubt(self) -> list[str]:
        """Warning where the replay is far off."""
        if self.replay is None or self.replay.error <= OFF:
            return []
        off = f"{self.replay.error:.1%} off, more than {OFF:.0%}"
        return [f"the replay of the run's own buckets is {off}: do not rely on what is predicted from it"]

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types; times in microseconds from each step's first kernel."""
        run, world = self.run, self.profile.world
        ready = np.median([step.ready_us for step in run.steps], axis=0).tolist()
        return {
            "world": {
                "ranks": world.ranks, "nodes": world.nodes, "traced_ranks": list(run.traced_ranks),
                "backend": world.backend, "device": world.device, "accelerator": world.accelerator, "group": run.group,
            },
            "steps": [
                {"step": step.number, **{f"{name.replace(' ', '_')}_us": time for name, time in _parts(step).items()}}
                for step in run.steps
            ],
            "gradients": [
                {"name": gradient.name, "numel": gradient.numel, "dtype": gradient.dtype, "ready_us": _round(at)}
                for gradient, at in zip(self.profile.compute.gradients, ready, strict=True)
            ],
            "messages": [
                {
                    "step": step.number, "collective": message.collective, "bytes": message.size_bytes,
                    "dtype": message.dtype, "group": message.group, "ready_us": _round(message.ready_us),
                    "start_us": _round(message.start_us), "duration_us": _round(message.duration_us),
                    "exposed_us": _round(step.exposed_of(message)), "last_rank": message.last_rank,
                    "arrivals_us": [_round(at) for at in message.arrivals_us],
                }
                for step in run.steps
                for message in step.messages
            ],
            "replay_error": None if self.replay is None else round(self.replay.error, 6),
            "replay": None if self.replay is None else asdict(self.replay),
            "notes": list(self.notes),
            "parts_us": self.parts_us,
            "buckets": [asdict(row) for row in self.messages],
            "ranks": [asdict(row) for row in self.ranks],
            "changes": [asdict(change) for change in self.changes],
        }  # fmt: skip


def _round(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 3)


def _parts(step: Step) -> dict[str, float | None]:
    found = {name: getattr(step, field) for name, field in PARTS.items()}
    return {name: None if time is None else round(time, 1) for name, time in found.items()}


def explain_run(run: Run, profile: Profile, *, changes: bool = True) -> Explanation:
    """Return where the steps of a run go, and, with `changes`, what would change them."""
    replayed = replay(run, profile)
    parts = [_parts(step) for step in run.steps]
    return Explanation(
        run=run, profile=profile, replay=replayed, messages=tuple(_message_rows(run, replayed)), ranks=_rank_rows(run),
        arrivals=tuple(_arrivals(run)),
        parts_us={name: _median(part[name] for part in parts) for name in PARTS},
        changes=tuple((_changes if profile.units is None else _wrappings)(run, profile)) if changes else (),
    )  # fmt: skip


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.median(known)), 3) if known else None


def _message_rows(run: Run, replayed: Replay | None) -> Iterator[MessageRow]:
    """Give the messages of a step in launch order, those of gradients last."""
    for kind in ("others", "buckets"):
        before, planned = 0, kind == "buckets"
        ends = replayed.buckets if replayed is not None and planned else ()
        for index, column in enumerate(zip(*(getattr(step, kind) for step in run.steps), strict=False)):
            first, last = column[0], [message.last_rank for message in column if message.last_rank is not None]
            medians = {
                name: _median(getattr(message, name) for message in column)
                for name in ("ready_us", "start_us", "duration_us")
            }
            exposed = [step.exposed_of(message) for step, message in zip(run.steps, column, strict=True)]
            yield MessageRow(
                collective=first.collective, group=first.group, bytes=first.size_bytes, dtype=first.dtype,
                gradients=first.gradients - before if planned else 0, **medians, exposed_us=_median(exposed),  # type: ignore[arg-type]
                waited_us=_median(max(message.arrivals_us, default=None) for message in column),
                last_rank=max(set(last), key=last.count) if last else None,
                replayed_end_us=_round(ends[index].replayed_end_us) if index < len(ends) else None,
            )  # fmt: skip
            before = first.gradients


def _rank_rows(run: Run) -> tuple[RankArrival, ...]:
    """Return for each traced rank how often it was last, and how long all others waited for it in a step."""
    sent = [message.arrivals_us for step in run.steps for message in step.messages]
    rows = compare_arrivals(([max(at) - one for one in at] for at in sent if at), run.traced_ranks)
    rows = tuple(replace(row, others_waited_us=round(row.others_waited_us / len(run.steps), 3)) for row in rows)
    if not rows or not run.steps[0].parts_us:
        return rows
    compute_us, input_us = np.median([step.parts_us for step in run.steps], axis=0).T.tolist()
    return with_causes(rows, compute_us, input_us)


def _arrivals(run: Run) -> Iterator[MessageArrival]:
    for index, column in enumerate(zip(*(step.buckets for step in run.steps), strict=False)):
        if late := [message.arrivals_us for message in column if message.arrivals_us]:
            yield MessageArrival(message=index, late_us=tuple(np.median(late, axis=0).round(3).tolist()))


def _changes(run: Run, profile: Profile) -> Iterator[Change]:
    """Predict what else the run could do; nothing of one rank, or without costs of messages."""
    if profile.cluster is None or profile.cluster.ranks == 1:
        return
    problem = make_problem(profile)
    own_us = predict(problem, own_schedule(problem, run.steps[0])).iteration_us if run.steps[0].buckets else None
    traced_bytes = min((size for size, _ in (profile.cluster.samples or {}).get("all_reduce", ())), default=0.0)
    for strategy, what in STRATEGIES.items():
        try:
            schedule = make_schedule(problem, strategy)
            step_us = predict(problem, schedule).iteration_us
        except InputError as error:
            yield Change(strategy=strategy, what=what, note=str(error))
            continue
        gain = None if own_us is None else round(1.0 - step_us / own_us, 5)
        small = sum(problem.size_bytes[list(bucket.gradients)].sum() < traced_bytes for bucket in schedule.buckets)
        note = f"an upper bound, {pluralize(small, 'message')} of sizes below any traced" if small else ""
        yield Change(strategy=strategy, what=what, step_us=round(step_us, 3), gain=gain, note=note)


def _wrappings(run: Run, profile: Profile) -> Iterator[Change]:
    """Predict FSDP2's groups."""
    try:
        plan = optimize_wrapping(WrappingRequest(profile=profile))
    except InputError as error:
        yield Change(strategy="fsdp2", what="other groups", note=str(error))
        return
    rows = {"groups as planner optimize --parallel fsdp2 plans them": plan.predicted, **(plan.baselines or {})}
    for name, predicted in rows.items():
        step_us = None if predicted is None else round(predicted.iteration_us, 3)
        yield Change(strategy="fsdp2", what=f"FSDP2: {name}", step_us=step_us)


def lines_of(explanation: Explanation) -> list[str]:
    """Return the summary in words."""
    run, profile, found = explanation.run, explanation.profile, explanation.replay
    by = f"gradients are exchanged by group {run.group}" if run.group else "gradients are exchanged"
    exchanged = by if run.ranks > 1 else NOTHING
    lines = [
        f"{pluralize(len(run.steps), 'step')} of {pluralize(profile.world.ranks, 'rank')}, "
        f"{profile.world.accelerator or run.device}; {exchanged}",
        ", ".join(f"{name} {milliseconds(time)} ms" for name, time in explanation.parts_us.items() if time is not None),
    ]
    if found is not None:
        lines.append(
            f"the run's own {pluralize(len(found.buckets), 'bucket')}, replayed: {milliseconds(found.replayed_us)} ms, "
            f"traced: {milliseconds(found.traced_us)} ms; each step from the others' messages: {found.error:.1%} off"
        )
    return [sanitize(line, SENTENCE_CHARACTERS) for line in (*lines, *map(str, explanation.ranks))]


def message_listing(explanation: Explanation) -> Listing:
    """Return the messages of a step as a table."""
    columns = (
        "collective", "gradients", "size", "ready (ms)", "start (ms)", "takes (ms)", "exposed (ms)",
        "replayed end (ms)", "last rank", "waiting (ms)",
    )  # fmt: skip
    rows = [
        (
            sanitize(row.collective), str(row.gradients or ""), mebibytes(row.bytes),
            *map(milliseconds, (row.ready_us, row.start_us, row.duration_us, row.exposed_us, row.replayed_end_us)),
            "" if row.last_rank is None else str(row.last_rank), milliseconds(row.waited_us),
        )
        for row in explanation.messages
    ]  # fmt: skip
    return Listing("messages of a step, medians over the steps", columns, rows, left=("collective",)).filled()


def arrival_listings(explanation: Explanation) -> list[Listing]:
    """Return when ranks arrive at each message of gradients as a table; nothing of a single rank."""
    return arrival_tables(explanation.ranks, explanation.arrivals, "traced")[1:]


def change_listing(explanation: Explanation) -> Listing:
    """Return what would change the step as a table."""
    rows = [
        (
            sanitize(": ".join(filter(None, (change.what, change.note))), SENTENCE_CHARACTERS),
            milliseconds(change.step_us),
            "" if change.gain is None else f"{change.gain:+.1%}",
        )
        for change in explanation.changes
    ]
    columns = ("what would change the step", "step (ms)", "saved")
    return Listing("predicted steps", columns, rows, left=("what would change the step",))
