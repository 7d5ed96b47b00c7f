"""A model that `torch.compile` compiles in regions: one graph, cut where a plan says.

Autograd gives the parameters of a compiled graph their gradients when its whole backward has ended. With a graph for
each region gradients come region by region, and their buckets are sent while backward continues. The graph is split as
`torch.compile(DistributedDataParallel(model))` splits it, at other places.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import nn

from runtime.core.options import CompileArgument
from runtime.errors import InputError
from runtime.plan.names import canonical_name
from runtime.torch_compat import (
    compile_split,
    compiled_parts,
    compiling,
    find_backend,
    functions_given_up,
    inductor_settings,
    is_autograd_compiled,
    is_compiled,
    modules_of_node,
    recompile,
)

INDUCTOR, CUDA_GRAPHS = "inductor", "cudagraphs"
FIRST_BYTES, LATER_BYTES = 1 << 20, 25 << 20
"""Limits of DistributedDataParallel's buckets, at which it cuts graphs: of the first one in backward, and of others."""
HINT = 'pass compile="inductor", or keyword arguments of torch.compile'


@dataclass(frozen=True)
class CompileOptions:
    """The arguments of `torch.compile` that a model is compiled with."""

    backend: str | Callable[..., Any] = INDUCTOR
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    dynamic: bool | None = None

    @classmethod
    def of(cls, argument: CompileArgument) -> Self:
        """Return the options that `attach` was given. Raises InputError where they are none."""
        given = {"backend": argument} if isinstance(argument, str) else argument
        if not isinstance(given, Mapping):
            raise InputError(f"compile: found {argument!r}, expected a backend's name or a mapping; {HINT}")
        unknown = next((name for name in given if name not in cls.__dataclass_fields__), None)
        if unknown is not None:
            raise InputError(
                f"compile: found {unknown!r}, expected some of {', '.join(cls.__dataclass_fields__)}; leave it out"
            )
        made = cls(**given)
        if made.dynamic not in (None, True, False):
            raise InputError(f"compile: found dynamic={made.dynamic!r}, expected True, False or None; correct it")
        if made.backend != INDUCTOR and (made.mode is not None or made.options is not None):
            raise InputError(
                f"compile: found mode or options with the backend {made.backend!r}, expected them with inductor alone; "
                f"leave them out, or the backend"
            )
        try:
            settings = made.settings
        except Exception as error:  # torch's, of a class for each mistake
            raise InputError(
                f"compile: found mode {made.mode!r} and options {made.options!r}, expected inductor's "
                f"({str(error).partition(', known options')[0]}); correct them, or leave them out"
            ) from None
        if made.backend == CUDA_GRAPHS or settings.get("triton.cudagraphs"):
            raise InputError(
                f"compile: found CUDA graphs (backend {made.backend!r}, mode {made.mode!r}), whose gradients lie in "
                f"memory that the next replay overwrites; expected none: take inductor with max-autotune-no-cudagraphs "
                f"or no mode, and torch._inductor.config.triton.cudagraphs = False"
            )
        made.compiler()
        return made

    @property
    def name(self) -> str:
        """Return the backend's name."""
        return self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "own")

    @property
    def identity(self) -> str:
        """Return what distinguishes these arguments from others, in other processes, too."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return re.sub(r" at 0x[0-9a-f]+", "", ", ".join(f"{name}={value!r}" for name, value in given.items()))

    @property
    def settings(self) -> dict[str, Any]:
        """Return inductor's settings by mode and options."""
        return inductor_settings(self.mode, self.options) if self.backend == INDUCTOR else {}

    def compiler(self) -> Callable[..., Any]:
        """Return the function that compiles a graph. Raises InputError where no backend has that name."""
        found = find_backend(self.backend)
        if found is None:
            raise InputError(
                f"compile: found the backend {self.backend!r}, expected one that torch.compile knows; take a name of "
                f"torch.compiler.list_backends(), or a function"
            )
        settings = self.settings
        return (lambda graph, inputs: found(graph, inputs, config_patches=settings)) if settings else found


def compile_identity(argument: CompileArgument | None) -> str | None:
    """Return what ranks compare of what `attach` was given. Raises InputError where it cannot compile."""
    return None if argument is None else CompileOptions.of(argument).identity


