"""An Accelerate loop with accumulation, clipping and a scheduler, trained by planner; `--ddp` trains it by DDP.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py

What planner changes are the import and the class; the loop is Accelerate's own.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from planner.integrations.accelerate import PlannerAccelerator

ACCELERATOR = Accelerator if "--ddp" in sys.argv else PlannerAccelerator


def main() -> None:
    """Train for three epochs; print the loss and the sum of the weights of rank 0."""
    accelerator = ACCELERATOR(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    loader = DataLoader(TensorDataset(torch.randn(512, 16), torch.randint(4, (512,))), batch_size=16)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(3):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    weights = sum(p.detach().double().sum().item() for p in accelerator.unwrap_model(model).parameters())
    accelerator.print(f"loss {loss.item():.9f} weights {weights:.12f}")
    for session in getattr(accelerator, "sessions", []):
        accelerator.print(f"exchanges {session.step}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
