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

import runtime
from planner.documents.profile import ComputeProfile, Gradient
from planner.model.regions import find_breaks, find_cuts
from planner.online.ddp import ddp_plan
from planner.online.trials import Trials
from planner.profile.bench import Bench
from planner.profile.compute import Training, combine, measure_again
from planner.profile.measured_cuts import FEWEST_STEPS, cut_costs, regions_of, with_costs
from planner.profile.request import CUTS, Phase, Phases
from runtime.comm.world import World
from runtime.core.compiled import CompiledModel, CompileOptions, blocks_of, default_cuts
from runtime.errors import InputError
from runtime.plan import ModelReference, Plan, PlanWorld


def stack(layers: int) -> nn.Sequential:
    """Equal linear layers."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def plan_of(trained: dict[str, nn.Parameter], ranks: int = 2) -> Plan:
    """DDP's buckets."""
    return ddp_plan(trained, list(trained)[::-1], ModelReference(name="m"), PlanWorld(ranks=ranks))


def counted() -> tuple[list[object], dict[str, Any]]:
    """The graphs that were compiled so far, and `compile=` of `attach` for it."""
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return graphs, {"backend": count}


def test_blocks_are_children_of_lists_with_parameters_and_none_inside_another() -> None:
    model = nn.ModuleDict({
        "stem": nn.Linear(2, 2),
        "blocks": nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)),
        "layers": nn.ModuleDict({str(layer): nn.Linear(2, 2) for layer in range(2)}),
        "head": nn.Sequential(nn.ReLU(), nn.Linear(2, 2)),
    })  # fmt: skip
    assert blocks_of(model) == ["blocks.0", "blocks.1", "layers.0", "layers.1", "head.1"]
    assert blocks_of(nn.Linear(2, 2)) == []
    divided = nn.Sequential(nn.ModuleDict({"net": stack(2)}), nn.Linear(2, 2))
    assert blocks_of(divided) == ["0.net.0", "0.net.1", "1"]
    shared = stack(3)
    assert blocks_of(nn.ModuleDict({"a": shared[:2], "b": shared[1:]})) == ["a.0", "a.1", "b.2"]
    assert blocks_of(torch.compile(stack(2))) == ["0", "1"]  # type: ignore[arg-type]


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
        gradients = [
            Gradient(name=name, layer=name, numel=1, dtype="float32", backward_us=times[name]) for name in times
        ]
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


@pytest.mark.filterwarnings("ignore")  # of torch, about hooks that it compiles
@pytest.mark.parametrize(("step_us", "fewest", "most"), [(None, 14, 99), (5e6, 1, 2 + 2 * FEWEST_STEPS)])
def test_cuts_are_measured_within_their_share(step_us: float | None, fewest: int, most: int) -> None:
    model, steps, bench = stack(4), list[torch.Tensor](), Bench(World(), torch.device("cpu"))

    def step(_: object) -> None:
        steps.append(model(torch.ones(2, 4)).sum())
        steps[-1].backward()

    training = Training(model, step, None, "eager")
    with regions_of(training) as regions:
        assert regions is not None
        found = combine(measure_again(training, bench, 3), training.parameters)
        steps.clear()
        found = replace(found, forward_us=step_us or found.forward_us)
        costs = with_costs(found, training, bench, Phases([Phase(CUTS, 25.0)], 60.0, first=False), regions).compiled
    assert costs is not None
    assert (len(costs.cuts), fewest <= len(steps) <= most) == (3, True)


def test_each_form_of_a_model_is_compiled_where_others_have_reached_the_limit() -> None:
    model, (graphs, given) = stack(4), counted()
    compiled = CompiledModel(model, given)
    with torch._dynamo.config.patch(recompile_limit=2):
        for cuts in ((), ("1",), ("2",), ("1", "2")):
            compiled.cut(cuts)
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    model(torch.ones(2, 4))
        assert len(graphs) == 2 * (1 + 2 + 2 + 3)
        assert "ran into" not in compiled.report()
        model(torch.ones(2, 4, requires_grad=True))
        assert "1 function ran into torch._dynamo.config.recompile_limit" in compiled.report()
    compiled.remove()


def test_regions_are_counted_where_graphs_are_split() -> None:
    class Skipping(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[4][0](self[3](self[0](x)))  # type: ignore[index, no-any-return]

    model = Skipping([*stack(3), stack(1), nn.ModuleList(stack(1))])
    compiled = CompiledModel(model, "eager")
    compiled.cut(("1", "2", "3", "3.0", "4"))
    assert "no graph so far" in compiled.report()
    model(torch.ones(2, 4))
    assert "in 3 regions; 3 of 5 cuts made none" in compiled.report()
    compiled.remove()


@pytest.mark.filterwarnings("ignore")  # of torch, about what it traces
def test_a_session_has_the_graphs_of_models_without_one() -> None:
    model, (graphs, given) = stack(3), counted()
    plan = replace(plan_of(dict(model.named_parameters()), ranks=1), cuts=("1",))
    compiled = CompiledModel(model, given)
    compiled.cut(("1",))
    model(torch.ones(2, 4))
    compiled.remove()
    for _ in range(2):
        session = runtime.attach(model, None, plan, compile=given)
        model(torch.ones(2, 4)).sum().backward()
        assert "in 2 regions" in str(session.report())
        session.detach()
        assert not model._forward_pre_hooks
    assert len(graphs) == 2


WRONG: dict[str, Any] = {
    "mode 'fast' and options None, expected inductor's": {"mode": "fast"},
    "options 'x'": {"options": "x"},
    "option bogus": {"options": {"bogus": 1}},
    "the backend 3, expected one that torch.compile knows": {"backend": 3},
    "leave them out": {"backend": "eager", "mode": "default"},
    "dynamic='yes'": {"dynamic": "yes"},
    "CUDA graphs": "cudagraphs",
}
ALIKE: list[Any] = [
    {"backend": "eager"}, {"backend": stack}, {"backend": partial(stack, 1)}, {"backend": partial(stack, 2)},
    {"mode": "default"}, {"dynamic": True}, {"dynamic": False}, {"options": {"max-autotune": True}},
]  # fmt: skip


@pytest.mark.parametrize(("words", "given"), WRONG.items())
def test_wrong_arguments_of_compile_are_refused(words: str, given: Any) -> None:
    with pytest.raises(InputError, match=words):
        CompileOptions.of(given)
    with torch._inductor.config.patch({"triton.cudagraphs": True}), pytest.raises(InputError, match="CUDA graphs"):
        CompileOptions.of("inductor")
    assert len({CompileOptions.of(other).identity for other in ("inductor", *ALIKE)}) == 1 + len(ALIKE)


def test_cuts_are_tried_where_they_divide_gradients_also_as_many_as_there_are_elsewhere() -> None:
    model = stack(6)
    trained = {name: one for name, one in model.named_parameters() if name[0] in "35"}
    run = SimpleNamespace(
        session=SimpleNamespace(model=model, _parameters=trained), present=replace(plan_of(trained), cuts=("1",))
    )
    trials = Trials(run, None)  # type: ignore[arg-type]
    with patch.object(trials, "_climb", return_value=()) as climbed:
        assert list(trials.try_cuts()) == []
    plans, counts, _ = climbed.call_args.args
    assert ([one.cuts for one in plans.values()], next(counts)) == ([(), ("5",)], 1)
    model = nn.Linear(4, 4)
    trained = dict(model.named_parameters())
    run.session, run.present = SimpleNamespace(model=model, _parameters=trained), plan_of(trained)
    assert list(Trials(run, None).try_cuts()) == []  # type: ignore[arg-type]
