"""Models of a user's own, described in a few numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import run, run_json

from planner.documents.catalog import find_profile
from planner.documents.profile import load_profile
from planner.documents.shapes import Decoder, new_decoder
from runtime.errors import InputError


def test_the_numbers_of_llama_give_the_catalogues_llama() -> None:
    known = find_profile("llama-8b")
    found = new_decoder(Decoder(layers=32, width=4096, batch=2, heads=32, key_heads=8, hidden=14336), 0.464)
    for name in ("gradients", "forward_us", "update_us", "optimizer"):
        assert getattr(found.compute, name) == getattr(known.compute, name)
    assert found.world == known.world
    assert found.compute.estimate is not None
    assert known.compute.estimate is not None
    same = replace(known.compute.estimate, efficiency={}, other_efficiency=0.464, source=found.compute.estimate.source)
    assert found.compute.estimate == same


def test_a_model_of_ones_own_is_advised_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("model", "new", "--layers", "4", "--hidden", "512", "--batch", "4", "-o", "mine.json")
    assert "planner advise mine.json --cluster CLUSTER" in capsys.readouterr().out
    assert load_profile("mine.json").model.name == "mine"
    advice = run_json(capsys, "advise", "mine.json", "--cluster", "a100-8x8-100gb")
    assert advice["computed_with"]["batch_per_rank"] == 4
    assert advice["computed_with"]["accelerator"] == "a100-40gb"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": 0}, "--layers: found 0, expected 1 to"),
        ({"heads": 3}, r"--heads: found 3, expected a divisor of --hidden \(512\)"),
        ({"heads": 4, "key_heads": 3}, r"--key-heads: found 3, expected a divisor of --heads \(4\)"),
        ({"share": 1.5}, "--share: found 1.5"),
    ],
)
def test_shapes_that_are_none(options: dict[str, float], said: str) -> None:
    share = options.pop("share", None)
    with pytest.raises(InputError, match=said):
        new_decoder(replace(Decoder(layers=2, width=512, batch=1), **options), share)  # type: ignore[arg-type]
