"""Plans and simulations as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from planner.cost import nccl
from planner.decide.advise import Advice
from planner.decide.at_scale import ScalePoint
from planner.decide.cluster_fit import FittedCluster
from planner.decide.defaults import ALLOWED, MORE
from planner.decide.simulate import Simulation
from planner.documents.profile import Profile
from planner.documents.text import (
    SENTENCE_CHARACTERS,
    describe_contention,
    mebibytes,
    milliseconds,
    pluralize,
    sanitize,
)
from planner.fsdp2.summary import Listing, wrapping_lines, wrapping_listings
from planner.model.codecs import BY_NAME, LOSSY
from planner.model.modes import describe
from planner.report.loading import levels, loading_lines
from runtime.plan import Plan, PlanBucket
from runtime.plan.interfaces import INTERFACES
from runtime.plan.measured import MeasuredStep
from runtime.plan.predicted import Prediction

SHOWN_BUCKETS = 1000
"""Rows that people might read."""


def make_table(title: str, columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    """Return a table without rows; columns are aligned to the right, but for those named in `left`."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def listing_table(listing: Listing) -> Table:
    """Return a table of texts."""
    table = make_table(listing.title, listing.columns, left=listing.left)
    for row in listing.rows:
        table.add_row(*row)
    return table


def summary_table(plan: Plan) -> Table:
    nodes = f" on {pluralize(plan.world.nodes, 'node')}" if plan.world.nodes else ""
    world = f"{pluralize(plan.world.ranks, 'rank')}{nodes}"
    table = make_table(f"{sanitize(plan.model.name)}, {world}: predicted time of one step", SUMMARY, left=("schedule",))
    for name, buckets, *times in summary_rows(plan):
        table.add_row(sanitize(name), buckets or str(len(plan.buckets)), *times)
    return table


SUMMARY = ("schedule", "buckets", "step (ms)", "exposed (ms)", "step / plan")
"""Columns of `summary_rows`."""


def summary_rows(plan: Plan, measured: MeasuredStep | None = None) -> list[tuple[str, ...]]:
    """The plan, a step measured with it, and its baselines from fast to slow."""
    planned, count = plan.predicted, len(plan.buckets)
    rows: list[tuple[str, int | None, Prediction | MeasuredStep]] = (
        [(plan_kind(plan), count, planned)] if planned else []
    )
    rows += [("plan, measured", count, measured)] if measured else []
    baselines = sorted((plan.baselines or {}).items(), key=lambda item: item[1].iteration_us)
    rows += [(name, prediction.buckets, prediction) for name, prediction in baselines]
    base_us = planned.iteration_us if planned else 0.0
    return [
        (
            name,
            "" if buckets is None else str(buckets),
            milliseconds(step.iteration_us),
            milliseconds(step.exposed_us),
            f"{step.iteration_us / base_us:.3f}" if base_us > 0.0 else "",
        )
        for name, buckets, step in rows
    ]


def plan_kind(plan: Plan) -> str:
    """The plan's name in tables: its accuracy, and its interface where that is not drop-in."""
    return f"plan ({', '.join((plan.accuracy, *plan.interfaces))})"


def interface_lines(plan: Plan) -> list[str]:
    """What a script has to know of the plan; nothing where it is drop-in."""
    return [f"interface {name}: {INTERFACES[name]}" for name in plan.interfaces if name in INTERFACES]


def bucket_table(plan: Plan) -> Table:
    """Every bucket: what is in it, when it is communicated, and why it is what it is."""
    columns = ("#", "gradients", "size", "start (ms)", "end (ms)", "how", "why")
    table = make_table("buckets in launch order", columns, left=("gradients", "how", "why"))
    sent = plan.predicted.bucket_times(len(plan.buckets)) if plan.predicted else [None] * len(plan.buckets)
    form = describe(plan).form
    for index, bucket in enumerate(plan.buckets[:SHOWN_BUCKETS]):
        start_us, end_us = sent[index] or (None, None)
        first, last, count = sanitize(bucket.gradients[0]), sanitize(bucket.gradients[-1]), len(bucket.gradients)
        table.add_row(
            str(index),
            first if count == 1 else f"{first} … {last} ({count})",
            mebibytes(bucket.size_bytes),
            milliseconds(start_us),
            milliseconds(end_us),
            form or bucket_form(bucket),
            sanitize(bucket.reason or "", SENTENCE_CHARACTERS),
        )
    if len(plan.buckets) > SHOWN_BUCKETS:
        table.add_row("…", f"{len(plan.buckets) - SHOWN_BUCKETS} more buckets: see --json", *[""] * 5)
    return table


