"""Outer steps: workers train alone for some steps, and an outer optimizer moves the weights that they share.

    warm-up   synchronous steps by the plan's buckets, all of them dense
    local     `.grad`s are a worker's own, or of a node's ranks; behind local step s the fragments that are due leave
              (`runtime.outer.rounds`), and t steps later a worker's weights are mixed with the new anchor

Local steps are counted by exchanges, which are the same on all ranks, not by optimizer's steps, which a GradScaler may
leave out on some. What is due behind a step is done behind `optimizer.step()`, or where that was left out, before the
next forward. Sources: DiLoCo (Douillard et al., arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512); with an outer
rate of 1 and no momentum, local SGD (Stich, arXiv 1805.09767).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from runtime.comm.by_device import make_communicator
from runtime.comm.collectives import collective_of
from runtime.comm.collectives.direct import by_message, library_all_reduce
from runtime.comm.communicator import Communicator, NullCommunicator
from runtime.comm.world import World
from runtime.core.all_reduce import AllReduce
from runtime.core.buckets import BucketBuffer, make_plain_buckets
from runtime.core.closures import DECIDE_BY_LOSS
from runtime.core.exchange import Exchange
from runtime.core.usage import UsageFlags
from runtime.errors import CommunicationError, InputError
from runtime.modes.base import Host, Mode, StepHooks, check_one_dtype, make_on_all_ranks, warn_of_scales
from runtime.modes.distance_guard import NO_DISTANCE, DistanceGuard
from runtime.outer import saved_state
from runtime.outer.averages import average_optimizer, mean_over
from runtime.outer.rounds import BucketRound, BufferRound, CompressedRound, DenseRound, Fragment
from runtime.outer.saved_state import copied
from runtime.plan import Plan
from runtime.plan.combinations import OUTER
from runtime.sparse.compressed import all_finite
from runtime.sparse.layout import make_buckets, make_lossy
from runtime.sparse.residuals import ErrorFeedbackState, State
from runtime.torch_compat import OUTSIDE, current_backward_id

BLOCKS = (
    "rounds of this plan block behind the step (outer.delay_steps 0, or every 1): where a worker leaves out its "
    "optimizer's step, call session.wait_for_weights() in its place, or plan with delay_steps of 1 or more"
)


class WorkerResiduals(ErrorFeedbackState):
    """Residuals of synchronous buckets, which follow with a worker's own gradients: whole, not times 1/workers."""

    workers = 1
    """Number of workers."""

    def state(self) -> State:
        """See `ErrorFeedback.state`: times 1/workers, as synchronous steps have them."""
        return self._scaled(super().state(), 1.0 / self.workers)

    def load_state(self, state: State, parameters: Mapping[str, nn.Parameter]) -> None:
        """Load residuals of synchronous steps, times the number of workers."""
        super().load_state(self._scaled(state, float(self.workers)), parameters)

    @staticmethod
    def _scaled(state: State, factor: float) -> State:
        residuals = {name: part * factor for name, part in state.get("residuals", {}).items()}
        return {**state, "residuals": residuals} if state else {}


