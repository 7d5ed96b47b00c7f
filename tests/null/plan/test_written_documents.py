"""Writing documents: what is written reads back as it was, byte for byte the same each time, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.documents import profile as d
from runtime import plan as p
from runtime.errors import InputError
from runtime.plan import predicted
from runtime.plan.files import write_text
from runtime.plan.strict_json import dump, write_json

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = texts.filter(bool)
times = st.floats(0.0, 1e15)
shares = st.floats(0.0, 1.0)
lines = st.builds(d.Line, alpha_us=times, beta_us_per_byte=st.floats(0.0, 1e12), r_squared=st.none() | shares)
density_rows = st.lists(st.tuples(st.floats(1e-6, 1.0), times, st.floats(0.0, 1e12)), min_size=1, max_size=3).map(tuple)
selections = st.builds(
    d.SelectionLine, alpha_us=times, beta_us_per_byte=st.floats(0.0, 1e12), by_density=st.none() | density_rows
)
factors = st.floats(1.0, 9.0)
by_size = st.lists(st.tuples(st.floats(1.0, 1e9), factors, factors), min_size=1, max_size=3).map(tuple)
links = st.builds(d.Link, alpha_us=times, beta_us_per_byte=st.floats(0.0, 1e12), gamma_us_per_byte=shares)
sample_lists = st.lists(st.tuples(st.floats(0.0, 2.0**60), times), min_size=1, max_size=4).map(tuple)
per_collective = st.dictionaries(names, lines, max_size=2)

clusters = st.builds(
    d.Cluster,
    name=st.none() | texts,
    nodes=st.integers(1, 64),
    ranks_per_node=st.integers(1, 8),
    intra=st.none() | links,
    inter=st.none() | links,
    collectives=st.none() | per_collective,
    samples=st.none() | st.dictionaries(names, sample_lists, max_size=2),
    sparsify=st.none() | selections | st.dictionaries(names, selections, min_size=1, max_size=2),
    encode=st.none() | per_collective,
    decode=st.none() | per_collective,
    all_reduce_algorithm=st.sampled_from(["ring", "binary_tree"]),
    contention=st.none()
    | st.builds(d.Contention, compute=factors, network=factors)
    | st.builds(d.Contention, compute=factors, network=factors, by_size=by_size, gathers_by_size=st.none() | by_size),
)

gradients = st.builds(
    d.Gradient,
    name=names,
    layer=texts,
    numel=st.integers(0, 2**40),
    dtype=st.sampled_from(sorted(d.DTYPE_BYTES)),
    backward_us=times,
    spread_us=st.none() | times,
)
fingerprints = st.binary(min_size=32, max_size=32).map(lambda digest: f"sha256:{digest.hex()}")
models = st.builds(p.ModelReference, name=texts, fingerprint=st.none() | fingerprints)

profiles = st.builds(
    d.Profile,
    model=models,
    world=st.builds(d.ProfileWorld, ranks=st.integers(1, 64), backend=st.none() | texts, measured=st.none() | texts),
    compute=st.builds(
        d.ComputeProfile,
        forward_us=times,
        update_us=times,
        gradients=st.lists(gradients, min_size=1, max_size=4, unique_by=lambda gradient: gradient.name).map(tuple),
        step_spread_us=st.none() | times,
        intervals=st.none()
        | st.builds(
            d.ComputeIntervals,
            **{name: st.tuples(times, times) for name in ("forward_us", "backward_us", "step_us")},
        ),
    ),
    layers=st.none()
    | st.lists(
        st.builds(
            d.Layer, name=texts, kind=texts, flops=times, activation_bytes=times, grad_input_us=st.none() | times
        ),
        max_size=2,
    ).map(tuple),
    tracing=st.none() | st.builds(d.Tracing, method=st.sampled_from(["export", "hooks"])),
    cluster=st.none() | clusters,
)

compressors = st.builds(
    p.CompressorSpec,
    name=names,
    k=st.none() | st.dictionaries(names, st.integers(1, 100), max_size=2),
    density=st.none() | st.floats(0.0, 1.0, exclude_min=True),
    scope=st.sampled_from([None, "bucket", "layer"]),
)
predictions = st.builds(
    predicted.Prediction,
    iteration_us=times,
    exposed_us=st.none() | times,
    compute_spread_us=st.none() | times,
    timeline=st.none()
    | st.lists(
        st.builds(
            predicted.PredictedTask,
            task=texts,
            resource=texts,
            start_us=times,
            end_us=times,
            bucket=st.none() | st.integers(0, 9),
            ready_us=st.none() | times,
            tasks=st.none() | st.integers(1, 9),
            step=st.none() | st.integers(0, 9),
        ),
        min_size=1,
        max_size=2,
    ).map(tuple),
)


norm_plans = st.builds(
    p.NormPlan,
    shares=st.none() | st.lists(st.lists(names, max_size=2).map(tuple), max_size=3).map(tuple),
    replicated_us=st.none() | times,
    shared_us=st.none() | times,
    message_bytes=st.none() | st.integers(0, 9999),
    method=st.none() | texts,
)


@st.composite
def step_plans(draw: st.DrawFn, buckets: int) -> p.StepPlan:
    """Shared steps, some with gathers beside the next forward, in groups of the buckets, in any order."""
    late = draw(st.booleans())
    cut = draw(st.integers(1, buckets))
    runs = [draw(st.permutations(run)) for run in (range(cut), range(cut, buckets)) if run]
    groups = tuple(tuple(run) for run in draw(st.permutations(runs)))
    return p.StepPlan(
        sharded=True, gather="forward" if late else draw(st.sampled_from([None, "step"])),
        gathers=draw(st.none() | st.just(groups)) if late else None, gather_us=draw(st.none() | times),
    )  # fmt: skip


worlds = st.builds(
    lambda nodes, each: p.PlanWorld(ranks=(nodes or 1) * each, nodes=nodes),
    st.none() | st.integers(1, 64),
    st.integers(1, 8),
)


@st.composite
def plans(draw: st.DrawFn, depth: int = 1) -> p.Plan:
    """Plans with every optional part now and then, and plans inside plans."""
    members = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    cut = draw(st.integers(1, len(members)))
    parts = [part for part in (members[:cut], members[cut:]) if part]
    inner = st.none() | plans(depth - 1) if depth else st.none()
    fallback, step = draw(inner), draw(st.none() | step_plans(len(parts)))
    if fallback is not None and fallback.sharded and step is None:
        fallback = None
    return p.Plan(
        model=draw(models),
        world=draw(worlds),
        accuracy=draw(st.sampled_from(["exact", "bounded", "relaxed"])),
        interface=("late-gather",) if step else draw(st.sampled_from([None, "drop-in", ("sharded-step",)])),
        buckets=tuple(p.PlanBucket(gradients=tuple(part), compressor=draw(compressors)) for part in parts),
        delay=draw(st.none() | st.builds(p.DelaySpec, steps=st.integers(1, 9))),
        local_async=draw(st.none() | st.builds(p.LocalAsyncSpec, updaters=st.integers(1, 9))),
        predicted=draw(st.none() | predictions),
        baselines=draw(st.none() | st.dictionaries(names, predictions, max_size=2)),
        certificate=draw(st.none() | st.builds(predicted.Certificate, method=texts, lower_bound_us=times, gap=shares)),
        scaling=draw(
            st.none()
            | st.builds(
                predicted.ScalingPoint,
                ranks=st.integers(1, 99),
                basis=st.sampled_from(["measured", "formula", "extrapolated"]),
                source=st.none() | texts,
                iteration_us=st.dictionaries(names, times, max_size=2),
            ).map(lambda point: (point,))
        ),
        delays=draw(
            st.none()
            | st.builds(
                predicted.DelayPoint,
                steps=st.integers(1, 9),
                iteration_us=times,
                closed_form_us=times,
                case=st.integers(1, 3),
                buckets=st.integers(0, 9),
            ).map(lambda point: (point,))
        ),
        sources=draw(st.none() | st.dictionaries(texts, texts, max_size=2)),
        fallback=fallback,
        phase_order=draw(st.none() | st.just(((0, 0), (0, 1)))),
        updates=draw(
            (st.none() if step is None else st.nothing())
            | st.builds(p.UpdatePlan, norms=st.none() | norm_plans, step=st.just(step))
        ),
        notes=tuple(draw(st.lists(texts, max_size=2))),
    )


def through_json(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False, ensure_ascii=False))


@given(clusters)
def test_cluster_round_trip(cluster: d.Cluster) -> None:
    assert d.parse_cluster(through_json(dump(cluster))) == cluster


@given(profiles)
def test_profile_round_trip(profile: d.Profile) -> None:
    assert d.parse_profile(through_json(profile.to_document())) == profile


@given(plans())
def test_plan_round_trip(plan: p.Plan) -> None:
    """Reading back gives an equal plan with the same digest."""
    again = p.parse_plan(through_json(plan.to_document()))
    assert again == plan
    assert again.digest() == plan.digest()


def small_plan(**fields: Any) -> p.Plan:
    return p.Plan(
        model=p.ModelReference(name="möbius"),
        world=p.PlanWorld(ranks=2),
        accuracy="exact",
        buckets=(p.PlanBucket(gradients=("a", "b")), p.PlanBucket(gradients=("c",))),
        **fields,
    )


def test_digest_covers_every_field() -> None:
    plans = [
        small_plan(),
        small_plan(notes=("x",)),
        small_plan(predicted=predicted.Prediction(iteration_us=1.0)),
        small_plan(delay=p.DelaySpec(steps=1)),
        small_plan(updates=p.UpdatePlan()),
        small_plan(updates=p.UpdatePlan(norms=p.NormPlan(shares=(("a",), ("b",))))),
        small_plan(updates=p.UpdatePlan(norms=p.NormPlan(shares=(("b",), ("a",))))),
    ]
    digests = {plan.digest() for plan in plans}
    assert len(digests) == len(plans)
    assert all(len(digest) == len("sha256:") + 64 for digest in digests)


def test_same_plan_same_bytes(tmp_path: Path) -> None:
    plan = small_plan(baselines={"wfbp": predicted.Prediction(iteration_us=0.1 + 0.2)})
    plan.save(tmp_path / "a.json")
    p.load_plan(tmp_path / "a.json").save(tmp_path / "b.json")
    content = (tmp_path / "a.json").read_bytes()
    assert content == (tmp_path / "b.json").read_bytes()
    assert content.endswith(b"}\n")
    assert "möbius" in content.decode()


def test_hand_order_of_a_plan() -> None:
    """What a reader looks for comes first."""
    keys = list(small_plan(notes=("x",), predicted=predicted.Prediction(iteration_us=1.0)).to_document())
    assert keys == ["schema", "model", "world", "accuracy", "notes", "buckets", "delay", "local_async", "predicted"]


@pytest.mark.parametrize("function", ["replace", "fsync", "fdopen", "fchmod"])
@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EIO, "cannot be written: Input"), (errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full")],
)
def test_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int, words: str
) -> None:
    target = tmp_path / "plan.json"
    write_text(target, "old")

    def fail(first: Any, *_: Any, **__: Any) -> None:
        if function == "fdopen":
            os.close(first)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(InputError, match=rf"plan\.json: .*{words}.*choose another output path"):
        write_text(target, "new")
    monkeypatch.undo()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_unwritable_text_leaves_the_old_file(tmp_path: Path) -> None:
    """An error that is not the file system's leaves nothing behind either."""
    target = tmp_path / "plan.json"
    write_text(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(target, "new \ud800")
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(target, {"a": float("inf")})
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_written_file_has_the_usual_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "plan.json", "text")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o640


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found a directory, expected a file name"):
        write_text(tmp_path, "text")
    with pytest.raises(InputError, match=r"there is no folder .*absent; make it"):
        write_text(tmp_path / "absent" / "plan.json", "text")
    assert list(tmp_path.iterdir()) == []


def test_devices_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    null = tmp_path / "null"
    null.symlink_to(os.devnull)
    write_text(null, "text")
    assert null.is_symlink()
    assert Path(os.devnull).is_char_device()
