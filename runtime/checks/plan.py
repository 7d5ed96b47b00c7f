"""Whether a plan fits this model, these ranks and this runtime: asked before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import nn

from runtime.checks.modes import asked_modes
from runtime.comm.collectives import COLLECTIVES, PHASED, is_known
from runtime.core.members import exchanged_parameters, named_buffers, named_parameters
from runtime.errors import InputError
from runtime.plan import HINT, Plan, PlanBucket, combinations, gathers_problem, interface_problem
from runtime.plan.names import canonical_name, fingerprint, shorten
from runtime.plan.transports import Transport
from runtime.sparse.compressed import layer_runs
from runtime.sparse.compressors import COMPRESSORS, Family, make_compressor
from runtime.sparse.compressors.wire import BETWEEN_NODES, EIGHT_BITS
from runtime.torch_compat import is_sharded, is_updated_in_backward, is_wrapped

SHARDS_HINT = (
    "is sent by sparse/hitopk, which selects from shards, not from layers; expected the compressor topk with one "
    'density and no scope "layer"'
)

SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64)
"""Dtypes that backends and torch add up."""

SHOWN = 5


def trainable_parameters(model: nn.Module, also: Iterable[nn.Parameter] = ()) -> dict[str, nn.Parameter]:
    """Return trainable parameters that ranks exchange (`runtime.core.members`) by canonical name, a shared one once.

    `also` are parameters that count as trainable. Raises InputError where two have one name.
    """
    found: dict[str, nn.Parameter] = {}
    full: dict[str, str] = {}
    counted = set(map(id, also))
    for name, parameter in named_parameters(model):
        if not (parameter.requires_grad or id(parameter) in counted):
            continue
        short = canonical_name(name)
        if short in found:
            raise InputError(
                f"the parameters {full[short]!r} and {name!r} are both called {short!r} once the prefixes of wrappers "
                f"(module., _orig_mod.) are taken off; expected different names: rename one of them"
            )
        found[short], full[short] = parameter, name
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def model_fingerprint(model: nn.Module) -> str:
    return parameters_fingerprint(trainable_parameters(model))


def parameters_fingerprint(parameters: Mapping[str, nn.Parameter]) -> str:
    """`model_fingerprint`, of parameters by canonical name."""
    return fingerprint((name, tuple(p.shape), dtype_name(p.dtype)) for name, p in parameters.items())


def check_attached(model: nn.Module, attached: Iterable[nn.Module]) -> str | None:
    """Return why this model cannot be attached in addition to those that are attached already, or None."""
    mine = [(n, p) for n, p in named_parameters(model) if p.requires_grad]
    for other in attached:
        if other is model:
            return "the model is attached already; call session.detach() first"
        # By identity: tensors that are compared compare their elements.
        theirs = set(map(id, exchanged_parameters(other)))
        shared = next((name for name, parameter in mine if id(parameter) in theirs), None)
        if shared is not None:
            return (
                f"{shared} belongs to another attached model too ({type(other).__name__}), and its gradient would be "
                f"averaged twice; expected each parameter in one attached model: detach that one first, or attach one "
                f"module that holds both"
            )
    return None


def check_model(model: nn.Module) -> str | None:
    """Return why no plan can drive this model, or None."""
    wrapper = is_wrapped(model)
    if wrapper is not None:
        return (
            f"the model is wrapped in {wrapper}, which exchanges gradients itself; expected a plain module: pass the "
            f"inner one (model.module) and drop the wrapper"
        )
    for name, tensor in chain(named_parameters(model), named_buffers(model)):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            return f"{name} has no shape yet (a lazy module); expected one: run one forward before attach"
        if is_sharded(tensor):
            return (
                f"{name} is a DTensor (tensor parallelism or FSDP2), of which each rank holds a part; expected whole "
                f"parameters, the same on every rank: train it with the wrapper that made it"
            )
        if is_updated_in_backward(tensor):
            return (
                f"{name} has an optimizer that steps in backward (_apply_optimizer_in_backward), before ranks have "
                f"averaged gradients; expected optimizers that step behind it: make an ordinary one, and call its step"
            )
        if tensor.layout != torch.strided:
            return f"{name} is sparse ({tensor.layout}); expected dense parameters: call to_dense() on it"
        if tensor.requires_grad and tensor.is_leaf and (found := tensor.grad_dtype) != tensor.dtype:
            return (
                f"{name} has the grad_dtype {found}; expected that of the parameter, {tensor.dtype}, which buckets "
                f"have: leave grad_dtype as it is"
            )
    exchanged = exchanged_parameters(model)
    devices = {str(parameter.device) for parameter in exchanged}
    if len(devices) > 1:
        return f"the parameters are on several devices ({', '.join(sorted(devices))}); expected one device per rank"
    if "meta" in devices:
        return "the parameters are on the device meta and have no data; expected real ones: model.to_empty(device=...)"
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and any(module.weight is one for one in exchanged):
            return f"{name or 'the model'} is an embedding with sparse=True gradients; expected sparse=False"
    return None


def check_buffers(model: nn.Module) -> str | None:
    """Return why the model's buffers cannot be overwritten with rank 0's, or None."""
    for name, buffer in model.named_buffers():
        if isinstance(buffer, nn.UninitializedBuffer) or buffer.layout != torch.strided:
            continue  # refused, whatever they are
        found = "was made in torch.inference_mode" if buffer.is_inference() else None
        if any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)):
            found = "has several elements in one place (expand does that)"
        if found is not None:
            return (
                f"{name} {found} and cannot be written to, but buffers follow those of rank 0; expected plain tensors: "
                f"register buffer.clone(), or leave each rank its own by attach(…, broadcast_buffers=False)"
            )
    return None


def check_plan(parameters: Mapping[str, nn.Parameter], plan: Plan, ranks: int) -> str | None:
    """Return the first reason why this plan cannot drive these trainable parameters on this many ranks, or None."""
    if plan.fsdp2 is not None:
        return (
            "the plan has groups of modules for FSDP2 and no buckets; expected buckets, which attach executes: call "
            "planner.fully_shard(model, plan) in its place"
        )
    if problem := plan.world.problem("the plan's world"):
        return problem
    if plan.world.ranks != ranks:
        hint = f"make one with a cluster of {ranks} ranks (`planner optimize --cluster`)"
        launch = "; to start several ranks use torchrun and torch.distributed.init_process_group" if ranks == 1 else ""
        return f"the plan was made for {plan.world.ranks} ranks, found {ranks}; {hint}{launch}"
    if problem := _check_parameters(parameters, plan) or _check_mode(parameters, plan):
        return problem
    for index, bucket in enumerate(plan.buckets):
        if problem := _check_form(bucket) or _check_compressor(parameters, plan, bucket):
            return f"bucket {index} {problem}"
    if plan.fallback is None:
        return None
    if plan.fallback.accuracy != "exact":
        return f"the plan's fallback has the accuracy {plan.fallback.accuracy}; expected exact: {HINT}"
    problem = check_plan(parameters, plan.fallback, ranks)
    return None if problem is None else f"the plan's fallback: {problem}"


def check_switch(plan: Plan, at_step: object, step: int) -> str | None:
    """Return why a run cannot switch to a plan at `at_step`, or None."""
    if not isinstance(at_step, int) or isinstance(at_step, bool):
        return f"at_step: found {at_step!r}, expected the number of a step, {step} or later"
    if at_step < step:
        return (
            f"at_step: found {at_step}, but {step} steps are done; expected {step} or later: leave it out to switch "
            f"at the next step"
        )
    mode = asked_modes(plan)[0]
    return mode.attach_reason or mode.late_reason


def _check_parameters(parameters: Mapping[str, nn.Parameter], plan: Plan) -> str | None:
    """Return how the model is another one than the plan's, or of what dtype no average can be made."""
    if not parameters:
        return "the model has no trainable parameter; expected at least one with requires_grad"
    planned = set(plan.gradients)
    missing = [name for name in parameters if name not in planned]
    same = plan.model.fingerprint is not None and plan.model.fingerprint == parameters_fingerprint(parameters)
    if same:
        missing = []  # the very model, with parameters that got no gradient when it was profiled
    unknown = [name for name in plan.gradients if name not in parameters]
    parts = [f"trainable in the model but not in the plan: {shorten(missing)}"] if missing else []
    parts += [f"in the plan but not trainable in the model: {shorten(unknown)}"] if unknown else []
    if parts:
        return f"the plan (for {plan.model.name}) is for another model: {'; '.join(parts)}; profile this model again"
    if plan.model.fingerprint is not None and not same:
        # The first buckets whose bytes are not those planned, with the shapes that were found.
        found = []
        for index, bucket in enumerate(plan.buckets):
            size_bytes = sum(parameters[name].numel() * parameters[name].element_size() for name in bucket.gradients)
            if bucket.size_bytes is not None and bucket.size_bytes != size_bytes:
                shapes = shorten([f"{name} {tuple(parameters[name].shape)}" for name in bucket.gradients])
                found.append(f"bucket {index}: {bucket.size_bytes} bytes planned, {size_bytes} bytes found, {shapes}")
        more = f"; and {len(found) - SHOWN} more buckets" if len(found) > SHOWN else ""
        sizes = f" (first in {'; '.join(found[:SHOWN])}{more})" if found else ""
        return (
            f"the plan (for {plan.model.name}) is for another model: the names of the parameters agree, their shapes "
            f"or dtypes do not{sizes}; profile this model again"
        )
    odd = next((name for name, parameter in parameters.items() if parameter.dtype not in SUMMED), None)
    if odd is None:
        return None
    return (
        f"{odd} is {dtype_name(parameters[odd].dtype)}, of which ranks cannot make an average; expected one of "
        f"{', '.join(map(dtype_name, SUMMED))}: convert it before attach, or freeze it (requires_grad_(False))"
    )


