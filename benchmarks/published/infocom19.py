"""MG-WFBP, INFOCOM 2019: GoogLeNet and ResNet-50 on 1 to 8 K80 nodes, and simulations up to 64 (B-Caffe)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from benchmarks.published.collectives import osu_all_reduce, osu_knots, thinned
from benchmarks.published.common import DATA, STRATEGY, Comparison, model, predict_s, schedule_of, simulate_s, table
from benchmarks.published.report import table_line
from benchmarks.traces import layer_log_rows, make_profile, with_step
from planner.cost.collectives import Coefficients, solve_link
from planner.cost.curve import CostCurve, fit_line
from planner.decide.simulate import simulate
from planner.decide.strategies import make_schedule
from planner.documents.profile import Cluster, Link, Profile
from planner.ir import Schedule
from planner.model.modes import simulate_schedule
from planner.model.problem import make_problem
from runtime.plan.timeline import Timeline

METHODS = ("WFBP", "SyncEASGD", "MG-WFBP")
MODELS = {"GoogLeNet": "googlenet", "ResNet-50": "resnet50-k80-b32"}
LOG = "bcaffe_infocom19/googlenet_layers.csv"
LOGGED = ("GoogLeNet",)
"""Models whose layers were timed on these machines."""
MAX_SEND_BYTES = 2**17
"""Open MPI's largest piece of a message over TCP (`btl_tcp_max_send_size`): from a block of a ring of this size on the
logs rise evenly, after steps at it and at half of it."""


def simulated_cluster(nodes: int) -> Cluster:
    """The authors' all-reduce model, with the paper's start-up 2(N − 1)·α."""
    constants = json.loads((DATA / "bcaffe_infocom19/constants.json").read_text(encoding="utf-8"))
    constants = constants["sim_allreduce_model_us"]
    alpha_us = constants["paper_intercept_us"]["8"] / (2 * (8 - 1))
    link = Link(
        alpha_us=alpha_us,
        beta_us_per_byte=constants["beta_s_per_byte"] * 1e6,
        gamma_us_per_byte=constants["gamma_s_per_byte"] * 1e6,
    )
    return Cluster(name="k80-10gbe", nodes=nodes, inter=link)


def text_cluster(nodes: int) -> Cluster:
    """The all-reduce of the paper's introduction, 1.5 ms for 200 KB and 1.8 ms for 400 KB on 8 nodes, as a ring."""
    values_us = [record_us("mgwfbp19-004"), record_us("mgwfbp19-005")]
    slope = (values_us[1] - values_us[0]) / 200_000
    link = solve_link("all_reduce/ring", 8, Coefficients(values_us[0] - 200_000 * slope, slope))
    return Cluster(name="k80-10gbe, introduction", nodes=nodes, inter=link)


@cache
def record_us(name: str) -> float:
    """A record of `paper_tables.json` in milliseconds, as microseconds."""
    records = json.loads((DATA / "paper_tables.json").read_text(encoding="utf-8"))
    [value] = [item["value"] for item in records if item["id"] == name]
    return 1e3 * float(value)


CONSTANTS = {"simulations": simulated_cluster, "introduction": text_cluster}
"""Both sets of constants that the paper has of its K80."""


def figure_9() -> Iterator[str]:
    """Speed-up S(N) and efficiency S(N) / N, Eq. 4 and 5, by both sets of constants."""
    methods = {**STRATEGY_OF_FIGURE_9, "best merged": "optimal"}
    yield table_line("model", "constants", "N", *(f"{name}: S(N), S(N) / N" for name in methods), "MG-WFBP / best")
    yield table_line(*["---"] * 2, *["--:"] * (len(methods) + 2))
    for (name, document), (constants, cluster) in product(MODELS.items(), CONSTANTS.items()):
        for nodes in (4, 8, 16, 32, 64):
            found = simulate(model(document), cluster(nodes), strategies=list(methods.values()))
            cells = [f"{of.speed_up:.1f}, {of.efficiency:.2f}" for of in found]
            steps_us = dict(zip(methods, (of.iteration_us for of in found), strict=True))
            loss = steps_us["MG-WFBP"] / steps_us["best merged"]
            yield table_line(name, constants, str(nodes), *cells, f"{loss:.3f}")


