"""On simulated streams of a GPU in no schedule do a copy, a message and a computation race for memory, nor do accesses
to parameters, gradients or host memory with an optimizer on the host. At most two messages to a rank are under way,
however slow the receiver is, and they hold no more than the plan says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.fakes.cuda import CPU, CUDA, SHAPE, Event, Races, Stream, Unordered
from support.problems.strategies import schedules
from support.ranks import cases
from support.ranks.programs import programs
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.model.ops import Kind, Op
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, StepReport
from optpipe_runtime.execute.messages import Messages, messages_reserve
from optpipe_runtime.features.host_optimizer import HostOptimizer
from optpipe_runtime.lowering.plan import UNDER_WAY
from optpipe_runtime.lowering.prepare import prepare
from optpipe_runtime.memory import link as link_module
from optpipe_runtime.memory.engines import StreamEngine
from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import Spec, StageIO
from optpipe_runtime.stage.runner import StageRunner, learn

(AWAY,) = programs("0F0 0O0 0O0.1 0F1 0D0 0D0.1 0O1 0D1 0R0.1 0R0 0O1.1 0BW0 0D1.1 0R1 0R1.1 0BW1")
PROBLEM = cases.problem([0], 3, offload_parts=2)


@contextmanager
def simulated(engine: Any, full_duplex: bool) -> Iterator[tuple[Races, Link, StageRunner]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulation = Races(monkeypatch)
        compute = simulation._compute
        monkeypatch.setattr(Event, "synchronize", lambda event: compute.wait_event(event), raising=False)
        monkeypatch.setattr(link_module, "copy_engine", lambda device: engine(CUDA))
        link = Link(CPU, full_duplex)
        stage = StageRunner(0, cases.Block(), CPU, link, HostPool(CPU))
        learn(stage, (torch.zeros(SHAPE, requires_grad=True),))
        yield simulation, link, stage


def races(ops: list[Op], full_duplex: bool, engine: Any = StreamEngine) -> list[str]:
    with simulated(engine, full_duplex) as (simulation, _, stage):
        stage.start_step((), 2)
        with simulation:
            for op in ops * 2:
                run(stage, op)
        assert stage.idle
    return simulation.found


def run(stage: StageRunner, op: Op) -> None:
    kind, _, j, part = op
    match kind:
        case Kind.F:
            stage.forward(j, (torch.randn(SHAPE),))
        case Kind.B | Kind.BW:
            stage.backward(j, (torch.ones(SHAPE),), split=kind == Kind.B)
        case Kind.W:
            stage.weight(j)
        case Kind.O:
            stage.offload(j, part)
        case Kind.D:
            stage.drop(j, part)
        case Kind.R:
            stage.reload(j, part)
        case Kind.C:
            raise AssertionError("nothing is recomputed here")


@settings(max_examples=examples(10))
@given(st.data(), st.booleans())
def test_no_schedule_races(data: Any, full_duplex: bool) -> None:
    kept = PROBLEM.replace(
        stages=[stage.model_copy(update={"recompute_ms": None, "checkpoint_bytes": None}) for stage in PROBLEM.stages]
    )
    schedule: Schedule = data.draw(schedules(kept))
    assert races(schedule.programs[0].ops(), full_duplex) == []


class Unawaited(StreamEngine):
    """Nobody waits for a copy."""

    def run(self, work: Any) -> Any:
        handle = super().run(work)
        handle.wait = lambda: None  # type: ignore[method-assign]
        return handle


@pytest.mark.parametrize("full_duplex", [False, True])
@pytest.mark.parametrize(
    ("engine", "raced"), [(Unordered, "copy_.default and its allocation"), (Unawaited, "its end and copy_.default")]
)
def test_the_simulation_finds_unordered_accesses(engine: Any, raced: str, full_duplex: bool) -> None:
    ops = [Op.parse(text) for text in AWAY]
    assert races(ops, full_duplex) == []
    assert raced in races(ops, full_duplex, engine)


# An optimizer on the host


class Immediate:
    """Works at once; what the host waits for is in the past of all that it enqueues."""

    start = end = None

    def run(self, work: Callable[[], object]) -> Immediate:
        work()
        return self

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


def races_in_steps(engine: Any = StreamEngine, full_duplex: bool = True) -> list[str]:
    with simulated(engine, full_duplex) as (simulation, link, stage):
        parameters = stage.module.named_parameters()
        host = HostOptimizer(0, parameters, lambda named: torch.optim.AdamW(named), link, Immediate())
        with simulation:
            for _ in range(3):
                stage.start_step((), 1)
                host.start_step()
                host.parameters_in()
                for j in range(2):
                    host.freshen()
                    stage.forward(j, (torch.randn(SHAPE),))
                for j in range(2):
                    stage.backward(j, (torch.ones(SHAPE),), split=False)
                host.gradients_out()
                host.update()
                host.wait_update()
    return simulation.found


@pytest.mark.parametrize("full_duplex", [False, True])
def test_no_step_of_an_optimizer_races(full_duplex: bool) -> None:
    assert races_in_steps(full_duplex=full_duplex) == []
    assert any("copy_.default and " in found for found in races_in_steps(Unordered, full_duplex))


# What messages hold

ROWS, WIDTH = 64, 512
MESSAGE_BYTES = ROWS * WIDTH * 4


class Sends(nn.Module):
    """A linear layer, which does not save its output. `held` is how many outputs were there when the next was made."""

    def __init__(self, part_of: int = 1, takes_s: float = 0.0) -> None:
        super().__init__()
        self.layer, self.part_of, self.takes_s = nn.Linear(WIDTH, WIDTH), part_of, takes_s
        self.held: list[int] = []
        self._sent: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        self.held.append(self.still_there())
        time.sleep(self.takes_s)
        y: Tensor = self.layer(x)
        if self.part_of > 1:  # a view of much more
            y = torch.cat([y] * self.part_of)[: len(y)]
        self._sent.append(StorageWeakRef(y.untyped_storage()))
        return y

    def still_there(self) -> int:
        return sum(not reference.expired() for reference in self._sent)


def burst(schedule: Schedule, part_of: int) -> tuple[list[int], int, StepReport]:
    """The second rank is slower than the first: how many messages there are at each forward and at the end."""
    rank, m = dist.get_rank(), schedule.problem.microbatches
    stage = Sends(part_of, takes_s=0.01 * rank)
    x = torch.ones(m * ROWS, WIDTH)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "microbatches": m}
    with Pipeline({rank: stage}, range(2), **options) as pipe:
        pipe.load(schedule)
        pipe.step(x, x)
        stage.held.clear()
        report = pipe.step(x, x)
        return stage.held, stage.still_there(), report


MICROBATCHES = 16


@pytest.mark.parametrize("part_of", [1, 4])
def test_at_most_two_messages_are_under_way(ranks: Ranks, part_of: int) -> None:
    """Also where what is sent is a view of much more."""
    schedule = cases.all_forwards_first([0, 1], MICROBATCHES)
    (held, left, first), (_, _, second) = ranks(burst, schedule=schedule, part_of=part_of)
    assert len(held) == MICROBATCHES
    assert max(held) < UNDER_WAY, "before the next is made, one is left"
    assert left <= UNDER_WAY, "until the next step begins"
    for rank, report in enumerate((first, second)):
        plan = prepare(schedule, rank, Layout.from_problem(schedule.problem))
        certified = plan.message_peak(lambda message: MESSAGE_BYTES)
        assert report.buffer_peak_bytes == report.buffer_certified_bytes == certified
    assert first.buffer_peak_bytes < 6 * MESSAGE_BYTES


def test_what_messages_may_hold_is_set_aside() -> None:
    """Two each way for each neighbour; of a stage on this rank nothing."""
    large, small = Spec((10,), torch.float32, True), Spec((3,), torch.float32, True)
    io = {
        (s, 0): StageIO((), begins=s == 0, ends=False, outputs=(spec,), reached=(frozenset({0}),), needed=(0,))
        for s, spec in enumerate([large, small, small])
    }
    assert [messages_reserve(rank, Layout.make([0, 1, 1, 2], 4), io) for rank in range(3)] == [160, 160 + 48, 48]


# Messages between GPUs

SPECS = (Spec((4,), torch.float32, True),)


class Move:
    """A message on its way: the event at its end, which the compute stream waits for. NCCL itself keeps nothing."""

    def __init__(self, stream: Stream) -> None:
        self.end = Event()
        self.end.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream(CPU).wait_event(self.end)  # type: ignore[arg-type]


class Pair:
    """The process group of two ranks: a stream, on which a message follows what was computed before it."""

    def __init__(self, move: Callable[[Stream], Any]) -> None:
        self._stream, self._move, self._wire = Stream(), move, torch.empty(4)

    def send(self, tensor: Tensor, to: int) -> Any:
        return self._run(lambda: self._wire.copy_(tensor))

    def receive(self, buffer: Tensor, source: int) -> Any:
        return self._run(lambda: buffer.fill_(1.0))

    def _run(self, work: Callable[[], object]) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(CPU))  # type: ignore[arg-type]
        with torch.cuda.stream(self._stream):  # type: ignore[arg-type]
            work()
            return self._move(self._stream)


class Alone:
    def __init__(self, number: int, move: Callable[[Stream], Any]) -> None:
        self.number, self._move = number, move

    def subgroup(self, members: Iterable[int], device: torch.device) -> Any:
        return Pair(self._move)


def message_races(schedule: Schedule, rank: int, move: Callable[[Stream], Any] = Move) -> list[str]:
    layout = Layout.from_problem(schedule.problem)
    plan = prepare(schedule, rank, layout)
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulation = Races(monkeypatch)
        team: Any = Alone(rank, move)
        messages = Messages(team, layout, CPU)
        with simulation:
            for action in plan.actions:
                for message, source in action.post:
                    messages.post(message, source, SPECS)
                if action.op.kind not in (Kind.F, Kind.B, Kind.BW):
                    continue
                received = messages.take(action.receives) if action.receives else (torch.ones(4),)
                if action.to is not None:
                    messages.make_room(action.to)
                made = (received[0] * 2,)
                del received
                if action.sends is not None and action.to is not None:
                    messages.send(action.sends, made, action.to, SPECS)
                del made
            messages.flush()
        assert messages.idle
        assert messages.peak_bytes == plan.message_peak(lambda message: SPECS[0].nbytes)
    return simulation.found


@settings(max_examples=examples(15))
@given(st.data(), st.sampled_from([[0, 1], [0, 1, 1, 0], [0, 1, 2]]))
def test_no_message_races(data: Any, placement: list[int]) -> None:
    schedule = data.draw(schedules(cases.problem(placement, 3)))
    for rank in range(max(placement) + 1):
        assert message_races(schedule, rank) == []


class UnawaitedMove(Move):
    def wait(self) -> None:
        pass


def test_the_simulation_finds_messages_that_nobody_waits_for() -> None:
    schedule = cases.all_forwards_first([0, 1], 4)
    assert message_races(schedule, 0) == []
    found = message_races(schedule, 0, UnawaitedMove)
    assert "its end and copy_.default" in found, "freed while it is sent"
    assert "mul.Tensor and fill_.Scalar" in found, "used before it has come"
