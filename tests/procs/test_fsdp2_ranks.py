"""Plans for FSDP2: the weights of stock FSDP2, the recorded order of its messages, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import fsdp2_checks
import pytest

from planner.fsdp2.decide import MARGIN
from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every rank found."""
    return run_ranks(LocalWorld(ranks=request.param), fsdp2_checks.everything)


CASES = [*fsdp2_checks.WRAPPINGS, *fsdp2_checks.TIED, *fsdp2_checks.FOUR]


@pytest.mark.parametrize("case", CASES)
def test_weights_and_messages_are_those_of_stock_fsdp2(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        if case not in rank:
            assert len(ranks) == 2
            assert case in fsdp2_checks.FOUR
            continue
        found = rank[case]
        assert found["planned"] == found["by hand"]
        rounds = 2e-2 if "bfloat16" in case else 1e-4
        assert found.get("off on hosts", 0.0) <= (0.0 if len(ranks) == 2 else rounds)
        assert found["recorded"] == found["simulated"]
        assert found["again"] == found["recorded"]
        assert {"all_gather", "reduce_scatter"} <= {kind for kind, *_ in found["recorded"]}


def test_memory_is_as_it_is_counted(ranks: list[dict[str, Any]]) -> None:
    """The peak of parameters, gradients, the optimizer's state, activations and messages: never above the prediction
    by more than decisions leave free, and at most 2 % below.
    """
    for rank in ranks:
        for name, (predicted, counted) in rank["memory"].items():
            for one in counted:
                assert one <= predicted / (1.0 - MARGIN), name
                assert predicted <= 1.02 * one, name


def test_messages_are_what_they_are_called_and_let_go_of_memory(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        off, held = rank["messages"]
        assert off < 32.0  # sums of a few numbers of about 1
        assert held == 0


def test_gradients_are_reduced_as_the_script_asks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        rounds = 0.0 if len(ranks) == 2 else 1e-4
        assert rank["reductions"].keys() >= {"divide factor", "all-reduce hook", "two models"}
        assert {name: off for name, off in rank["reductions"].items() if off > rounds} == {}


def test_blocks_that_are_compiled_behind_it_train_as_with_stock_fsdp2(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        rounds = 0.0 if len(ranks) == 2 else 1e-4
        assert {name: off for name, off in rank["compiled blocks"].items() if off > rounds} == {}
        assert "call torch.compile after planner.fully_shard" in rank["refusals"]["compiled in place"]


RAISES = """
import sys
import torch
import torch.distributed as dist
from runtime.fully_sharded.messages import SerialMessages

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
if rank == 0:
    sys.stdin.read()  # alive, and never comes
SerialMessages(600.0).gather(torch.zeros(2), torch.zeros(1), dist.group.WORLD)
raise LookupError("on purpose")
"""


@pytest.mark.long
def test_a_script_that_raises_ends_with_messages_under_way(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-c", RAISES, str(tmp_path / "met"), str(rank)]
        ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        _, said = ranks[1].communicate(timeout=300)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[1].returncode == 1
    assert said.endswith("LookupError: on purpose\n")


def test_units_are_found(ranks: list[dict[str, Any]]) -> None:
    blocks = [f"layers.{number}" for number in range(fsdp2_checks.BLOCKS)]
    for rank in ranks:
        assert rank["candidates"] == ["embed", *blocks, "norm", "head"]
        units = rank["units"]
        assert units == ranks[0]["units"]
        assert [unit.module for unit in units.units] == fsdp2_checks.LEAVES
        assert [unit.input_requires_grad for unit in units.units] == [False] + [True] * (len(units.units) - 1)
        # The head keeps its input, the norm its own and two numbers a row: batch 2, 5 words, 4 bytes.
        assert units.units[-1].activation_bytes >= 2 * 5 * fsdp2_checks.WIDTH * 4
        assert rank["failed backward"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "unknown",
            "found 'layers.7', which is no module of the model; expected a path of named_modules(); near: laye",
        ),
        ("list", "found 'layers', a ModuleList, which has no forward; expected what it holds: name that"),
        (
            "tied",
            "embed.weight and head.weight are one parameter (tied), in the group of embed and in the group of nor",
        ),
        ("wrapped", "PlanMismatch: the model is wrapped in FSDPTower; expected a plain module with whole parameters"),
        ("mesh", "PlanMismatch: mesh: found one of shape ("),
        ("ranks", "PlanMismatch: the plan was made for"),
        ("compiled", "PlanMismatch: the model is compiled, and FSDP2's hooks would be outside of what was compiled"),
        ("compiled in place", "PlanMismatch: the model is compiled"),
        ("dtypes", "layers.0.mix.weight is float64 and layers.0.wide.0.weight float32, both in the group of layers.0;"),
        ("model", "the plan (for other) is for another model, by the names, shapes and dtypes of its trainable param"),
        (
            "buckets",
            "PlanMismatch: the plan: found buckets, which attach executes, and no fsdp2; expected groups of mo",
        ),
        ("twice", "the plan's fsdp2.groups[1][1]: found 'embed', which is in group 0 already; expected each once"),
        ("prefetch", "the plan's fsdp2.forward_prefetch.head: found 'head', expected the first module of a group"),
        ("divisor", "the plan's fsdp2.reshard_after_forward.embed: found 3 of"),
        (
            "policy",
            "PlanMismatch: mp_policy: found reduce_dtype float32, expected bfloat16, as the plan says: pass",
        ),
        ("no module", "InputError: model: found a int, expected a torch.nn.Module"),
        ("one rank alone", "PlanMismatch: ranks hold different plans"),
        ("attach", "PlanMismatch: the plan has groups of modules for FSDP2 and no buckets; expected buckets, which at"),
        ("hosts", "InputError: the model is not wrapped, expected one from planner.fully_shard; call that first"),
        ("maximum", "InputError: the reduce-scatter of the model itself: found RedOpType.MAX, expected a sum, an av"),
    ],
)
def test_what_is_refused_on_all_ranks(ranks: list[dict[str, Any]], case: str, words: str) -> None:
    for rank in ranks:
        assert words in rank["refusals"][case]


def test_a_setter_that_is_missing_costs_milliseconds() -> None:
    [said] = run_ranks(LocalWorld(ranks=1), fsdp2_checks.without_the_setter)
    assert "found 2, but torch" in said
    assert "without which a step takes 1.23 ms longer, as predicted; expected a newer torch" in said
