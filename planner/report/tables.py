"""Plans and simulations as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from planner.cost import nccl
from planner.decide.advise import Advice
from planner.decide.at_scale import ScalePoint
from planner.decide.cluster_fit import FittedCluster
from planner.decide.defaults import ALLOWED, MORE, NOTHING_TO_GAIN
from planner.decide.simulate import Simulation
from planner.documents.profile import Profile
from planner.documents.text import (
    BOTH_BUSY,
    SENTENCE_CHARACTERS,
    describe_contention,
    mebibytes,
    milliseconds,
    pluralize,
    sanitize,
)
from planner.emit.step_graph import plan_graph
from planner.model.codecs import BY_NAME, LOSSY
from planner.model.modes import describe
from planner.report.fsdp2_tables import wrapping_lines, wrapping_listings
from planner.report.listing import Listing, print_tables, step_rows
from planner.report.loading import levels, loading_lines
from runtime.plan import Plan, PlanBucket
from runtime.plan.executed import cost_line
from runtime.plan.interfaces import INTERFACES
from runtime.plan.measured import MeasuredStep

SHOWN_BUCKETS = 1000
"""Largest number of rows on the terminal."""


def summary_table(plan: Plan) -> Listing:
    """Compare the plan's predicted step with its baselines'."""
    nodes = f" on {pluralize(plan.world.nodes, 'node')}" if plan.world.nodes else ""
    world = f"{pluralize(plan.world.ranks, 'rank')}{nodes}"
    rows = [(sanitize(name), buckets or str(len(plan.buckets)), *times) for name, buckets, *times in summary_rows(plan)]
    return Listing(f"{sanitize(plan.model.name)}, {world}: predicted time of one step", SUMMARY, rows, ("schedule",))


SUMMARY = ("schedule", "buckets", "step (ms)", "exposed (ms)", "step / plan")
"""Columns of `summary_rows`."""


def summary_rows(plan: Plan, measured: MeasuredStep | None = None) -> list[tuple[str, ...]]:
    """Return a row for the plan, a step measured with it, and its baselines from fast to slow."""
    return step_rows(plan, plan_kind(plan), len(plan.buckets), measured)


def plan_kind(plan: Plan) -> str:
    """Return the plan's name in tables: its accuracy, and its interface unless that is drop-in."""
    return f"plan ({', '.join((plan.accuracy, *plan.interfaces))})"


def interface_lines(plan: Plan) -> list[str]:
    """Return what a script has to know of the plan; nothing if it is drop-in."""
    return [f"interface {name}: {INTERFACES[name]}" for name in plan.interfaces if name in INTERFACES]


def bucket_table(plan: Plan, members: Callable[[PlanBucket], str], most: int, unknown: str) -> Listing:
    """List buckets: what is in each, when it is communicated, and why it is what it is.

    Args:
        plan: the plan.
        members: what describes the gradients of a bucket.
        most: the largest number of rows.
        unknown: the text of a bucket without a reason.
    """
    sent = plan.predicted.bucket_times(len(plan.buckets)) if plan.predicted else [None] * len(plan.buckets)
    form, graph = describe(plan).form, plan_graph(plan)
    slack_us = graph.bucket_slack_us(len(plan.buckets)) if graph else []
    rows = [
        (
            str(index),
            members(bucket),
            mebibytes(bucket.size_bytes),
            *map(milliseconds, times or (None, None)),
            *([milliseconds(slack_us[index])] if graph else []),
            form or bucket_form(bucket),
            sanitize(bucket.reason or unknown, SENTENCE_CHARACTERS),
        )
        for index, (bucket, times) in enumerate(zip(plan.buckets[:most], sent, strict=False))
    ]
    slack = ("slack (ms)",) if graph else ()
    columns = ("#", "gradients", "size", "start (ms)", "end (ms)", *slack, "how", "why")
    return Listing("buckets in launch order", columns, rows, left=("gradients", "how", "why"), details="why")


def _bucket_table(plan: Plan) -> Listing:
    def members(bucket: PlanBucket) -> str:
        first, last, count = sanitize(bucket.gradients[0]), sanitize(bucket.gradients[-1]), len(bucket.gradients)
        return first if count == 1 else f"{first} … {last} ({count})"

    table = bucket_table(plan, members, SHOWN_BUCKETS, "")
    more = len(plan.buckets) - SHOWN_BUCKETS
    last = [("…", f"{more} more buckets: see --json", *[""] * (len(table.columns) - 2))] if more > 0 else []
    return replace(table, rows=[*table.rows, *last])


