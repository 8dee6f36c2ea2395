# Everything is installed in ./.venv, once; `make clean` takes it away again.
#   make demo ARGS="--units 3"      make test ARGS="tests/workers -n 0"      make test PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint types clean

help:
	@echo "make demo     train with several units through a bucket on this machine"
	@echo "make test     run the tests"
	@echo "make lint     check style with ruff"
	@echo "make types    check types with mypy"
	@echo "make clean    remove ./$(VENV) and all caches"
	@echo
	@echo "ARGS=... is passed on to demo and test; PYTHON=... chooses the Python (3.11 or newer)."

demo: $(VENV)/.demo
	@$(BIN)/ps-diloco demo $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing ps-diloco into ./$(VENV) ..."
	@$(PIP) install --quiet --constraint $(VENV)/constraints.txt --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing ps-diloco with its test and development tools into ./$(VENV) ..."
	@$(PIP) install --quiet --constraint $(VENV)/constraints.txt --editable '.[demo,test,dev]'
	@touch $@

# The environment with PyTorch in it. A PyTorch that $(PYTHON) already has is used as it is, with the packages it is bound to; nothing replaces it.
# (A new environment sees the packages of the base Python only, hence the .pth file when $(PYTHON) itself lives in an environment.)
$(VENV)/.python: constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)'. Name a Python of 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, but $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@set -e; \
	found=$$($(PYTHON) -c 'import torch; print(torch.__version__)' 2>/dev/null || true); \
	usable=$$($(PYTHON) -c 'import sys; v = sys.argv[1].split("."); print("yes" if (int(v[0]), int(v[1])) >= (2, 4) else "")' "$${found:-0.0}"); \
	if [ -n "$$usable" ]; then \
	  echo "Using the PyTorch $$found of $(PYTHON)."; \
	  test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages $(VENV); \
	  $(BIN)/python -c 'import torch' 2>/dev/null || \
	    $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"; \
	  { grep -v -i -E '^(torch|numpy|sympy|mpmath|networkx|setuptools)==' constraints.txt; echo "torch==$$found"; } > $(VENV)/constraints.txt; \
	else \
	  if [ -n "$$found" ]; then echo "$(PYTHON) has PyTorch $$found, but 2.4 or newer is needed."; else echo "$(PYTHON) has no PyTorch."; fi; \
	  echo "It will be downloaded once into ./$(VENV): about 200 MB as a CPU build, 2 to 3 GB otherwise."; \
	  echo "To use another build, stop here, install it for $(PYTHON), and run make again."; \
	  test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	  cp constraints.txt $(VENV)/constraints.txt; \
	  $(PIP) install --constraint $(VENV)/constraints.txt torch; \
	fi
	@touch $@