def bucket_form(bucket: PlanBucket) -> str:
    """Return a bucket's collective, algorithm and compressor."""
    form = sanitize(str(bucket.transport))
    return form if bucket.dense else f"{form} {sanitize(bucket.compressor.name)}"


NOISY = 0.05
"""From this share of the step on, a prediction is so uncertain that measuring again helps."""


def _uncertainty(spread_us: float, whole_us: float) -> tuple[str, float, str]:
    """Return (± of a time in ms with two digits, its share of the whole, advice where that is large)."""
    half_us = spread_us / 2.0
    share = half_us / whole_us if whole_us > 0.0 else 0.0
    advice = "; measure again when the machine has nothing else to do" if share > NOISY else ""
    return f"± {float(f'{half_us / 1000:.2g}'):,g}", share, advice


def uncertainty_line(plan: Plan) -> str:
    """How uncertain the prediction is; empty where the profile did not say how much its steps differed."""
    prediction = plan.predicted
    if prediction is None or prediction.compute_spread_us is None:
        return ""
    parts = (prediction.forward_us, prediction.backward_us, prediction.update_us)
    about, share, advice = _uncertainty(prediction.compute_spread_us, max(sum(part or 0.0 for part in parts), 1e-9))
    step = milliseconds(prediction.iteration_us)
    return f"predicted {step} ms {about}: compute varied by {share:.0%} while it was profiled{advice}"


def certificate_text(plan: Plan) -> str:
    certificate = plan.certificate
    if certificate is None:
        return "no certificate"
    kind = "exact plan" if plan.accuracy == "exact" else f"{plan.accuracy} plan of those looked at"
    if certificate.gap <= 1e-9:
        text = f"optimal: no {kind} is faster under this cost model"
    else:
        text = f"within {certificate.gap:.2%} of optimal: no {kind} takes less than "
        text += f"{milliseconds(certificate.lower_bound_us)} ms under this cost model"
    note = f"; {sanitize(certificate.note, SENTENCE_CHARACTERS)}" if certificate.note else ""
    return f"{text} ({sanitize(certificate.method)}){note}"


def accuracy_lines(plan: Plan, unmeasured: Mapping[str, str] | None = None) -> list[str]:
    """One line for each class of accuracy; `unmeasured` says of classes why they cannot be decided."""
    classes = {plan.accuracy: plan, **(plan.alternatives or {})}
    refused = next((note for note in plan.notes if ALLOWED in note), "")  # says why, for the class that was allowed
    lines = []
    for name, looked_at in (("bounded", plan.frontier), ("relaxed", plan.delays or plan.updaters)):
        if name in classes:
            lines.append(f"{name}  {_accuracy_line(classes[name])}")
        elif unmeasured and name in unmeasured:
            lines.append(f"{name}  {unmeasured[name]}")
        elif refused and (looked_at or refused.startswith(name)):
            lines.append(f'{name}  none: see the note that begins with "{refused.partition(",")[0]}"')
        else:
            why = "nothing makes the step shorter" if looked_at else f"not looked at: --accuracy {name} does"
            lines.append(f"{name}  {why}")
        if name == "bounded" and MORE in classes:
            lines.append(f"bounded, --compress all  {_accuracy_line(classes[MORE])}")
    exact = _accuracy_line(classes["exact"]) if "exact" in classes else "not kept in this plan"
    return [f"exact    {exact}", *lines]


def _accuracy_line(plan: Plan) -> str:
    """Buckets, what is left out, and the step."""
    of_codec = {
        codec: [bucket for bucket in plan.buckets if BY_NAME.get(bucket.compressor.name) is codec] for codec in LOSSY
    }
    how = ", ".join(codec.summary(buckets) for codec, buckets in of_codec.items() if buckets) or "no compression"
    step = milliseconds(plan.predicted.iteration_us if plan.predicted else None)
    words = describe(plan)
    if words.makes_batches:
        return f"{words.short}: {step} ms for a minibatch of a rank"
    return f"{pluralize(len(plan.buckets), 'bucket')}, {how}, {words.short}: {step} ms"


