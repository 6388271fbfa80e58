# Two commands for newcomers: `make demo` and `make test`. Both set everything up in .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Tests that stay in one process each: two at a time. The others start ranks, which need both cores.
SIDE_BY_SIDE := tests/plan tests/kernels tests/sim \
	$(addprefix tests/fabric/test_,staged_lane.py staged_drain.py embedding_exchange.py) \
	$(addprefix tests/collective/test_,algorithms.py checker.py foreign_edges.py format_round_trips.py hostile_files.py \
	first_mistakes.py in_process.py msccl_conformance.py msccl_defects.py msccl_import.py mscclang.py \
	mscclang_places.py mscclang_scripts.py mscclpp_plans.py other_files.py random_programs.py tied.py)

.PHONY: demo test nightly lint gpu-test gpu-bench bench wheel-check clean

demo: $(VENV)/.ready
	$(BIN)/undertow demo

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "not nightly and not gpu" --numprocesses 2 --dist worksteal $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest -m "not nightly and not gpu" $(addprefix --ignore=,$(SIDE_BY_SIDE))

nightly: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "not gpu"

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

bench: $(VENV)/.ready-dev
	$(BIN)/python bench/cpu_fabric.py

# The two GPU targets run with the Python that is there and install nothing.
gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/gpu

gpu-bench:
	PYTHONPATH=src $(PYTHON) bench/gpu_fabric.py

wheel-check: $(VENV)/.ready-dev
	$(BIN)/python -m pytest tests/test_package.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/.ready-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	touch $(VENV)/.ready $@
