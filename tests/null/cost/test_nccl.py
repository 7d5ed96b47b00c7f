"""NCCL's cost model: its formulas by hand, its choices, what goes before it, and what descriptions may not say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost import nccl
from planner.cost.halves import half
from planner.cost.model import communication_cost
from planner.cost.nccl import COLLECTIVES, Channels, Shape
from planner.cost.phases import PHASES
from planner.documents.catalog import find_cluster, names
from planner.documents.nccl import GPUS, Nccl
from planner.documents.profile import Cluster, Link, parse_cluster
from runtime.errors import InputError
from runtime.plan.transports import TORUS_2D

A100 = Nccl(gpu="a100", nics_per_node=8, nic="200gbit", cpu="amd")
H100 = Nccl(gpu="h100", nics_per_node=8, nic="400gbit")
DESCRIBED = [name for name in names("cluster") if find_cluster(name).nccl is not None]
SIZES = 2.0 ** np.arange(3, 36)


def test_latencies_and_bandwidths_are_those_of_nccls_formulas() -> None:
    one, eight = Shape(A100, 1, 8), Shape(H100, 8, 8)
    assert nccl.latency_us("ring/ll", "all_reduce", one) == pytest.approx(6.6 + 14 * 0.6)
    assert nccl.latency_us("ring/simple", "all_gather", one) == pytest.approx(8.4 + 7 * 3.4)
    assert nccl.latency_us("tree/ll128", "all_reduce", eight) == pytest.approx(14 + 2 * (7 * 1.25 + 3 * 8.5))
    # 126 steps, of which 14 cross nodes; the others wait at least for three posts of 1 µs each.
    assert nccl.latency_us("ring/simple", "all_reduce", eight) == pytest.approx(8.4 + 112 * 3.4 + 14 * 14.0)
    assert nccl.latency_us("nvls_tree/simple", "all_reduce", eight) == pytest.approx(25.0 + 2 * 3 * 20.9)
    assert nccl.bytes_per_us("ring/simple", "all_reduce", one) == pytest.approx(240e3 * 8 / 14)
    assert nccl.bytes_per_us("ring/ll", "all_reduce", one) == pytest.approx(87.7e3 * 8 / 14)
    assert nccl.bytes_per_us("ring/ll128", "all_reduce", eight) == pytest.approx(8 * 36.7e3 * 64 / 126)
    assert nccl.bytes_per_us("tree/ll", "all_reduce", Shape(A100, 2, 8)) == pytest.approx(22.5e3 / 2)


def test_a_networks_latency_is_added_where_nccl_adds_it() -> None:
    efa, plain = Shape(replace(H100, network="efa"), 4, 8), Shape(H100, 4, 8)
    for family, times in (("tree/ll128", 4), ("tree/simple", 8), ("ring/ll128", 6), ("ring/simple", 12)):
        more = nccl.latency_us(family, "all_reduce", efa) - nccl.latency_us(family, "all_reduce", plain)  # type: ignore[arg-type]
        assert more == pytest.approx(75.0 * times), family


@pytest.mark.parametrize(
    ("machine", "nodes", "channels"),
    [
        (A100, 1, Channels(12, 20.0)), (H100, 1, Channels(12, 30.0)), (Nccl(gpu="b200"), 1, Channels(16, 45.0)),
        (A100, 8, Channels(8, 24.0)), (H100, 8, Channels(8, 45.0)),
        (replace(A100, nics_per_node=1), 2, Channels(1, 24.0)),
        (Nccl(gpu="a40", pcie="24gbyte", nic="100gbit"), 2, Channels(1, 12.0)),
    ],
)  # fmt: skip
def test_channels(machine: Nccl, nodes: int, channels: Channels) -> None:
    assert Shape(machine, nodes, 8).channels == channels


def test_sums_in_switches_are_taken_where_they_were_measured_to_be() -> None:
    """From 5 H100 on, at 473 to 482 GB/s of bus bandwidth with 8 (github.com/stas00/ml-engineering, network)."""
    large = np.array([2.0**33])
    assert nccl.choice("all_reduce", Shape(H100, 1, 8), large) == ["nvls/simple"]
    assert nccl.choice("all_reduce", Shape(H100, 1, 4), large) == ["ring/simple"]
    bus = nccl.bytes_per_us("nvls/simple", "all_reduce", Shape(H100, 1, 8)) * 14 / 8 / 1e3
    assert bus == pytest.approx(477, rel=0.02)
    assert "nvls/simple" not in nccl.families("all_reduce", Shape(A100, 1, 8))


@pytest.mark.parametrize("name", DESCRIBED)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_family_on_every_machine_takes_a_time_that_grows_with_the_message(name: str, collective: str) -> None:
    cluster = find_cluster(name)
    assert cluster.nccl is not None
    for nodes in (1, 2, 3, 64):
        shape = Shape(cluster.nccl, nodes, cluster.ranks_per_node)
        offered = nccl.families(collective, shape)
        for family in offered:
            times = nccl.times_us(collective, shape, SIZES, [family] * len(SIZES))
            assert np.isfinite(times).all()
            assert (np.diff(times) > 0).all(), (family, nodes)
        believed = np.array([nccl.believed_us(family, collective, shape, SIZES) for family in offered])
        chosen = nccl.believed_choice(collective, shape, SIZES)
        assert [offered.index(family) for family in chosen] == believed.argmin(axis=0).tolist()


def test_a_plugins_table_is_followed_at_its_corners() -> None:
    p5 = find_cluster("aws-p5").nccl
    assert p5 is not None
    asked = {
        (2, 2**24): "tree/ll128", (2, 2**26): "nvls_tree/simple", (4, 2**26): "ring/ll128", (4, 2**31): "ring/simple",
        (8, 2**26): "tree/ll128", (8, 2**31): "ring/ll128", (8, 2**32): "ring/simple", (16, 2**28): "tree/ll128",
        (16, 2**32): "nvls_tree/simple", (16, 2**33): "ring/simple", (32, 2**33): "nvls_tree/simple",
    }  # fmt: skip
    for (nodes, size), family in asked.items():
        assert nccl.choice("all_reduce", Shape(p5, nodes, 8), [float(size)]) == [family], (nodes, size)


@given(st.floats(0.1, 10.0), st.sampled_from(COLLECTIVES), st.sampled_from([1, 2, 16]))
def test_scaled_machines_take_so_many_times_as_long(factor: float, collective: str, nodes: int) -> None:
    before = nccl.times_us(collective, Shape(H100, nodes, 8), SIZES)
    after = nccl.times_us(collective, Shape(nccl.scaled(H100, factor), nodes, 8), SIZES)
    np.testing.assert_allclose(after, factor * before, rtol=1e-9)


def cluster(**fields: Any) -> Cluster:
    return Cluster(nodes=8, ranks_per_node=8, library="nccl", nccl=H100, **fields)


def test_the_model_goes_behind_samples_and_lines_and_before_links() -> None:
    link = Link(alpha_us=1.0, beta_us_per_byte=1.0)
    modelled = communication_cost(cluster(inter=link, intra=link))
    assert modelled.source.startswith("NCCL's all-reduce: tree/ll")
    assert modelled.all_reduce.at(2**26) == pytest.approx(nccl.curve("all_reduce", Shape(H100, 8, 8)).at(2**26))
    measured = communication_cost(cluster(samples={"all_reduce": ((1024.0, 7.0),)}))
    assert measured.source == "1 measured samples"
    others = communication_cost(cluster(samples={"all_reduce": ((1024.0, 7.0),)}), 512)
    assert others.source.startswith("NCCL's")
    assert half(modelled, "all_gather").source.startswith("NCCL's all-gather: ring/ll")


def test_a_curve_is_the_model_between_its_knots_too() -> None:
    shape = Shape(H100, 8, 8)
    sizes = 2.0 ** np.linspace(7.1, 35.0, 300)
    families = np.array(nccl.choice("all_reduce", shape, sizes))
    inside = (families[1:-1] == families[:-2]) & (families[1:-1] == families[2:])
    ratio = nccl.curve("all_reduce", shape)(sizes) / nccl.times_us("all_reduce", shape, sizes)
    assert np.quantile(np.abs(ratio[1:-1][inside] - 1.0), 0.95) < 0.02


def test_phases_share_a_nodes_cards_among_its_ranks() -> None:
    phases = PHASES[TORUS_2D](cluster(), communication_cost(cluster()).all_reduce, None)
    assert [(phase.name, phase.link) for phase in phases] == [
        ("reduce_scatter", "intra"), ("all_reduce", "inter"), ("all_gather", "intra"),
    ]  # fmt: skip
    few = replace(cluster(), nccl=replace(H100, nics_per_node=1))
    slower = PHASES[TORUS_2D](few, communication_cost(few).all_reduce, None)
    assert slower[1].time_us(2**30) > 5.0 * phases[1].time_us(2**30)


def document(**machine: Any) -> dict[str, Any]:
    described = {"gpu": "h100", "nics_per_node": 8, "nic": "400gbit", **machine}
    return {"schema": "planner.cluster/1", "nodes": 2, "ranks_per_node": 8, "library": "nccl", "nccl": described}


def test_a_description_in_a_few_words() -> None:
    parsed = parse_cluster(document())
    assert parsed.nccl == H100
    assert communication_cost(parsed, 1024).cluster.nodes == 128
    assert math.isclose(communication_cost(parsed).interval or 0.0, nccl.UNMEASURED_INTERVAL)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": "h1000"}, "gpu"),
        ({"nic": "400gb"}, "nic: found '400gb', expected a rate"),
        ({"nic": None}, "nic: missing with 2 nodes"),
        ({"nvlink": "1800gbyte"}, "nvlink: found 1800gbyte, expected at most 900gbyte, which h100 has"),
        ({"gpu": "l40s", "nvlink": "900gbyte"}, "nvlink: found 900gbyte, but l40s has none"),
        ({"pcie": "24gbyte"}, "pcie: found beside NVLink"),
        ({"gpu": "a100", "nvls": True}, "nvls: found true, but switches of a100 do not add up"),
        ({"network": "tcp", "sharp": True}, "sharp: found true on tcp"),
        ({"tuner": "aws-ofi-p5"}, "tuner: found aws-ofi-p5, which is for h100 and h200 on efa"),
        ({"net_latency": "fast"}, "net_latency: found 'fast', expected a time"),
        ({"speed": 1}, "speed"),
    ],
)
def test_descriptions_that_contradict_themselves(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_cluster({key: value for key, value in document(**change).items() if value is not None}, "c.json")
    assert said in str(raised.value)
    assert "nccl" in str(raised.value)


def test_a_library_needs_machines_and_machines_a_library() -> None:
    for missing in ("nccl", "library"):
        broken = {key: value for key, value in document().items() if key != missing}
        with pytest.raises(InputError, match=rf"\$\.{missing}: missing"):
            parse_cluster(broken)
    with pytest.raises(InputError, match="found 16 ranks a node, expected at most 8"):
        parse_cluster(document() | {"ranks_per_node": 16})
    with pytest.raises(InputError, match="nics_per_node: found 4, and 8 in nccl"):
        parse_cluster(document() | {"nics_per_node": 4})
    with pytest.raises(InputError, match="12 ranks do not fill nodes of 8"):
        communication_cost(parse_cluster(document()), 12)


def test_every_accelerator_can_be_described() -> None:
    for name in GPUS:
        machine = Nccl(gpu=name, nic="100gbit")
        assert np.isfinite(nccl.times_us("all_reduce", Shape(machine, 2, 4), SIZES)).all()
