"""How compressors are asked for, and the measure δ."""

from __future__ import annotations

import json
import math
from typing import Any

import contract_examples
import pytest
import torch
from compressor_cases import Layers, numbers, reference_topk, sparse
from torch import nn

from runtime.checks.plan import check_plan, trainable_parameters
from runtime.errors import InputError
from runtime.plan import NO_COMPRESSION, CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.sparse.compressors import COMPRESSORS, make_compressor
from runtime.sparse.compressors.options import MAX_ELEMENTS, Segment
from runtime.sparse.compressors.selectors import draw
from runtime.sparse.compressors.sparse import SparseCompressor
from runtime.sparse.samples import delta


@pytest.mark.parametrize("text", contract_examples.COMPRESSORS)
def test_specifications_of_the_contract_are_made(text: str) -> None:
    spec = CompressorSpec(**json.loads(text))
    made = make_compressor(spec, [("layer4.conv", 36_864), ("fc", 5130)], ranks=4)
    expected = {1: 171, 2: 419, 3: 368 + 51, 4: 20_997}.get(contract_examples.COMPRESSORS.index(text))
    assert (made.k if isinstance(made, SparseCompressor) else None) == expected


TWO = [("a", 10), ("b", 5)]

BAD: list[tuple[dict[str, Any], Layers, list[str]]] = [
    ({"name": "zip"}, TWO, ["compressor: found 'zip'", "none, powersgd, randomk, topk, wire"]),
    ({"name": "topk", "selector": "best", "density": 0.1}, TWO, ["selector: found 'best'", "exact, mstopk, sampled"]),
    ({"name": "topk"}, TWO, ["neither k nor density"]),
    ({"name": "topk", "density": 0.1, "k": {"a": 1, "b": 1}}, TWO, ["both k and density"]),
    ({"name": "topk", "density": 0.0}, TWO, ["density: found 0.0", "at most 1"]),
    ({"name": "topk", "density": 1.5}, TWO, ["density: found 1.5"]),
    ({"name": "topk", "density": math.nan, "scope": "layer"}, TWO, ["density: found nan"]),
    ({"name": "topk", "k": {"a": 1, "c": 1}}, TWO, ["found the layers c", "expected a, b"]),
    ({"name": "topk", "k": {"a": 1}}, TWO, ["no number for b"]),
    ({"name": "randomk", "k": {"a": 11, "b": 1}}, TWO, ["k of the layer a: found 11", "from 1 to 10"]),
    ({"name": "randomk", "k": {"a": 0, "b": 1}}, TWO, ["k of the layer a: found 0"]),
    ({"name": "topk", "k": {"a": 1, "b": 1}, "scope": "bucket"}, TWO, ["leave scope out"]),
    ({"name": "topk", "k": {"a": 1}}, [("a", 2), ("a", 3)], ["in several runs"]),
    ({"name": "topk", "density": 0.1}, [("a", MAX_ELEMENTS), ("b", 1)], ["2147483648 elements", "several buckets"]),
    ({"name": "topk", "density": 0.1, "dtype": "float16"}, TWO, ["options dtype", "density, k, scope, selector"]),
    ({"name": "randomk", "density": 0.1, "selector": "exact"}, TWO, ["options selector"]),
    ({"name": "none", "density": 0.1}, TWO, ["options density", "expected none"]),
    ({"name": "wire"}, TWO, ["no dtype", "bfloat16, float16"]),
    ({"name": "wire", "dtype": "int4"}, TWO, ["dtype: found 'int4'", "bfloat16, float16, int8, float8_e4m3fn"]),
    ({"name": "wire", "dtype": "float16", "scope": "layer"}, TWO, ["options scope", "block, dtype, error_feedback"]),
    ({"name": "wire", "dtype": "int8", "block": 63}, TWO, ["block: found 63", "64 to 512"]),
    ({"name": "wire", "dtype": "float8_e4m3fn", "block": 513}, TWO, ["block: found 513", "64 to 512"]),
    ({"name": "wire", "dtype": "bfloat16", "block": 256}, TWO, ["block: found 256 with the dtype bfloat16", "leave b"]),
    ({"name": "wire", "dtype": "float16", "block": 256}, TWO, ["a scale for each 256", "leave block out"]),
    ({"name": "wire", "dtype": "int8", "rounding": "up"}, TWO, ["rounding: found 'up'", "nearest, stochastic"]),
    ({"name": "wire", "dtype": "int8", "links": "some"}, TWO, ["links: found 'some'", "expected one of all, inter"]),
    ({"name": "powersgd"}, TWO, ["powersgd has no rank", "from 1 to 64", "such as 4"]),
    ({"name": "powersgd", "rank": 0}, TWO, ["rank: found 0", "from 1 to 64"]),
    ({"name": "powersgd", "rank": 65}, TWO, ["rank: found 65", "give it a smaller one"]),
    ({"name": "powersgd", "rank": 4, "dtype": "float16"}, TWO, ["options dtype", "expected only rank"]),
    ({"name": "wire", "dtype": "int8", "rank": 4}, TWO, ["options rank", "leave them out"]),
    ({"name": "topk", "density": 0.1, "error_feedback": False}, TWO, ["options error_feedback", "leave them out"]),
]


