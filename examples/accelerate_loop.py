"""An Accelerate loop with accumulation, clipping and a scheduler, trained by planner; `--ddp` trains it by DDP.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py [--muon]

What planner changes are the import and the class; the loop is Accelerate's own. With `--muon` the hidden matrices are
trained by Muon, and the rest by AdamW: two optimizers, which are prepared together.
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


def optimizers(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    """Return SGD, or Muon for hidden matrices and AdamW for the rest."""
    if "--muon" not in sys.argv:
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    matrices = [model[0].weight, model[2].weight]
    rest = [p for p in model.parameters() if all(p is not one for one in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def main() -> None:
    """Train for three epochs; print the loss and the sum of the weights of rank 0."""
    accelerator = ACCELERATOR(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    made = optimizers(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 5, 0.5) for one in made]
    loader = DataLoader(TensorDataset(torch.randn(512, 16), torch.randint(4, (512,))), batch_size=16)
    model, loader, *prepared = accelerator.prepare(model, loader, *made, *schedulers)
    made, schedulers = prepared[: len(made)], prepared[len(made) :]
    for _ in range(3):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                for one in (*made, *schedulers):
                    one.step()
                for one in made:
                    one.zero_grad()
    weights = sum(p.detach().double().sum().item() for p in accelerator.unwrap_model(model).parameters())
    accelerator.print(f"loss {loss.item():.9f} weights {weights:.12f}")
    for session in getattr(accelerator, "sessions", []):
        accelerator.print(f"exchanges {session.step}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
