"""Sweeps: the slowest of many ranks against draws, what failures cost, ranks that fill nodes, and the page."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from builders import run, run_json
from hypothesis import given
from hypothesis import strategies as st

from planner.decide.at_scale import Scenario, curves, sweep
from planner.report.scale_page import efficiency_figure
from runtime.errors import InputError

MODELS, CLUSTERS = ["llama-8b", "vit-l16"], ["dgx-h100", "gb200-nvl72", "rtx4090-8-10gbe"]


@pytest.mark.parametrize("ranks", [1, 8, 512])
def test_the_slowest_rank_is_that_of_many_draws(ranks: int) -> None:
    scenario = Scenario(jitter=0.05, slow_share=0.02, slow_factor=1.3)
    rng = np.random.default_rng(0)
    times = np.exp(0.05 * rng.standard_normal((4000, ranks))) * np.where(rng.random((4000, ranks)) < 0.02, 1.3, 1.0)
    slowest = times.max(axis=1)
    for quantile in (0.5, 0.9):
        assert scenario.slowest(ranks, quantile) == pytest.approx(np.quantile(slowest, quantile), rel=0.02)


@given(st.floats(0.0, 0.3), st.floats(0.0, 0.1), st.floats(1.0, 3.0))
def test_more_ranks_are_never_faster(jitter: float, share: float, factor: float) -> None:
    scenario = Scenario(jitter=jitter, slow_share=share, slow_factor=factor)
    slowest = [scenario.slowest(2**power, 0.5) for power in range(0, 15)]
    assert all(later >= earlier * (1.0 - 1e-9) for earlier, later in pairwise(slowest))
    assert all(scenario.slowest(ranks, 0.99) >= scenario.slowest(ranks, 0.5) for ranks in (1, 64, 16384))


def test_failures_cost_more_the_more_ranks_there_are() -> None:
    scenario = Scenario()
    shares = [scenario.goodput(ranks) for ranks in (1, 1024, 16384)]
    assert shares == sorted(shares, reverse=True)
    # 16,384 GPUs fail every 3.1 h; checkpoints of 60 s are then best 19 min apart.
    between_s = 50_676 * 3600 / 16384
    every_s = math.sqrt(2 * 60 * between_s)
    assert shares[-1] == pytest.approx(1 / (1 + 60 / every_s + (every_s / 2 + 600) / between_s))
    assert Scenario(checkpoint_s=0.0, restart_s=0.0).goodput(16384) == 1.0


def test_a_sweep_fills_nodes_and_keeps_what_memory_asks_for() -> None:
    points = sweep(MODELS, CLUSTERS, (8, 100, 16384))
    assert {point.ranks for point in points if point.cluster == "dgx-h100"} == {8, 104, 16384}
    assert {point.ranks for point in points if point.cluster == "gb200-nvl72"} == {8, 144, 16416}
    by_hand = {(point.model, point.cluster): point.strategy for point in points if point.ranks == 8}
    assert by_hand["vit-l16", "dgx-h100"] == "ddp"
    assert by_hand["llama-8b", "dgx-h100"] not in ("ddp", "ddp, planned buckets")
    for point in points:
        assert 0.0 < point.efficiency <= 1.0 + 1e-9
        assert point.p99_us >= point.median_us >= point.step_us > 0.0
    late = sweep(MODELS, CLUSTERS, (8, 16384), Scenario(jitter=0.05))
    assert all(point.median_us > point.step_us for point in late)
    assert points == sweep(MODELS, CLUSTERS, (8, 100, 16384))


def test_curves_and_their_figure() -> None:
    points = sweep(MODELS, CLUSTERS, (8, 64, 512))
    assert [(model, cluster) for model, cluster, _ in curves(points)] == [
        (model, cluster) for cluster in CLUSTERS for model in MODELS
    ]
    figure = efficiency_figure([point for point in points if point.model == "llama-8b"])
    assert [trace["name"] for trace in figure["data"]] == CLUSTERS
    assert all(len(trace["x"]) == len(trace["y"]) == len(trace["hovertext"]) for trace in figure["data"])


def test_the_command_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "scale.html"
    records = run_json(
        capsys, "sweep", ",".join(MODELS), ",".join(CLUSTERS), "--ranks", "8,64", "--jitter", "0.02",
        "--html", str(page),
    )  # fmt: skip
    assert len(records) == len(MODELS) * 5 + len(MODELS)
    text = page.read_text(encoding="utf-8")
    assert "Nothing here is measured" in text
    assert "default-src 'none'" in text
    assert "computed with h100, batch 2 per rank, bfloat16, AdamW, 80 GB memory" in text
    run("sweep", "resnet50", "dgx-a100", "--ranks", "8,12")
    assert "rounded up to whole nodes: 16 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"jitter": 2.0}, "jitter: found 2.0"), ({"slow_factor": 0.5}, "slow_factor: found 0.5"),
        ({"mtbf_hours": 0.0}, "mtbf_hours: found 0.0"), ({"checkpoint_s": -1.0}, "checkpoint_s: found -1.0"),
    ],
)  # fmt: skip
def test_scenarios_that_are_none(options: dict[str, float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Scenario(**options)


def test_numbers_of_ranks_that_are_none() -> None:
    with pytest.raises(InputError, match="ranks: found 0"):
        sweep(["resnet50"], ["dgx-a100"], (0,))
    with pytest.raises(InputError, match="expected at least one of each"):
        sweep([], ["dgx-a100"])
