"""`make test-gpu`, as on a machine where nothing is installed but torch and what `make wheels` fetches."""

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
TINY = "--width 32 --context 32 --blocks 1 --microbatches 2 --emulate-stage 0/2"


def make_test_gpu(**variables: str) -> subprocess.CompletedProcess[str]:
    given = [f"{name}={value}" for name, value in variables.items()]
    return subprocess.run(["make", "--silent", "test-gpu", *given], cwd=ROOT, capture_output=True, text=True)


def test_it_needs_no_other_package() -> None:
    """The tests run on CPU with all others, so here they are only collected; the bench runs."""
    python = f"{sys.executable} -X importtime"
    done = make_test_gpu(DEVICE="cpu", PYTHON=python, TESTS="--collect-only -q", ARGS=f"{TINY} --json")
    assert "test_gpu.py: " in done.stdout, done.stderr[-2000:]
    assert "test_odd_stages.py: " in done.stdout
    told = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert done.returncode == (0 if told["passed"] else 2), done.stderr  # make's own code for a command that failed
    assert told["device"] == "CPU"
    assert {row["what"] for row in told["rows"] if row["verdict"] == "not measured"} == ON_CUDA

    owners = packages_distributions()
    modules = [line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line]
    needed = {canonicalize_name(name) for module in modules for name in owners.get(module, ())} - {"optpipe"}
    assert {"torch", "numpy", "pydantic", "pytest"} <= needed
    wheels = re.search(r"^GPU_NEEDS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wheels
    optional = {"numba", "llvmlite", "tqdm", "pyyaml"}  # without numba plain Python runs, the others torch looks for
    ours = with_what_they_need("optpipe[all]") - optional
    assert needed & ours <= with_what_they_need(*wheels[1].split(), "torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = make_test_gpu(PYTHON=sys.executable)
    assert done.returncode != 0
    first, *others = done.stderr.splitlines()
    assert first.startswith("there is no GPU here: torch ")
    assert all(re.match(r"make(\[\d+\])?: ", line) for line in others)
    assert done.stdout == ""
