"""A cluster from a description of its machines: nodes, accelerators, links by their line rates. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from planner.documents.nccl import GPUS, Nccl, Network, find_gpu, is_on_pcie
from planner.documents.profile import Cluster, Link
from planner.documents.text import parse_bandwidth, parse_latency_us, us_per_byte
from runtime.errors import InputError
from runtime.plan.strict_json import MAX_RANKS

_CARDS = re.compile(r"(?:(\d{1,4})x)?(.+)", re.DOTALL)

INTRA_LATENCY = "2.5us"
NIC_LATENCY: Mapping[str, str] = {"infiniband": "5us", "roce": "5us", "efa": "7.5us", "tcp": "18us"}
"""Start-up time of a message between nodes, by network. RDMA: 16 H100 on two nodes took 123 µs for the smallest
all-reduce, 30 hops (GCP A3 Mega); EFA: of `h100-8x8-efa3200`; TCP: of `hkbu-8x4-100gbe`."""
ALSO_CALLED: Mapping[str, Network] = {"ethernet": "tcp"}
ASSUMED_NETWORK: Mapping[Network, str] = {
    "infiniband": "network: not stated, so taken as infiniband; on Ethernet name it, for start-up times are others: "
    "--network roce (with RDMA) or tcp (without), or efa on AWS",
    "tcp": "network: not stated, so taken as tcp (cards in gbe are Ethernet's); with RDMA start-up times are shorter: "
    "--network roce",
}
"""Note for the user, by the network that is assumed."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """A description of machines, in the words of the options of `planner cluster new`."""

    nodes: int
    """Number of machines."""
    gpus: int
    """Accelerators, and so ranks, of each."""
    nic: str | None = None
    """Network cards of one node, `8x400gbit` or `25gbit`. All of them together are the link `inter`."""
    nvlink: str | None = None
    """Rate of one accelerator's NVLink as vendors state it, both directions added; half of it counts."""
    intra: str | None = None
    """Rate of any other link inside a node (PCIe, say), in one direction."""
    nic_latency: str | None = None
    """Start-up time of a message between nodes; default: the network's."""
    intra_latency: str | None = None
    """Start-up time of a message inside a node; default: `INTRA_LATENCY`. 8 A100 took 35 µs, 14 hops."""
    gpu: str | None = None
    """Accelerator, for costs by NCCL's own model in place of line rates and latencies."""
    network: str | None = None
    """Network between nodes: infiniband, roce, efa or tcp, which is also called ethernet; default: see
    `assumed_network`."""
    name: str | None = None
    """Name of the cluster."""


def describe_machines(machines: Machines) -> Cluster:
    """Return the cluster of machines: by NCCL's cost model of them if the accelerator is named, else by line rates.

    Raises InputError: a number, word, rate or time is wrong; a link that the machines need is missing, or named twice.
    """
    for option, count in (("--nodes", machines.nodes), ("--gpus", machines.gpus)):
        if count < 1:
            raise InputError(f"{option}: found {count}, expected at least 1; correct it")
    if (ranks := machines.nodes * machines.gpus) > MAX_RANKS:
        raise InputError(f"--nodes, --gpus: found {ranks} ranks, expected at most {MAX_RANKS}; correct them")
    if machines.nvlink is not None and machines.intra is not None:
        raise InputError("--nvlink, --intra: found both, expected one of them: both are the link inside a node")
    network = parse_network(machines.network or assumed_network(machines.nic))
    cluster = _by_rates(machines, network) if machines.gpu is None else _by_nccl(machines, machines.gpu, network)
    return replace(
        cluster, name=machines.name, nodes=machines.nodes, ranks_per_node=machines.gpus,
        source="described by `planner cluster new`, not measured",
    )  # fmt: skip


def _by_rates(machines: Machines, network: Network) -> Cluster:
    nvlink, intra, nic, nic_latency = machines.nvlink, machines.intra, machines.nic, machines.nic_latency
    if machines.gpus > 1 and nvlink is None and intra is None:
        raise InputError("--nvlink: found none, expected the link inside a node: --nvlink 900gbyte, or --intra 32gbyte")
    if machines.nodes > 1 and nic is None:
        raise InputError("--nic: found none, expected the cards of a node: --nic 8x400gbit")
    within = between = None
    notes = []
    intra_latency = machines.intra_latency or INTRA_LATENCY
    intra_us = parse_latency_us(intra_latency, "--intra-latency")
    if nvlink is not None:
        one_way = parse_bandwidth(nvlink, "--nvlink") / 2
        within = Link(alpha_us=intra_us, beta_us_per_byte=us_per_byte(one_way))
        notes.append(f"intra: NVLink {nvlink}, half of it in each direction; {intra_latency} per message")
    elif intra is not None:
        within = Link(alpha_us=intra_us, beta_us_per_byte=us_per_byte(parse_bandwidth(intra, "--intra")))
        notes.append(f"intra: {intra} in each direction; {intra_latency} per message")
    if nic_latency is not None and machines.network is not None:
        raise InputError(
            f"--nic-latency, --network: found {nic_latency} and {machines.network}, expected one of them: both are the "
            f"start-up time of a message between nodes"
        )
    if nic is not None:
        latency = nic_latency or NIC_LATENCY[network]
        nic_us = parse_latency_us(latency, "--nic-latency")
        cards, rate = parse_cards(nic)
        between = Link(alpha_us=nic_us, beta_us_per_byte=us_per_byte(cards * parse_bandwidth(rate, "--nic")))
        notes.append(f"inter: {nic}, all cards of a node as one; {latency} per message")
        if machines.network is None and nic_latency is None and machines.nodes > 1:
            notes.append(ASSUMED_NETWORK[network])
    notes.append("line rates, which are an upper bound, and assumed start-up times: measure with `planner profile`")
    return Cluster(nodes=1, intra=within, inter=between, notes=tuple(notes))


def _by_nccl(machines: Machines, named: str, network: Network) -> Cluster:
    for option, value in (("--nic-latency", machines.nic_latency), ("--intra-latency", machines.intra_latency)):
        if value is not None:
            raise InputError(
                f"{option}: found {value} beside --gpu, whose cost model has latencies of its own; take one out"
            )
    gpu, nvlink, pcie = find_gpu(named), machines.nvlink, machines.intra
    if is_on_pcie(named) and nvlink is None and pcie is None:
        raise InputError(
            f"--gpu: found {named!r} without a link inside nodes, expected --intra with the rate of its PCIe, such as "
            f"24gbyte, or --nvlink with that of its bridges; add one"
        )
    cards, rate = (1, None) if machines.nic is None else parse_cards(machines.nic)
    if nvlink is None and pcie is not None and GPUS[gpu].nvlink_bytes_per_s:
        nvlink = "none"
    machine = Nccl(gpu=gpu, nvlink=nvlink, pcie=pcie, nics_per_node=cards, nic=rate, network=network)
    machine.check(machines.nodes, machines.gpus, "--")
    where = "it" if machines.nodes == 1 else "two of them"
    notes = [f"costs by NCCL's own model of these machines: run nccl-tests on {where} and `planner cluster fit`"]
    if machines.network is None and machines.nodes > 1:
        notes.append(ASSUMED_NETWORK[network])
    return Cluster(nodes=1, library="nccl", nccl=machine, notes=tuple(notes))


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
