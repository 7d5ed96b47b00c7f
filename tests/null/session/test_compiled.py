"""Blocks, default cuts, places of cuts, and what is compiled, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from planner.documents.profile import ComputeProfile, Gradient
from planner.model.regions import find_breaks, find_cuts
from planner.online.ddp import ddp_plan, region_plans
from planner.online.trials import Trials
from planner.profile.bench import Bench
from planner.profile.compute import Training, combine, measure_again
from planner.profile.measured_cuts import FEWEST_STEPS, cut_costs, regions_of, with_costs
from planner.profile.request import CUTS, Phase, Phases
from runtime.comm.world import World
from runtime.core.compiled import CompiledModel, CompileOptions, blocks_of, default_cuts
from runtime.errors import InputError
from runtime.plan import ModelReference, PlanWorld


def stack(layers: int) -> nn.Sequential:
    """Equal linear layers."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def test_blocks_are_children_of_lists_with_parameters_and_none_inside_another() -> None:
    model = nn.ModuleDict({
        "stem": nn.Linear(2, 2),
        "blocks": nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)),
        "head": nn.Sequential(nn.ReLU(), nn.Linear(2, 2)),
    })  # fmt: skip
    assert blocks_of(model) == ["blocks.0", "blocks.1", "head.1"]
    assert blocks_of(nn.Linear(2, 2)) == []


def test_default_cuts_follow_the_bucket_sizes_of_ddp() -> None:
    model = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(8)))  # 8.6 MiB each
    assert default_cuts(model) == ("1", "4", "7")
    assert default_cuts(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) == ()


def test_a_cut_is_where_the_region_before_it_in_forward_was_computed() -> None:
    times = {"head": 5.0, "b1.w": 900.0, "b1.b": 1.0, "norm": 700.0, "b0.b": 2.0, "b0.w": 3.0, "embed": 400.0}
    gradients = [
        Gradient(name=name, layer=name, numel=1, dtype="float32", backward_us=time) for name, time in times.items()
    ]
    found = find_cuts(gradients, {"b0": {"b0.w", "b0.b"}, "b1": {"b1.w", "b1.b"}})
    assert [(cut.module, cut.after) for cut in found] == [("b1", 3), ("b0", 6)]
    assert [cut.module for cut in find_cuts(gradients[:-1], {"b0": {"b0.w", "b0.b"}, "b1": {"b1.w", "b1.b"}})] == ["b1"]


def test_graph_breaks_of_a_model_are_where_its_uncut_form_has_gradients_early() -> None:
    def form(times: dict[str, float]) -> ComputeProfile:
        gradients = [Gradient(name=name, layer=name, numel=1, dtype="float32", backward_us=times[name]) for name in times]
        return ComputeProfile(forward_us=1.0, update_us=0.0, gradients=tuple(gradients), repeats=1)

    cut = form({"d": 100.0, "c": 100.0, "b": 100.0, "a": 100.0}).gradients
    assert find_breaks(cut, form({"c": 200.0, "d": 1.0, "a": 199.0, "b": 1.0})) == (2,)
    assert find_breaks(cut, form({"c": 390.0, "d": 5.0, "a": 5.0, "b": 5.0})) == ()


def test_groups_of_cuts_cost_what_fits_best() -> None:
    whole_us, alone_us, all_us, counts = 1000.0, [1300.0, 1100.0, 1050.0], 1510.0, [3, 1, 2]
    found = cut_costs([whole_us, *alone_us, all_us], counts)
    rows = np.vstack([np.diag(counts), counts])
    expected, *_ = np.linalg.lstsq(rows, np.array([*alone_us, all_us]) - whole_us, rcond=None)
    assert found == pytest.approx(expected.tolist())
    assert cut_costs([whole_us, 1400.0], [4]) == [100.0]
    assert cut_costs([whole_us, 900.0], [4]) == [0.0]
    assert cut_costs([whole_us, whole_us], [0]) == [0.0]


