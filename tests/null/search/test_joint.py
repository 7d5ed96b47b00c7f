"""The passes `sparsify` and `joint`: against trying everything, and against what else is known."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import sparse_reference
from builders import add_matrix, cluster_document, make, problems, profile_document, random_problem
from forms import at_ratios
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.decide.strategies import make_schedule
from planner.documents.profile import parse_cluster
from planner.ir import Bucket, Dense, Schedule
from planner.model.codecs import LOSSY, LowRank, Steps, TopK, compression
from planner.model.codecs.topk import layer_bucket
from planner.model.compression import make_limits, ratio_limits
from planner.model.modes import simulate_schedule, step_us
from planner.model.problem import Problem, make_problem
from planner.model.schedule_text import parse_schedule
from planner.model.spending import spending
from planner.passes.joint import Joint, parse_densities
from planner.passes.sparsify import Sparsify
from planner.search.forms import FlatForms
from planner.search.labels import search
from planner.search.lags import apportion, layer_wise, merge_layers
from planner.search.tables import bucket_tables, flat_forms
from planner.verify import VerifyError, verify, verify_on
from runtime.errors import InputError
from runtime.plan.transports import FLAT

RATIOS = (4.0, 16.0, 64.0)
DENSITIES = "0.25|0.0625|0.015625"


@st.composite
def sparse_problems(draw: st.DrawFn, max_count: int = 5) -> Problem:
    """Layers of a weight and perhaps a bias, on a coarse grid of numbers; with and without selection costs."""
    count = draw(st.integers(1, max_count))
    numel = st.one_of(st.integers(1, 80).map(lambda n: 64 * n), st.sampled_from([0, 1, 3, 64]))
    rows = [(draw(numel), draw(st.integers(0, 8)) * 10.0) for _ in range(count)]
    layers = [f"l{draw(st.integers(0, 2))}" for _ in range(count)]
    document = profile_document(rows, layers=layers)
    for index, gradient in enumerate(document["compute"]["gradients"]):
        gradient["name"] = f"{layers[index]}.{draw(st.sampled_from(['bias', 'weight']))}_{index}"
        if draw(st.booleans()):
            add_matrix(gradient)
    line = st.sampled_from([None, (0.0, 0.001), (5.0, 0.0), (20.0, 0.002)])
    fields = {
        field: {"alpha_us": given_line[0], "beta_us_per_byte": given_line[1]}
        for field in ("sparsify", "unpack")
        if (given_line := draw(line))
    }
    for of_field in fields.values():
        if draw(st.booleans()):
            of_field["by_density"] = [[0.02, 3.0, 0.001], [0.3, draw(st.sampled_from([5.0, 30.0])), 0.003]]
    link = {"alpha_us": draw(st.sampled_from([1.0, 20.0])), "beta_us_per_byte": draw(st.sampled_from([0.001, 0.02]))}
    fitted = (draw(st.integers(1, 12)) * 10.0, draw(st.sampled_from([0.002, 0.01, 0.05])))
    return make(document, cluster_document(fitted, inter=link, **fields))


def sent(schedule: Schedule) -> list[sparse_reference.Sent]:
    """A schedule as the reference has it."""
    return [
        sparse_reference.Sent(range(bucket.gradients[0], bucket.gradients[-1] + 1), ks_of(bucket))
        for bucket in schedule.buckets
    ]


def ks_of(bucket: Bucket) -> tuple[int, ...] | None:
    return bucket.codec.ks if isinstance(bucket.codec, TopK) else None


def k_of(bucket: Bucket) -> int | None:
    return bucket.codec.k if isinstance(bucket.codec, TopK) else None


def exact_of(problem: Problem) -> Schedule:
    return make_schedule(problem, "optimal")


@given(sparse_problems(), st.sampled_from(["none", "", "none|l0.*"]))
def test_joint_finds_what_trying_everything_finds(problem: Problem, protect: str) -> None:
    """The shortest step on the grid of densities or, off the grid, Eq. 19's; of equals the one that comes first."""
    names = [gradient.name for gradient in problem.profile.compute.gradients]
    protect = protect if any(name.startswith("l0.") for name in names) else protect.partition("|")[0]
    limits = ratio_limits(problem, 64.0, protect)
    frontier = Joint(max_ratio=64.0, protect=protect, densities=DENSITIES, compress="sparse").frontier(
        exact_of(problem), problem
    )
    found = frontier.best
    best_us, best = sparse_reference.best(problem, limits.tolist(), RATIOS)
    assert found.iteration_us == pytest.approx(sparse_reference.step_us(problem, sent(found.schedule)), rel=1e-12)
    eq19_us = step_us(problem, layer_wise(problem, limits, by_layer=True))
    assert found.iteration_us <= min(best_us, eq19_us) * (1 + 1e-12)
    order = sparse_reference.order(problem, sent(found.schedule))
    if found.iteration_us >= best_us * (1 - 1e-12):
        assert order <= best
    if found.form.ratio > 1.0:
        assert order[0] <= found.form.ratio


