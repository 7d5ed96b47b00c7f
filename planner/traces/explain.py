"""Where the steps of a traced run go, who waits for whom, and what would change them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from planner.decide.strategies import make_schedule
from planner.documents.profile import Profile
from planner.documents.text import mebibytes, milliseconds, pluralize
from planner.emit.lower import predict
from planner.fsdp2.decide import WrappingRequest, optimize_wrapping
from planner.model.problem import make_problem
from planner.traces.events import Message, Run
from planner.traces.kineto import DTYPES
from planner.traces.replayed import OFF, Replay, own_schedule, replay
from runtime.errors import InputError

STRATEGIES = {
    "optimal": "merging as `planner optimize` does",
    "ddp": "DDP's default buckets",
    "wfbp": "a message for every gradient",
    "single": "one message",
    "wire:bfloat16": "gradients sent as bfloat16 (bounded)",
    "optimal:late-gather": "a sharded step with late gathers (another interface)",
}
"""What is predicted of the run, and what that is."""
PARTS = {
    "step": lambda step: step.span_us,
    "forward": lambda step: step.forward_us,
    "backward": lambda step: step.last_gradient_us - step.forward_us,
    "update": lambda step: step.update_us,
    "compute": lambda step: step.compute_us,
    "communication": lambda step: step.communication_us,
    "exposed": lambda step: step.exposed_us,
    "hidden": lambda step: step.hidden_us,
    "idle": lambda step: step.idle_us,
    "input": lambda step: step.input_us,
    "between steps": lambda step: step.gap_us,
}  # type: Mapping[str, Callable[[Step], float | None]]


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
    """From the first rank's arrival to the last one's; None of a single traced rank."""
    last_rank: int | None
    """The rank that was last most often."""
    replayed_end_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """How often a rank arrived last at a message, and how long the others waited for it in a step."""

    rank: int
    last: int
    others_waited_us: float


@dataclass(frozen=True, kw_only=True)
class Change:
    """What another way to communicate is predicted to give."""

    strategy: str
    what: str
    step_us: float | None
    """None where it cannot be predicted."""
    gain: float | None
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
    ranks: tuple[RankRow, ...]
    changes: tuple[Change, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        return (*(self.profile.notes or ()), *self.run.unplanned)

    @property
    def doubt(self) -> str | None:
        """A warning where the replay is far off."""
        if self.replay is None or self.replay.error <= OFF:
            return None
        return (
            f"the replay of the run's own buckets is {self.replay.error:.1%} off, more than {OFF:.0%}: do not rely on "
            f"what is predicted below"
        )

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            **document_of(self.run, self.profile, self.replay),
            "parts_us": self.parts_us,
            "buckets": [asdict(row) for row in self.messages],
            "ranks": [asdict(row) for row in self.ranks],
            "changes": [asdict(change) for change in self.changes],
        }


def document_of(run: Run, profile: Profile, replayed: Replay | None) -> dict[str, Any]:
    """Return what was read of a run as plain JSON types; times in microseconds from each step's first kernel."""
    world = profile.world
    ready = np.median([step.ready_us for step in run.steps], axis=0)
    gradients = profile.compute.gradients
    return {
        "world": {
            "ranks": world.ranks, "nodes": world.nodes, "traced_ranks": list(run.traced_ranks),
            "backend": world.backend, "device": world.device, "accelerator": world.accelerator, "group": run.group,
        },
        "steps": [
            {
                "step": step.number, "forward_us": _round(step.forward_us),
                "backward_us": _round(step.last_gradient_us - step.forward_us), "update_us": _round(step.update_us),
                "idle_us": _round(step.idle_us), "exposed_us": _round(step.exposed_us),
                "hidden_us": _round(step.hidden_us), "compute_us": _round(step.compute_us),
                "input_us": _round(step.input_us), "gap_us": _round(step.gap_us), "step_us": _round(step.span_us),
            }
            for step in run.steps
        ],
        "gradients": [
            {"name": gradient.name, "numel": gradient.numel, "dtype": gradient.dtype, "ready_us": _round(float(at))}
            for gradient, at in zip(gradients, ready, strict=True)
        ],
        "messages": [
            {
                "step": step.number, "collective": message.collective, "bytes": message.size_bytes,
                "dtype": _dtype(message), "group": message.group, "ready_us": _round(message.ready_us),
                "start_us": _round(message.start_us), "duration_us": _round(message.duration_us),
                "exposed_us": _round(step.exposed_of(message)), "last_rank": message.last_rank,
                "arrivals_us": [_round(at) for at in message.arrivals_us],
            }
            for step in run.steps
            for message in step.messages
        ],
        "replay_error": None if replayed is None else round(replayed.error, 6),
        "replay": None if replayed is None else asdict(replayed),
        "notes": [*(profile.notes or ()), *run.unplanned],
    }  # fmt: skip


