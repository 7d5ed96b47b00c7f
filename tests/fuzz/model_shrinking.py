"""Makes a failing case smaller: which simpler cases to try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from models import Case, normal


def simpler(case: Case) -> list[Case]:
    """Cases that are a little simpler, the boldest first."""
    tries = [*_fewer_nodes(case), *_fewer_steps(case)]
    defaults = {name: field.default for name, field in Case.__dataclass_fields__.items()}
    tries += [replace(case, **{name: value}) for name, value in defaults.items() if name not in ("nodes", "steps")]
    for i, step in enumerate(case.steps):
        for plainer in _plainer(step):
            tries.append(replace(case, steps=(*case.steps[:i], plainer, *case.steps[i + 1 :])))
    for i, node in enumerate(case.nodes):
        for plainer in [*_plainer(node), replace(node, kind="linear")]:
            tries.append(replace(case, nodes=(*case.nodes[:i], plainer, *case.nodes[i + 1 :])))
    for i, plan in enumerate(case.plans):
        for plainer in _plainer(plan):
            tries.append(replace(case, plans=tuple(plainer if j == i else p for j, p in enumerate(case.plans))))
    found = dict.fromkeys(normal(one) for one in tries)
    return [one for one in found if one.weight < case.weight]


def _plainer(record: Any) -> list[Any]:
    fields = type(record).__dataclass_fields__
    return [replace(record, **{name: fields[name].default}) for name in fields if name not in ("kind", "inputs")]


def _fewer_nodes(case: Case) -> Iterator[Case]:
    count = len(case.nodes)
    length = count
    while length >= 1:
        for start in range(0, count - length + 1, max(1, length)):
            yield _without_nodes(case, start, start + length)
        length //= 2


def _without_nodes(case: Case, start: int, stop: int) -> Case:
    """The case without nodes start … stop − 1; what read them reads what came before them."""

    def value(v: int) -> int:
        return v if v <= start else max(start, v - (stop - start))

    def node(n: int | None) -> int | None:
        return n if n is None or n < start else (None if n < stop else n - (stop - start))

    kept = [
        replace(one, inputs=(value(one.inputs[0]), value(one.inputs[1])), same_as=node(one.same_as))
        for one in (*case.nodes[:start], *case.nodes[stop:])
    ]
    kept = [replace(one, tied_to=node(one.tied_to)) for one in kept]
    outputs, lost = (tuple(value(v) for v in values) for values in (case.outputs, case.lost))
    return replace(case, nodes=tuple(kept), outputs=outputs, lost=lost)


def _fewer_steps(case: Case) -> Iterator[Case]:
    for i in range(len(case.steps)):
        if len(case.steps) > 1:
            yield replace(case, steps=(*case.steps[:i], *case.steps[i + 1 :]))
