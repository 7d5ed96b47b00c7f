"""Logs of nccl-tests, as versions and launchers print them, and as they go wrong."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from builders import run_json
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.collectives import h100_efa_all_reduce
from planner.cli.app import main
from planner.documents.nccl_tests import parse_log
from planner.documents.profile import load_cluster
from runtime.errors import InputError

SAMPLES = ((8.0, 25.0), (1048576.0, 120.0), (67108864.0, 700.0), (1073741824.0, 8200.0))
HEAD = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{devices}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               ({unit})  (GB/s)  (GB/s)            ({unit})  (GB/s)  (GB/s)
"""


def log_text(
    samples: tuple[tuple[float, float], ...] = SAMPLES, ranks: int = 16, share: float | None = None, unit: str = "us",
    tag: str = "", wrong: str = "0", root: bool = True, gpu: str = "NVIDIA H100 80GB HBM3",
) -> str:  # fmt: skip
    """A log as nccl-tests prints it; in place everything takes 10 % longer."""
    share = 2.0 * (ranks - 1) / ranks if share is None else share
    scale = {"us": 1.0, "ms": 1e-3, "ns": 1e3}[unit]
    listed = "\n".join(
        f"#  Rank {rank:2} Group  0 Pid {100 + rank} on host{rank // 8} device {rank % 8} [0x{rank:02x}] {gpu}"
        for rank in range(ranks)
    )
    lines = []
    for size, time in samples:
        rate, slow = size / time / 1e3, size / time / 1.1e3
        lines.append(
            f"{tag}{int(size):12} {int(size) // 4:12}     float     sum {'     -1' if root else ''} "
            f"{time * scale:10.6g} {rate:7.2f} {rate * share:7.2f} {wrong:>6} "
            f"{1.1 * time * scale:10.6g} {slow:7.2f} {slow * share:7.2f} {wrong:>6}"
        )
    head = HEAD.format(devices=listed, unit=unit)
    return head + "\n".join(lines) + "\n# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 100.0\n"


def test_a_log() -> None:
    [log] = parse_log(log_text(), 16, "a.log")
    assert (log.collective, log.samples, log.gpu, log.notes) == ("all_reduce", SAMPLES, "h100", ())
    [in_place] = parse_log(log_text(), 16, "a.log", in_place=True)
    assert in_place.samples[2][1] == pytest.approx(770.0)


@pytest.mark.parametrize(
    "text",
    [
        log_text(unit="ms"),
        log_text(unit="ns"),
        log_text(tag="[0] "),
        log_text(tag="[1,0]<stdout>:"),
        log_text(wrong="N/A"),
        log_text(wrong="2e-07"),
        log_text().replace("(us)", "(ms)"),
        "\n".join(line for line in log_text(root=False).splitlines() if not line.startswith("#")),
        log_text() + "\n".join(line for line in log_text().splitlines() if not line.startswith("#")),
        "mpirun -np 16 ./build/all_reduce_perf -b 8 -e 1G\n" + log_text(),
        log_text().replace("\n", "\r\n"),
    ],
    ids=["ms", "ns", "tag", "rank-tag", "unchecked", "old-check", "wrong-head", "bare", "twice", "command", "crlf"],
)
def test_the_same_numbers_in_other_clothes(text: str) -> None:
    [log] = parse_log(text, 16, "a.log")
    assert [size for size, _ in log.samples] == [size for size, _ in SAMPLES]
    assert [time for _, time in log.samples] == pytest.approx([time for _, time in SAMPLES], rel=1e-4)


