# `make demo` shows what rotopath does; `make test` checks everything; `make quick` is for the inner loop.
# Each sets up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --only-binary :all:

.PHONY: demo test quick style types lint tests fuzz fuzz-guided faults audit format clean

demo: $(READY)
	$(BIN)/rotopath demo --out demo

test: style
	$(MAKE) --no-print-directory -j 2 types tests

tests: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal --cov --cov-report=term

quick: style
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow" --hypothesis-profile=quick -q

# Damaged inputs of all formats through the commands, in two processes: some minutes.
fuzz: $(READY)
	nice $(BIN)/python tools/fuzz.py --cases 20000 --out results/fuzz.csv

# The same, guided by the lines of code that an input reaches: half an hour. atheris has wheels for Linux.
fuzz-guided: $(READY)
	$(BIN)/python -m pip install --quiet --only-binary :all: atheris==3.0.0
	nice $(BIN)/python tools/fuzz_guided.py

# Processes that are killed, full disks, two processes at once: about half an hour.
faults: $(READY)
	nice $(BIN)/python tools/faults.py --out results/faults.csv

# Ages, known vulnerabilities and hashes of the pinned packages; needs the internet. Also works without .venv.
audit:
	$(PYTHON) tools/dependencies.py --hashes --out results/dependencies.csv

style: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

lint: style types

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# All packages but torch must have a hash in hashes.txt. A machine may have its own file of torch, so that its hash is
# compared afterwards, by the system's Python, which executes none of the new packages.
$(READY): pyproject.toml constraints.txt hashes.txt hashes-torch.txt
	@echo "Setting up $(VENV): this takes a few minutes and about 3 GB, once."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --no-deps --requirement hashes.txt
	$(PIP) --constraint constraints.txt --report $(VENV)/torch.json torch
	$(PYTHON) tools/dependencies.py --check $(VENV)/torch.json || { rm -rf $(VENV); exit 1; }
	$(PIP) --no-index --no-build-isolation --editable '.[dev]'
	@# On all cores; pip would use one. A few files of packages are templates, which are no valid Python; the tests of
	@# packages, a fifth of all code, are not imported.
	$(BIN)/python -m compileall -qq -j 0 -x 'site-packages/.*/tests/' $(VENV)/lib src || true
	touch $@

clean:
	rm -rf $(VENV) demo
