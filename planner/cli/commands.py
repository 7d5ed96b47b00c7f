"""The commands and their parameters, in the order of `planner --help`; texts and groups of those that several have."""

from __future__ import annotations

import time
from dataclasses import MISSING, field
from importlib import import_module
from typing import Any

import typer

from planner.cli.options import (
    argument,
    chosen,
    command,
    completed,
    for_fsdp2,
    option,
    options,
    rate_option,
    split_names,
)
from planner.decide.defaults import DEFAULT_PASSES
from planner.jobs.lr_schedule import LrSchedule
from planner.jobs.rank_options import RankOptions
from runtime.errors import InputError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
clusters = typer.Typer(no_args_is_help=True, help="Write a cluster.json.")
models = typer.Typer(no_args_is_help=True, help="Write a profile.json of a model that was not measured.")

MAX_STEPS = 10**9
"""Largest number of steps."""
STRATEGIES = "wfbp,single,mg_wfbp"
"""Strategies of a rehearsal, where none are named."""


PLAN = "plan.json"
JOB = "path/to/file.py:name or package.module:name of a function that returns a TrainingJob."
PARALLEL = "fsdp2: for models whose weights are sharded by FSDP2 (planner.fully_shard)."
COMPRESS = (
    "Lossy plans: wire (all elements in fewer bytes), lowrank (products in place of matrices), sparse (the "
    "largest elements), several with commas between, all or none (default: wire)."
)
MAX_MEMORY = (
    "What each rank has for weights, gradients, the optimizer's state and activations; where that is too "
    "little, ranks share the optimizer's step if --allow lets them (default: the accelerator's, as profiled)."
)
ALLOW = (
    "Interfaces that plans may need besides DDP's, comma-separated: sharded-step, late-gather "
    "(which implies it). Without, they are drop-in."
)
GLOBAL_BATCH = "Samples of a step over all ranks: each gets a share by its speed and memory."
PICTURE = "Draw the comparison on one page."
ACCELERATOR = "The cluster's, where it does not name it: a100, h100, ..."


def print_strategies(asked: bool) -> None:
    """Print all strategies, each with its accuracy and what it is, and end the command."""
    if asked:
        typer.echo(import_module("planner.cli.completion").strategies_text())
        raise typer.Exit


def profile_argument() -> Any:
    """Return the field of the profile to decide or predict for."""
    text = "profile.json, or a name: MODEL, MODEL@CLUSTER or MODEL+muon@CLUSTER (planner catalog)."
    return argument(text, autocompletion=completed("models_beginning"))


def cluster_option() -> Any:
    """Return the field of the cluster to decide or predict for."""
    text = "cluster.json, or a name (planner catalog); default: the cluster measured with the profile."
    return option(text, autocompletion=completed("clusters_beginning"))


@options
class Solving:
    """Options of the constraint program."""

    solver: str = option("dp, or cpsat: a constraint program looks again, and proves a bound.", "dp")
    solver_limit: float | None = option("Deterministic time for cpsat (default 2: less than a minute).")


@options
class Lossy:
    """Options of plans that are not exact."""

    compress: str | None = option(COMPRESS)
    max_ratio: float | None = option(
        "Lossy plans: largest ratio of a layer's elements to those that are sent "
        "(default 1000; 250 for recurrent and embedding layers)."
    )
    max_rank: int | None = option("Lossy plans: the largest rank of products in place of matrices (default 4).")
    protect: str | None = option(
        "Lossy plans: gradients to send whole, as patterns of names separated by |, besides biases and "
        "normalization layers; with 'none', not those."
    )
    from_step: int | None = option(
        "Lossy plans: the first step with compressed buckets; those before it are exact (default: the first one)."
    )
    steps: int | None = option("Lossy plans: steps of the training: --max-ratio is at most their cube root by default.")
    max_delay: int | None = option(
        "Relaxed plans: the largest number of steps from one pull of new weights to the next (default 4)."
    )
    max_period: int | None = option(
        "Relaxed plans with --allow outer: the largest number of local steps between two rounds (default 64)."
    )


