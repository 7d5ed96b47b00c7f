"""Hooks that are run after the user's own, or within them, and whether there are any of the user's."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from runtime.torch_compat import ModuleHook, accumulator_of


class GradientHook:
    """Is called when a gradient has been added to a parameter's `.grad`, after all hooks on the parameter.

    It is on the node of autograd's that adds gradients up, as DDP's is: hooks on the parameter come before it,
    whenever they were registered. The parameter does not keep that node, so it is kept here. Node and hook live as
    long as a graph is kept, so `after` has to hold the session weakly.
    """

    __slots__ = ("_after", "_before", "_handles", "_node", "_parameter")

    def __init__(
        self, parameter: Tensor, after: Callable[[Any, Any], None], before: Callable[[Any], Any] | None = None
    ) -> None:
        """Register the hooks: `after` is called with nothing and a tuple of the gradient, None where a backward
        function gave none; `before` with that tuple when the gradient is about to be added, which may return another
        one to add.
        """
        self._parameter, self._after, self._before = parameter, after, before
        self._register(accumulator_of(parameter))

    def _register(self, node: Any) -> None:
        self._node = node
        self._handles = [node.register_hook(self._after)]
        HookWatch.own += 1
        self.call_before(self._before)

    def call_before(self, before: Callable[[Any], Any] | None) -> None:
        """Call another `before` from now on; None: none."""
        self._before = before
        for handle in self._handles[1:]:
            handle.remove()
        del self._handles[1:]
        if before is not None:
            self._handles.append(self._node.register_prehook(before))
            HookWatch.own += 1

    def renew(self) -> bool:
        """Move to the parameter's node of now; returns whether that is another one."""
        # `parameter.data = …` of another dtype or on another device makes a new one, also where it is changed back.
        node = accumulator_of(self._parameter)
        if node is self._node:
            return False
        self.remove()
        self._register(node)
        return True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def accompanied(self) -> bool:
        """True if a script has hooks on the node: torch keeps all that a program registers there in one dict."""
        return len(self._handles[0].hooks_dict_ref() or ()) > 1


class HookWatch:
    """Tells whether hooks of the user's may look at gradients while a backward runs; a look takes no time without any.

    Hooks on parameters, their nodes and modules are looked for where torch has given out handles that are not ours.
    Hooks on what a forward computes cannot be found, but are registered in every one.
    """

    own = 0
    """Handles that torch has given to sessions while they run."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._given: int | None = None
        self._found = False

    @classmethod
    def on_output(cls, output: Tensor, hook: Callable[[Tensor], None]) -> None:
        output.register_hook(hook)
        cls.own += 1

    def hooks_may_read(self, on_nodes: Iterable[GradientHook]) -> bool:
        """Return, once in each backward, whether there may be hooks of the user's besides the session's `on_nodes`."""
        given = RemovableHandle.next_id - self.own
        news = given != self._given
        if news or self._found:
            self._found = (
                any(one._backward_hooks or one._post_accumulate_grad_hooks for one in self._model.parameters())
                or any(one._backward_hooks or one._backward_pre_hooks for one in self._model.modules())
                or any(one.accompanied for one in on_nodes)
            )
        self._given = given
        return self._found or news


class ModulePreHook:
    """Is called before the forward of modules that it is put on, first of all their hooks: for some of a step's time,
    so that at others modules have none of ours, with which torch computes some of them otherwise, or not compiled.
    """

    def __init__(self, call: Callable[[nn.Module, Any], None]) -> None:
        self._hook, self._key = ModuleHook(call), RemovableHandle(OrderedDict()).id
        HookWatch.own += 1

    def put_on(self, module: nn.Module) -> None:
        hooks: Any = module._forward_pre_hooks  # an ordered dict
        hooks[self._key] = self._hook
        hooks.move_to_end(self._key, last=False)

    def take_off(self, module: nn.Module) -> None:
        module._forward_pre_hooks.pop(self._key, None)


class UpdateHooks:
    """Are called right before and right after the update of one of a model's optimizers: all hooks of the user's on the
    step, whenever they were registered, run outside of them, as they do if the step is neither sharded nor delayed.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], begin: Callable[[Optimizer], None], before: Callable[..., Any],
        after: Callable[..., Any],
    ) -> None:  # fmt: skip
        """Register the hooks: `before` and `after` are torch's pre- and post-hooks of the step; `begin` is called
        before all hooks on it, also where a derived class's step calls its base class's, which has hooks, too; and,
        with that one, when a step of another optimizer than these begins.
        """
        self._begin = begin
        self._handles = {
            id(one): (one.register_step_pre_hook(before), one.register_step_post_hook(after)) for one in optimizers
        }
        _update_hooks.add(self)
        _watch_updates()

    def step_begins(self, optimizer: Optimizer) -> None:
        """Become the last pre-hook and the first post-hook of this optimizer's step, which goes through neither yet."""
        for handle, last in zip(self._handles.get(id(optimizer), ()), (True, False), strict=False):
            hooks: Any = handle.hooks_dict_ref()  # an ordered dict
            hooks.move_to_end(handle.id, last=last)
        self._begin(optimizer)

    def remove(self) -> None:
        _update_hooks.discard(self)
        for handle in chain.from_iterable(self._handles.values()):
            handle.remove()


_update_hooks: weakref.WeakSet[UpdateHooks] = weakref.WeakSet()


@functools.cache
def _watch_updates() -> None:
    """Register, once in a process, a hook on all optimizers, which torch calls before it looks at those of one."""

    def before_any_step(optimizer: Optimizer, *_: Any) -> None:
        for hooks in list(_update_hooks):
            hooks.step_begins(optimizer)

    register_optimizer_step_pre_hook(before_any_step)
