"""What the ranks of the tests of shared steps do: hooks on the step, resets of the optimizer's state, as with DDP."""

from __future__ import annotations

import copy
import io
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_model
from session_checks import plan_of
from sharded_checks import LATE, SHARED, Net, loss_of, plain, same
from step_checks import raised
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel

import runtime

HOWS = {"DDP": None, "shared": SHARED, "late": LATE}
Optimizer = torch.optim.Optimizer


class Decayed(torch.optim.SGD):
    """Its step calls that of its base class, around which torch calls all hooks again."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        """Decay every weight, then as SGD."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.9)
        return super().step(closure)


def adam(parameters: Any) -> Optimizer:
    """AdamW, in two groups."""
    first, *rest = parameters
    return torch.optim.AdamW([{"params": rest}, {"params": [first], "lr": 0.1}], lr=1e-2)


def _attached(model: nn.Module, optimizer: Optimizer, how: str) -> tuple[nn.Module, Any]:
    """What a script calls, and its session."""
    if HOWS[how] is None:
        return DistributedDataParallel(model), None
    return model, runtime.attach(model, optimizer, plan_of(model, 3, updates=HOWS[how]), timeout_s=60)


def _hooked(how: str, make: Callable[[Any], Optimizer]) -> list[Any]:
    """What hooks see that were there before and that came later: before a step shapes, behind it weights."""
    model, seen = Net().double(), list[Any]()
    optimizer = make(model.parameters())

    def before(_of: Optimizer, *_: Any) -> None:
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        seen.extend((tuple(p.shape), p.grad is not None and p.grad.shape == p.shape) for p in listed)

    def after(_of: Optimizer, *_: Any) -> None:
        seen.extend(p.detach().clone() for group in optimizer.param_groups for p in group["params"])

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    schedulers: list[Any] = [lr_scheduler.ExponentialLR(optimizer, 0.9)]
    call, session = _attached(model, optimizer, how)
    hooks += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    hooks += [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    schedulers.append(lr_scheduler.ExponentialLR(optimizer, 0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = type(optimizer).step
    for number in range(4):
        optimizer.zero_grad()
        loss = loss_of(call, number)
        if number == 1:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            step(optimizer) if number == 2 else optimizer.step()  # the former passes by what is on the instance
        for scheduler in schedulers:
            scheduler.step()
    for hook in hooks:
        hook.remove()
    if session is not None:
        session.detach()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def hooks() -> dict[str, bool]:
    """Whole parameters, before and behind a step, whenever hooks are registered."""
    results = {}
    for name, make in {"AdamW": adam, "derived": lambda p: Decayed(p, lr=0.1, momentum=0.9)}.items():
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # schedulers miss one step
            expected, *found = [_hooked(how, make) for how in HOWS]
        results |= {f"{name}, {how}": equal(expected, one) for how, one in zip(list(HOWS)[1:], found, strict=True)}
    return results


def equal(one: list[Any], other: list[Any]) -> bool:
    """Tensors as `same`, other values equal."""
    tensors, others = [[x for x in of if isinstance(x, Tensor)] for of in (one, other)]
    values = [[x for x in of if not isinstance(x, Tensor)] for of in (one, other)]
    return same(tensors, others) and values[0] == values[1]


# Resets: (model, optimizer).


def _warm_restart(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for key in list(state):
            state[key].zero_()


def _fresh(model: nn.Module, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        state["exp_avg_sq"].mul_(0.5)
        nn.init.constant_(state["exp_avg"], 1e-3)


def _empty(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in [p for group in optimizer.param_groups for p in group["params"]][::2]:
        optimizer.state[parameter] = {}


def _deleted(model: nn.Module, optimizer: Optimizer) -> None:
    for number, parameter in enumerate(list(optimizer.state)):
        if number % 2:
            del optimizer.state[parameter]
        else:
            optimizer.state.pop(parameter)
    assert not optimizer.state


def _cleared(model: nn.Module, optimizer: Optimizer) -> None:
    assert len(optimizer.state) == len(list(model.parameters()))
    optimizer.state.clear()


def _replaced(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def _of_own(model: nn.Module, optimizer: Optimizer) -> None:
    for number, parameter in enumerate(model.parameters()):
        values = torch.arange(parameter.numel(), dtype=parameter.dtype).view_as(parameter)
        state = {"step": torch.tensor(number + 1.0), "exp_avg": values * 1e-3, "exp_avg_sq": values + 1.0}
        optimizer.state[parameter].update(state)


def _put_back(model: nn.Module, optimizer: Optimizer) -> None:
    saved = {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
    copied = copy.deepcopy(dict(optimizer.state[model.out.weight]))  # type: ignore[index]
    _warm_restart(model, optimizer)
    optimizer.state.update(saved)
    optimizer.state[model.out.weight] = copied  # type: ignore[index]


def _loaded(model: nn.Module, optimizer: Optimizer) -> None:
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        number: {"step": torch.tensor(2.0)} | {k: torch.full_like(p, 0.5) for k in ("exp_avg", "exp_avg_sq")}
        for number, p in enumerate(listed)
    }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    count = 0
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = list(range(count, count := count + len(own["params"])))
    handle = optimizer.register_load_state_dict_post_hook(
        lambda of: [entries["exp_avg"].copy_(entries["exp_avg_sq"] * 0.1) for entries in of.state.values()] and None
    )
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    handle.remove()


RESETS = (_warm_restart, _fresh, _empty, _deleted, _cleared, _replaced, _of_own, _put_back, _loaded)


def _reset(how: str, reset: Callable[[nn.Module, Optimizer], None]) -> list[Any]:
    model = Net().double()
    optimizer = adam(model.parameters())
    call, session = _attached(model, optimizer, how)
    for number in range(4):
        plain(call, optimizer, session, number)
        if number == 1:
            reset(model, optimizer)
    state = optimizer.state_dict() if session is None else session.optimizer_state_dict()
    if session is not None:
        session.detach()
    return [*model.parameters(), *(v for entries in state["state"].values() for v in entries.values())]


def resets() -> dict[str, bool]:
    """What scripts do to the optimizer's state between two steps; what would have to be read is refused."""
    results = {}
    for reset in RESETS:
        expected, *found = [_reset(how, reset) for how in HOWS]
        results |= {
            f"{reset.__name__}, {how}": equal(expected, one) for how, one in zip(list(HOWS)[1:], found, strict=True)
        }
    model = Net().double()
    optimizer = adam(model.parameters())
    _, session = _attached(model, optimizer, "shared")
    plain(model, optimizer, session, 0)
    for name, read in {
        "a sum": lambda v: v + 1.0, "numpy": lambda v: v.numpy(), "a norm": lambda v: v.norm(), "a row": lambda v: v[0],
    }.items():  # fmt: skip
        said = raised(lambda read=read: read(optimizer.state[model.out.weight]["exp_avg"]))  # type: ignore[index,misc]
        results[f"refused: {name}"] = "on exp_avg of out.weight in the optimizer's state, but" in said
    session.detach()
    results["plain again"] = type(optimizer.state) is defaultdict
    return results


# What libraries do: (model, optimizer, what the script keeps).


def _averaged(model: nn.Module, optimizer: Optimizer, kept: dict[str, Any]) -> Any:
    kept.setdefault("average", AveragedModel(model)).update_parameters(model)
    if "scheduler" in kept:
        kept["scheduler"].step()
    kept.setdefault("scheduler", SWALR(optimizer, 0.05))
    return [one.clone() for one in kept["average"].parameters()]


def _checkpointed(model: nn.Module, optimizer: Optimizer, kept: dict[str, Any]) -> Any:
    """By torch.distributed.checkpoint, which reads the model, and writes the model and the optimizer."""
    weights = get_model_state_dict(model)
    set_model_state_dict(model, {name: value * 0.9 for name, value in weights.items()})
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        name: {"step": torch.tensor(3.0)} | {key: torch.full_like(p, 0.1) for key in ("exp_avg", "exp_avg_sq")}
        for p, name in names.items()
    }
    groups = [group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups})
    return list(weights.values())


def _moved(model: nn.Module, optimizer: Optimizer, kept: dict[str, Any]) -> Any:
    """As Lightning moves state to its device."""
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = {key: value.to("cpu") for key, value in state.items()}
    return []


def _keyed(model: nn.Module, optimizer: Optimizer, kept: dict[str, Any]) -> Any:
    """Who is in groups and state, in which order, and in which form."""
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    places = {id(p): number for number, p in enumerate(model.parameters())}
    forms = [[(key, tuple(v.shape), v.dtype) for key, v in optimizer.state[p].items()] for p in listed]
    return [[places[id(p)] for p in listed], [places[id(p)] for p in optimizer.state], forms]


def _profiled(model: nn.Module, optimizer: Optimizer, kept: dict[str, Any]) -> Any:
    with torch.profiler.profile(profile_memory=True, with_stack=True):
        optimizer.step()
    return []


def _used(how: str, use: Callable[[nn.Module, Optimizer, dict[str, Any]], Any]) -> list[Any]:
    model, seen, kept = Net().double(), list[Any](), dict[str, Any]()
    optimizer = adam(model.parameters())
    call, session = _attached(model, optimizer, how)
    for number in range(3):
        plain(call, optimizer, session, number)
        seen += use(model, optimizer, kept)
    if session is not None:
        if use is _checkpointed:
            said = raised(lambda: get_optimizer_state_dict(model, optimizer))
            assert "expected session.optimizer_state_dict(), called on every rank" in said
        session.detach()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def libraries() -> dict[str, bool]:
    """Averages, checkpoints, profilers and what moves state find what they find with DDP."""
    results = {}
    for use in (_averaged, _checkpointed, _moved, _keyed, _profiled):
        expected, *found = [_used(how, use) for how in HOWS]
        results |= {
            f"{use.__name__}, {how}": equal(expected, one) for how, one in zip(list(HOWS)[1:], found, strict=True)
        }
    return results


def _bytes_of(saved: Any) -> int:
    file = io.BytesIO()
    torch.save(saved, file)
    return len(file.getvalue())


def storages() -> dict[str, bool]:
    """Parameters look as unrelated as they are to all that writes or copies them."""
    results = {}
    for how in ("shared", "late"):
        model, fresh = Net().double(), Net().double()
        optimizer = adam(model.parameters())
        _, session = _attached(model, optimizer, how)
        plain(model, optimizer, session, 0)
        with tempfile.NamedTemporaryFile() as file:
            save_model(model, file.name)
            fresh.load_state_dict(load_file(file.name))  # strictly: nothing is left out
        results[f"{how}: safetensors"] = same(model.parameters(), fresh.parameters())
        for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
            form = p.untyped_storage().nbytes(), p.storage_offset(), p.stride()
            results[f"{how}: {name}"] = form == (q.nbytes, 0, q.stride()) and _bytes_of(p) == _bytes_of(q)
        session.detach()
    return results


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    "hooks": hooks, "resets": resets, "libraries": libraries, "storages": storages,
}  # fmt: skip
