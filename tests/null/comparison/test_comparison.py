"""What `planner compare` makes of measured steps, and whom it compares."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import cluster_document, outcome_of, profile_document, run, usual_document, usual_profile, write
from rich.console import Console
from scipy.special import stdtrit

from planner import optimize
from planner.comparison.measure import LEAST_CLEAR_ROUNDS, LEAST_ROUNDS, Measured, Record, Runner
from planner.comparison.picture import picture_text
from planner.comparison.report import Row, comparison_table, failures, summarize
from planner.comparison.same import Deviation
from planner.comparison.script import find_trained
from planner.comparison.statistics import (
    Interval,
    hidden_share,
    median_interval,
    ratio_interval,
    step_values,
    verdict,
)
from planner.comparison.variants import (
    DDP,
    NO_COMMUNICATION,
    PLAN,
    BucketVariant,
    Rounds,
    distinct_caps,
    make_lineup,
)
from planner.decide.strategies import make_schedule
from planner.documents.profile import parse_profile
from planner.model.problem import Problem, make_problem
from planner.profile.bench import Bench, Progress
from planner.report.listing import print_tables
from planner.strategies.baselines import CAPS_MIB, ddp_buckets
from runtime.comm.world import World
from runtime.errors import InputError
from runtime.monitor.verdict import t_quantile
from runtime.plan import LocalAsyncSpec


def usual() -> Problem:
    return make_problem(usual_profile())


def noisy(center: float, seed: int, spread: float = 0.05, drift: float = 0.2) -> np.ndarray:
    """Six rounds of five steps around `center`; whole rounds drift."""
    rng = np.random.default_rng(seed)
    rounds = 1.0 + drift * np.random.default_rng(0).standard_normal((6, 1))
    return center * rounds * (1.0 + spread * rng.standard_normal((6, 5)))


def test_intervals_hold_the_median_and_grow_with_the_noise() -> None:
    calm, loud = median_interval(noisy(100.0, 1, 0.01, 0.0)), median_interval(noisy(100.0, 1, 0.2, 0.0))
    for interval in (calm, loud):
        assert interval.low <= interval.value <= interval.high
    assert loud.high - loud.low > 3 * (calm.high - calm.low)
    assert median_interval(np.full((3, 2), 7.0)) == Interval(7.0, 7.0, 7.0, rounds=3)


def test_a_drift_that_hits_all_does_not_widen_a_ratio() -> None:
    ratio = ratio_interval(noisy(90.0, 1, 0.01), noisy(100.0, 2, 0.01))
    alone = median_interval(noisy(90.0, 1, 0.01))
    assert ratio.low < 0.9 < ratio.high or ratio.value == pytest.approx(0.9, abs=0.03)
    assert (ratio.high - ratio.low) / ratio.value < (alone.high - alone.low) / alone.value


@pytest.mark.parametrize("seed", range(12))
def test_noise_is_rarely_called_a_win(seed: int) -> None:
    """Of equal variants; 95 % intervals may miss one in twenty, none of these seeds does."""
    ratio = ratio_interval(noisy(100.0, 2 * seed + 1), noisy(100.0, 2 * seed + 2))
    assert "no difference" in verdict(ratio, "a", "b", 5)


def test_real_differences_are_told() -> None:
    fast, slow = noisy(80.0, 1), noisy(100.0, 2)
    assert "a is faster than b" in verdict(ratio_interval(fast, slow), "a", "b", 5)
    assert "a is slower than b" in verdict(ratio_interval(slow, fast), "a", "b", 5)


def drifting(rng: np.random.Generator, rounds: int, steps: int, ratio: float = 1.0) -> tuple[Interval, bool]:
    """The interval of two variants as machines measure them: the machine drifts by 2 % from block to block, blocks are
    1 % off by themselves, every tenth is disturbed, and so are steps. And whether it holds `ratio`.
    """
    level = np.cumsum(0.02 * rng.standard_normal(2 * rounds)).reshape(rounds, 2)
    level[1::2] = level[1::2, ::-1]  # each round begins with another
    blocks = level + 0.01 * rng.standard_normal((rounds, 2))
    blocks += 0.05 * rng.exponential(size=blocks.shape) * (rng.random(blocks.shape) < 0.1)
    times = 100.0 * np.exp(blocks[:, :, None] + 0.03 * rng.exponential(size=(rounds, 2, steps)))
    found = ratio_interval(times[:, 0] * ratio, times[:, 1])
    return found, found.low <= ratio <= found.high


@pytest.mark.parametrize(("rounds", "steps"), [(2, 3), (3, 5), (5, 5), (12, 5)])
def test_intervals_of_few_rounds_hold_what_they_should(rounds: int, steps: int) -> None:
    rng = np.random.default_rng(rounds)
    held = [drifting(rng, rounds, steps)[1] for _ in range(2000)]
    assert np.mean(held) >= 0.95 - 2.0 * np.sqrt(0.05 * 0.95 / len(held))


def test_how_many_steps_would_tell_is_said_and_they_do() -> None:
    few, _ = drifting(np.random.default_rng(1), 5, 5)
    rounds = few.telling_rounds
    assert rounds is not None
    assert f"a difference of 2% takes about {5 * rounds} steps in {rounds} rounds to show" in verdict(few, "a", "b", 5)
    many, _ = drifting(np.random.default_rng(2), 4 * rounds, 5)
    assert many.telling_rounds is None
    assert "to show" not in verdict(many, "a", "b", 5)
    assert "a is faster" in verdict(drifting(np.random.default_rng(3), 4 * rounds, 5, ratio=0.95)[0], "a", "b", 5)


def test_student_s_t_is_scipy_s() -> None:
    for freedom in (1, 2, 3, 4, 5, 9, 30, 1000):
        assert t_quantile(freedom) == pytest.approx(float(stdtrit(freedom, 0.975)), rel=3e-3)


def test_ranks_that_wait_see_one_step_others_are_as_slow_as_the_slowest() -> None:
    seen = np.array([[[10.0, 12.0]], [[14.0, 8.0]]])
    assert step_values(seen, together=True).tolist() == [[12.0, 10.0]]
    assert step_values(seen, together=False).tolist() == [[14.0, 12.0]]


@pytest.mark.parametrize(
    ("exposed_us", "alone_us", "backward_us", "share"),
    [
        (0.0, 50.0, 100.0, 1.0),
        (50.0, 50.0, 100.0, 0.0),
        (20.0, 50.0, 100.0, 0.6),
        (100.0, 200.0, 100.0, 1.0),
        (150.0, 200.0, 100.0, 0.5),
        (-5.0, 50.0, 100.0, 1.0),
        (500.0, 50.0, 100.0, 0.0),
        (0.0, 0.0, 100.0, None),
    ],
)
def test_hidden_share(exposed_us: float, alone_us: float, backward_us: float, share: float | None) -> None:
    assert hidden_share(exposed_us, alone_us, backward_us) == share


TRAINS = "import torch\nimport planner\nfrom parts import loop\nloop.train()\n"


@pytest.mark.parametrize(
    ("script", "loop", "refused"),
    [
        (TRAINS, "def train(): ...", True),
        (TRAINS, "import planner\ndef train():\n    print(planner.compare(None, None))", False),
        (TRAINS + "planner.compare(None, None)", "def train(): ...", False),
        (TRAINS, "import importlib\ndef train(): importlib.import_module('other')", False),
        (TRAINS, "from . import deeper\ndef train(): ...", True),
        (TRAINS, "from .deeper import measured\ndef train(): measured()", True),
        ("import torch.nn.functional as F\n", "", True),
        ("no python", "", False),
    ],
)
def test_a_script_that_never_compares_is_refused_before_it_trains(
    tmp_path: Path, script: str, loop: str, refused: bool
) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "loop.py").write_text(loop)
    (tmp_path / "parts" / "deeper.py").write_text("def measured(): ...")
    path = tmp_path / "train.py"
    path.write_text(script)
    if not refused:
        assert find_trained(str(path), []) == (str(path), True)
        return
    with pytest.raises(InputError, match="expected a call of"):
        find_trained(str(path), [])


def test_progress_in_a_pipe_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("planner.profile.bench.time.monotonic", lambda: now_s[0])
    for show in (True, False):
        progress = Progress(show)
        for _ in progress.track(range(40), "measuring"):
            now_s[0] += 1.0
        found = capsys.readouterr()
        assert found.out == ""
        said = ["planner: measuring, 15 of 40 done", "planner: measuring, 30 of 40 done"]
        assert found.err.splitlines() == (said if show else [])


@pytest.mark.parametrize(("spread", "rounds"), [(1e-4, LEAST_CLEAR_ROUNDS), (0.5, 12)])
@pytest.mark.parametrize("brief", [(), ("b",)])
def test_rounds_end_once_the_ratio_is_known(spread: float, rounds: int, brief: tuple[str, ...]) -> None:
    """With little noise after the fewest, with much after all; a brief variant has the fewest blocks, of one step."""
    random = np.random.default_rng(1)

    class Made(Runner[BucketVariant]):
        def block(self, record: Record[BucketVariant], steps: int) -> None:
            record.step_us.append((100.0 * (1.0 + spread * random.standard_normal(steps))).tolist())

    records = [Record(BucketVariant(name=name, kind="plan")) for name in ("a", "b")]
    runner = Made(Bench(World(), torch.device("cpu")))
    runner.interleave(records, Rounds(count=12, steps=3, brief=brief, clear=("a", "b")))
    assert [len(record.step_us) for record in records] == [rounds, LEAST_ROUNDS if brief else rounds]


def test_who_is_compared() -> None:
    problem = usual()
    plan = optimize(problem.profile)
    found = {one.name: one for one in make_lineup(plan, problem, ["wfbp", "ddp:0.1"]).variants}
    assert list(found) == [NO_COMMUNICATION, DDP, "ddp:fp16", "ddp:powersgd", "wfbp", "ddp:0.1", PLAN]
    assert found[PLAN].plan is plan
    assert found[PLAN].predicted_us == plan.predicted.iteration_us  # type: ignore[union-attr]
    assert found[DDP].predicted_us == plan.baselines["ddp"].iteration_us  # type: ignore[index]
    assert found[NO_COMMUNICATION].predicted_us == pytest.approx(problem.compute_end_us + problem.update_us)
    assert len(found["wfbp"].plan.buckets) == problem.count  # type: ignore[union-attr]
    assert not found["ddp:fp16"].exact
    without = {one.name: one for one in make_lineup(plan, None, []).variants}
    assert without[DDP].predicted_us == found[DDP].predicted_us


def test_bucket_sizes_that_make_no_difference_are_tried_once() -> None:
    problem = usual()
    sizes, dtypes = problem.size_bytes.tolist(), problem.dtype_ids.tolist()
    caps = distinct_caps(sizes, dtypes, CAPS_MIB)
    tried = [ddp_buckets(sizes, dtypes), *(ddp_buckets(sizes, dtypes, cap) for cap in caps)]
    assert all(one != other for index, one in enumerate(tried) for other in tried[:index])
    assert all(ddp_buckets(sizes, dtypes, cap) in tried for cap in CAPS_MIB)
    assert distinct_caps([1024] * 3, [0] * 3, CAPS_MIB) == []  # all in one, as by default
    for cap, variant in make_lineup(optimize(problem.profile), problem, []).caps:
        made = make_schedule(problem, f"ddp:{cap:g}")
        assert [len(b.gradients) for b in variant.plan.buckets] == [len(b.gradients) for b in made.buckets]  # type: ignore[union-attr]


def test_a_profile_of_something_else_is_refused() -> None:
    plan = optimize(usual_profile())
    other = parse_profile(profile_document([(10, 1.0)], cluster=cluster_document()))
    with pytest.raises(InputError, match="gradients that are not the plan's, the first g1"):
        make_lineup(plan, make_problem(other), [])
    more = parse_profile(usual_document(cluster=cluster_document((200.0, 0.001), nodes=8)))
    with pytest.raises(InputError, match="a cluster of 8 ranks, expected the plan's 4"):
        make_lineup(plan, make_problem(more), [])
    with pytest.raises(InputError, match="found no profile to make them from"):
        make_lineup(plan, None, ["wfbp"])


def test_local_updaters_are_refused() -> None:
    problem = usual()
    plan = optimize(problem.profile)
    updaters = replace(plan, accuracy="relaxed", local_async=LocalAsyncSpec(updaters=2))
    with pytest.raises(InputError, match=r"--plan: found local updaters .* expected a plan .* with `planner run`"):
        make_lineup(updaters, None, [])
    with pytest.raises(InputError, match="--strategy lap:2: found local updaters"):
        make_lineup(plan, problem, ["wfbp", "lap:2"])


def measured(
    blocks: dict[str, float],
    losses: dict[str, list[float]] | None = None,
    broken: Sequence[str] = (),
    apart: dict[str, float] | None = None,
    predicted_us: dict[str, float] | None = None,
) -> Measured:
    """One rank's records, without noise but of DDP's best; `apart`: shares by which first updates differ from DDP's."""
    plan = optimize(usual_profile())
    records = []
    for name, step_us in blocks.items():
        kind = "no_communication" if name == NO_COMMUNICATION else "ddp" if name.startswith("ddp") else "plan"
        record = Record(
            BucketVariant(
                name=name,
                kind=kind,
                plan=plan if kind == "plan" else None,
                predicted_us=(predicted_us or {}).get(name, 90.0),
            )
        )  # type: ignore[arg-type]
        noise_us = 1.0 if name.startswith("ddp:best") else 0.0
        record.step_us = [[step_us + off, step_us + 2.0 + off] for off in (-noise_us, 0.0, noise_us)]
        record.losses = [(losses or {}).get(name, [3.0, 2.0, 1.5, 1.0])]
        record.deviations = [Deviation("fc.weight", (apart or {}).get(name, 0.0), 0.01)]
        record.alone_us = 40.0 if kind == "plan" else None
        record.failure = "no such message" if name in broken else None
        records.append(record)
    return Measured(records, backward_us=30.0)


