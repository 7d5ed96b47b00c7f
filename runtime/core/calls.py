"""`model.forward(x)` is `model(x)` while a model is attached: only that runs hooks."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from runtime.torch_compat import may_have_methods


class DirectForward:
    """Lets a call of the model's `forward` from outside of one go through the model itself, as with DDP's `forward`.

    A method in place of the model's own does that. Copies of the model, and what is loaded of one that was saved whole,
    call their own; so does the method after `remove`, where a library has put something around it. Scripts and modules
    that save themselves in ways of their own (`torch.fx.GraphModule`) are left as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: Any = None
        self._method: MethodType | None = None
        self.running = 0
        """Number of calls of the model that are running, one inside the other."""

    def install(self) -> None:
        """Put the method there, or around what has taken its place since."""
        before = self._model.__dict__.get("forward")
        if may_have_methods(self._model) and (self._method is None or before is not self._method):
            self._before = before
            function = _redirect(self._model, weakref.ref(self), before)
            self._method = self._model.__dict__["forward"] = MethodType(function, self._model)

    def remove(self) -> None:
        """Put the model's own method back, unless another one has taken the place."""
        method, self._method = self._method, None
        if method is None or self._model.__dict__.get("forward") is not method:
            return
        if self._before is None:
            del self._model.__dict__["forward"]
        else:
            self._model.__dict__["forward"] = self._before

    def redirects(self, model: nn.Module) -> bool:
        return model is self._model and self._method is not None and not self.running


def _redirect(model: nn.Module, here: weakref.ref[DirectForward], before: Any) -> Callable[..., Any]:
    """Return the method, as a function. `before`: what was among the model's attributes, in place of its class's."""
    plain, bound = model.forward, isinstance(before, MethodType) and before.__self__ is model
    function = getattr(plain, "__func__", None)

    # What is in __dict__ may say of a function that it is compiled. Code of another name than `forward` torch leaves as
    # it is, also of its own modules.
    @functools.wraps(function or plain, updated=())
    def redirected(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        direct = here()
        if direct is not None and direct.redirects(self):
            direct.running += 1  # also where a script has taken all hooks off
            try:
                return self(*arguments, **keywords)
            finally:
                direct.running -= 1
        if before is None:
            return type(self).forward(self, *arguments, **keywords)
        return before.__func__(self, *arguments, **keywords) if bound else before(*arguments, **keywords)

    redirected.__name__ = "forward"  # by which a method is saved
    if function is None:  # and has no `self`
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(plain)
        redirected.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    return redirected
