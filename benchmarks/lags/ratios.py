"""k by Eq. 19 of LAGS-SGD for tasks that are trained here.

Backward of a layer takes the time of its FLOPs; the link has no start-up time, and is so slow that the all-reduce of
all gradients takes `SLOWER` times as long as backward, about as for VGG-16 on the paper's network. With its start-up
times no message of models as small as these would hide.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from torch import nn

from benchmarks.lags.bound import on_link
from benchmarks.learning import Task
from planner.documents.profile import ComputeProfile, Gradient, Profile, ProfileWorld
from planner.frontend.trace import trace
from planner.model.codecs import TopK
from planner.model.problem import Problem
from planner.search.lags import layer_wise
from runtime.checks.plan import trainable_parameters
from runtime.plan import ModelReference

RANKS, SLOWER = 16, 20.0
MAX_RATIO = 1000.0
"""c_u of the paper."""


def problem_of(task: Task, model: nn.Module) -> Problem:
    """The task's step, by FLOPs; its unit of time is that of one."""
    layers = trace(model, lambda: task.loss(model, task.batch(0, 0))).layers
    parameters, flops = trainable_parameters(model), dict[str, float]()
    for layer in layers:
        matrices = {name: parameters[name].numel() for name in layer.parameters if parameters[name].dim() >= 2}
        for name, numel in matrices.items():
            flops[name] = (layer.grad_input_flops + layer.grad_weight_flops) * numel / sum(matrices.values())
    gradients: list[Gradient] = []
    home = ""
    for name, p in parameters.items():  # norms and biases belong to the matrix before them
        home = name if p.dim() >= 2 else home or name
        time_us = flops.get(name, 0.0)
        gradients.insert(0, Gradient(name=name, layer=home, numel=p.numel(), dtype="float32", backward_us=time_us))
    compute = ComputeProfile(forward_us=sum(layer.flops for layer in layers), update_us=0.0, gradients=tuple(gradients))
    profile = Profile(model=ModelReference(name=task.name), world=ProfileWorld(ranks=RANKS), compute=compute)
    dense_us = float(on_link(profile, RANKS, 0.0, 1.0).range_cost_us(0, len(gradients)))
    return on_link(profile, RANKS, 0.0, SLOWER * sum(flops.values()) / dense_us)


def eq19(task: Task, model: nn.Module, selected: Collection[str]) -> dict[str, int]:
    """Return k of the gradients that are not sent whole, of those from which elements may be selected."""
    problem = problem_of(task, model)
    gradients = problem.profile.compute.gradients
    limits = np.array([MAX_RATIO if gradient.name in selected else 1.0 for gradient in gradients])
    ks: dict[str, int] = {}
    for bucket in layer_wise(problem, limits, by_layer=True).buckets:
        if not isinstance(bucket.codec, TopK):
            continue
        members = [gradients[index] for index in bucket.gradients]
        numel = sum(member.numel for member in members)
        ks |= {member.name: max(1, round(bucket.codec.k * member.numel / numel)) for member in members}
    return ks