STRATEGY_OF_FIGURE_9 = {method: STRATEGY[method] for method in METHODS}


def slopes() -> dict[str, float]:
    """b of the all-reduce on 8 nodes, in µs per byte, by set of constants."""
    found = {}
    for name, cluster in CONSTANTS.items():
        cost = make_problem(model("googlenet"), cluster(8)).cost.all_reduce
        found[name] = (cost.at(2e6) - cost.at(1e6)) / 1e6
    return found


def start_ups() -> list[Comparison]:
    """The paper's a on 2, 4 and 8 nodes."""
    constants = json.loads((DATA / "bcaffe_infocom19/constants.json").read_text(encoding="utf-8"))
    published = constants["sim_allreduce_model_us"]["paper_intercept_us"]
    return [
        Comparison(
            what=f"start-up a on {nodes} nodes",
            published=a_us,
            ours=make_problem(model("googlenet"), simulated_cluster(int(nodes))).cost.all_reduce.start_up_us,
            unit="µs",
            by_construction=True,
        )
        for nodes, a_us in published.items()
    ]


def replay() -> Timeline:
    """One logged iteration: every layer's own all-reduce time, in the order of backward, starting with backward."""
    lines = [line for line in table(LOG) if line["run"] == "tmp8comm_pass2"]
    rows = layer_log_rows(DATA / LOG, "tmp8comm_pass2")
    times = {f"layer{line['layer_forward_index']}": float(line["allreduce_us"]) for line in lines}
    # One byte range of its own for each message, so that a curve through samples gives each its logged time.
    numbered = [replace(row, numel=index + 1) for index, row in enumerate(rows)]
    profile = make_profile(numbered, name="googlenet", forward_us=0.0)
    samples = tuple((4.0 * row.numel, times[row.name]) for row in numbered)
    problem = make_problem(profile, Cluster(nodes=8, samples={"all_reduce": samples}))
    return simulate_schedule(problem, make_schedule(problem, "wfbp"))


def speed_ups(name: str, nodes: int, forward_order: bool = False) -> dict[str, float]:
    """Step time of WFBP and SyncEASGD over that of MG-WFBP (Algorithm 1), simulated as the paper does.

    Args:
        name: the model.
        nodes: number of nodes.
        forward_order: walk the layers from first to last, as the authors' script does, and not as backward does.
    """
    cluster, profile = simulated_cluster(nodes), model(MODELS[name])
    if forward_order:
        gradients = tuple(reversed(profile.compute.gradients))
        profile = replace(profile, compute=replace(profile.compute, gradients=gradients))
    own_s = predict_s(profile, cluster, "mg_wfbp")
    return {method: predict_s(profile, cluster, STRATEGY[method]) / own_s for method in ("WFBP", "SyncEASGD")}


PUBLISHED_SPEED_UPS = {
    ("GoogLeNet", "WFBP"): 1.78,
    ("GoogLeNet", "SyncEASGD"): 1.35,
    ("ResNet-50", "WFBP"): 1.75,
    ("ResNet-50", "SyncEASGD"): 1.45,
}
"""Sec. V-C, simulated on 64 nodes: MG-WFBP over the method."""


def simulated_comparisons() -> list[Comparison]:
    """The paper's simulations of 64 nodes."""
    ours = {name: speed_ups(name, 64) for name in MODELS}
    return [
        Comparison(what=f"{name}, 64 nodes: MG-WFBP over {method}", published=value, ours=ours[name][method], unit="×")
        for (name, method), value in PUBLISHED_SPEED_UPS.items()
    ]


PUBLISHED_EFFICIENCY = 0.55
"""Sec. V-C, "around", for WFBP and SyncEASGD alike: ResNet-50 simulated on 64 nodes."""


def efficiency_comparisons() -> list[Comparison]:
    """Throughput of 64 simulated nodes over 64 times that of one."""
    profile, cluster = model(MODELS["ResNet-50"]), simulated_cluster(64)
    compute_us = profile.compute.forward_us + sum(gradient.backward_us for gradient in profile.compute.gradients)
    return [
        Comparison(
            what=f"ResNet-50, 64 nodes: scaling efficiency of {method}",
            published=PUBLISHED_EFFICIENCY,
            ours=compute_us / 1e6 / predict_s(profile, cluster, STRATEGY[method]),
            unit="",
        )
        for method in ("WFBP", "SyncEASGD")
    ]