def row_of(name: str, *seen: Measured) -> Row:
    """Of a comparison."""
    return next(row for row in summarize(seen).rows if row.name == name)


def test_a_comparison_from_what_ranks_saw() -> None:
    blocks = {NO_COMMUNICATION: 79.0, DDP: 119.0, "ddp:best(5 MiB)": 109.0, "ddp:fp16": 94.0, PLAN: 99.0}
    comparison = summarize([measured(blocks), measured(blocks)])
    rows = {row.name: row for row in comparison.rows}
    assert rows[PLAN].median_us == 100.0
    assert rows[PLAN].exposed_us == 20.0
    assert rows[PLAN].hidden_share == pytest.approx(20.0 / 30.0)
    assert rows[PLAN].error == pytest.approx(-0.1)
    assert "the plan is faster than the best DDP, ddp:best(5 MiB)" in comparison.verdicts[0]
    assert "the plan is slower than ddp:fp16, which is not exact" in comparison.verdicts[1]
    assert len(comparison.verdicts) == 2
    assert set(comparison.to_document()[0]) >= {
        *("name", "median_us", "ci95_us", "exposed_us", "hidden_share", "predicted_us", "error")
    }


def test_predictions_are_of_steps_with_as_many_micro_batches() -> None:
    """The plan's are of one, measured steps of a script that accumulates are of all."""
    seen = measured({NO_COMMUNICATION: 79.0, DDP: 119.0, PLAN: 99.0})
    plan = next(record.variant.plan for record in seen.records if record.variant.name == PLAN)
    assert plan is not None
    assert plan.predicted is not None
    more_us = plan.predicted.forward_us + plan.predicted.backward_us  # type: ignore[operator]
    for name in (PLAN, DDP, NO_COMMUNICATION):
        assert row_of(name, replace(seen, micro_batches=(3, 1))).predicted_us == pytest.approx(90.0 + 2 * more_us)


