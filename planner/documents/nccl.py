"""The machines of a cluster as NCCL sees them, and what was fitted to measurements of them. Torch-free.

Rates of accelerators' links are in bytes per second in one direction, as NCCL counts them: links × rate of one
(src/graph/topo.h, NCCL 2.30.7), where one direction of an NVLink 3 or 4 is 20 to 20.6 GB/s of its nominal 25.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from planner.documents.accelerators import find_accelerator, kind_of
from planner.documents.text import parse_bandwidth, parse_latency_us
from runtime.errors import InputError
from runtime.plan.strict_json import Count, PositiveCount, Ranks, Record, TimeUs

Generation = Literal["volta", "ampere", "hopper", "blackwell"]


class Gpu(NamedTuple):
    """One kind of accelerator."""

    generation: Generation
    nvlink_bytes_per_s: float
    """All its links as NCCL counts them; 0 for none."""
    nominal_nvlink_bytes_per_s: float
    """Rate as vendors state it, both directions added."""
    in_switch: bool = False
    """Whether its switches can add up (NVLS)."""
    domain: int = 8
    """Largest number of them in one NVLink domain."""


_GB = 1e9
GPUS: Mapping[str, Gpu] = {
    "v100": Gpu("volta", 6 * 20 * _GB, 300 * _GB, False, 16),
    "a100": Gpu("ampere", 12 * 20 * _GB, 600 * _GB, False, 16),
    "h100": Gpu("hopper", 18 * 20.6 * _GB, 900 * _GB, True, 8),
    "h200": Gpu("hopper", 18 * 20.6 * _GB, 900 * _GB, True, 8),
    "b200": Gpu("blackwell", 18 * 40.1 * _GB, 1800 * _GB, True, 8),
    "gb200": Gpu("blackwell", 18 * 40.1 * _GB, 1800 * _GB, True, 72),
    "a10g": Gpu("ampere", 0.0, 0.0),
    "a40": Gpu("ampere", 0.0, 0.0),
    "l40s": Gpu("ampere", 0.0, 0.0),
    "rtx4090": Gpu("ampere", 0.0, 0.0),
    "mi300x": Gpu("hopper", 7 * 48 * _GB, 896 * _GB),
    "mi325x": Gpu("hopper", 7 * 48 * _GB, 896 * _GB),
}
"""Accelerators by name; `planner.documents.accelerators` has their peak rates and memory. Ada (L40S, 4090) has no
constants of its own in NCCL, which gives everything from 8.0 to 8.9 those of Ampere. MI300X and MI325X have 7 links of
64 GB/s in one direction to the 7 others of a node, which RCCL counts with 48 (GFX94X_XGMI_WIDTH, src/graph/topo.h,
github.com/ROCm/rccl, commit 0cbce2a); it is NCCL's model with constants of its own, in whose place those of Hopper
stand until a fit moves them."""


def gpu_named(text: str) -> str | None:
    """Return the accelerator of `GPUS` that a text names in any usual way: `A100-SXM4-80GB`, `RTX 4090`; else None."""
    found = find_accelerator(text)
    return None if found is None or kind_of(found) not in GPUS else kind_of(found)


def is_on_pcie(text: str) -> bool:
    """Return whether a text names the form of an accelerator that has PCIe in place of NVLink: `A100-PCIE-40GB`."""
    name = gpu_named(text)
    return name is not None and GPUS[name].nvlink_bytes_per_s > 0.0 and "pcie" in text.lower()


def find_gpu(text: str) -> str:
    """Return the same of `--gpu`, or raise InputError with all names."""
    found = gpu_named(text)
    if found is None:
        raise InputError(f"--gpu: found {text[:60]!r}, expected one of: {', '.join(GPUS)}")
    return found


MAX_PCIE_BYTES_PER_S = 128e9
"""16 lanes of PCIe 6.0."""
MAX_CARDS = 256
"""Most cards of one node; AWS p5 has 32."""

Rate = Annotated[str, Field(max_length=40)]
Multiplier = Annotated[float, Field(gt=0.0, le=1e4)]
Family = Literal[
    "ring/ll", "ring/ll128", "ring/simple", "tree/ll", "tree/ll128", "tree/simple",
    "nvls/simple", "nvls_tree/simple", "collnet_direct/simple", "collnet_chain/simple", "pat/simple",
]  # fmt: skip
"""Algorithm and protocol."""
Tuner = Literal["nccl", "aws-ofi-p5"]
Network = Literal["infiniband", "roce", "efa", "tcp"]
Segment = tuple[Annotated[float, Field(gt=0.0)], Family]
"""(up to so many bytes, what is used)."""


@dataclass(frozen=True, kw_only=True)
class Interval(Record):
    """Distance of measurements from predictions: 9 of 10 lie within × exp(± this)."""

    inside: Annotated[float, Field(ge=0.0, le=10.0)]
    """Logarithm on numbers of nodes that were measured."""
    beyond: Annotated[float, Field(ge=0.0, le=10.0)]
    """Logarithm on others: as leaving one log out shows, and never less than `inside`."""


@dataclass(frozen=True, kw_only=True)
class NcclFit(Record):
    """Multipliers by which measurements change the model's times."""

    launch_us: TimeUs
    """Time of a call that the model lacks."""
    overlap: Annotated[float, Field(ge=1.0, le=10.0)]
    """Exponent of the norm that adds latency and transfer: 1 adds them up, more hides one behind the other."""
    overlap_inside: Annotated[float, Field(ge=1.0, le=10.0)]
    """The same on a single node."""
    latency: dict[Family, Multiplier]
    transfer: dict[Family, Multiplier]
    halves: dict[Family, Multiplier]
    """Further ones of the transfer of reduce-scatters and all-gathers."""
    other_latency: Multiplier
    """Multiplier of families that no measurement used."""
    other_transfer: Multiplier
    choice: dict[str, dict[str, Annotated[tuple[Segment, ...], Field(min_length=1, max_length=16)]]] | None = None
    """Choice by collective and number of ranks, if the measurements show another one than the tuner's."""
    interval: Interval
    measured_on: Annotated[tuple[Ranks, ...], Field(min_length=1)]
    """Numbers of ranks."""
    samples: Count
    mean_error: Annotated[float, Field(ge=0.0)]
    """Mean of |predicted − measured| / measured over these samples."""


