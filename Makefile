# Each target sets up what it needs; nothing has to be installed by hand but Python 3.11+.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
JOBS   ?= auto

.PHONY: help demo test package check format docs bench clean
help:            ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --group dev --group test
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) --group docs
	@touch $@

demo: $(VENV)/.core ## train a network privately on the embedded digits, to epsilon <= 3
	$(BIN)/lipdp train digits --epsilon 3

test: $(VENV)/.dev ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

package: $(VENV)/.dev ## wheel and source archive, each installed where nothing else is, and tried
	LIPDP_PACKAGING=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o addopts= -q tests/test_packaging.py

check: $(VENV)/.dev ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs ## the documentation site, into site/
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.dev ## speed and memory against named peers, as ratios in one run
	$(BIN)/python benchmarks/speed/run.py

clean:           ## remove everything that was built
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
