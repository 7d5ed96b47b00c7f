"""A job on this rank: building it, and training it step by step."""

from __future__ import annotations

import hashlib
import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import runtime
from planner.frontend.call import map_leaves
from planner.jobs.batch_share import BatchShare
from planner.jobs.job import TrainingJob, described, load_job
from planner.jobs.lr_schedule import LrSchedule
from planner.profile.bench import synchronize
from planner.profile.step import TIMEOUT_S, check_same_model, deadline_s
from planner.testbed.hosts import Emulation, emulation_here
from runtime.checks.optimizer import check_owners
from runtime.checks.plan import model_fingerprint, trainable_parameters
from runtime.comm.world import World, first_line
from runtime.core.compiled import CompiledModel
from runtime.core.members import ignored_ids
from runtime.errors import CommunicationError, InputError, PlannerError
from runtime.monitor.preserve import preserved
from runtime.optimizers.kinds import Optimizers, each_of
from runtime.plan import Plan

SEED = 0
KEPT_BATCHES = 4
"""Number of batches that are made before a step is timed, and then used in turn."""


def this_rank() -> int:
    """Return this process's rank, 0 where it trains alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch on the device: what has a method `to` is moved, in dicts, lists, tuples and dataclasses, too."""
    if device.type == "cpu":
        return value  # jobs make their batches there
    return map_leaves(value, lambda leaf: callable(getattr(leaf, "to", None)), lambda leaf: leaf.to(device))


@dataclass
class BuiltJob:
    """A job with its model on the device and its optimizer made."""

    spec: str
    job: TrainingJob
    optimizer: Optimizers
    device: torch.device
    share: BatchShare | None = None
    """This rank's share of a step's samples; None: its batches are the job's."""

    @property
    def model(self) -> nn.Module:
        return self.job.model

    def sharing(self, shares: Mapping[str, int] | None) -> BuiltJob:
        """Return the job with batches by a plan's shares; where they are of other ranks `attach` refuses the plan."""
        rank = this_rank()
        if shares is None or str(rank) not in shares:
            return replace(self, share=None)
        where = f"{self.spec}: batch(step, rank)"
        return replace(self, share=BatchShare(shares, rank, self.batch_of, where, self.job.batch_samples))

    @property
    def weight(self) -> Callable[[], float] | None:
        """Return what gives the weight of this rank's batches, as `attach` takes it; None: all weigh alike."""
        share = self.share
        return None if share is None else lambda: share.weight

    @property
    def loss_factor(self) -> float:
        """Return the factor by which losses of ranks have the loss of all samples as their mean."""
        return 1.0 if self.share is None else self.share.factor

    def batch(self, step: int) -> Any:
        """Return this rank's batch of one step, on the device."""
        return self.batch_of(step, this_rank()) if self.share is None else self.share.batch(step)

    def batch_of(self, step: int, rank: int) -> Any:
        """Return the batch of any rank."""
        with attribute_user_errors(f"{self.spec}: batch({step}, {rank})"):
            return to_device(self.job.batch(step, rank), self.device)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss, checked to be a scalar that requires a gradient."""
        with attribute_user_errors(f"{self.spec}: loss(model, batch)"):
            loss = self.job.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"{self.spec}: loss returned {found}, expected a scalar tensor that requires a gradient")
        return loss

    def backward(self, loss: Tensor, *, in_ddp: bool = False) -> None:
        """Run `loss.backward()`; `in_ddp`: it also waits for the messages of DDP."""
        ddp = ", all_reduce of a bucket of DDP" if in_ddp else ""
        with attribute_user_errors(f"{self.spec}: loss.backward(){ddp}"):
            loss.backward()

    def forward_backward(self, batch: Any, loss_ready: Callable[[], None]) -> None:
        """Run forward and backward of the model, and call `loss_ready` between them."""
        loss = self.loss(self.model, batch)
        loss_ready()
        self.backward(loss)

    def train(self, batch: Any, forward: nn.Module | None = None, optimizer: Optimizers | None = None) -> Tensor:
        """Make one training step and return its loss.

        Args:
            batch: on the device.
            forward: DDP around the model; default: the model.
            optimizer: of the model's parameters; default: its own.
        """
        forward, optimizers = self.model if forward is None else forward, each_of(optimizer or self.optimizer)
        for one in optimizers:
            one.zero_grad()
        loss = self.loss(forward, batch)
        self.backward(loss, in_ddp=isinstance(forward, DistributedDataParallel))
        with attribute_user_errors(f"{self.spec}: optimizer.step()"):
            for one in optimizers:
                one.step()
        return loss.detach()


@contextmanager
def attribute_user_errors(where: str) -> Iterator[None]:
    """Turn what a user's function raises into an InputError that names it.

    A backend's error is no fault of the function: another rank is gone, which is a CommunicationError. planner's own
    errors pass.
    """
    try:
        yield
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, RuntimeError) and _LOST.search(str(error)):
            raise CommunicationError(f"rank {this_rank()}: {where}: lost another rank: {first_line(error)}") from error
        raise InputError(f"{where} raised {described(error)}; expected it not to: correct it") from error


@contextmanager
def error_context(spec: str) -> Iterator[None]:
    """Prefix the messages of wrong input that do not begin with the job by it."""
    try:
        yield
    except InputError as error:
        raise error if str(error).startswith(spec) else InputError(f"{spec}: {error}") from error


_LOST = re.compile(r"gloo|nccl|connection closed|timed out waiting|pair closure", re.IGNORECASE)
"""Words of backends' errors when a rank is gone."""


