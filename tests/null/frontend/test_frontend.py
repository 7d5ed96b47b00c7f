"""Tracing: the layers of a model and their FLOPs, by every method, without changing the model."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from planner.frontend import trace as trace_module
from planner.frontend.layers import LayerCost, TracedModel, estimated_grad_weight_share, split_backward
from planner.frontend.trace import trace

METHODS = dict(trace_module._METHODS)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each method in turn, with the others switched off."""
    monkeypatch.setattr(trace_module, "_METHODS", {request.param: METHODS[request.param]})
    return str(request.param)


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> TracedModel:
    return trace(model, lambda: model(*args, **kwargs))


def by_name(result: TracedModel) -> dict[str, LayerCost]:
    assert result.failures == {}
    assert len({layer.name for layer in result.layers}) == len(result.layers)
    return {layer.name: layer for layer in result.layers}


class Cnn(nn.Module):
    """Images of 3 by 16 by 16 to 10 numbers; one convolution is grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2)
        self.norm2 = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.norm1(self.conv1(x))))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.fc(torch.dropout(x.flatten(1), 0.5, self.training))


class DataDependent(Cnn):
    """Branches on its activations, changes a weight, and keeps things between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []
        self.table = torch.zeros(10)
        self.carry: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(x)
        self.table.add_(1)
        self.carry = y = super().forward(x) + self.carry
        with torch.no_grad():
            self.fc.bias.add_(1)
        return y if y.sum() > 0 else -y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.out = nn.Linear(24, 50)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Any]:
        x, state = self.lstm(self.embed(ids), state)
        return self.out(x), state


def test_cnn_by_hand(method: str) -> None:
    layers = by_name(traced(Cnn(), torch.randn(4, 3, 16, 16)))
    flops = {
        "conv1": 2 * 4 * 16 * 16 * 8 * 3 * 9,
        "norm1": 4 * 8 * 16 * 16,
        "pool": 4 * 8 * 8 * 8,
        "conv2": 2 * 4 * 4 * 4 * 12 * (8 // 2) * 9,
        "norm2": 4 * 12 * 4 * 4,
        "fc": 2 * 4 * 192 * 10,
    }
    assert [(name, layer.flops) for name, layer in layers.items()] == list(flops.items())
    assert [layer.kind for layer in layers.values()] == ["conv", "norm", "other", "conv", "norm", "linear"]
    assert layers["conv2"].activation_bytes == 4 * 4 * 12 * 4 * 4
    assert layers["conv2"].parameters == ("conv2.weight", "conv2.bias")
    assert {name: layer.grad_input_flops for name, layer in layers.items()} == {**flops, "conv1": 0}
    assert {name: layer.grad_weight_flops for name, layer in layers.items()} == {**flops, "pool": 0}


def test_methods_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for name, tracer in METHODS.items():
        monkeypatch.setattr(trace_module, "_METHODS", {name: tracer})
        results.append(traced(Cnn(), torch.randn(4, 3, 16, 16)))
    assert [(result.method, result.failures) for result in results] == [(name.split()[0], {}) for name in METHODS]
    assert all(result.layers == results[0].layers for result in results)


def test_attention_by_hand(method: str) -> None:
    qkv, products = traced(Attention(), torch.randn(2, 5, 8)).layers
    assert [qkv.name, products.name] == ["qkv", ""]
    assert qkv.flops == 2 * 2 * 5 * 8 * 24
    assert (products.kind, products.flops) == ("attention", 2 * (2 * 2 * 5 * 5 * 8))
    # Both operands of each product are activations: each needs a product of the same size.
    assert (products.grad_input_flops, products.grad_weight_flops) == (2 * products.flops, 0)
    assert products.activation_bytes == 2 * 5 * 8 * 4


def test_fused_attention_by_hand(method: str) -> None:
    layers = by_name(traced(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)))
    attention, products = layers["self_attn"], 2 * (2 * 2 * 5 * 5 * 8)
    assert (attention.flops, attention.grad_input_flops) == (2 * 2 * 5 * 8 * 24 + products, 2 * products)
    assert attention.parameters == ("self_attn.in_proj_weight", "self_attn.in_proj_bias")
    assert layers["self_attn.out_proj"].flops == 2 * 2 * 5 * 8 * 8


def test_lstm_by_hand(method: str) -> None:
    embed, lstm, _ = traced(LanguageModel(), torch.randint(0, 50, (3, 7))).layers
    assert (embed.flops, embed.grad_input_flops) == (3 * 7 * 16, 0)
    assert (lstm.kind, len(lstm.parameters)) == ("recurrent", 8)
    assert lstm.flops == 2 * 3 * 7 * 4 * 24 * ((16 + 24) + (24 + 24))
    assert lstm.grad_input_flops == lstm.grad_weight_flops == lstm.flops


