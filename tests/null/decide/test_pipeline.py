"""Schedules as text, the verifier, pass specs, and what every registered pass has to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest
from builders import line_problem, problems, usual_profile
from hypothesis import given
from hypothesis import strategies as st

from planner.decide import pipeline
from planner.decide.pipeline import parse_passes, run_passes
from planner.ir import Bucket, Dense, Schedule, format_indices, parse_indices
from planner.model.codecs import LowRank, TopK, Wire
from planner.model.modes import simulate_schedule
from planner.model.problem import Problem
from planner.model.schedule_text import parse_schedule
from planner.passes import PASSES
from planner.passes.base import Candidate, Pass, Pipeline
from planner.passes.joint import Joint
from planner.passes.merge import Merge
from planner.verify import VerifyError, verify
from runtime.errors import InputError
from runtime.plan.transports import FLAT, transport_of

indices = st.lists(st.integers(0, 200), min_size=1, max_size=12, unique=True).map(tuple)
words = st.text("abcdefghijklmnopqrstuvwxyz0123456789_", min_size=1, max_size=8)
counts = st.integers(1, 10**6)
codecs = st.one_of(
    st.builds(Dense),
    st.builds(Wire, words),
    st.builds(LowRank, counts),
    st.builds(TopK, counts, st.one_of(st.none(), st.lists(counts, min_size=1).map(tuple))),
)
buckets = st.builds(Bucket, indices, st.builds(transport_of, words, words), codecs)


@given(st.lists(buckets, max_size=5).map(lambda items: Schedule(buckets=tuple(items))))
def test_text_form_parses_back(schedule: Schedule) -> None:
    assert parse_schedule(str(schedule)) == schedule


@given(indices)
def test_indices_parse_back(members: tuple[int, ...]) -> None:
    assert parse_indices(format_indices(members)) == members


def test_text_form_by_hand() -> None:
    schedule = Schedule(buckets=(Bucket((0, 1, 2, 5)), Bucket((3, 4), FLAT, TopK(7))))
    assert str(schedule) == "[0-2,5] all_reduce/library none\n[3-4] sparse/flat topk k=7"
    assert str(Schedule(buckets=())) == ""
    assert Schedule.from_boundaries([2, 3]) == parse_schedule(
        "[0-1] all_reduce/library none\n[2] all_reduce/library none"
    )


def lines(*members: str) -> Schedule:
    """Exact buckets from their indices."""
    return Schedule(buckets=tuple(Bucket(gradients=parse_indices(text)) for text in members))


ONE_DTYPE = (0, 0, 0, 0)
TWO_DTYPES = (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("schedule", "dtype_ids"),
    [
        (lines("0-3"), ONE_DTYPE),
        (lines("0", "1", "2", "3"), ONE_DTYPE),
        (lines("0-3"), TWO_DTYPES),
        (lines("0,2", "1,3"), TWO_DTYPES),
        (Schedule(buckets=()), ()),
    ],
)
def test_sound_schedules(schedule: Schedule, dtype_ids: tuple[int, ...]) -> None:
    verify(schedule, dtype_ids)


@pytest.mark.parametrize(
    ("schedule", "dtype_ids", "message"),
    [
        (Schedule(buckets=(*lines("0-3").buckets, Bucket(gradients=()))), ONE_DTYPE, "bucket 1 is empty"),
        (lines("0-4"), ONE_DTYPE, r"bucket 0 \(\[0-4\] .*\): gradient 4 does not exist, there are 4"),
        (Schedule(buckets=(Bucket(gradients=(-1, 0)),)), ONE_DTYPE, "gradient -1 does not exist"),
        (lines("0-1", "1-3"), ONE_DTYPE, "gradient 1 is in bucket 0 and in bucket 1"),
        (lines("0,0-3"), ONE_DTYPE, "gradient 0 is in bucket 0 and in bucket 0"),
        (lines("0", "2"), ONE_DTYPE, "no bucket holds the gradients 1,3"),
        (Schedule(buckets=()), ONE_DTYPE, "no bucket holds the gradients 0-3"),
        (lines("2-3", "0-1"), ONE_DTYPE, r"launch order is not readiness order: .* gradients \[2, 0\]"),
        (lines("1,0", "2-3"), ONE_DTYPE, "bucket 0: gradients 1,0 are not in readiness order"),
        (lines("0,2", "1,3"), ONE_DTYPE, r"bucket 0 \(0,2\) leaves out gradient 1"),
        (lines("0,3", "1-2"), TWO_DTYPES, r"bucket 0 \(0,3\) leaves out gradient 1"),
    ],
)
def test_broken_schedules(schedule: Schedule, dtype_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(schedule, dtype_ids)


@pytest.mark.parametrize("form", ["all_reduce/two_shot wire dtype=int8", "all_reduce/star none", "sparse/flat none"])
def test_lossy_and_unknown_forms_are_not_exact(form: str) -> None:
    schedule = parse_schedule(f"[0-3] {form}")
    with pytest.raises(VerifyError, match="is not exact, but the plan has to be"):
        verify(schedule, ONE_DTYPE)
    verify(schedule, ONE_DTYPE, accuracy="bounded")


def test_verify_error_is_no_input_error() -> None:
    """A broken schedule is our defect, not the user's."""
    assert not issubclass(VerifyError, InputError)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("", ()),
        ("merge", (Merge(),)),
        (" merge { labels = 4 } ", (Merge(labels=4),)),
        ("merge{}", (Merge(),)),
        ("merge,merge{labels=1}", (Merge(), Merge(labels=1))),
    ],
)
def test_pass_specs(text: str, passes: tuple[Pass, ...]) -> None:
    assert parse_passes(text) == passes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "mrege",
            "found 'mrege', expected one of: delay, joint, late_gather, local_async, merge, outer, shard_updates",
        ),
        ("merge,sparsify{ratio=1000}", "sparsify has no option 'ratio'; did you mean max_ratio?"),
        ("sparsify{max_ratio=0.5}", "expected a number of at least 1"),
        ("delay{max_delay=0}", r"delay{max_delay=0}: expected an integer of at least 1"),
        ("joint{max_ratio=nan}", "expected a number of at least 1"),
        ("merge{label=4}", "merge has no option 'label'; did you mean labels?"),
        ("merge{zzz=4}", "merge has no option 'zzz'; it has: labels"),
        ("merge{labels}", r"merge{labels=}: expected an integer of at least 1"),
        ("merge{labels=0}", r"merge{labels=0}: expected an integer of at least 1"),
        ("merge{labels=2.5}", "expected an integer"),
        ("merge{labels=many}", "expected an integer"),
        ("merge{labels=4", r"cannot read 'merge\{labels=4', expected for example merge\{labels=8\}"),
        ("merge}", "cannot read"),
        ("merge merge", "cannot read"),
        (",", "cannot read ','"),
        ("merge,,merge", "cannot read ',merge'"),
        ("Merge", "cannot read"),
    ],
)
def test_wrong_pass_specs(text: str, message: str) -> None:
    with pytest.raises(InputError, match="--passes: ") as caught:
        parse_passes(text)
    assert caught.match(message)


