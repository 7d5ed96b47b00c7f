"""Local updaters are measured, and planned from what was measured, in this process and real updaters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner import optimize
from planner.documents.profile import ComputeProfile, Gradient, OptimizerProfile, Profile, ProfileWorld, parse_cluster
from planner.jobs.on_rank import measure_updaters
from planner.jobs.training import build
from planner.profile import updaters
from planner.profile.bench import Progress
from runtime.checks.plan import trainable_parameters
from runtime.plan import ModelReference


def test_updaters_of_the_digits_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updaters, "RUN_S", 0.1)
    monkeypatch.setattr(updaters, "LEAST_MINIBATCHES", 8)
    monkeypatch.setattr(updaters, "REPEATS", 2)
    monkeypatch.setattr(updaters, "PROBES", 6)
    built = build("examples.digits:job", "cpu")
    before = {name: parameter.clone() for name, parameter in built.model.named_parameters()}
    gradients = tuple(
        Gradient(name=name, layer=name.rpartition(".")[0], numel=tensor.numel(), dtype="float32", backward_us=300.0)
        for name, tensor in reversed(trainable_parameters(built.model).items())
    )
    compute = ComputeProfile(
        forward_us=9000.0, update_us=1000.0, gradients=gradients, optimizer=OptimizerProfile(name="SGD", adaptive=False)
    )
    bare = Profile(model=ModelReference(name="resnet20"), world=ProfileWorld(ranks=1), compute=compute)
    profile = measure_updaters(built, built.batch(0), bare, 2, Progress())
    found = profile.local_async
    assert found is not None
    assert profile.world.batch_per_rank == 16
    assert [point.updaters for point in found.curve] == [1, 2]
    assert all(point.averaging_us is None for point in found.curve)
    assert sum(layer.gradients for layer in found.layers) == len(gradients)
    found.check([gradient.layer for gradient in gradients], "profile", "")
    assert found.forward_us > 0.0
    assert sum(layer.grad_weight_us for layer in found.layers) > 0.0
    assert all(torch.equal(parameter, before[name]) for name, parameter in built.model.named_parameters())
    # With twice the throughput, of which this machine may give less, a plan has two blocks in readiness order.
    faster = replace(found.curve[1], minibatch_us=found.curve[0].minibatch_us / 2)
    section = replace(found, curve=(found.curve[0], faster))
    cluster = parse_cluster(
        {"schema": "planner.cluster/1", "nodes": 2,
         "collectives": {"all_reduce": {"alpha_us": 1e6, "beta_us_per_byte": 0.0}}}
    )  # fmt: skip
    plan = optimize(replace(profile, local_async=section), cluster, accuracy="relaxed", passes="merge,local_async")
    assert plan.local_async is not None
    assert plan.local_async.updaters == 2
    assert [name for block in plan.local_async.blocks or () for name in block] == list(plan.gradients)