PUBLISHED_MEASURED_SPEED_UPS = {"WFBP": 1.2, "SyncEASGD": 1.36}
"""Sec. V-B, "about", for both models on 8 nodes: MG-WFBP over the method."""


def measured_speed_ups() -> list[Comparison]:
    """The text's summary of the measurements on 8 nodes."""
    result = []
    for name in MODELS:
        profile, cluster = measured_profile(name), measured_cluster(8)
        steps_s = {method: simulate_s(profile, cluster, _schedule(profile, method)) for method in METHODS}
        for method, published in PUBLISHED_MEASURED_SPEED_UPS.items():
            what = f"{name}, 8 nodes: MG-WFBP over {method}"
            ours = steps_s[method] / steps_s["MG-WFBP"]
            result.append(Comparison(what=what, published=published, ours=ours, unit="×"))
    return result


def measured_profile(name: str) -> Profile:
    """A model whose step takes what it took on one node there.

    GoogLeNet's backward is that of its log, in which it is 202 to 205 ms in each of six runs; forward is the rest.
    ResNet-50 has no log there: both are scaled.
    """
    [single] = [line for line in _throughput(name, "WFBP") if line["nodes"] == "1"]
    profile, step_us = model(MODELS[name]), float(single["iteration_s_derived"]) * 1e6
    if name not in LOGGED:
        return with_step(profile, step_us)
    backward_us = sum(gradient.backward_us for gradient in profile.compute.gradients)
    return replace(profile, compute=replace(profile.compute, forward_us=step_us - backward_us))


def logged_slow_down(run: str = "tmp8comm_pass2") -> float:
    """All-reduces of a logged step on 8 nodes over those of the benchmark, size by size: the median."""
    curve = CostCurve.from_samples(osu_knots(8))
    lines = [line for line in table(LOG) if line["run"] == run]
    ratios = [float(line["allreduce_us"]) / curve.at(4.0 * int(line["n_elements"])) for line in lines]
    return round(statistics.median(ratios), 2)


@cache
def measured_cluster(nodes: int) -> Cluster:
    """The OSU all-reduce on this number of nodes.

    Beyond the benchmark's last size a byte takes what Table II's ring makes of its time on 2 nodes, where the benchmark
    has the largest blocks.
    """
    samples = thinned(osu_all_reduce(nodes), 20)
    (last, time_us), far = samples[-1], 2.0**30
    far_us = time_us + large_slope() * 2 * (nodes - 1) / nodes * (far - last)
    name = f"k80-{nodes}x1-10gbe-osu"
    return Cluster(name=name, nodes=nodes, samples={"all_reduce": (*samples, (far, far_us))})


@cache
def large_slope() -> float:
    """Microseconds per byte that a node sends, in blocks that are larger than TCP's pieces: on 2 nodes half of them."""
    return fit_line(osu_all_reduce(2, least_bytes=2 * MAX_SEND_BYTES)).per_byte_us


def believed_cluster() -> Cluster:
    """The four points by which B-Caffe's binary decided what to merge."""
    constants = json.loads((DATA / "bcaffe_infocom19/constants.json").read_text(encoding="utf-8"))
    points = constants["online_predictor_points"]["bytes_us"]
    return Cluster(nodes=8, samples={"all_reduce": tuple((float(x), float(y)) for x, y in points)})


def measured_comparisons() -> list[Comparison]:
    """Iteration times on two and more nodes."""
    result = []
    for name in MODELS:
        profile = measured_profile(name)
        for method in METHODS:
            for line in _throughput(name, method):
                nodes = int(line["nodes"])
                if nodes == 1:
                    continue
                result.append(
                    Comparison(
                        what=f"{name} {nodes} nodes",
                        method=method,
                        published=float(line["iteration_s_derived"]),
                        ours=simulate_s(profile, measured_cluster(nodes), _schedule(profile, method)),
                    )
                )
    return result


def _schedule(profile: Profile, method: str) -> Schedule:
    return schedule_of(profile, method, believed_cluster())


def _throughput(name: str, method: str) -> list[dict[str, str]]:
    lines = table("bcaffe_infocom19/measured_throughput.csv")
    return [line for line in lines if line["model"] == name and line["method"] == method]