def check_compile(model: nn.Module, argument: CompileArgument | None) -> str | None:
    """Return why a model cannot be compiled with what `attach` was given; None if it can, or is not to be."""
    if argument is None:
        return None
    CompileOptions.of(argument)
    if parts := compiled_parts(model):
        return (
            f"compile: found {parts[0]!r} compiled already, expected a model of which no part is; take compile() of "
            f"its parts out, or leave compile= out, and gradients come with the graphs that there are"
        )
    if is_autograd_compiled():
        return (
            "compile: found compiled autograd, one graph of the whole backward that no cut divides; expected "
            "torch._dynamo.config.compiled_autograd = False, as by default: set it, or leave compile= out"
        )
    return None


def check_cuts(model: nn.Module, cuts: Sequence[str] | None) -> str | None:
    """Return which of a plan's cuts is no module of the model; None if all are."""
    known = modules_by_name(model)
    for position, name in enumerate(cuts or ()):
        if name not in known:
            return (
                f"the plan's cuts[{position}]: found {name!r}, which is no module of the model; expected a path as "
                f"model.named_modules() has it: profile this model again, or take it out"
            )
    return None


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by canonical name."""
    return {canonical_name(name): module for name, module in model.named_modules()}


def blocks_of(model: nn.Module) -> list[str]:
    """Return the modules at which graphs may be cut: the children of lists and sequences of modules, and of dicts with
    numbers as keys, outside of each other, in the order in which they are registered, which is usually that of forward.
    One that has most of the model (an encoder before a head) is divided, where it has such children.
    """
    found: list[str] = []
    modules, half = modules_by_name(model), _elements(model) / 2
    for name, module in modules.items():
        if not _is_list(module) or any(f"{name}.".startswith(f"{block}.") for block in found):
            continue
        for child, block in module.named_children():
            path, size = canonical_name(f"{name}.{child}" if name else child), _elements(block)
            divided = size > half and any(_is_list(one) and _elements(one) for one in block.modules())
            if size and not divided and path in modules:  # a module of several lists has one path
                found.append(path)
    return sorted(found, key=list(modules).index)


def _is_list(module: nn.Module) -> bool:
    numbered = isinstance(module, nn.ModuleDict) and all(map(str.isdigit, module.keys()))
    return numbered or isinstance(module, nn.ModuleList | nn.Sequential)


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def default_cuts(model: nn.Module) -> tuple[str, ...]:
    """Return cuts by the rule of DistributedDataParallel: from the back a region ends at the block with which its
    gradients reach the limit.
    """
    starts = starts_of(model, blocks_of(model))
    sizes = [p.numel() * p.element_size() if p.requires_grad else 0 for p in model.parameters()]
    cuts: list[str] = []
    size, end = 0, len(sizes)
    for block, start in sorted(starts.items(), key=lambda of: -of[1]):
        size, end = size + sum(sizes[start:end]), min(start, end)
        if size >= (LATER_BYTES if cuts else FIRST_BYTES) and any(sizes[:start]):
            cuts.append(block)
            size = 0
    return tuple(reversed(cuts))


def starts_of(model: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """Return the place of the first parameter of each of some modules among the model's."""
    modules, places = modules_by_name(model), {id(one): place for place, one in enumerate(model.parameters())}
    return {block: min(places[id(one)] for one in modules[block].parameters()) for block in blocks}


def report_regions(
    model: nn.Module, compiled: CompiledModel | None, cuts: Sequence[str] | None, wait_us: float
) -> str | None:
    """Return in how many regions a model is compiled, or what cuts would win; None where it is not compiled.

    Args:
        model: as attached.
        compiled: its regions, where `attach` has compiled it.
        cuts: the plan's.
        wait_us: time of a step in which it waits for messages.
    """
    if compiled is not None:
        return compiled.report()
    if cuts:
        return f"the plan has {len(cuts)} cuts of the compiled graph, which are not executed: attach with compile="
    if not is_compiled(model) or compiled_parts(model):
        return None
    return (
        f"one compiled graph, whose gradients come at once: cuts could hide up to {wait_us / 1e3:.2f} ms of waiting; "
        f'attach with compile="inductor" to make them'
    )


@dataclass(frozen=True)
class _Form:
    """A model in the regions that begin at some modules; holds nothing of the model."""

    cuts: tuple[str, ...]
    backend: CutBackend
    compile: Callable[[Any], Any]


