"""Tensors of which each rank holds a part alone: the `.grad` of a parameter whose gradient ranks share, its average,
and what the optimizer keeps by element.

Operations of scripts on gradients between backward and step work as before if they can be done by parts: scaling and
clamping in place, zeroing, a GradScaler's check, and norms, which ranks add up (so `clip_grad_norm_` is right).
Whatever else would look at numbers that this rank does not have is refused by name; the tensor itself holds NaN, so
that what comes here by another way cannot go unnoticed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.world import World
from runtime.errors import InputError
from runtime.torch_compat import is_tracing

IN_PLACE = frozenset((
    "mul_", "multiply_", "div_", "divide_", "true_divide_", "clamp_", "clip_", "clamp_min_", "clamp_max_", "neg_",
    "nan_to_num_", "zero_", "fill_", "constant_",
))  # fmt: skip
"""Element by element, with numbers."""
FOREACH_IN_PLACE = frozenset((
    "_foreach_mul_", "_foreach_div_", "_foreach_clamp_min_", "_foreach_clamp_max_", "_foreach_neg_", "_foreach_zero_",
))  # fmt: skip
SHAPES = frozenset((
    "__len__", "__hash__", "__repr__", "__str__", "_is_view", "_is_zerotensor", "detach", "detach_", "dim",
    "element_size", "empty_like", "full_like", "get_device", "is_complex", "is_conj", "is_contiguous",
    "is_floating_point", "is_inference", "is_neg", "ndimension", "nelement", "new_empty", "new_full", "new_ones",
    "new_zeros", "numel", "ones_like", "requires_grad_", "size", "storage_offset", "stride", "type", "zeros_like",
))  # fmt: skip
"""Functions that do not read the numbers."""
CONVERSIONS = frozenset(("cpu", "cuda", "to"))
"""Conversions that return the tensor itself if there is nothing to convert."""
COPIES = frozenset(("__deepcopy__", "clone"))
MEMORY = frozenset(("data_ptr", "untyped_storage"))
"""Functions that lead to numbers; `torch.compile` calls them, and `SHAPES`, for a parameter whose forward it traces."""
PARTS_OF_NUMBERS = frozenset(("H", "T", "imag", "mH", "mT", "real"))
"""Attributes that are tensors of them; `data` is the gradient itself here."""
NORMS = frozenset(("linalg_vector_norm", "norm", "_foreach_norm"))
SCALER = "_amp_foreach_non_finite_check_and_unscale_"


class Owned(Protocol):
    """The owner of sharded gradients."""

    world: World

    def part(self, index: int) -> Tensor:
        """Return this rank's part of a gradient, by its place in the plan; 1-D."""
        ...

    def local_share(self, index: int) -> Tensor | None:
        """Return a gradient that, averaged with the other ranks' ones, is the average again; None after zeroing."""
        ...

    def norms(self, order: float) -> Tensor:
        """Return norms of every whole gradient, float64; all ranks must call this."""
        ...


class PartialTensor(Tensor):
    """Shape, dtype and device of a whole tensor, without its memory."""

    whose: str
    """Name of the tensor, as in "found … on …"."""
    place: int
    """Place of its parameter in the plan."""
    zeroed: bool
    expected = ""
    """Supported operations, as text of an error."""

    @classmethod
    def _of(cls, like: Tensor, dtype: torch.dtype, whose: str, place: int) -> Self:
        nothing = torch.full(
            (), math.nan if dtype.is_floating_point or dtype.is_complex else 0, dtype=dtype, device=like.device
        )
        made = nothing.expand(like.shape).as_subclass(cls)
        made.whose, made.place, made.zeroed = whose, place, False
        return made

    @property
    def part(self) -> Tensor:
        """Part of this rank, 1-D."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return _served(func, tuple(args), options)


class ShardedGradient(PartialTensor):
    """The average over ranks, as `.grad`."""

    _owner: weakref.ref[Owned]
    """Weakly: a parameter's `.grad` is where no garbage collector looks."""
    expected = (
        "norms (clip_grad_norm_, on every rank), scaling or clamping in place, or zeroing: leave it out, or plan "
        "without sharing (`planner optimize` without --allow sharded-step)"
    )

    @staticmethod
    def of(parameter: Tensor, name: str, place: int, owner: Owned) -> ShardedGradient:
        made = ShardedGradient._of(parameter, parameter.dtype, f"the gradient of {name}", place)
        made._owner = weakref.ref(owner)
        return made

    @property
    def owner(self) -> Owned:
        """Owner of the gradient. Raises InputError if it is gone."""
        owner = self._owner()
        if owner is None:
            raise InputError(
                f"{self.whose} was shared by ranks in a session that is gone, and no rank has all of it; expected the "
                f"model to be kept as long as its gradients: keep it, or call session.detach() first"
            )
        return owner

    @property
    def part(self) -> Tensor:
        return self.owner.part(self.place)


class ShardedEntry(PartialTensor):
    """An entry of the optimizer's state with one value for each element of a parameter."""

    _part: Tensor
    expected = (
        "scaling, clamping, filling or zeroing in place, another tensor in its place, or "
        "session.optimizer_state_dict(), called on every rank, to read it: do that, or plan without sharing (`planner "
        "optimize` without --allow sharded-step)"
    )

    @staticmethod
    def of(parameter: Tensor, whose: str, place: int, part: Tensor) -> ShardedEntry:
        made = ShardedEntry._of(parameter, part.dtype, whose, place)
        made._part = part
        return made

    @property
    def part(self) -> Tensor:
        return self._part


