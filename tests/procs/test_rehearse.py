"""`planner rehearse` on two emulated hosts: it ends in time, with every row, undilated, and leaves nothing; also under
FSDP2.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import commands
import pytest
from builders import usual_document, write
from test_testbed import machine, needs_namespaces


def on_two_hosts() -> dict[str, Any]:
    """The usual profile, with a link between hosts."""
    cluster = {"schema": "planner.cluster/1", "nodes": 2, "inter": {"latency": "300us", "bandwidth": "1gbit"}}
    return usual_document() | {"cluster": cluster}


@needs_namespaces
def test_a_small_model_is_predicted_and_measured(tmp_path: Path) -> None:
    document = on_two_hosts()
    for gradient in document["compute"]["gradients"]:
        gradient |= {"backward_us": 4000.0, "numel": 50_000}
    before, started_s = machine(), time.monotonic()
    found = commands.result(
        "rehearse", str(write(tmp_path / "profile.json", document)), "--strategy", "single", "--minutes", "0.5",
        "--dilate", "3", "--shrink", "2",
    )  # fmt: skip
    assert time.monotonic() - started_s < 90.0
    assert machine() == before
    assert (found["dilate"], found["shrink"], found["hosts"]) == (3.0, 2.0, "2x1")
    rows = {row["name"]: row for row in found["rows"]}
    assert {"none", "ddp", "single", "plan"} <= rows.keys()
    assert found["bound_us"] <= rows["plan"]["predicted_us"] * (1.0 + 1e-9)  # both are sums of many terms
    gradients = document["compute"]["gradients"]
    computed_us = document["compute"]["forward_us"] + 4000.0 * len(gradients) + document["compute"]["update_us"]
    assert rows["none"]["from_constants_us"] == pytest.approx(computed_us)
    assert rows["none"]["predicted_us"] >= computed_us  # with what a step costs here beside its waits
    assert rows["none"]["median_us"] >= 0.99 * computed_us  # a wait never ends too early
    for row in (rows["single"], rows["plan"]):
        assert row["median_us"] > rows["none"]["median_us"]
        assert row["predicted_us"] > computed_us
        assert row["from_constants_us"] > computed_us
        assert row["same_training"] is not False
        assert len(row["messages"]) == row["buckets"]
        # As on the cluster, whose step is a third as long as here.
        assert all(0.0 <= max(one["late_us"]) < row["median_us"] for one in row["messages"])


def test_the_demo_compares_ddp_with_a_plan_and_trains_as_ddp_does() -> None:
    """Without root: on connections of this machine."""
    found = commands.result("demo", "--minutes", "0.8")
    assert (found["hosts"], found["dilate"], found["shrink"]) == ("2x1", 10.0, 1.0)
    rows = {row["name"]: row for row in found["rows"] if row["equal_to"] is None}
    assert {"none", "ddp", "plan"} == rows.keys()
    assert rows["plan"]["same_training"]
    assert rows["plan"]["predicted_us"] < rows["ddp"]["predicted_us"]
    # The link is held: DDP's last bucket cannot take less.
    assert rows["ddp"]["median_us"] > 0.9 * rows["ddp"]["from_constants_us"]
    assert found["ratio_ci95"][0] <= found["ratio"] <= found["ratio_ci95"][1]


@needs_namespaces
def test_wrappings_are_predicted_measured_and_counted(tmp_path: Path) -> None:
    document = on_two_hosts()
    names = ["embed", *(f"layers.{number}" for number in range(3)), "head"]
    document["units"] = {
        "units": [
            {"module": name, "forward_us": 3000.0, "backward_us": 6000.0, "activation_bytes": 400_000,
             "input_requires_grad": name != "embed"}
            for name in names
        ],
        "weights": [{"modules": [name], "shape": [100_000]} for name in names],
        "state_factor": 2.0,
    }  # fmt: skip
    before = machine()
    found = commands.result(
        "rehearse", str(write(tmp_path / "profile.json", document)), "--parallel", "fsdp2", "--minutes", "0.6",
        "--dilate", "2", "--shrink", "2",
    )  # fmt: skip
    assert machine() == before
    rows = {row["name"]: row for row in found["rows"]}
    assert {"plan", "per_block", "one_unit", "torchtitan"} == rows.keys()
    for row in rows.values():
        assert row["median_us"] >= 0.99 * 9000.0 * len(names)
        assert row["predicted_us"] > 9000.0 * len(names)
        assert row["difference"] <= 1e-6
        assert row["counted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.01)
    assert rows["one_unit"]["counted_bytes"] > rows["per_block"]["counted_bytes"]
