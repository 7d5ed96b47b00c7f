"""`planner diff`: what two plans do differently, what each predicts, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from planner.documents.text import SENTENCE_CHARACTERS, milliseconds, pluralize, sanitize
from planner.report.tables import SHOWN_BUCKETS, make_console, make_table, print_table
from runtime.plan import Plan, PlanBucket, load_plan
from runtime.plan.executed import executed_part, spelled_options
from runtime.plan.predicted import Prediction

SYNCHRONOUS = "synchronous"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing in which two plans differ; `first` and `second` are what each has, as text."""

    what: str
    first: str
    second: str


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What `planner diff` reports."""

    executed: tuple[Row, ...]
    """What the plans do differently; none where they train the same way."""
    predicted: tuple[Row, ...]
    """Predictions, and where numbers came from, as far as they are not equal."""

    @property
    def same(self) -> bool:
        """Whether both plans execute the same."""
        return not self.executed

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"same": self.same, **asdict(self)}


def difference(first: Plan, second: Plan) -> Difference:
    """Return in what two plans differ.

    Options that are spelt out in one plan and left out in the other, with the same meaning, are no difference.
    """
    executed = list(_executed_rows(executed_part(first), executed_part(second)))
    return Difference(executed=tuple(executed), predicted=tuple(_predicted_rows(first, second)))


def difference_of_files(first: str, second: str) -> Difference:
    """Return in what the plans of two files differ. Raises InputError: a file is no plan."""
    return difference(load_plan(first), load_plan(second))


def _executed_rows(first: Plan, second: Plan) -> Iterator[Row]:
    if first == second:
        return
    both = (first, second)
    yield from _rows("", [{"model": plan.model.fingerprint} for plan in both])
    yield from _rows("", [_fields(plan.world) for plan in both])
    yield from _rows("", [{"accuracy": plan.accuracy, "interface": plan.interface} for plan in both])
    for name in ("delay", "local_async", "fsdp2"):
        yield from _rows(f"{name}.", [_fields(getattr(plan, name)) for plan in both])
    updates = [plan.updates for plan in both]
    yield from _rows("updates.norms.", [_fields(each and each.norms) for each in updates])
    yield from _rows("updates.step.", [_fields(each and each.step) for each in updates])
    yield from _bucket_rows(first.buckets, second.buckets)
    yield from _rows("", [{"phase_order": plan.phase_order} for plan in both])
    if first.fallback is not None and second.fallback is not None:
        for row in _executed_rows(first.fallback, second.fallback):
            yield Row(what=f"fallback: {row.what}", first=row.first, second=row.second)
    elif first.fallback != second.fallback:
        yield Row(what="fallback", first=_text(first.fallback and "one"), second=_text(second.fallback and "one"))


def _fields(record: Any) -> dict[str, Any]:
    return {} if record is None else {each.name: getattr(record, each.name) for each in fields(record)}


def _rows(prefix: str, values: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a row for each name under which two mappings hold different values."""
    first, second = values
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name):
            yield Row(what=f"{prefix}{name}", first=_text(first.get(name)), second=_text(second.get(name)))


def _text(value: Any) -> str:
    if value is None or value == () or value == {}:
        return "–"
    if isinstance(value, tuple):
        return ", ".join("+".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value)
    return str(value)


def _bucket_rows(first: Sequence[PlanBucket], second: Sequence[PlanBucket]) -> Iterator[Row]:
    """Yield a row for each smallest set of gradients that both plans have in buckets of their own, if those differ."""
    if first == second:
        return
    order = dict.fromkeys(name for bucket in (*first, *second) for name in bucket.gradients)
    owner = {name: name for name in order}

    def find(name: str) -> str:
        while owner[name] != name:
            owner[name] = owner[owner[name]]
            name = owner[name]
        return name

    for bucket in (*first, *second):
        for name in bucket.gradients[1:]:
            owner[find(name)] = find(bucket.gradients[0])
    sides: dict[str, tuple[list[PlanBucket], list[PlanBucket]]] = {find(name): ([], []) for name in order}
    members: dict[str, list[str]] = {root: [] for root in sides}
    for name in order:
        members[find(name)].append(name)
    for side, buckets in enumerate((first, second)):
        for bucket in buckets:
            sides[find(bucket.gradients[0])][side].append(bucket)
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
    forms = list(dict.fromkeys(map(_form, buckets)))
    sizes = "+".join(str(len(bucket.gradients)) for bucket in buckets)
    counted = pluralize(len(buckets), "bucket")
    return f"{counted} of {sizes}: {'; '.join(forms)}"


def _form(bucket: PlanBucket) -> str:
    return f"{bucket.collective}/{bucket.algorithm} {spelled_options(bucket.compressor)}"


def _predicted_rows(first: Plan, second: Plan) -> Iterator[Row]:
    both = (first, second)
    yield from _rows("", [_times(plan.predicted) for plan in both])
    yield from _rows("", [{"fallback (ms)": _step(plan.fallback)} for plan in both])
    bounds = [plan.certificate and milliseconds(plan.certificate.lower_bound_us) for plan in both]
    yield from _rows("", [{"bound (ms)": bound} for bound in bounds])
    baselines = [{f"baseline {name} (ms)": milliseconds(of.iteration_us) for name, of in (plan.baselines or {}).items()}
                 for plan in both]  # fmt: skip
    yield from _rows("", baselines)
    yield from _rows("", [{"model name": plan.model.name, "torch": plan.world.torch} for plan in both])
    yield from _rows("source of ", [plan.sources or {} for plan in both])


def _times(predicted: Prediction | None) -> dict[str, str]:
    if predicted is None:
        return {}
    return {
        "step (ms)": milliseconds(predicted.iteration_us),
        "exposed (ms)": milliseconds(predicted.exposed_us),
        "update (ms)": milliseconds(predicted.update_us),
    }


def _step(plan: Plan | None) -> str | None:
    return None if plan is None or plan.predicted is None else milliseconds(plan.predicted.iteration_us)


def print_difference(found: Difference, names: tuple[str, str]) -> None:
    """Print what is executed differently and what is predicted differently; `names` are the plans' files."""
    console = make_console()
    if found.same:
        console.print(f"{names[0]} and {names[1]} execute the same", highlight=False)
    titles = (("what they do differently", found.executed), ("what they predict, and from what", found.predicted))
    for title, rows in titles:
        columns = ("what", f"first: {sanitize(names[0])}", f"second: {sanitize(names[1])}")
        table = make_table(title, columns, left=columns)
        for row in rows[:SHOWN_BUCKETS]:
            table.add_row(*(sanitize(text, SENTENCE_CHARACTERS) for text in (row.what, row.first, row.second)))
        if len(rows) > SHOWN_BUCKETS:
            table.add_row("…", f"{len(rows) - SHOWN_BUCKETS} more: see --json", "")
        if rows:
            print_table(console, table)
