"""Several models at once: GANs, copies, averages of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import ADAM, SGD, Side, batch, clone, compare, like_ddp, mlp, outcome, steps, with_ddp, with_plan
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

STEPS = 4


def _generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))


def _discriminator() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def gan(freeze: bool) -> dict[str, bool]:
    """Two attached models in turn; the generator's backward runs through the discriminator, frozen meanwhile or not."""

    def train(g: Side, d: Side) -> None:
        for step in range(STEPS):
            real, _ = batch(step)
            noise = torch.randn(5, 4, generator=torch.Generator().manual_seed(50 * step + dist.get_rank()))
            d.optimizer.zero_grad()
            scores = d.forward(torch.cat([real, g.forward(noise).detach()]))
            functional.binary_cross_entropy_with_logits(scores[:5], torch.ones(5, 1)).backward(retain_graph=False)
            d.optimizer.step()
            g.optimizer.zero_grad()
            d.model.requires_grad_(not freeze)
            fooled = d.forward(g.forward(noise))
            functional.binary_cross_entropy_with_logits(fooled, torch.ones(5, 1)).backward()
            g.optimizer.step()
            d.model.requires_grad_(True)
            d.model.zero_grad()

    found = []
    for side in (with_ddp, partial(with_plan, group=3)):
        pair = side(_generator(), ADAM), side(_discriminator(), ADAM)
        train(*pair)
        found.append([outcome(one) for one in pair])
        for one in pair:
            one.close()
    results = [compare(expected, got) for expected, got in zip(*found, strict=True)]
    return {f"{who} {kind}": good for who, one in zip("gd", results, strict=True) for kind, good in one.items()}


def _trained_copy(copied: nn.Module) -> list[Any]:
    """What a copy holds after steps of its own on rank 0 alone, and which hooks it has."""
    optimizer = SGD(copied.parameters())
    for step in range(2 if dist.get_rank() == 0 else 0):
        x, _ = batch(step)
        optimizer.zero_grad()
        copied(x).square().mean().backward()
        optimizer.step()
    return clone(list(copied.parameters()))


def deepcopy_before_and_after() -> dict[str, bool]:
    """Copies made before, during and after training are plain models; training them changes nothing here."""

    def loop(side: Side) -> list[Any]:
        found = []
        steps(side, range(2))
        found.append(_trained_copy(copy.deepcopy(side.model)))
        found.append(copy.deepcopy(side.optimizer).state_dict()["param_groups"][0]["lr"])
        steps(side, range(2, STEPS))
        side.close()
        found.append(_trained_copy(copy.deepcopy(side.model)))
        return found

    results = like_ddp(loop)
    return results


def attach_a_copy() -> dict[str, bool]:
    """A copy of an attached model is attached beside it, and both train."""
    reference = with_ddp(mlp())
    first = with_plan(mlp())
    steps(first, range(2))
    second = with_plan(copy.deepcopy(first.model))
    steps(second, range(2, STEPS))
    steps(first, range(2, STEPS))
    steps(reference, range(2))
    results = {}
    fresh = with_ddp(copy.deepcopy(reference.model))
    steps(reference, range(2, STEPS))
    steps(fresh, range(2, STEPS))
    for name, expected, found in (("first", reference, first), ("copy", fresh, second)):
        results |= {f"{name} {kind}": good for kind, good in compare(outcome(expected), outcome(found)).items()}
        found.close()
    return results


def ema(how: str) -> dict[str, bool]:
    """An average of the weights kept beside training; evaluated with statistics of its own."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def loop(side: Side) -> list[Any]:
        if how == "AveragedModel":
            average: nn.Module = AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        else:
            average = copy.deepcopy(side.model).requires_grad_(False)
        for step in range(STEPS):
            steps(side, [step])
            if isinstance(average, AveragedModel):
                average.update_parameters(side.model)
                continue
            with torch.no_grad():
                for mean, value in zip(average.parameters(), side.model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
        if isinstance(average, AveragedModel):
            update_bn([batch(step)[0] for step in range(2)], average)
        return [clone(list(average.parameters())), clone(average(torch.ones(4, 6)))]

    return like_ddp(loop, make)


COPY_CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    **{f"gan-{'frozen' if freeze else 'free'}": partial(gan, freeze) for freeze in (True, False)},
    "deepcopy": deepcopy_before_and_after,
    "attach_a_copy": attach_a_copy,
    **{f"ema-{how}": partial(ema, how) for how in ("AveragedModel", "by hand")},
}
