"""A plan with collectives on two kinds of link beside the nodes that there are: does it fit, and what becomes of it.

On one node nothing is sent between nodes, so what HiTopKComm would leave out there is not left out: it falls to its
dense part. With one rank a node it is the flat gather of selected elements.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from runtime.comm.collectives import HITOPK, TORUS, asks_for_nodes, form_of
from runtime.comm.collectives.phases import share_of
from runtime.comm.phased_communicator import phases_of
from runtime.comm.topology import Topology
from runtime.comm.world import World
from runtime.errors import AdaptedWarning
from runtime.plan import CURE, NO_COMPRESSION, Plan, PlanBucket


def find_topology_misfit(plan: Plan, topology: Topology | str | None) -> str | None:
    """Why ranks on these nodes cannot execute the plan, or None; where nodes are not known, `topology` says why."""
    plans = [plan, *([] if plan.fallback is None else [plan.fallback])]
    if asks_for_nodes(plan) and (problem := _nodes_misfit(plan, topology)):
        return problem
    if plan.delay is not None and (problem := _workers_misfit(plan, topology)):
        return problem
    if isinstance(topology, Topology):
        return next((problem for one in plans if (problem := _order_misfit(one, topology))), None)
    return None


def _nodes_misfit(plan: Plan, topology: Topology | str | None) -> str | None:
    if not isinstance(topology, Topology):
        why = topology or "ranks have not agreed on their nodes; attach with this plan"
        return f"the plan has collectives inside nodes and between them, but {why}"
    planned = plan.world.nodes
    if planned is None or planned == topology.count or topology.count == 1:
        return None
    return (
        f"the plan has collectives inside nodes and between them, for {planned} nodes, but found {topology}; expected "
        f"{planned} nodes of {plan.world.ranks // planned}: start so many, give a mesh, or make a plan for this cluster"
    )


def _workers_misfit(plan: Plan, topology: Topology | str | None) -> str | None:
    """Why the nodes that there are cannot be the workers of a plan with delay, or None."""
    nodes, ranks = plan.world.nodes or plan.world.ranks, plan.world.ranks
    if nodes == ranks:  # every rank is a worker, wherever it is
        return None
    if not isinstance(topology, Topology):
        why = topology or "ranks have not agreed on their nodes; attach with this plan"
        return f"the plan has a delay between {nodes} nodes, but {why}"
    if topology.count == nodes:
        return None
    return (
        f"the plan has a delay between {nodes} nodes, but found {topology}; expected {nodes} of {ranks // nodes} "
        f"ranks: start so many, give a mesh, or make a plan for this cluster"
    )


def _order_misfit(plan: Plan, topology: Topology) -> str | None:
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
            f"{list(odd[0])}: leave it out for the usual order, or {CURE}"
        )
    for bucket, phase in found:
        if phase != reached[bucket]:
            return (
                f"phase_order: found phase {phase} of bucket {bucket} before its phase {reached[bucket]}, for which it "
                f"waits; expected the phases of a bucket in order: leave phase_order out, or {CURE}"
            )
        reached[bucket] += 1
    return None


def adapt(plan: Plan, world: World, parameters: Mapping[str, nn.Parameter]) -> Plan:
    """The plan as it is executed on the world's nodes; rank 0 says (`AdaptedWarning`) what is other than it reads."""
    topology = world.topology
    if not isinstance(topology, Topology) or world.ranks == 1:
        return plan
    adapted = _adapted(plan, topology)
    notes = list(_too_few(adapted, topology, parameters))
    changed = [index for index, bucket in enumerate(plan.buckets) if form_of(bucket) == HITOPK]
    if changed and topology.count == 1:
        notes.append(
            f"all {topology.per_node} ranks are on one node, where sparse/hitopk has nothing to leave out: "
            f"{len(changed)} of {len(plan.buckets)} buckets (the first is {changed[0]}) travel dense, by "
            f"all_reduce/torus_2d"
        )
    for note in notes if world.rank == 0 else []:
        warnings.warn(note, AdaptedWarning, stacklevel=4)
    return adapted


def _adapted(plan: Plan, topology: Topology) -> Plan:
    several = topology.count > 1 and topology.per_node > 1
    stays = several or not any(form_of(bucket) == HITOPK for bucket in plan.buckets)
    others = plan.phase_order is not None and plan.world.nodes not in (None, topology.count)  # phases are others there
    fallback = plan.fallback and _adapted(plan.fallback, topology)
    if stays and not others and fallback is plan.fallback:
        return plan
    buckets = tuple(_other_form(bucket, topology) if form_of(bucket) == HITOPK else bucket for bucket in plan.buckets)
    order = plan.phase_order if stays and not others else None
    return replace(plan, buckets=plan.buckets if stays else buckets, phase_order=order, fallback=fallback)


def _other_form(bucket: PlanBucket, topology: Topology) -> PlanBucket:
    if topology.count > 1:
        return replace(bucket, algorithm="flat")
    return replace(bucket, collective=TORUS[0], algorithm=TORUS[1], compressor=NO_COMPRESSION)


def _too_few(plan: Plan, topology: Topology, parameters: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Of each bucket whose density is less than one element of a shard, what is sent."""
    for index, bucket in enumerate(plan.buckets):
        density = bucket.compressor.density
        if form_of(bucket) != HITOPK or density is None:
            continue
        share = share_of(sum(parameters[name].numel() for name in bucket.gradients), topology.per_node)
        if math.floor(density * share) < 1:
            yield (
                f"bucket {index}: a density of {density:g} is less than one of the {share} elements of a shard: k = 1 "
                f"there, a density of {1 / share:.3g}"
            )
