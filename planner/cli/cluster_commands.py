"""The commands of `planner cluster`: a cluster.json from a description, or from what nccl-tests measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import Flags, clusters_beginning, print_json, rate_option

clusters = typer.Typer(no_args_is_help=True, help="Write a cluster.json.")
Output = Annotated[str, typer.Option("-o", "--output", help="Where to write the cluster.")]
Nic = Annotated[str | None, rate_option("All network cards of one node, as 8x400gbit or 25gbit per second.")]

QUIET_S = 3.0
"""A command that ends earlier says nothing of its progress."""


@clusters.command()
def new(
    nodes: Annotated[int, typer.Option(help="How many machines.")],
    gpus: Annotated[int, typer.Option(help="Accelerators, and so ranks, of each.")],
    nic: Nic = None,
    nvlink: Annotated[
        str | None, rate_option("NVLink of one GPU as vendors state it, both directions added: 900gbyte.")
    ] = None,
    intra: Annotated[
        str | None, rate_option("Another link inside a node in one direction, such as PCIe: 32gbyte.")
    ] = None,
    nic_latency: Annotated[
        str | None, typer.Option(help="Start-up time of a message between nodes; default: the network's.")
    ] = None,
    intra_latency: Annotated[
        str | None, typer.Option(help="Start-up time of a message inside a node; default: 2.5us.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Use NCCL's cost model for this accelerator, such as h100, in place of latencies."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Between nodes: infiniband, roce, efa, tcp (ethernet); default: tcp for --nic in gbe, else infiniband."
        ),
    ] = None,
    output: Output = "cluster.json",
) -> None:
    """Write the cluster that a description of its machines gives, from line rates."""
    from planner.documents.machines import INTRA_LATENCY, describe_machines, describe_nccl
    from planner.report.files import check_writable
    from runtime.errors import InputError

    check_writable(output)
    if gpu is not None:
        for option, value in (("--nic-latency", nic_latency), ("--intra-latency", intra_latency)):
            if value is not None:
                raise InputError(
                    f"{option}: found {value} beside --gpu, whose cost model has latencies of its own; take one out"
                )
        cluster = describe_nccl(
            nodes=nodes, gpus=gpus, gpu=gpu, nic=nic, nvlink=nvlink, intra=intra,
            network=network, name=Path(output).stem,
        )  # fmt: skip
    else:
        cluster = describe_machines(
            nodes=nodes, gpus=gpus, nic=nic, nvlink=nvlink, intra=intra,
            nic_latency=nic_latency, network=network, intra_latency=intra_latency or INTRA_LATENCY,
            name=Path(output).stem,
        )  # fmt: skip
    cluster.save(output)
    if Flags.as_json:
        print_json(cluster.to_document())
        return
    for note in cluster.notes or ():
        typer.echo(note)
    typer.echo(f"wrote {output}; use it with `planner simulate PROFILE --cluster {output}`")


def _progress() -> Callable[[str], None]:
    """Lines on standard error, once a command has run for some seconds."""
    began = time.monotonic()

    def say(line: str) -> None:
        if time.monotonic() - began > QUIET_S:
            typer.echo(f"planner: {line}", err=True)

    return say


@clusters.command()
def fit(
    logs: Annotated[
        list[str],
        typer.Argument(
            help="Output of nccl-tests, with nodes and GPUs of each before it: 2x8:a.log 4x8:b.log; directories of "
            "NCCL Inspector; traces, or profiles of `planner import`."
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(
            help="A cluster whose description of machines to start from: cluster.json, or a name.",
            autocompletion=clusters_beginning,
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="The accelerator, where no log names it: a100, h100, ...")] = None,
    nic: Nic = None,
    network: Annotated[
        str | None, typer.Option(help="infiniband, roce, efa or tcp; default: what explains the logs best.")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Take the times of buffers that are also results.")
    ] = False,
    output: Output = "cluster.json",
) -> None:
    """Fit NCCL's cost model to a few logs, to predict other sizes and numbers of nodes."""
    from planner.decide.cluster_fit import fit_cluster, parse_log_argument
    from planner.documents.catalog import find_cluster
    from planner.documents.machines import parse_cards
    from planner.report.files import check_writable
    from planner.report.tables import fitted_tables, make_console, print_table
    from planner.traces.measured_logs import measured_logs
    from runtime.errors import InputError

    arguments = [
        log for text in logs for log in (measured_logs(text) if Path(text).exists() else [parse_log_argument(text)])
    ]
    check_writable(output, *(argument.path for argument in arguments))
    described = None
    if machine is not None:
        described = find_cluster(machine).nccl
        if described is None:
            raise InputError(f'--machine: found {machine} without "nccl", expected a cluster with "library": "nccl"')
        for option, value in (("--gpu", gpu), ("--nic", nic), ("--network", network)):
            if value is not None:
                raise InputError(f"{option}: found it beside --machine, which says it; expected one of them")
    cards = (None, None) if nic is None else parse_cards(nic)
    fitted = fit_cluster(
        arguments, described, gpu=gpu, nics=cards[0], nic=cards[1], network=network, in_place=in_place,
        name=Path(output).stem, progress=_progress(),
    )  # fmt: skip
    fitted.cluster.save(output)
    if Flags.as_json:
        print_json(fitted.cluster.to_document())
        return
    console = make_console()
    for table in fitted_tables(fitted):
        print_table(console, table)
    for note in fitted.cluster.notes or ():
        typer.echo(note)
    machines = fitted.cluster.nccl
    ranks = " --ranks 64,512" if machines is not None and machines.nic is not None else ""
    typer.echo(f"wrote {output}; use it with `planner simulate PROFILE --cluster {output}{ranks}`")