@options
class OnRanks(RankOptions):
    """Options of commands that need ranks; what is wrong with them is an error before torch is imported."""

    ranks: int | None = option("Local ranks to start (default 2); under torchrun its world is joined.")
    device: str = option("auto, cpu or cuda.", "auto")
    backend: str | None = option("Backend of torch.distributed; default: nccl on GPUs, else gloo.")
    timeout_s: float | None = option(
        "Deadline in seconds of every wait for other ranks; default: from the measured step, at least 30."
    )
    emulate: str | None = rate_option(
        "Run on an emulated cluster HOSTSxRANKS@RATE on this machine, for example 4x1@1gbit (needs root)."
    )

    @property
    def are_open(self) -> bool:
        """Return whether neither the number of ranks nor an emulated cluster is given."""
        return self.ranks is None and self.emulate is None


@command(app, "planner.cli.profiling", "profile")
class Profile:
    """Trace a job and measure its step and the links between ranks."""

    job: str = argument(JOB)
    output: str | None = option(
        "Where to write the profile; default: profile.json, or that of --add-to.", None, "-o", "--output"
    )
    measure_for: str | None = option(
        "exact, bounded or relaxed: the riskiest class of plan to measure for.", None, "--for"
    )
    add_to: str | None = option("A profile of this job on these ranks: measure only what it lacks, and add it.")
    budget_s: float | None = option("Seconds that it may take beyond the first steps (default 60).")
    where: OnRanks
    updaters: int | None = option("Also measure up to this number of local updaters for relaxed plans.")
    parallel: str | None = option(PARALLEL)

    def __post_init__(self) -> None:
        for_fsdp2(self, ("--updaters", "--add-to", "--for"))


DECIDING = (
    "--print-after", "--passes", "--solver", "--solver-limit", "--compress", "--max-ratio", "--max-rank", "--protect",
    "--steps", "--max-delay", "--max-period",
)  # fmt: skip
"""Options of `optimize` about decisions on buckets."""


@command(app, "planner.cli.optimizing", "optimize")
class Optimize:
    """Decide how gradients are sent, and how far that is from optimal."""

    profile: str = profile_argument()
    more: list[str] | None = argument("Profiles of later phases: the same model with other inputs.", None)
    cluster: str | None = cluster_option()
    accuracy: str = option("exact, bounded or relaxed: the riskiest class of plan allowed.", "exact")
    allow: str | None = option(ALLOW)
    output: str = option("Where to write the plan.", "plan.json", "-o", "--output")
    passes: str = option(
        "The pipeline, for example merge{labels=4}; lossy passes: joint, sparsify; delay, local_async.", DEFAULT_PASSES
    )
    print_after: str | None = option("Print the schedule after this pass, or after all.")
    solving: Solving
    lossy: Lossy
    max_memory_mib: float | None = option(MAX_MEMORY)
    epochs: str | None = option("Epochs of each phase, such as 13,11,3, with several profiles.")
    steps_per_epoch: str | None = option("Steps of an epoch, one number or one for each phase.")
    global_batch: int | None = option(GLOBAL_BATCH)
    from_schedule: str | None = option("Decide nothing: plan the schedule in this file, as --print-after prints it.")
    parallel: str | None = option(PARALLEL)

    def __post_init__(self) -> None:
        for_fsdp2(self, ("--allow", *DECIDING, "--global-batch", "--from-schedule"))


@options
class Changes:
    """Options of `simulate` that change the cluster or the model."""

    compute_speed: float = option("Accelerator speed, as a factor of the profiled.", 1.0)
    batch: float = option("Batch of each rank, as a factor of the profiled.", 1.0)
    intra: str | None = rate_option("Links inside nodes, other than the cluster's: 3us,600gbit.")
    inter: str | None = rate_option("Links between nodes, other than the cluster's: 5us,100gbit.")
    straggler: float = option("Slow-down factor of one rank's computation.", 1.0)
    jitter: float = option("Standard deviation of ranks' compute times, as a share: gives quantiles.", 0.0)
    seed: int = option("Seed of the jitter.", 0)


@command(app, "planner.cli.predicting", "simulate")
class Simulate:
    """Predict strategies on a cluster."""

    profile: str = profile_argument()
    cluster: str | None = cluster_option()
    strategy: str | None = option(
        "Strategies, comma-separated, for example wfbp,ddp:25,optimal; --list-strategies prints all.",
        autocompletion=completed("strategies_beginning"),
    )
    list_strategies: bool = option(
        "Print all strategies, and exit.", False, "--list-strategies", is_eager=True, callback=print_strategies
    )
    ranks: str | None = option("Numbers of ranks, comma-separated; default: the cluster's.")
    changes: Changes
    critical_path: bool = option("Say what the step's length is made of.", False, "--critical-path")
    solving: Solving


