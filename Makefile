# Every command of the project; `make` alone lists them. The first use installs into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
STAMP := $(VENV)/.installed
# Test processes at a time; compiling a graph keeps one core busy.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install train train-distributed test test-all test-devices op-counts test-oldest check format mutate bench bench-growth bench-quick docs docs-serve docs-install docs-pictures docs-notebook clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP)  ## install the project and its tools into .venv

$(STAMP): setup.py pyproject.toml $(wildcard cells/native/*.cc cells/native/*.h)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

train: install  ## train LeNet on real digits with dynamic loss scaling, and draw what happened (out/*.png)
	$(RUN) -m examples.lenet

WORKERS ?= 2
train-distributed: install  ## train it on 2 ranks of this machine (WORKERS=2)
	PATH="$(CURDIR)/$(BIN):$$PATH" MS_NODE_TIMEOUT=30 msrun --worker_num=$(WORKERS) --local_worker_num=$(WORKERS) \
		--master_port=$$($(RUN) -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])") \
		--join=True --log_dir=out/data_parallel examples/data_parallel.py
	@grep --no-filename accuracy= out/data_parallel/worker_*.log

test: install  ## run the tests, with coverage
	$(RUN) -m pytest -n $(JOBS) -m "not slow" --cov --cov-report=term

test-all: install  ## run the slow tests too
	$(RUN) -m pytest -n $(JOBS) --cov --cov-report=term

test-devices: install  ## compile everything for Ascend and GPU, on stand-ins for their libraries
	$(RUN) -m pytest tests/devices

op-counts: install  ## count the operators of a step for Ascend, into docs/performance.md
	$(RUN) -m tests.devices.op_counts

test-oldest:  ## run the tests on the oldest MindSpore that is supported
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[test]" mindspore==2.7.0
	.venv-oldest/bin/python -m pytest -n $(JOBS) -m "not slow"

check: install  ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install  ## format and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

PEERS := torch==2.13.0 jax==0.10.2 flax==0.12.8 optax==0.2.8 matplotlib==3.11.2
BENCH_STAMP := .venv-bench/.installed

$(BENCH_STAMP): Makefile
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check $(PEERS)
	touch $@

bench: install $(BENCH_STAMP)  ## measure the cost of loss scaling, beside PyTorch and Flax
	$(RUN) -m benchmarks.run

bench-growth: install $(BENCH_STAMP)  ## measure how the cost grows with parameters and values, and draw it
	$(RUN) -m benchmarks.growth --peers .venv-bench/bin/python

bench-quick: install  ## measure a little of it, in less than a minute
	$(RUN) -m benchmarks.run --quick

MUTATE_STAMP := .venv-mutate/.installed
N ?= 40

$(MUTATE_STAMP): Makefile
	test -x .venv-mutate/bin/python || $(PYTHON) -m venv .venv-mutate
	.venv-mutate/bin/python -m pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	touch $@

mutate: install $(MUTATE_STAMP)  ## make N=40 random changes to the code, one at a time, and list those that no test notices
	.venv-mutate/bin/python tests/mutations/sample.py --python $(RUN) --jobs $(JOBS) --number $(N) $(if $(SEED),--seed $(SEED)) $(MUTATE)

DOCS_VENV ?= .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs

$(DOCS_STAMP): docs/requirements.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
	touch $@

docs-install: $(DOCS_STAMP)

docs: docs-install  ## build the documentation site into site/
	$(MKDOCS) build --strict

docs-serve: docs-install  ## show it at http://127.0.0.1:8000, and follow changes
	$(MKDOCS) serve

docs-pictures: install  ## draw the pictures of the docs again; trains LeNet
	$(RUN) docs/draw.py

docs-notebook: install  ## run the notebook, and keep its outputs
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[notebook]"
	$(RUN) docs/run_notebook.py

clean:  ## remove what was built, but not .venv
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage out rank_0 rewritten_network kernel_meta
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
