"""Scripts of Accelerate as its users write them, on every rank: with DDP and with planner."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from session_checks import plan_of
from sharded_checks import LATE, SHARED
from step_checks import raised
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from planner.integrations.accelerate import PlannerAccelerator
from planner.integrations.attaching import detach
from runtime.plan import Plan

Make = Callable[..., Accelerator]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def data(step: int) -> tuple[Tensor, Tensor]:
    """This rank's batch of a step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(5, 6, generator=generator), torch.randn(5, 1, generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def state(*models: nn.Module) -> dict[str, Tensor]:
    """All weights and buffers, by names as they are without DDP."""
    return {
        f"{at}.{name.removeprefix('module.')}": value.clone()
        for at, model in enumerate(models)
        for name, value in model.state_dict().items()
    }


def evaluated(*models: nn.Module) -> dict[str, Tensor]:
    """As `state`, after an evaluation, before which DDP brings buffers in line; planner has done so after the step."""
    with torch.no_grad():
        for model in models:
            model.eval()(data(0)[0])
    return state(*models)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def as_with_ddp(script: Callable[[Make], dict[str, Tensor]]) -> bool:
    """Whether a script ends the same with planner; each accelerator begins with a state of its own."""
    results = []
    for make in (Accelerator, PlannerAccelerator):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        results.append(script(make))
    return same(*results)


def in_turn(make: Make) -> dict[str, Tensor]:
    """`no_sync` inside `no_sync`, forwards whose backward is the one that synchronizes, ordinary steps."""
    accelerator = make(cpu=True)
    model, optimizer = net(), None
    model, optimizer = accelerator.prepare(model, sgd(model))
    for step in range(0, 20, 4):
        with accelerator.no_sync(model):
            with accelerator.no_sync(model):
                accelerator.backward(mse_loss(model(data(step)[0]), data(step)[1]))
            first, last = (mse_loss(model(data(at)[0]), data(at)[1]) for at in (step + 1, step + 2))
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(last)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.backward(mse_loss(model(data(step + 3)[0]), data(step + 3)[1]))
        optimizer.step()
        optimizer.zero_grad()
    return evaluated(model)


def accumulated(make: Make, each: bool) -> dict[str, Tensor]:
    """Two models in one `accumulate`; with `each`, all micro-batches are synchronized."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
    accelerator = make(cpu=True, gradient_accumulation_plugin=plugin)
    first, second = net(0), net(1)
    first, second, one, other = accelerator.prepare(first, second, sgd(first), sgd(second))
    for step in range(8):
        with accelerator.accumulate(first, second):
            x, y = data(step)
            accelerator.backward(mse_loss(first(x) + second(x), y))
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
    return evaluated(first, second)


def own_buffers(make: Make) -> dict[str, Tensor]:
    """Statistics of each rank's own, which is said through Accelerate."""
    accelerator = make(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    ordinary(accelerator, model, optimizer, range(3))
    return evaluated(model)


def ordinary(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        accelerator.backward(mse_loss(model(data(step)[0]), data(step)[1]))
        optimizer.step()


def prepared_again(make: Make) -> dict[str, Tensor]:
    """A model that is prepared already, a copy of it, and one whose accelerator was cleared, before and after it is
    prepared again.
    """
    accelerator = make(cpu=True)
    model = accelerator.prepare(net())
    raw = accelerator.unwrap_model(model)
    model, optimizer = accelerator.prepare(model, sgd(model))
    ordinary(accelerator, model, optimizer, range(2))
    other = copy.deepcopy(raw)
    other, another = accelerator.prepare(other, sgd(other))
    ordinary(accelerator, other, another, range(2, 4))
    accelerator.free_memory()
    ordinary(accelerator, model, optimizer, range(4, 6))
    model, optimizer = accelerator.prepare(raw, sgd(raw))
    ordinary(accelerator, model, optimizer, range(6, 8))
    return evaluated(model, other)


def synchronized() -> dict[str, bool]:
    return {
        "in turn": as_with_ddp(in_turn),
        "accumulated": as_with_ddp(lambda make: accumulated(make, False)),
        "each micro-batch": as_with_ddp(lambda make: accumulated(make, True)),
        "own buffers": as_with_ddp(own_buffers),
        "prepared again": as_with_ddp(prepared_again),
    }


def copies() -> dict[str, bool]:
    """A prepared model is copied and saved whole; copies are of no session."""
    accelerator = PlannerAccelerator(cpu=True, timeout_s=77.0)
    model = accelerator.prepare(net())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    results = {"timeout": accelerator.sessions[0]._world.timeout_s == 77.0}
    for name, other in (("deepcopy", copy.deepcopy(model)), ("saved", torch.load(file, weights_only=False))):
        if dist.get_rank() == 0:  # alone: anything collective would hang
            with other.no_sync():
                other(data(0)[0]).sum().backward()
        results[name] = (other[0].weight.grad is not None) == (dist.get_rank() == 0)
    detach(accelerator.sessions[0])
    return results | {"plain again": not hasattr(model, "no_sync")}


class OnDevices(PlannerAccelerator):
    """Believes that it is on several GPUs, where Accelerate joins uneven inputs."""

    multi_device = True


def refusals() -> dict[str, str]:
    """What is refused, in words that are the same on all ranks."""
    accelerator = OnDevices(cpu=True)
    model = accelerator.prepare(net())
    with accelerator.join_uneven_inputs([model], even_batches=True):
        model(data(0)[0]).sum().backward()

    def uneven() -> None:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            raise AssertionError

    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    found = {
        "uneven": raised(uneven),
        "hook": raised(lambda: PlannerAccelerator(cpu=True, kwargs_handlers=[hook])),
    }
    accelerator.free_memory()
    return found


PLANS = {"exact": None, "late": LATE}


def resumed(folder: Path) -> dict[str, bool]:
    """Accelerate's checkpoints, of plans that shard the step too: a run goes on from them as one that never ended."""
    results = {}
    for name, updates in {**PLANS, "sharded": SHARED}.items():
        models = []
        for interrupted in (False, True):
            accelerator, model, optimizer = planned(updates)
            ordinary(accelerator, model, optimizer, range(3))
            if interrupted:
                where = folder / name
                accelerator.save_state(where)
                accelerator.free_memory()
                accelerator, model, optimizer = planned(updates, seed=5)
                accelerator.load_state(where)
            ordinary(accelerator, model, optimizer, range(3, 5))
            models.append(state(model))
            accelerator.free_memory()
        results[name] = same(*models)
    return results


def planned(updates: Any, seed: int = 0) -> tuple[PlannerAccelerator, nn.Module, Any]:
    model = net(seed)
    accelerator = PlannerAccelerator(cpu=True, plan=plan_for(model, updates))
    return accelerator, *accelerator.prepare(model, sgd(model))


def plan_for(model: nn.Module, updates: Any) -> Plan:
    return plan_of(model, 2) if updates is None else plan_of(model, 2, updates=updates)


def prepare_environment(folder: str) -> Path:
    """For runs of few steps, where ranks are those of this process group."""
    os.environ["PLANNER_CACHE"] = f"{folder}/cache"
    os.environ["LOCAL_RANK"], os.environ["PLANNER"] = os.environ["RANK"], "off"
    return Path(folder)


def run(folder: str) -> dict[str, Any]:
    """All of them."""
    where = prepare_environment(folder)
    return {
        "synchronized": synchronized(), "copies": copies(), "refusals": refusals(), "accelerate": resumed(where)
    }  # fmt: skip