def test_other_losses_than_ddp_s_are_told() -> None:
    blocks = {NO_COMMUNICATION: 80.0, DDP: 120.0, PLAN: 99.0}

    def told(ranks: int, *losses: float) -> str:
        seen = [measured(blocks, {PLAN: list(losses)})] * ranks
        differences = summarize(seen).differences
        assert row_of(PLAN, *seen).same_training == (not differences)
        return "".join(differences)

    assert told(2, 3.0, 2.0, 1.5 + 1e-7, 1.0) == ""
    assert "NOT THE SAME TRAINING: plan: on rank 0 the loss was 1.01 in step 4 of a block, DDP's 1" in told(
        2, 3.0, 2.0, 1.5, 1.01
    )
    # Of more ranks sums are rounded in another order, which training multiplies from step to step.
    assert told(3, 3.0, 2.0, 1.5, 1.01) == ""
    assert "in step 2" in told(3, 3.0, 2.01, 1.6, 1.2)
    nan = [float("nan")] * 4
    assert summarize([measured(blocks, dict.fromkeys(blocks, nan))]).differences == ()
    assert "the loss was nan" in told(2, *nan)


def test_another_first_update_than_ddp_s_is_told() -> None:
    """It shows what losses hide: one small gradient that was not averaged."""
    blocks = {NO_COMMUNICATION: 80.0, DDP: 120.0, PLAN: 99.0}

    def told(**apart: float) -> str:
        return "".join(summarize([measured(blocks), measured(blocks, apart=apart)]).differences)

    assert told(plan=0.009) == ""
    assert "on rank 1 the first update of fc.weight is off by 70.0% of its length, expected 1% at most" in told(
        plan=0.7
    )
    # As far as blocks of DDP are from each other, others may be.
    assert told(plan=0.012, ddp=0.005) == ""
    assert told(plan=0.02, ddp=0.005) != ""


