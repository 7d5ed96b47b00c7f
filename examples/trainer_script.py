"""Fine-tuning with the HF Trainer: accumulation, clipping, a schedule, checkpoints and resuming; `--ddp` uses DDP.

    torchrun --nproc-per-node 2 examples/trainer_script.py OUTPUT_FOLDER [--muon]

What planner changes are the import and the class. With `--muon` the matrices of the encoder are trained by Muon, and
the rest by AdamW: Trainer takes one optimizer, so that this one has both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from planner.integrations.transformers import PlannerTrainer

TRAINER = Trainer if "--ddp" in sys.argv else PlannerTrainer


class MuonAndAdamW(torch.optim.Optimizer):
    """Groups with `muon=True` are orthogonalized momentum, in torch's own arithmetic, the others AdamW."""

    unit = "matrix"

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "muon": False, "momentum": 0.95, "betas": (0.9, 0.999), "eps": 1e-8})

    def operator(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the nearest matrix with orthogonal rows or columns, in bfloat16; ranks share this work."""
        x = matrix.bfloat16()
        x = x.mT if matrix.shape[0] > matrix.shape[1] else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):  # the quintic Newton–Schulz iteration of Jordan et al., 2024
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
        return x.mT if matrix.shape[0] > matrix.shape[1] else x

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update all parameters with a gradient."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if group["muon"]:
                    momentum = state.setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1.0 - group["momentum"])
                    update = self.operator(p.grad.lerp(momentum, group["momentum"]), group)
                    p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
                    continue
                first, second = (state.setdefault(name, torch.zeros_like(p)) for name in ("exp_avg", "exp_avg_sq"))
                state["step"] = count = state.get("step", 0) + 1
                (beta1, beta2), eps = group["betas"], group["eps"]
                first.lerp_(p.grad, 1.0 - beta1)
                second.mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)
                below = (second / (1.0 - beta2**count)).sqrt().add_(eps)
                p.addcdiv_(first, below, value=-group["lr"] / (1.0 - beta1**count))


def muon(model: nn.Module) -> MuonAndAdamW:
    """Return the optimizer with a group for matrices of the encoder, and one for the rest."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[".encoder." in name and parameter.ndim == 2].append(parameter)
    return MuonAndAdamW([{"params": groups[True], "muon": True, "lr": 0.02}, {"params": groups[False]}])


def main(folder: str) -> None:
    """Train two epochs, then a third from the last checkpoint; rank 0 prints losses and the sum of the weights."""
    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(100, (8,)), "labels": index % 2} for index in range(256)]
    for epochs, resume in ((2, False), (3, True)):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=8, gradient_accumulation_steps=2,
            num_train_epochs=epochs, max_grad_norm=1.0, learning_rate=1e-3, save_steps=8, report_to=[], seed=0,
            disable_tqdm=True,
        )  # fmt: skip
        model = BertForSequenceClassification(config)
        own = {"optimizers": (muon(model), None)} if "--muon" in sys.argv else {}
        trainer = TRAINER(model=model, args=arguments, train_dataset=rows, **own)
        found = trainer.train(resume_from_checkpoint=resume)
        if trainer.args.process_index == 0:
            weights = sum(p.detach().double().sum().item() for p in trainer.model.parameters())
            print(f"loss {found.training_loss:.9f} weights {weights:.12f}")
            for session in getattr(trainer.accelerator, "sessions", []):
                print(f"exchanges {session.step}")


if __name__ == "__main__":
    main(sys.argv[1])