def test_joint_at_six_gradients_and_three_densities() -> None:
    """The labels alone, without what Eq. 19 adds, against 12,500 schedules each."""
    rng = np.random.default_rng(5)
    gained = 0
    for _ in range(4):
        rows = [(int(n) * 64, float(t)) for n, t in zip(rng.integers(1, 90, 6), rng.uniform(0, 60, 6), strict=True)]
        lines = {
            name: {"alpha_us": float(rng.uniform(0, 9)), "beta_us_per_byte": 5e-4} for name in ("sparsify", "unpack")
        }
        link = {"alpha_us": 9.0, "beta_us_per_byte": 0.004}
        problem = make(profile_document(rows), cluster_document((60.0, 0.01), inter=link, **lines))
        best_us, best = sparse_reference.best(problem, [64.0] * 6, RATIOS)
        found = Joint(max_ratio=64.0, protect="none", densities=DENSITIES, compress="sparse").frontier(
            exact_of(problem), problem
        )
        assert found.points[-1].exact
        assert found.best.iteration_us == pytest.approx(best_us, rel=1e-12)
        assert sparse_reference.order(problem, sent(found.best.schedule)) == best
        assert found.bound_us == pytest.approx(best_us, rel=1e-12)
        gained += step_us(problem, exact_of(problem)) > 1.02 * best_us and best[2] > 1
    assert gained >= 2


LOW_RANK = {
    name: {part: {"alpha_us": 1.0 * rank + place, "beta_us_per_byte": 2e-4 * rank} for place, part in enumerate(
        ("pack", "project", "subtract", "unpack")
    )}
    for name, rank in (("1", 1), ("4", 4))
}  # fmt: skip


@given(problems(max_count=4, monotone=True, matrices=True))
@settings(max_examples=30)
def test_products_and_merging_are_decided_as_by_trying_everything(base: Problem) -> None:
    """Every schedule of dense buckets and those of rank 1 and 2."""
    cluster = replace(base.cost.cluster, low_rank=parse_cluster(cluster_document(low_rank=LOW_RANK)).low_rank)
    problem = make_problem(base.profile, cluster)
    every_us = []
    for stops in (
        [*cut, problem.count]
        for size in range(problem.count)
        for cut in itertools.combinations(range(1, problem.count), size)
    ):
        places = list(itertools.pairwise([0, *stops]))
        for ranks in itertools.product((None, 1, 2), repeat=len(places)):
            buckets = [
                Bucket(tuple(range(*place)), codec=Dense() if rank is None else LowRank(rank))
                for place, rank in zip(places, ranks, strict=True)
            ]
            every_us.append(step_us(problem, Schedule(buckets=tuple(buckets))))
    found = Joint(compress="lowrank", max_rank=2).frontier(exact_of(problem), problem)
    assert found.best.iteration_us == pytest.approx(min(every_us), rel=1e-12)
    assert found.bound_us <= min(every_us) * (1 + 1e-12)
    assert [point.form.codec.point_fields().get("rank") for point in found.points] == [None, 2, 1]