def test_what_differs_from_itself_is_not_judged() -> None:
    blocks = {NO_COMMUNICATION: 80.0, DDP: 120.0, PLAN: 99.0}
    seen = [measured(blocks, apart={DDP: 0.3, PLAN: 0.4})]
    comparison = summarize(seen)
    assert comparison.differences == ()
    assert "the first update of fc.weight is off by 30.0% of its length" in comparison.verdicts[-1]
    assert "draws from a generator of its own" in comparison.verdicts[-1]
    assert row_of(PLAN, *seen).same_training is None


@pytest.mark.parametrize(("best_us", "equal"), [(110.0, False), (118.5, True), (130.0, True), (None, True)])
def test_the_best_bucket_size_is_the_default_unless_it_is_faster(best_us: float | None, equal: bool) -> None:
    """Also where all sizes give the same buckets, and none was measured."""
    blocks = {NO_COMMUNICATION: 80.0, DDP: 119.0, **({"ddp:best(5 MiB)": best_us} if best_us else {}), PLAN: 99.0}
    comparison = summarize([measured(blocks)])
    best = next(row for row in comparison.rows if row.name.startswith("ddp:best"))
    assert (best.equal_to == DDP) == equal
    assert f"the best DDP, {DDP if equal else best.name}:" in comparison.verdicts[0]
    console = Console(file=io.StringIO(), width=200)
    print_tables(comparison_table(comparison), console=console)
    assert ("equal to ddp" in console.file.getvalue()) == equal  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("predicted_us", "words"),
    [
        ({NO_COMMUNICATION: 80.0, PLAN: 99.0}, None),
        (
            {NO_COMMUNICATION: 160.0, PLAN: 180.0},
            "compute is twice as fast as in the profile (0.1 ms a step, predicted 0.2 ms)",
        ),
        ({NO_COMMUNICATION: 40.0, PLAN: 50.0}, "compute takes twice as long as in the profile"),
        ({NO_COMMUNICATION: 80.0, PLAN: 82.0}, "communication holds steps up more than predicted"),
        ({NO_COMMUNICATION: 80.0, PLAN: 130.0}, "communication holds steps up less than predicted"),
    ],
)
def test_the_cause_of_wrong_predictions_is_named(predicted_us: dict[str, float], words: str | None) -> None:
    cause = summarize([measured({NO_COMMUNICATION: 79.0, DDP: 119.0, PLAN: 99.0}, predicted_us=predicted_us)]).cause
    assert cause is None if words is None else cause is not None and cause.startswith(words)
    assert cause is None or "profile again" in cause


