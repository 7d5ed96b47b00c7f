"""`--parallel fsdp2` of the commands that need no ranks: what is decided, said and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import cluster_document, profile_document, two_nodes, write

from planner.cli.app import main
from planner.documents.profile import parse_profile
from planner.fsdp2.decide import WrappingRequest, optimize_wrapping
from runtime.errors import InputError
from runtime.plan import Plan, load_plan, parse_plan

WIDE = 256


def document(blocks: int = 4, **cluster: Any) -> dict[str, Any]:
    """A model of an embedding, blocks, a norm and a head, measured module by module."""
    units = [
        ("embed", 20.0, 40.0, [4 * WIDE, WIDE]),
        *((f"layers.{i}", 150.0, 300.0, [8 * WIDE, WIDE]) for i in range(blocks)),
    ]
    units += [("norm", 10.0, 20.0, [WIDE]), ("head", 60.0, 120.0, [4 * WIDE, WIDE])]
    found = profile_document([(1000, 100.0)] * 2, cluster=cluster or cluster_document((40.0, 4e-4)))
    found["world"]["device"] = "cuda"
    found["units"] = {
        "units": [
            {"module": name, "forward_us": forward, "backward_us": backward, "activation_bytes": 300_000,
             "input_requires_grad": name != "embed"}
            for name, forward, backward, _ in units
        ],
        "weights": [{"modules": [name], "shape": shape} for name, _, _, shape in units],
        "state_factor": 2.0,
    }  # fmt: skip
    return found


def optimized(found: dict[str, Any], **options: Any) -> Plan:
    return optimize_wrapping(WrappingRequest(profile=parse_profile(found), **options))


def decided(found: dict[str, Any], mib: float | None = None) -> tuple[Any, Any]:
    plan = optimized(found, max_memory_mib=mib)
    assert plan.fsdp2 is not None
    assert plan.fsdp2.peak_bytes is not None
    return plan, plan.fsdp2


def test_a_plan_is_as_fast_as_what_users_have_and_within_its_limit() -> None:
    free, spec = decided(document())
    assert free.predicted.iteration_us <= min(one.iteration_us for one in free.baselines.values())
    assert set(free.baselines) == {"per_block", "one_unit", "torchtitan"}
    assert {module for group in spec.groups for module in group} <= {
        "embed",
        *(f"layers.{i}" for i in range(4)),
        "norm",
        "head",
    }
    times = [free.predicted.iteration_us]
    for share in (0.9, 0.8, 0.75):
        limit = share * spec.peak_bytes / 2**20
        try:
            plan, tight = decided(document(), limit)
        except InputError:
            break
        assert tight.peak_bytes <= limit * 2**20
        times.append(plan.predicted.iteration_us)
    assert len(times) > 1
    assert times == sorted(times)
    points = spec.frontier or ()
    assert points
    assert [point.peak_bytes for point in points] == sorted(point.peak_bytes for point in points)
    assert [point.iteration_us for point in points] == sorted((point.iteration_us for point in points), reverse=True)
    assert free == decided(document())[0]


def test_gradients_are_added_up_in_bfloat16_only_where_that_is_allowed_and_pays() -> None:
    dear = cluster_document((40.0, 4e-2))
    exact, bounded = (optimized(document(**dear), accuracy=one) for one in ("exact", "bounded"))
    assert exact.fsdp2 is not None
    assert bounded.fsdp2 is not None
    assert (exact.accuracy, exact.fsdp2.reduce_dtype) == ("exact", None)
    assert (bounded.accuracy, bounded.fsdp2.reduce_dtype) == ("bounded", "bfloat16")
    assert exact.predicted is not None
    assert bounded.predicted is not None
    assert bounded.predicted.iteration_us < exact.predicted.iteration_us
    assert any("which rounds them" in note for note in bounded.notes)
    assert parse_plan(bounded.to_document()) == bounded
    with pytest.raises(InputError, match=r"fsdp2\.reduce_dtype: found bfloat16 in an exact plan"):
        parse_plan(bounded.to_document() | {"accuracy": "exact"})
    nothing = optimized(document(**cluster_document((0.001, 1e-9))), accuracy="bounded")
    assert nothing.accuracy == "exact"
    assert any("would gain less than 2%" in note for note in nothing.notes)
    on_hosts = document(**dear)
    on_hosts["world"]["device"] = "cpu"
    assert optimized(on_hosts, accuracy="bounded").accuracy == "exact"


def test_a_limit_that_cannot_be_met_says_the_least_that_can() -> None:
    with pytest.raises(InputError, match=r"--max-memory-mib: found .*, expected at least ([\d.]+) MiB") as caught:
        decided(document(), 0.001)
    least = float(str(caught.value).partition("at least ")[2].partition(" MiB")[0].replace(",", ""))
    _, spec = decided(document(), 1.01 * least)
    assert spec.peak_bytes <= 1.01 * least * 2**20
    with pytest.raises(InputError, match="expected at least"):
        decided(document(), 0.98 * least)


def test_on_two_kinds_of_link_a_copy_for_each_node_is_looked_at() -> None:
    """Between nodes bytes are dear, and parts of gradients few."""
    plan, spec = decided(document(**two_nodes(slow=0.05, fast=1e-4)))
    assert spec.shard_ranks == 2
    assert any("not rehearsed" in note for note in plan.notes)


def test_tied_modules_are_left_to_the_model() -> None:
    found = document()
    found["units"]["weights"][0]["modules"] = ["embed", "head"]
    _, spec = decided(found)
    assert not {"embed", "head"} & {module for group in spec.groups for module in group}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("layers.0", "found 'layers.0' once more"),
        ("layers.0.mlp", "found 'layers.0.mlp', a part of the unit 'layers.0'"),
    ],
)
def test_units_that_are_none_are_refused(module: str, words: str) -> None:
    found = document()
    found["units"]["units"][2]["module"] = module
    with pytest.raises(InputError, match=rf"profile: \$\.units\.units\[2\]\.module: {words}"):
        parse_profile(found)


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        main(arguments)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, plan, trace = (str(tmp_path / name) for name in ("profile.json", "plan.json", "trace.json"))
    write(Path(profile), document())
    code, out, _ = run(["optimize", profile, "--parallel", "fsdp2", "-o", plan], capsys)
    assert code == 0
    assert "shorter than a group for each block with FSDP2's own rules" in out
    saved = load_plan(plan)
    assert saved.buckets == ()
    assert saved.fsdp2 is not None
    code, out, _ = run(["explain", plan, "--trace", trace], capsys)
    assert code == 0
    assert "groups in the order of forward" in out
    assert "time over memory" in out
    names = {event["name"] for event in json.loads(Path(trace).read_text())["traceEvents"]}
    assert {f"all-gather {saved.fsdp2.groups[0][0]}", "forward head", "backward embed"} <= names
    for arguments, words in (
        (["explain", plan, "--html", str(tmp_path / "page.html")], "found a plan for FSDP2, expected one with buckets"),
        (["export", plan, "--to", "ddp"], "FSDP2 is a stock executor itself"),
        (["optimize", profile, "--parallel", "fsdp1"], "--parallel: found 'fsdp1', expected fsdp2"),
        (["optimize", profile, "--parallel", "fsdp2", "--solver", "cpsat"], "--solver: found cpsat, which is"),
        (["optimize", profile, "--parallel", "fsdp2", "--max-rank", "3"], "--max-rank: found 3, which is"),
        (["compare", "job.py:job", "--plan", plan], "compare it with --parallel fsdp2"),
        (["compare", f"{__file__}:document", "--plan", plan, "--parallel", "fsdp2"], "--profile: missing;"),
    ):  # fmt: skip
        code, _, said = run(arguments, capsys)
        assert (code, words in said) == (2, True), (arguments, said)
