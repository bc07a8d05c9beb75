# One virtual environment holds everything: .venv, or the one VENV names.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
comma := ,
# The GPU extra is added where an NVIDIA driver answers; the driver's CUDA version picks the wheels.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')
GPU := $(if $(CUDA),$(if $(filter 12,$(CUDA)),cuda12,cuda13)$(comma))
NOTEBOOKS := $(patsubst notebooks/%.py,build/notebooks/%.ipynb,$(wildcard notebooks/*.py))

.PHONY: train check lint test notebooks gpu sanitize clean

train: $(VENV)/.train
	$(BIN)/lowgpu train

check: lint test notebooks

lint: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# One thread a process: two test workers share the cores, and threads that wait spin.
test notebooks: export NUMBA_NUM_THREADS = 1
test notebooks: export OPENBLAS_NUM_THREADS = 1

test: $(VENV)/.check
	$(BIN)/python -m pytest -q -n 2 --dist worksteal tests
	NUMBA_ENABLE_CUDASIM=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/test_simulator.py tests/test_gae.py
	$(BIN)/python -m pytest -q bench --benchmark-disable --sizes small --device cpu

notebooks: $(NOTEBOOKS)
	$(BIN)/python -m pytest -q --nbmake --nbmake-timeout=300 $(NOTEBOOKS)

build/notebooks/%.ipynb: notebooks/%.py $(VENV)/.check
	mkdir -p $(@D)
	$(BIN)/jupytext -q --to ipynb -o $@ $<

# Needs an NVIDIA GPU and a Python that has the GPU extra.
gpu:
	$(PYTHON) -m pytest -q -m gpu tests

# A venv is made once, and filled again when setup.cfg changes.
$(VENV)/.train: setup.cfg | $(BIN)/python
	$(BIN)/python -m pip install -q -e ".[$(GPU)data,plots]"
	touch $@

$(VENV)/.check: setup.cfg | $(BIN)/python
	$(BIN)/python -m pip install -q -e ".[cuda13,data,plots,gym,notebooks,interop,dev]"
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# compute-sanitizer's four tools over every kernel, each proven by a fault planted for it.
sanitize:
	$(PYTHON) -m tests.sanitize

clean:
	rm -rf $(VENV) build runs *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
