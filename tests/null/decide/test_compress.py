"""`--compress`: bounded plans alone send all elements in fewer bytes; low rank and top-k are asked for by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import add_matrix, usual_document, usual_profile

from planner import optimize
from planner.decide.plan_request import Request
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_cluster, find_profile, names
from planner.documents.profile import OptimizerProfile, Profile, parse_profile
from planner.model.codecs import LOSSY, LowRank, TopK, Wire, codec_of
from planner.model.problem import make_problem
from planner.passes.delay import Delay
from planner.passes.joint import Joint

SLOW = "k80-10gbe"
OPTIMIZERS = (OptimizerProfile(name="SGD", adaptive=False), OptimizerProfile(name="AdamW", adaptive=True))


def trained_by(profile: Profile, optimizer: OptimizerProfile) -> Profile:
    return replace(profile, compute=replace(profile.compute, optimizer=optimizer))


@pytest.mark.parametrize("model", names("model"))
def test_alone_searches_look_at_narrow_dtypes_of_every_model_with_every_optimizer(model: str) -> None:
    for optimizer in OPTIMIZERS:
        profile = trained_by(find_profile(model), optimizer)
        problem = make_problem(profile, find_cluster(SLOW))
        forms = {}
        for compress in (None, "wire", "all", "none"):
            lossy = Request(profile=profile, cluster=SLOW, accuracy="relaxed", compress=compress).lossy
            [joint] = [each for each in lossy if isinstance(each, Joint)]
            [delay] = [each for each in lossy if isinstance(each, Delay)]
            assert delay.codecs == joint.codecs
            forms[compress] = {type(form.codec) for form in joint.forms(problem)}
        assert forms[None] == forms["wire"] == {Wire}
        assert {Wire, TopK} <= forms["all"]
        assert (LowRank in forms["all"]) == any(gradient.matrix for gradient in profile.compute.gradients)
        assert forms["none"] == set()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.name)
@pytest.mark.parametrize("model", ["alexnet", "resnet18-ddp"])
def test_no_plan_of_the_catalogue_holds_more_than_was_asked_for(model: str, optimizer: OptimizerProfile) -> None:
    profile = trained_by(find_profile(model), optimizer)
    compressors = {bucket.compressor.name for bucket in optimize(profile, SLOW, accuracy="bounded").buckets}
    assert compressors <= {"none", "wire"}


def test_strategies_by_name_are_not_limited() -> None:
    problem = make_problem(usual_profile(), find_cluster(SLOW))
    for name, codec in (("lags", TopK), ("slgs", TopK), ("joint:4", TopK), ("wire", Wire)):
        assert any(isinstance(codec_of(bucket), codec) for bucket in make_schedule(problem, name).buckets), name
    assert Joint(compress="all").codecs == set(LOSSY)
    document = usual_document()
    for gradient in document["compute"]["gradients"]:
        add_matrix(gradient)
    problem = make_problem(parse_profile(document), find_cluster(SLOW))
    assert any(isinstance(codec_of(bucket), LowRank) for bucket in make_schedule(problem, "lowrank:2").buckets)
