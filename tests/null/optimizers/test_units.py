"""Units of an optimizer's work and its operators, and that looking at a step changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from planner.profile.bench import Bench
from planner.profile.operator_times import measure_operators
from runtime.comm.world import World
from runtime.errors import FallbackWarning
from runtime.monitor.clock import WallClock
from runtime.optimizers.kinds import find_not_elementwise
from runtime.optimizers.shared_operator import SharedOperator
from runtime.optimizers.units import BY_MATRIX, OwnOperator, kind_name, operator_of, stack_difference, unit_of


class Own(torch.optim.SGD):
    """A matrix optimizer whose operator has state."""

    unit = "matrix"


class Halved(torch.optim.Optimizer):
    """Decays before, and writes to gradients and to numbers of its own."""

    unit = "matrix"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.steps = 0

    def operator(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        return matrix / 2.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[parameter].setdefault("buffer", torch.zeros_like(parameter))
                parameter.mul_(0.9)
                parameter.sub_(self.operator(parameter.grad.add_(buffer.add_(1.0)), group))


def matrices() -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (6, 4))]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


MAKERS: dict[str, Any] = {
    "torch.optim.Muon": torch.optim.Muon,
    "pytorch_optimizer.optimizer.soap.SOAP": pytorch_optimizer.SOAP,
    "pytorch_optimizer.optimizer.shampoo.Shampoo": pytorch_optimizer.Shampoo,
    "pytorch_optimizer.optimizer.shampoo.ScalableShampoo": pytorch_optimizer.ScalableShampoo,
}


@pytest.mark.parametrize("name", BY_MATRIX)
def test_registered_optimizers_work_on_whole_matrices(name: str) -> None:
    optimizer = MAKERS[name](matrices())
    assert kind_name(optimizer) == name
    assert unit_of(optimizer) == "matrix"
    assert (operator_of(optimizer) is not None) == (name == "torch.optim.Muon")
    assert BY_MATRIX[name] in str(find_not_elementwise(optimizer))


def test_classes_declare_their_unit() -> None:
    assert unit_of(torch.optim.AdamW(matrices())) == "element"
    assert unit_of(Own(matrices())) == "matrix"
    assert operator_of(Own(matrices())) is None
    assert operator_of(Halved(matrices())) is not None
    assert unit_of(torch.optim.LBFGS(matrices())) is None
    assert "declares whole parameters" in str(find_not_elementwise(Own(matrices())))


@pytest.mark.parametrize("make", [torch.optim.Muon, Halved])
def test_one_operator_is_found_without_a_trace(make: Any) -> None:
    """Also in the second step, where there is state."""
    parameters, expected = matrices(), matrices()
    optimizer, plain = make(parameters), make(expected)
    operator = operator_of(optimizer)
    assert operator is not None
    alone = SharedOperator(optimizer, operator, {}, World())
    for _ in range(2):
        before = [p.detach().clone() for p in (*parameters, *(p.grad for p in parameters))]
        groups, numbers = copy.deepcopy(optimizer.state_dict()), dict(vars(optimizer))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert alone.run_one(parameter, group, operator.compute) is not None
        after = [*parameters, *(p.grad for p in parameters)]
        assert all(map(torch.equal, before, after))
        assert str(optimizer.state_dict()) == str(groups)
        assert vars(optimizer).keys() == numbers.keys()
        optimizer.step()
        plain.step()
        assert all(map(torch.equal, parameters, expected))


def test_operators_of_all_optimizers_are_timed_by_shape_and_options() -> None:
    more, (wide, tall), square = matrices(), matrices(), nn.Parameter(torch.ones(4, 6))
    muon = torch.optim.Muon([{"params": [more[0], wide], "ns_steps": 5}, {"params": [more[1], square], "ns_steps": 2}])
    named = {"more.0": more[0], "more.1": more[1], "wide": wide, "square": square, "tall": tall}
    training: Any = SimpleNamespace(optimizer=[muon, Halved([tall])], parameters=named)
    compute: Any = SimpleNamespace(gradients=[SimpleNamespace(name=name) for name in named])
    found = measure_operators(training, Bench(World(), torch.device("cpu")), compute)
    assert found is not None
    assert found.optimizer == "Muon, Halved"
    assert not found.applied
    assert [shape.parameters for shape in found.shapes] == [("more.0", "wide"), ("more.1",), ("square",), ("tall",)]
    assert all(shape.before_us > 0.0 for shape in found.shapes)
    assert [shape.stacked_us for shape in found.shapes[1:]] == [None] * 3  # single ones; Halved takes none
    assert square.grad is None


class OfGroups(torch.optim.Optimizer):
    """Calls its operator for the parameters of one of its groups."""

    unit = "matrix"

    def operator(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        return matrix.sign()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.operator(p.grad, group) if group["whole"] else p.grad)


def test_operators_are_timed_of_the_groups_that_call_them() -> None:
    one, other = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    optimizer = OfGroups([{"params": [one], "whole": False}, {"params": [other], "whole": True}], {})
    shared = SharedOperator(optimizer, OwnOperator(optimizer), {one: "one", other: "other"}, World())
    shared.observe(WallClock())
    one.grad, other.grad = torch.ones(3, 3), torch.ones(3, 3)
    shared.before_step()
    optimizer.step()
    shared.after_step()
    assert list(shared.times_us()) == ["other"]


class Stacked(Halved):
    """Takes stacks, whose results are `factor` times those of one matrix at a time."""

    batched = True

    def __init__(self, params: Any, factor: float) -> None:
        super().__init__(params)
        self.factor, self.dims = factor, list[int]()

    def operator(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        self.dims.append(matrix.dim())
        return matrix / 2.0 * (self.factor if matrix.dim() == 3 else 1.0)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_stacks_are_timed_where_bits_are_equal_and_of_one_group(factor: float) -> None:
    named = {str(place): matrices()[0] for place in range(5)}
    groups = [{"params": [named[name] for name in of], "lr": 0.1 / len(of)} for of in ("012", "34")]
    training: Any = SimpleNamespace(optimizer=Stacked(groups, factor), parameters=named)
    compute: Any = SimpleNamespace(gradients=[SimpleNamespace(name=name) for name in named])
    found = measure_operators(training, Bench(World(), torch.device("cpu")), compute)
    assert found is not None
    assert [shape.parameters for shape in found.shapes] == [tuple("012"), tuple("34")]
    assert all((shape.stacked_us is None) == (factor > 1.0) for shape in found.shapes)
    assert found.shapes[0].operator_us == found.shapes[1].operator_us  # timed once


@pytest.mark.parametrize(
    ("factor", "tolerance", "dims"), [(1.0, 0.0, [3, 3, 2, 2]), (1.001, 0.0, [2] * 6), (1.001, 0.01, [3, 3, 2, 2])]
)
def test_equal_shapes_of_a_group_are_one_stack_where_bits_are_equal_or_near_by_name(
    factor: float, tolerance: float, dims: list[int]
) -> None:
    ends = []
    for batched in (True, False):
        parameters = [p for _ in range(3) for p in matrices()]
        groups = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.2}]
        optimizer, world = Stacked(groups, factor), World()
        names: dict[Tensor, str] = {p: str(place) for place, p in enumerate(parameters)}
        shared = SharedOperator(optimizer, OwnOperator(optimizer), names, world)
        shared.share(dict.fromkeys(names, 0), [(world, parameters)], parameters if batched else (), tolerance)
        warns = batched and 3 not in dims
        said: Any = pytest.warns(FallbackWarning, match="one matrix at a time") if warns else nullcontext()
        with said:
            for _ in range(3):
                optimizer.dims.clear()
                shared.before_step()
                optimizer.step()
                shared.after_step()
        assert optimizer.dims == (dims if batched else [2] * 6)
        ends.append(parameters)
    same = all(map(torch.equal, *ends))
    assert same == (tolerance == 0.0)
    assert all(torch.allclose(one, other, atol=2.0 * tolerance) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (32, 32)])
def test_newton_schulz_of_a_stack_is_that_of_each_matrix(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Muon(matrices())
    operator, group = operator_of(optimizer), optimizer.param_groups[0]
    assert operator is not None
    many = [torch.randn(shape, generator=generator) for _ in range(3)]
    assert stack_difference(operator, many, [group] * 3) < 0.1
    assert stack_difference(OwnOperator(Halved(matrices())), many, [group] * 3) == 0.0
