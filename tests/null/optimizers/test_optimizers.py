"""LARS and LAMB: against their papers, against an independent implementation, and as ordinary optimizers."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from optimizer_references import SHAPES, gradients_of, lamb_reference, lars_reference, layers, run
from torch import nn
from torch.nn import functional

from runtime.errors import InputError
from runtime.monitor.clock import WallClock
from runtime.optimizers import LAMB, LARS, LayerwiseOptimizer

RATES = (0.5, 0.5, 0.25, 1.0, 0.1)
ADAPTED = [len(shape) > 1 for shape in SHAPES]

MAKERS: dict[str, Callable[[Any], LayerwiseOptimizer]] = {
    "lars": lambda parameters: LARS(parameters, lr=0.3, weight_decay=1e-3, trust_coefficient=0.02),
    "lars nesterov": lambda parameters: LARS(parameters, lr=0.3, weight_decay=1e-3, nesterov=True),
    "lars plain": lambda parameters: LARS(parameters, lr=0.3, momentum=0.0, weight_decay=1e-3),
    "lamb": lambda parameters: LAMB(parameters, lr=0.02),
    "lamb uncorrected": lambda parameters: LAMB(parameters, lr=0.02, bias_correction=False, weight_decay=0.0),
}


def close(found: list[nn.Parameter], expected: list[torch.Tensor], rtol: float = 2e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach().double(), other.detach().double(), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_lars_is_the_paper_s(dtype: torch.dtype, momentum: float, nesterov: bool, weight_decay: float) -> None:
    parameters = layers(dtype=dtype)
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "trust_coefficient": 0.02}
    expected = lars_reference(
        parameters, [gradients_of(step, dtype=dtype) for step in range(len(RATES))], RATES, adapted=ADAPTED, **options
    )
    run(LARS(parameters, lr=0.1, **options), parameters, RATES)
    close(parameters, expected, rtol=1e-11 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_lamb_is_the_paper_s(dtype: torch.dtype, bias_correction: bool, weight_decay: float) -> None:
    parameters = layers(dtype=dtype)
    options = {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": weight_decay, "bias_correction": bias_correction}
    rates = [rate / 10 for rate in RATES]
    expected = lamb_reference(
        parameters, [gradients_of(step, dtype=dtype) for step in range(len(rates))], rates, adapted=ADAPTED, **options
    )
    run(LAMB(parameters, **options), parameters, rates)
    close(parameters, expected, rtol=1e-10 if dtype == torch.float64 else 5e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_against_another_package(nesterov: bool) -> None:
    """Its rate is outside of the velocity, which is the same as long as the rate is."""
    parameters, others = layers(), layers()
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.01, "trust_coefficient": 0.02}
    run(LARS(parameters, lr=0.5, **options), parameters, [0.5] * 6)
    run(pytorch_optimizer.LARS(others, lr=0.5, **options), others, [0.5] * 6)
    close(parameters, others)


def test_lamb_against_another_package() -> None:
    """It adapts all layers, corrects no bias, adds a small number to ‖r‖, and its ‖w‖ is at most 10."""
    parameters, others = layers(), layers()
    assert all(float(parameter.detach().norm()) < 9.0 for parameter in parameters)
    options: dict[str, Any] = {"betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1}
    mine = LAMB(parameters, lr=0.02, bias_correction=False, exclude_1d=False, **options)
    theirs = pytorch_optimizer.Lamb(others, lr=0.02, weight_decouple=False, adam_debias=True, **options)
    run(mine, parameters, [0.02] * 4)
    run(theirs, others, [0.02] * 4)
    close(parameters, others)


def test_options_differ_between_groups() -> None:
    parameters = layers()
    groups = [
        {"params": parameters[:1]},
        {"params": parameters[1:4], "adapt": False, "momentum": 0.0, "weight_decay": 0.5},
        {"params": parameters[4:], "weight_decay": 0.0, "exclude_1d": False, "trust_coefficient": 0.1},
    ]
    optimizer = LARS(groups, lr=0.5, weight_decay=0.01, trust_coefficient=0.02)
    before = [parameter.detach().clone() for parameter in parameters]
    run(optimizer, parameters, RATES[:1])
    gradients = gradients_of(0)
    first = 0.02 * before[0].norm() / (gradients[0].norm() + 0.01 * before[0].norm())
    torch.testing.assert_close(parameters[0].data, before[0] - 0.5 * first * (gradients[0] + 0.01 * before[0]))
    torch.testing.assert_close(parameters[1].data, before[1] - 0.5 * gradients[1])  # a vector: neither decayed
    torch.testing.assert_close(parameters[2].data, before[2] - 0.5 * (gradients[2] + 0.5 * before[2]))
    last = 0.1 * before[5].norm() / gradients[5].norm()
    torch.testing.assert_close(parameters[5].data, before[5] - 0.5 * last * gradients[5])
    assert {id(p) for p in optimizer.adapted()} == {id(parameters[index]) for index in (0, 4, 5)}


def test_norms_and_biases_are_excluded_by_default() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 2))
    optimizer = LAMB(model.named_parameters())
    adapted = {id(parameter) for parameter in optimizer.adapted()}
    assert [n for n, p in model.named_parameters() if id(p) in adapted] == ["0.weight", "4.weight"]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_state_continues_bit_for_bit(make: Callable[[Any], LayerwiseOptimizer]) -> None:
    parameters = layers()
    optimizer = make(parameters)
    run(optimizer, parameters, RATES[:3])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    others = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    again = make(others)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    for one, its in ((optimizer, parameters), (again, others)):
        run(one, its, RATES[3:], first=3)
    assert all(map(torch.equal, parameters, others))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_go_on_alone(make: Callable[[Any], LayerwiseOptimizer], copied: Callable[[Any], Any]) -> None:
    parameters = layers()
    optimizer = make(parameters)
    run(optimizer, parameters, RATES[:2])
    other = copied(optimizer)
    others = [parameter for group in other.param_groups for parameter in group["params"]]
    run(other, others, RATES[2:], first=2)
    assert not any(map(torch.equal, parameters[:1], others[:1]))
    run(optimizer, parameters, RATES[2:], first=2)
    assert all(map(torch.equal, parameters, others))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_parameters_without_a_gradient_rest(make: Callable[[Any], LayerwiseOptimizer]) -> None:
    parameters, alone = layers(), layers()
    whole, part = make(parameters), make([alone[0], alone[1]])
    for step in range(3):
        for parameter, gradient in itertools.islice(zip(parameters, gradients_of(step), strict=True), 2):
            parameter.grad = gradient
        for parameter, gradient in itertools.islice(zip(alone, gradients_of(step), strict=True), 2):
            parameter.grad = gradient
        whole.step()
        part.step()
    assert all(map(torch.equal, parameters, alone))
    assert set(whole.state) == {parameters[0], parameters[1]} or make is MAKERS["lars plain"]
    for parameter in parameters:
        parameter.grad = None
    whole.step()  # nothing to do


def test_gradients_are_left_as_they_are() -> None:
    for make in MAKERS.values():
        parameters = layers()
        run(make(parameters), parameters, RATES[:1])
        for parameter, gradient in zip(parameters, gradients_of(0), strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_closures_and_schedulers(make: Callable[[Any], LayerwiseOptimizer]) -> None:
    """The closure is run with gradients on, its loss handed back; the rate of the scheduler counts."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    before = closure().item()
    assert optimizer.step(closure).item() == before
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0
    weights = model.weight.detach().clone()
    if not isinstance(optimizer, LARS) or optimizer.param_groups[0]["momentum"] == 0.0:
        optimizer.step(closure)
        assert torch.equal(model.weight, weights)


