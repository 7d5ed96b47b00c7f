"""Delay: the two stages of a run whose ranks do not wait for each other's gradients (SSD-SGD).

    warm-up   synchronous steps, by the plan's buckets: every `.grad` is the average, the optimizer's step is its own
    delayed   `.grad`s are a rank's own and are pushed to the owners of the weights (`runtime.delayed`), who update
              them. In place of the optimizer's step each rank updates its own weights (`runtime.local_updates`); first
              they become the global ones, where a pull has come, which is once in every k steps

Step numbers count from 0 and warm-up is a multiple of k. Weights are pulled behind the pushes of steps with
(step + 1) mod k = 0, travel during the next step and are taken at its local update. `pre_weight` are the global weights
of the last pull: overwritten after that local update, which compares them with the new ones.
Source: SSD-SGD (Xu et al., arXiv 2012.05396), Algorithms 1 and 2.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runtime.collectives.delayed import PushPull
from runtime.communicator import make_communicator
from runtime.delayed import DelayedExchange
from runtime.errors import AccuracyWarning, InputError
from runtime.exchange import Exchange
from runtime.local_updates import LOCAL_UPDATES, LocalStep
from runtime.plan import Plan
from runtime.recorder import Recorder
from runtime.shards import Rates, Shard, check_state, joined, rates_of
from runtime.staleness import Staleness
from runtime.torch_compat import all_gather_single
from runtime.world import World

Stage = Literal["warm-up", "delayed", "synchronous"]


def synchronous(plan: Plan) -> Plan:
    """The plan's buckets without its delay."""
    return replace(plan, delay=None)


