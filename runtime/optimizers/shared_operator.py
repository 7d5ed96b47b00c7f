"""An optimizer's stateless operator, shared: owners compute it, results are gathered, every rank applies them.

Before the optimizer's step each rank finds the matrices of the parameters that it owns: it runs the step for one
parameter, with copies of its weights, gradient and state, up to the call of the operator, which it computes. Then the
step runs as it is on all ranks, and gets the gathered results where it calls the operator. So every rank keeps momenta,
weight decay and learning rate, and the bits are those of a rank that computes all.

    before the step: matrix 0 ─▶ result ─▶ gather 0 ┐ (in flight while the next is computed)
                     matrix 3 ─▶ result ─▶ gather 1 ┤
    the step:        momentum, decay, rate of every parameter ◀─ results in the order of the step's calls
"""

from __future__ import annotations

import copy
import hashlib
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.comm.world import World, agreed
from runtime.errors import FallbackWarning, InputError
from runtime.monitor.clock import Clock
from runtime.optimizers.pto import Pending, Split
from runtime.optimizers.units import Compute, Operator, stack_difference
from runtime.torch_compat import plain_step

Groups = Mapping[Tensor, Mapping[str, Any]]
"""Group of each parameter that has a gradient."""

TIMED_STEPS = 8
"""Number of steps in which operators are timed in a run."""


