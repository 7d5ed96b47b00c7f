"""The life of one training step.

    backward begins      ─▶ ask autograd for a callback at the end of this backward
    each gradient ready  ─▶ scale it into its bucket; buckets whose gradients are all there leave in plan order
    end of backward      ─▶ fill in what no backward produced, send the rest, wait; `.grad` is the average

Which backwards are steps is decided here, and what becomes of one that an exception ends; what is done with gradients
is the exchange's affair.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.core.buckets import Slot
from runtime.core.calls import DirectForward
from runtime.core.exchange import Exchange
from runtime.core.hooks import HookWatch
from runtime.core.watch import ModelWatch
from runtime.errors import InputError
from runtime.torch_compat import (
    OUTSIDE,
    ModuleHook,
    current_backward_id,
    hook_after_forward,
    hook_before_forward,
    queue_backward_callback,
    tree_leaves,
)


class BackwardTracker:
    """Sees forwards and backwards of one model."""

    def __init__(
        self, model: nn.Module, watch: ModelWatch, exchange: Callable[[], Exchange], step_done: Callable[[], None]
    ) -> None:
        """`exchange` gives the one in place now; `step_done` is called at the end of each backward that exchanges."""
        self._model, self._watch, self._exchange, self._step_done = model, watch, exchange, step_done
        self._hooks, self.calls = HookWatch(model), DirectForward(model)
        self.synchronizing = True
        """Whether forwards are now followed by an exchange; False in `no_sync`."""
        self.forced = False
        """Whether backwards exchange now, whatever their forwards decided."""
        self._reached: bool | None = None
        """Whether this backward has reached an output of a forward that exchanges; None: it has reached none."""
        self._returned_leaf: bool | None = None
        """Whether a forward that exchanges has returned leaves since the last backward; None: no forward has."""
        self._declined = False
        """Whether a gradient has come in a backward that does not exchange."""
        self._awaiting_end = False
        self._end: Callable[[], Any] = lambda: None
        self._gone = partial(_gone, weakref.ref(self))

    def install(self) -> list[Any]:
        self.calls.install()
        return [
            hook_before_forward(self._model, ModuleHook(self._before_forward)),
            hook_after_forward(self._model, ModuleHook(self._after_forward)),
            self.calls,
        ]

    def install_exchange(self, exchange: Exchange) -> None:
        """Hook the parameters: their gradients go to this exchange, when a step is on."""
        exchange.install(self._on_first_grad, self._on_duplicate_grad, self._hooks.hooks_may_read)

    # One step, in the order in which it happens.

    def _before_forward(self, _module: nn.Module, _arguments: Any) -> None:
        self.calls.running += 1
        if self._exchange().slots and torch.is_grad_enabled():  # alone, nothing is missed
            self._watch.check()
        self.forget_abandoned()
        if torch.is_grad_enabled() and current_backward_id() == OUTSIDE:
            self._exchange().carried.read_scale()

    def _after_forward(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        """See the outermost backward begin, also where a reentrant checkpoint runs backwards inside it. A forward that
        raised has no output.
        """
        self.calls.running = max(0, self.calls.running - 1)
        if torch.is_grad_enabled():
            reached = partial(self._backward_reaches_output, self.synchronizing)
            for tensor in tree_leaves(output):
                if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                    continue
                # A leaf, such as a parameter that is returned, outlives the graph, and so would a hook on it.
                if tensor.is_leaf:
                    self._returned_leaf = self._returned_leaf or self.synchronizing
                else:
                    HookWatch.on_output(tensor, reached)

    def _backward_reaches_output(self, synchronizing: bool, _gradient: Tensor) -> None:
        # Whether this backward reaches parameters is not known yet: `torch.autograd.grad` does not.
        if self._abandoned():
            self._forget_backward()
        self._reached = self._reached or synchronizing
        if not self._awaiting_end:
            self._exchange().begin_backward()
        self._await_end()

    def _on_first_grad(self) -> bool:
        """Begin a step, if this backward, whose first gradient is here, exchanges.

        As with DDP the forward decides: one outside of `no_sync` is enough. If none was seen, the backward does; so it
        does where it is `forced`.
        """
        seen = self._reached is not None or self._returned_leaf is not None
        if not (self.forced or (self._reached or self._returned_leaf if seen else self.synchronizing)):
            if not self._declined:
                self._declined = True
                self._await_end()
            return False
        if not seen:  # no forward of the model itself
            self._watch.check()
        self._exchange().begin()
        self._await_end()
        return True

    def _await_end(self) -> None:
        """Ask for a callback at the end of this backward, once."""
        if self._awaiting_end and not self._abandoned():
            return
        self._awaiting_end = True
        callback = partial(self._end_of_backward)
        self._end = weakref.ref(callback, self._gone)
        queue_backward_callback(callback)

    def _abandoned(self) -> bool:
        """Tell whether an exception ended the backward whose end is awaited: its callback is gone and has not run."""
        return self._awaiting_end and self._end() is None

    def callback_gone(self) -> None:
        """Tell other ranks at once where an exception ended the backward: its callback is gone, and has not run."""
        if self._awaiting_end and self._exchange().open:
            with contextlib.suppress(Exception):  # the next forward comes here again, and raises it
                self._exchange().give_up()

    def _forget_backward(self) -> bool:
        """Forget one that an exception ended; return whether micro-batches before it still count."""
        self._awaiting_end = self._declined = False
        self._reached = self._returned_leaf = None
        return self._exchange().abort_backward()

    def forget_abandoned(self) -> None:
        """Forget, outside of backward, one that an exception ended; its messages are waited for."""
        weights = self._exchange().launcher.rank_weights
        begun = self._exchange().open or self._awaiting_end or (weights is not None and weights.factor is not None)
        if begun and current_backward_id() == OUTSIDE and not self._forget_backward():
            self._exchange().clear_used()

    def _on_duplicate_grad(self, slot: Slot) -> None:
        """Raise InputError for a gradient that is here already, unless it was an abandoned backward's."""
        if not self._abandoned():
            raise InputError(
                f"the gradient of {slot.name} became ready twice in one backward; expected once: reentrant activation "
                f"checkpointing of a shared parameter does that (DDP takes it with static_graph=True alone), use "
                f"checkpoint(..., use_reentrant=False)"
            )
        self._forget_backward()
        self._exchange().gradient_ready(slot)

    def _end_of_backward(self) -> None:
        self._awaiting_end = False
        reached, self._reached = self._reached, None
        if self._declined and not self._exchange().open:
            self._exchange().accumulated()
        if self._exchange().open or self._declined:  # gradients have come: `torch.autograd.grad` brings none
            self._returned_leaf, self._declined = None, False
        alone = not self._exchange().slots  # one rank only reports
        if self._exchange().open or (alone and (reached or (self.forced and reached is not None))):
            self._exchange().finish()
            self._step_done()


def _gone(tracker: weakref.ref[BackwardTracker], _callback: Any) -> None:
    # A weak reference: what autograd holds must keep no session.
    here = tracker()
    if here is not None:
        here.callback_gone()
