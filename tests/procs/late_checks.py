"""What the ranks of the tests of late gathers do: every look at weights between two steps, against gathers in the step.

Gathers are held until somebody waits (`late_links.Held`), so that a look that does not wait finds old weights every
time.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from late_links import Held, slow
from session_checks import plan_of
from sharded_checks import LATE, SHARED
from step_checks import raised
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import functional_call
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import runtime
from runtime.plan import StepPlan, UpdatePlan
from runtime.sharded.late_gather import LateStep

Kept = dict[str, Any]


class Past(nn.Linear):
    """Its weight is read by code that torch's functions know nothing of, as C++ would."""

    def forward(self, x: Tensor) -> Tensor:
        """As any linear layer's."""
        with torch._C.DisableTorchFunctionSubclass():
            return super().forward(x)


class Net(nn.Module):
    """A tied weight, a layer that is called twice, one that steps leave out, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.past = nn.Linear(6, 6), nn.Linear(6, 6), Past(6, 6)
        self.twin, self.out, self.side = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 6)
        self.twin.weight = self.middle.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.encoder = nn.TransformerEncoderLayer(6, 2, 6, dropout=0.0, batch_first=True)
        self.order = [self.first, self.middle, self.past]
        self.uses_side = True
        self.trap = self.recomputes = False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        for module in self.order:
            x = torch.tanh(checkpoint(module, x, use_reentrant=False) if self.recomputes else module(x))
        if self.trap:
            raise ArithmeticError("on purpose")
        x = self.middle(x) + self.twin(x)
        x = x + self.side(x) if self.uses_side else x
        x = self.encoder(x.unsqueeze(1)).squeeze(1)
        logits: Tensor = self.out(x) * self.scale
        return logits

    def encode(self, x: Tensor) -> Tensor:
        """Another method than forward, which calls no module."""
        return functional.linear(x, self.first.weight, self.first.bias) * self.scale


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's, float64."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return (
        torch.randn(4, 6, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (4,), generator=generator),
    )


def step_of(session: Any) -> LateStep:
    """The part that gathers."""
    (step,) = session._mode._steps.of.values()
    assert isinstance(step, LateStep)
    return step


def made(late: bool, *, held: bool = True, group: int = 3, timeout_s: float = 60) -> tuple[Net, Any, Any]:
    """A model, its optimizer and a session; of late gathers some are of one bucket and one is of two."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    plan = plan_of(model, group, updates=SHARED)
    if late:
        count = len(plan.buckets)
        gathers = ((count - 1,), tuple(range(count - 2, 0, -1))[:2], *((i,) for i in range(max(0, count - 3))))
        updates = UpdatePlan(step=StepPlan(sharded=True, gather="forward", gathers=gathers)) if count > 3 else LATE
        plan = plan_of(model, group, updates=updates)
    session = runtime.attach(model, optimizer, plan, timeout_s=timeout_s)
    if late and held:
        step_of(session)._communicator = Held(step_of(session)._communicator)
    return model, optimizer, session


def train(model: nn.Module, optimizer: Any, number: int, *, clip: bool = False) -> Tensor:
    """An ordinary step; returns the loss."""
    optimizer.zero_grad()
    x, y = batch(number)
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def awaited(session: Any) -> list[bool]:
    """By gather."""
    return [gather.awaited for gather in step_of(session)._gathers]


# Looks at weights, each of which gives numbers.


def _saved(model: Net, _: Kept) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def _pickled(model: Net, _: Kept) -> Any:
    return pickle.loads(pickle.dumps(model)).state_dict()


def _averaged(model: Net, kept: Kept) -> Any:
    kept.setdefault("average", AveragedModel(model)).update_parameters(model)
    return [one.clone() for one in kept["average"].parameters()]


def _kept_parameters(_: Net, kept: Kept) -> Any:
    return [parameter * 1.0 for parameter in kept["parameters"].values()]


def _shared(model: Net, kept: Kept) -> Any:
    other = kept.setdefault("other", nn.Linear(6, 3, bias=False).double())
    other.weight = model.out.weight
    return other(batch(900)[0])


def _from_a_thread(model: Net, _: Kept) -> Any:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(p * 1.0 for p in model.parameters()))
    thread.start()
    thread.join()
    return found


