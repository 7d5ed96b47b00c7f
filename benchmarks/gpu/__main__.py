"""See the package. Nothing here imports torch: a device is the worker's."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.gpu.environment import WheelsMissing, make_environment, requirements
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.state import ROOT, State, append, records

PAGE, KEPT = ROOT / "docs" / "results" / "gpu.md", ROOT / "build" / "gpu"
ON_DEVICE, ON_CPU = 30.0, 10.0
"""Minutes, where none are given."""
TIME_UP = 4
"""Exit code."""
HUNG = 3.0
"""How many times its share of the time a part may take before it is given up, where more than `LEAST_S`."""
LEAST_S, POLL_S = 240.0, 0.2
LOG_LINES = 15


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what has not been run, and write the page."""
    begun = time.time()
    options = _options(arguments)
    python, wheels = Path(sys.executable), options.wheels
    if wheels is not None:
        try:
            python = make_environment(wheels, options.state / "venv", requirements())
        except WheelsMissing as error:
            print(error, file=sys.stderr)
            return 2
    environment = _describe(python)
    if options.device == "cuda" and environment["device"] is None:
        print("--device cuda: torch finds no CUDA device here; leave it out to rehearse on the CPU", file=sys.stderr)
        return 2
    if options.device == "cpu":
        environment["device"] = None
    kind = "cpu" if environment["device"] is None else "cuda"
    minutes = options.minutes or (ON_CPU if kind == "cpu" else ON_DEVICE)
    if kind == "cpu":
        print("No device: this is a rehearsal on the CPU, at a small size. On a device it would")
        for part in PARTS.values():
            print(f"  {part.name}: {part.does}")
    state = State(options.state / f"{kind}.jsonl", environment, anew=options.anew or kind == "cpu")
    names = [name for name in PARTS if name in (options.only or PARTS)]
    Runner(state, python, kind, begun + 60.0 * minutes).run(names)
    results = state.results()
    written = options.output.read_text(encoding="utf-8") if options.output.exists() else None
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(page(written, environment, results, state.source), encoding="utf-8")
    print(f"wrote {options.output}")
    failed = {name: results[name].failures for name in names if name in results and results[name].failures}
    for name, failures in failed.items():
        print(f"{name} FAILED: {'; '.join(failures)}")
    left = [name for name in names if name not in results]
    if left:
        print(f"the time was up before {', '.join(left)}: the same command goes on there")
    return 1 if failed else TIME_UP if left else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Everything that needs a device.")
    parser.add_argument("--minutes", type=float, help=f"what it may take (default {ON_DEVICE:g}; on a CPU {ON_CPU:g})")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels: an environment is made of them, offline")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--anew", action="store_true", help="forget what is finished (on a CPU always)")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    parser.add_argument("--state", type=Path, default=KEPT, help="the folder of what is finished")
    options = parser.parse_args(arguments)
    if options.minutes is not None and options.minutes <= 0.0:
        parser.error(f"--minutes: found {options.minutes:g}, expected more than 0")
    return options


def _call(python: Path, *arguments: str) -> list[str]:
    return [str(python), "-m", "benchmarks.gpu.worker", *arguments]


def _surroundings() -> dict[str, str]:
    """This repository's packages come first, whatever is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def _describe(python: Path) -> dict[str, Any]:
    done = subprocess.run(
        _call(python, "--describe"), cwd=ROOT, env=_surroundings(), capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise SystemExit(f"torch cannot be imported by {python} ({last}): install it there, or give --wheels")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Runner:
    """Starts workers until every part is done, or the time is up."""

    def __init__(self, state: State, python: Path, kind: str, deadline: float) -> None:
        """`deadline`: as time.time() gives it."""
        self._state, self._python, self._kind, self._deadline = state, python, kind, deadline

    def run(self, names: Sequence[str]) -> None:
        """Run what of these has not been done well; each once."""
        left = [name for name in names if self._failed_or_new(name)]
        for name in [name for name in names if name not in left]:
            print(f"{name}: done before")
        while left and time.time() < self._deadline:
            known = len(list(records(self._state.path)))
            code = self._worker(left)
            done = [one["part"] for one in list(records(self._state.path))[known:] if "part" in one]
            on_its_way = self._state.begun(known)
            if on_its_way is not None and time.time() < self._deadline:  # it died, or hung
                self._give_up(on_its_way[0], code)
                done.append(on_its_way[0])
            left = [name for name in left if name not in done]
            if not done:
                break

    def _failed_or_new(self, name: str) -> bool:
        result = self._state.results().get(name)
        return result is None or bool(result.failures)

    def _worker(self, names: Sequence[str]) -> int | None:
        """One worker for all of these; returns its exit code, None where it had to be ended."""
        arguments = ["--device", self._kind, "--state", str(self._state.path), "--deadline", str(self._deadline)]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                _call(self._python, *arguments, "--parts", *names), cwd=ROOT, env=_surroundings(), stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                return self._watch(process, log)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ranks and commands end with it
                process.wait()

    def _watch(self, process: subprocess.Popen[bytes], log: BinaryIO) -> int | None:
        known = shown = len(list(records(self._state.path)))
        while process.poll() is None:
            time.sleep(POLL_S)
            shown = self._show(shown)
            begun = self._state.begun(known)
            late = begun is not None and time.time() > begun[1] + max(LEAST_S, HUNG * begun[2])
            if late or time.time() > self._deadline:
                return None
        self._show(shown)
        return process.returncode

    def _show(self, shown: int) -> int:
        """Print what has come since; returns how many records there are."""
        found = list(records(self._state.path))
        for record in found[shown:]:
            if "begun" in record:
                print(f"{record['begun']}: up to {record['seconds']:.0f} s …", flush=True)
            elif "part" in record:
                good = "good" if not record["failures"] else f"{len(record['failures'])} failed"
                print(f"{record['part']}: {good}, {record['took_s']:.0f} s", flush=True)
        return len(found)

    def _give_up(self, name: str, code: int | None) -> None:
        """Note a part whose process has ended under it."""
        why = "it did not end in time" if code is None else f"its process ended with exit code {code}"
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
        append(self._state.path, {
            "part": name, "took_s": 0.0, "date": time.strftime("%Y-%m-%d"), "source": self._state.source,
            "text": "```text\n" + "\n".join(said) + "\n```", "failures": [why],
        })  # fmt: skip

    @property
    def _log(self) -> Path:
        return self._state.path.with_suffix(".log")


if __name__ == "__main__":
    sys.exit(main())