@pytest.mark.parametrize(("options", "layers", "words"), BAD, ids=lambda value: str(value)[:60])
def test_wrong_specifications_are_told_in_words(options: dict[str, Any], layers: Layers, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        make_compressor(CompressorSpec(**options), layers, ranks=2)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_is_kept_of_each_part() -> None:
    layers = [("a", 1000), ("none", 0), ("b", 10)]
    assert sparse("exact", layers, density=0.015).segments == (Segment("a\nnone\nb", 0, 1010, 15),)
    expected = (Segment("a", 0, 1000, 15), Segment("b", 1000, 10, 1))
    assert sparse("exact", layers, density=0.015, scope="layer").segments == expected
    assert sparse("exact", layers, k={"b": 4, "a": 2}).segments == (Segment("a", 0, 1000, 2), Segment("b", 1000, 10, 4))
    assert sparse("exact", layers, k={"b": 4, "a": 2}).k == 6


OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.5},
    "randomk": {"density": 0.5},
    "wire": {"dtype": "bfloat16"},
    "powersgd": {"rank": 1},
}


@pytest.mark.parametrize("name", sorted(set(COMPRESSORS) - {"none"}))
def test_plans_may_ask_for_each_where_it_fits(name: str) -> None:
    model = nn.Linear(2, 2)
    spec = CompressorSpec(name=name, **OPTIONS[name])
    fitting = "sparse" if COMPRESSORS[name].selects else "all_reduce"

    def misfit(spec: CompressorSpec, collective: str, accuracy: Any = "bounded") -> str | None:
        algorithm = "library" if collective == "all_reduce" else "flat"
        bucket = PlanBucket(gradients=("bias", "weight"), collective=collective, algorithm=algorithm, compressor=spec)
        plan = Plan(model=ModelReference(name="linear"), world=PlanWorld(ranks=1), accuracy=accuracy, buckets=(bucket,))
        return check_plan(trainable_parameters(model), plan, 1)

    assert misfit(spec, fitting) is None
    for wrong, expected in (
        (misfit(spec, "sparse" if fitting == "all_reduce" else "all_reduce"), "expected"),
        (misfit(spec, fitting, "exact"), "the plan's accuracy is exact"),
        (misfit(CompressorSpec(name=name), fitting), "bucket 0 has a compressor that does not fit"),
    ):
        assert wrong is not None
        assert expected in wrong


