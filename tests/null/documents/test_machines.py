"""Clusters in people's words: rates and times in cluster.json, and `planner cluster new`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import run, run_json, usual_document, write

from planner.cost.model import communication_cost
from planner.documents.catalog import search
from planner.documents.machines import Machines, describe_machines
from planner.documents.profile import load_cluster, parse_cluster, parse_profile
from planner.documents.text import parse_bandwidth, parse_latency_us, spell_rate
from runtime.errors import InputError


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("400gbit", 50e9),
        ("400 Gbit/s", 50e9),
        ("900gbyte", 900e9),
        ("1tbit", 125e9),
        ("2.5mbyte", 2.5e6),
        ("8kbits", 1e3),
        ("100Gbps", 12.5e9),
        ("100gbps", 12.5e9),
        ("100 Gb/s", 12.5e9),
        ("10gbe", 1.25e9),
        ("10GbE", 1.25e9),
        ("400GB/s", 400e9),
        ("400GBps", 400e9),
        ("900GByte/s", 900e9),
    ],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text, "here") == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "400",
        "400gb",
        "400GB",
        "400gb/s",
        "400GBPS",
        "4gibit",
        "gbit",
        "-1gbit",
        "0gbit",
        "1e3gbit",
        "4gbit x",
        400,
        None,
        "9999tbyte",
    ],
)
def test_rates_that_are_none(text: object) -> None:
    with pytest.raises(InputError, match=r"^here: found .*, expected a rate per second .*\"400gbit\""):
        parse_bandwidth(text, "here")


@pytest.mark.parametrize(
    ("text", "spelled"),
    [("8x100gb", "8x100gbit"), ("100GB", "100gbyte"), ("5us,100gb/s", "5us,100gbit"), ("4x1@1Gb", "4x1@1gbit"),
     ("100Gbps", "100Gbps"), ("25gbit", "25gbit"), ("400GB/s", "400GB/s"), ("lots", "lots")],
)  # fmt: skip
def test_options_spell_out_what_is_read_in_two_ways(text: str, spelled: str) -> None:
    assert spell_rate(text) == spelled


def test_usual_spellings_of_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("cluster", "new", "--nodes", "2", "--gpus", "8", "--gpu", "A100-SXM4-80GB", "--nic", "8x100gb")
    assert "planner: --nic 8x100gb: read as 8x100gbit" in capsys.readouterr().err
    machine = load_cluster("cluster.json").nccl
    assert machine is not None
    assert (machine.gpu, machine.nic) == ("a100", "100gbit")
    for gpu, said in (
        ("a1000", "--gpu: found 'a1000', expected one of: v100, a100, "),
        ("A100-PCIE-40GB", "--gpu: found 'A100-PCIE-40GB' without a link inside nodes"),
    ):
        run("cluster", "new", "--nodes", "2", "--gpus", "8", "--gpu", gpu, "--nic", "8x100Gbps", code=2)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "time_us"), [("3us", 3.0), ("900ns", 0.9), ("0.5 ms", 500.0), ("3µs", 3.0), ("0us", 0.0)]
)
def test_times(text: str, time_us: float) -> None:
    assert parse_latency_us(text, "here") == pytest.approx(time_us)


@pytest.mark.parametrize("text", ["", "3", "us", "-3us", "1e3us", "3 weeks", 3, None, "999999999999s"])
def test_times_that_are_none(text: object) -> None:
    with pytest.raises(InputError, match=r"^here: found .*, expected a time .*\"3us\""):
        parse_latency_us(text, "here")


def linked(**inter: Any) -> dict[str, Any]:
    return {"schema": "planner.cluster/1", "nodes": 4, "inter": inter}


def test_links_in_words_are_links_in_constants() -> None:
    written = parse_cluster(linked(bandwidth="400gbit", latency="3us", gamma_us_per_byte=1e-6))
    assert written == parse_cluster(linked(beta_us_per_byte=2e-5, alpha_us=3.0, gamma_us_per_byte=1e-6))
    assert written == parse_cluster(linked(bandwidth="50gbyte", alpha_us=3.0, gamma_us_per_byte=1e-6))
    assert parse_cluster(written.to_document()) == written
    profile = parse_profile(usual_document() | {"cluster": linked(bandwidth="400gbit", latency="3us")})
    assert profile.cluster is not None
    assert profile.cluster.inter == parse_cluster(linked(bandwidth="400gbit", latency="3us")).inter


@pytest.mark.parametrize(
    ("inter", "message"),
    [
        ({"bandwidth": "400", "latency": "3us"}, r"\$\.inter\.bandwidth: found '400', expected a rate"),
        ({"bandwidth": "4gbit", "latency": 3}, r"\$\.inter\.latency: found 3, expected a time"),
        ({"bandwidth": "4gbit", "beta_us_per_byte": 1e-4, "alpha_us": 1}, "found bandwidth and beta_us_per_byte"),
        ({"latency": "3us"}, r"\$\.inter\.beta_us_per_byte: missing field; add it, or bandwidth"),
        ({"bandwidth": "4gbit"}, r"\$\.inter\.alpha_us: missing field; add it, or latency"),
        ({"bandwith": "4gbit", "latency": "3us"}, r"add it, or bandwidth"),
    ],
)
def test_links_that_are_wrong(inter: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^cluster: .*{message}"):
        parse_cluster(linked(**inter))
    with pytest.raises(InputError, match=r"profile: \$\.cluster\.inter"):
        parse_profile(usual_document() | {"cluster": linked(**inter)}, "profile")


def test_a_described_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The joint rate of a node's cards is what a flat ring gets; concurrent exchanges share it."""
    monkeypatch.chdir(tmp_path)
    said = run_json(
        capsys, "cluster", "new", "--nodes", "8", "--gpus", "8", "--nvlink", "900gbyte", "--nic", "8x400gbit"
    )
    cluster = load_cluster("cluster.json")
    assert said == json.loads(Path("cluster.json").read_text())
    assert (cluster.nodes, cluster.ranks_per_node, cluster.nics_per_node) == (8, 8, 1)
    assert cluster.intra is not None
    assert cluster.inter is not None
    assert cluster.intra.beta_us_per_byte == pytest.approx(1e6 / 450e9)
    assert cluster.inter.beta_us_per_byte == pytest.approx(1e6 / 400e9)
    assert (cluster.intra.alpha_us, cluster.inter.alpha_us) == (2.5, 5.0)
    bytes_sent = 2**30
    ring_us = 2 * 63 * 5.0 + 2 * 63 / 64 * bytes_sent * 1e6 / 400e9
    assert communication_cost(cluster).all_reduce.at(bytes_sent) == pytest.approx(ring_us)
    write(Path("p.json"), usual_document(ranks=64))
    run("--json", "simulate", "p.json", "--cluster", "cluster.json")
    assert "with link constants" in capsys.readouterr().out


