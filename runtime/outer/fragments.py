"""The fragments of one worker: their rounds, which are due behind which local step, and its exchange inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.comm.by_device import make_communicator
from runtime.comm.collectives import collective_of
from runtime.comm.collectives.direct import by_message, library_all_reduce
from runtime.comm.communicator import Communicator, NullCommunicator
from runtime.comm.world import World
from runtime.core.all_reduce import AllReduce
from runtime.core.buckets import make_plain_buckets
from runtime.core.exchange import Exchange
from runtime.errors import CommunicationError
from runtime.modes.base import Host
from runtime.outer.period import Period
from runtime.outer.rounds import BucketRound, BufferRound, CompressedRound, DenseRound, floating, mix_into
from runtime.plan import Plan
from runtime.sharded.sharded import Sharded
from runtime.sparse.layout import make_buckets, make_lossy
from runtime.sparse.residuals import ErrorFeedbackState

BLOCKS = (
    "rounds of this plan block behind the step (outer.delay_steps 0, or every 1): where a worker leaves out its "
    "optimizer's step, call session.wait_for_weights() in its place, or plan with delay_steps of 1 or more"
)


class Fragment:
    """The parameters that are averaged in one round, and where that round is."""

    def __init__(self, rounds: Sequence[BucketRound]) -> None:
        """`rounds`: of its buckets."""
        self.rounds = rounds
        self.launched: int | None = None
        """Local step behind which the round in flight was launched, until it is finished; None: there is none."""

    def launch(self, step: int) -> None:
        """Send the fragment behind this local step."""
        self.launched = step
        for one in self.rounds:
            one.launch()

    def complete(self) -> None:
        """Block until the round in flight has come, if there is one; the worker's weights stay what they are."""
        if self.launched is not None:
            for one in self.rounds:
                one.complete()