def bucket_form(bucket: PlanBucket) -> str:
    """Return a bucket's collective, algorithm and compressor."""
    form = sanitize(str(bucket.transport))
    return form if bucket.dense else f"{form} {sanitize(bucket.compressor.name)}"


def slack_lines(plan: Plan) -> list[str]:
    """Return how much slower each network may be, and the critical path; nothing where steps overlap."""
    graph = plan_graph(plan)
    if graph is None:
        return []
    lines = []
    for link, factor in graph.link_slack().items():
        if factor < LEAST_SLACK:
            lines.append(f"{link} has no slack: slower messages make the step longer")
        else:
            lines.append(f"messages on {link} may take {factor:.3g} times as long without making the step longer")
    times_us: dict[str, float] = {}
    for node in graph.critical_path:
        name = node.name.partition(" part ")[0]
        times_us[name] = times_us.get(name, 0.0) + node.time_us
    parts = [f"{name} {milliseconds(time_us)} ms" for name, time_us in times_us.items() if time_us > 0.0]
    if len(parts) > SHOWN_PATH:
        parts[SHOWN_PATH - 1 : -1] = [f"{len(parts) - SHOWN_PATH} more"]
    if lines and BOTH_BUSY in (plan.sources or {}).get("communication", ""):
        lines.append("slack leaves out contention: slower messages also slow computation down")
    return [*lines, f"critical path: {', '.join(parts)}"]


LEAST_SLACK = 1.005
"""Factor of a network's slack below which there is none to speak of."""
SHOWN_PATH = 12
"""Tasks of a critical path that are listed."""

NOISY = 0.05
"""Uncertainty of a prediction, as a share of the step, above which measuring again helps."""


def _uncertainty(spread_us: float, whole_us: float) -> tuple[str, float, str]:
    """Return (± of a time in ms with two digits, its share of the whole, advice where that is large)."""
    half_us = spread_us / 2.0
    share = half_us / whole_us if whole_us > 0.0 else 0.0
    advice = "; measure again when the machine has nothing else to do" if share > NOISY else ""
    return f"± {float(f'{half_us / 1000:.2g}'):,g}", share, advice


def uncertainty_line(plan: Plan) -> str:
    """Return how uncertain the prediction is; empty if the profile does not say how much its steps differed."""
    prediction = plan.predicted
    if prediction is None or prediction.compute_spread_us is None:
        return ""
    parts = (prediction.forward_us, prediction.backward_us, prediction.update_us)
    about, share, advice = _uncertainty(prediction.compute_spread_us, max(sum(part or 0.0 for part in parts), 1e-9))
    step = milliseconds(prediction.iteration_us)
    return f"predicted {step} ms {about}: compute varied by {share:.0%} while it was profiled{advice}"


def certificate_text(plan: Plan) -> str:
    """Return how far the plan is from optimal, in one sentence."""
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
    """Return a line for each class of accuracy; `unmeasured` has the reasons why classes cannot be decided."""
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
    """Return the number of buckets, their compression, and the step."""
    of_codec = {
        codec: [bucket for bucket in plan.buckets if BY_NAME.get(bucket.compressor.name) is codec] for codec in LOSSY
    }
    how = ", ".join(codec.summary(buckets) for codec, buckets in of_codec.items() if buckets) or "no compression"
    step = milliseconds(plan.predicted.iteration_us if plan.predicted else None)
    words = describe(plan)
    if words.makes_batches:
        return f"{words.short}: {step} ms for a minibatch of a rank"
    return f"{pluralize(len(plan.buckets), 'bucket')}, {how}, {words.short}: {step} ms"


def _frontier_table(plan: Plan) -> Listing:
    columns = ("at the most", "largest ratio", "buckets", "narrow", "low rank", "sparse", "elements sent", "step (ms)")
    rows = [
        (
            next(filter(None, (codec.point_text(point) for codec in LOSSY)), "dense"),
            f"{point.max_ratio:,.3g}",
            *map(str, (point.buckets, point.narrow_buckets, point.low_rank_buckets, point.sparse_buckets)),
            f"{point.sent_share:.2%}",
            milliseconds(point.iteration_us),
        )
        for point in plan.frontier or ()
    ]
    return Listing("speed over compression", columns, rows)


