"""States of runs with delay: those of the first version are read, those of later ones refused."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.delay.checkpoint import VERSION, own_state
from runtime.errors import InputError

BUCKETS = [["weight", "bias"]]


def saved(**entries: Any) -> dict[str, Any]:
    return {"ranks": 2, "rank": 1, "delay": {"stage": "delayed", "workers": 2, "buckets": BUCKETS, **entries}}


def test_the_first_version_is_read() -> None:
    state = own_state(saved(told=1, words=2), 1, 2, 2, BUCKETS)
    assert (state["reported"], state["distance"]) == (1, 2)
    assert "told" not in state
    assert own_state(saved(version=VERSION, reported=1, distance=2), 1, 2, 2, BUCKETS)["reported"] == 1


def test_a_later_version_is_refused() -> None:
    with pytest.raises(InputError, match=f"in version {VERSION + 1}, expected at most {VERSION}"):
        own_state(saved(version=VERSION + 1), 1, 2, 2, BUCKETS)
