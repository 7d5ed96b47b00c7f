"""Random training scripts as data: a grammar of what people write in a loop, each script one line that parses back.

A line is `kind option=value …: action; action; …`, an action `name argument … @rank`; without @rank every rank does it.
What actions do is in `script_runs`. `attach` (wrapping in DDP, for the reference) comes first where it is not written.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

KINDS = ("exact", "sparse", "sharded", "delayed", "late", "outer")
"""Of the plan; `late` is sharded, with gathers beside the next forward, and compared with that."""
SHARED = ("sharded", "late")
OWN_WEIGHTS = ("delayed", "outer")
"""Kinds whose ranks train alone, after steps that are compared."""
WITH_MUON = ("exact", "sparse", "sharded", "outer")
"""Kinds whose scripts may have Muon for matrices, whose operators or steps owners compute, and AdamW for the rest."""
FEATURES = (
    "norm", "large", "scale", "dropout", "tied", "twice", "checkpoint", "unused", "apart", "bank", "growing", "expert",
)  # fmt: skip
"""Of the model; see `script_runs.Net`."""
PARAMETERS = ("0", "1", "2", "3", "-1")
RANK = ("0", "1")


@dataclass(frozen=True)
class Action:
    """One line of a script."""

    name: str
    arguments: tuple[str, ...] = ()
    rank: int | None = None
    """The only rank that does it."""

    def __str__(self) -> str:
        return " ".join([self.name, *self.arguments, *([] if self.rank is None else [f"@{self.rank}"])])


@dataclass(frozen=True, kw_only=True)
class Script:
    """A model, an optimizer, a plan, and what is done with them."""

    kind: str = "exact"
    ranks: int = 2
    dtype: str = "float32"
    model: tuple[str, ...] = ()
    """Features."""
    optimizer: str = "sgd"
    buckets: int = 100
    """Gradients per bucket."""
    habit: str = ""
    """What DDP is told: `find_unused`, `static`, or nothing."""
    broadcast: str = ""
    """Of buffers: `off` where DDP is told so."""
    framework: str = ""
    """`accelerate` where its Accelerator makes DDP, and its counterpart the session."""
    weights: str = ""
    """`equal` where ranks give each backward the same weight, which changes nothing, `unequal` where others, also 0."""
    actions: tuple[Action, ...] = ()

    def line(self) -> str:
        """The script as text."""
        told = [self.kind]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("kind", "actions") and value != field.default:
                told.append(f"{field.name}={'+'.join(value) if isinstance(value, tuple) else value}")
        return f"{' '.join(told)}: {'; '.join(map(str, self.actions))}"

    @property
    def weight(self) -> int:
        """What shrinking makes smaller."""
        return len(self.line())


def from_line(line: str) -> Script:
    """The script that `Script.line` printed."""
    head, _, tail = line.partition(":")
    kind, *options = head.split()
    values: dict[str, object] = dict(option.split("=") for option in options)
    for name in values.keys() & {"ranks", "buckets"}:
        values[name] = int(str(values[name]))
    if "model" in values:
        values["model"] = tuple(str(values["model"]).split("+"))
    actions = tuple(_action(part.split()) for part in tail.split(";") if part.strip())
    return Script(kind=kind, actions=actions, **values)  # type: ignore[arg-type]


def _action(words: list[str]) -> Action:
    rank = int(words.pop()[1:]) if words[-1].startswith("@") else None
    return Action(words[0], tuple(words[1:]), rank)


# The grammar.


@dataclass(frozen=True)
class Rule:
    """How an action is drawn: each argument is one of some words."""

    weight: int
    arguments: tuple[tuple[str, ...], ...] = ()
    kinds: tuple[str, ...] = KINDS
    alone: bool = False
    """Whether one rank may do it by itself with DDP."""
    early: bool = False
    """Whether it may come before `attach`."""


NOT_DELAYED = ("exact", "sparse", "sharded", "late", "outer")
LIKE_DDP = ("exact", "sharded", "late")

GLANCES = (
    "kept", "method", "thread", "keep_vars", "vector", "pickle", "average", "functional", "part", "wait", "other",
)  # fmt: skip
"""Ways to look at weights."""

HABITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "zero": (("none", "zeros", "skip", "model"), KINDS),
    "clip": (("norm", "norm_loop", "value", "parameter", "off"), KINDS),
    "micro": (("no_sync", "uneven", "nested", "trigger", "accumulate", "off"), KINDS),
    "call": (("forward", "off"), KINDS),
    "every": (("2", "3", "off"), LIKE_DDP),
    "forwards": (("2", "off"), KINDS),
    "autocast": (("on", "off"), LIKE_DDP),
    "scaler": (("on", "overflow", "unscale", "off"), KINDS),
    "ema": (("copy", "data", "off"), KINDS),
    "edit": (("half", "delete", "in_place", "data", "swap", "off"), LIKE_DDP),
    "own": (("each", "off"), LIKE_DDP),
    "closure": (("on", "off"), NOT_DELAYED),
    "penalty": (("on", "off"), LIKE_DDP),
    "probe": (("on", "off"), KINDS),
    "reduce": (("loss", "gradients", "off"), LIKE_DDP),
    "schedule": (("step", "cosine"), KINDS),
    "second": (("on",), ("exact",)),
    "watch": (("on", "off"), ("late",)),
}
"""What every step does from then on, by `loop`."""
WITH_ACCELERATE = ("trigger", "accumulate")
"""Ways to accumulate gradients that Accelerators alone have."""
NOT_WITH_ACCELERATE = (
    "attach", "wrapper", "optimizer", "compile", "drop", "switch", "switch_within", "reattach", "checkpoint", "fail",
    "resize", "freeze", "thaw", "add_group", "create_graph",
)  # fmt: skip
"""Actions that its scripts are drawn without: they attach anew, or are no different with it."""

RULES: dict[str, Rule] = {
    "train": Rule(14, (("1", "2", "3"),)),
    "hook": Rule(
        8,
        (
            ("tensor", "post", "forward", "forward_pre", "backward", "backward_pre", "model_forward", "model_backward"),
            ("look", "clamp", "add", "replace"),
            PARAMETERS,
        ),
        alone=True,
        early=True,
    ),
    "unhook": Rule(2, early=True),
    "look": Rule(3, (("norm", "abs", "max", "numpy", "print", "sum_of_squares"),), alone=True),
    "keep": Rule(4, (("itself", "clone", "detach", "data", "view", "numpy", "dlpack", "storage"),), alone=True),
    "let_go": Rule(1),
    "freeze": Rule(3, (PARAMETERS,), early=True),
    "thaw": Rule(3, (PARAMETERS,)),
    "add_group": Rule(2, (), LIKE_DDP),
    "optimizer": Rule(2, (("sgd", "momentum", "adamw"),)),
    "attach": Rule(0),
    "wrapper": Rule(1, early=True),
    "create_graph": Rule(1, (("leave", "second"),), ("exact",)),
    "save": Rule(3, (("model", "optimizer", "session", "pickle"),), alone=True),
    "load": Rule(2, (("model", "optimizer", "both"),), LIKE_DDP),
    "checkpoint": Rule(3),
    "evaluate": Rule(3, (("eval", "no_grad", "inference", "copy"),), alone=True),
    "validate": Rule(3, (("eval", "inference"),)),
    "mode": Rule(2, (("eval", "part", "train"),)),
    "buffers": Rule(3, (("reset", "load", "replace", "update_bn"),), alone=True),
    "copy": Rule(2, (("model", "optimizer", "both"),), alone=True, early=True),
    "exchange": Rule(2, (("parameters", "average", "average_and_back", "scaled"),), NOT_DELAYED),
    "compile": Rule(1, (("in_place", "around"), ("eager", "aot_eager")), LIKE_DDP, early=True),
    "fail": Rule(2, (("forward", "backward", "alone"),)),
    "interrupt": Rule(1, (), LIKE_DDP),
    "drop": Rule(2),
    "switch": Rule(4, (("1", "2", "100"),)),
    "switch_within": Rule(2, (("1", "2", "100"),), NOT_DELAYED),
    "reattach": Rule(2, (("1", "2", "100"),), ("exact", "sharded", "delayed", "late")),
    "report": Rule(1, alone=True),
    "resize": Rule(1, (), NOT_DELAYED),
    "glance": Rule(8, (GLANCES,), ("late",), alone=True),
}

OFTEN: dict[str, dict[str, int]] = {
    "sparse": {"checkpoint": 10},
    "sharded": {"exchange": 8, "look": 1, "keep": 1},  # the last two are refused, as a rule
    "late": {"look": 0, "keep": 1, "evaluate": 8, "copy": 5, "save": 5, "checkpoint": 5},
    "outer": {"switch": 10, "checkpoint": 10},
}
"""Weights of actions that try what is particular to a kind."""
TRAINS = {"exact": 0.3, "sparse": 0.7, "sharded": 0.6, "delayed": 0.5, "late": 0.8, "outer": 0.8}
"""How often there are steps between two actions: what is carried from step to step shows in the next ones only."""

KNOWN: tuple[str, ...] = ()
"""Patterns of lines that are not drawn: what they find is known, and not yet mended."""


def draw(seed: int) -> Script:
    """A script of a seed, without what is known to fail."""
    for attempt in range(1000):
        script = normal(_draw(random.Random(1000 * seed + attempt)))
        if not any(re.search(pattern, script.line()) for pattern in KNOWN):
            return script
    raise AssertionError("everything is known to fail")


def draw_scripts(count: int, seed: int, ranks: int | None = None) -> list[Script]:
    """The first scripts of a seed, those on so many ranks first asked for."""
    found, number = list[Script](), 1_000_000 * seed
    while len(found) < count:
        script = draw(number)
        number += 1
        if ranks in (None, script.ranks):
            found.append(script)
    return found


def _draw(chance: random.Random) -> Script:
    kind = chance.choices(KINDS, (10, 4, 6, 4, 6, 5))[0]
    ranks = 3 if chance.random() < 0.2 else 2
    features = tuple(feature for feature in FEATURES if chance.random() < 0.2)
    optimizer = chance.choice(("sgd", "momentum", "adamw", "adamw", "rmsprop", "adamw_loop", "muon", "muon"))
    if kind == "exact" and chance.random() < 0.07:
        optimizer = "lbfgs"
    early = [_draw_action(chance, kind, early=True) for _ in range(chance.choice((0, 0, 1, 2)))]
    actions = [one for _ in range(chance.randint(2, 9)) for one in _draw_between(chance, kind)]
    first = [*early, Action("attach")] if early else []
    return Script(
        kind=kind,
        ranks=ranks,
        dtype=chance.choice(("float32", "float32", "float64")),
        broadcast="off" if chance.random() < 0.1 else "",
        framework="accelerate" if kind == "exact" and chance.random() < 0.25 else "",
        model=features,
        optimizer=optimizer,
        buckets=chance.choice((1, 2, 3, 100)),
        habit=chance.choice(("", "", "find_unused", "static")),
        actions=(*first, *actions, Action("train", ("2",))),
        weights=chance.choices(("", "equal", "unequal"), (8, 1, 1))[0],
    )


def _draw_between(chance: random.Random, kind: str) -> Iterator[Action]:
    """An action, and steps before it."""
    action = _draw_action(chance, kind)
    if action.name != "train" and chance.random() < TRAINS[kind]:
        yield Action("train", (chance.choice(("1", "1", "2")),))
    yield action


def _draw_action(chance: random.Random, kind: str, *, early: bool = False) -> Action:
    if not early and chance.random() < 0.25:
        habits = [habit for habit, (_, kinds) in HABITS.items() if kind in kinds]
        habit = chance.choice(habits)
        return Action("loop", (habit, chance.choice(HABITS[habit][0])))
    rules = {name: rule for name, rule in RULES.items() if kind in rule.kinds and (rule.early or not early)}
    often = OFTEN.get(kind, {})
    name = chance.choices(list(rules), [often.get(name, rule.weight) for name, rule in rules.items()])[0]
    rule = rules[name]
    rank = chance.choice((0, 1)) if rule.alone and chance.random() < 0.4 else None
    arguments = tuple(chance.choice(words) for words in rule.arguments)
    if kind in SHARED and (name, *arguments) == ("look", "norm"):
        rank = None  # every rank has to be there
    return Action(name, arguments, rank)


def normal(script: Script) -> Script:
    """The script without what its kind of plan, its number of ranks or its model does not permit."""
    features, actions = list(script.model), list(script.actions)
    names = {action.name for action in actions}
    habits = {action.arguments[0] for action in actions if action.name == "loop"}
    dtype, optimizer, habit = script.dtype, script.optimizer, script.habit
    if script.ranks > 2 or script.kind in ("sharded", "delayed") or script.weights == "unequal":
        dtype = "float64"  # sums have several orders
    if optimizer == "muon" and script.kind not in WITH_MUON:
        optimizer = "adamw"
    if optimizer == "muon" and script.ranks > 2:  # the last bit of a narrow gradient may be much of a direction
        actions = [a for a in actions if a.name != "loop" or a.arguments[0] != "autocast"]
    if script.kind == "delayed":
        optimizer = "momentum" if optimizer in ("momentum", "adamw") else "sgd"
    if "validate" in names:  # behind a forward without gradients DDP leaves ranks what they change in buffers
        actions = [replace(a, arguments=("eval",)) if a.arguments == ("no_grad",) else a for a in actions]
        actions = [a for a in actions if a.name not in ("buffers", "fail")]  # after which ranks have their own, too
    # With outer steps, where one rank's backward raises, it is a step of the others alone.
    actions = [a for a in actions if script.kind != "outer" or a.arguments != ("alone",)]
    if script.kind == "delayed" and "clip" in habits:  # by a norm that is each rank's own
        features = [feature for feature in features if feature != "expert"]
    if "growing" in features:  # a forward in training mode on one rank alone would leave DDP buffers of unlike sizes
        trains = ({"no_grad"}, {"update_bn"})
        actions = [replace(a, rank=None) if set(a.arguments) in trains else a for a in actions]
    framework = script.framework if optimizer != "lbfgs" else ""
    weights, actions = _weights(replace(script, framework=framework, optimizer=optimizer), actions)
    features = [one for one in features if weights != "unequal" or one not in ("unused", "apart", "expert")]
    if framework:
        actions = [a for a in actions if a.name not in NOT_WITH_ACCELERATE]
        actions = [
            a for a in actions if a.name != "loop" or a.arguments[0] not in ("scaler", "closure", "second", "every")
        ]
        features = [feature for feature in features if feature not in ("unused", "apart")]
    else:
        actions = [a for a in actions if a.name != "loop" or a.arguments[1] not in WITH_ACCELERATE]
    if optimizer == "lbfgs":
        drop = {"scaler", "closure", "edit", "clip", "penalty", "every"}
        actions = [a for a in actions if a.name != "loop" or a.arguments[0] not in drop]
        actions = [
            a for a in actions if a.name not in ("add_group", "optimizer", "freeze", "thaw", "wrapper", "switch_within")
        ]
    if ("alone",) in {action.arguments for action in actions}:  # of two forwards no gradient comes before it raises
        actions = [a for a in actions if a.arguments[:1] != ("forwards",)]
    if "compile" in names:
        features = [
            feature for feature in features if feature not in ("unused", "apart", "checkpoint", "growing", "expert")
        ]
        # Compiled code looks at hooks again only where it is compiled again, which the reference does not come to here.
        actions = [a for a in actions if a.name != "fail"]
    moving = {"unused", "apart"} & set(features) or names & {"freeze", "thaw"}
    if habit == "static" and (moving or names & {"create_graph", "fail", "interrupt", "evaluate", "compile"} or habits):
        habit = ""
    if moving:
        habit = "find_unused"
    if "resize" in names and (script.ranks < 3 or names & {"drop"} or "second" in habits):
        actions = [a for a in actions if a.name != "resize"]
    return replace(
        script, dtype=dtype, optimizer=optimizer, habit=habit, framework=framework, weights=weights,
        model=tuple(features),
        actions=tuple(actions),
    )  # fmt: skip


def _weights(script: Script, actions: list[Action]) -> tuple[str, list[Action]]:
    """The weights that it may have, and the actions that it may have with them."""
    added = {("zero", "zeros"), ("zero", "skip"), ("every", "2"), ("every", "3"), ("own", "each")}
    if script.kind in OWN_WEIGHTS or added & {action.arguments for action in actions}:
        return "", actions  # averages that are not zeroed, and gradients of ranks' own, come behind those of the step
    if script.weights != "unequal" or script.kind == "sparse" or script.framework or script.optimizer == "muon":
        return script.weights and "equal", actions
    # DDP's hooks see gradients of a weighed loss; what a rank of weight 0 has may not be infinite.
    hard = (("micro", "uneven"), ("scaler", "overflow"))
    return "unequal", [a for a in actions if a.name not in ("hook", "resize") and a.arguments not in hard]


# Making a failing script smaller.


def simpler(script: Script) -> list[Script]:
    """Scripts that are a little simpler, the boldest first."""
    tries = [*_fewer_actions(script)]
    tries += [replace(script, model=tuple(f for f in script.model if f != feature)) for feature in script.model]
    defaults = {
        "ranks": 2, "dtype": "float32", "optimizer": "sgd", "buckets": 100, "habit": "", "broadcast": "",
        "framework": "", "weights": "",
    }  # fmt: skip
    tries += [replace(script, **{name: value}) for name, value in defaults.items()]  # type: ignore[arg-type]
    for i, action in enumerate(script.actions):
        plainer = []
        if action.rank is not None:
            plainer.append(replace(action, rank=None))
        if action.name == "train" and action.arguments != ("1",):
            plainer.append(replace(action, arguments=("1",)))
        tries += [replace(script, actions=(*script.actions[:i], one, *script.actions[i + 1 :])) for one in plainer]
    found = dict.fromkeys(normal(one) for one in tries)
    return [one for one in found if one.weight < script.weight]


def _fewer_actions(script: Script) -> Iterator[Script]:
    count = len(script.actions)
    length = count // 2
    while length >= 1:
        for start in range(0, count - length + 1, length):
            yield replace(script, actions=(*script.actions[:start], *script.actions[start + length :]))
        length //= 2
