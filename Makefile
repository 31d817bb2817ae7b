# Two commands on a fresh machine: `make test` and `make train`. Both create .venv and install what they need first.
# An existing .venv is kept, and so is the build of torch it holds, as long as its version is the tested one.

PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.wholestep-installed
TORCH   := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
PIP     := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install test lint unit test-slow test-cpus train docs quoted zoo trust loop fuzz bench-cpu bench-smoke sz clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## .venv with the tested versions (PYTHON=python3.12 to choose the interpreter)

test: lint unit  ## lint, then the tests

lint: $(STAMP)  ## ruff and mypy
	@echo "ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@echo "mypy"
	@$(BIN)/mypy

unit: $(STAMP)  ## the tests alone (WORKERS=4, ARGS="-k dropout")
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

test-slow: $(STAMP)  ## the tests that `make test` leaves out since they take long (ARGS="tests/fuzz")
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m 'slow and not gpu and not multi_gpu and not zoo' $(ARGS)

# What older CPUs lack is switched off in torch's own kernels and in oneDNN's; the last line is a machine with more threads.
test-cpus: $(STAMP)  ## the tests as on CPUs without AVX-512, without AVX2, and with four threads (ARGS="tests/lower")
	@ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) --no-print-directory unit
	@ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(MAKE) --no-print-directory unit
	@OMP_NUM_THREADS=4 OMP_WAIT_POLICY=PASSIVE $(MAKE) --no-print-directory unit

train: $(STAMP)  ## train a small model, with a report in runs/ (ARGS="gpt-10m --steps 100", ARGS="--resume")
	@$(BIN)/python -m wholestep train $(ARGS)

docs: $(STAMP)  ## the pages as HTML, offline, warnings as errors (build/docs/index.html)
	@$(BIN)/python -m sphinx -W --keep-going -q -E -b html docs build/docs $(ARGS)
	@echo "build/docs/index.html"

quoted: $(STAMP)  ## run what README and docs quote, and compare (ARGS=--write rewrites, ARGS=docs/plan.md one page)
	@$(BIN)/python scripts/quoted.py $(ARGS)

zoo: $(STAMP)  ## capture and check every model of the zoo, slow ones included
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m zoo $(ARGS)

trust: $(STAMP)  ## trainings that change between two steps against eager: both backends, with and without the first check
	@$(BIN)/python -m pytest -q -n $(WORKERS) tests/trust -m 'slow or not slow' $(ARGS)

loop: $(STAMP)  ## a whole training script and 200 random lengths against eager, compiled
	@$(BIN)/python -m pytest -q tests/test_real_loop.py -m 'slow or not slow' $(ARGS)

fuzz: $(STAMP)  ## 10,000 random training steps through every pass, in two processes (ARGS="--seed 4711 --count 1")
	@$(BIN)/python -m tests.fuzz --count 10000 --workers $(WORKERS) $(ARGS)

bench-cpu: $(STAMP)  ## time the compiled step against eager on the CPU
	@$(BIN)/python benchmarks/cpu_gpt.py $(ARGS)

bench-smoke: $(STAMP)  ## every workload of the benchmark, small, on the CPU: does it train, captured as in eager?
	@$(BIN)/python -m wholestep bench --smoke $(ARGS)

sz:  ## lines per folder, the longest functions
	@$(PYTHON) scripts/sz.py

clean:  ## remove caches and build outputs; .venv stays
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv too
	@rm -rf $(VENV)

$(BIN)/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# Torch goes first and by itself: it is the large download, and a failure here is then easy to tell from any other.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing $(TORCH)"
	@$(PIP) $(TORCH)
	@echo "installing wholestep and its tools"
	@$(PIP) -e '.[dev,hf,gnn,data,docs]'
	@touch $@
