"""Strategies that send selected elements, and what the simulator makes of them, against numbers worked out by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import sparse_reference
from builders import make, profile_document, run

from planner import simulate
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_cluster, find_profile
from planner.documents.profile import Cluster, Link, SelectionLine, parse_profile
from planner.ir import Bucket, Schedule
from planner.model.codecs import TopK
from planner.model.modes import simulate_schedule
from planner.model.problem import Problem, make_problem
from planner.model.schedule_text import parse_schedule
from planner.model.spending import spending
from planner.search.lags import fill_buffers, layer_wise, merge_layers
from planner.strategies.sparse import ratios
from planner.verify import VerifyError, verify
from runtime.errors import InputError
from runtime.plan.transports import FLAT, HITOPK

LINK = {"alpha_us": 10.0, "beta_us_per_byte": 0.01}
ROWS = [(1000, 50.0), (4000, 100.0), (100, 30.0)]
"""Layers in the order of backward; forward takes 100 µs, the update 10 µs."""


def k_of(bucket: Bucket) -> int:
    assert isinstance(bucket.codec, TopK)
    return bucket.codec.k


def problem_of(rows: Any = ROWS, nodes: int = 4, layers: list[str] | None = None, **fields: Any) -> Problem:
    """One rank on each of the nodes."""
    cluster = {"schema": "planner.cluster/1", "nodes": nodes, "inter": LINK, **fields}
    return make(profile_document(rows, layers=layers), cluster)


def two_links(rows: Any = ROWS, **fields: Any) -> Problem:
    """2 nodes of 2 ranks with one card each."""
    intra = Link(alpha_us=1.0, beta_us_per_byte=0.001)
    inter = Link(alpha_us=10.0, beta_us_per_byte=0.01)
    cluster = Cluster(nodes=2, ranks_per_node=2, intra=intra, inter=inter, **fields)
    return make_problem(parse_profile(profile_document(rows)), cluster)


def iteration_us(problem: Problem, schedule: Schedule) -> float:
    return simulate_schedule(problem, schedule).iteration_us


def test_slgs_sends_one_message_after_its_selection() -> None:
    """5100 elements, 5 of them from each of 4 ranks: 160 bytes in two doublings."""
    problem = problem_of(
        sparsify={"alpha_us": 7.0, "beta_us_per_byte": 0.001}, unpack={"alpha_us": 3.0, "beta_us_per_byte": 0.0}
    )
    schedule = make_schedule(problem, "slgs")
    assert str(schedule) == "[0-2] sparse/flat topk k=5"
    timeline = simulate_schedule(problem, schedule)
    select_us, sent_us, unpack_us = 7.0 + 0.001 * 20400, 2 * 10.0 + 0.75 * 0.01 * 160, 3.0
    assert timeline.iteration_us == pytest.approx(280.0 + select_us + sent_us + unpack_us + 10.0)
    assert timeline.exposed_us == pytest.approx(select_us + sent_us + unpack_us)
    assert str(make_schedule(problem, "slgs:0.1")) == "[0-2] sparse/flat topk k=510"
    assert str(make_schedule(problem, "slgs:1e-9")) == "[0-2] sparse/flat topk k=1"


def test_selection_delays_the_rest_of_backward() -> None:
    """The first bucket is selected for 100 µs before the second gradient's backward goes on."""
    problem = problem_of([(100, 50.0), (100, 50.0)], sparsify={"alpha_us": 100.0, "beta_us_per_byte": 0.0})
    first = Bucket((0,), FLAT, TopK(1))
    dense = 6 * 10.0 + 1.5 * 0.01 * 400
    assert iteration_us(problem, Schedule(buckets=(first, Bucket((1,))))) == pytest.approx(300.0 + dense + 10)
    assert iteration_us(problem, make_schedule(problem, "wfbp")) == pytest.approx(100.0 + 50.0 + 2 * dense + 10.0)


def test_on_one_rank_there_is_nothing_to_select() -> None:
    problem = problem_of(nodes=1, sparsify={"alpha_us": 100.0, "beta_us_per_byte": 0.1})
    for name in ("slgs", "lags", "hitopk"):
        assert iteration_us(problem, make_schedule(problem, name)) == pytest.approx(290.0)