def test_of_equal_steps_the_one_that_leaves_less_out_is_best() -> None:
    problem = make(profile_document([(6400, 50.0)] * 3), cluster_document((10.0, 0.01)))
    forms = FlatForms(problem, flat_forms(at_ratios(4.0, 16.0)), make_limits(problem, 64.0, "none"))
    least_first = [((3, 0),), ((3, 1),), ((1, 2), (3, 0)), ((2, 2), (3, 0)), ((3, 2),), ((1, 2), (3, 2))]
    assert sorted(reversed(least_first), key=forms.rank) == least_first


def test_what_is_left_to_unpack_counts_though_all_arrives_in_time() -> None:
    """Two sparse buckets come sooner than one of both gradients, and are unpacked twice behind a long backward."""
    document = profile_document([(640_001, 50.0), (640_001, 50.0), (1, 5000.0)], layers=["a", "a", "b"])
    for index, gradient in enumerate(document["compute"]["gradients"]):
        gradient["name"] = f"{gradient['layer']}.weight_{index}"
    link, unpack = {"alpha_us": 1.0, "beta_us_per_byte": 0.001}, {"alpha_us": 200.0, "beta_us_per_byte": 0.0}
    problem = make(document, cluster_document((10.0, 0.01), inter=link, unpack=unpack))
    tables = bucket_tables(problem, flat_forms(at_ratios(64.0)), make_limits(problem, 64.0, "none"), np.arange(4))
    found = search(tables, 2, math.inf)
    assert found is not None
    assert (found.stops, found.forms, found.exact) == ((2, 3), (1, 0), True)
    assert found.end_us == pytest.approx(problem.compute_end_us + 200.0)


@given(sparse_problems(max_count=7))
def test_tables_hold_the_buckets_that_plans_get(problem: Problem) -> None:
    limits = make_limits(problem, 64.0)
    places = np.arange(problem.count + 1)
    steps = Steps(RATIOS, 3)
    ladder = flat_forms([form for codec in LOSSY for form in codec.forms(problem, limits, steps)])
    forms = FlatForms(problem, ladder, limits)
    tables = bucket_tables(problem, forms.forms, limits, places)
    for start, stop in itertools.combinations(range(problem.count + 1), 2):
        for number, form in enumerate(forms.forms):
            cost_us = tables.cost_us[number, start, stop]
            if (known := forms.known(start, stop, number)) is None:
                assert math.isinf(cost_us)
                ratios = limits.ratios.tolist()
                assert (
                    not isinstance(form.codec, TopK)
                    or sparse_reference.sparse(problem, ratios, range(start, stop), form.ratio) is None
                )
                continue
            bucket, _ = known
            spent = spending(problem, bucket)
            assert cost_us == pytest.approx(sum(message.time_us for message in spent.messages))
            assert tables.select_us[number, start, stop] == pytest.approx(spent.before_us)
            assert tables.unpack_us[number, start, stop] == pytest.approx(spent.after_us)
            _, densities = compression(problem, [bucket])
            assert tables.densities[number, start, stop] == pytest.approx(-densities)