class Delay:
    """The stages of one session's run."""

    def __init__(
        self,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        world: World,
        parameters: Mapping[str, nn.Parameter],
        buffers: Sequence[Tensor],
        recorder: Recorder,
        *,
        put: Callable[[Exchange], None],
        steps_done: Callable[[], int],
        loss_scale: Callable[[], float] | None,
        guard: bool,
    ) -> None:
        """Every rank of `world` must call this: it makes a group of its own, whose messages cross nobody else's.

        Args:
            buffers: the model's, which stay a rank's own while it is delayed.
            put: gives the session another exchange.
            steps_done: how many steps the session has exchanged.
            loss_scale: gives the factor of this rank's losses.
            guard: shorten the delay where ranks are too far from each other, and say so where there is no warm-up.
        """
        assert plan.delay is not None
        self.plan, self.spec = plan, plan.delay
        self.stage: Stage = "warm-up"
        self.steps = plan.delay.steps
        """k: shortened where ranks drift apart."""
        self.staleness = Staleness()
        self._optimizer, self._parameters, self._buffers = optimizer, parameters, buffers
        self._recorder, self._put, self._steps_done = recorder, put, steps_done
        self._loss_scale, self._guarded = loss_scale or _unscaled, guard
        self._session_world = world
        self._world = world.split([range(world.ranks)])
        names = {id(parameter): name for name, parameter in parameters.items()}
        groups = [group["params"] for group in optimizer.param_groups]
        self._groups = [[(names[id(p)], p) for p in group if id(p) in names] for group in groups]
        self._lrs: deque[Rates] = deque(maxlen=self.steps)
        self._exchange: DelayedExchange | None = None
        self._before: dict[str, Tensor] = {}
        self._memory: dict[int, dict[int, Any]] = {}
        """What local updaters remember, by group."""
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._passes_over = False
        """Whether the optimizer's next step has been done already."""

    @property
    def active(self) -> bool:
        """Whether ranks have weights of their own now."""
        return self._exchange is not None

    def install(self) -> list[Any]:
        """Hooks the optimizer's step; returns the handles."""
        return [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]

    def start(self) -> None:
        """The session is complete: without warm-up, ranks are delayed from the first step on."""
        if self.spec.warmup_steps == 0:
            if self._guarded and self._world.rank == 0:
                warnings.warn(
                    "the delay begins without synchronous steps, in which weights change most: it may cost accuracy; "
                    "give the plan's delay warmup_steps, such as the 500 of the paper",
                    AccuracyWarning,
                    stacklevel=4,
                )
            self._begin()

    # One step, in the order in which it happens.

    def _before_step(self, _optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if self._exchange is None and not self._passes_over:
            return
        if any(callable(one) for one in (*arguments[1:], *keywords.values())):
            raise InputError(
                "optimizer.step(closure): found a closure, expected none, for a plan with delay takes the place of the "
                "optimizer's step: call backward before it"
            )
        self._hidden = [(p, p.grad) for group in self._groups for _, p in group if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None  # the optimizer passes over it

    def _after_step(self, *_: Any) -> None:
        rates = rates_of(self._optimizer)
        if self._exchange is not None:
            self._update(rates)
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden, self._passes_over = [], False
        self._lrs.append(rates)
        if self.stage == "warm-up":
            self._warm_up()

    def _warm_up(self) -> None:
        left = self.spec.warmup_steps - self._steps_done()
        if left <= self.steps:
            self.staleness.see_warmup(self._parameters, sum(self._lr_sums()), last=left <= 0)
        if left <= 0:
            self._begin()

    def _lr_sums(self) -> list[float]:
        """Of the last k steps, for each group."""
        return [sum(rates[index]["lr"] for rates in self._lrs) for index in range(len(self._groups))]

    @torch.no_grad()
    def _update(self, rates: Rates) -> None:
        exchange = self._exchange
        assert exchange is not None
        pulled = exchange.take()
        weights = {} if pulled is None else exchange.weights(pulled.whole)
        if weights:
            exchange.words = self.staleness.measure(self._parameters, weights, sum(self._lr_sums()))
            _copy([self._parameters[name] for name in weights], list(weights.values()))
        gradients = {id(parameter): gradient for parameter, gradient in self._hidden}
        for index, group in enumerate(self._groups):
            if group:
                self._update_group(index, group, gradients, rates[index])
        for name, weight in weights.items():
            self._before[name].copy_(weight, non_blocking=True)
        if pulled is not None:
            exchange.give_back(pulled)

    def _update_group(
        self,
        index: int,
        group: Sequence[tuple[str, nn.Parameter]],
        gradients: Mapping[int, Tensor],
        rates: Mapping[str, Any],
    ) -> None:
        weights = [parameter.detach() for _, parameter in group]
        step = LocalStep(
            weights=weights,
            gradients=[gradients.get(id(p), torch.zeros_like(w)) for (_, p), w in zip(group, weights, strict=True)],
            before=[self._before[name].to(p.device, non_blocking=True) for name, p in group],
            rates=rates,
            lr_sum=self._lr_sums()[index],
            spec=self.spec,
            state=self._memory.setdefault(index, {}),
        )
        LOCAL_UPDATES[self.spec.local_update](step)

    def _pulls_at(self, step: int, told: Tensor | None) -> bool:
        """Called by the exchange; what all ranks said decides how long the delay is from this step on."""
        if told is not None and self._guarded:
            self.steps = self.staleness.judge(told, step, self.steps)
            if self.steps:
                self._lrs = deque(self._lrs, maxlen=self.steps)
        return self.steps > 0 and (step + 1) % self.steps == 0

    @property
    def failed(self) -> bool:
        """Whether ranks are too far from each other, so that this step has to be the last one with a delay."""
        return self._exchange is not None and self.steps == 0

    # Stages.

    def _begin(self) -> None:
        """Ranks have the same weights: from now on each has its own."""
        rates = rates_of(self._optimizer)
        self._exchange = DelayedExchange(
            synchronous(self.plan), self._parameters, self._world.ranks,
            make_communicator(self._world, [PushPull()] * len(self.plan.buckets), _device(self._parameters)),
            self._recorder, optimizer=self._optimizer, rank=self._world.rank,
            rates=lambda: rates_of(self._optimizer), pulls_at=self._pulls_at, scale=self._loss_scale,
        )  # fmt: skip
        self._exchange.step = self._steps_done()
        self._before = {name: _kept(parameter) for name, parameter in self._parameters.items()}
        while len(self._lrs) < self.steps:  # with less warm-up than k
            self._lrs.append(rates)
        self.stage = "delayed"
        self._put(self._exchange)

    def end(self) -> None:
        """Ranks have the same weights and momentum again. All of them call this at the end of the same backward, whose
        gradients owners have used: the optimizer's next step passes over them.
        """
        exchange = self._exchange
        assert exchange is not None
        exchange.communicator.wait()
        weights, momenta = self._gathered(lambda shard: shard.weights), self._momenta()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
                if name in momenta:
                    self._optimizer.state[parameter]["momentum_buffer"] = momenta[name].clone()
        self._session_world.broadcast(self._buffers)
        self.stage, self._exchange, self._passes_over = "synchronous", None, True

    def _gathered(self, part_of: Callable[[Shard], Tensor]) -> dict[str, Tensor]:
        """What all owners have, by name, in the parameters' shapes."""
        assert self._exchange is not None
        found: dict[str, Tensor] = {}
        for shards in self._exchange.server.shards:
            for shard in shards:
                whole = torch.zeros_like(shard.pushed)
                with self._world.naming("gathering the global weights"):
                    all_gather_single(
                        whole.view(torch.uint8), part_of(shard).view(torch.uint8), group=self._world.group
                    )
                found |= shard.views(whole)
        return found

    def _momenta(self) -> dict[str, Tensor]:
        assert self._exchange is not None
        server = self._exchange.server
        if not any(group["momentum"] for group in self._optimizer.param_groups):
            return {}
        return self._gathered(server.momenta)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """See `Session.global_weights`."""
        if self._exchange is None:
            yield
            return
        self._exchange.communicator.wait()
        weights = self._gathered(lambda shard: shard.weights)
        pairs = [(parameter, weights[name]) for name, parameter in self._parameters.items()]
        own = [parameter.detach().clone() for parameter, _ in pairs]
        own_buffers = [buffer.detach().clone() for buffer in self._buffers]
        self._session_world.broadcast(self._buffers)
        _copy([parameter for parameter, _ in pairs], [weight for _, weight in pairs])
        try:
            yield
        finally:
            _copy([parameter for parameter, _ in pairs], own)
            _copy(self._buffers, own_buffers)

    def close(self) -> None:
        """Gives the group back."""
        self._exchange = None
        self._world.leave()

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """What `load` continues from, of this rank; copies. Waits for what is on its way."""
        state: dict[str, Any] = {
            "spec": asdict(self.spec), "stage": self.stage, "step": self._steps_done(), "steps": self.steps,
            "rates": list(self._lrs), "staleness": self.staleness.state(),
        }  # fmt: skip
        exchange = self._exchange
        if exchange is None:
            return state
        exchange.settle()
        pulls = [(pulled.step, _clones(exchange.weights(pulled.whole))) for pulled in exchange.pulls]
        return state | {
            "pieces": exchange.server.state(),
            "weights": _clones(self._parameters),
            "buffers": [buffer.detach().clone() for buffer in self._buffers],
            "pre_weight": _clones(self._before),
            "pulls": pulls, "told": exchange.told, "words": exchange.words, "memory": copy.deepcopy(self._memory),
        }  # fmt: skip

    def load(self, states: Sequence[Mapping[str, Any]], *, same_ranks: bool) -> int:
        """Goes on from states; returns the number of the next step.

        Args:
            states: this rank's alone; or, of a run with another number of ranks, those of all of its ranks in order.
            same_ranks: which of them.

        Raises:
            InputError: of a run with another delay, or another model.
        """
        first = states[0]
        check_state(first, self.spec, self._parameters)
        if self._steps_done():
            raise InputError("load_state_dict: found a session that has trained, expected one before its first step")
        self.steps = first["steps"]
        self._lrs = deque(first["rates"], maxlen=max(1, self.steps))
        self.staleness.load(first["staleness"])
        if first["stage"] == "delayed":
            self._go_on(states, same_ranks=same_ranks)
        else:
            self.stage = first["stage"]
        step: int = first["step"]
        return step

    @torch.no_grad()
    def _go_on(self, states: Sequence[Mapping[str, Any]], *, same_ranks: bool) -> None:
        first = states[0]
        if self._exchange is None:
            self._begin()
        exchange = self._exchange
        assert exchange is not None
        exchange.step = first["step"]
        for name, before in first["pre_weight"].items():
            self._before[name].copy_(before)
        if not same_ranks:
            weights, momenta = joined([one["pieces"] for one in states], self._parameters)
            exchange.server.set_weights(weights)
            exchange.server.set_momenta(momenta)
            _copy([self._parameters[name] for name in weights], list(weights.values()))
            return
        exchange.server.load(first["pieces"])
        _copy([self._parameters[name] for name in first["weights"]], list(first["weights"].values()))
        _copy(self._buffers, first["buffers"])
        for step, pulled in first["pulls"]:
            exchange.put_back(step, pulled)
        exchange.told, exchange.words, self._memory = first["told"], first["words"], copy.deepcopy(first["memory"])


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _unscaled() -> float:
    return 1.0


def _device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    return next(iter(parameters.values())).device


def _kept(parameter: nn.Parameter) -> Tensor:
    """A copy for `pre_weight`: on the host, for a device has better uses of its memory."""
    copy = parameter.detach().to("cpu", copy=True)
    return copy.pin_memory() if parameter.is_cuda else copy


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def delays_of(given: Any, rank: int, ranks: int) -> tuple[list[Any], bool]:
    """(what `Delay.load` continues from, whether the run had as many ranks), from `Session.state_dict()`s.

    Raises:
        InputError: no state of a run with delay; another rank's, or not those of all ranks.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    everyone: list[Any] = list(given) if several else [given]
    for one in everyone or [None]:
        if not isinstance(one, Mapping) or not {"ranks", "rank", "delay"} <= set(one):
            raise InputError(
                "found no state of a run with delay, expected what Session.state_dict() returned of one: go on with "
                "the plan that the run began with"
            )
    count = everyone[0]["ranks"]
    if several and [one["rank"] for one in everyone] == list(range(count)):
        states = [one["delay"] for one in everyone]
        return ([states[rank]], True) if count == ranks else (states, False)
    if several or (count, everyone[0]["rank"]) != (ranks, rank):
        raise InputError(
            f"found the states of ranks {[one['rank'] for one in everyone]} of {count}, this is rank {rank} of "
            f"{ranks}; expected its own, or those of all ranks in order: pass a list of them on every rank"
        )
    return [everyone[0]["delay"]], True
