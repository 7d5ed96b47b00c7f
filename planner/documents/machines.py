"""A cluster from a description of its machines: nodes, accelerators, links by their line rates. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from planner.documents.nccl import GPUS, Nccl, Network, find_gpu, is_on_pcie
from planner.documents.profile import Cluster, Link
from planner.documents.text import parse_bandwidth, parse_latency_us, us_per_byte
from runtime.errors import InputError
from runtime.plan.strict_json import MAX_RANKS

_CARDS = re.compile(r"(?:(\d{1,4})x)?(.+)", re.DOTALL)

INTRA_LATENCY = "2.5us"
NIC_LATENCY: Mapping[str, str] = {"infiniband": "5us", "roce": "5us", "efa": "7.5us", "tcp": "18us"}
"""By network, the start-up time of a message between nodes. RDMA: 16 H100 on two nodes took 123 µs for the smallest
all-reduce, 30 hops (GCP A3 Mega); EFA: of `h100-8x8-efa3200`; TCP: of `hkbu-8x4-100gbe`."""
ALSO_CALLED: Mapping[str, Network] = {"ethernet": "tcp"}
ASSUMED_NETWORK: Mapping[Network, str] = {
    "infiniband": "network: not stated, so taken as infiniband; on Ethernet name it, for start-up times are others: "
    "--network roce (with RDMA) or tcp (without), or efa on AWS",
    "tcp": "network: not stated, so taken as tcp (cards in gbe are Ethernet's); with RDMA start-up times are shorter: "
    "--network roce",
}
"""By what is assumed, what the user has to know of it."""


def describe_machines(
    *,
    nodes: int,
    gpus: int,
    nic: str | None = None,
    nvlink: str | None = None,
    intra: str | None = None,
    nic_latency: str | None = None,
    network: str | None = None,
    intra_latency: str = INTRA_LATENCY,
    name: str | None = None,
) -> Cluster:
    """Return a cluster whose links have the line rates of its machines.

    Args:
        nodes: how many machines.
        gpus: accelerators, and so ranks, of each.
        nic: network cards of one node, `8x400gbit` or `25gbit`. All of them together are the link `inter`.
        nvlink: rate of one accelerator's NVLink as vendors state it, both directions added; half of it counts.
        intra: rate of any other link inside a node (PCIe, say), in one direction.
        nic_latency: start-up time of a message between nodes; default: the network's.
        network: infiniband, roce, efa or tcp, which is also called ethernet; default: see `assumed_network`.
        intra_latency: the same inside a node; 8 A100 took 35 µs, 14 hops.

    Raises InputError: a number, rate or time is wrong; a link that the machines need is missing, or named twice.
    """
    _check_counts(nodes, gpus)
    if nvlink is not None and intra is not None:
        raise InputError("--nvlink, --intra: found both, expected one of them: both are the link inside a node")
    if gpus > 1 and nvlink is None and intra is None:
        raise InputError("--nvlink: found none, expected the link inside a node: --nvlink 900gbyte, or --intra 32gbyte")
    if nodes > 1 and nic is None:
        raise InputError("--nic: found none, expected the cards of a node: --nic 8x400gbit")
    within = between = None
    notes = []
    intra_us = parse_latency_us(intra_latency, "--intra-latency")
    if nvlink is not None:
        one_way = parse_bandwidth(nvlink, "--nvlink") / 2
        within = Link(alpha_us=intra_us, beta_us_per_byte=us_per_byte(one_way))
        notes.append(f"intra: NVLink {nvlink}, half of it in each direction; {intra_latency} per message")
    elif intra is not None:
        within = Link(alpha_us=intra_us, beta_us_per_byte=us_per_byte(parse_bandwidth(intra, "--intra")))
        notes.append(f"intra: {intra} in each direction; {intra_latency} per message")
    if nic_latency is not None and network is not None:
        raise InputError(
            f"--nic-latency, --network: found {nic_latency} and {network}, expected one of them: both are the start-up "
            f"time of a message between nodes"
        )
    known = parse_network(network or assumed_network(nic))
    if nic is not None:
        nic_latency, assumed = nic_latency or NIC_LATENCY[known], network is None and nic_latency is None
        nic_us = parse_latency_us(nic_latency, "--nic-latency")
        between = Link(alpha_us=nic_us, beta_us_per_byte=us_per_byte(_cards_rate(nic)))
        notes.append(f"inter: {nic}, all cards of a node as one; {nic_latency} per message")
        notes += [ASSUMED_NETWORK[known]] if assumed and nodes > 1 else []
    notes.append("line rates, which are an upper bound, and assumed start-up times: measure with `planner profile`")
    return Cluster(
        name=name, nodes=nodes, ranks_per_node=gpus, intra=within, inter=between,
        source="described by `planner cluster new`, not measured", notes=tuple(notes),
    )  # fmt: skip


def describe_nccl(
    *,
    nodes: int,
    gpus: int,
    gpu: str,
    nic: str | None = None,
    nvlink: str | None = None,
    intra: str | None = None,
    network: str | None = None,
    name: str | None = None,
) -> Cluster:
    """Return a cluster that NCCL's cost model describes; `intra` is PCIe's rate, of machines without NVLink.

    Raises InputError: a word or a rate is wrong, or they contradict one another.
    """
    _check_counts(nodes, gpus)
    named, gpu, known = gpu, find_gpu(gpu, "--gpu"), parse_network(network or assumed_network(nic))
    if is_on_pcie(named) and nvlink is None and intra is None:
        raise InputError(
            f"--gpu: found {named!r} without a link inside nodes, expected --intra with the rate of its PCIe, such as "
            f"24gbyte, or --nvlink with that of its bridges; add one"
        )
    if nvlink is not None and intra is not None:
        raise InputError("--nvlink, --intra: found both, expected one of them: both are the link inside a node")
    cards, rate = (1, None) if nic is None else parse_cards(nic)
    if nvlink is None and intra is not None and GPUS[gpu].nvlink_bytes_per_s:
        nvlink = "none"
    machine = Nccl(
        gpu=gpu, nvlink=nvlink, pcie=intra, nics_per_node=cards, nic=rate,
        network=known,
    )  # fmt: skip
    machine.check(nodes, gpus, "--")
    where = "it" if nodes == 1 else "two of them"
    model = f"costs by NCCL's own model of these machines: run nccl-tests on {where} and `planner cluster fit`"
    return Cluster(
        name=name, nodes=nodes, ranks_per_node=gpus, library="nccl", nccl=machine,
        source="described by `planner cluster new`, not measured",
        notes=(model, *((ASSUMED_NETWORK[known],) if network is None and nodes > 1 else ())),
    )  # fmt: skip


def assumed_network(nic: str | None) -> Network:
    """Return the network where none is stated: tcp for cards in gbe (Gigabit Ethernet), else infiniband."""
    return "tcp" if nic is not None and nic.strip().lower().endswith("gbe") else "infiniband"


def parse_network(name: str) -> Network:
    """Return the network of that name. Raises InputError: it is not known."""
    known = get_args(Network)
    found = ALSO_CALLED.get(name, name)
    if found not in known:
        raise InputError(f"--network: found {name!r}, expected one of: {', '.join((*known, *ALSO_CALLED))}")
    return found  # type: ignore[return-value]


def parse_cards(nic: str) -> tuple[int, str]:
    """Return how many cards `8x400gbit` or `25gbit` stands for, and the rate of one.

    Raises InputError: anything else.
    """
    match = _CARDS.fullmatch(nic.strip())
    cards = int(match[1] or 1) if match else 0
    if match is None or cards < 1:
        raise InputError(f"--nic: found {nic!r}, expected the cards of a node, such as 8x400gbit or 25gbit; correct it")
    parse_bandwidth(match[2], "--nic")
    return cards, match[2]


def _cards_rate(nic: str) -> float:
    """Return the bytes per second of all cards."""
    cards, rate = parse_cards(nic)
    return cards * parse_bandwidth(rate, "--nic")


def _check_counts(nodes: int, gpus: int) -> None:
    """Raises InputError where they are no numbers of machines and accelerators, or more than any cluster has."""
    for option, count in (("--nodes", nodes), ("--gpus", gpus)):
        if count < 1:
            raise InputError(f"{option}: found {count}, expected at least 1; correct it")
    if nodes * gpus > MAX_RANKS:
        raise InputError(f"--nodes, --gpus: found {nodes * gpus} ranks, expected at most {MAX_RANKS}; correct them")
