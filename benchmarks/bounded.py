"""`--accuracy bounded --compress all` compared with DDP and its hooks: profile, optimize, compare on emulated hosts.

    python -m benchmarks.bounded --write               # as root; all cells, six minutes each; resumes
    python -m benchmarks.bounded --only bert@4x1@1gbit

Jobs are those of `benchmarks.truth.foreign`, all trained with AdamW. Each cell is measured in one run, all ways in
interleaved rounds, on a machine that should have nothing else to do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.marked import parser_of, tabulate
from planner.testbed.hosts import check_namespaces
from runtime.errors import PlannerError

DOCUMENT, RESULTS = Path("docs/results/bounded.md"), Path("benchmarks/results/bounded.jsonl")
JOBS, LINKS = ("bert", "vit", "gpt2", "t5", "wide"), ("4x1@1gbit", "4x1@200mbit")
INT8, HOOKS = "wire:int8", ("ddp:fp16", "ddp:powersgd")


def command(*arguments: str) -> str:
    """Run `planner`; return its output. Raises PlannerError with what it said last."""
    done = subprocess.run([sys.executable, "-m", "planner", *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: a plan that trains differently, which a bounded one does
        raise PlannerError(f"planner {arguments[0]}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def measure(job: str, link: str) -> dict[str, Any]:
    """One cell: rows of `planner compare --json`, and what the plan is."""
    spec = f"benchmarks.truth.foreign:{job}_job"
    with tempfile.TemporaryDirectory() as folder:
        profile, plan = f"{folder}/profile.json", f"{folder}/plan.json"
        command("profile", spec, "--emulate", link, "--for", "bounded", "-o", profile)
        command("optimize", profile, "--accuracy", "bounded", "--compress", "all", "-o", plan)
        rows = command(
            "--json", "compare", spec, "--plan", plan, "--profile", profile, "--emulate", link, "--strategy", INT8,
            "--steps", "12", "--rounds", "4",
        )  # fmt: skip
        buckets = json.loads(Path(plan).read_text(encoding="utf-8"))["buckets"]
    forms = [bucket.get("compressor") or {} for bucket in buckets]
    names = [form.get("dtype") or (f"rank {form['rank']}" if "rank" in form else "dense") for form in forms]
    return {"plan": ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)), "rows": json.loads(rows)}


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One row for each cell."""
    yield (
        "| job | best DDP ms | fp16 hook | PowerSGD hook | int8 | plan | its buckets | predicted | error | "
        "plan / best DDP | plan / faster hook | hook fp16 / int8 |"
    )
    yield "| --- " * 12 + "|"
    for cell in found:
        rows = {row["name"]: row for row in cell["rows"]}
        times_ms = {name: row["median_us"] / 1e3 for name, row in rows.items() if row["median_us"]}
        best_ms = min(times_ms[name] for name in times_ms if name == "ddp" or name.startswith("ddp:best"))
        hooks = [times_ms[name] for name in HOOKS if name in times_ms]
        plan_ms, row = times_ms["plan"], rows["plan"]
        columns = (
            f"{best_ms:.0f}", *(f"{times_ms[name]:.0f}" if name in times_ms else "" for name in (*HOOKS, INT8)),
            f"{plan_ms:.0f}", cell["plan"], f"{row['predicted_us'] / 1e3:.0f}", f"{row['error']:+.1%}",
            f"{plan_ms / best_ms:.2f}", f"{plan_ms / min(hooks):.2f}", f"{times_ms[HOOKS[0]] / times_ms[INT8]:.2f}",
        )  # fmt: skip
        yield f"| {cell['cell']} | {' | '.join(columns)} |"


def main() -> int:
    """Measure what is missing, print, and write where asked to."""
    options = parser_of(__doc__, DOCUMENT, RESULTS).parse_args()
    check_namespaces()
    wanted = {f"{job}@{link}": partial(measure, job, link) for link in LINKS for job in JOBS}
    return tabulate(DOCUMENT, {"cells": (wanted, lines)}, options)


if __name__ == "__main__":
    sys.exit(main())
