"""The accelerator of a rehearsal on a clock that is told: what waits, what does not, and what a backward does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from planner.documents.catalog import find_profile
from planner.documents.profile import ComputeProfile, OperatorProfile, OperatorShape
from planner.rehearse import accelerator
from planner.rehearse.accelerator import AcceleratedModel, Accelerator, make_job
from runtime.checks.plan import trainable_parameters
from runtime.comm.world import World
from runtime.errors import InputError
from runtime.optimizers.shared_operator import SharedOperator
from runtime.optimizers.units import operator_of


class Clock:
    """Seconds that pass only by being slept or spent."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 2e-5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(accelerator, "time", made)
    return made


def test_work_goes_on_under_its_host(clock: Clock) -> None:
    """The host is a third of the work: the end is that of the work."""
    device = Accelerator()
    device.synchronize()
    start_s = clock.now_s
    for _ in range(10):
        device.run(3000.0)
        clock.now_s += 1e-3
    assert clock.now_s - start_s == pytest.approx(31e-3, abs=1e-4)
    assert device.late_us == 0.0


def test_a_device_that_runs_dry_waits_for_its_host(clock: Clock) -> None:
    """The host takes three times as long as the work: it decides, and what did not fit is counted."""
    device = Accelerator()
    device.synchronize()
    start_s = clock.now_s
    for _ in range(10):
        device.run(1000.0)
        clock.now_s += 3e-3
    assert clock.now_s - start_s == pytest.approx(31e-3, abs=1e-4)
    assert device.late_us > 0.0


def test_gaps_are_replayed_not_ends(clock: Clock) -> None:
    """One long interruption moves what follows by what does not fit under the next work alone."""
    device = Accelerator()
    device.synchronize()
    start_s, ends_s = clock.now_s, []
    for place in range(4):
        device.run(1000.0)
        ends_s.append(round((clock.now_s - start_s) * 1e3, 1))
        clock.now_s += 5e-3 if place == 1 else 0.0
    assert ends_s[:2] == [1.0, 2.0]
    assert ends_s[2] == pytest.approx(7.0, abs=0.1)
    assert ends_s[3] == pytest.approx(7.0, abs=0.1)  # it was queued meanwhile


def test_work_behind_a_message_begins_when_it_is_there_and_the_host_s_own_time_goes_on_under_it(clock: Clock) -> None:
    device = Accelerator()
    device.synchronize()
    start_s = clock.now_s
    device.run(1000.0)
    clock.now_s += 2e-3  # the message comes, for which the host waits
    device.arrived(2e-3)
    clock.now_s += 0.5e-3  # it copies
    device.run(1000.0)
    assert clock.now_s - start_s == pytest.approx(4e-3, abs=1e-4)
    device.arrived(0.0)  # one that was there already
    device.run(1000.0)
    assert clock.now_s - start_s == pytest.approx(5e-3, abs=1e-4)
    clock.now_s += 4e-3  # a host that takes longer than all of it
    device.run(1000.0)
    assert clock.now_s - start_s > 9e-3


@pytest.fixture
def compute() -> ComputeProfile:
    return find_profile("resnet50").compute


