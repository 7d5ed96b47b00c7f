# Each target does all of its set-up, on a fresh machine too.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Tests run on all cores at once: those with ranks by file, because tests of a file share ranks, and the longest first.
WITHOUT_RANKS := -n auto tests/null
LONGEST := tests/docs/ tests/zoo/
WITH_RANKS := -n auto --dist loadfile --no-loadscope-reorder $(LONGEST) \
	$(filter-out tests/null/ $(LONGEST),$(sort $(wildcard tests/*/)))
COLD := tests/procs/test_session.py tests/procs/test_mismatches.py

.PHONY: help demo test test-all test-versions chromium fuzz lint types docs check zoo validation pictures gpu wheel clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or newer: make PYTHON=python3.11")'
	@echo 'Installing planner and all that its targets need into $(VENV): some minutes, most of them for torch.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)  ## DDP and a plan on two emulated machines: a gain, in about a minute
	$(BIN)/planner demo

test: $(INSTALLED) chromium  ## tests, at least one of everything; about twelve minutes on two cores
	$(BIN)/python -m pytest -m "not long" $(WITHOUT_RANKS)
	$(BIN)/python -m pytest -m "not long" $(WITH_RANKS)

test-all: $(INSTALLED) chromium  ## all tests; some of them also with ranks that start as outside of tests
	$(BIN)/python -m pytest $(WITHOUT_RANKS)
	$(BIN)/python -m pytest $(WITH_RANKS)
	$(BIN)/python -m pytest --cold $(COLD)

CELL ?=
TESTS ?= tests

test-versions: $(INSTALLED)  ## `make test` on Python 3.11 to 3.13 with torch 2.11 to 2.13, resumable; CELL=python3.12-torch2.12, TESTS=tests/null/cost
	$(BIN)/python -m benchmarks.versions --only '$(CELL)' --tests $(TESTS)

chromium:  ## a browser for the tests of pages, where there is none
	@sh tests/browser/install_chromium.sh

fuzz: $(INSTALLED)  ## made-up documents, models and 2,000 scripts; those that held are not run again
	$(BIN)/python -m pytest tests/fuzz --fuzz-documents 10000 --fuzz-models 500 --fuzz-scripts 2000 \
		--fuzz-resume .fuzz-held --timeout 0 -x -q

lint: $(INSTALLED)  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## static types
	$(BIN)/mypy

$(VENV)/.docs: pyproject.toml $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs  ## the documents as a site in site/; fails on a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: lint types docs test-all  ## everything that CI runs

zoo: $(INSTALLED)  ## profile, plan and train every model of tests/zoo; rewrites the table in docs/results/tracing.md
	$(BIN)/python -m benchmarks.trace_zoo --output docs/results/tracing.md

validation: $(INSTALLED)  ## published figures beside planner's: rewrites docs/results/validation.md
	$(BIN)/python -m benchmarks.validate

pictures: $(INSTALLED) chromium  ## draw docs/pictures
	$(BIN)/python -m benchmarks.pictures

MINUTES ?= $(if $(shell command -v nvidia-smi),30,10)
WHEELS ?=

gpu: $(if $(WHEELS),,$(INSTALLED))  ## check and time all that needs a GPU, else rehearse it; MINUTES=30, offline WHEELS=FOLDER
	$(if $(WHEELS),$(PYTHON),$(BIN)/python) -m benchmarks.gpu --minutes $(MINUTES) $(if $(WHEELS),--wheels $(WHEELS))

wheel: $(INSTALLED)  ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## remove what the targets made
	rm -rf $(VENV) .versions build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
