"""`planner doctor`: what is installed and works here, and the cure for what does not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys

import typer

from planner.cli.commands import Doctor
from planner.cli.options import printed_json
from planner.jobs.finding import Finding
from planner.testbed.namespaces import Namespace, NoNamespaces
from runtime.version import __version__

NEEDED = ("torch", "numpy", "scipy", "ortools", "pydantic", "typer", "rich")
OPTIONAL = {
    "scikit-learn": "examples/digits.py needs it: pip install scikit-learn",
    "plotly": "`planner explain --html` needs it: pip install plotly",
}


def doctor(_: Doctor) -> None:
    """Print what is installed and works here."""
    findings = examine()
    if not printed_json(lambda: [vars(finding) for finding in findings]):
        for finding in findings:
            mark = "ok " if finding.ok else "NO " if finding.required else "-- "
            cure = f"  → {finding.cure}" if finding.cure and not finding.ok else ""
            typer.echo(f"{mark} {finding.what:<20} {finding.found}{cure}")
    if not all(finding.ok for finding in findings if finding.required):
        raise typer.Exit(3)


def examine() -> list[Finding]:
    """Look at everything worth knowing; slow checks (starting two ranks) last."""
    version = platform.python_version()
    findings = [
        Finding("system", True, platform.platform()),
        Finding("python", sys.version_info >= (3, 11), version, "use Python 3.11 or newer"),
        Finding("commplanner", True, __version__),
    ]
    findings += [_package(name) for name in NEEDED]
    findings += [_package(name, cure, required=False) for name, cure in OPTIONAL.items()]
    if not all(finding.ok for finding in findings if finding.what == "torch"):
        return findings + _emulation()
    from planner.jobs import torch_findings  # which needs torch

    findings += [torch_findings.device(), torch_findings.kernels(), *torch_findings.backends(), *_emulation()]
    if any(finding.what == "gloo" for finding in findings):
        findings.append(torch_findings.two_ranks())
    return findings


def _package(name: str, cure: str = "", *, required: bool = True) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", cure or f"pip install {name}", required)
    if name == "torch" and tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < (2, 11):
        return Finding(name, False, version, "pip install 'torch>=2.11'")
    return Finding(name, True, version, required=required)


def _emulation() -> list[Finding]:
    """Look at what `--emulate` needs."""
    tools = {tool: shutil.which(tool) for tool in ("ip", "tc")}
    found = [
        Finding(tool, path is not None, path or "not found", "--emulate needs it: apt-get install iproute2", False)
        for tool, path in tools.items()
    ]
    user_id = os.geteuid() if hasattr(os, "geteuid") else None  # Windows has none
    user = Finding("root", user_id == 0, f"user {user_id}", "--emulate needs it: sudo -E", required=False)
    try:
        Namespace.make().close()
    except NoNamespaces as error:
        return [*found, user, Finding("network namespaces", False, "cannot be made", str(error), required=False)]
    return [*found, user, Finding("network namespaces", True, "can be made: --emulate works", required=False)]
