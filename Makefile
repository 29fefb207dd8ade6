# make demo | recipes | quick-start | test | test-models | test-newest | test-oldest | fuzz | mutants | lint | docs | dist | setup | clean
#
# The first four set themselves up: a virtual environment in $(VENV), with the versions of constraints.txt. It is
# built once, and again when pyproject.toml or constraints.txt change.
#
#   PYTHON=python3.12   the Python (>= 3.10) to build that environment with, or to use as it is
#   ENV=current         use $(PYTHON) with what it has installed: nothing is created, nothing is installed
#   WORKERS=2           processes that the tests run in
#   ARCHITECTURES=others  for test-models: those that `make test` does not take, instead of all
#   ARGS="..."          more arguments for the command: make demo ARGS="--steps 20", make test ARGS="-k planner",
#               make fuzz ARGS="--start 50000 --count 100000"

PYTHON ?= python3
VENV ?= .venv
ENV ?= venv
WORKERS ?= 2
ARCHITECTURES ?= 1
ARGS ?=

ifeq ($(ENV),current)
RUN := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
READY :=
else ifeq ($(ENV),venv)
RUN := $(VENV)/bin/python
READY := $(VENV)/.installed
else
$(error ENV is '$(ENV)': expected 'venv' (the default) or 'current')
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo recipes quick-start test test-models test-newest test-oldest fuzz mutants lint docs dist clean

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

setup: $(READY)

# torch goes first: whatever is installed after it finds its torch there, of the version pinned.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "flce needs Python 3.10 or newer: make $(MAKECMDGOALS) PYTHON=python3.12, say" >&2; exit 1; }
	@echo "Setting up $(VENV): a few minutes, once."
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(RUN) integrations/demo.py $(ARGS)

# The scripts that train with other libraries, stock and patched, in full; a few minutes.
recipes: $(READY)
	RECIPE_STEPS=50 OMP_NUM_THREADS=1 $(RUN) -m pytest -rPs -k "test_the_script or test_trains_alike" \
	    tests/integrations/test_scripts.py tests/integrations/test_trl.py $(ARGS)

# What README.md calls its quick start, as it stands there, in a copy of this repository.
quick-start: $(READY)
	PYTHON="$(if $(filter current,$(ENV)),$(PYTHON),$(VENV)/bin/python)" scripts/quick_start.sh

# One thread per worker, so that the workers do not get into each other's way.
test: $(READY)
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# Every architecture of Transformers, of which `make test` takes a sample.
test-models: $(READY)
	FLCE_ALL_ARCHITECTURES=$(ARCHITECTURES) OMP_NUM_THREADS=1 \
	    $(RUN) -m pytest -n $(WORKERS) --dist worksteal tests/huggingface/test_architectures.py $(ARGS)

# Imports, patched models and the operator's grid with the newest PyTorch, Triton and Transformers, in an environment of
# its own. `scripts/versions.sh write newest` looks for newer ones.
test-newest:
	PYTHON=$(PYTHON) WORKERS=$(WORKERS) scripts/versions.sh newest

# The same with the oldest that flce supports.
test-oldest:
	PYTHON=$(PYTHON) WORKERS=$(WORKERS) scripts/versions.sh oldest

# Random programs on lazy logits and on real ones, of which `make test` takes the first 3,000; random calls of the
# functions, of which it takes 20 in each test.
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m tests.huggingface.fuzz --count 50000 --workers $(WORKERS) $(ARGS)
	HYPOTHESIS_PROFILE=search OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) -o timeout=0 tests/ops/test_search.py

# Mutants of a few modules, each with a few tests (scripts/mutants.toml); up to three hours. cosmic-ray has an environment
# of its own.
mutants: $(READY)
	test -x .cache/cosmic-ray/bin/python || $(PYTHON) -m venv .cache/cosmic-ray
	.cache/cosmic-ray/bin/python -m pip install --quiet 'cosmic-ray>=8.7'
	.cache/cosmic-ray/bin/python scripts/mutants.py --workers $(WORKERS) $(ARGS) \
	    --python "$(if $(filter current,$(ENV)),$(PYTHON),$(CURDIR)/$(VENV)/bin/python)"

lint: $(READY)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

# The site of the documents, in site/. A link or an anchor that leads nowhere is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# The source distribution and the wheel made of it, in dist/; in an environment of its own.
dist:
	test -x .cache/build/bin/python || $(PYTHON) -m venv .cache/build
	.cache/build/bin/python -m pip install --quiet build
	rm -rf dist
	.cache/build/bin/python -m build

clean:
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info demo.png demo-memory.png