def test_selection_costs_by_selector() -> None:
    by_selector = {"exact": {"alpha_us": 40.0, "beta_us_per_byte": 0.0}}
    problem = problem_of(sparsify=by_selector)
    assert spending(problem, make_schedule(problem, "slgs").buckets[0]).before_us == 40.0
    with pytest.raises(InputError, match=r"\$\.sparsify: no cost for the selector 'mstopk'; found exact; expected"):
        make_schedule(problem, "hitopk")


def test_lags_by_hand() -> None:
    """Budgets: layer 0 hides behind 100 µs, layer 1 behind 30, layer 2 behind nothing.

    A dense ring takes 60 + 0.015 per byte: 120, 660 and 66 µs. A gather of k elements takes 20 + 0.24 k.
    """
    problem = problem_of(
        sparsify={"alpha_us": 2.0, "beta_us_per_byte": 0.0005}, unpack={"alpha_us": 1.0, "beta_us_per_byte": 0.0}
    )
    schedule = make_schedule(problem, "lags:1000:0")
    # Layer 0: 20 + 0.24 k + 2 + 2 + 1 ≤ 100. Layer 1: 20 + 0.24 k + 2 + 8 + 1 > 30. Layer 2 has no budget at all.
    assert [k_of(bucket) for bucket in schedule.buckets] == [312, 4, 1]
    assert ratios(problem, schedule) == {"layer0": 1000 / 312, "layer1": 1000.0, "layer2": 100.0}
    assert [k_of(bucket) for bucket in make_schedule(problem, "lags:10:0").buckets] == [312, 400, 10]
    assert [k_of(bucket) for bucket in make_schedule(problem, "lags:3:0").buckets] == [334, 1334, 34]


def test_lags_leaves_layers_dense_that_hide() -> None:
    problem = problem_of([(1000, 50.0), (10, 120.0), (10, 60.6)])
    assert str(make_schedule(problem, "lags:1000:0")) == (
        "[0] all_reduce/library none\n[1] all_reduce/library none\n[2] sparse/flat topk k=1"
    )


