"""Compute times on another accelerator than those that a profile has. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from planner.documents.nccl import GPUS
from planner.documents.profile import Cluster, ComputeProfile, Profile


def on_accelerator(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile on the cluster's accelerators, where its times are estimates and the cluster names them."""
    estimate = profile.compute.estimate
    if estimate is None or cluster.nccl is None or cluster.nccl.gpu == estimate.gpu:
        return profile
    old, new = GPUS[estimate.gpu], cluster.nccl.kind
    step = old.dense_flops * estimate.share_of(estimate.gpu) / (new.dense_flops * estimate.share_of(cluster.nccl.gpu))
    compute = scale_compute(profile.compute, step, old.memory_bytes_per_s / new.memory_bytes_per_s)
    world = replace(profile.world, accelerator=cluster.nccl.gpu, memory_bytes=int(new.memory_bytes))
    moved = replace(estimate, gpu=cluster.nccl.gpu)
    return replace(profile, compute=replace(compute, estimate=moved), world=world)


def scale_compute(compute: ComputeProfile, step: float, update: float) -> ComputeProfile:
    """Forward and backward times `step`, the update times `update`."""
    if step == 1.0 and update == 1.0:
        return compute
    norms = compute.norms
    if norms is not None:
        norms = replace(norms, layers=tuple(replace(layer, norm_us=layer.norm_us * update) for layer in norms.layers))
    return replace(
        compute,
        forward_us=compute.forward_us * step,
        update_us=compute.update_us * update,
        norms=norms,
        intervals=None,
        gradients=tuple(replace(g, backward_us=g.backward_us * step) for g in compute.gradients),
    )
