# make setup     .venv with the engine and everything its tests need
# make demo      the default pair, plain and speculative, with both speeds
# make check     lint, types and the quick tests: before every commit (2 minutes)
# make test      lint, types and all tests (10 minutes)
# make sanitize  the compiled kernels' tests under address, undefined-behaviour and thread sanitizers (minutes)
# make verify    every claim at full size; writes docs/results.md
# make audit     known vulnerabilities of the tested packages, and their list as build/sbom.cdx.json
# make lock      requirements.lock anew, after constraints.txt has changed
#
# make setup LOCKED=1 installs only files whose hashes stand in requirements.lock, and torch.
# On Linux PyPI's torch is the CUDA build (gigabytes). For the CPU build:
#   make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What is never imported need not be compiled, which is most of it.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile $(PIP_ARGS) -c constraints.txt

.PHONY: setup demo check test lint sanitize verify audit lock clean

setup: $(STAMP)

NATIVE := setup.py $(wildcard src/slipstream/kernels/cpu/native/*.cpp src/slipstream/kernels/cpu/native/*.h)

# dflash is only the tests' oracle and pins packages its model code never imports, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(LOCKED),$(PIP_INSTALL) --no-deps --require-hashes -r requirements.lock)
	$(PIP_INSTALL) -e '.[test]'
	$(PIP_INSTALL) --no-deps dflash
	touch $@

demo: setup
	$(BIN)/slipstream demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: setup
	$(BIN)/python -m tests.side_by_side check

test: setup
	$(BIN)/python -m tests.side_by_side test

sanitize: setup
	$(BIN)/python scripts/sanitize.py

verify: setup
	$(BIN)/python -m tests.verify

# The two tools have packages of their own, which must not mix with the ones they look at.
TOOLS := build/audit
$(TOOLS)/bin/pip-audit:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --disable-pip-version-check --quiet pip-audit==2.10.1 cyclonedx-bom==7.5.0

audit: $(TOOLS)/bin/pip-audit
	$(TOOLS)/bin/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --of JSON -o build/sbom.cdx.json
	$(TOOLS)/bin/pip-audit --requirement requirements.lock --disable-pip --no-deps --progress-spinner off

lock: setup
	$(BIN)/python scripts/lock.py

clean:
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