class CompiledModel:
    """Compiles a model, or what `torch.compile` has made of one, in regions, until `remove`."""

    def __init__(self, model: nn.Module, argument: CompileArgument) -> None:
        self._model, self._options = model, CompileOptions.of(argument)
        self._restore: Callable[[], None] | None = None
        self._form: _Form | None = None
        self._given_up = functions_given_up()

    def around(self, wrapped: nn.Module) -> nn.Module:
        """Return what `torch.compile` makes of DDP around the model, whose graph torch cuts at DDP's buckets."""
        return cast(nn.Module, self._form_of((), getattr(wrapped, "bucket_bytes_cap", None)).compile(wrapped))

    def cut(self, cuts: Sequence[str] | None) -> None:
        """Compile the model anew, from its next forward on, with a region that begins at each of these modules.

        Where graphs were compiled for these cuts before, they are used again.
        """
        form = self._form_of(tuple(default_cuts(self._model) if cuts is None else cuts))
        if self._restore is not None and form is self._form:
            return
        self.remove()
        self._form, self._restore = form, recompile(self._model, form.compile)

    def _form_of(self, cuts: tuple[str, ...], ddp_bytes: int | None = None) -> _Form:
        """Return the model's form with these cuts; `ddp_bytes`: with DDP's own, at buckets of this size."""
        # One in all sessions that the model has: torch looks compiled graphs up by it. DDP's bucket size is no guard.
        known = _forms.setdefault(self._model, {})
        if (key := (repr(self._options), cuts, ddp_bytes)) not in known:
            modules = modules_by_name(self._model)
            backend = CutBackend([modules[name] for name in cuts], self._options.compiler())
            known[key] = _Form(cuts, backend, compiling(backend, self._options.dynamic))
        return known[key]

    def report(self) -> str:
        """Return in how many regions the model is compiled, and what torch has given up to compile since."""
        form = self._form
        if form is None or form.backend.begun is None:
            return (
                f"compiled by {self._options.name}: no graph so far; where the model has no forward of its own, as a "
                f"subclass of nn.Sequential, attach torch.compile(model); a graph break in a loop (see TORCH_LOGS="
                f"graph_breaks) leaves a forward uncompiled"
            )
        regions, missing = 1 + len(form.backend.begun), len(form.cuts) - len(form.backend.begun)
        text = f"compiled by {self._options.name} in {regions} region{'s' * (regions > 1)}"
        if missing > 0:
            text += f"; {missing} of {len(form.cuts)} cuts made none: no graph has a forward of those modules alone"
        if (given_up := functions_given_up() - self._given_up) > 0:
            text += (
                f"; {given_up} function{'s' * (given_up > 1)} ran into torch._dynamo.config.recompile_limit, and what "
                f"was not compiled by then runs eagerly: raise it, or give batches fewer shapes"
            )
        return text

    def remove(self) -> None:
        """Compile the model no more; a model that was compiled is as before."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()


_forms: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Form]] = weakref.WeakKeyDictionary()


class CutBackend:
    """Backend of `torch.compile` that splits each graph before the first operations of some modules.

    What a graph break of the model's own has divided already is split further. A module that a graph calls several
    times begins a region once; one without a forward (a list of layers) begins one with the first of its modules.
    """

    def __init__(self, cuts: Sequence[nn.Module], compiler: Callable[..., Any]) -> None:
        self._cuts = {id(part): id(cut) for cut in cuts for part in (*_called_for(cut), cut)}
        self._compiler = compiler
        self.begun: set[int] | None = None
        """Modules that a region began with, in graphs of any shape, by id; None: nothing was compiled yet."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        regions = self.regions(graph)
        if max(regions.values(), default=0) == 0:
            compiled: Callable[..., Any] = self._compiler(graph, inputs)
            return compiled
        return compile_split(graph, inputs, regions.__getitem__, self._compiler)

    def regions(self, graph: torch.fx.GraphModule) -> dict[torch.fx.Node, int]:
        """Return the region of each node, numbered in the order of forward."""
        region, begun, firsts, computed = 0, set[int](), set[int](), False
        regions: dict[torch.fx.Node, int] = {}
        for node in graph.graph.nodes:
            if node.op not in ("placeholder", "output", "get_attr"):
                new = {self._cuts[one] for one in self._cuts.keys() & modules_of_node(graph, node)} - begun
                begun |= new
                firsts.update(sorted(new)[:1])  # of modules inside each other one
                region += bool(new) and computed  # nothing precedes the first operation
                computed = True
            regions[node] = region
        self.begun = firsts | (self.begun or set())
        return regions


def _called_for(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are called in place of one without a forward."""
    if type(module).forward is nn.Module.forward:
        for child in module.children():
            yield child
            yield from _called_for(child)
