"""Options of the fuzzing tests: a small budget by default, a long one for `make fuzz`."""

import pytest

DOCUMENTS, MODELS, SCRIPTS, SEED = 400, 40, 100, 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Asked for only when this folder is named on the command line; elsewhere the defaults hold."""
    group = parser.getgroup("fuzz")
    group.addoption("--fuzz-documents", type=int, default=DOCUMENTS, help="documents to make up")
    group.addoption("--fuzz-models", type=int, default=MODELS, help="random models to train beside DDP")
    group.addoption("--fuzz-scripts", type=int, default=SCRIPTS, help="random scripts to run beside DDP")
    group.addoption("--fuzz-seed", type=int, default=SEED, help="another seed draws other models and scripts")
    group.addoption("--fuzz-resume", default="", help="a file of scripts that held: they are not run again")
    group.addoption("--fuzz-replay", default="", help="a failing model's or script's line, to run it alone")


@pytest.fixture(scope="session")
def fuzz_documents(pytestconfig: pytest.Config) -> int:
    """How many documents to make up."""
    return int(pytestconfig.getoption("--fuzz-documents", DOCUMENTS))
