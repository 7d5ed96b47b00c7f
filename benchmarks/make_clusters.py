"""The clusters of the catalogue: measured curves, fitted lines and link constants, each with how it was obtained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks import sources
from benchmarks.published import collectives, ddl2020, tpds
from benchmarks.published.omgs import sparsify_line
from planner.cost.nccl_fit import Measured, fit
from planner.documents.nccl import Nccl
from planner.documents.profile import Cluster, Link, Sample

GBIT = 8e-3
"""µs per byte at 1 Gbit/s."""

NVLINK_V100 = Link(alpha_us=2.5, beta_us_per_byte=2e-5)
NVLINK_NOTE = (
    "intra: β is the constant for NVLink in Espresso's simulator (0.02 µs per KB; github.com/zhuangwang93/Espresso, "
    "commit a0294e3); α is borrowed from 8 A100: floor of the all-reduce (35 µs) over its 14 hops"
)
H100_INTRA = Link(alpha_us=0.93625, beta_us_per_byte=2.5e-6)
H100_INTRA_NOTE = f"intra: 400 GB/s and 936.25 ns; {sources.ASTRA}"
H100_ALPHA_US = 4.1
ALPHA_NOTE = (
    "inter: β is the line rate of the node's cards, all as one, so an upper bound on what they do; α is borrowed from "
    "2 × 8 H100 on GCP A3 Mega: floor of the all-reduce (123 µs) over its 30 hops"
)


def clusters() -> Iterator[Cluster]:
    """Every cluster."""
    yield from _k80()
    yield from _testbed()
    yield from _hkbu()
    yield _p102()
    yield _commlib()
    yield from _a100()
    yield from _h100()
    yield from _described()


def _k80() -> Iterator[Cluster]:
    simulator = sources.BCAFFE.format(what="scripts/gmwfbp.py, constants of the all-reduce model of the simulations")
    yield Cluster(
        name="k80-10gbe",
        nodes=8,
        accelerator="k80",
        inter=Link(alpha_us=45.25, beta_us_per_byte=0.0009934107462565104, gamma_us_per_byte=0.0025),
        source=simulator,
        notes=(
            "any number of nodes; the paper's text gives α = 45.26 µs",
            "against the OSU benchmark of the same machines this is 13 % off on 8 nodes, and 27 % and 56 % too slow "
            "on 4 and 2: k80-8x1-10gbe-osu has the measurements themselves",
        ),
    )
    yield Cluster(
        name="k80-8x1-10gbe-osu",
        nodes=8,
        accelerator="k80",
        samples={"all_reduce": _rounded(collectives.osu_knots(8))},
        source=sources.BCAFFE.format(what="logdata, OSU MPI_Allreduce v5.4.0"),
        notes=(
            "20 of 266 measured sizes, chosen so that the lines between them are nearest to all",
            "the log ends at 1 MiB; larger messages follow the line over its last octave",
        ),
    )


def _testbed() -> Iterator[Cluster]:
    models = tuple(tpds.MODELS)
    for network, rate in (("10GbE", "10 Gbit/s Ethernet"), ("56GbIB", "56 Gbit/s InfiniBand")):
        yield replace(
            tpds.fitted_cluster(network, models),
            accelerator="v100",
            source=f"{sources.TPDS} on {rate}",
            notes=(
                "α: the authors' line for 16 workers (distributed_optimizer.py)",
                "β: least squares of the relative error of the steps with one message (SyncEASGD) of ResNet-152, "
                "DenseNet-161 and Inception-v4; the authors' own β is lower than the link allows",
                "contention: one factor for both networks, least mean log error of the rows of WFBP and MG-WFBP of "
                "these models",
                "checked in `planner docs results/validation`: there constants of each model are fitted on the others",
            ),
        )


def _hkbu() -> Iterator[Cluster]:
    models = tuple(ddl2020.MODELS)
    rates = {"10gbe": "10 Gbit/s Ethernet", "100gbe": "100 Gbit/s Ethernet", "100gbib": "100 Gbit/s InfiniBand"}
    for network, rate in rates.items():
        yield replace(
            ddl2020.fitted_cluster(network, models),
            source=f"{sources.DDL2020}; {rate}",
            notes=(
                "α and β of a flat ring: least mean log error of the throughput of BSP-A2A and WFBP-A2A with "
                "ResNet-50, BERT-Base and BERT-Large on 8 to 32 GPUs; MG-WFBP's rows were not fitted to",
                "checked in `planner docs results/validation`: there constants of each model are fitted on the others",
                "overlap is taken as free: see `planner docs results/validation`",
            ),
        )


def _p102() -> Cluster:
    return Cluster(
        name="p102-1gbe",
        nodes=16,
        accelerator="p102-100",
        inter=Link(alpha_us=436.0, beta_us_per_byte=9e-3),
        sparsify=sparsify_line(("Inception-v4", "LSTM-PTB")),
        source=f"{sources.GTOPK}: point-to-point α and β; sparsification: {sources.OMGS}",
        notes=(
            "sparsify: mean time per byte of the top-k of Inception-v4 and LSTM-PTB; checked on ResNet-50",
            "the measured collectives of this testbed were up to ten times slower than these links allow: rankings "
            "only",
        ),
    )


def _commlib() -> Cluster:
    return Cluster(
        name="v100-16x8-25gbe",
        nodes=16,
        ranks_per_node=8,
        accelerator="v100",
        intra=NVLINK_V100,
        inter=ddl2020.fitted_cluster("100gbe", tuple(ddl2020.MODELS)).inter,
        source=(
            f"{sources.COMMLIB}, NVLink inside a node and one 25 Gbit/s card for each; between nodes: {sources.DDL2020}"
        ),
        notes=(
            "the paper gives no link constants; no number was fitted to its tables, but this rate between nodes was "
            "chosen over the line rate with its Table 3 in view: `planner docs results/validation` shows both",
            "inter: the link of hkbu-8x4-100gbe, which is what TCP between nodes did on a card of 100 Gbit/s: "
            "18.5 Gbit/s, less than this card's line rate of 25; assumed: TCP here does as well, and no better",
            NVLINK_NOTE,
        ),
    )


def _a100() -> Iterator[Cluster]:
    names = {"all_reduce": "allreduce", "reduce_scatter": "reducescatter", "all_gather": "allgather"}
    curves = {key: _rounded(collectives.a100_collective(name)) for key, name in names.items()}
    yield Cluster(
        name="a100-1x8",
        nodes=1,
        ranks_per_node=8,
        accelerator="a100-40gb",
        intra=collectives.ring_link("reduce_scatter", 8, collectives.a100_collective("reducescatter")),
        samples=dict(curves),
        source=sources.SUPERBENCH,
        notes=("intra: least squared relative error of reduce-scatter, 4 B to 8 GiB, as a ring",),
    )
    intra = collectives.ring_link("reduce_scatter", 8, collectives.a100_collective("reducescatter"))
    inside = {f"intra/{key}": curve for key, curve in curves.items()}
    for gbit in (25, 100, 400):
        yield Cluster(
            name=f"a100-8x8-{gbit}gb",
            nodes=8,
            ranks_per_node=8,
            accelerator="a100-40gb",
            intra=intra,
            inter=Link(alpha_us=H100_ALPHA_US, beta_us_per_byte=GBIT / gbit),
            samples=dict(inside),
            source=f"inside a node: {sources.SUPERBENCH}; between nodes: {gbit} Gbit/s a node, and {sources.GCP}",
            notes=("intra: least squared relative error of reduce-scatter, 4 B to 8 GiB, as a ring", ALPHA_NOTE),
        )


def _h100() -> Iterator[Cluster]:
    for gbit in (25, 100, 400):
        yield Cluster(
            name=f"h100-8x8-{gbit}gb",
            nodes=8,
            ranks_per_node=8,
            accelerator="h100",
            intra=H100_INTRA,
            inter=Link(alpha_us=H100_ALPHA_US, beta_us_per_byte=GBIT / gbit),
            source=f"inside a node: {sources.ASTRA}; between nodes: {gbit} Gbit/s a node, and {sources.GCP}",
            notes=(H100_INTRA_NOTE, ALPHA_NOTE),
        )
    yield Cluster(
        name="h100-2x8-a3mega",
        nodes=2,
        ranks_per_node=8,
        accelerator="h100",
        intra=H100_INTRA,
        inter=Link(alpha_us=H100_ALPHA_US, beta_us_per_byte=GBIT / 1600),
        samples={"all_reduce": _rounded(collectives.h100_gcp_all_reduce())},
        source=f"{sources.GCP}; inside a node: {sources.ASTRA}",
        notes=(
            "samples: measured on 16 GPUs; between 16 and 32 MiB NCCL changes its protocol",
            H100_INTRA_NOTE,
            "inter: for other numbers of nodes; α from the floor of the all-reduce (123 µs) over its 30 hops, β the "
            "line rate of a node's 8 cards, all as one",
        ),
    )
    yield Cluster(
        name="h100-8x8-efa3200",
        nodes=8,
        ranks_per_node=8,
        accelerator="h100",
        intra=H100_INTRA,
        inter=collectives.fit_ring((2, 4, 8)),
        samples={"all_reduce": _rounded(collectives.h100_efa_all_reduce(8))},
        source=f"{sources.AWS}; inside a node: {sources.ASTRA}",
        notes=(
            "samples: measured on 64 GPUs, 32 MiB to 8 GiB (size / bandwidth; sizes taken as MiB); smaller messages "
            "follow the first segment",
            "inter: for other numbers of nodes; a flat ring, all cards of a node as one, least mean log error of the "
            "all-reduces on 2, 4 and 8 nodes; leaving one of these out: see `planner docs results/validation`",
            H100_INTRA_NOTE,
        ),
    )


DESCRIBED: tuple[tuple[str, int, int, Nccl, str], ...] = (
    ("dgx-a100", 8, 8, Nccl(gpu="a100", nics_per_node=8, nic="200gbit", cpu="amd"),
     "NVIDIA DGX A100 data sheet: 8 A100 80 GB, NVLink 600 GB/s, 8 × 200 Gbit/s InfiniBand"),
    ("dgx-h100", 8, 8, Nccl(gpu="h100", nics_per_node=8, nic="400gbit"),
     "NVIDIA DGX H100 data sheet: 8 H100, NVLink 900 GB/s, 8 × 400 Gbit/s InfiniBand"),
    ("dgx-h200", 8, 8, Nccl(gpu="h200", nics_per_node=8, nic="400gbit"),
     "NVIDIA DGX H200 data sheet: 8 H200, NVLink 900 GB/s, 8 × 400 Gbit/s InfiniBand"),
    ("dgx-b200", 8, 8, Nccl(gpu="b200", nics_per_node=8, nic="400gbit"),
     "NVIDIA DGX B200 data sheet: 8 B200, NVLink 1800 GB/s, 8 × 400 Gbit/s InfiniBand"),
    ("gb200-nvl72", 8, 72, Nccl(gpu="gb200", nics_per_node=72, nic="400gbit"),
     "NVIDIA GB200 NVL72: 72 B200 in one NVLink domain, which counts as a node; one ConnectX-7 of 400 Gbit/s for each"),
    ("aws-p4d", 8, 8, Nccl(gpu="a100", nics_per_node=4, nic="100gbit", network="efa"),
     "AWS EC2 p4d.24xlarge: 8 A100 40 GB, NVSwitch, 400 Gbit/s EFA"),
    ("aws-p5", 8, 8, Nccl(gpu="h100", nics_per_node=8, nic="400gbit", network="efa", cpu="amd", tuner="aws-ofi-p5"),
     "AWS EC2 p5.48xlarge: 8 H100, NVSwitch, 3200 Gbit/s EFA"),
    ("aws-p5en", 8, 8,
     Nccl(gpu="h200", nics_per_node=8, nic="400gbit", network="efa", net_latency="35us", tuner="aws-ofi-p5"),
     "AWS EC2 p5en.48xlarge: 8 H200, NVSwitch, 3200 Gbit/s EFA"),
    ("aws-g5-48xlarge", 8, 8, Nccl(gpu="a10g", pcie="24gbyte", nic="100gbit", network="tcp", cpu="amd"),
     "AWS EC2 g5.48xlarge: 8 A10G on PCIe 4.0, 100 Gbit/s Ethernet"),
    ("gcp-a2-highgpu", 8, 8, Nccl(gpu="a100", nic="100gbit", network="tcp"),
     "Google Cloud a2-highgpu-8g: 8 A100 40 GB, NVSwitch, 100 Gbit/s Ethernet"),
    ("gcp-a3-high", 8, 8, Nccl(gpu="h100", nics_per_node=4, nic="200gbit", network="tcp", ll128=False),
     "Google Cloud a3-highgpu-8g: 8 H100, 800 Gbit/s for them (GPUDirect-TCPX)"),
    ("gcp-a3-mega", 8, 8, Nccl(gpu="h100", nics_per_node=8, nic="200gbit", network="tcp", ll128=False),
     "Google Cloud a3-megagpu-8g: 8 H100, 8 × 200 Gbit/s for them (GPUDirect-TCPXO)"),
    ("azure-nd-a100-v4", 8, 8, Nccl(gpu="a100", nics_per_node=8, nic="200gbit", cpu="amd"),
     "Azure ND A100 v4: 8 A100, NVLink 3.0, 8 × 200 Gbit/s InfiniBand"),
    ("azure-nd-h100-v5", 8, 8, Nccl(gpu="h100", nics_per_node=8, nic="400gbit"),
     "Azure ND H100 v5: 8 H100, NVLink 4.0, 8 × 400 Gbit/s InfiniBand"),
    ("a40-8-100gbe", 8, 8, Nccl(gpu="a40", pcie="24gbyte", nic="100gbit", network="roce"),
     "8 A40 on PCIe 4.0 (NVIDIA A40 data sheet), one card of 100 Gbit/s Ethernet with RDMA"),
    ("l40s-8-100gbe", 8, 8, Nccl(gpu="l40s", pcie="24gbyte", nic="100gbit", network="roce"),
     "8 L40S on PCIe 4.0 (NVIDIA L40S data sheet), one card of 100 Gbit/s Ethernet with RDMA"),
    ("rtx4090-8-25gbe", 4, 8, Nccl(gpu="rtx4090", pcie="16gbyte", nic="25gbit", network="tcp", cpu="amd"),
     "8 GeForce RTX 4090 on PCIe 4.0 without peer access, one card of 25 Gbit/s Ethernet"),
    ("rtx4090-8-10gbe", 4, 8, Nccl(gpu="rtx4090", pcie="16gbyte", nic="10gbit", network="tcp", cpu="amd"),
     "8 GeForce RTX 4090 on PCIe 4.0 without peer access, one card of 10 Gbit/s Ethernet"),
)  # fmt: skip
"""(name, nodes, ranks a node, machine, what its vendor says)."""
PCIE_NOTE = (
    "pcie: what NCCL counts (src/graph/topo.h, 2.30.7): 24 GB/s of PCIe 4.0 x16 between peers, 16 GB/s through the "
    "memory of an AMD host where there is no peer access"
)


def _described() -> Iterator[Cluster]:
    for name, nodes, per_node, machine, source in DESCRIBED:
        machine.check(nodes, per_node, name)
        if name == "aws-p5":
            yield _aws_p5(nodes, per_node, machine, source)
            continue
        yield Cluster(
            name=name,
            nodes=nodes,
            ranks_per_node=per_node,
            accelerator="a100-40gb" if "A100 40 GB" in source else None,
            library="nccl",
            nccl=machine,
            source=f"{source}; costs by NCCL's own model (github.com/NVIDIA/nccl, 2.30.7), nothing measured",
            notes=(
                "any number of nodes: `--ranks`; how far off such predictions are: `planner docs results/validation`",
                *((PCIE_NOTE,) if machine.pcie else ()),
            ),
        )


def _aws_p5(nodes: int, per_node: int, machine: Nccl, source: str) -> Cluster:
    logs = [
        Measured(collective, count, per_node, tuple(collectives.h100_efa(collective, count)))
        for collective, counts in (("all_reduce", (2, 4, 8)), ("all_gather", (2, 4, 8, 16, 32)))
        for count in counts
    ]
    return Cluster(
        name="aws-p5",
        nodes=nodes,
        ranks_per_node=per_node,
        library="nccl",
        nccl=fit(machine, logs),
        source=f"{source}; costs by NCCL's own model (github.com/NVIDIA/nccl, 2.30.7), fitted to {sources.AWS}",
        notes=(
            "fitted on all-reduces on 2, 4 and 8 nodes and all-gathers on 2 to 32, 32 MiB to 8 GiB; leaving 8 nodes "
            "out, and nothing measured: `planner docs results/validation`",
            "any number of nodes: `--ranks`",
        ),
    )


def _rounded(samples: collectives.Samples) -> tuple[Sample, ...]:
    return tuple((size_bytes, round(time_us, 2)) for size_bytes, time_us in samples)
