"""The scale of a rehearsal: what is dilated and shrunk, how it is chosen, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.decide.optimize import optimize
from planner.documents.catalog import find_cluster, find_profile
from planner.documents.machines import Machines, describe_machines
from planner.fsdp2.inputs import baselines_of
from planner.fsdp2.program import Shape
from planner.fsdp2.simulator import simulate
from planner.model.modes import model_of
from planner.model.problem import make_problem
from planner.rehearse.asked import ask_plan, ask_wrappings, find_target
from planner.rehearse.scale import Links, Machine, Scale, check_profile, choose_scale, links_of, on_hosts, scaled_plan
from planner.strategies.baselines import wfbp
from runtime.errors import InputError
from runtime.plan.names import layer_of

GIB = 2.0**30


@pytest.mark.parametrize("name", ["resnet50", "gpt2", "vgg16"])
def test_a_scaled_step_is_the_step_dilated(name: str) -> None:
    """Links of the scaled rate, start-ups dilated: every message and the whole step take D times as long."""
    profile, cluster = find_profile(name), on_hosts(find_cluster("v100-16x8-25gbe"), 4, 1)
    scale = Scale(dilate=6.0, shrink=4.0)
    assert cluster.inter is not None
    slow = replace(
        cluster.inter,
        alpha_us=cluster.inter.alpha_us * scale.dilate,
        beta_us_per_byte=cluster.inter.beta_us_per_byte * scale.dilate * scale.shrink,
    )
    problem = make_problem(profile, cluster)
    scaled = make_problem(scale.profile(profile), replace(cluster, inter=slow))
    schedule = wfbp(problem)
    step_us = model_of(schedule).step_us(problem, schedule)
    assert model_of(schedule).step_us(scaled, schedule) / scale.dilate == pytest.approx(step_us, rel=1e-3)
    assert 8e6 / slow.beta_us_per_byte == pytest.approx(scale.rate(links_of(cluster).inter_bits_per_s))


def test_scaled_units_are_the_units_dilated_and_shrunk() -> None:
    """A wrapping's step takes D times as long over links of the scaled rate, and an S-th of the memory."""
    asked = ask_wrappings(find_target("bert-large", "v100-16x8-25gbe", "4x1"))
    scale, setting = Scale(dilate=6.0, shrink=4.0), asked.setting(asked.cluster)
    costs = setting.costs(None)
    slow = replace(
        costs, update_us=costs.update_us * scale.dilate,
        gather_us=lambda size: scale.dilate * costs.gather_us(size * scale.shrink),
        scatter_us=lambda size: scale.dilate * costs.scatter_us(size * scale.shrink),
    )  # fmt: skip
    for plan in baselines_of(setting).values():
        step = simulate(setting.shape, plan, costs, "hosts")
        scaled = simulate(Shape.of(scale.units(asked.units), 4), plan, slow, "hosts")
        assert scaled.iteration_us / scale.dilate == pytest.approx(step.iteration_us, rel=1e-3)
        assert scaled.peak_bytes * scale.shrink == pytest.approx(step.peak_bytes, rel=1e-3)


def test_a_lossy_plan_fits_the_scaled_model() -> None:
    """Elements of small gradients are rounded, and at least one: no layer may be asked for more than it has."""
    profile, cluster = find_profile("resnet50"), on_hosts(find_cluster("p102-1gbe"), 8, 1)
    plan = optimize(profile, cluster, accuracy="bounded", compress="sparse")
    scale = Scale(dilate=2.0, shrink=25.0)
    scaled = scaled_plan(plan, scale, profile.compute, "of the scaled model")
    numel = {gradient.name: scale.numel(gradient.numel) for gradient in profile.compute.gradients}
    seen = 0
    for bucket in scaled.buckets:
        for layer, k in (bucket.compressor.k or {}).items():
            of_layer = sum(numel[name] for name in bucket.gradients if layer_of(name) == layer)
            assert 1 <= k <= of_layer
            seen += 1
    assert seen > 50


