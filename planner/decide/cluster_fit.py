"""`planner cluster fit`: a cluster for any number of nodes from nccl-tests on one or two small sets of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

from planner.cost import nccl
from planner.cost.nccl import Shape
from planner.cost.nccl_fit import Measured, Progress, attempt, finish
from planner.documents.nccl import Nccl, Network, find_gpu, is_on_pcie
from planner.documents.nccl_tests import NcclLog, read_log
from planner.documents.profile import Cluster
from planner.documents.text import sanitize
from runtime.errors import InputError
from runtime.plan.strict_json import MAX_RANKS

_NAMED = re.compile(r"(\d{1,7})x(\d{1,4}):(.+)", re.ASCII | re.DOTALL)
_CARDS_GBIT = (1, 10, 25, 40, 50, 100, 200, 400, 800)
PASSES = {"all_reduce": 2}
"""Times that a ring sends each byte, of collectives that send it more than once."""
_NETWORKS = (("infiniband", "nccl"), ("efa", "nccl"), ("efa", "aws-ofi-p5"), ("tcp", "nccl"))


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One argument: a log and the machines it was made on."""

    nodes: int
    per_node: int
    path: str
    found: tuple[NcclLog, ...] = ()
    """Contents, if it is no log of nccl-tests, which is yet to be read."""


@dataclass(frozen=True, kw_only=True)
class FittedCluster:
    """A fitted cluster, with what a reader should know of the fit."""

    cluster: Cluster
    notes: tuple[str, ...]
    """Parts of the logs that were left out, and assumptions on the machines."""
    rows: tuple[tuple[str, int, int, float, float], ...]
    """(collective, nodes, samples, median error, worst error) of each log."""


def parse_log_argument(text: str) -> LogFile:
    """Return what `2x8:a.log` stands for. Raises InputError: anything else."""
    match = _NAMED.fullmatch(text)
    if match is None or int(match[1]) < 1 or int(match[2]) < 1:
        raise InputError(
            f"{text[:80]}: found no nodes and GPUs before the log, expected NODESxGPUS:FILE, for example 2x8:a.log"
        )
    nodes, per_node = int(match[1]), int(match[2])
    if nodes * per_node > MAX_RANKS:
        raise InputError(f"{text[:80]}: found {nodes * per_node} ranks, expected at most {MAX_RANKS}; correct it")
    if nodes * per_node < 2:
        raise InputError(f"{text[:80]}: found one rank, which sends nothing; expected a log of two or more")
    return LogFile(nodes=nodes, per_node=per_node, path=match[3])


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A user's description of machines, for what logs leave out; None: found by their rates."""

    gpu: str | None = None
    """One of `planner.documents.nccl.GPUS`."""
    nics: int | None = None
    """Network cards of a node."""
    nic: str | None = None
    """Line rate of one."""
    network: str | None = None
    """One of infiniband, roce, efa and tcp; None: that which explains the logs best."""


def fit_cluster(
    logs: Sequence[LogFile], machine: Nccl | None = None, stated: Stated | None = None, *, in_place: bool = False,
    name: str | None = None, progress: Progress | None = None,
) -> FittedCluster:  # fmt: skip
    """Fit NCCL's constants to logs.

    Args:
        logs: at least one; all of the same GPUs a node (or of fewer, within one node).
        machine: a description to start from.
        stated: without a description, what the user says of the machines.
        in_place: take the columns of buffers that are also results.
        name: the cluster's.
        progress: gets a line before each fit.

    Raises:
        InputError: a log is wrong, was made on other ranks than its name says, or logs and description contradict.
    """
    if not logs:
        raise InputError("found no log, expected at least one, for example 2x8:a.log")
    stated = stated or Stated()
    per_node = max(log.per_node for log in logs)
    for log in logs:
        if log.nodes > 1 and log.per_node != per_node:
            raise InputError(
                f"{log.path}: found {log.per_node} GPUs a node, and {per_node} in another log; expected the same: fit "
                f"them apart"
            )
    read: Logs = {
        log: list(log.found) or read_log(log.path, log.nodes * log.per_node, per_node=log.per_node, in_place=in_place)
        for log in logs
    }
    all_found = [(log, one) for log, found in read.items() for one in found]
    notes = [note for _, one in all_found for note in one.notes]
    measured = [Measured(one.collective, log.nodes, log.per_node, one.samples) for log, one in all_found]
    gpu = None if stated.gpu is None else find_gpu(stated.gpu)
    said = gpu if machine is None else machine.gpu
    for log, found in read.items():
        if said is not None and (other := found[0].gpu) not in (None, said):
            option = "--gpu" if machine is None else "--machine"
            raise InputError(f"{option}: found {said}, but {log.path} was made on {other}; correct it, or take it out")
    if machine is None:
        machine, assumed = _describe(read, per_node, gpu, stated)
        notes += assumed
        candidates = _candidates(machine, stated.network, per_node)
    else:
        candidates = [machine]
    nodes = max(log.nodes for log in logs)
    for candidate in candidates:
        candidate.check(nodes, per_node, "--")
    trials = []
    for candidate in candidates:
        if progress is not None and len(candidates) > 1:
            progress(f"trying {candidate.network}, {candidate.cpu}, {candidate.tuner}; --network saves some of that")
        trials.append(attempt(candidate, measured))
    best = min(trials, key=lambda trial: trial.cost)
    if len(trials) > 1:
        notes.append(
            f"network taken as {best.machine.network}, cpu as {best.machine.cpu}, algorithms as chosen by "
            f"{best.machine.tuner}: these explain the logs best; say --network where you know it"
        )
    fitted = finish(best, measured, progress)
    fit = fitted.fit
    assert fit is not None
    sizes = ", ".join(f"{log.nodes}x{log.per_node} ({Path(log.path).name})" for log in logs)
    cluster = Cluster(
        name=name, nodes=nodes, ranks_per_node=per_node, library="nccl", nccl=fitted,
        source=f"NCCL's cost model, fitted by `planner cluster fit` to {sizes}",
        notes=(
            f"{fit.samples} samples, {fit.mean_error:.1%} off on average; 9 of 10 within "
            f"{math.expm1(fit.interval.inside):.0%} where measured, {math.expm1(fit.interval.beyond):.0%} on other "
            f"numbers of nodes",
            *notes,
        ),
    )  # fmt: skip
    return FittedCluster(cluster=cluster, notes=tuple(notes), rows=tuple(_errors(fitted, one) for one in measured))


