"""`EngineRuns`: which engine runs when, from which schedule and for how long; what engines find; how much they hold.

`EngineProcesses` starts, listens to and stops their processes.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from optpipe.errors import OptPipeError
from optpipe.evaluate.jit import compiles_elsewhere
from optpipe.process.child import LOADING_S, Child
from optpipe.process.process_tree import members, resident_bytes
from optpipe.process.protocol import Bound, End, Frame, Incumbent, Note, Programs, Ready, Request
from optpipe.schedule import Schedule
from optpipe_solver import engines, tuning
from optpipe_solver.clock import Clock
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.methods import RELAX
from optpipe_solver.schedule_facts import is_modelled
from optpipe_solver.tuning import EngineRun

ENGINE = "optpipe_solver.engines"
KILLED = float("inf")
MIB = 2**20

Message = Frame | OptPipeError | None  # what an engine's process sends; None is its end, however it came


@dataclass(eq=False)
class EngineProcess:
    """One run of an engine, in a process that others may have had before."""

    engine: str
    child: Child
    threads: int
    start: Schedule | None  # the warm start
    # A moment of `time.monotonic` at which it is asked to end, then one at which it is killed, and `KILLED`.
    deadline: float
    allotted_s: float
    began: float = field(default_factory=time.monotonic)  # to load, then to search
    spent_s: float | None = None  # of its time, by its own count
    gained: bool = False  # whether a schedule of its became the best
    report: Note | None = None  # its last, on how a search of it ended or how far it is
    asked_to_end: bool = False

    @property
    def killed(self) -> bool:
        return self.deadline == KILLED

    @property
    def stopped(self) -> bool:
        """Whether it does not end by itself."""
        return self.killed or self.asked_to_end

    @property
    def ended_early(self) -> bool:
        """Whether it ended by itself with more than half of its time left: it knew nothing more to do."""
        spent_s = time.monotonic() - self.began if self.spent_s is None else self.spent_s
        return not self.stopped and spent_s < self.allotted_s / 2


class EngineProcesses:
    """All engine processes of one search. Used from one thread."""

    def __init__(self) -> None:
        self.running: list[EngineProcess] = []
        self.waiting: list[Child] = []  # for another request
        self._inbox: queue.Queue[tuple[EngineProcess, Message]] = queue.Queue()

    def prepare(self) -> None:
        """Start a process that waits for an engine."""
        self.waiting.append(Child(ENGINE, None))

    def start(self, request: Request, start: Schedule | None, deadline: float, allotted_s: float) -> None:
        """Start the engine that the request's method names, from a schedule."""
        asked = request.model_copy(update={"warm_start": Programs.from_schedule(start) if start else None})
        process = EngineProcess(request.method, self._child(asked), request.threads, start, deadline, allotted_s)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        self.running.append(process)

    def _child(self, asked: Request) -> Child:
        """One that waits, if the engine can have it; else a new one."""
        while self.waiting and not engines.load(asked.method).ALONE:
            child = self.waiting.pop()
            if child.waits:
                child.ask(asked)
                return child
            child.close()  # it has died
        return Child(ENGINE, asked)

    def _listen(self, process: EngineProcess) -> None:
        try:
            for frame in process.child.frames(stays=not engines.load(process.engine).ALONE):
                self._inbox.put((process, frame))
        except OptPipeError as error:
            self._inbox.put((process, error))
        finally:
            self._inbox.put((process, None))

    def stop(self, process: EngineProcess) -> None:
        """Kill an engine; `messages` still yields what it sent before."""
        if not process.killed:
            process.deadline = KILLED
            process.child.stop()

    def end_waiting(self) -> None:
        """End the processes in which no engine runs."""
        while self.waiting:
            self.waiting.pop().close()

    def messages(self, wait_s: float = 0.0) -> Iterator[tuple[EngineProcess, Message]]:
        """Yield what engines have sent since the last call; wait for a first message, `wait_s` at most."""
        while True:
            try:
                process, message = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            except queue.Empty:
                return
            if message is None:
                self.running.remove(process)
                if process.child.waits and not process.killed:
                    self.waiting.append(process.child)
                else:
                    process.child.close()
            yield process, message
            wait_s = 0.0


