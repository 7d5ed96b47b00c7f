"""Links between emulated hosts: a bridge in a namespace of its own, a veth pair to each host, egress shaped by tbf.

Everything is made inside namespaces without a name. The machine's own interfaces are never touched.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence

from planner.testbed.namespaces import Namespace, NoNamespaces
from runtime.errors import EnvironmentFailure

INTERFACE = "eth0"
"""Every host's interface."""
COMMAND_DEADLINE_S = 15.0
"""Deadline of one call of `ip` or `tc`, which takes milliseconds."""
HOST_DEADLINE_S = 10.0
"""Deadline for a host to reach the switch."""

MTU_BYTES = 9000
"""Jumbo frames: headers take 0.7 % of the rate instead of 4.4 %, and the cores have fewer packets to move."""
_FRAME_BYTES = MTU_BYTES + 100
_BURST_S = 2e-3
"""Size of the bucket, in seconds: traffic that a busy machine failed to send in time and may make up for."""
_PEAK = 1.1
"""Ratio of the rate at which the bucket empties to the rate, so that messages of some KiB see the rate too."""
_PEAK_BURST_S = 1e-4
_LEAST_QUEUE_BYTES, _QUEUE_S = 2**22, 0.2
"""Size of the queue before the bucket: TCP slows down long before that, so nothing is dropped."""

SWITCH_ADDRESS = "10.77.255.254"
_PREFIX = 16


def host_address(host: int) -> str:
    """Return the address of a host inside the emulated cluster."""
    return f"10.77.{host // 250}.{host % 250 + 1}"


def check_tools() -> None:
    """Raise NoNamespaces where iproute2 is missing."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNamespaces(f"{tool}: not found; expected iproute2 (Debian, Ubuntu: apt-get install iproute2)")


def wire(switch: Namespace, hosts: Sequence[Namespace], bits_per_s: float) -> None:
    """Connect the hosts and shape what each of them sends; return when every host reaches the switch.

    Raises:
        NoNamespaces: iproute2 is missing, or the kernel lacks bridges, veth pairs or tbf.
        EnvironmentFailure: a host did not come up within the deadline.
    """
    check_tools()
    lines = ["link set lo up", f"link add switch mtu {MTU_BYTES} type bridge", "link set switch up"]
    lines += [f"addr add {SWITCH_ADDRESS}/{_PREFIX} dev switch"]
    for number, host in enumerate(hosts):
        pair = f"type veth peer name {INTERFACE} mtu {MTU_BYTES} netns {host.path}"
        lines += [f"link add port{number} mtu {MTU_BYTES} {pair}", f"link set port{number} master switch up"]
    _batch(switch, "ip", lines, "connecting the hosts", hosts)
    # IPv6 would send packets of its own over the links.
    quiet = [f"link set {INTERFACE} addrgenmode none"] if os.path.exists("/proc/sys/net/ipv6") else []
    for number, host in enumerate(hosts):
        address = f"addr add {host_address(number)}/{_PREFIX} dev {INTERFACE}"
        _batch(host, "ip", ["link set lo up", *quiet, f"link set {INTERFACE} up", address], f"starting host {number}")
        _batch(host, "tc", [shaping(bits_per_s)], f"shaping host {number}")
    _await_hosts(switch, hosts)


def shaping(bits_per_s: float) -> str:
    """Return the arguments of `tc` that hold an interface to a rate."""
    bytes_per_s = bits_per_s / 8
    burst = max(_FRAME_BYTES, round(bytes_per_s * _BURST_S))
    peak_burst = max(_FRAME_BYTES, round(bytes_per_s * _PEAK_BURST_S))
    queue = max(_LEAST_QUEUE_BYTES, round(bytes_per_s * _QUEUE_S))
    return (
        f"qdisc add dev {INTERFACE} root tbf rate {round(bits_per_s)}bit burst {burst} "
        f"peakrate {round(bits_per_s * _PEAK)}bit mtu {peak_burst} limit {queue}"
    )


def _batch(place: Namespace, tool: str, lines: Sequence[str], what: str, named: Sequence[Namespace] = ()) -> None:
    """Run lines of `ip` or `tc` inside a namespace; `named` are the namespaces that the lines refer to."""
    text = "".join(f"{line}\n" for line in lines)

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tool, "-batch", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_DEADLINE_S,
            pass_fds=[namespace.descriptor for namespace in named],
        )

    try:
        done = place.call(run)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailure(
            f"{what}: `{tool}` did not end within {COMMAND_DEADLINE_S:g} s; the emulated cluster is given up"
        ) from error
    if done.returncode != 0:
        said = "; ".join(done.stderr.split("\n")).strip("; ") or f"exit code {done.returncode}"
        raise NoNamespaces(
            f"{what}: `{tool}` failed: {said}; expected a kernel with bridge, veth and sch_tbf, and root"
        )


def _await_hosts(switch: Namespace, hosts: Sequence[Namespace]) -> None:
    """Block until every host has connected to the switch, which sees the host's address."""
    with switch.call(lambda: socket.create_server((SWITCH_ADDRESS, 0), backlog=len(hosts))) as server:
        server.settimeout(HOST_DEADLINE_S)
        port = server.getsockname()[1]
        for number, host in enumerate(hosts):
            try:
                with host.call(lambda: socket.create_connection((SWITCH_ADDRESS, port), timeout=HOST_DEADLINE_S)):
                    connection, (seen, _) = server.accept()
                    connection.close()
            except OSError as error:
                raise EnvironmentFailure(
                    f"host {number} of the emulated cluster did not reach the others within {HOST_DEADLINE_S:g} s "
                    f"({error}); the emulated cluster is given up"
                ) from error
            assert seen == host_address(number)
