"""Acts out what the papers measured, with their own layer times and links, and writes docs/results/headlines.md.

    python -m benchmarks.headlines                  # what benchmarks/results/headlines.jsonl lacks
    python -m benchmarks.headlines --only K80

Needs root, and a machine that does nothing else. Where a paper had more nodes than fit here, fewer are acted out, and
its figure stands beside them for the order only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.marked import parser_of, tabulate
from benchmarks.published import commlib, infocom19, omgs, ssd
from benchmarks.published.common import model, table
from benchmarks.rehearsal import target_on
from benchmarks.traces import with_step
from planner.comparison.variants import DDP
from planner.documents.catalog import find_cluster
from planner.documents.profile import Link, Profile
from planner.rehearse.asked import ask_plan
from planner.rehearse.rehearsal import rehearse

DOCUMENT, RESULTS = Path("docs/results/headlines.md"), Path("benchmarks/results/headlines.jsonl")
MINUTES = 3.0


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One experiment of a paper."""

    name: str
    catalog: str
    """The model, as the catalogue calls it."""
    profile: Callable[[], Profile]
    """The same with the paper's times."""
    hosts: str
    inter: Mapping[str, Any]
    intra: Mapping[str, Any] | None = None
    reference: str
    """What others are compared with: step of this way / step of the other."""
    ratios: Mapping[str, float | None]
    """By way, what the paper has; None where it has no such row."""
    accuracy: str = "exact"
    remark: str


def _link(link: Link) -> dict[str, float]:
    """Return a ring's link that takes as long with summing as this one: its slope in bytes holds half of it."""
    slope = link.beta_us_per_byte + link.gamma_us_per_byte / 2.0
    return {"alpha_us": link.alpha_us, "beta_us_per_byte": slope}


def _k80(name: str) -> Headline:
    times_s = {
        line["method"]: float(line["iteration_s_derived"])
        for line in table("bcaffe_infocom19/measured_throughput.csv")
        if line["model"] == name and line["nodes"] == "8"
    }
    words = infocom19.PUBLISHED_MEASURED_SPEED_UPS
    published = {ours: times_s[theirs] / times_s["MG-WFBP"] if times_s else words[theirs]
                 for ours, theirs in (("wfbp", "WFBP"), ("single", "SyncEASGD"))}  # fmt: skip
    link = infocom19.simulated_cluster(8).inter
    assert link is not None
    return Headline(
        name=f"MG-WFBP: {name} on 8 K80, 10 Gbit/s", catalog=infocom19.MODELS[name],
        profile=lambda: infocom19.measured_profile(name), hosts="8x1", inter=_link(link), reference="mg_wfbp",
        ratios=published,
        remark="the paper's table" if times_s else 'the text of the paper says "about", for both models',
    )  # fmt: skip


def _lags(what: str, reference: str, remark: str) -> Headline:
    row = omgs.measured("ResNet-50", "SLGS")
    gain = row.step_s / omgs.measured("ResNet-50", "OMGS").step_s
    link = find_cluster("p102-1gbe").inter
    assert link is not None
    return Headline(
        name=f"{what}: ResNet-50 on 8 P102 (theirs 16), 1 Gbit/s", catalog="resnet50",
        profile=lambda: with_step(model("resnet50"), (row.forward_s + row.backward_s) * 1e6), hosts="8x1",
        inter=_link(link), reference=reference, ratios={"slgs:0.001": gain, "ddp": None}, accuracy="bounded",
        remark=f"rehearsed with {remark}; the paper measured OMGS-SGD, merged, with collectives up to ten times slower "
        "than its links",
    )  # fmt: skip