def _forked(model: Net, _: Kept) -> Any:
    """As in a DataLoader's worker, where no gather ends."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, pickle.dumps(model.out.weight.tolist()))
        os._exit(0)
    os.waitpid(child, 0)
    found = pickle.loads(os.read(reading, 2**16))
    os.close(reading)
    os.close(writing)
    return found


def _trapped(model: Net, _: Kept) -> Any:
    model.trap = True
    with suppress(ArithmeticError):
        model(batch(902)[0])
    model.trap = False
    return list(model.state_dict().values())


def _evaluated(model: Net, _: Kept) -> Any:
    model.eval()
    with torch.inference_mode():
        found = model(batch(903)[0]).clone()
    model.train()
    return found


def _part_evaluated(model: Net, _: Kept) -> Any:
    """Torch computes this layer otherwise where it has hooks."""
    model.encoder.eval()
    with torch.no_grad():
        found = model.encoder(batch(904)[0].unsqueeze(1))
    model.encoder.train()
    return found


def _loaded(model: Net, _: Kept) -> Any:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    return []


def _loaded_blindly(model: Net, kept: Kept) -> Any:
    """What comes later must not write over it."""
    model.load_state_dict(kept["first state"])
    return []


def _written(model: Net, _: Kept) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    nn.init.ones_(model.scale)
    return []


def _swapped(model: Net, _: Kept) -> Any:
    """A parameter becomes another tensor; who has it then looks at the model's memory."""
    other = nn.Parameter(model.side.weight.detach() * 0.5)
    model.out.bias.sum()
    torch.utils.swap_tensors(model.side.weight, other)  # type: ignore[no-untyped-call]
    return other * 1.0


def _swapped_blindly(model: Net, _: Kept) -> Any:
    other = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))
    torch.utils.swap_tensors(model.side.weight, other)
    return [other * 1.0, model.side.weight * 1.0]


def _moved(model: Net, _: Kept) -> Any:
    model.side.bias.data = torch.ones(6, dtype=torch.float64)
    return []


LOOKS: dict[str, Callable[[Net, Kept], Any]] = {
    "state_dict": lambda model, _: model.state_dict(),
    "of a part": lambda model, _: model.past.state_dict(),
    "keep_vars": lambda model, _: [one * 1.0 for one in model.state_dict(keep_vars=True).values()],
    "torch.save": _saved,
    "pickle": _pickled,
    "parameters": lambda model, _: [parameter.data for parameter in model.parameters()],
    "parameters kept": _kept_parameters,
    "in the optimizer": lambda _, kept: [p.norm() for p in kept["optimizer"].param_groups[0]["params"]],
    "deepcopy": lambda model, _: list(copy.deepcopy(model).parameters()),
    "deepcopy of one": lambda model, _: [copy.deepcopy(model.scale), copy.copy(model.out.bias)],
    "form of a pickle": lambda model, _: model.scale.__reduce_ex__(2)[0].__name__,
    "average": _averaged,
    "numpy": lambda model, _: torch.from_numpy(model.out.weight.detach().numpy().copy()),
    "number": lambda model, _: [model.scale.item(), str(model.out.bias), model.side.bias.tolist()],
    "vector": lambda model, _: nn.utils.parameters_to_vector(model.parameters()),
    "foreach": lambda model, _: torch._foreach_norm(list(model.parameters())),
    "a method": lambda model, _: model.encode(batch(905)[0]),
    "a module": lambda model, _: model.past(batch(906)[0]),
    "recomputed": lambda model, _: checkpoint(model.past, batch(907)[0].requires_grad_(), use_reentrant=True),
    "another model": _shared,
    "a thread": _from_a_thread,
    "a process": _forked,
    "functional": lambda model, _: functional_call(model, dict(model.named_parameters()), batch(901)[0]),
    "evaluated": _evaluated,
    "a part evaluated": _part_evaluated,
    "raised": _trapped,
    "loaded": _loaded,
    "loaded blindly": _loaded_blindly,
    "written": _written,
    "wait_for_weights": lambda _, kept: kept["session"].wait_for_weights(),
    "optimizer_state_dict": lambda _, kept: list(kept["session"].optimizer_state_dict()["state"][0].values()),
    "report": lambda model, kept: [str(kept["session"].report()) and 0, *model.parameters()],
    "moved": _moved,
}
"""(model, what the script keeps) → numbers."""
LAST = {"swapped": _swapped, "swapped blindly": _swapped_blindly}
"""Those after which the model's tensors are others than the optimizer's."""


def leaves(found: Any) -> list[Any]:
    """Tensors, cut off from memory and graphs, and other values."""
    return [one.detach().clone() if isinstance(one, Tensor) else one for one in torch.utils._pytree.tree_leaves(found)]


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def _kept(model: Net, optimizer: Any, session: Any) -> Kept:
    return {
        "parameters": dict(model.named_parameters()), "optimizer": optimizer, "session": session,
        "first state": copy.deepcopy(model.state_dict()),
    }  # fmt: skip


