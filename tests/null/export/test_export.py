"""`planner export`: what stock executors get of a plan, what they cannot get, and what that costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import cluster_document, run, run_json, two_nodes, usual_document, write

from planner import optimize, simulate
from planner.documents.profile import parse_profile
from planner.export import EXPORTERS, export
from planner.export.base import NO_PRICE
from planner.model.problem import make_problem
from planner.strategies.baselines import MIB, ddp_buckets
from runtime.errors import InputError
from runtime.plan import Plan, PlanBucket
from runtime.plan.document import CompressorSpec


def test_ddp_makes_the_plans_buckets_of_the_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By DDP's rule; that torch follows it is shown on ranks."""
    write(tmp_path / "p.json", usual_document())
    profile, plan_path = str(tmp_path / "p.json"), str(tmp_path / "plan.json")
    plan = optimize(profile)
    plan.save(plan_path)
    written = tmp_path / "ddp.json"
    run("export", plan_path, "--to", "ddp", "--profile", profile, "-o", str(written))
    capsys.readouterr()
    document = run_json(capsys, "export", plan_path, "--to", "ddp", "--profile", profile)
    assert document == json.loads(written.read_text())
    gradients = parse_profile(usual_document()).compute.gradients
    made = ddp_buckets([g.size_bytes for g in gradients], [0] * len(gradients), document["bucket_cap_mb_list"])
    assert [tuple(gradients[at].name for at in bucket) for bucket in made] == [b.gradients for b in plan.buckets]
    # The one size is as good as the best of the sizes that a sweep would try.
    by_size = [simulate(profile, strategies=[f"ddp:{cap:.12g}"])[0].iteration_us for cap in (0.1, 1, 25)]
    one = simulate(profile, strategies=[f"ddp:{document['bucket_cap_mb']:.12g}"])[0].iteration_us
    assert one <= min(by_size) + 1e-6


def test_without_a_profile_sizes_are_the_plans_own() -> None:
    plan = optimize(parse_profile(usual_document()))
    document = export(plan, "ddp").document
    assert document["bucket_cap_mb_list"] == [(b.size_bytes or 0) / MIB for b in plan.buckets]
    assert any("not checked" in note for note in document["notes"])
    bare = replace(plan, buckets=tuple(replace(b, size_bytes=None) for b in plan.buckets))
    with pytest.raises(InputError, match="--profile"):
        export(bare, "ddp")


def two_dtypes() -> dict[str, Any]:
    document = usual_document()
    for at, gradient in enumerate(document["compute"]["gradients"]):
        gradient["dtype"] = ("float32", "bfloat16")[at % 2]
    return document


def test_dtypes_that_ddp_keeps_apart_are_said_with_their_price() -> None:
    profile = parse_profile(two_dtypes())
    plan = optimize(profile)
    notes = " ".join(export(plan, "ddp", profile).notes)
    assert "DDP keeps dtypes apart" in notes
    assert "ms longer" in notes


def test_what_is_lossy_or_sharded_or_has_shares_is_replaced_and_priced() -> None:
    plan = optimize(parse_profile(usual_document()))
    assert plan.predicted is not None
    topk = CompressorSpec(name="topk", density=0.01)
    sparse = tuple(PlanBucket(gradients=b.gradients, collective="sparse", algorithm="flat", compressor=topk,
                              size_bytes=b.size_bytes) for b in plan.buckets)  # fmt: skip
    quick = replace(plan.predicted, iteration_us=plan.predicted.iteration_us - 2000.0)
    lossy = replace(plan, accuracy="bounded", buckets=sparse, predicted=quick, fallback=plan)
    found = export(lossy, "ddp")
    assert found.document["bucket_cap_mb_list"] == export(plan, "ddp").document["bucket_cap_mb_list"]
    assert "compression cannot be expressed: the exact plan beside it stands in; the step is predicted 2 ms longer" in (
        " ".join(found.notes)
    )
    alone = export(replace(lossy, fallback=None), "ddp").notes
    assert any("its buckets, sent whole, stands in; what that costs is known with --profile" in note for note in alone)
    shared = replace(plan, shares={str(rank): 8 * (rank + 1) for rank in range(plan.world.ranks)})
    for to in ("ddp", "ddp-hook"):
        assert "multiply each rank's loss by its samples in the step x 4 / those of all ranks (80)" in " ".join(
            export(shared, to).notes
        )


