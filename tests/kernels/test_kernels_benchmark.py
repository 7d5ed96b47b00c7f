"""Checks and times for GPUs: they find what is wrong, here with the host as the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_host import HostBackend, needs_compiler, usual_library

from benchmarks.gpu import checks
from benchmarks.gpu.checks import SMALL, Checks
from benchmarks.gpu.contestants import RoundsProgram, resnet50_like
from benchmarks.gpu.selection import KERNEL, ROUNDS, SEGMENTS, TORCH, Row, judge, rows_table, targets_table
from benchmarks.gpu.timing import Times, sets_of
from runtime.kernels import nvrtc
from runtime.kernels.backend import installed

FEW = replace(SMALL, families=("normal", "few values", "nan"))


@needs_compiler
def test_its_checks_hold_on_the_host() -> None:
    made = Checks(torch.device("cpu"), FEW)
    with installed("cpu", HostBackend(usual_library(), grid=2)):
        made.all()
    assert made.failed == []
    assert made.made > 250


def test_its_checks_notice_a_wrong_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ef_topk_", lambda *arguments, **options: None)
    made = Checks(torch.device("cpu"), FEW)
    made.kinds_of_input()
    made.streams()
    made.large()
    assert len(made.failed) == made.made > 80


def test_its_checks_notice_a_wrong_format(monkeypatch: pytest.MonkeyPatch) -> None:
    results, calls = checks.wire_results, []

    def wrong(*arguments: Any) -> tuple[torch.Tensor, ...]:
        calls.append(arguments)
        first, *rest = results(*arguments)
        return (first ^ (len(calls) % 2), *rest)

    monkeypatch.setattr(checks, "wire_results", wrong)
    made = Checks(torch.device("cpu"), FEW)
    made.wire()
    assert len(made.failed) == made.made > 80


def test_the_published_rounds_compile() -> None:
    code, _ = nvrtc.compiler().compile(RoundsProgram(), 90)  # type: ignore[arg-type]
    assert code


def row(what: str, elements: int, time_us: float, share: float, ratio: float | None = None) -> Row:
    return Row(what, elements, Times(time_us, time_us - 1, time_us + 1, time_us + 2), 12.0, share, ratio)


def rows(time_us: float) -> list[Row]:
    elements = 1 << 24
    return [
        row(KERNEL, elements, time_us, 12 * elements / time_us / 4e6),
        row(TORCH, elements, 600.0, 0.1, 600.0 / time_us),
        row(ROUNDS, elements, 700.0, 0.1, 700.0 / time_us),
        row(SEGMENTS, 25_557_032, 100.0, 0.5, 1.2),
    ]


def test_targets_are_judged() -> None:
    good, bad = judge(rows(60.0)), judge(rows(90.0))
    assert [target.met for target in good] == [True, True, True, True]
    assert [target.met for target in bad] == [False, False, False, True]
    assert "**no**" in targets_table(bad)
    assert "| fused, one pass | 16,777,216 | 60.0 (59.0 to 61.0) | 62.0 | 12.0 | 84% |  |" in rows_table(rows(60.0))


def test_the_median_has_its_interval() -> None:
    times = Times.of([float(value) for value in range(100, 0, -1)])
    assert (times.median_us, times.p95_us) == (50.5, 95.0)
    assert times.low_us < 45.0 < 56.0 < times.high_us
    assert Times.of([3.0]) == Times(3.0, 3.0, 3.0, 3.0)


def test_buffers_do_not_fit_into_the_cache() -> None:
    device = torch.device("cuda")
    assert sets_of(16 << 20, device) == 16
    assert sets_of(1 << 30, device) == 1


def test_segments_are_those_of_resnet50() -> None:
    assert (len(resnet50_like()), sum(resnet50_like())) == (161, 25_557_032)
