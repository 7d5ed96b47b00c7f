"""Eq. 19's ratios of the tasks that are trained: what hides, and no more."""

from __future__ import annotations

import math

import pytest

from benchmarks.lags.accuracy import METHODS, _buckets, matrices
from benchmarks.lags.ratios import MAX_RATIO, eq19, problem_of
from benchmarks.learning import tasks
from planner.model.compression import ratio_of_steps, steps_of_ratio
from runtime.checks.plan import trainable_parameters
from runtime.plan.transports import FLAT


def test_every_message_hides_or_has_the_largest_ratio() -> None:
    task = next(task for task in tasks() if task.name == "characters, LSTM")
    model = task.model()
    ks, problem = eq19(task, model, list(matrices(model))), problem_of(task, model)
    gradients, (gather,) = problem.profile.compute.gradients, problem.sparse_phases(FLAT)
    runs = [gradients[slice(*run)] for run in problem.layer_runs]
    assert len(runs) == len(matrices(model))
    hidden = 0
    for run, following in zip(runs, [*runs[1:], ()], strict=True):
        matrix = max(run, key=lambda gradient: gradient.numel)
        first = problem.profile.compute.gradients.index(run[0])
        budget_us = sum(gradient.backward_us for gradient in following)
        budget_us -= sum(
            float(problem.range_cost_us(first + place, first + place + 1))
            for place, gradient in enumerate(run)
            if gradient is not matrix
        )
        k = ks[matrix.name]
        if k == math.ceil(matrix.numel / MAX_RATIO):
            assert gather.time_us(k + 1, 0.0) > budget_us
        else:
            hidden += 1
            assert gather.time_us(k, 0.0) <= budget_us * (1.0 + 1e-9)
            assert gather.time_us(k + 1, 0.0) > budget_us
    assert hidden


def test_slgs_and_lags_send_the_same_gradients_whole() -> None:
    task = next(task for task in tasks() if task.name == "characters, LSTM")
    model = task.model()
    names, ks = list(reversed(trainable_parameters(model))), eq19(task, model, list(matrices(model)))
    assert ks.keys() <= matrices(model).keys()
    whole, sent = [], []
    for name in ("LAGS, Eq. 19", "SLGS, as many as LAGS"):
        buckets = list(_buckets(names, METHODS[name], ks))
        assert sorted(gradient for bucket in buckets for gradient in bucket.gradients) == sorted(names)
        whole.append({g for bucket in buckets if bucket.compressor.name == "none" for g in bucket.gradients})
        sent.append(sum(bucket.compressor.name != "none" for bucket in buckets))
    assert whole[0] == whole[1] == {*names} - ks.keys()
    assert sent == [len(ks), 1]


@pytest.mark.parametrize(("ratio", "steps"), [(1.0, 1.0), (10.0, 1e3), (1000.0, 1e9)])
def test_steps_that_a_ratio_needs(ratio: float, steps: float) -> None:
    assert steps_of_ratio(ratio) == steps
    assert ratio_of_steps(steps) == pytest.approx(ratio)
