"""What commands have in common: the types of their options, the global flags, and how results are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from planner.documents.text import spell_rate
from runtime.errors import InputError


def _spelled(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Return the rate as it is read, and print that where other programs read it differently."""
    spelled = None if value is None else spell_rate(value)
    if spelled != value:
        typer.echo(f"planner: {parameter.opts[0]} {value}: read as {spelled}", err=True)
    return spelled


def rate_option(help: str) -> Any:
    """Return an option whose text ends in a rate."""
    return typer.Option(help=help, callback=_spelled)


Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Backend = Annotated[str | None, typer.Option(help="Backend of torch.distributed; default: nccl on GPUs, else gloo.")]
Ranks = Annotated[
    int | None, typer.Option(help="Local ranks to start (default 2); under torchrun its world is joined.")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        help="Deadline in seconds of every wait for other ranks; default: from the measured step, at least 30."
    ),
]
Emulate = Annotated[
    str | None,
    rate_option("Run on an emulated cluster HOSTSxRANKS@RATE on this machine, for example 4x1@1gbit (needs root)."),
]
Job = Annotated[
    str, typer.Argument(help="path/to/file.py:name or package.module:name of a function that returns a TrainingJob.")
]
FSDP2 = "fsdp2"
Parallel = Annotated[
    str | None,
    typer.Option(help="fsdp2: for models whose weights are sharded by FSDP2 (planner.fully_shard)."),
]
MAX_STEPS = 10**9
"""More steps than anybody waits for."""

Solver = Annotated[str, typer.Option(help="dp, or cpsat: a constraint program looks again, and proves a bound.")]
SolverLimit = Annotated[
    float | None, typer.Option(help="Deterministic time for cpsat (default 2: less than a minute).")
]
CompressBy = Annotated[
    str | None,
    typer.Option(
        help="Lossy plans: wire (all elements in fewer bytes), lowrank (products in place of matrices), sparse (the "
        "largest elements), several with commas between, all or none (default: wire)."
    ),
]
MaxRank = Annotated[
    int | None, typer.Option(help="Lossy plans: the largest rank of products in place of matrices (default 4).")
]
MaxRatio = Annotated[
    float | None,
    typer.Option(
        help="Lossy plans: largest ratio of a layer's elements to those that are sent "
        "(default 1000; 250 for recurrent and embedding layers)."
    ),
]
Protect = Annotated[
    str | None,
    typer.Option(
        help="Lossy plans: gradients to send whole, as patterns of names separated by |, besides biases and "
        "normalization layers; with 'none', not those."
    ),
]
MaxDelay = Annotated[
    int | None,
    typer.Option(
        help="Relaxed plans: the largest number of steps from one pull of new weights to the next (default 4)."
    ),
]
MaxMemory = Annotated[
    float | None,
    typer.Option(
        "--max-memory-mib",
        help="What each rank has for weights, gradients, the optimizer's state and activations; where that is too "
        "little, ranks share the optimizer's step if --allow lets them (default: the accelerator's, as profiled).",
    ),
]
FromSchedule = Annotated[
    str | None,
    typer.Option(help="Decide nothing: plan the schedule in this file, as --print-after prints it."),
]
Allow = Annotated[
    str | None,
    typer.Option(
        help="Interfaces that plans may need besides DDP's, comma-separated: sharded-step, late-gather "
        "(which implies it). Without, they are drop-in."
    ),
]


def models_beginning(incomplete: str) -> list[str]:
    """Return names of the catalog's profiles, for a shell that completes one."""
    from planner.documents.catalog import names

    model, at, _ = incomplete.partition("@")
    known = [f"{model}@{cluster}" for cluster in names("cluster")] if at else names("model")
    return [name for name in known if name.startswith(incomplete)]


def clusters_beginning(incomplete: str) -> list[str]:
    """Return names of the catalog's clusters, for a shell that completes one."""
    from planner.documents.catalog import names

    return [name for name in names("cluster") if name.startswith(incomplete)]


def entries_beginning(incomplete: str) -> list[str]:
    """Return names of the catalog's profiles and clusters, for a shell that completes one."""
    return [*models_beginning(incomplete), *clusters_beginning(incomplete)]


def strategies_beginning(incomplete: str) -> list[str]:
    """Return names of strategies, for a shell that completes the last one of a list."""
    from planner.decide.strategies import STRATEGIES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in STRATEGIES if name.startswith(last)]


def print_strategies(asked: bool) -> None:
    """Print all strategies, each with its accuracy and what it is, and end the command."""
    if not asked:
        return
    from planner.decide.strategies import STRATEGIES

    for one in STRATEGIES.values():
        about = " ".join((one.make.__doc__ or "").split("\n\n")[0].split()).removeprefix("Return ")
        typer.echo(f"{'  '.join(one.usages)}  ({one.accuracy})\n    {about}")
    raise typer.Exit


ListStrategies = Annotated[
    bool,
    typer.Option("--list-strategies", is_eager=True, callback=print_strategies, help="Print all strategies, and exit."),
]
ProfileName = Annotated[
    str,
    typer.Argument(
        help="profile.json, or a name: MODEL or MODEL@CLUSTER (planner catalog).", autocompletion=models_beginning
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        help="cluster.json, or a name (planner catalog); default: the cluster measured with the profile.",
        autocompletion=clusters_beginning,
    ),
]


class Flags:
    """Global flags of this call."""

    as_json = False
    verbose = False


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


def print_json(value: Any) -> None:
    """The machine-readable result, alone on standard output."""
    typer.echo(json.dumps(value, indent=1, allow_nan=False))
