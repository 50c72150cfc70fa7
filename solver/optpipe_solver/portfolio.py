"""Which solvers run, in what order and for how long: heuristics in this process, then the engines, each in a process of its own."""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable, Iterable

from optpipe.child import Bound, Child, End, Frame, Incumbent, Infeasible, Note, Programs, Request
from optpipe.errors import InputError, OptPipeError
from optpipe.schedule import Schedule
from optpipe.validity import check
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.floor import infeasibility
from optpipe_solver.heuristics import STREAMS, value
from optpipe_solver.methods import ENGINES, HEURISTICS, METHODS, WITHIN_MEMORY

ENGINE = "optpipe_solver.engine"
HEURISTIC_SHARE = 0.15  # of the time, where engines follow
MARGIN_S = 0.3  # kept for stopping the engines and writing the last frames
WORTHWHILE_S = 0.5  # an engine needs that long to start
LARGE = 3_000  # forwards: list scheduling takes some tenths of a second for so many

Emit = Callable[[Frame], None]


class Portfolio:
    """One request's search: the best schedule and the best bound so far, both told as soon as they are known."""

    def __init__(self, request: Request, emit: Emit) -> None:
        if request.method not in METHODS:
            raise InputError(f"method = {request.method!r}: the methods are {', '.join(METHODS)}")
        self.request, self.emit = request, emit
        self.deadline = time.monotonic() + request.time_limit_s - min(MARGIN_S, request.time_limit_s / 4)
        self.best: Schedule | None = None
        self.bound = 0.0

    def run(self) -> None:
        """Tells what is known to be impossible, else the bound, the warm start, what heuristics find and what engines make of it."""
        problem, method = self.request.problem, self.request.method
        reason = infeasibility(problem)
        if reason:
            self.emit(Infeasible(reason=reason))
            return
        self.raise_bound(trivial_bound(problem, self.request.objective), "trivial")
        self.raise_bound(memory_bound(problem, self.request.objective), "memory")
        self.take_warm_start()
        engines = [name for name in ENGINES if method in ("auto", name) and self.applies(name)]
        if method in ENGINES and not engines:
            self.emit(Note(text=f"{method} is not for a problem of this sort or size"))
        self.run_heuristics([method] if method in HEURISTICS else self.within_memory(), patient=not engines)
        self.run_engines(engines)

    @property
    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def optimal(self) -> bool:
        return self.best is not None and self.value(self.best) <= self.bound * (1 + 1e-9)

    def value(self, schedule: Schedule) -> float:
        return value(schedule, self.request.objective)

    def raise_bound(self, lower_bound_ms: float, method: str) -> None:
        if lower_bound_ms > self.bound * (1 + 1e-9):
            self.bound = lower_bound_ms
            self.emit(Bound(method=method, lower_bound_ms=lower_bound_ms))

    def offer(self, schedule: Schedule) -> str | None:
        """Takes a schedule if it is better and valid; says what is wrong with it, if anything. Raises `ScheduleError` if it cannot run."""
        if self.best is not None and self.value(schedule) >= self.value(self.best) * (1 - 1e-9):
            return None
        wrong = check(self.request.problem, schedule)
        if wrong:
            return wrong[0]
        self.best = schedule
        self.emit(Incumbent(method=schedule.method, schedule=Programs.of(schedule)))
        return None

    def within_memory(self) -> list[str]:
        """The heuristics that fit, the most promising first; where these take their time, naive, which takes none, before them."""
        problem = self.request.problem
        large = len(problem.stages) * problem.microbatches > LARGE
        return sorted(WITHIN_MEMORY, key=lambda name: large and name != "naive")

    def take_warm_start(self) -> None:
        if self.request.warm_start is None:
            return
        try:
            wrong = self.offer(self.request.warm_start.schedule(self.request.problem, "warm start"))
        except OptPipeError as error:
            wrong = str(error)
        if wrong:
            self.emit(Note(text=f"the warm start is no schedule of this problem: {wrong}"))

    def applies(self, engine: str) -> bool:
        try:
            return bool(importlib.import_module(f"optpipe_solver.{engine}").applies(self.request.problem))
        except ImportError as error:
            self.emit(Note(text=f"{engine} is not available: {error}"))
            return False

    def run_heuristics(self, names: Iterable[str], patient: bool) -> None:
        """In turn a schedule of each: first what they are known for, then, for a share of the time, what varying their policies brings."""
        until = self.deadline if patient else time.monotonic() + HEURISTIC_SHARE * self.time_left
        streams = {name: STREAMS[name](self.request.problem, self.request.objective) for name in names}
        while streams and not self.optimal:
            for name, stream in list(streams.items()):
                if self.best is not None and time.monotonic() > until:
                    return
                try:
                    schedule = next(stream, None)
                    wrong = self.offer(schedule) if schedule else None
                except OptPipeError as error:
                    schedule, wrong = None, str(error)
                except Exception as error:  # one heuristic's fault is not the search's end
                    schedule, wrong = None, f"{type(error).__name__}: {error}"
                if wrong:
                    self.emit(Note(text=f"{name} gives no schedule: {wrong}"))
                if wrong or schedule is None:
                    del streams[name]

    def run_engines(self, engines: list[str]) -> None:
        """As many at a time as there are threads, the time shared evenly between those that must wait for each other."""
        together = min(len(engines), self.request.threads)
        while engines and not self.optimal and self.time_left > WORTHWHILE_S:
            rounds = -(-len(engines) // together)
            self.run_together(engines[:together], self.time_left / rounds)
            engines = engines[together:]

    def run_together(self, engines: list[str], seconds: float) -> None:
        inbox: queue.Queue[tuple[str, Frame | OptPipeError]] = queue.Queue()
        running = {}
        for engine in engines:
            running[engine] = self.start(engine, seconds, max(1, self.request.threads // len(engines)))
        listeners = [threading.Thread(target=_listen, args=(name, child, inbox), daemon=True) for name, child in running.items()]
        for listener in listeners:
            listener.start()
        until, under_way = time.monotonic() + seconds, set(engines)
        while under_way and not self.optimal:
            try:
                engine, frame = inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(frame, OptPipeError | End):
                under_way.remove(engine)
            self.hear(engine, frame)
        for child in running.values():
            child.stop()
        for listener in listeners:
            listener.join()
        while not inbox.empty():
            self.hear(*inbox.get())

    def start(self, engine: str, seconds: float, threads: int) -> Child:
        start = Programs.of(self.best) if self.best else None
        return Child(
            ENGINE, self.request.model_copy(update={"method": engine, "time_limit_s": seconds, "threads": threads, "warm_start": start})
        )

    def hear(self, engine: str, frame: Frame | OptPipeError) -> None:
        """Passes on what an engine finds once it is verified; what goes wrong is told, and the search goes on."""
        if isinstance(frame, Incumbent):
            try:
                wrong = self.offer(frame.schedule.schedule(self.request.problem, frame.method))
            except OptPipeError as error:
                wrong = str(error)
            if wrong:
                self.emit(Note(text=f"a schedule of {engine} was rejected: {wrong}"))
        elif isinstance(frame, Bound):
            if self.best is None or frame.lower_bound_ms <= self.value(self.best) * (1 + 1e-6):
                self.raise_bound(frame.lower_bound_ms, frame.method)
            else:
                self.emit(
                    Note(text=f"{engine} claims a bound of {frame.lower_bound_ms} ms, above a schedule of {self.value(self.best)} ms")
                )
        elif isinstance(frame, Note):
            self.emit(frame)
        elif isinstance(frame, OptPipeError):
            self.emit(Note(text=f"{engine} failed: {frame}"))


def _listen(engine: str, child: Child, inbox: queue.Queue[tuple[str, Frame | OptPipeError]]) -> None:
    try:
        for frame in child.frames():
            inbox.put((engine, frame))
    except OptPipeError as error:
        inbox.put((engine, error))
