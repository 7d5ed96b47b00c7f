"""Nodes that only train need torch, numpy and pydantic."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import light_node

import runtime

NAMES = ["2.bias", "2.weight", "0.bias", "0.weight"]


def test_a_plan_trains_where_nothing_else_is_installed(tmp_path: Path) -> None:
    document = {"schema": "planner.plan/1", "model": {"name": "light"}, "world": {"ranks": 2}}
    exact = {**document, "accuracy": "exact", "buckets": [{"gradients": NAMES[:2]}, {"gradients": NAMES[2:]}]}
    topk = {"name": "topk", "density": 0.25}
    sparse = {**document, "accuracy": "bounded", "buckets": [{"gradients": NAMES, "compressor": topk}]}
    sparse["buckets"][0] |= {"collective": "sparse", "algorithm": "flat"}
    paths = []
    for name, plan in (("exact", exact), ("sparse", sparse)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(plan))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {
        **os.environ, **world, "PYTHONPATH": str(Path(runtime.__file__).parents[1]), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, light_node.__file__, *map(str, paths)]
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[0].splitlines()[-1] == "trained"
    assert said[0].count("AccuracyCostWarning: accuracy: not measured on this job") == 1
    assert said[1] == "trained\n"
