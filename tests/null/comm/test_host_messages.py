"""Messages over a host's backend: which are on their way at once, in which order, and what is noted of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.comm import communicator
from runtime.comm.communicator import AT_ONCE, CommTiming, HostCommunicator, Payload


class Backend:
    """Calls that have been made and have not ended; `phases` of a message say how many calls it takes."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.open: dict[tuple[int, int], torch.futures.Future[Any]] = {}

    def carry(self, message: tuple[int, int], _group: Any) -> Iterator[Any]:
        index, phases = message
        for phase in range(phases):
            future: torch.futures.Future[Any] = torch.futures.Future()
            self.calls.append((index, phase))
            self.open[index, phase] = future
            yield SimpleNamespace(get_future=lambda future=future: future, wait=lambda *_: None)

    def shared(self, message: tuple[int, int], group: Any) -> Iterator[Any]:
        return self.carry(message, group)


@given(st.lists(st.one_of(st.none(), st.integers(1, 3)), min_size=1, max_size=8), st.data())
def test_all_reduces_share_the_link_and_nothing_else_does(kinds: list[int | None], data: st.DataObject) -> None:
    """None: the backend's own all-reduce, else the calls that a message takes. They are launched, and end, in any
    order that can be.
    """
    backend = Backend()
    with mock.patch.object(communicator, "library_all_reduce", shared := backend.shared):
        ways = [shared if calls is None else backend.carry for calls in kinds]
        group: Any = SimpleNamespace(process_group=object(), timeout_s=1.0, rank=0)
        messages = HostCommunicator(group, ways)
        sent = [CommTiming() for _ in kinds]
        launched = 0
        while launched < len(kinds) or backend.open:
            if launched < len(kinds) and (not backend.open or data.draw(st.booleans())):
                messages.launch(Payload(launched, "", [(launched, kinds[launched] or 1)]), sent[launched])
                launched += 1
            else:
                call = data.draw(st.sampled_from(sorted(backend.open)))
                backend.open.pop(call).set_result(None)
            on_way = {index for index, _ in backend.open}
            assert len(on_way) <= AT_ONCE
            assert len(on_way) < 2 or all(kinds[index] is None for index in on_way)
            waiting = [index for index in range(launched) if sent[index].end is None]
            if len(waiting) >= AT_ONCE and all(kinds[index] is None for index in waiting):
                ended = {index for index in waiting if (index, 0) in backend.calls} - on_way
                assert len(on_way | ended) >= AT_ONCE  # nothing waits that need not
        messages.wait()
    assert backend.calls == [(index, phase) for index, calls in enumerate(kinds) for phase in range(calls or 1)]
    marks = [(one.start, one.end) for one in sent]
    assert all(start <= end for start, end in marks)
    assert all(before[1] <= after[0] for before, after in pairwise(marks))
