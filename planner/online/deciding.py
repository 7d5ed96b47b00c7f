"""The process in which rank 0 has a plan made, so that training continues meanwhile. Torch-free.

`python -m planner.online.deciding` reads a request from standard input and writes the answer to standard output:

    {"profile": {…}, "options": {"accuracy": "exact", …}, "others": [[["fc.weight", …], …], …],
     "owners": {"fc.weight": 1}, "gathers": [["fc.weight"]], "inside": null}
    {"plan": {…}, "others_us": [41200.0, …]}    or    {"problem": "…"}

`options` are those of `planner.optimize`; `others_us` is what a step takes with the buckets of each of `others`, sent
whole, and with the present `owners` of operators (null: every rank), by the same simulator.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from planner.decide.optimize import optimize
from planner.documents.profile import parse_profile
from planner.emit.lower import predict
from planner.ir import Bucket, Schedule
from planner.model.operator_costs import shares_of
from planner.model.problem import make_problem
from runtime.errors import PlannerError
from runtime.plan import OperatorPlan

DEADLINE_S = 300
"""Time after which training stays with its plan."""
LOWEST_PRIORITY = 19
PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


def decide(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request. Raises PlannerError as `optimize` does."""
    profile = parse_profile(request["profile"])
    plan = optimize(profile, **request["options"])
    index = {gradient.name: at for at, gradient in enumerate(profile.compute.gradients)}
    problem = make_problem(profile)
    owned = OperatorPlan(owners=request["owners"], gathers=request["gathers"] or None, inside=request.get("inside"))
    present = shares_of(problem, owned)
    others = [
        Schedule(buckets=tuple(Bucket(tuple(index[name] for name in bucket)) for bucket in buckets), operators=present)
        for buckets in request["others"]
    ]
    times_us = [predict(problem, other).iteration_us for other in others]
    return {"plan": plan.to_document(), "others_us": times_us}


def main() -> None:
    """Answer one request; what is wrong is an answer, too."""
    signal.alarm(DEADLINE_S)  # perhaps no process is left to end this one
    with suppress(AttributeError, OSError):  # Linux alone: where rank 0 ends, so does this
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        answer = decide(json.load(sys.stdin))
    except PlannerError as error:
        answer = {"problem": str(error)}
    json.dump(answer, sys.stdout)


class Decision:
    """A request that another process answers, with the least claim to the processors."""

    def __init__(self, request: dict[str, Any]) -> None:
        # Files without a name: pipes would have to be read during training, named files would stay after a kill.
        self._answer, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - until `close`
        root = str(Path(__file__).resolve().parents[2])
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        paths = os.pathsep.join([root, *(path for path in sys.path if path)])
        with tempfile.TemporaryFile() as asked:
            asked.write(json.dumps(request).encode())
            asked.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "planner.online.deciding"],
                stdin=asked, stdout=self._answer, stderr=self._errors,
                env={**os.environ, **one_thread, "PYTHONPATH": paths},
            )  # fmt: skip
        os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)

    def poll(self) -> dict[str, Any] | None:
        """Return the answer, or None while there is none; never waits."""
        code = self._process.poll()
        if code is None:
            return None
        try:
            self._answer.seek(0)
            answer: dict[str, Any] = json.loads(self._answer.read())
        except ValueError:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            late = f"it took longer than {DEADLINE_S} s" if code == -signal.SIGALRM else f"it ended with {code}"
            answer = {"problem": f"the process that decides gave no plan: {(last or [late])[0]}"}
        self.close()
        return answer

    def close(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._answer.close()
        self._errors.close()


def names_of(buckets: Sequence[Any]) -> list[list[str]]:
    """Return the gradients of a plan's buckets, as a request has them."""
    return [list(bucket.gradients) for bucket in buckets]


if __name__ == "__main__":
    main()
