"""The parts of local updaters, in one process: counters, shared tensors, parts of the data, when to average."""

from __future__ import annotations

import os
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from examples import digits
from runtime.comm.shared_memory import SharedMemory
from runtime.comm.world import World
from runtime.errors import InputError
from runtime.local_async.averaging import DONE, RUNNING, Averager, every
from runtime.local_async.job import LocalJob, Part, PartSampler, batches_of, samples_of
from runtime.local_async.memory import AtomicCounter, Doorbell
from runtime.local_async.preparing import mps_note, mps_runs
from runtime.local_async.races import Races, add_to_probe, count_races, probe_places
from runtime.local_async.report import Averaging, LocalReport, UpdaterReport
from runtime.local_async.shared import ALIGNMENT, Layout, SharedModel, Snapshots, make_memory
from runtime.plan import LocalAsyncSpec

TAKERS, TAKES = 4, 100_000


def test_a_counter_gives_each_number_to_one_process(tmp_path: Path) -> None:
    counter = AtomicCounter()
    children = []
    for taker in range(TAKERS):
        child = os.fork()
        if not child:
            taken = b"".join(counter.take().to_bytes(4, "little") for _ in range(TAKES))
            (tmp_path / str(taker)).write_bytes(taken)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    given = [(tmp_path / str(taker)).read_bytes() for taker in range(TAKERS)]
    numbers = sorted(int.from_bytes(b[i : i + 4], "little") for b in given for i in range(0, len(b), 4))
    assert numbers == list(range(TAKERS * TAKES))
    assert counter.value == TAKERS * TAKES
    counter.exhaust()
    assert counter.take() > 10**12


def test_a_doorbell_never_makes_its_ringer_wait() -> None:
    bell = Doorbell()
    assert wait([bell], 0.0) == []
    for _ in range(100_000):
        bell.ring()
    assert wait([bell], 0.0) == [bell]
    bell.silence()
    assert wait([bell], 0.0) == []


