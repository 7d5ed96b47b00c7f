"""Every kind of plan, for one model: what sessions are tried with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from runtime.checks.plan import trainable_parameters
from runtime.plan import CompressorSpec, DelaySpec, ModelReference, Plan, PlanBucket, PlanWorld, StepPlan, UpdatePlan

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""DDP's default limits."""


@dataclass(frozen=True)
class Form:
    """How all buckets of a plan are sent, and how ranks train."""

    bucket: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `PlanBucket`."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Plan`."""
    like_ddp: bool = False
    """Whether two ranks end with DDP's weights, bit for bit."""


def _wire(dtype: str, algorithm: str = "library") -> Form:
    spec = CompressorSpec(name="wire", dtype=dtype)
    return Form({"compressor": spec, "algorithm": algorithm}, {"accuracy": "bounded"})


FORMS: Mapping[str, Form] = {
    "exact": Form(like_ddp=True),
    "sharded step": Form(
        plan={"updates": UpdatePlan(step=StepPlan(sharded=True)), "interface": ("sharded-step",)}, like_ddp=True
    ),
    **{f"wire {dtype}": _wire(dtype) for dtype in ("bfloat16", "float16", "int8", "float8_e4m3fn")},
    "wire bfloat16, native": _wire("bfloat16", "native"),
    **{
        f"topk 1 %, {selector}": Form(
            {"compressor": CompressorSpec(name="topk", density=0.01, selector=selector), "collective": "sparse",
             "algorithm": "flat"},
            {"accuracy": "bounded"},
        )
        for selector in ("exact", "mstopk")
    },
    "powersgd, rank 2": Form({"compressor": CompressorSpec(name="powersgd", rank=2)}, {"accuracy": "bounded"}),
    "delay of 2": Form(plan={"accuracy": "relaxed", "delay": DelaySpec(steps=2, warmup_steps=2)}),
}  # fmt: skip


def ddp_buckets(model: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """DDP's buckets of names in readiness order: one closes with the gradient that reaches its limit."""
    parameters = trainable_parameters(model)
    buckets: list[list[str]] = [[]]
    size_bytes, limit_bytes = 0, FIRST_BUCKET_BYTES
    for name in names:
        buckets[-1].append(name)
        size_bytes += parameters[name].nbytes
        if size_bytes >= limit_bytes:
            buckets.append([])
            size_bytes, limit_bytes = 0, BUCKET_BYTES
    return [bucket for bucket in buckets if bucket]


def plan_of(model: nn.Module, form: Form, ranks: int, buckets: Sequence[Sequence[str]] | None = None) -> Plan:
    """The plan of a form; by default with DDP's buckets of the reverse order of registration."""
    made = buckets or ddp_buckets(model, list(reversed(trainable_parameters(model))))
    fields: dict[str, Any] = {"accuracy": "exact", **form.plan}
    return Plan(
        model=ModelReference(name=type(model).__name__),
        world=PlanWorld(ranks=ranks),
        buckets=tuple(PlanBucket(gradients=tuple(names), **form.bucket) for names in made),
        **fields,
    )


def readiness(model: nn.Module, backward: Any) -> list[str]:
    """Names in the order in which gradients become ready in `backward`, a call without arguments."""
    order: list[str] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, parameter in trainable_parameters(model).items()
    ]
    backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return order
