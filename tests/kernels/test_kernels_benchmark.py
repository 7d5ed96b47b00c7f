"""The script for GPUs: its checks find what is wrong, here with the host as the device; without a GPU it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_host import HostBackend, needs_compiler, usual_library

from benchmarks.gpu_topk import checks
from benchmarks.gpu_topk.__main__ import main
from benchmarks.gpu_topk.checks import Checks, Scale
from benchmarks.gpu_topk.contestants import RoundsProgram, resnet50_like
from benchmarks.gpu_topk.inputs import FAMILIES
from benchmarks.gpu_topk.report import KERNEL, ROUNDS, SEGMENTS, TORCH, Row, judge, table, targets_table
from benchmarks.gpu_topk.timing import sets_of
from runtime.kernels import Shape, nvrtc
from runtime.kernels.backend import installed

ROOT = Path(__file__).parents[2]
SMALL = Scale(elements=(1, 4097), family_elements=4203, steps=6, repeats=2, shapes=(Shape(),))


@pytest.fixture
def few_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "FAMILIES", {name: FAMILIES[name] for name in ("normal", "few values", "nan")})


@needs_compiler
@pytest.mark.usefixtures("few_families")
def test_its_checks_hold_on_the_host() -> None:
    made = Checks(torch.device("cpu"), SMALL)
    with installed("cpu", HostBackend(usual_library(), grid=2)):
        made.all()
    assert made.failed == []
    assert made.made > 140


@pytest.mark.usefixtures("few_families")
def test_its_checks_notice_a_wrong_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ef_topk_", lambda *arguments, **options: None)
    made = Checks(torch.device("cpu"), SMALL)
    made.kinds_of_input()
    made.steady_state()
    assert len(made.failed) > 80


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_and_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "gpu.md"
    assert main(["--output", str(output)]) == 3
    assert "no kernels here: " in capsys.readouterr().err
    assert not output.exists()


def test_it_needs_nothing_but_torch() -> None:
    """What a machine with a GPU and torch has, and the standard library."""
    code = (
        "import sys, torch; before = set(sys.modules); import benchmarks.gpu_topk.__main__; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(new - set(sys.stdlib_module_names) - {'torch', 'numpy', 'runtime', 'benchmarks'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_published_rounds_compile() -> None:
    code, _ = nvrtc.compiler().compile(RoundsProgram(), 90)  # type: ignore[arg-type]
    assert code


def rows(time_us: float) -> list[Row]:
    elements = 1 << 24
    share = 12 * elements / time_us / 4e6
    return [
        Row(KERNEL, elements, time_us, time_us, 12 * elements, share),
        Row(TORCH, elements, 300.0, 300.0, 12 * elements, 0.1, 300.0 / time_us),
        Row(ROUNDS, elements, 700.0, 700.0, 12 * elements, 0.1, 700.0 / time_us),
        Row(SEGMENTS, 25_557_032, 100.0, 100.0, 12 * 25_557_032, 0.5, 0.8),
    ]


def test_targets_are_judged() -> None:
    good, bad = judge(rows(60.0)), judge(rows(90.0))
    assert [target.met for target in good] == [True, True, True, True]
    assert [target.met for target in bad] == [False, False, False, True]
    assert "**no**" in targets_table(bad)
    assert "| kernel, float32 | 16,777,216 | 60.0 | 60.0 | 12.0 | 84% |  |" in table(rows(60.0))


def test_buffers_do_not_fit_into_the_cache() -> None:
    assert sets_of(16 << 20) == 16
    assert sets_of(1 << 30) == 1


def test_segments_are_those_of_resnet50() -> None:
    assert (len(resnet50_like()), sum(resnet50_like())) == (161, 25_557_032)


def test_the_document_has_a_place_for_what_is_measured() -> None:
    text = (ROOT / "docs" / "results" / "gpu-topk.md").read_text(encoding="utf-8")
    assert text.count("<!-- measured: begin -->") == text.count("<!-- measured: end -->") == 1
