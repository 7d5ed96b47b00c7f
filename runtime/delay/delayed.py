"""Delay: ranks do not wait for each other's gradients (SSD-SGD); the two stages of a run.

    warm-up   synchronous steps, by the plan's buckets: every `.grad` is the average, the optimizer's step is its own
    delayed   `.grad`s are a rank's own and are pushed to the owners of the weights (`runtime.delay.exchange`), who
              update them. In place of the optimizer's step each rank updates its own weights
              (`runtime.delay.local_weights`); first they become the global ones, where a pull has come, which is once
              in every k steps

A worker is a rank, or where the plan has fewer nodes than ranks a node, whose ranks have the same weights and `.grad`s.
Warm-up sends everything, also in buckets whose pushes are compressed.
Step numbers count from 0 and warm-up is a multiple of k. Weights are pulled behind the pushes of steps with
(step + 1) mod k = 0, are sent during the next step and are taken at its local update. `pre_weight` are the global
weights of the last pull: overwritten after that local update, which compares them with the new ones.
Source: SSD-SGD (Xu et al., arXiv 2012.05396), Algorithms 1 and 2.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runtime.core.buckets import make_plain_buckets
from runtime.core.exchange import Exchange
from runtime.delay.checkpoint import VERSION, buckets_of, check_state, clones, copy_all, own_state
from runtime.delay.exchange import Pushes, PushResiduals
from runtime.delay.local_weights import LocalWeights
from runtime.delay.nodes import NodeGroups, communicator_of, workers_of
from runtime.delay.server import Rates, rates_of
from runtime.errors import AccuracyWarning, InputError
from runtime.modes.base import Host, Mode, StepHooks, check_one_dtype, make_on_all_ranks, warn_of_scales
from runtime.modes.distance_guard import NO_DISTANCE, WINDOWS, DistanceGuard
from runtime.monitor.pace import Pace
from runtime.optimizers.kinds import find_missing
from runtime.plan import HINT, Plan
from runtime.plan.combinations import DELAY

Stage = Literal["warm-up", "delayed", "synchronous"]
OVER: Stage = "synchronous"
"""Stage of a run whose delay has ended, or has not been possible."""

SGD_ONLY = ("dampening", "maximize", "differentiable", "fused")
"""Options of torch.optim.SGD that owners do not have. A fused step is scaled by a GradScaler itself, and what takes its
place here is not."""


class Delayed(Mode, StepHooks):
    """The stages of one session's run."""

    name = DELAY
    what = "a delay"
    relaxed = True
    late_reason = "the plan has a delay, whose warm-up begins with a run; expected delay null: attach with that plan"
    aside_reason = (
        "the session has a delay, so that ranks have weights of their own; expected one without: attach an exact plan, "
        "and name the one with a delay in this call"
    )
    residual_reason = (
        'residual_unit: found "update" and a plan with a delay, whose servers keep momenta of gradients; expected '
        '"gradient": leave it out, or use a plan with delay null'
    )
    weight_reason = (
        "the plan has a delay, whose servers add up what ranks push at unlike times, so that ranks have no weights; "
        "expected delay null: plan with `--accuracy exact` or `bounded`, or give no weights"
    )
    lingers = True
    has_workers = True

    @classmethod
    def owned_step(cls, plan: Plan) -> str | None:
        return "has a delay, for which owners of the weights do the optimizer's step"

    @classmethod
    def check_plan(cls, plan: Plan, parameters: Mapping[str, nn.Parameter]) -> str | None:
        delay = plan.delay
        assert delay is not None
        if delay.steps < 1 or delay.warmup_steps < 0:  # of a plan that a program made
            return (
                f"the delay has steps {delay.steps} and warmup_steps {delay.warmup_steps}; expected at least 1 and 0, "
                f"such as 4 and 500: correct it"
            )
        if delay.local_update != "glu":
            return (
                f"the delay's local_update is {delay.local_update!r}; expected 'glu': leave it out (what was 'sgd' is "
                f"alpha 1 with beta 0)"
            )
        if delay.warmup_steps % delay.steps:
            return (
                f"the delay has {delay.warmup_steps} warmup_steps, expected a multiple of its {delay.steps} steps, "
                f"such as {-(-delay.warmup_steps // delay.steps) * delay.steps}"
            )
        if plan.world.nodes == 1 and plan.world.ranks > 1:
            return (
                f"the plan has a delay for {plan.world.ranks} ranks on one node, which is one worker, and nothing is "
                f"between nodes; expected at least two nodes, or as many as ranks, whose workers are the ranks: {HINT}"
            )
        return check_one_dtype(plan, parameters, "but is pushed")

    @classmethod
    def check_optimizer(
        cls, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], planned: Mapping[str, nn.Parameter]
    ) -> str | None:
        """See `Mode.check_optimizer`: owners of the weights do what plain SGD does."""
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        odd = "no optimizer" if optimizer is None else type(optimizer).__name__
        if isinstance(optimizer, torch.optim.SGD):
            found = (f"SGD with {o}" for group in optimizer.param_groups for o in SGD_ONLY if group[o])
            odd = next(found, "")
        if odd:
            return (
                f"the plan has a delay, for which owners of the weights and ranks do what torch.optim.SGD does, but "
                f"found {odd}; expected torch.optim.SGD with momentum, weight decay or Nesterov's momentum: use that, "
                f"or plan without --accuracy relaxed"
            )
        if (missing := find_missing(optimizer, planned)) is not None:
            return (
                f"the plan has a delay and the gradient {missing}, whose parameter is not in the optimizer; expected "
                f"all of them in it, for owners of the weights do what it does: add that parameter, or freeze it "
                f"before profiling"
            )
        return None

    @property
    def synchronous_plan(self) -> Plan:
        """See `Mode.synchronous_plan`: all buckets dense."""
        return replace(self.plan.with_dense_buckets(), delay=None)

    def __init__(self, plan: Plan, host: Host) -> None:
        """Make a group of its own, whose messages cross nobody else's; all ranks call this."""
        super().__init__(plan, host)
        assert plan.delay is not None
        assert host.optimizer is not None  # else the plan has been refused
        self.spec, self._optimizer = plan.delay, host.optimizer
        self.stage: Stage = "warm-up"
        self.steps = plan.delay.steps
        """Steps between two pulls (k); shortened if ranks drift apart."""
        warns = host.world.rank == 0
        self.distances = DistanceGuard(warns=warns)
        self.pace = Pace(host.recorder.clock, self.steps, warns=warns)
        self._parameters = {name: host.parameters[name] for name in plan.gradients}
        self._device = next(iter(self._parameters.values())).device
        self._loss_scale = host.options.loss_scale or (lambda: 1.0)
        self.workers = workers_of(plan, host.world)
        self._groups_of_nodes = NodeGroups.make(host.world, self.workers) if self.workers.ranks_per_node > 1 else None
        self._world = host.world
        if self._groups_of_nodes is None:
            self._world = host.world.split([range(host.world.ranks)])
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._names_of_groups = self._listed()
        self._groups = [[(name, self._parameters[name]) for name in group] for group in self._names_of_groups]
        self._lrs: deque[Rates] = deque(maxlen=self.steps)
        self._pushes: Pushes | None = None
        self._own = LocalWeights(plan.delay, self._parameters, self._groups)
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._updated = 0
        """Number of exchanged steps at the optimizer's last step."""
        self._done_by_owners: int | None = None
        """Step whose gradients owners have used, so that the optimizer must not use them again."""
        self._norms: Tensor | None = None
        """Norms of the weights, after an exchange without an optimizer's step. Shape (parameters,)."""
        self._places: dict[str, int] | None = None
        """Addresses of the weights after the last update, by name, while ranks are delayed."""

    @property
    def own_weights(self) -> bool:
        return self._pushes is not None

    predicted = own_weights  # the warm-up is as long as it is

    def begin(self, exchange: Exchange) -> None:
        """See `Mode.begin`: without warm-up, ranks are delayed from the first step on."""
        if self.spec.warmup_steps == 0:
            if self.host.options.guard and self._world.rank == 0:
                warnings.warn(
                    "the delay begins without synchronous steps, in which weights change most: it may cost accuracy; "
                    "give the plan's delay warmup_steps, such as the 500 of the paper",
                    AccuracyWarning,
                    stacklevel=4,
                )
            self._begin()

    def _listed(self) -> list[list[str]]:
        """Return the parameters in the optimizer's groups now, by name."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        return [[self._names[id(p)] for p in group if id(p) in self._names] for group in groups]

    # What would leave ranks alone.

    @property
    def hooks(self) -> StepHooks:
        return self

    def begin_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError for a step of another optimizer than the attached one with this model's parameters."""
        if self.stage == OVER:
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
    def exchanged(self) -> None:
        """See `Mode.exchanged`. Raises InputError where weights have changed, and not by an optimizer's step."""
        first = self.host.step == 1
        if self.stage == OVER or (self._updated == self.host.step - 1 and not first):
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

    def _note_places(self) -> None:
        here = {name: parameter.data_ptr() for name, parameter in self._parameters.items()}
        self._places = here if self._pushes is not None else None

    # One step, in the order in which it happens.

    def before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Let the optimizer pass over pushed gradients. Raises InputError for closures, other groups, moved weights."""
        groups = self._optimizer.param_groups
        if self.stage == OVER and self._done_by_owners != self.host.step:
            return
        if any(callable(one) for one in (*arguments[1:], *keywords.values())):
            raise InputError(
                "optimizer.step(closure): found a closure, expected none, for a plan with delay takes the place of the "
                "optimizer's step: call backward before it"
            )
        if len(groups) != len(self._groups):
            raise InputError(
                f"found {len(groups)} groups of parameters in the optimizer, expected the "
                f"{len(self._groups)} that it had at attach: with a delay, owners of the weights update them, too"
            )
        if self._listed() != self._names_of_groups:
            raise InputError(
                "found other parameters in the optimizer's groups than it had at attach; with a delay, owners of the "
                "weights update them, too: keep the groups, or call session.detach() and attach again"
            )
        if self.stage == "warm-up":
            return
        for name, place in (self._places or {}).items():
            if self._parameters[name].data_ptr() != place:
                raise InputError(
                    f"{name}.data was replaced since the last step, which the owners of the global weights do not hear "
                    f"of: the next pull would undo it; expected the memory that it had: put it back before the step, "
                    f"or call session.switch to a plan without a delay first"
                )
        self._hidden = [(p, p.grad) for group in self._groups for _, p in group if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See `StepHooks.after_step`: this rank updates its own weights."""
        rates = rates_of(self._optimizer)
        if self._pushes is not None:
            self._update(rates)
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden, self._updated = [], self.host.step
        self._lrs.append(rates)
        if self.stage == "warm-up":
            left = self.spec.warmup_steps - self.host.step
            if left > WINDOWS * self.steps:  # later ones are looked at, too, which takes time
                self.pace.synchronous_step(self.host.step)
            lr = sum(group["lr"] for group in rates)
            self.distances.see_warmup(self._parameters, lr, left=left, steps=self.steps)
            if left <= 0:
                self._begin()
        self._note_places()

    def _lr_sums(self) -> list[float]:
        return [sum(rates[index]["lr"] for rates in self._lrs) for index in range(len(self._groups))]

    @torch.no_grad()
    def _update(self, rates: Rates) -> None:
        pushes = self._pushes
        assert pushes is not None
        pulled = pushes.take()
        weights = {} if pulled is None else pushes.weights(pulled.whole)
        if weights:
            pushes.distance = self.distances.measure(self._parameters, weights, sum(self._lr_sums()))
            self._own.take(weights)
        # What is not finite is no gradient; on a device nobody waits to know it.
        if pushes.finite.device.type != "cpu" or pushes.finite:
            self._own.update({id(p): gradient for p, gradient in self._hidden}, rates, self._lr_sums())
        self._own.overwrite(weights)
        if pulled is not None:
            pushes.give_back(pulled)

    def _pulls_at(self, step: int, reported: Tensor | None) -> bool:
        # What all ranks said decides how long the delay is from this step on.
        if reported is not None and self.host.options.guard:
            self.steps = self.distances.judge(reported[:, : len(NO_DISTANCE)], step, self.steps)
            self.steps *= self.pace.allows(reported[:, len(NO_DISTANCE) :])
            if self.steps:
                self._lrs = deque(self._lrs, maxlen=self.steps)
        if self._pushes is not None and self.host.options.guard:
            self._pushes.pace = self.pace.delayed_step(self.steps)
        return self.steps > 0 and (step + 1) % self.steps == 0

    @property
    def over(self) -> bool:
        """See `Mode.over`: ranks are too far from each other, or no faster."""
        return self._pushes is not None and self.steps == 0

    def send_as(self, bucket: int, following: Plan) -> bool:
        """See `Mode.send_as`: from the next push on, while ranks are delayed."""
        if self._pushes is None:
            return False
        self._pushes.push_as(bucket, following.buckets[bucket].compressor)
        self.plan = following
        return True

    # Stages.

    def _begin(self) -> None:
        """Let each rank have weights of its own from now on, if all have memory for it."""
        rates, warning = rates_of(self._optimizer), "the run stays synchronous: no memory for a delay"
        pushes = make_on_all_ranks(self._make_pushes, self.host.world, "beginning a delay", warning)
        if pushes is None:
            self.stage = OVER
            return
        while len(self._lrs) < self.steps:  # with less warm-up than k
            self._lrs.append(rates)
        self.stage, self._pushes = "delayed", pushes
        self._note_places()
        held = PushResiduals(pushes.server)
        self.host.put(Exchange(self.plan, self.host.parameters, pushes.buckets, pushes, held, self.host.recorder))

    def _make_pushes(self) -> Pushes:
        """Lay out the pushes of delayed steps, and memory for this rank's own weights."""
        communicator = communicator_of(self._groups_of_nodes, self._world, len(self.plan.buckets), self._device)
        pushes = Pushes(
            self.plan, make_plain_buckets(self.plan, self.host.parameters), self.workers, communicator,
            self.host.recorder, optimizer=self._optimizer, rank=self._world.rank, pulls_at=self._pulls_at,
            loss_scale=self._loss_scale,
        )  # fmt: skip
        pushes.step = self.host.step
        self._own.begin()
        return pushes

    def end(self) -> None:
        """See `Mode.end`: ranks have the same weights and momentum again.

        Where owners have used the gradients of a backward whose optimizer's step is yet to come, that step passes over.
        """
        pushes, self.stage = self._pushes, OVER
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
        self.host.world.broadcast(self.host.synced_buffers())
        if self._updated != self.host.step:
            self._done_by_owners = self.host.step
        warn_of_scales(self.host)
        self._pushes = None
        self._own.end()

    def _weights(self) -> dict[str, Tensor]:
        assert self._pushes is not None
        return self._pushes.server.gathered(lambda shard: shard.weights, self._world)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        if self._pushes is None:
            yield
            return
        self._pushes.communicator.wait()
        weights, buffers = self._weights(), self.host.synced_buffers()
        with self._own.aside(buffers):
            self.host.world.broadcast(buffers)
            self._own.take(weights)
            yield

    def close(self) -> None:
        self._pushes = None
        if self._groups_of_nodes is not None:
            self._groups_of_nodes.leave()
        else:
            self._world.leave()

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """See `Mode.state`; copies. Waits for what is on its way. Raises InputError: the session is detached."""
        if self.stage == "delayed" and self._pushes is None:
            raise InputError(
                "state_dict: the session is detached; expected one with its weights: call it before detach"
            )
        state: dict[str, Any] = {
            "version": VERSION, "spec": asdict(self.spec), "stage": self.stage, "step": self.host.step,
            "steps": self.steps, "rates": list(self._lrs), "staleness": self.distances.state(),
            "pace": self.pace.state(), "workers": self.workers.num_nodes,
        }  # fmt: skip
        pushes = self._pushes
        if pushes is None:
            return {"rank": self.host.world.rank, "delay": state}
        pushes.come()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # pre_weight may still be on its way to the host
        pulls = [(pulled.step, clones(pushes.weights(pulled.whole))) for pulled in pushes.pulls]
        state |= {
            "pushed": pushes.step,
            "pieces": pushes.server.state(),
            "residuals": pushes.server.residuals(),
            "buckets": buckets_of(self.plan),
            "pulls": pulls,
            "reported": pushes.reported,
            "distance": pushes.distance,
            **self._own.state(self.host.synced_buffers()),
        }
        return {"rank": self.host.world.rank, "delay": state}

    def load(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> int:
        """See `Mode.load`. Raises InputError for another delay, model, optimizer, ranks, workers or buckets."""
        buckets = buckets_of(self.plan)
        own = own_state(state, self._world.rank, self._world.ranks, self.workers.num_nodes, buckets)
        check_state(own, self.spec, self._parameters, len(self._groups))
        if self.host.step:
            raise InputError("load_state_dict: found a session that has trained, expected one before its first step")
        self.steps = own["steps"]
        self._lrs = deque(own["rates"], maxlen=max(1, self.steps))
        self.distances.load(own["staleness"])
        self.pace.load(own["pace"])
        if own["stage"] == "delayed":
            self._go_on(own)
        else:
            self.stage = own["stage"]
            if self._pushes is not None:  # the plan has no warm-up
                self._pushes = None
                self.host.put(self.make_exchange())
        step: int = own["step"]
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
        copy_all(self.host.synced_buffers(), state["buffers"])
        for step, pulled in state["pulls"]:
            pushes.put_back(step, pulled)
        pushes.reported, pushes.distance = state["reported"], state["distance"]