@pytest.mark.parametrize(("step_us", "fewest", "most"), [(None, 14, 99), (5e6, 1, 2 + FEWEST_STEPS)])
def test_cuts_are_measured_within_their_share(step_us: float | None, fewest: int, most: int) -> None:
    model, steps, bench = stack(4), list[None](), Bench(World(), torch.device("cpu"))

    def step(_: object) -> None:
        steps.append(None)
        model(torch.ones(2, 4)).sum().backward()

    training = Training(model, step, None, "eager")
    with regions_of(training) as regions:
        assert regions is not None
        found = combine(measure_again(training, bench, 3), training.parameters)
        found = found if step_us is None else replace(found, forward_us=step_us)
        steps.clear()
        costs = with_costs(found, training, bench, Phases([Phase(CUTS, 25.0)], 60.0, first=False), regions).compiled
    assert costs is not None
    assert len(costs.cuts) == 3
    assert fewest <= len(steps) <= most


def test_each_form_of_a_model_is_compiled_where_others_have_reached_the_limit() -> None:
    model, graphs = stack(4), list[int]()

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs[-1] += 1
        return graph.forward

    compiled = CompiledModel(model, {"backend": count})
    with torch._dynamo.config.patch(recompile_limit=2):
        for cuts in ((), ("1",), ("2",), ("1", "2")):
            compiled.cut(cuts)
            graphs.append(0)
            for training in (True, False):
                model.train(training)(torch.ones(2, 4))
        assert graphs == [2, 4, 4, 6]
        assert "ran into" not in compiled.report()
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert "1 function ran into torch._dynamo.config.recompile_limit" in compiled.report()
    compiled.remove()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "fast"}, "mode 'fast' and options None, expected inductor's"),
        ({"mode": ["default"]}, "correct them"),
        ({"options": "x"}, "options 'x'"),
        ({"options": {"bogus": 1}}, "option bogus"),
        ({"options": {"max_autotune": "yes"}}, "attr max_autotune"),
        ({"backend": 3}, "the backend 3, expected one that torch.compile knows"),
        ({"backend": "eager", "mode": "default"}, "leave them out"),
        ({"dynamic": "yes"}, "dynamic='yes'"),
        ("cudagraphs", "CUDA graphs"),
    ],
)
def test_wrong_arguments_of_compile_are_refused(given: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        CompileOptions.of(given)
    with torch._inductor.config.patch({"triton.cudagraphs": True}), pytest.raises(InputError, match="CUDA graphs"):
        CompileOptions.of("inductor")
    assert CompileOptions.of({"options": {"max-autotune": True}}).settings == {"max_autotune": True}


def test_regions_are_counted_where_graphs_are_split() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(stack(1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.blocks[2](self.blocks[0](x))
            return found

    model = Skipping()
    compiled = CompiledModel(model, "eager")
    compiled.cut(("blocks", "blocks.1", "blocks.2", "blocks.2.0"))
    assert "from the next forward on" in compiled.report()
    model(torch.ones(2, 4))
    assert "in 2 regions; 3 of 4 cuts made none" in compiled.report()
    compiled.remove()


def test_what_is_remembered_of_one_way_of_compiling_is_not_of_another() -> None:
    ways: list[Any] = ["inductor", "eager", stack, partial(stack, 1), partial(stack, 2)]
    ways = [*({"backend": way} for way in ways), {"mode": "max-autotune-no-cudagraphs"}, {"dynamic": True}]
    ways += [{"dynamic": False}, {"options": {"max_autotune": True}}]
    identities = [CompileOptions.of(way).identity for way in ways]
    assert len(set(identities)) == len(ways)
    assert identities[0] == CompileOptions.of("inductor").identity == "inductor"


def test_cuts_are_tried_where_they_divide_gradients_also_as_many_as_there_are_elsewhere() -> None:
    model = stack(6)
    trained = {name: one for name, one in model.named_parameters() if name[0] in "35"}
    plan = replace(ddp_plan(trained, list(trained)[::-1], ModelReference(name="m"), PlanWorld(ranks=2)), cuts=("1",))
    assert [one.cuts for one in region_plans(model, trained, plan).values()] == [(), ("5",)]
    run = SimpleNamespace(session=SimpleNamespace(model=model, _parameters=trained), present=plan)
    trials = Trials(run, None)  # type: ignore[arg-type]
    with patch.object(trials, "_climb", return_value=()) as climbed:
        assert list(trials.try_cuts()) == []
    plans, counts, _ = climbed.call_args.args
    assert (next(counts), plans[1].cuts) == (1, ("5",))
