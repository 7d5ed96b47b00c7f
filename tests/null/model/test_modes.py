"""What holds of every mode: each member of the registry is covered without a line of its own."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from builders import cluster_document, make, profile_document

import planner
from planner.emit.lower import lower
from planner.ir import ACCURACIES, Bucket, Mode, Schedule, Synchronous
from planner.model.codecs import TopK, Wire
from planner.model.modes import MODES, simulate_schedule, step_us
from planner.model.problem import Problem
from planner.model.schedule_text import parse_schedule
from planner.verify import VerifyError, verify
from runtime.plan import parse_plan
from runtime.plan.combinations import (
    COMBINATIONS,
    FEATURES,
    LAYER_SELECTION,
    SELECTION,
    SHARED_NORMS,
    TOPOLOGY,
    WIRE,
    reason_against,
)
from runtime.plan.transports import FLAT, TREE

ROWS = [(4000, 120.0), (12000, 80.0), (8000, 60.0)]

BUCKETS = {
    TOPOLOGY: Bucket((0, 1, 2), TREE),
    SELECTION: Bucket((0, 1, 2), FLAT, TopK(60)),
    LAYER_SELECTION: Bucket((0, 1, 2), FLAT, TopK.of_layers((10, 30, 20))),
    WIRE: Bucket((0, 1, 2), codec=Wire("int8")),
}
"""Feature → a bucket that has it."""


def value(kind: type[Mode]) -> Mode:
    """A mode whose options are 2 where they have no default."""
    return kind(**{field.name: 2 for field in fields(kind) if field.default is MISSING})  # type: ignore[arg-type]


def problem(ranks: int = 4, **cluster: Any) -> Problem:
    profile = profile_document(ROWS, forward_us=100.0, update_us=40.0)
    return make(profile, cluster_document((30.0, 0.005), nodes=ranks, **cluster))


def schedule(kind: type[Mode]) -> Schedule:
    return replace(Schedule.from_boundaries([1, 3]), mode=value(kind))


def test_the_reference_shows_the_table() -> None:
    page = (Path(planner.__file__).parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    for feature, what in FEATURES.items():
        cells = [COMBINATIONS[mode].get(feature, "yes") for mode in COMBINATIONS]
        assert f"| {what} | {' | '.join(cells)} |" in page


every_mode = pytest.mark.parametrize("kind", MODES, ids=lambda kind: kind.name)


def test_the_table_of_combinations_is_about_modes_and_features_that_there_are() -> None:
    assert {kind.name for kind in MODES} == set(COMBINATIONS)
    for reasons in COMBINATIONS.values():
        assert reasons.keys() <= FEATURES.keys()
        assert all(reasons.values())


@every_mode
def test_text_form(kind: type[Mode]) -> None:
    given = schedule(kind)
    assert parse_schedule(str(given)) == given
    assert hash(given) == hash(schedule(kind))
    line = str(given.mode)
    assert "\n" not in line
    assert next(filter(None, (each.parse(line) for each in MODES)), Synchronous()) == given.mode


@every_mode
def test_verified_by_accuracy(kind: type[Mode]) -> None:
    for accuracy in ACCURACIES:
        if ACCURACIES.index(accuracy) >= ACCURACIES.index(kind.accuracy):
            verify(schedule(kind), [0, 0, 0], accuracy=accuracy)
        else:
            with pytest.raises(VerifyError, match=f"that is {kind.accuracy}, but the plan has to be {accuracy}"):
                verify(schedule(kind), [0, 0, 0], accuracy=accuracy)


@every_mode
@pytest.mark.parametrize("feature", [*BUCKETS, SHARED_NORMS])
def test_verified_by_the_table(kind: type[Mode], feature: str) -> None:
    odd = replace(schedule(kind), norms=(0, 1))
    if feature in BUCKETS:
        assert feature in BUCKETS[feature].features
        odd = replace(schedule(kind), buckets=(BUCKETS[feature],))
    reasons = [reason_against(kind.name, one) for one in (odd.buckets[0].features or (feature,))]
    if not any(reasons):
        verify(odd, [0, 0, 0], accuracy="relaxed", norms=(2, 2))
        return
    with pytest.raises(VerifyError) as caught:
        verify(odd, [0, 0, 0], accuracy="relaxed", norms=(2, 2))
    assert next(filter(None, reasons)) in str(caught.value)


@every_mode
@pytest.mark.parametrize("contention", [None, (1.2, 1.4)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_predicted(kind: type[Mode], ranks: int, contention: tuple[float, float] | None) -> None:
    """Step and timeline agree; what a plan says of it can be read back."""
    step, given, model = problem(ranks, contention=contention), schedule(kind), MODES[kind]
    timeline = simulate_schedule(step, given)
    assert timeline.iteration_us > 0.0
    assert timeline.iteration_us == pytest.approx(step_us(step, given))
    assert all(span.end_us >= span.start_us >= 0.0 for span in timeline.spans)
    assert sum(model.critical_path(step, given).values()) == pytest.approx(1.0)
    assert all(size >= 0.0 for size in model.message_bytes(step, given).values())
    reasons = model.explain(step, given, timeline)
    assert len(reasons) == len(given.buckets)
    assert all(reasons)
    notes, implied = model.assumptions(step)
    assert all(notes)
    assert isinstance(implied, bool)
    plan = lower(step, given)
    assert plan.accuracy == kind.accuracy
    assert parse_plan(json.loads(json.dumps(plan.to_document()))).digest() == plan.digest()


@every_mode
def test_defects_are_of_the_mode_alone(kind: type[Mode]) -> None:
    assert MODES[kind].defect(schedule(kind), 3) is None