class Outer(Mode, StepHooks):
    """The stages of one session's run."""

    name = OUTER
    what = "outer steps"
    relaxed = True
    lingers = True
    has_workers = True
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
        return check_one_dtype(plan, parameters, "but has one anchor")

    @classmethod
    def check_optimizer(
        cls, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], planned: Mapping[str, nn.Parameter]
    ) -> str | None:
        optimizer = next((one for one in optimizers if isinstance(one, DECIDE_BY_LOSS)), None)
        if optimizers and optimizer is None:
            return None
        found = "no optimizer" if optimizer is None else f"{type(optimizer).__name__}, which averages losses over ranks"
        return (
            f"the plan has outer steps, which follow the steps of each worker's optimizer, but found {found}; expected "
            f"a torch.optim.Optimizer that steps alone, such as AdamW: give that to attach, or plan without --allow "
            f"outer"
        )

    @property
    def synchronous_plan(self) -> Plan:
        """See `Mode.synchronous_plan`: all buckets dense."""
        return replace(self.plan.with_dense_buckets(), accuracy="exact", outer=None)

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
        self.every = plan.outer.every
        """Local steps between two rounds of a fragment (H); fewer where workers are too far from each other."""
        self.distances = DistanceGuard(warns=host.world.rank == 0, taken="averaged")
        self._lrs: deque[float] = deque(maxlen=self.every)
        """Sums of the learning rates of the last steps."""
        self._report = NO_DISTANCE
        """This worker's last distance, which other workers get with the next round."""
        self._parameters = {name: host.parameters[name] for name in plan.gradients}
        self._messages = host.world
        """Group of the rounds alone, in flight across steps: everything else goes through the session's own."""
        self._node = World()
        """The ranks of this worker: this rank, or those of its node."""
        self._fragments: list[Fragment] | None = None
        self._rounds: list[BucketRound] = []
        """Rounds of each bucket, in plan order."""
        self._buffers: BufferRound | None = None
        self._begun: int | None = None
        """Number of steps at which local ones began; None: they have not."""
        self._done = host.step
        """Number of steps behind which everything due has been done."""
        self._ended = False
        self._aside: tuple[dict[str, Tensor], list[Tensor]] | None = None
        """The worker's own weights and buffers, while the model has others."""

    @property
    def own_weights(self) -> bool:
        return self._fragments is not None

    predicted = own_weights  # the warm-up is as long as it is

    @property
    def hooks(self) -> StepHooks:
        return self

    # What is due behind a step.

    def before_forward(self) -> None:
        """See `StepHooks.before_forward`: a step that the optimizer has left out counts, too."""
        if torch.is_grad_enabled() and self.host.model.training and current_backward_id() == OUTSIDE:
            self._advance(self.host.step)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See `StepHooks.after_step`: of several optimizers the last one counts."""
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
        lr = sum(float(group["lr"]) for optimizer in self.host.optimizers for group in optimizer.param_groups)
        self._lrs.append(lr)
        if self._fragments is None:
            left = self._warmup_steps - step
            self.distances.see_warmup(self._parameters, lr, left=left, steps=self.every)
            if left <= 0:
                self._begin(step)
            return
        assert self._begun is not None
        self._outer_step(step - self._begun)

    @torch.no_grad()
    def _outer_step(self, local: int) -> None:
        """Finish and launch the rounds of a local step, counted from 1."""
        assert self._fragments is not None
        reported = None
        for fragment in self._fragments:
            launched = fragment.launched
            if launched is not None and launched < local and local >= launched + self._late:
                reported = self._finish(fragment)
            self._launch(fragment, local)
            if fragment.launched == local and self._late == 0:
                reported = self._finish(fragment)
        if reported is not None and self.every and self.host.options.guard:
            self._shorten(self.distances.judge(reported, self._done, self.every))

    @property
    def _late(self) -> int:
        """Local steps that a round takes; 0: it blocks behind the step that launches it."""
        return min(self.spec.delay_steps, max(0, self.every - 1))

    def _launch(self, fragment: Fragment, local: int) -> None:
        """Send a fragment if it is due behind a local step."""
        assert self._fragments is not None
        assert self._buffers is not None
        if self._due(fragment, local):
            fragment.launch(local)
            if fragment is self._fragments[-1]:
                self._buffers.launch(self.host.synced_buffers(), self._report)

    def _due(self, fragment: Fragment, local: int) -> bool:
        # One in flight where H has been halved misses a turn.
        turn = self.every > 0 and local % self.every == fragment.first_step % self.every
        return turn and fragment.launched is None

    @torch.no_grad()
    def _launch_early(self, *, overflowed: bool = False) -> None:
        """Send what is due behind the last step, whose optimizer's is left out: nothing waits for it yet.

        Args:
            overflowed: only where no gradient is of use, as a GradScaler finds.
        """
        if self._fragments is None or self._begun is None or self._done >= self.host.step:
            return
        local = self.host.step - self._begun
        if any(self._due(one, local) for one in self._fragments) and (not overflowed or self._overflows()):
            for fragment in self._fragments:
                self._launch(fragment, local)

    def go_on(self) -> None:
        """See `Mode.go_on`. Others, which block behind their steps, need not wait for a forward of this worker where it
        is going to leave its step out.
        """
        super().go_on()
        if self._late == 0:
            self._launch_early(overflowed=True)

    def _overflows(self) -> bool:
        """Tell whether gradients of each optimizer are not finite."""
        for optimizer in self.host.optimizers:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if not gradients or bool(torch.stack([all_finite(one) for one in gradients]).all()):
                return False
        return True

    def wait_for_weights(self) -> None:
        """See `StepHooks.wait_for_weights`: do what is due behind a step, also where the optimizer's is left out."""
        if self._fragments is not None:
            self._advance(self.host.step)

    def _finish(self, fragment: Fragment) -> Tensor | None:
        """End a round; return the distances of all workers, where they have come with it. Shape (workers, 3)."""
        assert self._fragments is not None
        assert self._buffers is not None
        try:
            fragment.finish(self.spec.mix, self.distances)
        except CommunicationError as error:
            if self._late:
                raise
            raise CommunicationError(f"{error}; {BLOCKS}") from error
        if fragment is not self._fragments[-1]:
            return None
        reported = self._buffers.finish()
        self._report = self.distances.measured(sum(self._lrs))
        return reported

    def _shorten(self, every: int) -> None:
        """Take rounds after this many steps from now on; 0: steps are synchronous from the next one on."""
        if every in (0, self.every):
            self.every = every
            return
        assert self._fragments is not None
        self.every, self._lrs = every, deque(self._lrs, maxlen=every)
        for index, fragment in enumerate(self._fragments):
            fragment.first_step = (index + 1) * every // len(self._fragments)

    @property
    def over(self) -> bool:
        """See `Mode.over`: workers are too far from each other."""
        return self._fragments is not None and self.every == 0

    # Stages.

    def begin(self, exchange: Exchange) -> None:
        """See `Mode.begin`: where the warm-up is over, workers are alone from the next step on. If the guard watches
        and has not seen it, some more steps are synchronous.
        """
        self._done = self.host.step
        if self.host.options.guard:
            self._warmup_steps = self.spec.local_after(self.host.step)
        if self.host.step >= self._warmup_steps:
            self._begin(self.host.step)

    @property
    def _workers(self) -> int:
        """Number of nodes, or of ranks where these are the workers."""
        return self.plan.world.nodes or self.host.world.ranks

    def _begin(self, step: int) -> None:
        """Let each worker have weights of its own after this number of steps, if all have memory for it."""
        host = self.host
        self._messages = host.world.split([range(host.world.ranks)])
        if self._workers < host.world.ranks:
            self._node = host.world.split(host.topology.nodes)
        warning = "the run stays synchronous: no memory for outer steps"
        exchange = make_on_all_ranks(self._lay_out, host.world, "beginning local steps", warning)
        if exchange is None:
            self._fragments, self._ended = None, True
            return
        self._begun = step
        self.distances.base = host.world.gather(self.distances.base, "beginning local steps")[0]
        host.put(exchange)

    def _lay_out(self) -> Exchange:
        """Make rounds and anchors of the present weights, and the exchange of local steps, inside of a worker."""
        host, plan, ranks = self.host, self.plan, self.host.world.ranks
        buckets, flags, inside = self._buckets_inside()
        carried = WorkerResiduals(buckets, {}, host.options.loss_scale)
        carried.workers = ranks // self._node.ranks
        collectives = [by_message if bucket.dense else collective_of(bucket) for bucket in plan.buckets]
        communicator = make_communicator(
            self._messages, [*collectives, library_all_reduce], host.device, across_steps=True
        )
        self._communicator = communicator
        self._rounds = []
        compressed = make_plain_buckets(plan, host.parameters) if any(not one.dense for one in plan.buckets) else ()
        for index, planned in enumerate(plan.buckets):
            made: BucketRound
            if planned.dense:
                made = DenseRound(
                    buckets[index], self._parameters, self.spec.optimizer, host.world, communicator, self._peers()
                )
            else:
                own = compressed[index]
                native = planned.transport.native
                lossy = make_lossy(own, planned.compressor, ranks, rank=host.world.rank, native=native)
                if self._node.ranks > 1 and not native:  # a backend's own all-reduce passes each link once as it is
                    lossy.packed.send_once(host.topology, host.world.rank)
                made = CompressedRound(own, lossy, self._parameters, self.spec.optimizer, host.world, communicator)
            for anchor in made.anchors:
                anchor.take({name: parameter.detach() for name, parameter in self._parameters.items()})
            self._rounds.append(made)
        self._buffers = BufferRound(len(plan.buckets), self.host.world, communicator, host.device)
        fragments = self.spec.fragments_of(plan.gradients)
        fragment_of = {name: index for index, names in enumerate(fragments) for name in names}
        self._fragments = [
            Fragment(
                [
                    one
                    for bucket, one in zip(plan.buckets, self._rounds, strict=True)
                    if fragment_of[bucket.gradients[0]] == index
                ],
                self._parameters,
                self.spec.due_after(index, len(fragments)),
            )
            for index in range(len(fragments))
        ]
        launcher = AllReduce(buckets, flags, inside, carried, host.recorder, exact=True)
        return Exchange(self.synchronous_plan, host.parameters, buckets, launcher, carried, host.recorder)

    def _peers(self) -> Sequence[int]:
        """Return a rank of each worker: those that have this rank's place on their nodes."""
        rank, ranks = self.host.world.rank, self.host.world.ranks
        if self._node.ranks == 1:
            return range(ranks)
        return next(peers for peers in self.host.topology.cross_node_groups if rank in peers)

    def _buckets_inside(self) -> tuple[list[BucketBuffer], UsageFlags | None, Communicator]:
        """Return the plan's buckets, dense, with what averages them over the ranks of this worker."""
        plan, host, node = self.synchronous_plan, self.host, self._node
        if node.ranks == 1:
            return make_plain_buckets(plan, host.parameters), None, NullCommunicator()
        buckets, flags, _ = make_buckets(plan, host.parameters, node.ranks)
        return buckets, flags, make_communicator(node, [library_all_reduce] * len(buckets), host.device, host.world)

    @torch.no_grad()
    def end(self) -> None:
        """See `Mode.end`: a last round averages weights, whole and with what error feedback has held back.

        Where the optimizer's step of the last backward is yet to come, gradients are averaged, too: it is synchronous.
        """
        if self._fragments is None:
            self._ended = True
            return
        self._settle_last_step()
        self._ended = True
        for fragment in self._fragments:
            if fragment.launched is not None:
                self._finish(fragment)
        residuals = {name: part for one in self._rounds for name, part in one.residuals().get("residuals", {}).items()}
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
        gradients.
        """
        self._advance(self.host.step)
        pending = self._exchanged == self.host.step and not self._stepped
        if not all(self.host.world.gather(pending, "ending outer steps")):
            return
        for parameter in self._parameters.values():
            gradients = self.host.world.gather(parameter.grad is not None, "ending outer steps")
            if any(gradients):
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = own.copy_(mean_over(self.host.world, own))

    def _average_buffers(self) -> None:
        buffers = self.host.synced_buffers()
        for buffer in buffers:
            if buffer.is_floating_point():
                buffer.copy_(mean_over(self.host.world, buffer))
        self.host.world.broadcast([buffer for buffer in buffers if not buffer.is_floating_point()])

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Give the model the weights of the last rounds and the mean of the workers' buffers inside."""
        if self._fragments is None:
            yield
            return
        self._advance(self.host.step)
        buffers = self.host.synced_buffers()
        before, own = self._aside, (copied(self._own_weights()), [buffer.detach().clone() for buffer in buffers])
        for fragment in self._fragments:
            fragment.complete()
        self._aside = before or own
        try:
            with torch.no_grad():
                for fragment in self._fragments:
                    for one in fragment.rounds:
                        for name, anchor in one.weights(keep=fragment.launched is not None).items():
                            self._parameters[name].copy_(anchor)
                self._average_buffers()
            yield
        finally:
            self._aside = before
            self._take(*own, buffers)

    def _own_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor], values: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)

    def close(self) -> None:
        self._launch_early()  # others may wait for it
        self._release()
        if self._begun is not None:
            self._messages.leave()
            self._node.leave()

    def _release(self) -> None:
        """Free what local steps need but the group, which the backend's thread may hold until the session ends."""
        if self._fragments is not None:
            self._communicator.close()
        self._fragments, self._rounds, self._buffers = None, [], None

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """See `Mode.state`; copies. Waits for rounds in flight. Raises InputError: the session is detached."""
        if self._begun is not None and self._fragments is None and not self._ended:
            raise InputError(
                "state_dict: the session is detached; expected one with its weights: call it before detach"
            )
        if self._aside is None:
            self._advance(self.host.step)
        state: dict[str, Any] = {
            "version": saved_state.VERSION, "spec": asdict(self.spec), "buckets": saved_state.buckets_of(self.plan),
            "step": self.host.step, "begun": None, "ended": self._ended, "every": self.every, "lrs": list(self._lrs),
            "distances": self.distances.state(), "report": self._report, "warmup_steps": self._warmup_steps,
        }  # fmt: skip
        if self._fragments is None:
            return super().state() | {"rank": self.host.world.rank, "outer": state}
        for fragment in self._fragments:
            fragment.complete()
        weights, buffers = self._aside or (self._own_weights(), self.host.synced_buffers())
        assert self._buffers is not None
        state |= {
            "begun": self._begun, "done": self._done, "workers": self._workers,
            "anchors": [[anchor.tensors() for anchor in one.anchors] for one in self._rounds],
            "residuals": [one.residuals() for one in self._rounds],
            "launched": [fragment.launched for fragment in self._fragments],
            "means": self._buffers.pending(),
            "weights": dict(weights), "buffers": list(buffers),
            "optimizers": [optimizer.state_dict() for optimizer in self.host.optimizers],
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
            self._lrs = deque(own["lrs"], maxlen=self._lrs.maxlen)
            self.distances.load(own["distances"])
            self._report, self._warmup_steps = own["report"], own.get("warmup_steps", self.spec.warmup_steps)
        if not local or different is not None:
            if local:
                saved_state.take_mean(states, host)
            self._continue_at(step, ended=own["ended"])
            return step
        if self._fragments is None:
            self._begin(host.step)
        if self._fragments is not None:
            self._resume(states, own, same=same)
        return step

    def _continue_at(self, step: int, *, ended: bool) -> None:
        """Continue with the model's weights behind this number of steps: alone, if the warm-up is over; where workers
        have `ended` that for good, synchronous.
        """
        self._done, self._ended = step, ended
        if self._fragments is None:
            if step >= self._warmup_steps and not ended:
                self._begin(step)
        elif ended:
            self._release()
            self.host.put(self.make_exchange())
        else:
            self._begun = step
            for anchor in (anchor for one in self._rounds for anchor in one.anchors):
                anchor.take(self._own_weights())

    @torch.no_grad()
    def _resume(self, states: Sequence[dict[str, Any]], own: dict[str, Any], *, same: bool) -> None:
        """Continue from the state of this worker; where there were not the `same` workers, from those of all."""
        assert self._fragments is not None
        assert self._buffers is not None
        for index, one in enumerate(self._rounds):
            for number, anchor in enumerate(one.anchors):
                parts = [state["anchors"][index][number] for state in states]
                anchor.load(own["anchors"][index][number], None if same else parts)
        if not same:
            own = saved_state.merged_state(states, self._parameters)
        for one, residuals in zip(self._rounds, own["residuals"], strict=True):
            one.load(residuals, summed=not same)
        for fragment, launched in zip(self._fragments, own["launched"], strict=True):
            fragment.launched = launched
            if launched is not None:  # gathered now, for later other rounds are in flight
                for one in fragment.rounds:
                    one.weights(keep=True)
        self._take(own["weights"], own["buffers"], self.host.synced_buffers())
        for optimizer, state in zip(self.host.optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(copied(state))
        self._buffers.load(self.host.synced_buffers(), own["means"])
        self._begun, self._done = own["begun"], own["done"]
        self._shorten(own["every"])