@given(data=st.data())
def test_never_slower_than_what_is_known_within_the_limits(data: st.DataObject) -> None:
    """Contention, several dtypes and jagged costs included."""
    problem = data.draw(problems(max_count=8, mixed=data.draw(st.booleans()), contention=data.draw(st.booleans())))
    max_ratio = data.draw(st.sampled_from([1.0, 3.0, 64.0, 1000.0]))
    limits = ratio_limits(problem, max_ratio, "none")
    exact = exact_of(problem)
    joint = Joint(max_ratio=max_ratio, protect="none", compress="sparse")
    result = joint.frontier(exact, problem).best.schedule
    verify_on(problem, result, "bounded")
    known = [exact]
    # At 1 everything is protected, so that no bucket is sparse; gradients without elements travel dense.
    if max_ratio > 1.0 and problem.numel.all():
        known.append(make_schedule(problem, f"lags:{max_ratio}"))
    if problem.ranks > 1:
        whole = layer_bucket(problem, limits, 0, problem.count, max_ratio)  # SLGS with a share of each layer
        known += [Schedule(buckets=(whole,))] if whole else []
    assert step_us(problem, result) <= min(step_us(problem, other) for other in known) * (1 + 1e-12)
    assert all(compression(problem, [bucket])[0] <= max_ratio * (1 + 1e-12) for bucket in result.buckets)
    assert max_ratio > 1.0 or all(not bucket.transport.sparse for bucket in result.buckets)


@pytest.mark.parametrize(
    ("contention", "unpack_us"),
    [(None, 0.0), ((1.2, 1.5), 0.0), pytest.param(None, 30.0, marks=pytest.mark.long), ((1.2, 1.5), 30.0)],
)
def test_large_problems_beat_what_is_known_and_come_out_the_same(contention: Any, unpack_us: float) -> None:
    rng = np.random.default_rng(11)
    for count in (40, 220) if contention is None and unpack_us else (40,):
        small = random_problem(rng, count, "line", contention=contention)
        fields = {
            "sparsify": {"alpha_us": 20.0, "beta_us_per_byte": 1e-5},
            "unpack": {"alpha_us": unpack_us, "beta_us_per_byte": 0.0},
        }
        rows = [(gradient.numel, gradient.backward_us) for gradient in small.profile.compute.gradients]
        link = {"alpha_us": 30.0, "beta_us_per_byte": 1e-3}
        problem = make(profile_document(rows), cluster_document((300.0, 0.01), None, contention, inter=link, **fields))
        exact = exact_of(problem)
        result = Joint(compress="sparse").frontier(exact, problem).best.schedule
        known = [exact, make_schedule(problem, "lags")]
        whole = layer_bucket(problem, ratio_limits(problem), 0, count, 1000.0)
        known += [Schedule(buckets=(whole,))] if whole else []
        assert step_us(problem, result) <= min(step_us(problem, other) for other in known) * (1 + 1e-12)
        copy = make(profile_document(rows), cluster_document((300.0, 0.01), None, contention, inter=link, **fields))
        assert str(Joint(compress="sparse").frontier(exact_of(copy), copy).best.schedule) == str(result)


@given(sparse_problems(), st.sampled_from([1.5, 7.0, 50.0]))
def test_equation_19_by_trying_every_k(problem: Problem, max_ratio: float) -> None:
    """Largest k whose gather, selection and unpacking hide behind the next layer's backward; dense where that hides."""
    gradients = problem.profile.compute.gradients
    runs = problem.layer_runs
    schedule = layer_wise(problem, np.full(problem.count, max_ratio))
    assert [bucket.gradients for bucket in schedule.buckets] == [tuple(range(*run)) for run in runs]
    for bucket, following in zip(schedule.buckets, [*runs[1:], (0, 0)], strict=True):
        budget_us = math.fsum(gradient.backward_us for gradient in gradients[slice(*following)])
        numel = sum(gradients[index].numel for index in bucket.gradients)
        dense_us = float(problem.range_cost_us(bucket.gradients[0], bucket.gradients[-1] + 1))
        if numel == 0 or dense_us <= budget_us:
            assert bucket.whole
            continue

        def spent_us(k: int, members: tuple[int, ...] = bucket.gradients) -> float:
            return sum(sparse_reference.line_us(problem, field, members, k) for field in ("sparsify", "unpack"))

        hidden = [k for k in range(1, numel + 1) if sparse_reference.gather_us(problem, k) + spent_us(k) <= budget_us]
        assert k_of(bucket) == max([math.ceil(numel / max_ratio), *hidden[-1:]])


