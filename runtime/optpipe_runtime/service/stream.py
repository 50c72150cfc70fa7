"""`StreamClient`: a training that schedules each step itself asks the service where to start, and tells it what its
steps follow, for the next training on these stages. No step waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from optpipe.dispatch.simulate import Simulator
from optpipe.dispatch.starts import moved_rules
from optpipe.errors import OptPipeError
from optpipe.model.problem import Problem
from optpipe.model.rules import Rules, RulesRecord
from optpipe.schedule import Schedule
from optpipe.steps import StepRules
from optpipe_runtime.service.answers import JobAnswer, StreamAnswer, parse
from optpipe_runtime.service.background import Background
from optpipe_runtime.service.connection import LONGEST_REQUEST, ServiceConnection, api_key, run_name
from optpipe_runtime.service.errors import InvalidAnswerError, RefusedError, UnauthorizedError, UnavailableError
from optpipe_runtime.service.outages import Backoff, Outages

log = logging.getLogger("optpipe.client")

FIRST_STEP = 8  # after which rules are told, then each time that there were twice as many steps
TELL_S = 3.0  # how long `close` waits until the last ones are told


class _Step(NamedTuple):
    """A step that has run."""

    number: int
    schedule: Schedule
    measured_ms: float


class StreamClient(Background):
    """Used on one rank.

    Parameters
    ----------
    url, key
        As of `ScheduleClient`.
    problem
        A step of the training.

    Attributes
    ----------
    rules
        What an earlier training told, for this problem; None until it is here, and if there is none.
    """

    def __init__(self, url: str, problem: Problem, key: str | None = None) -> None:
        self._url, self._problem = url, problem
        self._connection = ServiceConnection(url, api_key(key))
        super().__init__("optpipe-stream")
        self._outages, self._backoff = Outages(url), Backoff()
        self._stream: tuple[str, Problem] | None = None  # its job, and the problem that its rules are for
        self.rules: StepRules | None = None
        self._newest: deque[_Step] = deque(maxlen=1)
        self._due = FIRST_STEP
        self._to_tell, self._closing = asyncio.Event(), False
        self._begin()

    def ran(self, number: int, schedule: Schedule, measured_ms: float) -> None:
        """A step has run. Never blocks."""
        self._newest.append(_Step(number, schedule, measured_ms))
        if number >= self._due:
            self._due = 2 * number
            self._in_thread(self._to_tell.set)

    def close(self) -> None:
        """Tells the rules of the last step; waits for that up to `TELL_S`."""
        self._closing = True
        self._in_thread(self._to_tell.set)
        self._thread.join(TELL_S)
        self._in_thread(lambda: self._task.cancel())

    # In the thread

    async def _main(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        with suppress(asyncio.CancelledError):
            try:
                async with self._connection:
                    await self._follow()
            except Exception:
                log.exception("the client of the solver service failed; steps are scheduled without it")

    async def _follow(self) -> None:
        """Until `close`, or the service refuses the stream."""
        while True:
            try:
                await self._open_and_tell()
                self._outages.end(UnavailableError)
                self._backoff.reset()
                if self._closing:
                    return None
                await self._to_tell.wait()
                self._to_tell.clear()
                continue
            except RefusedError as refusal:
                if refusal.status != 404:
                    log.warning("the solver service at %s refuses this stream: %s", self._url, refusal)
                    return None
                self._stream = None
                failure = UnavailableError("it does not know the stream any more")
            except (UnauthorizedError, InvalidAnswerError) as error:
                return self._outages.begin(error)
            except UnavailableError as unavailable:
                failure = unavailable
            self._outages.begin(failure)
            await self._backoff.wait(failure.retry_after_s)

    async def _open_and_tell(self) -> None:
        self._stream = self._stream or await self._open()
        if self._newest:
            step = self._newest[-1]
            await self._tell(*self._stream, step)
            if self._newest[-1] is step:
                self._newest.clear()

    async def _open(self) -> tuple[str, Problem]:
        named = {**self._problem.to_dict(), "name": self._problem.name or run_name()}
        answer = await self._connection.request("POST", "/v1/jobs", {"problem": named, "stream": True})
        job = parse(JobAnswer, answer).id
        answer = await self._connection.request("GET", f"/v1/jobs/{job}/rules", longest=2 * LONGEST_REQUEST)
        stream = parse(StreamAnswer, answer)
        if (told := stream.told) is not None:
            self.rules = StepRules(_moved(self._problem, told.rules.rules(), stream.problem), self._problem)
            log.info(
                "the solver service at %s has the rules of step %d of a training: steps are scheduled from them",
                self._url,
                told.step,
            )
        return job, stream.problem

    async def _tell(self, job: str, problem: Problem, step: _Step) -> None:
        if step.schedule.rules is None:
            return
        rules = RulesRecord.from_rules(_moved(problem, step.schedule.rules, step.schedule.problem))
        told = {
            "rules": rules.model_dump(mode="json"),
            "step": step.number,
            "predicted_ms": step.schedule.makespan_ms,
            "measured_ms": step.measured_ms,
        }
        await self._connection.request("PUT", f"/v1/jobs/{job}/rules", told, longest=2 * LONGEST_REQUEST)


def _moved(problem: Problem, rules: Rules, old: Problem) -> Rules:
    """Rules of a step, for another one. Raises `InvalidAnswerError` if they are not of these stages."""
    try:
        moved = moved_rules(Simulator(problem), rules, old)
    except OptPipeError as error:
        raise InvalidAnswerError(f"rules for other steps: {error}") from None
    if moved is None:
        raise InvalidAnswerError("rules for other steps")
    return moved
