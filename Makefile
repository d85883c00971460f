# Run `make help` for the targets. Everything happens in .venv, made on first use; a target installs what it
# needs, again only when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
# Quiet, but errors and warnings are shown.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help serve test lint kernels format bench demo-model clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# `-I` keeps the repository root, with its folder `platform`, off the path of a Python that knows nothing of it.
$(BIN)/python:
	@$(PYTHON) -I -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "Outrider needs Python 3.11 to 3.13; choose one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -I -m venv .venv

# torch first and alone: constraints.txt says why.
.venv/.torch.stamp: constraints.txt | $(BIN)/python
	$(PIP_INSTALL) "$$(grep '^torch==' constraints.txt)"
	@touch $@

.venv/.serve.stamp: pyproject.toml constraints.txt .venv/.torch.stamp
	$(PIP_INSTALL) -c constraints.txt -e '.[serve]'
	@touch $@

.venv/.dev.stamp: pyproject.toml constraints.txt .venv/.torch.stamp
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

serve: .venv/.serve.stamp ## Serve a model: make serve ARGS="MODEL --port 8000"
	$(BIN)/outrider serve $(ARGS)

# A process for each core; a file's tests stay together and share their fixtures. Bytecode is written even where the
# environment says otherwise: the tests start hundreds of processes, each of which would compile the package again.
test: .venv/.dev.stamp ## Run the tests: make test ARGS="-k layout"
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=20 $(ARGS)

lint: .venv/.dev.stamp ## Check format, rules, docstrings, types, layers and sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_docstrings.py
	$(BIN)/lint-imports --no-cache
	MYPY=$(BIN)/mypy tools/mypy.sh

# Machines with a GPU have torch 2.11 and its Triton, an older one than .venv's: its compiler uses registers differently.
# It goes before .venv's on the path; its kernels for Hopper depend neither on torch's version nor on Python's.
GPU_TRITON := .venv/gpu-triton
$(GPU_TRITON)/.stamp: | .venv/.dev.stamp
	$(PIP_INSTALL) --no-deps --upgrade --target $(GPU_TRITON) 'triton==3.6.*'
	@touch $@

kernels: $(GPU_TRITON)/.stamp ## Compile every Triton kernel as a machine with a GPU does
	PYTHONPATH=$(GPU_TRITON) $(BIN)/python tools/compile_kernels.py --arch 90 --jobs 2 $(ARGS)
	PYTHONPATH=$(GPU_TRITON) TRITON_INTERPRET=0 $(BIN)/python -m pytest -q -p no:cacheprovider tests/kernels/test_triton_specialisations.py

format: .venv/.dev.stamp ## Format the code and apply the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.dev.stamp ## Measure every way of drafting on the demo model: make bench ARGS="--plot bench.png"
	$(BIN)/outrider bench speculation $(ARGS)

demo-model: .venv/.dev.stamp ## Rebuild the demo model from its recipe
	$(BIN)/python tools/demo_model $(ARGS)

clean: ## Remove caches and build outputs; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
