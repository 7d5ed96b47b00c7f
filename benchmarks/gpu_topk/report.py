"""What was measured, held against the targets, as Markdown."""

from __future__ import annotations

from dataclasses import dataclass

PART = "measured"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    elements: int
    time_us: float
    p95_us: float
    useful_bytes: int
    """What has to be read and written in any case."""
    copy_share: float
    """Of the bandwidth of a copy in the same run, by the useful bytes."""
    ratio: float | None = None
    """How many times longer the other way takes, where it is compared."""


@dataclass(frozen=True)
class Target:
    """One limit, and what was found."""

    what: str
    found: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether it is kept."""
        return self.found <= self.limit if self.at_most else self.found >= self.limit


def table(rows: list[Row]) -> str:
    """Times."""
    lines = [
        "| what | elements | median µs | p95 µs | bytes per element | share of a copy | times longer than the kernel |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.1f}"
        each = row.useful_bytes / row.elements
        times = f"{row.time_us:.1f} | {row.p95_us:.1f}"
        lines.append(f"| {row.what} | {row.elements:,} | {times} | {each:.1f} | {row.copy_share:.0%} | {ratio} |")
    return "\n".join(lines)


def targets_table(targets: list[Target]) -> str:
    """Limits."""
    lines = ["| target | limit | found | met |", "| --- | --- | --- | --- |"]
    for one in targets:
        sign = "≤" if one.at_most else "≥"
        lines.append(f"| {one.what} | {sign} {one.limit:g} | {one.found:.3g} | {'yes' if one.met else '**no**'} |")
    return "\n".join(lines)


def judge(rows: list[Row]) -> list[Target]:
    """The targets that these rows allow to judge."""
    by = {(row.what, row.elements): row for row in rows}
    found: list[Target] = []
    for elements, limit_us in ((1 << 24, 62.0), (1 << 20, 12.0)):
        row = by.get((KERNEL, elements))
        if row is not None:
            found.append(Target(f"{elements:,} elements: µs", row.time_us, limit_us, at_most=True))
    row = by.get((KERNEL, 1 << 27))
    if row is not None:
        found.append(Target(f"{1 << 27:,} elements: share of a copy", row.copy_share, 0.83, at_most=False))
    for (what, elements), row in by.items():
        if what == TORCH and row.ratio is not None and (elements >= 1 << 24 or elements <= 1 << 20):
            limit = 4.0 if elements >= 1 << 24 else 8.0
            found.append(Target(f"{elements:,} elements: times torch's operations", row.ratio, limit, at_most=False))
        if what == ROUNDS and row.ratio is not None and elements >= 1 << 24:
            found.append(Target(f"{elements:,} elements: times MSTopK's rounds", row.ratio, 10.0, at_most=False))
        if what == SEGMENTS and row.ratio is not None:
            found.append(Target("161 segments: times the merged buffer", 1 / row.ratio, 1.3, at_most=True))
    return found


KERNEL = "kernel, float32"
TORCH = "torch: add, abs, topk, gather, fill"
ROUNDS = "MSTopK, 30 rounds of kernels"
SEGMENTS = "kernel, 161 segments of ResNet-50"
