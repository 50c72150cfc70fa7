"""`FirstSchedules`: the best schedule that is known of a problem before any worker searches.

It comes from the cache, from the client, or from a process that makes first schedules. Schedules of that process are
verified here; its bounds, and its word that a problem is infeasible, are taken as they are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import structlog

from optpipe.errors import InputError, OptPipeError
from optpipe.evaluate.jit import compile_at_once
from optpipe.model.problem import Problem
from optpipe.model.records import Device, Stage
from optpipe.options import SolveOptions
from optpipe.process.protocol import Bound, Frame, Incumbent, Infeasible, Programs, Refused, Request
from optpipe.results import Result, merged
from optpipe.schedule import Schedule, check
from optpipe_server.database import InitialResult
from optpipe_server.database.tables import Source
from optpipe_server.metrics import CACHE, REJECTED
from optpipe_server.settings import LOCAL, Settings
from optpipe_server.tenant_caches import TenantCaches
from optpipe_server.warm_process import WarmProcess

log = structlog.get_logger("optpipe.server")

MODULE = "optpipe_solver.first"
INCUMBENTS_KEPT = 3  # of an answer: the last one is the best, the others replace it if it is not valid
PUBLISHED_S = 0.2  # for the published schedules of a problem that is too large for list scheduling
LARGE = 2**15  # activation parts: a larger problem takes seconds, so it gets a process of its own
NOISY = 8  # times as much memory and time take a schedule's samples with noise
AT_ONCE = 4  # smaller ones that are looked up or verified at a time
MOST_LARGE = 4  # large problems that are handled or wait at a time
CHECK_S_PER_PART = 5e-6  # to read and verify a schedule here, per activation part


class BusyError(Exception):
    """Too much is computed already; the message says what."""


class FirstSchedules:
    """Finds the first schedules of submissions; thread-safe.

    Its processes end with `close`, and with this process however that ends.
    """

    def __init__(self, settings: Settings, caches: TenantCaches) -> None:
        self._settings, self._caches = settings, caches
        self._idle: queue.Queue[WarmProcess] = queue.Queue()
        self._processes = [WarmProcess(MODULE) for _ in range(max(1, settings.first_schedule_processes))]
        for process in self._processes:
            process.ensure_running()  # so that it is ready for the first submission
            self._idle.put(process)
        self._one_large = threading.Lock()  # held while a large problem is handled
        self._large_slots = threading.Semaphore(MOST_LARGE)  # for the one that is handled and those that wait
        self._computing = threading.BoundedSemaphore(AT_ONCE)  # held while a small problem is looked up or verified
        self._lock = threading.Lock()  # guards the three fields below
        self._large_of: Counter[str] = Counter()  # tenants: their part of the slots
        self._large: WarmProcess | None = None
        self._closed = False
        _warm_up()

    def close(self) -> None:
        """End the processes. Whoever waits for one gets what is known without it."""
        with self._lock:
            self._closed, large = True, self._large
        for process in (*self._processes, *([large] if large else [])):
            process.close()

    def find(
        self, tenant: str, problem: Problem, options: SolveOptions, warm_start: ReadSchedule | None
    ) -> InitialResult:
        """Return the best that can be found within `first_schedule_s`; `warm_start` reads what the client has sent.

        Raises
        ------
        InputError
            If the method is unknown or does not apply to this problem, or the warm start cannot be read.
        BusyError
            If other large problems take so long that a warm start cannot be checked.
        """
        return self._find(_Wanted(tenant, problem, options, warm_start, "warm_start", self._deadline(problem)))

    def find_after_change(
        self, tenant: str, problem: Problem, options: SolveOptions, best: ReadSchedule | None
    ) -> InitialResult:
        """`find` for a job whose costs have changed: `best`, made for the former costs, is kept if still valid."""
        return self._find(_Wanted(tenant, problem, options, best, "carried", self._deadline(problem)))

    def _deadline(self, problem: Problem) -> float:
        """When a process has to have answered, so that there is time to verify what it says."""
        limit_s = self._settings.first_schedule_s
        return time.monotonic() + max(limit_s / 2, limit_s - CHECK_S_PER_PART * count_parts(problem))

    def _find(self, wanted: _Wanted) -> InitialResult:
        if count_parts(wanted.problem) <= LARGE // (NOISY if wanted.options.jitter else 1):
            return self._search(wanted, self._ask_idle, self._computing)
        with self._turn_of_large(wanted) as has_turn:
            if has_turn:
                return self._search(wanted, self._ask_for_large, nullcontext())
        if wanted.given is not None and wanted.source == "warm_start":
            raise BusyError("Other large problems are being handled, so the warm start cannot be checked now.")
        return InitialResult()

    def _search(self, wanted: _Wanted, ask: Ask, computing: AbstractContextManager[Any]) -> InitialResult:
        """What is known, and what a process finds; `computing` is held while this process computes."""
        tenant, problem, options, given, source, deadline = wanted
        with computing:
            schedule, to_repair = given() if given else None, None
            initial = InitialResult(self._cached(tenant, problem, options), "cache")
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
        ask(request, deadline, answer)
        with computing:
            first = _better(initial, InitialResult(_verified(request, answer), "heuristic"))
            if first.state(options) == "done":  # no worker will keep it
                self._caches.keep(tenant, first.best)
        return first

    def _cached(self, tenant: str, problem: Problem, options: SolveOptions) -> Result:
        """What the cache has; a heuristic or a published schedule that is asked for is made anew."""
        unknown = Result("unknown", objective=options.objective)
        if not options.starts_from_known:
            return unknown
        try:
            hit = self._caches.cache_of(tenant).lookup(problem, options.objective)
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

    @contextmanager
    def _turn_of_large(self, wanted: _Wanted) -> Iterator[bool]:
        """Yield whether it is this problem's turn: large ones are handled one at a time, from the lookup to the last
        check, as each takes this process seconds and much memory."""
        with self._large_slot(wanted.tenant) as free:
            has_turn = free and self._one_large.acquire(timeout=max(0.0, wanted.deadline - time.monotonic()))
            try:
                yield has_turn
            finally:
                if has_turn:
                    self._one_large.release()

    @contextmanager
    def _large_slot(self, tenant: str) -> Iterator[bool]:
        """Yield whether one more large problem of the tenant may wait.

        A few may, of each tenant at most half of them. More would take the threads of submissions with small problems.
        """
        with self._lock:
            free = tenant == LOCAL or self._large_of[tenant] < max(1, MOST_LARGE // 2)
            free = free and self._large_slots.acquire(blocking=False)
            self._large_of[tenant] += free
        try:
            yield free
        finally:
            if free:
                with self._lock:
                    self._large_of[tenant] -= 1
                    self._large_of += Counter()  # without those that have none
                self._large_slots.release()


ReadSchedule = Callable[[], Schedule]  # read when it is its turn: a large one takes seconds and much memory


class _Wanted(NamedTuple):
    """Whose problem wants a first schedule, the schedule that is given for it, and until when a process may answer."""

    tenant: str
    problem: Problem
    options: SolveOptions
    given: ReadSchedule | None
    source: Source
    deadline: float


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


Ask = Callable[[Request, float, Answer], None]


def count_parts(problem: Problem) -> int:
    """Count the activation parts as if every stage had as many as that with the most: time and memory to make or verify
    a schedule grow with them."""
    return len(problem.stages) * problem.microbatches * max(stage.offload_parts for stage in problem.stages)


def _better(known: InitialResult, new: InitialResult) -> InitialResult:
    best = merged(known.best, new.best)
    return InitialResult(best, known.source if best.schedule is known.best.schedule else new.source)


def _verified(request: Request, answer: Answer) -> Result:
    """The last valid schedule of an answer, with its bound."""
    known = Result("unknown", objective=request.objective, lower_bound_ms=answer.lower_bound_ms)
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
    return replace(known, status="infeasible", reason=answer.infeasible) if answer.infeasible else known


def _warm_up() -> None:
    """Load and compile what verifying needs, so that no submission waits for it."""
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
