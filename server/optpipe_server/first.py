"""`Desk`: what is known of a problem before any worker: from the cache, the client's own schedule, and a maker.

A maker is a process (`python -m optpipe_solver.first`) that has been started before it is needed and answers one
request after the other. Nothing that it says is believed but bounds and that a problem is infeasible: schedules are
checked here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace

import structlog

from optpipe.anytime import Result, merged
from optpipe.errors import InputError, OptPipeError, SolverError
from optpipe.evaluate.jit import compile_at_once
from optpipe.evaluate.objective import Objective
from optpipe.model.problem import Problem
from optpipe.model.records import Device, Stage
from optpipe.process.child import Child
from optpipe.process.protocol import Bound, Frame, Incumbent, Infeasible, Programs, Refused, Request
from optpipe.schedule import Schedule, check
from optpipe_server.caches import Caches
from optpipe_server.database import Start
from optpipe_server.database.tables import Source
from optpipe_server.metrics import CACHE, REJECTED
from optpipe_server.settings import Settings

log = structlog.get_logger("optpipe.server")

MAKER = "optpipe_solver.first"
PUBLISHED_S = 0.2  # for the published schedules of a problem that is too large for list scheduling
LARGE = 2**16  # parts of activations: a problem this large takes seconds, so it gets a process of its own
MOST_LARGE = 4  # of these that are asked about, or wait, at a time
CHECKED_S = 5e-6  # for a part of an activation, to read and check it here
KEPT = 3  # incumbents of an answer; the last one is the best


class Desk:
    """The first schedules of submissions, from any thread. Its makers end with `close`, or with this process however it
    ends."""

    def __init__(self, settings: Settings, caches: Caches) -> None:
        self._settings, self._caches = settings, caches
        self._idle: queue.Queue[Maker] = queue.Queue()
        self._makers = [Maker() for _ in range(max(1, settings.makers))]
        for maker in self._makers:
            self._idle.put(maker)
        self._alone = threading.Lock()  # of whoever asks about something large
        self._places = threading.Semaphore(MOST_LARGE)  # of those who do, one of whom is asking
        self._lock = threading.Lock()  # over the two below
        self._large: Maker | None = None
        self._closed = False
        _warm_up()

    def close(self) -> None:
        """Ends the makers; whoever still waits for one gets what is known without."""
        with self._lock:
            self._closed, large = True, self._large
        for maker in (*self._makers, *([large] if large else [])):
            maker.close()

    def start_of(
        self, tenant: str, problem: Problem, method: str, objective: Objective, warm_start: Schedule | None
    ) -> Start:
        """The best that is there within `first_schedule_s`. Raises `InputError` for a method that is none, or none for
        this problem."""
        return self._start(tenant, problem, method, objective, warm_start, "warm_start")

    def carry(self, tenant: str, problem: Problem, method: str, objective: Objective, best: Schedule | None) -> Start:
        """`start_of` for a job whose costs have changed: `best`, made for those before, is taken as it is where it
        still holds."""
        return self._start(tenant, problem, method, objective, best, "carried")

    def _start(
        self, tenant: str, problem: Problem, method: str, objective: Objective, given: Schedule | None, source: Source
    ) -> Start:
        patience_s = self._settings.first_schedule_s
        deadline = time.monotonic() + max(patience_s / 2, patience_s - CHECKED_S * size(problem))
        start = Start(self._cached(tenant, problem, objective), "cache")
        if start.best.status == "optimal" and method == "auto":  # another name may be none, which a maker knows
            return start
        to_repair = None
        if given is not None:
            retimed = replace(given, problem=problem, placement=None)
            if check(problem, retimed):
                to_repair = Programs.of(retimed)
            else:
                start = _better(start, Start(Result("feasible", retimed, objective, method=retimed.method), source))
        request = Request(
            problem=problem, method=method, objective=objective, time_limit_s=PUBLISHED_S, warm_start=to_repair
        )
        return _better(start, Start(self._made(request, deadline), "heuristic"))

    def _cached(self, tenant: str, problem: Problem, objective: Objective) -> Result:
        try:
            hit = self._caches.of(tenant).lookup(problem, objective)
        except InputError as error:
            log.warning("the cache was not asked", why=str(error))
            CACHE.labels("failed").inc()
            return Result("unknown", objective=objective)
        CACHE.labels("miss" if hit is None else "exact" if hit.exact else "near").inc()
        if hit is None:
            return Result("unknown", objective=objective)
        return Result(hit.status, hit.schedule, objective, hit.lower_bound_ms, hit.schedule.method)

    def _made(self, request: Request, deadline: float) -> Result:
        """What a maker knows; `unknown` where none is free in time."""
        if size(request.problem) > LARGE:
            return self._made_alone(request, deadline)
        try:
            maker = self._idle.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return _judged(request, Answer())
        try:
            answer = maker.ask(request, deadline)
        finally:
            maker.running()  # another process where this one had to be ended, ready for the next submission
            self._idle.put(maker)
        return _judged(request, answer)

    def _made_alone(self, request: Request, deadline: float) -> Result:
        """By a process of its own, and one at a time: each takes this process seconds to check, and much memory. Some
        may wait; more would take the threads of those who ask about something small."""
        if not self._places.acquire(blocking=False):
            return _judged(request, Answer())
        try:
            return self._made_in_turn(request, deadline)
        finally:
            self._places.release()

    def _made_in_turn(self, request: Request, deadline: float) -> Result:
        if not self._alone.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return _judged(request, Answer())
        try:
            with self._lock:
                maker = self._large = None if self._closed else Maker()
            try:
                return _judged(request, maker.ask(request, deadline) if maker else Answer())
            finally:
                if maker:
                    maker.close()
        finally:
            self._alone.release()


@dataclass
class Answer:
    """What a maker said."""

    lower_bound_ms: float | None = None
    infeasible: str | None = None
    found: deque[Incumbent] = field(default_factory=lambda: deque(maxlen=KEPT))

    def take(self, frame: Frame) -> None:
        """Raises `InputError` where it refuses the request."""
        if isinstance(frame, Refused):
            raise InputError(frame.reason)
        if isinstance(frame, Bound):
            self.lower_bound_ms = max(frame.lower_bound_ms, self.lower_bound_ms or 0.0)
        elif isinstance(frame, Infeasible):
            self.infeasible = frame.reason
        elif isinstance(frame, Incumbent):
            self.found.append(frame)


class Maker:
    """A process that makes first schedules, another one wherever it has ended or had to be ended. `ask` is for one
    thread at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # of whoever reads what the process writes
        self._lock = threading.Lock()  # over the two below
        self._closed = False
        self._child: Child | None = Child(MAKER)

    def ask(self, request: Request, deadline: float) -> Answer:
        """What it says before the deadline (`time.monotonic`), then the process is ended. Raises `InputError` for a
        refused request."""
        answer = Answer()
        with self._turn:
            for _again in range(2):  # where it had ended before it was asked
                child, left_s = self.running(), deadline - time.monotonic()
                if child is None or left_s <= 0 or _heard(child, request, left_s, answer):
                    break
        return answer

    def running(self) -> Child | None:
        """The process, a new one where it has ended; None once this is closed."""
        with self._lock:
            if self._closed:
                return None
            if self._child is None or self._child.ended:
                if self._child:
                    self._child.close()
                self._child = Child(MAKER)
            return self._child

    def close(self) -> None:
        with self._lock:
            self._closed, child = True, self._child
        if child:
            child.stop()
            with self._turn:
                child.close()


