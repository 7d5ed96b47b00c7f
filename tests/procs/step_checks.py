"""More of what the ranks of the session tests do: unusual models and steps, misfits, and what a session tells."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from session_checks import OPTIMIZERS, Weighted, convnet, digest, images, plan_of, train
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import runtime
from runtime.checks.plan import trainable_parameters
from runtime.errors import PlannerError
from runtime.plan import CompressorSpec, DelaySpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.plan.names import layer_of
from runtime.plan.predicted import Prediction


class Branches(nn.Module):
    """A trunk and branches of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        """The trunk and the branches in `used`."""
        x = self.trunk(x)
        return sum((self.branches[i](x) for i in used), x).sum()


def unused_like_ddp() -> dict[str, bool]:
    """Parameters unused on some or all ranks, against DDP with find_unused_parameters."""
    rank = dist.get_rank()
    used = [[0], [0, 1] if rank == 0 else [0], [0, 2]]
    reference, model = Branches(), Branches()
    ddp = DistributedDataParallel(reference, find_unused_parameters=True)
    session = runtime.attach(model, None, plan_of(model, 2))
    results = {}
    for step, branches in enumerate(used):
        x = torch.full((2, 4), float(rank + step + 1))
        for forward, owner in ((ddp, reference), (model, model)):
            owner.zero_grad()
            forward(x, branches).backward()
        pairs = zip(reference.parameters(), model.parameters(), strict=True)
        results[f"step {step}"] = all(_same(a.grad, b.grad) for a, b in pairs)
    kept = torch.full_like(model.branches[1].weight, 7.0)
    model.branches[1].weight.grad = kept.clone()
    model(torch.ones(2, 4), [0]).backward()
    results["kept as it was"] = bool((model.branches[1].weight.grad == kept).all())
    session.detach()
    return results


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    # Two summands have one order; more may be added in another order than DDP's.
    return torch.equal(a, b) if dist.get_world_size() == 2 else torch.allclose(a, b, rtol=1e-6, atol=0.0)


def mixed_dtypes() -> bool:
    """bfloat16 and float32 parameters in one bucket, against DDP."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.low = nn.Linear(6, 6).to(torch.bfloat16)
            self.high = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.high(self.low(x.to(torch.bfloat16)).float()).square().sum()

    reference, model = Mixed(), Mixed()
    ddp = DistributedDataParallel(reference)
    session = runtime.attach(model, None, plan_of(model, 3))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    ddp(x).backward()
    model(x).backward()
    session.detach()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(reference.parameters(), model.parameters(), strict=True))


def checkpointed(reentrant: bool) -> bool:
    """Activation checkpointing of every layer, against plain DDP without it."""

    class Deep(nn.Module):
        def __init__(self, save: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.save = save
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                step = nn.Sequential(layer, nn.Tanh())
                x = checkpoint(step, x, use_reentrant=reentrant) if self.save else step(x)
            return x

    reference, model = Deep(False), Deep(True)
    ddp = DistributedDataParallel(reference)
    session = runtime.attach(model, None, plan_of(model, 3))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True)
    ddp(x).sum().backward()
    model(x).sum().backward()
    session.detach()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(reference.parameters(), model.parameters(), strict=True))


def after_an_exception() -> bool:
    """A backward that raises in the middle on all ranks, then ordinary steps that equal DDP's."""
    model, reference = convnet(), convnet()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    session = runtime.attach(model, optimizer, plan_of(model, 2))

    def fail(_gradient: Tensor) -> None:
        raise ArithmeticError("on purpose")

    handle = model[3].weight.register_hook(fail)
    x, y = images(0)
    state = copy.deepcopy(model.state_dict())
    try:
        functional.cross_entropy(model(x), y).backward()
        return False
    except ArithmeticError:
        handle.remove()
    model.load_state_dict(state)
    train(model, optimizer, model, steps=3)
    session.detach()
    train(reference, OPTIMIZERS["sgd"](reference.parameters()), DistributedDataParallel(reference), steps=3)
    return digest(model) == digest(reference)


def detach_and_attach() -> dict[str, bool]:
    """A detached model is plain; it can be attached again; twice at once is refused; rank 0 may evaluate alone."""
    results = {}
    model = convnet()
    session = runtime.attach(model, None, plan_of(model, 3))
    results["twice refused"] = "attached already" in raised(lambda: runtime.attach(model, None, plan_of(model, 3)))
    if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            model(images(0)[0])
        model.train()
    session.detach()
    model.zero_grad()
    x, y = images(0)
    functional.cross_entropy(model(x), y).backward()
    alone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(alone, digest(nn.ParameterList([p.grad for p in model.parameters()])))
    results["plain again"] = len(set(alone)) == dist.get_world_size()
    results["hooks gone"] = not model._forward_pre_hooks and not model._forward_hooks
    again = runtime.attach(model, None, plan_of(model, 1))
    model.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    dist.all_gather_object(alone, digest(nn.ParameterList([p.grad for p in model.parameters()])))
    results["attached again"] = len(set(alone)) == 1
    again.detach()
    return results


def two_models() -> bool:
    """Two attached models whose backwards run into each other, against DDP."""
    models, references = [convnet(), convnet()], [convnet(), convnet()]
    ddp = [DistributedDataParallel(model) for model in references]
    sessions = [runtime.attach(model, None, plan_of(model, group)) for model, group in zip(models, (2, 5), strict=True)]
    x, y = images(0)
    for first, second in (models, ddp):
        (functional.cross_entropy(first(x), y) + functional.cross_entropy(second(x), y)).backward()
    for session in sessions:
        session.detach()
    pairs = [
        (a, b)
        for reference, model in zip(references, models, strict=True)
        for a, b in zip(reference.parameters(), model.parameters(), strict=True)
    ]
    return all(torch.equal(a.grad, b.grad) for a, b in pairs)


