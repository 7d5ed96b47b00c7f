"""What the ranks of the tests of weights do: unlike numbers of samples, against one process that has all of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from hierarchy_reference import on_grid
from session_checks import digest, plan_of
from torch import Tensor, nn

import runtime
from planner.report.page import page_text
from runtime.checks.plan import check_plan
from runtime.errors import PlannerError, StragglerWarning
from runtime.plan import CompressorSpec, Plan, PlanBucket, StepPlan, UpdatePlan
from runtime.plan.document import DelaySpec, OuterSpec
from runtime.plan.transports import FLAT, TRANSPORTS, TWO_SHOT, Transport
from runtime.session.session import Session

STEPS = 3


class Net(nn.Module):
    """Two layers and one that is used where the inputs are positive on average."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rare, self.last = nn.Linear(7, 130), nn.Linear(130, 130), nn.Linear(130, 3)
        self.to(dtype)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        """Outputs of the last layer."""
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.rare(hidden)) if rare else hidden)


def samples(rank: int, step: int, dtype: torch.dtype = torch.float64, equal: bool = False) -> tuple[Tensor, Tensor]:
    """Rank's samples and targets of a micro-batch; unlike numbers of them, by rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    number = 4 if equal else 1 + (3 * rank + 5 * step) % 7
    x = torch.randn(number, 7, generator=generator, dtype=dtype)
    return x, torch.randn(number, 3, generator=generator, dtype=dtype)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    """A mean over samples."""
    return (model(x, **options) - y).square().mean(dim=1).mean()


def concatenated(step: int, micro_batches: int = 1, skipped: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """All ranks' samples of a step."""
    given = [
        samples(rank, micro_batches * step + micro)
        for micro in range(micro_batches)
        for rank in range(dist.get_world_size())
        if rank not in skipped
    ]
    return torch.cat([x for x, _ in given]), torch.cat([y for _, y in given])


def difference(model: nn.Module, reference: nn.Module) -> float:
    """Largest difference of weights over the largest weight."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def alone(micro_batches: int = 1, **options: Any) -> nn.Module:
    """The reference: one process with all samples."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *concatenated(step, micro_batches), **options).backward()
        optimizer.step()
    return model


