"""What every rank of a rehearsal does, from the machine as it is to the compared steps."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from planner.comparison.measure import Record, Sweep, VariantRunner, measure_all
from planner.comparison.trained import TrainedJob
from planner.comparison.variants import DDP, NO_COMMUNICATION, PLAN, Hook, Variant, make_variants, sweep
from planner.decide.optimize import optimize
from planner.decide.strategies import make_schedule
from planner.documents.profile import Cluster, ComputeProfile, Line, Profile, SelectionLine
from planner.ir import ACCURACIES, Bucket, Schedule
from planner.jobs.training import SEED, BuiltJob
from planner.model.modes import model_of
from planner.model.problem import Problem, make_problem
from planner.profile.delay import measure_delay
from planner.profile.links import (
    SMALLEST_BYTES,
    Curve,
    make_bucket,
    measure_apart,
    measure_links,
    parts_of,
    timed_us,
)
from planner.profile.progress import Progress
from planner.profile.selection import measure_encoding, measure_selection
from planner.profile.step import joined
from planner.rehearse.accelerator import AcceleratedModel, Accelerator, make_job
from planner.rehearse.rehearsal import Asked, OnHosts, Rehearsed, scaled_plan
from planner.rehearse.scale import Links, Machine, Scale, choose_scale, links_of
from planner.testbed.wiring import INTERFACE, MTU_BYTES, shaping
from runtime.checks.plan import model_fingerprint
from runtime.comm.collectives import COLLECTIVES
from runtime.comm.communicator import CommTiming, make_communicator
from runtime.comm.topology import node_name
from runtime.comm.world import World
from runtime.errors import EnvironmentFailure, InputError
from runtime.plan import Accuracy, Plan
from runtime.plan.interfaces import SHARDED_STEP, granted
from runtime.plan.transports import LIBRARY, NATIVE, TWO_SHOT
from runtime.session.session import Session
from runtime.sparse.residuals import ErrorFeedbackState

TIMEOUT_S = 120.0
SETTINGS = Path("/proc/sys/net/ipv4")
"""Of the emulated host alone."""
WAITING_S = 1e-3
"""How much of what a connection sends a host holds back in its own queue, on the cluster as it is: TCP's own bound,
which knows no less than two large packets. On a link held to some Mbit/s those take tens of milliseconds, in which
gloo's messages that ask for the next piece wait behind them."""
PROBE_BYTES = 2**24
"""A message whose time is the machine's, not its start-up."""
PIECES = 32
"""Of the weights whose update is probed."""
PROBES = 7
BETWEEN = ("all_reduce", "reduce_scatter", "all_gather")
"""The phases of collectives on two kinds of link, inside hosts and between them."""
LEAST_BYTES = 16
"""Of a message, however much is shrunk."""
LINK_SHARE = 0.15
"""Of the time given, what timing messages may take."""
ROUNDS_SHARE = 0.48
"""Of the time left, what the fewest rounds may take where D is chosen …"""
BRIEF_SHARE = 0.6
"""… and where DDP's steps are slow, so that nothing else takes long."""
SWEEP_SHARE = 0.3
"""Of the time left, what looking for DDP's best bucket size may take."""
WARM_UP_STEPS, BLOCK_STEPS = 1, 3
"""Of each block: DDP lays its buckets out again after the first step. Waits differ by little, so that a few steps say
as much as many, and time is better spent on a larger dilation."""
OWN_STEPS = 5
"""Without communication, before anything is predicted."""
LEAST_ROUNDS, MOST_ROUNDS = 2, 40
SLOW = 4.0
"""Steps that are so many times longer than without communication get the fewest blocks."""
HOOKS: tuple[Hook, ...] = ("fp16",)
"""Of DDP's; PowerSGD's products would be the host's work, and are the accelerator's."""
SWEEP = Sweep(rounds=1, finalists=2, final_rounds=2, steps=2)
"""Dilated steps differ by little."""


