"""Steps of ResNets under DDP on 2 A100 and on 8 MI300X, and on one V100, as torch.profiler recorded them on rank 0.

From public traces of HolisticTraceAnalysis and TraceLens: when each gradient was ready, and when each all-reduce of the
run's own buckets began and ended. *Published* are the traced times. *Own durations* gives each message its own
duration and predicts when communication ends: the order of messages alone. *Others' durations* predicts the step with
the medians of the other steps' messages, as `planner explain` replays a run. Nothing is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from benchmarks.published.common import Comparison, model, table
from planner.documents.profile import DTYPE_BYTES, Cluster, ComputeProfile, Gradient, Profile, ProfileWorld
from planner.ir import Schedule
from planner.model.modes import simulate_schedule
from planner.model.problem import make_problem
from runtime.plan import ModelReference

RUNS = {"ResNet-50 on 2 A100": ("resnet50_ddp_2xA100", 2), "ResNet-18 on 8 MI300X": ("resnet18_ddp_8xMI300X", 8)}
"""Run → the folder of its tables, and its ranks."""
_DTYPES = {"Float": "float32", "BFloat16": "bfloat16"}


@dataclass(frozen=True)
class TracedStep:
    """One step of a traced run; times in microseconds from its first kernel."""

    number: int
    profile: Profile
    """Its compute."""
    cuts: tuple[int, ...]
    """Where each of its buckets ends among the gradients."""
    sizes: tuple[int, ...]
    """Bytes of each of its messages."""
    durations_us: tuple[float, ...]
    end_us: float
    """End of the last message."""
    span_us: float


def traced_steps(run: str) -> list[TracedStep]:
    """Return the steps of a run of `RUNS`."""
    folder, ranks = RUNS[run]
    found = []
    for step in table(f"{folder}/steps.csv"):
        sent = [line for line in _lines(folder, "collectives", step["step"]) if line["collective"] == "allreduce"]
        dtype = _DTYPES[sent[0]["dtype"]]
        ready = _lines(folder, "gradients", step["step"])
        numel = [int(line["numel"]) for line in ready]
        ends = list(accumulate(numel))
        durations = tuple(float(line["dur_us"]) for line in sent)
        end_us = float(sent[-1]["start_us"]) + durations[-1]
        forward_us, span_us = float(step["forward_end_us"]), float(step["gpu_span_us"])
        moments = [forward_us, *(float(line["ready_us"]) for line in ready)]
        gradients = tuple(
            Gradient(name=f"g{at}", layer=f"g{at}", numel=size, dtype=dtype, backward_us=max(0.0, after - before))
            for at, (size, (before, after)) in enumerate(zip(numel, pairwise(moments), strict=True))
        )
        compute = ComputeProfile(forward_us=forward_us, update_us=span_us - end_us, gradients=gradients)
        world = ProfileWorld(ranks=ranks, nodes=1, backend="nccl", device="cuda")
        found.append(
            TracedStep(
                number=int(step["step"]),
                profile=Profile(model=ModelReference(name=run), world=world, compute=compute),
                cuts=tuple(ends.index(total) + 1 for total in accumulate(int(line["numel"]) for line in sent)),
                sizes=tuple(int(line["numel"]) * DTYPE_BYTES[dtype] for line in sent),
                durations_us=durations, end_us=end_us, span_us=span_us,
            )
        )  # fmt: skip
    return found


def _lines(folder: str, name: str, step: str) -> list[dict[str, str]]:
    return [line for line in table(f"{folder}/{name}.csv") if line["step"] == step]


def predicted_us(step: TracedStep, durations_us: tuple[float, ...]) -> float:
    """Return the predicted step of its own buckets, of messages that take these times."""
    samples = {"all_reduce": tuple(sorted(zip(map(float, step.sizes), durations_us, strict=True)))}
    cluster = Cluster(nodes=1, ranks_per_node=step.profile.world.ranks, samples=samples)
    problem = make_problem(step.profile, cluster)
    return simulate_schedule(problem, Schedule.from_boundaries(list(step.cuts))).iteration_us


def comparisons() -> list[Comparison]:
    """Return the ends of communication, steps from the other steps' messages, and the V100 compared with others'."""
    rows = []
    for run in RUNS:
        steps = traced_steps(run)
        for step in steps:
            update_us = step.profile.compute.update_us
            ours = (predicted_us(step, step.durations_us) - update_us) / 1e3
            what = f"{run}, step {step.number}: end of communication, own durations"
            rows.append(Comparison(what=what, published=step.end_us / 1e3, ours=ours, unit="ms"))
        for step in steps:
            columns = zip(*(other.durations_us for other in steps if other is not step), strict=True)
            ours = predicted_us(step, tuple(map(median, columns))) / 1e3
            what = f"{run}, step {step.number}: step, others' durations"
            rows.append(Comparison(what=what, published=step.span_us / 1e3, ours=ours, unit="ms"))
    return [*rows, *v100_rows()]


def v100_rows() -> list[Comparison]:
    """Return the traced steps of a V100, all but the first, beside the catalogue's ResNet-50, which others measured."""
    known = model("resnet50").compute
    moments = {
        "forward": ("forward_end_us", known.forward_us),
        "last gradient": ("last_gradient_us", known.forward_us + known.backward_us),
    }
    traced = table("resnet50_1xV100/steps.csv")[1:]
    return [
        Comparison(
            what=f"ResNet-50 on one V100: {what}", unit="ms", ours=ours_us / 1e3,
            published=median(float(line[column]) for line in traced) / 1e3,
        )
        for what, (column, ours_us) in moments.items()
    ]  # fmt: skip
