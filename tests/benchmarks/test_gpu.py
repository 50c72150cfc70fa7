"""The benchmark `gpu` on CPU: everything but CUDA itself. And `make test-gpu`, as on a machine where nothing is
installed but torch and what `make wheels` fetches."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from packaging.utils import canonicalize_name
from support.deployment import with_what_they_need
from support.problems import pipeline, stage

from benchmarks.__main__ import load
from benchmarks.gpu import report, runs
from benchmarks.gpu.neighbours import arrivals
from benchmarks.gpu.schedules import alone, halved, kept, share_offloaded
from examples import gpt
from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import certify, check
from optpipe_runtime.lowering.plan import Message

ON_CUDA = {  # what cannot be measured without
    "memory_allocated above it, of its peak",
    "num_alloc_retries in steady state",
    "num_device_alloc in steady state",
}
CERTAIN = {  # whatever else the machine does
    "activation bytes that leave",
    "peak falls, of what is certified",
    "gradients that differ",
    "activations above the certificate, of its peak",
}


def problem(devices: int, stages: int, copy_ms: float = 4.0, microbatches: int = 8) -> Problem:
    costs = stage((10, 10, 8), (100, 60), offload=(copy_ms, copy_ms, 100), offload_parts=2)
    placed = [{"device": s % devices} | costs for s in range(stages)]
    p2p_ms = 0.5 if devices > 1 else 0.0
    return pipeline(devices, microbatches, 2**20, placed, p2p_ms=p2p_ms, transfer_mode="full_duplex")


@pytest.mark.parametrize(("devices", "warm_up"), [(1, [3]), (4, [3, 2, 1, 0])])
def test_half_of_long_lived_activations_is_offloaded_at_no_cost_if_the_link_keeps_up(
    devices: int, warm_up: list[int]
) -> None:
    given = problem(devices, 4)
    whole, half = kept(given, warm_up), halved(given, warm_up)
    assert check(given, whole) == check(given, half) == check(problem(1, 4), alone(problem(1, 4))) == []
    assert half.makespan_ms <= 1.01 * whole.makespan_ms
    assert certify(given, half).device[0].bytes < certify(given, whole).device[0].bytes
    assert share_offloaded(whole) == 0.0
    assert share_offloaded(half) == 0.5 if devices == 1 else 0.25 < share_offloaded(half) <= 0.375, (
        "the last stage holds nothing for long"
    )
    assert share_offloaded(alone(problem(1, 4))) == 1.0


def test_emulated_messages_arrive_when_the_timeline_says() -> None:
    given = problem(3, 3, microbatches=2)
    schedule = kept(given, [2, 1, 0])
    first, middle = arrivals(schedule, 0), arrivals(schedule, 1)
    assert set(first) == {Message(Kind.B, 0, 0), Message(Kind.B, 0, 1)}
    assert set(middle) == {Message(kind, 1, j) for kind in (Kind.F, Kind.B) for j in range(2)}
    assert middle[Message(Kind.F, 1, 0)] == 0.0, "counted from the device's own first op"
    assert middle[Message(Kind.F, 1, 1)] == 10.0
    assert first[Message(Kind.B, 0, 0)] == 52.0, "three forwards there, two backwards back, four messages"


@pytest.fixture(scope="module")
def measured() -> Iterator[tuple[runs.GpuSetup, runs.GpuMeasurements]]:
    setup = runs.GpuSetup(torch.device("cpu"), gpt.Size(32, 1, 3, 64, 1), stages=3, emulated=1, microbatches=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "ROUNDS", 1)
        yield setup, runs.measure(setup)


def test_on_cpu_only_figures_of_cuda_are_not_measured(measured: tuple[runs.GpuSetup, runs.GpuMeasurements]) -> None:
    judged = report.judge(*measured)
    assert {row.what for row in judged.rows if row.passed is None} == ON_CUDA
    assert {row.what for row in judged.rows if row.passed} >= CERTAIN
    assert all(math.isfinite(row.reached) for row in judged.rows if row.reached is not None)


def test_every_op_ran_once_a_step_and_held_no_more_than_certified(
    measured: tuple[runs.GpuSetup, runs.GpuMeasurements],
) -> None:
    _, found = measured
    for steps in (*found.inside, found.copies, *found.stage):
        ops = steps.schedule.programs[steps.device].ops()
        for step in steps.reports:
            assert [time.op for time in step.trace] == ops
            assert all(time.held_bytes <= time.certified_bytes for time in step.trace)
        assert len(steps.reports) == runs.STEPS


@pytest.mark.parametrize(
    ("above", "retries", "verdicts"),
    [
        (0.04, 0, ["pass", "pass", "pass", "pass"]),
        (0.06, 0, ["pass", "FAIL", "pass", "pass"]),
        (0.0, 1, ["pass", "pass", "FAIL", "pass"]),
    ],
)
def test_memory_of_the_cuda_allocator_is_judged(
    above: float, retries: int, verdicts: list[str], measured: tuple[runs.GpuSetup, runs.GpuMeasurements]
) -> None:
    _, found = measured
    keeps, halves = found.inside
    step, base = keeps.reports[0], 1000 + int(above * keeps.certified_bytes)
    trace = tuple(time._replace(allocated_bytes=base + time.certified_bytes) for time in step.trace)
    allocations = Counter(num_alloc_retries=retries)
    steps = replace(keeps, reports=[replace(step, trace=trace)], base_bytes=1000, allocations=allocations)
    judged = report._memory(replace(found, inside=(steps, halves)), cuda=True)
    assert [row.verdict for row in judged] == verdicts


@pytest.mark.parametrize("given", ["8", "many"])
def test_spins_need_queues_of_their_own(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    with pytest.raises(InputError, match=f"^CUDA_DEVICE_MAX_CONNECTIONS is {given}: set it to 32 before the script"):
        runs.measure(runs.GpuSetup(torch.device("cuda", 0), gpt.Size()))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--emulate-stage", "4/4"], "--emulate-stage = 4/4: expected i/p"),
        (["--width", "4097"], "--width = 4097: expected a multiple of 128"),
        (["--device", "cpu", "--width", "4", "--context", "2"], "nothing of a stage's activation can be offloaded"),
        (["--device", "cuda:99"], "--device = cuda:99: torch"),
    ],
)
def test_a_bench_that_cannot_run_here_exits_with_an_error(arguments: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        load("gpu")(arguments)


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
