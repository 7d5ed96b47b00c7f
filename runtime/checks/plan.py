"""Whether a plan fits this model and this runtime: every misfit in words, before any training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from runtime.checks.delay import delay_misfit
from runtime.checks.local_async import find_updater_misfit
from runtime.comm.collectives import COLLECTIVES, HITOPK, PHASED, form_of
from runtime.errors import InputError
from runtime.plan import CURE, Plan, PlanBucket, interface_misfit
from runtime.plan.names import canonical_name, fingerprint
from runtime.sparse.compressors import COMPRESSORS, make_compressor
from runtime.sparse.lossy import layer_runs
from runtime.torch_compat import is_sharded, is_wrapped

SELECTING = ("topk", "randomk")
"""Compressors that send some elements as they are, and travel by sparse collectives."""

SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64)
"""Dtypes that backends and torch add up."""

SHOWN = 5
"""How many differing parameters a message lists."""


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name → parameter, for those that require a gradient; a shared one once.

    Raises:
        InputError: two parameters have the same canonical name.
    """
    found: dict[str, nn.Parameter] = {}
    full: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        short = canonical_name(name)
        if parameter.requires_grad and short in found:
            raise InputError(
                f"the parameters {full[short]!r} and {name!r} are both called {short!r} once the prefixes of wrappers "
                f"(module., _orig_mod.) are taken off; expected different names: rename one of them"
            )
        if parameter.requires_grad:
            found[short], full[short] = parameter, name
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` → `float32`."""
    return str(dtype).removeprefix("torch.")


def model_fingerprint(model: nn.Module) -> str:
    """See `runtime.plan.names.fingerprint`."""
    return parameters_fingerprint(trainable_parameters(model))


def parameters_fingerprint(parameters: Mapping[str, nn.Parameter]) -> str:
    """`model_fingerprint`, of parameters by canonical name."""
    return fingerprint((name, tuple(p.shape), dtype_name(p.dtype)) for name, p in parameters.items())


def find_attached(model: nn.Module, attached: Iterable[nn.Module]) -> str | None:
    """What speaks against attaching this model beside those that are attached already, or None."""
    mine = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for other in attached:
        if other is model:
            return "the model is attached already; call session.detach() first"
        theirs = {id(parameter) for parameter in other.parameters()}
        shared = next((name for name, parameter in mine if id(parameter) in theirs), None)
        if shared is not None:
            return (
                f"{shared} belongs to another attached model too ({type(other).__name__}), and its gradient would be "
                f"averaged twice; expected each parameter in one attached model: detach that one first, or attach one "
                f"module that holds both"
            )
    return None


def find_misfit(model: nn.Module, plan: Plan, ranks: int) -> str | None:
    """The first reason why this plan cannot drive this model on this many ranks, or None."""
    return _wrapper_misfit(model) or _module_misfit(model) or find_plan_misfit(trainable_parameters(model), plan, ranks)


def find_plan_misfit(parameters: Mapping[str, nn.Parameter], plan: Plan, ranks: int) -> str | None:
    """The first reason why this plan cannot drive these trainable parameters on this many ranks, or None."""
    return (
        _world_misfit(plan, ranks)
        or _parameter_misfit(parameters, plan)
        or _fingerprint_misfit(parameters, plan)
        or _dtype_misfit(parameters)
        or _support_misfit(parameters, plan)
        or _fallback_misfit(parameters, plan, ranks)
    )


def _fallback_misfit(parameters: Mapping[str, nn.Parameter], plan: Plan, ranks: int) -> str | None:
    if plan.fallback is None:
        return None
    if plan.fallback.accuracy != "exact":
        return f"the plan's fallback has the accuracy {plan.fallback.accuracy}; expected exact: {CURE}"
    problem = find_plan_misfit(parameters, plan.fallback, ranks)
    return None if problem is None else f"the plan's fallback: {problem}"


def find_late_step(at_step: object, step: int) -> str | None:
    """Why a plan cannot begin with step `at_step` when `step` steps are done, or None."""
    if not isinstance(at_step, int) or isinstance(at_step, bool):
        return f"at_step: found {at_step!r}, expected the number of a step, {step} or later"
    if at_step < step:
        return (
            f"at_step: found {at_step}, but {step} steps are done; expected {step} or later: leave it out to change "
            f"over at the next step"
        )
    return None


def _wrapper_misfit(model: nn.Module) -> str | None:
    wrapper = is_wrapped(model)
    if wrapper is None:
        return None
    return (
        f"the model is wrapped in {wrapper}, which exchanges gradients itself; expected a plain module: pass the "
        f"inner one (model.module) and drop the wrapper"
    )


def _world_misfit(plan: Plan, ranks: int) -> str | None:
    if plan.world.misfit is not None:
        return f"the plan's world: {plan.world.misfit}"
    if plan.world.ranks == ranks:
        return None
    cure = f"make one with a cluster of {ranks} ranks (`planner optimize --cluster`)"
    launch = "; to start several ranks use torchrun and torch.distributed.init_process_group" if ranks == 1 else ""
    return f"the plan was made for {plan.world.ranks} ranks, found {ranks}; {cure}{launch}"


def _parameter_misfit(parameters: Mapping[str, nn.Parameter], plan: Plan) -> str | None:
    if not parameters:
        return "the model has no trainable parameter; expected at least one with requires_grad"
    planned = set(plan.gradients)
    missing = [name for name in parameters if name not in planned]
    if plan.model.fingerprint is not None and plan.model.fingerprint == parameters_fingerprint(parameters):
        missing = []  # the very model, with parameters that got no gradient when it was profiled
    unknown = [name for name in plan.gradients if name not in parameters]
    if not missing and not unknown:
        return None
    parts = []
    if missing:
        parts.append(f"trainable in the model but not in the plan: {_listed(missing)}")
    if unknown:
        parts.append(f"in the plan but not trainable in the model: {_listed(unknown)}")
    return f"the plan (for {plan.model.name}) is for another model: {'; '.join(parts)}; profile this model again"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _fingerprint_misfit(parameters: Mapping[str, nn.Parameter], plan: Plan) -> str | None:
    if plan.model.fingerprint is None or plan.model.fingerprint == parameters_fingerprint(parameters):
        return None
    sizes = _size_misfits(parameters, plan)
    return (
        f"the plan (for {plan.model.name}) is for another model: the names of the parameters agree, their shapes or "
        f"dtypes do not{sizes}; profile this model again"
    )


def _dtype_misfit(parameters: Mapping[str, nn.Parameter]) -> str | None:
    odd = next((name for name, parameter in parameters.items() if parameter.dtype not in SUMMED), None)
    if odd is None:
        return None
    return (
        f"{odd} is {dtype_name(parameters[odd].dtype)}, of which ranks cannot make an average; expected one of "
        f"{', '.join(map(dtype_name, SUMMED))}: convert it before attach, or freeze it (requires_grad_(False))"
    )


def _size_misfits(parameters: Mapping[str, nn.Parameter], plan: Plan) -> str:
    """The first buckets whose bytes are not those planned, with the shapes that were found."""
    misfits = []
    for index, bucket in enumerate(plan.buckets):
        size_bytes = sum(parameters[name].numel() * parameters[name].element_size() for name in bucket.gradients)
        if bucket.size_bytes is not None and bucket.size_bytes != size_bytes:
            shapes = [f"{name} {tuple(parameters[name].shape)}" for name in bucket.gradients]
            found = f"{size_bytes} bytes found, {_listed(shapes)}"
            misfits.append(f"bucket {index}: {bucket.size_bytes} bytes planned, {found}")
    if not misfits:
        return ""
    more = f"; and {len(misfits) - SHOWN} more buckets" if len(misfits) > SHOWN else ""
    return f" (first in {'; '.join(misfits[:SHOWN])}{more})"


def _module_misfit(model: nn.Module) -> str | None:
    for name, parameter in chain(model.named_parameters(), model.named_buffers()):
        reason = _tensor_misfit(parameter)
        if reason is not None:
            return f"{name} {reason}"
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1:
        return f"the parameters are on several devices ({', '.join(sorted(devices))}); expected one device per rank"
    if "meta" in devices:
        return "the parameters are on the device meta and have no data; expected real ones: model.to_empty(device=...)"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{name or 'the model'} is an embedding with sparse=True gradients; expected sparse=False"
    return None


def _tensor_misfit(tensor: Tensor) -> str | None:
    """Why a parameter or buffer cannot be handled, as what follows its name."""
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        return "has no shape yet (a lazy module); expected one: run one forward before attach"
    if is_sharded(tensor):
        return (
            "is a DTensor (tensor parallelism or FSDP2), of which each rank holds a part; expected whole parameters, "
            "the same on every rank: train it with the wrapper that made it"
        )
    if tensor.layout != torch.strided:
        return f"is sparse ({tensor.layout}); expected dense parameters: call to_dense() on it"
    if tensor.requires_grad and tensor.is_leaf and (found := tensor.grad_dtype) != tensor.dtype:
        return (
            f"has the grad_dtype {found}; expected that of the parameter, {tensor.dtype}, which buckets have: leave "
            f"grad_dtype as it is"
        )
    return None


def _support_misfit(parameters: Mapping[str, nn.Parameter], plan: Plan) -> str | None:
    if plan.delay is not None and (problem := delay_misfit(plan, plan.delay)):
        return problem
    if plan.local_async is not None and (problem := find_updater_misfit(parameters, plan, plan.local_async)):
        return problem
    if (problem := _norms_misfit(parameters, plan) or _step_misfit(plan)) is not None:
        return problem
    for index, bucket in enumerate(plan.buckets):
        problem = _form_misfit(bucket) or _lossy_misfit(parameters, plan, bucket)
        if problem is not None:
            return f"bucket {index} {problem}"
    return None


def _norms_misfit(parameters: Mapping[str, nn.Parameter], plan: Plan) -> str | None:
    """Why ranks cannot share norms as a plan says, or None."""
    shares = plan.updates.norms.shares if plan.updates and plan.updates.norms else None
    if shares is None:
        return None
    where = "the plan's updates.norms.shares"
    if plan.local_async is not None:
        return f"{where}: found shares in a plan with local updaters, which do not wait for other ranks; {CURE}"
    if plan.delay is not None:
        return f"{where}: found shares in a plan with a delay, which needs torch.optim.SGD; expected none: {CURE}"
    if len(shares) != plan.world.ranks:
        return f"{where}: found {len(shares)} for {plan.world.ranks} ranks; expected one for each: {CURE}"
    listed = [name for share in shares for name in share]
    unknown = next((name for name in listed if name not in parameters), None)
    if unknown is not None:
        return f"{where}: found {unknown!r}, which is no trainable parameter of the model; expected its own: {CURE}"
    twice = next((name for name, times in Counter(listed).items() if times > 1), None)
    return None if twice is None else f"{where}: found {twice!r} twice; expected each parameter in one share: {CURE}"


def _step_misfit(plan: Plan) -> str | None:
    """Why ranks cannot share the optimizer's step as a plan says, or None."""
    if (problem := interface_misfit(plan)) is not None:
        return problem
    if not plan.sharded:
        return None
    where = "the plan's updates.step"
    others = {"a delay": plan.delay, "local updaters": plan.local_async}
    beside = next((name for name, other in others.items() if other is not None), None)
    if beside is not None:
        return (
            f"{where}: found a shared step beside {beside}, which takes the step's place; expected one of them: {CURE}"
        )
    if plan.updates is not None and plan.updates.norms is not None and plan.updates.norms.shares is not None:
        return (
            f"{where}: found a shared step beside shared norms, which need whole layers; expected one of them: {CURE}"
        )
    for index, bucket in enumerate(plan.buckets):
        form = (*form_of(bucket), bucket.compressor.name)
        if form != ("all_reduce", "library", "none"):
            return (
                f"{where}: found a shared step, and bucket {index} travels by {'/'.join(form[:2])} with the compressor "
                f"{form[2]!r}; expected all_reduce/library and none, of which each rank gets its part: {CURE}"
            )
    return None


def _form_misfit(bucket: PlanBucket) -> str | None:
    """What is unknown about how a bucket travels, as what follows its number."""
    form, compressor = (bucket.collective, bucket.algorithm), bucket.compressor.name
    if form not in COLLECTIVES and form not in PHASED:
        known = ", ".join("/".join(name) for name in sorted((*COLLECTIVES, *PHASED)))
        return f"travels by {'/'.join(form)}, which is unknown here; known: {known}"
    if compressor not in COMPRESSORS:
        return f"has the compressor {compressor!r}, which is unknown here; known: {', '.join(COMPRESSORS)}"
    if (bucket.collective == "sparse") != (compressor in SELECTING):
        which = f"one of {', '.join(SELECTING)}" if bucket.collective == "sparse" else "none or wire"
        return f"travels by {'/'.join(form)} with the compressor {compressor!r}; expected {which} there"
    if compressor == "wire" and bucket.algorithm != "library":
        return f"travels by {'/'.join(form)} with the compressor 'wire'; expected all_reduce/library, or none"
    if form == HITOPK and (
        compressor != "topk" or bucket.compressor.density is None or bucket.compressor.scope == "layer"
    ):
        return (
            "travels by sparse/hitopk, which selects from shards, not from layers; expected the compressor topk with "
            'one density and no scope "layer"'
        )
    return None


def _lossy_misfit(parameters: Mapping[str, nn.Parameter], plan: Plan, bucket: PlanBucket) -> str | None:
    """Why a bucket cannot be compressed as it says, as what follows its number."""
    name = bucket.compressor.name
    if name == "none":
        return None
    if plan.accuracy == "exact":
        return (
            f"has the compressor {name!r}, but the plan's accuracy is exact; expected none in every bucket of an exact "
            f'plan: set "accuracy" to "bounded" if sending less is meant'
        )
    if form_of(bucket) == HITOPK and not any(parameters[gradient].numel() for gradient in bucket.gradients):
        return f"has the compressor {name!r}, and no elements to select from; expected all_reduce/library and none"
    odd = next((gradient for gradient in bucket.gradients if parameters[gradient].is_complex()), None)
    if odd is not None:
        return f"has the compressor {name!r}, which knows no complex numbers; expected none: {odd} is complex"
    if plan.delay is not None and len({parameters[gradient].dtype for gradient in bucket.gradients}) > 1:
        return f"has the compressor {name!r} and several dtypes, but is pushed; expected one dtype in it: divide it"
    sizes = [(gradient, parameters[gradient].numel()) for gradient in bucket.gradients]
    try:
        make_compressor(bucket.compressor, layer_runs(sizes), ranks=plan.world.ranks)
    except InputError as error:
        return f"has a compressor that does not fit: {error}"
    return None
