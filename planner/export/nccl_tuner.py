"""`--to nccl-tuner`: rows for NCCL's example tuner plugin, which chooses an algorithm by the size of a message.

One row is `colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff`; −1 leaves a field
to NCCL. Only the buckets that a plan sends by a tree say anything: `library` is NCCL's own choice, so it has no row.
"""

from __future__ import annotations

from itertools import groupby

from planner.export.base import Export, bucket_sizes, cost, members_of, stock_plan, stock_us
from planner.model.problem import Problem
from runtime.errors import InputError
from runtime.plan import Plan

COLUMNS = "colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
USE = (
    "NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=FILE; the buckets themselves: --to ddp",
    "a tree here sends whole chunks, which is NCCL's simple protocol",
)


def to_nccl_tuner(plan: Plan, problem: Problem | None) -> Export:
    """Return rows for the tuner. Raises InputError where no bucket is sent by a tree."""
    plan, notes = stock_plan(plan)
    sizes = bucket_sizes(plan, problem)
    trees = {size for size, bucket in zip(sizes, plan.buckets, strict=True) if bucket.transport.tunable}
    others = {size for size, bucket in zip(sizes, plan.buckets, strict=True) if not bucket.transport.tunable}
    if both := sorted(trees & others):
        notes.append(f"buckets of {both[0]:,} bytes go by a tree and otherwise: NCCL chooses by size alone, so all do")
    if not trees:
        raise InputError(
            "--to nccl-tuner: found no bucket with the algorithm 'tree'; every all-reduce is left to the library or "
            "made of phases, so there is nothing to tell a tuner: use NCCL as it is, with the buckets of --to ddp"
        )
    phases = sorted({b.algorithm for b in plan.buckets if not (b.transport.stock or b.transport.tunable)})
    if phases:
        more_us = None
        if problem is not None and plan.predicted is not None:
            more_us = stock_us(problem, members_of(plan, problem)) - plan.predicted.iteration_us
        notes.append(f"{', '.join(phases)} cannot be expressed: NCCL chooses; all by its own choice, {cost(more_us)}")
    nodes = plan.world.nodes or -1
    rows = [
        f"allreduce,{low},{high},tree,simple,-1,{nodes},{plan.world.ranks},-1,-1" for low, high in _runs(trees, others)
    ]
    notes = [*notes, *USE]
    text = "\n".join([f"# {COLUMNS}", *(f"# {note}" for note in notes), *rows]) + "\n"
    return Export(text=text, document={"rows": rows, "notes": notes}, notes=tuple(notes))


def _runs(trees: set[int], others: set[int]) -> list[tuple[int, int]]:
    """Return (smallest, largest) of each run of sizes that no size of the others comes between."""
    runs = [list(run) for is_tree, run in groupby(sorted(trees | others), key=trees.__contains__) if is_tree]
    return [(run[0], run[-1]) for run in runs]