def _delay_table(plan: Plan) -> Listing:
    columns = ("k", "buckets", "mean step (ms)", "by Eq. 4 (ms)", "case of Eq. 4")
    rows = [
        (*map(str, (p.steps, p.buckets)), *map(milliseconds, (p.iteration_us, p.closed_form_us)), str(p.case))
        for p in plan.delays or ()
    ]
    return Listing("speed over delay", columns, rows)


def _updaters_table(plan: Plan) -> Listing:
    columns = ("updaters", "blocks", "LAP-SGD (ms)", "LPP-SGD (ms)", "backwards saved", "(c − 1)/2", "memory")
    rows = [
        (
            *map(str, (point.updaters, point.blocks)),
            *map(milliseconds, (point.lap_us, point.lpp_us)),
            f"{point.saved_backwards:.2f}",
            f"{point.closed_form:.2f}",
            "" if point.fits else "too little",
        )
        for point in plan.updaters or ()
    ]
    return Listing("speed over local updaters: a rank's time for a minibatch", columns, rows)


def print_plan(plan: Plan, console: Console, *, buckets: bool, more: Iterable[str] = ()) -> None:
    """Print the plan in a sentence, tables, certificate and notes, and `more` lines; with `buckets` also the table of
    buckets and sources.
    """
    if plan.fsdp2 is not None:
        tables = list(wrapping_listings(plan, plan.fsdp2, groups=buckets))
        said = wrapping_lines(plan, plan.fsdp2)
    elif plan.phases is not None:
        tables, said = [], list(interface_lines(plan))
    else:
        tables = [summary_table(plan), *([_bucket_table(plan)] if buckets else [])]
        risky = ((plan.frontier, _frontier_table), (plan.delays, _delay_table), (plan.updaters, _updaters_table))
        tables += [table(plan) for points, table in risky if points]
        line = describe(plan).line
        said = [f"accuracy {plan.accuracy}; {line}" if line else "", *interface_lines(plan), uncertainty_line(plan)]
    console.print(plan_line(plan), highlight=False)
    print_tables(*tables, console=console)
    lines = [*filter(None, (*said, "" if plan.phases else certificate_text(plan)))]
    lines += [f"- {sanitize(note, SENTENCE_CHARACTERS)}" for note in plan.notes]
    lines += filter(None, [cost_line(plan)])
    if buckets:
        lines += [*slack_lines(plan), *loading_lines(plan)]
        sources = (plan.sources or {}).items()
        lines += [f"{sanitize(name)}: {sanitize(text, SENTENCE_CHARACTERS)}" for name, text in sources]
    for line in (*lines, *more):
        console.print(line, highlight=False)


def plan_line(plan: Plan) -> str:
    """Return the plan in one sentence: its messages, its predicted step, and that of DDP or of the best baseline."""
    said, baselines = plan.predicted, plan.baselines or {}
    messages = pluralize(len(plan.buckets), "bucket")
    if plan.phases is not None:
        messages = pluralize(len(plan.phases), "phase")
    if plan.fsdp2 is not None:
        messages = f"a wrapping of {pluralize(len(plan.fsdp2.groups) + 1, 'group')}"
    kind = "" if plan.accuracy == "exact" else f"{plan.accuracy}, "
    if said is None:
        return f"planned {messages} ({kind}nothing is predicted of them)"
    step = f"predicted step {milliseconds(said.iteration_us)} ms"
    if not baselines or describe(plan).makes_batches:
        return f"planned {messages} ({kind}{step})"
    name = "ddp" if "ddp" in baselines else min(baselines, key=lambda one: baselines[one].iteration_us)
    reference, called = baselines[name], "DDP" if name == "ddp" else sanitize(name)
    gain = 1.0 - said.iteration_us / reference.iteration_us if reference.iteration_us > 0.0 else 0.0
    against = f"{called} {milliseconds(reference.iteration_us)} ms"
    if gain < NOTHING_TO_GAIN:
        return f"nothing to gain over {called}: {step} with {messages}, {against}; {len(baselines)} baselines predicted"
    return f"planned {messages} ({kind}{step}): {gain:.1%} less than {against}"


