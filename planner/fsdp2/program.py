"""FSDP2's step as what its hooks do, in order: gathers, computation, reduce-scatters, and the memory that each takes.

The host's program decides everything but times. Its rules, for groups of modules in a tree, held against recorded runs:

- Before the forward of a group's first module its parameters are gathered, waited for and copied out; then the gathers
  that it has to fetch ahead are begun. After the forward of the last of its modules they are freed, or kept.
- When the gradient of the last module's output is there, parameters that were freed are gathered again; then the group
  whose forward ended before is fetched, or what is listed in its place.
- When the gradient of the first module's input is there, parameters are freed and gradients reduce-scattered, the last
  parameter's being held meanwhile; where that input needs no gradient, at the end of backward, in the order of the
  model's modules.
- A gather lies in a buffer of its own until it is copied out; in forward, unless the host waits for messages itself,
  until the next one is. Before a reduce-scatter begins, the input of the one before is waited for and freed.

Memory follows the program and not the clock: allocators hand out and take back in the host's order.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from planner.documents.units import Unit, Units
from runtime.plan import FullyShardPlan
from runtime.plan.fully_sharded import ROOT

GATHER, WAIT, FORWARD, BACKWARD, SCATTER, REDUCE, RECYCLE = (
    "all_gather", "wait", "forward", "backward", "reduce_scatter", "all_reduce", "recycle"
)  # fmt: skip
MESSAGES = (GATHER, SCATTER, REDUCE)


@dataclass(frozen=True)
class Shape:
    """A model's units before they are wrapped, on a number of ranks."""

    units: Units
    ranks: int
    reduce_bytes: int
    """Bytes of an element of a gradient in a message."""

    @classmethod
    def of(cls, units: Units, ranks: int) -> Shape:
        """Return a shape whose gradients are reduced in the dtype of parameters."""
        return cls(units, ranks, units.element_bytes)

    @cached_property
    def leaves(self) -> tuple[Unit, ...]:
        """Modules that compute once in each forward, in its order."""
        return self.units.units

    @cached_property
    def spans(self) -> Mapping[str, tuple[int, int]]:
        """First and last leaf of every module above leaves."""
        found: dict[str, tuple[int, int]] = {}
        for index, leaf in enumerate(self.leaves):
            steps = leaf.module.split(".")
            for path in (ROOT, *(".".join(steps[:count]) for count in range(1, len(steps) + 1))):
                found[path] = (found.get(path, (index, index))[0], index)
        return found


class Action(NamedTuple):
    """One thing that the host does."""

    kind: str
    group: int = -1
    """Number of the group in `Program.groups`; -1 for computation."""
    leaf: int = -1
    size_bytes: int = 0
    of: int = 0
    """Number of ranks of a gather."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Actions of the host in a step, and the memory that they take."""

    groups: tuple[str, ...]
    """Names; the root's is the last."""
    actions: tuple[Action, ...]
    memory_bytes: tuple[int, ...]
    """The most after the action before and up to this one, of one rank."""
    fixed_bytes: int
    """Permanent part of it: this rank's parts of parameters and of the optimizer's state."""

    @property
    def peak_bytes(self) -> int:
        return max(self.memory_bytes, default=self.fixed_bytes)

    def messages(self) -> Iterator[tuple[str, str, int]]:
        """Give (kind, group, bytes) of each message, in the order in which they are sent."""
        for action in self.actions:
            if action.kind in MESSAGES:
                yield action.kind, self.groups[action.group], action.size_bytes


def host_program(
    shape: Shape, plan: FullyShardPlan, *, waits: bool = False, unbuffered: frozenset[str] = frozenset()
) -> Program:
    """Return what FSDP2 does with a model that is wrapped as the plan says.

    Args:
        shape: of the model, on as many ranks.
        plan: a wrapping without faults.
        waits: whether gathers are waited for by the host (custom collectives on a CPU), and not by streams.
        unbuffered: groups whose gathers in backward are taken to need no buffer: a bound for either way to treat them,
            freed after forward or kept.

    Raises ValueError: a group's module computes nothing, or a tied parameter would be in two groups.
    """
    return _Host(shape, plan, waits, unbuffered).program()


