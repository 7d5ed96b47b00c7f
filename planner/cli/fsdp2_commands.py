"""What commands do with `--parallel fsdp2`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import typer

from planner.cli.options import Flags, print_json
from planner.jobs.rank_options import RankOptions
from runtime.errors import CheckFailed, InputError, PlanMismatch
from runtime.plan import Accuracy

FSDP2 = "fsdp2"
ALIKE = 1e-3
"""Of the largest weight of a parameter: sums in another order differ by less."""

Parallel = Annotated[
    str | None,
    typer.Option(help="fsdp2: for models whose weights are sharded by FSDP2 (planner.fully_shard)."),
]


def for_fsdp2(parallel: str | None, others: Mapping[str, object] | None = None) -> bool:
    """Return whether FSDP2 is asked for.

    Args:
        parallel: the option.
        others: options by name that do not go with it, with their values where they were given.

    Raises InputError: another way to train in parallel, or an option that does not go with this one.
    """
    if parallel is None:
        return False
    if parallel != FSDP2:
        raise InputError(f"--parallel: found {parallel!r}, expected {FSDP2}, or nothing for gradients in buckets")
    for name, value in (others or {}).items():
        if value not in (None, False, ""):
            raise InputError(f"{name}: found {value}, which is not built for --parallel fsdp2 yet; leave it out")
    return True


def compare_fsdp2(
    job: str, plan: str, profile: str | None, where: RankOptions, rounds: int, steps: int, timeout_s: float
) -> None:
    """Measure and print. Raises CheckFailed where wrappings train differently."""
    from planner.comparison.fsdp2 import compare_rank_fsdp2, comparison_table, make_variants, summarize
    from planner.jobs.job import find_job
    from planner.jobs.world import choose_device, is_first_rank, on_ranks, planned_ranks
    from planner.report.tables import make_console, print_table
    from runtime.plan import load_plan

    find_job(job)
    loaded = load_plan(plan)
    variants = make_variants(loaded, plan, profile)
    if where.ranks is None and where.emulate is None:
        where = replace(where, ranks=planned_ranks(loaded.world.ranks, plan))
    measured = (job, loaded, variants, rounds, steps // rounds, choose_device(where.device), timeout_s)
    try:
        found = summarize(variants, on_ranks(where, compare_rank_fsdp2, *measured))
    except PlanMismatch as error:
        raise PlanMismatch(f"{plan}: {error}") from error
    if not is_first_rank():
        return
    if Flags.as_json:
        print_json(found.to_document())
    else:
        print_table(make_console(), comparison_table(found))
        typer.echo("\n".join(found.verdicts))
    odd = [row.name for row in found.rows if row.difference > ALIKE]
    if odd:
        raise CheckFailed(
            f"{', '.join(odd)}: weights differ from those of a group for each block by more than {ALIKE:g}, though all "
            f"were given the same batches and seeds; expected a job in which batch(step, rank) and the loss depend on "
            f"nothing else, such as a counter or a generator of their own"
        )


def optimize_fsdp2(
    profile: str, cluster: str | None, output: str, accuracy: Accuracy, max_memory_mib: float | None
) -> None:
    """Decide, save and print."""
    from planner.fsdp2.decide import optimize_fsdp2 as decide
    from planner.report.files import check_writable

    check_writable(output, profile, cluster)
    plan = decide(profile, cluster, accuracy=accuracy, max_memory_mib=max_memory_mib)
    plan.save(output)
    if Flags.as_json:
        print_json(plan.to_document())
        return
    from planner.report.tables import make_console, print_plan

    console = make_console()
    print_plan(plan, console, buckets=False)
    console.print(f"wrote {output}; see `planner explain {output}`", highlight=False)


def rehearse_fsdp2(
    profile: str, cluster: str | None, hosts: str | None, max_memory_mib: float | None, minutes: float,
    dilate: float | None, shrink: float | None, started_s: float,
) -> None:  # fmt: skip
    """Rehearse and print."""
    from planner.rehearse.fsdp2 import make_asked_units, rehearse_units, units_table
    from planner.report.tables import make_console, print_table

    asked = make_asked_units(
        profile, cluster, hosts, max_memory_mib=max_memory_mib, minutes=minutes, dilate=dilate, shrink=shrink
    )
    found = rehearse_units(asked, started_s=started_s, show_progress=not Flags.as_json)
    if Flags.as_json:
        print_json(found.to_document())
        return
    print_table(make_console(), units_table(found))
    typer.echo("\n".join([*found.comparison.verdicts, *found.notes]))
