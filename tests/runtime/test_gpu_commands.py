"""`make bench-gpu` and `make test-gpu`, as on a machine where nothing is installed but torch and what
`make wheels` fetches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from packaging.utils import canonicalize_name
from support.packages import with_what_they_need
from support.ranks.bench_gpu import ON_CUDA

ROOT = Path(__file__).parents[2]
TINY = ["--width", "32", "--context", "32", "--blocks", "1", "--microbatches", "2", "--emulate-stage", "0/2"]


def require_wheels(names: set[str]) -> None:
    """These packages, as far as they are OptPipe's, are there beside torch. Without numba plain Python runs."""
    ours = with_what_they_need("optpipe[all]") - {"numba", "llvmlite"}
    assert {canonicalize_name(name) for name in names} & ours <= with_what_they_need(*gpu_needs(), "torch")


def imported(told: str) -> set[str]:
    """The packages that a Python with `-X importtime` has imported."""
    owners = packages_distributions()
    modules = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in told.splitlines()
        if line.startswith("import time:")
    }
    return {name for module in modules for name in owners.get(module, ())} - {"optpipe"}


def make_test_gpu(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = [f"{name}={value}" for name, value in variables.items()]
    return subprocess.run(["make", "--silent", "test-gpu", *options, *given], cwd=ROOT, capture_output=True, text=True)


def test_make_test_gpu() -> None:
    """What it runs can be imported on a machine where nothing is installed but torch and what the docs name. The tests
    run on CPU with all others, so here they are only collected; the bench runs."""
    done = make_test_gpu(
        DEVICE="cpu",
        PYTHON=f"{sys.executable} -X importtime",
        TESTS="--collect-only -q",
        ARGS=" ".join([*TINY, "--json"]),
    )
    assert "test_gpu.py: " in done.stdout, done.stderr[-2000:]
    assert "test_odd_stages.py: " in done.stdout
    told = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert done.returncode == (0 if told["passed"] else 2), done.stderr  # make's own code for a command that failed
    assert told["device"] == "CPU"
    assert {row["what"] for row in told["rows"] if row["verdict"] == "not measured"} == ON_CUDA
    needed = imported(done.stderr)
    assert {"torch", "numpy", "pydantic", "pytest"} <= needed
    require_wheels(needed)


def test_make_bench_gpu() -> None:
    """The one command is the bench of `make test-gpu`, alone."""
    command = ["make", "--no-print-directory", "--dry-run", "bench-gpu", f"ARGS=--device cpu {' '.join(TINY)}"]
    (alone,) = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "-m benchmarks gpu --device cpu" in alone
    both = make_test_gpu("--dry-run", DEVICE="cpu", ARGS=" ".join(TINY)).stdout
    assert f"{alone} || failed=1" in both


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_test_gpu_without_a_gpu() -> None:
    done = make_test_gpu(PYTHON=sys.executable)
    assert done.returncode != 0
    first, *others = done.stderr.splitlines()
    assert first.startswith("there is no GPU here: torch ")
    assert all(re.match(r"make(\[\d+\])?: ", line) for line in others)
    assert done.stdout == ""


def gpu_needs() -> list[str]:
    found = re.search(r"^GPU_NEEDS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    return found[1].split()
