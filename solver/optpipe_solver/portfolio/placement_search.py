"""Placement search: the same model on the same devices as other stages.

A placement has one chunk a device or several, looped or V-shaped, or, where forwards run beside backwards, one each
way. A problem with layers is cut anew. A `Portfolio` searches the schedules of one placement; here portfolios run one
after the other by successive halving (Jamieson and Talwalkar 2016). `PlacementSearch.phases` is the list of what runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from operator import methodcaller
from typing import NamedTuple

from optpipe.errors import InputError
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.formats.stacks import STACKS
from optpipe.process.child import Child
from optpipe.process.protocol import Note, Request
from optpipe_solver import engines, tuning
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.clock import Clock, FirstClock, counts_work
from optpipe_solver.incumbents import Emit
from optpipe_solver.methods import RELAX
from optpipe_solver.portfolio.contenders import Contender, Contenders
from optpipe_solver.portfolio.engine_runs import ENGINE
from optpipe_solver.portfolio.heuristic_runs import HeuristicRuns
from optpipe_solver.portfolio.partitions import improve_partitions, mismatch, partition_of_stages
from optpipe_solver.portfolio.portfolio import Portfolio
from optpipe_solver.schedule_facts import is_listed, is_modelled
from optpipe_solver.systems import SYSTEMS, is_system, on_other_stages, parse, variants


def rules_are_compiled() -> bool:
    """Whether a search in rules waits for no compiler."""
    return not engines.waits_for_compiler("dispatch")


class Phase(NamedTuple):
    """A part of the search."""

    name: str
    share: float  # of the time, by plan
    run: Callable[[float], float]  # gets the share, and returns what of it counts as spent; later phases have the rest


class PlacementSearch:
    """One request's search over placements: emits the best schedule, and bounds that hold for all placements.

    Begins with `first`, the search of the system that is `named`, or of the problem's own stages. Raises InputError if
    the method is unknown or does not apply, or the layers are not what the problem's stages are made of.
    """

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request, self.emit, self.only_own = request, emit, STACKS[request.stack].only_own
        self.contenders = Contenders(request, emit)
        if self.contenders.has_layers and (complaint := mismatch(request.problem)):
            raise InputError(complaint)
        self.clock = Clock(request.time_limit_s, counts_work(request), wall_s=request.time_limit_s)
        self.method_ran = False  # the method that was asked for, which may be an engine
        self.named: Contender | None = None
        if not is_system(request.method):
            most_s = tuning.FIRST_LOOK_MOST * request.time_limit_s
            self.first = self._portfolio(self.contenders.unplaced, request.method, most_s)
            return
        self.named, problem = self.contenders.unplaced, request.problem
        if placement := SYSTEMS[parse(request.method)[0]].placement(problem, "all"):
            self.named.incumbents.bound_ms = trivial_bound(problem, request.objective)
            self.named = self.contenders.contender(placement, placement.apply(problem))
        self.first = self._portfolio(self.named, request.method, request.time_limit_s)

    def begin(self) -> None:
        """Emit, once, what takes a moment: what a search of the stages as given begins with, the bounds of all
        placements, and the published systems on the stages that they are for; or the system that is named.
        """
        contenders, request = self.contenders, self.request
        if contenders.all:
            return
        if self.named:
            self.first.run()
        else:
            self.first.begin()
        contenders.list_all(self.named)
        if self.named and self.named.infeasible:
            contenders.note(self.named.infeasible, self.named.placement)
        if self.named or not request.starts_from_known:
            return
        for contender in contenders.all:
            if contender.start:  # a warm start
                self._portfolio(contender, "naive", 0.0).begin()
        self._offer_on_other_stages(FirstClock(request.time_limit_s))
        for contender in contenders.all if not self.only_own else ():
            if contenders.best_ms == NO_SCHEDULE_MS:
                self._portfolio(contender, "naive", 0.0).run()

    def _offer_on_other_stages(self, clock: Clock) -> None:
        """Offer the published systems on the stages that they are given."""
        for name, placement in on_other_stages(self.request.problem):
            if placed := self.contenders.of(placement):
                self._offer_published(placed, [name], clock)

    def _offer_published(self, contender: Contender, names: Iterable[str], clock: Clock) -> None:
        request = self.request.model_copy(update={"problem": contender.problem})
        emit = partial(self.contenders.handle, contender)
        for _ in HeuristicRuns(request, None, contender.incumbents, self.clock, emit).published(names, clock):
            pass

    def run(self) -> None:
        """Search the problem's own stages for a moment, then from many placements for a short time to one for long.

        A system that is named runs on the stages that it is for, and nothing else runs.
        """
        contenders, request = self.contenders, self.request
        self.begin()
        if self.named:
            return
        if request.starts_from_known:
            self._offer_on_other_stages(self.clock.until_half())
        uses_rules = request.method == "auto" and request.time_limit_s >= tuning.COMPILE_S and not self.only_own
        with ExitStack() as meanwhile:
            if uses_rules and not engines.load("dispatch").unsupported(request.problem) and not rules_are_compiled():
                contenders.note(engines.COMPILING)  # in the engine's own process
                asked = {"method": "dispatch", "placements": "keep", "time_limit_s": 1e-3, "warm_start": None}
                compiling = Child(ENGINE, request.model_copy(update=asked))
                meanwhile.callback(compiling.stop)
                threading.Thread(target=list, args=(compiling.frames(),), daemon=True).start()
            for phase in self.phases():
                self.clock.spend(phase.run(phase.share) * self.clock.seconds)
        if contenders.best_ms == NO_SCHEDULE_MS and contenders.last_note:
            self.emit(Note(text=contenders.last_note))  # the last note is taken for the reason

    @property
    def is_infeasible(self) -> bool:
        """Whether all placements were shown not to fit."""
        return bool(self.contenders.all) and all(contender.infeasible for contender in self.contenders.all)

    def phases(self) -> Iterator[Phase]:
        """What runs, in this order."""
        # A heuristic on the stages as given, then on every placement.
        yield Phase("own stages", tuning.FIRST_LOOK_SHARE / 2, self._look_at_own_stages)
        yield Phase("all placements", tuning.FIRST_LOOK_SHARE, self._look_at_all)
        # Of layers there are too many partitions to try all.
        yield Phase("partitions", tuning.PARTITIONS_SHARE + tuning.FIRST_LOOK_SHARE, self._improve_partitions)
        if self.contenders.all_are_infeasible() or self.only_own:
            return
        # A first look does not show how far rules lead, nor do rules show what windows gain.
        in_rules = Phase("rules", tuning.RULES_SHARE, self._search_in_rules)
        if were_compiled := rules_are_compiled():
            yield in_rules
            yield Phase("annealing", tuning.ANNEALING_SHARE, self._anneal)
        yield Phase("best two", tuning.BEST_TWO_SHARE, self._search_best_two)
        if not were_compiled and rules_are_compiled():
            yield in_rules
        # The least bound of all placements is what holds for all.
        yield Phase("least bound", tuning.LEAST_BOUND_SHARE, self._raise_least_bound)
        yield Phase("best", 1.0, self._search_best)  # with all that is left
        yield Phase("method asked for", 1.0, self._run_method_asked_for)  # also where all is proven by then

    def _look_at_own_stages(self, share: float) -> float:
        """Run a heuristic on the problem's own stages for a moment or, on a busy machine, until it has a schedule, also
        when time is up."""
        if self.first.begin() and not self.contenders.proven:
            self.method_ran = self._heuristic == self.request.method
            for _ in self.first.heuristics.run(share / tuning.FIRST_LOOK_MOST):
                pass
        return share

    def _look_at_all(self, share: float) -> float:
        self._look_at([c for c in self.contenders.all if c is not self.contenders.unplaced], share, self.first)
        return share

    def _improve_partitions(self, share: float) -> float:
        """Descend from the even partition for every number and shape of chunks, and from the given one; look at the
        partitions that come out."""
        if not self.contenders.has_layers:
            return 0.0
        starts = [c.placement for c in self.contenders.all if c.placement and not c.is_bidirectional]
        if (partition := partition_of_stages(self.request.problem)) is not None:
            starts.append(partition)
        better = improve_partitions(self.request, starts, self.clock.share(tuning.PARTITIONS_SHARE))
        self._look_at(self.contenders.add_new(better), tuning.FIRST_LOOK_SHARE)
        return share

    def _search_in_rules(self, share: float) -> float:
        """Search in the rules of a list scheduler on every placement that may win, then on the half of them where rules
        lead to the shortest schedules, and so on; each time for a part of the share, side by side.

        The time is counted in ops; the clock ends only what takes longer, with one thread much longer.
        """
        request, contenders = self.request, self.contenders.ranked()
        too_short = request.method != "auto" or request.time_limit_s < tuning.RULES_S
        if too_short or self.contenders.proven or not contenders:
            return 0.0
        planned, limit = (tuning.COUNTED_SHARE, tuning.COUNTED_TIMEOUT) if self.clock.counts else (1.0, 1.0)
        limit_s = share * limit * self.clock.seconds
        searches = [self._portfolio(each, "dispatch", limit_s).heuristics for each in contenders]
        until = self.clock.moment(limit_s)
        round_s = share * planned * self.clock.seconds / tuning.RULES_ROUNDS
        ops, shortest_ms = 0.0, NO_SCHEDULE_MS
        with ThreadPoolExecutor(request.threads) as pool:
            for _ in range(tuning.RULES_ROUNDS):
                ops += round_s * tuning.RULES_OPS_PER_S * min(1.0, request.threads / len(searches))
                lengths_ms = list(pool.map(methodcaller("by_rules", round(ops), until), searches))
                shortest_ms = min(shortest_ms, *lengths_ms)
                order = sorted(range(len(searches)), key=lengths_ms.__getitem__)
                searches = [searches[n] for n in order[: -(-len(searches) // 2)]]
        return share if shortest_ms < NO_SCHEDULE_MS else 0.0

    def _anneal(self, share: float) -> float:
        """Anneal the best placement's best schedule and its best that no engine found, side by side: what is longer at
        first, such as the one of `v-auto`, may end shorter."""
        request, cannot = self.request, engines.load("anneal").unsupported(self.request.problem)
        seconds = share * self.clock.seconds * (tuning.COUNTED_SHARE if self.clock.counts else 1.0)
        if request.method != "auto" or self.contenders.proven or cannot or engines.waits_for_compiler("anneal"):
            return 0.0
        if not (best := self.contenders.ranked()[:1]):
            return 0.0
        search = self._portfolio(best[0], "anneal", seconds).heuristics
        each_s = seconds * min(1.0, request.threads / 2)
        with ThreadPoolExecutor(request.threads) as pool:  # where both are the same, at least their seeds differ
            for _ in pool.map(partial(search.by_annealing, each_s), (is_modelled, is_listed), (0, 1)):
                pass
        return share

    def _search_best_two(self, share: float) -> float:
        """Run everything there is on the best two, if the share is long enough for both."""
        best_two = self.contenders.ranked()[:2]
        if len(best_two) < 2 or share * self.clock.seconds < 2 * tuning.PLACEMENT_S:
            return 0.0
        for contender in best_two:
            self._search(contender, self.request.method, share / 2 * self.clock.seconds)
        return share

    def _raise_least_bound(self, share: float) -> float:
        """Let `relax` search the placement with the least bound for half of the share, then the one that has the least
        bound by then for half of what is left, and so on, up to the best placement, which is searched anyway."""
        seconds = share * self.clock.seconds
        left_s = seconds
        if self.request.method != "auto" or seconds < tuning.PLACEMENT_S:
            return 0.0
        relax, searched = engines.load(RELAX), {*self.contenders.ranked()[:1]}
        while (alive := self.contenders.ranked()) and left_s / 2 >= tuning.ENGINE_LEAST_S:
            lowest = min(alive, key=lambda contender: contender.incumbents.bound_ms)
            if lowest in searched or relax.unsupported(lowest.problem):
                break
            searched.add(lowest)
            left_s /= 2
            self._search(lowest, RELAX, left_s)
        return share * (1 - left_s / seconds)

    def _search_best(self, _: float) -> float:
        """Run everything there is on the best for all the time that is left, by plan where work is counted, else by the
        clock; then, if it is proven for its placement sooner, on the next ones."""
        for contender in self.contenders.ranked():
            self._search(contender, self.request.method, self.clock.left_s)
            if self.clock.counts:
                break
        return 0.0

    def _run_method_asked_for(self, _: float) -> float:
        """Run a method that was asked for whatever is proven, such as the MILP, if it did not run yet."""
        if not self.method_ran and not self.request.ends_when_proven:
            feasible = [contender for contender in self.contenders.all if not contender.infeasible]
            best = min(feasible, key=lambda contender: contender.incumbents.best_ms)
            if self._search(best, self.request.method, self.clock.left_s, although_proven=True) is None:
                self.contenders.note(f"{self.request.method}: there was no time left to start it")
        return 0.0

    @property
    def _heuristic(self) -> str:
        """The heuristic that the request names; by default that of the portfolio."""
        return tuning.HEURISTIC if self.request.starts_from_known else self.request.method

    def _look_at(self, contenders: list[Contender], share: float, first: Portfolio | None = None) -> None:
        """Try the published systems for each contender's stages, then a heuristic for a share of the time in all, then,
        on the stages of `first`, too, what the engine `dispatch` would begin with.

        The lowest bounds come first, should time run out. All but the heuristic stops when half of all the time is
        over.
        """
        order = sorted(contenders, key=lambda contender: contender.incumbents.bound_ms)
        each_s = share * self.clock.seconds / max(1, len(contenders))
        tries_all, clock = self.request.starts_from_known, self.clock.until_half()
        for contender in (self.contenders.unplaced, *order) if tries_all else ():
            self._offer_published(contender, variants(contender.problem), clock)
        portfolios = [first, *(self._search(contender, self._heuristic, each_s) for contender in order)]
        if tries_all and self.request.time_limit_s >= tuning.RULES_S and rules_are_compiled():
            for portfolio in portfolios:
                if portfolio and not clock.over:
                    portfolio.heuristics.by_rules()

    def _search(
        self, contender: Contender, method: str, seconds: float, although_proven: bool = False
    ) -> Portfolio | None:
        """Run a portfolio on one placement, from its best schedule so far.

        Returns None, and runs nothing, if that cannot change the answer, or time is up.
        """
        if contender.infeasible or self.clock.wall_left_s <= 0 or (self.contenders.proven and not although_proven):
            return None
        self.method_ran = self.method_ran or method == self.request.method
        portfolio = self._portfolio(contender, method, seconds)
        portfolio.run()
        return portfolio

    def _portfolio(self, contender: Contender, method: str, seconds: float) -> Portfolio:
        asked = {
            "problem": contender.problem,
            "placements": "keep",
            "method": method,
            "time_limit_s": max(1e-3, min(seconds, self.clock.wall_left_s)),
            "warm_start": contender.start if contender.incumbents.best is None else None,
        }
        emit = partial(self.contenders.handle, contender)
        return Portfolio(self.request.model_copy(update=asked), emit, contender.incumbents)