def test_gradients_that_are_not_needed_cost_nothing(method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 8))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)  # its bias alone costs nothing worth counting
    layers = traced(model, torch.randn(3, 4)).layers
    assert [layer.flops for layer in layers] == [2 * 3 * a * (a + 1) for a in (4, 5, 6, 7)]
    assert [layer.grad_input_flops / layer.flops for layer in layers] == [0, 0, 1, 1]
    assert [layer.grad_weight_flops / layer.flops for layer in layers] == [0, 1, 0, 1]
    first = traced(model, torch.randn(3, 4, requires_grad=True)).layers[0]
    assert first.grad_input_flops == first.flops


def test_tied_weight_is_counted_once(method: str) -> None:
    model = nn.ModuleDict({"out": nn.Linear(8, 20, bias=False), "embed": nn.Embedding(20, 8)})
    model["embed"].weight = model["out"].weight
    model.forward = lambda ids: model["out"](model["embed"](ids))
    embed, out = traced(model, torch.randint(0, 20, (2, 3))).layers
    assert (embed.name, embed.parameters, embed.flops) == ("embed", ("out.weight",), 2 * 3 * 8)
    assert (out.name, out.parameters, out.flops) == ("out", (), 2 * 2 * 3 * 8 * 20)


def test_module_called_twice_and_module_not_called(method: str) -> None:
    model = nn.ModuleDict({"spare": nn.Linear(2, 2), "fc": nn.Linear(4, 4)})
    model.forward = lambda x: model["fc"](model["fc"](x))
    fc, spare = traced(model, torch.randn(3, 4)).layers
    assert (fc.flops, fc.activation_bytes) == (2 * 2 * 3 * 4 * 4, 2 * 3 * 4 * 4)
    assert (fc.grad_input_flops, fc.grad_weight_flops) == (fc.flops / 2, fc.flops)
    assert (spare.name, spare.flops, spare.parameters) == ("spare", 0, ("spare.weight", "spare.bias"))


class Branches(nn.Module):
    """Two branches as in an Inception block, and a connection around them."""

    def __init__(self) -> None:
        super().__init__()
        for name, (inside, outside) in {"stem": (3, 4), "left": (4, 4), "right": (4, 4), "after": (4, 4)}.items():
            self.add_module(name, nn.Conv2d(inside, outside, 3, padding=1))
        self.join, self.out = nn.Conv2d(8, 4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        y = torch.cat([self.left(x), self.after(torch.relu_(self.right(x)))], 1)
        return self.out((self.join(y) + x).mean((2, 3)))


def test_branches_and_connections_around_layers(method: str) -> None:
    layers = by_name(traced(Branches(), torch.randn(2, 3, 5, 5)))
    assert {name: layer.inputs for name, layer in layers.items()} == {
        "stem": (), "left": ("stem",), "right": ("stem",), "after": ("right",), "join": ("left", "after"),
        "out": ("join", "stem"),
    }  # fmt: skip
    assert [layer.inputs for layer in traced(Attention(), torch.randn(2, 5, 8)).layers] == [(), ("qkv",)]


def test_a_layer_that_is_called_again_reads_what_is_before_it_alone(method: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model.forward = lambda x: model["c"](model["a"](model["b"](model["a"](x))))
    layers = by_name(traced(model, torch.randn(3, 4)))
    assert {name: layer.inputs for name, layer in layers.items()} == {"a": (), "b": ("a",), "c": ("a", "b")}


def identities(model: nn.Module) -> list[object]:
    """Every attribute of every module, and what is in those that are containers (hooks, buffers, …), by identity."""

    def inside(value: Any) -> list[int]:
        items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        return [id(item) for item in items]

    return [[(key, id(value), inside(value)) for key, value in vars(part).items()] for part in model.modules()]


def assert_unchanged(model: nn.Module, run: Callable[[], object]) -> TracedModel:
    """Traces, and compares the model, its gradients and the generators before and after."""
    first, *others = model.parameters()
    first.grad = torch.randn_like(first)
    gradient, gradient_bits = first.grad, first.grad.clone()
    bits, objects = {name: value.clone() for name, value in model.state_dict().items()}, identities(model)
    torch_rng, python_rng = torch.get_rng_state(), random.getstate()
    result = trace(model, run)
    assert identities(model) == objects
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, bits[name])] == []
    assert first.grad is gradient
    assert torch.equal(gradient, gradient_bits)
    assert [parameter.grad for parameter in others] == [None] * len(others)
    assert torch.equal(torch.get_rng_state(), torch_rng)
    assert random.getstate() == python_rng
    return result


@pytest.mark.parametrize("model", [Cnn(), DataDependent(), nn.Sequential(Cnn()).eval()])
def test_model_is_left_as_found(method: str, model: nn.Module) -> None:
    def run() -> None:
        model.zero_grad(set_to_none=False)
        model(torch.randn(4, 3, 16, 16) + random.random()).sum().backward()

    assert_unchanged(model, run)


