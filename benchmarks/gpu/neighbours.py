"""Emulates the neighbours of one stage: messages come when the timeline says they do, and what the stage sends is
dropped.

On CPU a receive sleeps until its moment. On CUDA the host must not wait, or what follows would be enqueued too late. So
a stream of its own spins on the GPU, on one thread, from one arrival to the next, and compute waits for the event
between two spins. A spin (`torch.cuda._sleep`) counts clock cycles, whose frequency follows load and temperature, so
each step corrects the rate by the time that the spins of the step before took. The moments are those of the prediction,
whatever the stage itself does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from optpipe.schedule import Schedule
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.executor import Executor
from optpipe_runtime.execute.messages import Messages
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.lowering.plan import Message
from optpipe_runtime.lowering.prepare import messages_between, prepare, programs_of
from optpipe_runtime.memory.engines import Clock
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.team import Team
from optpipe_runtime.stage.io import Spec, Tensors

CYCLES_PER_MS = 1e6  # a first guess, 1 GHz


def arrivals(schedule: Schedule, device: int) -> dict[Message, float]:
    """When each message for `device` arrives by prediction: ms after the device's own first op starts."""
    timeline, problem, compiled = schedule.timeline, schedule.problem, schedule.compiled
    ends = dict(zip(compiled.places.tolist(), timeline.end.tolist(), strict=True))
    begins = float(timeline.start[timeline.device == device].min())
    programs, layout = programs_of(compiled), Layout.from_problem(problem)
    return {
        message: ends[place] + problem.p2p_ms - begins
        for d in range(len(problem.devices))
        if d != device
        for message, place in messages_between(programs(d), device, layout).items()
    }


def emulate(pipe: Pipeline, schedule: Schedule, device: int) -> tuple[Callable[[Any, Any], StepReport], Timer]:
    """A function that runs a traced step of one device of the schedule, with inputs and targets as for `Pipeline.step`;
    and the timer of the emulated neighbours.

    The step uses the stage of that number of `pipe`, its host pool and its link. `pipe` must have run or profiled all
    stages on one rank; in `schedule` each has a device of its own."""
    rank, layout = pipe.runner.rank, Layout.from_problem(schedule.problem)
    plan = prepare(schedule, device, layout)
    pipe.runner.schedules.reserve(plan)
    messages = EmulatedMessages(rank.team, rank.device, arrivals(schedule, device))
    own = replace(rank, layout=layout, stages={device: rank.stages[device]}, messages=messages, features=())
    executor = Executor(own)
    return lambda inputs, targets: executor.run(plan, Batch(inputs, targets, trace=True)), messages.timer


class Timer(Protocol):
    """Lets compute go on at given moments of a step, ms after its start."""

    def start_step(self) -> None: ...

    def wait(self, message: Message) -> None:
        """Makes what is computed from here on come after the message's moment."""

    def late_ms(self) -> float:
        """After a step: how late a message was at most."""


class EmulatedMessages(Messages):
    """The messages of a rank with one stage. They carry noise, because zeros would make matrix products faster than
    they are."""

    def __init__(self, team: Team, device: torch.device, moments: Mapping[Message, float]) -> None:
        super().__init__(team, Layout.make([0], 1), device)  # one rank, so no process groups
        self.timer: Timer = Spinner(device, moments) if device.type == "cuda" else Sleeper(moments)
        self._made_on = device
        self._waiting: dict[Message, Tensors] = {}

    def start_step(self) -> None:
        super().start_step()
        self.timer.start_step()

    def post(self, message: Message, source: int, specs: Sequence[Spec]) -> None:
        self._waiting[message] = tuple(spec.empty(self._made_on).normal_() for spec in specs)
        self.peak_bytes = max(
            self.peak_bytes, sum(buffer.nbytes for buffers in self._waiting.values() for buffer in buffers)
        )

    def take(self, message: Message) -> Tensors:
        self.timer.wait(message)
        return self._waiting.pop(message)

    def send(self, message: Message, tensors: Tensors, to: int, specs: Sequence[Spec]) -> None:
        """Drops it: there is no receiver."""

    @property
    def idle(self) -> bool:
        return not self._waiting


class Sleeper:
    """The CPU's `Timer`."""

    def __init__(self, moments: Mapping[Message, float]) -> None:
        self._moments = moments
        self._begun = self._late = 0.0

    def start_step(self) -> None:
        self._late, self._begun = 0.0, time.perf_counter()

    def wait(self, message: Message) -> None:
        missing = self._moments[message] / 1e3 - (time.perf_counter() - self._begun)
        if missing > 0:
            time.sleep(missing)
            self._late = max(self._late, (time.perf_counter() - self._begun) * 1e3 - self._moments[message])

    def late_ms(self) -> float:
        return self._late


class Spinner:
    """CUDA's `Timer`. All moments of a step are enqueued at its start."""

    def __init__(self, device: torch.device, moments: Mapping[Message, float]) -> None:
        self._device, self._clock = device, Clock(device)
        self._moments = sorted(moments.items(), key=lambda item: item[1])
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._rate = CYCLES_PER_MS
        self._begun: Any = None
        self._marks: dict[Message, Any] = {}

    def start_step(self) -> None:
        if self._marks:
            self._learn()
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            self._begun, before = self._clock.mark(), 0.0
            for message, moment in self._moments:
                torch.cuda._sleep(int(max(0.0, moment - before) * self._rate))  # type: ignore[no-untyped-call]
                self._marks[message], before = self._clock.mark(), moment

    def _learn(self) -> None:
        """Corrects the rate by when the last spin of the step before ended."""
        last, moment = self._moments[-1]
        if moment > 0:
            self._rate *= moment / self._clock.ms(self._begun, self._marks[last])

    def wait(self, message: Message) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._marks[message])

    def late_ms(self) -> float:
        return max(
            (abs(self._clock.ms(self._begun, self._marks[message]) - moment) for message, moment in self._moments),
            default=0.0,
        )