def mismatches() -> dict[str, str]:
    """The message of each plan or model that does not fit."""
    rank = dist.get_rank()
    model = convnet()
    good = plan_of(model, 3)
    other = nn.Sequential(nn.Linear(3, 3))
    sparse = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    names = good.gradients
    elsewhere = PlanBucket(gradients=names, collective="sparse", algorithm="gossip")
    everything = PlanBucket(gradients=names, collective="sparse", algorithm="flat")
    topk = CompressorSpec(name="topk", selector="exact", density=0.1)
    lossy = PlanBucket(gradients=names, collective="sparse", algorithm="flat", compressor=topk)
    too_many = replace(lossy, compressor=CompressorSpec(name="topk", k=dict.fromkeys(map(layer_of, names), 10**6)))
    complex_numbers = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64))
    lbfgs = torch.optim.LBFGS(model.parameters())
    unknown = PlanBucket(gradients=names, compressor=CompressorSpec(name="zip"))
    stamped = ModelReference(name="test", fingerprint="sha256:" + "0" * 64)

    def attach(target: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None = None) -> str:
        return raised(lambda: runtime.attach(target, optimizer, plan, timeout_s=20))

    def bounded(bucket: PlanBucket, of: nn.Module = model) -> Plan:
        return plan_of(of, 3, buckets=(replace(bucket, gradients=plan_of(of, 99).gradients),), accuracy="bounded")

    return {
        "other model": attach(other, good),
        "other ranks": attach(model, plan_of(model, 3, world=PlanWorld(ranks=7))),
        "other plan on rank 1": attach(model, plan_of(model, 2 if rank == 1 else 3)),
        "bad on rank 1 only": attach(model, plan_of(model, 3, world=PlanWorld(ranks=7)) if rank == 1 else good),
        "wrapped": attach(DistributedDataParallel(convnet()), good),
        "sparse embedding": attach(sparse, plan_of(sparse, 1)),
        "unknown collective": attach(model, plan_of(model, 3, buckets=(elsewhere,))),
        "sparse, but everything": attach(model, bounded(everything)),
        "lossy, but exact": attach(model, plan_of(model, 3, buckets=(lossy,))),
        "more than there are": attach(model, bounded(too_many)),
        "bad fallback": attach(model, replace(bounded(lossy), fallback=plan_of(other, 1))),
        "lossy fallback": attach(model, replace(bounded(lossy), fallback=bounded(lossy))),
        "complex and lossy": attach(complex_numbers, bounded(lossy, complex_numbers)),
        "optimizer that compares": attach(model, bounded(lossy), lbfgs),
        "unknown compressor": attach(model, plan_of(model, 3, buckets=(unknown,))),
        "delay": attach(model, plan_of(model, 3, delay=DelaySpec(steps=2))),
        "fingerprint": attach(model, plan_of(model, 3, model=stamped)),
    }


def raised(action: Callable[[], Any]) -> str:
    """Class and text of the error that `action` raises on purpose, or an empty string."""
    try:
        action()
    except PlannerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def measured_timeline() -> dict[str, Any]:
    """What the report says after some steps, with more buckets than fit the order of autograd."""
    model = convnet()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    names = list(trainable_parameters(model))
    backwards = tuple(PlanBucket(gradients=(name,)) for name in names)  # forward order: launches have to wait
    session = runtime.attach(model, optimizer, plan_of(model, 1, buckets=backwards))
    train(model, optimizer, model, steps=5)
    report = session.report()
    session.detach()
    return {
        "steps": report.steps,
        "iteration_us": report.iteration_us,
        "buckets": [(b.ready_us, b.launch_us, b.start_us, b.end_us) for b in report.buckets],
        "network": [(span.start_us, span.end_us) for span in report.timeline.on("network")],
        "text": str(report),
        "document": report.to_document(),
    }


def reported_steps() -> dict[str, Any]:
    """What the report says of steps of one, three and two micro-batches, the last two exchanged both."""
    results: dict[str, Any] = {}
    for kind, quiet, exchanged in (("one", 0, 1), ("three", 2, 1), ("two exchanged", 0, 2)):
        model = convnet()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        said = Prediction(iteration_us=100.0, forward_us=40.0, backward_us=30.0, update_us=10.0)
        session = runtime.attach(model, optimizer, replace(plan_of(model, 2), predicted=said))
        for step in range(8):
            optimizer.zero_grad()
            for micro_batch in range(quiet + exchanged):
                with session.no_sync() if micro_batch < quiet else nullcontext():
                    model(images(step)[0]).sum().backward()
            time.sleep(0.002)  # the script
            optimizer.step()
        report = session.report()
        session.detach()
        results[kind] = (report, report.measured)
    return results


def memory_of_attach() -> tuple[int, int]:
    """(bytes of flat buffers that attach adds, bytes of the gradients)."""
    model = convnet()
    session = runtime.attach(model, None, plan_of(model, 4))
    buffers = sum(message.size_bytes for bucket in session._exchange.buckets for message in bucket.messages)
    session.detach()
    return buffers, sum(p.numel() * p.element_size() for p in model.parameters())


def subgroup() -> bool | None:
    """Ranks 0 and 2 of three train together; rank 1 does something else."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    model = Weighted()
    plan = plan_of(model, 2, world=PlanWorld(ranks=2))
    session = runtime.attach(model, None, plan, process_group=group)
    model([torch.full_like(w, float(2 * dist.get_rank())) for w in model.weights]).backward()
    session.detach()
    return all(bool((w.grad == 2.0).all()) for w in model.weights)
