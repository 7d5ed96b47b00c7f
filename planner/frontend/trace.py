"""Traces one forward of a model: torch.export, then torch.fx's symbolic trace, then module hooks around a plain call.

Nothing of the model is changed, and where possible nothing is computed: parameters and batch are replaced by tensors
without data.
"""

from __future__ import annotations

import copy
import io
import logging
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.func import functional_call
from torch.nn.parallel import DataParallel, DistributedDataParallel

from planner.frontend.layers import (
    CostInterpreter,
    CostRecorder,
    LayerCost,
    Method,
    TracedModel,
    canonical_path,
    tensor_bytes,
)

__all__ = ["TracedModel", "trace"]

_REASON_CHARS = 200


def trace(model: nn.Module, run_forward: Callable[[], object]) -> TracedModel:
    """Finds the layers of `model` and what its first call in `run_forward` costs.

    Parameters, buffers, `.grad`, modules' attributes (and the lists and dicts that are attributes), hooks, training
    flags and the generators of random numbers are left as found. `run_forward` is cut short at the model's first call;
    only where it calls no more than parts of the model does it run to its end.

    Args:
        model: in the mode (train or eval) in which it is to be traced; may be compiled or wrapped in DDP.
        run_forward: computes one forward, say the loss of a batch.

    Raises:
        Exception: whatever `run_forward` raises before it calls the model. Once the model has been called, nothing:
            methods that fail are named in the result, and the last resort is a list of layers without FLOPs.
    """
    with _unchanged(model), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        call = _first_call(model, run_forward)
        inner = _levels(model)[-1]
        failures: dict[str, str] = {}
        for method, tracer in _METHODS.items():
            if call.step is not None and method != "hooks":
                failures[method] = "no call of the model itself was seen, only of parts of it"
                continue
            try:
                # Each method finds the model as it was, whatever the one before has left in its attributes.
                with _unchanged(inner), torch.enable_grad(), call.context(), _silenced():
                    return TracedModel(method=method, failures=failures, layers=tracer(inner, call))
            except Exception as error:
                failures[method] = _reason(error)
        return TracedModel(method="hooks", failures=failures, layers=CostRecorder(inner).layers())


@dataclass(frozen=True)
class _Call:
    """How the step calls the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: dict[str, torch.dtype]
    """Device types under autocast, with the type they cast to."""
    step: Callable[[], object] | None = None
    """Runs instead of a call of the model, where the step has none."""

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, cut off from whatever computed them."""
        return [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in _leaves((self.args, self.kwargs))]

    @contextmanager
    def context(self) -> Iterator[None]:
        """The surroundings of the call. No cache of casts, for it would outlive the stand-ins it is keyed by."""
        with ExitStack() as stack:
            for device_type, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
            yield


class _Bound(nn.Module):
    """A model bound to its arguments: tensors in, tensors out, everything else fixed.

    So it can be traced whatever its signature and its containers are. The name `module` is one that
    `canonical_name` takes off again.
    """

    def __init__(self, model: nn.Module, call: _Call) -> None:
        super().__init__()
        self.module = model
        self.training = model.training
        self._call = call

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        leaves = iter(tensors)
        args, kwargs = _map_tensors((self._call.args, self._call.kwargs), lambda _: next(leaves))
        return tuple(_leaves(self.module(*args, **kwargs)))