@given(sparse_problems(), st.sampled_from(["", "none", "*.weight*"]))
def test_sparsify_keeps_to_limits_and_is_the_strategy_without_protection(problem: Problem, protect: str) -> None:
    protect = protect if any("weight" in gradient.name for gradient in problem.profile.compute.gradients) else ""
    limits = ratio_limits(problem, 20.0, protect)
    found = layer_wise(problem, limits, by_layer=True)
    merged = merge_layers(problem, found)
    verify_on(problem, merged, "bounded")
    assert step_us(problem, merged) <= step_us(problem, found) * (1 + 1e-12)
    verify_on(problem, found, "bounded")
    for bucket in found.buckets:
        assert compression(problem, [bucket])[0] <= 20.0 * (1 + 1e-12)
        assert bucket.whole or all(limits[index] > 1.0 for index in bucket.gradients)
    if protect == "none" and all(gradient.numel for gradient in problem.profile.compute.gradients):
        strategy = make_schedule(problem, "lags:20:0")
        apart = [len(problem.layer_elements(bucket)) > 1 for bucket in strategy.buckets]
        assert [k_of(b) for b in found.buckets] == [k_of(b) for b in strategy.buckets] or any(apart)
    start = exact_of(problem)
    result = Sparsify(max_ratio=20.0, protect=protect).apply(start, problem).schedule
    assert result == (merged if step_us(problem, merged) < step_us(problem, start) * (1 - 1e-12) else start)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 300), st.sampled_from([1.0, 4.0, 100.0]))
def test_shares_of_k_keep_to_the_limit(elements: list[int], k: int, limit: float) -> None:
    k = min(k, sum(elements))
    shares = apportion(k, elements, limit)
    assert sum(shares) >= k
    assert all(math.ceil(numel / limit) <= share <= numel for share, numel in zip(shares, elements, strict=True))
    assert limit < 100.0 or k < sum(elements) or shares == elements


@given(data=st.data())
def test_steps_of_sparse_buckets_are_as_long_with_and_without_a_timeline(data: st.DataObject) -> None:
    base = data.draw(sparse_problems(max_count=6))
    cluster = base.cost.cluster
    factors = data.draw(st.sampled_from([None, (1.2, 1.5)]))
    rows = [(gradient.numel, gradient.backward_us) for gradient in base.profile.compute.gradients]
    lines = {
        field: {key: value for key, value in asdict(line).items() if value is not None}
        for field in ("inter", "sparsify", "unpack")
        if (line := getattr(cluster, field))
    }
    document = cluster_document((50.0, 0.01), None, factors, **lines)
    if factors and data.draw(st.booleans()):
        document["contention"]["by_size"] = [[64, 1.5, 2.0], [9999, 1.2, 1.5]]
        if data.draw(st.booleans()):
            document["contention"]["gathers_by_size"] = [[256, 1.3, 4.0], [5000, 1.1, 1.2]]
    problem = make(profile_document(rows), document)
    buckets, start = [], 0
    while start < problem.count:
        stop = data.draw(st.integers(start + 1, problem.count))
        numel = int(problem.numel[start:stop].sum())
        k = data.draw(st.one_of(st.none(), st.integers(1, numel))) if numel else None
        members = tuple(range(start, stop))
        buckets.append(Bucket(members) if k is None else Bucket(members, FLAT, TopK(k)))
        start = stop
    schedule = Schedule(buckets=tuple(buckets))
    assert step_us(problem, schedule) == pytest.approx(simulate_schedule(problem, schedule).iteration_us, rel=1e-12)