@command(app, "planner.cli.predicting", "advise")
class Advise:
    """Say what to use for a model on a cluster, and why."""

    profile: str = profile_argument()
    cluster: str | None = cluster_option()
    ranks: int | None = option("Number of ranks; default: the cluster's.")
    max_memory_mib: float | None = option(MAX_MEMORY)
    accuracy: str = option("exact, or bounded: may messages lose digits?", "exact")
    accelerator: str | None = option(ACCELERATOR)


@options
class Disturbances:
    """Options of `sweep` about what slows large runs down."""

    jitter: float = option("Spread of a rank's compute from step to step, as a share.", 0.0)
    slow_share: float = option("Share of ranks that are slow in a step.", 0.0)
    slow_factor: float = option("Slow-down factor of slow ranks.", 1.0)
    mtbf_hours: float | None = option("Hours between failures of one accelerator; default: as Llama 3 met them.")
    checkpoint_s: float = option("Seconds that a checkpoint takes.", 60.0)
    restart_s: float = option("Seconds that a restart takes.", 600.0)


@command(app, "planner.cli.predicting", "sweep")
class Sweep:
    """Predict models on clusters of 8 to 16384 ranks, as `advise`."""

    models: str = argument("Profiles or names, comma-separated.")
    clusters: str = argument("Clusters or names, comma-separated.")
    ranks: str | None = option("Numbers of ranks, comma-separated; default: 8 to 16384, and the cluster's own.")
    disturbances: Disturbances
    html: str | None = option("Write a page with curves here that needs no network.")
    accelerator: str | None = option(ACCELERATOR)


@command(app, "planner.cli.reading", "catalog")
class Catalog:
    """List models and clusters that others measured, by name."""

    name: str = argument(
        "A name, for all that is known of it; or a part of one, to filter.", "",
        autocompletion=completed("entries_beginning"),
    )  # fmt: skip


@command(app, "planner.cli.traced_runs", "import_traces", name="import")
class Import:
    """Make a profile and its cluster from traces of torch.profiler."""

    traces: list[str] = argument("Traces of torch.profiler, one a rank (.json, .json.gz, .zip), or a directory.")
    job: str | None = option("The job that was traced, path/to/file.py:name, for the names of its parameters.")
    step_ms: float | None = option("Milliseconds of a step without the profiler.")
    parallel: str | None = option(PARALLEL)
    output: str = option("Where to write the profile.", "profile.json", "-o", "--output")

    def __post_init__(self) -> None:
        for_fsdp2(self)


app.add_typer(clusters, name="cluster")
app.add_typer(models, name="model")


@command(app, "planner.cli.explaining", "explain")
class Explain:
    """Say why a plan is what it is, or where a traced run's time goes.

    As a table, a trace or a page.
    """

    plan: str = argument("plan.json; or a trace of torch.profiler, or a directory of them, one a rank.")
    trace: str | None = option("Write Chrome trace events here, for ui.perfetto.dev or chrome://tracing.")
    html: str | None = option("Write a page here that needs no network.")
    measured: str | None = option("A step measured with this plan (`session.report().save(...)`), to draw, too.")


@command(app, "planner.cli.explaining", "diff")
class Diff:
    """Show what two plans do differently, and what each predicts.

    Exit status 0: they execute the same; 1: they do not.
    """

    first: str = argument(PLAN)
    second: str = argument("Another one.")


@command(app, "planner.cli.explaining", "export")
class Export:
    """Give a plan to stock DDP, torch.compile, NCCL or simulators.

    As DDP's arguments, estimates for its scheduler, rows for its tuner, a Chakra trace, or the graph of the step. What
    cannot be expressed is said, with what it costs.
    """

    plan: str = argument(PLAN)
    to: str = option("ddp, ddp-hook, inductor, nccl-tuner, chakra, [layers-]graphml or [layers-]dot.", MISSING)
    profile: str | None = option("The plan's profile: checks buckets, and reports what is lost, in ms.")
    cluster: str | None = cluster_option()
    output: str | None = option("Where to write; default: print it.", None, "-o", "--output")