class EngineRuns:
    """The planned runs of engines, and those that are under way.

    With one thread an engine's share is planned in seconds of counted work, and the next engine has what is left of it.
    """

    def __init__(
        self, request: Request, planned: Sequence[EngineRun], incumbents: Incumbents, clock: Clock, emit: Emit
    ) -> None:
        self._request, self._incumbents, self._emit = request, incumbents, emit
        self._processes = EngineProcesses()
        beside = request.method in ("auto", RELAX)  # what gives bounds only need not wait for heuristics
        self._parallel = tuning.side_by_side(request.threads) if beside else 1
        engines_s = (1 - tuning.heuristics_share(request.problem, clock.seconds)) * clock.seconds
        engines_s *= tuning.COUNTED_SHARE if clock.counts else 1
        self._shared_s = self._parallel * engines_s  # shares are of this
        self._planned = [run for run in planned if run.share * self._shared_s >= run.least_s]
        # By count what no engine has used yet; by the clock all that is left.
        self._clock = Clock(engines_s if clock.counts else clock.seconds, clock.counts, inf, whole=clock)
        self._started = 0
        self._any_ready = False  # whether an engine's search has begun
        self._exhausted: list[tuple[str, Schedule | None]] = []  # an engine that found no more to do, and from where

    def prepare(self) -> None:
        """Let a process load what planned engines compile, before there is a schedule to start from."""
        if self._clock.left_s > tuning.ENGINE_END_S and any(run.engine in engines.LOOPS for run in self._planned):
            self._processes.prepare()

    @property
    def running(self) -> bool:
        return bool(self._processes.running)

    @property
    def loading(self) -> bool:
        """Whether engines were started, and the first of them is yet to be ready."""
        return self.running and not self._any_ready

    def unfinished(self, engine: str) -> bool:
        """Whether an engine that was asked for by name is yet to run, or to end."""
        each = [run.engine for run in self._planned] + [process.engine for process in self._processes.running]
        return self._request.method == engine and engine in each

    def start_next(self, beside_heuristics: bool) -> None:
        """Start planned runs as long as fewer than `tuning.side_by_side` searches are under way.

        Heuristics that still run count as one of them. Each run has its share of the threads that are free, or as many
        as its engine can use. An engine that runs already from the same schedule waits if others can run, and so does
        one that must compile before any other has begun, unless work is counted.
        """
        running, request = self._processes.running, self._request
        free = self._parallel - len(running) - beside_heuristics
        threads = request.threads - sum(process.threads for process in running)
        threads -= beside_heuristics * (request.threads // self._parallel)
        while free > 0 and self._planned:
            if self._clock.left_s <= tuning.ENGINE_END_S:
                self._planned.clear()
                return
            able = [run for run in self._planned if self.may_gain(run)]
            if compiles_elsewhere():  # what waits for that comes later, if anything runs without it
                able = [run for run in able if not engines.waits_for_compiler(run.engine)] or able[: not running]
            if not able:
                return
            under_way = [(process.engine, process.start) for process in running]
            others = (run for run in able if not _contains(under_way, run.engine, self._start))
            may_compile = self._started > 0 or self._clock.counts
            run = next((run for run in others if may_compile or not engines.waits_for_compiler(run.engine)), able[0])
            self._planned.remove(run)
            if run.repeat:
                self._planned.append(run)
            share = max(1, -(-threads // free))
            share = min(share, engines.load(run.engine).MOST_THREADS or share)
            allotted_s = self._clock.left_s  # all that is left if no run is planned behind it
            if self._planned:
                allotted_s = min(allotted_s, max(run.share * self._shared_s, tuning.ENGINE_LEAST_S))
            self.start(run, allotted_s, share)
            free, threads = free - 1, threads - share

    @property
    def _start(self) -> Schedule | None:
        """The best schedule that the engines' models know."""
        return self._incumbents.best_of(is_modelled)

    def start(self, run: EngineRun, allotted_s: float, threads: int) -> None:
        """Start an engine; what it is allotted begins when it is ready, and has the time that it needs to end.

        Where the clock counts, one that makes no plan for its time is stopped at the end of its share, or goes on while
        it gains.
        """
        goes_on = not self._clock.counts and engines.load(run.engine).OPEN_ENDED
        limit_s = max(allotted_s - tuning.ENGINE_END_S, allotted_s / 2)
        asked = {
            "method": run.engine,
            "time_limit_s": tuning.NO_LIMIT_S if goes_on else limit_s,
            "threads": threads,
            "seed": (self._request.seed + self._started) % 2**31,
        }
        if self._request.method == "auto" and self._request.milp_ops is None:
            asked["milp_ops"] = tuning.MILP_OPS
        self._started += 1
        start, deadline = self._start, self._deadline(allotted_s, LOADING_S)
        self._processes.start(self._request.model_copy(update=asked), start, deadline, allotted_s)

    def _deadline(self, allotted_s: float, loading_s: float = 0.0) -> float:
        """The moment at which an engine is stopped that does not end by itself."""
        return self._clock.moment(loading_s + allotted_s * (tuning.COUNTED_TIMEOUT if self._clock.counts else 1.0))

    def may_gain(self, run: EngineRun) -> bool:
        """Whether the engine never ended early from the best schedule."""
        return not _contains(self._exhausted, run.engine, self._start)

    def handle_messages(self, wait_s: float = 0.0) -> None:
        """Take what engines have sent; wait for a first message, `wait_s` at most.

        An engine whose time is up is asked to end, so that its process can be another's, where there is time for one;
        else, and if it does not, it is killed.
        """
        for process, message in self._processes.messages(wait_s):
            self.handle(process, message)
        for process in self._processes.running:
            if time.monotonic() <= process.deadline:
                continue
            if process.asked_to_end or process.deadline >= self._clock.until:
                self._processes.stop(process)
            else:
                process.asked_to_end = True
                process.deadline += tuning.ENGINE_END_S
                process.child.end_soon()

    def stop_all(self) -> None:
        """Stop all engines, start no more, take what they sent before, and end their processes."""
        self._planned.clear()
        for process in self._processes.running:
            self._processes.stop(process)
        while self.running:
            self.handle_messages(1.0)
        self._processes.end_waiting()

    def handle(self, process: EngineProcess, message: Message) -> None:
        """Take what an engine sends. What goes wrong becomes a note, and the search goes on."""
        match message:
            case Incumbent():
                self._take_schedule(process, message)
            case Bound(lower_bound_ms=claim_ms):
                if self._incumbents.contradicts(claim_ms):
                    claim = f"{process.engine} claims a bound of {claim_ms} ms"
                    self._emit(Note(text=f"{claim}, above a schedule of {self._incumbents.best_ms} ms"))
                else:
                    self._incumbents.raise_bound(claim_ms, message.method)
            case Note(method=method):
                if method == self._request.method or not message.ongoing:  # how far it is, is for who asked for it
                    self._emit(message)
                process.report = message if method else process.report
            case OptPipeError():
                self._emit(Note(text=f"{process.engine} failed: {message}"))
                self._cancel(process.engine)
            case Ready():
                self._any_ready = True
                process.began = time.monotonic()
                if not process.stopped:
                    process.deadline = self._deadline(process.allotted_s)
            case End():
                process.spent_s = message.spent_s
            case None:
                self._ended(process)

    def _take_schedule(self, process: EngineProcess, message: Incumbent) -> None:
        """Take a schedule once it is verified. An engine that makes no plan for its time goes on if it gained."""
        best_ms = self._incumbents.best_ms
        try:
            schedule = message.schedule.schedule(self._request.problem, message.method)
            wrong = self._incumbents.offer(schedule)
        except OptPipeError as error:
            wrong = str(error)
        if self._incumbents.best_ms < best_ms:
            process.gained = True
            if not process.stopped:
                process.deadline = max(process.deadline, self._clock.moment(process.allotted_s))
        if wrong:
            self._emit(Note(text=f"a schedule of {process.engine} was rejected: {wrong}"))

    def _ended(self, process: EngineProcess) -> None:
        """Count what it spent. If it gained, it is the first of those that repeat: win-stay, lose-shift (Robbins 1952).

        One that was stopped had gone on for as long as it gained.
        """
        spent_s = inf if process.stopped or process.spent_s is None else process.spent_s + tuning.ENGINE_END_S
        self._clock.spend(min(process.allotted_s, spent_s))
        if process.report and process.report.ongoing:
            self._emit(process.report.stopped(time.monotonic() - process.began))
        engine = process.engine
        again = [run for run in self._planned if run.repeat and run.engine == engine]
        if process.gained and not process.stopped and again:
            self._planned.remove(again[0])
            others = (n for n, run in enumerate(self._planned) if run.repeat)
            self._planned.insert(next(others, len(self._planned)), again[0])
        if process.ended_early:
            self._exhausted.append((process.engine, process.start))

    def _cancel(self, engine: str) -> None:
        self._planned = [run for run in self._planned if run.engine != engine]

    def limit_memory(self) -> None:
        """Stop the engine that holds most if all processes together hold more than the request allows."""
        allowed_mib = self._request.memory_mib
        if allowed_mib is None:
            return
        running = (process for process in self._processes.running if not process.killed)
        held = {process: resident_bytes(members(process.child.mark)) for process in running}
        waiting = (pid for child in self._processes.waiting for pid in members(child.mark))
        total = sum(held.values()) + resident_bytes([os.getpid(), *waiting])
        if total > allowed_mib * MIB and self._processes.waiting:
            self._processes.end_waiting()
        elif held and total > allowed_mib * MIB:
            largest = max(held, key=held.__getitem__)
            self._processes.stop(largest)
            self._cancel(largest.engine)
            sizes = f"{total // MIB} MiB together, {held[largest] // MIB} of them {largest.engine}"
            text = f"{largest.engine} was ended: the solver's processes held {sizes}, and memory_mib is {allowed_mib}"
            self._emit(Note(text=text))


def _contains(each: Sequence[tuple[str, Schedule | None]], engine: str, start: Schedule | None) -> bool:
    return any(name == engine and begun_from is start for name, begun_from in each)
