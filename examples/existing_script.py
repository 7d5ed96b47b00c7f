"""An ordinary data-parallel training script, and the two lines that make it train with a plan.

torchrun --nproc-per-node 2 examples/existing_script.py                              # plain DDP
torchrun --nproc-per-node 2 examples/existing_script.py --profile-to profile.json
planner optimize profile.json -o plan.json
torchrun --nproc-per-node 2 examples/existing_script.py --plan plan.json
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import planner
import runtime
from planner.demo_job import digits

BATCH_SIZE = 32
MAX_NORM = 1.0
"""Gradients are clipped to this norm."""
STEPS_PER_LINE = 20
"""How often rank 0 prints."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains a small CNN on handwritten digits.")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--plan", metavar="FILE", help="train with this plan; without it with DDP")
    way.add_argument("--profile-to", metavar="FILE", help="measure a step, write the profile and stop")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps")
    parser.add_argument("--checkpoint", metavar="FILE", help="save model and optimizer here at the end")
    return parser.parse_args()


def join_world() -> tuple[int, int, torch.device]:
    """This process's rank, the number of ranks and its device; one rank where no launcher started it."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return 0, 1, device
    dist.init_process_group("nccl" if cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


class Cnn(nn.Sequential):
    """A small CNN: images (batch, 1, 16, 16) to scores (batch, 10)."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)),
        )


def batches(rank: int, ranks: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the training digits, epoch after epoch."""
    data = digits()
    dataset = TensorDataset(data.train_images, data.train_labels)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, num_replicas=ranks, rank=rank, seed=0)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            yield images.to(device), labels.to(device)
        epoch += 1


@torch.no_grad()
def evaluate(model: nn.Module, device: torch.device) -> tuple[float, float]:
    """Loss and share of right answers on the test digits."""
    data = digits()
    model.eval()
    scores, labels = model(data.test_images.to(device)), data.test_labels.to(device)
    model.train()
    return float(functional.cross_entropy(scores, labels)), float((scores.argmax(1) == labels).float().mean())


def measure(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[tuple[Tensor, Tensor]]
) -> planner.Profile:
    """Profiles one step; model and optimizer are left as they were."""
    images, labels = next(data)

    def step() -> None:
        functional.cross_entropy(model(images), labels).backward()

    return planner.profile_step(model, step, optimizer)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[tuple[Tensor, Tensor]], steps: int, *, talk: bool
) -> None:
    """Trains for some steps; `talk` on the rank that prints."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for step in range(1, steps + 1):
        images, labels = next(data)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        if talk and step % STEPS_PER_LINE == 0:
            print(f"step {step}: loss {float(loss.detach()):.4f}")


def main() -> None:
    """Trains, or measures a step."""
    arguments = parse_arguments()
    rank, ranks, device = join_world()
    torch.manual_seed(rank)  # each rank drops other activations out; all begin with rank 0's weights
    model = Cnn().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = batches(rank, ranks, device)

    if arguments.profile_to:
        profile = measure(model, optimizer, data)
        if rank == 0:
            profile.save(arguments.profile_to)
            print(f"wrote {arguments.profile_to}")
    else:
        replica: nn.Module = model
        session = None
        if arguments.plan:
            # The two added lines: from here on, backward() leaves the average over ranks in .grad, as DDP's does.
            plan = runtime.load_plan(arguments.plan)
            session = runtime.attach(model, optimizer, plan)
        elif ranks > 1:
            replica = DistributedDataParallel(model)
        train(replica, optimizer, data, arguments.steps, talk=rank == 0)
        if rank == 0:
            if session is not None:
                print(session.report())
            loss, accuracy = evaluate(model, device)
            print(f"after {arguments.steps} steps: test loss {loss:.4f}, test accuracy {accuracy:.2%}")
            if arguments.checkpoint:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, arguments.checkpoint)

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
