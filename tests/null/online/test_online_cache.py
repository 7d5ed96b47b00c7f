"""What runs remember: read strictly, written whole, bounded, and never a reason to stop."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import usual_document

from planner import optimize
from planner.documents.profile import parse_profile
from planner.online import cache as cache_module
from planner.online.cache import Cache, Key, Remembered, cache_folder
from runtime.errors import InputError
from runtime.plan import ModelReference

PRINT = "sha256:" + "a" * 64
KEY = Key(model=PRINT, ranks=4, nodes=4, backend="gloo", device="cpu", cores=2, torch="2.13.0", planner="0.1.0",
          optimizer="torch.optim.adamw.AdamW", accuracy="exact")  # fmt: skip


def remembered(key: Key = KEY) -> Remembered:
    profile = parse_profile(usual_document())
    plan = replace(optimize(profile), model=ModelReference(name="test", fingerprint=key.model))
    return Remembered(key=key, plan=plan, profile=profile, step_us=1234.5, story=("step 3: it was fine",))


def on_ranks(ranks: int, **changes: Any) -> Remembered:
    """What a run on another number of ranks left; on a node each, unless it is said."""
    kept = remembered(replace(KEY, **{"ranks": ranks, "nodes": ranks, **changes}))
    return replace(kept, plan=replace(kept.plan, world=replace(kept.plan.world, ranks=ranks, nodes=kept.key.nodes)))


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "made" / "here")
    assert cache.read(KEY) is None
    path = cache.write(remembered())
    assert cache.read(KEY) == remembered()
    assert os.listdir(cache.folder) == [path.name]


@pytest.mark.parametrize(
    "change", [{"torch": "2.14.0"}, {"ranks": 8}, {"nodes": 2}, {"model": "sha256:" + "b" * 64}, {"device": "H100"},
               {"backend": "nccl"}, {"allow": ("sharded-step",)}, {"cores": 64},
               {"optimizer": "torch.optim.adafactor.Adafactor"}],
)  # fmt: skip
def test_another_model_torch_or_cluster_has_another_file(tmp_path: Path, change: dict[str, Any]) -> None:
    cache, other = Cache(tmp_path), replace(KEY, **change)
    mine = cache.write(remembered())
    assert cache.read(other) is None
    os.replace(mine, cache.path(other))  # somebody renamed it
    with pytest.raises(InputError, match=rf"\$.key: found another {next(iter(change))} than this run's"):
        cache.read(other)


def test_the_run_before_on_other_ranks_is_found(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.read_other_ranks(KEY) is None
    for at, ranks in enumerate((3, 8, 2)):
        left = on_ranks(ranks)
        os.utime(cache.write(left if ranks != 2 else replace(left, profile=None)), (1000 + at, 1000 + at))
    cache.write(remembered())
    assert cache.read_other_ranks(KEY) == on_ranks(8)  # the last one that has measurements
    os.utime(cache.path(on_ranks(3).key))
    assert cache.read_other_ranks(KEY) == on_ranks(3)


@pytest.mark.parametrize(
    "change", [{"nodes": 1}, {"nodes": 2}, {"torch": "2.14.0"}, {"model": "sha256:" + "b" * 64}, {"backend": "nccl"},
               {"device": "H100"}, {"planner": "9.9.9"}],
)  # fmt: skip
def test_a_run_of_another_kind_on_other_ranks_is_not(tmp_path: Path, change: dict[str, Any]) -> None:
    cache = Cache(tmp_path)
    cache.write(on_ranks(8, **change))
    assert cache.read_other_ranks(KEY) is None


def test_one_node_is_one_link_and_nodes_are_alike_with_as_many_ranks() -> None:
    assert replace(KEY, ranks=4, nodes=1).alike == replace(KEY, ranks=3, nodes=1).alike
    assert replace(KEY, ranks=16, nodes=2).alike == replace(KEY, ranks=24, nodes=3).alike
    assert replace(KEY, ranks=16, nodes=2).alike != replace(KEY, ranks=12, nodes=3).alike
    assert replace(KEY, ranks=8, nodes=1).alike != replace(KEY, ranks=16, nodes=2).alike


def test_a_spoiled_file_of_other_ranks_is_refused_with_its_path(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = cache.write(on_ranks(8))
    os.replace(path, path.with_name(on_ranks(3, torch="2.14.0").key.file_names + path.name[20:]))
    other = replace(KEY, torch="2.14.0")
    with pytest.raises(InputError, match=r"\$.key: found another .*torch"):
        cache.read_other_ranks(other)


SPOILED: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "hello",
    "another schema": lambda text: text.replace("planner.cache/1", "planner.plan/1"),
    "an unknown field": lambda text: json.dumps({**json.loads(text), "code": "import os"}),
    "a wrong plan": lambda text: json.dumps({**json.loads(text), "plan": {"schema": "planner.plan/1"}}),
    "a plan of other ranks": lambda text: text.replace('"ranks": 4', '"ranks": 8', 2),
    "not finite": lambda text: text.replace("1234.5", "NaN"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_file_is_refused_with_its_path(tmp_path: Path, how: str) -> None:
    cache = Cache(tmp_path)
    path = cache.write(remembered())
    path.write_text(SPOILED[how](path.read_text()))
    with pytest.raises(InputError, match=path.name):
        cache.read(KEY)
    cache.write(remembered())  # and is written over
    assert cache.read(KEY) == remembered()


def test_it_bounds_its_own_size_and_touches_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / ".planner-killed.tmp").write_text("half")
    os.utime(tmp_path / ".planner-killed.tmp", (1, 1))
    monkeypatch.setattr(cache_module, "MOST_FILES", 3)
    keys = [replace(KEY, ranks=4, cores=cores) for cores in range(1, 7)]
    for at, key in enumerate(keys):
        os.utime(cache.write(remembered(key)), (1000 + at, 1000 + at))
    cache.read(keys[3])  # was used, so it stays
    cache.write(remembered())
    kept = {cache.path(key).name for key in (keys[3], keys[5], KEY)}
    assert set(os.listdir(tmp_path)) == {"notes.json", *kept}
    monkeypatch.setattr(cache_module, "MOST_BYTES", 1)
    cache.write(remembered())
    assert set(os.listdir(tmp_path)) == {"notes.json", cache.path(KEY).name}  # the newest one stays in any case


def test_links_in_a_shared_folder_are_replaced_and_never_followed(tmp_path: Path) -> None:
    cache, mine = Cache(tmp_path / "shared"), tmp_path / "mine.txt"
    path = cache.write(remembered())
    kept = path.rename(tmp_path / "kept.json")
    os.utime(kept, (1000, 1000))
    path.symlink_to(kept)
    with pytest.raises(InputError, match="found a symbolic link"):
        cache.read(KEY)
    assert kept.stat().st_mtime == 1000
    path.unlink()
    mine.write_text("mine")
    mine.chmod(0o600)
    path.symlink_to(mine)
    cache.write(remembered())
    assert (mine.read_text(), mine.stat().st_mode & 0o777) == ("mine", 0o600)
    assert not path.is_symlink()
    assert cache.read(KEY) == remembered()


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="set PLANNER_CACHE"):
        Cache(tmp_path / "file" / "below").write(remembered())


def test_where_it_lies(tmp_path: Path) -> None:
    assert cache_folder({"PLANNER_CACHE": "/x", "XDG_CACHE_HOME": "/y"}) == Path("/x")
    assert cache_folder({"XDG_CACHE_HOME": "/y"}) == Path("/y/planner")
    assert cache_folder({}) == Path.home() / ".cache" / "planner"
