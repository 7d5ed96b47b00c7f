"""A LightningModule with accumulation, clipping, a scheduler, a checkpoint and resuming; `--ddp` uses Lightning's DDP.

    python examples/lightning_module.py OUTPUT_FOLDER [--muon]

What planner changes are the import and the strategy's name. With `--muon` the hidden matrices are trained by Muon, and
the rest by AdamW: Lightning steps two optimizers in manual optimization, where the module clips, too.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import planner.integrations.lightning  # noqa: F401 - registers the strategy

STRATEGY, MUON = "ddp" if "--ddp" in sys.argv else "planner", "--muon" in sys.argv


class Classifier(lightning.LightningModule):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        """Return the loss of a batch."""
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return SGD and its schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class WithMuon(Classifier):
    """Steps two optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        """Return the loss of a batch, after the step."""
        loss = super().training_step(batch, _index)
        self.manual_backward(loss)
        for one in self.optimizers():  # type: ignore[union-attr]
            self.clip_gradients(one, gradient_clip_val=1.0)
            one.step()
            one.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        """Return Muon for hidden matrices, and AdamW for the rest."""
        matrices = [self.layers[0].weight, self.layers[2].weight]
        rest = [p for p in self.parameters() if all(p is not one for one in matrices)]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


class Exchanges(lightning.Callback):
    """Tells how often gradients were exchanged."""

    def on_train_end(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        """Print it on rank 0."""
        session = getattr(trainer.strategy, "session", None)
        if session is not None and trainer.is_global_zero:
            print(f"exchanges {session.step}")


def main(folder: str) -> None:
    """Train three epochs, then a fourth from the checkpoint; rank 0 prints losses and the sum of the weights."""
    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(TensorDataset(torch.randn(512, 16), torch.randint(4, (512,))), batch_size=16)
    options: dict[str, Any] = {} if MUON else {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    checkpoint = None
    for epochs in (3, 4):
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=STRATEGY, max_epochs=epochs, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, callbacks=[Exchanges()], **options,
        )  # fmt: skip
        module = WithMuon() if MUON else Classifier()
        trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=False)
        checkpoint = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        if trainer.is_global_zero:
            weights = sum(p.detach().double().sum().item() for p in module.parameters())
            print(f"loss {float(trainer.callback_metrics['loss']):.9f} weights {weights:.12f}")


if __name__ == "__main__":
    main(sys.argv[1])
