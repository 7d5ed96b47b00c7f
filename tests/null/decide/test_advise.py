"""Advice: what published tables bear out, what fits into memory, and what it says where nothing is to be gained."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from builders import run, run_json, usual_cluster, usual_profile

from planner.decide.advise import WORTH_ASKING, advise
from planner.decide.at_scale import sweep
from planner.documents.accelerators import ACCELERATORS, find_accelerator, kind_of, speed_ratio
from planner.documents.catalog import find_cluster, find_profile, names
from planner.documents.estimate import check_accelerators, compute_basis, on_accelerator
from planner.documents.profile import Cluster, Profile
from planner.fsdp2.decide import WrappingRequest, optimize_wrapping
from planner.fsdp2.inputs import PER_BLOCK
from planner.model.problem import make_problem
from planner.report import listing
from planner.report.tables import advice_lines
from runtime.errors import InputError

PAIRS = [
    # BERT-Large on DGX A100 scales with 95 % efficiency (DeepLearningExamples): nothing is to be gained.
    ("bert-large-s128@dgx-a100", "ddp"),
    ("resnet50@dgx-a100", "ddp"),
    ("vit-l16@dgx-h100", "ddp"),
    ("sd15-unet@dgx-h100", "ddp"),
    ("llama-1b@dgx-h100", "ddp"),
    # Bound by bytes on 10 Gbit/s Ethernet: no merge helps (ddl-benchmarks, BERT-Large: all methods alike).
    ("bert-base@hkbu-8x4-10gbe", "ddp"),
    ("bert-large@rtx4090-8-10gbe", "ddp, planned buckets"),
    # 8 billion parameters with Adam's state do not fit into 80 GB; ranks that share the state do.
    ("llama-8b@dgx-h100", "sharded step"),
    # MPT-70b is trained with FSDP on 64 and more H100 (llm-foundry).
    ("llama-70b@aws-p5", "fsdp2"),
    ("llama-8b@rtx4090-8-25gbe", None),
]


@pytest.mark.parametrize(("pair", "use"), PAIRS)
def test_ten_pairs(pair: str, use: str | None) -> None:
    advice = advise(pair)
    assert advice.options[0].name == "ddp"
    if use is not None:
        assert advice.use == use, advice.reason
    chosen = next(option for option in advice.options if option.name == advice.use)
    assert not chosen.lossy
    for option in advice.options:
        assert option.iteration_us > 0.0
        assert option.reason
        assert option.fits is None or option.memory_bytes is not None
    if advice.nothing_to_gain:
        better = [o for o in advice.options if o.fits is not False and not o.lossy]
        assert min(o.iteration_us for o in better) * (1.0 + WORTH_ASKING) >= chosen.iteration_us
        assert "nothing to gain here" in advice.reason


def test_lossy_ways_are_only_taken_where_allowed() -> None:
    exact, bounded = (advise("bert-large@rtx4090-8-10gbe", accuracy=accuracy) for accuracy in ("exact", "bounded"))
    assert exact.use == "ddp, planned buckets"
    assert exact.if_lossy == bounded.use == "ddp, int8 on the wire"
    assert bounded.if_lossy is None
    # That cluster's all-reduce is far slower than its links' constants: half of the bytes gain no more than half.
    slow = advise(find_profile("gpt2"), replace(find_cluster("k80-10gbe"), accelerator=None))
    steps = {option.name: option.exposed_us for option in slow.options}
    assert steps["ddp, bfloat16 on the wire"] > 0.4 * steps["ddp"]
    assert all(option.executed_by == "planner.attach" for option in exact.options if option.lossy)


def test_memory_decides() -> None:
    roomy, tight = (advise("llama-1b@dgx-h100", max_memory_mib=mib) for mib in (80_000, 24_000))
    assert roomy.use == "ddp"
    assert tight.use not in ("ddp", "ddp, planned buckets")
    assert tight.options[0].fits is False
    assert "do not fit" in tight.reason
    nothing = advise("llama-70b@rtx4090-8-25gbe")
    assert nothing.reason.startswith("nothing here fits")


def test_a_single_rank_and_unknown_memory() -> None:
    alone = advise(usual_profile(), usual_cluster(), ranks=1)
    assert [option.name for option in alone.options] == ["ddp"]
    assert alone.nothing_to_gain
    assert advise(usual_profile(), usual_cluster()).options[0].fits is None
    crowded = advise("llama-8b@dgx-h100", ranks=1)
    assert not crowded.nothing_to_gain
    assert "nothing here fits" in crowded.reason


def test_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="--accuracy: found 'relaxed', expected exact or bounded"):
        advise("resnet50@dgx-a100", accuracy="relaxed")
    with pytest.raises(InputError, match="--max-memory-mib: found -1"):
        advise("resnet50@dgx-a100", max_memory_mib=-1)
    for mib in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="--max-memory-mib: found"):
            advise("resnet50@dgx-a100", max_memory_mib=mib)
    with pytest.raises(InputError, match="12 ranks do not fill nodes of 8"):
        advise("resnet50@dgx-a100", ranks=12)
    document = run_json(capsys, "advise", "llama-8b@dgx-h100")
    assert {"use", "reason", "options", "cost_source", "memory_limit_bytes"} <= document.keys()
    assert "NCCL's all-reduce" in document["cost_source"]


def test_estimated_compute_goes_with_the_clusters_accelerator() -> None:
    profile = find_profile("llama-8b")
    times = {
        name: make_problem(profile, find_cluster(name)).forward_us
        for name in ("a100-8x8-100gb", "dgx-a100", "dgx-h100", "dgx-b200")
    }
    assert times["dgx-h100"] == profile.compute.forward_us
    assert times["dgx-a100"] == pytest.approx(profile.compute.forward_us * 989.4 * 0.464 / (312 * 0.642), rel=1e-6)
    assert times["a100-8x8-100gb"] == times["dgx-a100"]
    assert times["dgx-b200"] < times["dgx-h100"] < times["dgx-a100"]


def test_measured_compute_is_scaled_to_the_clusters_accelerator() -> None:
    measured = find_profile("resnet50")
    scaled = make_problem(measured, find_cluster("dgx-h100"))
    assert scaled.forward_us == pytest.approx(measured.compute.forward_us / speed_ratio("v100", "h100"))
    assert make_problem(measured, find_cluster("v100-16x8-25gbe")).forward_us == measured.compute.forward_us
    # No accelerator is named there: times are taken as they are, and that is said.
    assert make_problem(measured, find_cluster("hkbu-8x4-10gbe")).forward_us == measured.compute.forward_us
    assert advise("resnet50@hkbu-8x4-10gbe").computed_with.compute.basis == "as profiled"


known_profile = cache(find_profile)


def computes(profile: Profile, machines: Cluster) -> str:
    """What has to be said of a pair, from what the documents name alone."""
    there = machines.accelerator or (machines.nccl.gpu if machines.nccl is not None else None)
    if profile.compute.estimate is not None:
        return "estimated" if there else "refused"
    if there is None:
        return "as profiled"
    device = (profile.world.accelerator or "").lower()
    if not device:
        return "refused"
    memory_bytes = profile.world.memory_bytes or ACCELERATORS[there].memory_bytes
    same = kind_of(there) in device and memory_bytes == pytest.approx(ACCELERATORS[there].memory_bytes, rel=0.1)
    return "measured" if same else "scaled"


@pytest.mark.parametrize("cluster", names("cluster"))
def test_every_pair_says_what_it_was_computed_with(cluster: str) -> None:
    """All of the catalogue, by the functions behind `advise`, without its simulations."""
    machines = find_cluster(cluster)
    for model in names("model"):
        profile = known_profile(model)
        expected = computes(profile, machines)
        if expected == "refused":
            with pytest.raises(InputError, match="accelerator"):
                check_accelerators(profile, machines)
            continue
        check_accelerators(profile, machines)
        found = compute_basis(profile, machines)
        profiled_on = find_accelerator(profile.world.accelerator, profile.world.memory_bytes)
        assert found.basis == expected, model
        assert found.accelerator == (
            machines.computes_on or profiled_on or profile.world.accelerator or profile.world.device
        )
        factor = profile.compute.forward_us / on_accelerator(profile, machines).compute.forward_us
        assert factor == pytest.approx(found.speed if expected in ("scaled", "estimated") else 1.0)
        assert (found.within is not None) == (expected in ("scaled", "estimated"))
        if expected == "scaled":
            assert factor == pytest.approx(speed_ratio(profiled_on, found.accelerator))  # type: ignore[arg-type]


SAID = [
    ("llama-8b", "a100-8x8-25gb", ["a100-40gb", "batch 2 per rank", "bfloat16", "AdamW", "40 GB memory", "estimated"]),
    ("gpt2", "dgx-h100", ["h100", "batch not stated", "float32", "optimizer not stated", "80 GB memory",
                          "scaled from Tesla V100 32 GB", "± 35%"]),
    ("resnet50", "v100-4x4-10gbe", ["v100", "compute measured"]),
    ("googlenet", "hkbu-8x4-10gbe", ["k80", "batch 64 per rank", "as profiled"]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "cluster", "words"), SAID)
def test_text_and_json_say_what_was_computed_with(
    model: str, cluster: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PIPE_COLUMNS", 400)
    document = run_json(capsys, "advise", f"{model}@{cluster}")
    run("advise", f"{model}@{cluster}")
    summary, first, *lines = capsys.readouterr().out.splitlines()
    assert summary.startswith("use ")
    assert first.startswith(f"{model} on {cluster}: computed with ")
    for word in words:
        assert word in first
    told = document["computed_with"]
    assert told["accelerator"] in first
    assert told["dtype"] in first
    assert f"{told['memory_bytes'] / 1e9:.3g} GB memory" in first
    printed = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    cells = [(name, row) for row in printed for name in row[0].split(" / ")]  # equal options are one row
    rows = [[cell.strip(" ←") for cell in (name, *row[1:])] for name, row in cells]
    assert [row[0] for row in rows] == [option["name"] for option in document["options"]]
    for row, option in zip(rows, document["options"], strict=True):
        assert float(row[1].replace(",", "")) == pytest.approx(option["iteration_us"] / 1e3, rel=1e-3)
        if option["interval_us"]:
            low, high = (float(value.replace(",", "")) for value in row[2].split(" to "))
            assert [low, high] == pytest.approx([end / 1e3 for end in option["interval_us"]], rel=1e-3)
            assert low < option["iteration_us"] / 1e3 < high
    within = document["interval"]
    assert (within is None) or any(f"± {within:.0%} for 9 of 10" in line for line in lines)


def test_an_a100_is_not_an_h100() -> None:
    a100, h100 = (advise(f"llama-8b@{kind}-8x8-400gb") for kind in ("a100", "h100"))
    assert a100.memory_limit_bytes == 40 * 10**9
    assert h100.memory_limit_bytes == 80 * 10**9
    ratio = 989.4 * 0.464 / (312 * 0.642)
    times = [one.options[0].iteration_us - one.options[0].exposed_us for one in (a100, h100)]
    assert times[0] / times[1] == pytest.approx(ratio, rel=0.1)


def test_the_clusters_accelerator_can_be_named() -> None:
    with pytest.raises(InputError, match="hkbu-8x4-10gbe does not name its accelerator; expected one: `--accelerator"):
        advise("llama-1b@hkbu-8x4-10gbe")
    assert advise("llama-1b@hkbu-8x4-10gbe", accelerator="v100").computed_with.accelerator == "v100"
    assert advise("llama-1b@dgx-a100", accelerator="A100-SXM4-40GB").memory_limit_bytes == 40 * 10**9
    with pytest.raises(InputError, match="--accelerator: found a100, and dgx-h100 has h100"):
        advise("llama-1b@dgx-h100", accelerator="a100")
    with pytest.raises(InputError, match="alexnet: measured on cuda, whose rates are not known, and dgx-h100 has h100"):
        advise("alexnet@dgx-h100")


def test_a_sweep_gives_what_advise_does() -> None:
    """At the cluster's own number of ranks, which the default has, and at others."""
    for model, cluster, ranks in (
        ("llama-8b", "gcp-a2-highgpu", 32), ("resnet50", "dgx-h100", None), ("llama-1b", "hkbu-8x4-10gbe", None),
    ):  # fmt: skip
        advice = advise(f"{model}@{cluster}", ranks=ranks, accelerator="v100" if "hkbu" in cluster else None)
        points = sweep(
            [model], [cluster], None if ranks is None else [ranks], accelerator=advice.computed_with.accelerator
        )
        [point] = [point for point in points if point.ranks == advice.ranks]
        assert (point.strategy, point.step_us) == (advice.use, advice.chosen.iteration_us)
        assert point.computed_with == advice.computed_with