def _round(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 3)


def _dtype(message: Message) -> str | None:
    return None if message.dtype is None else DTYPES.get(message.dtype.lower(), message.dtype.lower())


def explain_run(run: Run, profile: Profile, *, fsdp2: bool = False) -> Explanation:
    """Return where the steps of a run go, and what would change them."""
    replayed = replay(run, profile)
    parts: dict[str, float | None] = {}
    for name, of in PARTS.items():
        known = [time for step in run.steps if (time := of(step)) is not None]
        parts[name] = _round(float(np.median(known))) if known else None
    return Explanation(
        run=run, profile=profile, replay=replayed, parts_us=parts, messages=_message_rows(run, replayed),
        ranks=_rank_rows(run), changes=tuple(_wrappings(profile) if fsdp2 else _changes(run, profile)),
    )  # fmt: skip


def _message_rows(run: Run, replayed: Replay | None) -> tuple[MessageRow, ...]:
    """Return the messages of a step in launch order, those of gradients last."""
    rows = []
    for kind, place in (("others", False), ("buckets", True)):
        columns = zip(*(getattr(step, kind) for step in run.steps), strict=False)
        before = 0
        for index, column in enumerate(columns):
            pairs = list(zip(run.steps, column, strict=True))
            first: Message = column[0]
            waits = [max(message.arrivals_us) for message in column if message.arrivals_us]
            last = [message.last_rank for message in column if message.last_rank is not None]
            ends = replayed.buckets if replayed is not None and place else ()
            rows.append(
                MessageRow(
                    collective=first.collective, group=first.group, bytes=first.size_bytes, dtype=_dtype(first),
                    gradients=first.gradients - before if place else 0,
                    ready_us=_median(message.ready_us for message in column),
                    start_us=_median(message.start_us for message in column),
                    duration_us=_median(message.duration_us for message in column),
                    exposed_us=_median(step.exposed_of(message) for step, message in pairs),
                    waited_us=_median(waits) if waits else None,
                    last_rank=max(set(last), key=last.count) if last else None,
                    replayed_end_us=_round(ends[index].replayed_end_us) if index < len(ends) else None,
                )
            )  # fmt: skip
            before = first.gradients if place else 0
    return tuple(rows)


def _median(values: Any) -> float:
    return round(float(np.median(list(values))), 3)


def _rank_rows(run: Run) -> tuple[RankRow, ...]:
    """Return for each traced rank how often it was last, and how long all others waited for it in a step."""
    last: dict[int, int] = dict.fromkeys(run.traced_ranks, 0)
    waited: dict[int, float] = dict.fromkeys(run.traced_ranks, 0.0)
    for step in run.steps:
        for message in step.messages:
            if message.last_rank is not None:
                last[message.last_rank] += 1
                waited[message.last_rank] += sum(max(message.arrivals_us) - at for at in message.arrivals_us)
    if not any(last.values()):
        return ()
    return tuple(
        RankRow(rank=rank, last=last[rank], others_waited_us=round(waited[rank] / len(run.steps), 3)) for rank in last
    )


