.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
ONE_THREAD := OMP_NUM_THREADS=1 MLFLOW_DISABLE_TELEMETRY=true

# The set-up is done again only when the dependencies change. torch goes first: its wheel is the one that differs
# between machines, and a set-up that cannot find it stops at once.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

.PHONY: run test test-all ui lint gpu clean help

run: .venv/ready ## Set up, then train at level=O2 boost_level=O1, measure and log.
	$(BIN)/python -m ampexp level=O2 boost_level=O1

test: lint ## Set up, check the style and the types, run the tests that take minutes at most.
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-all: lint ## Everything that `test` does, and the slow tests.
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not gpu"

gpu: .venv/ready ## Run what needs a CUDA device: the marked tests and the benchmarks, ten minutes at most.
	PYTHON=$(BIN)/python experiments/gpu/run.sh

ui: .venv/ready ## Open MLflow on the runs of this directory.
	$(BIN)/python -m ampexp ui

lint: .venv/ready ## Check the style and the types.
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

clean: ## Remove the set-up and the caches; runs and their records stay.
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1: \2/p' $(MAKEFILE_LIST)
