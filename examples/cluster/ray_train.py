"""Ray Train: Ray places the model, planner exchanges its gradients; `--ddp` has Ray wrap it in DDP.

    python examples/cluster/ray_train.py OUTPUT_FOLDER

What planner changes are `parallel_strategy` and the line below it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy

import planner


def train(settings: dict[str, Any]) -> None:
    """Train on this rank, and report what came out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    session = None
    if settings["ddp"]:
        model = prepare_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        model = prepare_model(model, parallel_strategy=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session = planner.attach(model, optimizer)
    torch.manual_seed(1 + dist.get_rank())
    loss = torch.zeros(())
    for _ in range(settings["steps"]):
        images, labels = torch.randn(16, 16, device=get_device()), torch.randint(4, (16,), device=get_device())
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    weights = sum(p.detach().double().sum().item() for p in model.parameters())
    metrics = {"loss": loss.item(), "weights": weights, "exchanges": session.step if session else 0}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        # Ray hands metrics back with a checkpoint alone; all ranks hold the same model.
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None)


def main(folder: str) -> None:
    """Start two ranks and print what rank 0 reports."""
    # Workers have the environment of Ray's own processes, which on a cluster is not this one's.
    cache = {"PLANNER_CACHE": os.environ["PLANNER_CACHE"]} if "PLANNER_CACHE" in os.environ else {}
    ray.init(runtime_env={"env_vars": cache})
    found = TorchTrainer(
        train,
        train_loop_config={"steps": 24, "ddp": "--ddp" in sys.argv},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    print(f"loss {found.metrics['loss']:.9f} weights {found.metrics['weights']:.12f}")
    if "--ddp" not in sys.argv:
        print(f"exchanges {found.metrics['exchanges']}")


if __name__ == "__main__":
    main(sys.argv[1])
