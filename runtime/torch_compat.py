"""Every torch call that is private, deprecated or differs between versions, in one place (torch ≥ 2.11)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pkgutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ProcessGroupGloo, TCPStore
from torch.fx.passes.split_module import split_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import _muon
from torch.utils import _pytree
from torch.utils.dlpack import from_dlpack
from torch.utils.hooks import RemovableHandle

from runtime.errors import InputError


@contextlib.contextmanager
def unprofiled() -> Iterator[None]:
    """Hide the collectives that are launched here from profilers.

    gloo's thread notes in a profiler's record when a collective has ended. Where the profiler was stopped before, that
    record has been freed: the thread writes to memory of others, and the process crashes later (torch 2.13).
    """
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the backward pass that is running now, before `backward()` returns. Raises
    InputError in compiled autograd, which does not do that.
    """
    from torch._dynamo import compiled_autograd

    if compiled_autograd.in_compiled_autograd_region:
        raise InputError(
            "backward: found compiled autograd, at whose end no message is waited for; expected autograd itself: set "
            "torch._dynamo.config.compiled_autograd = False, and enable it nowhere else"
        )
    torch.autograd.Variable._execution_engine.queue_callback(callback)


OUTSIDE = -1
"""Value of `current_backward_id` outside of a backward pass."""


def current_backward_id() -> int:
    """Return a number that is the same throughout one backward pass and differs between passes; `OUTSIDE` outside."""
    return torch._C._current_graph_task_id()


def is_in_compiled_code() -> bool:
    """Return whether a compiled program calls the function that asks, which it does not know by itself."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)


def runs_without_python(module: torch.nn.Module) -> bool:
    """Return whether a program that torch has compiled, or a script, stands in for the module's forward."""
    return _is_compiled_itself(module) or isinstance(module, torch.jit.ScriptModule)