@st.composite
def options_of(draw: st.DrawFn, name: str) -> Pass:
    """A pass of the registry, some of its numbers and lists not as by default."""
    made = PASSES[name]()
    lists = {"compress": st.lists(st.sampled_from(["wire", "lowrank", "sparse"]), min_size=1, unique=True)}
    chosen: dict[str, Any] = {}
    for field in fields(made):  # type: ignore[arg-type]
        kinds = {int: st.integers(1, 10**6), float: st.floats(1.0, 1e9), str: st.just(field.default)}
        value = lists[field.name].map("|".join) if field.name in lists else kinds[type(field.default)]
        if draw(st.booleans()):
            chosen[field.name] = draw(value)
    return replace(made, **chosen)  # type: ignore[type-var]


@given(st.lists(st.sampled_from(sorted(PASSES)).flatmap(options_of), max_size=4).map(Pipeline))
def test_pipelines_print_what_is_parsed(passes: Pipeline) -> None:
    assert parse_passes(str(passes)) == passes


def test_a_comma_in_an_option_is_printed_so_that_it_can_be_read() -> None:
    assert str(Joint(compress="wire,sparse")) == "joint{compress=wire|sparse}"
    assert str(parse_passes(" merge { labels = 4 } , topology")) == "merge{labels=4},topology"


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_can_be_named(name: str) -> None:
    (made,) = parse_passes(name)
    assert type(made) is PASSES[name]
    assert made.name == name