def _errors(machine: Nccl, log: Measured) -> tuple[str, int, int, float, float]:
    sizes = [size for size, _ in log.samples]
    predicted = nccl.times_us(log.collective, Shape(machine, log.nodes, log.per_node), sizes)
    errors = sorted(abs(float(ours) / time - 1.0) for ours, (_, time) in zip(predicted, log.samples, strict=True))
    return log.collective, log.nodes, len(errors), errors[len(errors) // 2], errors[-1]


Logs = Mapping[LogFile, list[NcclLog]]


def _describe(read: Logs, per_node: int, gpu: str | None, stated: Stated) -> tuple[Nccl, list[str]]:
    """Return the machines as options and logs have them, and what was assumed."""
    assumed, nics, nic = [], stated.nics, stated.nic
    device = next((one.device for found in read.values() for one in found if one.device), None)
    named = stated.gpu or device
    if gpu is None:
        gpu = next((one.gpu for found in read.values() for one in found if one.gpu), None)
    if gpu is None:
        gpu = _gpu_by_rate(read)
        why = "no log names it" if named is None else f"{sanitize(named, 60)} of the logs is none that is known here"
        assumed.append(f"accelerator taken as {gpu}, by its rates: {why}; say --gpu where that is wrong")
    if any(log.nodes > 1 for log in read):
        nics = nics or per_node
        if nic is None:
            nic = f"{_card_gbit(read, nics)}gbit"
            assumed.append(f"taken as {nics} cards of {nic} a node, by rates; say --nic where that is wrong")
    nvlink = None
    if is_on_pcie(named or ""):
        nvlink = "none"
        assumed.append(f"taken without NVLink, for {sanitize(named or '', 60)} is on PCIe")
    return Nccl(gpu=gpu, nvlink=nvlink, nics_per_node=nics or 1, nic=nic), assumed


def _rates(read: Logs, *, several: bool) -> list[float]:
    """Return bus bandwidths in GB/s of the largest sizes, on one node or on several."""
    found = []
    for log, results in read.items():
        ranks = log.nodes * log.per_node
        for one in results:
            if (log.nodes > 1) == several:
                share = PASSES.get(one.collective, 1) * (ranks - 1) / ranks
                found.append(max(share * size / time / 1e3 for size, time in one.samples))
    return found


def _gpu_by_rate(read: Logs) -> str:
    """Return the accelerator whose links carry what was measured."""
    alone, between = max(_rates(read, several=False), default=0.0), max(_rates(read, several=True), default=0.0)
    # A ring between nodes has at most what NVLink has; in-switch sums reach 1.3 times that.
    limits = (("a40", 30.0, 0.0), ("v100", 130.0, 0.0), ("a100", 250.0, 240.0), ("h100", 500.0, 500.0))
    for gpu, inside_limit, between_limit in limits:
        if alone <= inside_limit and between <= between_limit:
            return gpu
    return "b200"


def _card_gbit(read: Logs, nics: int) -> int:
    """Return the least line rate that carries the slowest inter-node rate; two nodes may show twice a card's."""
    rate = min(_rates(read, several=True)) / nics * 8.0
    return next((gbit for gbit in _CARDS_GBIT if 0.97 * gbit >= rate), _CARDS_GBIT[-1])


def _candidates(machine: Nccl, network: str | None, per_node: int) -> list[Nccl]:
    """Return the machine on every network that it may have."""
    known = get_args(Network)
    if network is not None and network not in known:
        raise InputError(f"--network: found {network!r}, expected one of: {', '.join(known)}")
    if machine.nic is None:
        if network is not None:
            raise InputError(f"--network: found {network}, but no log of several nodes; add --nic, or take it out")
        return [machine]
    pairs = [pair for pair in _NETWORKS if network in (None, pair[0])] or [("roce", "nccl")]
    return [
        replace(machine, network=kind, tuner=tuner, cpu=cpu)  # type: ignore[arg-type]
        for (kind, tuner), cpu in product(pairs, ("intel", "amd"))
        if tuner == "nccl" or (machine.gpu in ("h100", "h200") and per_node == 8)
    ]
