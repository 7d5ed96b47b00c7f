"""Stacked bars as SVG: measured steps, and those of CommLib's figures 1 and 8 as `planner simulate` predicts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from planner.comparison.variants import DDP, NO_COMMUNICATION, PLAN
from planner.cost.sparse import SPARSE_PHASES, selected_elements
from planner.decide.simulate import simulate
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_cluster, find_profile
from planner.model.problem import make_problem
from planner.model.spending import spending
from runtime.plan.transports import HITOPK, NAIVE_ALL_GATHER

Bars = Sequence[tuple[str, Mapping[str, float]]]
"""(name, milliseconds by part) of each bar, from the top."""

BAR_PX, GAP_PX, LEFT_PX, LETTER_PX, SCALE_PX, WIDTH_PX = 46, 16, 130.0, 10.5, 640, 900
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
COMPUTATION, SELECTION, WAITING = "computation", "selecting elements", "waiting for gradients"


def measured(rows: Sequence[Mapping[str, Any]]) -> Bars:
    """DDP's step and the plan's, of the rows of a rehearsal."""
    times_ms = {row["name"]: row["median_us"] / 1e3 for row in rows if row["median_us"] is not None}
    computed_ms = times_ms[NO_COMMUNICATION]
    return [
        (title, {COMPUTATION: computed_ms, WAITING: times_ms[name] - computed_ms})
        for title, name in (("DDP", DDP), ("planner", PLAN))
    ]


def stacked_bars(title: str, bars: Bars) -> str:
    """Return the bars with the sum of each behind it, as SVG."""
    used = dict.fromkeys(part for _, parts in bars for part, part_ms in parts.items() if part_ms > 0.0)
    colors = dict(zip(used, COLORS, strict=False))
    left = max(LEFT_PX, 40.0 + LETTER_PX * max(len(name) for name, _ in bars))
    scale = (SCALE_PX + LEFT_PX - left) / max(sum(parts.values()) for _, parts in bars)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{words}</text>'

    drawn = [text(20, 34, title, 'font-size="20" font-weight="bold"')]
    for row, (name, parts) in enumerate(bars):
        top, x = 58 + row * (BAR_PX + GAP_PX), left
        drawn.append(text(20, top + 30, name))
        for part, part_ms in ((part, parts[part]) for part in colors if part in parts):
            drawn.append(
                f'<rect x="{x:.1f}" y="{top}" width="{scale * part_ms:.1f}" height="{BAR_PX}" fill="{colors[part]}"/>'
            )
            x += scale * part_ms
        drawn.append(text(x + 12, top + 30, f"{sum(parts.values()):.3g} ms", 'font-weight="bold"'))
    x, low = left if left == LEFT_PX else 20.0, 58 + len(bars) * (BAR_PX + GAP_PX) + 6
    for part, color in colors.items():
        drawn += [f'<rect x="{x:.0f}" y="{low}" width="16" height="16" fill="{color}"/>', text(x + 24, low + 14, part)]
        x += max(190.0, 44.0 + 9.0 * len(part))
    width = max(WIDTH_PX, round(x))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{low + 36}" font-family="sans-serif"'
    return "\n".join(
        [f'{head} font-size="18">', '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>", ""]
    )


CLUSTER, DENSITY = "v100-16x8-25gbe", 0.001
PROFILES = {"96 px": "resnet50-96px-v100-amp-b256", "224 px": "resnet50-224px-v100-amp-b256"}
METHODS = {"dense": "single", "top-k": f"naive_all_gather:{DENSITY}", "HiTopKComm": f"hitopk:{DENSITY}"}
SIZES = {"ResNet-50": 25_557_032, "Transformer": 110_000_000}
"""Elements of Fig. 8's two tensors."""
ELEMENT_BYTES = 4


def steps() -> str:
    """CommLib's Fig. 1: where steps of dense and sparse training go, at two resolutions."""
    bars = []
    for size, name in PROFILES.items():
        problem = make_problem(find_profile(name), find_cluster(CLUSTER))
        for method, strategy in METHODS.items():
            [step] = simulate(name, CLUSTER, strategies=strategy)
            spent = [spending(problem, bucket) for bucket in make_schedule(problem, strategy).buckets]
            selected_us = sum(one.before_us + one.after_us for one in spent)
            computed_us = step.forward_us + step.backward_us + step.update_us
            rest_us = step.iteration_us - computed_us - selected_us
            parts = {COMPUTATION: computed_us / 1e3, SELECTION: selected_us / 1e3, WAITING: rest_us / 1e3}
            bars.append((f"{size}, {method}", parts))
    return stacked_bars("One step of ResNet-50 on 128 V100, predicted", bars)


def phases() -> str:
    """CommLib's Fig. 8: phases of HiTopKComm, compared with one gather over all ranks."""
    return stacked_bars("Messages of 0.1 % of the elements on 128 V100, predicted", list(_phases()))


def _phases() -> Iterator[tuple[str, Mapping[str, float]]]:
    cluster = find_cluster(CLUSTER)
    where = {"intra": "in nodes", "inter": "between nodes"}
    for name, numel in SIZES.items():
        for method, transport in (("HiTopKComm", HITOPK), ("all-gather", NAIVE_ALL_GATHER)):
            shards = cluster.ranks_per_node if transport.hierarchical else 1
            k = selected_elements(DENSITY, -(-numel // shards))
            parts = {}
            for phase in SPARSE_PHASES[transport](cluster, None):
                what = f"{phase.name.replace('_', '-')} {where[phase.link] if shards > 1 else 'over all ranks'}"
                parts[what] = phase.time_us(k, numel * ELEMENT_BYTES) / 1e3
            yield f"{name}, {method}", parts


PREDICTED: Mapping[str, Callable[[], str]] = {"breakdown": steps, "hitopk": phases}
"""Pictures of predicted times, by name of their file."""
