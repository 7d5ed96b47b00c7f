"""The source compiles for the architectures of data centres by NVRTC, which needs no device, and is kept in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.errors import EnvironmentFailure
from runtime.kernels import nvrtc
from runtime.kernels.source import KERNELS, PARTS, UNPACK, WIRE, Program, Shape

PROGRAMS = [Program(name="topk"), UNPACK, WIRE]
ELF = b"\x7fELF"
SHARED_BYTES = 48 * 1024
"""What a kernel may have without asking."""


@pytest.fixture(scope="module")
def compiler() -> nvrtc.Compiler:
    """Comes with the extra `dev`, and with CUDA builds of torch."""
    return nvrtc.compiler()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.long), 90, pytest.param(100, marks=pytest.mark.long)]
)
def test_compiles(compiler: nvrtc.Compiler, program: Program, capability: int) -> None:
    """To machine code, without warnings; each kernel fits into what a block may have."""
    code, log = compiler.compile(program, capability, "--ptxas-options=-v")
    assert code.startswith(ELF)
    assert "warning" not in log
    kernels = len(KERNELS[program.name])
    assert log.count("0 bytes spill stores, 0 bytes spill loads") == kernels, log
    used = [line for line in log.splitlines() if "registers" in line]
    assert len(used) == kernels, log
    for line in used:
        words = line.replace(",", "").split()
        assert int(words[words.index("registers") - 1]) * program.shape.threads <= 65536
        assert "smem" not in words or int(words[words.index("smem") - 2]) <= SHARED_BYTES


def test_a_device_that_is_newer_than_the_compiler_gets_code_that_its_driver_translates(
    compiler: nvrtc.Compiler,
) -> None:
    code, _ = compiler.compile(UNPACK, compiler.architectures[-1] + 1)
    assert b".visible .entry unpack_float32_float32" in code


def test_a_device_that_is_too_old_is_named(compiler: nvrtc.Compiler) -> None:
    with pytest.raises(EnvironmentFailure, match=r"knows compute capabilities from .* on, found 3"):
        compiler.compile(UNPACK, 30)


def test_what_does_not_compile_is_told(compiler: nvrtc.Compiler) -> None:
    with pytest.raises(EnvironmentFailure, match="topk does not compile with NVRTC"):
        compiler.compile(Program(name="topk", shape=Shape(vectors=5)), 90)


def test_compiled_code_is_kept_in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = nvrtc.machine_code(UNPACK, 90)
    (kept,) = nvrtc.cache_folder().iterdir()
    assert kept.read_bytes() == first
    kept.write_bytes(b"from the file")
    assert nvrtc.machine_code(UNPACK, 90) == b"from the file"
    other = Program(name="unpack", shape=Shape(threads=128))
    assert nvrtc.machine_code(other, 90) != b"from the file"
    assert len(list(nvrtc.cache_folder().iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert nvrtc.machine_code(UNPACK, 90).startswith(ELF)


def test_without_nvrtc_the_cure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["libnvrtc-that-is-not-there.so"]))
    nvrtc.compiler.cache_clear()
    try:
        with pytest.raises(
            EnvironmentFailure, match=r"NVRTC cannot be loaded \(.*not-there.*pip install nvidia-cuda-nvrtc"
        ):
            nvrtc.compiler()
    finally:
        nvrtc.compiler.cache_clear()


def test_without_a_device_the_reason_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    from runtime.kernels.cuda import cuda_backend, working

    with pytest.raises(EnvironmentFailure, match=r"kernels: (this torch is built without CUDA|no device)"):
        cuda_backend(0)
    assert working(0) is not None


def test_the_source_includes_nothing() -> None:
    for name in PARTS:
        assert "#include" not in Program(name=name).text
