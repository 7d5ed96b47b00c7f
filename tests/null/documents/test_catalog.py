"""Models and clusters by name, and the documents that ship with the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import cluster_document, run, run_json, usual_document, write

from planner import optimize, simulate
from planner.documents.catalog import entries, find_cluster, find_profile, names
from planner.documents.profile import load_cluster, load_profile, parse_profile
from planner.model.problem import make_problem
from runtime.errors import InputError

ROOT = Path(__file__).parents[3]


def test_a_model_on_a_cluster_is_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    records = run_json(capsys, "simulate", "resnet50@v100-16x8-25gbe", "--strategy", "single,optimal")
    assert [(record["strategy"], record["ranks"]) for record in records] == [("single", 128), ("optimal", 128)]
    assert (
        run_json(capsys, "simulate", "resnet50", "--cluster", "v100-16x8-25gbe", "--strategy", "single,optimal")
        == records
    )


def test_a_name_is_the_file_of_that_name() -> None:
    assert find_profile("resnet50") == load_profile(ROOT / "profiles/models/resnet50.json")
    assert find_cluster("k80-10gbe") == load_cluster(ROOT / "profiles/clusters/k80-10gbe.json")
    assert find_profile("vgg16@k80-10gbe").cluster == find_cluster("k80-10gbe")


@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        ("gpt2", 48), ("bert-base", 72), ("bert-large", 144), ("vit-l16", 96), ("transformer", 60), ("llama-8b", 224),
        ("olmoe-1b-7b", 64),
    ],
)  # fmt: skip
def test_hidden_matrices_of_transformers_have_estimated_times_with_muon(name: str, matrices: int) -> None:
    without, profile = find_profile(name), find_profile(f"{name}+muon")
    operator, optimizer = profile.compute.operator, profile.compute.optimizer
    assert operator is not None
    assert optimizer is not None
    assert len(operator.parameters) == len(set(operator.parameters)) == matrices
    assert optimizer.matrices == operator.parameters
    total_us = sum(shape.operator_us * len(shape.parameters) for shape in operator.shapes)
    assert profile.compute.update_us == pytest.approx(without.compute.update_us + total_us)
    assert parse_profile(profile.to_document()) == profile


def test_a_plan_of_a_model_with_muon_says_that_times_are_estimated_and_which_owners_win() -> None:
    plan = optimize("gpt2+muon@a100-8x8-25gb")
    operator = plan.updates.operator if plan.updates else None
    assert operator is not None
    assert operator.owners is not None
    assert operator.inside == tuple(range(len(operator.messages)))  # 25 Gbit/s a node for 170 MB
    assert max(operator.owners.values()) == 7
    assert any("estimated: FLOPs over a share of the accelerator's peak" in note for note in plan.notes)
    assert any("of them inside nodes" in note for note in plan.notes)


def test_operators_are_as_fast_on_another_accelerator_as_its_products_of_matrices() -> None:
    profile = find_profile("llama-1b+muon")
    on_a100 = make_problem(profile, find_cluster("a100-8x8-25gb")).profile
    ratio = on_a100.compute.forward_us / profile.compute.forward_us
    assert profile.compute.operator is not None
    assert on_a100.compute.operator is not None
    before, after = profile.compute.operator.shapes[0], on_a100.compute.operator.shapes[0]
    assert after.operator_us / before.operator_us == pytest.approx(ratio)


def test_muon_is_for_transformers_alone() -> None:
    with pytest.raises(
        InputError, match=r"resnet50: found no matrices of hidden layers for Muon, expected a transformer"
    ):
        find_profile("resnet50+muon")


def test_the_cluster_option_replaces_the_one_behind_the_at() -> None:
    [record] = simulate("resnet50@v100-16x8-25gbe", "k80-10gbe", strategies=["single"])
    assert record.ranks == 8


def test_a_path_that_exists_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "resnet50", usual_document())
    write(tmp_path / "k80-10gbe", cluster_document(nodes=2))
    assert find_profile("resnet50").model.name == "test"
    assert find_cluster("k80-10gbe").nodes == 2
    both = find_profile("resnet50@k80-10gbe")
    assert both.model.name == "test"
    assert both.cluster is not None
    assert both.cluster.nodes == 2
    write(tmp_path / "resnet50@k80-10gbe", usual_document(ranks=7))
    assert find_profile("resnet50@k80-10gbe").world.ranks == 7


def test_a_folder_named_profiles_where_one_works_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_profile("resnet50").model.name == "resnet50"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("resnet-50@k80-10gbe",), r"resnet-50: found neither a file nor a known model .*did you mean .*resnet50"),
        (("resnet50@k80",), r"k80: found neither a file nor a known cluster .*one of: .*v100-16x8-25gbe"),
        (("quark",), r"quark: found neither a file nor a known model of that name; expected .* one of: alexnet, bert"),
        (("resnet50", "no-such"), r"no-such: found neither a file nor a known cluster"),
        (("missing.json",), r"missing\.json: no such file"),
        (("resnet50@missing.json",), r"missing\.json: no such file"),
        (("folder/resnet50",), r"folder/resnet50: no such file"),
        (("resnet50",), r"resnet50: \$\.cluster: found none .*`--cluster NAME` \(`planner catalog` lists names\)"),
        (("@k80-10gbe",), r"found neither a file nor a known model"),
        (("resnet50@",), r"found neither a file nor a known cluster"),
    ],
)
def test_unknown_names_list_the_near_and_the_known_ones(arguments: tuple[str, ...], said: str) -> None:
    for decide in (simulate, optimize):
        with pytest.raises(InputError, match=said):
            decide(*arguments)  # type: ignore[operator]


def test_optimize_takes_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    plan = run_json(capsys, "optimize", "googlenet@k80-10gbe")
    assert plan["world"]["ranks"] == 8
    assert plan["predicted"]["iteration_us"] <= min(b["iteration_us"] for b in plan["baselines"].values())


def test_catalog_lists_every_document_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run_json(capsys, "catalog")
    assert [(item["kind"], item["name"]) for item in listed] == [
        *(("model", name) for name in names("model")),
        *(("cluster", name) for name in names("cluster")),
    ]
    assert all(item["source"] for item in listed)
    run("catalog")
    assert "resnet50" in capsys.readouterr().out


def test_every_document_names_itself_and_its_source() -> None:
    for path in (ROOT / "profiles/models").iterdir():
        profile = load_profile(path)
        assert profile.model.name == path.stem
        assert profile.source
        assert profile.notes
    for path in (ROOT / "profiles/clusters").iterdir():
        cluster = load_cluster(path)
        assert cluster.name == path.stem
        assert cluster.source
        assert "github.com" in cluster.source or "arXiv" in cluster.source


@pytest.mark.parametrize("cluster", names("cluster"))
def test_every_cluster_costs_an_all_reduce_at_its_size_and_at_others(cluster: str) -> None:
    machines = find_cluster(cluster)
    profile = find_profile("googlenet")
    for ranks in (None, machines.ranks_per_node * 2, machines.ranks_per_node * 64):
        problem = make_problem(profile, machines, ranks)
        assert problem.cost.all_reduce.at(1e6) > 0.0


def test_the_known_parameter_counts_hold() -> None:
    """As the publications print them."""
    counts = {
        "resnet50": 25557032, "resnet152": 60192808, "densenet201": 20013928, "inception-v4": 42679816,
        "googlenet": 13379136, "vgg16": 138357544, "gpt2": 124439808,
    }  # fmt: skip
    for name, count in counts.items():
        gradients = find_profile(name).compute.gradients
        assert sum(gradient.numel for gradient in gradients) == count, name


def test_source_and_notes_survive_reading_and_writing(tmp_path: Path) -> None:
    profile = find_profile("googlenet@k80-10gbe")
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    with pytest.raises(InputError, match=r"\$\.notes"):
        parse_profile({**usual_document(), "notes": "one line"})


def test_entries_say_what_they_are() -> None:
    [entry] = [entry for entry in entries() if entry.name == "v100-16x8-25gbe"]
    assert entry.summary == "128 ranks: 16 nodes of 8"