def _check_mode(parameters: Mapping[str, nn.Parameter], plan: Plan) -> str | None:
    """Return what does not go together in a plan: two modes, or a mode and a feature."""
    mode, *others = asked_modes(plan)
    if others:
        return (
            f"the plan: found {mode.what} beside {others[0].what}, each of which takes the place of what the other "
            f"one does; expected one of them: {HINT}"
        )
    if mode.relaxed and plan.accuracy != "relaxed":
        return (
            f'the plan has {mode.what} and the accuracy {plan.accuracy}; expected "relaxed": set it if {mode.what} '
            f"is meant"
        )
    if problem := mode.check_plan(plan, parameters) or interface_problem(plan) or gathers_problem(plan):
        return problem
    if plan.rounds_weights and not plan.sharded:
        return (
            f"the plan's updates.step.weights: found them in a plan whose ranks do not share the step, and gather no "
            f"weights; expected none there, or sharded true beside it: {HINT}"
        )
    against = {
        feature: reason
        for feature, reason in combinations.COMBINATIONS[mode.name].items()
        if feature not in combinations.ALSO_EXECUTED.get(mode.name, ())
    }
    forms = "all_reduce/library without a compressor"
    if combinations.WIRE not in against:
        forms += " or with wire"
    if combinations.SELECTION not in against:
        forms += ", or sparse/flat with one density"
    for index, bucket in enumerate(plan.buckets):
        spec = bucket.compressor
        by_layer = spec.k is not None or spec.scope == "layer"
        features = combinations.features_of_bucket(bucket.transport, spec.name, by_layer=by_layer)
        for feature in features:
            if feature in against:
                how = f"is sent by {bucket.transport} with the compressor {spec.name!r}"
                how = "selects by layer" if feature == combinations.LAYER_SELECTION else how
                return f"bucket {index} {how}, but {against[feature]}; expected {forms}: {HINT}"
    if plan.from_step is not None and combinations.FROM_STEP in against:
        reason = against[combinations.FROM_STEP]
        return (
            f"the plan's from_step: found {plan.from_step} with {mode.what}, but {reason}; expected none: take it out"
        )
    step = plan.updates.step if plan.updates else None
    if step is not None and step.owners:
        where = "the plan's updates.step.owners"
        if not step.sharded:
            return f"{where}: found owners in a plan without a sharded optimizer step; expected none: {HINT}"
        if (problem := check_owner_ranks(where, step.owners, parameters, plan.world.ranks)) is not None:
            return problem
    return _check_norms(parameters, plan, against, mode.what) or _check_operator(parameters, plan, against, mode.what)


