"""The arithmetic of measuring: fits, contention, combination of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, cycle, repeat
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from planner.profile import compute, contention, links, request
from planner.profile.bench import Bench, fit
from planner.profile.compute import RankTimes, Training, combine, spread_of
from planner.profile.contention import Seen, solve
from planner.profile.links import Limits, message_sizes, undisturbed
from planner.profile.measuring import _describe
from planner.profile.request import Phases, Wanted
from runtime.comm.world import World

BENCH = Bench(World(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("model_bytes", "ratio", "sizes"),
    [
        (100, 2, [1024]),
        (1024, 2, [1024]),
        (5000, 2, [1024, 2048, 4096, 5000]),
        (70000, 4, [1024, 4096, 16384, 65536, 70000]),
    ],
)
def test_message_sizes_end_with_the_model(model_bytes: int, ratio: int, sizes: list[int]) -> None:
    assert message_sizes(model_bytes, ratio) == sizes


def test_a_line_is_found_through_an_outlier() -> None:
    samples = [(1024.0 * 2**k, 100.0 + 0.001 * 1024 * 2**k) for k in range(10)]
    samples[3] = (samples[3][0], 50_000.0)
    line = fit(samples)
    assert line.alpha_us == pytest.approx(100.0, rel=0.02)
    assert line.beta_us_per_byte == pytest.approx(0.001, rel=0.02)


def test_a_fit_says_how_good_it_is() -> None:
    perfect = fit([(1024.0, 10.0), (2048.0, 20.0), (4096.0, 40.0)])
    assert perfect.r_squared == pytest.approx(1.0)
    assert perfect.mean_error == pytest.approx(0.0, abs=1e-6)
    assert (fit([(1024.0, 10.0), (2048.0, 90.0), (4096.0, 40.0)]).mean_error or 0.0) > 0.1


@given(
    st.floats(1.0, 3.0), st.floats(1.0, 10.0), st.floats(1000.0, 50_000.0), st.floats(50.0, 5000.0), st.integers(2, 64)
)  # fmt: skip
def test_contention_factors_are_recovered_from_what_they_cause(
    compute: float, network: float, backward_us: float, each_us: float, messages: int
) -> None:
    network_us = each_us * messages
    if backward_us * compute >= network_us * network:
        shared_us = network_us * network
        both_us = shared_us + backward_us - shared_us / compute
    else:
        shared_us = both_us = backward_us * compute
    passed_us = [each_us * network * (k + 1) for k in range(messages)]
    done = contention.passed(passed_us, shared_us)
    assert done == pytest.approx(min(messages, shared_us / (each_us * network)))
    found = solve([Seen(backward_us, each_us, both_us, shared_us, done)] * 3)
    if shared_us / compute > 0.12 * backward_us:
        assert found[0] == pytest.approx(compute, rel=1e-6)
    if done > 0.5:
        assert found[1] == pytest.approx(network, rel=1e-6)


def test_factors_do_not_explode_where_little_was_shared() -> None:
    compute, network = solve([Seen(1200.0, 900.0, 1205.0, 8.0, 0.01)])
    assert (compute, network) == (1.0, 1.0)
    compute, network = solve([Seen(1000.0, 100.0, 1990.0, 1000.0, 0.0)])
    assert (compute, network) == (pytest.approx(10.0), pytest.approx(20.0))


def test_nothing_gets_faster_by_contention() -> None:
    assert solve([Seen(1000.0, 1000.0, 900.0, 900.0, 1.0)]) == (1.0, 1.0)


def test_the_message_on_its_way_counts_in_part() -> None:
    ends_us = [100.0, 300.0, 400.0]
    assert [contention.passed(ends_us, at) for at in (0.0, 50.0, 100.0, 250.0, 400.0)] == [0.0, 0.5, 1.0, 1.75, 3.0]
    assert contention.passed(ends_us, 1000.0) == 3.0


def times(ready_us: dict[str, list[float]]) -> RankTimes:
    """What a rank measured."""
    repeats = len(next(iter(ready_us.values())))
    end_us = [200.0] * repeats
    return RankTimes(forward_us=[100.0] * repeats, update_us=[5.0], ready_us=ready_us, backward_end_us=end_us)


def test_a_gradient_is_ready_when_it_is_on_all_ranks() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 1)})
    late = math.nan
    ranks = [
        times({"b.bias": [110, 131, 110], "b.weight": [120, 120, 120], "a.weight": [150] * 3, "a.bias": [140] * 3}),
        times({"b.bias": [130, 110, late], "b.weight": [119, 121, 122], "a.weight": [151] * 3, "a.bias": [139] * 3}),
    ]
    compute = combine(ranks, dict(model.named_parameters()))
    assert [g.name for g in compute.gradients] == ["b.weight", "b.bias", "a.bias", "a.weight"]
    assert [g.backward_us for g in compute.gradients] == [21.0, 9.0, 10.0, 11.0]
    assert [g.numel for g in compute.gradients] == [3, 1, 3, 6]
    assert (compute.forward_us, compute.update_us, compute.repeats) == (100.0, 5.0, 3)


def test_the_update_is_what_it_adds_on_the_slowest_rank() -> None:
    """In each step another rank has the slower half; no rank's own median knows of it."""
    backward_us = [[80.0, 70.0, 80.0], [70.0, 80.0, 70.0]]
    updates_us = [[4.0, 12.0, 6.0], [12.0, 5.0, 12.0]]
    ranks = [
        RankTimes(forward_us=[50.0] * 3, update_us=update, ready_us={"weight": backward}, backward_end_us=backward)
        for update, backward in zip(updates_us, backward_us, strict=True)
    ]
    compute = combine(ranks, {"weight": nn.Parameter(torch.zeros(1))})
    assert compute.update_us == 5.0  # the longest of (84, 82), (82, 85) and (86, 82) beyond 80: 4, 5 and 6
    assert combine([replace(rank, update_us=[]) for rank in ranks], {}).update_us == 0.0


