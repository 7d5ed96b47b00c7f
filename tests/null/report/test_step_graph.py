"""The graph of a step: slack of buckets and links, the critical path, what is refused, and the exported forms."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from builders import line_problem, random_problem, run, usual_cluster, usual_document, usual_profile

from planner import optimize
from planner.decide.strategies import make_schedule
from planner.documents.profile import Cluster, Link, SelectionLine, parse_profile
from planner.emit.step_graph import StepGraph, plan_graph, step_graph
from planner.export import export
from planner.ir import Schedule
from planner.model.engine import COMPUTE, Ops
from planner.model.engine import run as run_ops
from planner.model.modes import simulate_schedule
from planner.model.problem import Problem, make_problem
from planner.model.step_ops import step_ops
from planner.report.tables import slack_lines
from runtime.errors import InputError

STRATEGIES = (
    "random:1",
    "wfbp",
    "ddp:0.01",
    "mg_wfbp",
    "optimal",
    "lags:20:0",
    "lags:20:64",
    "torus_2d",
    "hitopk:0.05",
)


def on_two_links(rng: np.random.Generator, count: int) -> Problem:
    """2 nodes of 2 ranks, with costs of selection and unpacking."""
    profile = random_problem(rng, count, "line").profile
    intra = Link(alpha_us=float(rng.uniform(0, 9)), beta_us_per_byte=0.002)
    inter = Link(alpha_us=float(rng.uniform(0, 40)), beta_us_per_byte=0.01)
    line = SelectionLine(alpha_us=float(rng.uniform(0, 5)), beta_us_per_byte=1e-4)
    cluster = Cluster(nodes=2, ranks_per_node=2, intra=intra, inter=inter, sparsify=line, unpack=line)
    return make_problem(profile, cluster)


def graph_of(problem: Problem, schedule: Schedule) -> StepGraph:
    graph = step_graph(simulate_schedule(problem, schedule).spans)
    assert graph is not None
    return graph


@pytest.mark.parametrize("seed", range(100))
def test_a_bucket_may_be_longer_by_its_slack_and_no_more(seed: int) -> None:
    """Against the simulator, run again with one message made longer."""
    rng = np.random.default_rng(seed)
    problem = on_two_links(rng, int(rng.integers(1, 12)))
    schedule = make_schedule(problem, STRATEGIES[seed % len(STRATEGIES)])
    graph, ops = graph_of(problem, schedule), step_ops(problem, schedule)
    step_us = run_ops(ops).total_us
    assert graph.step_us == pytest.approx(step_us, rel=1e-9)
    slack_us = {(node.name, node.resource): slack for node, slack in graph.slack_us.items()}
    by_bucket: dict[int, list[float]] = {}
    for number, op in enumerate(ops):
        if op.bucket is None or op.lane == COMPUTE:
            continue
        slack = slack_us[f"bucket {op.bucket} {op.kind}", op.lane]
        by_bucket.setdefault(op.bucket, []).append(slack)
        for more_us in (0.5 * slack, slack + 7.0):
            longer = Ops([*ops[:number], op._replace(time_us=op.time_us + more_us), *ops[number + 1 :]])
            expected_us = step_us + max(0.0, more_us - slack)
            assert run_ops(longer).total_us == pytest.approx(expected_us, rel=1e-9)
    assert graph.bucket_slack_us(len(schedule.buckets)) == [min(by_bucket[b]) for b in range(len(schedule.buckets))]
    path_us = sum(node.time_us for node in graph.critical_path)
    assert path_us == pytest.approx(step_us, rel=1e-9)
    assert all(graph.slack_us[node] == 0.0 for node in graph.critical_path if node.time_us > 0.0)
    for link, factor in graph.link_slack().items():
        for times, same in ((0.5 * (1.0 + factor), True), (1.01 * factor + 0.01, False)):
            slower = Ops([op._replace(time_us=op.time_us * times) if op.lane == link else op for op in ops])
            assert (run_ops(slower).total_us <= step_us * (1 + 1e-8)) == same


def test_slack_by_hand() -> None:
    """Forward 100, backward 50, 300, 50, update 10; messages take 60: the first two wait for nothing and are waited for
    late, the last one is waited for.
    """
    problem = line_problem([(1, 50.0), (1, 300.0), (1, 50.0)], 60.0, 0.0)
    graph = graph_of(problem, make_schedule(problem, "wfbp"))
    # Ready at 150, 450, 500; sent 150 to 210, 450 to 510, 510 to 570.
    assert graph.bucket_slack_us(3) == [240.0, 0.0, 0.0]
    assert [node.name for node in graph.critical_path] == [
        "forward", "backward part 0", "backward part 1", "bucket 1 all_reduce", "bucket 2 all_reduce", "update"
    ]  # fmt: skip
    assert graph.link_slack() == {"network": pytest.approx(1.0)}


def test_hidden_messages_may_be_slower() -> None:
    problem = line_problem([(1, 50.0), (1, 300.0)], 60.0, 0.0)
    graph = graph_of(problem, make_schedule(problem, "single"))
    assert graph.link_slack() == {"network": pytest.approx(1.0)}
    plan = optimize(usual_profile(), usual_cluster())
    found = plan_graph(plan)
    assert found is not None
    assert found.step_us == pytest.approx(plan.predicted.iteration_us if plan.predicted else 0.0)


def test_networks_without_messages_and_contention() -> None:
    """One rank alone has no network that could be slower; contention is said not to change."""
    free = line_problem([(1, 50.0)], 0.0, 0.0)
    assert graph_of(free, make_schedule(free, "single")).link_slack() == {}
    for contention in (None, (1.5, 2.0)):
        lines = slack_lines(optimize(usual_profile(), usual_cluster(contention=contention)))
        assert any("leaves out contention" in line for line in lines) == (contention is not None)


def test_tasks_that_wait_for_each_other_are_named() -> None:
    problem = line_problem([(1, 50.0), (1, 300.0)], 60.0, 0.0)
    graph = graph_of(problem, make_schedule(problem, "single"))
    forward, *_, update = graph.order
    circle = nx.DiGraph(graph.graph)
    circle.add_edge(update, forward)
    with pytest.raises(InputError, match=r"found tasks that wait for each other: forward → .*; expected"):
        _ = StepGraph(circle).order


@pytest.mark.parametrize("strategy", ["ssd:2", "optimal:late-gather", "lap"])
def test_steps_that_overlap_have_no_graph(strategy: str) -> None:
    rng = np.random.default_rng(1)
    problem = random_problem(rng, 5, "line")
    spans = simulate_schedule(problem, make_schedule(problem, strategy)).spans
    overlapping = any(getattr(span, "step", None) is not None or "updater" in span.resource for span in spans)
    assert (step_graph(spans) is None) == overlapping


def test_exports_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = optimize(usual_profile(), usual_cluster())
    graph = plan_graph(plan)
    assert graph is not None
    plan.save(tmp_path / "plan.json")
    run("export", str(tmp_path / "plan.json"), "--to", "graphml", "-o", str(tmp_path / "step.graphml"))
    read = nx.read_graphml(tmp_path / "step.graphml")
    assert set(read) == {node.name for node in graph.order}
    assert {(a, b) for a, b in read.edges} == {(a.name, b.name) for a, b in graph.graph.edges}
    for node in graph.order:
        assert read.nodes[node.name]["time_us"] == node.time_us
        assert read.nodes[node.name]["slack_us"] == graph.slack_us[node]
    dot = export(plan, "dot").text
    assert dot.startswith("digraph step {")
    assert all(json.dumps(node.name) in dot for node in graph.order)
    assert dot.count(" -> ") == graph.graph.number_of_edges()
    bare = json.loads(json.dumps(plan.to_document()))
    bare["predicted"].pop("timeline")
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    with pytest.raises(InputError, match="found no timeline of one step, expected"):
        export(tmp_path / "bare.json", "dot")


def test_layers_with_branches_are_a_graph_of_the_same_form(tmp_path: Path) -> None:
    inputs = {"stem": None, "left": ["stem"], "right": ["stem"], "join": ["left", "right"]}
    times_us = {"stem": 5.0, "left": 10.0, "right": 30.0, "join": 2.0}
    document = usual_document()
    document["layers"] = [
        {"name": name, "kind": "conv", "flops": 1.0, "activation_bytes": 1.0, "forward_us": times_us[name],
         "grad_weight_us": times_us[name], **({"inputs": of} if of else {})}
        for name, of in inputs.items()
    ]  # fmt: skip
    profile = parse_profile(document)
    plan = optimize(profile, usual_cluster())
    found = export(plan, "layers-graphml", profile)
    (tmp_path / "layers.graphml").write_text(found.text)
    read = nx.read_graphml(tmp_path / "layers.graphml")
    assert {(a, b) for a, b in read.edges} == {(name, after) for after, of in inputs.items() for name in of or ()}
    assert {name: of["slack_us"] for name, of in read.nodes.items()} == {"stem": 0, "left": 40, "right": 0, "join": 0}
    assert "3 of 4 layers are on the critical path, with 0.074 of 0.094 ms" in found.notes[0]
    dot = export(plan, "layers-dot", profile)
    assert dot.text.startswith("digraph layers {")
    assert dot.text.count(" -> ") == 4
    assert dot.document == found.document
    for without in (None, parse_profile(usual_document())):
        with pytest.raises(InputError, match=r"--profile: found .* expected the plan's profile with the inputs"):
            export(plan, "layers-dot", without)


def test_explain_shows_slack_and_the_critical_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = optimize(usual_profile(), usual_cluster())
    plan.save(tmp_path / "plan.json")
    capsys.readouterr()
    run("explain", str(tmp_path / "plan.json"))
    shown = " ".join(capsys.readouterr().out.split())
    assert "slack" in shown
    assert "critical path: forward" in shown
    assert "times as long without making the step longer" in shown or "has no slack" in shown
