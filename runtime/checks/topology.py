"""Checks of a plan with hierarchical collectives against the present nodes, and its adaptation to them.

On one node nothing is sent between nodes, so what would be left out or narrowed there is not: what remains is a dense
torus. With one rank a node all links are between nodes: HiTopKComm is the flat gather of selected elements, a torus
that is narrow between nodes two shots on all links.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from runtime.checks.modes import asked_modes
from runtime.comm.collectives import asks_for_nodes, is_narrow_between
from runtime.comm.collectives.phases import share_of
from runtime.comm.phased_communicator import phases_of
from runtime.comm.topology import Topology, nodes_problem
from runtime.comm.world import World
from runtime.errors import AdaptedWarning, PlanMismatch
from runtime.plan import HINT, NO_COMPRESSION, Plan, PlanBucket
from runtime.plan.transports import FLAT, TORUS_2D, TWO_SHOT


def check_topology(plan: Plan, topology: Topology | str | None) -> str | None:
    """Return why ranks on these nodes (or why nodes are not known) cannot carry out the plan, or None."""
    if asks_for_nodes(plan):
        what = "the plan has collectives inside nodes and between them"
        planned = plan.world.nodes or (plan.fallback and plan.fallback.world.nodes)
        if planned:
            what += f", for {planned} nodes"
        if problem := nodes_problem(what, (planned, 1) if planned else (), plan.world.ranks, topology):
            return problem
    if problem := asked_modes(plan)[0].check_topology(plan, topology):
        return problem
    if not isinstance(topology, Topology):
        return None
    return _check_order(plan, topology) or (plan.fallback and _check_order(plan.fallback, topology)) or None


def _check_order(plan: Plan, topology: Topology) -> str | None:
    """Return what is wrong with the order of the phases of buckets, or None."""
    plan = _adapted(plan, topology)
    if plan.phase_order is None:
        return None
    expected = {
        (index, phase) for index, bucket in enumerate(plan.buckets) for phase in range(len(phases_of(bucket, topology)))
    }
    found, reached = list(plan.phase_order), [0] * len(plan.buckets)
    if len(found) != len(expected) or set(found) != expected:
        odd = sorted(set(found) ^ expected) or [entry for entry in found if found.count(entry) > 1]
        return (
            f"phase_order: found {len(found)} pairs of bucket and phase, expected each of {len(expected)} once; see "
            f"{list(odd[0])}: leave it out for the usual order, or {HINT}"
        )
    for bucket, phase in found:
        if phase != reached[bucket]:
            return (
                f"phase_order: found phase {phase} of bucket {bucket} before its phase {reached[bucket]}, for which it "
                f"waits; expected the phases of a bucket in order: leave phase_order out, or {HINT}"
            )
        reached[bucket] += 1
    return None


def adapt(plan: Plan, world: World, parameters: Mapping[str, nn.Parameter]) -> Plan:
    """Return the plan as it is executed on the world's nodes; rank 0 warns (`AdaptedWarning`) of what is other than it
    reads. Raises PlanMismatch, on all ranks alike, where these nodes cannot carry it out.
    """
    topology = world.topology
    if problem := check_topology(plan, topology):
        raise PlanMismatch(problem)
    if not isinstance(topology, Topology) or world.ranks == 1:
        return plan
    adapted = _adapted(plan, topology)
    notes = []
    for index, bucket in enumerate(adapted.buckets):
        density = bucket.compressor.density
        if not bucket.transport.by_shards or density is None:
            continue
        share = share_of(sum(parameters[name].numel() for name in bucket.gradients), topology.ranks_per_node)
        if math.floor(density * share) < 1:
            notes.append(
                f"bucket {index}: a density of {density:g} is less than one of the {share} elements of a shard: k = 1 "
                f"there, a density of {1 / share:.3g}"
            )
    changed = [index for index, bucket in enumerate(plan.buckets) if _sends_less_between(bucket)]
    if changed and topology.num_nodes == 1:
        wide = all(plan.buckets[index].transport.by_shards for index in changed)
        what = "sparse/hitopk has nothing to leave out" if wide else "no links between nodes are"
        notes.append(
            f"all {topology.ranks_per_node} ranks are on one node, where {what}: "
            f"{len(changed)} of {len(plan.buckets)} buckets (the first is {changed[0]}) are sent dense, by "
            f"all_reduce/torus_2d"
        )
    for note in notes if world.rank == 0 else []:
        warnings.warn(note, AdaptedWarning, stacklevel=4)
    return adapted


def _sends_less_between(bucket: PlanBucket) -> bool:
    return bucket.transport.by_shards or is_narrow_between(bucket)


def _where_links_are_alike(bucket: PlanBucket, topology: Topology) -> PlanBucket:
    """Return how a bucket is sent on one node, or on nodes of one rank."""
    if not _sends_less_between(bucket):
        return bucket
    if topology.num_nodes == 1:
        return bucket.sent_by(TORUS_2D, NO_COMPRESSION)
    if bucket.transport.by_shards:
        return bucket.sent_by(FLAT, bucket.compressor)
    return bucket.sent_by(TWO_SHOT, replace(bucket.compressor, links=None))


def _adapted(plan: Plan, topology: Topology) -> Plan:
    several = topology.num_nodes > 1 and topology.ranks_per_node > 1
    stays = several or not any(map(_sends_less_between, plan.buckets))
    # Phases are others on another number of nodes.
    others = plan.phase_order is not None and plan.world.nodes not in (None, topology.num_nodes)
    fallback = plan.fallback and _adapted(plan.fallback, topology)
    if stays and not others and fallback is plan.fallback:
        return plan
    buckets = tuple(_where_links_are_alike(bucket, topology) for bucket in plan.buckets)
    order = plan.phase_order if stays and not others else None
    return replace(plan, buckets=plan.buckets if stays else buckets, phase_order=order, fallback=fallback)
