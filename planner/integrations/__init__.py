"""`planner.attach` inside the frameworks that own the loop; each module needs its framework, nothing else here does."""

from __future__ import annotations

import re

from runtime.errors import EnvironmentFailure


def check_version(package: str, found: str, needed: str) -> None:
    """Raise EnvironmentFailure where a framework is older than what this was made for."""

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])

    if numbers(found) < numbers(needed):
        raise EnvironmentFailure(
            f"{package}: found version {found}, expected {needed} or newer: pip install '{package}>={needed}'"
        )
