"""The costs of one forward, layer by layer: FLOPs, activation bytes, and the parts of backward.

All tracing methods end here: the model's operations run once, mostly on tensors without data, under `CostRecorder`,
which gives each operation to the layer whose parameters it uses, or else to the module in which it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from planner.documents.profile import Layer
from runtime.plan.names import canonical_name, layer_of

Method = Literal["export", "symbolic_trace", "hooks"]
"""The ways of tracing, best first."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer of the traced step: a module that owns parameters, or one that computes without any (attention)."""

    name: str
    """Canonical path of the module; "" is the model itself."""
    kind: str
    """"conv", "linear", "embedding", "norm", "recurrent", "attention" or "other", from the module's class."""
    flops: float
    """Forward floating-point operations of all its calls in one forward, a multiply-add counted as two. What has no
    matrix product (norms, embeddings, pooling) counts one per element of its output."""
    activation_bytes: float
    """Bytes of the outputs of all its calls."""
    parameters: tuple[str, ...]
    """Canonical names of its parameters, frozen ones too; a shared one belongs to the first layer that uses it."""
    grad_input_flops: float
    """Operations for the gradients of its inputs; 0 where nothing before it needs a gradient."""
    grad_weight_flops: float
    """Operations for the gradients of its weights; 0 where they are frozen."""
    inputs: tuple[str, ...] = ()
    """Names of the layers before it whose outputs it reads, as they are or through operations of no layer."""


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """The layers of a model in the order of their first use, and how they were found."""

    method: Method
    failures: dict[str, str]
    """Methods that failed, with one line of the reason; "hooks" too if not even a plain call succeeded."""
    layers: tuple[LayerCost, ...]
    """Layers that the forward did not use come last, without FLOPs."""


def estimated_grad_weight_share(layers: Sequence[LayerCost]) -> float:
    """Return the share of backward spent on gradients of weights, by FLOPs (0 where there is no backward)."""
    weight = sum(layer.grad_weight_flops for layer in layers)
    whole = weight + sum(layer.grad_input_flops for layer in layers)
    return weight / whole if whole else 0.0


def split_backward(
    layers: Sequence[LayerCost], layer_backward_us: Mapping[str, float], forward_us: float
) -> tuple[Layer, ...]:
    """Return the profile's layers: measured times, divided by FLOPs if only FLOPs can tell.

    A layer without gradients (attention's products) keeps None for backward, because its time was measured as part of
    its neighbours'.

    Args:
        layers: the traced ones.
        layer_backward_us: sum of the gradients' `backward_us` of each layer, as `layer_of` names it.
        forward_us: time of the whole forward.
    """
    all_flops = sum(layer.flops for layer in layers)
    return tuple(
        Layer(
            name=layer.name,
            kind=layer.kind,
            flops=layer.flops,
            activation_bytes=layer.activation_bytes,
            forward_us=forward_us * layer.flops / all_flops if all_flops else None,
            grad_input_us=halves[0],
            grad_weight_us=halves[1],
            parameters=layer.parameters,
            inputs=layer.inputs or None,
        )
        for layer, halves in zip(layers, _backward_halves(layers, layer_backward_us), strict=True)
    )


def _backward_halves(
    layers: Sequence[LayerCost], layer_backward_us: Mapping[str, float]
) -> Iterator[tuple[float | None, float | None]]:
    """Yield (grad_input_us, grad_weight_us) of each layer, whose sum was measured."""
    # A shared parameter keeps the name under which it was registered first, perhaps not in the layer that uses it
    # first. So the time measured under one name is divided, by FLOPs, among all layers that own parameters of it.
    flops = [layer.grad_input_flops + layer.grad_weight_flops for layer in layers]
    homes = [{layer_of(name) for name in layer.parameters} & layer_backward_us.keys() for layer in layers]
    owners = {home: [i for i, mine in enumerate(homes) if home in mine] for home in layer_backward_us}
    totals = {home: sum(flops[i] for i in indices) for home, indices in owners.items()}
    for layer, own_flops, mine in zip(layers, flops, homes, strict=True):
        if not mine:
            yield None, None
            continue
        shares = {home: own_flops / totals[home] if totals[home] else 1 / len(owners[home]) for home in mine}
        time_us = sum(layer_backward_us[home] * share for home, share in shares.items())
        input_us = time_us * layer.grad_input_flops / own_flops if own_flops else 0.0
        yield input_us, time_us - input_us


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors of a nest of lists, tuples and dicts, each once."""
    return list({id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}.values())


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count queries times keys, then weights times values; a causal mask saves nothing here."""
    return 2 * query.numel() * key.shape[-2] + 2 * query.numel() // query.shape[-1] * key.shape[-2] * value.shape[-1]


