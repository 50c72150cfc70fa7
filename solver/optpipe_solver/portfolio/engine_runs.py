"""`EngineRuns`: which engine runs when, from which schedule and for how long; what engines find; how much they hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

from optpipe.errors import OptPipeError
from optpipe.process.protocol import Bound, End, Incumbent, Note, Ready, Request
from optpipe.schedule import Schedule
from optpipe_solver import engines, tuning
from optpipe_solver.clock import Clock
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.methods import MILP, RELAX
from optpipe_solver.portfolio.engine_processes import EngineProcess, EngineProcesses, Message, own_memory_bytes
from optpipe_solver.schedule_facts import is_listed, is_modelled
from optpipe_solver.tuning import EngineRun

MIB = 2**20


class EngineRuns:
    """The planned runs of engines, and those that are under way.

    With one thread an engine's share is planned in seconds of counted work, and the next engine has what is left of it.
    The MILP's solvers count none: asked for by name, it goes by the clock.
    """

    def __init__(
        self, request: Request, planned: Sequence[EngineRun], incumbents: Incumbents, clock: Clock, emit: Emit
    ) -> None:
        self._request, self._incumbents, self._emit = request, incumbents, emit
        self._planned = list(planned)
        self._processes = EngineProcesses()
        beside = request.method in ("auto", RELAX)  # what gives bounds only need not wait for heuristics
        self._parallel = tuning.side_by_side(request.threads) if beside else 1
        counts = clock.counts and request.method != MILP
        self._engines_s = (1 - tuning.heuristics_share(clock.seconds)) * clock.seconds  # summed shares are of this
        self._engines_s *= tuning.COUNTED_SHARE if counts else 1
        # By count what no engine has used yet; by the clock all that is left.
        self._clock = Clock(self._engines_s if counts else clock.seconds, counts, inf, whole=clock)
        self._started = 0
        self._any_ready = False  # whether an engine's search has begun
        self._exhausted: list[tuple[str, Schedule | None]] = []  # an engine that found no more to do, and from where

    @property
    def are_planned(self) -> bool:
        return bool(self._planned)

    @property
    def running(self) -> bool:
        return bool(self._processes.running)

    @property
    def loading(self) -> bool:
        """Whether engines were started, and the first of them is yet to be ready."""
        return self.running and not self._any_ready

    def unfinished(self, engine: str) -> bool:
        """Whether an engine that was asked for by name is yet to run, or to end."""
        planned = any(run.engine == engine for run in self._planned)
        running = any(process.engine == engine for process in self._processes.running)
        return self._request.method == engine and (planned or running)

    def start_next(self, beside_heuristics: bool) -> None:
        """Start planned runs as long as fewer than `tuning.side_by_side` searches are under way.

        Heuristics that still run count as one of them. Each run has its share of the threads that are free, or as many
        as its engine can use.
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
            if not able:
                return
            run = next((run for run in able if not self._under_way(run) and self._may_begin(run)), able[0])
            self._planned.remove(run)
            if run.repeat:
                self._planned.append(run)
            share = max(1, -(-threads // free))
            share = min(share, engines.load(run.engine).MOST_THREADS or share)
            self.start(run, self._allotted_s(run), share)
            free, threads = free - 1, threads - share

    def _under_way(self, run: EngineRun) -> bool:
        """Whether the engine runs already, from the schedule that this run would start from."""
        start = self._start_for(run)
        return any(process.engine == run.engine and process.start is start for process in self._processes.running)

    def _may_begin(self, run: EngineRun) -> bool:
        """Whether the engine's turn has come: an engine that must compile lets others begin, unless work is counted."""
        return self._started > 0 or self._clock.counts or not engines.waits_for_compiler(run.engine)

    def _start_for(self, run: EngineRun) -> Schedule | None:
        return self._incumbents.best_of(is_listed if run.from_heuristics else is_modelled)

    def _allotted_s(self, run: EngineRun) -> float:
        """A run's share of the time; all that is left if no run is planned behind it."""
        share_s = max(run.share * self._parallel * self._engines_s, tuning.ENGINE_LEAST_S)
        return min(share_s, self._clock.left_s) if self._planned else self._clock.left_s

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
        self._started += 1
        start, deadline = self._start_for(run), self._deadline(allotted_s, tuning.LOADING_S)
        self._processes.start(self._request.model_copy(update=asked), start, deadline, allotted_s)

    def _deadline(self, allotted_s: float, loading_s: float = 0.0) -> float:
        """The moment at which an engine is stopped that does not end by itself."""
        return self._clock.moment(loading_s + allotted_s * (tuning.COUNTED_TIMEOUT if self._clock.counts else 1.0))

    def may_gain(self, run: EngineRun) -> bool:
        """Whether the engine never ended early from the schedule that this run would start from."""
        start = self._start_for(run)
        return not any(engine == run.engine and begun_from is start for engine, begun_from in self._exhausted)

    def handle_messages(self, wait_s: float = 0.0) -> None:
        """Take what engines have sent; wait for a first message, `wait_s` at most."""
        for process, message in self._processes.messages(wait_s):
            self.handle(process, message)

    def stop_all(self) -> None:
        """Stop all engines, start no more, and take what they sent before."""
        self._planned.clear()
        for process, message in self._processes.stop_all():
            self.handle(process, message)

    def handle(self, process: EngineProcess, message: Message) -> None:
        """Take what an engine sends. What goes wrong becomes a note, and the search goes on."""
        match message:
            case Incumbent():
                self._take_schedule(process, message)
            case Bound():
                self._take_bound(process, message)
            case Note():
                self._take_note(process, message)
            case OptPipeError():
                self._emit(Note(text=f"{process.engine} failed: {message}"))
                self._cancel(process.engine)
            case Ready():
                self._any_ready = True
                process.begins(self._deadline(process.allotted_s))
            case End():
                process.spent_s = message.spent_s
            case None:
                self._ended(process)

    def _take_schedule(self, process: EngineProcess, message: Incumbent) -> None:
        """Take a schedule once it is verified. An engine that makes no plan for its time goes on if it gained."""
        best_ms = self._incumbents.best_ms
        try:
            wrong = self._incumbents.offer(message.schedule.schedule(self._request.problem, message.method))
        except OptPipeError as error:
            wrong = str(error)
        if self._incumbents.best_ms < best_ms:
            process.gained = True
            process.goes_on(self._clock.moment(process.allotted_s))
        if wrong:
            self._emit(Note(text=f"a schedule of {process.engine} was rejected: {wrong}"))

    def _take_bound(self, process: EngineProcess, message: Bound) -> None:
        claim_ms, best_ms = message.lower_bound_ms, self._incumbents.best_ms
        if self._incumbents.contradicts(claim_ms):
            claim = f"{process.engine} claims a bound of {claim_ms} ms"
            self._emit(Note(text=f"{claim}, above a schedule of {best_ms} ms"))
        else:
            self._incumbents.raise_bound(claim_ms, message.method)

    def _take_note(self, process: EngineProcess, message: Note) -> None:
        """Pass a note on. An engine's report is for whoever asked for the engine."""
        if message.method in ("", self._request.method):
            self._emit(message)
            if message.method:
                process.report = message

    def _ended(self, process: EngineProcess) -> None:
        spent_s = float("inf") if process.spent_s is None else process.spent_s + tuning.ENGINE_END_S
        self._clock.spend(min(process.allotted_s, spent_s))
        if process.report and process.report.ongoing:
            self._emit(process.report.stopped(time.monotonic() - process.began))
        if process.gained and not process.stopped:
            self._repeat_next(process.engine)
        if process.ended_early:
            self._exhausted.append((process.engine, process.start))

    def _repeat_next(self, engine: str) -> None:
        """Let an engine that gained be the first of those that repeat: win-stay, lose-shift (Robbins 1952).

        One that was stopped had gone on for as long as it gained.
        """
        again = next(
            (run for run in self._planned if run.repeat and run.engine == engine and not run.from_heuristics), None
        )
        if again is not None:
            self._planned.remove(again)
            others = (n for n, run in enumerate(self._planned) if run.repeat)
            self._planned.insert(next(others, len(self._planned)), again)

    def _cancel(self, engine: str) -> None:
        self._planned = [run for run in self._planned if run.engine != engine]

    def limit_memory(self) -> None:
        """Stop the engine that holds most if all processes together hold more than the request allows."""
        allowed_mib = self._request.memory_mib
        if allowed_mib is None or not self.running:
            return
        held = self._processes.memory_bytes()
        total = sum(held.values()) + own_memory_bytes()
        if held and total > allowed_mib * MIB:
            largest = max(held, key=held.__getitem__)
            self._processes.stop(largest)
            self._cancel(largest.engine)
            sizes = f"{total // MIB} MiB together, {held[largest] // MIB} of them {largest.engine}"
            text = f"{largest.engine} was ended: the solver's processes held {sizes}, and memory_mib is {allowed_mib}"
            self._emit(Note(text=text))
