# One virtual environment holds everything; make puts it in .venv, or uses the one VENV names.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# The GPU extra is added where an NVIDIA driver answers; its CUDA version picks the wheels.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')
comma := ,

.PHONY: train check lint test compile gpu sanitize bench clean

train: $(VENV)/.train
	$(BIN)/lowgpu train

# Installed once; setup.cfg is what decides when to install again.
$(VENV)/.train: setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e ".[$(if $(CUDA),$(if $(filter 12,$(CUDA)),cuda12,cuda13)$(comma))data,plots]"
	touch $@

$(VENV)/.check: setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e ".[cuda13,data,plots,gym,notebooks,dev]"
	touch $@

check: lint test

lint: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: $(VENV)/.check
	$(BIN)/python -m pytest -q -n 2 --dist worksteal tests
	NUMBA_ENABLE_CUDASIM=1 $(BIN)/python -m pytest -q tests/test_simulator.py
	$(BIN)/python -m pytest -q --nbmake --nbmake-timeout=300 notebooks

gpu:
	$(PYTHON) -m pytest -q -m gpu tests
