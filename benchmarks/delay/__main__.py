"""Accuracy of plans with delay over k; how fast they are is measured with `python -m benchmarks.truth --delayed`.

python -m benchmarks.delay                                # some minutes
python -m benchmarks.delay --scale 0.2                    # shorter runs
python -m benchmarks.delay --output docs/results/delay.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.delay import accuracy
from benchmarks.learning import SEEDS, outcomes
from benchmarks.marked import write_part

PART = "accuracy"


def main() -> int:
    """Prints, and writes where told to."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps that are trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--tasks", nargs="+", choices=accuracy.TASKS, default=list(accuracy.TASKS))
    parser.add_argument("--ways", nargs="+", choices=list(accuracy.WAYS), default=list(accuracy.WAYS))
    parser.add_argument("--results", type=Path, default=None, help="JSON lines: not trained again")
    parser.add_argument("--only", default="", help="a part of (task, seed, way): what may be trained now")
    parser.add_argument("--output", type=Path, default=None, help="a document whose marked part is replaced")
    options = parser.parse_args()
    ways = list(dict.fromkeys([accuracy.SYNCHRONOUS, *options.ways]))  # with which all others are compared
    found = outcomes(
        accuracy.train, accuracy.Stale, options.tasks, ways, options.seeds, options.scale, options.results,
        only=options.only,
    )  # fmt: skip
    text = "\n".join(accuracy.lines(found))
    print(text)
    if options.output is not None:
        write_part(options.output, PART, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