def rehearse_rank(asked: Asked, started_s: float, show_progress: bool) -> Rehearsed:
    """Rehearse on this rank; every rank calls it. `started_s`: wall-clock seconds when the command began."""
    with joined(None, TIMEOUT_S) as world:
        progress = Progress(show_progress and world.rank == 0)
        say = Teller(world.rank == 0)
        scale = begin(world, asked, say, lambda: _most_dilate(asked, asked.left_s(started_s)))
        scaled = scale.profile(asked.profile)
        torch.manual_seed(SEED)
        riskiest = _riskiest(asked)
        job = make_job(scaled.compute, world.rank, scale.dilate, fused=riskiest != "relaxed")
        assert isinstance(job.model, AcceleratedModel)
        made = job.optimizer(job.model.parameters())
        built = BuiltJob(spec=f"rehearsal of {asked.name}", job=job, optimizer=made, device=torch.device("cpu"))
        own_us = _own_us(built, world, scaled, scale)
        decided = _decide(asked, riskiest, world, scale, progress, model_fingerprint(job.model), own_us)
        variants, caps = decided.variants, decided.caps
        left_s = asked.left_s(started_s)
        rounds: Rounds = world.gather(_rounds(variants, caps, left_s, asked.minutes), "agreeing on rounds")[0]
        caps = [one for one in caps if one[0] in rounds.caps]
        slow = f", {LEAST_ROUNDS} of one step of {', '.join(rounds.brief)}" if rounds.brief else ""
        say(
            f"{len(variants)} variants and {len(caps)} bucket sizes of DDP: {rounds.count} rounds of {rounds.steps} "
            f"steps each{slow}"
        )
        if world.ranks > 1:
            world.broadcast([*job.model.parameters()])
        torch.manual_seed(SEED + 1 + world.rank)
        runner = RehearsalRunner(TrainedJob(built), world, scale, job.model.device)
        alone_s = sum(each.alone_s for each in _blocks(variants, rounds.steps))
        end_s = started_s + asked.minutes * 60.0 - alone_s
        measured = measure_all(runner, variants, caps, rounds.count, rounds.steps, progress, end_s, SWEEP, rounds.brief)
        return Rehearsed(
            scale=scale, measured=measured, from_constants_us=decided.from_constants_us, bound_us=decided.bound_us,
            late_us=runner.late_by_variant_us(),
        )  # fmt: skip


def begin(world: World, asked: OnHosts, say: Teller, most_dilate: Callable[[], float], copies: float = 1.0) -> Scale:
    """Agree on the scale, and hold this host's links to it; every rank calls it.

    `most_dilate` returns the most that there is time for; the first rank calls it, where none is asked for. `copies`:
    how many times more bytes are to be shrunk than the machine's sockets ask for, as hosts copy them as well.
    """
    # A thread that wakes must not take the core from one that holds a lock of gloo's, or it spins there until the other
    # is on again: with eight ranks on two cores an all-reduce starts up three times more slowly then.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    links = links_of(asked.cluster)
    machine = probe(world)
    # Of the first rank alone, where ranks share cores.
    most = asked.dilate or (most_dilate() if world.rank == 0 else 1.0)
    mine = choose_scale(
        links, machine, asked.profile, world.ranks, most_dilate=most, dilate=asked.dilate, shrink=asked.shrink
    )
    scale: Scale = world.gather(mine, "agreeing on the scale")[0]
    if asked.shrink is None:
        scale = replace(scale, shrink=round(copies * scale.shrink, 1))
    say(
        f"dilated {scale.dilate:g} times, shrunk {scale.shrink:g} times: an all-reduce starts up in "
        f"{machine.start_up_us / scale.dilate:.0f} us (asked {links.start_up_us:.0f})"
    )
    shape_links(world, links, scale)
    return scale