def looks() -> dict[str, bool]:
    """Each after a step, with the weights of that step, and none is lost for the next one."""
    results = {}
    sides = [made(late) for late in (False, True)]
    kept = [_kept(*side) for side in sides]
    for number, (name, look) in enumerate((LOOKS | LAST).items()):
        if name in LAST:
            sides = [made(late) for late in (False, True)]
            kept = [_kept(*side) for side in sides]
        found = []
        for (model, optimizer, session), things in zip(sides, kept, strict=True):
            loss = train(model, optimizer, number)
            if session.plan.gathers is not None and number:
                ahead = all(awaited(session)) or name in ("moved", *LAST)
                results[f"{name}: weights are on their way"] = ahead
            found.append([loss, *leaves(look(model, things))])
        results[name] = equal(*found)
    for (model, optimizer, _), _things in zip(sides, kept, strict=True):
        train(model, optimizer, 99)
    for *_, session in sides:
        session.detach()
    results["in the end"] = equal(*([*leaves(list(model.parameters()))] for model, *_ in sides))
    results["plain in the end"] = all(
        type(p) is nn.Parameter and "_from" not in vars(p) for model, *_ in sides for p in model.parameters()
    ) and not any(module._forward_pre_hooks for model, *_ in sides for module in model.modules())
    return results


def aliases() -> dict[str, bool]:
    """Whose memory somebody looks at beside the parameter comes in the step: a tensor that was kept has new numbers."""
    model, optimizer, session = made(True)
    results = {}
    train(model, optimizer, 0)
    session.wait_for_weights()
    for name, keep in {
        "detached": lambda p: p.detach(), "data": lambda p: p.data, "numpy": lambda p: p.detach().numpy(),
        "row": lambda p: p.detach()[0], "storage": lambda p: p.untyped_storage(),
    }.items():  # fmt: skip
        alias = keep(model.out.weight)
        train(model, optimizer, 1)
        which = next(g for g in step_of(session)._gathers if any(p is model.out.weight for p in g.parameters))
        results[f"{name}: in the step"] = not which.awaited and any(awaited(session))
        values = torch.tensor(alias.tolist(), dtype=torch.float64) if name != "storage" else None
        expected = model.out.weight.detach() if name != "row" else model.out.weight.detach()[0]
        results[name] = values is None or torch.equal(values, expected)
        session.wait_for_weights()
        del alias, expected, which
        train(model, optimizer, 2)
        results[f"{name}: let go"] = all(awaited(session))
    session.detach()
    return results


# What forwards do.


def _reordered(model: Net, number: int) -> None:
    model.order = [model.order[1], model.order[2], model.order[0]]


def _skipping(model: Net, number: int) -> None:
    model.uses_side = number % 2 == 0


def _recomputing(model: Net, number: int) -> None:
    model.recomputes = True


def _raising(model: Net, number: int) -> None:
    _trapped(model, {})


def _evaluating(model: Net, _: int) -> None:
    if dist.get_rank() == 0:
        _evaluated(model, {})


def _two_forwards(model: Net, number: int) -> None:
    one, two = (functional.cross_entropy(model(x), y) for x, y in (batch(500 + number), batch(600 + number)))
    (one + two).backward()


FORWARDS: dict[str, Callable[[Net, int], None]] = {
    "reordered": _reordered, "skipping": _skipping, "recomputing": _recomputing, "raising": _raising,
    "one rank evaluates": _evaluating, "two forwards": _two_forwards,
}  # fmt: skip
"""(model, step): before each step."""


def forwards() -> dict[str, bool]:
    """The same losses and weights whatever runs, in whatever order, on whatever rank."""
    results = {}
    with slow():
        for name, before in FORWARDS.items():
            losses, ends = list[list[Tensor]](), []
            for late in (False, True):
                model, optimizer, session = made(late, held=False, group=1 if name == "skipping" else 3)
                losses.append([])
                for number in range(4):
                    before(model, number)
                    losses[-1].append(train(model, optimizer, number, clip=number % 2 == 1))
                session.detach()
                ends.append(leaves(list(model.parameters())))
            results[name] = equal(*losses) and equal(*ends)
    return results


