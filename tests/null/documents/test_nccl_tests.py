"""Logs of nccl-tests, as versions and launchers print them, and as they go wrong."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from builders import run, run_json
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.collectives import h100_efa_all_reduce
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
    wrong: str = "0", root: bool = True, gpu: str = "NVIDIA H100 80GB HBM3",
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
            f"{int(size):12} {int(size) // 4:12}     float     sum {'     -1' if root else ''} "
            f"{time * scale:10.6g} {rate:7.2f} {rate * share:7.2f} {wrong:>6} "
            f"{1.1 * time * scale:10.6g} {slow:7.2f} {slow * share:7.2f} {wrong:>6}"
        )
    head = HEAD.format(devices=listed, unit=unit).replace("" if root else "    root", "")
    return head + "\n".join(lines) + "\n# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 100.0\n"


def before_lines(text: str, before: str, rest: str = "") -> str:
    """A log as launchers pass it on; `%d` is the number of a line, which grows in width."""
    return "\n".join(f"{before.replace('%d', str(at))}{line}{rest}" for at, line in enumerate(text.splitlines(), 95))


def records(world: int = 16, **more: object) -> list[dict[str, object]]:
    """What rccl-tests -Z json writes: out of place and in place, which takes 10 % longer."""
    return [
        {
            "numCycle": 0, "name": "AllReduce", "nodes": 1, "ranks": world, "ranksPerNode": world, "gpusPerRank": 1,
            "size": int(size), "type": "float", "redop": "sum", "inPlace": in_place, "time": time * longer,
            "algBw": size / time / longer / 1e3, "busBw": size / time / longer / 1e3 * 2 * (world - 1) / world,
            "wrong": "0", **more,
        }
        for size, time in SAMPLES
        for in_place, longer in ((0, 1.0), (1, 1.1))
    ]  # fmt: skip


def as_csv(written: list[dict[str, object]]) -> str:
    """The same as rccl-tests -Z csv writes it, with its other names of columns."""
    head = "numCycle,collective,nodes,ranks,ranksPerNode,gpusPerRank,size,type,redop,inplace,time,algbw,busbw,#wrong\n"
    return head + "".join(
        ",".join(f'"{value}"' if isinstance(value, str) else str(value) for value in one.values()) + "\n"
        for one in written
    )


def as_object(ranks: int = 16, time: str = "time", device: str = "AMD Instinct MI300X") -> str:
    """What nccl-tests -J writes."""
    half = [
        {time: one["time"], "alg_bw": one["algBw"], "bus_bw": one["busBw"], "nwrong": 0.0} for one in records(ranks)
    ]
    results = [
        {"size": int(size), "count": 2, "type": "float", "redop": "sum", "root": "    -1",
         "out_of_place": half[2 * at], "in_place": half[2 * at + 1], "actual_iterations": 20}
        for at, (size, _) in enumerate(SAMPLES)
    ]  # fmt: skip
    devices = [
        {"rank": rank, "group": 0, "pid": 1, "hostname": f"host{rank // 8}", "device": rank % 8,
         "device_hex": f"0000:{rank % 8:02x}:00", "device_info": device}
        for rank in range(ranks)
    ]  # fmt: skip
    document = {
        "version": 3, "args": ["./build/all_reduce_perf", "-b", "8"], "env": [], "nccl_version": 22807,
        "config": {"nthreads": 1, "ngpus": 1, "devices": devices}, "results": results, "errors": [""],
    }  # fmt: skip
    return json.dumps(document)


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
        before_lines(log_text(), "[0] "),
        before_lines(log_text(), "0: "),
        before_lines(log_text(), " 0: "),
        before_lines(log_text(), "[1,0]<stdout>:"),
        before_lines(log_text(), "[prterun-host7-4711@1,0]<stdout>: "),
        before_lines(log_text(), "2026-02-03T10:20:30.%dZ "),
        before_lines(log_text(), "[2026-02-03 10:20:30,%d] 0: "),
        before_lines(log_text(), "Tue Feb  3 10:20:%d 2026[1,0]<stdout>:"),
        before_lines(log_text(), "Feb %d 10:20:30 host7 run.sh[%d]: "),
        before_lines(log_text(), "\x1b[36m0: \x1b[0m", "\x1b[K"),
        before_lines("\n".join(line for line in log_text().splitlines() if not line.startswith("#")), "0: "),
        log_text(root=False),
        as_object(),
        json.dumps(records()),
        as_csv(records()),
        json.dumps(records(16, ranks=2, gpusPerRank=8)),
        log_text(wrong="N/A"),
        log_text(wrong="2e-07"),
        log_text().replace("(us)", "(ms)"),
        "\n".join(line for line in log_text(root=False).splitlines() if not line.startswith("#")),
        log_text() + "\n".join(line for line in log_text().splitlines() if not line.startswith("#")),
        "mpirun -np 16 ./build/all_reduce_perf -b 8 -e 1G\n" + log_text(),
        log_text().replace("\n", "\r\n"),
    ],
    ids=[
        "ms",
        "ns",
        "hydra",
        "srun",
        "srun-padded",
        "mpirun",
        "prterun",
        "kubectl",
        "stamp-and-label",
        "timestamp-output",
        "journal",
        "colours",
        "bare-label",
        "rootless",
        "object",
        "records",
        "csv",
        "threads",
        "unchecked",
        "old-check",
        "wrong-head",
        "bare",
        "twice",
        "command",
        "crlf",
    ],
)
def test_the_same_numbers_in_other_clothes(text: str) -> None:
    [log] = parse_log(text, 16, "a.log")
    assert [size for size, _ in log.samples] == [size for size, _ in SAMPLES]
    assert [time for _, time in log.samples] == pytest.approx([time for _, time in SAMPLES], rel=1e-4)


@pytest.mark.parametrize(
    ("head", "more"),
    [("timestamp", "2026-02-03 10:20:30"), ("algo proto nchannels", "RING LL 24"), ("i_min i_p99", "1 9")],
)
def test_columns_behind_the_known_ones(head: str, more: str) -> None:
    rows = "\n".join(
        f"{int(size)} 2 float sum -1 {time} {size / time / 1e3:.2f} {size / time / 1e3 * 1.875:.2f} 0 {more}"
        for size, time in SAMPLES
    )
    [log] = parse_log(f"# size count type redop root time algbw busbw #wrong {head}\n{rows}\n", 16, "a.log")
    assert log.samples == SAMPLES


[ROW] = [line for line in log_text().splitlines() if line.split()[:1] == ["1048576"]]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (ROW, "0: " + ROW, "line 25: found '0:' before the row, expected '' as in line 22"),
        (ROW, "7 " + ROW, "line 25: found '7' before the row"),
        (ROW, ROW.replace("sum", "   "), "line 25: found 12 columns, expected the 13 of line 22 (size count type"),
        (ROW, ROW + " 0", "line 25: found 14 columns, expected the 13"),
        (" time ", " cputime ", "line 22: found cputime among the columns, expected the time of the collective"),
    ],
)
def test_columns_that_do_not_fit(old: str, new: str, said: str) -> None:
    assert old in log_text()
    with pytest.raises(InputError) as raised:
        parse_log(log_text().replace(old, new), 16, "a.log")
    assert said in str(raised.value)


def test_a_row_in_which_the_log_ends() -> None:
    text = log_text()
    [log] = parse_log(text[: text.index("8200") + 2], 16, "a.log")
    assert log.samples == SAMPLES[:-1]
    assert log.notes == ("a.log: left out its last line, which ends before its last column",)


def test_a_bus_bandwidth_of_nothing() -> None:
    """What a column less does to the numbers behind it."""
    rows = "\n".join(f"{int(size)} 2 float sum -1 {time} {size / time / 1e3} 0 0" for size, time in SAMPLES)
    with pytest.raises(InputError, match=r"found bus bandwidths of 0\.0000 times the algorithm's"):
        parse_log(rows, 16, "a.log")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (as_object()[:900], "found JSON that cannot be read"),
        ("{}", 'found JSON without "results"'),
        (json.dumps([{"size": 8}]), "record 1: found no time, algbw, busbw"),
        (as_csv(records()).replace(',"sum"', ""), "columns, expected the 14 of its head"),
        (as_csv(records()).replace("AllReduce", "AlltoAll"), "found AlltoAll; expected all_reduce"),
        (as_object(8), "found a log of 8 ranks, expected 16"),
        (json.dumps(records(16, gpusPerRank=2)), "found a log of 32 ranks, expected 16"),
        (as_object(time="cpu_time"), "found cpu_time, expected the time of the collective"),
        ("[]", "found no row of results"),
    ],
)
def test_files_that_cannot_be_used(text: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_log(text, 16, "a.json")
    assert said in str(raised.value)


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
    [log] = parse_log(log_text(SAMPLES[1:]) + f"{long} 2 float sum -1 25 0.00 0.00 0 25 0.00 0.00 0\n", 16, "a.log")
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


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA RTX A1000", None), ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"), ("AMD Instinct MI300X OAM", "mi300x"), ("AMD Instinct MI250X", None),
    ],
)  # fmt: skip
def test_accelerators_are_told_by_whole_words(name: str, gpu: str | None) -> None:
    for text in (log_text(gpu=name), as_object(device=name)):
        [log] = parse_log(text, 16, "a.log")
        assert (log.gpu, log.device) == (gpu, name)


def test_a_failure_in_a_log_is_said_with_what_it_measured_before() -> None:
    text = log_text() + "host0: Test NCCL failure common.cu:958 'unhandled system error'\n"
    [log] = parse_log(text, 16, "a.log")
    assert log.samples == SAMPLES
    assert "unhandled system error" in log.notes[0]


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        ("", 16, "found no row of results in an empty file; expected the output of nccl-tests"),
        ("hello\n", 16, "found no row of results in a text that begins with 'hello'"),
        (HEAD, 16, "under the head of its table: the run ended before its first result"),
        ("Test NCCL failure common.cu:958\n", 16, "it says: Test NCCL failure common.cu:958"),
        (log_text(), 32, "found a log of 16 ranks, expected 32"),
        (log_text().replace("Rank", "rank"), 32, "found bus bandwidths of 1.8750 times the algorithm's"),
        (log_text(wrong="3"), 16, "found no row of all_reduce with right results"),
        (log_text().replace("8200 ", "820000 ").replace("700 ", "70000 "), 16, "do not fit together"),
    ],
    ids=["empty", "text", "head", "failed", "listed", "ranks", "all-wrong", "units"],
)
def test_logs_that_cannot_be_used(text: str, ranks: int, said: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_log(text, ranks, "a.log")
    assert str(raised.value).startswith("a.log: ")
    assert said in str(raised.value)


@given(st.text(max_size=400), st.integers(2, 64))
def test_any_text_is_read_or_refused(text: str, ranks: int) -> None:
    for whole in (text, log_text() + text, as_csv(records()) + text):
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
    run("cluster", "fit", "1x8:a.log", "--network", "efa", code=2)
    assert "--network: found efa, but no log of several nodes" in capsys.readouterr().err
    run("cluster", "fit", "1x8:a.log")
    assert "--ranks" not in capsys.readouterr().out
    run("simulate", "resnet50", "--cluster", "cluster.json", "--ranks", "64", code=2)
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
    run("cluster", "fit", *arguments, code=2)
    assert said in capsys.readouterr().err
