"""Interfaces of plans: drop-in unless something else is allowed by name; what that would gain is said once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from builders import cluster_document, profile_document, run, write

from planner.decide.optimize import optimize
from planner.documents.profile import Profile, parse_profile
from planner.report.listing import make_console
from planner.report.page import page_text
from planner.report.tables import bucket_form, print_plan
from runtime.errors import InputError
from runtime.plan import Plan, load_plan, parse_plan

Rows = list[tuple[int, float]]

NS_PER_ELEMENT = 2.0
"""Of backward, so that models differ in how their time is spread as they do in size."""


def rows(*sizes: int) -> Rows:
    """Gradients with their part of backward."""
    return [(size, 5.0 + size * NS_PER_ELEMENT / 1e3) for size in sizes]


def encoder(layers: int, width: int, outside: int) -> Rows:
    """A transformer, from its last layer to its embeddings: four matrices and their biases, two normalizations."""
    layer = [4 * width * width, width, 4 * width * width, 4 * width, width * width, width, 3 * width * width, 3 * width]
    return rows(*([width, width, *layer, width, width] * layers), outside, width)


def resnet() -> Rows:
    """ResNet-18, roughly: from the classifier to the first convolution."""
    stages = [size for width in (512, 256, 128, 64) for size in [9 * width * width, width, width] * 4]
    return rows(1000, 512_000, *stages, 9408)


MODELS: dict[str, Callable[[], Rows]] = {
    "bert": partial(encoder, 12, 768, 30522 * 768),
    "gpt2": partial(encoder, 12, 768, 50257 * 768),
    "vit": partial(encoder, 12, 384, 3 * 16 * 16 * 384),
    "resnet": resnet,
}
OPTIMIZERS = {"AdamW": 2, "Adam": 2, "SGD": 1}
"""Name → tensors of state for each parameter."""

CLUSTERS = {
    "2 hosts, 1 Gbit/s": (2, 1, 100.0, 8e-3),
    "8 hosts, 25 Gbit/s": (8, 1, 60.0, 4e-4),
    "8 GPUs": (1, 8, 20.0, 1e-5),
}
"""Nodes, ranks on each, start-up time and µs per byte of an all-reduce."""


@cache
def profile(model: str, optimizer: str, machines: str, update_share: float = 0.15) -> Profile:
    """A step whose update takes a share of it, with both halves of the all-reduce measured."""
    nodes, ranks_per_node, alpha_us, beta = CLUSTERS[machines]
    cluster = cluster_document((alpha_us, beta), nodes=nodes, ranks_per_node=ranks_per_node)
    for half in ("reduce_scatter", "all_gather"):
        cluster["collectives"][half] = {"alpha_us": alpha_us / 2, "beta_us_per_byte": beta / 2}
    of = MODELS[model]()
    compute_us = 1.5 * sum(time_us for _, time_us in of)
    made = profile_document(of, update_us=update_share * compute_us, cluster=cluster)
    made["compute"]["optimizer"] = {
        "name": optimizer, "adaptive": optimizer != "SGD", "elementwise": True, "holds_all": True,
        "state_bytes": 4 * OPTIMIZERS[optimizer] * sum(numel for numel, _ in of),
    }  # fmt: skip
    return parse_profile(made)


def said(plan: Plan) -> list[str]:
    """The notes that speak of sharing."""
    return [note for note in plan.notes if re.search("shar|ZeRO", note)]


@pytest.mark.parametrize("model", MODELS)
def test_only_what_is_allowed_shares_the_step(model: str) -> None:
    """Without --allow never, and with it where that is faster; the one line is where it would be taken."""
    taken = 0
    for optimizer in OPTIMIZERS:
        for machines in CLUSTERS:
            given = profile(model, optimizer, machines)
            plan, allowed = optimize(given), optimize(given, allow=["sharded-step"])
            assert not plan.sharded
            assert plan.interfaces == ()
            assert "interface" not in plan.to_document()
            assert all(bucket_form(bucket).startswith("all_reduce") for bucket in plan.buckets)
            assert allowed.interfaces == (("sharded-step",) if allowed.sharded else ())
            assert len(said(plan)) == allowed.sharded
            assert allowed.sharded or allowed.buckets == plan.buckets
            taken += allowed.sharded
    assert taken


def printed(plan: Plan, *, buckets: bool = False) -> str:
    """What the terminal shows."""
    console = make_console()
    with console.capture() as captured:
        print_plan(plan, console, buckets=buckets)
    return captured.get().replace("\n", " ")


def test_one_line_says_what_sharing_would_gain() -> None:
    """In every form of the report; equal inputs give equal plans."""
    given = profile("bert", "AdamW", "8 GPUs")
    plan = optimize(given)
    (line,) = said(plan)
    assert re.search(r"would take [\d.]+ ms a step instead of [\d.]+ ms, and [\d,]+ MiB .* instead of [\d,]+ MiB", line)
    assert line.endswith("--allow sharded-step")
    assert printed(plan).count("--allow sharded-step") == page_text(plan).count("--allow sharded-step") == 1
    assert json.dumps(plan.to_document()) == json.dumps(optimize(given).to_document())


def test_what_is_not_drop_in_is_shown() -> None:
    plan = optimize(profile("bert", "AdamW", "8 GPUs"), allow=["sharded-step"])
    for text in (printed(plan, buckets=True), page_text(plan)):
        assert "plan (exact, sharded-step)" in text
        assert "interface sharded-step: between backward and step gradients can be scaled" in text
        assert "reduce_scatter, all_gather" in text
        assert "all_reduce/library" not in text
    assert "interface" not in printed(optimize(profile("bert", "AdamW", "8 GPUs")), buckets=True)


@pytest.mark.parametrize("model", ["bert", "resnet"])
def test_nothing_is_said_of_what_gains_nothing(model: str) -> None:
    """Neither with slow links, nor without a limit of memory, nor where a pass shares nothing."""
    slow = profile(model, "AdamW", "2 hosts, 1 Gbit/s")
    assert said(optimize(slow)) == []
    assert said(optimize(slow, passes="merge")) == said(optimize(slow, passes="merge,shard_updates{step=never}")) == []
    (why,) = said(optimize(slow, allow=["sharded-step"]))
    assert why.startswith("ranks do not share the optimizer's step, as they may: that is predicted")


def test_a_limit_of_memory_allows_nothing_and_says_what_would_fit() -> None:
    slow = profile("bert", "AdamW", "2 hosts, 1 Gbit/s")
    shared, whole = 1400.0, 1656.0
    assert said(optimize(slow, max_memory_mib=whole)) == []
    plan = optimize(slow, max_memory_mib=whole - 1)
    assert not plan.sharded
    (line,) = said(plan)
    assert line.startswith("a rank needs 1,656 MiB for weights, gradients")
    assert "would fit, with " in line
    assert line.endswith("--allow sharded-step")
    assert optimize(slow, max_memory_mib=whole - 1, allow=["sharded-step"]).sharded
    (line,) = said(optimize(slow, max_memory_mib=shared / 2))
    assert "too much as well: take more ranks, or a smaller batch" in line
    assert "--allow" not in line


def test_memory_is_no_reason_where_sharing_saves_none() -> None:
    """The largest message takes as much as momentum does: "29.7 MiB instead of 29.7 MiB" is no gain."""
    of = [(1_000_000, 100.0)]
    cluster = cluster_document((50.0, 0.01), nodes=2)
    made = profile_document(of, update_us=10.0, cluster=cluster, ranks=2)
    made["compute"]["optimizer"] = {
        "name": "SGD",
        "adaptive": False,
        "elementwise": True,
        "holds_all": True,
        "state_bytes": 8_000_000,
    }
    for memory_mib in (None, 10.0):
        for allow in ([], ["sharded-step"]):
            plan = optimize(parse_profile(made), max_memory_mib=memory_mib, allow=allow)
            assert not plan.sharded
            assert not any("instead of" in note or "would fit" in note for note in plan.notes)
    assert plan.notes[-1].endswith("more than the 10 MiB that it has: take more ranks, or a smaller batch")


def test_lossy_plans_are_drop_in_too() -> None:
    """What sharing would gain is said against the plan that is taken."""
    given = profile("bert", "SGD", "8 hosts, 25 Gbit/s")
    for accuracy in ("bounded", "relaxed"):
        plan = optimize(given, accuracy=accuracy)  # type: ignore[arg-type]
        assert plan.interfaces == ()
        assert plan.fallback is None or not plan.fallback.sharded
        assert all(not one.sharded for one in (plan.alternatives or {}).values())


def test_outer_steps_have_no_sharded_step_and_say_so() -> None:
    taken = 0
    for machines in CLUSTERS:
        given = profile("bert", "AdamW", machines, 0.8)
        plan = optimize(given, accuracy="relaxed", allow=["outer", "sharded-step"], compress="none", max_period=8)
        assert not (plan.outer and plan.sharded)
        if plan.outer and optimize(given, allow=["sharded-step"]).sharded:
            assert any("not sharded, as it may be: relaxed plans are made" in note for note in plan.notes)
            taken += 1
    assert taken


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"allow": ["shared-step"]},
            "--allow: found 'shared-step', which is unknown; known: sharded-step",
        ),
        ({"allow": ["bfloat16-weights"]}, "which no plan of `planner optimize` asks for yet"),
        ({"passes": "merge,late_gather{when=always}"}, "expected --allow late-gather with it"),
        ({"allow": "shared-step"}, "--allow: found 'shared-step', which is unknown"),
        ({"passes": "merge,shard_updates{step=always}"}, "expected --allow sharded-step with it"),
    ],
)
def test_what_cannot_be_allowed_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as refused:
        optimize(profile("resnet", "AdamW", "8 GPUs"), **options)
    assert words in str(refused.value)


def test_the_command_line_allows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = write(tmp_path / "profile.json", profile("resnet", "AdamW", "8 GPUs").to_document())
    path = str(tmp_path / "plan.json")

    asked = ("optimize", given, "-o", path)
    run(*asked)
    assert capsys.readouterr().out.count("--allow sharded-step") == 1
    assert load_plan(path).interface is None
    run(*asked, "--allow", "sharded-step")
    assert load_plan(path).interface == ("sharded-step",)
    run(*asked, "--allow", "sharded-step,zero3", code=2)
    assert "planner: --allow: found 'zero3'" in capsys.readouterr().err


def test_plans_that_contradict_themselves_are_refused() -> None:
    """As those are that were written before plans had interfaces."""
    shared = optimize(profile("resnet", "AdamW", "8 GPUs"), allow=["sharded-step"]).to_document()
    drop_in = optimize(profile("resnet", "AdamW", "8 GPUs")).to_document()
    assert parse_plan(shared).interfaces == ("sharded-step",)
    assert parse_plan(drop_in | {"interface": "drop-in"}).interfaces == ()
    late = shared | {"interface": ["late-gather"]}
    late["updates"] = {"step": shared["updates"]["step"] | {"gather": "forward"}}
    assert parse_plan(late).gathers
    assert parse_plan(shared | {"interface": ["late-gather"]}).sharded
    old = {name: value for name, value in shared.items() if name != "interface"}
    for document, words in (
        (old, "old.json: $.interface: found no interface, so drop-in, beside $.updates.step, where ranks share"),
        (old | {"interface": "drop-in"}, "old.json: $.interface: found drop-in, beside $.updates.step"),
        (old, "or make the plan again with `planner optimize`, which shares the step with --allow sharded-step alone"),
        (drop_in | {"fallback": shared}, "$.interface: found no interface, so drop-in, beside $.fallback.updates.step"),
        (drop_in | {"interface": ["sharded"]}, "old.json: $.interface[0]: found 'sharded', which is unknown; known"),
        (drop_in | {"interface": ["sharded-step", "zero-3"]}, "$.interface[1]: found 'zero-3', which is unknown"),
        (
            late | {"interface": ["sharded-step"]},
            "$.interface: found sharded-step, beside $.updates.step, where",
        ),
        (drop_in | {"fallback": late}, "where weights come beside the next forward"),
        (drop_in | {"interface": []}, "old.json: $.interface: found []"),
        (drop_in | {"interface": "sharded-step"}, 'old.json: $.interface: found "sharded-step", expected'),
    ):
        with pytest.raises(InputError) as refused:
            parse_plan(document, "old.json")
        assert words in str(refused.value)
