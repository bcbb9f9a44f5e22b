# Everything runs in .venv, which this file makes by itself.
# Needed: Python >= 3.10, make; with a C++ compiler the CPU kernels are built, without one the eager ones run.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench docs clean

PYTHON ?= python3
# More arguments for every pip call, e.g. PIP_ARGS="--index-url ..." for a build of torch of your choice.
PIP_ARGS ?=
# More arguments for pytest, e.g. PYTEST_ARGS="-x -m slow".
PYTEST_ARGS ?=
# Test files that run at once: most tests wait for other processes. 0 runs all in one process.
TEST_JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DOCS_STAMP := $(VENV)/.stamp-docs
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints-dev.txt)
DOCS := $(shell sed -n '/^docs = \[/,/^\]/s/^ *\("[^"]*"\),$$/\1/p' pyproject.toml)
NATIVE := $(shell find bagua -name '*.cpp' -o -name '*.h' 2>/dev/null)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Variables: PYTHON=$(PYTHON) PIP_ARGS="$(PIP_ARGS)" PYTEST_ARGS="$(PYTEST_ARGS)"'

# torch is installed first and exactly, so that no later requirement can choose another build of it.
$(STAMP): pyproject.toml constraints-dev.txt $(wildcard setup.py) $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "make: $(PYTHON) is Python %d.%d; Bagua needs 3.10 or newer (PYTHON=... chooses)" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints-dev.txt setuptools
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) '$(TORCH)'
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints-dev.txt --no-build-isolation -e '.[dev,demo]'
	@touch $@

demo: $(STAMP)  ## train, compare and plot on this machine; writes out/demo
	$(BIN)/python examples/demo.py --out out/demo

test: $(STAMP)  ## the everyday tests
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile tests $(PYTEST_ARGS)

lint: $(STAMP)  ## style, format and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m basedpyright

bench: $(STAMP)  ## cost of the wrapper beside plain PyTorch
	$(BIN)/python -m benchmarks.overhead

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints-dev.txt $(DOCS)
	@touch $@

docs: $(DOCS_STAMP)  ## the site, out/site/index.html; also writes docs/compatibility.md from its tests, runs the code in docs/
	$(BIN)/python -m tests.parity.page
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m pytest -q tests/docs tests/parity/test_page.py $(PYTEST_ARGS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:  ## remove what was built, .venv too
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	find bagua -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
