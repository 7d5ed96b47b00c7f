"""examples/existing_script.py, but for one thing: rank 1 is killed in its first life, after some updates.

DIES_AFTER in the environment says how many.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import existing_script


class DyingSGD(torch.optim.SGD):
    """SGD with a last update."""

    updates = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As ever, but for the last one."""
        super().step(closure)
        DyingSGD.updates += 1
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first_life and os.environ["RANK"] == "1" and DyingSGD.updates == int(os.environ["DIES_AFTER"]):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.optim.SGD = DyingSGD  # type: ignore[misc]
    existing_script.main()
