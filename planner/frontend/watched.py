"""Hooks that tell the recorder which module runs: around a plain call, and inside the module calls of a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from planner.frontend.call import hookable, leaves_of
from planner.frontend.layers import CostRecorder, canonical_path, tensor_bytes


@contextmanager
def watched(model: nn.Module, recorder: CostRecorder, skip: Collection[str] = ()) -> Iterator[None]:
    """Tells the recorder which module runs and how large its outputs are; `skip` holds paths that it knows of."""
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
