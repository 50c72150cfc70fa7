"""Placement search: the same model on the same devices as other stages.

A placement has one chunk a device or several, looped or V-shaped, or, where forwards run beside backwards, one each
way. A problem with layers is cut anew. A `Portfolio` searches the schedules of one placement. Here portfolios run one
after the other by successive halving (Jamieson and Talwalkar 2016): a heuristic on every placement, then a search in
rules, as how far they lead cannot be told before, then everything there is for a short time on the best two, then on
the best for the rest of the time. Before that, `relax` raises the bounds of the placements that have the least ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from threading import RLock

from optpipe.errors import InputError
from optpipe.evaluate.objective import NEVER, raises, reaches, shorter
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.records import Stage
from optpipe.process.protocol import Bound, Frame, Incumbent, Infeasible, Note, Programs, Request
from optpipe_solver import engines, plan
from optpipe_solver.bounds import lower_bound, trivial_bound
from optpipe_solver.bounds.any_partition import no_partition_fits, partition_bound
from optpipe_solver.methods import ENGINES, RELAX
from optpipe_solver.portfolio.partitions import SHAPES, PartitionDescent, mismatch, partition_of_stages
from optpipe_solver.portfolio.portfolio import Portfolio
from optpipe_solver.portfolio.search_state import Emit
from optpipe_solver.systems import SYSTEMS, parse
from optpipe_solver.systems.variants import is_system


@dataclass(eq=False)
class Candidate:
    """A placement, None for the problem's own stages, with what is known of it."""

    placement: Placement | None
    problem: Problem
    bound_ms: float = 0.0
    best: Programs | None = None  # of `problem`
    best_ms: float = NEVER  # by what counts, the percentile where there is jitter
    infeasible: str | None = None

    @property
    def name(self) -> str:
        return str(self.placement or "the stages as given")

    @property
    def is_bidirectional(self) -> bool:
        return self.placement is not None and self.placement.shape == "bidirectional"


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
        self.has_layers = request.problem.layers is not None and len(request.problem.all_routes) == 1
        if self.has_layers and (complaint := mismatch(request.problem)):
            raise InputError(complaint)
        self.deadline = time.monotonic() + request.time_limit_s
        self.one_thread = request.threads == 1  # one search in one order, whatever the clock says
        self.best_ms, self.bound_ms = NEVER, float("-inf")
        self.notes: set[str] = set()
        self._handling = RLock()
        self.last_note = ""  # the latest one about the problem's own stages
        self.engine_ran = False  # the method that was asked for, which may be an engine
        self.unplaced = Candidate(None, request.problem)
        self.candidates: list[Candidate] = []  # all of them; empty as long as not all are known
        self.partitions_ms = partition_bound(request.problem, request.objective) if self.has_layers else NEVER
        self.named = self._of_named_system() if is_system(request.method) else None
        if self.named:
            self.first = self._portfolio(self.named, request.method, 1.0)
        else:
            self.first = self._portfolio(self.unplaced, self._heuristic("naive"), plan.FIRST_LOOK_SHARE)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def run(self) -> None:
        """Search the problem's own stages for a moment, then from many placements for a short time to one for long.

        A system that is named runs on the stages that it is for, and nothing else runs.
        """
        self.first.run()
        self.candidates = [self.unplaced, *self._others(), *([self.named] if self.named else [])]
        self._take_warm_start()
        self._raise_bound()
        if self.named:
            if self.named.infeasible:
                self._note(self.named.infeasible, self.named.placement)
            return
        self._look(self.candidates, plan.FIRST_LOOK_SHARE)
        share_left = 1.0 - plan.FIRST_LOOK_SHARE
        if self.has_layers:
            self._look(self._better_partitions(), plan.FIRST_LOOK_SHARE)
            share_left -= plan.PARTITIONS_SHARE + plan.FIRST_LOOK_SHARE
        if all(candidate.infeasible for candidate in self.candidates):
            self._emit_infeasible()
            return
        if self.request.method == "auto" and self.request.time_limit_s >= plan.RULES_S:
            share_left -= self._search_in_rules(plan.RULES_SHARE)
        best_two = self._ranked()[:2]
        if len(best_two) == 2 and plan.BEST_TWO_SHARE * self.request.time_limit_s >= 2 * plan.PLACEMENT_S:
            share_left -= plan.BEST_TWO_SHARE
            for candidate in best_two:
                self._search(candidate, self.request.method, plan.BEST_TWO_SHARE / 2)
        if self.request.method == "auto" and plan.WEAKEST_SHARE * self.request.time_limit_s >= plan.PLACEMENT_S:
            share_left -= self._search_weakest(plan.WEAKEST_SHARE)
        for candidate in self._ranked():  # the second one if the best is proven for its placement before time is up
            self._search(candidate, self.request.method, share_left if self.one_thread else 1.0)
            if self.one_thread:
                break
        if not (self.engine_ran or self.request.ends_when_proven):  # the best is proven, or time is up
            best = min((c for c in self.candidates if not c.infeasible), key=lambda candidate: candidate.best_ms)
            if self._search(best, self.request.method, share_left, although_proven=True) is None:
                self._note(f"{self.request.method}: there was no time left to start it")
        if self.best_ms == NEVER and self.last_note:
            self.emit(Note(text=self.last_note))  # the last note is taken for the reason

    def _of_named_system(self) -> Candidate:
        """The placement on which the published system that is named runs."""
        problem = self.request.problem
        placement = SYSTEMS[parse(self.request.method)[0]].placement(problem, "all")
        if placement is None:
            return self.unplaced
        self.unplaced.bound_ms = trivial_bound(problem, self.request.objective)
        return self._candidate(placement, placement.apply(problem))

    def _others(self) -> Iterator[Candidate]:
        """Every placement that is allowed and makes other stages than the problem's own, once."""
        problem = self.request.problem
        if len(problem.all_routes) > 1:
            self._note(f"routes: there are {len(problem.all_routes)}, placements are searched for one route only")
            return
        yield from self._new({problem.stages}, _placements(problem))

    def _new(self, known: set[tuple[Stage, ...]], placements: Iterable[Placement]) -> Iterator[Candidate]:
        for placement in placements:
            with suppress(InputError):  # more forward passes than a problem may have
                placed = placement.apply(self.request.problem)
                if placed.stages not in known:
                    known.add(placed.stages)
                    yield self._candidate(placement, placed)

    def _candidate(self, placement: Placement, placed: Problem) -> Candidate:
        objective = self.request.objective
        return Candidate(placement, placed, lower_bound(placed, objective))

    def _take_warm_start(self) -> None:
        """Make a warm start that names a placement that placement's first schedule."""
        start = self.request.warm_start
        if start is None or start.placement is None:
            return
        placement, programs = start.placement, start.model_copy(update={"placement": None})
        try:
            placed = placement.apply(self.request.problem)
        except InputError as error:
            self._note(f"the warm start is no schedule of this problem: {error}")
            return
        own = next((candidate for candidate in self.candidates if candidate.problem.stages == placed.stages), None)
        if own is None:
            own = self._candidate(placement, placed)
            self.candidates.append(own)
        own.best = own.best or programs

    def _look(self, candidates: list[Candidate], share: float) -> None:
        """Run a heuristic on each candidate, then what the engine `dispatch` would begin with, then the published
        systems for its stages.

        The problem's own stages and the lowest bounds come first, should time run out. All but the heuristic stops when
        half of all the time is over. A short search does not wait until rules are compiled.
        """
        portfolios = []
        for candidate in sorted(candidates, key=lambda candidate: (candidate is not self.unplaced, candidate.bound_ms)):
            portfolios.append(self._search(candidate, self._heuristic("adaoffload"), share / len(candidates)))
        if self.request.method in ("auto", *ENGINES):
            searched = [portfolio.heuristics for portfolio in portfolios if portfolio]
            ruled = searched if self.request.time_limit_s >= plan.RULES_S else []
            steps = [heuristics.by_simple_rules() for heuristics in ruled]
            for _ in chain(*steps, *(heuristics.published() for heuristics in searched)):
                if self.left_s < self.request.time_limit_s / 2:
                    return

    def _search_in_rules(self, share: float) -> float:
        """Search in the rules of a list scheduler on every placement that may win, then on the half of them where rules
        lead to the shortest schedules, and so on; each time for a part of this share of the time, side by side.

        The time is counted in ops; the clock ends only what takes longer, with one thread much longer. Returns the
        share that was used, none where rules lead to no schedule.
        """
        alive = self._ranked()
        if reaches(self.best_ms, self.bound_ms) or not alive:
            return 0.0
        planned, limit = (plan.COUNTED_SHARE, plan.COUNTED_TIMEOUT) if self.one_thread else (1.0, 1.0)
        left = [self._portfolio(each, "dispatch", share * limit).heuristics for each in alive]
        a_round = share * planned * self.request.time_limit_s / plan.RULES_ROUNDS * plan.RULES_OPS_PER_S
        threads, ops, shortest = self.request.threads, 0.0, NEVER
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(plan.RULES_ROUNDS):
                ops += a_round * min(1.0, threads / len(left))
                found = list(pool.map(methodcaller("by_rules", round(ops)), left))
                shortest = min(shortest, *found)
                order = sorted(range(len(left)), key=found.__getitem__)
                left = [left[n] for n in order[: -(-len(left) // 2)]]
        return share if shortest < NEVER else 0.0

    def _search_weakest(self, share: float) -> float:
        """Let `relax` search the placement with the least bound for half of the time, then what has the least bound
        now, and so on: the least bound holds for all.

        It ends at the best placement, on which everything there is runs anyway. Returns the share that was used.
        """
        relax, searched, left = engines.load(RELAX), {id(best) for best in self._ranked()[:1]}, share
        while alive := self._ranked():
            weakest = min(alive, key=lambda candidate: candidate.bound_ms)
            too_short = left / 2 * self.request.time_limit_s < plan.ENGINE_LEAST_S
            if too_short or id(weakest) in searched or relax.unsupported(weakest.problem, alone=False):
                break
            searched.add(id(weakest))
            left /= 2
            self._search(weakest, RELAX, left)
        return share - left

    def _heuristic(self, name: str) -> str:
        """The heuristic that the request names; this one if it names none."""
        return name if self.request.method in ("auto", *ENGINES) else self.request.method

    def _better_partitions(self) -> list[Candidate]:
        """Descend from the even partition and from the given one, for every number and shape of chunks, then go on with
        the best of them."""
        problem, request = self.request.problem, self.request
        placements = [c.placement for c in self.candidates if c.placement and not c.is_bidirectional]
        if (given := partition_of_stages(problem)) is not None:
            placements.append(given)
        descents = [PartitionDescent(problem, request.objective, start, request.seed) for start in placements]
        for count in (len(descents), -(-len(descents) // 3)):
            for descent in sorted(descents, key=lambda descent: descent.length_ms)[:count]:
                self._descend(descent, plan.PARTITIONS_SHARE / 2 / count * request.time_limit_s)
        known = {candidate.problem.stages for candidate in self.candidates}
        found = list(self._new(known, [descent.placement for descent in descents]))
        self.candidates += found
        return found

    def _descend(self, descent: PartitionDescent, seconds: float) -> None:
        """Go on with a descent for so long: with one thread by the work that is counted, else by the clock."""
        until, ops = time.monotonic() + seconds, 0
        for handled in descent.steps:
            ops += handled
            over = ops > seconds * plan.OPS_PER_S if self.one_thread else time.monotonic() > until
            if over or self.left_s < plan.ENGINE_END_S:
                return

    def _ranked(self) -> list[Candidate]:
        """The candidates that may still have the best schedule, the most promising first."""
        alive = [c for c in self.candidates if not c.infeasible and shorter(c.bound_ms, self.best_ms)]
        return sorted(alive, key=lambda candidate: candidate.best_ms)

    def _search(
        self, candidate: Candidate, method: str, share: float, although_proven: bool = False
    ) -> Portfolio | None:
        """Run a portfolio on one placement for a share of the time, from its best schedule so far.

        Returns None, and runs nothing, if that is of no use.
        """
        proven = reaches(self.best_ms, self.bound_ms) and not although_proven
        if candidate.infeasible is not None or proven or self.left_s <= 0:
            return None
        self.engine_ran = self.engine_ran or method == self.request.method
        portfolio = self._portfolio(candidate, method, share)
        portfolio.run()
        return portfolio

    def _portfolio(self, candidate: Candidate, method: str, share: float) -> Portfolio:
        start, given = candidate.best, self.request.warm_start
        if start is None and candidate is self.unplaced and given and not given.placement:
            start = given
        asked = {
            "problem": candidate.problem,
            "placements": "keep",
            "method": method,
            "time_limit_s": max(1e-3, min(share * self.request.time_limit_s, self.left_s)),
            "warm_start": start,
        }
        portfolio = Portfolio(
            self.request.model_copy(update=asked), lambda frame: self._handle(candidate, portfolio, frame)
        )
        return portfolio

    def _handle(self, candidate: Candidate, portfolio: Portfolio, frame: Frame) -> None:
        """Emit what a portfolio says if it is news among all placements; called from any thread."""
        with self._handling:
            self._take(candidate, portfolio, frame)

    def _take(self, candidate: Candidate, portfolio: Portfolio, frame: Frame) -> None:
        if isinstance(frame, Incumbent):
            found_ms = portfolio.state.best_ms
            if found_ms < candidate.best_ms:
                candidate.best, candidate.best_ms = frame.schedule, found_ms
            if shorter(found_ms, self.best_ms):
                self.best_ms = found_ms
                placed = frame.schedule.model_copy(update={"placement": candidate.placement})
                self.emit(frame.model_copy(update={"schedule": placed}))
        elif isinstance(frame, Bound):
            candidate.bound_ms = max(candidate.bound_ms, frame.lower_bound_ms)
            self._raise_bound()
        elif isinstance(frame, Infeasible):
            candidate.infeasible = frame.reason
            self._raise_bound()
        elif isinstance(frame, Note):
            if frame.method:
                self.emit(frame.model_copy(update={"text": f"{candidate.name}: {frame.text}"}))
            else:
                self._note(frame.text, candidate.placement)

    def _raise_bound(self) -> None:
        """Emit the bound that holds for all placements if it is higher than before.

        Each placement has its bound; all partitions of layers have one together.
        """
        candidates = self.candidates
        if self.has_layers:
            candidates = [c for c in candidates if c is self.unplaced or c.is_bidirectional]
        bound_ms = min([self.partitions_ms, *(c.bound_ms for c in candidates if not c.infeasible)])
        if bound_ms < NEVER and raises(bound_ms, self.bound_ms):
            self.bound_ms = bound_ms
            self.emit(Bound(method="all placements", lower_bound_ms=bound_ms))

    def _emit_infeasible(self) -> None:
        """Every placement tried is infeasible. That is a proof unless there are more partitions than can be tried."""
        reason = no_partition_fits(self.request.problem) if self.has_layers else self.unplaced.infeasible
        if reason:
            self.emit(Infeasible(reason=reason))
        else:
            self._note(f"no partition was found that fits; with the stages as given {self.unplaced.infeasible}")

    def _note(self, text: str, placement: Placement | None = None) -> None:
        """Emit a note once, with the placement that it is about first."""
        if text not in self.notes:
            self.notes.add(text)
            self.last_note = self.last_note if placement else text
            self.emit(Note(text=f"{placement}: {text}" if placement else text))


def _placements(problem: Problem) -> Iterator[Placement]:
    for chunks in range(1, plan.CHUNKS + 1):
        for shape in SHAPES if chunks > 1 else SHAPES[:1]:
            with suppress(InputError):  # fewer layers than stages
                yield Placement.balanced(problem, chunks, shape)
    if problem.overlap_factor is not None:  # two ways pay where a forward runs beside a backward
        with suppress(InputError):
            yield Placement.balanced(problem, 1, "bidirectional")
