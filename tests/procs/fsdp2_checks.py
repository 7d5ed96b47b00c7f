"""What the ranks of the FSDP2 tests do: wrap by a plan and by hand, record what is sent, and train side by side."""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_recorder import record_collectives
from step_checks import raised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock
from torch.nn import functional

import planner
from planner.documents.units import Units
from planner.fsdp2.program import Shape, host_program
from planner.profile.units import LiveBytes, candidate_units, measure_units
from runtime.comm.world import World
from runtime.fully_sharded.hosts import overlap_on_hosts
from runtime.fully_sharded.messages import PIECE_BYTES, SerialMessages
from runtime.plan import FullyShardPlan, ModelReference, Plan, PlanWorld
from runtime.plan.fully_sharded import nesting_order

WIDTH, WORDS, BLOCKS = 10, 37, 4
"""Rows that no number of ranks divides, too."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        mixed: Tensor = x + self.wide(x)
        return mixed


class Tower(nn.Module):
    """A language model in small; tied or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) * self.scale
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


EACH = tuple((f"layers.{number}",) for number in range(BLOCKS))
ALL = (("embed",), *EACH, ("norm", "head"))
LEAVES = [
    "embed", *(f"layers.{number}.{part}" for number in range(BLOCKS) for part in ("mix", "wide")), "norm", "head"
]  # fmt: skip
NESTED = tuple(one for number in range(BLOCKS) for one in ((f"layers.{number}.wide",), (f"layers.{number}",)))

WRAPPINGS: dict[str, FullyShardPlan] = {
    "each block": FullyShardPlan(groups=EACH),
    "one unit": FullyShardPlan(groups=()),
    "everything in groups": FullyShardPlan(groups=ALL),
    "pairs": FullyShardPlan(groups=(EACH[0] + EACH[1], EACH[2] + EACH[3])),
    "with the embedding": FullyShardPlan(groups=(("embed", "layers.0"), *EACH[1:])),
    "last kept": FullyShardPlan(
        groups=ALL, reshard_after_forward={"layers.3": False, "norm": False, "layers.0": True}
    ),
    "all kept": FullyShardPlan(groups=ALL, reshard_after_forward={name: False for (name, *_) in ALL}),
    "root freed": FullyShardPlan(groups=EACH, reshard_after_forward={"": True}),
    "forward ahead": FullyShardPlan(
        groups=ALL,
        forward_prefetch={"embed": ("layers.0", "layers.1"), "layers.0": ("layers.1", "layers.2"), "": ("embed",)},
    ),
    "backward ahead": FullyShardPlan(
        groups=ALL,
        backward_prefetch={"norm": ("layers.3", "layers.2"), "layers.3": ("layers.2", "layers.1"),
                           "layers.1": ("embed",)},
    ),
    "reduced in bfloat16": FullyShardPlan(groups=ALL, reduce_dtype="bfloat16"),
    "nested": FullyShardPlan(groups=NESTED),
    "nested, outer first": FullyShardPlan(groups=(EACH[0], ("layers.0.wide",), ("layers.2.mix", "layers.3.wide"))),
}  # fmt: skip
TIED = {
    "tied, with the root": FullyShardPlan(groups=EACH),
    "tied, together": FullyShardPlan(groups=(*EACH, ("embed", "head"))),
}
FOUR = {
    "kept in parts": FullyShardPlan(groups=EACH, reshard_after_forward={"layers.1": 2, "layers.3": 2}),
    "two copies": FullyShardPlan(groups=ALL, shard_ranks=2),
    "two at once": FullyShardPlan(groups=EACH, reduce_scatter_max_input_buffers=2),
}


def cases() -> dict[str, tuple[FullyShardPlan, bool]]:
    """By name, the wrapping and whether the model is tied."""
    more = FOUR if dist.get_world_size() == 4 else {"two at once": FOUR["two at once"]}
    found = {name: (spec, False) for name, spec in (WRAPPINGS | more).items()}
    return found | {name: (spec, True) for name, spec in TIED.items()}


def plan_for(spec: FullyShardPlan) -> Plan:
    ranks, accuracy = PlanWorld(ranks=dist.get_world_size()), "exact" if spec.reduce_dtype is None else "bounded"
    return Plan(model=ModelReference(name="tower"), world=ranks, accuracy=accuracy, buckets=(), fsdp2=spec)  # type: ignore[arg-type]


def made(tied: bool) -> Tower:
    torch.manual_seed(3)
    return Tower(tied)


def words(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, WORDS, (2, 5), generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    given = words(step)
    return functional.cross_entropy(model(given).flatten(0, 1), given.flatten())


def mesh_for(spec: FullyShardPlan) -> Any:
    ranks = dist.get_world_size()
    if spec.shard_ranks is None:
        return init_device_mesh("cpu", (ranks,))
    shape = (ranks // spec.shard_ranks, spec.shard_ranks)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def by_hand(model: nn.Module, spec: FullyShardPlan) -> nn.Module:
    """The same wrapping, as a script would write it."""
    modules: dict[str, Any] = dict(model.named_modules())
    given: dict[str, Any] = {"mesh": mesh_for(spec)}
    if spec.reduce_dtype is not None:
        given["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for index in nesting_order(spec.groups) or []:
        group = spec.groups[index]
        options = given | {"reshard_after_forward": spec.reshard_after_forward.get(group[0])}
        stock([modules[name] for name in group], **options) if group[1:] else stock(modules[group[0]], **options)
    stock(model, reshard_after_forward=spec.reshard_after_forward.get(""), **given)
    for name, ahead in spec.forward_prefetch.items():
        modules[name].set_modules_to_forward_prefetch([modules[one] for one in ahead])
    for name, ahead in spec.backward_prefetch.items():
        modules[name].set_modules_to_backward_prefetch([modules[one] for one in ahead])
    return model


def trained(model: nn.Module, steps: int = 3, adaptive: bool = True) -> list[Tensor]:
    """Some steps with accumulation and clipping; the weights."""
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.05)
        if adaptive
        else torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    )
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2 if step == 1 else 1):
            loss_of(model, 10 * step + part).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


def digest(weights: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights)).hexdigest()


def observed(tied: bool) -> Units:
    model = made(tied)

    def run(backward_begins: Callable[[], None]) -> None:
        loss = loss_of(model, 0)
        backward_begins()
        loss.backward()

    return measure_units(model, run, World.join(), paths=LEAVES, repeats=1)


def on_hosts(tied: bool, spec: FullyShardPlan) -> nn.Module:
    model = planner.fully_shard(made(tied), plan_for(spec), mesh_for(spec))
    overlap_on_hosts(model, spec)
    return model


def everything() -> dict[str, Any]:
    units = {tied: observed(tied) for tied in (False, True)}
    found: dict[str, Any] = {"candidates": candidate_units(made(False)), "units": units[False]}
    ranks = dist.get_world_size()
    for name, (spec, tied) in cases().items():
        planned = planner.fully_shard(made(tied), plan_for(spec), mesh_for(spec))
        sent = record_collectives(planned, spec)
        loss_of(planned, 0).backward()
        first = list(sent)
        sent.clear()
        loss_of(planned, 1).backward()
        shape = Shape.of(units[tied], ranks)
        program = host_program(replace(shape, reduce_bytes=4 if spec.reduce_dtype is None else 2), spec)
        result = {
            "recorded": [tuple(one) for one in first],
            "simulated": list(program.messages()),
            "again": [tuple(one) for one in sent],
            "planned": digest(trained(planner.fully_shard(made(tied), plan_for(spec)))),
            "by hand": digest(trained(by_hand(made(tied), spec))),
        }
        if spec.shard_ranks is None:
            # More than two ranks' gradients are added up in another order, of which Adam makes more than it is.
            apart = [trained(model, adaptive=ranks == 2) for model in (by_hand(made(tied), spec), on_hosts(tied, spec))]
            result["off on hosts"] = max(float((a - b).abs().max()) for a, b in zip(*apart, strict=True))
        found[name] = result
    found["memory"] = memory()
    found["messages"] = messages()
    found["failed backward"] = after_a_failed_backward()
    found["refusals"] = refusals()
    found["reductions"] = reductions()
    found["compiled blocks"] = compiled_blocks()
    return found


def reductions() -> dict[str, float]:
    """How far weights are from stock FSDP2's, by how gradients are reduced. Stock raises for a divide factor over gloo,
    unless it divides by itself behind a sum.
    """
    spec = WRAPPINGS["everything in groups"]

    def off(change: Callable[[Any], None], reference: Callable[[Any], None]) -> float:
        pair = by_hand(made(False), spec), on_hosts(False, spec)
        for model, changed in zip(pair, (reference, change), strict=True):
            for module in model.modules():
                changed(module)
        theirs, ours = (trained(model, adaptive=False) for model in pair)
        return max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))

    def divide(module: Any) -> None:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(8.0)

    def divide_behind(module: Any) -> None:
        divide(module)
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)

    def hook(module: Any) -> None:
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda reduced: reduced.mul_(2.0))

    return {
        "divide factor": off(divide, divide_behind),
        "divide factor behind a sum": off(divide_behind, divide_behind),
        "all-reduce hook": off(hook, hook),
        "two models": two_models(),
    }


def compiled_blocks() -> dict[str, float]:
    """How far weights are from stock FSDP2's where both compile each block behind `fully_shard`."""
    spec, found = WRAPPINGS["each block"], dict[str, float]()
    for name, make in (("planned", lambda: planner.fully_shard(made(False), plan_for(spec), mesh_for(spec))),
                       ("on hosts", lambda: on_hosts(False, spec))):  # fmt: skip
        weights = []
        for model in (by_hand(made(False), spec), make()):
            torch._dynamo.reset()
            for layer in model.get_submodule("layers").children():
                layer.compile(backend="aot_eager")
            weights.append(trained(model, adaptive=False))
        found[name] = max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True))
    return found


def two_models() -> float:
    """Of two models whose messages are under way at the same time, begun in another order on each rank."""
    spec, ranks, group = WRAPPINGS["one unit"], dist.get_world_size(), dist.group.WORLD
    assert group is not None
    wrapped = [planner.fully_shard(made(False), plan_for(spec)) for _ in range(2)]
    senders = [overlap_on_hosts(model, spec).messages for model in wrapped]
    wholes = [torch.zeros(ranks * 5) for _ in senders]
    under_way = []
    for number in (0, 1) if dist.get_rank() % 2 else (1, 0):
        under_way.append(senders[number].gather(wholes[number], torch.full((5,), 1.0 + number), group))
        dist.barrier()
    for message in under_way:
        message.result()
    return max(float((whole - 1.0 - number).abs().max()) for number, whole in enumerate(wholes))


def messages() -> tuple[float, int]:
    """How far gathers and reduce-scatters are from their definitions, relative to what a dtype holds, over sizes of one
    piece and of several; and how often memory was still held when the wait for its message had returned.
    """
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    serial, worst, held = SerialMessages(60.0), 0.0, 0
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for numel in (1, 7, PIECE_BYTES // 4, 2 * PIECE_BYTES // dtype.itemsize + 13):
            given = torch.randn(ranks * numel, generator=generator).to(dtype)
            everyone = [torch.empty_like(given) for _ in range(ranks)]
            dist.all_gather(everyone, given)
            whole, own, average = torch.empty_like(given), given.new_empty(numel), numel % 2 == 1
            mine = slice(rank * numel, (rank + 1) * numel)
            part = (whole[mine] if average else own.clone()).copy_(given[:numel])
            begun = [
                serial.gather(whole, part, group),
                serial.reduce_scatter(own, given.clone(), group, average=average),
            ]
            for message in begun:
                message.result()
            assert torch.equal(whole, torch.cat([one[:numel] for one in everyone]))
            summed: Tensor = sum(one[mine].double() for one in everyone)  # type: ignore[assignment]
            expected = summed / ranks if average else summed
            worst = max(worst, float((own.double() - expected).abs().max()) / torch.finfo(dtype).eps)
            lent = [weakref.ref(whole), weakref.ref(own)]
            del whole, own, part
            held += sum(one() is not None for one in lent)
    return worst, held


class Stack(nn.Module):
    """Large enough that what memory holds beside tensors does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )
        self.head = nn.Linear(64, 200)

    def forward(self, given: Tensor) -> Tensor:
        x = self.embed(given)
        for layer in self.layers:
            x = x + layer(x)
        scores: Tensor = self.head(x).clone()
        return scores


ALL_OF_STACK = (("embed",), *EACH, ("head",))


def memory() -> dict[str, tuple[int, list[int]]]:
    """By wrapping, the predicted peak of a step with Adam, and counted ones: by operations, and by torch's own tracker.

    The tracker has hooks of its own in place of FSDP2's, which gather groups of several modules once for each of them.
    Collectives are those that take no memory of their own, as gloo's do.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    given = torch.randint(0, 200, (4, 32), generator=torch.Generator().manual_seed(dist.get_rank()))

    def loss(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(given).flatten(0, 1), given.flatten())

    plain = Stack()

    def run(backward_begins: Callable[[], None]) -> None:
        plain.zero_grad()
        found = loss(plain)
        backward_begins()
        found.backward()

    units = replace(measure_units(plain, run, World.join(), repeats=1), state_factor=2.0)
    peaks = {}
    for name, spec in {
        "each": FullyShardPlan(groups=ALL_OF_STACK),
        "one unit": FullyShardPlan(groups=()),
        "pairs, the last kept": FullyShardPlan(
            groups=(("embed",), EACH[0] + EACH[1], EACH[2] + EACH[3], ("head",)),
            reshard_after_forward={"layers.2": False, "head": False},
        ),
        "blocks, the last kept": FullyShardPlan(groups=EACH, reshard_after_forward={"layers.3": False}),
        "all kept": FullyShardPlan(groups=ALL_OF_STACK, reshard_after_forward={n: False for (n,) in ALL_OF_STACK}),
    }.items():
        model = planner.fully_shard(Stack(), plan_for(spec))
        overlap_on_hosts(model, spec)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((given,))
        with tracker:
            for step in range(2):
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
                if step == 0:
                    tracker.reset_mod_stats()
        [tracked] = tracker.get_tracker_snapshot("peak").values()
        predicted = host_program(Shape.of(units, dist.get_world_size()), spec, waits=True).peak_bytes
        counted = [] if any(len(group) > 1 for group in spec.groups) else [tracked["Total"]]
        peaks[name] = predicted, [*counted, counted_in_operations(spec, loss)]
    return peaks


def counted_in_operations(spec: FullyShardPlan, loss: Callable[[nn.Module], Tensor]) -> int:
    """The peak of a second step, with this rank's parts and twice as much for Adam."""
    model = planner.fully_shard(Stack(), plan_for(spec))
    overlap_on_hosts(model, spec)
    loss(model).backward()
    for parameter in model.parameters():
        parameter.grad = None
    parameters: list[Any] = list(model.parameters())
    parts = [parameter.to_local().untyped_storage() for parameter in parameters]
    with LiveBytes({part.data_ptr() for part in parts}) as live:
        loss(model).backward()
    return int(live.total_bytes + 3 * sum(part.nbytes() for part in parts))


def after_a_failed_backward() -> bool:
    """A backward that raises on all ranks, with messages under way: the next step is as if it had not been."""
    digests = []
    for fails in (True, False):
        spec = WRAPPINGS["everything in groups"]
        model = planner.fully_shard(made(False), plan_for(spec))
        overlap_on_hosts(model, spec)
        if fails:

            def fail(_grad: Tensor) -> None:
                raise ArithmeticError("on purpose")

            handle = model.layers[1].register_forward_hook(lambda _m, _i, output: output.register_hook(fail) and None)  # type: ignore[index, union-attr]
            with suppress(ArithmeticError):
                loss_of(model, 0).backward()
                raise AssertionError("the backward did not fail")
            handle.remove()
            model.reset_iter_state()  # type: ignore[operator]
            model.zero_grad()
        digests.append(digest(trained(model)))
    return digests[0] == digests[1]


def refusals() -> dict[str, str]:
    spec = WRAPPINGS["everything in groups"]
    plan = plan_for(spec)
    compiled = made(False)
    compiled.layers[0].compile()
    mixed = made(False)
    mixed.layers[0].mix.double()
    ranks = dist.get_world_size()

    def refuse(model: Any, given: Any, mesh: Any = None, **options: Any) -> str:
        before = (
            copy.deepcopy([parameter.shape for parameter in model.parameters()]) if isinstance(model, nn.Module) else []
        )
        said = raised(lambda: planner.fully_shard(model, given, mesh, **options))
        if isinstance(model, nn.Module):
            assert [parameter.shape for parameter in model.parameters()] == before
        return said

    def other(**fields: Any) -> Plan:
        return plan_for(replace(spec, **fields))

    return {
        "unknown": refuse(made(False), other(groups=(("layers.7",),))),
        "list": refuse(made(False), other(groups=(("layers",),))),
        "tied": refuse(made(True), plan),
        "wrapped": refuse(stock(made(False), mesh=mesh_for(spec)), plan),
        "mesh": refuse(made(False), plan, init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("a", "b"))),
        "ranks": refuse(made(False), replace(plan, world=PlanWorld(ranks=ranks + 1))),
        "compiled": refuse(torch.compile(made(False)), plan),
        "compiled in place": refuse(compiled, plan),
        "dtypes": refuse(mixed, plan),
        "model": refuse(made(False), replace(plan, model=ModelReference(name="other", fingerprint="sha256:0"))),
        "buckets": refuse(made(False), replace(plan, fsdp2=None)),
        "twice": refuse(made(False), other(groups=(("embed",), ("norm", "embed")))),
        "prefetch": refuse(made(False), other(forward_prefetch={"head": ("embed",)})),
        "divisor": refuse(made(False), other(reshard_after_forward={"embed": 3})),
        "policy": refuse(
            made(False),
            plan_for(WRAPPINGS["reduced in bfloat16"]),
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
        ),
        "no module": refuse(3, plan),
        "one rank alone": refuse(made(False), plan if dist.get_rank() else other(groups=EACH)),
        "attach": raised(lambda: planner.attach(made(False), None, plan)),
        "hosts": raised(lambda: overlap_on_hosts(made(False), spec)),
        "maximum": raised(lambda: reduce_by(dist.ReduceOp.MAX)),
    }


def reduce_by(op: Any) -> None:
    """Let a group of a model on hosts reduce by another operation."""
    model: Any = on_hosts(False, WRAPPINGS["one unit"])
    scatter = model._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm
    scatter(torch.zeros(1), torch.zeros(dist.get_world_size()), dist.group.WORLD, op)


def without_the_setter() -> str:
    """As a version of torch would refuse that has no `set_reduce_scatter_max_input_buffers`."""
    from torch.distributed.fsdp import FSDPModule

    kept = FSDPModule.set_reduce_scatter_max_input_buffers
    del FSDPModule.set_reduce_scatter_max_input_buffers
    try:
        spec = replace(FOUR["two at once"], lost_without_buffers_us=1234.0)
        return raised(lambda: planner.fully_shard(made(False), plan_for(spec)))
    finally:
        FSDPModule.set_reduce_scatter_max_input_buffers = kept  # type: ignore[method-assign]