def build(spec: str, device: str, seed: int = SEED) -> BuiltJob:
    """Load a job, from the same seed on every rank.

    Raises:
        InputError: the job cannot be loaded, or its model or optimizer is none that can be trained.
    """
    torch.manual_seed(seed)
    job = load_job(spec)
    target = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    lazy = [name for name, parameter in job.model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise InputError(f"{spec}: {lazy[0]} has no shape yet; expected a model whose lazy modules have seen a batch")
    job.model.to(target)
    return BuiltJob(spec=spec, job=job, optimizer=make_optimizer(job, spec), device=target)


def make_scheduler(lr_schedule: LrSchedule, steps: int, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return a scheduler of an optimizer for a run of `steps`; it is stepped once after each step."""
    return LambdaLR(optimizer, lambda step: lr_schedule.factor(step, steps))


def make_optimizer(job: TrainingJob, spec: str) -> Optimizers:
    """Return a new optimizer, or a tuple of several, of a job's trainable parameters.

    Raises:
        InputError: the job's function raises, or returns something else, or the same parameter in two optimizers.
    """
    named = [(name, parameter) for name, parameter in job.model.named_parameters() if parameter.requires_grad]
    takes_names = "named" in inspect.signature(job.optimizer).parameters
    where = f"{spec}: optimizer({'named' if takes_names else 'parameters'})"
    with attribute_user_errors(where):
        try:
            made: object = job.optimizer(iter(named) if takes_names else (parameter for _, parameter in named))
        except ValueError as error:
            if "Muon only supports 2D" not in str(error):
                raise
            sizes = {f"{p.size()}": f"{name}, of shape {tuple(p.shape)}," for name, p in reversed(named)}
            odd = next((found for size, found in sizes.items() if str(error).endswith(size)), "a parameter")
            raise InputError(
                f"{where}: found {odd} under torch.optim.Muon, which takes matrices alone; expected it in another "
                f"optimizer: return Muon of the matrices, and AdamW, say, of the rest"
            ) from error
    several = isinstance(made, Sequence)
    for one in made if isinstance(made, Sequence) and made else (made,):
        if not isinstance(one, torch.optim.Optimizer):
            found = f"a sequence with {type(one).__name__}" if several and made else type(made).__name__
            raise InputError(
                f"{spec}: optimizer returned {found}, expected a torch.optim.Optimizer, or a sequence of them"
            )
    if not isinstance(made, Sequence):
        assert isinstance(made, torch.optim.Optimizer)
        return made
    if (problem := check_owners(job.model, made)) is not None:
        raise InputError(f"{spec}: {problem}")
    return tuple(made) if len(made) > 1 else made[0]


@dataclass(frozen=True)
class RankRun:
    """The times and results of a run on one rank."""

    step_us: tuple[float, ...]
    losses: tuple[float, ...]
    """Losses of all steps; with shares of the batch their mean over ranks is the loss of all samples."""
    weights_sha256: str
    report: str
    emulation: Emulation | None = None
    """The emulated cluster that it ran on, if any."""


def _join_for_ddp(built: BuiltJob, timeout_s: float | None) -> tuple[World, bool]:
    """Return the joined ranks, by default with a deadline by a first step, and whether it left parameters unused."""
    world = World.join(None, TIMEOUT_S if timeout_s is None else timeout_s)
    with error_context(built.spec):
        check_same_model(world.gather(model_fingerprint(built.model), "comparing models"))
    start = time.perf_counter()
    with preserved(built.model):
        built.backward(built.loss(built.model, built.batch(0)))
        missing = any(p.requires_grad and p.grad is None for p in built.model.parameters())
    mine = missing, (time.perf_counter() - start) * 1e6
    everyone = world.gather(mine, "comparing the first step")
    missing, step_us = (max(column) for column in zip(*everyone, strict=True))
    if timeout_s is None:
        size_bytes = sum(p.numel() * p.element_size() for p in trainable_parameters(built.model).values())
        world.leave()
        world = World.join(None, deadline_s(step_us, size_bytes))
    return world, bool(missing)


class Trainer:
    """One model that trains step by step: plain DDP without a plan, attached with one."""

    def __init__(self, built: BuiltJob, plan: Plan | None, timeout_s: float | None = None) -> None:
        """Attach the plan, or wrap the model; every rank calls it.

        Args:
            built: the job; its batches are by the shares of the plan, or of its phases.
            plan: None: plain DDP.
            timeout_s: deadline of every wait for other ranks; default: 20 steps, at least 30 s.
        """
        self._phases = [built] if plan is None else [built.sharing(each.shares) for each in plan.all_phases]
        self.session: runtime.Session | None = None
        if plan is not None:
            weight = self._weight if any(each.share is not None for each in self._phases) else None
            self.session = runtime.attach(
                built.model, built.optimizer, plan, timeout_s=timeout_s, compile=built.job.compile, weight=weight
            )
        self._model: nn.Module = built.model
        # Made after the model and released after it: if DDP is the last owner of a group, it takes it down without
        # letting other threads run, and waits for the group's thread, which may wait for that.
        self._world = World()
        if self.session is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._world, unused = _join_for_ddp(built, timeout_s)
            with attribute_user_errors(f"{built.spec}: DistributedDataParallel(model)"):
                # DDP has to know of unused parameters, or it stops at the second step.
                self._model = DistributedDataParallel(
                    built.model, process_group=self._world.group, find_unused_parameters=unused
                )
            if built.job.compile is not None:
                self._model = CompiledModel(built.model, built.job.compile).around(self._model)
        self.step_us: list[float] = []
        self.losses: list[float] = []

    @property
    def built(self) -> BuiltJob:
        """Return the job, with the batches of the present phase."""
        return self._phases[0 if self.session is None else self.session.phase]

    def _weight(self) -> float:
        return 1.0 if self.built.share is None else self.built.share.weight

    def step(self, batch: Any) -> None:
        """Make one training step, timed from zero_grad to the end of the update; the batch is ready before."""
        built = self.built
        synchronize(built.device)
        start = time.perf_counter()
        loss = built.train(batch, self._model)
        synchronize(built.device)
        self.step_us.append((time.perf_counter() - start) * 1e6)
        self.losses.append(float(loss) * built.loss_factor)

    def close(self) -> RankRun:
        """End the run; all ranks must call this. The hash is of the weights that they share, also with a delay."""
        report = "" if self.session is None else str(self.session.report())
        with nullcontext() if self.session is None else self.session.global_weights():
            weights = weights_sha256(self.built.model)
        if self.session is not None:
            self.session.detach()
        self._model = self.built.model
        self._world.leave()
        return RankRun(tuple(self.step_us), tuple(self.losses), weights, report, emulation_here())


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of the bytes of all parameters that ranks exchange, in order of name."""
    digest, ignored = hashlib.sha256(), ignored_ids(model)
    for parameter in (one for _, one in sorted(model.named_parameters()) if id(one) not in ignored):
        raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()
