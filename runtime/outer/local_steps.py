"""Outer steps: workers train alone for some steps, and an outer optimizer moves the weights that they share.

    warm-up   synchronous steps by the plan's buckets, all of them dense
    local     `.grad`s are a worker's own, or of a node's ranks; behind local step s the fragments that are due leave
              (`runtime.outer.fragments`), and t steps later a worker's weights are mixed with the new anchor

Where the optimizer step is sharded inside nodes, it is sharded over all ranks in the warm-up; its state is cut anew
when local steps begin.

Local steps are counted by exchanges, which are the same on all ranks, not by optimizer's steps, which a GradScaler may
leave out on some. What is due behind a step is done behind `optimizer.step()`, or where that was left out, before the
next forward. Sources: DiLoCo (Douillard et al., arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512); with an outer
rate of 1 and no momentum, local SGD (Stich, arXiv 1805.09767).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from runtime.comm.world import World
from runtime.core.closures import DECIDE_BY_LOSS
from runtime.core.exchange import Exchange
from runtime.errors import InputError
from runtime.modes.base import NO_HOOKS, Host, Mode, StepHooks, check_one_dtype, make_on_all_ranks, warn_of_scales
from runtime.monitor.step_report import StepReport
from runtime.outer import saved_state
from runtime.outer.averages import average_optimizer, mean_over
from runtime.outer.fragments import Fragments
from runtime.outer.period import Period
from runtime.outer.saved_state import copied
from runtime.plan import HINT, Plan, StepPlan, UpdatePlan
from runtime.plan.combinations import OUTER
from runtime.sharded.gradient import PartialTensor
from runtime.sharded.sharded import Sharded
from runtime.sharded.step import HOST
from runtime.sparse.compressed import all_finite
from runtime.torch_compat import OUTSIDE, current_backward_id


class Outer(Mode, StepHooks):
    """The stages of one session's run."""

    name = OUTER
    what = "outer steps"
    relaxed = True
    lingers = True
    has_workers = True
    several = True
    aside_reason = (
        "the session has outer steps, so that workers have weights of their own; expected one without: attach an exact "
        "plan, and name the one with outer steps in this call"
    )
    residual_reason = (
        'residual_unit: found "update" and a plan with outer steps, whose workers send differences of weights; '
        'expected "gradient": leave it out, or use a plan with outer null'
    )
    weight_reason = (
        "the plan has outer steps, between which workers train alone, so that ranks have no weights; expected outer "
        "null: plan with `--accuracy exact` or `bounded`, or give no weights"
    )

    @classmethod
    def check_plan(cls, plan: Plan, parameters: Mapping[str, nn.Parameter]) -> str | None:
        assert plan.outer is not None
        if problem := plan.outer.problem_in(plan.buckets):
            return problem
        if plan.outer.sharded_step and (plan.world.nodes or plan.world.ranks) == plan.world.ranks:
            return (
                f"the plan's outer.sharded_step: found true where each rank is a worker, expected nodes of several "
                f"ranks as workers, over which the step is sharded: leave it out, or {HINT}"
            )
        return check_one_dtype(plan, parameters, "but has one anchor")

    @classmethod
    def check_optimizer(
        cls, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], planned: Mapping[str, nn.Parameter]
    ) -> str | None:
        optimizer = next((one for one in optimizers if isinstance(one, DECIDE_BY_LOSS)), None)
        if optimizers and optimizer is None:
            shares = plan.shares_step
            return Sharded.check_optimizer(plan.with_dense_buckets(), optimizers, planned) if shares else None
        found = "no optimizer" if optimizer is None else f"{type(optimizer).__name__}, which averages losses over ranks"
        return (
            f"the plan has outer steps, which follow the steps of each worker's optimizer, but found {found}; expected "
            f"a torch.optim.Optimizer that steps alone, such as AdamW: give that to attach, or plan without --allow "
            f"outer"
        )

    @classmethod
    def owned_step(cls, plan: Plan) -> str | None:
        return Sharded.owned_step(plan) if plan.shares_step else None

    @property
    def synchronous_plan(self) -> Plan:
        """See `Mode.synchronous_plan`: all buckets dense."""
        updates = UpdatePlan(step=StepPlan(sharded=True)) if self.spec.sharded_step else self.plan.updates
        return replace(self.plan.with_dense_buckets(), accuracy="exact", outer=None, updates=updates)

    def __init__(self, plan: Plan, host: Host) -> None:
        """Prepare the mode; groups are made when it begins, for a switch may yet be refused."""
        super().__init__(plan, host)
        assert plan.outer is not None
        self.spec = plan.outer
        self._warmup_steps = plan.outer.warmup_steps
        """Number of steps behind which local ones begin."""
        self._stepped = 0
        """Number of optimizers' steps since the last exchange."""
        self._exchanged = -1
        """Number of steps at the last exchange of this session."""
        self.period = Period(plan.outer.every, guarded=host.options.guard, warns=host.world.rank == 0)
        self._parameters = {name: host.parameters[name] for name in plan.gradients}
        self._messages = host.world
        """Group of the rounds alone, in flight across steps: everything else goes through the session's own."""
        self._node = World()
        """The ranks of this worker: this rank, or those of its node."""
        self.fragments: Fragments | None = None
        """None while steps are synchronous."""
        self._sharded: Sharded | None = None
        """The optimizer's step that all ranks share, or those of a node; None: each updates all of its weights."""
        self._begun: int | None = None
        """Number of steps at which local ones began; None: they have not."""
        self._done = host.step
        """Number of steps behind which everything due has been done."""
        self._ended = False
        self._aside: tuple[dict[str, Tensor], list[Tensor]] | None = None
        """The worker's own weights and buffers, while the model has others."""

    @property
    def own_weights(self) -> bool:
        return self.fragments is not None

    predicted = own_weights  # the warm-up is as long as it is

    @property
    def hooks(self) -> StepHooks:
        return self

    # What is due behind a step.

    def before_forward(self) -> None:
        """See `StepHooks.before_forward`: a step that the optimizer has left out counts, too."""
        if torch.is_grad_enabled() and self.host.model.training and current_backward_id() == OUTSIDE:
            self._advance(self.host.step)

    @property
    def _step_hooks(self) -> StepHooks:
        return NO_HOOKS if self._sharded is None else self._sharded.hooks

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._step_hooks.begin_step(optimizer)

    def before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        return self._step_hooks.before_step(optimizer, arguments, keywords)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See `StepHooks.after_step`: of several optimizers the last one counts."""
        self._step_hooks.after_step(optimizer)
        self._stepped += 1
        if self._stepped >= len(self.host.optimizers):
            self._advance(self.host.step)

    def exchanged(self) -> None:
        self._stepped, self._exchanged = 0, self.host.step
        self._advance(self.host.step - 1)

    def _advance(self, step: int) -> None:
        """Do what is due behind the step of this number, once."""
        if step <= self._done or self._ended:
            return
        self._done = step
        self.period.step(self.host.optimizers)
        if self.fragments is None:
            left = self._warmup_steps - step
            self.period.see_warmup(self._parameters, left)
            if left <= 0:
                self._begin(step)
            return
        assert self._begun is not None
        self.fragments.advance(step - self._begun, step)

    def _launch_early(self, *, overflowed: bool = False) -> None:
        """Send what is due behind the last step, whose optimizer's is left out: nothing waits for it yet.

        Args:
            overflowed: only where no gradient is of use, as a GradScaler finds.
        """
        if self.fragments is None or self._begun is None or self._done >= self.host.step:
            return
        local = self.host.step - self._begun
        if self.fragments.launches(local) and (not overflowed or self._overflows()):
            self.fragments.launch(local)

    def go_on(self) -> None:
        """See `Mode.go_on`. Others, which block behind their steps, need not wait for a forward of this worker where it
        is going to leave its step out.
        """
        if self.over:
            self.end()
            self._train_together()
        if self.fragments is not None and self.fragments.late == 0:
            self._launch_early(overflowed=True)

    def _overflows(self) -> bool:
        """Tell whether gradients of each optimizer are not finite."""
        for optimizer in self.host.optimizers:
            found = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            gradients = [one.part if isinstance(one, PartialTensor) else one for one in found]
            if not gradients or bool(torch.stack([all_finite(one) for one in gradients]).all()):
                return False
        return True

    def wait_for_weights(self) -> None:
        """See `StepHooks.wait_for_weights`: do what is due behind a step, also where the optimizer's is left out."""
        if self.fragments is not None:
            self._advance(self.host.step)

    @property
    def over(self) -> bool:
        """See `Mode.over`: workers are too far from each other."""
        return self.fragments is not None and self.period.every == 0

    # Stages.

    def make_exchange(self) -> Exchange:
        """See `Mode.make_exchange`: of steps that are synchronous."""
        if not self.spec.sharded_step:
            return super().make_exchange()
        self._sharded = Sharded(self.synchronous_plan, self.host)
        return self._sharded.make_exchange()

    def _train_together(self) -> None:
        """Continue with synchronous steps, from the same weights and optimizer's state on all ranks."""
        exchange = self.make_exchange()
        self.host.put(exchange)
        self._share_step(exchange)

    def _share_step(self, exchange: Exchange) -> None:
        if self._sharded is not None:
            self._sharded.begin(exchange)

    def _end_shared_step(self) -> None:
        """End a sharded step, with the whole state and whole gradients on each rank; all ranks call this."""
        sharded, self._sharded = self._sharded, None
        if sharded is not None:
            sharded.end()

    def begin(self, exchange: Exchange) -> None:
        """See `Mode.begin`: where the warm-up is over, workers are alone from the next step on. If the guard watches
        and has not seen it, some more steps are synchronous.
        """
        self._done = self.host.step
        if self.host.options.guard:
            self._warmup_steps = self.spec.local_after(self.host.step)
        if self.host.step < self._warmup_steps or not self._begin(self.host.step):
            self._share_step(exchange)

    @property
    def _workers(self) -> int:
        """Number of nodes, or of ranks where these are the workers."""
        return self.plan.world.nodes or self.host.world.ranks

    def _begin(self, step: int) -> bool:
        """Let each worker have weights of its own after this number of steps; False where one lacks memory for it."""
        host = self.host
        self._messages = host.world.split([range(host.world.ranks)])
        if self._workers < host.world.ranks:
            self._node = host.world.split(host.topology.nodes)
        warning = "the run stays synchronous: no memory for outer steps"
        self.fragments = make_on_all_ranks(self._lay_out, host.world, "beginning local steps", warning)
        if self.fragments is None:
            self._ended = True
            return False
        self._begun, distances = step, self.period.distances
        distances.base = host.world.gather(distances.base, "beginning local steps")[0]
        if self._sharded is not None:  # a device has no memory for the whole state
            self._sharded.hand_over(HOST)
        self._sharded = self.fragments.sharded
        host.put(self.fragments.exchange)
        self._share_step(self.fragments.exchange)
        return True

    def _lay_out(self) -> Fragments:
        return Fragments(self.plan, self.synchronous_plan, self.host, self.period, self._messages, self._node)

    @torch.no_grad()
    def end(self) -> None:
        """See `Mode.end`: a last round averages weights, whole and with what error feedback has held back.

        Where the optimizer's step of the last backward is yet to come, gradients are averaged, too: it is synchronous.
        """
        self._end_shared_step()
        if self.fragments is None:
            self._ended = True
            return
        self._settle_last_step()
        self._ended = True
        self.fragments.finish()
        residuals = self.fragments.residuals()
        for name, parameter in self._parameters.items():
            own = parameter.detach()
            if name in residuals:
                own = own.to(residuals[name].dtype) - residuals[name] * self.host.world.ranks
            parameter.copy_(mean_over(self.host.world, own))
        planned = set(self._parameters.values())
        for optimizer in self.host.optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"] if p in planned]
            average_optimizer(self.host.world, optimizer, held)
        self._average_buffers()
        warn_of_scales(self.host)
        self._release()

    def _settle_last_step(self) -> None:
        """Send what others may have sent behind the last step; where no rank's optimizer has taken it yet, average its
        gradients, each in its worker's loss scale.
        """
        self._advance(self.host.step)
        pending = self._exchanged == self.host.step and not self._stepped
        if not all(self.host.world.gather(pending, "ending outer steps")):
            return
        scale = (self.host.options.loss_scale or (lambda: 1.0))()
        for parameter in self._parameters.values():
            gradients = self.host.world.gather(parameter.grad is not None, "ending outer steps")
            if any(gradients):
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = own.copy_(mean_over(self.host.world, own, scale))

    def _average_buffers(self) -> None:
        buffers = self.host.synced_buffers()
        for buffer in buffers:
            if buffer.is_floating_point():
                buffer.copy_(mean_over(self.host.world, buffer))
        self.host.world.broadcast([buffer for buffer in buffers if not buffer.is_floating_point()])

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Give the model the weights of the last rounds and the mean of the workers' buffers inside."""
        if self.fragments is None:
            yield
            return
        self._advance(self.host.step)
        buffers = self.host.synced_buffers()
        before, own = self._aside, (copied(self.fragments.weights()), [buffer.detach().clone() for buffer in buffers])
        self.fragments.complete()
        self._aside = before or own
        try:
            with torch.no_grad():
                for name, anchor in self.fragments.anchors():
                    self._parameters[name].copy_(anchor)
                self._average_buffers()
            yield
        finally:
            self._aside = before
            self._take(*own, buffers)

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor], values: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)

    def close(self) -> None:
        self._launch_early()  # others may wait for it
        self._release()
        self._end_shared_step()
        if self._begun is not None:
            self._messages.leave()
            self._node.leave()

    def _release(self) -> None:
        """Free what local steps need but the group, which the backend's thread may hold until the session ends."""
        if self.fragments is not None:
            self.fragments.close()
        self.fragments = None

    def report(self) -> StepReport | None:
        return None if self._sharded is None else self._sharded.report()

    # Checkpoints.

    def whole_optimizer_state(self) -> AbstractContextManager[None]:
        """See `Mode.whole_optimizer_state`: of this worker."""
        shared = self._sharded
        return super().whole_optimizer_state() if shared is None else shared.whole_optimizer_state()

    def state(self) -> dict[str, Any]:
        """See `Mode.state`; copies. Waits for rounds in flight, and for the other ranks of a node that share its step.
        Raises InputError: the session is detached.
        """
        if self._begun is not None and self.fragments is None and not self._ended:
            raise InputError(
                "state_dict: the session is detached; expected one with its weights: call it before detach"
            )
        if self._aside is None:
            self._advance(self.host.step)
        state: dict[str, Any] = {
            "version": saved_state.VERSION, "spec": asdict(self.spec), "buckets": saved_state.buckets_of(self.plan),
            "step": self.host.step, "begun": None, "ended": self._ended, "warmup_steps": self._warmup_steps,
        } | self.period.state()  # fmt: skip
        if self.fragments is None:
            return super().state() | {"rank": self.host.world.rank, "outer": state}
        self.fragments.complete()
        weights, buffers = self._aside or (self.fragments.weights(), self.host.synced_buffers())
        with self.whole_optimizer_state():
            optimizers = [optimizer.state_dict() for optimizer in self.host.optimizers]
        state |= self.fragments.state() | {
            "begun": self._begun, "done": self._done, "workers": self._workers,
            "weights": dict(weights), "buffers": list(buffers), "optimizers": optimizers,
        }  # fmt: skip
        return super().state() | {"rank": self.host.world.rank, "outer": copied(state)}

    def load(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> int:
        """See `Mode.load`. With other outer steps or buckets a run begins anew with the mean of all workers. Raises
        InputError where that is needed and a worker's state was given alone, or the states are another model's.
        """
        host, ranks = self.host, self.host.world.ranks
        states = saved_state.states_of(state, host.world.rank, ranks)
        if states is None:
            return super().load(state)
        if host.step:
            raise InputError("load_state_dict: found a session that has trained, expected one before its first step")
        own = states[host.world.rank if len(states) == ranks else 0]
        different, local = saved_state.other_layout(own, self.spec, self.plan), own["begun"] is not None
        same = local and len(states) in (1, ranks) and own["workers"] == self._workers
        others = None if same else f"other workers: {own.get('workers')}, here {self._workers}"
        saved_state.refuse_alone(states, different or others)
        step = super().load(saved_state.plain_states(state, own["step"]))
        if different is None:
            self.period.load(own)
            self._warmup_steps = own.get("warmup_steps", self.spec.warmup_steps)
        if not local or different is not None:
            if local:
                saved_state.take_mean(states, host)
            self._continue_at(step, ended=own["ended"])
            return step
        if self.fragments is None:
            self._begin(host.step)
        if self.fragments is not None:
            self._resume(self.fragments, states, own, same=same)
        return step

    def _continue_at(self, step: int, *, ended: bool) -> None:
        """Continue with the model's weights behind this number of steps: alone, if the warm-up is over; where workers
        have `ended` that for good, synchronous.
        """
        self._done, self._ended = step, ended
        if self.fragments is None:
            if step >= self._warmup_steps and not ended:
                self._begin(step)
        elif ended:
            self._release()
            self._end_shared_step()
            self._train_together()
        else:
            self._begun = step
            self.fragments.take(self.fragments.weights())

    @torch.no_grad()
    def _resume(
        self, fragments: Fragments, states: Sequence[dict[str, Any]], own: dict[str, Any], *, same: bool
    ) -> None:
        """Continue from the state of this worker; where there were not the `same` workers, from those of all."""
        if not same:
            own = saved_state.merged_state(states, self._parameters)
        fragments.load(states, own, same=same)
        self._take(own["weights"], own["buffers"], self.host.synced_buffers())
        for optimizer, state in zip(self.host.optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(copied(state))
        self._begun, self._done = own["begun"], own["done"]
        self.period.shorten(own["every"])