@st.composite
def cuts(draw: st.DrawFn, problem: Problem) -> Schedule:
    inner = draw(st.sets(st.integers(1, problem.count)))
    return Schedule.from_boundaries(sorted(inner | {problem.count}))


@pytest.mark.parametrize("name", PASSES)
@given(data=st.data())
def test_every_pass_keeps_its_promise(name: str, data: st.DataObject) -> None:
    """Sound, deterministic, and never worse than the schedule it was given, which it leaves as it was."""
    problem = data.draw(problems(mixed=data.draw(st.booleans()), contention=data.draw(st.booleans())))
    schedule = data.draw(cuts(problem))
    text = str(schedule)
    (made,) = parse_passes(name)
    result = run_passes([made], schedule, problem, accuracy=made.accuracy).schedule
    assert parse_schedule(str(result)) == result
    assert str(schedule) == text
    assert made.apply(schedule, problem).schedule == result
    before, after = (simulate_schedule(problem, s).iteration_us for s in (schedule, result))
    assert after <= before * (1 + 1e-12)


@dataclass(frozen=True)
class Fake(Pass):
    """A pass that does what the test says."""

    name: ClassVar[str] = "fake"
    act: Callable[[Schedule], Schedule]

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        return Candidate(schedule=self.act(schedule))


def drop_last(schedule: Schedule) -> Schedule:
    return Schedule(buckets=schedule.buckets[:-1])


def test_verifier_runs_before_and_after_each_pass() -> None:
    problem = line_problem([(1, 1.0)] * 3, 10.0, 0.1)
    start = lines("0", "1", "2")
    with pytest.raises(VerifyError, match="no bucket holds the gradients 2"):
        run_passes([Fake(drop_last)], start, problem)
    with pytest.raises(VerifyError, match="no bucket holds the gradients 2"):
        run_passes([Fake(drop_last), Fake(lambda _: start)], start, problem)
    with pytest.raises(VerifyError, match="no bucket holds the gradients 1-2"):
        run_passes([], lines("0"), problem)


def test_passes_run_in_order_and_report() -> None:
    problem = line_problem([(1, 1.0)] * 3, 10.0, 0.1)
    seen: list[tuple[str, str]] = []

    def note(name: str, schedule: Schedule, seconds: float) -> None:
        assert seconds >= 0.0
        seen.append((name, str(schedule).replace(" all_reduce/library none", "")))

    passes = [Fake(lambda _: lines("0", "1-2")), Merge(), Fake(lambda s: s)]
    result = run_passes(passes, lines("0-2"), problem, note).schedule
    assert seen[0] == ("fake", "[0]\n[1-2]")
    assert [name for name, _ in seen] == ["fake", "merge", "fake"]
    assert result == Merge().apply(lines("0-2"), problem).schedule


def test_bad_pass_is_caught_in_optimize(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: a registered pass that loses a gradient never becomes a plan."""
    from planner.decide.optimize import optimize

    broken: dict[str, Any] = {"fake": lambda: Fake(drop_last)}
    monkeypatch.setattr(pipeline, "_make_pass", lambda name, _: broken[name]())
    with pytest.raises(VerifyError, match=r"no bucket holds the gradients ([0-9]-)?5"):
        optimize(usual_profile(), passes="fake")


def test_merge_fires_holds_back_and_takes_one_gradient() -> None:
    """Fires where start-up is dear, holds back where it is free and sending hides, and copes with one gradient."""
    dear = line_problem([(100, 10.0)] * 3, 1000.0, 0.001)
    assert Merge().apply(lines("0", "1", "2"), dear).schedule == lines("0-2")
    cheap = line_problem([(100, 1000.0)] * 3, 1.0, 1.0)
    # The first two hide under backward whether they travel together or apart: fewer buckets win.
    assert Merge().apply(lines("0-2"), cheap).schedule == lines("0-1", "2")
    assert Merge().apply(lines("0"), line_problem([(1, 1.0)], 1.0, 1.0)).schedule == lines("0")
