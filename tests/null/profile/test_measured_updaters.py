"""Taking backward apart: parts that are known are found again from the times of partial backwards."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.documents.profile import Gradient
from planner.profile.updaters import (
    Floats,
    _probes,
    halves_us,
    numbers_up_to,
    stalled,
    take_apart,
    with_updates,
)


def runs_of(times_us: NDArray[np.float64]) -> list[list[Gradient]]:
    """A layer of one gradient for each time."""
    return [
        [Gradient(name=f"g{i}", layer=f"l{i}", numel=i + 1, dtype="float32", backward_us=float(time_us))]
        for i, time_us in enumerate(times_us)
    ]


def timed(inputs: NDArray[np.float64], weights: NDArray[np.float64], probes: list[int]) -> tuple[Floats, Floats]:
    """What partial backwards would take, if `inputs[i]` is spent on the way to layer i."""
    reached = np.cumsum(inputs)
    before = np.cumsum(weights) - weights
    return (reached + weights)[probes], before[probes]


@pytest.mark.parametrize("seed", range(3))
def test_known_parts_are_found_again(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs, weights = rng.uniform(1, 100, (2, 12))
    runs = runs_of(inputs + weights)
    loss_us, layers = take_apart(runs, range(12), *timed(inputs, weights, list(range(12))))
    assert loss_us == pytest.approx(inputs[0], abs=1e-2)
    assert [layer.grad_weight_us for layer in layers[:-1]] == pytest.approx(weights[:-1], abs=1e-2)
    assert [layer.grad_input_us for layer in layers[:-2]] == pytest.approx(inputs[1:-1], abs=1e-2)
    full_us = loss_us + sum(layer.grad_weight_us + layer.grad_input_us for layer in layers)
    assert full_us == pytest.approx(inputs.sum() + weights.sum(), abs=1e-1)


def test_layers_between_probes_share_by_readiness() -> None:
    """Where parts are in proportion to readiness, a few probes tell all; the whole is right in any case."""
    times = np.random.default_rng(1).uniform(1, 100, 60)
    inputs, weights = 0.4 * times, 0.6 * times
    probes = _probes(times.tolist(), 8)
    assert probes[0] == 0
    assert probes[-1] == 59
    assert 6 <= len(probes) <= 10
    loss_us, layers = take_apart(runs_of(times), probes, *timed(inputs, weights, probes))
    full_us = loss_us + sum(layer.grad_weight_us + layer.grad_input_us for layer in layers)
    assert full_us == pytest.approx(times.sum(), rel=0.02)
    for stop in (15, 30, 45):
        partial_us = loss_us + sum(layer.grad_input_us for layer in layers[: stop - 1])
        assert partial_us == pytest.approx(inputs[:stop].sum(), rel=0.1, abs=0.02 * times.sum())


def test_noise_makes_no_negative_parts() -> None:
    rng = np.random.default_rng(2)
    inputs, weights = rng.uniform(1, 100, (2, 30))
    single_us, others_us = timed(inputs, weights, list(range(30)))
    noisy = single_us * rng.uniform(0.8, 1.2, 30), others_us + rng.normal(0.0, 100.0, 30)
    loss_us, layers = take_apart(runs_of(inputs + weights), range(30), *noisy)
    assert loss_us >= 0.0
    assert all(layer.grad_weight_us >= 0.0 and layer.grad_input_us >= 0.0 for layer in layers)
    assert layers[-1].grad_input_us == 0.0


def test_one_layer() -> None:
    loss_us, (layer,) = take_apart(runs_of(np.array([8.0])), [0], *timed(np.array([2.0]), np.array([6.0]), [0]))
    assert (loss_us, layer.grad_weight_us, layer.grad_input_us) == (4.0, 4.0, 0.0)


def test_updates_are_shared_out_by_elements() -> None:
    runs = runs_of(np.ones(3))
    layers = take_apart(runs, range(3), *timed(np.ones(3), np.ones(3), [0, 1, 2]))[1]
    given_out = with_updates(layers, [gradient for run in runs for gradient in run], 60.0)
    assert [layer.update_us for layer in given_out] == [10.0, 20.0, 30.0]


def test_halves_of_a_run() -> None:
    """Twenty updates every second, then every two; the first ones of each half and the last do not count."""
    ends_s = [*np.arange(1.0, 21.0), *np.arange(22.0, 62.0, 2.0)]
    ends_s[0] -= 0.9
    assert halves_us(ends_s, 20, 2) == pytest.approx((1e6, 2e6))


def test_numbers_of_updaters() -> None:
    assert [numbers_up_to(most) for most in (1, 2, 4, 6, 8)] == [
        [1], [1, 2], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8],
    ]  # fmt: skip


def test_more_updaters_are_measured_as_long_as_they_get_more_done() -> None:
    """One number that gets no more done may be noise; two in a row end it."""
    assert not stalled([100.0, 120.0])
    assert not stalled([100.0, 120.0, 90.0])
    assert not stalled([100.0, 60.0, 61.0])
    assert stalled([100.0, 100.0, 110.0])
    assert stalled([100.0, 60.0, 61.0, 62.0])
