"""Fits of NCCL's constants: what made the measurements is found again, and published tables come out within targets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published import nccl as published
from planner.cost import nccl
from planner.cost.nccl import Shape
from planner.cost.nccl_fit import Measured, _loss, _Problem, fit
from planner.documents.nccl import Interval, Nccl, NcclFit
from runtime.errors import InputError

MACHINE = Nccl(gpu="h100", nics_per_node=8, nic="400gbit")
SIZES = tuple(2.0**power for power in range(10, 34))


def made_by(latency: float, transfer: float, launch_us: float) -> Nccl:
    """A machine whose NCCL is off by these factors."""
    truth = NcclFit(
        launch_us=launch_us, overlap=1.8, overlap_inside=1.0, latency={}, transfer={}, halves={},
        other_latency=latency, other_transfer=transfer, interval=Interval(inside=0.1, beyond=0.1), measured_on=(16,),
        samples=1, mean_error=0.0,
    )  # fmt: skip
    return Nccl(gpu="h100", nics_per_node=8, nic="400gbit", fit=truth)


def log_of(machine: Nccl, nodes: int, noise: float = 0.0, collective: str = "all_reduce") -> Measured:
    times = nccl.times_us(collective, Shape(machine, nodes, 8), SIZES)
    times = times * np.exp(noise * np.random.default_rng(nodes).standard_normal(len(times)))
    return Measured(collective, nodes, 8, tuple(zip(SIZES, times.tolist(), strict=True)))


@settings(max_examples=8, deadline=None)
@given(st.floats(0.6, 2.5), st.floats(0.85, 1.4), st.floats(10.0, 40.0))
def test_what_made_the_measurements_is_found_again(latency: float, transfer: float, launch_us: float) -> None:
    truth = made_by(latency, transfer, launch_us)
    found = fit(MACHINE, [log_of(truth, 2, 0.01), log_of(truth, 4, 0.01)])
    expected = np.array([time for _, time in log_of(truth, 16).samples])
    ours = nccl.times_us("all_reduce", Shape(found, 16, 8), SIZES)
    assert np.median(np.abs(ours / expected - 1.0)) < 0.1
    assert found.fit is not None
    assert found.fit.measured_on == (16, 32)
    assert found.fit.interval.beyond >= found.fit.interval.inside >= 0.03


def problem_of(nodes: tuple[int, ...]) -> _Problem:
    return _Problem.of(MACHINE, [log_of(made_by(1.4, 1.1, 15.0), count, 0.2) for count in nodes])


def test_derivatives_are_those_of_the_model() -> None:
    problem = problem_of((1, 2, 4))
    values = 0.1 * np.random.default_rng(0).standard_normal(len(problem.priors))
    _, slopes = problem.residuals(problem.tuned, values, slice(None))
    for at in range(len(values)):
        step = 1e-6 * (np.arange(len(values)) == at)
        above, below = (problem.residuals(problem.tuned, values + sign * step, slice(None))[0] for sign in (1, -1))
        assert slopes[:, at] == pytest.approx((above - below) / 2e-6, rel=1e-5, abs=1e-5)


def test_no_other_solver_finds_less() -> None:
    from scipy.optimize import least_squares

    problem = problem_of((1, 2))
    found = problem.solve(problem.tuned, np.zeros(len(problem.priors)))

    def residuals(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        apart = problem.residuals(problem.tuned, values, slice(None))[0]
        return np.concatenate([np.sqrt(_loss(apart)), values / problem.priors])

    other = least_squares(
        residuals, np.zeros(len(problem.priors)), bounds=([-9, -0.5, 0] + [-9] * (len(problem.priors) - 3), 9)
    )
    assert found.cost <= 2.0 * other.cost * (1 + 1e-6)


def test_a_single_disturbed_row_moves_little() -> None:
    truth = made_by(1.3, 1.1, 20.0)
    log = log_of(truth, 2)
    samples = [(size, time * (20.0 if at == 12 else 1.0)) for at, (size, time) in enumerate(log.samples)]
    one, other = fit(MACHINE, [log]), fit(MACHINE, [Measured("all_reduce", 2, 8, tuple(samples))])
    times = [nccl.times_us("all_reduce", Shape(machine, 2, 8), SIZES) for machine in (one, other)]
    assert np.max(np.abs(times[1] / times[0] - 1.0)) < 0.2


def test_another_choice_than_nccls_is_seen_and_goes_with_the_number_of_ranks() -> None:
    """A tuner that keeps LL up to 16 MiB, as Google's does; NCCL's own would leave it at 1 MiB."""
    shape = Shape(MACHINE, 2, 8)
    forced = ["tree/ll" if size <= 2**24 else "nvls_tree/simple" for size in SIZES]
    times = nccl.times_us("all_reduce", shape, SIZES, forced)  # type: ignore[arg-type]
    found = fit(MACHINE, [Measured("all_reduce", 2, 8, tuple(zip(SIZES, times.tolist(), strict=True)))])
    assert found.fit is not None
    assert found.fit.choice is not None
    assert np.max(np.abs(nccl.times_us("all_reduce", Shape(found, 2, 8), SIZES) / times - 1.0)) < 0.15
    assert nccl.choice("all_reduce", Shape(found, 4, 8), [2.0**24.8]) != ["nvls_tree/simple"]
    assert nccl.choice("all_reduce", Shape(found, 4, 8), [2.0**26.2]) == ["nvls_tree/simple"]


def test_the_same_logs_give_the_same_fit_in_any_order() -> None:
    logs = [log_of(made_by(1.2, 1.1, 20.0), nodes, 0.05) for nodes in (2, 4)]
    assert fit(MACHINE, logs) == fit(MACHINE, logs[::-1])


def test_ten_logs_of_another_network() -> None:
    """The most that is searched through: every log shows other changes than this network's tuner makes."""
    truth = made_by(1.3, 1.15, 12.0)
    tcp = Nccl(gpu="h100", nics_per_node=8, nic="400gbit", network="tcp", cpu="amd")
    logs = [log_of(truth, nodes, 0.05, kind) for kind in ("all_reduce", "all_gather") for nodes in (1, 2, 4, 8, 16)]
    found = fit(tcp, logs)
    assert found.fit is not None
    assert found.fit.mean_error < 0.06
    assert found.fit.samples == 10 * len(SIZES)


def test_times_that_no_machine_has() -> None:
    """They fall with the number of bytes."""
    samples = tuple((2.0**power, 1e6 / 2.0 ** (power - 20)) for power in range(20, 31))
    with pytest.raises(InputError, match="explains half within a factor of"):
        fit(MACHINE, [Measured("all_reduce", 2, 8, samples)])


def test_nothing_measured() -> None:
    with pytest.raises(InputError, match="found no measured collective"):
        fit(MACHINE, [Measured("all_reduce", 1, 1, ((8.0, 1.0),))])


@pytest.mark.parametrize(
    ("rows", "median", "worst"),
    [("p5_rows", 0.08, 0.25), ("a100_rows", 0.10, 0.30), ("a3_rows", 0.10, 0.30)],
)
def test_published_rows_that_were_not_fitted_on(rows: str, median: float, worst: float) -> None:
    found = getattr(published, rows)()
    assert published.middle(found) <= median
    assert max(row.error for row in found) <= worst


def test_by_machine_description_alone() -> None:
    rows = [row for table in published.described_tables().values() for row in table]
    assert published.middle(rows) <= 0.25
