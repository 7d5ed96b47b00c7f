"""Every constant that was fitted: its value, on what it was fitted, and on what it was checked."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published import collectives, ddl2020, omgs, ssd, tpds
from benchmarks.published.report import table_line
from planner.documents.profile import Cluster


def fit_lines() -> Iterator[str]:
    """A table in Markdown."""
    yield table_line("constant", "value", "fitted on", "checked on")
    yield table_line("---", "---", "---", "---")
    yield from _tpds()
    yield from _ddl2020()
    yield from _others()


def _tpds() -> Iterator[str]:
    for name in tpds.MODELS:
        others = tpds.others(name)
        for network in tpds.NETWORKS:
            yield table_line(
                f"β of the all-reduce on 16 V100, {network}",
                f"{tpds.fit_beta(network, others):.4g} µs/byte",
                f"SyncEASGD's rows of {' and '.join(others)}",
                f"all rows of {name}",
            )
        yield table_line(
            "contention on 16 V100, both networks, compute and network alike",
            f"{tpds.fit_contention(others):.2f}",
            f"rows of WFBP and MG-WFBP of {' and '.join(others)}",
            f"all rows of {name}",
        )


def _ddl2020() -> Iterator[str]:
    for network, title in ddl2020.NETWORKS.items():
        for name in ddl2020.MODELS:
            others = ddl2020.others(name)
            yield table_line(
                f"α, β of a flat ring, 8 nodes of 4 GPUs, {title}",
                _link(ddl2020.fitted_cluster(network, others)),
                f"BSP-A2A and WFBP-A2A of {' and '.join(others)}",
                f"all rows of {name}",
            )
    yield table_line(
        "α, β between nodes of v100-16x8-25gbe",
        _link(ddl2020.fitted_cluster("100gbe", tuple(ddl2020.MODELS))),
        "BSP-A2A and WFBP-A2A of all three models, 100GbE with TCP/IP",
        "nothing: CommLib's tables are read with the line rate",
    )


def _link(cluster: Cluster) -> str:
    link = cluster.inter
    return "" if link is None else f"{link.alpha_us:.4g} µs, {link.beta_us_per_byte:.4g} µs/byte"


def _others() -> Iterator[str]:
    ring = collectives.fit_ring((2, 4))
    yield table_line(
        "α, β of a flat ring, nodes of 8 H100 (AWS p5)",
        f"{ring.alpha_us:.4g} µs, {ring.beta_us_per_byte:.4g} µs/byte",
        "all-reduces on 2 and 4 nodes",
        "all-reduces on 8 nodes",
    )
    yield table_line(
        "time of top-k on P102-100",
        f"{omgs.sparsify_line(('Inception-v4', 'LSTM-PTB')).beta_us_per_byte:.4g} µs/byte",
        "SLGS's rows of Inception-v4 and LSTM-PTB",
        f"SLGS's row of ResNet-50: {omgs.predicted_selection_s():.4g} s, measured "
        f"{omgs.measured('ResNet-50', 'SLGS').select_s:.4g} s",
    )
    yield table_line(
        "local update of SSD-SGD",
        f"{ssd.LOCAL_UPDATE_S:.3g} s",
        "ResNet-50, batch 32, k = 5",
        "ResNet-50, batch 64",
    )
