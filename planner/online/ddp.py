"""Plans that need no profile: DistributedDataParallel's own buckets, with which a run begins, and those of regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from torch import nn

from planner.documents.text import pluralize
from planner.model.compression import NARROWED
from planner.strategies.baselines import ddp_buckets
from runtime.checks.plan import dtype_name
from runtime.core.compiled import blocks_of, starts_of
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld
from runtime.plan.document import CompressorSpec
from runtime.plan.transports import TWO_SHOT, Transport

AS_DDP = "as DistributedDataParallel cuts"
WHOLE = "one compiled graph"


def ddp_plan(
    parameters: Mapping[str, nn.Parameter], order: Sequence[str], model: ModelReference, world: PlanWorld,
    cap_mib: float | None = None,
) -> Plan:  # fmt: skip
    """Return the plan; `order` has the names of all parameters in the order in which gradients become ready, `cap_mib`
    is DDP's `bucket_cap_mb`, by default its own.
    """
    sizes_bytes = [parameters[name].numel() * parameters[name].element_size() for name in order]
    kinds = {dtype: at for at, dtype in enumerate(dict.fromkeys(dtype_name(parameters[n].dtype) for n in order))}
    members = ddp_buckets(sizes_bytes, [kinds[dtype_name(parameters[name].dtype)] for name in order], cap_mib)
    cut = AS_DDP + ("" if cap_mib is None else f" at {cap_mib:g} MiB")
    return Plan(
        model=model,
        world=world,
        accuracy="exact",
        buckets=tuple(
            PlanBucket(
                gradients=tuple(order[at] for at in bucket),
                size_bytes=sum(sizes_bytes[at] for at in bucket),
                reason=cut,
            )
            for bucket in members
        ),
        sources={"buckets": f"{cut}, made in the run, from the order in which gradients became ready"},
    )


def in_dtype(
    plan: Plan, parameters: Mapping[str, nn.Parameter], dtype: str, transport: Transport = TWO_SHOT
) -> Plan:  # fmt: skip
    """Return a plan with the same buckets in a narrow dtype, as far as they can be; `plan` is its fallback."""
    spec = CompressorSpec(name="wire", dtype=dtype)
    buckets = tuple(
        replace(bucket, collective=transport.collective, algorithm=transport.algorithm, compressor=spec)
        if dtype_name(parameters[bucket.gradients[0]].dtype) in NARROWED
        else bucket
        for bucket in plan.buckets
    )
    return replace(plan, accuracy="bounded", buckets=buckets, predicted=None, fallback=plan)


def region_plans(model: nn.Module, parameters: Mapping[str, nn.Parameter], present: Plan) -> dict[int, Plan]:
    """Return plans with other cuts of a compiled graph, by the number of cuts: none, every fourth block, every second
    one, every one, of those at which gradients come in parts. Each region has a bucket.
    """
    starts = starts_of(model, blocks_of(model))
    places = {id(one): place for place, one in enumerate(model.parameters())}
    trained = [places[id(one)] for one in parameters.values()]
    ordered = sorted(starts, key=lambda block: starts[block])
    ends = [*(starts[block] for block in ordered[1:]), len(places)]
    blocks = [
        block
        for block, end in zip(ordered, ends, strict=False)  # none where there is no block
        if min(trained) < starts[block] and any(starts[block] <= place < end for place in trained)
    ]
    found: dict[int, Plan] = {}
    for every in (None, 4, 2, 1):
        cuts = () if every is None else tuple(blocks[::-1][::every][::-1])

        def region(name: str, cuts: tuple[str, ...] = cuts) -> int:
            return -sum(starts[cut] <= places[id(parameters[name])] for cut in cuts)

        reason = f"{pluralize(len(cuts), 'cut')} of the compiled graph" if cuts else WHOLE
        buckets = tuple(
            PlanBucket(
                gradients=gradients,
                size_bytes=sum(parameters[name].numel() * parameters[name].element_size() for name in gradients),
                reason=reason,
            )
            for _, members in groupby(sorted(present.gradients, key=region), key=region)
            for gradients in [tuple(members)]
        )
        sources = {"buckets": f"{reason}, made in the run"}
        plan = Plan(
            model=present.model, world=present.world, accuracy="exact", buckets=buckets, sources=sources, cuts=cuts
        )
        found.setdefault(len(cuts), plan)
    return found