class Fragments:
    """All fragments of one worker, from the beginning of its local steps on."""

    def __init__(self, plan: Plan, synchronous: Plan, host: Host, period: Period, messages: World, node: World) -> None:
        """Make rounds and anchors of the present weights, and the exchange of local steps.

        Args:
            plan: its buckets are the messages of fragments.
            synchronous: the same with dense buckets, by which the ranks of this worker average gradients.
            host: the session.
            period: the run's.
            messages: group of the rounds alone, in flight across steps.
            node: the ranks of this worker: this rank, or those of its node.
        """
        assert plan.outer is not None
        self._host, self._spec, self._period, self._node = host, plan.outer, period, node
        self._parameters = {name: host.parameters[name] for name in plan.gradients}
        self.sharded = Sharded(synchronous, host, node) if plan.outer.sharded_step else None
        """The optimizer's step of this worker, where its ranks share it."""
        self.exchange = self._exchange_inside(synchronous) if self.sharded is None else self.sharded.make_exchange()
        """Average of gradients inside of this worker."""
        carried = self.exchange.carried
        assert isinstance(carried, ErrorFeedbackState)
        carried.workers = host.world.ranks // node.ranks
        collectives = [by_message if bucket.dense else collective_of(bucket) for bucket in plan.buckets]
        self._communicator = make_communicator(
            messages, [*collectives, library_all_reduce], host.device, across_steps=True
        )
        self._rounds = self._make_rounds(plan)
        """Rounds of each bucket, in plan order."""
        self.take(self.weights())
        self._buffers = BufferRound(len(plan.buckets), host.world, self._communicator, host.device)
        of_gradient = {bucket.gradients[0]: one for bucket, one in zip(plan.buckets, self._rounds, strict=True)}
        self._fragments = [
            Fragment([one for name, one in of_gradient.items() if name in names])
            for names in map(set, plan.outer.fragments_of(plan.gradients))
        ]

    def _exchange_inside(self, plan: Plan) -> Exchange:
        """Return an exchange of the plan's buckets, dense, that averages them over the ranks of this worker."""
        host, node = self._host, self._node
        communicator: Communicator = NullCommunicator()
        if node.ranks == 1:
            buckets, flags = make_plain_buckets(plan, host.parameters), None
        else:
            buckets, flags, _ = make_buckets(plan, host.parameters, node.ranks)
            communicator = make_communicator(node, [library_all_reduce] * len(buckets), host.device, host.world)
        carried = ErrorFeedbackState(buckets, {}, host.options.loss_scale)
        launcher = AllReduce(buckets, flags, communicator, carried, host.recorder, exact=True)
        return Exchange(plan, host.parameters, buckets, launcher, carried, host.recorder)

    def _make_rounds(self, plan: Plan) -> list[BucketRound]:
        host, optimizer, rounds = self._host, self._spec.optimizer, list[BucketRound]()
        # Those of the exchange have other messages where the step is shared, and gradients where one is encoded.
        lossy = any(not one.dense for one in plan.buckets)
        apart = lossy or self.sharded is not None
        buckets = make_plain_buckets(plan, host.parameters) if apart else self.exchange.buckets
        peers: Sequence[int] = range(host.world.ranks)
        if self._node.ranks > 1:  # those that have this rank's place on their nodes
            peers = host.topology.cross_node_groups[host.topology.local_rank(host.world.rank)]
        for index, planned in enumerate(plan.buckets):
            bucket, native = buckets[index], planned.transport.native
            if planned.dense:
                for message in bucket.messages if apart else ():
                    message.storage.resize_(0)
                dense = DenseRound(bucket, self._parameters, optimizer, host.world, self._communicator, peers)
                rounds.append(dense)
                continue
            made = make_lossy(bucket, planned.compressor, host.world.ranks, rank=host.world.rank, native=native)
            if self._node.ranks > 1 and not native:  # a backend's own all-reduce passes each link once as it is
                made.packed.send_once(host.topology, host.world.rank)
            rounds.append(CompressedRound(bucket, made, self._parameters, optimizer, host.world, self._communicator))
        return rounds

    # What is due behind a local step.

    @property
    def late(self) -> int:
        """Local steps that a round takes; 0: it blocks behind the step that launches it."""
        return min(self._spec.delay_steps, max(0, self._period.every - 1))

    @torch.no_grad()
    def advance(self, local: int, step: int) -> None:
        """Finish and launch the rounds that are due behind a local step, counted from 1; `step` of the run."""
        reported = None
        for fragment in self._fragments:
            launched = fragment.launched
            if launched is not None and launched < local and local >= launched + self.late:
                reported = self._finish(fragment)
            self._launch_due(fragment, local)
            if fragment.launched == local and self.late == 0:
                reported = self._finish(fragment)
        if reported is not None:
            self._period.judge(reported, step)

    def launches(self, local: int) -> bool:
        """Tell whether a fragment is to be sent behind a local step."""
        return any(self._is_due(fragment, local) for fragment in self._fragments)

    @torch.no_grad()
    def launch(self, local: int) -> None:
        """Send what is due behind a local step, which `advance` will follow."""
        for fragment in self._fragments:
            self._launch_due(fragment, local)

    def _launch_due(self, fragment: Fragment, local: int) -> None:
        if not self._is_due(fragment, local):
            return
        fragment.launch(local)
        buffers = self._host.synced_buffers()
        if fragment is self._fragments[-1] and (self._period.guarded or floating(buffers)):
            self._buffers.launch(buffers, self._period.report)

    def _is_due(self, fragment: Fragment, local: int) -> bool:
        # One in flight where H has been halved misses a turn.
        every, count = self._period.every, len(self._fragments)
        if every == 0 or fragment.launched is not None:
            return False
        return (local - (self._fragments.index(fragment) + 1) * every // count) % every == 0

    def _finish(self, fragment: Fragment) -> Tensor | None:
        """End the round in flight: weights ← mix · weights + (1 − mix) · anchor; return what all workers report, where
        that has come with it. Shape (workers, 3).
        """
        try:
            fragment.complete()
        except CommunicationError as error:
            if self.late:
                raise
            raise CommunicationError(f"{error}; {BLOCKS}") from error
        fragment.launched = None
        for one in fragment.rounds:
            anchors = one.weights()
            self._period.add(self._parameters, anchors)
            for name, anchor in anchors.items():
                mix_into(self._parameters[name], anchor, self._spec.mix)
        if fragment is not self._fragments[-1]:
            return None
        reported = self._buffers.finish()
        self._period.measure()
        return reported

    def finish(self) -> None:
        """End all rounds in flight."""
        for fragment in self._fragments:
            if fragment.launched is not None:
                self._finish(fragment)

    # Weights and what is held back.

    def complete(self) -> None:
        """Block until all rounds in flight have come; the worker's weights stay what they are."""
        for fragment in self._fragments:
            fragment.complete()

    def weights(self) -> dict[str, Tensor]:
        """Return the worker's own weights by name; no copies."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def anchors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the last rounds by name; all workers call this after `complete`."""
        for fragment in self._fragments:
            for one in fragment.rounds:
                yield from one.weights(keep=fragment.launched is not None).items()

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Begin anew at these weights, which are the same on all workers."""
        for one in self._rounds:
            for anchor in one.anchors:
                anchor.take(weights)

    def residuals(self) -> dict[str, Tensor]:
        """Return what error feedback has held back, by name."""
        return {name: part for one in self._rounds for name, part in one.residuals().get("residuals", {}).items()}

    def close(self) -> None:
        """Close what carries rounds; the group stays, for the backend's thread may hold it until the session ends."""
        self._communicator.close()

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """Return what `load` continues from; no copies. Rounds in flight have to be complete."""
        return {
            "anchors": [[anchor.tensors() for anchor in one.anchors] for one in self._rounds],
            "residuals": [one.residuals() for one in self._rounds],
            "launched": [fragment.launched for fragment in self._fragments],
            "means": self._buffers.pending(),
        }

    def load(self, states: Sequence[dict[str, Any]], own: dict[str, Any], *, same: bool) -> None:
        """Continue from the state of this worker, but for anchors from those of all (`states`) unless these were the
        `same` workers.
        """
        for index, one in enumerate(self._rounds):
            for number, anchor in enumerate(one.anchors):
                parts = [state["anchors"][index][number] for state in states]
                anchor.load(own["anchors"][index][number], None if same else parts)
            one.load(own["residuals"][index], summed=not same)
        for fragment, launched in zip(self._fragments, own["launched"], strict=True):
            fragment.launched = launched
            if launched is not None:  # gathered now, for later other rounds are in flight
                for one in fragment.rounds:
                    one.weights(keep=True)
        self._buffers.load(self._host.synced_buffers(), own["means"])