def simulation_line(results: Sequence[Simulation]) -> str:
    """Return which strategy is fastest on each number of ranks, in one sentence."""
    fastest: dict[str, list[int]] = {}
    for ranks in dict.fromkeys(result.ranks for result in results):
        best = min((result for result in results if result.ranks == ranks), key=lambda result: result.iteration_us)
        fastest.setdefault(best.strategy, []).append(ranks)
    return "fastest: " + "; ".join(
        f"{sanitize(name)} on {', '.join(map(str, counts))} rank{'' if counts == [1] else 's'}"
        for name, counts in fastest.items()
    )


def simulation_table(results: Sequence[Simulation]) -> Listing:
    """List predictions by number of ranks and strategy."""
    best = {
        ranks: min(r.iteration_us for r in results if r.ranks == ranks)
        for ranks in dict.fromkeys(r.ranks for r in results)
    }
    changes = f", what if: {', '.join(results[0].what_if)}" if results and results[0].what_if else ""
    sources = [result.cost_source + (", extrapolated" if result.extrapolated else "") for result in results]
    one_source = len(set(sources)) == 1
    columns = ["ranks", "strategy", "buckets", "step (ms)", "exposed (ms)", "step / best", "S(N)", "S(N) / N"]
    columns += [] if one_source else ["all-reduce"]
    quantiles = list((results[0].quantiles_us or {}) if results else {})
    columns += [f"{name} (ms)" for name in quantiles]
    shown = any(result.critical_path for result in results)
    columns += ["critical path"] if shown else []
    rows = []
    for result, source in zip(results, sources, strict=True):
        shares = sorted((result.critical_path or {}).items(), key=lambda item: -item[1])
        critical_path = ", ".join(f"{kind} {share:.0%}" for kind, share in shares if share >= 0.005)
        rows.append((
            str(result.ranks),
            result.strategy,
            str(result.buckets),
            milliseconds(result.iteration_us),
            milliseconds(result.exposed_us),
            f"{result.iteration_us / best[result.ranks]:.3f}" if best[result.ranks] else "",
            f"{result.speed_up:.3g}",
            f"{result.efficiency:.3f}",
            *([] if one_source else [source]),
            *(milliseconds((result.quantiles_us or {})[name]) for name in quantiles),
            *([critical_path] if result.critical_path else []),
        ))  # fmt: skip
    left = ("strategy", "all-reduce", "critical path")
    title = f"predicted time of one step{changes}{f'; all-reduce: {sources[0]}' if one_source else ''}"
    return Listing(title, columns, rows, left, label="strategy", details="critical path" if shown else "")


FITTED_SIZES = (2**20, 2**25, 2**30)


def fitted_tables(fitted: FittedCluster) -> list[Listing]:
    """List what a fit is off by on its logs, and what it predicts there and on more nodes."""
    errors = [
        (collective, str(nodes), str(samples), f"{median_error:.1%}", f"{worst:.1%}")
        for collective, nodes, samples, median_error, worst in fitted.rows
    ]
    columns = ("collective", "nodes", "samples", "median error", "largest")
    machine, cluster = fitted.cluster.nccl, fitted.cluster
    assert machine is not None
    predicted = []
    for nodes in dict.fromkeys([*(row[1] for row in fitted.rows), 4 * cluster.nodes, 64 * cluster.nodes]):
        if nodes > 1 and machine.nic is None:
            continue
        shape = nccl.Shape(machine, nodes, cluster.ranks_per_node)
        times = nccl.times_us("all_reduce", shape, FITTED_SIZES)
        taken = dict.fromkeys(nccl.choice("all_reduce", shape, FITTED_SIZES))
        within = f"± {nccl.interval_of(shape):.0%}"
        predicted.append((str(nodes), *(milliseconds(float(time)) for time in times), within, ", ".join(taken)))
    sizes = map(mebibytes, FITTED_SIZES)
    return [
        Listing("fitted on", columns, errors, left=("collective",)),
        Listing("all-reduce (ms), 9 of 10 within", ("nodes", *sizes, "within", "by"), predicted, left=("by",)),
    ]


def computed_line(result: Advice | ScalePoint) -> str:
    """Return what a prediction was computed with, on one line."""
    return f"{sanitize(result.model)} on {sanitize(result.cluster)}: computed with {result.computed_with}"


