"""The planner's costs, simulator and strategies against measurements and simulations that others published.

Tolerances are fractions of the published value. Constants that were fitted were fitted on other models than the one
compared; `benchmarks/published` says for each on which data.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import pytest

from benchmarks.published import asc, collectives, commlib, ddl2020, dgx, infocom19, omgs, ssd, tpds
from benchmarks.published.common import Comparison, model, ordered, predict_s
from benchmarks.published.report import swaps
from benchmarks.traces import in_dtype
from planner import optimize
from planner.documents.catalog import find_cluster


def check(comparisons: Iterable[Comparison], tolerance: float) -> None:
    """Every figure within its tolerance; all that are not are listed."""
    compared = list(comparisons)
    assert compared
    off = [f"{c.name}: published {c.published:.4g}, ours {c.ours:.4g}" for c in compared if c.error > tolerance]
    assert not off, off


def by_method(comparisons: Iterable[Comparison]) -> dict[str, Comparison]:
    """Method → comparison."""
    return {comparison.method: comparison for comparison in comparisons}


# MG-WFBP, INFOCOM 2019


def test_the_start_up_of_the_ring_on_2_4_and_8_nodes() -> None:
    for comparison in infocom19.start_ups():
        assert comparison.ours == pytest.approx(comparison.published, abs=0.01)


def test_replaying_a_logged_iteration_ends_when_its_log_says() -> None:
    timeline = infocom19.replay()
    assert timeline.backward_us / 1e3 == pytest.approx(205.3, abs=0.1)
    assert timeline.iteration_us / 1e3 == pytest.approx(311.2, abs=0.1)
    assert (timeline.iteration_us - timeline.backward_us) / 1e3 == pytest.approx(105.9, abs=0.1)


def test_the_simulated_gains_of_merging_googlenet_on_64_nodes() -> None:
    check([c for c in infocom19.simulated_comparisons() if "GoogLeNet" in c.what], 0.12)


def test_one_message_becomes_better_than_one_per_layer_between_16_and_64_nodes() -> None:
    few, many = (infocom19.speed_ups("GoogLeNet", nodes) for nodes in (16, 64))
    assert few["SyncEASGD"] > few["WFBP"]
    assert many["SyncEASGD"] < many["WFBP"]


def test_resnet50_on_8_k80_nodes() -> None:
    rows = by_method(c for c in infocom19.measured_comparisons() if c.what == "ResNet-50 8 nodes")
    check([rows["WFBP"], rows["MG-WFBP"]], 0.15)
    check([rows["SyncEASGD"]], 0.25)
    assert ordered({name: row.ours for name, row in rows.items()}) == ["MG-WFBP", "WFBP", "SyncEASGD"]
    assert ordered({name: row.published for name, row in rows.items()}) == ["MG-WFBP", "WFBP", "SyncEASGD"]


# MG-WFBP, TPDS version: constants fitted on the other two models


@pytest.mark.parametrize("network", tpds.NETWORKS)
@pytest.mark.parametrize("name", tpds.MODELS)
def test_step_times_on_16_v100(name: str, network: str) -> None:
    rows = tpds.comparisons(network, name)
    check(rows, 0.25)
    if network == "10GbE":
        check([row for row in rows if row.method != "MG-WFBP"], 0.10)


def test_on_infiniband_merging_gains_next_to_nothing_for_resnet152() -> None:
    rows = by_method(row for row in tpds.comparisons("56GbIB", "ResNet-152") if "fp32" in row.what)
    assert ordered({name: row.published for name, row in rows.items()}) == ["WFBP", "MG-WFBP", "SyncEASGD"]
    assert rows["WFBP"].ours / rows["MG-WFBP"].ours - 1 < 0.03
    assert rows["SyncEASGD"].ours > max(rows["WFBP"].ours, rows["MG-WFBP"].ours)


# HKBU ddl-benchmarks, 2020: constants fitted on the other two models


def test_resnet50_over_10gbe_on_8_16_and_32_gpus() -> None:
    rows = ddl2020.comparisons("10gbe", "ResNet-50")
    check(rows, 0.15)
    for ranks in (8, 16, 32):
        methods = by_method(row for row in rows if f" {ranks} GPUs" in row.what)
        assert ordered({name: row.ours for name, row in methods.items()}) == ["BSP-A2A", "WFBP-A2A", "MG-WFBP"]


def test_bert_large_over_10gbe_is_bound_by_bytes() -> None:
    published_s = {8: 2.13, 16: 2.359, 32: 2.438}
    rows = [row for row in ddl2020.comparisons("10gbe", "BERT-Large") if row.method == "MG-WFBP"]
    for (ranks, step_s), row in zip(published_s.items(), rows, strict=True):
        assert f" {ranks} GPUs" in row.what
        assert 8 * ranks / row.ours == pytest.approx(step_s, rel=0.20)
    cluster = ddl2020.fitted_cluster("10gbe", ddl2020.others("BERT-Large"))
    for ranks in published_s:
        profile = ddl2020.profile_of("BERT-Large")
        merged_s = [predict_s(profile, cluster, name, ranks) for name in ("mg_wfbp", "ddp", "optimal")]
        assert max(merged_s) / min(merged_s) < 1.05


def test_merging_bert_base_as_its_authors_did_gains_nothing_on_32_gpus() -> None:
    rows = by_method(row for row in ddl2020.comparisons("10gbe", "BERT-Base") if " 32 GPUs" in row.what)
    assert rows["MG-WFBP"].ours / rows["WFBP-A2A"].ours - 1 < 0.05
    check(rows.values(), 0.15)


# ASC-WFBP, INFOCOM 2021


@pytest.mark.parametrize("name", asc.MODELS)
def test_all_reduces_at_the_same_time_beat_merging_which_beats_one_per_layer(name: str) -> None:
    rows = by_method(asc.comparisons(name))
    order = ["ASC-WFBP", "MG-WFBP", "WFBP"]
    assert ordered({method: row.published for method, row in rows.items()}) == order
    assert ordered({method: row.ours for method, row in rows.items()}) == order


def test_two_all_reduces_at_once_move_more_bytes_than_one() -> None:
    check(asc.gain_comparisons(), 0.05)
    check([row for row in asc.left_out_comparisons() if " 4 nodes" in row.what or " 7 nodes" in row.what], 0.05)


# Sparsification, delay, topology


def test_pipelining_a_sparsified_step_gains_no_more_than_its_bound() -> None:
    gains = {name: omgs.predicted_speed_up(name) for name in ("ResNet-50", "VGG-16", "Inception-v4")}
    for name, gain in gains.items():
        assert 1.0 < gain <= omgs.measured(name, "SLGS").bound
    assert gains["ResNet-50"] > gains["VGG-16"]
    published = {row.what.partition(":")[0]: row.published for row in omgs.comparisons()}
    assert published == {"ResNet-50": pytest.approx(1.314, abs=1e-3), "VGG-16": pytest.approx(1.015, abs=1e-3)}


def test_selection_time_by_bytes_fitted_on_two_models_holds_for_a_third() -> None:
    assert omgs.predicted_selection_s() == pytest.approx(omgs.measured("ResNet-50", "SLGS").select_s, rel=0.06)


def test_the_mean_step_with_delayed_synchronization() -> None:
    terms = ssd.batch_32()
    assert terms.compute_s == pytest.approx(0.14, abs=5e-4)
    assert ssd.measured_k5_s() == pytest.approx(0.1627, abs=5e-4)
    assert terms.synchronous_s == pytest.approx(0.2803, abs=5e-4)
    assert ssd.case_1_s(terms, 5) == pytest.approx(ssd.measured_k5_s(), rel=0.02)


def test_network_cards_that_ranks_share_make_the_2d_torus_as_slow_as_it_was() -> None:
    """Published: 46 ms exposed with FP16 and 96x96 images; 30 to 60 are asked for."""
    profile = model("resnet50-96px-v100-amp-b256")
    over_tcp = commlib.Reading(line_rate=False)
    assert 0.030 <= commlib.torus_s(profile, commlib.cluster(over_tcp)) <= 0.060
    assert commlib.torus_s(profile, commlib.cluster(over_tcp, shared_cards=False)) < 0.010
    half = in_dtype(profile, "float16")
    assert 0.030 <= commlib.torus_after_backward_s(half, commlib.cluster()) <= 0.060
    assert commlib.torus_after_backward_s(half, commlib.cluster(shared_cards=False)) < 0.010


def test_throughput_of_128_v100_on_a_public_cloud() -> None:
    """Every row, and the order of methods as published but for two that are 1 % apart.

    The reading was chosen with these tables in view (docs/results/validation.md), so this holds a choice and proves no
    prediction.
    """
    rows = commlib.comparisons(3)
    assert len(rows) == 3 * len(commlib.CELLS)
    check(rows, 0.15)
    assert all(swap.close for swap in swaps(rows))
    check(commlib.comparisons(4), 0.20)
    check([commlib.record_comparison()], 0.10)
    assert ordered(commlib.transformer_exposed_s()) == ["MSTopK-SGD", "2DTAR-SGD", "Dense-SGD (TreeAR)"]


def test_times_to_accuracy_are_those_of_the_cited_entries() -> None:
    rows = commlib.times_to_accuracy()
    assert [row.ours for row in rows] == [1085.2, 561.2, 162.3, 157.6]
    assert all(abs(row.ours - row.published) <= 1.0 for row in rows)


# Collectives


@pytest.mark.parametrize(("nodes", "line", "curve"), [(8, 0.15, 0.03), (2, 0.06, 0.03)])
def test_all_reduce_over_10gbe_by_line_and_by_curve(nodes: int, line: float, curve: float) -> None:
    samples = collectives.osu_all_reduce(nodes, least_bytes=4096)
    assert collectives.line_error(samples) <= line
    assert statistics.mean(collectives.leave_one_out_errors(samples).values()) <= curve


def test_the_short_curve_of_the_catalogue_is_as_good_as_the_long_log() -> None:
    from planner.cost.curve import CostCurve

    samples = [sample for sample in collectives.osu_all_reduce(8) if sample[0] >= 4096]
    short = CostCurve.from_samples((find_cluster("k80-8x1-10gbe-osu").samples or {})["all_reduce"])
    assert statistics.mean(abs(short.at(size) / time_us - 1) for size, time_us in samples) <= 0.05


def test_reduce_scatter_and_all_gather_over_all_reduce_on_8_a100() -> None:
    check(collectives.two_steps_over_one(), 0.02)


def test_a_curve_of_two_pieces_needs_interpolation() -> None:
    samples = collectives.h100_gcp_all_reduce()
    assert max(collectives.leave_one_out_errors(samples).values()) <= 0.25
    assert collectives.line_error(samples) > 0.25


def test_a_ring_fitted_on_fewer_nodes_holds_for_more() -> None:
    """Fitted on 2 and 4 nodes, checked on 8, from 64 MiB on; worse where the library changes its algorithm."""
    rows = collectives.ring_comparisons(collectives.fit_ring((2, 4)), 8)[1:]
    check(rows, 0.35)
    assert statistics.mean(row.error for row in rows) <= 0.20


def test_a_fast_network_gets_an_exact_plan() -> None:
    plan = optimize(dgx.profile_of(32), dgx.cluster(), accuracy="bounded")
    assert plan.accuracy == "exact"
    exact_s = predict_s(dgx.profile_of(32), dgx.cluster(), "optimal", 256)
    for lossy in ("slgs", "lags", "hitopk"):  # selection taken as free; 2 % is what a lossy plan has to gain
        assert predict_s(dgx.profile_of(32), dgx.cluster(), lossy, 256) > exact_s * 0.98
    assert dgx.measured_efficiency(32) == pytest.approx(0.949, abs=1e-3)
    check(dgx.comparisons(), 0.06)
