"""Options of the fuzzers."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-models", type=int, default=40, help="random models to train beside DDP")
    parser.addoption("--fuzz-seed", type=int, default=0, help="another seed draws other models")
    parser.addoption("--fuzz-replay", default="", help="a failing model's line, to run it alone")
