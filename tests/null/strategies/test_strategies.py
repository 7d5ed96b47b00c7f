"""The named strategies: each against its definition, all against the verifier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import reference
from builders import (
    add_matrix,
    add_operator,
    cluster_document,
    line_problem,
    make,
    problems,
    profile_document,
    profile_documents,
    random_problem,
    usual_document,
)
from hypothesis import given
from hypothesis import strategies as st

from planner.decide.strategies import BASELINES, STRATEGIES, accuracy_of, make_schedule
from planner.ir import Schedule
from planner.model.modes import simulate_schedule
from planner.model.problem import Problem
from planner.model.schedule_text import parse_schedule
from planner.verify import verify_on
from runtime.errors import InputError

ARGUMENTS = {
    "wfbp": ["wfbp:layer"],
    "ddp": ["ddp:25", "ddp:0.001", "ddp:1e-9"],
    "dear": ["dear:25", "dear:0.001"],
    "megatron": ["megatron:0.001"],
    "slgs": ["slgs:1", "slgs:1e-9"],
    "lags": ["lags:1", "lags:25.5", "lags:25.5:0", "lags:9:64"],
    "hitopk": ["hitopk:0.5"],
    "naive_all_gather": ["naive_all_gather:0.5"],
    "joint": ["joint:25.5"],
    "ssd": ["ssd:1", "ssd:3", "ssd:3:1"],
    "lpp": ["lpp:2"],
    "lowrank": ["lowrank:1", "lowrank:9"],
    "wire": ["wire:int8", "wire:float16"],
}
NAMES = [*STRATEGIES, *(name for names in ARGUMENTS.values() for name in names)]


def groups(problem: Problem, strategy: str) -> list[tuple[int, ...]]:
    """The gradients of each bucket."""
    return [bucket.gradients for bucket in make_schedule(problem, strategy).buckets]


def stops(schedule: Schedule) -> tuple[int, ...]:
    return tuple(bucket.gradients[-1] + 1 for bucket in schedule.buckets)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_every_strategy_is_sound(name: str, data: st.DataObject) -> None:
    """A verified schedule, equal for equal problems; an exact one is never faster than the optimum of one dtype."""
    # What is narrowed, or sent as products, is added up in float32.
    mixed, contention = data.draw(st.booleans()) and not name.startswith(("wire", "lowrank")), data.draw(st.booleans())
    has = {"matrices": name.startswith("lowrank"), "operator": name.startswith("operators")}
    problem = data.draw(problems(max_count=8, mixed=mixed, contention=contention, **has))
    schedule = make_schedule(problem, name)
    verify_on(problem, schedule, accuracy_of(name))
    assert make_schedule(problem, name) == schedule
    assert parse_schedule(str(schedule)) == schedule
    # No all-reduces of the library, or not all of them in the step.
    others = name == "tree" or schedule.mode.shares_update
    if not mixed and accuracy_of(name) == "exact" and not others:
        _, end_us = reference.best_stops(problem)
        bound_us = max(end_us, problem.compute_end_us) + problem.update_us
        assert simulate_schedule(problem, schedule).iteration_us >= bound_us * (1 - 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_one_gradient_is_one_bucket(name: str) -> None:
    document = profile_document([(1000, 1.0)])
    add_matrix(document["compute"]["gradients"][0])
    if name.startswith("operators"):
        add_operator(document)
    assert groups(make(document, cluster_document((10.0, 0.1))), name) == [(0,)]


def test_baselines_are_strategies() -> None:
    assert set(BASELINES) == {"wfbp", "single", "mg_wfbp", "ddp"}
    assert set(BASELINES) <= set(STRATEGIES)
    assert list(STRATEGIES) == sorted(STRATEGIES)
    assert {accuracy_of(name) for name in BASELINES} == {"exact"}


@pytest.mark.parametrize("name", ["best", "", ":", "WFBP", "ddp2", "optimal "])
def test_unknown_names_list_the_known(name: str) -> None:
    problem = line_problem([(5, 1.0)], 10.0, 0.1)
    with pytest.raises(InputError) as caught:
        make_schedule(problem, name)
    assert f"found the strategy {name!r}, expected one of: " in str(caught.value)
    assert all(known in str(caught.value) for known in [*STRATEGIES, "wfbp:layer", "ddp:SIZE_MIB"])


@pytest.mark.parametrize(
    "name",
    ["wfbp:", "wfbp:bucket", "single:1", "mg_wfbp:", "optimal:2", "ddp:", "ddp:0", "ddp:-1", "ddp:x", "ddp:nan",
     "ddp:inf", "ddp:1:2", "slgs:", "slgs:0", "slgs:1.1", "slgs:nan", "lags:0.5", "lags:", "lags:inf", "lags:9:",
     "lags:9:-1", "lags:9:1e3", "lags:9:1:1", "hitopk:-1",
     "hitopk:x", "ssd:", "ssd:0", "ssd:-1", "ssd:1.5", "ssd:33", "ssd:x", "ssd:3:", "ssd:3:0", "ssd:3:x",
     "dear:", "dear:0", "megatron:x", "optimal:late_gather",
     "wire:", "wire:int4", "random:", "random:0", "random:x",
     "lap:0", "lpp:", "lpp:1025", "l_sgd:0", "pl_sgd:x", "mb_sgd:1"],
)  # fmt: skip
def test_wrong_arguments(name: str) -> None:
    problem = line_problem([(5, 1.0)], 10.0, 0.1)
    with pytest.raises(InputError, match=f"found the strategy {name}, expected"):
        make_schedule(problem, name)


def test_operators_by_a_rule_need_operators() -> None:
    with pytest.raises(InputError, match="found the strategy operators:round_robin for a profile without operators"):
        make_schedule(line_problem([(5, 1.0)], 10.0, 0.1), "operators:round_robin")


def test_wfbp_single_and_layers_by_hand() -> None:
    """Layers fc, fc, norm, conv2, conv1, conv1."""
    problem = make(usual_document(), cluster_document())
    assert groups(problem, "wfbp") == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert groups(problem, "single") == [(0, 1, 2, 3, 4, 5)]
    assert groups(problem, "wfbp:layer") == [(0, 1), (2,), (3,), (4, 5)]


def test_layers_are_runs() -> None:
    """A name that comes back later is another layer."""
    problem = line_problem([(1, 1.0)] * 5, 1.0, 1.0, layers=["a", "b", "b", "a", "a"])
    assert groups(problem, "wfbp:layer") == [(0,), (1, 2), (3, 4)]


def test_mg_wfbp_by_hand() -> None:
    """Layers ready at 110, 115, 200, 220; a = 20, a message of 40 B takes 24.

    Layer 4 starts at 110; 115 < 130: merged with layer 3, which starts at 115. 200 ≥ 135: stays, ends at 115 + 28.
    Layer 2 starts at 200; 220 is not before 220: no merge.
    """
    problem = line_problem([(10, 10.0), (10, 5.0), (10, 85.0), (10, 20.0)], 20.0, 0.1)
    assert groups(problem, "mg_wfbp") == [(0, 1), (2,), (3,)]
    sooner = line_problem([(10, 10.0), (10, 5.0), (10, 85.0), (10, 19.0)], 20.0, 0.1)
    assert groups(sooner, "mg_wfbp") == [(0, 1), (2, 3)]


@given(profile_documents(max_count=14), st.integers(0, 40), st.integers(0, 64))
def test_mg_wfbp_equals_the_paper_on_a_grid(profile: dict[str, object], alpha: int, beta: int) -> None:
    """Sums on this grid are exact, so that `<` decides alike on both sides."""
    problem = make(profile, cluster_document((alpha * 12.5, beta / 64)))
    assert stops(make_schedule(problem, "mg_wfbp")) == reference.mg_wfbp_stops(problem, alpha * 12.5)


@pytest.mark.parametrize("kind", ["line", "monotone", "jagged"])
def test_mg_wfbp_equals_the_paper(kind: str) -> None:
    """With samples, a is the intercept of the line fitted to them."""
    rng = np.random.default_rng(4)
    for count in (1, 2, 3, 10, 40, 150):
        layers = np.sort(rng.integers(0, max(1, count // 2), count)).astype(str).tolist()
        problem = random_problem(rng, count, kind, layers=layers)
        start_up_us = problem.cost.all_reduce.start_up_us
        if kind != "line":
            sizes, times = np.array(problem.cost.cluster.samples["all_reduce"]).T  # type: ignore[index]
            intercept = np.polyfit(sizes, times, 1)[1]
            assert start_up_us == pytest.approx(max(0.0, intercept), abs=1e-6)
        assert stops(make_schedule(problem, "mg_wfbp")) == reference.mg_wfbp_stops(problem, start_up_us)


def test_mg_wfbp_is_not_optimal() -> None:
    """The baseline is the paper's greedy rule: on some problems it loses to the optimum by much."""
    rng = np.random.default_rng(6)
    ratios = []
    for _ in range(60):
        problem = random_problem(rng, 12, "line")
        greedy, best = (simulate_schedule(problem, make_schedule(problem, name)) for name in ("mg_wfbp", "optimal"))
        ratios.append(greedy.iteration_us / best.iteration_us)
    assert max(ratios) > 1.02
    assert np.median(ratios) < 1.1


