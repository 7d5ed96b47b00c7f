"""Reading documents: what is wrong is refused with file, JSON path, what was found and what was expected."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contract_examples
import pytest
from builders import cluster_document, profile_document

from planner.documents.profile import Cluster, load_cluster, load_profile, parse_cluster, parse_profile
from runtime.errors import InputError
from runtime.plan import CompressorSpec, DelaySpec, LocalAsyncSpec, Plan, load_plan, parse_plan
from runtime.plan.strict_json import dump

LOADERS: dict[str, Callable[[Path], Any]] = {"profile": load_profile, "cluster": load_cluster, "plan": load_plan}


def sound(kind: str) -> dict[str, Any]:
    """A document without fault."""
    if kind == "profile":
        return profile_document([(10, 1.0), (20, 2.0)], cluster=cluster_document())
    if kind == "cluster":
        return cluster_document(samples=[[1, 2], [3, 4]])
    return {
        "schema": "planner.plan/1",
        "model": {"name": "test"},
        "world": {"ranks": 2},
        "accuracy": "exact",
        "buckets": [{"gradients": ["a", "b"]}, {"gradients": ["c"]}],
    }


def refusal(path: Path, kind: str, text: str | bytes) -> str:
    """The message with which a file is refused."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as caught:
        LOADERS[kind](path)
    message = str(caught.value)
    assert all(line.startswith(f"{path}: ") for line in message.splitlines())
    return message


def changed(document: Any, place: str, value: Any) -> Any:
    """A copy with the field at `a.0.b` set, or taken out when the value is ..., or renamed when it is `→ name`."""
    document = copy.deepcopy(document)
    *parents, last = [int(step) if step.isdecimal() else step for step in place.split(".")]
    owner = document
    for step in parents:
        owner = owner[step]
    if value is ...:
        del owner[last]
    elif isinstance(value, str) and value.startswith("→ "):
        owner[value.removeprefix("→ ")] = owner.pop(last)
    else:
        owner[last] = value
    return document


