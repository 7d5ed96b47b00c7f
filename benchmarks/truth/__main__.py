"""Measures how true predictions are, and writes docs/results/truth.md.

python -m benchmarks.truth --quick        # some cells, ten minutes
python -m benchmarks.truth                # all; resumes where an earlier run was stopped
python -m benchmarks.truth --foreign      # models that this project did not write
python -m benchmarks.truth --lossy        # the same cells with lossy plans
python -m benchmarks.truth --delayed      # with plans with delay
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.resumable import kept
from benchmarks.truth.cells import Cell, Result, cell_rank, summarize
from benchmarks.truth.report import cell_lines, plan_lines, summary, write_into
from planner.documents.profile import Profile
from planner.jobs.on_rank import profile_rank
from planner.jobs.rank_options import RankOptions
from planner.jobs.world import on_ranks
from planner.profile.request import Request

MODELS = ("resnet20", "resnet18", "vgg", "lstm", "gpt")
RATES = ("unshaped", "1gbit", "100mbit")
HOSTS = (2, 4)
QUICK = (Cell("gpt", 2, "unshaped"), Cell("vgg", 2, "1gbit"), Cell("lstm", 2, "1gbit"), Cell("gpt", 2, "100mbit"))
FOREIGN = tuple(
    Cell(f"benchmarks.truth.foreign:{model}_job", hosts, rate)
    for model, hosts, rate in (
        ("bert", 2, "1gbit"), ("vit", 2, "1gbit"), ("gpt2", 2, "1gbit"), ("t5", 2, "1gbit"), ("unet", 2, "1gbit"),
        ("wide", 2, "1gbit"), ("deep", 2, "1gbit"), ("vit", 4, "1gbit"), ("bert", 4, "100mbit"),
        ("gpt2", 2, "unshaped"),
    )
)  # fmt: skip
LOSSY = tuple(
    Cell(model, hosts, rate, lossy=True)
    for hosts in HOSTS for rate in ("1gbit", "100mbit") for model in ("resnet18", "vgg", "lstm", "gpt")
)  # fmt: skip
DELAYED = tuple(Cell(model, 4, rate, delayed=True) for rate in ("1gbit", "100mbit") for model in ("resnet18", "vgg"))
DOCUMENT = Path("docs/results/truth.md")


def main() -> int:
    """Measures what is missing, prints, writes; 0 even where a target is missed: the document says so."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few cells; writes nothing but the results")
    parser.add_argument(
        "--cells", nargs="+", default=None, help="for example gpt@2x1@1gbit, or path/to/job.py:job@2x1@1gbit"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--foreign", action="store_true", help="models that this project did not write")
    kinds.add_argument("--lossy", action="store_true", help="with plans that send a part of the gradients")
    kinds.add_argument("--delayed", action="store_true", help="with plans with delay")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a plan in each round")
    parser.add_argument("--results", type=Path, default=None, help="JSON lines: not measured again")
    parser.add_argument("--output", type=Path, default=None, help=f"the document to write, such as {DOCUMENT}")
    options = parser.parse_args()
    wanted = {cell.key: partial(_document, cell, options.rounds, options.steps) for cell in _cells(options)}
    records = kept(options.results, wanted, name_of=lambda record: Cell(**record["cell"]).key)
    results = [Result.parse(record) for record in records]
    if not results:
        return 3
    print("\n".join([*summary(results), "", *cell_lines(results), "", *plan_lines(results)]))
    if options.output is not None:
        options.output.write_text(write_into(options.output.read_text(encoding="utf-8"), results), encoding="utf-8")
    return 0


def _cells(options: argparse.Namespace) -> list[Cell]:
    if options.cells:
        named = [_cell(text) for text in options.cells]
        return [replace(cell, lossy=options.lossy, delayed=options.delayed) for cell in named]
    chosen = [(options.quick, QUICK), (options.foreign, FOREIGN), (options.lossy, LOSSY), (options.delayed, DELAYED)]
    return list(next((cells for wanted, cells in chosen if wanted), _all()))


def _all() -> list[Cell]:
    return [Cell(model, hosts, rate) for hosts in HOSTS for rate in RATES for model in MODELS]


def _cell(text: str) -> Cell:
    model, shape, rate = text.rsplit("@", 2)
    return Cell(model, int(shape.partition("x")[0]), rate)


def _document(cell: Cell, rounds: int, steps: int) -> dict[str, Any]:
    return measure(cell, rounds, steps).to_document()


def measure(cell: Cell, rounds: int, steps: int) -> Result:
    """One start of the ranks."""
    spec = cell.model if cell.foreign else f"benchmarks.truth.jobs:{cell.model}_job"
    emulate = None if cell.rate == "unshaped" else f"{cell.hosts}x1@{cell.rate}"
    options = RankOptions(cell.hosts) if emulate is None else RankOptions(None, emulate=emulate)
    # In a start of its own, as users have it: nothing of it is known to the ranks that are measured.
    user: Profile = on_ranks(options, profile_rank, spec, "cpu", False, None, 0, Request(accuracy=cell.accuracy))[0]
    return summarize(cell, user, on_ranks(options, cell_rank, spec, rounds, steps, cell, user))


if __name__ == "__main__":
    sys.exit(main())
