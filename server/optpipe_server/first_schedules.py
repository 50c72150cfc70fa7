"""`FirstSchedules`: the best schedule that is known of a problem before any worker searches.

It comes from the cache, from the client, or from a process that makes first schedules. Schedules of that process are
verified here; its bounds, and its word that a problem is infeasible, are taken as they are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

import structlog

from optpipe.errors import InputError, OptPipeError
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.process.protocol import Bound, Frame, Incumbent, Infeasible, Programs, Refused, Request
from optpipe.results import Result, merged
from optpipe.schedule import Schedule, check
from optpipe_server.database import InitialResult
from optpipe_server.database.tables import Source
from optpipe_server.metrics import CACHE, REJECTED
from optpipe_server.schedule_cache import ScheduleCache
from optpipe_server.settings import Settings
from optpipe_server.warm_process import WarmProcess

log = structlog.get_logger("optpipe.server")

MODULE = "optpipe_solver.first"
INCUMBENTS_KEPT = 3  # of an answer: the last one is the best, the others replace it if it is not valid
PUBLISHED_S = 0.2  # for the published schedules of a problem that is too large for list scheduling
LARGE = 2**15  # activation parts: a larger problem takes seconds, so it gets a process of its own
AT_ONCE = 4  # that are looked up or verified at a time
CHECK_S_PER_PART = 5e-6  # to read and verify a schedule here, per activation part

ReadSchedule = Callable[[], Schedule]  # read when it is its turn: a large one takes seconds and much memory


class FirstSchedules:
    """Finds the first schedules of submissions; thread-safe, but for large problems, of which the caller asks for one
    at a time.

    Its processes end with `close`, and with this process however that ends.
    """

    def __init__(self, settings: Settings, cache: ScheduleCache) -> None:
        self._cache = cache
        self._idle: queue.Queue[WarmProcess] = queue.Queue()
        self._processes = [WarmProcess(MODULE) for _ in range(max(1, settings.first_schedule_processes))]
        for process in self._processes:
            process.ensure_running()  # so that it is ready for the first submission
            self._idle.put(process)
        self._computing = threading.BoundedSemaphore(AT_ONCE)  # held while a problem is looked up or verified
        self._lock = threading.Lock()  # guards the two fields below
        self._large: WarmProcess | None = None
        self._closed = False

    def close(self) -> None:
        """End the processes. Whoever waits for one gets what is known without it."""
        with self._lock:
            self._closed, large = True, self._large
        for process in (*self._processes, *([large] if large else [])):
            process.close()

    def find(
        self,
        problem: Problem,
        options: SolveOptions,
        given: ReadSchedule | None,
        source: Source,
        deadline: float,
    ) -> InitialResult:
        """Return the best that can be found by then.

        Parameters
        ----------
        given
            Reads the schedule that comes from this `source`: the client's, or for a job whose costs have changed the
            best one for the former costs. It counts if it is valid.
        deadline
            By `time.monotonic`.

        Raises
        ------
        InputError
            If the method is unknown or does not apply to this problem, or `given` cannot be read.
        """
        parts, left_s = count_parts(problem), deadline - time.monotonic()
        answered_by = deadline - min(left_s / 2, CHECK_S_PER_PART * parts)  # what a process says is verified, too
        to_repair = None
        with self._computing:
            schedule = given() if given else None
            initial = InitialResult(self._cached(problem, options), "cache")
            if initial.best.status == "optimal":
                return initial
            if schedule is not None:
                placement = schedule.placement if options.placements == "all" else None
                placed = placement.apply(problem) if placement else problem
                retimed = replace(schedule, problem=placed, placement=placement)
                if check(placed, retimed):
                    to_repair = Programs.from_schedule(retimed)
                else:
                    initial = _better(initial, InitialResult(Result.from_schedule(retimed, options), source))
        asked = {**options.arguments(), "threads": 1, "time_limit_s": PUBLISHED_S}
        request, answer = Request.model_validate({"problem": problem, "warm_start": to_repair, **asked}), Answer()
        (self._ask_for_large if is_large(problem) else self._ask_idle)(request, answered_by, answer)
        with self._computing:
            first = _better(initial, InitialResult(_verified(request, answer), "heuristic"))
            if first.state(options) == "done":  # no worker will keep it
                self._cache.keep(first.best)
        return first

    def _cached(self, problem: Problem, options: SolveOptions) -> Result:
        """What the cache has; a heuristic or a published schedule that is asked for is made anew."""
        unknown = Result("unknown", objective=options.objective)
        if not options.starts_from_known:
            return unknown
        try:
            hit = self._cache.open().lookup(problem, options.objective)
        except InputError as error:
            log.warning("the cache cannot be used", why=str(error))
            CACHE.labels("failed").inc()
            return unknown
        CACHE.labels("miss" if hit is None else "exact" if hit.exact else "near").inc()
        if hit is None:
            return unknown
        bound_ms = hit.lower_bound_ms if options.placements == "keep" else None  # other stages may be faster
        return Result.from_schedule(hit.schedule, options, bound_ms)

    def _ask_idle(self, request: Request, deadline: float, answer: Answer) -> None:
        try:
            process = self._idle.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return
        try:
            process.ask(request, deadline, answer.add)
        finally:
            process.ensure_running()  # so that it is ready for the next submission if it had to be ended
            self._idle.put(process)

    def _ask_for_large(self, request: Request, deadline: float, answer: Answer) -> None:
        """Ask a process of its own."""
        with self._lock:
            if self._closed:
                return
            process = self._large = WarmProcess(MODULE)
        with closing(process):
            process.ask(request, deadline, answer.add)


@dataclass
class Answer:
    """What a process answered to one request."""

    lower_bound_ms: float | None = None
    infeasible: str | None = None
    incumbents: deque[Incumbent] = field(default_factory=lambda: deque(maxlen=INCUMBENTS_KEPT))

    def add(self, frame: Frame) -> None:
        """Add one frame of the answer. Raises `InputError` if the process refused the request."""
        if isinstance(frame, Refused):
            raise InputError(frame.reason)
        if isinstance(frame, Bound):
            self.lower_bound_ms = max(frame.lower_bound_ms, self.lower_bound_ms or 0.0)
        elif isinstance(frame, Infeasible):
            self.infeasible = frame.reason
        elif isinstance(frame, Incumbent):
            self.incumbents.append(frame)


def count_parts(problem: Problem) -> int:
    """Count the activation parts as if every stage had as many as that with the most: time and memory to make or verify
    a schedule grow with them."""
    return len(problem.stages) * problem.microbatches * max(stage.offload_parts for stage in problem.stages)


def is_large(problem: Problem) -> bool:
    """Return whether a schedule of this problem takes seconds and much memory."""
    return count_parts(problem) > LARGE


def _better(known: InitialResult, new: InitialResult) -> InitialResult:
    best = merged(known.best, new.best)
    return InitialResult(best, known.source if best.schedule is known.best.schedule else new.source)


def _verified(request: Request, answer: Answer) -> Result:
    """The last valid schedule of an answer, with its bound."""
    bound_only = Result("unknown", objective=request.objective, lower_bound_ms=answer.lower_bound_ms)
    for frame in reversed(answer.incumbents):
        try:
            programs = frame.schedule
            if request.placements == "keep":
                programs = programs.model_copy(update={"placement": None})
            schedule = programs.schedule(request.problem, frame.method)
            wrong = check(schedule.problem, schedule)
        except OptPipeError as error:
            wrong = [str(error)]
        if not wrong:
            return Result.from_schedule(schedule, request, answer.lower_bound_ms, frame.method)
        log.warning("a first schedule was rejected", method=frame.method, why=wrong[0])
        REJECTED.inc()
    return replace(bound_only, status="infeasible", reason=answer.infeasible) if answer.infeasible else bound_only
