"""Placement search: the same model on the same devices as other stages.

A placement has one chunk a device or several, looped or V-shaped, or, where forwards run beside backwards, one each
way. A problem with layers is cut anew. A `Portfolio` searches the schedules of one placement; here portfolios run one
after the other by successive halving (Jamieson and Talwalkar 2016). `PlacementSearch.run` is the list of what runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from operator import methodcaller

from optpipe.errors import InputError
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.process.child import Child
from optpipe.process.protocol import Note, Request
from optpipe_solver import engines, tuning
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.methods import ENGINES, RELAX
from optpipe_solver.portfolio.candidates import Candidate, Candidates
from optpipe_solver.portfolio.engine_processes import ENGINE
from optpipe_solver.portfolio.partitions import improve_partitions, mismatch, partition_of_stages
from optpipe_solver.portfolio.portfolio import Portfolio
from optpipe_solver.portfolio.search_state import Emit
from optpipe_solver.systems import SYSTEMS, parse
from optpipe_solver.systems.variants import is_system


class PlacementSearch:
    """One request's search over placements: emits the best schedule, and bounds that hold for all placements.

    Parameters
    ----------
    request
        The problem, the method and the limits.
    emit
        Called with each better schedule, each better bound, and what else there is to say, as soon as it is known.

    Raises
    ------
    InputError
        If the method is unknown or does not apply, or the layers are not what the problem's stages are made of.
    """

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request, self.emit = request, emit
        self.candidates = Candidates(request, emit)
        if self.candidates.has_layers and (complaint := mismatch(request.problem)):
            raise InputError(complaint)
        self.deadline = time.monotonic() + request.time_limit_s
        self.one_thread = request.threads == 1  # one search in one order, whatever the clock says
        self.share_left = 1.0  # of the time, by what the phases are planned to take, not by the clock
        self.method_ran = False  # the method that was asked for, which may be an engine
        # The placement of the published system that was asked for, if one was.
        self.named = self._placement_of_system() if is_system(request.method) else None
        if self.named:
            self.first = self._portfolio(self.named, request.method, 1.0)
        else:
            self.first = self._portfolio(self.candidates.unplaced, self._heuristic("naive"), tuning.FIRST_LOOK_SHARE)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def run(self) -> None:
        """Search the problem's own stages for a moment, then from many placements for a short time to one for long.

        A system that is named runs on the stages that it is for, and nothing else runs.
        """
        candidates = self.candidates
        self.first.run()  # on the stages as given: an answer within milliseconds
        if self.named:
            candidates.list_all(self.named)
            if self.named.infeasible:
                candidates.note(self.named.infeasible, self.named.placement)
            return
        with self._compiling():
            self._search_all()
        if candidates.best_ms == NO_SCHEDULE_MS and candidates.last_note:
            self.emit(Note(text=candidates.last_note))  # the last note is taken for the reason

    def _search_all(self) -> None:
        candidates = self.candidates
        first_look = self._look_at_own_stages()  # a heuristic, before bounds of all placements take their time
        candidates.list_all(None)
        self._look_at_all(first_look)  # what takes a moment, on every placement
        self._improve_partitions()  # of layers there are too many to try all
        if candidates.all_are_infeasible():
            return
        if rules_are_compiled := not engines.waits_for_compiler("dispatch"):
            self._search_in_rules()  # a first look does not tell how far rules lead
        self._search_best_two()  # nor do rules tell what windows gain
        if not (rules_are_compiled or engines.waits_for_compiler("dispatch")):
            self._search_in_rules()
        self._raise_least_bound()  # the least bound of all placements is what is told
        self._search_best()  # with all that is left
        self._run_method_asked_for()  # also where all is proven by then

    def _placement_of_system(self) -> Candidate:
        """The placement on which the published system that is named runs."""
        problem = self.request.problem
        placement = SYSTEMS[parse(self.request.method)[0]].placement(problem, "all")
        if placement is None:
            return self.candidates.unplaced
        self.candidates.unplaced.bound_ms = trivial_bound(problem, self.request.objective)
        return self.candidates.new_candidate(placement, placement.apply(problem))

    # The phases, in this order

    def _look_at_own_stages(self) -> Portfolio | None:
        """Run a heuristic on the problem's own stages for a moment or, on a busy machine, until it has a schedule."""
        share, unplaced, name = tuning.FIRST_LOOK_SHARE / 2, self.candidates.unplaced, self._heuristic("adaoffload")
        self._use(share)
        if not self._is_of_use(unplaced):
            return None
        self.method_ran = name == self.request.method
        portfolio = self._portfolio(unplaced, name, tuning.FIRST_LOOK_MOST)
        if portfolio.begin():
            heuristics = portfolio.heuristics
            for _ in heuristics.run(heuristics.streams(), share / tuning.FIRST_LOOK_MOST):
                pass
        return portfolio

    def _look_at_all(self, first_look: Portfolio | None) -> None:
        share = tuning.FIRST_LOOK_SHARE
        self._use(share)
        self._look_at([c for c in self.candidates.all if c is not self.candidates.unplaced], share, first_look)

    def _improve_partitions(self) -> None:
        """Descend from the even partition for every number and shape of chunks, and from the given one; look at the
        partitions that come out."""
        if not self.candidates.has_layers:
            return
        self._use(tuning.PARTITIONS_SHARE + tuning.FIRST_LOOK_SHARE)
        starts = [c.placement for c in self.candidates.all if c.placement and not c.is_bidirectional]
        if (partition := partition_of_stages(self.request.problem)) is not None:
            starts.append(partition)
        better = improve_partitions(self.request, starts, self.deadline - tuning.ENGINE_END_S)
        self._look_at(self.candidates.add_new(better), tuning.FIRST_LOOK_SHARE)

    def _search_in_rules(self) -> None:
        """Search in the rules of a list scheduler on every placement that may win, then on the half of them where rules
        lead to the shortest schedules, and so on; each time for a part of the share, side by side.

        The time is counted in ops; the clock ends only what takes longer, with one thread much longer. Where rules lead
        to no schedule the share is left to others.
        """
        request, candidates = self.request, self.candidates.ranked()
        too_short = request.method != "auto" or request.time_limit_s < tuning.RULES_S
        if too_short or self.candidates.proven or not candidates:
            return
        planned, limit = (tuning.COUNTED_SHARE, tuning.COUNTED_TIMEOUT) if self.one_thread else (1.0, 1.0)
        searches = [self._portfolio(each, "dispatch", tuning.RULES_SHARE * limit).heuristics for each in candidates]
        round_s = tuning.RULES_SHARE * planned * request.time_limit_s / tuning.RULES_ROUNDS
        ops, shortest_ms = 0.0, NO_SCHEDULE_MS
        with ThreadPoolExecutor(request.threads) as pool:
            for _ in range(tuning.RULES_ROUNDS):
                ops += round_s * tuning.RULES_OPS_PER_S * min(1.0, request.threads / len(searches))
                lengths_ms = list(pool.map(methodcaller("by_rules", round(ops)), searches))
                shortest_ms = min(shortest_ms, *lengths_ms)
                order = sorted(range(len(searches)), key=lengths_ms.__getitem__)
                searches = [searches[n] for n in order[: -(-len(searches) // 2)]]
        if shortest_ms < NO_SCHEDULE_MS:
            self._use(tuning.RULES_SHARE)

    def _search_best_two(self) -> None:
        """Run everything there is on the best two, if the share is long enough for both."""
        best_two = self.candidates.ranked()[:2]
        if len(best_two) == 2 and tuning.BEST_TWO_SHARE * self.request.time_limit_s >= 2 * tuning.PLACEMENT_S:
            self._use(tuning.BEST_TWO_SHARE)
            for candidate in best_two:
                self._search(candidate, self.request.method, tuning.BEST_TWO_SHARE / 2)

    def _raise_least_bound(self) -> None:
        """Let `relax` search the placement with the least bound for half of this phase's share, then the one that has
        the least bound by then for half of what is left, and so on: the least bound holds for all. It ends at the best
        placement, which is searched anyway."""
        time_limit_s = self.request.time_limit_s
        if self.request.method != "auto" or tuning.LEAST_BOUND_SHARE * time_limit_s < tuning.PLACEMENT_S:
            return
        relax, searched, share = engines.load(RELAX), {*self.candidates.ranked()[:1]}, tuning.LEAST_BOUND_SHARE / 2
        while (alive := self.candidates.ranked()) and share * time_limit_s >= tuning.ENGINE_LEAST_S:
            lowest = min(alive, key=lambda candidate: candidate.bound_ms)
            if lowest in searched or relax.unsupported(lowest.problem):
                return
            searched.add(lowest)
            self._use(share)
            self._search(lowest, RELAX, share)
            share /= 2

    def _search_best(self) -> None:
        """Run everything there is on the best for all the time that is left, by plan with one thread, else by the
        clock; then, if it is proven for its placement sooner, on the next ones."""
        for candidate in self.candidates.ranked():
            self._search(candidate, self.request.method, self.share_left if self.one_thread else 1.0)
            if self.one_thread:
                return

    def _run_method_asked_for(self) -> None:
        """Run a method that was asked for whatever is known, such as the MILP, if it did not run yet."""
        if self.method_ran or self.request.ends_when_proven:
            return
        feasible = [candidate for candidate in self.candidates.all if not candidate.infeasible]
        best = min(feasible, key=lambda candidate: candidate.best_ms)
        if self._search(best, self.request.method, self.share_left, although_proven=True) is None:
            self.candidates.note(f"{self.request.method}: there was no time left to start it")

    # What phases do

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Meanwhile have the engine `dispatch` compile the rules, in its own process, if nobody did on this machine."""
        engine: Child | None = None
        request = self.request
        uses_rules = request.method == "auto" and request.time_limit_s >= tuning.RULES_S
        if (
            uses_rules
            and not engines.load("dispatch").unsupported(request.problem)
            and engines.waits_for_compiler("dispatch")
        ):
            self.candidates.note(engines.COMPILING)
            asked = {"method": "dispatch", "placements": "keep", "time_limit_s": 1e-3, "warm_start": None}
            engine = Child(ENGINE, request.model_copy(update=asked))
        try:
            yield
        finally:
            if engine:
                engine.close()

    def _use(self, share: float) -> None:
        self.share_left -= share

    def _heuristic(self, name: str) -> str:
        """The heuristic that the request names; this one if it names none."""
        return name if self.request.method in ("auto", *ENGINES) else self.request.method

    def _look_at(self, candidates: list[Candidate], share: float, first_look: Portfolio | None = None) -> None:
        """Run a heuristic on each candidate for a share of the time in all, then, on the stages of `first_look`, too,
        what the engine `dispatch` would begin with, then the published systems for its stages.

        The lowest bounds come first, should time run out. All but the heuristic stops when half of all the time is
        over. Nothing waits until rules are compiled.
        """
        order = sorted(candidates, key=lambda candidate: candidate.bound_ms)
        each = share / max(1, len(candidates))
        portfolios = [
            first_look,
            *(self._search(candidate, self._heuristic("adaoffload"), each) for candidate in order),
        ]
        if self.request.method not in ("auto", *ENGINES):
            return
        searches = [portfolio.heuristics for portfolio in portfolios if portfolio]
        use_rules = self.request.time_limit_s >= tuning.RULES_S and not engines.waits_for_compiler("dispatch")
        rules = (heuristics.by_simple_rules() for heuristics in searches if use_rules)
        for _ in chain(*rules, *(heuristics.published() for heuristics in searches)):
            if self.left_s < self.request.time_limit_s / 2:
                return

    def _search(
        self, candidate: Candidate, method: str, share: float, although_proven: bool = False
    ) -> Portfolio | None:
        """Run a portfolio on one placement for a share of the time, from its best schedule so far.

        Returns None, and runs nothing, if that is of no use.
        """
        if not self._is_of_use(candidate, although_proven):
            return None
        self.method_ran = self.method_ran or method == self.request.method
        portfolio = self._portfolio(candidate, method, share)
        portfolio.run()
        return portfolio

    def _is_of_use(self, candidate: Candidate, although_proven: bool = False) -> bool:
        """Whether a search of one placement may change the answer, and there is time for it."""
        is_open = although_proven or not self.candidates.proven
        return is_open and candidate.infeasible is None and self.left_s > 0

    def _portfolio(self, candidate: Candidate, method: str, share: float) -> Portfolio:
        start, warm_start = candidate.best, self.request.warm_start
        if start is None and candidate is self.candidates.unplaced and warm_start and not warm_start.placement:
            start = warm_start
        asked = {
            "problem": candidate.problem,
            "placements": "keep",
            "method": method,
            "time_limit_s": max(1e-3, min(share * self.request.time_limit_s, self.left_s)),
            "warm_start": start,
        }
        portfolio = Portfolio(
            self.request.model_copy(update=asked), lambda frame: self.candidates.handle(candidate, portfolio, frame)
        )
        return portfolio
