"""What if: each change against the same change made by hand, and what it may not touch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import cluster_document, profile_document, run, write

from planner.decide.simulate import simulate
from planner.documents.profile import Cluster, Link, parse_cluster, parse_profile
from planner.model.what_if import WhatIf, parse_link, relink
from runtime.errors import InputError

ROWS = [(1000, 50.0), (20000, 200.0), (300, 10.0), (70000, 400.0)]
LINKS = {"intra": {"alpha_us": 5.0, "beta_us_per_byte": 0.001}, "inter": {"alpha_us": 20.0, "beta_us_per_byte": 0.01}}
PROFILE = parse_profile(profile_document(ROWS, forward_us=300.0, update_us=40.0))
CLUSTER = parse_cluster(cluster_document(None, ranks_per_node=2, **LINKS))


def steps(what: WhatIf, cluster: Cluster = CLUSTER, profile: Any = PROFILE) -> list[float]:
    """Step times of all strategies."""
    names = ("wfbp", "single", "ddp", "torus_2d", "optimal")
    return [result.iteration_us for result in simulate(profile, cluster, strategies=names, what_if=what)]


@pytest.mark.parametrize(
    ("what", "step", "update"),
    [
        (WhatIf(compute_speed=4.0), 0.25, 0.25),
        (WhatIf(batch=3.0), 3.0, 1.0),
        (WhatIf(straggler=1.5), 1.5, 1.5),
        (WhatIf(compute_speed=2.0, batch=2.0, straggler=3.0), 3.0, 1.5),
    ],
)
def test_compute_is_scaled_as_by_hand(what: WhatIf, step: float, update: float) -> None:
    rows = [(numel, backward_us * step) for numel, backward_us in ROWS]
    by_hand = parse_profile(profile_document(rows, forward_us=300.0 * step, update_us=40.0 * update))
    assert steps(what) == pytest.approx(steps(WhatIf(), profile=by_hand))


def test_another_link_between_nodes() -> None:
    link = Link(alpha_us=2.0, beta_us_per_byte=0.0005)
    assert steps(WhatIf(inter=link)) == pytest.approx(steps(WhatIf(), replace(CLUSTER, inter=link)))
    assert steps(WhatIf(inter=link)) != pytest.approx(steps(WhatIf()))


def test_what_was_measured_over_the_old_link_is_dropped() -> None:
    samples = {key: ((100.0, 9.0),) for key in ("all_reduce", "intra/all_gather", "inter/all_reduce")}
    measured = replace(CLUSTER, samples=samples)
    link = Link(alpha_us=2.0, beta_us_per_byte=0.0005)
    assert set(relink(measured, "inter", link).samples or {}) == {"intra/all_gather"}
    assert set(relink(measured, "intra", link).samples or {}) == {"all_reduce", "inter/all_reduce"}
    assert set(relink(replace(measured, nodes=1), "intra", link).samples or {}) == {"inter/all_reduce"}
    # A link inside nodes that sets the pace of flat collectives, before the change or after it.
    slow = replace(measured, ranks_per_node=2, intra=Link(alpha_us=2.0, beta_us_per_byte=1.0))
    assert set(relink(slow, "intra", link).samples or {}) == {"inter/all_reduce"}
    assert set(relink(replace(slow, intra=link), "intra", slow.intra).samples or {}) == {"inter/all_reduce"}  # type: ignore[arg-type]


def test_jitter_gives_quantiles_of_the_slowest_rank() -> None:
    results = [simulate(PROFILE, CLUSTER, strategies=["ddp"], what_if=WhatIf(jitter=j))[0] for j in (0.01, 0.2)]
    small, large = (result.quantiles_us or {} for result in results)
    assert list(small) == ["p50", "p90", "p99"]
    assert list(small.values()) == sorted(small.values())
    # Of eight ranks the slowest is slower than the mean nearly always, the more the more they differ.
    assert results[0].iteration_us < small["p50"] < large["p50"]
    again = simulate(PROFILE, CLUSTER, strategies=["ddp"], what_if=WhatIf(jitter=0.2))[0]
    assert again.quantiles_us == large
    assert simulate(PROFILE, CLUSTER, strategies=["ddp"])[0].quantiles_us is None


def test_idle_time_bytes_and_critical_path() -> None:
    single, torus = simulate(PROFILE, CLUSTER, strategies=["single", "torus_2d"], critical_path=True)
    size_bytes = 4 * sum(numel for numel, _ in ROWS)
    assert single.message_bytes == {"network": size_bytes}
    assert torus.message_bytes == {"intra": 2 * size_bytes, "inter": size_bytes / 2}
    # One bucket: forward, backward and the update compute, then the network; nothing at once.
    assert single.idle_us["network"] == pytest.approx(300 + 660 + 40)
    assert single.idle_us["compute"] == pytest.approx(single.iteration_us - 1000)
    assert single.critical_path == pytest.approx(
        {
            "forward": 300 / single.iteration_us,
            "backward": 660 / single.iteration_us,
            "all_reduce": 1 - 1000 / single.iteration_us,
            "update": 40 / single.iteration_us,
        }
    )


@pytest.mark.parametrize(
    ("text", "alpha_us", "gbit"), [("5us,100gbit", 5, 100), (" 0.5us , 25gbit", 0.5, 25), ("5ms,9gbyte", 5e3, 72)]
)
def test_links_in_words(text: str, alpha_us: float, gbit: float) -> None:
    link = parse_link("--inter", text)
    assert (link.alpha_us, link.beta_us_per_byte) == (alpha_us, pytest.approx(1e6 / (gbit * 1e9 / 8)))


@pytest.mark.parametrize(
    "text", ["", "5us", "9gbit", "5 weeks,9gbit", "-5us,9gbit", "5us,0gbit", "eus,1gbit", "1e99us,1gbit"]
)
def test_links_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match=r"--inter: found .*, expected .* (for example 5us,100gbit|such as)"):
        parse_link("--inter", text)


@pytest.mark.parametrize(
    "options",
    [
        ["--compute-speed", "0"],
        ["--compute-speed", "nan"],
        ["--batch", "-1"],
        ["--straggler", "inf"],
        ["--jitter", "2"],
        ["--inter", "fast"],
    ],
)
def test_nonsense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    path = write(tmp_path / "profile.json", profile_document(ROWS, cluster=cluster_document()))
    run("simulate", path, *options, code=2)
    assert "expected" in capsys.readouterr().err


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = write(tmp_path / "profile.json", profile_document(ROWS))
    cluster = write(tmp_path / "cluster.json", cluster_document(None, ranks_per_node=2, **LINKS))
    options = ["--compute-speed", "2", "--inter", "5us,100gbit", "--jitter", "0.05", "--critical-path", "--json"]
    run("simulate", profile, "--cluster", cluster, "--ranks", "2,16384", "--strategy", "ddp,torus_2d", *options)
    records = json.loads(capsys.readouterr().out)
    assert [(r["ranks"], r["strategy"]) for r in records] == [
        *((2, "ddp"), (2, "torus_2d"), (16384, "ddp"), (16384, "torus_2d"))
    ]
    assert records[0]["what_if"] == ["accelerator 2 × as fast", "jitter 5% (seed 0)", "another link between nodes"]
    assert all(sum(r["critical_path"].values()) == pytest.approx(1) for r in records)
