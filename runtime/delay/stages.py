"""Delay: the two stages of a run whose ranks do not wait for each other's gradients (SSD-SGD).

    warm-up   synchronous steps, by the plan's buckets: every `.grad` is the average, the optimizer's step is its own
    delayed   `.grad`s are a rank's own and are pushed to the owners of the weights (`runtime.delay.exchange`), who
              update them. In place of the optimizer's step each rank updates its own weights
              (`runtime.delay.local_updates`); first they become the global ones, where a pull has come, which is once
              in every k steps

A worker is a rank, or where the plan has fewer nodes than ranks a node, whose ranks have the same weights and `.grad`s.
Warm-up sends everything, also in buckets whose pushes are compressed.
Step numbers count from 0 and warm-up is a multiple of k. Weights are pulled behind the pushes of steps with
(step + 1) mod k = 0, travel during the next step and are taken at its local update. `pre_weight` are the global weights
of the last pull: overwritten after that local update, which compares them with the new ones.
Source: SSD-SGD (Xu et al., arXiv 2012.05396), Algorithms 1 and 2.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runtime.comm.world import World, first_line
from runtime.core.exchange import Exchange
from runtime.core.layout import make_plain_buckets
from runtime.delay.checkpoint import buckets_of, check_state, clones, copy_all, own_state
from runtime.delay.exchange import HeldPushes, Pushes
from runtime.delay.local_weights import LocalWeights
from runtime.delay.nodes import NodeGroups, communicator_of, workers_of
from runtime.delay.server import Rates, rates_of
from runtime.delay.staleness import NOTHING, WINDOWS, Staleness
from runtime.errors import AccuracyWarning, FallbackWarning, InputError
from runtime.monitor.pace import Pace
from runtime.monitor.recorder import Recorder
from runtime.plan import Plan
from runtime.torch_compat import is_out_of_memory

Stage = Literal["warm-up", "delayed", "synchronous"]


class Delay:
    """The stages of one session's run."""

    def __init__(
        self,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        world: World,
        parameters: Mapping[str, nn.Parameter],
        buffers: Callable[[], list[Tensor]],
        recorder: Recorder,
        *,
        put: Callable[[Exchange | None], None],
        steps_done: Callable[[], int],
        loss_scale: Callable[[], float] | None,
        guard: bool,
    ) -> None:
        """Every rank of `world` must call this: it makes a group of its own, whose messages cross nobody else's.

        Args:
            buffers: the model's that follow rank 0; while a rank is delayed they stay its own.
            put: gives the session another exchange; None: a synchronous one.
            steps_done: how many steps the session has exchanged.
            loss_scale: gives the factor of this rank's losses.
            guard: shorten the delay where ranks are too far from each other, end it where it is not faster.
        """
        assert plan.delay is not None
        self.plan, self.spec = plan, plan.delay
        self.stage: Stage = "warm-up"
        self.steps = plan.delay.steps
        """k: shortened where ranks drift apart."""
        self.staleness, self.pace = Staleness(), Pace(recorder.clock, self.steps)
        self._optimizer, self._buffers = optimizer, buffers
        self._all, self._parameters = parameters, {name: parameters[name] for name in plan.gradients}
        self._recorder, self._put, self._steps_done = recorder, put, steps_done
        self._loss_scale, self._guarded = loss_scale or (lambda: 1.0), guard
        self._session_world = world
        self.workers = workers_of(plan, world)
        self._groups_of_nodes = NodeGroups.make(world, self.workers) if self.workers.per_node > 1 else None
        self._world = world if self._groups_of_nodes is not None else world.split([range(world.ranks)])
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._names_of_groups = self._listed()
        self._groups = [[(name, self._parameters[name]) for name in group] for group in self._names_of_groups]
        self._lrs: deque[Rates] = deque(maxlen=self.steps)
        self._pushes: Pushes | None = None
        self._own = LocalWeights(plan.delay, self._parameters, self._groups)
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._updated = 0
        """How many steps had been exchanged at the optimizer's last one."""
        self._done_by_owners: int | None = None
        """The step whose gradients owners have used, so that the optimizer has to pass over them."""
        self._norms: Tensor | None = None
        """Of the weights, where a step has come without one of the optimizer's. Shape (parameters,)."""
        self._places: list[int] | None = None
        """While ranks are delayed: where the weights lay after the last update."""

    @property
    def active(self) -> bool:
        """Whether ranks have weights of their own now."""
        return self._pushes is not None

    def install(self) -> list[Any]:
        """Hooks the optimizer's step, and those of others; returns the handles."""
        _watch_all_steps()
        _delays.add(self)
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

    def _listed(self) -> list[list[str]]:
        """The parameters in the optimizer's groups now, by name."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        return [[self._names[id(p)] for p in group if id(p) in self._names] for group in groups]

    # What would leave ranks alone.

    def refuse_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before any optimizer's step: of this model's parameters only the attached one may make it."""
        if optimizer is self._optimizer or self.stage == "synchronous":
            return
        held = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        name = next((self._names[one] for one in held if one in self._names), None)
        if name is not None:
            raise InputError(
                f"found a step of another optimizer ({type(optimizer).__name__}) that holds {name}, expected steps of "
                f"the one given to attach, for with a delay owners of the weights do what that one does: make the "
                f"optimizer before attach, or call session.detach() and attach with the new one"
            )

    @torch.no_grad()
    def step_done(self) -> None:
        """A step's gradients have been exchanged.

        Raises:
            InputError: weights have changed in a way that no optimizer's step is, and the optimizer makes none.
        """
        first = self._steps_done() == 1
        if self.stage == "synchronous" or (self._updated == self._steps_done() - 1 and not first):
            self._norms = None
            return
        parameters = [parameter.detach() for parameter in self._parameters.values() if parameter.numel()]
        before, self._norms = self._norms, torch.stack([norm.double() for norm in torch._foreach_norm(parameters)])
        if before is not None and not torch.allclose(before, self._norms, rtol=0.0, atol=0.0, equal_nan=True):
            raise InputError(
                "the weights have changed since the last step, and the optimizer given to attach made no step; "
                "expected its optimizer.step(), for with a delay owners of the weights do what it does: let it update "
                "them, or use a plan without a delay"
            )

    def _refuse_moved(self) -> None:
        if self._places is None:
            return
        places = zip(self._parameters.items(), self._places, strict=True)
        moved = next((name for (name, parameter), place in places if parameter.data_ptr() != place), None)
        if moved is not None:
            raise InputError(
                f"{moved}.data was replaced since the last step, which the owners of the global weights do not hear "
                f"of: the next pull would undo it; expected the memory that it had: put it back before the step, or "
                f"call session.switch to a plan without a delay first"
            )

    def _note_places(self) -> None:
        self._places = [p.data_ptr() for p in self._parameters.values()] if self._pushes is not None else None

    # One step, in the order in which it happens.

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if self.stage == "synchronous" and self._done_by_owners != self._steps_done():
            return
        if any(callable(one) for one in (*arguments[1:], *keywords.values())):
            raise InputError(
                "optimizer.step(closure): found a closure, expected none, for a plan with delay takes the place of the "
                "optimizer's step: call backward before it"
            )
        if len(optimizer.param_groups) != len(self._groups):
            raise InputError(
                f"found {len(optimizer.param_groups)} groups of parameters in the optimizer, expected the "
                f"{len(self._groups)} that it had at attach: with a delay, owners of the weights update them, too"
            )
        if self._listed() != self._names_of_groups:
            raise InputError(
                "found other parameters in the optimizer's groups than it had at attach; with a delay, owners of the "
                "weights update them, too: keep the groups, or call session.detach() and attach again"
            )
        if self.stage == "warm-up":
            return
        self._refuse_moved()
        self._hidden = [(p, p.grad) for group in self._groups for _, p in group if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None  # the optimizer passes over it

    def _after_step(self, *_: Any) -> None:
        rates = rates_of(self._optimizer)
        if self._pushes is not None:
            self._update(rates)
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden, self._updated = [], self._steps_done()
        self._lrs.append(rates)
        if self.stage == "warm-up":
            left = self.spec.warmup_steps - self._steps_done()
            if left > WINDOWS * self.steps:  # later ones are looked at, too, which takes time
                self.pace.synchronous_step(self._steps_done())
            lr = sum(group["lr"] for group in rates)
            self.staleness.see_warmup(self._parameters, lr, left=left, steps=self.steps)
            if left <= 0:
                self._begin()
        self._note_places()

    def _lr_sums(self) -> list[float]:
        """Of the last k steps, for each group."""
        return [sum(rates[index]["lr"] for rates in self._lrs) for index in range(len(self._groups))]

    @torch.no_grad()
    def _update(self, rates: Rates) -> None:
        pushes = self._pushes
        assert pushes is not None
        pulled = pushes.take()
        weights = {} if pulled is None else pushes.weights(pulled.whole)
        if weights:
            pushes.words = self.staleness.measure(self._parameters, weights, sum(self._lr_sums()))
            self._own.take(weights)
        # What is not finite is no gradient; on a device nobody waits to know it.
        if pushes.finite.device.type != "cpu" or pushes.finite:
            self._own.update({id(p): gradient for p, gradient in self._hidden}, rates, self._lr_sums())
        self._own.overwrite(weights)
        if pulled is not None:
            pushes.give_back(pulled)

    def _pulls_at(self, step: int, told: Tensor | None) -> bool:
        """Called by the exchange; what all ranks said decides how long the delay is from this step on."""
        if told is not None and self._guarded:
            self.steps = self.staleness.judge(told[:, : len(NOTHING)], step, self.steps)
            self.steps *= self.pace.allows(told[:, len(NOTHING) :])
            if self.steps:
                self._lrs = deque(self._lrs, maxlen=self.steps)
        if self._pushes is not None and self._guarded:
            self._pushes.pace = self.pace.delayed_step(self.steps)
        return self.steps > 0 and (step + 1) % self.steps == 0

    @property
    def has_to_end(self) -> bool:
        """Whether ranks are too far from each other, or no faster: this step has to be the last one with a delay."""
        return self._pushes is not None and self.steps == 0

    def push_whole(self, bucket: int) -> bool:
        """Whether ranks are delayed: then a bucket pushes everything from the next step on. All ranks call it alike."""
        if self._pushes is not None:
            self._pushes.push_whole(bucket)
        return self._pushes is not None

    # Stages.

    def _begin(self) -> None:
        """Ranks have the same weights: from now on each has its own, if all have memory for it."""
        rates, pushes, problem = rates_of(self._optimizer), None, None
        try:
            pushes = self._make_pushes()
            self._own.begin()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = first_line(error)
        problems = [one for one in self._session_world.gather(problem, "beginning a delay") if one]
        if problems or pushes is None:
            warnings.warn(
                f"the run stays synchronous: no memory for a delay ({problems[0]})", FallbackWarning, stacklevel=4
            )
            self.stage = "synchronous"
            return
        while len(self._lrs) < self.steps:  # with less warm-up than k
            self._lrs.append(rates)
        self.stage, self._pushes = "delayed", pushes
        self._note_places()
        held = HeldPushes(pushes.server)
        self._put(Exchange(self.plan, self._all, pushes.buckets, pushes, held, self._recorder))

    def _make_pushes(self) -> Pushes:
        device = _device(self._parameters)
        communicator = communicator_of(self._groups_of_nodes, self._world, len(self.plan.buckets), device)
        made = Pushes(
            self.plan, make_plain_buckets(self.plan, self._all), self.workers, communicator, self._recorder,
            optimizer=self._optimizer, rank=self._world.rank, rates=lambda: rates_of(self._optimizer),
            pulls_at=self._pulls_at, loss_scale=self._loss_scale,
        )  # fmt: skip
        made.step = self._steps_done()
        return made

    def end(self) -> None:
        """Ranks have the same weights and momentum again; all of them call this at the same step.

        Where owners have used the gradients of a backward whose optimizer's step is yet to come, that step passes over.
        """
        pushes, self.stage = self._pushes, "synchronous"
        if pushes is None:
            return
        pushes.come()
        weights, server = self._weights(), pushes.server
        momenta: dict[str, Tensor] = {}
        if any(group["momentum"] for group in self._optimizer.param_groups):
            momenta = server.gathered(server.momenta, self._world)
        copy_all([self._parameters[name] for name in weights], list(weights.values()))
        for name, momentum in momenta.items():
            self._optimizer.state[self._parameters[name]]["momentum_buffer"] = momentum.clone()
        self._session_world.broadcast(self._buffers())
        if self._updated != self._steps_done():
            self._done_by_owners = self._steps_done()
        scales = self._session_world.gather(self._loss_scale(), "comparing loss scales")
        if len(set(scales)) > 1:
            text = (
                f"ranks scale losses differently now ({', '.join(f'{scale:g}' for scale in scales)}), and synchronous "
            )
            text += "steps average their gradients: give all scalers one scale, scaler.update(new_scale=…)"
            warnings.warn(text, AccuracyWarning, stacklevel=3)
        self._pushes = None
        self._own.end()

    def _weights(self) -> dict[str, Tensor]:
        assert self._pushes is not None
        return self._pushes.server.gathered(lambda shard: shard.weights, self._world)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """See `Session.global_weights`."""
        if self._pushes is None:
            yield
            return
        self._pushes.communicator.wait()
        weights, buffers = self._weights(), self._buffers()
        with self._own.aside(buffers):
            self._session_world.broadcast(buffers)
            self._own.take(weights)
            yield

    def close(self) -> None:
        """Gives the group back."""
        _delays.discard(self)
        self._pushes = None
        if self._groups_of_nodes is not None:
            self._groups_of_nodes.leave()
        else:
            self._world.leave()

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """What `load` continues from, of this rank; copies. Waits for what is on its way.

        Raises:
            InputError: the session is detached.
        """
        if self.stage == "delayed" and self._pushes is None:
            raise InputError(
                "state_dict: the session is detached; expected one with its weights: call it before detach"
            )
        state: dict[str, Any] = {
            "spec": asdict(self.spec), "stage": self.stage, "step": self._steps_done(), "steps": self.steps,
            "rates": list(self._lrs), "staleness": self.staleness.state(), "pace": self.pace.state(),
            "workers": self.workers.count,
        }  # fmt: skip
        pushes = self._pushes
        if pushes is None:
            return state
        pushes.come()
        if _device(self._parameters).type == "cuda":
            torch.cuda.current_stream().synchronize()  # pre_weight may still be on its way to the host
        pulls = [(pulled.step, clones(pushes.weights(pulled.whole))) for pulled in pushes.pulls]
        return state | {
            "pushed": pushes.step,
            "pieces": pushes.server.state(),
            "residuals": pushes.server.residuals(),
            "buckets": buckets_of(self.plan),
            "pulls": pulls, "told": pushes.told, "words": pushes.words, **self._own.state(self._buffers()),
        }  # fmt: skip

    def load(self, given: Any) -> int:
        """Goes on; returns the number of the next step.

        Args:
            given: see `Session.load_state_dict`.

        Raises:
            InputError: of a run with another delay, model or optimizer, or with other ranks, workers or buckets.
        """
        buckets = buckets_of(self.plan)
        state = own_state(given, self._world.rank, self._world.ranks, self.workers.count, buckets)
        check_state(state, self.spec, self._parameters, len(self._groups))
        if self._steps_done():
            raise InputError("load_state_dict: found a session that has trained, expected one before its first step")
        self.steps = state["steps"]
        self._lrs = deque(state["rates"], maxlen=max(1, self.steps))
        self.staleness.load(state["staleness"])
        self.pace.load(state["pace"])
        if state["stage"] == "delayed":
            self._go_on(state)
        else:
            self.stage = state["stage"]
            if self._pushes is not None:  # the plan has no warm-up
                self._pushes = None
                self._put(None)
        step: int = state["step"]
        return step

    @torch.no_grad()
    def _go_on(self, state: Mapping[str, Any]) -> None:
        if self._pushes is None:
            self._begin()
        pushes = self._pushes
        assert pushes is not None
        pushes.step = state["pushed"]
        self._own.load(state)
        pushes.server.load(state["pieces"])
        pushes.server.put_residuals(state["residuals"])
        copy_all(self._buffers(), state["buffers"])
        for step, pulled in state["pulls"]:
            pushes.put_back(step, pulled)
        pushes.told, pushes.words = state["told"], state["words"]


_delays: weakref.WeakSet[Delay] = weakref.WeakSet()


def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for delay in _delays:
        delay.refuse_other(optimizer)


@functools.cache
def _watch_all_steps() -> None:
    """Once in a process, for good: torch goes through these hooks while a session may be collected."""
    register_optimizer_step_pre_hook(_before_any_step)


def _device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    return next(iter(parameters.values())).device
