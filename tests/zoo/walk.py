"""What ranks do with the models of the zoo: profile, decide, attach, train; all in one process group."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from planner import optimize
from planner.documents.profile import Profile
from planner.frontend.layers import TracedModel
from planner.jobs.on_rank import profile_rank
from planner.jobs.training import Trainer, build
from planner.profile import compute, contention, grad_weight, links, measuring

from .registry import ZOO


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What was found out about one model."""

    name: str
    family: str
    error: str | None = None
    """Why there is no plan, or why it does not train."""
    method: str = ""
    failures: dict[str, str] = field(default_factory=dict)
    layers: int = 0
    parameters: int = 0
    gradients: int = 0
    attributed: int = 0
    """Gradients whose parameter belongs to a layer that ran in the traced forward."""
    buckets: int = 0
    trace_s: float = 0.0
    loss: float = math.nan
    weights_sha256: str = ""
    """After one step with the plan; equal on all ranks."""

    @property
    def graph(self) -> bool:
        """Whether torch.export or torch.fx made a graph."""
        return self.method in ("export", "symbolic_trace")

    @property
    def one_path(self) -> bool:
        """Whether that graph holds only the path that one batch took."""
        return self.graph and "export of all paths" in self.failures


LEAST_GRAPHS = 0.9
"""Share of all models that have to come through a graph and not through hooks."""

FEWEST = (
    (compute, {"WARM_UP_STEPS": 1, "MIN_REPEATS": 2, "MAX_REPEATS": 2, "MOST_TIMES": 1}),
    (links, {"MIN_PASSES": 1, "MAX_PASSES": 1}),
    (contention, {"MAX_ROUNDS": 1}),
    (grad_weight, {"REPEATS": 1}),
)
"""How often things are measured where it matters only that they can be."""


def walk(names: Sequence[str], hurry: bool) -> list[Visit]:
    """On every rank: takes these models through everything; in a hurry, measures as seldom as can be."""
    torch.set_num_threads(1)
    with fewest_repeats() if hurry else nullcontext():
        return [visit(name) for name in names]


@contextmanager
def fewest_repeats() -> Iterator[None]:
    """Puts `FEWEST` in force."""
    usual = [(module, {name: getattr(module, name) for name in values}) for module, values in FEWEST]
    for module, values in FEWEST:
        vars(module).update(values)
    try:
        yield
    finally:
        for module, values in usual:
            vars(module).update(values)


@contextmanager
def traces_timed() -> Iterator[list[float]]:
    """Seconds that each tracing takes inside."""
    usual, times = measuring.trace, []

    def timed(*arguments: Any) -> TracedModel:
        started = time.perf_counter()
        result = usual(*arguments)
        times.append(time.perf_counter() - started)
        return result

    vars(measuring)["trace"] = timed
    try:
        yield times
    finally:
        vars(measuring)["trace"] = usual


def visit(name: str) -> Visit:
    """One model: a measured profile, the plan, one attached step."""
    member = ZOO[name]
    try:
        with traces_timed() as trace_s:
            profile = profile_rank(member.spec, "cpu", False)
        plan = optimize(profile)
        built = build(member.spec, "cpu")
        trainer = Trainer(built, plan)
        trainer.step(built.batch(0))
        run = trainer.close()
    except Exception as error:
        return Visit(name=name, family=member.family, error=f"{type(error).__name__}: {error}")
    assert profile.tracing is not None
    return Visit(
        name=name,
        family=member.family,
        method=profile.tracing.method,
        failures=dict(profile.tracing.failures or {}),
        layers=len(profile.layers or ()),
        parameters=sum(parameter.numel() for parameter in built.model.parameters()),
        gradients=len(profile.compute.gradients),
        attributed=attributed(profile),
        buckets=len(plan.buckets),
        trace_s=trace_s[0],
        loss=run.losses[0],
        weights_sha256=run.weights_sha256,
    )


def attributed(profile: Profile) -> int:
    """How many of the measured gradients belong to a layer that ran."""
    layers = [layer for layer in profile.layers or () if layer.flops or layer.activation_bytes]
    ran = {name for layer in layers for name in layer.parameters or ()}
    return sum(gradient.name in ran for gradient in profile.compute.gradients)
