"""Runs of Lightning and the HF Trainer that are interrupted and go on, on every rank: with DDP and with planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate_checks import PLANS, net, plan_for, prepare_environment, same, sgd, state
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from planner.integrations.accelerate import PlannerAccelerator
from planner.integrations.lightning import PlannerMetrics as LightningMetrics
from planner.integrations.lightning import PlannerStrategy
from planner.integrations.transformers import PlannerMetrics, PlannerTrainer
from runtime.errors import InputError


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Without buffers, which DDP brings in line before the next forward, and planner after each step."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Module(lightning.LightningModule):
    """The net, with a checkpoint after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(32, 6, generator=generator), torch.randn(32, 1, generator=generator))


def lightning_runs(folder: Path) -> dict[str, Any]:
    """Lightning saves after each epoch, and goes on from there; afterwards its strategy has the session."""
    results: dict[str, Any] = {}
    ends = []
    for name, updates in {"ddp": None, **PLANS}.items():
        checkpoint = None
        for epochs in (2, 3):
            module: Module = Module()
            strategy: Any = PlannerStrategy(plan_for(module, updates), timeout_s=66.0, broadcast_buffers=True)
            trainer = lightning.Trainer(
                accelerator="cpu", devices=2, strategy="ddp" if name == "ddp" else strategy, max_epochs=epochs,
                plugins=[TorchElasticEnvironment()], logger=False, enable_progress_bar=False,
                enable_model_summary=False, default_root_dir=folder / name, accumulate_grad_batches=2,
            )  # fmt: skip
            trainer.fit(module, DataLoader(rows(), batch_size=4), ckpt_path=checkpoint, weights_only=False)
            checkpoint = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        ends.append(weights(module))
        results[name] = same(ends[0], ends[-1])
        trainer.save_checkpoint(folder / name / "after.ckpt")
        if name != "ddp":
            results[f"{name}, session"] = strategy.session.step == 2 and not strategy.session.is_attached
            results[f"{name}, timeout"] = strategy.session._world.timeout_s == 66.0
            results[f"{name}, explained"] = "buckets in launch order" in strategy.session.explain(path=None)
            results[f"{name}, measured"] = strategy.session.report().update_us > 0  # its closure holds the whole step
    return results


class Loss(nn.Module):
    """As the HF Trainer calls models."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": mse_loss(self.net(x), y)}


def trainer_runs(folder: Path) -> dict[str, bool]:
    """The HF Trainer with buffers of each rank's own, and with plans that shard the step, goes on from a checkpoint."""
    items = [{"x": x, "y": y} for x, y in rows()]
    results, ends = {}, []
    for name, updates in {"ddp": None, **PLANS}.items():
        for steps, resume in ((2, False), (4, True)):
            model = Loss()
            arguments = TrainingArguments(
                output_dir=str(folder / name), use_cpu=True, per_device_train_batch_size=4, max_steps=steps,
                save_steps=2, report_to=[], seed=0, disable_tqdm=True, learning_rate=0.1,
                ddp_broadcast_buffers=False,
            )  # fmt: skip
            if name == "ddp":
                trainer = Trainer(model=model, args=arguments, train_dataset=items)
            else:
                trainer = PlannerTrainer(
                    model=model, args=arguments, train_dataset=items, plan=plan_for(model, updates), timeout_s=55.0
                )
            trainer.train(resume_from_checkpoint=resume)
            if name != "ddp":
                results[f"{name}, timeout"] = trainer.accelerator.sessions[0]._world.timeout_s == 55.0
        ends.append(state(model))
        results[name] = same(ends[0], ends[-1])
        trainer.accelerator.free_memory()
    return results


def compiled_again(folder: Path) -> bool:
    """The HF Trainer trains a model that it has compiled, and trains it again; with `compile=` in regions."""
    items = [{"x": x, "y": y} for x, y in rows()]
    ends = []
    ways: list[tuple[type[Trainer], dict[str, Any]]] = [
        (Trainer, {}), (PlannerTrainer, {}), (PlannerTrainer, {"compile": "eager"})
    ]  # fmt: skip
    for kind, options in ways:
        model = Loss()
        arguments = TrainingArguments(
            output_dir=str(folder), use_cpu=True, per_device_train_batch_size=4, max_steps=2, save_strategy="no",
            report_to=[], seed=0, disable_tqdm=True, torch_compile=True, torch_compile_backend="eager",
        )  # fmt: skip
        trainer = kind(model=model, args=arguments, train_dataset=items, **options)
        trainer.train()
        trainer.train()
        ends.append(weights(model))
        if options and "compiled by eager in" not in str(trainer.accelerator.sessions[-1].report()):
            return False
    return same(ends[0], ends[1]) and same(ends[0], ends[2])


