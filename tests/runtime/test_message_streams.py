"""Messages between GPUs on simulated streams: what is sent is not freed too early, and what is received is there when
it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.fakes.cuda import CPU, Event, Races, Stream
from support.problems.strategies import schedules
from support.ranks import cases
from torch import Tensor

from optpipe.model.ops import Kind
from optpipe.schedule import Schedule
from optpipe_runtime.execute.messages import Messages
from optpipe_runtime.lowering.prepare import prepare
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import Spec

SPECS = (Spec((4,), torch.float32, True),)


class Move:
    """A message on its way: the event at its end, which the compute stream waits for. NCCL itself keeps nothing."""

    def __init__(self, stream: Stream) -> None:
        self.end = Event()
        self.end.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream(CPU).wait_event(self.end)  # type: ignore[arg-type]


class Pair:
    """The process group of a pair of ranks: a stream of its own, on which each message follows what was computed when
    it was issued."""

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
    """A team of which only one rank runs."""

    def __init__(self, number: int, move: Callable[[Stream], Any]) -> None:
        self.number, self._move = number, move

    def subgroup(self, members: Iterable[int], device: torch.device) -> Any:
        return Pair(self._move)


def races(schedule: Schedule, rank: int, move: Callable[[Stream], Any] = Move) -> list[str]:
    """What raced while a rank computed and exchanged messages."""
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
        assert races(schedule, rank) == []


class Unawaited(Move):
    def wait(self) -> None:
        pass


def test_the_simulation_finds_messages_that_nobody_waits_for() -> None:
    first, second = ([f"{s}{kind}{j}" for kind in ("F", "BW") for j in range(4)] for s in range(2))
    schedule = Schedule.parse(cases.problem([0, 1], 4), [first, second])
    assert races(schedule, 0) == []
    found = races(schedule, 0, Unawaited)
    assert "its end and copy_.default" in found, "freed while it is sent"
    assert "mul.Tensor and fill_.Scalar" in found, "used before it has come"
