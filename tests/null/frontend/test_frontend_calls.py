"""Tracing of steps that ask for values, call the model several times, or call only its parts."""

from __future__ import annotations

import pytest
import torch
from test_frontend import LanguageModel, assert_unchanged, traced
from torch import Tensor, nn


class Branches(nn.Module):
    """Asks in loops, on one line, in numpy, and less while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            bool(x.isfinite().all())
        signs = [1 if row.sum() > 0 else -1 for row in x]
        for layer, sign in zip(self.layers, [*signs, int(x[0, 0]), *x[:1, 1].detach().numpy()], strict=False):
            x = layer(x) if sign > 0 else x
        return x


@pytest.mark.parametrize("signs", [(1, 1, 1), (1, -1, 1), (-1, 1, -1), (-1, -1, -1)])
def test_the_path_is_that_of_the_batch(signs: tuple[int, ...]) -> None:
    x = torch.tensor(signs)[:, None] * torch.tensor([[1.0, 2.0]])
    result = traced(Branches(), x)
    used = [layer.name for layer in result.layers if layer.flops]
    assert (result.method, [*result.failures]) == ("export", ["export of all paths"])
    assert used == [f"layers.{i}" for i, sign in enumerate((*signs, signs[0], signs[0])) if sign > 0]


def test_a_model_that_no_graph_can_hold_falls_back_to_hooks() -> None:
    class Packed(LanguageModel):
        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True)
            return self.out(self.lstm(packed)[0].data)

    model, ids = Packed(), torch.randint(0, 50, (2, 5))
    result = assert_unchanged(model, lambda: model(ids, torch.tensor([5, 3])))
    assert (result.method, [*result.failures]) == ("hooks", ["export", "symbolic_trace"])
    assert all("\n" not in reason and len(reason) <= 200 for reason in result.failures.values())
    assert {layer.name: layer.flops for layer in result.layers}["out"] == 2 * 8 * 24 * 50


def test_values_of_distributions_are_not_asked_for() -> None:
    class Sampled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.distributions.Normal(super().forward(x), 1.0).rsample()

    checking = torch.distributions.Distribution._validate_args
    result = traced(Sampled(3, 2), torch.randn(4, 3))
    assert (result.method, result.failures) == ("export", {})
    assert torch.distributions.Distribution._validate_args is checking


def parts() -> nn.ModuleDict:
    return nn.ModuleDict({"encoder": nn.Linear(4, 2), "decoder": nn.Linear(2, 4), "idle": nn.Linear(4, 4)})


def test_a_step_that_calls_only_parts_gets_a_graph_of_its_forward() -> None:
    model, x, after = parts(), torch.randn(3, 4), []

    def step() -> None:
        loss = (model["decoder"](model["encoder"](x).tanh()) - x).square().sum()
        loss.backward()
        after.append(loss)

    result = assert_unchanged(model, step)
    assert (result.method, result.failures, after) == ("export", {}, [])
    costs = [(layer.name, layer.flops, layer.grad_input_flops) for layer in result.layers]
    assert costs == [("encoder", 48, 0), ("decoder", 48, 48), ("idle", 0, 0)]


class Students(nn.Module):
    """Two layers, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)


def test_calls_that_train_different_layers_are_traced_together() -> None:
    model, x = Students(), torch.randn(3, 4)
    result = assert_unchanged(model, lambda: (model(x, 0) + model(x, 1)).sum().backward())
    assert (result.method, result.failures) == ("export", {})
    assert [layer.grad_weight_flops for layer in result.layers] == [96, 96]


def test_a_step_that_goes_on_without_training_more_is_cut_short() -> None:
    model, x, calls = Students(), torch.randn(3, 4), []

    def step() -> None:
        model(x, 0).sum()
        calls.append(model(x, 0))
        raise ValueError("after the first call, an error is nothing to us")

    result = assert_unchanged(model, step)
    assert [layer.grad_weight_flops for layer in result.layers] == [96, 0]


def test_backward_works_again_after_tracing() -> None:
    model, x = parts(), torch.randn(3, 4)
    backward = (Tensor.backward, torch.autograd.backward)
    assert_unchanged(model, lambda: torch.autograd.backward(model["encoder"](x).sum()))
    assert traced(model, x).failures  # a ModuleDict has no forward
    assert backward == (Tensor.backward, torch.autograd.backward)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


class Selecting(nn.Module):
    """Sizes that depend on values decide how many rows a layer sees, and which layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        total = self.layers[3](chosen).sum() if len(chosen) > 1 else x.sum()
        for number in x[:, 1].long().unique().tolist():
            total = total + self.layers[number](x[x[:, 1] == number]).sum()
        return total


@pytest.mark.parametrize("positive", [0, 1, 2, 5])
def test_sizes_that_depend_on_values_are_those_of_the_batch(positive: int) -> None:
    x = torch.ones(5, 3)
    x[positive:, 0] = -1.0
    x[:, 1] = torch.tensor([0.0, 2.0, 0.0, 2.0, 2.0])
    model = Selecting()
    result = assert_unchanged(model, lambda: model(x))
    assert (result.method, [*result.failures]) == ("export", ["export of all paths"])
    flops = {layer.name: layer.flops for layer in result.layers}
    rows = {0: 2, 1: 0, 2: 3, 3: positive if positive > 1 else 0}
    assert {name: count for name, count in flops.items() if name} == {
        f"layers.{number}": 2 * 3 * 3 * count for number, count in rows.items()
    }
