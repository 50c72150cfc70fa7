PYTHON ?= python3
BIN := .venv/bin
# Ranks and solver engines share the cores: one thread each.
export OMP_NUM_THREADS := 1

# What `bench-gpu` needs beside torch: fetched by `make wheels` where there is a registry, for a machine with a GPU and Python 3.12 that has none.
GPU_NEEDS := numpy numba pydantic rich typer
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

.PHONY: setup check test soak demo bench wheels bench-gpu pictures clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	touch $@

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy optpipe solver/optpipe_solver runtime/optpipe_runtime server/optpipe_server cache/optpipe_cache cli/optpipe_cli
	$(BIN)/lint-imports

# Two at a time: a test waits as often as it computes.
test: check
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# The longer versions of the tests that end the service's processes at random, and the like; ARGS are pytest's.
soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600 $(ARGS)

demo: setup
	$(BIN)/optpipe demo

bench: setup
	$(BIN)/optpipe bench core

wheels:
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary :all: --implementation cp --python-version 3.12 \
		$(PLATFORMS:%=--platform %) --constraint constraints.txt --dest wheels $(GPU_NEEDS)

# On the machine's own Python, whose torch is there already; ARGS are those of `optpipe bench gpu`.
bench-gpu: $(if $(wildcard wheels),.gpu/ready)
	PYTHONPATH=.:cli:runtime:.gpu $(PYTHON) -m optpipe_cli bench gpu $(ARGS)

.gpu/ready: $(wildcard wheels/*.whl)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade --target .gpu wheels/*.whl
	touch $@

pictures: setup
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/better_than_linear.py

clean:
	rm -rf .venv .gpu .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
