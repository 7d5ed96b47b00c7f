"""Every command of every page runs, in the order of its page, in a folder with what the page takes for granted.

Options behind a command's own make it short. What is not run is named with its reason; its options are parsed in
`test_pages.py`, as those of all commands are.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from made_traces import Job, make_traces, write_trace
from pages import PAGES, ROOT, blocks, call, commands, run
from test_testbed import MISSING

from planner.cost import nccl
from planner.cost.nccl import Shape
from planner.documents.nccl import Nccl

SHORTER = {
    "profile": "--budget-s 5", "compare": "--steps 2 --rounds 2", "run": "--steps 2",
    "rehearse": "--hosts 2x1 --minutes 0.5",
}  # fmt: skip
"""By command of planner."""
SHORTER_LEARNING = "--learn 10 --seeds 2"
"""In place of what `compare --learn` is given: the last of an option counts."""
TOO_SHORT = "expected --minutes"
"""What a rehearsal says that came as far as timing steps on its hosts, and would need longer than it may take here."""
SHORTER_SCRIPT = "--steps 4"
NOT_RUN = {
    "make test": "it runs a part of what runs this test",
    "make check": "it is what runs this test",
    "make test-versions": "it runs a part of what runs this test, on versions that are to be installed",
    ".venv/bin/pytest tests/null/cost -q": "these tests run with this one",
    ".venv/bin/pytest tests/null -k merge -x -q": "these tests run with this one",
    ".venv/bin/pytest tests/procs/test_matrix.py -k tree": "these tests run with this one",
    "all_reduce_perf -b 8 -e 8G -f 2": "NVIDIA's program, on two nodes with GPUs; its logs are made up here",
    "sbatch examples/cluster/slurm.sh --checkpoint /shared/run.pt": "needs Slurm; test_cluster_examples.py runs it",
    "pip uninstall commplanner": "it would remove what runs this test",
    "rm -r ~/.cache/planner ~/.cache/commplanner": "the caches of whoever runs this test are not its own",
}
OWN_TEST = {"docs/tutorial.md": "test_pages.py runs it as it is written, and compares losses"}
SHORT = {"docs/howto/describe-cluster.md", "docs/howto/read-output.md"}
"""Pages for `make test` also: all others start ranks, or decide for long."""
BEFORE = {
    "docs/howto/checkpoints.md": [
        "torchrun --nproc-per-node 2 examples/existing_script.py --profile-to profile.json",
        "planner optimize profile.json -o plan.json",
    ],
}
"""Commands that a page takes for granted, where those of `prepared` are not it."""

SMALL_JOB = """
import torch
from planner import TrainingJob


def job():
    return TrainingJob(
        model=torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda step, rank: torch.full((4, 64), float(step + rank)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )
"""
CLUSTER = """
{"schema": "planner.cluster/1", "nodes": 2, "inter": {"bandwidth": "10gbit", "latency": "20us"}}
"""


def text_of(words: Sequence[str]) -> str:
    """A command as it is written, without where its output goes."""
    return " ".join(words[: words.index(">")] if ">" in words else words)


def pages_with_commands() -> list[ParameterSet]:
    names = [str(page.relative_to(ROOT)) for page in PAGES if any(text_of(w) not in NOT_RUN for w in commands(page))]
    return [
        pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in names if name not in OWN_TEST
    ]


def log_text(nodes: int) -> str:
    """What nccl-tests would print on so many nodes of 8 H100."""
    sizes = [2.0**power for power in range(3, 34)]
    times = nccl.times_us("all_reduce", Shape(Nccl(gpu="h100", nics_per_node=8, nic="400gbit"), nodes, 8), sizes)
    bus = 2.0 * (8 * nodes - 1) / (8 * nodes)
    rows = [
        f"{size:.0f} {size / 4:.0f} float sum -1 {time:.2f} {size / time / 1e3:.2f} {bus * size / time / 1e3:.2f} 0"
        for size, time in zip(sizes, times.tolist(), strict=True)
    ]
    return "\n".join(["# size count type redop root time algbw busbw #wrong", *rows, ""])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small job, its profile and plan, a cluster, logs, and traces."""
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "job.py").write_text(SMALL_JOB, encoding="utf-8")
    with (folder / "examples" / "digits.py").open("a", encoding="utf-8") as digits:
        digits.write(SMALL_JOB)  # its `job` hides the first one
    (folder / "cluster.json").write_text(CLUSTER, encoding="utf-8")
    for name, nodes in (("a.log", 2), ("b.log", 4)):
        (folder / name).write_text(log_text(nodes), encoding="utf-8")
    (folder / "traces").mkdir()
    for rank, document in enumerate(make_traces(Job())):
        write_trace(folder / "traces" / f"rank{rank}.json.gz", document)
    run(shlex.split("planner profile job.py:job --ranks 2 --for bounded --budget-s 5 -o profile.json"), folder)
    run(shlex.split("planner optimize profile.json -o plan.json"), folder)
    return folder


def shorter(words: Sequence[str]) -> list[str]:
    words = [*words[1:]] if words[0] == "sudo" else [*words]  # tests that need root run as root
    if words[0] == "planner":
        added = SHORTER_LEARNING if "--learn" in words else SHORTER.get(words[1], "")
        return [*words, *added.split()]
    return [*words, *SHORTER_SCRIPT.split()]


def test_what_is_not_run_is_on_a_page() -> None:
    assert set(NOT_RUN) <= {text_of(words) for page in PAGES for words in commands(page)}
    assert {*OWN_TEST, *BEFORE, *SHORT} <= {str(page.relative_to(ROOT)) for page in PAGES}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", pages_with_commands())
def test_commands_run(page: str, prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    for name, _, _, text in blocks(ROOT / page):
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    for command in BEFORE.get(page, ()):
        run(shlex.split(command), tmp_path)
    impossible = []
    for words in commands(ROOT / page):
        if text_of(words) in NOT_RUN:
            continue
        if words[0] == "sudo" and MISSING:
            impossible.append(text_of(words))
            continue
        done = call(shorter(words), tmp_path)
        assert done.returncode == 0 or TOO_SHORT in done.stderr, f"{text_of(words)}:\n{done.stdout}\n{done.stderr}"
    if impossible:
        pytest.skip(f"no emulated cluster here ({MISSING}), so not run: {', '.join(impossible)}")