class TokenLoss(nn.Module):
    """A loss that is a sum over tokens, divided by the number that the HF Trainer gives, or a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:
        errors = (self.net(x).expand(labels.shape) - labels).square()[labels.ne(-100)]
        return {"loss": errors.mean() if num_items_in_batch is None else errors.sum() / num_items_in_batch}


def token_rows() -> list[dict[str, Tensor]]:
    """Rows with unlike numbers of tokens, of which two make a batch of a rank, and all of them a step."""
    generator, items = torch.Generator().manual_seed(5), []
    for row in range(8):
        labels = torch.randn(9, generator=generator, dtype=torch.float64)
        labels[1 + row :] = -100
        items.append({"x": torch.randn(6, generator=generator, dtype=torch.float64), "labels": labels})
    return items


def batch_of(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in ("x", "labels")}


def number_of(batch: dict[str, Tensor]) -> int:
    return int(batch["labels"].ne(-100).sum())


def by_accelerate() -> nn.Module:
    """Accelerate, with a function that gives the number of tokens."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    model, number = TokenLoss(), [0]
    accelerator = PlannerAccelerator(cpu=True, gradient_accumulation_steps=2, weight=lambda: number[0])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mine = token_rows()[dist.get_rank() :: 2]
    for micro in range(6):
        batch = batch_of(mine[2 * (micro % 2) :][:2])
        with accelerator.accumulate(model):
            number[0] = number_of(batch)
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return model


class TokenModule(lightning.LightningModule):
    """Keeps the number of tokens of its last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.number = TokenLoss(), 0

    def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
        self.number = number_of(batch)
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_lightning(folder: Path) -> nn.Module:
    """Lightning, with one too."""
    module = TokenModule()
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy=PlannerStrategy(weight=lambda: module.number), max_epochs=3,
        plugins=[TorchElasticEnvironment()], logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder, accumulate_grad_batches=2,
    ).fit(module, DataLoader(token_rows(), batch_size=2))  # type: ignore[arg-type]  # fmt: skip
    return module.net


def tokens(folder: Path) -> dict[str, bool]:
    """Frameworks on ranks with unlike numbers of tokens: whether they are as one process that has all of them."""
    items, reference, found = token_rows(), TokenLoss(), dict[str, Any]()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        reference(**batch_of(items))["loss"].backward()
        optimizer.step()

    def apart(model: nn.Module) -> float:
        pairs = zip(weights(model).values(), weights(reference).values(), strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)

    for average, weight in ((True, None), (False, "tokens"), (False, None), (True, "tokens")):
        model = TokenLoss()
        arguments = TrainingArguments(
            output_dir=str(folder), use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_steps=3, save_strategy="no", report_to=[], seed=0, disable_tqdm=True, max_grad_norm=0.0,
            average_tokens_across_devices=average,
        )  # fmt: skip
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            trainer = PlannerTrainer(
                model=model,
                args=arguments,
                train_dataset=items,
                weight=weight,
                optimizers=(plain, torch.optim.lr_scheduler.ConstantLR(plain, 1.0)),
            )
            trainer.train()
        except InputError as error:
            found[f"{average}, {weight}"] = str(error)
            continue
        found[f"{average}, {weight}"] = apart(model)
        trainer.accelerator.free_memory()
    return {
        "True, None": found["True, None"] < 1e-12,
        "False, tokens": found["False, tokens"] < 1e-12,
        "accelerate": apart(by_accelerate()) < 1e-12,
        "lightning": apart(by_lightning(folder)) < 1e-12,
        "False, None": found["False, None"] > 1e-3,  # a mean of means
        "True, tokens": "found weight='tokens' and average_tokens_across_devices=True" in str(found["True, tokens"]),
    }


class Written(TrainerCallback, Logger):
    """Keeps what a framework writes: of the HF Trainer a callback, of Lightning a logger."""

    name, version = "written", 0

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.found.append(dict(logs))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.found.append({"step": step or 0, **metrics})

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def metrics(folder: str) -> dict[str, dict[str, bool]]:
    """Callbacks give loggers the session's numbers: in Lightning of every second step, in the HF Trainer of each."""
    where = prepare_environment(folder)
    wanted = {"planner/step", "planner/step_us", "planner/wait_us", "planner/plans_tried"}
    written, module = Written(), Module()
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy=PlannerStrategy(), max_epochs=1, plugins=[TorchElasticEnvironment()],
        logger=written, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=where, accumulate_grad_batches=2, callbacks=[LightningMetrics(every_steps=2)],
    ).fit(module, DataLoader(rows(), batch_size=4))  # fmt: skip
    of_lightning = [one for one in written.found if wanted <= one.keys()]
    rank = torch.distributed.get_rank()
    results = {"lightning": {"metrics": [one["step"] for one in of_lightning] == ([2] if rank == 0 else [])}}
    written = Written()
    arguments = TrainingArguments(
        output_dir=str(where), use_cpu=True, per_device_train_batch_size=4, max_steps=2, save_strategy="no",
        report_to=[], seed=0, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    items = [{"x": x, "y": y} for x, y in rows()]
    trainer = PlannerTrainer(model=Loss(), args=arguments, train_dataset=items, callbacks=[written, PlannerMetrics()])
    trainer.train()
    logged = [one for one in written.found if "loss" in one]
    results["transformers"] = {"metrics": len(logged) == 2 and wanted <= logged[1].keys()}
    trainer.accelerator.free_memory()
    return results


def run(folder: str) -> dict[str, Any]:
    """All of them."""
    where = prepare_environment(folder)
    trained = trainer_runs(where / "trainer")
    trained["compiled, again"] = compiled_again(where)
    return {"transformers": trained, "tokens": tokens(where), "lightning": lightning_runs(where / "lightning")}
