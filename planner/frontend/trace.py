"""Traces one forward of a model: torch.export, then torch.fx's symbolic trace, then module hooks around a plain call.

Nothing of the model is changed, and where possible nothing is computed: parameters and batch are replaced by tensors
without data.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import cast

import torch
from torch import nn
from torch.distributions import Distribution

from planner.frontend.call import Call, first_call, goes_on, levels
from planner.frontend.graphs import by_export, by_export_of_one_path, by_hooks, by_symbolic_trace
from planner.frontend.layers import CostRecorder, LayerCost, Method, TracedModel
from planner.frontend.unchanged import unchanged, values_kept
from runtime.checks.plan import trainable_parameters

__all__ = ["TracedModel", "trace"]

_REASON_CHARS = 200

_METHODS: dict[str, Callable[[nn.Module, Call], tuple[LayerCost, ...]]] = {
    "export": by_export,
    "export of one path": by_export_of_one_path,
    "symbolic_trace": by_symbolic_trace,
    "hooks": by_hooks,
}
"""Ways of tracing by name, best first; the first word is the method."""


def trace(model: nn.Module, run_forward: Callable[[], object]) -> TracedModel:
    """Find the layers of `model` and what its first call in `run_forward` costs.

    Where that call leaves trainable parameters idle and the step goes on to further calls, or where the step calls
    parts of the model and not the model, the step's whole forward is traced instead.

    Parameters, buffers, `.grad`, modules' attributes (and the lists and dicts that are attributes), hooks, training
    flags and the generators of random numbers are left as found. `run_forward` is cut short at the model's first call;
    where its whole forward is traced, at the loss's `backward()`.

    The model is in the mode (train or eval) in which it is to be traced, and may be compiled or wrapped in DDP.

    Raises Exception: whatever `run_forward` raises before it calls the model. Once the model has been called, nothing:
    methods that fail are named in the result, and the last resort is a list of layers without FLOPs.
    """
    with unchanged(model), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        inner = levels(model)[-1]
        call = first_call(model, run_forward)
        result = _trace_call(inner, call)
        if call.step is None and _idle(inner, result) and _goes_on(model, run_forward):
            whole = _trace_call(inner, Call(step=run_forward))
            fewer = len(_idle(inner, whole)) < len(_idle(inner, result))
            if fewer and (whole.method != "hooks" or result.method == "hooks"):
                return whole
        return result


def _trace_call(model: nn.Module, call: Call) -> TracedModel:
    """Trace a call by the first method that succeeds."""
    failures: dict[str, str] = {}
    for name, tracer in _METHODS.items():
        try:
            # Each method finds the model as it was, whatever the one before has left in its attributes.
            with unchanged(model), torch.enable_grad(), call.context(), _silenced():
                layers = tracer(model, call)
        except Exception as error:
            if name != "export of one path" or _reason(error) != failures.get("export"):
                failures[name] = _reason(error)  # where values were not what export lacked, it fails as before
            continue
        if name == "export of one path" and "export" in failures:
            failures = {"export of all paths": failures["export"]}  # export itself has not failed
        return TracedModel(method=cast(Method, name.partition(" ")[0]), failures=failures, layers=layers)
    return TracedModel(method="hooks", failures=failures, layers=CostRecorder(model).layers())


def _idle(model: nn.Module, result: TracedModel) -> set[str]:
    """Return trainable parameters that the traced call did not train."""
    trained = {name for layer in result.layers if layer.grad_weight_flops for name in layer.parameters}
    return set(trainable_parameters(model)) - trained


def _goes_on(model: nn.Module, run_forward: Callable[[], object]) -> bool:
    """Return whether the step calls the model again after its first call; a step that fails does not."""
    try:
        with unchanged(model), values_kept(model.parameters()), _silenced():
            return goes_on(model, run_forward)
    except Exception:
        return False


@contextmanager
def _silenced() -> Iterator[None]:
    """Suppress logging, warnings and output: a failed method is reported by its reason."""
    level, checking = logging.root.manager.disable, getattr(Distribution, "_validate_args", __debug__)
    logging.disable(logging.CRITICAL)
    # Distributions look at their parameters' values when they are made, which tracing without data cannot.
    Distribution.set_default_validate_args(False)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        Distribution.set_default_validate_args(checking)
        logging.disable(level)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 1] + "…"
