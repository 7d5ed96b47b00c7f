"""Small profiles, clusters and problems, built by hand or drawn by hypothesis."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from rich.console import Console

from planner.cli.app import main
from planner.cost.model import communication_cost
from planner.documents.profile import Cluster, Profile, parse_cluster, parse_profile
from planner.model.problem import Problem
from planner.report.tables import print_plan
from runtime.plan import Plan

Rows = Sequence[tuple[int, float]]
"""(numel, backward_us) of each gradient."""


def profile_document(
    rows: Rows,
    *,
    forward_us: float = 100.0,
    update_us: float = 10.0,
    layers: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    cluster: dict[str, Any] | None = None,
    ranks: int = 4,
) -> dict[str, Any]:
    """profile.json with gradients g0, g1, …; every gradient is a layer of its own unless `layers` says otherwise."""
    gradients = [
        {
            "name": f"g{index}",
            "layer": layers[index] if layers else f"layer{index}",
            "numel": numel,
            "dtype": dtypes[index] if dtypes else "float32",
            "backward_us": backward_us,
        }
        for index, (numel, backward_us) in enumerate(rows)
    ]
    return {
        "schema": "planner.profile/1",
        "model": {"name": "test"},
        "world": {"ranks": ranks},
        "compute": {"forward_us": forward_us, "update_us": update_us, "gradients": gradients},
        "cluster": cluster or {},
    }


def add_matrix(gradient: dict[str, Any]) -> None:
    """Makes a gradient of a profile as nearly square as its elements allow."""
    numel = gradient["numel"]
    rows = next((rows for rows in range(math.isqrt(numel), 1, -1) if numel % rows == 0), 0)
    if rows:
        gradient["matrix"] = [rows, numel // rows]


def add_operator(profile: dict[str, Any]) -> None:
    """Gives the first gradient of a profile an operator that takes no time."""
    first = profile["compute"]["gradients"][0]
    shape = {"shape": [first["numel"]], "operator_us": 0.0, "result_bytes": 4, "parameters": [first["name"]]}
    profile["compute"]["operator"] = {"optimizer": "Muon", "shapes": [shape]}


def cluster_document(
    line: tuple[float, float] | None = (50.0, 0.01),
    samples: Sequence[Sequence[float]] | None = None,
    contention: tuple[float, float] | None = None,
    nodes: int = 4,
    **fields: Any,
) -> dict[str, Any]:
    """cluster.json with a measured all-reduce: a line (alpha, beta), samples, or both."""
    document: dict[str, Any] = {"schema": "planner.cluster/1", "nodes": nodes, **fields}
    if line is not None:
        document["collectives"] = {"all_reduce": {"alpha_us": line[0], "beta_us_per_byte": line[1]}}
    if samples is not None:
        document["samples"] = {"all_reduce": [list(sample) for sample in samples]}
    if contention is not None:
        document["contention"] = {"compute": contention[0], "network": contention[1]}
    return document


def two_nodes(slow: float = 1.0, fast: float = 0.01, alpha_us: float = 20.0, **fields: Any) -> dict[str, Any]:
    """Two nodes of two ranks; a flat ring between nodes."""
    links = {
        "intra": {"alpha_us": alpha_us / 4, "beta_us_per_byte": fast},
        "inter": {"alpha_us": alpha_us, "beta_us_per_byte": slow},
    }
    return cluster_document(None, nodes=2, ranks_per_node=2, **links, **fields)


def make(profile: dict[str, Any], cluster: dict[str, Any]) -> Problem:
    """The problem of two documents."""
    return Problem(profile=parse_profile(profile), cost=communication_cost(parse_cluster(cluster)))


def halves_cluster(half: tuple[float, float] | None = (30.0, 0.005), **fields: Any) -> dict[str, Any]:
    """Four ranks; reduce-scatter and all-gather are lines, or unknown."""
    made = cluster_document((50.0, 0.01), **fields)
    for name in ("reduce_scatter", "all_gather") if half else ():
        made["collectives"][name] = {"alpha_us": half[0], "beta_us_per_byte": half[1]}  # type: ignore[index]
    return made


def line_problem(rows: Rows, alpha_us: float, beta_us_per_byte: float, **options: Any) -> Problem:
    """Gradients on a network whose all-reduce is a line."""
    return make(profile_document(rows, **options), cluster_document((alpha_us, beta_us_per_byte)))


def write(path: Path, document: Any) -> str:
    """Writes a JSON document; returns its path as the command line takes it."""
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def usual_profile(**options: Any) -> Profile:
    """Six gradients of four layers, with a cluster on which merging pays."""
    return parse_profile(usual_document(**options))


def usual_document(**options: Any) -> dict[str, Any]:
    """The document of `usual_profile`."""
    rows = [(10, 100.0), (5000, 100.0), (200, 50.0), (200000, 400.0), (64, 10.0), (30000, 300.0)]
    layers = ["fc", "fc", "norm", "conv2", "conv1", "conv1"]
    options.setdefault("cluster", cluster_document((200.0, 0.001)))
    return profile_document(rows, layers=layers, **options)


def usual_cluster(**options: Any) -> Cluster:
    """A measured line on four nodes."""
    return parse_cluster(cluster_document(**options))


DTYPES = ("float32", "bfloat16", "float64")


@st.composite
def profile_documents(draw: st.DrawFn, max_count: int = 10, mixed: bool = False) -> dict[str, Any]:
    """Profiles on a coarse grid of numbers, so that equal sizes, equal ready times and ties are common."""
    count = draw(st.integers(1, max_count))
    numel = st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 64, 1000, 100000]))
    time_us = st.one_of(st.integers(0, 20).map(lambda n: n * 25.0), st.sampled_from([0.0, 0.5, 1000.0]))
    rows = draw(st.lists(st.tuples(numel, time_us), min_size=count, max_size=count))
    layers = [f"layer{index // draw(st.integers(1, 3))}" for index in range(count)]
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=count, max_size=count)) if mixed else None
    forward_us, update_us = draw(time_us), draw(time_us)
    return profile_document(rows, forward_us=forward_us, update_us=update_us, layers=layers, dtypes=dtypes)


@st.composite
def cluster_documents(draw: st.DrawFn, monotone: bool = False, contention: bool = False) -> dict[str, Any]:
    """A line, or samples that may go up and down."""
    if draw(st.booleans()):
        line = (draw(st.integers(0, 40)) * 12.5, draw(st.integers(0, 64)) / 64)
        return _contended(draw, cluster_document(line), contention)
    sizes = draw(st.lists(st.integers(0, 2000), min_size=1, max_size=6))
    times = [draw(st.integers(0, 60)) * 12.5 for _ in sizes]
    if monotone:
        sizes, times = sorted(set(sizes)), sorted(times)[: len(set(sizes))]
    samples = list(zip(sizes, times, strict=True))
    return _contended(draw, cluster_document(None, samples), contention)


def _contended(draw: st.DrawFn, cluster: dict[str, Any], contention: bool) -> dict[str, Any]:
    """With contention factors for all messages or, as often, by their size, where that is asked for."""
    if not contention:
        return cluster
    compute, network = draw(factors())
    cluster["contention"] = {"compute": compute, "network": network}
    if draw(st.booleans()):
        sizes = draw(st.lists(st.sampled_from([1, 64, 4096, 100_000, 400_000]), min_size=1, max_size=4, unique=True))
        cluster["contention"]["by_size"] = [[size, *draw(factors())] for size in sizes]
    return cluster


def factors() -> st.SearchStrategy[tuple[float, float]]:
    """Contention factors, from none to heavy."""
    factor = st.sampled_from([1.0, 1.07, 1.25, 1.5, 2.0, 3.0])
    return st.tuples(factor, factor)


@st.composite
def problems(
    draw: st.DrawFn, max_count: int = 10, *, mixed: bool = False, monotone: bool = False, contention: bool = False,
    matrices: bool = False, operator: bool = False,
) -> Problem:  # fmt: skip
    """A profile on a cluster; with `matrices` at least one gradient is such, and others may be; see `add_operator`."""
    profile = draw(profile_documents(max_count, mixed))
    if matrices or operator:
        gradients = profile["compute"]["gradients"]
        gradients[0] |= {"numel": 1000, "dtype": "float32"}
        for gradient in gradients:
            if gradient is gradients[0] or draw(st.booleans()):
                add_matrix(gradient)
    if operator:
        add_operator(profile)
    return make(profile, draw(cluster_documents(monotone, contention)))


def random_problem(rng: np.random.Generator, count: int, kind: str, **options: Any) -> Problem:
    """A problem of real-valued numbers without ties.

    Args:
        rng: its state decides the problem.
        count: number of gradients.
        kind: `line`, `monotone` or `jagged` (samples that may go down).
        options: as for `profile_document`, and `contention`.
    """
    contention = options.pop("contention", None)
    numel = (10 ** rng.uniform(1, 5.5, count)).astype(int)
    backward_us = rng.exponential(rng.choice([30.0, 300.0]), count)
    rows = list(zip(numel.tolist(), backward_us.tolist(), strict=True))
    line = (float(rng.uniform(5, 1000)), float(10 ** rng.uniform(-4.5, -2.5)))
    if kind == "line":
        cluster = cluster_document(line, contention=contention)
    else:
        sizes = np.sort(10 ** rng.uniform(1, 6.5, 12))
        times = line[0] + line[1] * sizes * rng.uniform(0.6, 1.4, 12)
        times = np.maximum.accumulate(times) if kind == "monotone" else times
        cluster = cluster_document(None, np.column_stack([sizes, times]).tolist(), contention)
    return make(profile_document(rows, **options), cluster)


def run(*arguments: str, code: int = 0) -> None:
    """Run a command, which has to end with this exit code."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert (stop.value.code or 0) == code


class Outcome(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


def outcome_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Run a command, and return how it ended."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    code = stop.value.code or 0
    assert isinstance(code, int)
    return Outcome(code, *capsys.readouterr())


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return what a command prints with --json."""
    run(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def printed(plan: Plan) -> str:
    """Return the tables of a plan with its buckets, as a wide terminal shows them."""
    console = Console(width=200, record=True, file=io.StringIO())
    print_plan(plan, console, buckets=True)
    return console.export_text()


def every_choice(count: int, forms: int) -> Any:
    """Every way to cut gradients into buckets, each in any form."""
    for cuts in itertools.product([False, True], repeat=count - 1):
        stops = [*(index + 1 for index, cut in enumerate(cuts) if cut), count]
        for chosen in itertools.product(range(forms), repeat=len(stops)):
            yield tuple(zip(stops, chosen, strict=True))
