"""What LAGS-SGD's theory says, beside what this planner simulates and this runtime measures.

python -m benchmarks.lags                  # prints both tables; some minutes
python -m benchmarks.lags --part order     # Table 2, simulated: seconds
python -m benchmarks.lags --part bound     # Eq. 20 against the simulator: seconds
python -m benchmarks.lags --part measured  # Eq. 20 against emulated hosts: minutes; as root
python -m benchmarks.lags --part accuracy --scale 0.1
python -m benchmarks.lags --part first_dense --results runs.jsonl   # after dense steps; goes on where it was stopped
python -m benchmarks.lags --part methods --results methods.jsonl       # dense, SLGS and LAGS by Eq. 19; δ by layer
python -m benchmarks.lags --part selectors --results selectors.jsonl   # mstopk and sampled against exact top-k
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.lags import accuracy, bound, measured, order
from benchmarks.learning import SEEDS, outcomes
from benchmarks.marked import write_part
from planner.documents.catalog import find_profile

MODELS = ("resnet50", "vgg16", "bert-base")


def main() -> int:
    """Prints, and writes where told to."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--part", nargs="+", choices=WRITERS, default=list(WRITERS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps that are trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--tasks", nargs="+", choices=accuracy.TASKS, default=list(accuracy.TASKS))
    parser.add_argument("--results", type=Path, default=None, help="JSON lines: not trained again")
    parser.add_argument("--only", default="", help="a part of (task, seed, way): what may be trained now")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="of the catalogue, for the bound")
    parser.add_argument("--job", default="benchmarks.truth.jobs:resnet18_job", help="whose steps are measured")
    parser.add_argument("--links", nargs="+", default=list(measured.LINKS), help="emulated, for measured steps")
    parser.add_argument("--rounds", type=int, default=5, help="of measured steps")
    parser.add_argument("--output", type=Path, default=None, help="a document whose marked parts are replaced")
    options = parser.parse_args()
    for part in options.part:
        text = "\n".join(WRITERS[part](options))
        print(text)
        if options.output is not None:
            write_part(options.output, part, text)
    return 0


def _order(_: argparse.Namespace) -> list[str]:
    return list(order.lines(order.settings()))


def _bound(options: argparse.Namespace) -> list[str]:
    found: list[str] = []
    for model in options.models:
        found += [f"{model}, 16 ranks, density {bound.DENSITY:.0%}:", ""]
        found += [*bound.lines(list(bound.simulated(find_profile(model)))), ""]
    return found


def _measured(options: argparse.Namespace) -> list[str]:
    rows = [measured.on_link(options.job, link, options.rounds) for link in options.links]
    return [f"{options.job}, density {bound.DENSITY:.0%}:", "", *measured.lines(rows)]


def _accuracy(options: argparse.Namespace) -> list[str]:
    return _trained(options, accuracy.WAYS)


def _first_dense(options: argparse.Namespace) -> list[str]:
    return _trained(options, accuracy.FIRST_DENSE)


def _methods(options: argparse.Namespace) -> list[str]:
    found = _outcomes(options, accuracy.METHODS)
    what = "δ of LAGS with Eq. 19's ratios, median by layer and part of the steps:"
    return [*accuracy.lines(found), "", what, "", *accuracy.curve_lines(found, "LAGS, Eq. 19")]


def _selectors(options: argparse.Namespace) -> list[str]:
    return _trained(options, accuracy.SELECTORS)


def _trained(options: argparse.Namespace, ways: Iterable[str]) -> list[str]:
    return list(accuracy.lines(_outcomes(options, ways)))


def _outcomes(options: argparse.Namespace, ways: Iterable[str]) -> list[accuracy.Sampled]:
    return outcomes(
        accuracy.train, accuracy.Sampled, options.tasks, list(ways), options.seeds, options.scale, options.results,
        only=options.only,
    )  # fmt: skip


WRITERS = {
    "order": _order, "bound": _bound, "measured": _measured, "accuracy": _accuracy, "first_dense": _first_dense,
    "methods": _methods, "selectors": _selectors,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
