"""Models that are unlike a plain stack of layers, and what scripts make of them: GANs, copies, averages."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import (
    ADAM,
    LOW_PRECISION_TOLERANCE,
    SGD,
    Side,
    batch,
    clone,
    compare,
    like_ddp,
    loss_of,
    mlp,
    outcome,
    steps,
    with_ddp,
    with_plan,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

STEPS = 4


def batchnorm(momentum: float | None) -> dict[str, bool]:
    """Statistics after steps with accumulation, and after an evaluation in between; cumulative ones too."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8, momentum=momentum)
        return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3), nn.BatchNorm1d(3, affine=False))

    def loop(side: Side) -> list[Any]:
        found = []
        steps(side, range(2))
        side.model.eval()
        with torch.no_grad():
            found.append(clone(side.model(torch.ones(2, 6))))
        side.model.train()
        side.optimizer.zero_grad()
        with side.no_sync():
            loss_of(side, 2).backward()
        loss_of(side, 3).backward()
        side.optimizer.step()
        side.model[1].eval()
        steps(side, [4])  # fine-tuning with frozen statistics
        return found

    return like_ddp(loop, make)


def tied() -> dict[str, bool]:
    """An output layer that shares the embedding's weight."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.mix, self.output = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)
            self.output.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.output(torch.tanh(self.mix(self.embedding(tokens)))).flatten(0, 1)

    def loop(side: Side) -> None:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            tokens = torch.randint(0, 11, (4, 6), generator=generator)
            side.optimizer.zero_grad()
            functional.cross_entropy(side.forward(tokens[:, :-1]), tokens[:, 1:].flatten()).backward()
            side.optimizer.step()

    return like_ddp(loop, Language, ADAM)


def shared_layer() -> dict[str, bool]:
    """One layer called three times in a forward."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = torch.tanh(self.again(x))
            return self.last(x)

    return like_ddp(lambda side: steps(side, range(STEPS)), Repeated)


def frozen_before() -> dict[str, bool]:
    """A frozen trunk, as in fine-tuning; its parameters are neither in the plan nor in the optimizer."""

    def make() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    return like_ddp(lambda side: steps(side, range(STEPS)), make)


def frozen_after() -> dict[str, bool]:
    """Frozen after attach and thawed again, on all ranks and on one rank alone; Adam skips what has no gradient."""

    def loop(side: Side) -> list[Any]:
        found = []
        for step in range(6):
            side.model[2].requires_grad_(step not in (1, 2) and not (step == 4 and dist.get_rank() == 0))
            steps(side, [step])
            found.append(clone([p.grad for p in side.model.parameters()]))
        return found

    return like_ddp(loop, mlp, ADAM, find_unused_parameters=True)


def mixed_dtypes() -> dict[str, bool]:
    """bfloat16 and float32 parameters in one bucket, through several steps."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.low, self.high = nn.Linear(6, 6).to(torch.bfloat16), nn.Linear(6, 3)
            self.scale = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return self.high((self.low(x.bfloat16()) * self.scale).to(self.high.weight.dtype))

    return like_ddp(lambda side: steps(side, range(STEPS)), Mixed, tolerance=LOW_PRECISION_TOLERANCE)


class Checkpointed(nn.Module):
    """Recomputes every layer in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)


def checkpointing(reentrant: bool, autocast: bool, accumulated: bool) -> dict[str, bool]:
    """Against DDP with the same checkpoints; dropout has to be the same in the recomputed forward."""

    def loop(side: Side) -> None:
        torch.manual_seed(7)
        for step in range(STEPS):
            side.optimizer.zero_grad()
            if accumulated:
                with side.no_sync():
                    loss_of(side, 50 + step).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                x, y = batch(step)
                loss = functional.cross_entropy(side.forward(x.float() if autocast else x), y)
            loss.backward()
            side.optimizer.step()

    def make() -> nn.Module:
        model = Checkpointed(reentrant)
        return model.float() if autocast else model

    return like_ddp(loop, make, tolerance=LOW_PRECISION_TOLERANCE if autocast else 1e-12)


