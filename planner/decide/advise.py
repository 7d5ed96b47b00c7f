"""`planner advise`: what to use for a model on a cluster, from costs alone, least risky first. Never imports torch.

What this runtime does not do itself (FSDP2) is predicted from costs, and marked so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.cost.wire import ELEMENT_BYTES
from planner.decide.optimize import name_of
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_cluster, find_profile
from planner.documents.nccl import GPUS
from planner.documents.profile import Cluster, Profile
from planner.documents.text import mib, ms
from planner.model.compression import NARROWED
from planner.model.fully_sharded import blocks_of, messages_on, sharded_step
from planner.model.modes import simulate_schedule
from planner.model.modes.sharded import can_share, memory_bytes, replicated_bytes, sharded_bytes
from planner.model.problem import Problem, make_problem
from runtime.errors import InputError

WORTH, WORTH_ASKING, WORTH_LOSING = 0.02, 0.05, 0.10
"""By what share a way has to shorten the step against less risky ones: a drop-in one, one that scripts have to know of,
and one that loses digits."""
ROOM = 0.92
"""Of an accelerator's memory: the rest is the library's buffers and fragments."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to train, and what it would take."""

    name: str
    iteration_us: float
    exposed_us: float
    memory_bytes: int | None
    """Of weights, gradients, the optimizer's state and activations; None: not known."""
    fits: bool | None
    interface: str
    """`drop-in`, or what a script has to know of."""
    runs_here: bool
    """Whether this runtime does it; others follow from costs alone."""
    lossy: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to use, and what else there was, least risky first."""

    model: str
    cluster: str
    ranks: int
    nodes: int
    use: str
    """The name of an option; `ddp` with `nothing_to_gain` where nothing riskier pays."""
    nothing_to_gain: bool
    reason: str
    if_lossy: str | None
    """The name of an option that is worth it where messages may lose digits; None: there is none, or it is allowed and
    so in `use`."""
    memory_limit_bytes: int | None
    cost_source: str
    extrapolated: bool
    estimated: bool
    """Whether compute times are FLOPs over a stated rate."""
    interval: float | None
    options: tuple[Option, ...]

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self) | {"options": [asdict(option) for option in self.options]}


def advise(
    profile: Profile | str | Path, cluster: Cluster | str | Path | None = None, *, ranks: int | None = None,
    max_memory_mib: float | None = None, accuracy: str = "exact",
) -> Advice:  # fmt: skip
    """Say what to use for a model on a cluster.

    Args:
        profile: a profile, its path, or a name of the catalogue: `MODEL` or `MODEL@CLUSTER`.
        cluster: a cluster, its path, or a name; default: the profile's.
        ranks: how many; default: the cluster's.
        max_memory_mib: what a rank has; default: its accelerator's.
        accuracy: `bounded` lets what to use be lossy; with `exact` such ways are listed only.

    Raises InputError: a document is wrong, there is no cluster, or ranks do not fill nodes.
    """
    if accuracy not in ("exact", "bounded"):
        raise InputError(f"--accuracy: found {accuracy!r}, expected exact or bounded")
    loaded = find_profile(profile)
    machines = None if cluster is None else find_cluster(cluster)
    problem = make_problem(loaded, machines, ranks, where=name_of(profile if cluster is None else cluster))
    limit = _limit(problem, max_memory_mib)
    options = list(_options(problem, limit))
    chosen, reason = _choose([option for option in options if not option.lossy])
    lossy, lossy_reason = _choose(options)
    if accuracy == "bounded":
        chosen, reason = lossy, lossy_reason
    found = problem.cost.cluster
    return Advice(
        model=loaded.model.name, cluster=found.name or "(unnamed)", ranks=problem.ranks, nodes=found.nodes,
        use=chosen.name, nothing_to_gain=chosen.name == "ddp" and chosen.fits is not False, reason=reason,
        if_lossy=lossy.name if lossy.lossy and not chosen.lossy else None, memory_limit_bytes=limit,
        cost_source=problem.cost.source, extrapolated=problem.cost.extrapolated,
        estimated=loaded.compute.estimate is not None, interval=problem.cost.interval, options=tuple(options),
    )  # fmt: skip


def _limit(problem: Problem, given_mib: float | None) -> int | None:
    if given_mib is not None and not 0 < given_mib <= 1e12:
        raise InputError(f"--max-memory-mib: found {given_mib}, expected more than 0, such as 40000; correct it")
    machine = problem.cost.cluster.nccl
    known = memory_bytes(problem, given_mib or 0.0)
    return known or (int(GPUS[machine.gpu].memory_bytes) if machine is not None else None)


def _options(problem: Problem, limit: int | None) -> Iterator[Option]:
    """All ways, least risky first: drop-in, then what a script has to know of, then what changes sums."""
    base = simulate_schedule(problem, make_schedule(problem, "ddp"))
    whole = replicated_bytes(problem)
    option = _Maker(base.iteration_us, limit)

    hidden = f"{ms(base.exposed_us)} of communication are exposed"
    yield option("ddp", base.iteration_us, whole, f"PyTorch's buckets; {hidden}", exposed_us=base.exposed_us)
    if problem.ranks == 1:
        return
    best = simulate_schedule(problem, make_schedule(problem, "optimal"))
    words = "buckets merged for this network"
    yield option("ddp, planned buckets", best.iteration_us, whole, words, exposed_us=best.exposed_us)
    if can_share(problem):
        shared = make_schedule(problem, "optimal:sharded-step")
        taken = simulate_schedule(problem, shared)
        yield option(
            "sharded step", taken.iteration_us, sharded_bytes(problem, shared),
            "each rank updates and stores the state of its part (ZeRO-1)", interface="sharded-step",
            exposed_us=taken.exposed_us,
        )  # fmt: skip
        yield from _fully_sharded(problem, option)
    yield from _narrow(problem, option, whole)


@dataclass(frozen=True)
class _Maker:
    """Makes options that are compared with DDP's step, and with what a rank has."""

    ddp_us: float
    limit_bytes: int | None

    def __call__(
        self, name: str, iteration_us: float, memory: int | None, reason: str, *, exposed_us: float,
        interface: str = "drop-in", runs_here: bool = True, lossy: bool = False,
    ) -> Option:  # fmt: skip
        limit = self.limit_bytes
        fits = None if memory is None or limit is None else memory <= ROOM * limit
        gain = self.ddp_us / iteration_us - 1.0 if iteration_us > 0.0 else 0.0
        versus = "" if name == "ddp" else f"; {gain:+.1%} in speed against ddp"
        room = "" if fits is not False or limit is None else f"; needs {mib(memory or 0)} of {mib(int(ROOM * limit))}"
        return Option(
            name=name, iteration_us=iteration_us, exposed_us=exposed_us, memory_bytes=memory, fits=fits,
            interface=interface, runs_here=runs_here, lossy=lossy, reason=f"{reason}{versus}{room}",
        )  # fmt: skip


