"""How long predicting takes: each strategy on 1,000 gradients, and a sweep over ResNet-50 as a command.

    python -m benchmarks.simulate_speed             # prints a table; exit code 1 where a limit is passed
    python -m benchmarks.simulate_speed --repeats 9

Inside the process, everything that `planner.simulate` does for one strategy on one cluster counts, as the least over
repeats of the processor's time, so that other work on the machine is left out. The sweep is what a user waits for: the
command from its start to its end, the least of three.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from planner import simulate
from planner.decide.simulate import DEFAULT_STRATEGIES
from planner.documents.profile import Profile, parse_cluster, parse_profile

STRATEGY_LIMIT_MS, SWEEP_LIMIT_S = 50.0, 5.0
GRADIENTS = 1000
SWEEP_RANKS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
SWEEP_REPEATS = 3
FLOPS_PER_US = 8e6
"""What the made-up accelerator does of the backward of ResNet-50, whose times only have to be plausible."""

CLUSTER: dict[str, Any] = {
    "schema": "planner.cluster/1",
    "nodes": 8,
    "ranks_per_node": 4,
    "intra": {"alpha_us": 5.0, "beta_us_per_byte": 1e-5},
    "inter": {"alpha_us": 30.0, "beta_us_per_byte": 8e-5},
}
CONTENTION = {"contention": {"compute": 1.07, "network": 1.12}}


def profile_of(name: str, rows: list[tuple[str, int, float]]) -> dict[str, Any]:
    """profile.json of gradients given as (layer, numel, backward_us)."""
    gradients = [
        {"name": f"g{index}", "layer": layer, "numel": numel, "dtype": "float32", "backward_us": backward_us}
        for index, (layer, numel, backward_us) in enumerate(rows)
    ]
    forward_us = sum(backward_us for _, _, backward_us in rows) / 2
    compute = {"forward_us": forward_us, "update_us": 3000.0, "gradients": gradients}
    world = {"ranks": 32}
    return {"schema": "planner.profile/1", "model": {"name": name}, "world": world, "compute": compute, "cluster": {}}


def large_profile() -> Profile:
    """Many gradients of all sizes."""
    generator = np.random.default_rng(0)
    numel = (10 ** generator.uniform(2, 6, GRADIENTS)).astype(int).tolist()
    backward_us = generator.exponential(100.0, GRADIENTS).tolist()
    rows = [(f"layer{i // 3}", n, us) for i, (n, us) in enumerate(zip(numel, backward_us, strict=True))]
    return parse_profile(profile_of("large", rows))


def resnet50() -> dict[str, Any]:
    """The 161 gradients of ResNet-50 in order of readiness, each convolution taking the time of its multiplications."""
    layers = [(7 * 7 * 3 * 64, 64, 112)]
    width_in = 64
    for width, blocks, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            shapes = [(width_in * width, width), (9 * width * width, width), (width * 4 * width, 4 * width)]
            shapes += [(width_in * 4 * width, 4 * width)] if block == 0 else []
            layers += [(weights, out, side) for weights, out in shapes]
            width_in = 4 * width
    rows: list[tuple[str, int, float]] = [("fc", 1000, 5.0), ("fc", 2048 * 1000, 40.0)]
    for index, (weights, out, side) in reversed(list(enumerate(layers))):
        rows += [(f"norm{index}", out, 5.0), (f"norm{index}", out, 5.0)]
        rows.append((f"conv{index}", weights, 32 * 4 * weights * side * side / FLOPS_PER_US))
    return profile_of("resnet50", rows)


def situations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Clusters whose costs are lines, or samples that rise, or samples that do not; with and without contention."""
    generator = np.random.default_rng(1)
    sizes = np.sort(10 ** generator.uniform(2, 8, 30))
    rising = 100.0 + 1e-4 * sizes
    jagged = rising * generator.uniform(0.6, 1.4, 30)
    yield "line", CLUSTER
    for name, times in (("samples", rising), ("jagged", jagged)):
        yield name, CLUSTER | {"samples": {"all_reduce": np.column_stack([sizes, times]).tolist()}}
    yield "line, contention", CLUSTER | CONTENTION
    samples = {"all_reduce": np.column_stack([sizes, jagged]).tolist()}
    yield "jagged, contention", CLUSTER | CONTENTION | {"samples": samples}


def strategy_ms(profile: Profile, cluster: dict[str, Any], strategy: str, repeats: int) -> float:
    """The least processor time of one prediction, after a first one that loads what it needs."""
    machines = parse_cluster(cluster)
    times_s = []
    for _ in range(repeats + 1):
        started = time.process_time()
        simulate(profile, machines, strategies=[strategy])
        times_s.append(time.process_time() - started)
    return min(times_s[1:]) * 1e3


def sweep_s() -> float:
    """The least time of `planner simulate` over the default strategies and twelve numbers of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        profile, cluster = Path(folder, "profile.json"), Path(folder, "cluster.json")
        profile.write_text(json.dumps(resnet50()), encoding="utf-8")
        cluster.write_text(json.dumps(CLUSTER), encoding="utf-8")
        command = [sys.executable, "-m", "planner", "simulate", str(profile), "--cluster", str(cluster)]
        command += ["--ranks", ",".join(map(str, SWEEP_RANKS)), "--strategy", ",".join(DEFAULT_STRATEGIES)]
        times_s = []
        for _ in range(SWEEP_REPEATS):
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            times_s.append(time.perf_counter() - started)
    return min(times_s)


def main() -> int:
    """Prints the table; 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="predictions of which the fastest counts")
    repeats = max(1, parser.parse_args().repeats)
    profile, strategies = large_profile(), (*DEFAULT_STRATEGIES, "torus_2d")
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"ms per strategy, {GRADIENTS} gradients, limit {STRATEGY_LIMIT_MS:g}")
    print(f"{'':<20}" + "".join(f"{name:>12}" for name in strategies))
    slowest_ms = 0.0
    for name, cluster in situations():
        row_ms = [strategy_ms(profile, cluster, strategy, repeats) for strategy in strategies]
        print(f"{name:<20}" + "".join(f"{ms:12.1f}" for ms in row_ms))
        slowest_ms = max(slowest_ms, *row_ms)
    took_s = sweep_s()
    count = f"{len(DEFAULT_STRATEGIES)} strategies, {len(SWEEP_RANKS)} numbers of ranks"
    print(f"sweep of ResNet-50 as a command ({count}): {took_s:.2f} s, limit {SWEEP_LIMIT_S:g}")
    return int(slowest_ms > STRATEGY_LIMIT_MS or took_s > SWEEP_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
