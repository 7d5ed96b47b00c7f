"""`planner advise`: what to use for a model on a cluster, from costs alone, least risky first. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from planner.cost import nccl
from planner.cost.model import communication_cost
from planner.cost.wire import DTYPES
from planner.decide.cut_choice import cut_problem, possible_cuts
from planner.decide.strategies import make_schedule, problem_of
from planner.documents.accelerators import ACCELERATORS, ROOM, find_accelerator, kind_of
from planner.documents.catalog import find_cluster, find_profile, name_of
from planner.documents.estimate import ComputeBasis, check_accelerators, scale_profile
from planner.documents.profile import Cluster, ComputeEstimate, Profile
from planner.documents.text import mib, ms, pluralize
from planner.documents.units import Units
from planner.fsdp2.inputs import PER_BLOCK, Setting, baselines_of, setting_of
from planner.fsdp2.simulator import Step, simulate
from planner.model.compression import NARROWED
from planner.model.modes import simulate_schedule
from planner.model.modes.sharded import can_share, memory_bytes, replicated_bytes, sharded_bytes
from planner.model.owned import whole_gradients
from planner.model.problem import Problem, make_problem
from runtime.errors import InputError
from runtime.plan.timeline import Timeline

CUTS = "cuts"
"""Name of the option that cuts a compiled graph."""
WORTH, WORTH_ASKING, WORTH_LOSING = 0.02, 0.05, 0.10
"""Shares of the step that an option has to save over less risky ones: a drop-in one, one that scripts have to know of,
and one that loses digits."""


@dataclass(frozen=True, kw_only=True)
class ComputedWith:
    """The assumptions of a prediction."""

    accelerator: str | None
    batch_per_rank: int | None
    dtype: str
    """Dtype of gradients; several are joined by +."""
    optimizer: str | None
    memory_bytes: int | None
    """Memory of a rank."""
    compute: ComputeBasis
    messages_within: float | None
    """Largest relative error of 9 of 10 messages; None where a formula or samples have their costs."""

    def __str__(self) -> str:
        """Return the assumptions on one line."""
        known = (
            self.accelerator or "accelerator not stated",
            "batch not stated" if self.batch_per_rank is None else f"batch {self.batch_per_rank} per rank",
            self.dtype,
            self.optimizer or "optimizer not stated",
            "memory not known" if self.memory_bytes is None else f"{self.memory_bytes / 1e9:.3g} GB memory",
            str(self.compute),
            *(() if self.messages_within is None else (f"messages ± {self.messages_within:.0%}",)),
        )
        return ", ".join(known)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to train, and its costs."""

    name: str
    iteration_us: float
    exposed_us: float
    memory_bytes: int | None
    """Memory for weights, gradients, the optimizer's state and activations; None: not known."""
    fits: bool | None
    interface: str
    """`drop-in`, or the interface that a script has to know of."""
    executed_by: str
    """The call that trains that way."""
    lossy: bool
    reason: str
    recomputed: bool = False
    """Whether blocks are computed once more in backward, which the script has to ask for (activation checkpointing)."""
    interval_us: tuple[float, float] | None = None
    """The step with all messages and all computation as fast, and as slow, as `ComputedWith` allows."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The option to use, and all options, least risky first."""

    model: str
    cluster: str
    ranks: int
    nodes: int
    computed_with: ComputedWith
    use: str
    """The name of an option; `ddp` with `nothing_to_gain` where nothing riskier pays."""
    nothing_to_gain: bool
    reason: str
    if_lossy: str | None
    """The name of an option that is worth it where messages may lose digits; None: there is none, or it is allowed and
    so in `use`."""
    next_command: str | None
    """The command to continue with; None where stock DDP is all that is needed, nothing fits, blocks have to be
    checkpointed or cuts measured first, or the cluster was changed, whose plan needs a cluster.json of its own."""
    memory_limit_bytes: int | None
    cost_source: str
    extrapolated: bool
    estimated: bool
    """Whether compute times are FLOPs over a stated rate."""
    interval: float | None
    options: tuple[Option, ...]

    @property
    def chosen(self) -> Option:
        """Return the option to use."""
        return next(option for option in self.options if option.name == self.use)

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self) | {"options": [asdict(option) for option in self.options]}