def test_a_step_takes_the_profile_s_time_and_gradients_come_in_its_order(clock: Clock, compute: ComputeProfile) -> None:
    small = replace(compute, gradients=tuple(replace(one, numel=1 + one.numel // 1000) for one in compute.gradients))
    job = make_job(small, rank=0)
    (optimizer,) = job.optimizer(job.model.named_parameters())
    names: list[str] = []
    for name, parameter in trainable_parameters(job.model).items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
    losses = []
    for _ in range(2):
        start_s = clock.now_s
        loss = job.loss(job.model, job.batch(0, 0))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        whole_us = small.forward_us + small.update_us + sum(one.backward_us for one in small.gradients)
        assert (clock.now_s - start_s) * 1e6 == pytest.approx(whole_us, rel=0.01)
    assert names == 2 * [gradient.name for gradient in small.gradients]
    assert losses[0] != losses[1]


def test_ranks_have_gradients_of_their_own_and_equal_weights(compute: ComputeProfile) -> None:
    small = replace(compute, gradients=tuple(replace(one, numel=8, backward_us=0.0) for one in compute.gradients))
    grads, weights = [], []
    for rank in range(2):
        model = make_job(replace(small, forward_us=0.0, update_us=0.0), rank).model
        model(torch.zeros((), dtype=torch.float64)).backward()
        grads.append(torch.cat([p.grad for p in model.parameters()]))
        weights.append(torch.cat([p.detach() for p in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(grads[0], grads[1])


def test_names_that_no_module_can_have_are_refused(compute: ComputeProfile) -> None:
    first = replace(compute.gradients[0], numel=1)
    with pytest.raises(InputError, match="which no module can have both"):
        AcceleratedModel(replace(compute, gradients=(replace(first, name="a"), replace(first, name="a.b"))), 0)


def test_an_update_takes_the_longer_of_its_wait_and_the_real_one(clock: Clock) -> None:
    device = Accelerator()
    for really_us, late_us in ((1000.0, 0.0), (5000.0, 2000.0)):
        before_us = device.late_us
        device.synchronize()
        start_s = clock.now_s
        clock.now_s += really_us * 1e-6
        device.run_since_met(3000.0)
        assert (clock.now_s - start_s) * 1e6 == pytest.approx(3000.0 + late_us, abs=100.0)
        assert device.late_us - before_us == pytest.approx(late_us)


def test_a_forward_that_is_waited_in_passes_through_its_modules(compute: ComputeProfile, clock: Clock) -> None:
    """In the reverse of readiness order, as long as in one piece; a module that waits moves what follows."""
    one, other = (make_job(compute, 0) for _ in range(2))
    batch = torch.zeros((), dtype=torch.float64)
    assert isinstance(other.model, AcceleratedModel)
    last = compute.gradients[0].name.rpartition(".")[0]
    seen: list[str] = []

    def wait(module: torch.nn.Module, *_: object) -> None:
        seen.append(names[module])
        clock.now_s += compute.forward_us * 2e-6 if names[module] == last else 0.0

    names = {module: name for name, module in other.model.named_modules()}
    for module in names:
        if module is not other.model:
            module.register_forward_pre_hook(wait)
    lengths_s, losses = [], []
    for job in (one, other):
        started_s = clock.now_s
        losses.append(job.model(batch))
        lengths_s.append(clock.now_s - started_s)
        losses[-1].backward()
    assert losses[0].item() == losses[1].item()
    order = list(dict.fromkeys(gradient.name.rpartition(".")[0] for gradient in reversed(compute.gradients)))
    assert list(dict.fromkeys(seen)) == order
    share = compute.forward_us / sum(gradient.backward_us for gradient in compute.gradients)
    of_last_us = share * sum(g.backward_us for g in compute.gradients if g.name.rpartition(".")[0] == last)
    assert lengths_s[0] == pytest.approx(compute.forward_us * 1e-6, abs=1e-3)
    # It is reached at once, for the host runs ahead of the device; forward goes on when it has waited.
    assert lengths_s[1] == pytest.approx((2.0 * compute.forward_us + of_last_us) * 1e-6, abs=1e-3)
    assert other.model.device.late_us == 0.0
    for job in (one, other):
        assert all(parameter.grad is not None for parameter in job.model.parameters())


def test_operators_of_matrices_take_their_time(clock: Clock, compute: ComputeProfile) -> None:
    """The rest of the update is divided over what two optimizers update."""
    gradients = tuple(replace(one, numel=12, backward_us=10.0) for one in compute.gradients[:4])
    names = tuple(gradient.name for gradient in gradients[:3])
    shape = OperatorShape(shape=(12,), operator_us=2000.0, result_bytes=24, parameters=names)
    operator = OperatorProfile(optimizer="Muon", shapes=(shape,), applied=True)
    small = replace(compute, gradients=gradients, forward_us=100.0, update_us=7000.0, operator=operator)
    job = make_job(small, rank=0)
    optimizers = job.optimizer(list(job.model.named_parameters()))
    assert [type(one).__name__ for one in optimizers] == ["WaitingMatrices", "SGD"]
    assert optimizers[0].update_dtype == torch.bfloat16
    start_s = clock.now_s
    job.loss(job.model, job.batch(0, 0)).backward()
    for one in optimizers:
        one.step()
    assert (clock.now_s - start_s) * 1e6 == pytest.approx(100.0 + 40.0 + 7000.0, rel=0.02)


def test_stacks_of_matrices_take_their_time(clock: Clock, compute: ComputeProfile) -> None:
    gradients = tuple(replace(one, numel=12, backward_us=10.0) for one in compute.gradients[:4])
    names = tuple(gradient.name for gradient in gradients[:3])
    shape = OperatorShape(shape=(12,), operator_us=2000.0, result_bytes=24, parameters=names, stacked_us=500.0)
    operator = OperatorProfile(optimizer="Muon", shapes=(shape,), applied=True)
    small = replace(compute, gradients=gradients, forward_us=100.0, update_us=6000.0, operator=operator)
    job = make_job(small, rank=0)
    optimizer = job.optimizer(list(job.model.named_parameters()))[0]
    own: dict[Tensor, str] = {parameter: name for name, parameter in job.model.named_parameters() if name in names}
    found = operator_of(optimizer)
    assert found is not None
    shared = SharedOperator(optimizer, found, own, World())
    shared.share(dict.fromkeys(own, 0), [(World(), list(own))], own)
    for _ in range(3):  # ranks compare results, then stacks
        job.loss(job.model, job.batch(0, 0)).backward()
        start_s = clock.now_s
        shared.before_step()
        optimizer.step()
        shared.after_step()
    assert (clock.now_s - start_s) * 1e6 == pytest.approx(2000.0 + 2 * 500.0, rel=0.05)


@pytest.mark.parametrize("waits", [False, True])
def test_a_batch_of_another_size_takes_longer_forward_and_backward(
    compute: ComputeProfile, clock: Clock, waits: bool
) -> None:
    small = replace(compute, gradients=tuple(replace(one, numel=8) for one in compute.gradients))
    model = make_job(small, 0).model
    assert isinstance(model, AcceleratedModel)
    if waits:
        next(iter(model.children())).register_forward_pre_hook(lambda *_: None)
    lengths_s = []
    for factor in (1.0, 3.0):
        model.batch_factor, started_s = factor, clock.now_s
        model(torch.zeros((), dtype=torch.float64)).backward()
        lengths_s.append(clock.now_s - started_s)
    assert lengths_s[1] == pytest.approx(3.0 * lengths_s[0], rel=0.01)


def test_a_model_takes_the_times_of_the_regions_that_it_is_compiled_in(clock: Clock) -> None:
    compute = find_profile("googlenet").compute
    first, *others = compute.gradients
    at_once = (replace(first, backward_us=compute.backward_us), *(replace(one, backward_us=0.0) for one in others))
    model, came_s = AcceleratedModel(compute, 0), list[float]()
    parameter = model.get_parameter(first.name)
    parameter.register_post_accumulate_grad_hook(lambda _: came_s.append(clock.now_s))
    batch = torch.zeros((), dtype=torch.float64)
    for gradients, longer_us in ((compute.gradients, 0.0), (at_once, 500.0)):
        model.retime(replace(compute, forward_us=compute.forward_us + longer_us, gradients=gradients))
        begun_s = clock.now_s
        loss = model(batch)
        assert clock.now_s - begun_s == pytest.approx(1e-6 * (compute.forward_us + longer_us), abs=1e-4)
        loss.backward()
    assert came_s[1] - came_s[0] == pytest.approx(
        1e-6 * (500.0 + compute.forward_us + 2.0 * compute.backward_us - first.backward_us), abs=1e-3
    )
