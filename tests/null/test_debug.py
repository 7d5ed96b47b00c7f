"""`PLANNER_DEBUG`: what it logs, what it refuses, and that a step pays nothing without it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import run, usual_profile

from planner.decide.optimize import optimize
from runtime import debug
from runtime.comm.communicator import CommTiming, NullCommunicator, Payload
from runtime.comm.traced import TracedCommunicator, message_bytes, traced
from runtime.errors import InputError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Set the variable as a new process would find it."""
    levels = {name: logging.getLogger(name).level for name in debug.PACKAGES}
    handlers = {name: list(logging.getLogger(name).handlers) for name in debug.PACKAGES}

    def ask(text: str) -> frozenset[str]:
        monkeypatch.setenv(debug.VARIABLE, text)
        debug.asked_events.cache_clear()
        return debug.asked_events()

    yield ask
    debug.asked_events.cache_clear()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).handlers[:] = handlers[name]


@pytest.mark.parametrize("text", ["", " ", ",", "launch", " wait , launch,", "schedule,launch,wait"])
def test_words_are_separated_by_commas(text: str) -> None:
    assert debug.parse_events(text) == frozenset(text.replace(",", " ").split())


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"PLANNER_DEBUG: found lunch, expected words among schedule, launch, wait"):
        debug.parse_events("lunch,wait")


def test_the_command_line_says_so_first(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError):
        asked("lunch")
    run("catalog", code=2)
    assert "found lunch" in capsys.readouterr().err


def test_without_the_variable_a_communicator_is_itself(asked: Any) -> None:
    assert asked("") == asked("schedule") - {"schedule"} == frozenset()
    inner = NullCommunicator()
    assert traced(inner, 0) is inner


def test_passes_log_their_schedules(asked: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked("schedule")
    optimize(usual_profile(), passes="merge{labels=4}")
    [record] = [record for record in caplog.records if record.name == "planner.decide"]
    assert record.getMessage().startswith("after merge{labels=4} (")
    assert "all_reduce/library none" in record.getMessage()


class Inner:
    """A communicator whose messages take 2 ms on the network, 3 ms after their launch."""

    def launch(self, bucket: Payload, sent: CommTiming, prepare: Any) -> None:
        prepare()
        sent.launch, sent.start, sent.end = 0.0, 0.001, 0.003

    def wait(self, until: CommTiming | None = None) -> None: ...

    def close(self) -> None: ...


def test_messages_are_logged_as_they_are_launched_and_waited_for(asked: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked("launch,wait")
    communicator = traced(Inner(), 3)
    assert isinstance(communicator, TracedCommunicator)
    message, sent = SimpleNamespace(flat=torch.zeros(1000)), [CommTiming(), CommTiming()]
    for index in range(2):
        label = f"bucket {index} (all_reduce/library, a … b)"
        communicator.launch(Payload(index, label, [message]), sent[index], lambda: None)
    communicator.wait(sent[1])
    communicator.wait()
    communicator.wait()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(", at ")[0] for line in lines[:2]] == [
        f"rank 3: launch: bucket {index} (all_reduce/library, a … b): 4,000 bytes" for index in range(2)
    ]
    assert [line.split(":")[2].split(" (")[0] for line in lines[2:]] == [" bucket 1", " bucket 0"]
    assert all("2.000 ms of it on the network" in line for line in lines[2:])


def test_a_device_is_not_waited_for(asked: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked("wait")
    communicator = TracedCommunicator(NullCommunicator(), 0, frozenset({"wait"}))
    communicator.launch(Payload(0, "bucket 0", []), CommTiming())
    communicator.wait()
    [record] = caplog.records
    assert "bucket 0: the device waits for it" in record.getMessage()


def test_bytes_of_each_kind_of_message() -> None:
    assert message_bytes(SimpleNamespace(rows=torch.zeros(2, 3, dtype=torch.uint8))) == 6
    assert message_bytes(SimpleNamespace(left=torch.zeros(2), right=torch.zeros(3))) == 20
    assert message_bytes(object()) == 0
