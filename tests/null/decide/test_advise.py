"""Advice: what published tables bear out, what fits into memory, and what it says where nothing is to be gained."""

from __future__ import annotations

import pytest
from builders import run_json, usual_cluster, usual_profile

from planner.decide.advise import WORTH_ASKING, advise
from planner.documents.catalog import find_cluster, find_profile
from planner.model.fully_sharded import Block, Messages, blocks_of, sharded_step
from planner.model.problem import make_problem
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
    steps = {option.name: option.exposed_us for option in advise("gpt2@k80-10gbe").options}
    assert steps["ddp, bfloat16 on the wire"] > 0.4 * steps["ddp"]
    assert all(option.runs_here for option in exact.options if option.lossy)


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
        name: make_problem(profile, find_cluster(name)).forward_us for name in ("dgx-a100", "dgx-h100", "dgx-b200")
    }
    assert times["dgx-h100"] == profile.compute.forward_us
    assert times["dgx-a100"] == pytest.approx(profile.compute.forward_us * 989.4 * 0.464 / (312 * 0.642), rel=1e-6)
    assert times["dgx-b200"] < times["dgx-h100"] < times["dgx-a100"]
    measured = find_profile("resnet50")
    assert make_problem(measured, find_cluster("dgx-b200")).forward_us == measured.compute.forward_us


def test_blocks_hold_every_byte_and_all_of_the_step() -> None:
    for name in ("llama-70b", "sd15-unet", "resnet50", "bert-large-s128"):
        problem = make_problem(find_profile(name), find_cluster("dgx-h100"))
        blocks = blocks_of(problem)
        assert sum(block.size_bytes for block in blocks) == problem.size_bytes.sum()
        assert sum(block.forward_us for block in blocks) == pytest.approx(problem.forward_us)
        assert sum(block.backward_us for block in blocks) == pytest.approx(problem.backward_us)
    assert len(blocks_of(make_problem(find_profile("llama-70b"), find_cluster("dgx-h100")))) == 82


def test_a_sharded_step_by_hand() -> None:
    """Two blocks; a gather takes 10, a scatter 20, forward 100 and backward 200 each.

    Forward: gather 0 (10), block 0 to 110 beside gather 1, block 1 to 210. Backward: block 1 at 210 to 410 beside
    gather 0 (to 220) and then its scatter (410 to 430); block 0 at 410 to 610, its scatter to 630.
    """
    blocks = [Block("0", 1.0, 100.0, 200.0), Block("1", 1.0, 100.0, 200.0)]
    messages = Messages(gather_us=lambda _: 10.0, scatter_us=lambda _: 20.0, reduce_us=lambda _: 0.0)
    step = sharded_step(blocks, messages, 5.0, slowdown=1.0)
    assert (step.iteration_us, step.exposed_us, step.busy_us) == (635.0, 30.0, 70.0)
    kept = sharded_step(blocks, messages, 5.0, slowdown=1.0, keep_weights=True)
    assert (kept.iteration_us, kept.busy_us) == (635.0, 60.0)
    again = sharded_step(blocks, messages, 5.0, slowdown=1.0, recompute=True)
    assert again.iteration_us == 835.0
    assert sharded_step(blocks, messages, 5.0, slowdown=1.5).iteration_us == 635.0 + 0.5 * 40.0
    slow = Messages(gather_us=lambda _: 1000.0, scatter_us=lambda _: 0.0, reduce_us=lambda _: 0.0)
    assert sharded_step(blocks, slow, 0.0, slowdown=1.0).iteration_us == 1000.0 + 1000.0 + 100.0 + 1000.0 + 200.0