def whole_model_checkpointed(reentrant: bool) -> dict[str, bool]:
    """`checkpoint(model, x)`: the model's own forward runs again inside backward. Against DDP without checkpoints."""
    reference, planned = with_ddp(mlp()), with_plan(mlp())
    steps(reference, range(STEPS))
    for step in range(STEPS):
        x, y = batch(step)
        planned.optimizer.zero_grad()
        output = checkpoint(planned.forward, x.requires_grad_(), use_reentrant=reentrant)
        functional.cross_entropy(output, y).backward()
        planned.optimizer.step()
    results = compare(outcome(reference), outcome(planned))
    planned.close()
    return results


@dataclasses.dataclass
class Record:
    """An output that no library knows."""

    logits: Tensor
    extra: dict[str, Any]


def outputs(kind: str) -> dict[str, bool]:
    """Outputs in dicts, tuples and dataclasses, some of them not used by the loss."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.unused = mlp(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            y = self.inner(x)
            extra = {"unused": [self.unused(y), "text", None]}
            return {"dict": {"logits": y, **extra}, "tuple": (y, extra), "dataclass": Record(y, extra)}[kind]

    def loop(side: Side) -> None:
        for step in range(STEPS):
            x, y = batch(step)
            side.optimizer.zero_grad()
            with side.no_sync():
                side.forward(x)
            found = side.forward(x)
            logits = found if isinstance(found, Tensor) else found[0] if kind == "tuple" else _logits(found)
            functional.cross_entropy(logits, y).backward()
            side.optimizer.step()

    if kind != "dataclass":
        return like_ddp(loop, Wrapped, find_unused_parameters=True)
    # DDP looks for unused outputs in dicts and lists only: it is given the tensor alone, with that layer left aside.
    reference, planned = with_ddp(mlp()), with_plan(Wrapped())
    for side in (reference, planned):
        loop(side)
    planned.close()
    inner = outcome(dataclasses.replace(planned, model=planned.model.inner))
    return compare(outcome(reference) | {"optimizer": None}, inner | {"optimizer": None})


def _logits(found: Any) -> Tensor:
    return found["logits"] if isinstance(found, dict) else found.logits


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


def fast_weights() -> dict[str, bool]:
    """MAML: an inner update of every weight with create_graph, then the outer loss through `functional_call`."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad()
            names, weights = zip(*side.forward.named_parameters(), strict=True)
            with side.no_sync():
                inner = loss_of(side, 10 + step)
            slopes = torch.autograd.grad(inner, weights, create_graph=True)
            fast = {name: w - 0.1 * g for name, w, g in zip(names, weights, slopes, strict=True)}
            x, y = batch(step)
            functional.cross_entropy(torch.func.functional_call(side.forward, fast, (x,)), y).backward()
            side.optimizer.step()

    return like_ddp(loop)


def partial_backward() -> dict[str, bool]:
    """`backward(inputs=...)` of some of the parameters, against DDP with the others frozen: its own fails."""
    frozen = mlp()
    frozen[0].requires_grad_(False)
    found = []
    for side in (with_ddp(frozen), with_plan(mlp())):
        for step in range(STEPS):
            side.optimizer.zero_grad()
            loss_of(side, step).backward(inputs=list(side.model[2:].parameters()))
            side.optimizer.step()
        found.append(outcome(side) | {"optimizer": None})
        side.close()
    return compare(*found)


MODEL_CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    **{f"batchnorm-{momentum}": partial(batchnorm, momentum) for momentum in (0.1, None)},
    "tied": tied,
    "shared_layer": shared_layer,
    "frozen_before": frozen_before,
    "frozen_after": frozen_after,
    "mixed_dtypes": mixed_dtypes,
    **{
        f"checkpointing-{'' if reentrant else 'not '}reentrant{'-autocast' * cast}{'-accumulated' * more}": partial(
            checkpointing, reentrant, cast, more
        )
        for reentrant in (True, False)
        for cast, more in ((False, False), (True, False), (False, True))
    },
    **{
        f"whole_model_checkpointed-{'' if reentrant else 'not '}reentrant": partial(whole_model_checkpointed, reentrant)
        for reentrant in (True, False)
    },
    **{f"outputs-{kind}": partial(outputs, kind) for kind in ("dict", "tuple", "dataclass")},
    **{f"gan-{'frozen' if freeze else 'free'}": partial(gan, freeze) for freeze in (True, False)},
    "fast_weights": fast_weights,
    "partial_backward": partial_backward,
    "deepcopy": deepcopy_before_and_after,
    "attach_a_copy": attach_a_copy,
    **{f"ema-{how}": partial(ema, how) for how in ("AveragedModel", "by hand")},
}