def _recurrent_flops(x: Tensor, *args: Any, **_: Any) -> int:
    """Count one product of every weight matrix with every element of every sequence."""
    return 2 * x.numel() // x.shape[-1] * sum(w.numel() for w in tensors_in(args[:2]) if w.dim() == 2)


def _grouped_flops(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight.shape[-1]


FORMULAS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "aten._scaled_dot_product_fused_attention_overrideable": _attention_flops,
    "aten.mkldnn_rnn_layer": _recurrent_flops,
    "aten._cudnn_rnn": _recurrent_flops,
    "aten.miopen_rnn": _recurrent_flops,
    "aten._grouped_mm": _grouped_flops,
}
"""FLOPs of the operations that torch's own registry lacks, by name."""


def _multiplied(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the operands of a matrix product, without the bias."""
    if op in ("aten.addmm", "aten.baddbmm"):
        return tensors_in(args[1:3])
    if "_rnn" in op or "attention" in op:
        return tensors_in(args[:3])
    return tensors_in(args[:2])


_BUFFER = 0
"""Identity of any buffer, in place of a parameter's."""


@dataclass
class _Tally:
    """Running sums of one layer, each [forward, grad_input, grad_weight] FLOPs."""

    place: int
    """Number of layers that were used before it."""
    products: NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    elementwise: NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    """A sum of its own, dropped if there are products: whether a bias is added by its own operation depends on
    strides."""
    inputs: dict[str, None] = field(default_factory=dict)
    output_bytes: float = 0.0
    attention: bool = False


class CostRecorder(TorchDispatchMode):
    """Adds up the operations that run inside it, by layer.

    Which gradients are needed is read off `requires_grad`, so autograd must be on.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = ""
        """Canonical path of the module that runs now."""
        self.call_bytes: dict[str, float] = {}
        """Bytes of the outputs of every module's calls, filled by the hooks or the interpreter."""
        self._modules = {canonical_path(name): module for name, module in model.named_modules(remove_duplicate=False)}
        self._names: dict[int, list[str]] = {}
        self._spans: dict[int, list[tuple[float, float, int]]] = {}
        self._alive: list[object] = []
        self._first_layer: dict[int, str] = {}
        self._tallies: dict[str, _Tally] = {}
        self._sources = WeakKeyDictionary[torch.UntypedStorage, dict[str, None]]()
        """Layers that the values of each storage come from."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(canonical_name(name))
            self.stands_for(parameter, parameter)
        for buffer in model.buffers():
            self.stands_for(buffer, buffer)

    def stands_for(self, tensor: Tensor, original: Tensor) -> None:
        """Count every use of `tensor` as one of `original`, a parameter or buffer of the model."""
        owner = id(original) if id(original) in self._names else _BUFFER
        # Indices are data, not part of the weights, wherever they are kept.
        if owner != _BUFFER or tensor.is_floating_point():
            # Parameters may be pieces of one flat storage (recurrent weights on CUDA): their offsets tell them apart.
            start = 0 if tensor.layout is not torch.strided else int(tensor.storage_offset())
            self._own(tensor, owner, start, start + max(1, int(tensor.numel())))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        op = getattr(func, "_overloadpacket", func)
        if not str(op).startswith("prim.") and torch._C._current_graph_task_id() == -1:  # not within a backward
            self._record(op, args, kwargs, result)
        return result

    def _record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        inputs = tensors_in((args, kwargs))
        roles = [self._owner(value) for value in inputs]
        owners = [role for role in roles if role]
        formula = FORMULAS.get(str(op)) or flop_registry.get(op)
        if formula is not None:
            flops = float(formula(*args, **kwargs, out_val=result))
            self._add_product(str(op), flops, args, owners, result)
        elif roles and None not in roles:  # a weight is made ready: transposed, cast, normalized
            for value in tensors_in(result):
                if self._owner(value) is None:
                    self._own(value, owners[0] if owners else _BUFFER, 0, inf)
        elif owners or "pool" in str(op):
            flops = float(sum(value.numel() for value in tensors_in(result)[:1]))
            needed = [role for value, role in zip(inputs, roles, strict=True) if value.requires_grad]
            self._use(owners, inputs, result).elementwise += flops, flops * (None in needed), flops * any(needed)
        else:
            self._write(result, self._read(inputs))

    def _add_product(self, op: str, flops: float, args: tuple[Any, ...], owners: list[int], result: Any) -> None:
        operands = _multiplied(op, args)
        inputs = [value for value in operands if self._owner(value) is None]
        weights = [value for value in operands if self._owner(value) is not None]
        # Each operand's gradient is one more product of the same size; attention's two products have three operands.
        grad_input = flops * min(2, sum(value.requires_grad for value in inputs))
        grad_weight = flops * any(value.requires_grad for value in weights)
        tally = self._use(owners, tensors_in(args), result)
        tally.attention |= "attention" in op
        tally.products += flops, grad_input, grad_weight

    def _use(self, owners: list[int], inputs: list[Tensor], result: Any) -> _Tally:
        """Return the tally of the layer that an operation on these parameters belongs to."""
        homes = []
        for owner in owners:
            layers = [layer_of(name) for name in self._names[owner]]
            homes.append(self.path if self.path in layers else layers[0])
            self._first_layer.setdefault(owner, homes[-1])
        layer = self.path if self.path in homes or not homes else homes[-1]
        tally = self._tallies.setdefault(layer, _Tally(len(self._tallies)))
        later: dict[str, None] = {}  # layers behind one that is called again, which whoever reads its output reads, too
        for name in self._read(inputs):
            (tally.inputs if self._tallies[name].place < tally.place else later)[name] = None
        self._write(result, {layer: None, **later})
        tally.output_bytes += tensor_bytes(tensors_in(result)[:1])
        return tally

    def _read(self, values: Sequence[Tensor]) -> dict[str, None]:
        """Return the layers that values come from."""
        found = (self._sources.get(storage, {}) for value in values if (storage := _storage(value)) is not None)
        return {name: None for sources in found for name in sources}

    def _write(self, values: Any, sources: dict[str, None]) -> None:
        """Note the layers that values come from."""
        for value in tensors_in(values):
            if (storage := _storage(value)) is not None:
                self._sources[storage] = sources

    def _own(self, tensor: Tensor, owner: int, start: float, end: float) -> None:
        if (storage := _storage(tensor)) is not None:
            self._spans.setdefault(storage._cdata, []).append((start, end, owner))
            self._alive.append(storage)  # its address must not be reused while it is a key here

    def _owner(self, tensor: Tensor) -> int | None:
        """Return the parameter (or `_BUFFER`) that `tensor` is, is a view of, or is computed from alone."""
        storage = _storage(tensor)
        spans = self._spans.get(storage._cdata, ()) if storage is not None else ()
        offset = tensor.storage_offset() if spans and tensor.layout is torch.strided else 0
        return next((owner for start, end, owner in spans if start <= offset < end), None)

    def layers(self) -> tuple[LayerCost, ...]:
        """Return every layer that has run, in order, then those that have not."""
        owned: dict[str, list[str]] = {}
        for owner, names in self._names.items():
            owned.setdefault(self._first_layer.get(owner, layer_of(names[0])), []).append(names[0])
        return tuple(self._cost(name, tuple(owned.get(name, ()))) for name in dict.fromkeys([*self._tallies, *owned]))

    def _cost(self, name: str, parameters: tuple[str, ...]) -> LayerCost:
        tally = self._tallies.get(name, _Tally(0))
        flops, grad_input, grad_weight = (tally.products if tally.products[0] else tally.elementwise).tolist()
        kind = _kind(self._modules.get(name.partition(".parametrizations.")[0]))
        return LayerCost(
            name=name,
            kind="attention" if kind == "other" and tally.attention else kind,
            flops=flops,
            activation_bytes=self.call_bytes.get(name, tally.output_bytes),
            parameters=parameters,
            grad_input_flops=grad_input,
            grad_weight_flops=grad_weight,
            inputs=tuple(tally.inputs),
        )


_ASSERTIONS = ("aten._assert", "aten.sym_constrain_range")
"""Checks of values in an exported graph; random values may differ in this run."""


class CostInterpreter(fx.Interpreter):
    """Runs a graph node by node, telling the recorder which module each node came from."""

    def __init__(self, graph: fx.GraphModule, recorder: CostRecorder) -> None:
        super().__init__(graph)
        self._recorder = recorder
        self._node_bytes: dict[fx.Node, float] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, and report the bytes of every module's outputs to the recorder."""
        result = super().run(*args, **kwargs)
        for node, size_bytes in self._node_bytes.items():
            users = [_calls(user) for user in node.users]
            for call, path in _calls(node).items():
                if any(call not in user for user in users):  # the value leaves the module
                    self._recorder.call_bytes[path] = self._recorder.call_bytes.get(path, 0.0) + size_bytes
        return result

    def run_node(self, node: fx.Node) -> Any:
        """Run one node as the innermost module that it came from."""
        if calls := _calls(node):
            with running(self._recorder, [*calls.values()][-1]):
                result = super().run_node(node)
            self._node_bytes[node] = tensor_bytes(tensors_in(result))
            return result
        return super().run_node(node)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter the regions that export makes of `torch.no_grad()` and `torch.autocast()`; asserts nothing."""
        if str(target).startswith(_ASSERTIONS):
            return None
        if str(target) in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            args = tuple(CostInterpreter(a, self._recorder).run if isinstance(a, fx.GraphModule) else a for a in args)
        return super().call_function(target, args, kwargs)


@contextmanager
def running(recorder: CostRecorder, path: str) -> Iterator[None]:
    """Give the operations inside to the module `path`."""
    outer, recorder.path = recorder.path, path
    try:
        yield
    finally:
        recorder.path = outer


def canonical_path(path: str) -> str:
    """Return a module's path without the names of wrappers; "" for the model itself."""
    return canonical_name(path + ".").removesuffix(".")


def tensor_bytes(tensors: Sequence[Tensor]) -> float:
    """Return the bytes of the elements of all `tensors`."""
    return float(sum(value.numel() * value.element_size() for value in tensors))


def _calls(node: fx.Node) -> dict[str, str]:
    """Return the module calls around a node, outermost first: a key for each call → the module's canonical path."""
    stack = node.meta.get("nn_module_stack") or {}
    return {key: canonical_path(path) for key, (path, _) in stack.items() if path}


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage of their own
        return None


_KIND_BY_PACKAGE = {
    "torch.nn.modules.conv": "conv",
    "torch.nn.modules.linear": "linear",
    "torch.nn.modules.sparse": "embedding",
    "torch.nn.modules.batchnorm": "norm",
    "torch.nn.modules.instancenorm": "norm",
    "torch.nn.modules.normalization": "norm",
    "torch.nn.modules.rnn": "recurrent",
}
_KIND_BY_NAME = {
    "attention": "attention",
    "embed": "embedding",
    "norm": "norm",
    "linear": "linear",
    "conv1d": "linear",  # not torch's own, which its package has told: the transposed linear layer of GPT-2
    "conv": "conv",
    "lstm": "recurrent",
    "gru": "recurrent",
}


def _kind(module: nn.Module | None) -> str:
    for base in type(module).__mro__:
        if base.__module__ in _KIND_BY_PACKAGE:
            return _KIND_BY_PACKAGE[base.__module__]
    name = type(module).__name__.lower()
    return next((kind for part, kind in _KIND_BY_NAME.items() if part in name), "other")