def test_what_does_not_work_is_listed_with_its_reason() -> None:
    blocks = {NO_COMMUNICATION: 80.0, DDP: 120.0, "ddp:powersgd": 70.0, PLAN: 99.0}
    comparison = summarize([measured(blocks, broken=["ddp:powersgd"])])
    assert failures(comparison) == ["ddp:powersgd does not work here: no such message"]
    assert len(comparison_table(comparison).rows) == 5
    assert all("powersgd" not in line for line in comparison.verdicts)


def test_the_page_holds_every_figure() -> None:
    """And date, cause, verdicts and table, in the frame of the page that explains a plan."""
    blocks = {NO_COMMUNICATION: 80.0, DDP: 120.0, "ddp:powersgd": 70.0, PLAN: 99.0}
    predicted_us = {NO_COMMUNICATION: 160.0, PLAN: 180.0}
    seen = measured(blocks, broken=["ddp:powersgd"], predicted_us=predicted_us, apart={PLAN: 0.5})
    text = picture_text(summarize([seen]), "a <model> on 4x1@1gbit", "2026-11-22 10:00 UTC")
    for words in (
        "a &lt;model&gt; on 4x1@1gbit: measured in interleaved blocks",
        "<p>Compute is twice as fast as in the profile",
        "<p>NOT THE SAME TRAINING: plan",
        "<p>The plan is faster than the best DDP, ddp",
        '<td class="number" data-label="step (ms)">equal to ddp</td>',
        "ddp:powersgd does not work here",
        "2026-11-22 10:00 UTC: 6 steps each on 1 ranks",
    ):
        assert words in text, words
    assert "src=" not in text.rpartition("</script>")[0].rpartition("<script")[2].partition(">")[0]
    assert len(text) < 6 * 2**20