def frontier_table(plan: Plan) -> Table:
    columns = ("at the most", "largest ratio", "buckets", "narrow", "low rank", "sparse", "elements sent", "step (ms)")
    table = make_table("speed over compression", columns)
    for point in plan.frontier or ():
        sent, step = f"{point.sent_share:.2%}", milliseconds(point.iteration_us)
        form = next(filter(None, (codec.point_text(point) for codec in LOSSY)), "dense")
        counts = point.buckets, point.narrow_buckets, point.low_rank_buckets, point.sparse_buckets
        table.add_row(form, f"{point.max_ratio:,.3g}", *map(str, counts), sent, step)
    return table


def delay_table(plan: Plan) -> Table:
    table = make_table("speed over delay", ("k", "buckets", "mean step (ms)", "by Eq. 4 (ms)", "case of Eq. 4"))
    for point in plan.delays or ():
        times = milliseconds(point.iteration_us), milliseconds(point.closed_form_us)
        table.add_row(str(point.steps), str(point.buckets), *times, str(point.case))
    return table


def updaters_table(plan: Plan) -> Table:
    columns = ("updaters", "blocks", "LAP-SGD (ms)", "LPP-SGD (ms)", "backwards saved", "(c − 1)/2", "memory")
    table = make_table("speed over local updaters: a rank's time for a minibatch", columns)
    for point in plan.updaters or ():
        times = milliseconds(point.lap_us), milliseconds(point.lpp_us)
        saved = f"{point.saved_backwards:.2f}", f"{point.closed_form:.2f}"
        memory = "" if point.fits else "too little"
        table.add_row(str(point.updaters), str(point.blocks), *times, *saved, memory)
    return table


def print_plan(plan: Plan, console: Console, *, buckets: bool) -> None:
    """Summary, certificate and notes; with `buckets` the table of buckets and where the numbers came from too."""
    if plan.fsdp2 is not None:
        tables = list(map(listing_table, wrapping_listings(plan, plan.fsdp2, groups=buckets)))
        said = wrapping_lines(plan, plan.fsdp2)
    else:
        tables = [summary_table(plan), *([bucket_table(plan)] if buckets else [])]
        risky = ((plan.frontier, frontier_table), (plan.delays, delay_table), (plan.updaters, updaters_table))
        tables += [table(plan) for points, table in risky if points]
        line = describe(plan).line
        said = [f"accuracy {plan.accuracy}; {line}" if line else "", *interface_lines(plan), uncertainty_line(plan)]
    for table in tables:
        print_table(console, table)
    for line in filter(None, (*said, certificate_text(plan))):
        console.print(line, highlight=False)
    for note in plan.notes:
        console.print(f"- {sanitize(note, SENTENCE_CHARACTERS)}", highlight=False)
    if buckets:
        for line in loading_lines(plan):
            console.print(line, highlight=False)
        for name, text in (plan.sources or {}).items():
            console.print(f"{sanitize(name)}: {sanitize(text, SENTENCE_CHARACTERS)}", highlight=False)


def simulation_table(results: Sequence[Simulation]) -> Table:
    best = {
        ranks: min(r.iteration_us for r in results if r.ranks == ranks)
        for ranks in dict.fromkeys(r.ranks for r in results)
    }
    changes = f", what if: {', '.join(results[0].what_if)}" if results and results[0].what_if else ""
    columns = ["ranks", "strategy", "buckets", "step (ms)", "exposed (ms)", "step / best", "all-reduce"]
    quantiles = list((results[0].quantiles_us or {}) if results else {})
    columns += [f"{name} (ms)" for name in quantiles]
    columns += ["critical path"] if any(result.critical_path for result in results) else []
    left = ("strategy", "all-reduce", "critical path")
    table = make_table(f"predicted time of one step{changes}", columns, left=left)
    for result in results:
        shares = sorted((result.critical_path or {}).items(), key=lambda item: -item[1])
        critical_path = ", ".join(f"{kind} {share:.0%}" for kind, share in shares if share >= 0.005)
        table.add_row(
            str(result.ranks),
            result.strategy,
            str(result.buckets),
            milliseconds(result.iteration_us),
            milliseconds(result.exposed_us),
            f"{result.iteration_us / best[result.ranks]:.3f}" if best[result.ranks] else "",
            result.cost_source + (", extrapolated" if result.extrapolated else ""),
            *(milliseconds((result.quantiles_us or {})[name]) for name in quantiles),
            *([critical_path] if result.critical_path else []),
        )
    return table


