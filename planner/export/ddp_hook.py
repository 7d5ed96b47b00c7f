"""`--to ddp-hook`: a Python module that wraps a model in stock DDP with the plan's buckets, whose compressed ones go
through torch's own bfloat16 hook.

Torch has hooks of 16 bits alone, without error feedback, so everything narrower, sparse or of low rank becomes
bfloat16. Torch calls a hook with the bucket's index, which after DDP has rebuilt its buckets is its place in the plan;
in the first step, whose buckets are others, those of the last place are many.
"""

from __future__ import annotations

from dataclasses import replace

from planner.emit.lower import predict
from planner.export.base import NO_PRICE, Export, cost, members_of, sent_whole, stock_plan
from planner.export.ddp import to_ddp
from planner.ir import Bucket, Schedule
from planner.model.codecs import Wire
from planner.model.problem import Problem
from planner.strategies.baselines import ddp_buckets
from runtime.plan import Plan
from runtime.plan.transports import NATIVE

MODULE = '''"""The plan of {model} for stock DDP; written by `planner export --to ddp-hook`.

    model = wrap(model)      # in place of DistributedDataParallel(model)
"""

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

BUCKET_CAP_MB_LIST = {caps}
NARROW = {narrow}
"""Of each bucket, whether it is sent in bfloat16."""


def hook(group, bucket):
    narrow = NARROW[min(bucket.index(), len(NARROW) - 1)]
    return (bf16_compress_hook if narrow else allreduce_hook)(group, bucket)


def wrap(module, **options):
    if options.get("find_unused_parameters"):
        raise ValueError("with find_unused_parameters DDP does not rebuild its buckets, and NARROW would be of others")
    model = DistributedDataParallel(module, bucket_cap_mb_list=BUCKET_CAP_MB_LIST, **options)
    model.register_comm_hook(None, hook)
    return model
'''
HOW = "save it as a module, and wrap the model with its `wrap` in place of DistributedDataParallel"
NOTHING_NARROW = "no bucket is compressed: --to ddp gives the same without a hook"


def to_ddp_hook(plan: Plan, problem: Problem | None) -> Export:
    """Return the module; a relaxed plan is replaced by its exact fallback."""
    notes: list[str] = []
    if plan.accuracy == "relaxed":
        plan, notes = stock_plan(plan)
    narrow = [not bucket.dense for bucket in plan.buckets]
    whole = replace(
        plan, accuracy="exact", fallback=None,
        buckets=tuple(
            sent_whole(bucket) if compressed else bucket
            for bucket, compressed in zip(plan.buckets, narrow, strict=True)
        ),
    )  # fmt: skip
    buckets = to_ddp(replace(whole, predicted=None), problem)
    # What one bucket size alone would cost is of no use where the list is written into the module.
    notes += [
        note for note in buckets.notes[:-1] if "bucket_cap_mb alone" not in note and "bucket_cap_mb is" not in note
    ]
    other = sorted({_what(plan, index) for index, compressed in enumerate(narrow) if compressed} - {"bfloat16"})
    if other:
        notes.append(
            f"{', '.join(other)}: torch's hooks know none of it, bfloat16 is sent; {_price(plan, narrow, problem)}"
        )
    if any(narrow):
        notes.append("without error feedback: what rounding loses is lost")
    else:
        notes.append(NOTHING_NARROW)
    caps = buckets.document["bucket_cap_mb_list"]
    narrow = _by_ddps_bucket(plan, narrow, caps, problem)
    text = MODULE.format(model=plan.model.name.replace('"', "'"), caps=caps, narrow=narrow)
    document = {"bucket_cap_mb_list": caps, "narrow": narrow, "notes": [*notes, HOW]}
    return Export(text=text, document=document, notes=(*notes, HOW))


def _by_ddps_bucket(plan: Plan, narrow: list[bool], caps_mib: list[float], problem: Problem | None) -> list[bool]:
    """Return for each bucket that DDP makes whether it is sent in bfloat16: if all its gradients are in the plan.
    Without a problem these are the plan's own but for those without bytes, which DDP does not make.
    """
    if problem is None:
        return [one for one, bucket in zip(narrow, plan.buckets, strict=True) if bucket.size_bytes]
    of = {name: one for one, bucket in zip(narrow, plan.buckets, strict=True) for name in bucket.gradients}
    names = [gradient.name for gradient in problem.profile.compute.gradients]
    made = ddp_buckets(problem.size_bytes.tolist(), problem.dtype_ids.tolist(), caps_mib) if caps_mib else []
    return [all(of[names[index]] for index in bucket) for bucket in made]


def _what(plan: Plan, index: int) -> str:
    """Return the name of the encoding of a compressed bucket."""
    compressor = plan.buckets[index].compressor
    return compressor.dtype or compressor.name


def _price(plan: Plan, narrow: list[bool], problem: Problem | None) -> str:
    if problem is None or plan.predicted is None:
        return NO_PRICE
    made = tuple(
        Bucket(tuple(of), NATIVE, Wire("bfloat16")) if compressed else Bucket(tuple(of))
        for of, compressed in zip(members_of(plan, problem), narrow, strict=True)
    )
    return cost(predict(problem, Schedule(buckets=made)).iteration_us - plan.predicted.iteration_us)