def _leaves(value: Any) -> list[Any]:
    """All tensors of a nest of containers, in the order in which `_map_tensors` replaces them."""
    found: list[Any] = []

    def take(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    _map_tensors(value, take)
    return found


def _map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of a nest of containers with every tensor replaced; objects of other kinds are kept."""
    if isinstance(value, (Tensor, fx.Proxy)):
        return function(value)
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key in value:
            result[key] = _map_tensors(value[key], function)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, function) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(cast(Any, value))
        for entry in fields(value):
            object.__setattr__(result, entry.name, _map_tensors(getattr(value, entry.name), function))
        return result
    return value


def _without_data(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A tensor like this one that takes no memory and shares none."""
    if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        return mode.from_tensor(tensor)
    with mode:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return twin.requires_grad_(tensor.requires_grad)


def _state(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers under all their names."""
    return dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))


def _stand_ins(mode: FakeTensorMode, module: nn.Module, recorder: CostRecorder) -> dict[str, Tensor]:
    """Parameters and buffers without data, by name; `recorder` knows whom they stand for."""
    made: dict[int, Tensor] = {}
    state = _state(module)
    for tensor in state.values():
        if id(tensor) not in made:
            made[id(tensor)] = _without_data(mode, tensor)
            recorder.stands_for(made[id(tensor)], tensor)
    return {name: made[id(tensor)] for name, tensor in state.items()}


def _by_export(model: nn.Module, call: _Call) -> tuple[LayerCost, ...]:
    bound, inputs = _Bound(model, call), call.tensors()
    program = torch.export.export(bound, tuple(inputs), strict=False)
    recorder = CostRecorder(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        values = {**program.constants, **_stand_ins(mode, bound, recorder)}
        leaves = iter([_without_data(mode, tensor) for tensor in inputs])
        args = [
            next(leaves) if spec.kind is InputKind.USER_INPUT else values[spec.target or ""]
            for spec in program.graph_signature.input_specs
        ]
        with recorder:
            CostInterpreter(program.graph_module, recorder).run(*args)
    return recorder.layers()


class _BoundTracer(fx.Tracer):
    """A symbolic tracer for `_Bound`, with one placeholder for each tensor."""

    def __init__(self, arity: int) -> None:
        super().__init__()
        self._arity = arity

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        placeholders = [self.create_proxy("placeholder", f"input_{i}", (), {}) for i in range(self._arity)]
        return root_fn, [self.root, *placeholders]


class _Replay(nn.Module):
    """Runs a graph under the recorder, with the parameters that `functional_call` puts in."""

    def __init__(self, graph: fx.GraphModule, recorder: CostRecorder) -> None:
        super().__init__()
        self.graph = graph
        self._recorder = recorder

    def forward(self, *inputs: Tensor) -> None:
        with self._recorder:
            CostInterpreter(self.graph, self._recorder).run(*inputs)


def _by_symbolic_trace(model: nn.Module, call: _Call) -> tuple[LayerCost, ...]:
    bound, inputs = _Bound(model, call), call.tensors()
    graph = fx.GraphModule(bound, _BoundTracer(len(inputs)).trace(bound))
    recorder = CostRecorder(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        values = _stand_ins(mode, bound, recorder)
        state = {f"graph.{name}": values[name] for name in _state(graph) if name in values}
        leaves = tuple(_without_data(mode, tensor) for tensor in inputs)
        # The graph tells in which module its nodes are; what is left to watch is the inside of its module calls.
        called = {canonical_path(str(node.target)) for node in graph.graph.nodes if node.op == "call_module"}
        with _watched(model, recorder, skip=called):
            functional_call(_Replay(graph, recorder), state, leaves)
    return recorder.layers()


def _by_hooks(model: nn.Module, call: _Call) -> tuple[LayerCost, ...]:
    bound, inputs = _Bound(model, call), call.tensors()
    if call.step is None:
        try:
            with _unchanged(model), FakeTensorMode(allow_non_fake_inputs=True) as mode:
                recorder = CostRecorder(model)
                state = _stand_ins(mode, bound, recorder)
                leaves = tuple(_without_data(mode, tensor) for tensor in inputs)
                with _watched(model, recorder), recorder:
                    functional_call(bound, state, leaves)
                return recorder.layers()
        except Exception:  # what this forward does depends on its data: run it on them
            pass
    recorder = CostRecorder(model)
    copies = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    with _values_kept(model.parameters()), _watched(model, recorder), recorder:
        _ = bound(*copies) if call.step is None else call.step()
    return recorder.layers()


@contextmanager
def _watched(model: nn.Module, recorder: CostRecorder, skip: Collection[str] = ()) -> Iterator[None]:
    """Tells the recorder which module runs and how large its outputs are; `skip` holds paths that it knows of."""
    outer: list[str] = []

    def enter(path: str, *_: Any) -> None:
        outer.append(recorder.path)
        recorder.path = path

    def leave(path: str, module: nn.Module, args: Any, output: Any) -> None:
        recorder.path = outer.pop()
        recorder.call_bytes[path] = recorder.call_bytes.get(path, 0.0) + tensor_bytes(_leaves(output))

    with ExitStack() as stack:
        for name, module in _hookable(model):
            if (path := canonical_path(name)) not in skip:
                stack.callback(module.register_forward_pre_hook(partial(enter, path)).remove)
                stack.callback(module.register_forward_hook(partial(leave, path), always_call=True).remove)
        yield


_METHODS: dict[Method, Callable[[nn.Module, _Call], tuple[LayerCost, ...]]] = {
    "export": _by_export,
    "symbolic_trace": _by_symbolic_trace,
    "hooks": _by_hooks,
}


class _CallSeen(BaseException):
    """Ends the step at the model's first call; not an Exception, so that the step's own handlers let it pass."""


def _first_call(model: nn.Module, run_forward: Callable[[], object]) -> _Call:
    calls: list[_Call] = []
    wholes = _levels(model)  # the step may call the wrapper or what is in it

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(module is whole for whole in wholes):
            calls.append(_Call(args, kwargs, _autocast(model)))
        raise _CallSeen

    with ExitStack() as stack:
        for _, module in _hookable(model):
            stack.callback(module.register_forward_pre_hook(see, with_kwargs=True, prepend=True).remove)
        try:
            run_forward()
        except _CallSeen:
            pass
        except Exception:
            if not calls:
                raise
    return calls[0] if calls else _Call((), {}, {}, step=run_forward)


def _hookable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules but TorchScript's, which take no hooks."""
    return [(name, part) for name, part in model.named_modules() if not isinstance(part, torch.jit.ScriptModule)]


def _levels(model: nn.Module) -> list[nn.Module]:
    """The model and what it wraps, outermost first."""
    wrapped = isinstance(model, (DistributedDataParallel, DataParallel))
    inner: Any = model.module if wrapped else getattr(model, "_orig_mod", None)
    return [model] if inner is None else [model, *_levels(inner)]


def _autocast(model: nn.Module) -> dict[str, torch.dtype]:
    device_types = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    return {name: torch.get_autocast_dtype(name) for name in sorted(device_types) if torch.is_autocast_enabled(name)}


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back modules' attributes, buffers, gradients and generators of random numbers.

    Values of parameters are not kept, for that takes as much memory as the model: `_values_kept` does it where a
    forward runs on real data.
    """
    modules = list(model.modules())
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    values = [value for _, saved in attributes for value in saved.values()]
    containers = [(value, copy.copy(value)) for value in values if type(value) in (dict, OrderedDict, list, set)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    plain = [value for value in values if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)]
    kept = [*model.buffers(), *plain, *(gradient for _, gradient in gradients if gradient is not None)]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python_generator = random.getstate()
    try:
        with torch.random.fork_rng(devices), _values_kept(kept):
            yield
    finally:
        random.setstate(python_generator)
        for live, saved in [*attributes, *containers]:
            _put_back(live, saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _put_back(live: Any, saved: Any) -> None:
    """Makes a container hold exactly the objects that it held."""
    if _identities(live) == _identities(saved):
        return
    if isinstance(live, list):
        live[:] = saved
    else:
        live.clear()
        live.update(saved)


def _identities(container: Any) -> list[int]:
    items = chain(*container.items()) if isinstance(container, dict) else container
    return [id(item) for item in items]


@contextmanager
def _values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Puts back the elements of tensors (whose version counters do not tell: batch norm's statistics skip them)."""
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors if tensor.device.type != "meta"]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                if tensor.layout is not torch.strided or not torch.equal(tensor, value):
                    tensor.copy_(value)


@contextmanager
def _silenced() -> Iterator[None]:
    """No logging, warnings or output: a failed method is told by its reason, not by what it prints on the way."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _reason(error: Exception) -> str:
    """One short line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 1] + "…"
