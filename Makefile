# Everything runs in .venv, which this file makes by itself.
# Needed: Python >= 3.10, make; with a C++ compiler the CPU kernels are built, without one the eager ones run.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast test-interop test-deploy dist-check lint bench gpu docs docs-check clean

# With it every process of every test compiles the library and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
# More arguments for every pip call, e.g. PIP_ARGS="--index-url ..." for a build of torch of your choice.
PIP_ARGS ?=
# More arguments for pytest, e.g. PYTEST_ARGS="-x -m slow".
PYTEST_ARGS ?=
# Test files that run at once: most tests wait for other processes or threads. 0 runs all in one process.
TEST_JOBS ?= 4
# A worker that dies is replaced, and its other tests run (tests/scheduling.py); not for ever.
TEST_FLAGS := -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 2
# For `make gpu`: parts to run (all), a folder for the results (dated), and 1 for a dry run on a CPU.
PART ?=
OUT ?=
DRY ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
INTEROP_VENV := .venv-interop
INTEROP_STAMP := $(INTEROP_VENV)/.stamp
DOCS_STAMP := $(VENV)/.stamp-docs
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints-dev.txt)
DOCS := $(shell sed -n '/^docs = \[/,/^\]/s/^ *\("[^"]*"\),$$/\1/p' pyproject.toml)
INTEROP := $(shell sed -n '/^interop-tests = \[/,/^\]/s/^ *\("[^"]*"\),$$/\1/p' pyproject.toml)
DEPLOY_VENV := .venv-deploy
DEPLOY_STAMP := $(DEPLOY_VENV)/.stamp
DIST_STAMP := $(VENV)/.stamp-dist
DEPLOY := $(shell sed -n '/^deploy-tests = \[/,/^\]/s/^ *\("[^"]*"\),$$/\1/p' pyproject.toml)
DIST := $(shell sed -n 's/^dist-tests = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
NATIVE := $(shell find bagua -name '*.cpp' -o -name '*.h' 2>/dev/null)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Variables: PYTHON=$(PYTHON) PIP_ARGS="$(PIP_ARGS)" PYTEST_ARGS="$(PYTEST_ARGS)"'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "make: $(PYTHON) is Python %d.%d; Bagua needs 3.10 or newer (PYTHON=... chooses)" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# torch is installed first and exactly, so that no later requirement can choose another build of it.
$(STAMP): pyproject.toml constraints-dev.txt $(wildcard setup.py) $(NATIVE) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints-dev.txt setuptools
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) '$(TORCH)'
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints-dev.txt --no-build-isolation -e '.[dev,demo]'
	@touch $@

demo: $(STAMP)  ## train, compare and plot on this machine; writes out/demo
	$(BIN)/python examples/demo.py --out out/demo

test: $(STAMP)  ## the everyday tests
	$(BIN)/python -m pytest -q $(TEST_FLAGS) tests $(PYTEST_ARGS)

test-fast: $(STAMP)  ## the tests that start no process (the unit tier)
	$(BIN)/python -m pytest -q $(TEST_FLAGS) -m "unit and not slow" tests $(PYTEST_ARGS)

# Bagua is installed as well, so that `.venv-interop/bin/bagua run examples/hf_trainer.py` works.
$(INTEROP_STAMP): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(INTEROP_VENV)
	$(INTEROP_VENV)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) '$(TORCH)'
	$(INTEROP_VENV)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints-dev.txt setuptools $(INTEROP)
	$(INTEROP_VENV)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) --no-build-isolation --no-deps -e .
	@touch $@

test-interop: $(INTEROP_STAMP)  ## Hugging Face and loggers of metrics, which `make test` skips; in .venv-interop
	$(INTEROP_VENV)/bin/python -m pytest -q -rs --dist loadfile -n 2 tests/interop tests/examples/test_hugging_face.py \
		tests/examples/test_squad_training.py $(PYTEST_ARGS)

# skypilot and torchx pin old versions of much, so no constraints here.
$(DEPLOY_STAMP): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(DEPLOY_VENV)
	$(DEPLOY_VENV)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) '$(TORCH)'
	$(DEPLOY_VENV)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) $(DEPLOY)
	@touch $@

test-deploy: $(DEPLOY_STAMP)  ## files in deploy/, by the programs that read them: hadolint, Trainer's model, TorchX, SkyPilot
	PATH="$(CURDIR)/$(DEPLOY_VENV)/bin:$$PATH" $(DEPLOY_VENV)/bin/python -m pytest -q -rs tests/deploy $(PYTEST_ARGS)
	$(DEPLOY_VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

$(DIST_STAMP): $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) $(DIST)
	@touch $@

dist-check: $(DIST_STAMP)  ## sdist and wheel: contents, same bytes twice, a machine without a compiler, aarch64 by qemu
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m pytest -q -rs -m "slow or not slow" tests/packaging $(PYTEST_ARGS)

lint: $(STAMP)  ## style, format and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m basedpyright

bench: $(STAMP)  ## cost of the wrapper beside plain PyTorch
	$(BIN)/python -m benchmarks.overhead

# A machine with a GPU may have no network, and its own torch: .venv is used if its torch has CUDA, else PYTHON.
gpu:  ## what a machine with one GPU shows; PART="tests rates", OUT=folder, DRY=1 on a CPU
	@for python in $(BIN)/python $(PYTHON); do \
	  if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then break; fi; \
	  python=; done; \
	if [ -z "$$python" ]; then python=$(PYTHON); if [ -x $(BIN)/python ]; then python=$(BIN)/python; fi; fi; \
	exec $$python -m benchmarks.gpu $(foreach part,$(PART),--part $(part)) $(if $(OUT),--out "$(OUT)") $(if $(filter-out 0,$(DRY)),--dry)

# MkDocs reads the sources as text: the site needs neither torch nor the compiled kernels, whose set-up takes minutes.
$(DOCS_STAMP): pyproject.toml constraints-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints-dev.txt $(DOCS)
	@touch $@

docs: $(DOCS_STAMP)  ## the site, out/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

docs-check: $(STAMP) $(DOCS_STAMP)  ## check docs/: code, links, figures, and the table of what works, by its tests (6 to 20 minutes)
	$(BIN)/python -m benchmarks.figures --check
	$(BIN)/python -m pytest -q -m "slow or not slow" tests/docs tests/parity/test_page.py $(PYTEST_ARGS)
	$(BIN)/python -m tests.parity.page --check

clean:  ## remove what was built, .venv too
	rm -rf $(VENV) $(INTEROP_VENV) $(DEPLOY_VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	find bagua -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