def test_a_parameter_that_no_rank_used_is_left_out() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 1)})
    ranks = [times({"b.bias": [110.0]}), times({"b.bias": [112.0], "b.weight": [120.0]})]
    compute = combine(ranks, dict(model.named_parameters()))
    assert [g.name for g in compute.gradients] == ["b.bias", "b.weight"]


@pytest.mark.parametrize(
    ("us_per_byte", "backward_us", "expected"),
    [
        (1e-4, 20_000.0, [(1024, 64), (8192, 64), (65536, 64), (524288, 64), (4194304, 64)]),
        (8e-3, 20_000.0, [(1024, 64), (8192, 64), (65536, 64), (524288, 10)]),
        (8e-3, 300.0, [(1024, 64), (8192, 9)]),
        (8e-1, 300.0, []),
    ],
)
def test_contention_is_measured_with_messages_that_fit_beside_backward(
    us_per_byte: float, backward_us: float, expected: list[tuple[int, int]]
) -> None:
    class Flood:
        def choose(self, kind: int, size_bytes: int, messages: int) -> None:
            self.time_us = size_bytes * us_per_byte * messages

        def alone_us(self, clock: None) -> float:
            return self.time_us

    kinds = ("all_reduce", "all_gather")

    def fitting(model_bytes: int, probing_s: float = 1e3) -> list[contention.Sort]:
        return contention._fitting(Flood(), None, backward_us, model_bytes, kinds, probing_s)  # type: ignore[arg-type]

    sizes = [(size, min(64, max(2, count))) for size, count in expected]
    assert fitting(5 * 2**20) == [(kind, *sort) for kind in kinds for sort in sizes]
    assert fitting(10_000) == [(kind, *sort) for kind in kinds for sort in sizes[:2]]
    # Where even the smallest messages take longer than what finding out may take, none larger are tried.
    assert fitting(5 * 2**20, 1e-9) == [(kind, *sort) for kind in kinds for sort in sizes[:1]]


@pytest.mark.parametrize("step_s", [0.01, 0.3, 1.0, 2.2, 5.0, 9.0, 60.0])
def test_contention_asks_for_no_more_steps_than_the_budget_has(step_s: float) -> None:
    budget_s = 20.0
    sizes = contention.affordable_sizes(step_s, budget_s)
    assert (sizes > 0) == (step_s * (1 + contention.STEPS_PER_SIZE) <= budget_s)
    assert step_s * (1 + contention.STEPS_PER_SIZE * min(sizes, 10)) <= budget_s or not sizes