@dataclass(frozen=True, kw_only=True)
class Nccl(Record):
    """Machines in a few words; what is left out is what its accelerator has."""

    gpu: Literal[tuple(GPUS)]  # type: ignore[valid-type]
    nvlink: Rate | None = None
    """Rate as vendors state it, both directions added: `900gbyte`; `none` for a machine without."""
    pcie: Rate | None = None
    """Rate of one accelerator over PCIe in one direction, if it has no NVLink: `24gbyte`."""
    nics_per_node: PositiveCount = 1
    nic: Rate | None = None
    """Line rate of one card: `400gbit`."""
    network: Network = "infiniband"
    net_latency: Rate | None = None
    """Latency of a message between nodes that NCCL's constants lack, as a plugin reports it to NCCL. By default 75us on
    EFA (aws-ofi-nccl, src/platform-aws.cpp); 35us over TCP, from steps of rings of 32 GPUs (ddl-benchmarks 2020: 18us
    if they were Simple's, 62us if LL's); else none."""
    cpu: Literal["amd", "intel"] = "intel"
    ll128: bool | None = None
    """Whether the protocol is enabled; by default where links inside are NVLink and the network is RDMA."""
    nvls: bool | None = None
    """Whether switches inside a node add up; by default where the accelerator's can, and more than 4 are in use."""
    sharp: bool = False
    """Whether switches between nodes add up (CollNet)."""
    tuner: Tuner = "nccl"
    """Tuner that chooses algorithm and protocol: NCCL's own model, or a plugin's table."""
    fit: NcclFit | None = None

    @property
    def kind(self) -> Gpu:
        """Return its accelerator."""
        return GPUS[self.gpu]

    @property
    def nvlink_bytes_per_s(self) -> float:
        """Return the rate as NCCL counts it; 0 without NVLink."""
        if self.nvlink is None:
            return self.kind.nvlink_bytes_per_s
        if self.nvlink == "none":
            return 0.0
        share = parse_bandwidth(self.nvlink, "nccl.nvlink") / self.kind.nominal_nvlink_bytes_per_s
        return share * self.kind.nvlink_bytes_per_s

    @property
    def pcie_bytes_per_s(self) -> float:
        """Return the rate of one accelerator in one direction; 12 GB/s by default, NCCL's count of PCIe 3.0 x16."""
        return 12e9 if self.pcie is None else parse_bandwidth(self.pcie, "nccl.pcie")

    @property
    def nic_bytes_per_s(self) -> float:
        """Return the rate of one card; 0 if none is described."""
        return 0.0 if self.nic is None else parse_bandwidth(self.nic, "nccl.nic")

    @property
    def net_latency_us(self) -> float:
        """Return the latency that the plugin reports."""
        if self.net_latency is not None:
            return parse_latency_us(self.net_latency, "nccl.net_latency")
        return {"efa": 75.0, "tcp": 35.0}.get(self.network, 0.0)

    @property
    def rdma(self) -> bool:
        return self.network != "tcp"

    def check(self, nodes: int, ranks_per_node: int, where: str) -> None:
        """Raise InputError where the description contradicts itself or the cluster that it is of.

        `where` is written before a field's name: `cluster.json: $.nccl.`, or `--` for options.
        """
        name, kind = self.gpu, self.kind
        if self.nvlink not in (None, "none"):
            if not kind.nvlink_bytes_per_s:
                raise InputError(f"{where}nvlink: found {self.nvlink}, but {name} has none; take it out")
            stated = parse_bandwidth(self.nvlink, f"{where}nvlink")
            if stated > 1.01 * kind.nominal_nvlink_bytes_per_s:
                raise InputError(
                    f"{where}nvlink: found {self.nvlink}, expected at most {kind.nominal_nvlink_bytes_per_s / 1e9:.0f}"
                    f"gbyte, which {name} has with both directions added; correct it, or the gpu"
                )
        for field, value in (("pcie", self.pcie), ("nic", self.nic)):
            if value is not None:
                parse_bandwidth(value, f"{where}{field}")
        if self.pcie_bytes_per_s > MAX_PCIE_BYTES_PER_S:
            raise InputError(
                f"{where}{'intra' if where == '--' else 'pcie'}: found {self.pcie}, expected at most "
                f"{MAX_PCIE_BYTES_PER_S / 1e9:.0f}gbyte, which 16 lanes of PCIe 6.0 have; correct it"
            )
        if self.nics_per_node > MAX_CARDS:
            raise InputError(
                f"{where}{'nic' if where == '--' else 'nics_per_node'}: found {self.nics_per_node} cards in a node, "
                f"expected at most {MAX_CARDS}; correct it"
            )
        if self.net_latency is not None:
            parse_latency_us(self.net_latency, f"{where}net_latency")
        if self.pcie is not None and self.nvlink_bytes_per_s:
            raise InputError(
                f'{where}pcie: found beside NVLink, expected one of them; take it out, or "nvlink": "none"'
            )
        if self.nvls and not (kind.in_switch and self.nvlink_bytes_per_s):
            raise InputError(f"{where}nvls: found true, but switches of {name} do not add up; take it out")
        if self.sharp and self.network not in ("infiniband",):
            raise InputError(f"{where}sharp: found true on {self.network}, expected infiniband; correct one of them")
        if self.tuner == "aws-ofi-p5" and (self.network != "efa" or self.gpu not in ("h100", "h200")):
            raise InputError(f"{where}tuner: found aws-ofi-p5, which is for h100 and h200 on efa; take it out")
        if self.nvlink_bytes_per_s and ranks_per_node > kind.domain:
            raise InputError(
                f"{where}gpu: found {ranks_per_node} ranks a node, expected at most {kind.domain}: {name} has no "
                f"larger NVLink domain; correct ranks_per_node, or the gpu"
            )
        if nodes > 1 and self.nic is None:
            raise InputError(f'{where}nic: missing with {nodes} nodes; add the rate of one card, such as "400gbit"')