def test_the_scale_matches_start_ups_and_leaves_sockets_idle() -> None:
    links = Links(start_up_us=250.0, us_per_byte=1e-3, inter_bits_per_s=1e10, intra_bits_per_s=None)
    machine = Machine(ranks=8, update_us_per_byte=1e-5, start_up_us=2000.0, us_per_byte=4e-3, memory_bytes=24 * GIB)
    profile = find_profile("resnet50")

    def chosen(**given: float | None) -> Scale:
        options = {"most_dilate": 100.0, "dilate": None, "shrink": None} | given
        return choose_scale(links, machine, profile, **options)  # type: ignore[arg-type]

    assert chosen() == Scale(dilate=8.0, shrink=5.0)  # 4e-3 / 1e-3 / 0.1 = 40 = 8 · 5
    assert chosen(most_dilate=4.0) == Scale(dilate=4.0, shrink=10.0)
    assert chosen(dilate=16.0) == Scale(dilate=16.0, shrink=2.5)
    assert chosen(shrink=8.0) == Scale(dilate=8.0, shrink=8.0)


def test_models_that_do_not_fit_are_shrunk_or_refused() -> None:
    links = Links(start_up_us=250.0, us_per_byte=1.0, inter_bits_per_s=1e7, intra_bits_per_s=None)
    machine = Machine(ranks=8, update_us_per_byte=1e-5, start_up_us=250.0, us_per_byte=0.0, memory_bytes=4 * GIB)
    profile = find_profile("vgg16")
    scale = choose_scale(links, machine, profile, most_dilate=9.0, dilate=None, shrink=None)
    held = 6 * 8 * sum(each.size_bytes for each in profile.compute.gradients) / scale.shrink
    assert held <= 0.6 * machine.memory_bytes
    with pytest.raises(InputError, match=r"GiB; shrink by .* or more"):
        choose_scale(links, machine, profile, most_dilate=9.0, dilate=None, shrink=scale.shrink / 2)


def test_what_cannot_be_rehearsed_is_refused() -> None:
    profile = find_profile("resnet50")
    times = tuple(replace(each, backward_us=0.0) for each in profile.compute.gradients)
    with pytest.raises(InputError, match="no gradient has a time"):
        check_profile(replace(profile, compute=replace(profile.compute, gradients=times)), "profile.json")
    narrow = (replace(profile.compute.gradients[0], dtype="float8_e5m2"), *profile.compute.gradients[1:])
    with pytest.raises(InputError, match="which gloo cannot add up"):
        check_profile(replace(profile, compute=replace(profile.compute, gradients=narrow)), "profile.json")
    one_kind = replace(find_cluster("v100-16x8-25gbe"), intra=None)
    with pytest.raises(InputError, match="--hosts 8x1"):
        on_hosts(one_kind, 4, 2)


def test_described_machines_are_rehearsed_on_any_hosts() -> None:
    """No link is measured there: rates are those of the cards, and of what joins accelerators of a node."""
    machines = describe_machines(Machines(nodes=2, gpus=8, gpu="a40", nic="2x100gbit", intra="24gbyte", network="roce"))
    for hosts, each in ((8, 1), (4, 2), (2, 8)):
        found = links_of(on_hosts(machines, hosts, each))
        assert found.inter_bits_per_s == pytest.approx(200e9)
        assert found.intra_bits_per_s == (None if each == 1 else pytest.approx(192e9))
    alone = describe_machines(Machines(nodes=1, gpus=8, gpu="a100"))
    with pytest.raises(InputError, match=r'no link constants between nodes \("inter"\).*expected them$'):
        on_hosts(alone, 4, 2)
    measured = find_cluster("v100-4x4-10gbe")
    with pytest.raises(InputError, match="or the hosts that were measured, 4x4"):
        on_hosts(measured, 4, 2)


def test_what_is_rehearsed_computes_as_long_as_on_the_clusters_accelerator() -> None:
    asked = ask_plan(find_target("gpt2@dgx-h100", None, "4x1"), strategies=())
    problem = make_problem(find_profile("gpt2"), find_cluster("dgx-h100"))
    assert asked.profile.compute.forward_us == problem.forward_us


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": "8"}, "expected HOSTSxRANKS"),
        ({"hosts": "300x1"}, "expected 2 to 256"),
        ({"hosts": "1x1"}, "expected 2 to 256"),
        ({"hosts": "2x1", "minutes": 0.0}, "--minutes"),
        ({"hosts": "2x1", "dilate": 0.5}, "--dilate: found 0.5, expected 1 to"),
        ({"hosts": "2x1", "shrink": 0.0}, "--shrink: found 0, expected 1 to"),
        ({"name": "resnet50", "hosts": "2x1"}, "found no cluster"),
    ],
)
def test_wrong_options(options: dict[str, object], words: str) -> None:
    usual = {"name": "resnet50@v100-16x8-25gbe", "cluster": None, "hosts": None}
    with pytest.raises(InputError, match=words):
        find_target(**(usual | options))  # type: ignore[arg-type]
