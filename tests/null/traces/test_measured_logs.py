"""`planner cluster fit` from NCCL Inspector's JSON lines and from imported traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_traces import Job, make_traces, write_trace

from planner.decide.cluster_fit import Stated, fit_cluster
from planner.traces.measured_logs import measured_logs
from runtime.errors import InputError


def line(rank: int, number: int, size: int, time_us: float, collective: str = "AllReduce", ranks: int = 8) -> str:
    """Return what NCCL Inspector writes of one call on one rank."""
    parts = 1 if collective == "AllReduce" else ranks
    return json.dumps(
        {
            "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": ranks, "nnodes": 1},
            "metadata": {"inspector_output_format_version": "v4.0", "hostname": "a", "pid": 1},
            "coll_perf": {
                "coll": collective, "coll_sn": number, "coll_msg_size_bytes": size, "coll_exec_time_us": time_us,
                "coll_algobw_gbs": parts * size / time_us / 1e3,
            },
        }
    )  # fmt: skip


def inspected(folder: Path, collective: str = "AllReduce") -> Path:
    """Write a directory in which rank 1 waits for rank 0."""
    for rank in range(2):
        lines = [
            line(rank, 10 * power + turn, 2**power, 30.0 + 2**power / 2e5 + 500.0 * rank + turn, collective)
            for power in range(12, 28)
            for turn in range(3)
        ]
        (folder / f"{rank}.log").write_text("\n".join(lines) + "\n")
    return folder


def test_the_last_rank_counts(tmp_path: Path) -> None:
    (log,) = measured_logs(str(inspected(tmp_path)))
    assert (log.nodes, log.per_node) == (1, 8)
    assert log.found is not None
    assert [one.collective for one in log.found] == ["all_reduce"]
    assert dict(log.found[0].samples)[2.0**20] == pytest.approx(31.0 + 2**20 / 2e5)


def test_parts_are_made_whole(tmp_path: Path) -> None:
    (log,) = measured_logs(str(inspected(tmp_path, "ReduceScatter")))
    assert log.found is not None
    assert log.found[0].samples[0][0] == 8 * 2.0**12


def test_a_cluster_is_fitted(tmp_path: Path) -> None:
    fitted = fit_cluster(measured_logs(str(inspected(tmp_path))), stated=Stated(gpu="a100"))
    assert (fitted.cluster.nodes, fitted.cluster.ranks_per_node, fitted.cluster.library) == (1, 8, "nccl")


def test_traces_are_logs(tmp_path: Path) -> None:
    job = Job(world=8, late_us=())
    (log,) = measured_logs(write_trace(tmp_path / "t.json", make_traces(job)[0]))
    assert (log.nodes, log.per_node) == (1, 8)
    assert log.found is not None
    assert log.found[0].gpu == "a100"
    assert len(log.found[0].samples) == 3


def test_files_without_collectives_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(line(0, 1, 100, 5.0, ranks=1) + "\n")
    with pytest.raises(InputError, match="found no collective of 2 sizes on several ranks"):
        measured_logs(str(tmp_path))
    (tmp_path / "a.log").write_text(line(0, 1, 100, 5.0) + "\n{broken\n" + line(0, 2, 100, 5.0) + "\n")
    with pytest.raises(InputError, match=r"a.log: line 2: found no JSON object"):
        measured_logs(str(tmp_path))