def advise(
    profile: Profile | str | Path, cluster: Cluster | str | Path | None = None, *, ranks: int | None = None,
    max_memory_mib: float | None = None, accuracy: str = "exact", accelerator: str | None = None,
) -> Advice:  # fmt: skip
    """Recommend a way to train a model on a cluster.

    Args:
        profile: a profile, its path, or a name of the catalogue: `MODEL` or `MODEL@CLUSTER`.
        cluster: a cluster, its path, or a name; default: the profile's.
        ranks: how many; default: the cluster's.
        max_memory_mib: memory of a rank; default: its accelerator's.
        accuracy: `bounded` lets what to use be lossy; with `exact` such ways are listed only.
        accelerator: the cluster's, where it does not name it.

    Raises:
        InputError: a document is wrong, there is no cluster, ranks do not fill nodes, or it cannot be known how long
            the model computes on the cluster's accelerators.
    """
    if accuracy not in ("exact", "bounded"):
        raise InputError(f"--accuracy: found {accuracy!r}, expected exact or bounded")
    loaded = find_profile(profile)
    machines = loaded.cluster if cluster is None else find_cluster(cluster)
    where = name_of(profile if cluster is None else cluster)
    problem = make_problem(loaded, machines and with_accelerator(machines, accelerator), ranks, where=where)
    advice = advice_on(loaded, problem, max_memory_mib=max_memory_mib, accuracy=accuracy)
    # A plan is of the cluster as it is written.
    written = accelerator is None and machines is not None and advice.ranks == machines.ranks
    if isinstance(profile, Profile) or isinstance(cluster, Cluster) or not written:
        return advice
    on = "" if cluster is None else f" --cluster {cluster}"
    memory = "" if max_memory_mib is None else f" --max-memory-mib {max_memory_mib:g}"
    return replace(advice, next_command=_command(advice, f"{profile}{on}", memory))


def with_accelerator(cluster: Cluster, name: str | None) -> Cluster:
    """Return the cluster with this accelerator. Raises InputError: it is not known, or the cluster has another."""
    if name is None:
        return cluster
    found, known = find_accelerator(name), cluster.computes_on
    if found is None:
        raise InputError(f"--accelerator: found {name!r}, expected one of: {', '.join(ACCELERATORS)}")
    # What `nccl` names is a kind, of which this may be a variant.
    if known not in (None, found) and (cluster.accelerator is not None or kind_of(found) != known):
        raise InputError(
            f"--accelerator: found {name}, and {cluster.name or 'the cluster'} has {known}; take it out, or choose "
            f"another cluster"
        )
    return replace(cluster, accelerator=found)


def advice_on(
    profile: Profile, problem: Problem, *, max_memory_mib: float | None = None, accuracy: str = "exact",
    brief: bool = False,
) -> Advice:  # fmt: skip
    """Return the advice on records, as `advise` and `sweep` give it.

    Args:
        profile: as it was measured.
        problem: the profile on the cluster's accelerators.
        max_memory_mib: memory of a rank; default: its accelerator's.
        accuracy: as for `advise`.
        brief: leave out lossy ways, and intervals of steps.

    Raises:
        InputError: as `advise` does.
    """
    check_accelerators(profile, problem.cost.cluster)
    problem = cut_problem(problem)
    basis = problem.basis
    assert basis is not None
    limit, lossy = _limit(problem, basis, max_memory_mib), not brief
    options = list(_options(problem, limit, lossy=lossy))
    if not brief:
        options = _with_intervals(problem, basis, limit, options)
    chosen, reason = _choose([option for option in options if not option.lossy])
    best, best_reason = _choose(options)
    if accuracy == "bounded":
        chosen, reason = best, best_reason
    found = problem.cost.cluster
    return Advice(
        model=profile.model.name, cluster=found.name or "(unnamed)", ranks=problem.ranks, nodes=found.nodes,
        computed_with=_computed_with(problem, basis, limit), use=chosen.name,
        nothing_to_gain=chosen.name == "ddp" and chosen.fits is not False, reason=reason,
        if_lossy=best.name if best.lossy and not chosen.lossy else None, next_command=None, memory_limit_bytes=limit,
        cost_source=problem.cost.source, extrapolated=problem.cost.extrapolated,
        estimated=profile.compute.estimate is not None, interval=problem.cost.interval, options=tuple(options),
    )  # fmt: skip


def _computed_with(problem: Problem, basis: ComputeBasis, limit: int | None) -> ComputedWith:
    compute = problem.profile.compute
    return ComputedWith(
        accelerator=basis.accelerator, batch_per_rank=problem.profile.world.batch_per_rank,
        dtype="+".join(dict.fromkeys(gradient.dtype for gradient in compute.gradients)),
        optimizer=None if compute.optimizer is None else compute.optimizer.name, memory_bytes=limit, compute=basis,
        messages_within=problem.cost.interval,
    )  # fmt: skip


def _command(advice: Advice, of: str, memory: str) -> str | None:
    """Return the command that makes the plan of the chosen way, if any."""
    option = advice.chosen
    if option.name in ("ddp", CUTS) or option.fits is False or option.recomputed:
        return None
    asked = {"sharded-step": " --allow sharded-step", "fsdp2": " --parallel fsdp2", "bounded": " --accuracy bounded"}
    return f"planner optimize {of}{asked.get(option.interface, '')}{memory} -o plan.json"


