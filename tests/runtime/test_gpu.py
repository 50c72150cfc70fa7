"""Trainings on the device of the tests: on a GPU under `make test-gpu`, on the CPU else. On one device all stages are
on one rank; with two GPUs, and on the CPU, two ranks train, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.close import require_close
from support.ranks import cases, failures, gpu, microbatches, record, worker
from support.ranks.calls import same
from support.ranks.device import KIND, ON_CUDA
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT, V_SHAPED
from support.ranks.worker import Ranks

from benchmarks.training.overhead import overhead
from optpipe.measured.convert import problem_from
from optpipe.model.ops import Kind
from optpipe.schedule import Schedule

M = 4
QUEUES = ["1", "8", "32"] if ON_CUDA else ["32"]  # CUDA_DEVICE_MAX_CONNECTIONS
TWO = pytest.mark.skipif(ON_CUDA and torch.cuda.device_count() < 2, reason="needs two GPUs")
AROUND = {"kept": ("", ""), "offloaded": ("OD", "R"), "recomputed": ("", "C")}  # what follows an F and precedes a B


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(worker.STARTER, 1, tmp_path_factory.mktemp("rank"))
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=QUEUES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks on two devices, with so many hardware queues."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": request.param}
    pool = Ranks(worker.STARTER, 2, tmp_path_factory.mktemp("pair"), environment=environment)
    yield pool
    pool.close()


def on_one_rank(stages: int, microbatches: int, way: str, split: bool) -> list[list[str]]:
    """All forwards, then all backwards."""
    after, before = AROUND[way]
    program = [f"{s}{op}{j}" for j in range(microbatches) for s in range(stages) for op in ("F", *after)]
    backward = ("B", "W") if split else ("BW",)
    return [
        program
        + [f"{s}{op}{j}" for j in range(microbatches) for s in reversed(range(stages)) for op in (*before, *backward)]
    ]


ALL = [(way, split) for way in AROUND for split in (True, False)]


def test_all_modes_train_as_plain_autograd(rank: Ranks) -> None:
    same(rank, [0, 0], [on_one_rank(2, M, way, split) for way, split in ALL])


@pytest.mark.parametrize("way", gpu.WAYS)
def test_a_training_is_the_same_in_plain_torch(rank: Ranks, way: str) -> None:
    """For each way to wrap a stage, with its backward split and fused, kept, offloaded and recomputed."""
    problem = cases.problem([0, 0], M)
    schedules = [Schedule.parse(problem, on_one_rank(2, M, way, split)) for way, split in ALL]
    ((loss, parameter),) = rank(gpu.trained, way=way, schedules=schedules)
    # bfloat16 has eight bits, and inductor has kernels of its own.
    assert loss < (1e-2 if way == "autocast" else 1e-4)
    assert parameter < (0.05 if way == "autocast" else 1e-3)


def test_each_step_has_a_schedule_of_its_own(rank: Ranks) -> None:
    """Of micro-batches of other shapes, as many as it has, within the bytes that are certified."""
    (seen,) = rank(microbatches.planned, placement=[0, 0], taken=microbatches.COUNTS, budget=10**7)
    for step, (losses, gradients, _) in zip(seen, microbatches.plain(2, microbatches.COUNTS), strict=True):
        assert step.losses == pytest.approx(losses, rel=1e-4)
        require_close(step.gradients, gradients, rtol=1e-7, atol=1e-4)
        assert 0 < step.peak_bytes <= step.certified_bytes


def test_a_drop_frees_what_a_reload_takes(rank: Ranks) -> None:
    schedule = Schedule.parse(cases.problem([0], 2), on_one_rank(1, 2, "offloaded", split=False))
    ((freed, taken, locked),) = rank(gpu.freed, schedule=schedule)
    assert freed == taken == 4 * gpu.Wide.NBYTES
    assert all(locked)


def test_a_profile_by_default(rank: Ranks) -> None:
    (found,) = rank(gpu.profiled, microbatches=M)
    assert found.transfer_mode == ("full_duplex" if ON_CUDA else "half_duplex")
    assert found.budget > 0
    assert all(ms > 0 for ms in found.times_ms)


def little_and_much(ranks: int, microbatches: int = 8) -> list[Schedule]:
    """One micro-batch at a time; and all forwards before the first backward."""
    problem = cases.problem(range(ranks), microbatches)
    each = [[f"{s}{op}{j}" for j in range(microbatches) for op in ("F", "BW")] for s in range(ranks)]
    whole = [[f"{s}{op}{j}" for op in ("F", "BW") for j in range(microbatches)] for s in range(ranks)]
    return [replace(Schedule.parse(problem, texts), method=name) for name, texts in (("little", each), ("much", whole))]


def require_undone(results: Sequence[tuple[str, bool, list[str]]]) -> None:
    for method, equal, _ in results:
        assert (method, equal) == ("little", True)
    assert any("little" in line and "replaces much, which ran out of memory" in line for line in results[0][2])


def test_a_step_that_runs_out_of_memory_is_undone(rank: Ranks) -> None:
    little, much = little_and_much(1)
    require_undone(rank(gpu.out_of_memory, little=little, much=much))


def test_what_a_trace_costs_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = overhead(stages=2, microbatches=4, steps=5, device=KIND)
    assert found.followed_ratio > 0
    with capsys.disabled():
        print(
            f"\non {KIND}: {found.op_us:.0f} µs an op beyond a plain run; a traced step takes "
            f"{found.traced_ratio:.3f} times the host's time, with a Follower {found.followed_ratio:.3f}"
        )


# Two ranks


def refused(error: AssertionError) -> bool:
    """Whether the pipeline says that its streams need more hardware queues."""
    return ON_CUDA and "CUDA_DEVICE_MAX_CONNECTIONS is" in str(error)


@TWO
def test_two_ranks_train_as_plain_autograd_or_ask_for_queues(pair: Ranks) -> None:
    """From a cold start: their first step is also their first message."""
    try:
        same(pair, [0, 1], [ONE_F_ONE_B, OFFLOADED, SPLIT, RECOMPUTED])
        same(pair, [0, 1, 1, 0], [V_SHAPED])
    except AssertionError as error:
        if not refused(error):
            raise
        assert pair.environment["CUDA_DEVICE_MAX_CONNECTIONS"] != "32"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(worker.STARTER, 2, tmp_path_factory.mktemp("two"), environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
    yield pool
    pool.close()


@TWO
@pytest.mark.parametrize("short", [0, 1])
def test_two_ranks_undo_a_step_for_which_one_lacks_memory(two: Ranks, short: int) -> None:
    little, much = little_and_much(2)
    require_undone(two(gpu.out_of_memory, little=little, much=much, rank=short))


@TWO
def test_a_rank_that_is_killed_is_reported(two: Ranks) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], M), ONE_F_ONE_B)
    trouble = failures.Trouble(1, "forward", 2, kill=True)
    for heard in two.survivors(failures.in_trouble, 1, placement=[0, 1], schedule=schedule, trouble=trouble):
        assert "rank 0 lost its connection to " in heard.error


def test_torchs_own_schedule_is_recorded(rank: Ranks, tmp_path: Path) -> None:
    """On a GPU by events. Ops of one stage that sleeps take no less than that, and stand in their order."""
    case = record.Case("1F1B", record.Times(10.0, 10.0, 10.0, loss=5.0), ((0,),))
    rank(record.run_recorded, case=case, folder=tmp_path, plan="ttt", ahead_ms=0.0)
    found = problem_from("torch-trace", tmp_path / "pipeline-0")
    (times,) = found.stages
    assert times[Kind.F].count == times[Kind.BW].count == 2 * M
    assert times[Kind.F].ms >= 15
    assert times[Kind.BW].ms >= 20
    assert [str(op) for op in found.schedule.programs[0].ops()] == [f"0{op}{j}" for j in range(M) for op in ("F", "BW")]
    assert ("times of a device: these are the host's" in found.unknown) is not ON_CUDA
