PYTHON ?= python3
# Which versions are installed: `constraints-lowest.txt` for the lowest that pyproject.toml allows, empty for the newest.
# `make clean` first where an environment of other versions, or of another PYTHON, exists.
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
# Ranks and solver engines share the cores: one thread each.
export OMP_NUM_THREADS := 1
# Tests start many processes: none shall compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

# What `test-gpu` and `bench-gpu` need beside torch: fetched by `make wheels` where there is a registry, for a machine with
# a GPU and Python 3.12 that has none. Without numba the simulator runs as plain Python.
GPU_NEEDS := numpy pydantic rich cyclopts pytest pytest-timeout
ON_GPU = PYTHONPATH=.:cli:runtime:.gpu $(PYTHON)
DEVICE ?= cuda
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

.PHONY: help setup format check check-web docs test test-all suite suite-slow soak stacks slurm containers demo bench wheels test-gpu bench-gpu pictures pack dist clean

# The comment behind a target is its help.
help: ## list the targets (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

setup: .venv/ready ## make .venv with OptPipe, all extras and the tools

.venv/ready: pyproject.toml $(CONSTRAINTS)
	@echo 'Making .venv with OptPipe, all extras and the tools: takes some minutes, most of them for torch.'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS:%=--constraint %) --editable '.[all,dev,docs]'
	touch $@

format: setup ## write the code in ruff's format, and mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

check: setup ## check style, types and imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy optpipe solver/optpipe_solver runtime/optpipe_runtime server/optpipe_server cache/optpipe_cache cli/optpipe_cli benchmarks examples/demo
	$(BIN)/lint-imports

check-web: ## check the types of the code of pages; needs Node
	npx --yes --package typescript@5 tsc --project optpipe/show/web
	npx --yes --package typescript@5 tsc --project server/optpipe_server/web

docs: setup ## build the site of the docs in the folder site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# More tests at a time than two cores compute: a test waits as often as it computes.
PYTEST = env --unset=MAKEFLAGS $(BIN)/python -m pytest --numprocesses 4 --dist worksteal -rs

# Two at a time: mypy and mkdocs have one process each.
test: setup ## check style, types and imports, and run the tests: 5 minutes on two cores
	+$(MAKE) --no-print-directory --jobs 2 check suite

test-all: test ## and all that takes longer: PostgreSQL, many ranks, kills, hostile input, pages, docs
	+$(MAKE) --no-print-directory --jobs 2 docs suite-slow $(if $(shell command -v npx),check-web,$(info No npx here: the types of the pages' code are not checked.))

suite: setup ## run the tests of `make test` only
	$(BIN)/python -m optpipe_solver.compiling
	$(PYTEST) -m 'not slow and not soak and not stacks'

suite-slow: setup ## run the tests that `make test-all` adds
	$(PYTEST) -m 'slow and not soak and not stacks'

# The longer versions of the tests that end the service's processes at random, and the like, and many more examples of
# each property; ARGS are pytest's. And all types of models of transformers, in the environment of their stack.
soak: setup ## run the long versions of some tests
	$(BIN)/python -m pytest -m 'soak or hypothesis' --hypothesis-profile soak --timeout 3600 $(ARGS)
	$(PYTHON) scripts/stacks.py .stacks transformers-5.24.0

# Each stack has an environment of its own in .stacks; ARGS are names of stacks, such as torch-2.15.0. Also where the main
# environment has another torch.
stacks: ## run schedules in other projects' packages, and print a table
	$(PYTHON) scripts/stacks.py .stacks $(ARGS)

slurm: ## install Slurm on Debian or Ubuntu, for the stack clusters
	sudo apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client

containers: ## build the service's image and run docker-compose.yml; needs root and Debian's podman
	$(PYTHON) scripts/containers.py .containers

demo: setup ## train a small GPT on two ranks while its schedule improves
	$(BIN)/python -m examples.demo

bench: setup ## time the simulator, the certificate and the check
	$(BIN)/python -m benchmarks core

wheels: ## fetch what test-gpu and bench-gpu need on a machine without a registry
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary :all: --implementation cp --python-version 3.12 \
		$(PLATFORMS:%=--platform %) --constraint constraints.txt --dest wheels $(GPU_NEEDS)

# On the machine's own Python, whose torch is there already; TESTS are pytest's arguments, ARGS those of the benchmark
# `gpu`. With DEVICE=cpu the same runs anywhere. A warning of a driver or of another torch is no failure here, and a test
# that fails does not keep the bench from running.
test-gpu: $(if $(wildcard wheels),.gpu/ready) ## test and measure one GPU, or two
	@$(ON_GPU) scripts/require_device.py $(DEVICE)
	failed=0; \
	OPTPIPE_TEST_DEVICE=$(DEVICE) CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
		$(ON_GPU) -m pytest -p pytest_timeout -p no:cacheprovider --noconftest -W default -rs --durations 10 \
		tests/runtime/test_gpu.py tests/runtime/test_odd_stages.py $(TESTS) || failed=1; \
	$(ON_GPU) -m benchmarks gpu --device $(DEVICE) $(ARGS) || failed=1; \
	exit $$failed

bench-gpu: $(if $(wildcard wheels),.gpu/ready) ## measure one GPU
	$(ON_GPU) -m benchmarks gpu $(ARGS)

.gpu/ready: $(wildcard wheels/*.whl)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade --target .gpu wheels/*.whl
	touch $@

pictures: setup ## draw the pictures of the docs again
	$(BIN)/python docs/pictures.py

pack: setup ## solve common problems, for the pack of the release; goes on where it was ended
	nice -n 5 $(BIN)/python scripts/pack.py

# TAG is that of a release, such as v0.1.0, and must name the version.
TAG ?=
dist: ## build sdist and wheel into the folder dist, check them, and run the wheel
	$(PYTHON) scripts/dist.py dist --tag "$(TAG)"

clean: ## remove the environment and all caches
	find . -name '*.nb[ic]' -delete
	rm -rf .venv .gpu .stacks .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site *.egg-info
