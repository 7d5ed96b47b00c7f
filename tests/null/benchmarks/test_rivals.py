"""Rivals that benchmarks of relaxed plans train: local updates, ASGD, and the table of local updaters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from benchmarks import learning
from benchmarks.delay.updaters import DcAsgd, local_update, sgd, train_asgd
from benchmarks.learning import Outcome, Task, outcomes
from benchmarks.local_async.rivals import lines
from runtime.delay import local_weights
from runtime.plan import DelaySpec

RATES = {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9}


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,))]


def test_plain_local_sgd_is_glu_without_the_global_gradient() -> None:
    spec = DelaySpec(steps=2, alpha=1.0, beta=0.0)
    ours, theirs = drawn(1), drawn(1)
    sgd(spec, ours, drawn(2), drawn(3), RATES, 0.2)
    with torch.no_grad():
        local_weights.glu(spec, theirs, drawn(2), drawn(3), RATES, 0.2)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other)


def test_delay_compensation_follows_the_formula_and_is_none_at_the_pulled_weights() -> None:
    spec, rates = DelaySpec(steps=2, local_lr_scale=1.0), RATES | {"weight_decay": 0.0}
    update, weights = DcAsgd(scale=2.0, decay=0.5), [torch.tensor([1.0, -2.0])]
    update(spec, weights, [torch.tensor([0.5, 1.0])], [weights[0].clone()], rates, 0.2)
    torch.testing.assert_close(weights[0], torch.tensor([0.95, -2.1]))  # as plain SGD
    pulled = torch.tensor([1.95, -2.1])
    update(spec, weights, [torch.tensor([1.0, 1.0])], [pulled], rates, 0.2)
    mean = 0.5 * (0.5 * 0.5**2) + 0.5 * 1.0  # of the squares of both gradients
    expected = 0.95 - 0.1 * (1.0 + 2.0 / mean**0.5 * 1.0 * (1.95 - 0.95))
    torch.testing.assert_close(weights[0], torch.tensor([expected, -2.2]))


def test_glu_is_replaced_inside_only() -> None:
    glu = local_weights.glu
    with local_update(sgd):
        assert local_weights.glu is sgd
    assert local_weights.glu is glu
    with local_update(None):
        assert local_weights.glu is glu


def task() -> Task:
    def optimizer(parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch[:, :1]).square().mean()

    def batch(step: int, rank: int) -> Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * step + rank))

    return Task("linear", lambda: nn.Linear(3, 1), loss, batch, optimizer, lambda model: 0.0, "lower", 12)


def test_asgd_of_one_worker_is_sgd() -> None:
    given, found = task(), train_asgd(task(), 0, 1)
    torch.manual_seed(0)
    model = given.model()
    optimizer = given.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    for step in range(given.steps):
        optimizer.zero_grad()
        given.loss(model, given.batch(step, 0)).backward()
        optimizer.step()
        schedule.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]), name
    two = train_asgd(task(), 0, 2).state_dict()
    assert not torch.equal(two["weight"], found.state_dict()["weight"])


def test_the_table_of_rivals_compares_speed_with_minibatch_sgd() -> None:
    usual = {"model": "resnet20", "ranks": 2, "staleness": 0.0, "outdated": 0.0, "lost": 0.0, "worst": 0.0}
    records = [
        usual | {"way": "mb_sgd", "accuracy": 0.9, "samples_per_s": 100.0},
        usual | {"way": "mb_sgd", "accuracy": 1.0, "samples_per_s": 200.0},
        usual | {"way": "lpp:2 K=4", "accuracy": 0.9, "samples_per_s": 300.0, "lost": 0.001, "worst": 0.05},
    ]
    rows = list(lines(records))
    assert rows[2].startswith("| resnet20 | 2 | `mb_sgd` | 0.9500 (0.9000 to 1.0000) | 150 | 1.00 |")
    assert rows[3].endswith("| 300 | 2.00 | 0.00 | 0.0% | 0.100% (5.00%) |")


def test_trained_runs_are_kept_and_only_some_are_trained_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, int, str]] = []

    def run_ranks(world: object, on_rank: object, train: object, scale: float, *run: Any) -> list[Outcome]:
        trained.append(run)
        return [Outcome(*run, metric=float(len(trained)))]

    monkeypatch.setattr(learning, "run_ranks", run_ranks)

    def found(only: str = "") -> list[Outcome]:
        return outcomes(
            lambda task, seed, way: Outcome(task.name, seed, way, 0.0), Outcome, ["digits"], ["a", "b"], [0, 1], 1.0,
            tmp_path / "runs.jsonl", only=only,
        )  # fmt: skip

    assert found("0, 'b'") == [Outcome("digits", 0, "b", 1.0)]
    whole = found()
    assert [(one.seed, one.way, one.metric) for one in whole] == [(0, "a", 2), (0, "b", 1), (1, "a", 3), (1, "b", 4)]
    assert found() == whole
    assert len(trained) == 4