@pytest.mark.parametrize("make", [MAKERS["lars"], MAKERS["lamb"]], ids=["lars", "lamb"])
def test_a_rate_may_be_a_tensor(make: Callable[[Any], LayerwiseOptimizer]) -> None:
    parameters, others = layers(), layers()
    run(make(parameters), parameters, [0.25] * 3)
    run(make(others), others, [torch.tensor(0.25)] * 3)  # type: ignore[list-item]
    assert all(map(torch.equal, parameters, others))


def train_digits(make: Callable[[Any], torch.optim.Optimizer], steps: int, batch: int) -> float:
    """The share of test digits that a small network gets right after some large-batch steps."""
    from examples.digits import digits

    data = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(len(data.train_labels), (batch,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(data.test_images).argmax(1) == data.test_labels).float().mean())


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: LARS(parameters, lr=0.5, weight_decay=1e-4, trust_coefficient=0.04),
        lambda parameters: LARS(parameters, lr=0.5, weight_decay=1e-4, trust_coefficient=0.04, nesterov=True),
        lambda parameters: LAMB(parameters, lr=0.02),
    ],
    ids=["lars", "lars nesterov", "lamb"],
)
def test_large_batches_train(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Half the training set in a batch, forty steps."""
    assert train_digits(make, steps=40, batch=700) > 0.93


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: LARS(p, lr=-1.0), "LARS: lr: found -1.0, expected a number of at least 0"),
        (lambda p: LARS(p, lr=1.0, momentum=1.0), "LARS: momentum: found 1.0, expected a number from 0 to below 1"),
        (lambda p: LARS(p, lr=1.0, weight_decay=float("nan")), "LARS: weight_decay: found nan"),
        (lambda p: LARS(p, lr=1.0, trust_coefficient="x"), "LARS: trust_coefficient: found 'x'"),
        (lambda p: LARS(p, lr=1.0, momentum=0.0, nesterov=True), "nesterov without momentum"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), "LAMB: the second of betas: found 1.0"),
        (lambda p: LAMB(p, eps=-1e-8), "LAMB: eps: found -1e-08"),
        (lambda p: LAMB(p, lr=True), "LAMB: lr: found True"),
    ],
)
def test_wrong_options(make: Callable[[Any], LayerwiseOptimizer], words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        make(layers())


def test_a_wrong_group_is_not_added() -> None:
    parameters = layers()
    optimizer = LARS(parameters[:2], lr=0.1)
    with pytest.raises(InputError, match="LARS: lr: found -1"):
        optimizer.add_param_group({"params": parameters[2:], "lr": -1})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused_by_name() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(InputError, match=r"LAMB: found a sparse gradient of a parameter of shape \(5, 3\)"):
        LAMB(embedding.parameters()).step()


def test_one_rank_shares_with_nobody() -> None:
    parameters, others = layers(), layers()
    optimizer, alone = MAKERS["lars"](parameters), MAKERS["lars"](others)
    optimizer.share_norms()
    assert optimizer.sharing is None
    run(optimizer, parameters, RATES)
    run(alone, others, RATES)
    optimizer.stop_sharing()
    assert all(map(torch.equal, parameters, others))


def test_what_norms_take_is_measured_where_it_is_asked_for() -> None:
    parameters = layers()
    optimizer = MAKERS["lars"](parameters)
    run(optimizer, parameters, RATES)
    assert optimizer.norm_times_us() == []
    optimizer.observe_norms(WallClock())
    run(optimizer, parameters, RATES)
    assert len(optimizer.norm_times_us()) == len(RATES)
    assert min(optimizer.norm_times_us()) > 0.0