def _ssd() -> Headline:
    terms = ssd.batch_32()
    profile = model("resnet50")
    size_bytes = sum(gradient.size_bytes for gradient in profile.compute.gradients)
    nodes = ssd.MACHINES
    slope = terms.exchange_s * 1e6 / (2 * (nodes - 1) / nodes * size_bytes)
    return Headline(
        name="SSD-SGD: ResNet-50 on 4 machines", catalog="resnet50",
        profile=lambda: with_step(profile, terms.compute_s * 1e6), hosts=f"{nodes}x1",
        inter={"alpha_us": 30.0, "beta_us_per_byte": slope}, reference="ssd:5",
        ratios={"ddp": 1.0 + ssd.record("ssd-033") / 100.0}, accuracy="relaxed",
        remark="a machine of 4 V100 is one rank; the link's rate is inferred from the paper's exchange times",
    )  # fmt: skip


def _commlib() -> Headline:
    name = "ResNet-50 (96x96)"
    catalog, batch, rate = commlib.CELLS[name]
    throughput = {str(row["method"]): float(str(row["value"])) for row in commlib.records()
                  if row["table_or_figure"] == "Table 3" and row["model"] == name
                  and row["metric"] == "throughput, 128 GPUs"}  # fmt: skip
    best = throughput["MSTopK-SGD"]
    machines = find_cluster("v100-16x8-25gbe")
    assert machines.inter is not None
    assert machines.intra is not None
    return Headline(
        name="HiTopKComm: ResNet-50 (96x96) on 4x2 V100 (theirs 16x8), 25 Gbit/s", catalog=catalog,
        profile=lambda: with_step(model(catalog), batch / rate * 1e6), hosts="4x2", inter=_link(machines.inter),
        intra=_link(machines.intra), reference="hitopk:0.01",
        ratios={"torus_2d": best / throughput["2DTAR-SGD"], "single": best / throughput["Dense-SGD (TreeAR)"]},
        accuracy="bounded",
        remark="the paper's time excludes selection; there 128 ranks share 16 cards, here 8 share 4",
    )  # fmt: skip


HEADLINES = (
    *map(_k80, infocom19.MODELS),
    _lags("LAGS", "lags:1000:0", "one message a layer"),
    _lags("LAGS with its buffer", "lags:1000", "messages merged by the paper's buffer"),
    _ssd(),
    _commlib(),
)


def main() -> int:
    """Rehearses what is missing and writes the document."""
    options = parser_of(__doc__, DOCUMENT, RESULTS).parse_args()
    wanted = {headline.name: partial(measure, headline) for headline in HEADLINES}
    return tabulate(DOCUMENT, {"headlines": (wanted, lines)}, options)


def measure(headline: Headline) -> dict[str, Any]:
    """Rehearse it; return what `planner rehearse --json` prints."""
    nodes, each = map(int, headline.hosts.split("x"))
    cluster = {"nodes": nodes, "ranks_per_node": each, "inter": dict(headline.inter)}
    if headline.intra is not None:
        cluster["intra"] = dict(headline.intra)
    ways = [way for way in (headline.reference, *headline.ratios) if way != DDP]
    target = target_on(cluster, headline.catalog, minutes=MINUTES)
    compress = None if headline.accuracy == "exact" else "all"
    asked = ask_plan(target, strategies=ways, accuracy=headline.accuracy, compress=compress)
    return rehearse(replace(asked, profile=headline.profile()), show_progress=True).to_document()


def lines(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table: each way's step over that of the paper's own, published, rehearsed and predicted."""
    found = ["| headline | D, S | step of … over … | published | rehearsed | predicted before |", "| --- " * 6 + "|"]
    by_name = {headline.name: headline for headline in HEADLINES}
    remarks = []
    for record in records:
        headline = by_name[record["cell"]]
        rows = {row["name"]: row for row in record["rows"]}
        own = rows[headline.reference]
        for way, published in headline.ratios.items():
            row = rows[way]
            found.append(
                f"| {headline.name} | {record['dilate']:g}, {record['shrink']:g} | {way} / {headline.reference} | "
                f"{'' if published is None else f'{published:.2f}'} | {row['median_us'] / own['median_us']:.2f} | "
                f"{row['predicted_us'] / own['predicted_us']:.2f} |"
            )
        remarks.append(f"- {headline.name}: {headline.remark}.")
    return [*found, "", *remarks]


if __name__ == "__main__":
    sys.exit(main())