def test_a_node_without_cards_and_cards_of_one_gpu_each() -> None:
    alone = describe_machines(Machines(nodes=1, gpus=4, intra="32gbyte", intra_latency="1us"))
    assert alone.inter is None
    assert alone.intra is not None
    assert (alone.intra.alpha_us, alone.intra.beta_us_per_byte) == (1.0, pytest.approx(1e6 / 32e9))
    ethernet = describe_machines(Machines(nodes=4, gpus=1, nic="25gbit", nic_latency="20us"))
    assert ethernet.intra is None
    assert ethernet.inter is not None
    assert ethernet.inter.beta_us_per_byte == pytest.approx(8e6 / 25e9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0, "gpus": 1}, "--nodes: found 0, expected at least 1"),
        ({"nodes": 2, "gpus": 1}, "--nic: found none"),
        ({"nodes": 1, "gpus": 8}, "--nvlink: found none"),
        ({"nodes": 1, "gpus": 8, "nvlink": "900gbyte", "intra": "1gbyte"}, "--nvlink, --intra: found both"),
        ({"nodes": 1, "gpus": 8, "nvlink": "900gb"}, "--nvlink: found '900gb'"),
        ({"nodes": 2, "gpus": 1, "nic": "0x4gbit"}, "--nic: found '0x4gbit'"),
        ({"nodes": 2, "gpus": 1, "nic": "8x"}, "--nic: found"),
        ({"nodes": 2, "gpus": 1, "nic": "4gbit", "nic_latency": "5"}, "--nic-latency: found '5'"),
        ({"nodes": 10**6, "gpus": 10**6, "nic": "4gbit", "intra": "1gbyte"}, "ranks, expected at most"),
    ],
)
def test_descriptions_that_are_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        describe_machines(Machines(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h100"], "planner: --nic: missing with 2 nodes"),
        (["--gpu", "a100", "--nic", "8x200gbit", "--nvlink", "900gbyte"], "--nvlink: found 900gbyte, expected at most"),
        (["--gpu", "l40s", "--nic", "100gbit", "--intra", "600gbyte"], "--intra: found 600gbyte, expected at most 128"),
        (["--gpu", "h100", "--nic", "300x400gbit"], "--nic: found 300 cards in a node"),
        (["--gpu", "h100", "--nic", "400gbit", "--nic-latency", "9us"], "--nic-latency: found 9us beside --gpu"),
        (
            ["--nvlink", "900gbyte", "--nic", "400gbit", "--network", "tcp", "--nic-latency", "9us"],
            "--nic-latency, --network: found 9us and tcp, expected one of them",
        ),
        (["--gpu", "h100", "--nic", "400gbit", "--network", "wifi"], "--network: found 'wifi', expected one of: infin"),
    ],
)
def test_options_that_contradict(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run("cluster", "new", "--nodes", "2", "--gpus", "8", *options, code=2)
    assert message in capsys.readouterr().err
    assert not Path("cluster.json").exists()


@pytest.mark.parametrize("gpu", [[], ["--gpu", "l40s"]])
def test_a_network_that_is_not_named_is_said_to_be_assumed(
    gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    described = ["cluster", "new", "--nodes", "2", "--gpus", "8", "--intra", "24gbyte", "--nic", "100gbit", *gpu]
    message_us = {}
    for network in (None, "infiniband", "roce", "efa", "tcp", "ethernet"):
        run(*described, *(() if network is None else ("--network", network)))
        said, cluster = capsys.readouterr().out, load_cluster("cluster.json")
        assert ("taken as infiniband" in said) == (network is None)
        assert ("taken as infiniband" in " ".join(cluster.notes or ())) == (network is None)
        message_us[network] = communication_cost(cluster).all_reduce.at(1024)
    assert message_us[None] == message_us["infiniband"] < message_us["tcp"] == message_us["ethernet"]
    run(*described, "--nic", "100gbe")
    assert "taken as tcp" in capsys.readouterr().out
    assert communication_cost(load_cluster("cluster.json")).all_reduce.at(1024) == message_us["tcp"]


def test_what_to_measure_fits_the_number_of_nodes() -> None:
    one, two = (describe_machines(Machines(nodes=nodes, gpus=8, gpu="h100", nic="400gbit")) for nodes in (1, 2))
    assert "run nccl-tests on it and" in " ".join(one.notes or ())
    assert "run nccl-tests on two of them" in " ".join(two.notes or ())


def test_the_catalog_filters_and_shows_one_whole(capsys: pytest.CaptureFixture[str]) -> None:
    run("catalog")
    every = capsys.readouterr().out.splitlines()
    run("catalog", "H100")
    some = capsys.readouterr().out.splitlines()
    assert 1 < len(some) < len(every)
    assert set(some) <= set(every)
    run("catalog", "resnet50")  # a name, and a part of others
    whole = capsys.readouterr().out
    assert whole.startswith("model resnet50: ")
    assert "\nsource: " in whole
    assert "\nnote: " in whole
    assert [entry["name"] for entry in run_json(capsys, "catalog", "h100-8x8-400gb")] == ["h100-8x8-400gb"]
    with pytest.raises(InputError, match=r"resnet-50: found no model or cluster .*did you mean .*resnet50"):
        search("resnet-50")
