"""`planner diff`: what two plans do differently, what each predicts, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Any

from planner.documents.text import SENTENCE_CHARACTERS, milliseconds, pluralize, sanitize
from planner.report.listing import Listing, make_console, print_tables
from planner.report.tables import SHOWN_BUCKETS
from runtime.plan import Plan, PlanBucket
from runtime.plan.executed import FOR_READERS, executed_part, spelled_options


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing in which two plans differ; `first` and `second` are what each has, as text."""

    what: str
    first: str
    second: str


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Report of `planner diff`."""

    executed: tuple[Row, ...]
    """Differences in execution; none if the plans train the same way."""
    predicted: tuple[Row, ...]
    """Predictions, and where numbers came from, as far as they are not equal."""

    @property
    def same(self) -> bool:
        """Return whether both plans execute the same."""
        return not self.executed

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"same": self.same, **asdict(self)}


def difference(first: Plan, second: Plan) -> Difference:
    """Return in what two plans differ.

    Options that are spelt out in one plan and left out in the other, with the same meaning, are no difference.
    """
    executed = list(_executed_rows(executed_part(first), executed_part(second)))
    return Difference(executed=tuple(executed), predicted=tuple(_rows(_predictions(first), _predictions(second))))


def _executed_rows(first: Plan, second: Plan) -> Iterator[Row]:
    if first == second:
        return
    yield from _rows(_options(first), _options(second))
    for number, pair in enumerate(zip(first.phases or (), second.phases or (), strict=False)):
        for row in _executed_rows(pair[0].plan, pair[1].plan):
            yield replace(row, what=f"phase {number}: {row.what}")
    yield from _bucket_rows(first.buckets, second.buckets)
    yield from _rows([{"phase_order": first.phase_order}], [{"phase_order": second.phase_order}])
    if first.fallback is not None and second.fallback is not None:
        for row in _executed_rows(first.fallback, second.fallback):
            yield replace(row, what=f"fallback: {row.what}")
    else:
        yield from _rows([{"fallback": first.fallback and "one"}], [{"fallback": second.fallback and "one"}])


_SHOWN_APART = FOR_READERS | {
    "schema", "model", "world", "accuracy", "interface", "from_step", "buckets", "phases", "fallback", "phase_order",
    "updates", "shares", "cuts",
}  # fmt: skip
"""Fields of a plan that are no record with the options of a mode."""


def _options(plan: Plan) -> Iterator[Mapping[str, Any]]:
    """Yield what a plan says of its execution besides buckets, by name, in groups."""
    named = {"model": plan.model.fingerprint, **vars(plan.world)}
    yield named | {"accuracy": plan.accuracy, "interface": plan.interface, "from_step": plan.from_step}
    cuts = plan.cuts if plan.cuts is None else plan.cuts or "none at all"
    borders = None if plan.phases is None else tuple(str(phase.until_step or "by call") for phase in plan.phases[:-1])
    yield {"shares": plan.shares, "cuts": cuts, "borders of phases": borders}
    records = {each.name: getattr(plan, each.name) for each in fields(plan) if each.name not in _SHOWN_APART}
    updates = plan.updates
    of_update = ("norms", "operator", "step")
    records |= {f"updates.{name}": updates and getattr(updates, name) for name in of_update}
    for prefix, record in records.items():
        yield {f"{prefix}.{name}": value for name, value in vars(record).items()} if record else {}


def _rows(first: Iterable[Mapping[str, Any]], second: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a row for each name under which two mappings hold different values, for each pair of them."""
    for left, right in zip(first, second, strict=True):
        for name in dict.fromkeys([*left, *right]):
            if left.get(name) != right.get(name):
                yield Row(what=name, first=_text(left.get(name)), second=_text(right.get(name)))


def _text(value: Any) -> str:
    if value is None or value == () or value == {}:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {each}" for name, each in value.items())
    if isinstance(value, tuple):
        return ", ".join("+".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value)
    return str(value)