FITTED_SIZES = (2**20, 2**25, 2**30)


def fitted_tables(fitted: FittedCluster) -> list[Table]:
    """What a fit is off by on its logs, and what it predicts there and on more nodes."""
    errors = make_table(
        "fitted on", ["collective", "nodes", "samples", "median error", "largest"], left=("collective",)
    )
    for collective, nodes, samples, median_error, worst in fitted.rows:
        errors.add_row(collective, str(nodes), str(samples), f"{median_error:.1%}", f"{worst:.1%}")
    machine, cluster = fitted.cluster.nccl, fitted.cluster
    assert machine is not None
    sizes = [mebibytes(size) for size in FITTED_SIZES]
    predicted = make_table("all-reduce (ms), 9 of 10 within", ["nodes", *sizes, "within", "by"], left=("by",))
    for nodes in dict.fromkeys([*(row[1] for row in fitted.rows), 4 * cluster.nodes, 64 * cluster.nodes]):
        if nodes > 1 and machine.nic is None:
            continue
        shape = nccl.Shape(machine, nodes, cluster.ranks_per_node)
        times = nccl.times_us("all_reduce", shape, FITTED_SIZES)
        taken = dict.fromkeys(nccl.choice("all_reduce", shape, FITTED_SIZES))
        within = f"± {nccl.interval_of(shape):.0%}"
        predicted.add_row(str(nodes), *(milliseconds(float(time)) for time in times), within, ", ".join(taken))
    return [errors, predicted]


def computed_line(result: Advice | ScalePoint) -> str:
    """Return what a prediction was computed with, on one line."""
    return f"{sanitize(result.model)} on {sanitize(result.cluster)}: computed with {result.computed_with}"


def advice_table(advice: Advice) -> Table:
    """Every way to train, least risky first."""
    columns = ["way", "step (ms)", "exposed (ms)", "memory", "fits", "asks for", "why"]
    ranged = any(option.interval_us for option in advice.options)
    if ranged:
        columns.insert(2, "between (ms)")
    table = make_table(
        f"{sanitize(advice.model)} on {sanitize(advice.cluster)}, {pluralize(advice.ranks, 'rank')}: least risky first",
        columns, left=("way", "fits", "asks for", "why"),
    )  # fmt: skip
    for option in advice.options:
        fits = "not known" if option.fits is None else "yes" if option.fits else "no"
        asks = option.interface if option.executed_by != "planner.fully_shard" else "fsdp2: planner.fully_shard"
        times = [milliseconds(option.iteration_us), milliseconds(option.exposed_us)]
        if ranged:
            times.insert(1, " to ".join(map(milliseconds, option.interval_us or ())))
        mark = f"{option.name} ←" if option.name == advice.use else option.name
        table.add_row(mark, *times, mebibytes(option.memory_bytes), fits, asks, option.reason)
    return table


def advice_lines(advice: Advice) -> list[str]:
    """What to use and why, what that rests on, and how to continue."""
    lines = [f"use {advice.use}: {advice.reason}", f"messages: {advice.cost_source}"]
    if advice.if_lossy is not None:
        lines.insert(1, f"where messages may lose digits (--accuracy bounded): {advice.if_lossy}")
    if advice.interval is not None:
        lines.append(f"messages are within ± {advice.interval:.0%} for 9 of 10")
    lines.append(str(advice.computed_with.compute))
    chosen = advice.chosen
    if advice.next_command is not None:
        lines.append(f"continue with: {advice.next_command}; {chosen.executed_by} executes the plan in your script")
    elif chosen.fits is False:
        lines.append("continue with: --ranks, another cluster, or a smaller batch")
    elif chosen.recomputed:
        lines.append("continue with: checkpoint each block in the script, then planner profile JOB --parallel fsdp2")
    elif chosen.name == "ddp":
        lines.append("continue with: DistributedDataParallel as it is")
    else:
        lines.append(
            f'continue with: these machines in a cluster.json ("nodes": {advice.nodes}, "accelerator": '
            f'"{advice.computed_with.accelerator}"), and planner advise on it'
        )
    return lines


