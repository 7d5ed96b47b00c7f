"""`planner cluster` and `planner model`: a cluster.json or a profile.json without measuring a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from os.path import exists
from pathlib import Path

import typer

from planner.cli.commands import FitCluster, NewCluster, NewModel
from planner.cli.options import printed_json
from planner.decide.cluster_fit import Stated, parse_log_argument
from planner.decide.cluster_fit import fit_cluster as fit
from planner.documents.catalog import find_cluster
from planner.documents.machines import Machines, describe_machines, parse_cards
from planner.documents.shapes import Decoder, new_decoder
from planner.report.files import check_writable
from planner.report.listing import print_tables
from planner.report.tables import fitted_tables
from planner.traces.measured_logs import measured_logs
from runtime.errors import InputError

QUIET_S = 3.0
"""A command that ends earlier says nothing of its progress."""


def new_cluster(asked: NewCluster) -> None:
    """Write the cluster that a description of its machines gives."""
    check_writable(asked.output)
    given = {**vars(asked), "name": Path(asked.output).stem}
    del given["output"]
    cluster = describe_machines(Machines(**given))
    cluster.save(asked.output)
    if not printed_json(cluster.to_document):
        _print_end(asked.output, cluster.notes, f"use it with `planner simulate PROFILE --cluster {asked.output}`")


def _print_end(output: str, notes: tuple[str, ...] | None, use: str) -> None:
    typer.echo("\n".join([*(notes or ()), f"wrote {output}; {use}"]))


def _progress() -> Callable[[str], None]:
    """Return what prints a line on standard error, once a command has run for some seconds."""
    began = time.monotonic()

    def show(line: str) -> None:
        if time.monotonic() - began > QUIET_S:
            typer.echo(f"planner: {line}", err=True)

    return show


def fit_cluster(asked: FitCluster) -> None:
    """Fit NCCL's cost model to logs, and write the cluster."""
    arguments = [
        log for text in asked.logs for log in (measured_logs(text) if exists(text) else [parse_log_argument(text)])
    ]
    check_writable(asked.output, *(argument.path for argument in arguments))
    described = None
    if asked.machine is not None:
        described = find_cluster(asked.machine).nccl
        if described is None:
            raise InputError(
                f'--machine: found {asked.machine} without "nccl", expected a cluster with "library": "nccl"'
            )
        for name in ("gpu", "nic", "network"):
            if getattr(asked, name) is not None:
                raise InputError(f"--{name}: found it with --machine, which already sets it; expected one of them")
    nics, nic = (None, None) if asked.nic is None else parse_cards(asked.nic)
    fitted = fit(
        arguments, described, Stated(gpu=asked.gpu, nics=nics, nic=nic, network=asked.network),
        in_place=asked.in_place, name=Path(asked.output).stem, progress=_progress(),
    )  # fmt: skip
    fitted.cluster.save(asked.output)
    if printed_json(fitted.cluster.to_document):
        return
    print_tables(*fitted_tables(fitted))
    machines = fitted.cluster.nccl
    ranks = " --ranks 64,512" if machines is not None and machines.nic is not None else ""
    use = f"use it with `planner simulate PROFILE --cluster {asked.output}{ranks}`"
    _print_end(asked.output, fitted.cluster.notes, use)


def new_model(asked: NewModel) -> None:
    """Write the estimated profile of a language model."""
    check_writable(asked.output)
    model = Decoder(
        layers=asked.layers, width=asked.hidden, batch=asked.batch, tokens=asked.tokens, heads=asked.heads or 0,
        key_heads=asked.key_heads or 0, hidden=asked.feed_forward or 0, vocabulary=asked.vocabulary, tied=asked.tied,
    )  # fmt: skip
    profile = new_decoder(model, asked.share, Path(asked.output).stem)
    profile.save(asked.output)
    if printed_json(profile.to_document):
        return
    numel = sum(gradient.numel for gradient in profile.compute.gradients)
    typer.echo(f"{numel / 1e6:,.1f} M parameters in {len(profile.compute.gradients)} gradients")
    _print_end(asked.output, profile.notes, f"continue with: planner advise {asked.output} --cluster CLUSTER")
