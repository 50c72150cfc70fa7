"""`search`: the best candidate, found by bounds first, then published schedules, then searches of a few.

Branch and bound over candidates (Land and Doig 1960), the lowest bound first: what cannot be shorter than the best
iteration so far is ruled out without a schedule. The rest get published schedules, then list scheduling, then a search
each in rounds of fewer candidates and more time (successive halving, Jamieson and Talwalkar 2016).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from optpipe.errors import InputError, OptPipeError
from optpipe.evaluate.objective import NO_SCHEDULE_MS, shorter
from optpipe.formats.megatron import offload_arguments
from optpipe.formats.stacks import STACKS
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.options import EffortOptions
from optpipe.results import Result
from optpipe.schedule import Schedule
from optpipe.transformer.records import Parallelism, Run
from optpipe_solver import tuning
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.clock import Clock
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.planner.candidates import Question, Stack, branches, candidates, shifted
from optpipe_solver.planner.offload import offloads
from optpipe_solver.planner.plan import Plan
from optpipe_solver.planner.today import Running, Today, running
from optpipe_solver.systems import SYSTEMS, generate

GB = 1e9
Progress = Literal["bounds", "published schedules", "list scheduling", "searches"]
# Searches a candidate's schedule, from another one, for so many seconds. Returns None, or raises OptPipeError, if
# nothing came of it.
Solve = Callable[[Problem, Schedule | None, float], Result | None]


class PlanSearch:
    """A search for a plan; `run` is all of it.

    Attributes
    ----------
    phase, best
        How far it is, for whoever shows progress from another thread.
    notes
        Why searches of candidates failed.
    """

    def __init__(
        self, question: Question, solve: Solve, options: EffortOptions, side_by_side: int, today: Today | None = None
    ) -> None:
        self.question, self.options, self._today = question, options, today
        self.phase: Progress = "bounds"
        self.best: Candidate | None = None
        self.solved = 0
        self.notes: list[str] = []
        self.cancelled = False
        self.candidates: list[Candidate] = []
        self._roots = set[Candidate]()  # those that stand for their branches
        self._solve, self._side_by_side = solve, side_by_side
        self._clock = Clock(options.time_limit_s)
        self._only_published = STACKS[question.stack].only_own  # then there is nothing to list and to search

    def run(self) -> Plan:
        """Search within the time limit.

        Raises
        ------
        InputError
            If no division suits the question, none fits the memory, or nothing runs as `today` has it.
        """
        self.candidates = candidates(self.question)
        self._roots = set(self.candidates)
        runs = running(self._today, self.question) if self._today else None
        if runs:
            runs = self._with_today(runs)
        self._publish()
        if self._only_published:
            self._shift_layers()
        else:
            self._list()
            self._search()
        if self.best is None:
            why = _why_none(self.question, self.candidates, self.options.time_limit_s)
            if runs:
                why += f"; today needs {runs.used_bytes / GB:.1f} of {runs.has_bytes / GB:.1f} GB, and is not compared"
            raise InputError(why)
        self.best = self._simplest(self.best)
        ranked = sorted(self.candidates, key=lambda c: (c is not self.best, c.method is None, c.least_ms))
        optpipe_ms = self._optpipe_ms(self.best)
        passed_s, notes = self._clock.passed_s, tuple(self.notes)
        return Plan(self.question, tuple(ranked), self.solved, self.options.gap, passed_s, notes, runs, optpipe_ms)

    def _optpipe_ms(self, best: Candidate) -> float | None:
        """The iteration of a schedule of OptPipe's on the same division and memory, where Megatron offloads."""
        if best.schedule is None or not offload_arguments(best.schedule):
            return None
        problem = best.estimate.problem
        seconds = min(tuning.LISTED_SHARE * self.options.time_limit_s, self._clock.left_s - tuning.SPARE_S)
        start = result = None
        with suppress(OptPipeError):  # whatever fails proves nothing
            start = next(STREAMS["adaoffload"](problem, "makespan"), None)
            result = self._solve(problem, start, seconds) if seconds >= tuning.ENGINE_LEAST_S else None
        found = [each for each in (start, result and result.schedule) if each and not each.compiled.complaints]
        return min((best.with_step_end(each.makespan_ms) for each in found), default=None)

    def _simplest(self, best: Candidate) -> Candidate:
        """The candidate of least context parallelism, then the shortest, of those that hardly differ from the best."""
        limit = best.iteration_ms * (1 + tuning.PLAN_TIE)
        near = [c for c in self.candidates if c.method and (c is best or shorter(c.iteration_ms, limit))]
        simplest = min(near, key=lambda c: (c.estimate.parallelism.cp, c.iteration_ms))
        method = simplest.method
        if method and (simplest.schedule is None or simplest.schedule.method != method):  # only its formula was needed
            del simplest.lengths[method]
            self._take(simplest, generate(method, simplest.problem))
        return simplest

    def _with_today(self, runs: Running) -> Running:
        """Begin with what runs today: it is one of the candidates."""

        def division(candidate: Candidate) -> tuple[Parallelism, Run]:
            return candidate.estimate.parallelism, candidate.estimate.run

        for candidate in [c for c in self.candidates if c.division == runs.candidate.division]:
            self._branch(candidate)
        today = next((c for c in self.candidates if division(c) == division(runs.candidate)), runs.candidate)
        if today is runs.candidate:
            self.candidates.append(today)
        self._examine(today)
        if today.bound_ms < NO_SCHEDULE_MS:
            self._take(today, runs.schedule.on(today.problem))
        clock = self._counting(tuning.PUBLISHED_SHARE / 2, tuning.PUBLISHED_SHARE / 2)
        same = [c for c in self.candidates if c.division == today.division]  # though others may be better
        for candidate in sorted(same, key=lambda c: c.bound_ms):
            if not clock.over and self.may_win(candidate):
                self._examine(candidate)
                self._try_published(candidate, clock)
        return replace(runs, candidate=today)

    def cancel(self) -> None:
        """End the search soon; `run` returns the best so far. Searches of single candidates are not ended."""
        self.cancelled = True
        self._clock.stop()

    def may_win(self, candidate: Candidate) -> bool:
        """Whether its bound allows it to be shorter than the best by more than the gap; with less context parallelism
        hardly longer is enough."""
        if self.best is None:
            return shorter(candidate.bound_ms, NO_SCHEDULE_MS)
        is_simpler = candidate.estimate.parallelism.cp < self.best.estimate.parallelism.cp
        more = tuning.PLAN_TIE if is_simpler else -self.options.gap
        return shorter(candidate.bound_ms, self.best.iteration_ms * (1 + more))

    def _publish(self) -> None:
        """Give candidates the published schedules, the lowest bound first; a bound becomes tighter before that.

        Of each division one candidate in which 1F1B fits comes before all others, so that bounds soon have something to
        be compared with. One that stands for its branches makes room for these when its bound is the lowest.
        """
        self.phase = "published schedules"
        clock = self._counting(*((1.0, 1.0) if self._only_published else (tuning.PUBLISHED_SHARE, 0.5)))
        divisions = set[tuple[int, ...]]()
        for candidate in self.candidates:
            if self._clock.over:
                break
            if candidate.division not in divisions and self._try_looped(candidate) and candidate.method:
                divisions.add(candidate.division)
        waiting = [(c.bound_ms, n, False) for n, c in enumerate(self.candidates)]
        heapq.heapify(waiting)
        while waiting and not (clock.over if self.best else self._clock.over):
            _, n, is_examined = heapq.heappop(waiting)
            candidate = self.candidates[n]
            if not self.may_win(candidate):
                continue
            if is_examined:
                self._try_published(candidate, clock)
                continue
            first = len(self.candidates)
            if self._branch(candidate):
                added = ((c.bound_ms, k, False) for k, c in enumerate(self.candidates[first:], first))
                waiting = [*waiting, (candidate.bound_ms, n, False), *added]
                heapq.heapify(waiting)
            else:
                self._examine(candidate)
                heapq.heappush(waiting, (candidate.bound_ms, n, True))

    def _branch(self, candidate: Candidate) -> bool:
        """Add the branches of a candidate that has stood for them. Returns False if it has not."""
        if candidate not in self._roots:
            return False
        self._roots.remove(candidate)
        candidate.bound_ms = candidate.work_ms
        self.candidates += branches(self.question, candidate)
        return True

    def _try_looped(self, candidate: Candidate) -> str | None:
        """Try 1F1B, interleaved with chunks, of which a schedule is needed only if it is the best. Returns its name,
        None if there is no formula for it."""
        name = "1f1b" if candidate.estimate.parallelism.chunks == 1 else "interleaved"
        if not candidate.has_formula or not candidate.may_fit:
            return None
        ms, held = candidate.looped()
        if held > candidate.estimate.gpu.memory_bytes:
            return name
        if self.best is None or shorter(ms, self.best.iteration_ms):
            self._take(candidate, generate(name, candidate.problem))
        else:
            candidate.lengths[name] = ms, held
        return name

    def _try_published(self, candidate: Candidate, clock: Clock) -> None:
        """Try all published schedules, until one is so short that the bound allows no gain."""
        if not self.may_win(candidate):
            return
        looped = self._try_looped(candidate)
        for schedule in published(candidate, self.question.stack, looped):
            clock.count(_ops(candidate) // tuning.PUBLISHED_SPEED)
            self._take(candidate, schedule)
            if not self.may_win(candidate) or (clock.over and self.best):
                return
        below_ms = self.best.iteration_ms if self.best else NO_SCHEDULE_MS
        for schedule in offloads(candidate, below_ms) if candidate.runs.offloads_modules else ():
            clock.count(len(schedule.compiled.rows) // tuning.PUBLISHED_SPEED)
            self._take(candidate, schedule)
        if self._only_published:
            candidate.bound_ms = min((ms for ms, _ in candidate.lengths.values()), default=NO_SCHEDULE_MS)

    def _shift_layers(self) -> None:
        """Move single layers of the best candidate to other stages, also all of a stage, as long as that gains."""
        clock, first = self._counting(1.0, 1.0), self.best
        while (best := self.best) and best.method in ("1f1b", "interleaved") and best.estimate.parallelism.pp > 1:
            for other in shifted(self.question, best):
                clock.count(_ops(other) // tuning.FORMULA_SPEED)
                if clock.over or (self._try_looped(other) and self.best is other):
                    break
            if self.best is best:
                break
        if self.best and self.best is not first:
            self.candidates.append(self.best)
            self._try_published(self.best, clock)

    def _list(self) -> None:
        """Try list scheduling, which keeps within memory, on what may still win; the memory's bound rules out more."""
        self.phase = "list scheduling"
        clock = self._counting(tuning.LISTED_SHARE, 0.5)
        for candidate in sorted(filter(self._is_open, self.candidates), key=lambda c: (c.least_ms, c.bound_ms)):
            if clock.over:
                return
            if self._is_open(candidate):
                tighter = memory_bound(candidate.problem)
                candidate.bound_ms = max(candidate.bound_ms, candidate.with_step_end(tighter))
            if self._is_open(candidate):
                clock.count(_ops(candidate))
                try:
                    schedule = next(STREAMS["adaoffload"](candidate.problem, "makespan"), None)
                except OptPipeError:  # a policy that finds no way through proves nothing
                    continue
                if schedule:
                    self._take(candidate, schedule)

    def _search(self) -> None:
        """Search the most promising candidates, in rounds; each round is judged when all of it is over."""
        self.phase = "searches"
        share = 1 - tuning.PUBLISHED_SHARE - tuning.LISTED_SHARE
        searched = set[Candidate]()
        for count, part in tuning.SOLVED:
            open_ones = sorted(filter(self._is_open, self.candidates), key=lambda c: (c.least_ms, c.bound_ms))
            chosen = open_ones[: max(count, self._side_by_side * count // tuning.SOLVED[0][0])]
            side_by_side = min(len(chosen), self._side_by_side)
            seconds = min(share * part * self.options.time_limit_s, self._clock.left_s - tuning.SPARE_S)
            if not chosen or seconds < tuning.ENGINE_LEAST_S:
                return
            seconds = seconds * side_by_side / len(chosen)
            with ThreadPoolExecutor(side_by_side) as pool:
                asked = [pool.submit(self._solve, c.problem, c.start, seconds) for c in chosen]
                for candidate, answer in zip(chosen, asked, strict=True):
                    try:
                        result = answer.result()
                    except OptPipeError as error:
                        self.notes += [str(error)] if str(error) not in self.notes else []
                        continue
                    if result and result.schedule:
                        self._take(candidate, result.schedule)
                    if result and result.lower_bound_ms is not None:
                        least_ms = candidate.with_step_end(result.lower_bound_ms)
                        candidate.bound_ms = max(candidate.bound_ms, least_ms)
            searched.update(chosen)
            self.solved = len(searched)

    def _examine(self, candidate: Candidate) -> None:
        """Find out whether it fits, and raise its bound to that of its stages."""
        by_layers = candidate.runs.offloads_modules  # then less than a stage's activation may do
        if not candidate.may_fit or (not by_layers and infeasibility(candidate.problem)):
            candidate.bound_ms = NO_SCHEDULE_MS
        else:
            candidate.bound_ms = max(candidate.bound_ms, candidate.with_step_end(trivial_bound(candidate.problem)))

    def _take(self, candidate: Candidate, schedule: Schedule) -> None:
        if candidate.take(schedule) and (self.best is None or shorter(candidate.iteration_ms, self.best.iteration_ms)):
            self.best = candidate

    def _is_open(self, candidate: Candidate) -> bool:
        """Whether it fits and is worth more work: its bound allows it to win, and its schedule is not proven."""
        proven = not shorter(candidate.bound_ms, candidate.iteration_ms * (1 - self.options.gap))
        is_examined = "problem" in vars(candidate)
        return is_examined and not proven and self.may_win(candidate)

    def _counting(self, share: float, until: float) -> Clock:
        """A share of the time in counted work, so that the same question has the same answer; whatever is done, no
        longer than until the other share of the time is over."""
        seconds = self.options.time_limit_s
        return Clock(share * seconds, counts=True, wall_s=until * seconds - self._clock.passed_s, whole=self._clock)


def _why_none(question: Question, candidates: Sequence[Candidate], time_limit_s: float) -> str:
    """Why there is no schedule: too little time, or which candidate misses by least and what it needs."""
    left = sum(candidate.bound_ms < NO_SCHEDULE_MS for candidate in candidates)
    if left:
        return (
            f"time_limit_s = {time_limit_s:g}: no schedule was found by then and {left} candidates "
            "are left; a longer time would be right"
        )
    nearest, least = candidates[0], (NO_SCHEDULE_MS, 0)  # bytes that its fullest GPU needs, and its stages
    for candidate in sorted(candidates, key=lambda candidate: candidate.state_bytes):
        if candidate.state_bytes >= least[0]:
            break
        needs = candidate.needed_bytes, candidate.estimate.parallelism.stages
        if needs < least:
            nearest, least = candidate, needs
    who, has = f"gpus = {question.gpus}: no division fits: with {nearest},", question.usable.memory_bytes
    limit = f"; {question.limit}" if question.limit else ""
    beside = f" beside the margin of {question.margin:g}" if question.margin else ""
    at_once = "one micro-batch at a time" + " without offload" * nearest.runs.offloads_modules
    if least[0] <= has:
        return f"{who} one micro-batch fits, but no schedule that {question.stack} has{limit}"
    return (
        f"{who} a GPU needs {least[0] / GB:.1f} GB for {at_once}, {nearest.state_bytes / GB:.1f} of it without any "
        f"activation, and has {has / GB:.1f}{beside}; more GPUs, larger ones or a smaller model would fit{limit}"
    )


def _ops(candidate: Candidate) -> int:
    return 3 * candidate.estimate.parallelism.stages * candidate.estimate.run.microbatches


def published(candidate: Candidate, stack: Stack, without: str | None = None) -> Iterator[Schedule]:
    """Yield the published schedules for these stages but one, 1F1B first, whether they fit or not; of our runtime,
    which evicts, BPipe, too."""
    runs, estimate = STACKS[stack], candidate.estimate
    is_alone = estimate.run.mtp and estimate.parallelism.pp == 1  # which Megatron does not combine
    names = runs.own if runs.only_own else dict.fromkeys(("1f1b", "interleaved", *reversed(SYSTEMS)))
    for name in names:
        if name == without or (name == "combined-1f1b" and stack == "megatron" and is_alone):
            continue
        try:
            problem = candidate.evicting if name == "bpipe" and Kind.E in runs.kinds else candidate.problem
            if SYSTEMS[name].placement(problem, "keep") is None:
                schedule = generate(name, problem)
                _ = schedule.makespan_ms
                if runs.complaint(schedule) is None:  # in Megatron, groups that m does not divide are ours alone
                    yield schedule
        except OptPipeError:  # the paper excludes the problem, or the schedule cannot run
            continue
