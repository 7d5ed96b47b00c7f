"""The checks of the kernels' source can fail: each fault that is put into it on purpose is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_host import SMALL, HostBackend, needs_compiler, small_library
from kernel_mutants import MUTANTS, check, check_unpack, check_wire

pytestmark = needs_compiler
SHARES = 2
"""Processes that compile and run at once."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_mutant_is_noticed() -> None:
    script = Path(__file__).with_name("kernel_mutants.py")
    path = os.pathsep.join([str(script.parents[2]), *sys.path])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    commands = [[sys.executable, str(script), str(share), str(SHARES)] for share in range(SHARES)]
    running = [subprocess.Popen(one, env=environment, stdout=-1, stderr=-1, text=True) for one in commands]
    ended = [process.communicate(timeout=540) for process in running]
    assert [process.returncode for process in running] == [0] * SHARES, ended
    missed = [line for out, _ in ended for line in out.splitlines() if line]
    assert not missed, missed
    assert len(MUTANTS) > 15


def test_the_source_as_it_is_passes_the_same_check() -> None:
    assert SMALL.tile == 512
    check(HostBackend(small_library(), grid=4, resident=3))
    check_unpack(HostBackend(small_library(), grid=1))
    check_wire(HostBackend(small_library(), grid=4, resident=3))
