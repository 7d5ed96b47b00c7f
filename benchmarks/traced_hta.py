"""Compare exposed and overlapped communication of traces with those of HolisticTraceAnalysis, for the same files.

    pip install HolisticTraceAnalysis "pandas<3"
    python -m benchmarks.traced_hta FOLDER      # of traces (.json.gz); exit code 1 where apart

HTA leaves out the first or the last step of a file, and by default cuts kernels to whole microseconds, which takes some
percent of short ones. So planner's figures are those of the kernels that HTA keeps, and HTA's those without cutting.
Classes are the same: communication is what a kernel of NCCL does.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from planner.traces.events import covered
from planner.traces.kineto import MESSAGE, column, read_kineto

LIMIT = 0.01


def ours(path: Path, begin_us: float, end_us: float) -> tuple[float, float]:
    """Return communication, and the part of it during which a kernel computes, in microseconds; of the kernels that
    begin between two times of the file's clock.
    """
    device = read_kineto(path).device
    start = column(device, "start")
    order = np.argsort(start, kind="stable")
    order = order[(start[order] > begin_us - 0.5) & (start[order] < end_us)]  # times are rounded when they are parsed
    spans = np.stack([start, column(device, "end")], axis=1)[order]
    sends = column(device, "kind")[order] == MESSAGE
    # HTA counts copies, and setting memory, as memory, not as computation; only kernels have a name here.
    computes = (column(device, "bytes")[order] < 0) & (column(device, "name")[order] >= 0) & ~sends
    messages, kernels = spans[sends], spans[computes]
    if not len(messages) or not len(kernels):
        return 0.0, 0.0
    edges, before = covered(kernels)
    starts, within = covered(messages)
    begin, end = starts[::2], starts[1::2]
    overlapped = np.interp(end, edges, before) - np.interp(begin, edges, before)
    return float(within[-1]), float(overlapped.sum())


def theirs(path: Path) -> tuple[float, float, float]:
    """Return HTA's share of communication that is overlapped, and when its kernels begin and end, in microseconds of
    the file's clock.
    """
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.trace_analysis import TraceAnalysis  # optional: only this benchmark needs it

    with TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        analysis = TraceAnalysis(trace_files={0: path.name}, trace_dir=folder)
        frame = analysis.get_comm_comp_overlap(visualize=False)
    events = analysis.t.get_trace(0)
    kernels = events[events["stream"].ne(-1)]
    begin_us = kernels["ts"].min() + analysis.t.min_ts
    end_us = (kernels["ts"] + kernels["dur"]).max() + analysis.t.min_ts
    return float(frame["comp_comm_overlap_pctg"].iloc[0]) / 100.0, float(begin_us), float(end_us)


def main() -> int:
    """Print the shares of each file, and whether they agree."""
    parser = argparse.ArgumentParser(description="Overlapped communication beside HTA's.")
    parser.add_argument("folder", type=Path)
    apart = False
    for path in sorted(parser.parse_args().folder.glob("*.json.gz")):
        other, begin_us, end_us = theirs(path)
        communication_us, overlapped_us = ours(path, begin_us, end_us)
        if communication_us == 0.0:
            print(f"{path.name}: no communication")
            continue
        share = overlapped_us / communication_us
        apart |= abs(share - other) > LIMIT
        print(f"{path.name}: overlapped {share:.4f} of {communication_us / 1e3:.2f} ms, HTA {other:.4f}")
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