def test_of_few_sizes_of_messages_the_largest_of_each_kind_stay() -> None:
    fitting = [(kind, size, 4) for kind in ("all_reduce", "all_gather") for size in (1, 8, 64, 512)]
    assert contention.spread_evenly(fitting, 99) == fitting
    assert contention.spread_evenly(fitting, 1) == [("all_reduce", 512, 4)]
    assert [size for _, size, _ in contention.spread_evenly(fitting, 3)] == [8, 512, 512]


class Link:
    """Messages that take as long as a link says, on a clock that stands still otherwise."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.spent_s = bytes_per_s, 0.0

    def timed(self, bench: Bench, run: Callable[[], float | None], everybody: World) -> tuple[float, float]:
        """Microseconds until done and until all ranks met again; in place of `links._timed_us`."""
        time_s = (run() or 0.0) / self.bytes_per_s
        self.spent_s += time_s
        return 1e6 * time_s, 1e6 * time_s


@pytest.mark.parametrize("bytes_per_s", [1e10, 1e8, 25e6, 1e6])
def test_no_collective_takes_longer_than_it_may_on_slow_links(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float
) -> None:
    """553 MB on 200 Mbit/s take 22 s a message: what is timed ends before, and its last segment spans a factor of 4."""
    link, model_bytes = Link(bytes_per_s), 553_430_176
    monkeypatch.setattr(links, "_timed_us", link.timed)
    sizes = message_sizes(model_bytes, 2)
    curve = links.measure_curve(BENCH, sizes, lambda size: lambda: size, "all_reduce", Limits(4.0))
    assert link.spent_s <= 4.0
    assert [time_us for _, time_us in curve] == pytest.approx([1e6 * size / bytes_per_s for size, _ in curve], abs=1e-3)
    if 4 * 2 * model_bytes / bytes_per_s < 4.0:
        assert curve[-1][0] == model_bytes
    else:
        assert curve[-1][0] == 4 * curve[-2][0]
        assert 8 * 2 * 2 * curve[-1][0] / bytes_per_s > 4.0  # twice as much would have been too long
        said = links.cut_short({"all_reduce": curve}, model_bytes)
        assert "of 553,430,176 bytes" in said[0]


def test_a_message_lasts_until_its_last_rank_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are done at 100 us per KiB, the last one a tenth later, and meet for 20 us. Where a meeting would be a good
    part of the message, it tells nothing.
    """

    def timed(bench: Bench, run: Callable[[], int | None], everybody: World) -> tuple[float, float]:
        done_us = (run() or 0) / 1024 * 100.0
        return done_us, 1.1 * done_us + 20.0

    monkeypatch.setattr(links, "_timed_us", timed)
    curve = links.measure_curve(BENCH, [1024, 2048, 102400], lambda size: lambda: size, "all_reduce", Limits(4.0))
    assert dict(curve) == pytest.approx({1024: 100.0, 2048: 220.0, 102400: 11_000.0})


class Steps:
    """In place of `compute.StepRunner`: steps that take as long as they are told to, on a clock of their own."""

    def __init__(self, durations_s: Iterator[float]) -> None:
        self.durations_s, self.now_s, self.done = durations_s, 0.0, 0
        self.session, self.clock = SimpleNamespace(plan=SimpleNamespace(gradients=())), None

    def run(self) -> float:
        duration_s = next(self.durations_s)
        self.now_s, self.done = self.now_s + duration_s, self.done + 1
        return 1e6 * duration_s

    def close(self) -> None: ...


def measured_steps(monkeypatch: pytest.MonkeyPatch, durations_s: Iterator[float]) -> tuple[Steps, list[float]]:
    """The steps that were run on one rank with the usual budget, and the times that count."""

    def times(marks: list[float], *_: object) -> RankTimes:
        return RankTimes([0.0] * len(marks), [], {}, marks)

    steps = Steps(durations_s)
    for module in (compute, request):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: steps.now_s))
    monkeypatch.setattr(compute, "StepRunner", lambda *_, **__: steps)
    monkeypatch.setattr(compute, "rank_times", times)
    phases = Phases(Wanted.of("exact", 2, two_links=False, halves=True, norms=False).phases, 60.0, first=False)
    found = compute.measure_compute(Training(nn.Linear(1, 1), lambda _: None), BENCH, phases)
    return steps, found[0].backward_end_us


