"""`planner profile`."""

from __future__ import annotations

from dataclasses import replace

import typer

from planner.cli.commands import Profile
from planner.cli.options import Flags, printed_json
from planner.jobs.job import find_job
from planner.jobs.on_rank import profile_rank
from planner.jobs.rank_options import under_torchrun
from planner.jobs.world import choose_device, is_first_rank, on_ranks
from planner.passes.local_async import check_updaters
from planner.profile.request import make_request
from planner.report.files import check_writable
from planner.report.tables import profile_lines
from planner.testbed.hosts import describe


def profile(asked: Profile) -> None:
    """Profile a job on ranks, and save and print the result."""
    if asked.updaters is not None:
        check_updaters(asked.updaters, "--updaters")
    units = asked.parallel is not None
    request = make_request(asked.measure_for, asked.add_to, asked.budget_s, asked.updaters, units)
    where = asked.where
    if request.add_to is not None and where.are_open and not under_torchrun():
        world = request.add_to.world  # measured where that was
        where = replace(where, ranks=None if world.emulation else world.ranks, emulate=world.emulation)
    output = asked.output or asked.add_to or "profile.json"
    check_writable(output, find_job(asked.job)[0])
    device, shown = choose_device(where.device), not Flags.as_json
    result = on_ranks(
        where, profile_rank, asked.job, device, shown, where.timeout_s, asked.updaters or 0, request
    )[0]  # fmt: skip
    if not is_first_rank():
        return
    result.save(output)
    if printed_json(result.to_document):
        return
    emulated = [] if result.world.emulated is None else [f"measured on the {describe(result.world.emulation)}"]
    summary = [] if result.units is None else [result.units.summary]
    typer.echo("\n".join([*profile_lines(result), *summary, *emulated, f"wrote {output}"]))
