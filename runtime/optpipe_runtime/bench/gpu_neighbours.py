"""The neighbours of one stage, where there are none: messages come when the timeline says they do, and what is sent is
let go.

On the CPU a receive sleeps until its moment. On CUDA the host must not wait, or what comes behind would be enqueued too
late: a stream of its own spins on the GPU, on one thread, from one arrival to the next, and compute waits for the event
between two spins. A spin (`torch.cuda._sleep`) counts clock cycles, whose frequency follows load and temperature, so
each step corrects the rate by what the spins of the one before took. The moments are those of the prediction, whatever
the stage itself does. Not measured on CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from optpipe.schedule import Schedule
from optpipe_runtime.execute.executor import Executor, StepReport
from optpipe_runtime.execute.lowering import Message, prepare
from optpipe_runtime.execute.stage import Spec, Tensors
from optpipe_runtime.measure.clock import Clock
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.mail import Mail
from optpipe_runtime.ranks.team import Team

CYCLES_PER_MS = 1e6  # a first guess, 1 GHz


def arrivals(schedule: Schedule, device: int) -> dict[Message, float]:
    """When each message for `device` is there by prediction: ms after the device's own first op, which waits for none
    later than 0."""
    timeline, problem = schedule.timeline, schedule.problem
    layout = Layout.of(problem)
    ends = dict(zip((op for program in schedule.programs for op in program.ops()), timeline.end.tolist(), strict=True))
    begins = float(timeline.start[timeline.device == device].min())
    return {
        action.sends: ends[action.op] + problem.p2p_ms - begins
        for d in range(len(problem.devices))
        for action in prepare(schedule, d, layout).actions
        if d != device and action.sends is not None and action.to == device
    }


def emulate(pipe: Pipeline, schedule: Schedule, device: int) -> tuple[Callable[[Any, Any], StepReport], Timer]:
    """A step of one device of the schedule, with `pipe`'s stage of that number, its executor's code, host pool and
    links, and what keeps the stand-ins' time. `pipe` has run or profiled all stages on one rank, each is on a device of
    its own in `schedule`. The step takes inputs and targets as `Pipeline.step` does and is traced."""
    rank, layout = pipe._rank, Layout.of(schedule.problem)
    plan = prepare(schedule, device, layout)
    pipe._reserve(plan)
    mail = Neighbours(rank.team, rank.device, arrivals(schedule, device))
    executor = Executor(replace(rank, layout=layout, stages={device: rank.stages[device]}, mail=mail))
    return lambda inputs, targets: executor.run(plan, inputs, targets, trace=True), mail.timer


class Timer(Protocol):
    """Lets compute go on at given moments of a step, ms after its start."""

    def start_step(self) -> None: ...

    def wait(self, message: Message) -> None:
        """What is computed from here on comes after the message's moment."""

    def late_ms(self) -> float:
        """After a step: by how much a moment was missed, at most."""


class Neighbours(Mail):
    """The mail of a rank with one stage. Messages carry noise: zeros would make matrix products faster than they
    are."""

    def __init__(self, team: Team, device: torch.device, moments: Mapping[Message, float]) -> None:
        super().__init__(team, Layout.make([0], 1), device)  # nobody to have a process group with
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
        """Nobody is there to receive it."""

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
    """CUDA's `Timer`. Moments of one step are all enqueued at its start."""

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
        """The step before is over: its last spin ended when it did at this rate."""
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
