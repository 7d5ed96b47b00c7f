"""Graphs of a forward, by torch.export or by symbolic tracing, and what their operations cost.

A graph is run once under the recorder: on tensors without data, or, where it holds operations whose results' shapes
depend on values, on the values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.func import functional_call

from planner.frontend.answers import Answered, Recorded
from planner.frontend.call import Bound, Call, hookable, leaves_of
from planner.frontend.layers import CostInterpreter, CostRecorder, LayerCost, canonical_path, tensor_bytes
from planner.frontend.unchanged import unchanged, values_kept

Play = Callable[[CostRecorder, Mapping[str, Tensor] | None, Sequence[Tensor]], object]
"""Runs a forward under a recorder, given substitutes for the model's parameters and buffers by name (None: themselves)
and the inputs."""


def by_export(model: nn.Module, call: Call) -> tuple[LayerCost, ...]:
    """Trace by torch.export: the graph holds for all values, and a model that asks for some is refused."""
    return _exported(Bound(model, call), call.tensors(), model)


def by_export_of_one_path(model: nn.Module, call: Call) -> tuple[LayerCost, ...]:
    """Trace by torch.export, with the answers about values that a run on data gave.

    So the graph holds the path that the forward takes with this batch.
    """
    bound, inputs = Bound(model, call), call.tensors()
    with unchanged(model), values_kept(model.parameters()), Recorded() as recorded:
        bound(*_copies(inputs))
    bound.mode = Answered(recorded.answers)
    return _exported(bound, inputs, model)


def _exported(bound: Bound, inputs: Sequence[Tensor], model: nn.Module) -> tuple[LayerCost, ...]:
    program = torch.export.export(bound, tuple(inputs), strict=False)

    def play(recorder: CostRecorder, values: Mapping[str, Tensor] | None, leaves: Sequence[Tensor]) -> None:
        constants = {name: v.clone() if isinstance(v, Tensor) else v for name, v in program.constants.items()}
        rest, known = iter(leaves), {**constants, **(_state(bound) if values is None else values)}
        args = [
            next(rest) if spec.kind is InputKind.USER_INPUT else known[spec.target or ""]
            for spec in program.graph_signature.input_specs
        ]
        with recorder:
            CostInterpreter(program.graph_module, recorder).run(*args)

    return _played(play, bound, inputs, model)


class _BoundTracer(fx.Tracer):
    """A symbolic tracer for `Bound`, with one placeholder for each tensor."""

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


def by_symbolic_trace(model: nn.Module, call: Call) -> tuple[LayerCost, ...]:
    """Trace by torch.fx, whose proxies record the operations on them; torch's own modules stay whole."""
    bound, inputs = Bound(model, call), call.tensors()
    graph = fx.GraphModule(bound, _BoundTracer(len(inputs)).trace(bound))
    # The graph tells in which module its nodes are; what is left to watch is the inside of its module calls.
    called = {canonical_path(str(node.target)) for node in graph.graph.nodes if node.op == "call_module"}

    def play(recorder: CostRecorder, values: Mapping[str, Tensor] | None, leaves: Sequence[Tensor]) -> None:
        state = values and {f"graph.{name}": values[name] for name in _state(graph) if name in values}
        with watched(model, recorder, skip=called):
            _call_with(_Replay(graph, recorder), state, leaves)

    return _played(play, bound, inputs, model)


def by_hooks(model: nn.Module, call: Call) -> tuple[LayerCost, ...]:
    """Trace by a plain call with hooks around every module; there is no graph."""
    bound, inputs = Bound(model, call), call.tensors()

    def play(recorder: CostRecorder, values: Mapping[str, Tensor] | None, leaves: Sequence[Tensor]) -> None:
        with watched(model, recorder), recorder:
            _call_with(bound, values, leaves)

    return _played(play, bound, inputs, model)


def _played(play: Play, bound: Bound, inputs: Sequence[Tensor], model: nn.Module) -> tuple[LayerCost, ...]:
    """Return the costs of a forward: without data if possible, which takes no memory and no time; else on the data."""
    try:
        with unchanged(model), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            recorder = CostRecorder(model)
            values = _stand_ins(mode, bound, recorder)
            play(recorder, values, [_without_data(mode, tensor) for tensor in inputs])
            return recorder.layers()
    except Exception:  # what it does depends on values
        pass
    recorder = CostRecorder(model)
    with values_kept(model.parameters()):
        play(recorder, None, _copies(inputs))
    return recorder.layers()


def _call_with(module: nn.Module, state: Mapping[str, Tensor] | None, inputs: Sequence[Tensor]) -> None:
    if state is None:
        module(*inputs)
    else:
        functional_call(module, dict(state), tuple(inputs))


def _copies(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the same values, for a forward to change."""
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]


def _without_data(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a tensor like this one that takes no memory and shares none."""
    if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        return mode.from_tensor(tensor)
    with mode:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return twin.requires_grad_(tensor.requires_grad)


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers under all their names."""
    return dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))


def _stand_ins(mode: FakeTensorMode, module: nn.Module, recorder: CostRecorder) -> dict[str, Tensor]:
    """Return parameters and buffers without data, by name; `recorder` gets to know what they substitute."""
    made: dict[int, Tensor] = {}
    state = _state(module)
    for tensor in state.values():
        if id(tensor) not in made:
            made[id(tensor)] = _without_data(mode, tensor)
            recorder.stands_for(made[id(tensor)], tensor)
    return {name: made[id(tensor)] for name, tensor in state.items()}


@contextmanager
def watched(model: nn.Module, recorder: CostRecorder, skip: Collection[str] = ()) -> Iterator[None]:
    """Report to the recorder which module runs and the size of its outputs; `skip`: paths that it knows of."""
    outer: list[str] = []

    def enter(path: str, *_: Any) -> None:
        outer.append(recorder.path)
        recorder.path = path

    def leave(path: str, module: nn.Module, args: Any, output: Any) -> None:
        recorder.path = outer.pop()
        recorder.call_bytes[path] = recorder.call_bytes.get(path, 0.0) + tensor_bytes(leaves_of(output))

    with ExitStack() as stack:
        for name, module in hookable(model):
            if (path := canonical_path(name)) not in skip:
                stack.callback(module.register_forward_pre_hook(partial(enter, path)).remove)
                stack.callback(module.register_forward_hook(partial(leave, path), always_call=True).remove)
        yield