def _served(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        return _attribute(func, name, args)
    if not args and "tensor" in options:  # as torch.nn.init hands over its tensor
        args = (options.pop("tensor"),)
    first = _first(args)
    if isinstance(first, ShardedEntry) and name in COPIES:
        return ShardedEntry.of(first, first.whose, first.place, first.part.clone())
    if name in CONVERSIONS and func(*args, **options) is first:
        return first
    if name in IN_PLACE and _numbers(args[1:]) and _numbers(options.values()):
        return _in_place(func, name, args, options)
    if name in FOREACH_IN_PLACE and _numbers(args[1:]) and _numbers(options.values()):
        func([_part(gradient) for gradient in args[0]], *args[1:], **options)
        for gradient in args[0] if name == "_foreach_zero_" else ():
            if isinstance(gradient, PartialTensor):
                gradient.zeroed = True
        return None
    if name in NORMS and isinstance(first, ShardedGradient):
        return _norm(name, args, options)
    if name == SCALER:
        return _unscale(func, args, options)
    if name in SHAPES or (name in MEMORY and is_tracing()):
        return _shape(func, name, args, options)
    raise refusal(first, name)


def refusal(tensor: PartialTensor | None, what: str) -> InputError:
    """Return why something cannot be done with a tensor of which this rank has a part."""
    found, expected = ("a gradient", ShardedGradient.expected) if tensor is None else (tensor.whose, tensor.expected)
    return InputError(
        f"found {what} on {found}, but ranks share the optimizer's step, so that each has its own part of that alone; "
        f"expected {expected}"
    )


def _first(given: Any) -> PartialTensor | None:
    if isinstance(given, PartialTensor):
        return given
    if isinstance(given, list | tuple):
        return next((found for found in map(_first, given) if found is not None), None)
    return None


def _part(gradient: Tensor) -> Tensor:
    return gradient.part if isinstance(gradient, PartialTensor) else gradient


def _numbers(arguments: Any) -> bool:
    """Tell whether all of them are numbers, also in tensors of one element."""
    return all(
        one is None or isinstance(one, int | float) or (type(one) is Tensor and one.numel() == 1) for one in arguments
    )


def _attribute(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    attribute = str(getattr(getattr(func, "__self__", None), "__name__", ""))
    gradient = _first(args)
    if attribute in PARTS_OF_NUMBERS or (name == "__set__" and attribute != "requires_grad"):
        raise refusal(gradient, f".{attribute}")
    return gradient if attribute == "data" else func(*args)


def _in_place(func: Callable[..., Any], name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    gradient = args[0]
    if not isinstance(gradient, PartialTensor):  # a plain tensor, changed by this one
        raise refusal(_first(args), name)
    func(gradient.part, *args[1:], **options)
    gradient.zeroed = name == "zero_" or (gradient.zeroed and name not in ("fill_", "constant_"))
    return gradient


def _shape(func: Callable[..., Any], name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    gradient = args[0]
    if name == "type" and (len(args) > 1 or options):
        raise refusal(gradient, name)
    if name in ("__repr__", "__str__"):
        return f"{type(gradient).__name__}({gradient.whose}, shape {tuple(gradient.shape)}, {gradient.dtype})"
    if name in ("detach", "detach_"):
        return gradient
    return func(*args, **options)


def _norm(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    given, *rest = args
    first = "p" if name == "norm" else "ord"
    named = dict(zip((first, "dim", "keepdim", "dtype"), rest, strict=False)) | options
    order = named.pop("ord", named.pop("p", 2))
    if any(value is not None and value is not False for value in named.values()):
        raise refusal(_first(args), f"{name} with {', '.join(named)}")
    order = 2.0 if order in ("fro", None) else float(order)
    several = isinstance(given, list | tuple)
    found = []
    for one in given if several else [given]:
        if isinstance(one, ShardedGradient):
            dtype = one.dtype.to_real() if one.dtype.is_complex else one.dtype
            found.append(one.owner.norms(order)[one.place].to(dtype))
        else:
            found.append(torch.linalg.vector_norm(one, order))
    return found if several else found[0]


def _unscale(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Unscale parts for a GradScaler, and let all ranks know whether any of them has values that are not finite."""
    gradients, found, *rest = args
    first = _first(gradients)
    assert isinstance(first, ShardedGradient)
    parts = [_part(gradient) for gradient in gradients]
    func([part for part in parts if part.numel()], found, *rest, **options)
    # torch does not count this as a change, and norms that were asked for before would be taken for those after.
    torch.autograd.graph.increment_version(parts)
    world = first.owner.world
    with world.error_context("telling each other whether all gradients are finite"):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=world.group)


def whole_norms(parts: Sequence[Tensor], order: float, world: World, device: torch.device) -> Tensor:
    """Return norms of vectors of which each rank has a part, float64; all ranks must call this."""
    infinite = math.isinf(order)
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    if infinite and order < 0:
        nothing = nothing + math.inf
    own = []
    for part in parts:
        narrow = part.dtype in (torch.float16, torch.bfloat16)
        norm = nothing
        if part.numel():
            norm = torch.linalg.vector_norm(part, order, dtype=torch.float32 if narrow else None)
        own.append(norm.to(torch.float64))
    total = torch.stack(own) if own else nothing.new_zeros(0)
    if not infinite and order:
        total = total.pow(order)
    how = dist.ReduceOp.SUM if not infinite else dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
    with world.error_context("adding up the norms of gradients that ranks share; every rank has to ask for them"):
        dist.all_reduce(total, op=how, group=world.group)
    return total if infinite or not order else total.pow(1.0 / order)