MIB = 2**20


def sized(sizes_bytes: Sequence[int], dtypes: Sequence[str] | None = None) -> Problem:
    """Gradients of these many bytes."""
    width = [reference.DTYPE_BYTES[dtype] for dtype in dtypes or ["float32"] * len(sizes_bytes)]
    rows = [(size // bytes_each, 1.0) for size, bytes_each in zip(sizes_bytes, width, strict=True)]
    return line_problem(rows, 10.0, 0.001, dtypes=dtypes)


def test_ddp_by_hand() -> None:
    """A bucket closes with the gradient that reaches its limit: 1 MiB for the first, then 25 MiB."""
    problem = sized([MIB - 4, 4, 24 * MIB, MIB - 4, 4, 4, 30 * MIB, 4])
    assert groups(problem, "ddp") == [(0, 1), (2, 3, 4), (5, 6), (7,)]
    assert groups(problem, "ddp:1") == [(0, 1), (2,), (3, 4), (5, 6), (7,)]
    assert groups(problem, "ddp:1000") == [tuple(range(8))]


def test_ddp_rounds_its_cap_down_as_torch_does() -> None:
    """0.3 MiB are 314572.8 bytes; torch caps at 314572, which one gradient of that size reaches."""
    assert groups(sized([314572, 4]), "ddp:0.3") == [(0,), (1,)]


@pytest.mark.parametrize("argument", [None, "1", "0.3", "25", "0.00001"])
def test_ddp_equals_torch(argument: str | None) -> None:
    """Against torch's own assignment, for one dtype and for several that take turns."""
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("torch.distributed")
    limits = [MIB, 25 * MIB] if argument is None else [int(float(argument) * MIB)]
    rng = np.random.default_rng(8)
    for count in (1, 2, 10, 60):
        for dtypes in (["float32"], ["float32", "bfloat16"], ["float32", "bfloat16", "float64"]):
            numels = (10 ** rng.uniform(0, 6.7, count)).astype(int) * rng.integers(0, 5, count).clip(0, 1)
            chosen = rng.choice(dtypes, count).tolist()
            rows = [(numel, 1.0) for numel in numels.tolist()]
            problem = make(profile_document(rows, dtypes=chosen), cluster_document())
            tensors = [torch.empty(n, dtype=getattr(torch, d)) for (n, _), d in zip(rows, chosen, strict=True)]
            expected, _ = distributed._compute_bucket_assignment_by_size(tensors, limits, [False] * count)
            name = "ddp" if argument is None else f"ddp:{argument}"
            assert groups(problem, name) == [tuple(bucket) for bucket in expected]
