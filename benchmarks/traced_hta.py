"""Exposed and overlapped communication of traces: planner beside HolisticTraceAnalysis, for the same files.

    pip install HolisticTraceAnalysis "pandas<3"
    python -m benchmarks.traced_hta FOLDER      # of traces (.json.gz); exit code 1 where apart

HTA takes the time from a rank's first kernel to its last one; planner takes steps. So planner's figures are those of
all events of the file here, in the same classes: communication is what a kernel of NCCL does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from planner.traces.events import covered
from planner.traces.kineto import MESSAGE, column, read_kineto

LIMIT = 0.01


def ours(path: Path) -> tuple[float, float]:
    """Return communication, and the part of it during which a kernel computes, in microseconds of the whole file."""
    device = read_kineto(path).device
    spans = np.stack([column(device, "start"), column(device, "end")], axis=1)
    order = np.argsort(spans[:, 0], kind="stable")
    sends = column(device, "kind")[order] == MESSAGE
    # HTA counts copies as memory, not as computation.
    computes = (column(device, "bytes")[order] < 0) & ~sends
    messages, kernels = spans[order][sends], spans[order][computes]
    if not len(messages) or not len(kernels):
        return 0.0, 0.0
    edges, before = covered(kernels)
    starts, within = covered(messages)
    begin, end = starts[::2], starts[1::2]
    overlapped = np.interp(end, edges, before) - np.interp(begin, edges, before)
    return float(within[-1]), float(overlapped.sum())


def theirs(path: Path) -> float:
    """Return HTA's share of communication that is overlapped, in percent."""
    from hta.trace_analysis import TraceAnalysis  # optional: only this benchmark needs it

    with TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        analysis = TraceAnalysis(trace_files={0: path.name}, trace_dir=folder)
        frame = analysis.get_comm_comp_overlap(visualize=False)
    return float(frame["comp_comm_overlap_pctg"].iloc[0])


def main() -> int:
    """Print the shares of each file, and whether they agree."""
    parser = argparse.ArgumentParser(description="Overlapped communication beside HTA's.")
    parser.add_argument("folder", type=Path)
    apart = False
    for path in sorted(parser.parse_args().folder.glob("*.json.gz")):
        communication_us, overlapped_us = ours(path)
        if communication_us == 0.0:
            print(f"{path.name}: no communication")
            continue
        share, other = overlapped_us / communication_us, theirs(path) / 100.0
        apart |= abs(share - other) > LIMIT
        print(f"{path.name}: overlapped {share:.4f} of {communication_us / 1e3:.2f} ms, HTA {other:.4f}")
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