def test_lags_finds_the_largest_k_that_fits() -> None:
    """Against trying every k, on random layers."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        rows = [(int(n), float(t)) for n, t in zip(rng.integers(1, 400, 6), rng.uniform(0, 80, 6), strict=True)]
        problem = problem_of(rows, sparsify={"alpha_us": 1.0, "beta_us_per_byte": 0.002})
        for index, bucket in enumerate(make_schedule(problem, "lags:50:0").buckets):
            numel, budget_us = rows[index][0], rows[index + 1][1] if index < 5 else 0.0
            if bucket.whole:
                assert 60.0 + 0.015 * 4 * numel <= budget_us
                continue
            spent_us = 1.0 + 0.002 * 4 * numel
            fitting = [k for k in range(1, numel + 1) if 20.0 + 0.75 * 0.01 * 4 * 8 * k + spent_us <= budget_us]
            assert k_of(bucket) == max([-(-numel // 50), *fitting[-1:]])


@pytest.mark.parametrize("seed", range(8))
def test_lags_finds_the_largest_k_where_measured_times_fall_with_k(seed: int) -> None:
    """Gathers and selection as measured go up and down; a smaller k may take longer than a larger one."""
    rng = np.random.default_rng(seed)
    rows = [(int(n), float(t)) for n, t in zip(rng.integers(1, 400, 6), rng.uniform(0, 300, 6), strict=True)]
    samples = {
        "all_reduce": [[4.0, 1000.0]],
        "all_gather": [[float(size), float(rng.uniform(0, 150))] for size in sorted(rng.integers(32, 13_000, 7))],
    }
    selects = {"alpha_us": 0.0, "beta_us_per_byte": 0.0, "by_density": [[0.1, 50.0, 0.0], [0.5, 2.0, 0.02]]}
    problem = problem_of(rows, samples=samples, sparsify=selects)
    (phase,) = problem.sparse_phases(FLAT)
    select = problem.selection_cost(FLAT)
    for index, bucket in enumerate(make_schedule(problem, "lags:50:0").buckets):
        numel, budget_us = rows[index][0], rows[index + 1][1] if index < 5 else 0.0
        k = np.arange(1, numel + 1)
        fitting = k[phase.curve(4.0 * 8 * k) + select(4.0 * numel, k / numel) <= budget_us]
        assert k_of(bucket) == max([-(-numel // 50), *fitting[-1:].tolist()])


def buffered(ks: list[int | None], buffer: int) -> list[list[int]]:
    """The rule of Section 5 in plain words, on k of layers in the order of backward (None: dense): store; send what is
    stored when it holds `buffer` elements, when the first layer has come, and before a dense layer.
    """
    messages: list[list[int]] = []
    stored: list[int] = []
    for layer, k in enumerate(ks):
        if k is None:
            messages += [stored, [layer]] if stored else [[layer]]
            stored = []
            continue
        stored.append(layer)
        if sum(ks[each] or 0 for each in stored) >= buffer or layer == len(ks) - 1:
            messages.append(stored)
            stored = []
    return messages + [stored] * bool(stored)


@pytest.mark.parametrize("seed", range(8))
def test_lags_merges_by_the_rule_of_the_buffer(seed: int) -> None:
    """k of each layer as without a buffer, which tests by hand have; messages by the rule in plain words."""
    rng = np.random.default_rng(seed)
    rows = [(int(n), float(t)) for n, t in zip(rng.integers(1, 4000, 12), rng.uniform(0, 90, 12), strict=True)]
    problem = problem_of(rows)
    alone = make_schedule(problem, "lags:50:0")
    ks = [None if bucket.whole else k_of(bucket) for bucket in alone.buckets]
    for buffer in (1, 40, 150, 10**8):
        found = make_schedule(problem, f"lags:50:{buffer}").buckets
        assert [list(bucket.gradients) for bucket in found] == buffered(ks, buffer)
        sent = [(bucket.codec.ks if isinstance(bucket.codec, TopK) else (None,)) for bucket in found]
        assert [k for layers in sent for k in layers or ()] == ks
        assert ratios(problem, Schedule(buckets=found)) == ratios(problem, alone)
    default, same = (make_schedule(problem, name) for name in ("lags", "lags:1000:2048"))
    assert default == same


@pytest.mark.parametrize("model", ["resnet50", "vgg16", "inception-v4"])
@pytest.mark.parametrize("cluster", ["v100-4x4-10gbe", "p102-1gbe"])
def test_merged_by_the_buffer_lags_is_no_slower_than_slgs(model: str, cluster: str) -> None:
    """The order of the paper's Table 2, with its ratio in every layer."""
    problem = make_problem(find_profile(model), find_cluster(cluster), 16)
    alone = [
        Bucket(bucket.gradients, FLAT, TopK.of_layers([max(1, n // 1000) for n in problem.layer_elements(bucket)]))
        for bucket in make_schedule(problem, "wfbp:layer").buckets
    ]
    merged = fill_buffers(problem, Schedule(buckets=tuple(alone)), 2048)
    slgs_us = iteration_us(problem, make_schedule(problem, "slgs:0.001"))
    assert iteration_us(problem, merged) < slgs_us < iteration_us(problem, make_schedule(problem, "optimal"))


@pytest.mark.parametrize("seed", range(6))
def test_sparsify_merges_layers_so_that_the_step_is_shortest(seed: int) -> None:
    """Against trying all partitions with the same k, selected or whole; buckets of whole layers stay dense."""
    rng = np.random.default_rng(seed)
    rows = [(int(n), float(t)) for n, t in zip(rng.integers(20, 6000, 7), rng.uniform(0, 90, 7), strict=True)]
    start_up_us = float(rng.uniform(0, 9))
    costs = {name: {"alpha_us": start_up_us, "beta_us_per_byte": 5e-4} for name in ("sparsify", "unpack")}
    ring = {"all_reduce": {"alpha_us": 60.0, "beta_us_per_byte": 0.015}}
    problem = problem_of(rows, collectives=ring, **costs if seed % 2 else {})
    by_layer = layer_wise(problem, np.array([50.0, 50.0, 1.0, 50.0, 50.0, 1.0, 1.0]), by_layer=True)
    ks = [k_of(bucket) if not bucket.whole else None for bucket in by_layer.buckets]
    assert {None} < set(ks)
    found = merge_layers(problem, by_layer)
    times_us = []
    for stops in reference.all_stops(7):
        buckets = []
        for members in reference.buckets_of(stops):
            whole = all(ks[index] is None for index in members)
            sent = None if whole else tuple(ks[index] or rows[index][0] for index in members)
            buckets.append(sparse_reference.Sent(members, sent))
        times_us.append(sparse_reference.step_us(problem, buckets))
    assert iteration_us(problem, found) == pytest.approx(min(times_us), rel=1e-12)
    sent_by_layer = [k for bucket in found.buckets for k in (isinstance(bucket.codec, TopK) and bucket.codec.ks) or ()]
    assert set(sent_by_layer) <= {*ks, *(n for n, _ in rows)}
    assert len(found.buckets) < 7


def test_layers_that_come_back_are_numbered() -> None:
    problem = problem_of(layers=["conv", "fc", "conv"])
    assert list(ratios(problem, make_schedule(problem, "lags:1000:0"))) == ["conv", "fc", "conv#2"]


def test_hitopk_by_hand() -> None:
    """One bucket: 5100 elements in shards of 2550, 25 selected; 2 · 25 · 8 bytes between nodes, twice that inside."""
    problem = two_links(sparsify=SelectionLine(alpha_us=7.0, beta_us_per_byte=0.001))
    one = Bucket((0, 1, 2), HITOPK, TopK(25))
    steps = (1.0 + 0.5 * 0.001 * 20400, 10.0 + 0.5 * 0.02 * 400, 1.0 + 0.5 * 0.001 * 800)
    select_us = 7.0 + 0.001 * 20400 / 2
    assert iteration_us(problem, Schedule(buckets=(one,))) == pytest.approx(280.0 + select_us + sum(steps) + 10.0)
    [record] = simulate(problem.profile, problem.cost.cluster, strategies=["hitopk"])
    assert record.iteration_us <= 280.0 + select_us + sum(steps) + 10.0


def test_what_hitopk_selects_is_timed_by_its_share_of_a_shard() -> None:
    """510 of a shard's 2550 elements are a fifth, halfway between the densities that were timed."""
    rows = ((0.1, 10.0, 0.0), (0.3, 30.0, 0.0))
    problem = two_links(sparsify=SelectionLine(alpha_us=0.0, beta_us_per_byte=0.0, by_density=rows))
    one = Bucket((0, 1, 2), HITOPK, TopK(510))
    assert spending(problem, one).before_us == pytest.approx(20.0)


@pytest.mark.parametrize("start_up_us", [0.0, 30.0])
def test_hitopk_is_merged_nearly_as_well_as_can_be(start_up_us: float) -> None:
    """Against all partitions; without a start-up of the selection it is exact."""
    rng = np.random.default_rng(3)
    worst = 1.0
    for _ in range(12):
        rows = [(int(n), float(t)) for n, t in zip(rng.integers(1, 9000, 7), rng.uniform(0, 60, 7), strict=True)]
        problem = two_links(rows, sparsify=SelectionLine(alpha_us=start_up_us, beta_us_per_byte=0.001))
        found_us = iteration_us(problem, make_schedule(problem, "hitopk:0.05"))
        best_us = min(iteration_us(problem, partition) for partition in partitions(problem, 0.05))
        worst = max(worst, found_us / best_us)
    assert worst <= (1.0 + 1e-9 if start_up_us == 0.0 else 1.05)


def partitions(problem: Problem, share: float) -> list[Schedule]:
    """All ways to cut the gradients into buckets."""
    result = []
    for cuts in itertools.product([False, True], repeat=problem.count - 1):
        bounds = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), problem.count]
        buckets = []
        for start, stop in itertools.pairwise(bounds):
            shard = -(-int(problem.numel[start:stop].sum()) // 2)
            k = min(shard, max(1, int(share * shard)))
            members = tuple(range(start, stop))
            buckets.append(Bucket(members, HITOPK, TopK(k)))
        result.append(Schedule(buckets=tuple(buckets)))
    return result


def test_on_one_rank_a_node_hitopk_is_flat() -> None:
    problem = problem_of([(1000, 50.0)])
    times = [iteration_us(problem, make_schedule(problem, name)) for name in ("hitopk:0.01", "slgs:0.01")]
    assert times[0] == pytest.approx(times[1])


def test_an_all_gather_is_taken_as_measured_or_from_the_link_that_the_all_reduce_implies() -> None:
    """A ring of 4 ranks with 60 + 0.015 · bytes has the link of the other tests."""
    fitted = {"alpha_us": 60.0, "beta_us_per_byte": 0.015}
    implied = problem_of(inter=None, collectives={"all_reduce": fitted})
    assert problem_us(implied) == pytest.approx(problem_us(problem_of()))
    measured = problem_of(samples={"all_gather": [[0, 5.0], [160, 9.0]]}, collectives={"all_gather": fitted})
    assert problem_us(measured) == pytest.approx(9.0)
    lined = problem_of(collectives={"inter/all_gather": fitted})
    assert problem_us(lined) == pytest.approx(60.0 + 0.015 * 160)


def problem_us(problem: Problem) -> float:
    """Time of SLGS's message of 5 elements."""
    [(resource, _, _, time_us)] = spending(problem, make_schedule(problem, "slgs").buckets[0]).messages
    assert resource == "network"
    return time_us


def test_a_link_that_is_missing_is_named_with_how_to_measure_it() -> None:
    problem = two_links()
    lacking = replace(problem.cost.cluster, intra=None)
    with pytest.raises(
        InputError, match=r"no cost for the links inside a node; .*`planner profile` on the ranks of one"
    ):
        make_schedule(make_problem(problem.profile, lacking), "hitopk")


def test_records_have_ratios_for_lags_only(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["slgs:0.01", "lags:100", "hitopk:0.01", "torus_2d"]
    run("simulate", "googlenet@v100-16x8-25gbe", "--strategy", ",".join(names), "--json")
    records = json.loads(capsys.readouterr().out)
    assert [record["strategy"] for record in records] == names
    assert [bool(record["ratios"]) for record in records] == [False, True, False, False]
    assert all(1.0 <= ratio <= 100.0 for ratio in records[1]["ratios"].values())
    assert all(record["message_bytes"] for record in records)


@pytest.mark.parametrize(
    "text",
    ["[0-2] all_reduce/library topk k=3", "[0-2] sparse/flat topk k=0"],
)
def test_the_verifier_knows_what_belongs_together(text: str) -> None:
    with pytest.raises(VerifyError, match="k ≥ 1 belongs to topk"):
        verify(parse_schedule(text), [0, 0, 0], accuracy="bounded")
    with pytest.raises(VerifyError, match="not exact"):
        verify(parse_schedule("[0-2] sparse/flat topk k=3"), [0, 0, 0])


def test_records_say_what_is_not_known_of_selected_elements() -> None:
    known = problem_of(sparsify={"alpha_us": 1.0, "beta_us_per_byte": 0.0})
    [record] = simulate(known.profile, known.cost.cluster, strategies=["slgs"])
    assert not record.extrapolated
    assert ";" not in record.cost_source
    guessed = problem_of(inter=None, collectives={"all_reduce": {"alpha_us": 60.0, "beta_us_per_byte": 0.015}})
    dense, sparse = simulate(guessed.profile, guessed.cost.cluster, strategies=["single", "slgs"])
    assert not dense.extrapolated
    assert sparse.extrapolated
    assert sparse.cost_source == (
        "fitted line; gathers follow from the all-reduce; selection free (no `sparsify` given)"
    )
