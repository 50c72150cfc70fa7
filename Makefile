PYTHON ?= python3
BIN := .venv/bin
# Ranks and solver engines share the cores: one thread each.
export OMP_NUM_THREADS := 1

.PHONY: setup check test demo bench pictures clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	touch $@

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy optpipe solver/optpipe_solver runtime/optpipe_runtime server/optpipe_server cache/optpipe_cache
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest

demo: setup
	$(BIN)/optpipe demo

bench: setup
	$(BIN)/optpipe bench core

pictures: setup
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/better_than_linear.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