def test_a_round_is_as_long_as_its_straggler_whose_messages_wait_for_nobody() -> None:
    ranks = [Seen(100.0, 30.0, 150.0, 120.0, 3.0), Seen(90.0, 10.0, 200.0, 180.0, 2.0)]
    assert contention._of_last(ranks) == Seen(100.0, 10.0, 200.0, 180.0, 2.0)


@pytest.mark.parametrize(("step_s", "run"), [(0.001, 43), (0.5, 15), (2.2, 8), (5.0, 8), (11.0, 4), (60.0, 4)])
def test_first_steps_are_few_where_they_are_long(monkeypatch: pytest.MonkeyPatch, step_s: float, run: int) -> None:
    steps, _ = measured_steps(monkeypatch, repeat(step_s))
    assert steps.done == run
    assert run <= 10 or run * step_s < 10.0


def test_steps_are_measured_again_until_they_are_steady_and_those_count(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy, steady = [0.5, 0.9] * 6, [0.4] * 12
    steps, times_us = measured_steps(monkeypatch, chain([0.5] * 3, noisy, steady, repeat(9.0)))
    assert steps.done == 3 + 12 + 12
    assert set(times_us) == {400_000.0}
    steps, times_us = measured_steps(monkeypatch, chain([0.5] * 3, cycle([0.5, 0.9])))
    assert (steps.done - 3) % 12 == 0  # as often as the budget has room for
    assert 2 * 12 <= steps.done - 3 <= compute.MOST_TIMES * 12
    assert steps.now_s < 0.5 * 3 + 12 * 0.7 + 15.0 + 12 * 0.7


def test_steps_that_differ_much_are_told_from_steady_ones() -> None:
    def ranks(*end_us: float) -> list[RankTimes]:
        quiet = RankTimes([40.0] * len(end_us), [5.0] * len(end_us), {}, [80.0] * len(end_us))
        return [quiet, replace(quiet, backward_end_us=list(end_us))]

    steady, noisy = ranks(95.0, 95.0, 96.0, 95.0), ranks(75.0, 115.0, 95.0, 135.0)
    assert spread_of(steady) == pytest.approx(0.25 / 100.0)
    assert spread_of(noisy) == pytest.approx((125.0 - 96.25) / 110.0)
    intervals = combine(noisy, {}).intervals
    assert intervals is not None
    assert intervals.step_us == (96.25, 125.0)
    assert intervals.spread_us == 28.75


def test_an_optimizer_that_leaves_parameters_out_is_known() -> None:
    model = nn.Linear(2, 2)
    for held, all_of_them in ((list(model.parameters()), True), ([model.weight], False)):
        described = _describe(Training(model, lambda _: None, torch.optim.SGD(held, lr=0.1)))
        assert described is not None
        assert (described.name, described.elementwise, described.holds_all) == ("SGD", True, all_of_them)
    assert _describe(Training(model, lambda _: None)) is None


def test_one_disturbed_size_is_left_out_and_nothing_else() -> None:
    """Start-up and rate, and a bound by start-ups: untouched; a hiccup of 8 % is brought to its neighbours' rate."""
    line = [(2.0**power, 100.0 + 0.002 * 2.0**power) for power in range(10, 24)]
    floor = [(size, max(300.0, 0.002 * size)) for size, _ in line]
    for curve in (line, floor, line[:2], line[:1]):
        assert [time_us for _, time_us in undisturbed(curve)] == pytest.approx([time_us for _, time_us in curve])
    size, time_us = line[12]
    hiccup = [*line[:12], (size, time_us * 1.08), *line[13:]]
    found = undisturbed(hiccup)
    assert found[12][1] == pytest.approx(time_us, rel=0.03)
    others = [(one, true) for one, true in zip(found, line, strict=True) if true[0] != size]
    assert all(one[1] == pytest.approx(true[1], rel=0.03) for one, true in others)
