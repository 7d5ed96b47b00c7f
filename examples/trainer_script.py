"""Fine-tuning with the HF Trainer: accumulation, clipping, a schedule, checkpoints and resuming; `--ddp` uses DDP.

    torchrun --nproc-per-node 2 examples/trainer_script.py OUTPUT_FOLDER

What planner changes are the import and the class.
"""

from __future__ import annotations

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from planner.integrations.transformers import PlannerTrainer

TRAINER = Trainer if "--ddp" in sys.argv else PlannerTrainer


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
        trainer = TRAINER(model=BertForSequenceClassification(config), args=arguments, train_dataset=rows)
        found = trainer.train(resume_from_checkpoint=resume)
        if trainer.args.process_index == 0:
            weights = sum(p.detach().double().sum().item() for p in trainer.model.parameters())
            print(f"loss {found.training_loss:.9f} weights {weights:.12f}")
            for session in getattr(trainer.accelerator, "sessions", []):
                print(f"exchanges {session.step}")


if __name__ == "__main__":
    main(sys.argv[1])
