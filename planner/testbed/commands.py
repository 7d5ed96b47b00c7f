"""Commands in the hosts of an emulated cluster: started on all, waited for, their output collected."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from planner.testbed.emulation import mark
from planner.testbed.hosts import EmulatedHosts
from planner.testbed.wiring import INTERFACE
from runtime.errors import EnvironmentFailure

_SCRIPT = Path(__file__).with_name("host_process.py")


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a command did on one host."""

    host: int
    code: int
    """Exit code; 128 + N where signal N ended it."""
    out: str
    err: str


@dataclass
class _Running:
    host: int
    command: Sequence[str]
    process: subprocess.Popen[bytes]
    out: BinaryIO
    err: BinaryIO

    def end(self) -> None:
        """Kills it, with all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()

    def output(self) -> Output:
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Output(host=self.host, code=self.process.returncode, out=texts[0], err=texts[1])


def run_on_hosts(
    hosts: EmulatedHosts, command: Callable[[int], Sequence[str]], timeout_s: float = 60.0
) -> list[Output]:
    """Runs `command(host)` on every host at once, until all have ended.

    To be called from a thread that lives as long: the commands end with it, and with this process, however it ends.

    Args:
        hosts: an emulated cluster; `hosts.address(host)` is where a host is reached from the others.
        command: the program and its arguments for a host.
        timeout_s: deadline for all of them together.

    Returns:
        The outputs in order of host, whatever the exit codes.

    Raises:
        EnvironmentFailure: a command did not end within the deadline; all have been ended then.
    """
    with ExitStack() as stack:
        running = []
        for host in range(hosts.emulation.hosts):
            one = _start(hosts, host, command(host), stack)
            stack.callback(one.end)
            running.append(one)
        over_at = time.monotonic() + timeout_s
        for one in running:
            try:
                one.process.wait(max(0.0, over_at - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                said = one.output().err.strip().splitlines()[-1:]
                raise EnvironmentFailure(
                    f"host {one.host} of the {hosts.emulation}: `{' '.join(one.command)[:200]}` did not end within "
                    f"{timeout_s:g} s and was ended" + "".join(f"; it last said: {line[:300]}" for line in said)
                ) from error
        return [one.output() for one in running]


def _start(hosts: EmulatedHosts, host: int, command: Sequence[str], stack: ExitStack) -> _Running:
    out = stack.enter_context(tempfile.TemporaryFile(prefix="planner-"))  # noqa: SIM115
    err = stack.enter_context(tempfile.TemporaryFile(prefix="planner-"))  # noqa: SIM115
    descriptor = hosts.namespaces[host].descriptor if hosts.namespaces else -1
    environment = os.environ | mark(hosts.emulation)
    if hosts.namespaces:
        environment["GLOO_SOCKET_IFNAME"] = INTERFACE
    process = subprocess.Popen(
        [sys.executable, "-I", str(_SCRIPT), str(os.getpid()), str(descriptor), *command],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=environment,
        pass_fds=[descriptor] if hosts.namespaces else [],
        start_new_session=True,
    )
    return _Running(host, command, process, out, err)
