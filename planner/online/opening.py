"""The beginning of a run without a plan: DDP's buckets, and plans of earlier runs in rank 0's cache."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from planner.decide.plan_request import check_allow
from planner.ir import ACCURACIES
from planner.online.cache import Cache, Key, Remembered, cache_folder, parse_remembered
from planner.online.ddp import ddp_plan
from planner.passes.joint import DEFAULT_COMPRESS, check_compress, compress_of
from planner.profile.measuring import count_nodes
from runtime.checks.attach import ModelFacts
from runtime.comm.world import RankInfo, World
from runtime.core.compiled import compile_identity
from runtime.core.options import CompileArgument
from runtime.errors import CacheWarning, InputError
from runtime.optimizers.kinds import inner_optimizer
from runtime.plan import Accuracy, ModelReference, Plan, PlanWorld
from runtime.plan.interfaces import OUTER
from runtime.version import __version__

IN_RUN = DEFAULT_COMPRESS
"""Encodings whose costs a run measures, as `--compress` names them."""

Way = Literal["off", "report", "auto"]
"""DDP's buckets and no more; measured and reported, never switched; all of it."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The beginning of a run; but for `cache` and `other` the same on every rank."""

    way: Way
    key: Key
    plan: Plan
    """DDP's buckets, in the reverse of the parameters' order."""
    remembered: Remembered | None = None
    """Entry of an earlier run in rank 0's cache."""
    measured_on: int | None = None
    """Number of ranks of the run whose measurements are scaled, where nothing is remembered for as many as these."""
    cache: Cache | None = None
    """Rank 0's; None elsewhere, and where it cannot be used."""
    other: Remembered | None = None
    """Entry of the run on `measured_on` ranks, on rank 0."""


@dataclass(frozen=True)
class Opener:
    """Opens runs of one model, when it is attached and when more of its parameters begin to train."""

    model: nn.Module
    optimizer: object
    accuracy: Accuracy
    compress: str | None
    """Encodings that bounded plans may have; None: `wire`."""
    allow: tuple[str, ...]
    compile: CompileArgument | None = None
    """`compile` of `attach`."""

    @property
    def problem(self) -> str | None:
        """Return what is wrong with this rank's environment and arguments."""
        try:
            check_allow(self.allow)
            check_classes(self.accuracy, self.compress)
        except InputError as error:
            return str(error)
        if asked_way() not in get_args(Way):
            return f"PLANNER: found {asked_way()!r}, expected one of: {', '.join(get_args(Way))}; or leave it out"
        if self.accuracy == "relaxed" and not (OUTER in self.allow and compress_of(self.compress or IN_RUN)):
            return (
                f"accuracy: found {self.accuracy!r} without a plan, expected exact or bounded, or allow=({OUTER!r},) "
                f"with it and no compress: what other riskier plans need is measured by `planner profile --for "
                f"{self.accuracy}`; make a plan from that and attach it"
            )
        if self.compress is not None and not check_compress(self.compress) <= compress_of(IN_RUN):
            return (
                f"compress: found {self.compress!r} without a plan, expected {IN_RUN} or none: what low rank and top-k "
                f"cost is measured by `planner profile --for bounded`; make a plan from that and attach it"
            )
        return None

    @property
    def planned_accuracy(self) -> Accuracy:
        """Return the class of plans that are looked for: with nothing to compress by, exact ones."""
        return self.accuracy if compress_of(self.compress or "") else "exact"

    def open(self, world: World, facts: ModelFacts, everyone: Sequence[RankInfo]) -> Opening:
        """Return how the run begins; all ranks call this once they have agreed on the model."""
        nodes = count_nodes([one.where.node for one in everyone if one.where is not None])
        cpu = facts.device.type == "cpu"
        key = Key(
            model=facts.fingerprint, ranks=world.ranks, nodes=nodes, backend=world.backend,
            device="cpu" if cpu else torch.cuda.get_device_name(facts.device), cores=os.cpu_count() or 0,
            torch=torch.__version__, planner=__version__, accuracy=self.planned_accuracy, allow=self.allow,
            optimizer=_class_name(self.optimizer),
            compile=compile_identity(self.compile),
        )  # fmt: skip
        cache = found = other = None
        if world.rank == 0 and world.ranks > 1:
            cache, found, other = _read_cache(key)
        mine = (asked_way(), key, found and found.to_document(), other and other.key.ranks)
        answer: tuple[str, Key, Any, int | None] = world.gather(mine, "asking what rank 0 remembers")[0]
        way, key, document, measured_on = answer
        if document is None or way != "auto":
            found = None
        elif found is None:
            found = parse_remembered(document, key, "rank 0's cache")
        reference = ModelReference(name=type(self.model).__name__.lower(), fingerprint=facts.fingerprint)
        where = PlanWorld(ranks=key.ranks, nodes=key.nodes, torch=key.torch)
        return Opening(
            way=cast(Way, way), key=key, remembered=found, measured_on=measured_on, cache=cache, other=other,
            plan=ddp_plan(facts.parameters, list(reversed(facts.parameters)), reference, where),
        )  # fmt: skip


def check_classes(accuracy: str | None, compress: str | None) -> None:
    """Raise InputError where the class of plan or an encoding is unknown, or no plan of the class has encodings."""
    if accuracy is not None and accuracy not in ACCURACIES:
        raise InputError(f"accuracy: found {accuracy!r}, expected one of: {', '.join(ACCURACIES)}; or leave it out")
    if compress is None:
        return
    check_compress(compress, "compress")
    if accuracy == "exact":
        raise InputError(
            f"compress: found {compress!r} with accuracy='exact', whose plans send gradients whole; expected none: "
            f"leave it out, or pass accuracy='bounded'"
        )


def asked_way() -> str:
    """Return what a run may do by PLANNER of this process's environment; unchecked."""
    return os.environ.get("PLANNER", "auto").strip().lower() or "auto"


def _read_cache(key: Key) -> tuple[Cache | None, Remembered | None, Remembered | None]:
    """Return rank 0's cache, what it holds, and where that is nothing what it holds for another number of ranks; where
    it cannot be used, warn once: training continues.
    """
    cache: Cache | None = None
    try:
        cache = Cache(cache_folder())
        found = cache.read(key)
        return cache, found, cache.read_other_ranks(key) if found is None else None
    except Exception as error:  # the other ranks wait for what is read here
        warn_unused(error)
        return cache, None, None


def warn_unused(error: Exception) -> None:
    warnings.warn(f"what earlier runs found is not used: {error}", CacheWarning, stacklevel=4)


def _class_name(optimizer: object) -> str:
    """Return the class of an optimizer, after that of what wraps it; of several those of all."""
    if isinstance(optimizer, Sequence):
        return ", ".join(map(_class_name, optimizer))
    kinds = [type(one) for one in (optimizer, inner_optimizer(optimizer))]
    return " of ".join(dict.fromkeys(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))