def _limit(problem: Problem, basis: ComputeBasis, given_mib: float | None) -> int | None:
    if given_mib is not None and not 0 < given_mib <= 1e12:
        raise InputError(f"--max-memory-mib: found {given_mib}, expected more than 0, such as 40000; correct it")
    name = find_accelerator(basis.accelerator)
    known = memory_bytes(problem, given_mib or 0.0)
    return known or (None if name is None else int(ACCELERATORS[name].memory_bytes))


def _with_intervals(
    problem: Problem, basis: ComputeBasis, limit: int | None, options: Sequence[Option]
) -> list[Option]:
    """Return the options with what they take where all is as fast, and as slow, as the intervals allow."""
    ends = []
    for sign in (-1, 1):
        other = _off_by(problem, basis.within or 0.0, problem.cost.interval or 0.0, sign)
        if other is None:
            return list(options)
        ends.append({option.name: option.iteration_us for option in _options(other, limit, lossy=True)})
    fast, slow = ends
    return [replace(option, interval_us=(fast[option.name], slow[option.name])) for option in options]


def _off_by(problem: Problem, compute: float, messages: float, sign: int) -> Problem | None:
    """Return the problem at one end of its intervals; None where there are none."""
    if not compute and not messages:
        return None
    profile = scale_profile(problem.profile, *2 * [(1.0 + compute) ** sign])
    cost, machine = problem.cost, problem.cost.cluster.nccl
    if messages and machine is not None:
        slower = nccl.scaled(machine, (1.0 + messages) ** sign)
        cost = communication_cost(replace(cost.cluster, nccl=slower))
    return Problem(profile=profile, cost=cost, cuts=problem.cuts)


def _options(problem: Problem, limit: int | None, *, lossy: bool) -> Iterator[Option]:
    """Yield all options, least risky first: drop-in, then those that scripts have to know of, then lossy ones."""
    ddp = problem_of(problem, "ddp")
    base = simulate_schedule(ddp, make_schedule(ddp, "ddp"))
    whole = replicated_bytes(problem)
    option = _Maker(base.iteration_us, limit)

    hidden = f"{ms(base.exposed_us)} of communication are exposed"
    yield option("ddp", base, whole, f"PyTorch's buckets; {hidden}", executed_by="DistributedDataParallel")
    if problem.ranks == 1:
        return
    best = simulate_schedule(problem, make_schedule(problem, "optimal"))
    cut = f", a compiled graph cut at {pluralize(len(problem.cuts), 'module')}" if problem.cuts else ""
    yield option("ddp, planned buckets", best, whole, f"buckets merged for this network{cut}")
    if (possible := possible_cuts(problem)) is not None:
        step = simulate_schedule(possible.problem, make_schedule(possible.problem, "optimal"))
        measures = f"{possible.note}; planner profile of a job with compile= measures costs"
        yield option(CUTS, step, whole, measures, executed_by="planner.attach(compile=…)")
    if can_share(problem):
        shared = make_schedule(problem, "optimal:sharded-step")
        yield option(
            "sharded step", simulate_schedule(problem, shared), sharded_bytes(problem, shared),
            "each rank updates and stores the state of its part (ZeRO-1)", interface="sharded-step",
        )  # fmt: skip
        if not whole_gradients(problem):
            yield from _fully_sharded(problem, option)
    if lossy:
        yield from _narrow(problem, option, whole)


@dataclass(frozen=True)
class _Maker:
    """Makes options that are compared with DDP's step, and with the memory of a rank."""

    ddp_us: float
    limit_bytes: int | None

    def __call__(
        self, name: str, step: Timeline | Step, memory: int | None, reason: str, *, interface: str = "drop-in",
        executed_by: str = "planner.attach",
    ) -> Option:  # fmt: skip
        limit = self.limit_bytes
        fits = None if memory is None or limit is None else memory <= ROOM * limit
        gain = self.ddp_us / step.iteration_us - 1.0 if step.iteration_us > 0.0 else 0.0
        versus = "" if name == "ddp" else f"; {gain:+.1%} in speed against ddp"
        room = "" if fits is not False or limit is None else f"; needs {mib(memory or 0)} of {mib(int(ROOM * limit))}"
        return Option(
            name=name, iteration_us=step.iteration_us, exposed_us=step.exposed_us, memory_bytes=memory, fits=fits,
            interface=interface, executed_by=executed_by, lossy=interface == "bounded",
            reason=f"{reason}{versus}{room}",
        )  # fmt: skip