def _bucket_rows(first: Sequence[PlanBucket], second: Sequence[PlanBucket]) -> Iterator[Row]:
    """Yield a row for each smallest set of gradients that both plans have in buckets of their own, if those differ."""
    if first == second:
        return
    group = {name: [name] for bucket in (*first, *second) for name in bucket.gradients}
    for bucket in (*first, *second):
        for name in bucket.gradients:
            smaller, larger = sorted((group[bucket.gradients[0]], group[name]), key=len)
            if smaller is not larger:
                larger += smaller
                group |= dict.fromkeys(smaller, larger)
    members: dict[int, list[str]] = {}
    for name, names in group.items():
        members.setdefault(id(names), []).append(name)
    sides: dict[int, tuple[list[PlanBucket], list[PlanBucket]]] = {root: ([], []) for root in members}
    for side, buckets in enumerate((first, second)):
        for bucket in buckets:
            sides[id(group[bucket.gradients[0]])][side].append(bucket)
    odd = {root: pair for root, pair in sides.items() if pair[0] != pair[1]}
    for root, (left, right) in odd.items():
        names = members[root]
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        yield Row(what=f"gradients {shown}", first=_bucket_text(left), second=_bucket_text(right))
    if not odd:
        orders = [", ".join(bucket.gradients[0] for bucket in buckets) for buckets in (first, second)]
        yield Row(what="launch order", first=orders[0], second=orders[1])


def _bucket_text(buckets: Sequence[PlanBucket]) -> str:
    """Describe buckets: their number, sizes and forms."""
    if not buckets:
        return "–"
    forms = dict.fromkeys(f"{one.collective}/{one.algorithm} {spelled_options(one.compressor)}" for one in buckets)
    sizes = "+".join(str(len(bucket.gradients)) for bucket in buckets)
    counted = pluralize(len(buckets), "bucket")
    return f"{counted} of {sizes}: {'; '.join(forms)}"


def _predictions(plan: Plan) -> Iterator[Mapping[str, Any]]:
    """Yield what a plan says of its times and their sources, by name, in groups."""
    said, fallback = plan.predicted, plan.fallback and plan.fallback.predicted
    yield (
        {}
        if said is None
        else {
            "step (ms)": milliseconds(said.iteration_us),
            "exposed (ms)": milliseconds(said.exposed_us),
            "update (ms)": milliseconds(said.update_us),
        }
    )
    yield {"fallback (ms)": fallback and milliseconds(fallback.iteration_us)}
    yield {"bound (ms)": plan.certificate and milliseconds(plan.certificate.lower_bound_us)}
    yield {f"baseline {name} (ms)": milliseconds(of.iteration_us) for name, of in (plan.baselines or {}).items()}
    yield {"model name": plan.model.name, "torch": plan.world.torch}
    yield {f"source of {name}": text for name, text in (plan.sources or {}).items()}


def print_difference(found: Difference, names: tuple[str, str]) -> None:
    """Print what is executed differently and what is predicted differently; `names` are the plans' files."""
    console = make_console()
    how = "execute the same" if found.same else f"differ in {pluralize(len(found.executed), 'thing')} that they execute"
    console.print(f"{names[0]} and {names[1]} {how}", highlight=False)
    titles = (("what they do differently", found.executed), ("what they predict, and from what", found.predicted))
    for title, rows in titles:
        columns = ("what", f"first: {sanitize(names[0])}", f"second: {sanitize(names[1])}")
        cells = [tuple(sanitize(text, SENTENCE_CHARACTERS) for text in astuple(row)) for row in rows[:SHOWN_BUCKETS]]
        if len(rows) > SHOWN_BUCKETS:
            cells.append(("…", f"{len(rows) - SHOWN_BUCKETS} more: see --json", ""))
        if rows:
            print_tables(Listing(title, columns, cells, left=columns), console=console)