class Model(nn.Module):
    """Two dtypes, strides of its own, a tied weight, a shared buffer, buffers of both kinds, something frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.one = nn.Linear(5, 5, bias=False)
        self.other = nn.Linear(5, 5)
        self.other.weight = self.one.weight
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.zeros(2))
        self.norm.register_buffer("again", self.seen)


def shared_model() -> tuple[Model, SharedModel, dict[str, Tensor]]:
    model = Model()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    layout = Layout.of(model)
    handle, memory = make_memory(model, layout)
    assert isinstance(handle, SharedMemory)
    return model, SharedModel(model, layout, memory), before


def test_a_shared_model_keeps_values_strides_and_ties() -> None:
    model, shared, before = shared_model()
    base = shared.memory.data_ptr()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.stride() == before[name].stride(), name
        if tensor.numel():
            assert base <= tensor.data_ptr() < base + shared.layout.size_bytes, name
            assert (tensor.data_ptr() - base) % ALIGNMENT == 0, name
    assert model.other.weight is model.one.weight
    assert model.norm.again is model.seen
    assert {flat.dtype for flat in shared.layout.flats} == {torch.float32, torch.float64}
    assert set(shared.parameters) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert sorted(str(kept.dtype) for kept in shared.kept) == ["torch.float32", "torch.int64"]


def test_flats_hold_what_is_averaged_and_nothing_else() -> None:
    model, shared, _ = shared_model()
    with torch.no_grad():
        for flat in shared.flats:
            flat.fill_(3.0)
    for name, tensor in model.state_dict().items():
        averaged = name not in ("frozen", "norm.num_batches_tracked")
        assert bool((tensor == 3.0).all()) == averaged or not tensor.numel(), name


def test_a_snapshot_stays_while_others_change_the_model() -> None:
    model, shared, before = shared_model()
    snapshots = Snapshots(shared)
    snapshots.take()
    with torch.no_grad():
        for flat in shared.flats:
            flat.add_(1.0)
        model.one.weight.mul_(2.0)  # what the updater does to its copy stays there
    assert torch.equal(model.conv.weight, before["conv.weight"])
    assert model.conv.weight.stride() == before["conv.weight"].stride()
    model.wide.sum().backward()
    snapshots.leave()
    assert torch.equal(model.conv.weight, before["conv.weight"] + 1.0)
    assert torch.equal(model.one.weight, before["one.weight"] + 1.0)
    assert model.wide.grad is not None
    shared.release()
    assert torch.equal(model.one.weight, before["one.weight"] + 1.0)
    assert model.norm.again is model.seen
    with torch.no_grad():
        for flat in shared.flats:
            flat.zero_()
    assert torch.equal(model.one.weight, before["one.weight"] + 1.0)


def test_buffers_that_a_forward_replaces_are_shared_again() -> None:
    model, shared, _ = shared_model()
    place = model.norm.running_mean
    assert place is not None
    model.norm.running_mean = torch.full((4,), 9.0)
    shared.follow_buffers()
    assert model.norm.running_mean is place
    assert torch.equal(place, torch.full((4,), 9.0))


@given(some.lists(some.sampled_from("AaBb"), max_size=24))
def test_lost_additions_are_counted_exactly(events: list[str]) -> None:
    """Two updaters read (A, B) and write (a, b) the elements of their halves: additions that overlap are lost."""
    layout = Layout.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)))
    places = {"a": probe_places(layout), "b": probe_places(layout, ["1.weight", "1.bias"])}
    probe, read, done = torch.zeros(17, dtype=torch.int32), dict[str, Tensor](), {"a": 0, "b": 0}
    kept = torch.zeros(17, dtype=torch.int64)  # additions that are in the probe, by following each
    seen: dict[str, Tensor] = {}
    for event in events:
        if event.isupper():
            read[event.lower()], seen[event.lower()] = probe.clone(), kept.clone()
        elif event in read:
            for place in places[event]:
                probe[place] = (read[event] + 1)[place]
                kept[place] = (seen[event] + 1)[place]
            del read[event]
            done[event] += 1
    found = count_races(probe, [(places[one], done[one]) for one in "ab"])
    assert found.additions == 17 * done["a"] + 9 * done["b"]
    assert found.lost == found.additions - int(kept.sum())


def test_the_probe_of_a_large_model_is_shared_out_by_elements() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 2, bias=False)))
    assert layout.probe_elements == 2**16
    (whole,) = probe_places(layout)
    (first,), (last,) = probe_places(layout, ["0.weight", "0.bias"]), probe_places(layout, ["1.weight"])
    assert (whole.start, whole.stop) == (first.start, last.stop) == (0, 2**16)
    assert first.stop == last.start == round(2**16 * 120_300 / 120_900 - 0.5)
    probe = torch.zeros(2**16, dtype=torch.int32)
    add_to_probe(probe, [whole])
    add_to_probe(probe, [last])
    assert count_races(probe, [([whole], 1), ([last], 1)]) == Races(
        additions=2**16 + last.stop - last.start, lost=0, worst=0.0
    )


def test_layouts_of_other_models_are_told_apart() -> None:
    layout = Layout.of(nn.Linear(3, 2))
    assert layout.difference(Layout.of(nn.Linear(3, 2))) is None
    assert "weight (float32 (2, 4), trained) in place of weight (float32 (2, 3), trained)" in str(
        layout.difference(Layout.of(nn.Linear(4, 2)))
    )
    assert layout.difference(Layout.of(nn.Linear(3, 2, bias=False))) == "1 tensors in place of 2"


def test_parts_of_the_data_share_nothing_and_leave_nothing_out() -> None:
    samplers = [PartSampler(23, Part(index, 4, seed=3)) for index in range(4)]
    passes = []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in samplers]
        assert sorted(number for part in parts for number in part) == list(range(23))
        assert {len(part) for part in parts} == {5, 6} == {len(sampler) for sampler in samplers}
        assert parts[0] == list(samplers[0])
        passes.append(parts)
    assert len({tuple(sorted(parts[0])) for parts in passes}) == 3  # drawn again in each pass
    assert sorted(PartSampler(23, Part(0, 4, seed=4))) != sorted(passes[0][0])
    sampler = samplers[0]
    for options in ({"batch_size": 6, "sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 6, False)}):
        loader = DataLoader(range(23), **options)  # type: ignore[arg-type]
        batch = batches_of(cast(LocalJob, SimpleNamespace(loader=lambda _, loader=loader: loader)), 0, sampler.part)
        assert [batch(number).tolist() for number in range(3)] == [parts[0] for parts in passes]
    with pytest.raises(InputError, match="found 3 samples for 4 updaters"):
        PartSampler(3, Part(0, 4))


def test_ranks_of_the_example_share_out_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """In local updaters, too, which have no process group to ask how many ranks there are."""
    numbers = torch.arange(6 * digits.BATCH_SIZE)
    monkeypatch.setattr(digits, "digits", lambda: digits.Digits(numbers, numbers, numbers[:0], numbers[:0]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen = torch.cat([digits.batch(step, rank)[0] for step in range(3) for rank in range(2)])
    assert torch.equal(seen.sort().values, numbers)


def test_jobs_have_one_source_of_minibatches() -> None:
    usual = {"model": nn.Linear(1, 1), "loss": lambda m, b: m(b).sum(), "optimizer": lambda p: torch.optim.SGD(p, 0.1)}
    with pytest.raises(InputError, match="found neither of batch and loader"):
        LocalJob(**usual)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="found both of batch and loader"):
        LocalJob(**usual, batch=lambda n, r: None, loader=lambda p: [])  # type: ignore[arg-type]
    once = LocalJob(**usual, loader=lambda part: iter([1, 2]))  # type: ignore[arg-type]
    batch = batches_of(once, 0, Part())
    assert [batch(9), batch(9)] == [1, 2]
    with pytest.raises(InputError, match="pass 1 of part 0 of 1 has no minibatch"):
        batch(9)
    assert samples_of({"x": [torch.tensor(1.0), torch.ones(7, 2)]}) == 7
    assert samples_of("text") == 0


def test_models_are_averaged_every_k_updates() -> None:
    spec = LocalAsyncSpec(updaters=2, average_every=1, then_every=8, switch_fraction=0.5)
    assert [every(spec, begun, 10) for begun in (0, 4, 5, 10)] == [1, 1, 8, 8]


def test_mps_is_looked_for_where_processes_would_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_runs()
    (tmp_path / "control").touch()
    assert mps_runs()
    assert mps_note(nn.Linear(1, 1), 4) == ()  # on a CPU nothing is said of it


def test_a_report_in_words() -> None:
    updaters = (
        UpdaterReport(updater=0, minibatches=60, partial=20, samples=300, seconds=2.0),
        UpdaterReport(updater=1, minibatches=39, samples=195, lost="was killed by SIGKILL"),
    )
    averaging = Averaging(start_s=1.0, sent_s=1.001, end_s=1.004, updates=3, distance=0.25)
    report = LocalReport(
        rank=1, ranks=2, steps=100, minibatches=99, seconds=3.0, updaters=updaters, staleness=(50, 49), rounds=7,
        averagings=(averaging,), notes=("1 minibatches were not done",),
    )  # fmt: skip
    assert report.samples == 495
    assert report.samples_per_s == 165.0
    assert report.mean_staleness == pytest.approx(49 / 99)
    text = str(report)
    assert "rank 1 of 2: 99 of 100 minibatches in 3.00 s, 33.0 minibatches/s, 165.0 samples/s" in text
    assert "updater 0: 60 minibatches (20 of its block), 30.0 minibatches/s, 150.0 samples/s" in text
    assert "updater 1: 39 minibatches; was killed by SIGKILL" in text
    assert "staleness (updates between snapshot and update): 0: 51%, 1: 49%" in text
    assert "7 averagings, of the last 1: median 4.00 ms, every 3.0 updates" in text
    assert "2.50e-01 at most" in text


@pytest.mark.parametrize(("mine", "model"), [(RUNNING, [3.0, 5.0]), (DONE, [2.0, 4.0])])
def test_what_updaters_do_while_models_are_averaged_stays(mine: int, model: list[float]) -> None:
    """The other rank is done; the model is made the average itself only where nobody updates it any more."""
    flat = torch.tensor([1.0, 2.0])
    averager = Averager(cast(World, SimpleNamespace(ranks=2, rank=0)), [flat])

    def exchange(_: object) -> None:
        averager._messages[0] += torch.tensor([3.0, 6.0, 0.0, DONE])
        flat.add_(1.0)  # an updater's step

    with mock.patch.object(averager, "_exchange", exchange):
        assert averager.average(mine, 1, lambda _: None) == [mine, DONE]
    assert flat.tolist() == model