def trained(
    plan: Callable[[nn.Module], Plan], micro_batches: int = 1, *, asks: bool = False, **options: Any
) -> nn.Module:  # fmt: skip
    """Ranks with unlike numbers of samples, each of which gives its own; `asks`: where the session asks for it."""
    model, number = Net(), [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if asks:
        options["weight"] = lambda: number[0]
    session = runtime.attach(model, optimizer, plan(model), guard=False, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            x, y = samples(dist.get_rank(), micro_batches * step + micro)
            number[0] = len(x)
            if not asks:
                session.weight(len(x))
            with session.no_sync() if micro + 1 < micro_batches else nullcontext():
                (loss_of(model, x, y) / micro_batches).backward()
        optimizer.step()
    session.wait_for_weights()
    session.detach()
    return model


def sent_by(transport: Transport, spec: CompressorSpec, model: nn.Module) -> Plan:
    """All buckets are sent so."""
    accuracy = "exact" if spec.name == "none" else "bounded"
    buckets = tuple(PlanBucket(gradients=one.gradients).sent_by(transport, spec) for one in plan_of(model, 2).buckets)
    return plan_of(model, 2, accuracy=accuracy, buckets=buckets)


def sharded(model: nn.Module, **step: Any) -> Plan:
    """Ranks share the optimizer's step."""
    return plan_of(model, 2, updates=UpdatePlan(step=StepPlan(sharded=True, **step)))


def like_one_process() -> dict[str, float]:
    """Largest relative difference of weights from one process with all samples, by way of sending."""
    torch.set_num_threads(1)
    expected, accumulated = alone(), alone(3)
    results = {}
    nodes, ranks_per_node = (2, 2) if dist.get_world_size() == 4 else (1, dist.get_world_size())
    with on_grid(nodes, ranks_per_node) as group:
        for transport in TRANSPORTS.values():
            for spec in (CompressorSpec(name="none"), CompressorSpec(name="topk", density=1.0)):
                plan = partial(sent_by, transport, spec)
                if check_plan(dict(Net().named_parameters()), plan(Net()), dist.get_world_size()) is None:
                    model = trained(plan, process_group=group)
                    results[f"{transport} {spec.name}"] = difference(model, expected)
        results["sharded"] = difference(trained(sharded, process_group=group), expected)
        results["late gather"] = difference(trained(partial(sharded, gather="forward"), process_group=group), expected)
    results["asked"] = difference(trained(lambda model: plan_of(model, 2), asks=True), expected)
    owned = partial(sharded, owners={"last.weight": 0, "first.weight": 1})
    results["owners"] = difference(trained(owned), expected)
    results["accumulated"] = difference(trained(lambda model: plan_of(model, 2), 3), accumulated)
    results["sharded, accumulated"] = difference(trained(sharded, 3), accumulated)
    return results


EQUAL: dict[str, Callable[[nn.Module], Plan]] = {
    "plain": lambda model: plan_of(model, 2),
    "sharded": sharded,
    "late gather": partial(sharded, gather="forward"),
    "narrow": partial(sent_by, TWO_SHOT, CompressorSpec(name="wire", dtype="int8")),
    "sparse": partial(sent_by, FLAT, CompressorSpec(name="topk", density=0.3)),
}


def equal_weights() -> dict[str, bool]:
    """By plan, whether equal weights lead to the bits of none, with and without accumulation."""
    torch.set_num_threads(1)

    def run(plan: Callable[[nn.Module], Plan], micro_batches: int, weight: float | None) -> str:
        model = Net(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session = runtime.attach(model, optimizer, plan(model), guard=False)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step != 1)
            for micro in range(micro_batches):
                if weight is not None:
                    session.weight(weight)
                with session.no_sync() if micro + 1 < micro_batches else nullcontext():
                    x, y = samples(dist.get_rank(), micro_batches * step + micro, torch.float32, equal=True)
                    loss_of(model, x, y).backward()
            optimizer.step()
        session.wait_for_weights()
        session.detach()
        return digest(model)

    return {
        f"{name}, {micro_batches}": len({run(plan, micro_batches, weight) for weight in (None, 4, 0.1)}) == 1
        for name, plan in EQUAL.items()
        for micro_batches in (1, 3)
    }


def bits_of_float32() -> float:
    """Error of a weighted mean of given gradients in units in the last place of the largest element."""
    model = nn.Linear(300, 400, bias=False)
    session = runtime.attach(model, None, plan_of(model, 1))
    worst = 0.0
    for step in range(STEPS):
        generator, weights = torch.Generator().manual_seed(step), [3 + step, 11, 7, 5][: dist.get_world_size()]
        everyone = [torch.randn(400, 300, generator=generator) for _ in weights]
        model.zero_grad()
        session.weight(weights[dist.get_rank()])
        model.weight.backward(everyone[dist.get_rank()])
        mean = sum(n * one.double() for n, one in zip(weights, everyone, strict=True)) / sum(weights)
        assert model.weight.grad is not None
        largest = mean.abs().max().float()
        ulp = float(torch.nextafter(largest, torch.tensor(torch.inf)) - largest)
        worst = max(worst, float((model.weight.grad.double() - mean).abs().max()) / ulp)
    session.detach()
    return worst


def narrow_mean() -> float:
    """Largest difference from one process where buckets are sent in bfloat16, over the largest weight."""
    plan = partial(sent_by, TWO_SHOT, CompressorSpec(name="wire", dtype="bfloat16"))
    return difference(trained(plan), alone())


def raised(call: Callable[[], object]) -> str:
    """Name and text of the error."""
    try:
        call()
    except PlannerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals() -> dict[str, str]:
    """What is said of weights that are none."""
    rank, found = dist.get_rank(), {}

    def step(session: Session, weight: object) -> Callable[[], None]:
        def run() -> None:
            if weight is not None:
                session.weight(weight)  # type: ignore[arg-type]
            loss_of(session.model, *samples(rank, 0)).backward()

        return run

    model = Net()
    with attached(model) as session:
        for value in (-1, float("nan"), float("inf"), "many"):
            found[f"weight of {value}"] = raised(step(session, value))
        found["first step"] = raised(step(session, 2))
        found["zero everywhere"] = raised(step(session, 0))
        model.zero_grad()
        found["after an error"] = raised(step(session, 2))
        found["missing later"] = raised(step(session, 2 if rank == 0 else None))
    with attached(model) as session:
        found["on one rank"] = raised(step(session, 2 if rank == 0 else None))
        model.zero_grad()
        found["then on all"] = raised(step(session, 2))
    with attached(model) as session:
        found["elsewhere"] = raised(step(session, 2) if rank else lambda: list(session.batches([1])))
    with attached(model, weight=lambda: 2.0 if rank == 0 else float("nan")) as session:
        found["asked for nan"] = raised(step(session, None))
    with attached(model) as session:
        found["none"] = raised(step(session, None))
        found["begun later"] = raised(step(session, 2))
    delay = DelaySpec(steps=2, warmup_steps=2)
    plan = plan_of(model, 2, accuracy="relaxed", delay=delay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    delayed = runtime.attach(model, optimizer, plan)
    found["delay"] = raised(lambda: delayed.weight(1))
    delayed.detach()
    found["asked with delay"] = raised(lambda: runtime.attach(model, optimizer, plan, weight=lambda: 1.0))
    outer = plan_of(model, 2, accuracy="relaxed", outer=OuterSpec(every=2))
    found["asked with outer steps"] = raised(lambda: runtime.attach(model, optimizer, outer, weight=lambda: 1.0))
    return found


@contextmanager
def attached(model: nn.Module, plan: Plan | None = None, **options: Any) -> Iterator[Session]:
    """A session of a model alone."""
    session = runtime.attach(model, None, plan_of(model, 2) if plan is None else plan, **options)
    try:
        yield session
    finally:
        session.detach()
        model.zero_grad()


def zero_weight() -> dict[str, bool]:
    """A rank that contributes zeros: no NaN, no parameter and no buffer comes from it."""
    rank, last, found = dist.get_rank(), dist.get_world_size() - 1, {}
    for name, plan in {"plain": plan_of(Net(), 2), "sharded": sharded(Net())}.items():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = runtime.attach(model, optimizer, plan)
        for step in range(2):
            x, y = samples(rank, step)
            if rank == last:
                x = x * torch.nan
            optimizer.zero_grad()
            session.weight(0 if rank == last else len(x))
            loss_of(model, x, y, rare=rank == last).backward()
            optimizer.step()
            unused = model.rare.weight.grad is None and model.rare.bias.grad is None
            found[f"{name}, unused {step}"] = unused
        session.detach()
        reference = Net()
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(reference, *concatenated(step, skipped=[last])).backward()
            optimizer.step()
        found[name] = difference(model, reference) < 1e-12
    norm = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with attached(norm) as session:
        session.weight(0 if rank == 0 else 2)
        x = torch.full((2, 7), float(rank)) + torch.arange(2.0)[:, None]
        expected = norm[0](torch.ones(2, 7) + torch.arange(2.0)[:, None]).mean(0).detach() * 0.1
        norm(x).sum().backward()
        found["buffers"] = bool(torch.allclose(norm[1].running_mean, expected, atol=1e-6))
    return found


def taken_by_weights() -> list[tuple[int, int]]:
    """Messages of weights, and gradients that are weighed, in all steps so far: equal weights, but for one rank's in
    the third step.
    """
    model, counts = Net(), []
    with attached(model) as session:
        session._weights._send = sent = Mock(wraps=session._weights._send)  # type: ignore[method-assign]
        session._exchange.weighed = weighed = Mock(wraps=session._exchange.weighed)  # type: ignore[method-assign]
        for step in range(4):
            model.zero_grad()
            session.weight(3 if step == 2 and dist.get_rank() == 1 else 2)
            loss_of(model, *samples(0, step), rare=True).backward()
            counts.append((sent.call_count, weighed.call_count))
    return counts


def kept_average() -> float:
    """Difference from the sum of two weighted means, where a script does not zero the first."""
    model, reference = Net(), Net()
    with attached(model) as session:
        for step in range(2):
            x, y = samples(dist.get_rank(), step)
            session.weight(len(x))
            loss_of(model, x, y).backward()
            loss_of(reference, *concatenated(step)).backward()
        pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
        return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)


def uneven_batches(with_weights: bool) -> tuple[float, int, list[int], str]:
    """Training over unlike numbers of batches, with others in between: difference from one process, samples that
    counted, batches of this rank's loop, and what is said where a rank has none.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = [dict(zip("xy", samples(rank, step), strict=True)) for step in range(1 + 2 * rank)]
    model, reference = Net(), Net()
    optimizer, alike = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference))
    session = runtime.attach(model, optimizer, plan_of(model, 2))
    counted, seen = 0, []
    for batch in session.batches(mine):
        x, y = batch.pop("x"), batch.pop("y")
        for _ in session.batches([x] * (1 + rank)):
            pass
        seen.append(len(x))
        if with_weights:
            counted += int(session.weight(len(x)))
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for step in range(1 + 2 * (ranks - 1)):
        given = [samples(one, step) for one in range(ranks) if step < 1 + 2 * one]
        alike.zero_grad()
        if with_weights:
            loss = loss_of(reference, torch.cat([x for x, _ in given]), torch.cat([y for _, y in given]))
        else:
            loss = torch.stack([loss_of(reference, x, y) for x, y in given]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        alike.step()
    empty = raised(lambda: list(session.batches(mine if rank else [])))
    session.detach()
    return difference(model, reference), counted, seen, empty


def continued() -> bool:
    """Whether a run that stops and continues from its state ends with the bits of one that does not."""
    ends = []
    for stops in (False, True):
        model = Net(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = EQUAL["sparse"](model)
        session = runtime.attach(model, optimizer, plan, guard=False)
        for step in range(4):
            if stops and step == 2:
                state = session.state_dict()
                session.detach()
                session = runtime.attach(model, optimizer, plan, guard=False)
                session.load_state_dict(state)
            x, y = samples(dist.get_rank(), step, torch.float32)
            optimizer.zero_grad()
            session.weight(len(x))
            loss_of(model, x, y).backward()
            optimizer.step()
        session.detach()
        ends.append(digest(model))
    return ends[0] == ends[1]


class Slow(nn.Module):
    """Rank 1 computes for longer."""

    def __init__(self, compute_s: float, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7, dtype=torch.float64) if norm else nn.Identity()
        self.net, self.compute_s = Net(), compute_s

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, late."""
        time.sleep(self.compute_s)
        return self.net(self.norm(x))


def loaded(late_s: float) -> Iterator[Tensor]:
    """Inputs of some steps, late."""
    for _ in range(21):
        time.sleep(late_s)
        yield samples(0, 1)[0]


def late_rank() -> dict[str, tuple[list[str | None], list[str], int, bool, list[float]]]:
    """Of a rank that computes or loads for longer: causes by rank, what was said, the last rank, whether pages show it,
    times of compute. `batches`: in their loop; `buffers`: the last rank is the first, whose buffers are waited for.
    """
    found = {}
    for cause in ("compute", "input", "batches", "buffers"):
        late_s = 0.01 if dist.get_rank() == (0 if cause == "buffers" else 1) else 0.0
        model = Slow(late_s if cause == "compute" else 0.0, cause == "buffers")
        with warnings.catch_warnings(record=True) as said, attached(model) as session:
            warnings.simplefilter("always")
            inputs = loaded(0.0 if cause == "compute" else late_s)
            for x in session.batches(inputs) if cause == "batches" else inputs:
                model.zero_grad()
                model(x).sum().backward()
            report = session.report()
            page = page_text(session.plan, report.measured)
            compute_us, last = list(session._monitor.arrivals.compute_us), int(session.metrics()["straggler"])
        texts = [str(one.message) for one in said if one.category is StragglerWarning]
        shown = "Who waits for whom" in page and "rank 1 arrives last at" in str(report)
        found[cause] = [row.cause for row in report.arrivals], texts, last, shown, compute_us
    return found


def all_checks() -> dict[str, Any]:
    """Every check of this module, by name."""
    return {
        "like_one_process": like_one_process(), "equal_weights": equal_weights(), "bits_of_float32": bits_of_float32(),
        "narrow_mean": narrow_mean(), "refusals": refusals(), "zero_weight": zero_weight(),
        "kept_average": kept_average(),
        "continued": continued(), "taken": taken_by_weights(),
        "late_rank": late_rank() if dist.get_world_size() == 2 else None,
        "batches": uneven_batches(True), "unweighted batches": uneven_batches(False),
    }  # fmt: skip


def stops_early() -> str:
    """What the other ranks hear of a rank whose script ends its loop without `session.batches`."""
    model = Net()
    session = runtime.attach(model, None, plan_of(model, 2), timeout_s=100.0)

    def run() -> None:
        for step in range(1 if dist.get_rank() == 0 else 3):
            session.weight(2)
            loss_of(model, *samples(0, step)).backward()

    begun_s = time.monotonic()
    found = raised(run)
    session.detach()
    return f"{found} {'at once' if time.monotonic() - begun_s < 50 else 'late'}"