@dataclass(eq=False)
class _Group:
    """A group's state, as FSDP2 keeps it."""

    name: str
    modules: tuple[str, ...]
    keep: bool
    among: int
    """Ranks that have all of the parameters between forward and backward."""
    forward_list: list[int]
    backward_list: list[int]
    gathered_bytes: int = 0
    """Bytes of its parameters, whole and padded."""
    scattered_bytes: int = 0
    part_bytes: int = 0
    """Bytes of this rank's reduced gradients."""
    kept_part_bytes: int = 0
    """Bytes of this rank's part between forward and backward, where that is another one."""
    phase: str = "idle"
    state_phase: str = "idle"
    pending: bool = False
    whole: bool = False
    partly: bool = False
    run: set[str] = field(default_factory=set)
    places: list[int] = field(default_factory=list)
    held_bytes: int = 0
    """Bytes of gradients that were computed."""
    last: tuple[int, int] = (-1, 0)
    """Place in the group of the module of its last trainable parameter, and the bytes of that one's gradient."""

    @property
    def has_parameters(self) -> bool:
        return self.gathered_bytes > 0


class _Host:
    def __init__(self, shape: Shape, plan: FullyShardPlan, waits: bool, unbuffered: frozenset[str]) -> None:
        self.shape, self.plan, self.waits, self.unbuffered = shape, plan, waits, unbuffered
        self.turned = False
        """Whether forward is over."""
        self.shard = plan.shard_size(shape.ranks)
        self.copies = shape.ranks // self.shard
        numbers = {name: number for number, name in enumerate(plan.names)}
        self.groups = [self._group(name, modules, numbers) for name, modules in self._members(plan)]
        self.root = self.groups[-1]
        self.owner = {module: number for number, (_, modules) in enumerate(self._members(plan)) for module in modules}
        self.fixed = 0
        self._place_weights()
        self.actions: list[Action] = []
        self.memory: list[int] = []
        self.now = self.fixed
        self.most = self.now
        self.order: list[int] = []
        self.buffered: int | None = None
        """The group whose gathered buffer is kept for one wait longer."""
        self.inputs: list[tuple[int, int]] = []
        """(group, bytes) of reduce-scatters whose inputs are still there."""
        self.spans = shape.spans
        self.entering, self.leaving = self._hooks()
        self.before: list[list[int]] = [[] for _ in shape.leaves]
        """Groups whose backward begins with this leaf's."""
        self.after: list[list[int]] = [[] for _ in shape.leaves]

    @staticmethod
    def _members(plan: FullyShardPlan) -> list[tuple[str, tuple[str, ...]]]:
        return [*((group[0], group) for group in plan.groups), (ROOT, (ROOT,))]

    def _group(self, name: str, modules: tuple[str, ...], numbers: Mapping[str, int]) -> _Group:
        missing = [module for module in modules if module not in self.shape.spans]
        if missing:
            raise ValueError(f"found {missing[0]!r} in a group, which computes nothing in a forward; leave it out")
        reshard = self.plan.reshard_after_forward.get(name, name != ROOT)
        among = reshard if reshard is not True and reshard is not False else 0
        return _Group(
            name, modules, reshard is False, among,
            [numbers[target] for target in self.plan.forward_prefetch.get(name, ())],
            [numbers[target] for target in self.plan.backward_prefetch.get(name, ())],
        )  # fmt: skip

    def _place_weights(self) -> None:
        shape, shard, element_bytes = self.shape, self.shard, self.shape.units.element_bytes
        parts = 0
        self.gradients: list[list[tuple[int, int]]] = [[] for _ in shape.leaves]
        for weight in shape.units.weights:
            owners = {self.owner[_above(module, self.owner)] for module in weight.modules}
            if len(owners) > 1:
                raise ValueError(
                    f"found the tied parameter of {' and '.join(weight.modules)} in two groups, expected one"
                )
            number = owners.pop()
            group, padded = self.groups[number], weight.padded_numel(shard)
            group.gathered_bytes += padded * element_bytes
            group.kept_part_bytes += padded * element_bytes // group.among if group.among else 0
            parts += padded * element_bytes // shard
            if weight.trainable:
                group.scattered_bytes += padded * shape.reduce_bytes
                group.part_bytes += padded * element_bytes // shard
                # Its gradient is there when the first leaf that has it, backward the last, has been computed.
                leaf = first_leaf(shape, weight.modules)
                self.gradients[leaf].append((number, weight.numel * element_bytes))
                place = group.modules.index(_above(weight.modules[0], group.modules))
                if place >= group.last[0]:
                    group.last = place, weight.numel * element_bytes
        self.fixed = parts + round(shape.units.state_factor * parts)

    def _hooks(self) -> tuple[list[list[str]], list[list[str]]]:
        """Return the wrapped modules that begin and end with each leaf: the outermost begins first and ends last."""
        entering: list[list[str]] = [[] for _ in self.shape.leaves]
        leaving: list[list[str]] = [[] for _ in self.shape.leaves]
        for module in sorted(self.owner, key=lambda path: len(path.split(".")) if path else 0):
            first, last = self.spans[module]
            entering[first].append(module)
            leaving[last].insert(0, module)
        return entering, leaving

    def program(self) -> Program:
        for index in range(len(self.shape.leaves)):
            self._forward(index)
        self._let_go()
        self.turned = True
        self._take(self.shape.units.loss_working_bytes)
        self._take(-self.shape.units.loss_working_bytes)
        for index in reversed(range(len(self.shape.leaves))):
            self._backward(index)
        for group in (len(self.groups) - 1, *sorted(range(len(self.groups) - 1), key=self._registered)):
            if self.groups[group].has_parameters and self.groups[group].phase != "after":
                self._post_backward(group)
        for _, size_bytes in self.inputs:
            self._take(-size_bytes)
        return Program(
            groups=self.plan.names, actions=tuple(self.actions), memory_bytes=tuple(self.memory),
            fixed_bytes=self.fixed,
        )  # fmt: skip

    def _registered(self, group: int) -> tuple[int, int]:
        """Return the place of a group among the model's modules, mostly registered in the order of forward."""
        return min((self.spans[module][0], module.count(".")) for module in self.groups[group].modules)

    def _do(self, action: Action) -> None:
        self.actions.append(action)
        self.memory.append(self.most)
        self.most = self.now

    def _take(self, size_bytes: int) -> None:
        self.now += size_bytes
        self.most = max(self.most, self.now)

    def _let_go(self) -> None:
        if self.buffered is not None:
            self._take(-self.groups[self.buffered].gathered_bytes)
            self.buffered = None

    def _gather(self, number: int) -> None:
        group = self.groups[number]
        if group.pending or group.whole or not group.has_parameters:
            return
        among = group.among if group.partly else self.shard
        self._take(self._buffer_bytes(group))
        self._do(Action(GATHER, number, size_bytes=group.gathered_bytes, of=among))
        group.pending = True

    def _wait(self, number: int, forward: bool) -> None:
        group = self.groups[number]
        if not group.pending:
            return
        if forward:
            self._let_go()
        self._take(group.gathered_bytes)
        self._do(Action(WAIT, number, size_bytes=group.gathered_bytes))
        if group.partly:
            self._take(-group.kept_part_bytes)
        group.pending, group.whole, group.partly = False, True, False
        if forward and not self.waits:
            self.buffered = number
        else:
            self._take(-self._buffer_bytes(group))

    def _buffer_bytes(self, group: _Group) -> int:
        return 0 if self.turned and group.name in self.unbuffered else group.gathered_bytes

    def _free(self, group: _Group) -> None:
        if group.whole:
            self._take(-group.gathered_bytes)
            group.whole = False

    def _forward(self, index: int) -> None:
        for module in self.entering[index]:
            self._enter(self.owner[module], module, index)
        leaf = self.shape.leaves[index]
        self._take(leaf.activation_bytes + leaf.forward_working_bytes)
        self._do(Action(FORWARD, leaf=index))
        self._take(-leaf.forward_working_bytes)
        for module in self.leaving[index]:
            group = self.groups[self.owner[module]]
            group.run.discard(module)
            if not group.run:
                self._leave(self.owner[module], module, index)

    def _enter(self, number: int, module: str, index: int) -> None:
        group = self.groups[number]
        if not group.run:
            group.run = set(group.modules)
        first, group.state_phase = group.state_phase != "forward", "forward"
        if group.has_parameters:
            entering, group.phase = group.phase != "forward", "forward"
            self._gather(number)
            self._wait(number, forward=True)
            if entering and self.shape.leaves[index].input_requires_grad and module != ROOT:
                self.after[index].insert(0, number)  # what is inside was entered later, and is through earlier
        if first:
            for target in group.forward_list:
                self._gather(target)

    def _leave(self, number: int, module: str, index: int) -> None:
        group = self.groups[number]
        if group.has_parameters:
            if group.among:
                self._take(group.kept_part_bytes)
                group.partly = True
            if group.among or not group.keep:
                self._free(group)
            group.places.append(len(self.order))
            self.order.append(number)
            group.phase = "idle"
        group.state_phase = "idle"
        # Hooks of one tensor fire in the order in which they came; of tensors that follow each other, the last first.
        if module in self.shape.units.passes_through:
            self.before[index].append(number)
        else:
            self.before[index].insert(0, number)

    def _backward(self, index: int) -> None:
        leaf = self.shape.leaves[index]
        self._take(leaf.carried_bytes)
        for number in self.before[index]:
            self._pre_backward(number)
        self._take(-leaf.carried_bytes)
        for number, size_bytes in self.gradients[index]:
            self.groups[number].held_bytes += size_bytes
        self._take(sum(size_bytes for _, size_bytes in self.gradients[index]) + leaf.backward_working_bytes)
        self._do(Action(BACKWARD, leaf=index))
        self._take(-leaf.backward_working_bytes - leaf.activation_bytes)
        # The gradient that goes on to the leaf before is there already, and waits while parameters' are sent.
        onward_bytes = self.shape.leaves[index - 1].carried_bytes if index else 0
        self._take(onward_bytes)
        for number in self.after[index]:
            self._post_backward(number)
        self._take(-onward_bytes)

    def _pre_backward(self, number: int) -> None:
        group = self.groups[number]
        if group.has_parameters and group.phase != "before":
            group.phase = "before"
            self._gather(number)
            self._wait(number, forward=False)
            if not group.backward_list and group.places:
                place = group.places.pop()
                if place > 0:
                    self._gather(self.order[place - 1])
        for target in group.backward_list:
            self._gather(target)

    def _post_backward(self, number: int) -> None:
        group = self.groups[number]
        group.phase = "after"
        self._free(group)
        buffers = self.plan.reduce_scatter_max_input_buffers or 1
        while len(self.inputs) >= buffers:
            oldest, size_bytes = self.inputs.pop(0)
            self._take(-size_bytes)
            self._do(Action(RECYCLE, oldest))
        if not group.scattered_bytes:
            return
        part_bytes = group.scattered_bytes // self.shard
        # FSDP2 lets go of gradients when they are copied, but of the last one when all of this is over.
        held_bytes = min(group.last[1], group.held_bytes)
        self._take(group.scattered_bytes)
        self._take(held_bytes - group.held_bytes)
        self._take(part_bytes)
        self._do(Action(SCATTER, number, size_bytes=group.scattered_bytes))
        if self.copies > 1:
            self._do(Action(REDUCE, number, size_bytes=part_bytes))
        self._take(group.part_bytes - part_bytes)
        self._take(-held_bytes)
        self.inputs.append((number, group.scattered_bytes))


def first_leaf(shape: Shape, modules: Sequence[str]) -> int:
    """Return the first leaf that computes with a parameter, given all modules that have it."""
    return min(shape.spans[_above(module, shape.spans)][0] for module in modules)


def _above(module: str, known: Container[str]) -> str:
    """Return the innermost known module that a module is, or is a part of; else the model itself."""
    steps = module.split(".") if module else []
    return next((path for count in range(len(steps), 0, -1) if (path := ".".join(steps[:count])) in known), ROOT)
