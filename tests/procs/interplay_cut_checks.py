"""`attach(compile=...)`: one graph that is cut where the plan says, against DDP around the same compiled regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from interplay_harness import SGD, Chain, Side, compare, outcome, ranks_agree, told
from session_checks import plan_of
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import runtime
from runtime.core.compiled import CompiledModel, CutBackend, blocks_of
from runtime.errors import InputError, PlanMismatch
from runtime.torch_compat import find_backend

STEPS = 3
CUTS = ("blocks.1", "head")


class Blocks(nn.Module):
    """A list of blocks; with activation checkpoints, with a graph break behind them, or with hooks that matter."""

    def __init__(self, *, checkpoints: bool = False, breaks: bool = False, hooks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3))
        self.checkpoints, self.breaks = checkpoints, breaks
        for module in (self.blocks[1], self.blocks[1][0], self.head) if hooks else ():
            module.register_forward_pre_hook(lambda _, given: (1.5 * given[0],))
            module.register_forward_hook(_halve)
            next(module.parameters()).register_hook(lambda gradient: 1.25 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        if self.breaks:  # in the loop torch would compile nothing
            torch._dynamo.graph_break()
        result: Tensor = self.head(x)
        return result


def _halve(_module: nn.Module, _given: Any, output: Tensor) -> Tensor:
    """Halve an output and, once more, its gradient."""
    output.register_hook(lambda gradient: 0.5 * gradient)
    return 0.5 * output


def _train(side: Side, sizes: Callable[[int], int], seen: list[list[str]] | None = None) -> None:
    """Steps with accumulation. `sizes`: of the batch, by its number. `seen`: gets gradients as they come."""
    for number in range(2 * STEPS):
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(1000 * number + rank)
        size = sizes(number)
        x, y = torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)
        if number % 2 == 0:
            side.optimizer.zero_grad()
        with side.no_sync() if number % 2 == 0 else nullcontext():
            loss = functional.cross_entropy((side.forward.forward if number == 3 else side.forward)(x), y)
        if seen is not None:
            seen.append([])
        loss.backward()
        if number % 2:
            side.optimizer.step()


def _cut(side: Side, cuts: tuple[str, ...], backend: str, dynamic: bool | None = None) -> None:
    """Compile the model of the reference in the same regions."""
    compiler = find_backend(backend)
    assert compiler is not None
    blocks = [side.model.get_submodule(name) for name in cuts]
    side.model.compile(backend=CutBackend(blocks, compiler), dynamic=dynamic)


def _sizes(number: int, *, changing: bool) -> int:
    """Sizes that change on one rank alone, so that it compiles again while the other one waits."""
    return 5 + (number >= 2 and changing and torch.distributed.get_rank() == 0) * number


def cut(
    *, compiled: str = "", backend: str = "aot_eager", changing: bool = False, dynamic: bool | None = None,
    **model: bool,
) -> dict[str, bool]:  # fmt: skip
    """Weights, statistics and optimizer state; and whether gradients come region by region, from the back."""
    sizes = partial(_sizes, changing=changing)
    torch._dynamo.reset()
    made = Blocks(**model)
    reference = Side(made, DistributedDataParallel(made), SGD(made.parameters()), None)
    _cut(reference, CUTS, backend, dynamic)
    _train(reference, sizes)
    torch._dynamo.reset()
    made = Blocks(**model)
    target: nn.Module = made
    if compiled == "around":
        target = torch.compile(made, backend=backend)
    elif compiled == "in place":
        made.compile(backend=backend)
    before = made._compiled_call_impl
    optimizer, came = SGD(made.parameters()), list[list[str]]()
    for name, parameter in made.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came[-1].append(name))
    given = {"backend": backend, "dynamic": dynamic}
    session = runtime.attach(target, optimizer, plan_of(made, 3, cuts=CUTS), timeout_s=60, compile=given)
    side = Side(made, target, optimizer, session)
    _train(side, sizes, came)
    results = {"report": f"compiled by {backend} in 3 regions" in str(session.report())}
    results |= {"steps": session.report().steps == STEPS} | compare(outcome(reference), outcome(side))
    regions = [_region(name) for name in came[-1]]
    results["gradients come by regions"] = regions == sorted(regions, reverse=True)
    results["all come once"] = sorted(came[-1]) == sorted(name for name, _ in made.named_parameters())
    side.close()
    results["left as it was"] = made._compiled_call_impl is before and not made._forward_pre_hooks
    return results


def _region(parameter: str) -> int:
    """Number of the region of a parameter, by the cuts."""
    if parameter.startswith("head"):
        return 2
    return int(parameter.startswith(("blocks.1", "blocks.2")))


def switched() -> dict[str, bool]:
    """Other cuts from a step on, and none."""
    torch._dynamo.reset()
    made = Blocks()
    reference = Side(made, DistributedDataParallel(made), SGD(made.parameters()), None)
    _train(reference, lambda _: 5)
    _train(reference, lambda _: 5)
    made = Blocks()
    optimizer = SGD(made.parameters())
    session = runtime.attach(made, optimizer, plan_of(made, 3, cuts=CUTS), timeout_s=60, compile="aot_eager")
    side = Side(made, made, optimizer, session)
    _train(side, lambda _: 5)
    session.switch(plan_of(made, 2, cuts=()))
    _train(side, lambda _: 5)
    results = compare(outcome(reference), outcome(side))
    side.close()
    made.compile(backend="aot_eager")
    side.session = runtime.attach(made, optimizer, plan_of(made, 2), timeout_s=60)
    _train(side, lambda _: 5)
    results["says what cuts would win"] = "cuts could hide up to" in str(side.session.report())
    side.close()
    return results | _ddp_sizes()


def _ddp_sizes() -> dict[str, bool]:
    """Whether graphs of DDP around one model are cut anew where its buckets have another size."""
    made, compiled = Chain(*(nn.Linear(512, 512) for _ in range(4))), list[int]()

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compiled[-1] += 1
        return graph.forward

    for cap_mib in (1, 50):
        compiled.append(0)
        ddp = DistributedDataParallel(made, bucket_cap_mb=cap_mib)
        CompiledModel(made, {"backend": count}).around(ddp)(torch.ones(2, 512))
    return {f"regions of DDP: {compiled}": compiled[0] > compiled[1] > 0}


def foreign(name: str) -> dict[str, bool]:
    """A model of transformers, cut at its second block: tied weights, dropout, an output that is a dataclass."""
    import foreign_jobs

    outcomes: list[dict[str, Any]] = []
    for planned in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        job = getattr(foreign_jobs, name)()
        cuts = tuple(blocks_of(job.model)[1:2])
        side = Side(job.model, job.model, SGD(job.model.parameters()), None)
        if planned:
            plan = plan_of(job.model, 9, cuts=cuts)
            side.session = runtime.attach(job.model, side.optimizer, plan, timeout_s=60, compile="eager")
        else:
            side.forward = DistributedDataParallel(job.model)
            _cut(side, cuts, "eager")
        for step in range(STEPS):
            side.optimizer.zero_grad()
            job.loss(side.forward, job.batch(step, torch.distributed.get_rank())).backward()
            side.optimizer.step()
        outcomes.append(outcome(side))
    results = compare(*outcomes) | {"report": side.session is not None and "in 2 regions" in str(side.session.report())}
    side.close()
    return results


def refused() -> dict[str, bool]:
    """Each on all ranks alike, and the model is as it was."""
    made, parts = Blocks(), Blocks()
    parts.blocks[0].compile(backend="eager")
    cases: list[tuple[nn.Module, tuple[str, ...], str | Mapping[str, Any], list[str]]] = [
        (made, ("blocks.9",), "aot_eager", ["'blocks.9'", "no module of the model"]),
        (made, CUTS, "no such", ["'no such'", "torch.compile knows"]),
        (made, CUTS, {"fullgraph": True}, ["'fullgraph'", "leave it out"]),
        (made, CUTS, {"mode": "reduce-overhead"}, ["CUDA graphs"]),
        (parts, CUTS, "aot_eager", ["'blocks.0' compiled already"]),
    ]
    results: dict[str, bool] = {}
    for model, cuts, given, words in cases:
        try:
            runtime.attach(model, None, plan_of(model, 3, cuts=cuts), timeout_s=60, compile=given).detach()
            results[f"refused: {words[0]}"] = False
        except PlanMismatch as error:
            results |= told(str(error), words)
    with torch._dynamo.config.patch(compiled_autograd=True):
        try:
            runtime.attach(made, None, plan_of(made, 3, cuts=CUTS), timeout_s=60, compile="aot_eager").detach()
            results["compiled autograd"] = False
        except PlanMismatch as error:
            results |= told(str(error), ["compiled autograd"])
    session = runtime.attach(made, None, plan_of(made, 3), timeout_s=60)
    results["compiled autograd around backward"] = False
    try:
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            made(torch.ones(2, 6)).sum().backward()
    except InputError as error:
        results |= told(str(error), ["compiled autograd"]) | {"compiled autograd around backward": True}
    session.detach()
    results["as it was"] = made._compiled_call_impl is None and ranks_agree(len(results))
    return results


CUT_CHECKS: dict[str, Callable[[], Any]] = {
    "regions": cut,
    "compiled model": partial(cut, compiled="around"),
    "compiled in place": partial(cut, compiled="in place"),
    "inductor": partial(cut, backend="inductor"),
    "shapes": partial(cut, changing=True),
    "dynamic": partial(cut, changing=True, dynamic=True),
    "checkpoints": partial(cut, checkpoints=True),
    "breaks": partial(cut, breaks=True),
    "hooks": partial(cut, hooks=True),
    **{f"foreign-{name}": partial(foreign, name) for name in ("bert", "gpt2", "llama", "resnet", "vit")},
    "switched": switched,
    "refused": refused,
}