def named(kinds: dict[str, str] | None = None) -> Problem:
    """A few layers as models have them."""
    names = ["fc.bias", "fc.weight", "norm1.weight", "down.1.weight", "down.1.bias", "conv.weight", "rnn.weight_hh_l0",
             "rnn.bias_hh_l0", "embed.weight", "scale"]  # fmt: skip
    numels = [10, 1000, 64, 64, 64, 5000, 4000, 80, 9000, 1]
    document = profile_document(
        [(numel, 10.0) for numel in numels], layers=[name.rpartition(".")[0] or name for name in names]
    )
    for gradient, name in zip(document["compute"]["gradients"], names, strict=True):
        gradient["name"] = name
    if kinds:
        document["layers"] = [
            {"name": name, "kind": kind, "flops": 1.0, "activation_bytes": 1.0} for name, kind in kinds.items()
        ]
    return make(document, cluster_document())


def test_limits_by_kind_and_what_is_protected() -> None:
    assert ratio_limits(named()).tolist() == [1, 1000, 1, 1, 1, 1000, 1000, 1, 1000, 1000]
    told = named({"rnn": "recurrent", "embed": "embedding", "scale": "norm", "down.1": "conv"})
    assert ratio_limits(told).tolist() == [1, 1000, 1, 1000, 1, 1000, 250, 1, 250, 1]
    assert ratio_limits(told, 50.0, "none").tolist() == [50.0] * 10
    assert ratio_limits(told, 50.0, "none|fc.*|conv.weight").tolist() == [1, 1, *[50] * 3, 1, *[50] * 4]
    assert ratio_limits(told, 2.0, "embed.*").tolist() == [1, 2, 1, 2, 1, 2, 2, 1, 1, 1]


def test_wrong_limits() -> None:
    with pytest.raises(InputError, match=r"--max-ratio: found 0.5, expected a number from 1 \(nothing is left out\)"):
        ratio_limits(named(), 0.5)
    with pytest.raises(InputError, match=r"--protect: found 'fc.wieght', which is the name of no gradient; expected"):
        ratio_limits(named(), None, "fc.bias|fc.wieght")
    for text in ("", "0", "1.5", "-0.1", "0.1|nan", "0.1;0.2", "|".join(f"0.{n:03}" for n in range(1, 40))):
        with pytest.raises(InputError, match="shares of elements above 0 and up to 1, separated by"):
            parse_densities(text)
    assert parse_densities("0.5|1|0.25|0.5") == (2.0, 4.0)


def test_a_layer_that_is_protected_in_part_is_cut_there() -> None:
    problem = named()
    limits = ratio_limits(problem)
    assert layer_bucket(problem, limits, 0, 2, 10.0) is None
    assert str(layer_bucket(problem, limits, 1, 7, 10.0)) == "[1-6] sparse/flat topk k=1192 ks=100,64,128,500,400"
    assert layer_bucket(problem, limits, 2, 5, 10.0) is None  # nothing would be left out
    assert str(layer_bucket(problem, limits, 2, 5, 1.0)) == "[2-4] all_reduce/library none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[0-2] sparse/flat topk k=3 ks=1,1", "numbers of at least 1 whose sum is k"),
        ("[0-2] sparse/flat topk k=3 ks=3,0", "numbers of at least 1 whose sum is k"),
        ("[0-2] sparse/flat topk k=3 ks=1,1,1", "found 3 ks for 2 runs of layers"),
        ("[0-2] sparse/flat topk k=16 ks=5,11", "selects 11 of the 10 elements of run 1"),
    ],
)
def test_the_verifier_checks_what_layers_send(text: str, message: str) -> None:
    assert parse_schedule(text) == parse_schedule(str(parse_schedule(text)))
    with pytest.raises(VerifyError, match=message):
        verify(parse_schedule(text), [0, 0, 0], accuracy="bounded", elements=lambda bucket: [20, 10])
    with pytest.raises(VerifyError, match="not exact"):
        verify(parse_schedule(text), [0, 0, 0])
