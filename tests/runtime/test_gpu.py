"""Trainings on the device of the tests: on a GPU under `make test-gpu`, on the CPU else. On one device all stages are
on one rank; with two GPUs, and on the CPU, two ranks train, too."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks import cases, failures, microbatches, record, replicas, worker
from support.ranks.cases import same
from support.ranks.device import KIND, ON_CUDA, device
from support.ranks.optimizer import momentum
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT, V_SHAPED
from support.ranks.swaps import failing, heard
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from benchmarks.training.overhead import overhead
from optpipe.measured.convert import problem_from
from optpipe.model.ops import Kind
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.measure import kernels
from optpipe_runtime.memory.engines import Clock


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast(KIND, dtype=torch.bfloat16)


def _compiled(module: nn.Module) -> nn.Module:
    """By inductor on CUDA, which on CPU would need a compiler for C++."""
    return torch.compile(module, backend="inductor" if ON_CUDA else "aot_eager")


def _wrapped(how: str) -> Callable[[nn.Module], nn.Module]:
    """In the wrapper of replicas, of which this one rank is the only one."""
    return lambda module: replicas.wrapped(module, how, init_device_mesh(KIND, (1,)))


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "autocast": lambda module: module,
    "compiled": _compiled,
    "ddp": _wrapped("ddp"),
    "fsdp": _wrapped("fsdp"),
    "host optimizers": lambda module: module,
}


def trained(way: str, schedules: Sequence[Schedule]) -> tuple[float, float]:
    """Trains both stages on one rank, by one schedule after the other, and the same in plain torch. The largest
    difference of a loss, relative to it, and of a parameter, relative to the largest change of one."""
    inside = _autocast if way == "autocast" else nullcontext
    placement, m = [0, 0], schedules[0].problem.microbatches
    begun = cases.make_stages(2)
    plain, ours = copy.deepcopy(begun), [WAYS[way](module) for module in copy.deepcopy(begun)]
    hosted = {1: momentum} if way == "host optimizers" else None
    theirs = momentum([p for module in plain for p in module.parameters()])
    optimizer = momentum([p for s, module in enumerate(ours) if s not in (hosted or ()) for p in module.parameters()])
    batches, losses = cases.batches(len(schedules), m), list[float]()
    with Pipeline(dict(enumerate(ours)), placement, cases.loss_fn, m, host_optimizers=hosted) as pipe:
        for schedule, data in zip(schedules, batches, strict=True):
            pipe.load(schedule)
            optimizer.zero_grad()
            with inside():
                losses += pipe.step(*data).losses or []
            optimizer.step()
        pipe.synchronize()
        after = replicas.parameters(dict(enumerate(ours)))
    expected = []
    for data in batches:
        with inside():  # in each step anew: it keeps what it has cast
            expected += cases.plain_training(plain, [data], m, theirs)[0].losses
    right, before = (replicas.parameters(dict(enumerate(modules))) for modules in (plain, begun))
    changed = max(float(abs(right[name] - before[name]).max()) for name in right)
    names = dict(zip(right, after, strict=True))  # a compiled module adds to its parameters' names
    off = max(float(abs(after[names[name]] - right[name]).max()) for name in right)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)), off / changed


def profiled(microbatches: int) -> tuple[str, int, list[float]]:
    """By default arguments, on CUDA without a budget: the transfer mode, the budget, and times in ms."""
    with Pipeline(dict(enumerate(cases.make_stages(2))), [0, 0], cases.loss_fn, microbatches) as pipe:
        problem = pipe.profile(
            *cases.batch(0, microbatches), activation_budget_bytes=None if ON_CUDA else 10**9, repeats=3
        )
        stage = problem.stages[0]
    times = [stage.forward_ms, stage.backward_input_ms, stage.offload_ms or 0.0, stage.reload_ms or 0.0]
    return problem.transfer_mode, problem.devices[0].activation_budget_bytes, times


class Wide(nn.Module):
    """Saves three results of its input's size, and the loss a fourth: 16 MiB each on CUDA."""

    ROWS, WIDTH = 4096 if ON_CUDA else 64, 1024
    NBYTES = 4 * ROWS * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(self.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for _ in range(3):
            x = torch.sin(x)
        return x


def wide(microbatches: int) -> tuple[nn.Module, Tensor]:
    x = torch.linspace(0, 1, microbatches * Wide.ROWS, device=device())
    return Wide().to(device()), x[:, None].expand(-1, Wide.WIDTH).contiguous()


def freed(schedule: Schedule) -> tuple[int, int, list[bool]]:
    """The bytes that the drop of an activation frees and its reload takes, as CUDA's allocator counts (on CPU as the
    stage does, which `test_store` compares with the process), and whether the host's pages are locked."""
    module, x = wide(2)
    stage_bytes: dict[str, int] = {}
    with cases.pipeline({0: module}, schedule, mse_loss) as pipe:
        report = [pipe.step(x, torch.zeros_like(x), trace=True) for _ in range(2)][-1]
        locked = [page.is_pinned() for page in pipe.runner.rank.pool.take(1)] if ON_CUDA else [True]
    for before, after in zip(report.trace, report.trace[1:], strict=False):
        kind = after.op.kind.name
        counted = (before.allocated_bytes, after.allocated_bytes) if ON_CUDA else (before.held_bytes, after.held_bytes)
        if kind in "DR" and after.op.microbatch == 0:
            assert None not in counted
            stage_bytes[kind] = int(counted[1] or 0) - int(counted[0] or 0)
    return -stage_bytes["D"], stage_bytes["R"], locked


@contextmanager
def _little_memory(more: int) -> Iterator[None]:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def out_of_memory(little: Schedule, much: Schedule, rank: int = 0) -> tuple[str, bool, list[str]]:
    """A step by `little`, the same by `much`, for which the device's memory is too small on one rank, and a third. The
    schedule that runs in the end, whether gradients are those of the first step, and the log."""
    here, m = dist.get_rank(), little.problem.microbatches
    module, x = wide(m)
    inputs = {"inputs": x} if here == 0 else {}
    targets = {"targets": torch.zeros_like(x)} if here == dist.get_world_size() - 1 else {}
    gradients: list[Tensor] = []
    with Pipeline({here: module}, list(range(dist.get_world_size())), mse_loss, m) as pipe, heard() as logged:
        # One micro-batch and its learning take about ten results at once, eight micro-batches 24 and more.
        short = _little_memory(20 * Wide.NBYTES) if ON_CUDA and here == rank else nullcontext()
        with short:
            for schedule in (little, much, None):
                if schedule is not None:
                    pipe.load(schedule)
                module.zero_grad()
                with _too_much(much, pipe, here == rank):
                    pipe.step(**inputs, **targets)
                gradients.append(module.scale.grad.clone())
        same = all(torch.allclose(gradients[0], gradient, rtol=1e-5) for gradient in gradients[1:])
        return pipe.schedule.method, same, list(logged)


def _too_much(much: Schedule, pipe: Pipeline, here: bool) -> AbstractContextManager[Any]:
    """On CPU nothing runs out of memory, so an op says that it has."""
    if ON_CUDA or not here or pipe.schedule.method != much.method:
        return nullcontext()
    return failing("forward", 3, torch.OutOfMemoryError("too much"))


M = 4
QUEUES = ["1", "8", "32"] if ON_CUDA else ["32"]  # CUDA_DEVICE_MAX_CONNECTIONS
MANY_QUEUES = pytest.mark.parametrize("pair", ["32"], indirect=True)
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


@pytest.mark.parametrize("way", WAYS)
def test_a_training_is_the_same_in_plain_torch(rank: Ranks, way: str) -> None:
    """For each way to wrap a stage, with its backward split and fused, kept, offloaded and recomputed."""
    problem = cases.problem([0, 0], M)
    schedules = [Schedule.parse(problem, on_one_rank(2, M, way, split)) for way, split in ALL]
    ((loss, parameter),) = rank(trained, way=way, schedules=schedules)
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
    ((dropped, taken, locked),) = rank(freed, schedule=schedule)
    assert dropped == taken == 4 * Wide.NBYTES
    assert all(locked)


def test_a_profile_by_default(rank: Ranks) -> None:
    ((transfer_mode, *figures, times_ms),) = rank(profiled, microbatches=M)
    assert transfer_mode == ("full_duplex" if ON_CUDA else "half_duplex")
    assert min(*figures, *times_ms) > 0


def little_and_much(ranks: int, microbatches: int = 8) -> list[Schedule]:
    much = cases.all_forwards_first(range(ranks), microbatches)
    each = [[f"{s}{op}{j}" for j in range(microbatches) for op in ("F", "BW")] for s in range(ranks)]
    return [replace(Schedule.parse(much.problem, each), method="little"), replace(much, method="much")]


def require_undone(results: Sequence[tuple[str, bool, list[str]]]) -> None:
    for method, equal, _ in results:
        assert (method, equal) == ("little", True)
    assert any("little" in line and "replaces much, which ran out of memory" in line for line in results[0][2])


def test_a_step_that_runs_out_of_memory_is_undone(rank: Ranks) -> None:
    little, much = little_and_much(1)
    require_undone(rank(out_of_memory, little=little, much=much))


def test_what_a_trace_costs_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = overhead(stages=2, microbatches=4, steps=5, device=KIND)
    assert found.followed_ratio > 0
    with capsys.disabled():
        print(
            f"\non {KIND}: {found.op_us:.0f} µs an op beyond a plain run; a traced step takes "
            f"{found.traced_ratio:.3f} times the host's time, with a Follower {found.followed_ratio:.3f}"
        )


@pytest.mark.skipif(not ON_CUDA, reason="a CPU computes what it launches")
def test_a_kernel_is_timed_without_its_launch() -> None:
    clock, few = Clock(device()), torch.ones((1, 1, 16, 64), device=device(), dtype=torch.bfloat16)

    def run() -> Tensor:
        return scaled_dot_product_attention(few, few, few)

    launched = kernels._ms(clock, 20, lambda: None, run)
    assert kernels._ms(clock, 20, kernels._busy(device()), run) < 0.7 * launched


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


@TWO
@MANY_QUEUES
@pytest.mark.parametrize("short", [0, 1])
def test_two_ranks_undo_a_step_for_which_one_lacks_memory(pair: Ranks, short: int) -> None:
    little, much = little_and_much(2)
    require_undone(pair(out_of_memory, little=little, much=much, rank=short))


@TWO
@MANY_QUEUES
def test_a_rank_that_is_killed_is_reported(pair: Ranks) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], M), ONE_F_ONE_B)
    trouble = failures.Trouble(1, "forward", 2, kill=True)
    for told in pair.survivors(failures.in_trouble, 1, placement=[0, 1], schedule=schedule, trouble=trouble):
        assert "rank 0 lost its connection to " in told.error


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