def _is_compiled_itself(module: torch.nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def hook_before_forward(module: torch.nn.Module, hook: ModuleHook) -> RemovableHandle:
    """Register a hook that is called before a module's forward, first of all; a script, which has no method for that,
    calls it all the same.
    """
    return torch.nn.Module.register_forward_pre_hook(module, hook, prepend=True)


def hook_after_forward(module: torch.nn.Module, hook: ModuleHook) -> RemovableHandle:
    """Register a hook that is called after a module's forward, also where that raised; see `hook_before_forward`."""
    return torch.nn.Module.register_forward_hook(module, hook, always_call=True)


def may_have_methods(module: torch.nn.Module) -> bool:
    """Return whether a method among a module's attributes is copied and saved with it, as torch does by default,
    or left out.
    """
    kind = type(module)
    plain = (kind.__reduce__, kind.__reduce_ex__) == (object.__reduce__, object.__reduce_ex__)
    return isinstance(module, torch._dynamo.OptimizedModule) or (
        plain and not isinstance(module, torch.jit.ScriptModule)
    )


def is_tracing() -> bool:
    """Return whether `torch.compile` traces a program in this thread: it looks at tensors then, not at numbers."""
    return torch._guards.TracingContext.try_get() is not None


def accumulator_of(parameter: torch.Tensor) -> Any:
    """Return the node of autograd that adds gradients to the parameter's `.grad`; of a frozen parameter, too."""
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    if frozen:
        parameter.requires_grad_(False)
    return node


def names_ignored_by_ddp(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers that DistributedDataParallel would leave out of a model's exchange."""
    return frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def is_wrapped(model: torch.nn.Module) -> str | None:
    """Return the name of the wrapper that already exchanges this model's gradients, or None."""
    from torch.distributed._composable.replicate import DDP as Replicated
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DataParallel

    wrappers = (DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule, Replicated)
    for module in model.modules():
        if isinstance(module, wrappers):
            return type(module).__name__
    return None


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether `torch.compile` or `module.compile()` has been called on the model or a part of it."""
    return any(map(_is_compiled_itself, model.modules()))


def compiled_parts(model: torch.nn.Module) -> list[str]:
    """Return the names of the parts of a model that are compiled by themselves, not with the whole of it."""
    whole = {id(model), id(getattr(model, "_orig_mod", model))}
    return [name for name, module in model.named_modules() if id(module) not in whole and _is_compiled_itself(module)]


def find_backend(backend: str | Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a backend of `torch.compile` by name, or the given one; None where there is none of that name."""
    try:
        found = torch._dynamo.lookup_backend(backend)
    except Exception as error:  # of a class that differs between versions
        if type(error).__module__.startswith("torch._dynamo"):
            return None
        raise
    return found if callable(found) else None


def inductor_settings(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of inductor that a mode and options of `torch.compile` stand for, and CUDA graphs where they
    are its default. Raises what torch does where they are none.
    """
    found: dict[str, Any] = torch._TorchCompileInductorWrapper(mode, options, None).config
    return {**({"triton.cudagraphs": True} if torch._inductor.config.triton.cudagraphs else {}), **found}


def is_autograd_compiled() -> bool:
    """Return whether `torch.compile` is to compile the whole backward of its models as one graph."""
    return bool(torch._dynamo.config.compiled_autograd)


def modules_of_node(graph: torch.fx.GraphModule, node: torch.fx.Node) -> set[int]:
    """Return the ids of the modules in whose forward a node was traced; of an operator on graphs (an activation
    checkpoint) also those of their nodes.
    """
    found = {int(key.partition("@")[0]) for key in node.meta.get("nn_module_stack", ()) if key[:1].isdigit()}
    for argument in node.all_input_nodes:
        inner = getattr(graph, str(argument.target), None) if argument.op == "get_attr" else None
        if isinstance(inner, torch.fx.GraphModule):
            found.update(*(modules_of_node(inner, each) for each in inner.graph.nodes))
    return found


def compile_split(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], region_of: Callable[[torch.fx.Node], int],
    compiler: Callable[..., Any],
) -> Callable[..., Any]:  # fmt: skip
    """Compile each region of a graph by itself, as `torch.compile(DistributedDataParallel(model))` does its buckets."""
    from torch._dynamo.backends import distributed

    split = split_module(graph, None, region_of)  # type: ignore[arg-type]
    distributed.propagate_dynamo_source(graph, split)
    distributed.propagate_metadata(graph, split)
    fake_mode = torch._guards.detect_fake_mode(inputs) or torch._subclasses.fake_tensor.FakeTensorMode()
    with torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing():
        distributed.SubmodCompiler(split, compiler, fake_mode).run(*inputs)
    split.recompile()
    return split


def compiling(backend: Callable[..., Any], dynamic: bool | None) -> Callable[[Any], Any]:
    """Return what compiles modules and functions with a backend, as `torch.compile` does.

    Where torch can (2.13) their graphs are apart from those of other backends, which share a limit otherwise: when it
    is reached, all that was not compiled by then runs eagerly.
    """
    apart = {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
    made: Callable[[Any], Any] = torch._dynamo.optimize(backend, dynamic=dynamic, **apart)
    return made


def functions_given_up() -> int:
    """Return how many functions torch compiles no further in this process, for they reached a limit."""
    reasons: Mapping[str, int] = torch._dynamo.utils.counters["unimplemented"]
    return sum(number for reason, number in reasons.items() if "recompile limit" in reason)


def recompile(model: torch.nn.Module, compiled_by: Callable[[Any], Any]) -> Callable[[], None]:
    """Compile a model, or what `torch.compile` has made of one, by what `compiling` gives; return what undoes that."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        compiled, before = model, model.dynamo_ctx

        def use(context: Any) -> None:
            compiled.dynamo_ctx = context
            compiled._initialize()

        use(compiled_by)
        return lambda: use(before)
    plain, call = model, model._compiled_call_impl
    plain._compiled_call_impl = compiled_by(plain._call_impl)
    # Of its own modules (`nn.Sequential`) torch compiles the forward where they have a hook, alone.
    hook = hook_before_forward(plain, ModuleHook(no_hook))

    def put_back() -> None:
        plain._compiled_call_impl = call
        hook.remove()

    return put_back


def lift_recompile_limits() -> None:
    """Let `torch.compile` compile any number of models of one class; beyond 8, which it counts together, they would run
    uncompiled.
    """
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 20


def is_updated_in_backward(tensor: torch.Tensor) -> bool:
    """Return whether `_apply_optimizer_in_backward` has given a parameter an optimizer that steps in backward."""
    return bool(getattr(tensor, "_in_backward_optimizers", None))


def is_sharded(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def has_all_reduce_hook(module: torch.nn.Module) -> bool:
    """Return whether `set_all_reduce_hook` was called on a module of FSDP2: the hook reads what was reduced at once."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group is not None and group._all_reduce_hook is not None for group in groups)


def running_ddp() -> torch.nn.Module | None:
    """Return the DistributedDataParallel whose forward is running now, or None."""
    return DistributedDataParallel._active_ddp_module


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors of different shape, or handles, that share the memory."""
    return torch._C._storage_Use_Count(storage._cdata)


def makes_parameter(frame: FrameType) -> bool:
    """Return whether a frame makes a `torch.nn.Parameter` of a tensor."""
    return frame.f_code is torch.nn.Parameter.__new__.__code__


def own_memory(flat: torch.Tensor) -> torch.UntypedStorage:
    """Return a storage of exactly the elements of a 1-D tensor, whose memory it keeps alive. It cannot be resized. What
    is a part of a buffer is not taken for tied to others there, and is saved alone.
    """
    return from_dlpack(flat.detach()).untyped_storage()


def held_by_torch(tensor: torch.Tensor, holders: int = 0) -> bool:
    """Return whether more than `holders` other than Python refer to a tensor (a graph, DLPack), or it is not known."""
    count = getattr(tensor, "_use_count", None)
    return count is None or count() > 1 + holders


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists, tuples, registered records and dataclasses (each of these once)."""
    leaves: list[Any] = []
    seen: set[int] = set()
    left = [value]
    while left:
        for leaf in _pytree.tree_leaves(left.pop()):
            if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
                leaves.append(leaf)
            elif id(leaf) not in seen:
                seen.add(id(leaf))
                left += [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    return leaves


@functools.cache
def leave_uncompiled() -> None:
    """Let `torch.compile` run this package as it is, with breaks at hooks, but for the kernels, which are operators."""
    import torch._dynamo

    for module in pkgutil.iter_modules([str(Path(__file__).parent)], "runtime."):
        if module.name != "runtime.kernels":
            torch._dynamo.trace_rules.add(module.name)


def no_hook(*_: Any) -> None:
    """Do nothing, in place of a session's hook in a copied or loaded module."""


def _get_no_hook() -> Callable[..., None]:
    return no_hook


class ModuleHook:
    """Calls a session's method; `copy.deepcopy` (EMA) and pickling (`torch.save`) of the module make it nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _get_no_hook, ()


def wait_for(work: dist.Work, limit: timedelta | None = None) -> None:
    """Wait for `work`, with errors that `is_of_backend` distinguishes from those of other code."""
    work.wait() if limit is None else work.wait(limit)


def result_of(future: torch.futures.Future[Any]) -> Any:
    """Return what a future holds, or raise: as with `wait_for`."""
    return future.value()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether there was no memory for a tensor; on a CPU torch has no class for that."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


# torch 2.13 renames both and warns about the old names.
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output, input, group=…): the sum over ranks of `input` (1-D, ranks · n), of which this rank gets its n."""
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output, input, group=…): every rank's `input` (1-D, n), one after the other (ranks · n)."""
all_to_all_single: Callable[..., Any] = dist.all_to_all_single
"""(output, input, group=…): from every rank its part for this one (1-D, ranks · n)."""


def send(group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int = 0) -> Any:
    """Begin to send a tensor to a rank of the group, without the checks and ranks of the world of `dist.isend`."""
    return group.send([tensor], peer, tag)


def receive(group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int = 0) -> Any:
    """Begin to receive what a rank of the group sends; in the order of its sends with that tag."""
    return group.recv([tensor], peer, tag)


def queued_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on a device, copied on its current stream. The host does not wait: from pageable memory it
    would, for all that the stream has queued.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that carries a device's tensors in a group, which may have another one for each kind: `nccl`,
    say.
    """
    name: str = group._get_backend(device).name()
    return name.lower()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the deadline of a group's collectives, with which the script has made it."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            found: timedelta = options._timeout
            return found
    return dist.default_pg_timeout  # of a backend that has none


def object_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of the tensors in which a group carries what is pickled."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def break_off(group: dist.ProcessGroup, peer: int) -> None:
    """Let all that is under way in a gloo group fail now, on its threads too; afterwards the group is broken.

    Threads that wait for a lost rank would hold the process up where it ends. gloo's own `abort` does not wake them; a
    receive that ends by its deadline closes the connections of all ranks.
    """
    contexts = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))  # tags go round them
    for tag in range(_BREAK_OFF_TAG, _BREAK_OFF_TAG + contexts):
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, tag).wait(timedelta(milliseconds=1))


_BREAK_OFF_TAG = 0x5E0000


def all_gather_on(group: dist.ProcessGroup, whole: torch.Tensor, part: torch.Tensor) -> dist.Work:
    """Begin an all-gather like `all_gather_single`, also where the script has ended torch.distributed meanwhile."""
    options = AllgatherOptions()
    options.asyncOp = True
    return group._allgather_base(whole, part, options)


def store_address() -> tuple[str, int] | None:
    """(host, port) of the TCP store that the default process group was formed by, or None where it was another one."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def meet(address: tuple[str, int], key: str, rank: int, ranks: int, timeout: timedelta) -> Any:
    """Return a gloo group of processes that are no ranks, DataLoader workers say; torch.distributed knows nothing
    of it. They meet at a TCP store under `key`; each rank's n-th process to come there is of one group.
    """
    store = TCPStore(*address, is_master=False, timeout=timeout)
    life = store.add(f"{key}/{rank}", 1)
    return ProcessGroupGloo(PrefixStore(f"{key}/life{life}", store), rank, ranks, timeout)


def all_to_all_uneven(group: Any, output: torch.Tensor, given: torch.Tensor, gets: list[int], gives: list[int]) -> None:
    """Exchange a part with every rank of such a group: `gets` and `gives` are lengths by rank (1-D tensors)."""
    wait_for(group.alltoall_base(output, given, gets, gives))


_DISTRIBUTED = str(Path(dist.__file__).parent)
_CALLS_OF_BACKEND = frozenset(call.__code__ for call in (wait_for, result_of, meet, send, receive, all_gather_on))


def is_of_backend(error: BaseException) -> bool:
    """Return whether a backend raised the error, because a rank died or a network failed; not an operation on tensors,
    or whatever else went wrong in this process.

    torch has classes for some of these errors. The others are bare RuntimeErrors, identified by their place: a call of
    `torch.distributed`, or a wait for what that has started.
    """
    if isinstance(error, dist.DistError):
        return True
    if type(error) is not RuntimeError or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code in _CALLS_OF_BACKEND or frame.f_code.co_filename.startswith(_DISTRIBUTED)


def orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return the Newton–Schulz orthogonalization of a matrix as `torch.optim.Muon` computes it; of a stack of matrices
    with three dimensions that of each, by the same steps in batched products.
    """
    if matrix.dim() != 3:
        return _NEWTON_SCHULZ(matrix, coefficients, steps, eps)
    a, b, c = coefficients
    tall = matrix.size(1) > matrix.size(2)
    result = (matrix.mT if tall else matrix).to(torch.bfloat16, copy=True)
    for one in result:
        one.div_(one.norm().clamp(min=eps))
    for _ in range(steps):
        gram = result @ result.mT
        result = torch.baddbmm(result, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.mT if tall else result


_NEWTON_SCHULZ = _muon._zeropower_via_newtonschulz


def apply_orthogonalized(parameter: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Update a parameter in place as `torch.optim.Muon` does once its update is orthogonalized."""
    module: Any = _muon
    lr = module._to_scalar(group["lr"])
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.add_(update, alpha=-module._adjust_lr(lr, group["adjust_lr_fn"], parameter.shape))


@contextlib.contextmanager
def orthogonalize_replaced(
    function: Callable[[torch.Tensor, tuple[float, float, float], int, float], torch.Tensor],
) -> Iterator[None]:
    """Let the steps of `torch.optim.Muon` inside call `function` in place of `orthogonalize`."""
    module: Any = _muon
    original, module._zeropower_via_newtonschulz = module._zeropower_via_newtonschulz, function
    try:
        yield
    finally:
        module._zeropower_via_newtonschulz = original


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the function of an optimizer's step without the hooks that torch wraps around it."""
    step: Any = type(optimizer).step
    plain: Callable[[torch.optim.Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain
