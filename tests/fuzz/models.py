"""Random models, training loops and plans as descriptions: plain records, each one line of JSON that can be replayed.

A model is a graph of nodes over values of one shape, (BATCH, WIDTH): value 0 is the stem's output, value i + 1 is node
i's. What a node holds and does is in `model_nodes`; here is only what can be drawn, printed, shrunk and reasoned about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

RANKS = 2

KINDS = (
    *("linear", "large", "conv1d", "conv2d", "batch_norm", "layer_norm", "group_norm", "embedding", "lstm", "gru"),
    *("attention", "elementwise", "scalar", "odd", "empty", "running", "concat", "add", "dropout"),
    *("weight_norm", "spectral_norm"),
)
WITH_BUFFERS = frozenset({"batch_norm", "running", "spectral_norm"})
SQUARE_WEIGHT = frozenset({"linear", "embedding"})
"""Kinds whose `weight` is (WIDTH, WIDTH), so that they can be tied to each other."""
FULL_PRECISION = frozenset({"lstm", "gru", "attention", "spectral_norm"})
"""Kinds that torch does not run in bfloat16 on every CPU."""
IN_HALF = frozenset({"linear", "large", "elementwise", "scalar", "odd", "empty", "dropout"})
"""Kinds that may be in float16, where the optimizer does not divide by what underflows there."""
PLAIN_LAYOUT = frozenset({"lstm", "gru", "attention", "weight_norm", "spectral_norm"})
"""Kinds that lay their parameters out themselves."""

OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "adamw_loop", "rmsprop", "adagrad", "adadelta")
SKIPS = ("odd_steps", "even_steps", "rank_0", "rank_1", "rank_0_step_0", "first_micro", "later_micros", "always")
BY_RANK = frozenset({"rank_0", "rank_1", "rank_0_step_0"})
"""Skips that make ranks' graphs differ."""
MEDDLING = ("clone", "double", "in_place", "delete", "fill", "alias", "turn")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the graph."""

    kind: str
    inputs: tuple[int, int]
    """Values read; kinds with one input read the first."""
    dtype: str = "float32"
    same_as: int | None = None
    """An earlier node whose module this node calls again."""
    tied_to: int | None = None
    """An earlier node whose weight is this node's weight."""
    frozen: str = ""
    """`all`, `first` (of the node's parameters), or none."""
    layout: str = ""
    """`turned` (last two dimensions in the other order; channels-last in 4-D), `gaps` between elements, or plain."""
    checkpoint: str = ""
    """`reentrant`, `plain`, or none."""
    skip: str = ""
    """When the node is the identity instead; see `is_skipped`."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of the loop."""

    syncs: tuple[bool, ...] = (True,)
    """Per micro-batch, whether its forward and backward are synchronized; the last one is."""
    zero: str = "none"
    """`zero_grad`: `none`, `zeros`, or `skip`."""
    clip: str = ""
    """`norm`, `value`, or none."""
    meddle: str = ""
    """What the user does to some `.grad` before the update."""
    evaluate: int | None = None
    """The rank that evaluates alone before the step."""
    reattach: bool = False
    """Detach and attach, with another plan, before the step."""
    raises: int | None = None
    """The first micro-batch's backward raises at this value; the step is given up."""
    forwards: int = 1
    """Forwards in one backward."""
    backwards: int = 1
    """2: backward of the main output's loss, then of the whole loss through the same graph."""
    probe: bool = False
    """Takes the gradient of the input first, by `torch.autograd.grad`."""


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """How gradients are ordered and cut into buckets."""

    order: int = 0
    """0: reverse order of registration; else the seed of a permutation."""
    sizes: tuple[int, ...] = (100,)
    """Gradients per bucket, over and over."""
    leave_out_unused: bool = False
    """Whether parameters that never get a gradient are left out."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a training loop and two plans (the second for steps after an odd number of re-attachments)."""

    nodes: tuple[Node, ...] = ()
    outputs: tuple[int, ...] = ()
    """Values returned besides the last."""
    lost: tuple[int, ...] = ()
    """Values returned that the loss ignores."""
    spare: tuple[str, ...] = ()
    """Kinds of modules that are registered and never called."""
    container: str = "tensor"
    """Of the outputs: `tensor` (only the last), `tuple`, `dict`, `record` (a dataclass in a dict)."""
    optimizer: str = "sgd"
    autocast: bool = False
    broadcast_buffers: bool = True
    start_apart: bool = False
    steps: tuple[Step, ...] = (Step(), Step())
    plans: tuple[PlanShape, PlanShape] = (PlanShape(), PlanShape())

    def line(self) -> str:
        """The case as one line of JSON, without what is at its default."""
        return json.dumps(_without_defaults(self), separators=(",", ":"))

    @property
    def weight(self) -> int:
        """Length of the line: what shrinking makes smaller."""
        return len(self.line())


def _without_defaults(record: Any) -> dict[str, Any]:
    plain = asdict(record)
    if isinstance(record, Case):
        plain["nodes"] = [_without_defaults(node) for node in record.nodes]
        plain["steps"] = [_without_defaults(step) for step in record.steps]
        plain["plans"] = [_without_defaults(plan) for plan in record.plans]
    defaults = {name: field.default for name, field in type(record).__dataclass_fields__.items()}
    return {name: value for name, value in plain.items() if getattr(record, name) != defaults[name]}


def from_line(line: str) -> Case:
    """The case that `Case.line` printed."""
    plain = json.loads(line)
    plain["nodes"] = tuple(Node(**_tuples(node)) for node in plain.get("nodes", ()))
    if "steps" in plain:
        plain["steps"] = tuple(Step(**_tuples(step)) for step in plain["steps"])
    if "plans" in plain:
        plain["plans"] = tuple(PlanShape(**_tuples(plan)) for plan in plain["plans"])
    return Case(**_tuples(plain))


def _tuples(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}


# What can be said of a case without building it.


def is_skipped(node: Node, step: int, micro: int, rank: int) -> bool:
    """Whether the node is the identity here."""
    return {
        "": False,
        "odd_steps": step % 2 == 1,
        "even_steps": step % 2 == 0,
        "rank_0": rank == 0,
        "rank_1": rank == 1,
        "rank_0_step_0": rank == 0 and step == 0,
        "first_micro": micro == 0,
        "later_micros": micro > 0,
        "always": True,
    }[node.skip]


def reached(case: Case, step: int, micro: int, rank: int) -> set[int]:
    """Values that the loss depends on."""
    wanted = {len(case.nodes)} | ({*case.outputs} if case.container != "tensor" else set())
    for index in range(len(case.nodes), 0, -1):
        node = case.nodes[index - 1]
        if index in wanted:
            two = node.kind in ("concat", "add") and not is_skipped(node, step, micro, rank)
            wanted |= {*node.inputs} if two else {node.inputs[0]}
    return wanted


def used_nodes(case: Case, step: int, micro: int, rank: int) -> set[int]:
    """Nodes whose parameters the loss depends on."""
    values = reached(case, step, micro, rank)
    return {i for i, node in enumerate(case.nodes) if i + 1 in values and not is_skipped(node, step, micro, rank)}


def moments(case: Case) -> Iterator[tuple[int, int, int]]:
    """Every (step, micro-batch, rank)."""
    for index, step in enumerate(case.steps):
        for micro in range(len(step.syncs)):
            for rank in range(RANKS):
                yield index, micro, rank


def uses_everything(case: Case) -> bool:
    """Whether every backward on every rank reaches every node."""
    return not case.spare and all(len(used_nodes(case, *moment)) == len(case.nodes) for moment in moments(case))


def ddp_can(case: Case) -> bool:
    """Whether DDP supports the case."""
    everything = uses_everything(case)
    if not everything and case.lost and case.container != "tensor":
        return False  # what only lost outputs depend on counts as used: DDP would wait for gradients that never come
    if not everything and any(node.checkpoint == "reentrant" for node in case.nodes):
        return False
    for step in case.steps:
        if step.backwards > 1 or (step.raises is not None and step.syncs[0]):
            return False
        if step.forwards > 1 and not everything:
            return False
    return True


def normal(case: Case) -> Case:
    """The nearest case that means something: references point backwards, features that exclude each other give way."""
    nodes: list[Node] = []
    plain = case.optimizer in ("sgd", "momentum", "nesterov")
    for index, node in enumerate(case.nodes):
        if node.dtype == "float16" and not (plain and node.kind in IN_HALF and node.tied_to is None):
            node = replace(node, dtype="bfloat16")
        nodes.append(_normal_node(node, index, nodes))
    doubly = {i for i, node in enumerate(nodes) for i in (i, node.same_as, node.tied_to) if _refers(node)}
    buffers = any(node.kind in WITH_BUFFERS for node in nodes)
    twice = not buffers and any(step.forwards > 1 for step in case.steps)
    for i, node in enumerate(nodes):
        if node.checkpoint == "reentrant" and (i in doubly or twice):
            nodes[i] = replace(node, checkpoint="plain")
    reentrant = any(node.checkpoint == "reentrant" for node in nodes)
    if any(
        node.dtype in ("bfloat16", "float16") for node in nodes
    ):  # torch rounds `add_(…, alpha)` by its strides there
        case = replace(
            case, steps=tuple(replace(s, meddle="clone" if s.meddle == "turn" else s.meddle) for s in case.steps)
        )
    if any(step.meddle == "turn" for step in case.steps):  # DDP keeps its strides, and in them norms add up otherwise
        case = replace(case, steps=tuple(replace(step, clip="value" if step.clip else "") for step in case.steps))
    steps = tuple(_normal_step(step, buffers, reentrant, len(nodes)) for step in case.steps)
    if any(node.skip in BY_RANK for node in nodes):
        # Ranks that raise after different numbers of buckets are out of step from then on: not supported.
        steps = tuple(replace(step, raises=None) if step.syncs[0] else step for step in steps)
    values = range(len(nodes))
    return replace(
        case,
        nodes=tuple(nodes),
        steps=steps,
        outputs=tuple(sorted({v for v in case.outputs if v in values})),
        lost=tuple(sorted({v for v in case.lost if v in values})),
    )


def _refers(node: Node) -> bool:
    return node.same_as is not None or node.tied_to is not None


def _normal_node(node: Node, index: int, before: list[Node]) -> Node:
    node = replace(node, inputs=(min(node.inputs[0], index), min(node.inputs[1], index)))
    if node.same_as is not None:
        kept = node.same_as < index and before[node.same_as].kind == node.kind and node.kind != "add"
        other = before[node.same_as] if kept else node
        if kept and other.same_as is not None:
            return replace(node, same_as=other.same_as, tied_to=None, dtype=other.dtype, layout="", frozen="")
        if kept:
            return replace(node, tied_to=None, dtype=other.dtype, layout="", frozen="")
        node = replace(node, same_as=None)
    if node.tied_to is not None:
        fits = node.tied_to < index and node.kind in SQUARE_WEIGHT and before[node.tied_to].kind in SQUARE_WEIGHT
        fits = fits and before[node.tied_to].same_as is None
        node = replace(node, dtype=before[node.tied_to].dtype) if fits else replace(node, tied_to=None)
    if node.kind in FULL_PRECISION and node.dtype != "float64":
        node = replace(node, dtype="float32")
    return replace(node, layout="") if node.kind in PLAIN_LAYOUT else node


def _normal_step(step: Step, buffers: bool, reentrant: bool, nodes: int) -> Step:
    syncs = (*step.syncs[:-1], True)
    if buffers:  # as with DDP: the second forward's broadcast would change what the first one's backward needs
        step = replace(step, forwards=1)
    if reentrant:  # torch refuses both
        step = replace(step, probe=False, backwards=1)
    if step.raises is not None:
        step = replace(step, raises=min(step.raises, nodes), backwards=1)
    return replace(step, syncs=syncs)


# Drawing.


def rarely(strategy: st.SearchStrategy[Any], otherwise: Any, one_in: int = 4) -> st.SearchStrategy[Any]:
    """The strategy in one of so many draws."""
    return st.integers(0, one_in - 1).flatmap(lambda n: strategy if n == one_in - 1 else st.just(otherwise))


@st.composite
def node_descriptions(draw: st.DrawFn, index: int) -> Node:
    """The node at a position."""
    earlier = st.integers(0, max(0, index - 1))
    near = rarely(st.integers(max(0, index - 3), index), index, 3)
    return Node(
        kind=draw(st.sampled_from(KINDS)),
        inputs=(draw(near), draw(st.integers(0, index))),
        dtype=draw(rarely(st.sampled_from(("bfloat16", "float16", "float64")), "float32")),
        same_as=draw(rarely(earlier, None, 3)),
        tied_to=draw(rarely(earlier, None, 3)),
        frozen=draw(rarely(st.sampled_from(("all", "first")), "", 6)),
        layout=draw(rarely(st.sampled_from(("turned", "gaps")), "", 3)),
        checkpoint=draw(rarely(st.sampled_from(("reentrant", "plain")), "", 8)),
        skip=draw(rarely(st.sampled_from(SKIPS), "", 8)),
    )


@st.composite
def step_descriptions(draw: st.DrawFn, nodes: int) -> Step:
    """One step of the loop."""
    return Step(
        syncs=draw(rarely(st.lists(st.booleans(), min_size=2, max_size=3).map(tuple), (True,), 3)),
        zero=draw(st.sampled_from(("none", "none", "zeros", "skip"))),
        clip=draw(rarely(st.sampled_from(("norm", "value")), "")),
        meddle=draw(rarely(st.sampled_from(MEDDLING), "")),
        evaluate=draw(rarely(st.integers(0, RANKS - 1), None, 5)),
        reattach=draw(rarely(st.just(True), False, 6)),
        raises=draw(rarely(st.integers(0, nodes), None, 8)),
        forwards=draw(rarely(st.just(2), 1, 8)),
        backwards=draw(rarely(st.just(2), 1, 10)),
        probe=draw(rarely(st.just(True), False, 8)),
    )


plan_shapes = st.builds(
    PlanShape,
    order=st.one_of(st.just(0), st.integers(1, 999)),
    sizes=st.lists(st.sampled_from((1, 2, 3, 5, 8, 100)), min_size=1, max_size=4).map(tuple),
    leave_out_unused=st.booleans(),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any case."""
    count = draw(st.integers(1, 9))
    nodes = tuple(draw(node_descriptions(index)) for index in range(count))
    values = st.lists(st.integers(0, count), max_size=2).map(tuple)
    steps = draw(st.lists(step_descriptions(count), min_size=2, max_size=4))
    case = Case(
        nodes=nodes,
        outputs=draw(values),
        lost=draw(rarely(values, (), 5)),
        spare=draw(rarely(st.tuples(st.sampled_from(KINDS)), (), 5)),
        container=draw(st.sampled_from(("tensor", "tuple", "dict", "record"))),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        autocast=draw(rarely(st.just(True), False, 6)),
        broadcast_buffers=draw(rarely(st.just(False), True, 8)),
        start_apart=draw(rarely(st.just(True), False, 3)),
        steps=tuple(steps),
        plans=(draw(plan_shapes), draw(plan_shapes)),
    )
    return normal(case)


def draw_cases(count: int, seed_number: int) -> list[Case]:
    """So many cases, the same ones for the same seed."""
    found: list[Case] = []

    @seed(seed_number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found[:count]