def test_collectives_are_told_by_name_and_by_bandwidths() -> None:
    gathers = log_text(share=15 / 16)
    assert parse_log("./all_gather_perf -b 8\n" + gathers, 16, "g.log")[0].collective == "all_gather"
    started = "# Collective test starting: reduce_scatter_perf\n" + gathers
    assert parse_log(started, 16, "g.log")[0].collective == "reduce_scatter"
    [unnamed] = parse_log(gathers, 16, "g.log")
    assert unnamed.collective == "reduce_scatter"
    assert "no line names it" in unnamed.notes[0]
    both = "./all_reduce_perf\n" + log_text() + "./all_gather_perf\n" + gathers
    assert [log.collective for log in parse_log(both, 16, "b.log")] == ["all_reduce", "all_gather"]
    with pytest.raises(InputError, match="found all_gather with the bus bandwidths of another collective"):
        parse_log("./all_gather_perf\n" + log_text(), 16, "b.log")
    with pytest.raises(InputError, match="found alltoall; expected all_reduce, reduce_scatter or all_gather"):
        parse_log("./alltoall_perf\n" + gathers, 16, "b.log")


def test_warm_up_and_wrong_rows_are_left_out_and_said() -> None:
    slow_first = ((8.0, 900.0), *((size, 25.0) for size in (16.0, 32.0)), *SAMPLES[1:])
    [log] = parse_log(log_text(slow_first), 16, "a.log")
    assert log.samples[0] == (16.0, 25.0)
    assert "left out the first row of all_reduce, 900 µs, as a warm-up" in log.notes[0]
    lines = log_text().splitlines()
    row = next(at for at, line in enumerate(lines) if line.split()[:1] == ["67108864"])
    lines[row] = lines[row].replace("      0 ", "      7 ")
    [log] = parse_log("\n".join(lines), 16, "a.log")
    assert 67108864.0 not in dict(log.samples)
    assert log.notes == ("a.log: left out 1 of 4 rows of all_reduce with wrong results",)


@pytest.mark.parametrize("number", ["nan", "inf", "-5"])
def test_rows_without_numbers_are_left_out_and_said(number: str) -> None:
    [log] = parse_log(log_text().replace(" 8200 ", f" {number} "), 16, "a.log")
    assert log.samples == SAMPLES[:-1]
    assert log.notes == ("a.log: left out 1 of 4 rows of all_reduce whose times are no numbers",)


def test_numbers_of_any_length() -> None:
    long = "9" * 5000
    assert parse_log(log_text().replace("Rank  0", f"Rank {long}"), 16, "a.log")[0].samples == SAMPLES
    with pytest.raises(InputError, match="no row of all_reduce with right results"):
        parse_log(log_text(wrong=long), 16, "a.log")
    [log] = parse_log(log_text(SAMPLES[1:]) + f"{long} 2 float sum -1 25 0.00 0.00 0\n", 16, "a.log")
    assert log.samples == SAMPLES[1:]
    assert "disagree" in log.notes[0]


@pytest.mark.parametrize("time", ["1e300", "1e-300", "0.001"])
def test_impossible_times(time: str) -> None:
    rows = "\n".join(f"{2**power} 2 float sum -1 {time} 0.00 0.00 0" for power in range(3, 12))
    with pytest.raises(InputError, match="right results and possible times"):
        parse_log(rows, 16, "a.log")


def test_times_in_place_that_are_not_there() -> None:
    single = "\n".join(f"{int(size)} 2 float sum -1 {time} 0.00 0.00 0" for size, time in SAMPLES)
    [log] = parse_log(single, 16, "a.log", in_place=True)
    assert log.samples == SAMPLES
    assert "out of place" in log.notes[0]


@pytest.mark.parametrize(("name", "gpu"), [("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA RTX A1000", None)])
def test_accelerators_are_told_by_whole_words(name: str, gpu: str | None) -> None:
    assert parse_log(log_text(gpu=name), 16, "a.log")[0].gpu == gpu