def _changes(run: Run, profile: Profile) -> list[Change]:
    """Predict what else the run could do; nothing of one rank, or without costs of messages."""
    if profile.cluster is None or profile.cluster.ranks == 1:
        return []
    problem = make_problem(profile)
    own_us = predict(problem, own_schedule(problem, run.steps[0])).iteration_us if run.steps[0].buckets else None
    found = []
    for strategy, what in STRATEGIES.items():
        try:
            step_us = predict(problem, make_schedule(problem, strategy)).iteration_us
        except InputError as error:
            found.append(Change(strategy=strategy, what=what, step_us=None, gain=None, note=str(error)))
            continue
        gain = None if own_us is None else round(1.0 - step_us / own_us, 5)
        found.append(Change(strategy=strategy, what=what, step_us=round(step_us, 3), gain=gain))
    return found


def _wrappings(profile: Profile) -> list[Change]:
    """Predict FSDP2's groups."""
    try:
        plan = optimize_wrapping(WrappingRequest(profile=profile))
    except InputError as error:
        return [Change(strategy="fsdp2", what="other groups", step_us=None, gain=None, note=str(error))]
    rows = [("fsdp2", "FSDP2's groups as `planner optimize --parallel fsdp2` plans them", plan.predicted)]
    rows += [(name, "FSDP2's groups as users have them", baseline) for name, baseline in (plan.baselines or {}).items()]
    return [
        Change(
            strategy=name, what=what, step_us=None if of is None else round(of.iteration_us, 3), gain=None, note=name
        )
        for name, what, of in rows
    ]


def lines_of(explanation: Explanation) -> list[str]:
    """Return the summary in words."""
    run, parts = explanation.run, explanation.parts_us
    world = pluralize(explanation.profile.world.ranks, "rank")
    lines = [
        f"{pluralize(len(run.steps), 'step')} of {world}, {explanation.profile.world.accelerator or run.device}; "
        f"gradients are exchanged by group {run.group or 'unknown'}",
        ", ".join(f"{name} {milliseconds(time)} ms" for name, time in parts.items() if time is not None),
    ]
    if explanation.replay is not None:
        found = explanation.replay
        lines.append(
            f"the run's own {pluralize(len(found.buckets), 'bucket')}, replayed: {milliseconds(found.replayed_us)} ms, "
            f"traced: {milliseconds(found.traced_us)} ms; each step from the others' messages: {found.error:.1%} off"
        )
    for row in explanation.ranks:
        lines.append(
            f"rank {row.rank} arrived last at {pluralize(row.last, 'message')}; the others waited "
            f"{milliseconds(row.others_waited_us)} ms a step for it"
        )
    return [*lines, *explanation.notes]


COLUMNS = (
    "collective", "gradients", "size", "ready (ms)", "start (ms)", "takes (ms)", "exposed (ms)", "replayed end (ms)",
    "last rank", "waiting (ms)",
)  # fmt: skip


def message_cells(rows: Sequence[MessageRow]) -> list[tuple[str, ...]]:
    """Return the cells of a table of messages."""
    return [
        (
            row.collective, str(row.gradients or ""), mebibytes(row.bytes), milliseconds(row.ready_us),
            milliseconds(row.start_us), milliseconds(row.duration_us), milliseconds(row.exposed_us),
            milliseconds(row.replayed_end_us), "" if row.last_rank is None else str(row.last_rank),
            milliseconds(row.waited_us),
        )
        for row in rows
    ]  # fmt: skip


def change_cells(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    """Return the cells of a table of what would change the step."""
    return [
        (
            change.what, milliseconds(change.step_us), "" if change.gain is None else f"{change.gain:+.1%}",
            change.note[:200],
        )
        for change in changes
    ]  # fmt: skip