def test_the_command_to_continue_with() -> None:
    assert advise("resnet50@dgx-a100").next_command is None
    sharded = "planner optimize llama-8b@dgx-h100 --allow sharded-step -o plan.json"
    assert advise("llama-8b@dgx-h100").next_command == sharded
    tight = advise("llama-1b", "dgx-h100", max_memory_mib=24_000)
    assert tight.next_command is not None
    assert "llama-1b --cluster dgx-h100 --parallel fsdp2" in tight.next_command
    assert "--max-memory-mib 24000" in tight.next_command
    changed = advise("llama-8b@dgx-h100", ranks=32)
    assert changed.next_command is None
    assert any('"nodes": 4' in line for line in advice_lines(changed))


def test_fsdp2_is_what_the_planner_of_fsdp2_predicts() -> None:
    advice = advise("llama-1b@dgx-h100")
    options = {option.name: option for option in advice.options}
    planned = optimize_wrapping(WrappingRequest(profile="llama-1b@dgx-h100"))
    assert options["fsdp2"].iteration_us == planned.baselines[PER_BLOCK].iteration_us  # type: ignore[index]
    assert options["fsdp2"].executed_by == "planner.fully_shard"
    assert options["fsdp2, recomputed"].memory_bytes < options["fsdp2"].memory_bytes  # type: ignore[operator]
    again_us = options["fsdp2, recomputed"].iteration_us - options["fsdp2"].iteration_us
    assert again_us == pytest.approx(
        make_problem(find_profile("llama-1b"), find_cluster("dgx-h100")).forward_us, rel=0.1
    )
