"""What the ranks of the habit tests do: things that training scripts do with a model besides training it."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from session_checks import OPTIMIZERS, convnet, digest, follow_rank_0, images, plan_of, train
from step_checks import raised
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import runtime


def copies() -> dict[str, bool]:
    """A copy of an attached model, and one saved whole and loaded, are plain and train alone."""
    model = convnet()
    session = runtime.attach(model, None, plan_of(model, 3))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    results = {}
    for name, other in (("deepcopy", copy.deepcopy(model)), ("saved", torch.load(file, weights_only=False))):
        if dist.get_rank() == 0:  # alone: anything collective would hang
            functional.cross_entropy(other(images(0)[0]), images(0)[1]).backward()
        results[name] = (other[0].weight.grad is not None) == (dist.get_rank() == 0)
    session.detach()
    return results


def gradients_of_inputs() -> dict[str, bool]:
    """`torch.autograd.grad` on one rank alone exchanges nothing; the next step is as with DDP."""
    model, reference = convnet(), convnet()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    session = runtime.attach(model, optimizer, plan_of(model, 3))
    if dist.get_rank() == 0:
        x = images(0)[0].requires_grad_()
        [gradient] = torch.autograd.grad(copy_of_mode(model, x).sum(), x)
        found = bool(gradient.abs().sum() > 0)
    else:
        found = True
    train(model, optimizer, model, steps=2)
    steps = session.report().steps
    session.detach()
    train(reference, OPTIMIZERS["sgd"](reference.parameters()), DistributedDataParallel(reference), steps=2)
    return {"gradient": found, "as with DDP": digest(model) == digest(reference), "steps": steps == 2}


def copy_of_mode(model: nn.Module, x: Tensor) -> Tensor:
    """The model's output in evaluation mode; training mode is restored."""
    model.eval()
    y: Tensor = model(x)
    model.train()
    return y


class Reassigning(nn.Module):
    """Replaces its buffer in every forward instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 4) → (batch, 4)."""
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.linear(x - self.mean)


def reassigned_buffers() -> bool:
    """Against DDP, after some steps."""

    def run(planned: bool) -> str:
        model = Reassigning()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = runtime.attach(model, optimizer, plan_of(model, 1)) if planned else None
        forward = model if planned else DistributedDataParallel(model)
        for step in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            optimizer.zero_grad()
            forward(x).square().sum().backward()
            optimizer.step()
        if session is not None:
            session.detach()
        else:
            follow_rank_0(model)
        return digest(model)

    return run(True) == run(False)


def refusals() -> dict[str, str]:
    """Messages for a plan file that one rank lacks, and for names that wrappers' prefixes make equal."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 1, bias=False)
            self.weight = nn.Parameter(torch.zeros(1))

    model, twins = convnet(), Twins()
    plan = plan_of(model, 3)
    lacking: Any = "/nowhere/plan.json" if dist.get_rank() == 1 else plan
    return {
        "lacking": raised(lambda: runtime.attach(model, None, lacking, timeout_s=20)),
        "twins": raised(lambda: runtime.attach(twins, None, plan, timeout_s=20)),
    }


def habits() -> dict[str, Any]:
    """All of the above in one start of processes."""
    checks = (copies, gradients_of_inputs, reassigned_buffers, refusals)
    return {check.__name__: check() for check in checks}