@command(app, "planner.cli.running", "run")
class Run:
    """Train a job with a plan, or with plain DDP."""

    job: str = argument(JOB)
    plan: str | None = option("plan.json; without one the job trains with plain DDP.")
    steps: int = option("Steps to train.", 20)
    lr_schedule: str = option(
        "Learning rate: scale:BATCH (the job's is for this batch), warmup:STEPS and cosine, comma-separated.", ""
    )
    where: OnRanks

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS:
            raise InputError(f"--steps: found {self.steps}, expected at least 1 and at most {MAX_STEPS}; correct it")
        LrSchedule.parse(self.lr_schedule)


@options
class Learning:
    """Options of comparisons of what is learnt."""

    learn: int | None = option(
        "Compare losses: DDP and the plans train this number of steps from one start, over the same batches."
    )
    seeds: int = option("With --learn: starts that are trained from, of which intervals are.", 3)
    margin: float = option("With --learn: percentage of DDP's last loss within which a plan learns as DDP does.", 0.5)
    on: str | None = option(
        "With --learn: cluster.json or a name, for whose predicted steps times are shown; needs --profile.",
        autocompletion=completed("clusters_beginning"),
    )
    start: str | None = option("With --learn: checkpoint of torch.save to begin from.", None, "--from")


@command(app, "planner.cli.comparing", "compare")
class Compare:
    """Measure a plan and the best of DDP, interleaved.

    Also what is not communicated at all, DDP's hooks, and further strategies; with --learn their losses.
    """

    job: str = argument(
        "A job as for profile, or script.py: an existing script that calls planner.compare(session, step)."
    )
    plan: list[str] = option("The plan to judge; with --learn also several, each with its own --plan.", MISSING)
    profile: str | None = option("profile.json, for predictions of what is not the plan.")
    strategy: list[str] = option(
        "Further strategies, by name; needs --profile. May be given several times.",
        (),
        autocompletion=completed("strategies_beginning"),
    )
    steps: int = option("Measured steps of each variant.", 25)
    rounds: int | None = option("Rounds that these steps are spread over; default: 5, or as many as steps.")
    html: str | None = option(PICTURE)
    learning: Learning
    where: OnRanks
    arguments: list[str] | None = argument("Of a script: its own arguments.", None, metavar="[-- ARGUMENTS]")
    parallel: str | None = option(PARALLEL)

    @property
    def strategies(self) -> list[str]:
        """Return the names of all `--strategy`, each of which may have several."""
        return split_names(",".join(self.strategy))

    def __post_init__(self) -> None:
        for_fsdp2(self, ("--strategy", "--html", "ARGUMENTS", "--learn"))
        given, learns = chosen(self), self.learning.learn is not None
        needless = ("--steps", "--rounds") if learns else ("--seeds", "--margin", "--on", "--from")
        where = "with --learn, whose steps it does not change" if learns else "without --learn STEPS, which it is for"
        for name in (name for name in needless if name in given):
            raise InputError(f"{name}: found {given[name]} {where}; leave it out")
        if self.learning.learn is None and len(self.plan) > 1:
            raise InputError(
                f"--plan: found {' and '.join(self.plan)}, expected one plan without --learn STEPS; compare each by "
                f"itself"
            )
        if self.learning.on is not None and self.profile is None:
            raise InputError("--on: found no --profile, expected the profile of the job's compute: add it")


@command(app, "planner.cli.rehearsing", "rehearse")
class Rehearse:
    """Run a plan for real on a scaled emulated cluster.

    Compute is waited for; all times are shown as on the cluster itself. Needs root.
    """

    profile: str = profile_argument()
    cluster: str | None = cluster_option()
    hosts: str | None = option("HOSTSxRANKS to emulate, for example 8x1 or 4x2; default: the cluster's.")
    strategy: str = option(
        "Strategies to compare as well, by name.", STRATEGIES, autocompletion=completed("strategies_beginning")
    )
    accuracy: str = option("exact, bounded or relaxed: the riskiest class of plan.", "exact")
    allow: str | None = option(ALLOW)
    compress: str | None = option(COMPRESS)
    minutes: float = option("What it may take in all.", 10.0)
    dilate: float | None = option("Times are multiplied by this; default: chosen.")
    shrink: float | None = option("Bytes are divided by this; default: chosen.")
    html: str | None = option(PICTURE)
    max_memory_mib: float | None = option(MAX_MEMORY)
    parallel: str | None = option(PARALLEL)
    global_batch: int | None = option(GLOBAL_BATCH)
    started_s: float = field(init=False, default_factory=time.time)
    """Start of the command, in seconds: what it needs is imported within its minutes."""

    def __post_init__(self) -> None:
        wrapped = for_fsdp2(self, ("--strategy", "--accuracy", "--allow", "--compress", "--html", "--global-batch"))
        if self.max_memory_mib is not None and not wrapped:
            raise InputError(
                f"--max-memory-mib: found {self.max_memory_mib:g} without --parallel fsdp2, which it is for; add it"
            )