def _fully_sharded(problem: Problem, option: _Maker) -> Iterator[Option]:
    """Yield FSDP2 by its own rules, with a group for each block, on all ranks or inside nodes."""
    cluster, setting = problem.cost.cluster, setting_of(problem)
    optimizer, estimate = problem.profile.compute.optimizer, problem.profile.compute.estimate
    known = optimizer is not None and optimizer.state_bytes is not None
    groups: list[tuple[str, int | None]] = [("fsdp2", None)]
    if cluster.nodes > 1 and cluster.ranks_per_node > 1:
        groups.append(("hsdp", cluster.ranks_per_node))
    for name, shard_ranks in groups:
        for recompute in (False, True) if estimate is not None else (False,):
            units = _recomputed(setting.units, estimate) if recompute and estimate is not None else setting.units
            try:
                step = _wrapped_step(replace(setting, units=units), shard_ranks)
            except InputError:
                break  # what a group's messages cost is not known on this cluster
            where = "on all ranks" if shard_ranks is None else "inside nodes, all-reduced between them"
            again = ", blocks computed twice" if recompute else ""
            found = option(
                f"{name}{', recomputed' if recompute else ''}", step, step.peak_bytes if known else None,
                f"weights, gradients and state sharded {where}{again}", interface="fsdp2",
                executed_by="planner.fully_shard",
            )  # fmt: skip
            yield replace(found, recomputed=recompute)


def _wrapped_step(setting: Setting, shard_ranks: int | None) -> Step:
    costs = setting.costs(shard_ranks)
    plan = replace(baselines_of(setting)[PER_BLOCK], shard_ranks=shard_ranks)
    return simulate(setting.shape, plan, costs, setting.executor, bars=False)


def _recomputed(units: Units, estimate: ComputeEstimate) -> Units:
    """Return the units where only inputs are kept for backward, which computes each unit once more."""
    share = estimate.checkpoint_bytes / max(1, estimate.activation_bytes)
    found = []
    for unit in units.units:
        kept = int(share * unit.activation_bytes)
        found.append(replace(
            unit, backward_us=unit.backward_us + unit.forward_us, activation_bytes=kept,
            backward_working_bytes=unit.backward_working_bytes + unit.activation_bytes - kept,
        ))  # fmt: skip
    return replace(units, units=tuple(found))


def _narrow(problem: Problem, option: _Maker, whole: int | None) -> Iterator[Option]:
    """Yield quantized buckets, where gradients are wider and may be added up in float32."""
    gradients = problem.profile.compute.gradients
    if not all(gradient.dtype in NARROWED for gradient in gradients):
        return
    wide = float(problem.size_bytes.sum()) / max(1, int(problem.numel.sum()))
    for name, dtype in DTYPES.items():
        if dtype.advised and dtype.element_bytes < wide:
            taken = simulate_schedule(problem, make_schedule(problem, f"wire:{name}"))
            bytes_share = f"{dtype.element_bytes / wide:.0%} of the bytes, with error feedback"
            yield option(f"ddp, {name} on the wire", taken, whole, bytes_share, interface="bounded")


def _worth(option: Option) -> float:
    return WORTH_LOSING if option.lossy else WORTH if option.interface == "drop-in" else WORTH_ASKING


def _choose(options: list[Option]) -> tuple[Option, str]:
    """Return the least risky option that fits, unless a riskier one that fits is worth it; and the reason."""
    possible = [option for option in options if option.fits is not False]
    if not possible:
        least = min(options, key=lambda option: option.memory_bytes or 0)
        return least, (
            "nothing here fits into the memory of one accelerator, and this needs least: use more ranks, a smaller "
            "batch, or tensor or pipeline parallelism"
        )
    chosen = possible[0]
    for option in possible[1:]:
        if option.iteration_us * (1.0 + _worth(option)) < chosen.iteration_us:
            chosen = option
    if chosen.name == "ddp":
        best = min(possible, key=lambda option: option.iteration_us)
        gain = chosen.iteration_us / best.iteration_us - 1.0 if best.iteration_us > 0.0 else 0.0
        if best is chosen:
            return chosen, "nothing to gain here: no other way is faster"
        return chosen, f"nothing to gain here: {best.name} would be {gain:.1%} faster, less than {_worth(best):.0%}"
    without = [option.name for option in options[: options.index(chosen)] if option.fits is False]
    why = f"{', '.join(without)} do{'es' if len(without) == 1 else ''} not fit" if without else ""
    faster = [option for option in possible if options.index(option) < options.index(chosen)]
    if faster:
        gain = faster[0].iteration_us / chosen.iteration_us - 1.0
        why = "; ".join(part for part in (why, f"{gain:.1%} faster than {faster[0].name}") if part)
    return chosen, why or "the least risky way that fits"