def test_data_dependent_model_gets_a_graph_of_the_path_it_takes() -> None:
    model = DataDependent()
    result = assert_unchanged(model, lambda: model(torch.randn(4, 3, 16, 16)))
    assert (result.method, [*result.failures]) == ("export", ["export of all paths"])
    assert "data-dependent" in result.failures["export of all paths"]
    assert result.layers == traced(Cnn(), torch.randn(4, 3, 16, 16)).layers
    assert (model.history, model.table.sum()) == ([], 0)


def test_failures_are_silent(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert traced(DataDependent(), torch.randn(4, 3, 16, 16)).failures
    assert capfd.readouterr() == ("", "")
    # Torch's record for its own tools, empty and at debug level, is no message to anybody.
    assert [record for record in caplog.records if record.name != "torch.__trace"] == []
    assert logging.root.manager.disable == disabled


def test_broken_model_still_has_layers() -> None:
    def broken(x: Tensor) -> Tensor:
        raise ValueError("cannot\nrun")

    model = nn.Sequential(nn.Linear(2, 3))
    model.forward = broken
    result = traced(model, torch.randn(1, 2))
    assert result.failures == dict.fromkeys(["export", "symbolic_trace", "hooks"], "ValueError: cannot")
    assert [(layer.name, layer.flops) for layer in result.layers] == [("0", 0)]


def test_step_ends_at_the_first_call() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    assert trace(model, lambda: (model(torch.zeros(5, 2)), 1 // 0, model(torch.zeros(7, 2)))).layers[0].flops == 60
    with pytest.raises(ZeroDivisionError):  # before the model is called, an error is the user's
        trace(model, lambda: model(torch.zeros(1 // 0)))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_step_that_calls_only_parts() -> None:
    model, x = nn.ModuleDict({"encoder": nn.Linear(4, 2), "decoder": nn.Linear(2, 4)}), torch.randn(3, 4)
    result = assert_unchanged(model, lambda: model["decoder"](model["encoder"](x)).sum().backward())
    costs = [(layer.name, layer.flops, layer.grad_input_flops) for layer in result.layers]
    assert costs == [("encoder", 48, 0), ("decoder", 48, 48)]


@dataclass
class Nest:
    tensor: Tensor
    more: Any


class Containers(Cnn):
    def forward(self, batch: Any, *rest: Any, scale: float, **more: Any) -> Nest:
        x = super().forward(batch["pair"][0].tensor * scale + batch["pair"][1][0] + rest[0][1] + more["shift"])
        return Nest(x.sum(), {"heads": [self.fc.bias * 2, x]})


def test_nested_batches_and_dataclass_outputs(method: str) -> None:
    x, model = torch.randn(4, 3, 16, 16), Containers()
    batch = {"pair": (Nest(x, "label"), [x])}
    result = assert_unchanged(model, lambda: model(batch, (None, x), scale=2.0, shift=x).tensor)
    assert by_name(result)["fc"].flops == 2 * 4 * 192 * 10


def test_compiled_model_is_unwrapped(method: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6)), torch.randn(3, 4)
    compiled = torch.compile(model)
    for target, called in ((compiled, compiled), (compiled, model), (model, compiled)):
        model.zero_grad()
        result = assert_unchanged(target, lambda called=called: called(x))
        assert [(layer.name, layer.flops) for layer in result.layers] == [("0", 120), ("1", 180)]
        assert result.failures == {}


def test_compiled_part_is_unwrapped() -> None:
    result = traced(nn.Sequential(nn.Linear(4, 5), torch.compile(nn.Linear(5, 6))), torch.randn(3, 4))
    assert [layer.parameters for layer in result.layers] == [("0.weight", "0.bias"), ("1.weight", "1.bias")]


@pytest.mark.parametrize("method", ["export", "hooks"], indirect=True)  # symbolic_trace sees no contexts
def test_regions_inside_forward(method: str) -> None:
    class Regions(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self[0](x)
            with torch.autocast("cpu", torch.bfloat16):
                return self[2](self[1](x))

    layers = by_name(traced(Regions(Attention(), Attention(), Attention()), torch.randn(2, 5, 8)))
    products = 2 * (2 * 2 * 5 * 5 * 8)
    assert [layers[name].flops for name in "012"] == [products] * 3
    assert [layers[name].grad_input_flops for name in "012"] == [0, 2 * products, 2 * products]
    assert layers["1.qkv"].grad_input_flops == 0  # what comes before is not trained
    assert layers["1.qkv"].activation_bytes == 2 * 5 * 24 * 2


def test_autocast_around_the_step(method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5))
    run = torch.autocast("cpu", torch.bfloat16)(lambda: model(torch.zeros(3, 4)))
    assert trace(model, run).layers[0].activation_bytes == 3 * 5 * 2


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_reparametrized_weight_belongs_to_its_layer(method: str, name: str) -> None:
    model, x = nn.Sequential(getattr(nn.utils.parametrizations, name)(nn.Linear(4, 5))), torch.randn(3, 4)
    parts = [lambda: model[0](x)] if method == "hooks" else []  # on real tensors
    for run in (lambda: model(x), *parts):
        costs = [(layer.name, layer.flops, layer.grad_weight_flops) for layer in trace(model, run).layers]
        assert costs == [("0", 120, 120), ("0.parametrizations.weight", 0, 0)]


def test_large_model_needs_no_memory(method: str) -> None:
    model = nn.Sequential(nn.Linear(10**6, 10**6, device="meta"))  # 4 TB
    assert traced(model, torch.empty(10**6, 10**6, device="meta")).layers[0].flops == 2 * 10**18


def transformer(name: str) -> tuple[nn.Module, dict[str, Tensor], int]:
    """A model with two blocks of width 32, a batch of two, and the tokens in each."""
    size = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    ids = torch.randint(0, 50, (2, 16))
    if name == "bert":
        bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, **size))
        return bert, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}, 16
    if name == "gpt2":
        gpt2 = transformers.GPT2Config(vocab_size=50, n_inner=64, bos_token_id=0, eos_token_id=0, **size)
        return transformers.GPT2LMHeadModel(gpt2), {"input_ids": ids, "labels": ids}, 16
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **size))
    return vit, {"pixel_values": torch.randn(2, 3, 32, 32)}, 17


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_transformers_get_a_graph(name: str) -> None:
    model, batch, tokens = transformer(name)
    result = assert_unchanged(model, lambda: model(**batch))
    assert result.method in ("export", "symbolic_trace")
    block = [layer for layer in result.layers if ".0." in layer.name]
    linear = 2 * 2 * tokens * (4 * 32 * 32 + 2 * 32 * 64)
    assert sum(layer.flops for layer in block if layer.kind == "linear") == linear
    assert sum(layer.flops for layer in block if not layer.parameters) == 2 * 2 * 2 * tokens * tokens * 32
    assert [cost for cost in result.layers if "position_emb" in cost.name and cost.grad_input_flops] == []
    listed = [parameter for layer in result.layers for parameter in layer.parameters]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
    assert 0.4 < estimated_grad_weight_share(result.layers) < 0.55