@pytest.mark.parametrize(
    ("algorithm", "options", "dtype", "words"),
    [
        ("two_shot", {"dtype": "int8"}, torch.float32, None),
        ("library", {"dtype": "float8_e4m3fn", "block": 512, "links": "all"}, torch.bfloat16, None),
        ("native", {"dtype": "float16", "error_feedback": False}, torch.float32, None),
        ("native", {"dtype": "int8"}, torch.float32, ["algorithm native", "bfloat16, float16", "two_shot"]),
        ("native", {"dtype": "float16", "block": 64}, torch.float32, ["block: found 64"]),
        ("two_shot", {"dtype": "int8"}, torch.float64, ["weight is float64", "bfloat16 or float16"]),
        ("tree", {"dtype": "int8"}, torch.float32, ["all_reduce/tree", "all_reduce/two_shot"]),
        ("torus_2d", {"dtype": "int8", "links": "inter"}, torch.float32, None),
        ("torus_2d", {"dtype": "int8"}, torch.float32, ["all_reduce/torus_2d", "on all links", 'add "links": "inter"']),
        *(
            (
                algorithm,
                {"dtype": "bfloat16", "links": "inter"},
                torch.float32,
                [f"all_reduce/{algorithm}", "between nodes alone", "expected all_reduce/torus_2d", "leave links out"],
            )
            for algorithm in ("library", "two_shot", "native", "tree")
        ),
        ("two_shot", None, torch.float32, ["all_reduce/two_shot with the compressor 'none'", "expected wire"]),
        ("native", None, torch.float32, ["all_reduce/native with the compressor 'none'", "expected wire"]),
        ("library", {"name": "powersgd", "rank": 64}, torch.float64, None),
        ("library", {"name": "powersgd", "rank": 1}, torch.complex64, ["knows no complex numbers"]),
        ("tree", {"name": "powersgd", "rank": 1}, torch.float32, ["all_reduce/tree", "expected all_reduce/library"]),
        ("two_shot", {"name": "powersgd", "rank": 1}, torch.float32, ["expected all_reduce/library there"]),
    ],
)
def test_how_dense_buckets_may_be_sent_in_other_forms(
    algorithm: str, options: dict[str, Any] | None, dtype: torch.dtype, words: list[str] | None
) -> None:
    spec = NO_COMPRESSION if options is None else CompressorSpec(**{"name": "wire"} | options)
    bucket = PlanBucket(gradients=("weight", "bias"), algorithm=algorithm, compressor=spec)
    plan = Plan(model=ModelReference(name="linear"), world=PlanWorld(ranks=2), accuracy="bounded", buckets=(bucket,))
    problem = check_plan(trainable_parameters(nn.Linear(2, 2, dtype=dtype)), plan, 2)
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.startswith("bucket 0 ")
        assert all(word in problem for word in words), problem


def test_delta_compares_with_random_selection() -> None:
    """The denominator is the mean over drawn selections; top-k of one rank's own sum beats it."""
    total = numbers("normal", 60, 0, torch.float32)
    generator = torch.Generator().manual_seed(1)
    left = []
    for _ in range(4000):
        rest = total.clone()
        rest[draw(60, 12, generator)] = 0.0
        left.append(float(rest.double().square().sum()))
    expected = sum(left) / len(left)
    sent = torch.zeros(60)
    sent[:3] = total[:3]
    assert delta(total, sent, 12) == pytest.approx(float((total - sent).double().square().sum()) / expected, rel=0.01)
    top = torch.zeros(60)
    chosen = reference_topk(total, 12)
    top[chosen] = total[chosen]
    assert delta(total, top, 12) < 0.7
    assert delta(total, torch.zeros(60), 12) == pytest.approx(1 / 0.8)


def test_delta_at_the_ends() -> None:
    some, nothing = torch.tensor([3.0, -4.0]), torch.zeros(2)
    assert delta(some, some, 2) == 0.0
    assert delta(some, nothing, 2) == math.inf
    assert delta(nothing, nothing, 1) == 0.0
    assert delta(nothing, some, 1) == math.inf
    assert delta(torch.empty(0), torch.empty(0), 0) == 0.0
    assert delta(some, nothing, 0) == 1.0
    assert math.isnan(delta(torch.tensor([math.nan, 1.0]), nothing, 1))
    for arguments in ((some, nothing, 3), (some, torch.zeros(3), 1)):
        with pytest.raises(ValueError, match="delta: found k"):
            delta(*arguments)