WRONG_VALUES = [
    ("profile", "layers", [{"name": "a", "kind": "conv", "flops": 1.0, "activation_bytes": 1.0, "inputs": ["a"]}],
     "$.layers[0].inputs: found 'a', expected names of layers before it"),
    ("profile", "compute.forward_us", -1, "$.compute.forward_us: found -1, expected greater than or equal to 0"),
    ("profile", "compute.forward_us", "fast", '$.compute.forward_us: found "fast", expected a valid number'),
    ("profile", "compute.forward_us", True, "$.compute.forward_us: found true, expected a valid number"),
    ("profile", "compute.forward_us", None, "$.compute.forward_us: found null, expected a valid number"),
    ("profile", "compute.update_us", 1e300, "$.compute.update_us: found 1e+300, expected less than or equal to"),
    ("profile", "compute.gradients", [], "$.compute.gradients: found [], expected at least 1 item"),
    ("profile", "compute.gradients", {}, "$.compute.gradients: found {}, expected a valid"),
    ("profile", "compute.gradients.1.numel", 2.5, "$.compute.gradients[1].numel: found 2.5, expected a valid integer"),
    ("profile", "compute.gradients.1.numel", -3, "$.compute.gradients[1].numel: found -3, expected greater than"),
    ("profile", "compute.gradients.1.dtype", "int3", "$.compute.gradients[1].dtype: found \"int3\", expected"),
    ("profile", "compute.gradients.1.name", "", '$.compute.gradients[1].name: found "", expected at least 1 character'),
    ("profile", "compute.gradients.1.name", "g0", "$.compute.gradients[1].name: found 'g0', which is gradient 0"),
    ("profile", "compute.gradients.0.backward_us", ..., "$.compute.gradients[0].backward_us: missing field"),
    ("profile", "world.ranks", 0, "$.world.ranks: found 0, expected greater than or equal to 1"),
    ("profile", "schema", "planner.profile/2", '$.schema: found schema "planner.profile/2", expected "planner'),
    ("profile", "schema", ..., '$.schema: found no field "schema", expected "planner.profile/1"'),
    ("profile", "model.fingerprint", "md5:1", '$.model.fingerprint: found "md5:1", expected'),
    ("profile", "cluster.schema", "planner.cluster/9", '$.cluster.schema: found "planner.cluster/9", expected'),
    ("profile", "cluster.nodes", -4, "$.cluster.nodes: found -4, expected greater than or equal to 1"),
    ("profile", "compute.forward_us", "→ forward_s", '$.compute.forward_s: unknown field; did you mean "forward_us"?'),
    ("profile", "world.rank", 1, '$.world.rank: unknown field; did you mean "ranks"?'),
    ("cluster", "nodes", ..., "$.nodes: missing field; add it"),
    ("cluster", "samples.all_reduce", [], "$.samples.all_reduce: found [], expected at least 1 item"),
    ("cluster", "samples.all_reduce.1", [1], "$.samples.all_reduce[1][1]: missing field"),
    ("cluster", "samples.all_reduce.1", [1, 2, 3], "$.samples.all_reduce[1]: found [1, 2, 3], expected at most 2"),
    ("cluster", "samples.all_reduce.1.1", -0.5, "$.samples.all_reduce[1][1]: found -0.5, expected greater than"),
    ("cluster", "contention", {"compute": 0.9}, "$.contention.compute: found 0.9, expected greater than or equal to 1"),
    ("cluster", "contention", {"gathers_by_size": [[1024, 2, 3]]},
     "$.contention: found gathers_by_size without by_size, expected both, or by_size alone"),
    ("profile", "cluster.contention", {"compute": 1.5, "gathers_by_size": [[1024, 2, 3]]},
     "$.cluster.contention: found gathers_by_size without by_size, expected both, or by_size alone"),
    ("cluster", "all_reduce_algorithm", "star", "$.all_reduce_algorithm: found \"star\", expected 'ring', 'recursive"),
    ("cluster", "sparsify", {"alpha_us": -1, "beta_us_per_byte": 0}, "$.sparsify.alpha_us: found -1, expected greater"),
    ("cluster", "back_to_bakc", {}, '$.back_to_bakc: unknown field; did you mean "back_to_back"?'),
    ("cluster", "schema", "planner.profile/1", '$.schema: found schema "planner.profile/1", expected "planner'),
    ("plan", "buckets", [], "$.buckets: found [], expected at least 1 item"),
    ("plan", "buckets.1.gradients", [], "$.buckets[1].gradients: found [], expected at least 1 item"),
    ("plan", "buckets.1.gradients", ["c", "a"], "$.buckets[1].gradients[1]: found 'a', which is in bucket 0 already"),
    ("plan", "buckets.0.gradients", ["a", "a"], "$.buckets[0].gradients[1]: found 'a', which is in bucket 0 already"),
    ("plan", "buckets.0.compresor", {}, '$.buckets[0].compresor: unknown field; did you mean "compressor"?'),
    ("plan", "buckets.0.compressor", {"name": "topk", "density": 1.5}, "$.buckets[0].compressor.density: found 1.5"),
    ("plan", "buckets.0.compressor", {"name": "topk", "k": {"fc": 0}}, "$.buckets[0].compressor.k.fc: found 0"),
    ("plan", "accuracy", "lossy", "$.accuracy: found \"lossy\", expected 'exact', 'bounded' or 'relaxed'"),
    ("plan", "world", ..., "$.world: missing field; add it"),
    ("plan", "world.ranks", 4.0, "$.world.ranks: found 4.0, expected a valid integer"),
    ("plan", "world", {"ranks": 4, "nodes": 3}, "$.world: found 4 ranks on 3 nodes, expected as many ranks on each"),
    ("plan", "world", {"ranks": 2, "nodes": 4}, "$.world: found 2 ranks on 4 nodes, expected as many ranks on each"),
    ("plan", "fsdp2", {"groups": []}, "$.buckets: found 2 beside fsdp2, expected []"),
    ("plan", "fsdp2", {"groups": [[]]}, "$.fsdp2.groups[0]: found [], expected at least 1 item"),
    ("plan", "fsdp2", {"group": []}, '$.fsdp2.group: unknown field; did you mean "groups"?'),
    ("plan", "fsdp2", {"groups": [], "backward_prefetch": {"a": []}}, "$.fsdp2.backward_prefetch.a: found [], expect"),
    ("plan", "fsdp2", {"groups": [], "reshard_after_forward": {"a": 1}}, "$.fsdp2.reshard_after_forward.a: found 1, e"),
    ("plan", "fsdp2", {"groups": [], "reshard_after_forward": {"a": "no"}}, "$.fsdp2.reshard_after_forward.a: found"),
    ("plan", "delay", {"steps": 0}, "$.delay.steps: found 0, expected greater than or equal to 1"),
    ("plan", "outer", {"every": 0}, "$.outer.every: found 0, expected greater than or equal to 1"),
    ("plan", "outer", {"every": 4, "mix": 1.0}, "$.outer.mix: found 1.0, expected less than 1"),
    ("plan", "outer", {"every": 4, "optimizer": {"lr": 0.0}}, "$.outer.optimizer.lr: found 0.0, expected greater"),
    ("plan", "outer", {"every": 4, "optimizer": {"name": "adam"}}, "$.outer.optimizer.name: found 'adam', expected n"),
    ("plan", "outer", {"every": 4, "delay_steps": 4}, "$.outer.delay_steps: found 4, expected fewer than the 4 steps"),
    ("plan", "outer", {"every": 1, "fragments": [["a", "b"], ["c"]]}, "$.outer.fragments: found 2, expected at most 1"),
    ("plan", "outer", {"every": 4, "fragments": [["a", "b"], ["b", "c"]]},
     "$.outer.fragments[1][0]: found 'b', which is in fragment 0 already; expected each gradient in exactly one"),
    ("plan", "outer", {"every": 4, "fragments": [["a", "b"]]}, "$.outer.fragments: found no fragment with 'c'"),
    ("plan", "outer", {"every": 4, "fragments": [["a"], ["b", "c"]]},
     "$.buckets[0].gradients: found 'a' of fragment 0 and 'b' of fragment 1, expected one fragment's"),
    ("plan", "local_async", {"updaters": 2, "full_fraction": 2}, "$.local_async.full_fraction: found 2, expected less"),
    ("plan", "local_async", {"updaters": 0}, "$.local_async.updaters: found 0, expected greater than or equal to 1"),
    ("plan", "local_async", {"updaters": 9999}, "$.local_async.updaters: found 9999, expected less than or equal to"),
    ("plan", "local_async", {"updaters": 2, "then_every": 0}, "$.local_async.then_every: found 0, expected greater"),
    ("plan", "local_async", {"updaters": 2, "blocks": []}, "$.local_async.blocks: found [], expected at least 1 item"),
    ("plan", "local_async", {"updaters": 2, "blocks": [["a"], []]}, "$.local_async.blocks[1]: found [], expected at"),
    ("plan", "local_async", {"updaters": 1, "blocks": [["a"], ["b", "c"]]},
     "$.local_async.blocks: found 2 blocks for 1 updaters, expected at most as many"),
    ("plan", "local_async", {"updaters": 2, "blocks": [["a", "b"], ["c", "d"]]},
     "$.local_async.blocks[1][1]: found 'd', which is in no bucket; expected a gradient of the plan"),
    ("plan", "local_async", {"updaters": 2, "blocks": [["a", "b"], ["b", "c"]]},
     "$.local_async.blocks[1][0]: found 'b', which is in block 0 already; expected each gradient in exactly one"),
    ("plan", "local_async", {"updaters": 2, "blocks": [["c", "a"], ["b"]]},
     "$.local_async.blocks[0]: found 'a' and 'c' without 'b', which becomes ready between them"),
    ("plan", "local_async", {"updaters": 3, "blocks": [["b"]]},
     "$.local_async.blocks: found no block with 'a' and 1 more, expected each gradient in exactly one block"),
    ("plan", "schema", 1, '$.schema: found schema 1, expected "planner.plan/1"'),
    ("plan", "zzz", 1, "$.zzz: unknown field; remove it or use the version that knows it"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "place", "value", "message"), WRONG_VALUES)