def _heard(child: Child, request: Request, left_s: float, answer: Answer) -> bool:
    """Asks a child, which is ended where it takes too long or says what is none; whether it said anything."""
    timer = threading.Timer(left_s, child.stop)
    timer.daemon = True
    timer.start()
    heard = False
    try:
        for frame in child.ask(request):
            heard = True
            answer.take(frame)
    except SolverError as error:
        log.warning("a maker of first schedules failed", why=str(error))
        child.stop()
    finally:
        timer.cancel()
        timer.join()  # who is asked next is not ended for this
    return heard


def size(problem: Problem) -> int:
    """Parts of activations: what time and memory for a schedule, and for checking one, grow with."""
    return sum(stage.offload_parts for stage in problem.stages) * problem.microbatches


def _better(known: Start, new: Start) -> Start:
    best = merged(known.best, new.best)
    return Start(best, known.source if best.schedule is known.best.schedule else new.source)


def _judged(request: Request, answer: Answer) -> Result:
    """The last schedule of an answer that is one, with the bound."""
    known = Result("unknown", objective=request.objective, lower_bound_ms=answer.lower_bound_ms)
    for frame in reversed(answer.found):
        try:
            schedule = frame.schedule.model_copy(update={"placement": None}).schedule(request.problem, frame.method)
            wrong = check(request.problem, schedule)
        except OptPipeError as error:
            wrong = [str(error)]
        if not wrong:
            return replace(known, status="feasible", schedule=schedule, method=frame.method)
        log.warning("a schedule of a maker was rejected", method=frame.method, why=wrong[0])
        REJECTED.inc()
    return replace(known, status="infeasible", reason=answer.infeasible) if answer.infeasible else known


def _warm_up() -> None:
    """So that no submission waits for imports and compiled code."""
    compile_at_once()
    stage = Stage(
        device=0,
        forward_ms=1.0,
        backward_input_ms=1.0,
        backward_weight_ms=1.0,
        activation_bytes=1,
        saved_for_weight_bytes=0,
    )
    problem = Problem(microbatches=1, devices=(Device(activation_budget_bytes=1),), stages=(stage,))
    assert not check(problem, Schedule.parse(problem, [["0F0", "0BW0"]]))
