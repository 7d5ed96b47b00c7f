"""An ordinary data-parallel training script, and the line that makes it train with a plan.

torchrun --nproc-per-node 2 examples/existing_script.py                              # plain DDP
torchrun --nproc-per-node 2 examples/existing_script.py --profile-to profile.json
planner optimize profile.json -o plan.json
torchrun --nproc-per-node 2 examples/existing_script.py --plan plan.json
torchrun --nproc-per-node 2 examples/existing_script.py --compare plan.json          # DDP and the plan by turns, or
planner compare examples/existing_script.py --plan plan.json -- --compare plan.json  # the same, as a command

With --checkpoint FILE it saves now and then, and continues from FILE where that exists; so under torchrun's
--max-restarts a run that loses a rank ends with the weights that it would have had, bit for bit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import digits
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import planner

BATCH_SIZE = 32
MAX_NORM = 1.0
"""Gradients are clipped to this norm."""
DEADLINE = timedelta(minutes=2)
"""Of the script's own collectives; those of the plan have their own (see `planner.attach`)."""
STEPS_PER_LINE = 20
"""How often rank 0 prints."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains a small CNN on handwritten digits.")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--plan", metavar="FILE", help="train with this plan; without it with DDP")
    way.add_argument("--profile-to", metavar="FILE", help="measure a step, write the profile and stop")
    way.add_argument("--compare", metavar="FILE", help="measure DDP and this plan by turns, print, and stop")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps")
    parser.add_argument("--checkpoint", metavar="FILE", help="save here, and continue from here; seen by all ranks")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="how often; also at the end")
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
    store, rank, ranks = next(dist.rendezvous("env://", timeout=DEADLINE))
    # After a restart torchrun's store still holds the addresses of the ranks that are gone: each life has its own keys.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks, timeout=DEADLINE)
    return dist.get_rank(), dist.get_world_size(), device


class Cnn(nn.Sequential):
    """A small CNN: images (batch, 1, 16, 16) to scores (batch, 10)."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)),
        )


def batches(rank: int, ranks: int, device: torch.device, done: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the training digits, epoch after epoch; the first `done` batches are passed over."""
    data = digits()
    dataset = TensorDataset(data.train_images, data.train_labels)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, num_replicas=ranks, rank=rank, seed=0)
    # A generator of its own: otherwise each epoch would draw from the one that dropout uses.
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler, drop_last=True, generator=torch.Generator())
    epoch, done = divmod(done, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for images, labels in islice(loader, done, None):
            yield images.to(device), labels.to(device)
        epoch, done = epoch + 1, 0


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


def compare(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[tuple[Tensor, Tensor]], plan: str
) -> planner.Comparison:
    """Measures DDP and a plan by turns; model and optimizer are left as they were."""
    images, labels = next(data)

    def step(model: nn.Module) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss

    session = planner.attach(model, optimizer, plan)
    return planner.compare(session, step)


class Checkpoint:
    """Everything that the next step depends on, in one file."""

    def __init__(self, path: str | None, parts: dict[str, Any], device: torch.device) -> None:
        """`parts` have `state_dict` and `load_state_dict`, and are the same on every rank."""
        self._path, self._parts, self._device = Path(path) if path else None, parts, device

    def load(self) -> int:
        """The number of steps that are done; 0 where there is no file yet. Every rank calls it."""
        if self._path is None or not self._path.exists():
            return 0
        state = torch.load(self._path, map_location="cpu")
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self._generator("set", state["generators"][dist.get_rank() if dist.is_initialized() else 0])
        return int(state["step"])

    def save(self, step: int) -> None:
        """Rank 0 writes the file, whole or not at all. Every rank calls it, since dropout differs between them."""
        if self._path is None:
            return
        generators = [self._generator("get")]
        if dist.is_initialized():
            generators *= dist.get_world_size()
            dist.all_gather_object(generators, self._generator("get"))
            if dist.get_rank() != 0:
                return
        state = {name: part.state_dict() for name, part in self._parts.items()}
        partial = self._path.with_suffix(".part")
        torch.save({**state, "step": step, "generators": generators}, partial)
        partial.replace(self._path)

    def _generator(self, do: str, *state: Tensor) -> Any:
        """Gets or sets the state of the generator that dropout draws from on this rank."""
        return getattr(torch.cuda if self._device.type == "cuda" else torch, f"{do}_rng_state")(*state)


def train(arguments: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> None:
    """Trains with the plan or with DDP; rank 0 prints."""
    model, optimizer = make_model(rank, device)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    replica: nn.Module = model
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if arguments.plan:
        # The added line: from here on, backward() leaves the average over ranks in .grad, as DDP's does.
        session = planner.attach(model, optimizer, arguments.plan)
        parts["session"] = session
    elif ranks > 1:
        replica = DistributedDataParallel(model)
    checkpoint = Checkpoint(arguments.checkpoint, parts, device)
    done = checkpoint.load()
    if rank == 0 and done:
        print(f"continuing after step {done}", flush=True)
    data = batches(rank, ranks, device, done)
    for step in range(done + 1, arguments.steps + 1):
        images, labels = next(data)
        optimizer.zero_grad()
        loss = functional.cross_entropy(replica(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        if step % arguments.save_every == 0 or step == arguments.steps:
            checkpoint.save(step)
        if rank == 0 and step % STEPS_PER_LINE == 0:
            print(f"step {step}: loss {float(loss.detach()):.4f}")
    if rank == 0:
        if arguments.plan:
            print(session.report())
        test_loss, accuracy = evaluate(model, device)
        print(f"after {arguments.steps} steps: test loss {test_loss:.4f}, test accuracy {accuracy:.2%}")


def make_model(rank: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on its device, and its optimizer."""
    torch.manual_seed(rank)  # each rank drops other activations out; all begin with rank 0's weights
    model = Cnn().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    """Trains, or measures steps."""
    arguments = parse_arguments()
    rank, ranks, device = join_world()
    if arguments.profile_to:
        profile = measure(*make_model(rank, device), batches(rank, ranks, device))
        if rank == 0:
            profile.save(arguments.profile_to)
            print(f"wrote {arguments.profile_to}")
    elif arguments.compare:
        comparison = compare(*make_model(rank, device), batches(rank, ranks, device), arguments.compare)
        if rank == 0:
            print(comparison)
    else:
        train(arguments, rank, ranks, device)
    if dist.is_initialized():
        # Nobody leaves while rank 0 evaluates: an interpreter that ends just behind its last message may be aborted by
        # the backend's thread, which still holds that message's tensors.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