def test_wrong_value(tmp_path: Path, kind: str, place: str, value: Any, message: str) -> None:
    text = json.dumps(changed(sound(kind), place, value))
    assert f"{tmp_path / 'x.json'}: {message}" in refusal(tmp_path / "x.json", kind, text)


def test_nested_plans_are_checked_too(tmp_path: Path) -> None:
    twice = changed(sound("plan"), "buckets.1.gradients", ["b"])
    for field, place in (("fallback", "$.fallback"), ("alternatives", "$.alternatives.bounded")):
        document = changed(sound("plan"), field, twice if field == "fallback" else {"bounded": twice})
        message = refusal(tmp_path / "x.json", "plan", json.dumps(document))
        assert f"{place}.buckets[1].gradients[0]: found 'b', which is in bucket 0 already" in message


def test_many_faults_are_counted(tmp_path: Path) -> None:
    rows = [(10, -1.0)] * 9
    message = refusal(tmp_path / "x.json", "profile", json.dumps(profile_document(rows)))
    assert len(message.splitlines()) == 6
    assert message.endswith("and 4 more")


WRONG_TEXTS: list[tuple[str | bytes, str]] = [
    ("", "not valid JSON at line 1, column 1"),
    ("planner", "not valid JSON at line 1, column 1"),
    ('{"schema": "planner.plan/1",\n "model": {"na', "not valid JSON at line 2, column 12"),
    ('{"a": 1,}', "not valid JSON at line 1"),
    (b'{"a": "\xff"}', "expected UTF-8 text, found byte 7 that is not"),
    ("[]", "$: found a list, expected an object"),
    ("null", "$: found null, expected an object"),
    ("3", "$: found a number, expected an object"),
    ('"text"', "$: found a string, expected an object"),
    ("true", "$: found a boolean, expected an object"),
    ('{"updates": {"a": [0, NaN]}}', "$.updates.a[1]: found NaN, expected a finite number"),
    ('{"updates": {"a": -Infinity}}', "$.updates.a: found -Infinity, expected a finite number"),
    ('{"updates": {"a": 1e999}}', "$.updates.a: found Infinity, expected a finite number"),
    ('{"world": {"ranks": 1, "nodes": 1, "ranks": 2}}', "$.world.ranks: found the field twice in one object, expected"),
    ('{"buckets": [{}, {"a": 1, "a": 1}]}', "$.buckets[1].a: found the field twice in one object, expected it once"),
    ('{"schema": "planner.plan/1", "schema": "planner.plan/1"}', "$.schema: found the field twice in one object"),
    ('{"model": {"name": "\\ud800"}}', '$.model.name: found "\\ud800", expected Unicode text'),
    ('{"model": {"\\udc00": 1}}', '$.model: found "\\udc00", expected Unicode text'),
    ('{"a":' + "[" * 150 + "]" * 150 + "}", "found more than 100 levels of nesting, expected"),
    ('{"a":' * 100_000, "nested too deeply"),
    ('{"a": ' + "9" * 5000 + "}", "not valid JSON: Exceeds the limit"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_TEXTS)
@pytest.mark.parametrize("kind", LOADERS)
def test_wrong_text(tmp_path: Path, kind: str, text: str | bytes, message: str) -> None:
    assert message in refusal(tmp_path / "x.json", kind, text)


@pytest.mark.parametrize("place", ["compute.forward_us", "compute.gradients.0.numel", "cluster.nodes"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_non_finite_number_in_place(tmp_path: Path, place: str, number: str) -> None:
    """The same message wherever the number stands, whatever the field's type."""
    document = changed(sound("profile"), place, "HERE")
    message = refusal(tmp_path / "x.json", "profile", json.dumps(document).replace('"HERE"', number))
    path = "$." + place.replace(".0", "[0]")
    found = number.replace("1e999", "Infinity")
    assert message == f"{tmp_path / 'x.json'}: {path}: found {found}, expected a finite number; correct it"


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_wrong_files(tmp_path: Path, load: Callable[[Path], Any]) -> None:
    with pytest.raises(InputError, match=r"absent\.json: no such file"):
        load(tmp_path / "absent.json")
    with pytest.raises(InputError, match="found a directory, expected a JSON file"):
        load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be read: Not a directory"):
        load(tmp_path / "file" / "x.json")


def test_parsed_documents_are_refused_as_files_are() -> None:
    """A dictionary from elsewhere may be deeper than any JSON parser goes."""
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    with pytest.raises(InputError, match=r"plan: \$: not a document of ours"):
        parse_plan({**sound("plan"), "updates": {"a": deep}})


def test_contract_profile() -> None:
    document = json.loads(contract_examples.PROFILE)
    profile = parse_profile(document)
    assert profile.cluster is None
    assert profile.compute.gradients[0].size_bytes == 40
    assert profile.to_document() == document
    del document["cluster"]
    assert parse_profile(document) == profile
    layers = json.loads(contract_examples.LAYERS)
    assert parse_profile({**document, "layers": layers}).to_document()["layers"] == layers


def test_contract_cluster() -> None:
    document = json.loads(contract_examples.CLUSTER)
    cluster = parse_cluster(document)
    assert cluster.ranks == 8
    assert cluster.samples == {"all_reduce": ((1024.0, 700.1), (1048576.0, 2300.0))}
    assert dump(cluster) == {**document, "all_reduce_algorithm": "ring"}
    line = {"alpha_us": 1.0, "beta_us_per_byte": 0.0}
    optional = {
        "sparsify": {"exact": line, "mstopk": line},
        "unpack": {"exact": line},
        "push_pack": line,
        "local_update": line,
        "pull_take": line,
        "all_reduce_algorithm": "halving_doubling",
        "contention": {"compute": 1.07, "network": 1.12},
        "collectives": {"intra/reduce_scatter": line, "inter/all_gather": line, "all_reduce": line},
    }
    assert dump(parse_cluster({**document, **optional})) == {**document, **optional}


def test_cluster_defaults() -> None:
    cluster = parse_cluster({"schema": "planner.cluster/1", "nodes": 3})
    assert cluster == Cluster(nodes=3, ranks_per_node=1, nics_per_node=1, all_reduce_algorithm="ring")


def test_contract_plan() -> None:
    document = json.loads(contract_examples.PLAN)
    plan = parse_plan(document)
    assert plan.gradients == ("fc.bias", "fc.weight")
    assert plan.to_document() == document
    assert parse_plan({key: document[key] for key in ("schema", "model", "world", "accuracy", "buckets")}) == Plan(
        model=plan.model, world=plan.world, accuracy="exact", buckets=plan.buckets
    )


def test_contract_plan_options() -> None:
    document = json.loads(contract_examples.PLAN)
    nested = {key: value for key, value in document.items() if value is not None} | {"notes": ["the exact plan"]}
    options = {
        "delay": json.loads(contract_examples.DELAY),
        "outer": json.loads(contract_examples.OUTER),
        "local_async": json.loads(contract_examples.LOCAL_ASYNC),
        "fallback": nested,
        "alternatives": {"bounded": nested},
        "phase_order": [[0, 0], [0, 1]],
        "updates": {
            "norms": {"shares": [["fc"], []], "replicated_us": 9.5, "shared_us": 1.5, "method": "LPT"},
            "operator": {"owners": {"fc": 1}, "gathers": [["fc"]], "inside": [0], "replicated_us": 9.5},
        },
    }
    for compressor in map(json.loads, contract_examples.COMPRESSORS):
        options["buckets"] = [{**document["buckets"][0], "compressor": compressor}]
        plan = parse_plan({**document, **options})
        assert plan.to_document() == {**document, **options}
        assert plan.buckets[0].compressor == CompressorSpec(**compressor)


def test_exact_first_steps_need_a_bucket_that_is_compressed_later() -> None:
    document = sound("plan") | {"accuracy": "bounded", "from_step": 100}
    narrow = json.loads(contract_examples.COMPRESSORS[0])
    buckets = [{**bucket, "compressor": narrow} for bucket in document["buckets"]]
    plan = parse_plan({**document, "buckets": buckets})
    assert (plan.from_step, plan.to_document()["from_step"]) == (100, 100)
    whole = plan.uncompressed()
    assert (whole.accuracy, whole.from_step, whole.compresses) == ("exact", None, False)
    assert whole.gradients == plan.gradients
    with pytest.raises(InputError, match=r"from_step: found 100 in a plan that compresses no bucket.*take it out"):
        parse_plan(document)
    with pytest.raises(InputError, match=r"from_step: found 100 in an exact plan.*--accuracy bounded"):
        parse_plan({**document, "accuracy": "exact", "buckets": buckets})
    with pytest.raises(InputError, match=r"from_step: found 0"):
        parse_plan({**document, "from_step": 0, "buckets": buckets})


def test_blocks_may_name_their_gradients_in_any_order() -> None:
    blocks = [["b", "a"], ["c"]]
    plan = parse_plan({**sound("plan"), "local_async": {"updaters": 4, "blocks": blocks}})
    assert plan.local_async == LocalAsyncSpec(updaters=4, blocks=(("b", "a"), ("c",)))


def test_contract_defaults_of_delay_and_local_async() -> None:
    plan = parse_plan({**sound("plan"), "delay": {"steps": 4}, "local_async": {"updaters": 4, "blocks": None}})
    delay = {key: value for key, value in json.loads(contract_examples.DELAY).items() if key != "steps"}
    assert plan.delay == DelaySpec(steps=4, **delay)
    named = {key: value for key, value in json.loads(contract_examples.LOCAL_ASYNC).items() if key != "blocks"}
    assert plan.local_async == LocalAsyncSpec(**named)


GATHERS = (
    ({"gather": "later"}, '$.updates.step.gather: found "later"'),
    ({"gathers": []}, "$.updates.step.gathers: found []"),
    ({"gathers": [[0], []]}, "$.updates.step.gathers[1]: found []"),
    ({"gathers": [[0, -1]]}, "$.updates.step.gathers[0][1]: found -1"),
    ({"gathers": [[0], [2]]}, "$.updates.step.gathers[1]: found bucket 2, expected one of 2: correct it, or make"),
    ({"gathers": [[1], [0, 1]]}, "$.updates.step.gathers[1]: found bucket 1, which is in gather 0 already; expected"),
    ({"gathers": [[1]]}, "$.updates.step.gathers: found none with bucket 0, expected each bucket in exactly one: add"),
    ({"gathers": [[0], [1]], "gather": "step"}, "gathers: found groups of buckets, but weights are gathered inside"),
    ({"sharded": False}, '$.updates.step.gather: found "forward" beside "sharded": false; expected "sharded": true'),
)


@pytest.mark.parametrize(("changes", "words"), GATHERS)
def test_gathers_that_are_none(changes: dict[str, Any], words: str) -> None:
    document = sound("plan") | {"interface": ["late-gather"]}
    step = {"sharded": True, "gather": "forward", "gathers": [[1, 0]]}
    assert parse_plan(document | {"updates": {"step": step}}).gathers == ((1, 0),)
    with pytest.raises(InputError, match=re.escape(words)):
        parse_plan(document | {"updates": {"step": step | changes}})


def test_gathers_without_a_gap_come_in_any_order() -> None:
    buckets = [{"gradients": [name]} for name in "abc"]
    document = sound("plan") | {"interface": ["late-gather"], "buckets": buckets}

    def gathering(groups: list[list[int]]) -> Any:
        step = {"sharded": True, "gather": "forward", "gathers": groups}
        return parse_plan(document | {"updates": {"step": step}}).gathers

    assert gathering([[0], [1, 2]]) == ((0,), (1, 2))
    assert gathering([[2, 1], [0]]) == ((2, 1), (0,))
    words = (
        "$.updates.step.gathers[1]: found buckets 0 and 2 without bucket 1, which lies between them; expected buckets "
        "that follow one another: gather 1 with them, or make two gathers of them"
    )
    with pytest.raises(InputError, match=re.escape(words)):
        gathering([[1], [2, 0]])


def test_late_gathers_have_an_interface_of_their_own() -> None:
    step = {"sharded": True, "gather": "forward"}
    document = sound("plan") | {"updates": {"step": step}}
    assert parse_plan(document | {"interface": ["late-gather"]}).gathers == ((1,), (0,))
    for found in ({}, {"interface": "drop-in"}, {"interface": ["sharded-step"]}):
        with pytest.raises(InputError, match=r'weights come beside the next forward.* expected \["late-gather"\]'):
            parse_plan(document | found)
    within = document | {"updates": {"step": step | {"gather": "step"}}}
    assert parse_plan(within | {"interface": ["late-gather"]}).gathers is None  # who knows of it knows of sharded-step