def compiled() -> dict[str, bool]:
    """Programs that torch has compiled or scripted, whose parameters are those that they know."""
    results = {}
    for name in ("around", "in place", "a part", "scripted part", "a function"):
        ends, graphs = [], []
        for late in (False, True):
            torch._dynamo.reset()
            counters.clear()
            model, optimizer, session = made(late)
            call: Any = model
            if name == "around":
                call = torch.compile(model, backend="eager")
            elif name == "in place":
                model.compile(backend="eager")
            elif name == "a part":
                model.side.compile(backend="eager")
            elif name == "scripted part":
                model.side = torch.jit.script(model.side)  # type: ignore[assignment]
            else:
                call = torch.compile(partial(_called, model), backend="eager")
            for number in range(4):
                train(call, optimizer, number) if name != "a function" else _train_function(call, optimizer, number)
            session.detach()
            ends.append(leaves(list(model.parameters())))
            graphs.append(counters["stats"]["unique_graphs"])
        results[name] = equal(*ends)
        results[f"{name}: as often, {graphs}"] = graphs[0] == graphs[1]
    torch._dynamo.reset()
    return results


def _called(model: nn.Module, x: Tensor) -> Any:
    return model(x)


def _train_function(call: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    x, y = batch(number)
    functional.cross_entropy(call(x), y).backward()
    optimizer.step()


def reported() -> dict[str, bool]:
    """Gathers lie at the start of the measured step, beside forward, and are no part of the update."""
    with slow():
        model, optimizer, session = made(True, held=False)
        for number in range(4):
            train(model, optimizer, number)
        report = session.report()
    session.detach()
    tasks = [span.task for span in report.timeline.spans if "all_gather" in span.task]
    expected = [
        f"bucket{'s' if group[1:] else ''} {', '.join(map(str, group))} all_gather" for group in session.plan.gathers
    ]
    return {
        "gathers": tasks == expected,
        f"waited {report.step}": report.step.waited_us > 0.0,
        "not in the update": report.step.gather_us < sum(one.end_us - one.start_us for one in report.step.late),
        "said": "beside the next forward, which waited" in str(report),
        "interface": "; interface late-gather" in str(report),
    }


def dropped() -> dict[str, bool]:
    """A parameter that outlives its session, of which the weights were on their way, is refused."""
    model, optimizer, session = made(True)
    train(model, optimizer, 0)
    kept = model.scale
    step_of(session)._communicator.wait()  # so that no rank is missed
    del model, optimizer, session
    gc.collect()
    return {"refused": "were dropped; expected it to be read" in raised(lambda: kept + 1.0)}


def profiled() -> dict[str, bool]:
    """A profiler notes messages that end in the step, and none that may still be on its way when it stops."""
    model, optimizer, session = made(True, held=False)
    x, y = batch(0)
    loss = functional.cross_entropy(model(x), y)
    with torch.profiler.profile() as backward:
        loss.backward()
    with torch.profiler.profile() as step:
        optimizer.step()
    session.detach()
    noted = [any("gloo" in event.name for event in one.events()) for one in (backward, step)]
    return {"backward": noted[0], "step": not noted[1]}


def failing() -> dict[str, Any]:
    """A rank that makes no step is waited for until the deadline, by whoever looks; then nobody gets old weights."""
    model, optimizer, session = made(True, held=False, timeout_s=2)
    train(model, optimizer, 0)
    session.wait_for_weights()
    optimizer.zero_grad()
    x, y = batch(1)
    functional.cross_entropy(model(x), y).backward()
    if dist.get_rank() == 1:
        time.sleep(6)
        with suppress(Exception):
            session.detach()
        return {}
    optimizer.step()
    said = raised(lambda: model.out.weight + 1.0)
    again = raised(model.state_dict)
    with suppress(Exception):
        session.detach()
    return {
        "said": said, "again": again == said,
        "nothing old": all(bool(torch.isnan(p).all()) for p in model.parameters() if p.numel()),
    }  # fmt: skip


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "looks": looks, "aliases": aliases, "forwards": forwards, "compiled": compiled, "reported": reported,
    "dropped": dropped, "profiled": profiled,
}  # fmt: skip


def run() -> dict[str, Any]:
    """Everything; the last check breaks the group."""
    results: dict[str, Any] = {name: check() for name, check in CHECKS.items()}
    if dist.get_world_size() == 2:
        results["failing"] = failing()
    return results


def ends_early() -> bool:
    """The last rank's script ends right after its last step, the other one looks at weights a little later."""
    with slow(0.1):
        model, optimizer, session = made(True, held=False)
        train(model, optimizer, 0)
        if dist.get_rank() == 1:
            session.own = (model, optimizer)  # as a script's globals do
            return True
        time.sleep(1.0)
        return not any(bool(torch.isnan(p).any()) for p in model.parameters()) and all(awaited(session)) is False
