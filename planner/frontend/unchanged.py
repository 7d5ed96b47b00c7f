"""Leaves a model as it was found, whatever tracing ran on it."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from runtime.monitor.preserve import put_back


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore modules' attributes, buffers, gradients and generators of random numbers on leaving.

    Values of parameters are not kept, since that takes as much memory as the model: `values_kept` does it if a forward
    runs on real data.
    """
    modules = list(model.modules())
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    values = [value for _, saved in attributes for value in saved.values()]
    containers = [(value, copy.copy(value)) for value in values if type(value) in (dict, OrderedDict, list, set)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    plain = [value for value in values if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)]
    kept = [*model.buffers(), *plain, *(gradient for _, gradient in gradients if gradient is not None)]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python_generator, numpy_generator = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices), values_kept(kept):
            yield
    finally:
        random.setstate(python_generator)
        np.random.set_state(numpy_generator)
        for live, saved in [*attributes, *containers]:
            put_back(live, saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the elements of tensors on leaving (batch norm's statistics skip version counters)."""
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors if tensor.device.type != "meta"]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                if tensor.layout is not torch.strided or not torch.equal(tensor, value):
                    tensor.copy_(value)
