"""The search for one request: heuristics in this process, engines in processes of their own (`engine_processes`), by
`plan`."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

from optpipe.errors import OptPipeError
from optpipe.evaluate.jitter import Noise
from optpipe.evaluate.validity import check
from optpipe.model.program import JOINED
from optpipe.process.child import Bound, End, Frame, Incumbent, Infeasible, Note, Programs, Request
from optpipe.schedule import Schedule
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.heuristics import STREAMS, value
from optpipe_solver.methods import ENGINES, HEURISTICS, ON_CPSAT, ROBUST, WITHIN_MEMORY
from optpipe_solver.paths import familiar
from optpipe_solver.portfolio.engine_processes import MIB, Crew, Worker, own_bytes
from optpipe_solver.portfolio.plan import COUNTED_SHARE, LANES, Turn, heuristics_share, turns
from optpipe_solver.repair import repair
from optpipe_solver.systems import generate
from optpipe_solver.systems.variants import is_system, variants

MARGIN_S = 0.3  # kept for stopping the engines and writing the last frames
WORTHWHILE_S = 0.5  # an engine needs that long to start
POLL_S = 0.1  # how often memory and clocks are looked at
BEHIND = 4  # turns of the heuristic that is ahead for one of another
LARGE = 3_000  # parts of activations: list scheduling takes some tenths of a second for so many
BACKSTOP = 2.0  # with one thread an engine that should have ended by its own count is ended at so many times its time
OPS_PER_S = 30_000  # compute ops that heuristics handle in a second, about half of what they do on a quiet machine
NOISY = 3  # times as much work with a schedule whose percentile is simulated
NEAR = 1.05  # of the shortest nominal time: longer schedules are not worth a look under noise

Emit = Callable[[Frame], None]


class Portfolio:
    """One request's search: the best schedule and the best bound so far, both told as soon as they are known.

    With one thread everything happens in one order and shares of the time are counted in work, so that the same request
    has the same answer, however busy the machine; the clock only ends what would not end in time.
    """

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request, self.emit = request, emit
        self.asked = generate(request.method, request.problem) if is_system(request.method) else None
        self.seconds = request.time_limit_s - min(MARGIN_S, request.time_limit_s / 4)
        self.deadline = time.monotonic() + self.seconds
        self.noise = Noise(request.problem, request.jitter, request.seed) if request.jitter else None
        self.best: Schedule | None = None  # by what counts, the percentile where there is jitter
        self.best_ms = float("inf")
        self.nominal: Schedule | None = None  # the one of the shortest nominal time
        self.plain: Schedule | None = None  # the shortest of those whose ops all engines know
        self.bound = float("-inf")  # the first bound is told, whatever it is
        self.crew = Crew()
        self.heuristics_share = heuristics_share(self.seconds)
        self.engines_s = (
            (1 - self.heuristics_share) * self.seconds * (COUNTED_SHARE if self.one_thread else 1)
        )  # planned for each lane
        self.planned_s = self.engines_s  # what is left of it, with one thread
        self.stints = 0
        self.exhausted: dict[str, Schedule | None] = {}  # from where an engine knows nothing more to do

    def run(self) -> None:
        """Tells what is known to be impossible, else the bound, the warm start, what heuristics find and what engines
        make of it."""
        if not self.begun():
            return
        problem, method = self.request.problem, self.request.method
        due = deque(turns(method, self.request.jitter, problem, self.applies))
        if not due and method in ENGINES:
            self.emit(Note(text=f"{method} is not for a problem of this sort or size"))
        self.search(self.heuristics(self.streams(), share=self.heuristics_share if due else 1.0), due)

    def begun(self) -> bool:
        """Tells what needs no search, the bounds and the warm start; False where it is impossible, which is told."""
        problem = self.request.problem
        reason = infeasibility(problem)
        if reason:
            self.emit(Infeasible(reason=reason))
            return False
        self.raise_bound(trivial_bound(problem, self.request.objective), "trivial")
        self.take_warm_start()
        self.raise_bound(memory_bound(problem, self.request.objective), "memory")
        return True

    @property
    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def one_thread(self) -> bool:
        return self.request.threads == 1

    @property
    def proven(self) -> bool:
        """Whether no schedule is shorter by nominal times."""
        return self.nominal is not None and value(self.nominal, self.request.objective) <= self.bound * (1 + 1e-9)

    @property
    def optimal(self) -> bool:
        """Under noise nothing is proven by a bound on the nominal time."""
        return self.noise is None and self.proven

    def raise_bound(self, lower_bound_ms: float, method: str) -> None:
        if lower_bound_ms > self.bound * (1 + 1e-9):
            self.bound = lower_bound_ms
            self.emit(Bound(method=method, lower_bound_ms=lower_bound_ms))

    def offer(self, schedule: Schedule) -> str | None:
        """Takes a schedule if it is better and valid; says what is wrong with it, if anything. Raises `ScheduleError`
        if it cannot run."""
        nominal_ms = value(schedule, self.request.objective)
        shortest = self.nominal is None or nominal_ms < value(self.nominal, self.request.objective) * (1 - 1e-9)
        counts_ms = nominal_ms
        if self.noise:
            near = self.nominal is None or nominal_ms <= value(self.nominal, self.request.objective) * NEAR
            counts_ms = self.noise.percentile_ms(schedule, self.request.objective) if near else float("inf")
        best = counts_ms < self.best_ms * (1 - 1e-9)
        plainer = self.plain is None or nominal_ms < value(self.plain, self.request.objective) * (1 - 1e-9)
        plainer = plainer and is_plain(schedule)
        if not (shortest or best or plainer):
            return None
        wrong = check(self.request.problem, schedule)
        if wrong:
            return wrong[0]
        if shortest:
            self.nominal = schedule
        if plainer:
            self.plain = schedule
        if best:
            self.best, self.best_ms = schedule, counts_ms
            self.emit(Incumbent(method=schedule.method, schedule=Programs.of(schedule)))
        return None

    def within_memory(self) -> list[str]:
        """The heuristics that fit, the most promising first; where these take their time, naive, which takes none,
        before them."""
        problem = self.request.problem
        large = sum(stage.offload_parts for stage in problem.stages) * problem.microbatches > LARGE
        return sorted(WITHIN_MEMORY, key=lambda name: large and name != "naive")

    def take_warm_start(self) -> None:
        """Costs may have changed since: re-timed where it still holds, repaired where it does not. Its stages are taken
        for these here."""
        if self.request.warm_start is None:
            return
        try:
            given = self.request.warm_start.model_copy(update={"placement": None}).schedule(
                self.request.problem, "warm start"
            )
            wrong = check(self.request.problem, given)
            schedule = repair(self.request.problem, given) if wrong else given
            if schedule is not None:
                self.offer(schedule)
                return
        except OptPipeError as error:
            wrong = [str(error)]
        self.emit(Note(text=f"the warm start is no schedule of this problem: {wrong[0]}"))

    def applies(self, engine: str) -> bool:
        """Whether an engine is there and for the problem: within its size or, where it is named or the only one, able
        to do anything with it."""
        cpsat = importlib.util.find_spec("ortools") is not None
        if engine in ON_CPSAT and not cpsat:
            self.emit(Note(text=f"{engine} is not available: ortools is not installed"))
            return False
        module = importlib.import_module(f"optpipe_solver.{engine}")
        alone = engine == self.request.method or not cpsat
        able = getattr(module, "improves", module.applies) if alone else module.applies
        return bool(able(self.request.problem))

    def search(self, heuristics: Iterator[None], due: deque[Turn]) -> None:
        """Heuristics step by step in one lane, engines in the others, until time is up, nothing is left to try or the
        best is proven."""
        lanes = min(LANES, self.request.threads) if self.request.method == "auto" else 1
        trying = True
        try:
            while not self.optimal and self.time_left > 0:
                if trying:
                    trying = next(heuristics, True) is None
                if self.proven:
                    self.leave_it_to_robust(due)
                if self.best or not trying:
                    self.start_due(due, lanes, trying)
                if not trying and not self.crew.workers:
                    break
                for worker, word in self.crew.news(0.0 if trying else min(POLL_S, max(0.0, self.time_left))):
                    self.hear(worker, word, due)
                self.watch_memory(due)
        finally:
            for worker, word in self.crew.end():
                self.hear(worker, word, due)

    def streams(self) -> dict[str, Iterator[Schedule]]:
        """What begins: the method that is named if it is a heuristic or a system, else all heuristics that fit."""
        if self.asked:
            return {self.request.method: iter([self.asked])}
        names = [self.request.method] if self.request.method in HEURISTICS else self.within_memory()
        return {name: STREAMS[name](self.request.problem, self.request.objective, self.deadline) for name in names}

    def heuristics(self, streams: dict[str, Iterator[Schedule]], share: float) -> Iterator[None]:
        """In turn a schedule of each: first what they are known for, then what is published, then, for a share of the
        time, what varying their policies brings; those that are behind have fewer turns."""
        until = time.monotonic() + (share * self.time_left if not self.one_thread else self.time_left)
        work, most_work = 0, share * self.seconds * OPS_PER_S
        each = 3 * len(self.request.problem.stages) * self.request.problem.microbatches * (NOISY if self.noise else 1)
        own_ms = dict.fromkeys(streams, float("inf"))  # each one's best

        def spent() -> bool:
            return self.best is not None and (time.monotonic() > until or (self.one_thread and work > most_work))

        for turn in count():
            ahead_ms = min((own_ms[name] for name in streams), default=0.0)
            for name in [name for name in streams if turn % BEHIND == 0 or own_ms[name] <= ahead_ms]:
                if spent():
                    break
                work += each
                schedule = self.tried(name, streams[name])
                if schedule:
                    own_ms[name] = min(own_ms[name], value(schedule, self.request.objective))
                else:
                    del streams[name]
                yield
            if turn == 0 and self.request.method in ("auto", *ENGINES):
                for _ in self.published():  # all of them, unless that takes half of the time
                    work += each
                    yield
                    if self.time_left < self.seconds / 2:
                        break
            if spent() or not streams:
                return

    def tried(self, name: str, stream: Iterator[Schedule]) -> Schedule | None:
        """The next schedule of a stream, offered; None where there is none, or none that holds, which is told."""
        try:
            schedule = next(stream, None)
            wrong = self.offer(schedule) if schedule else None
        except OptPipeError as error:
            schedule, wrong = None, str(error)
        except Exception as error:  # one heuristic's fault is not the search's end
            schedule, wrong = None, f"{type(error).__name__}: {error}"
        if wrong:
            self.emit(Note(text=f"{name} gives no schedule: {wrong}"))
        return None if wrong else schedule

    def published(self) -> Iterator[None]:
        """Each system for these stages, once, so that none that fits is better than the answer. That one does not fit,
        or is not for the problem, is no news."""
        for method in variants(self.request.problem):
            try:
                self.offer(generate(method, self.request.problem))
            except OptPipeError:
                pass
            except Exception as error:  # as above
                self.emit(Note(text=f"{method} gives no schedule: {type(error).__name__}: {error}"))
            yield

    def start_due(self, due: deque[Turn], lanes: int, trying: bool) -> None:
        """On each free lane the next turn, with its share of the threads that are free."""
        free = lanes - len(self.crew.workers) - trying
        threads = (
            self.request.threads
            - sum(worker.threads for worker in self.crew.workers)
            - trying * (self.request.threads // lanes)
        )
        while free > 0 and due:
            left_s = min(self.planned_s, self.time_left) if self.one_thread else self.time_left
            if left_s <= WORTHWHILE_S:
                due.clear()
                return
            turn = next((turn for turn in due if self.may_gain(turn.engine)), None)
            if turn is None:
                return
            due.remove(turn)
            if turn.again:
                due.append(turn)
            all_s = self.planned_s if self.one_thread else left_s
            given_s = min(turn.share * lanes * self.engines_s, all_s) if due else all_s  # the last one waits for nobody
            own = max(1, -(-threads // free))
            self.start(turn, given_s, own)
            free, threads = free - 1, threads - own

    def start(self, turn: Turn, given_s: float, threads: int) -> None:
        """An engine, from the schedule that it could make better. What it needs to start and to end is part of its
        time."""
        asked = {
            "method": turn.engine,
            "time_limit_s": max(given_s - WORTHWHILE_S, given_s / 2),
            "threads": threads,
            "seed": (self.request.seed + self.stints) % 2**31,
        }
        until = time.monotonic() + min(self.time_left, BACKSTOP * given_s if self.one_thread else given_s)
        self.stints += 1
        start = None if turn.anew else self.best_for(turn.engine)
        self.crew.start(self.request.model_copy(update=asked), start, until, given_s)

    def may_gain(self, engine: str) -> bool:
        return engine not in self.exhausted or self.exhausted[engine] is not self.best_for(engine)

    def best_for(self, engine: str) -> Schedule | None:
        return self.best if engine == ROBUST else self.plain

    def hear(self, worker: Worker, word: Frame | OptPipeError | None, due: deque[Turn]) -> None:
        """Passes on what an engine finds once it is verified; what goes wrong is told, and the search goes on."""
        engine = worker.engine
        if isinstance(word, Incumbent):
            try:
                wrong = self.offer(word.schedule.schedule(self.request.problem, word.method))
            except OptPipeError as error:
                wrong = str(error)
            if wrong:
                self.emit(Note(text=f"a schedule of {engine} was rejected: {wrong}"))
        elif isinstance(word, Bound):
            shortest = value(self.nominal, self.request.objective) if self.nominal else float("inf")
            if word.lower_bound_ms <= shortest * (1 + 1e-6):
                self.raise_bound(word.lower_bound_ms, word.method)
            else:
                self.emit(
                    Note(text=f"{engine} claims a bound of {word.lower_bound_ms} ms, above a schedule of {shortest} ms")
                )
        elif isinstance(word, Note):
            self.emit(word)
        elif isinstance(word, OptPipeError):
            self.emit(Note(text=f"{engine} failed: {word}"))
            self.drop(engine, due)
        elif isinstance(word, End):
            worker.spent_s = word.spent_s
        elif word is None:
            self.planned_s -= (
                worker.given_s if worker.spent_s is None else min(worker.given_s, worker.spent_s + WORTHWHILE_S)
            )
            if worker.gave_back:
                self.exhausted[engine] = worker.start or self.best_for(engine)

    def leave_it_to_robust(self, due: deque[Turn]) -> None:
        """Nothing is left to gain by nominal times."""
        for engine in {turn.engine for turn in due} - {ROBUST}:
            self.drop(engine, due)
        for worker in self.crew.workers:
            if worker.engine != ROBUST:
                self.crew.dismiss(worker)

    def drop(self, engine: str, due: deque[Turn]) -> None:
        """An engine that failed gets no other turn."""
        for turn in [turn for turn in due if turn.engine == engine]:
            due.remove(turn)

    def watch_memory(self, due: deque[Turn]) -> None:
        """Ends the engine that holds most where all processes together hold more than the request allows."""
        limit = self.request.memory_mib
        if limit is None or not self.crew.workers:
            return
        held = self.crew.held_bytes()
        total = sum(held.values()) + own_bytes()
        if held and total > limit * MIB:
            worker = max(held, key=held.__getitem__)
            self.crew.dismiss(worker)
            self.drop(worker.engine, due)
            together, own = f"{total // MIB} MiB together", f"{held[worker] // MIB} of them {worker.engine}"
            text = (
                f"{worker.engine} was ended: the solver's processes held {together}, {own}, and memory_mib is {limit}"
            )
            self.emit(Note(text=text))


def is_plain(schedule: Schedule) -> bool:
    """Whether engines know all its ops, and none run in pairs."""
    return familiar(schedule) and not any(program.table[:, JOINED].any() for program in schedule.programs)