def test_who_waits_for_whom_is_in_text_page_and_json() -> None:
    ranks = [measured({NO_COMMUNICATION: 79.0, DDP: 119.0, PLAN: 99.0}) for _ in range(2)]
    for seen, figures in zip(ranks, ([500.0, float("nan"), 10.0, 5.0], [100.0, float("nan"), 410.0, 5.0]), strict=True):
        seen.records[-1].figures = figures
    comparison = summarize(ranks)
    *others, plan = comparison.to_document()
    assert [(row["last"], row["cause"]) for row in plan["arrivals"]] == [(0, None), (1, "compute")]
    assert plan["messages"] == ({"message": 0, "late_us": (0.0, 400.0)},)
    assert not any(row["arrivals"] for row in others)
    page = picture_text(comparison, "a model", "2026-11-22 10:00 UTC")
    assert "<h2>Who waits for whom</h2>" in page
    for text in (str(comparison), page):
        assert "plan: ranks that arrive last at its messages" in text
        assert "plan: arrival of each rank at each message behind the first one" in text
        assert "compute" in text


def test_a_page_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    monkeypatch.setattr("planner.cli.comparing.on_ranks", None)
    plan, page = str(tmp_path / "plan.json"), str(tmp_path / "page.html")
    run("optimize", write(tmp_path / "profile.json", usual_document()), "-o", plan)
    for learn in ((), ("--learn", "20")):
        ended = outcome_of(capsys, "compare", "examples/digits.py:job", "--plan", plan, *learn, "--html", page)
        assert "pip install plotly" in ended.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rounds", "1"], "expected at least 2 rounds"),
        (["--steps", "3", "--rounds", "5"], "expected at least 2 rounds and a step for each"),
        (["--strategy", "wfbp"], "expected --profile profile.json"),
        (["--profile", "absent.json"], "absent.json: no such file"),
    ],
)
def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    profile, plan = write(tmp_path / "profile.json", usual_document()), str(tmp_path / "plan.json")
    run("optimize", profile, "-o", plan)
    capsys.readouterr()
    run("compare", "examples/digits.py:job", "--plan", plan, *options, code=2)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("noisy", [False, True])
def test_noise_is_reported_in_place_of_a_hidden_share(noisy: bool) -> None:
    """The plan hides all, but for rounds that differ by more than all communication."""
    rounds = [20.0, -20.0, 60.0, -60.0] if noisy else [0.0, 1.0, 0.0, 1.0]
    seen = measured({NO_COMMUNICATION: 80.0, DDP: 120.0, PLAN: 80.0})
    records = []
    for record in seen.records:
        change = rounds if record.variant.name == PLAN else [0.0] * 4
        records.append(replace(record, step_us=[[record.step_us[0][0] + more] * 3 for more in change]))
    comparison = summarize([replace(seen, records=records)])
    row = next(row for row in comparison.rows if row.name == PLAN)
    assert isinstance(row, Row)
    assert row.hidden_text == ("noise" if noisy else "100%")
    assert any(line.startswith("noise: ") for line in str(comparison).splitlines()) == noisy
    assert str(comparison).splitlines()[0] == comparison.verdicts[0]