def test_lstm_language_model_gets_a_graph() -> None:
    model, state = LanguageModel(), (torch.zeros(2, 2, 24), torch.zeros(2, 2, 24))
    result = assert_unchanged(model, lambda: model(torch.randint(0, 50, (2, 3)), state))
    assert result.method in ("export", "symbolic_trace")
    assert list(by_name(result)) == ["embed", "lstm", "out"]


def cost(name: str, flops: float, grad_input: float, grad_weight: float, *parameters: str) -> LayerCost:
    return LayerCost(name=name, kind="linear", flops=flops, activation_bytes=8.0, parameters=parameters,
                     grad_input_flops=grad_input, grad_weight_flops=grad_weight)  # fmt: skip


def test_split_backward_divides_what_was_measured() -> None:
    layers = [cost("a", 100, 0, 100, "a.weight"), cost("mix", 40, 80, 0),
              cost("b", 60, 60, 30, "b.weight", "b.bias"), cost("idle", 0, 0, 0, "idle.weight")]  # fmt: skip
    split = split_backward(layers, {"a": 50.0, "b": 90.0, "idle": 3.0, "elsewhere": 7.0}, 80.0)
    assert [layer.forward_us for layer in split] == [40.0, 16.0, 24.0, 0.0]
    assert [(layer.grad_input_us, layer.grad_weight_us) for layer in split] == [(0, 50), (None, None), (60, 30), (0, 3)]
    assert [(layer.name, layer.parameters) for layer in split] == [(layer.name, layer.parameters) for layer in layers]
    assert [layer.forward_us for layer in split_backward(layers[3:], {}, 80.0)] == [None]


def test_split_backward_of_a_shared_weight() -> None:
    # The weight is named after the layer that registered it, and listed with the one that uses it first.
    layers = [cost("embed", 10, 0, 10, "out.weight"), cost("out", 30, 30, 0, "out.bias")]
    split = split_backward(layers, {"out": 80.0}, 1.0)
    assert [(layer.grad_input_us, layer.grad_weight_us) for layer in split] == [(0, 20), (60, 0)]


def test_estimated_grad_weight_share() -> None:
    assert estimated_grad_weight_share([cost("a", 9, 0, 30), cost("b", 9, 60, 30)]) == 0.5
    assert estimated_grad_weight_share([cost("frozen", 9, 0, 0)]) == 0.0
