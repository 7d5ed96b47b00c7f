"""How the test set-up gets a browser, on made-up machines: what is on PATH is all that the script can find."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("install_chromium.sh")

TOOLS = ("sh", "mktemp", "rm", "tail", "timeout", "cat", "chmod")

CURE = "install it (Debian: apt-get install chromium), or set CHROMIUM to the path of one"


class Machine:
    """A folder that is the whole PATH."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.calls = folder / "bin", folder / "calls"
        self.bin.mkdir()
        self.calls.touch()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        self.command("id", "echo 0")

    def command(self, name: str, script: str) -> Path:
        """Puts a program there."""
        path = self.bin / name
        path.write_text(f"#!{shutil.which('sh')}\n{script}\n")
        path.chmod(0o755)
        return path

    def apt_get(self, install: str, update: str = "exit 0") -> None:
        """apt-get and dpkg that note their calls; `install` and `update` say what these two do."""
        note = f'echo "${{0##*/}} $*" >> {self.calls}'
        self.command("apt-get", f"{note}\ncase $* in *update*) {update};; esac\n{install}")
        self.command("dpkg", note)

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the script here."""
        return subprocess.run(
            [self.bin / "sh", SCRIPT],
            env={"PATH": str(self.bin), **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )

    @property
    def called(self) -> list[str]:
        """Programs and what was asked of them, without options."""
        lines = self.calls.read_text().splitlines()
        options = ("-o", "-q", "-y", "-a")
        return [" ".join(w for w in line.split() if "::" not in w and w not in options) for line in lines]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def creates(machine: Machine) -> str:
    """An installation that leaves a browser behind."""
    return f"echo '#!/bin/sh' > {machine.bin}/chromium && chmod +x {machine.bin}/chromium"


INSTALL = "apt-get install --no-install-recommends chromium"


@pytest.mark.parametrize("update", ["exit 0", "exit 100"])
def test_root_gets_one_once(machine: Machine, update: str) -> None:
    """Also where one of several package sources is broken; the second run finds what the first installed."""
    machine.apt_get(creates(machine), update)
    assert machine.run().stderr == ""
    assert machine.called == ["apt-get update", INSTALL]
    assert machine.run().stdout == ""
    assert machine.called == ["apt-get update", INSTALL]


def test_one_that_is_there_is_taken(machine: Machine, tmp_path: Path) -> None:
    machine.apt_get("exit 1")
    elsewhere = Path(shutil.move(machine.command("browser", "exit 0"), tmp_path / "browser"))
    assert machine.run(CHROMIUM=str(elsewhere)).stderr == ""
    machine.command("google-chrome", "exit 0")
    assert machine.run().stderr == ""
    assert machine.called == []


def test_an_installation_that_was_cut_off_is_put_in_order(machine: Machine, tmp_path: Path) -> None:
    once = tmp_path / "once"
    machine.apt_get(f"[ -e {once} ] || {{ echo > {once}; exit 100; }}\n{creates(machine)}")
    assert machine.run().stderr == ""
    assert machine.called == ["apt-get update", INSTALL, "dpkg --configure", INSTALL]


def test_what_went_wrong_is_said_with_the_cure(machine: Machine) -> None:
    """And the script ends well, so that the other tests run."""
    machine.apt_get("echo 'E: no such package'; exit 100")
    said = machine.run().stderr
    assert "E: no such package" in said
    assert f"apt-get could not install one; tests/browser will fail: {CURE}" in said


def test_nobody_elses_system_is_changed(machine: Machine) -> None:
    machine.apt_get("exit 0")
    machine.command("id", "echo 1000")
    assert f"only root may install one; tests/browser will fail: {CURE}" in machine.run().stderr
    assert machine.called == []


def test_no_package_manager(machine: Machine) -> None:
    assert f"there is no apt-get to install one with; tests/browser will fail: {CURE}" in machine.run().stderr