@dataclass(frozen=True)
class Result:
    """Form of an operator's result, and of its matrix, which ranks have compared."""

    matrix: tuple[int, ...]
    """Shape of what the step gives to the operator; a parameter may have another one."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Called(BaseException):
    """Ends a step at its first call of the operator; no optimizer catches it."""


class SharedOperator:
    """The operator of one optimizer, computed by owners."""

    def __init__(self, optimizer: torch.optim.Optimizer, operator: Operator, names: Mapping[Tensor, str], world: World):
        """`names`: of the parameters that ranks train together. Nothing is shared yet."""
        self.optimizer, self._operator, self._names, self._world = optimizer, operator, names, world
        self._owners: dict[Tensor, int] = {}
        self._gathers: list[tuple[World, list[Tensor]]] = []
        self._forms: dict[Tensor, Result | None] = {}
        """Form of each known result; None: the step does not call the operator for the parameter, or not alike."""
        self._stays = False
        """Whether ranks have found that every one of them has to compute all."""
        self._callers: dict[Tensor, bool] = {}
        """Whether the step calls the operator for a parameter, of those that were timed."""
        self._splits: dict[tuple[Tensor, ...], tuple[Split, list[list[Tensor]]]] = {}
        """Who computes what of each message, and what this rank computes at once."""
        self._batched, self._tolerance = frozenset[Tensor](), 0.0
        self._open = ExitStack()
        """Holds the operator's replacement while the step runs."""
        self._busy = False
        self._end: Callable[[], None] | None = None
        self._clock: Clock | None = None
        self._marks: deque[dict[Tensor, tuple[Any, Any, int]]] = deque(maxlen=TIMED_STEPS)

    def observe(self, clock: Clock) -> None:
        """Time the operator in the next `TIMED_STEPS` steps in which every rank computes all."""
        self._clock = clock

    def times_us(self) -> dict[str, tuple[float, int]]:
        """Return the median time of each operator that was timed, and the bytes of its result, by parameter, in the
        order of the step's calls.
        """
        clock, steps = self._clock, list(self._marks)
        if clock is None or not steps or self._stays:
            return {}
        last = steps[-1]
        times = {p: [clock.between_us(*one[p][:2]) for one in steps if p in one] for p in last}
        return {self._name(p): (statistics.median(of), last[p][2]) for p, of in times.items()}

    def share(
        self, owners: Mapping[Tensor, int], gathers: Iterable[tuple[World, Sequence[Tensor]]],
        batched: Iterable[Tensor] = (), tolerance: float = 0.0,
    ) -> None:  # fmt: skip
        """Share from the next step on, unless ranks have found that they cannot; all ranks call this alike.

        Args:
            owners: rank that computes the operator, by parameter; every rank computes those of others.
            gathers: parameters of each message, in launch order, and the ranks that gather it: all, or those of this
                node, every node alike, of which owners then are ranks.
            batched: parameters whose matrices are one stack with those of one shape, group, message and owner, where
                ranks find that its results are as near to those of one at a time as `tolerance`, relative to the
                largest element; 0.0: with equal bits.
            tolerance: see there.
        """
        self.close()
        self._owners = {} if self._stays else dict(owners)
        self._gathers = [(world, list(one)) for world, one in gathers]
        self._splits.clear()
        self._batched = frozenset(batched if self._operator.batched else ())
        self._tolerance = tolerance

    @property
    def shared(self) -> int:
        """Number of parameters whose operator owners compute."""
        return len(self._owners)

    @property
    def own(self) -> int:
        """Number of those that this rank computes."""
        return sum(self._owners.get(p) == world.rank for world, members in self._gathers for p in members)

    def close(self) -> None:
        """End what a step that raised has left."""
        self._open.close()
        self._end = None

    def before_step(self) -> None:
        """Compute and send what this rank owns; the optimizer's step comes next."""
        if self._busy:  # a step of one parameter, of a class whose base class has hooks, too
            return
        self.close()
        groups = {p: group for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None}
        if not self._owners:
            if self._clock is not None and len(self._marks) < TIMED_STEPS:
                self._time(self._clock, groups)
            return
        unknown = [p for p in groups if p not in self._forms and p in self._names]
        for own in (p for p in groups if p not in self._forms and p not in self._names):
            # Nothing is sent of what a rank trains by itself, so that the form of the matrix does.
            found = self.run_one(own, groups[own], lambda matrix, _: matrix)
            self._forms[own] = found if found is None else Result(tuple(found.shape), tuple(found.shape), found.dtype)
        if unknown:
            self._learn(groups, unknown)
            return
        pending, results = dict[Tensor, tuple[Pending, list[Tensor]]](), dict[Tensor, Tensor]()
        splits = [  # ranks compare stacks before any is computed
            (members, *self._split(world, members, groups))
            for world, gather in self._gathers
            for members in _by_dtype(gather, groups, self._forms)
        ]
        for members, split, stacks in splits:
            sent = split.start(partial(self._results, stacks, groups), members)
            pending |= dict.fromkeys(members, (sent, members))
        calls = iter([(p, form) for p in groups if (form := self._forms.get(p)) is not None])

        def answer(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
            parameter, form = next(calls, (None, None))
            if parameter is None or form is None or (parameter in pending and tuple(matrix.shape) != form.matrix):
                raise InputError(
                    f"{self._what}: found a call of its operator with a matrix of shape {tuple(matrix.shape)} that "
                    f"steps before did not make; expected one for each parameter, in the order of param_groups"
                )
            if parameter not in pending:
                return self._operator.compute(matrix, group)
            if parameter not in results:  # the first of its message
                sent, members = pending[parameter]
                results.update(zip(members, sent.wait_each(), strict=True))
            return results.pop(parameter)

        self._open.enter_context(self._operator.replaced(answer))

    def after_step(self) -> None:
        """End the step: the operator is the optimizer's own again."""
        if self._busy:
            return
        end, self._end = self._end, None
        self._open.close()
        if end is not None:
            end()

    def _time(self, clock: Clock, groups: Groups) -> None:
        for p in (p for p in groups if p not in self._callers):  # other groups of one class may have no operator
            self._callers[p] = self.run_one(p, groups[p], lambda matrix, _: matrix) is not None
        called = [p for p in groups if self._callers[p]]
        marks: list[tuple[Any, Any, int]] = []

        def timed(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
            begin = clock.mark()
            result = self._operator.compute(matrix, group)
            marks.append((begin, clock.mark(), result.numel() * result.element_size()))
            return result

        def keep() -> None:
            if len(called) == len(marks):  # else the operator is not called once for each
                self._marks.append(dict(zip(called, marks, strict=True)))

        self._open.enter_context(self._operator.replaced(timed))
        self._end = keep

    @property
    def _what(self) -> str:
        return type(self.optimizer).__name__

    @property
    def _who(self) -> str:
        return f"the operator of {self._what}"

    def _split(self, world: World, members: Sequence[Tensor], groups: Groups) -> tuple[Split, list[list[Tensor]]]:
        """Return who computes what of a message, and what this rank computes at once."""
        key = tuple(members)
        if key not in self._splits:
            forms = [form for p in members if (form := self._forms[p]) is not None]
            owners = [self._owners[p] for p in members]
            split = Split(world, owners, [form.shape for form in forms], forms[0].dtype, members[0].device)
            mine = [members[place] for place in split.mine]
            stacks = [[p] for p in mine] if self._batched.isdisjoint(members) else self._stacks(mine, groups)
            self._splits[key] = split, stacks
        return self._splits[key]

    def _stacks(self, mine: Iterable[Tensor], groups: Groups) -> list[list[Tensor]]:
        """Return this rank's part of a message in stacks, if every rank finds them near enough to one at a time."""
        alike: dict[object, list[Tensor]] = {}
        for p in mine:
            key = (id(groups[p]), p.dtype, self._forms[p]) if p in self._batched else id(p)
            alike.setdefault(key, []).append(p)
        what = f"comparing stacks of {self._who}"

        def compare() -> list[tuple[float, str]]:
            return [
                (stack_difference(self._operator, *self._given(of, groups)), f"{len(of)} of {self._forms[of[0]]}")
                for of in alike.values()
                if len(of) > 1
            ]

        everyone = self._world.gather(agreed(self._world, what, compare, self._who), what)
        apart, stack = max((one for of_rank in everyone for one in of_rank), default=(0.0, ""))
        if apart <= self._tolerance:
            return list(alike.values())
        self._world.warn(
            f"{self._who} is computed one matrix at a time: found a stack, {stack}, whose results differ by "
            f"{apart:.1e} of their largest element, expected at most {self._tolerance} (updates.operator.tolerance): "
            f"profile again",
            FallbackWarning,
        )
        self._batched = frozenset()
        return [[p] for of in alike.values() for p in of]

    @torch.no_grad()
    def _results(self, stacks: Iterable[list[Tensor]], groups: Groups, own: Sequence[Tensor]) -> list[Tensor]:
        found: dict[Tensor, Tensor] = {}
        for members in stacks:
            if len(members) == 1:
                found[members[0]] = self._result(members[0], groups[members[0]], self._operator.compute)
                continue
            matrices, options = self._given(members, groups)
            if all({**one, "params": ()} == {**options[0], "params": ()} for one in options):
                results = self._operator.compute(torch.stack(matrices), options[0]).unbind()
            else:
                results = tuple(map(self._operator.compute, matrices, options))
            found.update(zip(members, results, strict=True))
        return [found[p] for p in own]

    def _given(self, members: Iterable[Tensor], groups: Groups) -> tuple[list[Tensor], list[Mapping[str, Any]]]:
        """Return what the step gives to its operator: copies of matrices, whose memory it uses again, and options."""
        options = list[Mapping[str, Any]]()

        def keep(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
            options.append(group)
            return matrix.clone()

        return [self._result(p, groups[p], keep) for p in members], options

    def _result(self, parameter: Tensor, group: Mapping[str, Any], compute: Compute) -> Tensor:
        found = self.run_one(parameter, group, compute)
        if found is None:
            raise InputError(
                f"{self._what}: its step did not call the operator for {self._name(parameter)}, as steps before did; "
                f"expected a call in every step in which it has a gradient"
            )
        return found

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def run_one(self, parameter: Tensor, group: Mapping[str, Any], compute: Compute) -> Tensor | None:
        """Run the step for one parameter up to its call of the operator; return what `compute` makes of that, or None
        where it does not call it. Nothing is changed: the step gets copies of what it writes to.
        """
        optimizer, found = self.optimizer, list[Tensor]()

        def called(matrix: Tensor, options: Mapping[str, Any]) -> Tensor:
            found.append(compute(matrix, options))
            raise _Called

        groups, state, had_state = optimizer.param_groups, optimizer.state.get(parameter), parameter in optimizer.state
        weights, gradient = parameter.data, parameter.grad
        assert gradient is not None
        numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)}
        self._busy = True
        try:
            optimizer.param_groups = [{**group, "params": [parameter]}]
            if had_state:
                optimizer.state[parameter] = copy.deepcopy(state)
            if not self._operator.keeps_inputs:
                parameter.data, parameter.grad = weights.clone(), gradient.clone()
            with self._operator.replaced(called):
                plain_step(optimizer)(optimizer)
        except _Called:
            pass
        finally:
            parameter.data, parameter.grad = weights, gradient
            optimizer.param_groups = groups
            optimizer.state.pop(parameter, None)
            if had_state:
                optimizer.state[parameter] = state
            vars(optimizer).update(numbers)
            self._busy = False
        return found[0] if found else None

    # The first step with parameters that are not known: every rank computes all, and ranks compare the results.

    def _learn(self, groups: Groups, unknown: Sequence[Tensor]) -> None:
        digests = list[str]()

        def look(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
            digests.append(_digest(matrix, group))
            return self._operator.compute(matrix, group)  # what raises does so before any rank has stepped

        def find() -> list[Tensor]:
            return [p for p in groups if self.run_one(p, groups[p], look) is not None]

        called = agreed(self._world, f"computing {self._who} on every rank", find, self._who)
        expected = dict(zip(called, digests, strict=True))
        calls: list[tuple[str, Result, str, bool]] = []
        state = {
            tensor.untyped_storage().data_ptr()
            for p in groups
            for tensor in (p, p.grad, *self.optimizer.state.get(p, {}).values())
            if isinstance(tensor, Tensor)
        }

        def observe(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
            before, version = _digest(matrix, group), matrix._version
            result = self._operator.compute(matrix, group)
            writes = matrix._version != version and matrix.untyped_storage().data_ptr() in state
            form = Result(tuple(matrix.shape), tuple(result.shape), result.dtype)
            calls.append((before, form, _digest(result), writes))
            return result

        self._open.enter_context(self._operator.replaced(observe))
        self._end = lambda: self._compare(expected, calls, unknown)

    def _compare(
        self, expected: Mapping[Tensor, str], calls: Sequence[tuple[str, Result, str, bool]], unknown: Sequence[Tensor]
    ) -> None:
        """Remember the forms of results that are equal on all ranks, and warn of what stays on all of them."""
        self._forms.update((p, None) for p in unknown)
        problem = None
        if [one[0] for one in calls] != list(expected.values()):
            problem = (
                f"its step calls its operator {len(calls)} times for {len(expected)} parameters, or in another order "
                f"than that of param_groups"
            )
        elif any(writes for *_, writes in calls):
            problem = "its operator writes to the optimizer's state"
        results = zip(expected, calls, strict=False)
        mine = {self._names[p]: (str(form), digest) for p, (_, form, digest, _) in results if p in self._names}
        everyone = self._world.gather((problem, mine), f"comparing results of {self._who}")
        problem, first = next((found for found, _ in everyone if found), None), everyone[0][1]
        for rank, (_, theirs) in enumerate(everyone):
            if problem is None and theirs != first:
                odd = next((name for name, result in theirs.items() if result != first.get(name)), None)
                what = f"another result of {odd}" if odd in first else "other parameters"
                problem = f"rank {rank} has {what} than rank 0: it depends on more than the matrix and its group"
        if problem is None:
            self._forms.update((p, form) for p, (_, form, *_) in zip(expected, calls, strict=True))
            return
        self._owners, self._gathers, self._stays = {}, [], True
        self._world.warn(
            f"{self._who} stays on every rank: {problem}; expected operator(self, matrix, group) to "
            f"be called once for each parameter with a gradient, to read these alone, and to write nothing",
            FallbackWarning,
        )


def _by_dtype(
    gather: Sequence[Tensor], groups: Mapping[Tensor, Any], forms: Mapping[Tensor, Result | None]
) -> list[list[Tensor]]:
    """Return the parameters of a message that have a gradient and a known result, one list for each dtype."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for parameter in gather:
        form = forms.get(parameter)
        if parameter in groups and form is not None:
            found.setdefault(form.dtype, []).append(parameter)
    return list(found.values())


def _digest(tensor: Tensor, group: Mapping[str, Any] | None = None) -> str:
    """Return a digest of a matrix, and of the options that an operator gets with it."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    options = sorted((name, str(value)) for name, value in (group or {}).items() if name != "params")
    return hashlib.sha256(raw.numpy().tobytes() + str(options).encode()).hexdigest()