def _fully_sharded(problem: Problem, option: _Maker) -> Iterator[Option]:
    cluster = problem.cost.cluster
    blocks = blocks_of(problem)
    state = problem.profile.compute.optimizer
    estimate = problem.profile.compute.estimate
    weights = int(problem.size_bytes.sum())
    groups: list[tuple[str, int | None]] = [("fsdp2", None)]
    if cluster.nodes > 1 and cluster.ranks_per_node > 1:
        groups.append(("hsdp", cluster.ranks_per_node))
    for name, shard_ranks in groups:
        try:
            messages = messages_on(cluster, shard_ranks)
        except InputError:
            continue  # what a group's messages cost is not known on this cluster
        parts = shard_ranks or problem.ranks
        largest = max(block.size_bytes for block in blocks)
        for recompute in (False, True) if estimate is not None else (False,):
            step = sharded_step(blocks, messages, problem.update_us / parts, recompute=recompute)
            kept = 0 if estimate is None else estimate.checkpoint_bytes if recompute else estimate.activation_bytes
            if recompute and estimate is not None:
                kept += estimate.activation_bytes // max(1, len(blocks))  # of the block that is computed again
            state_bytes = None if state is None else state.state_bytes
            memory = None if state_bytes is None else (2 * weights + state_bytes) // parts + int(3 * largest) + kept
            where = "on all ranks" if shard_ranks is None else "inside nodes, all-reduced between them"
            again = ", blocks computed twice" if recompute else ""
            yield option(
                f"{name}{', recomputed' if recompute else ''}", step.iteration_us, memory,
                f"weights, gradients and state sharded {where}{again}, from costs alone", interface="fsdp2",
                runs_here=False, exposed_us=step.exposed_us,
            )  # fmt: skip


def _narrow(problem: Problem, option: _Maker, whole: int | None) -> Iterator[Option]:
    """Narrow buckets, where gradients are wider and may be added up in float32."""
    gradients = problem.profile.compute.gradients
    if not all(gradient.dtype in NARROWED for gradient in gradients):
        return
    wide = float(problem.size_bytes.sum()) / max(1, int(problem.numel.sum()))
    for dtype in ("bfloat16", "int8", "float8_e4m3fn"):
        if ELEMENT_BYTES[dtype] < wide:
            taken = simulate_schedule(problem, make_schedule(problem, f"wire:{dtype}"))
            yield option(
                f"ddp, {dtype} on the wire", taken.iteration_us, whole,
                f"{ELEMENT_BYTES[dtype] / wide:.0%} of the bytes, with error feedback", interface="bounded",
                lossy=True, exposed_us=taken.exposed_us,
            )  # fmt: skip


def _worth(option: Option) -> float:
    return WORTH_LOSING if option.lossy else WORTH if option.interface == "drop-in" else WORTH_ASKING


def _choose(options: list[Option]) -> tuple[Option, str]:
    """The least risky one that fits, unless a riskier one that fits is worth it; why, in words."""
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
