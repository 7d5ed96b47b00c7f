"""`optimize` where lossy plans are allowed: when they are taken, what they carry, and what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders import (
    add_matrix,
    cluster_document,
    line_problem,
    make,
    printed,
    problems,
    profile_document,
    usual_document,
    usual_profile,
)
from hypothesis import given, settings

from planner import optimize, simulate
from planner.decide.defaults import MORE
from planner.decide.strategies import make_schedule
from planner.documents.profile import parse_cluster, parse_profile
from planner.emit.lower import lower
from planner.ir import GAIN
from planner.model.codecs import TopK, Wire, codec_of
from planner.model.codecs.topk import layer_bucket
from planner.model.compression import ratio_limits
from planner.model.problem import Problem
from planner.passes.joint import Joint
from planner.report.tables import accuracy_lines
from runtime.errors import InputError
from runtime.plan import Plan, parse_plan
from runtime.sparse.compressed import layer_runs
from runtime.sparse.compressors import make_compressor
from runtime.sparse.compressors.sparse import SparseCompressor
from runtime.sparse.compressors.wire import WireCompressor


def slow(**fields: Any) -> Any:
    """A network on which the usual profile is sent for long."""
    link = {"alpha_us": 20.0, "beta_us_per_byte": 0.01}
    return parse_cluster(cluster_document((200.0, 0.05), inter=link, **fields))


def written(plan: Plan) -> str:
    return json.dumps(plan.to_document())


@settings(max_examples=25)
@given(problems(max_count=7, mixed=True, contention=True))
def test_any_plan_is_sound_and_no_slower(problem: Problem) -> None:
    """Lossy only where it wins by enough; reads back; equal inputs give equal bytes; `exact` never selects."""
    accuracy: Any = "bounded"
    exact = optimize(problem.profile, problem.cost.cluster)
    plan = optimize(problem.profile, problem.cost.cluster, accuracy=accuracy, protect="none")
    assert exact.accuracy == "exact"
    assert exact.frontier is None
    assert {bucket.compressor.name for bucket in exact.buckets} == {"none"}
    assert parse_plan(json.loads(written(plan))) == plan
    assert written(optimize(problem.profile, problem.cost.cluster, accuracy=accuracy, protect="none")) == written(plan)
    assert plan.predicted is not None
    assert exact.predicted is not None
    assert plan.certificate is not None
    assert plan.certificate.lower_bound_us <= plan.predicted.iteration_us
    if plan.accuracy == "exact":
        assert plan.buckets == exact.buckets
        assert plan.predicted == exact.predicted
        assert next(note for note in plan.notes if note not in exact.notes).startswith(f"{accuracy} was allowed, but")
        return
    assert plan.accuracy == "bounded"
    assert plan.predicted.iteration_us <= (1 - GAIN) * exact.predicted.iteration_us
    assert plan.fallback is not None
    assert plan.fallback.buckets == exact.buckets
    assert {name: of for name, of in (plan.alternatives or {}).items() if name != MORE} == {"exact": plan.fallback}
    assert plan.baselines == exact.baselines
    assert plan.gradients == exact.gradients


def test_exact_plans_are_what_they_were() -> None:
    """Nothing of lossy plans is in a plan that was not asked for them."""
    document = optimize(usual_profile(), slow()).to_document()
    assert not {"frontier", "fallback", "alternatives"} & set(document)
    assert all(set(bucket["compressor"]) == {"name"} for bucket in document["buckets"])


def test_a_lossy_plan_by_layer() -> None:
    plan = optimize(usual_profile(), slow(), accuracy="bounded", compress="sparse", max_ratio=100.0)
    gradients = usual_profile().compute.gradients
    numel = {gradient.name: gradient.numel for gradient in gradients}
    assert plan.accuracy == "bounded"
    for bucket in plan.buckets:
        k = bucket.compressor.k
        if bucket.collective == "all_reduce":
            assert (bucket.compressor.name, k) == ("none", None)
            continue
        assert (bucket.collective, bucket.algorithm) == ("sparse", "flat")
        assert (bucket.compressor.name, bucket.compressor.selector) == ("topk", "exact")
        assert k is not None
        assert list(k) == list(bucket.gradients)  # each gradient of this profile is a layer by its name
        assert all(-(-numel[name] // 100) <= count <= numel[name] for name, count in k.items())
    assert any(bucket.compressor.k for bucket in plan.buckets)
    notes = " ".join(plan.notes)
    assert "shorter than the best exact plan, which is the fallback" in notes
    assert "of values and indices from each rank" in notes
    assert "step by what is allowed at the most: dense " in notes
    assert "selection is taken as free, for the cluster has no `sparsify` cost" in notes
    costs = slow(sparsify={"alpha_us": 1.0, "beta_us_per_byte": 0.0})
    known = optimize(usual_profile(), costs, accuracy="bounded", compress="sparse")
    assert known.accuracy == "bounded"
    assert "taken as free" not in " ".join(known.notes)


def test_the_frontier_goes_down() -> None:
    plan = optimize(usual_profile(), slow(), accuracy="bounded", compress="sparse", max_ratio=100.0)
    assert plan.frontier is not None
    assert [point.max_ratio for point in plan.frontier] == [1.0, 4.0, 16.0, 64.0, 100.0]
    times_us = [point.iteration_us for point in plan.frontier]
    assert times_us == sorted(times_us, reverse=True)
    assert plan.predicted is not None
    assert plan.fallback is not None
    assert plan.fallback.predicted is not None
    assert times_us[0] == plan.fallback.predicted.iteration_us
    assert times_us[-1] <= plan.predicted.iteration_us <= times_us[-1] * (1 + GAIN)
    assert (plan.frontier[0].sparse_buckets, plan.frontier[0].sent_share) == (0, 1.0)
    assert 0.0 < plan.frontier[-1].sent_share < 0.1
    text = printed(plan)
    assert "speed over compression" in text
    assert "of those looked at" in text
    assert "sparse/flat topk" in text


@pytest.mark.parametrize(("beta", "accuracy"), [(0.0101, "exact"), (0.02, "bounded")])
def test_a_lossy_plan_has_to_win_by_two_percent(beta: float, accuracy: str) -> None:
    """One gradient of 4 kB beside 10 ms of backward; its all-reduce is all that is exposed."""
    link = {"alpha_us": 0.0, "beta_us_per_byte": 1e-6}
    sparsify = {"alpha_us": 0.0, "beta_us_per_byte": 0.01}
    rows = [(100_000, 9890.0)]
    cluster = parse_cluster(cluster_document((0.0, beta), inter=link, sparsify=sparsify))
    problem = make(profile_document(rows), cluster_document())
    plan = optimize(problem.profile, cluster, accuracy="bounded", compress="sparse")
    assert plan.accuracy == accuracy
    if accuracy == "bounded":
        return
    assert plan.alternatives is not None
    bounded = plan.alternatives["bounded"]
    assert bounded.predicted is not None
    assert plan.predicted is not None
    gain = 1.0 - bounded.predicted.iteration_us / plan.predicted.iteration_us
    assert 0.0 < gain < GAIN
    assert plan.notes[-1] == (
        f"bounded was allowed, but compression would make the step {gain:.2%} shorter, and has to win 2%: the plan is "
        f"exact"
    )
    assert plan.fallback is None
    lines = accuracy_lines(plan)
    assert lines[0].startswith("exact    1 bucket, no compression")
    assert lines[1].startswith("bounded  1 bucket, 1 of them sparse, ")


def test_on_one_rank_nothing_is_compressed() -> None:
    plan = optimize(usual_profile(), slow(nodes=1), accuracy="bounded")
    assert plan.accuracy == "exact"
    assert len(plan.frontier or ()) == 1


def test_passes_by_name() -> None:
    """Exact ones run first; a lossy one that is named takes the place of `joint`."""
    seen: list[str] = []
    plan = optimize(
        usual_profile(),
        slow(),
        accuracy="bounded",
        passes="sparsify{max_ratio=50},merge",
        after_pass=lambda name, schedule, seconds: seen.append(name),
    )
    assert seen == ["merge", "sparsify"]
    assert plan.accuracy == "bounded"
    assert [len(bucket.gradients) for bucket in plan.buckets] == [3, 1, 2]
    assert "decided by sparsify" in ((plan.certificate and plan.certificate.note) or "")
    assert [point.max_ratio for point in plan.frontier or ()][-1] == 50.0
    own = optimize(
        usual_profile(), slow(), accuracy="bounded", passes="joint{max_ratio=20,compress=sparse}", max_ratio=500.0
    )
    assert [point.max_ratio for point in own.frontier or ()] == [1.0, 4.0, 16.0, 20.0]


@pytest.mark.parametrize("optimizer", [None, {"name": "SGD", "adaptive": False}, {"name": "AdamW", "adaptive": True}])
def test_alone_narrow_buckets_are_planned_and_more_compression_is_named(optimizer: dict[str, Any] | None) -> None:
    document = usual_document()
    if optimizer is not None:
        document["compute"]["optimizer"] = optimizer
    for gradient in document["compute"]["gradients"]:
        add_matrix(gradient)
    profile = parse_profile(document)
    plan = optimize(profile, slow(), accuracy="bounded")
    assert plan.accuracy == "bounded"
    assert {bucket.compressor.name for bucket in plan.buckets} <= {"none", "wire"}
    assert not any(point.sparse_buckets or point.low_rank_buckets for point in plan.frontier or ())
    every = optimize(profile, slow(), accuracy="bounded", compress="all")
    assert {bucket.compressor.name for bucket in every.buckets} & {"topk", "powersgd"}
    assert (plan.alternatives or {})[MORE].buckets == every.buckets
    assert MORE not in (every.alternatives or {})
    [note] = [note for note in plan.notes if note.startswith("--compress all would take")]
    assert ("selected elements train a worse model with AdamW" in note) == bool(optimizer and optimizer["adaptive"])
    assert accuracy_lines(plan)[2].startswith("bounded, --compress all  ")
    assert optimize(profile, slow(), accuracy="bounded", compress="none").accuracy == "exact"


@pytest.mark.parametrize(("option", "needed"), [("max_ratio", "sparse"), ("max_rank", "lowrank")])
def test_a_limit_of_what_is_not_planned_is_refused(option: str, needed: str) -> None:
    limit: dict[str, Any] = {option: 4}
    for compress in (None, "wire", "none"):
        with pytest.raises(InputError, match=rf"expected {needed} or all: add --compress {needed}"):
            optimize(usual_profile(), slow(), accuracy="bounded", compress=compress, **limit)
    assert optimize(usual_profile(), slow(), accuracy="bounded", compress=needed, **limit).frontier


def test_an_unknown_way_to_compress_is_refused() -> None:
    profile = usual_profile()
    with pytest.raises(InputError, match="--compress: found 'zip', expected one of all, wire, lowrank, sparse, none"):
        optimize(profile, slow(), accuracy="bounded", compress="zip")


def test_the_least_compression_within_two_percent_is_taken() -> None:
    """On a slow network 8 bits, and 16 where that suffices; of two formats of 8 bits the one that loses less."""
    rows = [(100_000, 400.0)] * 6
    taken = {}
    for beta in (1e-7, 0.0008, 0.05):
        link = {"alpha_us": 5.0, "beta_us_per_byte": beta}
        cluster = parse_cluster(cluster_document((10.0, 2.0 * beta), inter=link))
        plan = optimize(parse_profile(profile_document(rows)), cluster, accuracy="bounded", compress="wire")
        assert plan.predicted is not None
        shortest_us = min(point.iteration_us for point in plan.frontier or ())
        first = next(point for point in plan.frontier or () if point.iteration_us <= shortest_us * (1 + GAIN))
        assert plan.accuracy == "exact" or plan.predicted.iteration_us == first.iteration_us
        taken[beta] = {bucket.compressor.dtype for bucket in plan.buckets}
    assert taken[1e-7] == {None}
    assert "float16" in taken[0.0008]
    assert taken[0.05] == {"int8"}


def test_products_are_planned_where_matrices_are_known() -> None:
    """Where they are asked for, at the largest rank within two percent; without shapes not."""
    document = profile_document([(1_000_000, 9000.0), (1000, 10.0)] * 3)
    without = parse_profile(document)
    for gradient in document["compute"]["gradients"]:
        add_matrix(gradient)
    profile = parse_profile(document)
    plan = optimize(profile, slow(), accuracy="bounded", compress="wire,lowrank")
    assert 4 in {bucket.compressor.rank for bucket in plan.buckets}
    assert any("of factors" in note for note in plan.notes)
    assert any("nothing watches that" in note and "--compress wire leaves it out" in note for note in plan.notes)
    assert any("making factors is taken to be free" in note for note in plan.notes)
    for of, options in ((profile, {"compress": "all", "protect": "*"}), (without, {"compress": "all"})):
        assert not any(b.compressor.rank for b in optimize(of, slow(), accuracy="bounded", **options).buckets)
    both = optimize(profile, slow(), accuracy="bounded", compress="wire,lowrank", max_rank=1)
    assert {bucket.compressor.rank for bucket in both.buckets} & {1, 2, 4} == {1}
    assert optimize(profile, slow(), accuracy="bounded", passes="merge,joint{compress=lowrank,max_rank=2}").frontier
    with pytest.raises(InputError, match="--max-rank: found 65, expected a whole number from 1 to 64"):
        optimize(profile, slow(), accuracy="bounded", max_rank=65)
    with pytest.raises(InputError, match="--max-rank: found 0, expected"):
        optimize(profile, slow(), accuracy="bounded", max_rank=0)
    with pytest.raises(InputError, match="the strategy lowrank: found no gradient that is a matrix"):
        simulate(without, slow(), strategies=["lowrank"])


def test_that_there_is_nothing_to_gain_is_said_of_exact_plans_alone() -> None:
    """One gradient: DDP's bucket is the plan's, and in fewer bytes it takes a fraction of the time."""
    profile = parse_profile(profile_document([(1_000_000, 9000.0)]))
    plan = optimize(profile, slow(), accuracy="bounded", compress="wire")
    assert plan.accuracy == "bounded"
    [note] = [note for note in plan.notes if "nothing to gain" in note]
    assert note.startswith("exact plans have nothing to gain: the step is predicted 0.0% shorter")


def test_sixteen_bits_are_not_narrowed_to_sixteen() -> None:
    """Not even where two shots are timed shorter than the all-reduce."""
    document = usual_document()
    for gradient in document["compute"]["gradients"]:
        gradient["dtype"] = "bfloat16"
    samples = {"all_reduce": [[1, 20_000.0], [1e8, 20_000.0]], "two_shot": [[1, 9_000.0], [1e8, 9_000.0]]}
    machines = parse_cluster({"schema": "planner.cluster/1", "nodes": 4, "samples": samples})
    plan = optimize(parse_profile(document), machines, accuracy="bounded", compress="wire")
    assert {bucket.compressor.dtype for bucket in plan.buckets} <= {None, "int8", "float8_e4m3fn"}


def test_encoding_is_free_only_where_nobody_says_what_it_costs() -> None:
    dear = {"bfloat16": {"alpha_us": 10.0, "beta_us_per_byte": 0.01}}
    plan = optimize(usual_profile(), slow(encode=dear, decode=dear), accuracy="bounded", compress="wire")
    assert any("int8" in str(bucket.compressor.dtype) for bucket in plan.buckets)
    assert any("encoding is taken to be free" in note for note in plan.notes)


def test_a_cluster_that_knows_its_torus_alone_gets_bounded_plans() -> None:
    """Without what halves between nodes cost, narrow buckets go through all ranks."""
    line = [[1024, 60.0], [1e8, 1e6]]
    inside = [[1024, 5.0], [1e8, 5e4]]
    samples = {"all_reduce": line, "inter/all_reduce": line, "intra/reduce_scatter": inside, "intra/all_gather": inside}
    document = {"schema": "planner.cluster/1", "nodes": 4, "ranks_per_node": 4, "samples": samples}
    plan = optimize(usual_profile(), parse_cluster(document), accuracy="bounded")
    assert all(bucket.compressor.links is None for bucket in plan.buckets)


def test_what_is_protected_by_name_keeps_its_dtype() -> None:
    plan = optimize(usual_profile(), slow(), accuracy="bounded", compress="wire", protect="g1")
    dtypes = {name: bucket.compressor.dtype for bucket in plan.buckets for name in bucket.gradients}
    assert dtypes["g1"] is None
    assert any(dtypes.values())


def test_lossy_options_are_for_lossy_plans() -> None:
    for options in ({"max_ratio": 10.0}, {"protect": "g1"}, {"passes": "merge,joint"}):
        with pytest.raises(InputError, match=r"--accuracy exact: found .*, expected none, .*add --accuracy bounded"):
            optimize(usual_profile(), **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="found --max-ratio and --protect, expected neither, "):
        optimize(usual_profile(), max_ratio=10.0, protect="g1")
    with pytest.raises(InputError, match="--max-ratio: found inf"):
        optimize(usual_profile(), accuracy="bounded", max_ratio=float("inf"))


def test_exact_first_steps_are_written_only_where_asked_and_where_steps_are_compressed() -> None:
    plain = optimize(usual_profile(), slow(), accuracy="bounded")
    assert plain.compresses
    assert "from_step" not in written(plain)
    plan = optimize(usual_profile(), slow(), accuracy="bounded", from_step=500)
    assert plan.from_step == 500
    assert "500 exact steps first" in printed(plan)
    assert parse_plan(json.loads(written(plan))) == plan
    assert plan.uncompressed().buckets != plan.buckets
    whole = optimize(usual_profile(), slow(), accuracy="bounded", compress="none", from_step=500)
    assert whole.from_step is None
    assert "--from-step 500 changes nothing" in " ".join(whole.notes)
    with pytest.raises(InputError, match="--accuracy exact: found --from-step"):
        optimize(usual_profile(), slow(), from_step=500)
    with pytest.raises(InputError, match="--from-step: found 0, expected a whole number of steps"):
        optimize(usual_profile(), slow(), accuracy="bounded", from_step=0)


def test_protected_gradients_travel_whole() -> None:
    free = optimize(usual_profile(), slow(), accuracy="bounded", compress="sparse")
    kept = optimize(usual_profile(), slow(), accuracy="bounded", compress="sparse", protect="g3|g5")
    whole = {name: count for bucket in kept.buckets for name, count in (bucket.compressor.k or {}).items()}
    numel = {gradient.name: gradient.numel for gradient in usual_profile().compute.gradients}
    assert all(whole.get(name, numel[name]) == numel[name] for name in ("g3", "g5"))
    assert free.predicted is not None
    assert kept.predicted is not None
    assert free.predicted.iteration_us < kept.predicted.iteration_us


def named(names: list[str]) -> Problem:
    document = profile_document([(100, 10.0)] * len(names), layers=[name.rpartition(".")[0] for name in names])
    for gradient, name in zip(document["compute"]["gradients"], names, strict=True):
        gradient["name"] = name
    return make(document, cluster_document())


def test_layers_that_come_back_in_a_bucket_are_numbered() -> None:
    problem = named(["a.w", "a.v", "b.w", "a.u"])
    bucket = layer_bucket(problem, ratio_limits(problem), 0, 4, 10.0)
    assert bucket is not None
    assert codec_of(bucket).spec(problem, bucket).k == {"a": 20, "b": 10, "a#2": 10}
    clash = named(["a.w", "a#2.w", "a.v"])
    bucket = layer_bucket(clash, ratio_limits(clash), 0, 3, 10.0)
    assert bucket is not None
    with pytest.raises(InputError, match=r"the layer 'a#2': found it beside two runs of gradients of the layer 'a'"):
        codec_of(bucket).spec(clash, bucket)


def test_the_strategy_is_what_a_plan_gets() -> None:
    problem = line_problem([(1000, 50.0), (9000, 100.0), (100, 30.0)], 300.0, 0.05)
    [record] = simulate(problem.profile, problem.cost.cluster, strategies=["joint"])
    plan = optimize(problem.profile, problem.cost.cluster, accuracy="bounded", compress="all")
    assert plan.predicted is not None
    assert record.iteration_us == plan.predicted.iteration_us
    assert record.cost_source.endswith("selection free (no `sparsify` given)")
    [limited] = simulate(problem.profile, problem.cost.cluster, strategies=["joint:5"])
    assert limited.iteration_us > record.iteration_us
    schedule = make_schedule(problem, "joint")
    assert schedule == Joint(compress="all").apply(make_schedule(problem, "optimal"), problem).schedule
    assert lower(problem, schedule).accuracy == "bounded"


def test_plans_come_out_the_same_as_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        optimize(usual_profile(), slow(contention=(1.1, 1.2)), accuracy="bounded").save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("strategy", ["slgs:0.3", "slgs:0.0123", "lags:8", "joint"])
@settings(max_examples=40)
@given(problem=problems(max_count=12))
def test_a_plan_keeps_as_many_elements_as_its_schedule(strategy: str, problem: Problem) -> None:
    """As the runtime reads it: by layer, numbered where it comes back, or of a whole bucket."""
    schedule = make_schedule(problem, strategy)
    numel = {gradient.name: gradient.numel for gradient in problem.profile.compute.gradients}
    for bucket, planned in zip(schedule.buckets, lower(problem, schedule).buckets, strict=True):
        sizes = layer_runs((name, numel[name]) for name in planned.gradients)
        made = make_compressor(planned.compressor, sizes, ranks=4)
        assert bucket.whole == (made is None)
        assert isinstance(made, WireCompressor) == isinstance(bucket.codec, Wire)
        if isinstance(made, SparseCompressor):
            assert isinstance(bucket.codec, TopK)
            assert made.k == bucket.codec.k


def test_on_one_rank_sparse_buckets_have_nothing_to_send() -> None:
    """Their collectives have no messages there, which is no reason to fail."""
    cluster = cluster_document((30.0, 0.005), nodes=1)
    profile = parse_profile(profile_document([(4000, 120.0), (12000, 80.0)], cluster=cluster, ranks=1))
    plan = optimize(profile, accuracy="bounded", passes="merge,topology,sparsify{max_ratio=50}")
    assert plan.accuracy == "bounded"
    assert all("nothing to send" in (bucket.reason or "") for bucket in plan.buckets)


def test_steps_of_the_training_limit_the_default_ratio() -> None:
    """Eq. 18 of LAGS-SGD: a ratio c needs c³ steps."""

    def made(**options: Any) -> Plan:
        return optimize(usual_profile(), slow(), accuracy="bounded", compress="sparse", **options)

    assert written(made(steps=8000)) == written(made(max_ratio=20.0))
    assert written(made(steps=8000, max_ratio=100.0)) == written(made(max_ratio=100.0))
    assert written(made(steps=10**9)) == written(made())
    found = re.search(r"a ratio of ([0-9.]+) needs about ([0-9,]+) steps", " ".join(made(steps=8000).notes))
    assert found is not None
    assert 1.0 < float(found[1]) <= 20.0
    assert int(found[2].replace(",", "")) == pytest.approx(float(found[1]) ** 3, rel=0.05)
    by_pass = made(passes="merge,sparsify{steps=8000}").frontier
    assert by_pass is not None
    assert by_pass[-1].max_ratio == 20.0
    with pytest.raises(InputError, match="--steps: found 0, expected a whole number of steps"):
        made(steps=0)