@command(app, "planner.cli.demonstrating", "demo")
class Demo:
    """Show a gain over DDP here, in about a minute.

    Processes act two machines: computation is timed waits, connections are held to the rate of a link.
    """

    minutes: float = option("What it may take once ranks have started.", 1.1)
    where: OnRanks


@command(app, "planner.cli.reading", "docs")
class Docs:
    """Print a page of the documentation."""

    name: str = argument("A page, such as concepts/merging; default: list all.", "")


@command(app, "planner.cli.doctor", "doctor")
class Doctor:
    """Look at what is installed and works here, with cures."""


@command(clusters, "planner.cli.describing", "new_cluster", name="new")
class NewCluster:
    """Write the cluster that a description of its machines gives, from line rates."""

    nodes: int = option("How many machines.", MISSING)
    gpus: int = option("Accelerators, and so ranks, of each.", MISSING)
    nic: str | None = rate_option("All network cards of one node, as 8x400gbit or 25gbit per second.")
    nvlink: str | None = rate_option("NVLink of one GPU as vendors state it, both directions added: 900gbyte.")
    intra: str | None = rate_option("Another link inside a node in one direction, such as PCIe: 32gbyte.")
    nic_latency: str | None = option("Start-up time of a message between nodes; default: the network's.")
    intra_latency: str | None = option("Start-up time of a message inside a node; default: 2.5us.")
    gpu: str | None = option("Use NCCL's cost model for this accelerator, such as h100, in place of latencies.")
    network: str | None = option(
        "Between nodes: infiniband, roce, efa, tcp (ethernet); default: tcp for --nic in gbe, else infiniband."
    )
    output: str = option("Where to write the cluster.", "cluster.json", "-o", "--output")


@command(clusters, "planner.cli.describing", "fit_cluster", name="fit")
class FitCluster:
    """Fit NCCL's cost model to a few logs, to predict other sizes and numbers of nodes."""

    logs: list[str] = argument(
        "Output of nccl-tests, with nodes and GPUs of each before it: 2x8:a.log 4x8:b.log; directories of NCCL "
        "Inspector; traces, or profiles of `planner import`."
    )
    machine: str | None = option(
        "A cluster whose description of machines to start from: cluster.json, or a name.",
        autocompletion=completed("clusters_beginning"),
    )
    gpu: str | None = option("The accelerator, where no log names it: a100, h100, ...")
    nic: str | None = rate_option("All network cards of one node, as 8x400gbit or 25gbit per second.")
    network: str | None = option("infiniband, roce, efa or tcp; default: what explains the logs best.")
    in_place: bool = option("Take the times of buffers that are also results.", False, "--in-place")
    output: str = option("Where to write the cluster.", "cluster.json", "-o", "--output")


@models.callback()
def _group() -> None:
    """Keep `new` a subcommand of its own."""


@command(models, "planner.cli.describing", "new_model", name="new")
class NewModel:
    """Write the estimated profile of a language model from a few numbers: Llama's architecture, bfloat16, AdamW."""

    layers: int = option("Transformer blocks.", MISSING)
    hidden: int = option("Width of the residual stream.", MISSING)
    batch: int = option("Sequences per rank in a step.", MISSING)
    tokens: int = option("Length of a sequence.", 2048)
    heads: int | None = option("Attention heads; default: of 128 channels each.")
    key_heads: int | None = option("Heads of keys and values; default: as many.")
    feed_forward: int | None = option("Width of feed-forward layers; default: 8/3 of --hidden, as in Llama.")
    vocabulary: int = option("Tokens that there are.", 128_256)
    tied: bool = option("The embedding is also the output layer.", False, "--tied")
    share: float | None = option("Share of the accelerator's peak that is reached (MFU); default: 0.35.")
    output: str = option("Where to write the profile.", "model.json", "-o", "--output")