def sweep_table(points: Sequence[ScalePoint]) -> Table:
    """A row for each prediction."""
    columns = ["model", "cluster", "ranks", "how", "step (ms)", "median (ms)", "99 % (ms)", "efficiency", "goodput"]
    table = make_table("predicted at scale", columns, left=("model", "cluster", "how"))
    for point in points:
        how = point.strategy + ("" if point.fits is not False else ", too little memory")
        times = (milliseconds(time) for time in (point.step_us, point.median_us, point.p99_us))
        shares = f"{point.efficiency:.1%}", f"{point.goodput:.1%}"
        table.add_row(sanitize(point.model), sanitize(point.cluster), str(point.ranks), how, *times, *shares)
    return table


def profile_lines(profile: Profile) -> list[str]:
    """A profile in a few lines."""
    compute = profile.compute
    size_bytes = sum(gradient.size_bytes for gradient in compute.gradients)
    backward_us = sum(gradient.backward_us for gradient in compute.gradients)
    lines = [
        f"{sanitize(profile.model.name)}: {len(compute.gradients)} gradients, {mebibytes(size_bytes)}, "
        f"{profile.world.ranks} ranks; "
        f"forward {milliseconds(compute.forward_us)}, backward {milliseconds(backward_us)}, "
        f"update {milliseconds(compute.update_us)} ms"
    ]
    if compute.intervals is not None:
        low_us, high_us = compute.intervals.step_us
        about, part, advice = _uncertainty(compute.intervals.spread_us, (low_us + high_us) / 2.0)
        lines.append(
            f"half of the steps took {milliseconds(low_us)} to {milliseconds(high_us)} ms without communication: "
            f"predictions are uncertain by {about} ms ({part:.0%}){advice}"
        )
    tracing = profile.tracing
    if tracing is not None:
        lines.append(
            f"traced by {tracing.method}"
            + "".join(f"; {n}: {sanitize(why, SENTENCE_CHARACTERS)}" for n, why in (tracing.failures or {}).items())
        )
        share = tracing.grad_weight_share
        if share is not None and share.measured is not None:
            lines.append(
                f"gradients of weights take {share.estimated:.0%} of backward by FLOPs, {share.measured:.0%} measured"
            )
    cluster = profile.cluster
    line = (cluster.collectives or {}).get("all_reduce") if cluster else None
    if line is not None:
        lines.append(
            f"all-reduce: {line.alpha_us:.0f} µs + {line.beta_us_per_byte * 1e3:.3g} µs per kB; the line "
            f"is off by {line.mean_error or 0:.0%} on average, so the samples are used"
        )
    if cluster is not None and cluster.contention is not None:
        lines.append(f"while both are busy, {describe_contention(cluster.contention)}")
    if profile.local_async is not None:
        rates = ", ".join(
            f"{point.updaters}: {milliseconds(point.minibatch_us)} ms" for point in profile.local_async.curve
        )
        lines.append(f"a rank's time for a minibatch by its number of local updaters: {rates}")
    if profile.loading is not None:
        times = ", ".join(f"{milliseconds(us)} ms from {name}" for name, us in levels(profile.loading).items())
        lines.append(f"one of {profile.loading.samples:,} samples takes {times}, on the slowest rank")
    return lines


def print_table(console: Console, table: Table) -> None:
    """A table, with title and caption as lines of their own: rich would wrap them to the table's width."""
    title, caption, table.title, table.caption = table.title, table.caption, None, None
    for part, style in ((title, "table.title"), (table, None), (caption, "table.caption")):
        if part is not None and part != "":
            console.print(part, style=style, highlight=False)


UNWRAPPED = 100_000
"""Wider than any table or line."""


def make_console() -> Console:
    # Into a pipe or a file nothing is wrapped or cut off. Names are printed as they are.
    width = None if Console().is_terminal else UNWRAPPED
    return Console(width=width, markup=False, emoji=False)
