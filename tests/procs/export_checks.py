"""What ranks do to see which buckets DDP makes of exported arguments, after it has rebuilt them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from examples.digits import ResNet20
from planner.decide.optimize import optimize
from planner.documents.profile import parse_profile
from planner.export import export
from runtime.plan import CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld


class Language(nn.Module):
    """A transformer whose output shares the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(self.layers(self.embedding(tokens)), self.embedding.weight)


class Recurrent(nn.Module):
    """An LSTM between an embedding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(300, 48), nn.LSTM(48, 96, 2), nn.Linear(96, 300)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.out(self.lstm(self.embedding(tokens))[0])
        return found


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 700), nn.ReLU(), nn.Linear(700, 300), nn.ReLU(), nn.Linear(300, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer": (Language, lambda: torch.randint(500, (2, 7))),
    "lstm": (Recurrent, lambda: torch.randint(300, (5, 2))),
    "resnet": (ResNet20, lambda: torch.randn(4, 1, 16, 16)),
    "mlp": (mlp, lambda: torch.randn(4, 64)),
}


def _readiness(model: nn.Module, batch: Tensor) -> list[str]:
    order: list[str] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))  # type: ignore[misc]
        for name, parameter in model.named_parameters()
    ]
    model(batch).sum().backward()
    model.zero_grad()
    for handle in handles:
        handle.remove()
    return order


def buckets_of(model_name: str, alpha_us: float) -> tuple[list[list[str]], list[list[str]]]:
    """Return (the plan's buckets, those that DDP sends in its third step)."""
    make, make_batch = MODELS[model_name]
    torch.manual_seed(0)
    model, batch = make(), make_batch()
    parameters = dict(model.named_parameters())
    gradients = [
        {"name": name, "layer": name.rpartition(".")[0], "numel": parameters[name].numel(), "dtype": "float32",
         "backward_us": 30.0 + parameters[name].numel() * 0.002}
        for name in _readiness(model, batch)
    ]  # fmt: skip
    line = {"alpha_us": alpha_us, "beta_us_per_byte": 0.001}
    profile = parse_profile(
        {
            "schema": "planner.profile/1", "model": {"name": model_name}, "world": {"ranks": 2},
            "compute": {"forward_us": 1000.0, "update_us": 10.0, "gradients": gradients},
            "cluster": {"schema": "planner.cluster/1", "nodes": 2, "collectives": {"all_reduce": line}},
        }
    )  # fmt: skip
    plan = optimize(profile)
    caps = export(plan, "ddp", profile).document["bucket_cap_mb_list"]
    wrapped = DistributedDataParallel(model, bucket_cap_mb_list=caps)
    names = {parameter: name for name, parameter in parameters.items()}
    sent: list[list[str]] = []

    def record(_: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append([names[parameter] for parameter in bucket.parameters()])
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    record.__annotations__.clear()  # torch wants types there, not their names
    wrapped.register_comm_hook(None, record)
    for _ in range(3):
        sent.clear()
        wrapped(batch).sum().backward()
    return [list(bucket.gradients) for bucket in plan.buckets], sent


def hooked() -> tuple[Tensor, Tensor]:
    """Return gradients of (the exported module, DDP) in the third step; all but the last layer's are narrow."""
    found = []
    for kind in ("module", "ddp"):
        torch.manual_seed(0)
        model, batch = mlp(), torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
        parameters = dict(model.named_parameters())
        names = list(reversed(list(parameters)))
        sizes = [4 * parameters[name].numel() for name in names]
        narrow = CompressorSpec(name="wire", dtype="int8")
        planned = (
            PlanBucket(gradients=tuple(names[:2]), size_bytes=sum(sizes[:2])),
            PlanBucket(gradients=tuple(names[2:]), algorithm="two_shot", compressor=narrow, size_bytes=sum(sizes[2:])),
        )
        world = PlanWorld(ranks=2)
        plan = Plan(model=ModelReference(name="mlp"), world=world, accuracy="bounded", buckets=planned)
        module: dict[str, Any] = {}
        exec(export(plan, "ddp-hook").text, module)
        wrapped = module["wrap"](model) if kind == "module" else DistributedDataParallel(model)
        for _ in range(3):
            wrapped.zero_grad()
            wrapped(batch).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return found[0], found[1]


def run() -> dict[str, list[tuple[list[list[str]], list[list[str]]]]]:
    """Return what every model gives, with few large buckets and with many small ones."""
    return {name: [buckets_of(name, alpha_us) for alpha_us in (300.0, 5.0)] for name in MODELS}
