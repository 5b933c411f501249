# Two commands do everything: `make demo` and `make test`. Stamp files in the environment keep them quick when nothing changed.

PYTHON ?= python3
# The PyTorch to install where the environment has none of 2.10 or later. With an NVIDIA GPU: make demo TORCH=torch
TORCH ?= torch==2.13.0
VENV ?= .venv
PY = $(VENV)/bin/python

.PHONY: help demo test lint bench clean

help:
	@echo "make demo    set up $(VENV), install infuse, complete a prompt before and after injection"
	@echo "make test    the same with the development tools, then the whole test suite"
	@echo "make lint    ruff and mypy"
	@echo "make bench   the probes of this machine, then the models of bench/models.py"
	@echo "make clean   remove caches and build products (the environment stays: rm -rf $(VENV))"
	@echo
	@echo "PYTHON=$(PYTHON)  TORCH=$(TORCH)  (with an NVIDIA GPU: TORCH=torch)"

demo: $(VENV)/.infuse
	$(PY) examples/demo.py

test: $(VENV)/.dev
	$(PY) -m pytest

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(VENV)/.infuse
	$(PY) bench/probe.py
	$(PY) bench/models.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "infuse needs Python 3.10 or later; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) \
	  || { echo "$(PYTHON) cannot make environments; install its venv module (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@$(PY) -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))' 2>/dev/null \
	  || $(PY) -m pip install '$(TORCH)'
	@touch $@

$(VENV)/.infuse: $(VENV)/.torch pyproject.toml
	$(PY) -m pip install --quiet -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PY) -m pip install --quiet -e '.[dev]'
	@touch $(VENV)/.infuse $@