def _check_norms(
    parameters: Mapping[str, nn.Parameter], plan: Plan, against: Mapping[str, str], what: str
) -> str | None:
    shares = plan.updates.norms.shares if plan.updates and plan.updates.norms else None
    if shares is None:
        return None
    where = "the plan's updates.norms.shares"
    if combinations.SHARED_NORMS in against:
        reason = against[combinations.SHARED_NORMS]
        return f"{where}: found shares in a plan with {what}, but {reason}; expected none: {HINT}"
    if len(shares) != plan.world.ranks:
        return f"{where}: found {len(shares)} for {plan.world.ranks} ranks; expected one for each: {HINT}"
    listed = [name for share in shares for name in share]
    twice = next((name for name, times in Counter(listed).items() if times > 1), None)
    if twice is not None:
        return f"{where}: found {twice!r} twice; expected each parameter in one share: {HINT}"
    return check_owner_ranks(where, dict.fromkeys(listed, 0), parameters, len(shares))


def _check_operator(
    parameters: Mapping[str, nn.Parameter], plan: Plan, against: Mapping[str, str], what: str
) -> str | None:
    operator = plan.updates.operator if plan.updates else None
    if operator is None or not (operator.owners or operator.gathers):
        return None
    where, owners = "the plan's updates.operator", operator.owners or {}
    if combinations.SHARED_OPERATOR in against:
        reason = against[combinations.SHARED_OPERATOR]
        return f"{where}.owners: found owners in a plan with {what}, but {reason}; expected none: {HINT}"
    messages, inside = operator.messages if owners else operator.gathers or (), operator.inside or ()
    problem = check_owner_ranks(f"{where}.owners", owners, parameters, plan.world.ranks)
    problem = problem or _check_gathers(f"{where}.gathers", messages, owners)
    if problem is None and (unowned := next((name for name in operator.batched or () if name not in owners), None)):
        return f"{where}.batched: found {unowned!r}, which has no owner; expected names of owners: {HINT}"
    if problem is None and operator.tolerance and plan.accuracy == "exact":
        return f"{where}.tolerance: found {operator.tolerance} in an exact plan, expected none; take it out, or: {HINT}"
    if problem or not inside:
        return problem
    if max(inside) >= len(messages):
        return f"{where}.inside: found message {max(inside)} of {len(messages)}; expected places in gathers: {HINT}"
    local = {name: owners[name] for number in inside for name in messages[number]}
    return check_owner_ranks(f"{where}.inside", local, parameters, plan.world.ranks // (plan.world.nodes or 1))


def check_owner_ranks(
    where: str, owners: Mapping[str, int], parameters: Mapping[str, nn.Parameter], ranks: int
) -> str | None:
    """Return why these cannot be the owners of a model's parameters, or None; `where`: what they are in the plan."""
    unknown = next((name for name in owners if name not in parameters), None)
    if unknown is not None:
        return f"{where}: found {unknown!r}, which is no trainable parameter of the model; expected its own: {HINT}"
    odd = next((name for name, rank in owners.items() if not 0 <= rank < ranks), None)
    if odd is None:
        return None
    return f"{where}: found rank {owners[odd]} for {odd!r}; expected ranks from 0 to {ranks - 1}: {HINT}"


def _check_gathers(where: str, messages: Iterable[Iterable[str]], owners: Mapping[str, int]) -> str | None:
    counts = Counter(name for message in messages for name in message)
    odd = next((name for name in (*owners, *counts) if counts[name] != 1 or name not in owners), None)
    if odd is None:
        return None
    return f"{where}: found {odd!r} {counts[odd]} times; expected each parameter with an owner once: {HINT}"


def _check_form(bucket: PlanBucket) -> str | None:
    """Return what is unknown about how a bucket is sent, as what follows its number."""
    transport, spec = bucket.transport, bucket.compressor
    if not is_known(transport):
        return f"is sent by {transport}, which is unknown here; known: {_listed((*COLLECTIVES, *PHASED), ', ')}"
    if spec.name not in COMPRESSORS:
        return f"has the compressor {spec.name!r}, which is unknown here; known: {', '.join(COMPRESSORS)}"
    family, found = COMPRESSORS[spec.name], f"is sent by {transport} with the compressor {spec.name!r}"
    if family.selects != transport.sparse:
        which = (name for name, other in COMPRESSORS.items() if other.selects == transport.sparse)
        return f"{found}; expected one of {', '.join(which)} there"
    between = bool(family.between) and spec.links == BETWEEN_NODES
    if transport not in (family.between if between else family.transports):
        if family.between:
            return f"{found} {_links_hint(family, between=between, narrow=transport in family.between)}"
        if transport.by_shards:
            return SHARDS_HINT
        if bucket.dense:
            fitting = (name for name, other in COMPRESSORS.items() if transport in other.transports)
            return f"{found}; expected {' or '.join(fitting)} there: {HINT}"
        return f"{found}; expected {_listed(family.transports, ' or ')} there, or none"
    return SHARDS_HINT if transport.by_shards and (spec.density is None or spec.scope == "layer") else None


def _links_hint(family: Family, *, between: bool, narrow: bool) -> str:
    """Return why a bucket cannot be sent narrow on the links that it says, as what follows how it is sent. `narrow`:
    its transport may be narrow between nodes.
    """
    everywhere, inter = (_listed(transports, " or ") for transports in (family.transports, family.between))
    if between:
        return (
            f"on the links between nodes alone (links 'inter'); expected {inter} there, which is dense inside nodes: "
            f"send it so, or leave links out"
        )
    if narrow:
        return f'on all links; expected links \'inter\' there: add "links": "inter", or send it by {everywhere}'
    return f"on all links; expected {everywhere} there, or none"


def _listed(transports: Iterable[Transport], separator: str) -> str:
    return separator.join(sorted(map(str, transports)))


def _check_compressor(parameters: Mapping[str, nn.Parameter], plan: Plan, bucket: PlanBucket) -> str | None:
    """Return why a bucket cannot be compressed as it says, as what follows its number."""
    name = bucket.compressor.name
    if bucket.dense:
        return None
    if plan.accuracy == "exact":
        return (
            f"has the compressor {name!r}, but the plan's accuracy is exact; expected none in every bucket of an exact "
            f'plan: set "accuracy" to "bounded" if sending less is meant'
        )
    if bucket.transport.by_shards and not any(parameters[gradient].numel() for gradient in bucket.gradients):
        return f"has the compressor {name!r}, and no elements to select from; expected all_reduce/library and none"
    odd = next((gradient for gradient in bucket.gradients if parameters[gradient].is_complex()), None)
    if odd is not None:
        return f"has the compressor {name!r}, which knows no complex numbers; expected none: {odd} is complex"
    wide = next((gradient for gradient in bucket.gradients if parameters[gradient].dtype == torch.float64), None)
    if wide is not None and bucket.compressor.dtype in EIGHT_BITS:
        return (
            f"has the compressor {name!r} with the dtype {bucket.compressor.dtype}, but {wide} is float64; expected "
            f"gradients of at most 32 bits for a format of 8: send it as bfloat16 or float16, or as it is (none)"
        )
    sizes = [(gradient, parameters[gradient].numel()) for gradient in bucket.gradients]
    try:
        make_compressor(bucket.compressor, layer_runs(sizes), ranks=plan.world.ranks, native=bucket.transport.native)
    except InputError as error:
        return f"has a compressor that does not fit: {error}"
    return None
