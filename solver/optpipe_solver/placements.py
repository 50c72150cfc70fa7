"""Placement search: the same model on the same devices as one chunk a device or several, looped or V-shaped, or, where
forwards run beside backwards, one each way; with layers, cut anew.

A `Portfolio` searches the schedules of one placement. Here they are run in turn by successive halving (Jamieson and
Talwalkar 2016): a heuristic on every placement, then everything there is for a short time on the best few, then all
that is left on the best.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from optpipe.errors import InputError
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.records import Stage
from optpipe.process.protocol import Bound, Frame, Incumbent, Infeasible, Note, Programs, Request
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.methods import ENGINES
from optpipe_solver.partitions import SHAPES, Climb, given, mismatch, no_partition_fits, partition_bound
from optpipe_solver.portfolio import OPS_PER_S, WORTHWHILE_S, Emit, Portfolio
from optpipe_solver.seeds import is_system
from optpipe_solver.systems import SYSTEMS, parse

MOST_CHUNKS = 4  # a device
FIRST_LOOK = 0.06  # of the time: a heuristic for every placement
CLIMBING = 0.2  # of the time: for better partitions, where there are layers
ROUNDS = ((4, 0.2), (2, 0.2))  # so many placements, for that share of the time
SHORTEST_S = 2.5  # below that an engine has hardly begun


@dataclass(eq=False)
class Candidate:
    """A placement, None for the stages as given, with what is known of it."""

    placement: Placement | None
    problem: Problem
    bound_ms: float = 0.0
    best: Programs | None = None  # of `problem`
    best_ms: float = float("inf")  # by what counts, the percentile where there is jitter
    infeasible: str | None = None

    @property
    def goes_both_ways(self) -> bool:
        return self.placement is not None and self.placement.shape == "bidirectional"


class PlacementSearch:
    """One request's search over placements: tells what is the best, and bounds what holds, over all of them."""

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request, self.emit = request, emit
        if self.cuts_layers and (complaint := mismatch(request.problem)):
            raise InputError(complaint)
        self.deadline = time.monotonic() + request.time_limit_s
        self.best_ms, self.bound_ms = float("inf"), float("-inf")
        self.told: set[str] = set()
        self.on_given = ""  # the latest note on the stages as given
        self.keep = Candidate(None, request.problem)
        self.candidates: list[Candidate] = []  # all of them, or none as long as they are not all known
        self.for_all_ms = partition_bound(request.problem, request.objective) if self.cuts_layers else float("inf")
        self.asked = self.on_its_stages() if is_system(request.method) else None
        first = (self.asked, request.method, 1.0) if self.asked else (self.keep, self.heuristic("naive"), FIRST_LOOK)
        self.at_once = self.portfolio(*first)

    @property
    def cuts_layers(self) -> bool:
        return self.request.problem.layers is not None and len(self.request.problem.all_routes) == 1

    @property
    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    def run(self) -> None:
        """Something at once for the stages as given, then from many placements for a short time to one for long. A
        system that is named runs on the stages that it is for, and nothing else does."""
        self.at_once.run()
        self.candidates = [self.keep, *self.others(), *([self.asked] if self.asked else [])]
        self.start_warm()
        self.raise_bound()
        if self.asked:
            if self.asked.infeasible:
                self.note(self.asked.infeasible, self.asked.placement)
            return
        self.look(self.candidates, FIRST_LOOK)
        planned = 1.0 - FIRST_LOOK
        if self.cuts_layers:
            self.look(self.climb(), FIRST_LOOK)
            planned -= CLIMBING + FIRST_LOOK
        if all(candidate.infeasible for candidate in self.candidates):
            self.tell_infeasible()
            return
        method = self.request.method
        for most, share in ROUNDS:
            count = min(most, int(share * self.request.time_limit_s / SHORTEST_S))
            if count > 1:
                planned -= share
                for candidate in self.ranked()[:count]:
                    self.search(candidate, method, share / count)
        for (
            candidate
        ) in self.ranked():  # the next ones only where the best is proven for its placement before time is up
            self.search(candidate, method, planned if self.request.threads == 1 else 1.0)
            if self.request.threads == 1:  # one search in one order, whatever the clock says
                break
        if self.best_ms == float("inf") and self.on_given:
            self.emit(Note(text=self.on_given))  # the last word is taken for the reason

    def on_its_stages(self) -> Candidate:
        """Where the published schedule that is named runs."""
        problem = self.request.problem
        placement = SYSTEMS[parse(self.request.method)[0]].placement(problem, "all")
        if placement is None:
            return self.keep
        self.keep.bound_ms = trivial_bound(problem, self.request.objective)
        return self.candidate(placement, placement.apply(problem))

    def others(self) -> Iterator[Candidate]:
        """Every other placement that is allowed, once."""
        problem = self.request.problem
        if len(problem.all_routes) > 1:
            self.note(f"routes: there are {len(problem.all_routes)}, placements are searched for one route only")
            return
        yield from self.new({problem.stages}, _placements(problem))

    def new(self, known: set[tuple[Stage, ...]], placements: Iterable[Placement]) -> Iterator[Candidate]:
        """Those with other stages than the known ones, once."""
        for placement in placements:
            with suppress(InputError):  # more forward passes than a problem may have
                placed = placement.apply(self.request.problem)
                if placed.stages not in known:
                    known.add(placed.stages)
                    yield self.candidate(placement, placed)

    def candidate(self, placement: Placement, placed: Problem) -> Candidate:
        objective = self.request.objective
        return Candidate(placement, placed, max(trivial_bound(placed, objective), memory_bound(placed, objective)))

    def start_warm(self) -> None:
        """The warm start is its own placement's first schedule, the given stages' where it has none."""
        start = self.request.warm_start
        if start is None or start.placement is None:
            return
        placement, programs = start.placement, start.model_copy(update={"placement": None})
        try:
            placed = placement.apply(self.request.problem)
        except InputError as error:
            self.note(f"the warm start is no schedule of this problem: {error}")
            return
        own = next((candidate for candidate in self.candidates if candidate.problem.stages == placed.stages), None)
        if own is None:
            own = self.candidate(placement, placed)
            self.candidates.append(own)
        own.best = own.best or programs

    def look(self, candidates: list[Candidate], share: float) -> None:
        """At each with a heuristic; should time be up before, at the given stages and those of the lowest bounds. Then
        at what is published for such stages, unless that takes half of all the time."""
        portfolios = []
        for candidate in sorted(candidates, key=lambda candidate: (candidate is not self.keep, candidate.bound_ms)):
            portfolios.append(self.search(candidate, self.heuristic("adaoffload"), share / len(candidates)))
        if self.request.method in ("auto", *ENGINES):
            for _ in chain.from_iterable(portfolio.published() for portfolio in portfolios if portfolio):
                if self.time_left < self.request.time_limit_s / 2:
                    return

    def heuristic(self, name: str) -> str:
        """The one that was asked for, else this one."""
        return name if self.request.method in ("auto", *ENGINES) else self.request.method

    def climb(self) -> list[Candidate]:
        """Better partitions: from the even one and from the given one, for every number and shape of chunks, then for
        the best of them."""
        problem, request = self.request.problem, self.request
        starts = [
            candidate.placement for candidate in self.candidates if candidate.placement and not candidate.goes_both_ways
        ]
        starts += [own for own in [given(problem)] if own]
        climbs = [Climb(problem, request.objective, placement, request.seed) for placement in starts]
        for count in (len(climbs), -(-len(climbs) // 3)):
            for climb in sorted(climbs, key=lambda climb: climb.length_ms)[:count]:
                self.ascend(climb, CLIMBING / 2 / count * request.time_limit_s)
        found = list(
            self.new({candidate.problem.stages for candidate in self.candidates}, [climb.placement for climb in climbs])
        )
        self.candidates += found
        return found

    def ascend(self, climb: Climb, seconds: float) -> None:
        """With one thread in seconds' worth of work, else by the clock."""
        until, ops = time.monotonic() + seconds, 0
        for done in climb.looks:
            ops += done
            if self.time_left < WORTHWHILE_S or (
                ops > seconds * OPS_PER_S if self.request.threads == 1 else time.monotonic() > until
            ):
                return

    def ranked(self) -> list[Candidate]:
        """Those that may still have the best schedule, the most promising first."""
        alive = [c for c in self.candidates if not c.infeasible and c.bound_ms < self.best_ms * (1 - 1e-9)]
        return sorted(alive, key=lambda candidate: candidate.best_ms)

    def search(self, candidate: Candidate, method: str, share: float) -> Portfolio | None:
        """A portfolio on one placement for a share of the time, from its best schedule so far; None where that is no
        use."""
        if candidate.infeasible is not None or self.bound_ms >= self.best_ms * (1 - 1e-9) or self.time_left <= 0:
            return None
        portfolio = self.portfolio(candidate, method, share)
        portfolio.run()
        return portfolio

    def portfolio(self, candidate: Candidate, method: str, share: float) -> Portfolio:
        start = candidate.best
        if (
            start is None
            and candidate is self.keep
            and self.request.warm_start
            and not self.request.warm_start.placement
        ):
            start = self.request.warm_start
        asked = {
            "problem": candidate.problem,
            "placements": "keep",
            "method": method,
            "time_limit_s": max(1e-3, min(share * self.request.time_limit_s, self.time_left)),
            "warm_start": start,
        }
        portfolio = Portfolio(
            self.request.model_copy(update=asked), lambda frame: self.hear(candidate, portfolio, frame)
        )
        return portfolio

    def hear(self, candidate: Candidate, portfolio: Portfolio, frame: Frame) -> None:
        """Passes on what is news over all placements."""
        if isinstance(frame, Incumbent):
            if portfolio.best_ms < candidate.best_ms:
                candidate.best, candidate.best_ms = frame.schedule, portfolio.best_ms
            if portfolio.best_ms < self.best_ms * (1 - 1e-9):
                self.best_ms = portfolio.best_ms
                placed = frame.schedule.model_copy(update={"placement": candidate.placement})
                self.emit(frame.model_copy(update={"schedule": placed}))
        elif isinstance(frame, Bound):
            candidate.bound_ms = max(candidate.bound_ms, frame.lower_bound_ms)
            self.raise_bound()
        elif isinstance(frame, Infeasible):
            candidate.infeasible = frame.reason
            self.raise_bound()
        elif isinstance(frame, Note):
            self.note(frame.text, candidate.placement)

    def raise_bound(self) -> None:
        """What no schedule of any placement is shorter than: each has its bound, and all partitions of layers have
        theirs."""
        own = (
            [c for c in self.candidates if c is self.keep or c.goes_both_ways] if self.cuts_layers else self.candidates
        )
        bound_ms = min([self.for_all_ms, *(c.bound_ms for c in own if not c.infeasible)])
        if self.bound_ms * (1 + 1e-9) < bound_ms < float("inf"):
            self.bound_ms = bound_ms
            self.emit(Bound(method="all placements", lower_bound_ms=bound_ms))

    def tell_infeasible(self) -> None:
        """Proven where every placement is; of partitions not all are tried."""
        reason = no_partition_fits(self.request.problem) if self.cuts_layers else self.keep.infeasible
        if reason:
            self.emit(Infeasible(reason=reason))
        else:
            self.note(f"no partition was found that fits; with the stages as given {self.keep.infeasible}")

    def note(self, text: str, placement: Placement | None = None) -> None:
        """Once, with the placement where it came up first."""
        if text not in self.told:
            self.told.add(text)
            self.on_given = self.on_given if placement else text
            self.emit(Note(text=f"{placement}: {text}" if placement else text))


def _placements(problem: Problem) -> Iterator[Placement]:
    for chunks in range(1, MOST_CHUNKS + 1):
        for shape in SHAPES if chunks > 1 else SHAPES[:1]:
            with suppress(InputError):  # fewer layers than stages
                yield Placement.balanced(problem, chunks, shape)
    if problem.overlap_factor is not None:  # two ways pay where a forward runs beside a backward
        with suppress(InputError):
            yield Placement.balanced(problem, 1, "bidirectional")