def test_a_failure_in_a_log_is_said_with_what_it_measured_before() -> None:
    text = log_text() + "host0: Test NCCL failure common.cu:958 'unhandled system error'\n"
    [log] = parse_log(text, 16, "a.log")
    assert log.samples == SAMPLES
    assert "unhandled system error" in log.notes[0]


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        ("", 16, "found no row of results; expected the output of nccl-tests"),
        ("Test NCCL failure common.cu:958\n", 16, "it says: Test NCCL failure common.cu:958"),
        (log_text(), 32, "found a log of 16 ranks, expected 32"),
        (log_text().replace("Rank", "rank"), 32, "found bus bandwidths of 1.8750 times the algorithm's"),
        (log_text(wrong="3"), 16, "found no row of all_reduce with right results"),
        (log_text().replace("8200 ", "820000 ").replace("700 ", "70000 "), 16, "do not fit together"),
    ],
    ids=["empty", "failed", "listed", "ranks", "all-wrong", "units"],
)
def test_logs_that_cannot_be_used(text: str, ranks: int, said: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_log(text, ranks, "a.log")
    assert str(raised.value).startswith("a.log: ")
    assert said in str(raised.value)


@given(st.text(max_size=400), st.integers(2, 64))
def test_any_text_is_read_or_refused(text: str, ranks: int) -> None:
    for whole in (text, log_text() + text):
        with suppress(InputError):
            assert parse_log(whole, ranks, "a.log")


def test_fit_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two logs of AWS p5, by their rates alone: 8 nodes come out within the targets."""
    monkeypatch.chdir(tmp_path)
    for nodes, name in ((2, "a.log"), (4, "b.log")):
        rows = tuple(h100_efa_all_reduce(nodes))
        Path(name).write_text(log_text(rows, 8 * nodes, gpu=""), encoding="utf-8")
    document = run_json(capsys, "cluster", "fit", "2x8:a.log", "4x8:b.log", "-o", "fitted.json")
    assert document == json.loads(Path("fitted.json").read_text(encoding="utf-8"))
    cluster = load_cluster("fitted.json")
    assert cluster.nccl is not None
    assert (cluster.nccl.gpu, cluster.nccl.nic, cluster.nccl.tuner) == ("h100", "400gbit", "aws-ofi-p5")
    assert any("say --gpu" in note for note in cluster.notes or ())
    from planner.cost.model import communication_cost

    cost = communication_cost(cluster, 64)
    assert cost.extrapolated
    assert "fitted on 16, 32 ranks" in cost.source
    errors = sorted(abs(cost.all_reduce.at(size) / time - 1.0) for size, time in h100_efa_all_reduce(8))
    assert errors[len(errors) // 2] <= 0.08
    assert errors[-1] <= 0.25
    [record] = run_json(
        capsys, "simulate", "resnet50", "--cluster", "fitted.json", "--ranks", "64", "--strategy", "ddp"
    )
    low, high = record["interval_us"]
    assert low <= record["iteration_us"] <= high


def test_a_fit_of_one_node_says_what_several_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.log").write_text(log_text(ranks=8), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["cluster", "fit", "1x8:a.log", "--network", "efa"])
    assert "--network: found efa, but no log of several nodes" in capsys.readouterr().err
    with suppress(SystemExit):
        main(["cluster", "fit", "1x8:a.log"])
    assert "--ranks" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["simulate", "resnet50", "--cluster", "cluster.json", "--ranks", "64"])
    assert "$.nccl.nic: missing with 8 nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.log"], "expected NODESxGPUS:FILE"),
        (["0x8:a.log"], "expected NODESxGPUS:FILE"),
        (["1x1:a.log"], "found one rank"),
        (["2x8:missing.log"], "missing.log: no such file"),
        (["4x8:a.log"], "found a log of 16 ranks, expected 32"),
        (["4x4:a.log"], "a.log: found 8 GPUs on host0, expected at most 4"),
        (["1x16:a.log"], "--gpu: found 16 ranks a node, expected at most 8"),
        (["2x8:a.log", "--gpu", "h7"], "--gpu: found 'h7'"),
        (["2x8:a.log", "--gpu", "a100"], "--gpu: found a100, but a.log was made on h100"),
        (["2x8:a.log", "--machine", "dgx-a100"], "--machine: found a100, but a.log was made on h100"),
        (["2x8:a.log", "--nic", "lots"], "--nic: found"),
        (["2x8:a.log", "--network", "pigeon"], "--network: found 'pigeon'"),
        (["2x8:a.log", "--machine", "k80-10gbe"], '--machine: found k80-10gbe without "nccl"'),
        (["2x8:a.log", "-o", "a.log"], "found the input file"),
    ],
)
def test_fits_that_are_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.log").write_text(log_text(), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "fit", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
