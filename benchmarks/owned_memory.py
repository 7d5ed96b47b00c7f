"""Memory of an optimizer whose steps are owned, on each of four ranks, against that of one rank that has everything.

Counted from the tensors of the optimizer's state after steps of `examples/muon.py`, with the owners that planner
chooses by shapes alone, as for an optimizer that was not timed.
"""

from __future__ import annotations

import runtime
from planner import optimize
from planner.documents.profile import ComputeProfile, Gradient, OptimizerProfile, Profile, ProfileWorld, parse_cluster
from planner.jobs.launch import LocalWorld, run_ranks
from planner.jobs.training import build
from planner.profile.compute import matrix_of
from runtime.checks.plan import model_fingerprint, trainable_parameters
from runtime.optimizers.kinds import each_of
from runtime.optimizers.units import unit_of
from runtime.plan import ModelReference, Plan
from runtime.sharded.state import state_bytes

JOB, STEPS, MOST = "examples/muon.py:job", 2, 0.30
"""Job that is trained, its steps, and the target for a rank's share of the state."""


def owned_plan(ranks: int) -> Plan:
    """Return planner's plan of an owned step for the job."""
    built = build(JOB, "cpu")
    parameters, optimizers = trainable_parameters(built.model), each_of(built.optimizer)
    held = {id(p) for one in optimizers if unit_of(one) == "matrix" for g in one.param_groups for p in g["params"]}
    gradients = tuple(
        Gradient(
            name=name, layer=name, numel=p.numel(), dtype="float32", matrix=matrix_of(p), backward_us=p.numel() / 1e3
        )
        for name, p in reversed(parameters.items())
    )  # fmt: skip
    optimizer = OptimizerProfile(
        name="Muon, AdamW", adaptive=True, elementwise=False, unit="matrix", holds_all=True,
        matrices=tuple(name for name, p in parameters.items() if id(p) in held),
    )  # fmt: skip
    profile = Profile(
        model=ModelReference(name="gpt", fingerprint=model_fingerprint(built.model)),
        world=ProfileWorld(ranks=ranks),
        compute=ComputeProfile(forward_us=2e3, update_us=2e4, gradients=gradients, optimizer=optimizer),
    )
    link = {"bandwidth": "25gbit", "latency": "20us"}
    cluster = parse_cluster({"schema": "planner.cluster/1", "nodes": ranks, "inter": link})
    return optimize(profile, cluster, allow=["sharded-step"], passes="merge,shard_updates{step=always}")


def rank_bytes(plan: Plan | None) -> int:
    """Return the bytes of the optimizers' state on this rank after steps by the plan; None: of one rank alone."""
    built = build(JOB, "cpu")
    session = None if plan is None else runtime.attach(built.model, built.optimizer, plan)
    for step in range(STEPS):
        built.train(built.batch(step))
    if session is None:
        return sum(state_bytes(one.state) for one in each_of(built.optimizer))
    report = session.report().step
    session.detach()
    assert report is not None
    return report.state_bytes


def memory(ranks: int = 4) -> tuple[str, list[float]]:
    """Train on a number of ranks and on one; return a sentence, and each rank's share of the state of one."""
    each = run_ranks(LocalWorld(ranks=ranks), rank_bytes, owned_plan(ranks))
    whole = rank_bytes(None)
    shares = [own / whole for own in each]
    mib = ", ".join(f"{own / 2**20:.2f}" for own in each)
    text = (
        f"Optimizer state of `examples/muon.py` in an owned step: {mib} MiB on {ranks} ranks, {whole / 2**20:.2f} MiB "
        f"on one alone; at most {max(shares):.3f} of that on a rank."
    )
    return text, shares
