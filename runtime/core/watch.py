"""Notices what changed about an attached model that its plan cannot bear: parameters that came later, other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NoReturn

from torch import Tensor, nn

from runtime.core.buckets import BucketBuffer
from runtime.core.members import ignored_ids
from runtime.errors import InputError
from runtime.plan.names import canonical_name, shorten
from runtime.torch_compat import is_wrapped, running_ddp

HINT = "call session.detach(), profile the model again as it is now, and attach with the new plan"
THAW_HINT = (
    "attach without a plan (planner.attach(model, optimizer), PlannerStrategy()), which takes thawed parameters in, or "
    "let them be trainable at attach and freeze them behind it"
)


class Tables:
    """The tables in which modules keep parameters, or buffers, and submodules: a look at whether a member has changed
    takes some microseconds for a ResNet, where a walk through the model takes many times as long.
    """

    def __init__(self, modules: Iterable[nn.Module], kind: str) -> None:
        """`kind`: `_parameters` or `_buffers`."""
        tables = [table for module in modules for table in (getattr(module, kind), module._modules)]
        self._empty = [table for table in tables if not table]
        self._values = [table.values() for table in tables if table]
        self._members = list(chain.from_iterable(self._values))

    def unchanged(self) -> bool:
        return (
            sum(map(len, self._values)) == len(self._members)
            and all(map(is_, chain.from_iterable(self._values), self._members))
            and not any(self._empty)
        )


class ModelWatch:
    """Refuses parameters that became trainable after attach, unless the session takes them in: each rank would train
    them alone, without a word.

    Parameters that were frozen or taken off since are borne like unused ones. Called at every training forward, so
    it looks only at the modules' tables; a walk through the model follows where one of them has changed.
    """

    def __init__(
        self, model: nn.Module, trainable: Mapping[str, nn.Parameter], take_in: Callable[[Sequence[str]], bool]
    ) -> None:
        """`take_in`: called with the names of parameters that train now and did not at attach; returns whether they are
        in `trainable` from then on.
        """
        self._model, self._known, self._take_in = model, trainable, take_in
        self._ignored = ignored_ids(model)
        self._frozen_then = [p for p in model.parameters() if not p.requires_grad]
        self._remember()

    def check(self) -> None:
        """Raise InputError where the model has trainable parameters that it had not when it was attached."""
        outer = running_ddp()
        if outer is not None and any(module is self._model for module in outer.modules()):
            raise InputError(
                f"the model is attached and called inside a {type(outer).__name__}, which exchanges its gradients a "
                f"second time; expected one of the two: call the bare model, or session.detach() before wrapping it"
            )
        if self._unchanged():
            return
        self._refuse_newcomers()
        # Plain tensors stand in for parameters inside `torch.func.functional_call`: to be forgotten at once.
        if all(isinstance(parameter, nn.Parameter) for parameter in self._model.parameters()):
            self._remember()

    @property
    def _known_ids(self) -> set[int]:
        return set(map(id, self._known.values()))

    def _remember(self) -> None:
        self._tables = Tables(self._model.modules(), "_parameters")
        passed = self._known_ids | self._ignored
        self._frozen = [p for p in self._model.parameters() if not p.requires_grad and id(p) not in passed]

    def _unchanged(self) -> bool:
        # A loop, which costs less than a generator: this runs before every forward.
        for parameter in self._frozen:
            if parameter.requires_grad:
                return False
        return self._tables.unchanged()

    def _refuse_newcomers(self) -> None:
        wrapper = is_wrapped(self._model)
        if wrapper is not None:
            raise InputError(
                f"the model was wrapped in {wrapper} after attach, which exchanges gradients itself; expected the "
                f"plain module: drop the wrapper, or call session.detach() first"
            )
        reasons, names, thawed = [], list[str](), True
        passed = self._known_ids | self._ignored
        for name, parameter in self._model.named_parameters():
            known = id(parameter) in passed or not isinstance(parameter, nn.Parameter)
            if parameter.requires_grad and not known:
                short = canonical_name(name)
                names.append(short)
                why = "replaced by another parameter" if short in self._known else "new"
                if any(parameter is one for one in self._frozen_then):
                    why = "frozen then, requires_grad now"
                else:
                    thawed = False
                reasons.append(f"{short} ({why})")
        if reasons and not (thawed and self._take_in(names)):
            raise InputError(
                f"parameters are trainable now that were not when the model was attached: {shorten(reasons)}; no "
                f"bucket of the plan holds them, each rank would train them alone; {THAW_HINT if thawed else HINT}"
            )


def refuse_unplanned(name: str, _nothing: Any, gradients: tuple[Tensor | None]) -> None:
    """Refuse a gradient of a trainable parameter that the plan leaves out because it got none when it was profiled."""
    if gradients[0] is None:
        return  # a backward function gave None for it
    raise InputError(
        f"{name} got a gradient, but the plan does not hold it: it got none when the model was profiled; profile "
        f"again with a step that uses it"
    )


def raise_failed_move(error: RuntimeError, bucket: BucketBuffer) -> NoReturn:
    """Raise what explains that gradients could not be moved into their bucket: InputError where a parameter has another
    dtype, device or shape than at attach, or a gradient is sparse; else the error itself.
    """
    for slot in bucket.slots:
        found, then = _form(slot.parameter), _form(slot.view)
        if found != then:
            raise InputError(
                f"{slot.name} is {found} now and was {then} when the model was attached (model.half() or "
                f"model.to(...) does that); expected it unchanged: convert the model before attach; now {HINT}"
            ) from error
        if slot.parameter.grad_dtype != slot.view.dtype:
            raise InputError(
                f"{slot.name} has the grad_dtype {slot.parameter.grad_dtype} now; expected {slot.view.dtype}, that of "
                f"the parameter, as when the model was attached: leave grad_dtype as it is"
            ) from error
    if "sparse" in str(error).lower():
        raise InputError(
            f"{bucket.label}: a gradient is sparse (functional.embedding with sparse=True makes such); expected dense "
            f"ones: leave sparse=True out"
        ) from error
    raise error


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