def advice_table(advice: Advice) -> Listing:
    """List every way to train, least risky first."""
    ranged = any(option.interval_us for option in advice.options)
    rows = []
    for option in advice.options:
        fits = "not known" if option.fits is None else "yes" if option.fits else "no"
        asks = option.interface if option.executed_by != "planner.fully_shard" else "fsdp2: planner.fully_shard"
        between = [" to ".join(map(milliseconds, option.interval_us or ()))] if ranged else []
        times = milliseconds(option.iteration_us), *between, milliseconds(option.exposed_us)
        mark = f"{option.name} ←" if option.name == advice.use else option.name
        rows.append((mark, *times, mebibytes(option.memory_bytes), fits, asks, option.reason))
    between = ["between (ms)"] if ranged else []
    columns = ("way", "step (ms)", *between, "exposed (ms)", "memory", "fits", "asks for", "why")
    where = f"{sanitize(advice.model)} on {sanitize(advice.cluster)}, {pluralize(advice.ranks, 'rank')}"
    left = ("way", "fits", "asks for", "why")
    return Listing(f"{where}: least risky first", columns, rows, left=left, details="why")


def advice_lines(advice: Advice) -> list[str]:
    """Return what the advice rests on, and how to continue."""
    lines = [f"messages: {advice.cost_source}"]
    if advice.if_lossy is not None:
        lines.insert(0, f"where messages may lose digits (--accuracy bounded): {advice.if_lossy}")
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


def sweep_lines(points: Sequence[ScalePoint]) -> list[str]:
    """Return the efficiency of each model on each cluster, on the fewest and on the most ranks."""
    pairs: dict[tuple[str, str], list[ScalePoint]] = {}
    for point in points:
        pairs.setdefault((sanitize(point.model), sanitize(point.cluster)), []).append(point)
    lines = []
    for (model, cluster), found in pairs.items():
        few, many = min(found, key=lambda point: point.ranks), max(found, key=lambda point: point.ranks)
        text = f"{model} on {cluster}: efficiency {few.efficiency:.1%} on {pluralize(few.ranks, 'rank')}"
        lines.append(text + (f", {many.efficiency:.1%} on {many.ranks}" if many.ranks > few.ranks else ""))
    return lines


def sweep_table(points: Sequence[ScalePoint]) -> Listing:
    """List predictions at scale."""
    columns = ("model", "cluster", "ranks", "how", "step (ms)", "median (ms)", "99 % (ms)", "efficiency", "goodput")
    rows = [
        (
            sanitize(point.model),
            sanitize(point.cluster),
            str(point.ranks),
            point.strategy + (", too little memory" if point.fits is False else ""),
            *map(milliseconds, (point.step_us, point.median_us, point.p99_us)),
            *(f"{share:.1%}" for share in (point.efficiency, point.goodput)),
        )
        for point in points
    ]
    return Listing("predicted at scale", columns, rows, left=("model", "cluster", "how"), label="ranks")


def profile_lines(profile: Profile) -> list[str]:
    """Describe a profile in a few lines."""
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
    ranks, samples = compute.by_rank or (), profile.world.batch_per_rank or 0
    times_us = [rank.fixed_us + samples * rank.sample_us + rank.update_us for rank in ranks]
    if times_us and min(times_us) < max(times_us):  # those that differ by little are equal
        slow, fast = (times_us.index(of(times_us)) for of in (max, min))
        lines.append(
            f"rank {slow} computes for {max(times_us) / min(times_us):.3g} times as long as rank {fast}, which waits: "
            f"`planner optimize --global-batch N` gives ranks shares of the batch by their speed"
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
        lines.append(f"{BOTH_BUSY}, {describe_contention(cluster.contention)}")
    if profile.local_async is not None:
        rates = ", ".join(
            f"{point.updaters}: {milliseconds(point.minibatch_us)} ms" for point in profile.local_async.curve
        )
        lines.append(f"a rank's time for a minibatch by its number of local updaters: {rates}")
    if profile.loading is not None:
        times = ", ".join(f"{milliseconds(us)} ms from {name}" for name, us in levels(profile.loading).items())
        lines.append(f"one of {profile.loading.samples:,} samples takes {times}, on the slowest rank")
    return lines