def test_compressed_buckets_go_through_torchs_hook() -> None:
    """Eight bits become sixteen, with the price of that; plans without compression say that no hook is needed."""
    document = usual_document(cluster=cluster_document((20.0, 0.05)))
    profile = parse_profile(document)
    plan = optimize(profile, accuracy="bounded", compress="wire")
    found = export(plan, "ddp-hook", profile)
    narrow = [bucket.compressor.name == "wire" for bucket in plan.buckets]
    assert any(narrow)
    assert found.document["narrow"] == narrow
    assert found.document["bucket_cap_mb_list"] == [(b.size_bytes or 0) / MIB for b in plan.buckets]
    compile(found.text, "plan.py", "exec")
    notes = " ".join(found.notes)
    assert "int8" in notes
    assert "bfloat16 is sent; the step is predicted" in notes
    assert "without error feedback" in notes
    assert NO_PRICE in " ".join(export(plan, "ddp-hook").notes)
    exact = export(optimize(profile), "ddp-hook", profile)
    assert not any(exact.document["narrow"])
    assert "--to ddp gives the same without a hook" in " ".join(exact.notes)


def test_a_tree_has_a_row_and_the_library_has_none() -> None:
    plan = optimize(parse_profile(usual_document()))
    with pytest.raises(InputError, match="nothing to tell a tuner"):
        export(plan, "nccl-tuner")
    sizes, ways = (100, 200, 300, 400), ("tree", "tree", "library", "tree")
    buckets = tuple(
        PlanBucket(gradients=(f"g{at}",), algorithm=way, size_bytes=size)
        for at, (size, way) in enumerate(zip(sizes, ways, strict=True))
    )
    rows = export(replace(plan, buckets=buckets), "nccl-tuner").document["rows"]
    assert rows == [
        "allreduce,100,200,tree,simple,-1,4,4,-1,-1",
        "allreduce,400,400,tree,simple,-1,4,4,-1,-1",
    ]


def test_collectives_of_phases_are_priced_by_the_simulator() -> None:
    profile = parse_profile(usual_document(cluster=two_nodes(slow=0.05, fast=0.001)))
    plan = optimize(profile)
    assert {bucket.algorithm for bucket in plan.buckets} != {"library"}
    notes = " ".join(export(plan, "ddp", profile).notes)
    assert "DDP sends every bucket by the library's all-reduce" in notes
    assert "with bucket_cap_mb_list the step is predicted" in notes


def test_torch_reads_the_estimates(tmp_path: Path) -> None:
    """By the class that its overlap scheduler makes of the file; a step of torch's own interpolation stays close."""
    estimation = pytest.importorskip("torch._inductor.fx_passes.profile_guided_estimation")
    profile = parse_profile(usual_document())
    problem = make_problem(profile)
    for plan_profile in (profile, None):
        (tmp_path / "trace.json").write_text(export(optimize(profile), "inductor", plan_profile).text)
        found = estimation.ProfileData()
        found.load(str(tmp_path / "trace.json"))
        for dtype, size_bytes in (("Float", 4), ("BFloat16", 2)):
            elements = 200_264
            known = found.lookup_collective("all_reduce", (0, 1, 2, 3), elements, dtype)
            assert known is not None
            expected_us = float(problem.cost.all_reduce(elements * size_bytes))
            assert known[0] * 1e3 == pytest.approx(expected_us, rel=0.15 if plan_profile else 1.0)


def test_wrong_input_is_refused_in_words(tmp_path: Path) -> None:
    plan: Plan = optimize(parse_profile(usual_document()))
    with pytest.raises(InputError, match=r"--to: found 'ddp-hock', expected one of: " + ", ".join(EXPORTERS)):
        export(plan, "ddp-hock")
    with pytest.raises(InputError, match="--profile"):
        export(plan, "ddp", cluster=write(tmp_path / "c.json", cluster_document()))
    other = usual_document()
    other["compute"]["gradients"][0]["name"] = "another"
    with pytest.raises(InputError, match="a profile of another model: only one of it and plan holds another, g0"):
        export(plan, "ddp", parse_profile(other))
