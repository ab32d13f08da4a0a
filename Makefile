# `make demo` and `make test` do all set-up themselves, in .venv. `make help` lists the rest.
#
#   PYTHON=python3.12          the interpreter .venv is made from (3.10 or newer; the tests need 3.11)
#   TORCH='torch==2.11.0'      another torch than the pinned one
#   PYTEST_ARGS='-k plan -x'   instead of two processes, a file to each (-n 2 ...), which take half the time of one
#   BENCH_ARGS='attention --runs 2' another suite of the benchmark than the ladder (python -m benchmarks --help)

PYTHON ?= python3
TORCH  ?= torch==2.13.0
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

BIN    := .venv/bin
# torch is named in every call, so that nothing installed later can replace it
PIP     = $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(TORCH)

BENCH_ARGS ?= single

PROMPT ?= a red circle moving right on a blue background
DEMO   := out/demo.mp4
# whether the caption came true: colour, shape and motion, measured in the frames of the file that was written
DEMO_CHECK = $(BIN)/python -m wan_core check "$(DEMO)" --prompt "$(PROMPT)"

.PHONY: help demo test quick documented check format bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo        generate $(DEMO) with the embedded model and check that its caption came true"
	@echo "make test        make check, then the test suite"
	@echo "make quick       lint, and the tests that take less than 0.1 s each"
	@echo "make documented  run the commands of the README and the docs on tiny stand-ins of the weights"
	@echo "make check       lint, format, types, import directions, docstrings"
	@echo "make format      let ruff mend what it can"
	@echo "make bench       measure on this machine; writes benchmarks/results/"
	@echo "make clean       remove .venv, caches and out/"

demo: .venv/.runtime
	@mkdir -p $(dir $(DEMO))
	$(BIN)/python -m wan_core generate --model tiny --prompt "$(PROMPT)" --out "$(DEMO)" --overwrite
	$(DEMO_CHECK)
	@echo "The video is $(abspath $(DEMO))"

test: check
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

quick: .venv/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m pytest -q --quick $(PYTEST_ARGS) tests/config tests/cli tests/sampling tests/models tests/checkpoint tests/media

documented: .venv/.test
	$(BIN)/python -m pytest -q -m documented tests/tools tests/nodes

check: .venv/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright wan_core wan_lab
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tools/docstrings.py
	$(if $(wildcard README.md),$(BIN)/python tools/readme_tables.py --check)

format: .venv/.test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: .venv/.runtime
	$(BIN)/python -m benchmarks $(BENCH_ARGS) --out benchmarks/results

clean:
	rm -rf .venv out .pytest_cache .ruff_cache .hypothesis

# The stamps: newer than the requirement files means installed.
.venv/.runtime: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 10) and "WanCore needs Python 3.10 or newer, and $(PYTHON) is %d.%d: name another with PYTHON=python3.12" % v)'
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing $(TORCH) into .venv (some minutes the first time) ..."
	$(PIP)
	$(PIP) -r requirements.txt
	@touch $@

.venv/.test: .venv/.runtime tests/requirements.txt
	@$(BIN)/python -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and "The tests compare with diffusers, which needs Python 3.11 or newer, and .venv has %d.%d: make clean, then name another with PYTHON=python3.12" % v)'
	$(PIP) --no-compile -r tests/requirements.txt  # most of it is never imported
	@touch $@
