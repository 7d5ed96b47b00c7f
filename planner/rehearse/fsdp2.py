"""`planner rehearse --parallel fsdp2`: a plan and what users have instead, wrapped by stock FSDP2 on a scaled emulated
cluster, predicted and measured. Never imports torch.

One launch of ranks does it all, as in `planner.rehearse.rehearsal`. Units are waited for; parameters, messages, hooks
and memory are FSDP2's own. Meshes have one dimension: on hosts the all-reduces of HSDP block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.comparison.fsdp2 import Comparison, Taken, Variant, summarize
from planner.documents.catalog import find_profile
from planner.documents.profile import Cluster, Link
from planner.documents.text import mebibytes, milliseconds
from planner.documents.units import Units
from planner.fsdp2.decide import Setting, units_of_gradients
from planner.model.problem import make_problem
from planner.rehearse.rehearsal import OnHosts, hosts_of, late_note, on_emulated_hosts
from planner.rehearse.scale import Scale, links_of

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "", "step (ms)", "95 % interval (ms)", "predicted (ms)", "error", "predicted place", "by constants (ms)", "groups",
    "peak predicted", "peak counted", "weights",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AskedUnits(OnHosts):
    """What is to be rehearsed; on its way to ranks."""

    units: Units
    max_memory_mib: float | None = None

    def setting(self, cluster: Cluster) -> Setting:
        """Return the model on hosts, with what a cluster says of messages."""
        problem = make_problem(self.profile, cluster, where=self.name)
        return Setting(problem=problem, units=self.units, executor="hosts")

    def flat(self, **measured: Any) -> Cluster:
        """Return the cluster as one communicator sees it, by what was measured of its messages."""
        beta = 8e6 / links_of(self.cluster).inter_bits_per_s
        return replace(
            self.cluster, nodes=self.cluster.ranks, ranks_per_node=1, nics_per_node=1, intra=None,
            inter=Link(alpha_us=0.0, beta_us_per_byte=beta), back_to_back=None, collectives=None, contention=None,
            library=None, nccl=None, measured_for=None, emulated="namespaces", **measured,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RehearsedUnits:
    """What one rank brings home."""

    scale: Scale
    variants: tuple[Variant, ...]
    """Predictions are of the cluster as it is."""
    taken: Taken
    from_constants_us: dict[str, float]
    counted_bytes: dict[str, int]
    """By variant, this rank's peak, unshrunk."""
    late_us: dict[str, float]
    limit_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class UnitsRehearsal:
    """Everything undilated and unshrunk."""

    name: str
    hosts: str
    scale: Scale
    comparison: Comparison
    from_constants_us: dict[str, float]
    peak_bytes: dict[str, int]
    counted_bytes: dict[str, int]
    """By variant, on the rank where it is the most."""
    late_us: dict[str, float]
    limit_bytes: int | None

    @property
    def title(self) -> str:
        """What was rehearsed where, and at which scale."""
        return (
            f"{self.name} on {self.hosts} hosts under FSDP2, rehearsed: times were {self.scale.dilate:g} times longer "
            f"and bytes {self.scale.shrink:g} times fewer"
        )

    @property
    def notes(self) -> list[str]:
        """What a reader has to know of the rehearsal itself."""
        lines = [
            "rehearsed on this machine, where hosts wait for messages themselves: neither streams and contention of an "
            "accelerator nor NCCL's own behaviour are in it",
            "HSDP is not rehearsed: on hosts its all-reduces block",
            "peaks are counted in one step of the shrunk model, and the optimizer's state is added by the profile",
        ]
        if self.limit_bytes is not None:
            over = [name for name, size_bytes in self.counted_bytes.items() if size_bytes > self.limit_bytes]
            lines.append(f"limit {mebibytes(self.limit_bytes)}" + (f"; above it: {', '.join(over)}" if over else ""))
        return lines + late_note("hooks", self.late_us, {row.name: row.median_us for row in self.comparison.rows})

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types: rows as `planner compare --parallel fsdp2 --json` has them, and more."""
        rows = [
            asdict(row) | {
                "from_constants_us": self.from_constants_us.get(row.name), "late_us": self.late_us.get(row.name),
                "peak_bytes": self.peak_bytes.get(row.name), "counted_bytes": self.counted_bytes.get(row.name),
            }
            for row in self.comparison.rows
        ]  # fmt: skip
        return {
            "name": self.name, "dilate": self.scale.dilate, "shrink": self.scale.shrink, "hosts": self.hosts,
            "limit_bytes": self.limit_bytes, "rows": rows,
        }  # fmt: skip


def make_asked_units(
    name: str, cluster: str | None, hosts: str | None, *, max_memory_mib: float | None, minutes: float,
    dilate: float | None, shrink: float | None,
) -> AskedUnits:  # fmt: skip
    """Return what the options ask for; units are the profile's, or blocks by its gradients' names.

    Raises InputError as `make_asked` of other rehearsals.
    """
    profile = find_profile(name)
    chosen = hosts_of(name, profile, cluster, hosts, minutes)
    problem = make_problem(profile, chosen, where=name)
    units = problem.profile.units or units_of_gradients(problem)
    # What units free before gradients are there is not acted out, nor what goes on from one to the next.
    acted = tuple(
        replace(unit, backward_working_bytes=max(0, unit.backward_working_bytes), carried_bytes=0)
        for unit in units.units
    )
    units = replace(units, units=acted, update_us=units.update_us or problem.update_us, passes_through=("",))
    resolved = problem.profile
    return AskedUnits(
        name=name, cluster=chosen, units=units, max_memory_mib=max_memory_mib, minutes=minutes, dilate=dilate,
        shrink=shrink,
        profile=replace(
            resolved, cluster=None, units=units, world=replace(resolved.world, device="cpu"),
            compute=replace(resolved.compute, estimate=None),
        ),
    )  # fmt: skip


def rehearse_units(asked: AskedUnits, *, started_s: float | None = None, show_progress: bool = False) -> UnitsRehearsal:
    """Rehearse on emulated hosts of this machine, and return what was measured.

    Raises:
        EnvironmentFailure: hosts cannot be emulated here; says what cures it.
        InputError: the minutes are too few, the model does not fit at the scale asked for, or no wrapping does into
            the memory.
    """
    from planner.rehearse.fsdp2_ranks import rehearse_rank_units

    return summarize_units(asked, on_emulated_hosts(rehearse_rank_units, asked, started_s, show_progress))


def summarize_units(asked: AskedUnits, ranks: Sequence[RehearsedUnits]) -> UnitsRehearsal:
    """Return all ranks' measurements, undilated."""
    first = ranks[0]
    comparison = summarize(first.variants, [rank.taken for rank in ranks])

    def most(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {name: max(one[name] for one in values) for name in values[0]}

    return UnitsRehearsal(
        name=asked.name, hosts=asked.hosts, scale=first.scale, comparison=comparison,
        from_constants_us=first.from_constants_us,
        peak_bytes={one.name: one.peak_bytes for one in first.variants if one.peak_bytes is not None},
        counted_bytes=most([rank.counted_bytes for rank in ranks]), late_us=most([rank.late_us for rank in ranks]),
        limit_bytes=first.limit_bytes,
    )  # fmt: skip


def units_table(found: UnitsRehearsal) -> Table:
    """For the terminal, fastest first."""
    from planner.report.tables import make_table

    title = f"{found.title}; {found.comparison.steps} steps each in {found.comparison.rounds} interleaved rounds"
    table = make_table(title, COLUMNS, left=("", "weights"))
    rows = found.comparison.rows
    places = {
        row.name: str(place)
        for place, row in enumerate(sorted(rows, key=lambda row: row.predicted_us or 0.0), start=1)
    }  # fmt: skip
    for row in sorted(rows, key=lambda row: row.median_us):
        name, step, interval, predicted, error, groups, same = row.cells()
        peaks = (mebibytes(found.peak_bytes[row.name]), mebibytes(found.counted_bytes[row.name]))
        constants = milliseconds(found.from_constants_us.get(row.name))
        table.add_row(name, step, interval, predicted, error, places[row.name], constants, groups, *peaks, same)
    return table
