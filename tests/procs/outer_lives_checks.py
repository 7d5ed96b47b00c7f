"""Random lives of runs with outer steps: whatever happens between two steps, no gradient is lost."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from delay_workers_checks import nodes_of
from outer_checks import HALVES, INT8, mean_over_ranks, near, plan_of, sgd, single, single_loss, started
from torch import Tensor, nn

from runtime.plan import CompressorSpec, OuterOptimizer, OuterSpec, Plan

LR, STEPS = 0.05, 30
COMPRESSORS = (None, INT8, CompressorSpec(name="topk", density=0.3))


def plans(chance: random.Random, world: Mapping[str, Any]) -> Plan:
    """Return a synchronous plan or one with outer steps that average weights, whole or compressed, between workers: on
    nodes of several ranks (`world`) these may share the step.
    """
    compressor = chance.choice(COMPRESSORS)
    if chance.random() < 0.3:
        return replace(plan_of(None, compressor), accuracy="exact" if compressor is None else "bounded")
    spec = OuterSpec(
        every=chance.choice((2, 3, 5)), fragments=HALVES, optimizer=OuterOptimizer(lr=1.0, momentum=0.0),
        sharded_step=True if world and chance.random() < 0.7 else None,
    )  # fmt: skip
    return plan_of(spec, compressor, **world)


def gradients(twin: nn.Module, model: nn.Module, batches: list[int]) -> dict[str, Tensor]:
    """Return this rank's own gradients at the model's weights, which no session sees."""
    twin.load_state_dict(model.state_dict())
    twin.zero_grad()
    for batch in batches:
        single_loss(twin, dist.get_rank(), batch).backward()
    return {name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None}


def live(seed: int, world: Mapping[str, Any]) -> dict[str, Any]:
    """Train by plain SGD, of which the mean of weights is linear in their gradients: steps that accumulate,
    that overflow on one worker, whose GradScaler skips them, switches of plans, and checkpoints.
    """
    chance = random.Random(seed)  # the same on all ranks
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
    scaler.scale(torch.ones(()))  # from now on it may be updated
    model, optimizer, session = started(plans(chance, world), sgd, single(), loss_scale=scaler.get_scale)
    twin = single()
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    moved = {name: torch.zeros_like(p) for name, p in expected.items()}
    kinds = ("step", "step", "accumulate", "overflow", "switch", "resume", "switch in a step")
    events = [*chance.choices(kinds, k=STEPS), "end", "step"]  # at the end all residuals are sent
    for step, event in enumerate(events):
        plan = plans(chance, world)
        if event == "switch":
            session.switch(plan)
        elif event == "switch in a step":
            session.switch(plan, at_step=session.step + 1)
        elif event == "resume":
            saved = copy.deepcopy((model.state_dict(), session.state_dict()))
            plan = session.plan
            session.detach()
            model, optimizer, session = started(plan, sgd, single(), loss_scale=scaler.get_scale)
            model.load_state_dict(saved[0])
            session.load_state_dict(saved[1])
        elif event == "end":
            session.switch(plan_of(None))
        if not session._mode.own_weights:  # workers have come to scales of their own, of which they are warned
            scaler.update(64.0)
        optimizer.zero_grad()
        batches = [step, 100 + step] if event == "accumulate" else [step]
        if event == "accumulate":
            with session.no_sync():
                scaler.scale(single_loss(model, dist.get_rank(), batches[0])).backward()
        loss = single_loss(model, dist.get_rank(), batches[-1])
        own = gradients(twin, model, batches)  # at the weights of this forward
        overflows = event == "overflow" and dist.get_rank() == step % dist.get_world_size()
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters() if p.grad is not None]
        counts = bool(torch.isfinite(torch.stack(norms)).all())
        scaler.step(optimizer)
        scaler.update()
        for name, total in moved.items():
            total -= LR * own[name] * float(counts)
    for name, total in expected.items():
        total += mean_over_ranks(moved[name])
    found = {f"life {seed}: {events}": near([p.double() for p in model.parameters()], expected.values(), 1e-5)}
    session.detach()
    return found


def run(seeds: list[int], ranks_per_node: int = 1) -> dict[str, Any]:
    """Return results of some lives on this rank."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(), nodes_of(ranks_per_node) as world:
        warnings.simplefilter("ignore")
        for seed in seeds:
            found |= live(seed, world if ranks_per_node > 1 else {})
    return found
