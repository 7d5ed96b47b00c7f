"""Takes every model of the zoo through tracing, profiling, planning and a step; writes docs/results/tracing.md.

    python -m benchmarks.trace_zoo                       # prints the table
    python -m benchmarks.trace_zoo -o docs/results/tracing.md    # puts it between the markers of the file
    python -m benchmarks.trace_zoo bert unet             # some models only

Exit code 1 if a model gets no plan, or too few come through a graph.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from planner.jobs.launch import LocalWorld, run_ranks

TESTS = Path(__file__).resolve().parents[1] / "tests"
BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"
RANKS = 2
WHY_CHARS = 110
HEAD = (
    ("model", "family", "through", "layers", "parameters", "gradients in a layer", "buckets", "s"),
    ("---", "---", "---", "--:", "--:", "--:", "--:", "--:"),
)


def through(visit: Any) -> str:
    """How the layers were found, in a word or three."""
    if visit.error:
        return "**no plan**"
    return "export, one path" if visit.one_path else str(visit.method)


def row(visit: Any) -> tuple[str, ...]:
    """One line of the table."""
    share = f"{visit.attributed} of {visit.gradients}"
    counts = (str(visit.layers), str(visit.parameters), share, str(visit.buckets), f"{visit.trace_s:.1f}")
    return (visit.name, visit.family, through(visit), *counts)


def table(visits: Sequence[Any]) -> str:
    """The table, what it adds up to, and why something else than a graph of all paths was needed."""
    graphs, plans = [v for v in visits if v.graph], [v for v in visits if not v.error]
    paths = sum(visit.one_path for visit in graphs)
    where = f"torch {torch.__version__}, transformers {transformers.__version__}, {RANKS} ranks on CPU"
    lines = [
        f"{len(visits)} models: {len(plans)} get a plan ({len(plans) / len(visits):.0%}), {len(graphs)} come through a "
        f"graph ({len(graphs) / len(visits):.0%}), {paths} of these through one that holds a single path. "
        f"{datetime.now(UTC):%Y-%m-%d}, {where}.",
        "",
        *("| " + " | ".join(cells) + " |" for cells in (*HEAD, *map(row, visits))),
        "",
        "What stood in the way of a graph of all paths:",
        "",
        *(f"- {visit.name}: {why(visit)}" for visit in visits if visit.failures or visit.error),
    ]
    return "\n".join(lines)


def why(visit: Any) -> str:
    """Each attempt that failed, and the beginning of its reason."""
    reasons = {"plan": visit.error} if visit.error else visit.failures
    return "; ".join(f"{name}: `{_short(reason)}`" for name, reason in reasons.items())


def _short(reason: str) -> str:
    text = reason.replace("`", "'")
    return text if len(text) <= WHY_CHARS else text[: WHY_CHARS - 1] + "…"


def put(path: Path, text: str) -> None:
    """Replaces what stands between the markers."""
    document = path.read_text(encoding="utf-8")
    if BEGIN not in document or END not in document:
        sys.exit(f"{path}: found no {BEGIN} … {END}, expected both: the table goes between them")
    before, _, rest = document.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> int:
    """Walks, prints or writes, judges."""
    sys.path.insert(0, str(TESTS))  # ranks inherit it
    from zoo import ZOO
    from zoo.walk import LEAST_GRAPHS, walk

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of: {', '.join(ZOO)}")
    parser.add_argument("-o", "--output", type=Path, help="a file with markers, such as docs/results/tracing.md")
    parser.add_argument("--hurry", action="store_true", help="measure as seldom as can be: a third of the time")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(ZOO):
        parser.error(f"found {', '.join(sorted(unknown))}; expected names of: {', '.join(ZOO)}")
    visits = run_ranks(LocalWorld(ranks=RANKS), walk, arguments.models or list(ZOO), arguments.hurry)[0]
    text = table(visits)
    if arguments.output:
        put(arguments.output, text)
    else:
        print(text)
    graphs = sum(visit.graph for visit in visits) / len(visits)
    return int(any(visit.error for visit in visits) or (not arguments.models and graphs < LEAST_GRAPHS))


if __name__ == "__main__":
    sys.exit(main())
