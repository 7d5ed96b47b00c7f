"""Connections of this process that the kernel holds to a rate."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.testbed import pacing
from planner.testbed.pacing import SO_MAX_PACING_RATE, pace_connections
from runtime.errors import EnvironmentFailure


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0],
    ):
        yield one


def rate_of(connection: socket.socket) -> int:
    return connection.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE)


def test_connections_are_held_and_others_are_left_alone(connection: socket.socket) -> None:
    connection.setblocking(False)
    opened = sorted(os.listdir(pacing.DESCRIPTORS))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        before = rate_of(datagrams)
        pace_connections(200e6)
        assert rate_of(datagrams) == before
    assert rate_of(connection) == 25_000_000
    assert not connection.getblocking()
    pace_connections(80e6)
    assert rate_of(connection) == 10_000_000
    assert sorted(os.listdir(pacing.DESCRIPTORS)) == opened


def test_a_kernel_that_does_not_pace_is_named(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "SO_MAX_PACING_RATE", 9999)
    with pytest.raises(EnvironmentFailure, match=r"cannot hold connections to a rate .*--emulate 2x1@10gbit"):
        pace_connections(200e6)


def test_another_system_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pacing, "DESCRIPTORS", tmp_path / "absent")
    with pytest.raises(EnvironmentFailure, match="use Linux"):
        pace_connections(200e6)