class RehearsalRunner(VariantRunner):
    """Blocks of variants on an accelerator that is waited for, and what did not fit under its waits."""

    def __init__(self, trained: TrainedJob, world: World, scale: Scale, device: Accelerator) -> None:
        super().__init__(trained, world, TIMEOUT_S, WARM_UP_STEPS, shrink=scale.shrink)
        self._accelerator = device
        self._late_us: dict[str, list[float]] = {}

    def block(self, record: Record, steps: int) -> None:
        before_us = self._accelerator.late_us
        super().block(record, steps)
        late_us = self._accelerator.late_us - before_us
        late_us /= self.warm_up_steps(record) + record.variant.whole_cycles(steps)
        self._late_us.setdefault(record.variant.name, []).append(late_us)

    def _attach(self, optimizer: torch.optim.Optimizer | None, plan: Plan) -> Session:
        """As elsewhere; selecting and unpacking are the accelerator's work, which has begun when they have."""
        session = super()._attach(optimizer, plan)
        if isinstance(feedback := session.exchange.carried, ErrorFeedbackState):
            for lossy in feedback.lossy.values():
                lossy.pack = partial(self._on_device, lossy.pack)  # type: ignore[method-assign]
                lossy.unpack = partial(self._on_arrival, lossy.unpack)  # type: ignore[method-assign]
        return session

    def _on_device(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return self._accelerator.occupy(partial(work, *arguments))

    def _on_arrival(self, work: Callable[..., Any]) -> Any:
        self._accelerator.synchronize()  # both have waited for the message: the host was not late
        return self._on_device(work)

    def late_by_variant_us(self) -> dict[str, float]:
        """Return, of a step, by how much hooks and updates took longer than waits: the median of blocks."""
        return {name: statistics.median(of_blocks) for name, of_blocks in self._late_us.items()}


class Teller:
    """Lines on standard error, of the first rank alone."""

    def __init__(self, first: bool) -> None:
        self._first = first

    def __call__(self, text: str) -> None:
        if self._first:
            os.write(2, f"rehearse: {text}\n".encode())


def probe(world: World) -> Machine:
    """Return what an all-reduce costs these ranks where no link holds it."""
    device = torch.device("cpu")
    communicator = make_communicator(world, [COLLECTIVES[LIBRARY]], device)
    try:
        times = {}
        for numel in (256, PROBE_BYTES // 4):
            bucket = make_bucket(numel * 4, device)

            def run(bucket: object = bucket) -> None:
                communicator.launch(bucket.payload, CommTiming())  # type: ignore[attr-defined]
                communicator.wait()

            run()
            mine = []
            for _ in range(PROBES):
                dist.barrier(group=world.group)
                mine.append(timed_us(run, device))
            everyone = world.gather(mine, "probing the machine")
            passes = [min(of_pass) for of_pass in zip(*everyone, strict=True)]
            times[numel * 4] = sorted(passes)[len(passes) // 2]
    finally:
        communicator.close()
    update_us_per_byte = _probe_update(world)
    (small, small_us), (large, large_us) = times.items()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        start_up_us=small_us, us_per_byte=max(0.0, large_us - small_us) / (large - small),
        update_us_per_byte=update_us_per_byte, memory_bytes=memory,
    )  # fmt: skip


def _own_us(built: BuiltJob, world: World, scaled: Profile, scale: Scale) -> tuple[float, float]:
    """Return by how much a step without communication takes longer than the profile's, undilated: on a usual rank, and
    on the last one, for whom those wait that communicate.

    It is updates and Python, for which ranks share the machine's cores. What is compared is not looked at: these steps
    are made before, by all ranks at once.
    """
    compute, mine = scaled.compute, []
    asked_us = compute.forward_us + compute.update_us + sum(each.backward_us for each in compute.gradients)
    trained = TrainedJob(built)
    optimizer = trained.optimizer()
    with trained.restored(optimizer):
        for step in range(WARM_UP_STEPS + OWN_STEPS):
            dist.barrier(group=world.group)
            started_s = time.perf_counter()
            trained.step(trained.model, optimizer, step, in_ddp=False)
            mine.append((time.perf_counter() - started_s) * 1e6 - asked_us)
    everyone: list[list[float]] = world.gather(mine[WARM_UP_STEPS:], "steps without communication")
    usual_us = max(0.0, statistics.median(chain(*everyone)))
    last_us = statistics.median(max(of_ranks) for of_ranks in zip(*everyone, strict=True))
    return usual_us / scale.dilate, max(usual_us, last_us) / scale.dilate


def _probe_update(world: World) -> float:
    """Return microseconds per byte of weights of an update that all ranks make at once, on the slowest of them."""
    weights = [torch.zeros(PROBE_BYTES // 4 // PIECES, requires_grad=True) for _ in range(PIECES)]
    optimizer = torch.optim.SGD(weights, lr=1e-2)
    mine = []
    for _ in range(PROBES):
        for one in weights:  # in new memory, as after each `zero_grad`
            one.grad = torch.ones_like(one)
        dist.barrier(group=world.group)
        mine.append(timed_us(optimizer.step, weights[0].device))
        optimizer.zero_grad()
    everyone = world.gather(statistics.median(mine), "probing the machine")
    return float(max(everyone)) / PROBE_BYTES


def shape_links(world: World, links: Links, scale: Scale) -> None:
    """Hold this host's links to the scaled rates; the first rank of each host does."""
    problem = None
    rate = scale.rate(links.inter_bits_per_s)
    settings = {
        # Connections idle during a computation, which is dilated: they would begin slowly again as on no cluster.
        "tcp_slow_start_after_idle": 0,
        "tcp_min_tso_segs": 1,
        "tcp_limit_output_bytes": max(MTU_BYTES, round(WAITING_S * scale.dilate * rate / 8)),
    }
    for name, value in settings.items():
        with suppress(OSError):  # where a container does not let it be set, it stays
            (SETTINGS / name).write_text(str(value), encoding="ascii")
    if os.environ.get("LOCAL_RANK") == "0":
        commands = [["tc", *shaping(rate).replace("add", "replace", 1).split()]]
        if links.intra_bits_per_s is not None:
            inside = shaping(scale.rate(links.intra_bits_per_s)).replace(INTERFACE, "lo").replace("add", "replace", 1)
            # Packets that are larger than what is shaped at once would be dropped, again and again.
            commands += [["ip", "link", "set", "lo", "mtu", str(MTU_BYTES)], ["tc", *inside.split()]]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=15.0, check=False)
            problem = problem or (done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None)
    problems = [one for one in world.gather(problem, "shaping links") if one]
    if problems:
        raise EnvironmentFailure(f"the links of the emulated hosts cannot be held to their rates: {problems[0]}")


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What is compared, and what was said of it before; steps in microseconds of the cluster itself."""

    variants: list[Variant]
    caps: list[tuple[float, Variant]]
    """DDP's bucket sizes."""
    from_constants_us: dict[str, float]
    """By variant, its step as the cluster's constants alone predict it."""
    bound_us: float | None
    """No plan of the asked kind takes less."""


def _decide(
    asked: Asked,
    riskiest: Accuracy,
    world: World,
    scale: Scale,
    progress: Progress,
    fingerprint: str,
    own_us: tuple[float, float],
) -> Decided:
    """Time messages alone, and decide by what that took."""
    halves, lossy = _shares_update(asked) or riskiest == "relaxed", riskiest != "exact"
    names = ["all_reduce"] + ["reduce_scatter"] * halves + ["all_gather"] * (halves or lossy)
    names += [TWO_SHOT.algorithm, NATIVE.algorithm] * lossy
    gradients = asked.profile.compute.gradients
    size_bytes = round(sum(each.size_bytes for each in gradients) / scale.shrink)
    two_links = asked.cluster.ranks_per_node > 1
    # Inside hosts messages take little time.
    each_s = LINK_SHARE * asked.minutes * 60.0 / (len(names) + 1 + len(BETWEEN) * two_links)
    device = torch.device("cpu")
    smallest_bytes = max(LEAST_BYTES, round(SMALLEST_BYTES / scale.shrink))
    times = measure_links(world, device, size_bytes, progress, names, each_s, smallest_bytes)
    samples = dict(times.samples)
    parts = parts_of(world.gather(node_name(), "counting hosts"))
    if parts is not None:
        samples |= measure_apart(world, parts, device, size_bytes, progress, BETWEEN, BETWEEN, each_s).samples
    # What these ranks take for it, which is more than a device would.
    computed: dict[str, Any] = {}
    packing: dict[tuple[str, str], tuple[Mapping[str, Line], Mapping[str, Line]]] = {}
    if lossy:
        packing["sparsify", "unpack"] = measure_selection(world, device, size_bytes, progress, each_s, computes=False)
        packing["encode", "decode"] = measure_encoding(world, device, size_bytes, progress, each_s / 2, computes=False)
    for fields, both in packing.items():
        for field, lines in zip(fields, both, strict=True):
            computed[field] = {name: _unscaled_line(line, scale) for name, line in lines.items()}
    if riskiest == "relaxed":
        found_lines = measure_delay(world, device, [scale.numel(each.numel) for each in gradients], progress)
        computed |= {field: _unscaled_line(line, scale) for field, line in found_lines.items()}
    cluster = replace(
        asked.cluster, **computed, intra=None, inter=None, samples=unscaled(samples, scale),
        back_to_back=unscaled(times.back_to_back, scale), collectives=None,
        contention=None, measured_for=None, emulated="namespaces",
    )  # fmt: skip
    # One rank decides, so that ranks whose libraries round otherwise cannot come to different plans.
    mine: Decided | InputError | None = None
    if world.rank == 0:
        try:
            mine = _variants(asked, cluster, scale, fingerprint, own_us)
        except InputError as error:
            mine = error
    found = world.gather(mine, "deciding")[0]
    if isinstance(found, InputError):
        raise found
    assert isinstance(found, Decided)
    return found


def unscaled(curves: Mapping[str, Curve], scale: Scale) -> dict[str, Curve]:
    """Return curves as the cluster itself would have them."""
    return {
        name: tuple((size * scale.shrink, time_us / scale.dilate) for size, time_us in curve)
        for name, curve in curves.items()
    }


def _riskiest(asked: Asked) -> Accuracy:
    """Return the riskiest class of what is rehearsed, strategies included: it says what has to be measured."""
    problem = make_problem(asked.profile, asked.cluster, where=asked.name)
    classes = [asked.accuracy, *(make_schedule(problem, name).accuracy for name in asked.strategies)]
    return max(classes, key=ACCURACIES.index)


def _shares_update(asked: Asked) -> bool:
    """Return whether ranks of anything that is rehearsed may share the optimizer's step."""
    problem = make_problem(asked.profile, asked.cluster, where=asked.name)
    shared = (make_schedule(problem, name).mode.shares_update for name in asked.strategies)
    return SHARDED_STEP in granted(asked.allow) or any(shared)


AnyLine = TypeVar("AnyLine", Line, SelectionLine)


def _unscaled_line(line: AnyLine, scale: Scale) -> AnyLine:
    def unscaled(alpha_us: float, beta: float) -> tuple[float, float]:
        return alpha_us / scale.dilate, beta / (scale.dilate * scale.shrink)

    alpha_us, beta = unscaled(line.alpha_us, line.beta_us_per_byte)
    made = replace(line, alpha_us=alpha_us, beta_us_per_byte=beta)
    if isinstance(made, SelectionLine) and made.by_density:
        rows = tuple((density, *unscaled(*of_density)) for density, *of_density in made.by_density)
        return replace(made, by_density=rows)
    return made


def _variants(asked: Asked, cluster: Cluster, scale: Scale, fingerprint: str, own_us: tuple[float, float]) -> Decided:
    compute, (usual_us, last_us) = asked.profile.compute, own_us
    here = replace(asked.profile, compute=replace(compute, update_us=compute.update_us + last_us))
    plan = optimize(here, cluster, accuracy=asked.accuracy, allow=asked.allow, compress=asked.compress)
    problem = make_problem(here, cluster, where=asked.name)
    constants = make_problem(asked.profile, asked.cluster, where=asked.name)
    made = [
        replace(one, predicted_us=(one.predicted_us or 0.0) - last_us + usual_us)
        if one.kind == "no_communication"
        else one
        for one in make_variants(plan, problem, asked.strategies, HOOKS)
    ]
    caps = sweep(plan, problem)
    predicted = {one.name: _from_constants(one, problem, constants) for one in [*made, *(each for _, each in caps)]}
    return Decided(
        variants=[_scaled(one, scale, compute, fingerprint) for one in made],
        caps=[(cap, _scaled(one, scale, compute, fingerprint)) for cap, one in caps],
        from_constants_us={name: time_us for name, time_us in predicted.items() if time_us is not None},
        bound_us=plan.certificate.lower_bound_us if plan.certificate else None,
    )


def _scaled(variant: Variant, scale: Scale, compute: ComputeProfile, fingerprint: str) -> Variant:
    return replace(
        variant,
        plan=None if variant.plan is None else scaled_plan(variant.plan, scale, compute, fingerprint),
        predicted_us=None if variant.predicted_us is None else variant.predicted_us * scale.dilate,
    )


def _from_constants(variant: Variant, problem: Problem, constants: Problem) -> float | None:
    """Return the step as the cluster's constants alone have it; None where they say nothing of it."""
    if variant.kind == "no_communication":
        return constants.compute_end_us + constants.update_us
    if variant.plan is None:
        return None
    if variant.plan.accuracy == "exact" and not variant.plan.sharded:
        schedule = _schedule_of(variant.plan, constants)
    elif variant.name != PLAN:
        schedule = make_schedule(problem, variant.name)
    else:
        return None
    return float(model_of(schedule).step_us(constants, schedule))


def _schedule_of(plan: Plan, problem: Problem) -> Schedule:
    """Return the schedule of a plan that is exact and synchronous."""
    index = {gradient.name: place for place, gradient in enumerate(problem.profile.compute.gradients)}
    return Schedule(
        buckets=tuple(
            Bucket(tuple(index[name] for name in bucket.gradients), bucket.transport) for bucket in plan.buckets
        )
    )


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """What measuring one variant takes."""

    name: str
    step_s: float
    steps: int
    """Of a block, those that do not count included."""
    brief: bool
    """See `planner.comparison.measure.Record`."""

    @property
    def least_s(self) -> float:
        """What the fewest rounds take, and its messages alone."""
        return self.alone_s + self.step_s * LEAST_ROUNDS * self.steps

    @property
    def alone_s(self) -> float:
        """What timing its messages alone takes at the most; see `VariantRunner.alone`."""
        return self.step_s * (1 if self.brief else 2)

    @property
    def round_s(self) -> float:
        """What one round more takes."""
        return 0.0 if self.brief else self.step_s * self.steps


def _blocks(variants: Sequence[Variant], steps: int) -> list[Blocks]:
    """Return each variant's blocks of so many measured steps."""
    predicted_s = {one.name: one.predicted_us / 1e6 for one in variants if one.predicted_us}
    computed_s, ddp_s = predicted_s[NO_COMMUNICATION], predicted_s[DDP]
    found = []
    for one in variants:
        step_s = predicted_s.get(one.name, (computed_s + ddp_s) / 2.0)  # a hook's, which sends half of the bytes
        brief = step_s > SLOW * computed_s
        warm_up_steps = max(WARM_UP_STEPS, one.least_warm_up)
        block_steps = warm_up_steps + one.whole_cycles(1 if brief else steps)
        found.append(Blocks(name=one.name, step_s=step_s, steps=block_steps, brief=brief))
    return found


def _most_dilate(asked: Asked, left_s: float) -> float:
    """Return the dilation at which the fewest rounds take most of what is left, by the cluster's constants."""
    plan = optimize(asked.profile, asked.cluster, accuracy=asked.accuracy, allow=asked.allow, compress=asked.compress)
    problem = make_problem(asked.profile, asked.cluster, where=asked.name)
    blocks = _blocks(make_variants(plan, problem, asked.strategies, HOOKS), 1)
    ddp = next(each for each in blocks if each.name == DDP)
    least_s = sum(each.least_s for each in blocks)
    if ddp.brief:  # whose bucket sizes are not looked for
        return max(1.0, BRIEF_SHARE * left_s / least_s)
    return max(1.0, ROUNDS_SHARE * left_s / (least_s + ddp.least_s))  # DDP's best size, too


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What there is time for."""

    count: int
    steps: int
    """Measured ones of a block."""
    brief: tuple[str, ...]
    """Variants whose steps are slow."""
    caps: frozenset[float]
    """DDP's bucket sizes."""


def _rounds(
    variants: Sequence[Variant], caps: Sequence[tuple[float, Variant]], left_s: float, minutes: float
) -> Rounds:
    """Return what fits.

    Raises:
        InputError: not even the fewest rounds do; says how many minutes would.
    """
    # Steps that are slow even undilated: fewer of each block.
    for steps in range(BLOCK_STEPS, 0, -1):
        blocks = _blocks(variants, steps)
        least_s = sum(each.least_s for each in blocks)
        if least_s <= left_s:
            break
    if least_s > left_s:
        slowest = max(blocks, key=lambda each: each.step_s)
        raise InputError(
            f"--minutes {minutes:g}: a step of {slowest.name} takes {slowest.step_s:.2g} s here, and the fewest rounds "
            f"of {len(variants)} variants {least_s / 60:.1f} minutes of the {max(0.0, left_s) / 60:.1f} that are left; "
            f"expected --minutes {minutes + (least_s - left_s) / 60 + 0.5:.0f} or more, fewer strategies, or --dilate "
            f"less"
        )
    # The sizes that are predicted to be the fastest: what the sweep has no time for would have lost. The best one is
    # measured with the others.
    by_prediction = sorted(caps, key=lambda one: one[1].predicted_us or 0.0)
    ddp = next(each for each in blocks if each.name == DDP)

    def swept_s(count: int) -> float:
        tried_s = SWEEP.blocks(count) * (WARM_UP_STEPS + SWEEP.steps) * ddp.step_s
        return tried_s + (ddp.least_s if count else 0.0)

    most_s = 0.0 if ddp.brief else min(SWEEP_SHARE * left_s, left_s - least_s)
    most = max(count for count in range(len(caps) + 1) if swept_s(count) <= most_s)
    left_s -= least_s + swept_s(most)
    round_s = sum(each.round_s for each in blocks) + (ddp.round_s if most else 0.0)
    return Rounds(
        count=min(MOST_ROUNDS, LEAST_ROUNDS + int(left_s / round_s)),
        steps=steps,
        brief=tuple(each.name for each in blocks if each.brief),
        caps=frozenset(cap for cap, _ in by_prediction[:most]),
    )
