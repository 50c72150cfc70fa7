"""`Contenders`: the placements of one search, and what the best schedule and bound of each say of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from threading import RLock

from optpipe.errors import InputError
from optpipe.evaluate.objective import NO_SCHEDULE_MS, raises, reaches, shorter
from optpipe.formats.stacks import STACKS
from optpipe.model.placement import Placement, Shape, devices_in_order, folded
from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, Frame, Incumbent, Infeasible, Note, Programs, Request
from optpipe.results import is_better
from optpipe_solver import tuning
from optpipe_solver.bounds import lower_bound
from optpipe_solver.bounds.any_partition import no_partition_fits, partition_bound
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.portfolio.partitions import SHAPES
from optpipe_solver.portfolio.portfolio import incumbents_of


@dataclass(eq=False)
class Contender:
    """A placement, None for the problem's own stages, with the best schedule and bound for it."""

    placement: Placement | None
    incumbents: Incumbents
    start: Programs | None = None  # where its first search begins
    infeasible: str | None = None

    @property
    def problem(self) -> Problem:
        return self.incumbents.problem

    @property
    def is_bidirectional(self) -> bool:
        return self.placement is not None and self.placement.shape == "bidirectional"


class Contenders:
    """All placements of one search: takes what is better for one, and emits what is better than for all."""

    def __init__(self, request: Request, emit: Emit) -> None:
        self._request, self._emit = request, emit
        problem = request.problem
        self.has_layers = problem.layers is not None and len(problem.all_routes) == 1
        self._partitions_ms = partition_bound(problem, request.objective) if self.has_layers else NO_SCHEDULE_MS
        self.all: list[Contender] = []  # empty as long as not all are listed, since no bound holds for all before
        self.best_ms, self.bound_ms = NO_SCHEDULE_MS, float("-inf")
        self.last_note = self._best_method = ""
        self._notes: set[str] = set()
        self._handling = RLock()
        self.unplaced = self.contender(None, problem)
        if request.warm_start and request.warm_start.placement is None:
            self.unplaced.start = request.warm_start

    @property
    def proven(self) -> bool:
        """Whether no placement has a shorter schedule."""
        return reaches(self.best_ms, self.bound_ms)

    def ranked(self) -> list[Contender]:
        """The contenders that may still have the best schedule, the most promising first."""
        alive = [c for c in self.all if not c.infeasible and shorter(c.incumbents.bound_ms, self.best_ms)]
        return sorted(alive, key=lambda contender: contender.incumbents.best_ms)

    def list_all(self, named: Contender | None) -> None:
        """Every placement that is allowed and makes other stages than the problem's own, once; then the bound holds."""
        problem = self._request.problem
        self.all = [self.unplaced, *([named] if named else [])]
        if len(problem.all_routes) > 1:
            self.note(f"routes: there are {len(problem.all_routes)}, placements are searched for one route only")
        else:
            shapes: list[tuple[int, Shape]] = [(1, "looped"), *product(range(2, tuning.CHUNKS + 1), SHAPES)]
            # Two ways pay where a forward runs beside a backward. Who gives one number for all pairs knows whether
            # devices hold two stages' parameters; the budgets of an estimate, with its lists, do not allow for that.
            if isinstance(problem.overlap_factor, float):
                shapes.append((1, "bidirectional"))
            stack, devices = STACKS[self._request.stack], self._folded()
            for chunks, shape in (each for each in shapes if stack.places(*each)):
                with suppress(InputError):  # fewer layers than stages
                    placement = Placement.balanced(problem, chunks, shape)
                    self.add_new([placement])
                    if devices and shape == "looped":
                        self.add_new([placement.model_copy(update={"devices": devices})])
        start = self._request.warm_start
        if start and start.placement:
            self._take_warm_start(start, start.placement)
        self._raise_bound()

    def _folded(self) -> tuple[int, ...] | None:
        """The devices, `folded`, where a node may have too little host memory: else their order changes nothing."""
        problem, devices = self._request.problem, devices_in_order(self._request.problem)
        nodes = [node for d in devices if (node := problem.devices[d].node)]
        use = len(nodes) == len(devices) and problem.costs.host_is_scarce.any() and self._request.stack == "optpipe"
        return tuple(devices[place] for place in folded(nodes)) if use else None

    def of(self, placement: Placement) -> Contender | None:
        """The contender with the stages that a placement makes; None if there is none."""
        with suppress(InputError):  # as in `add_new`, or there are several routes
            stages = placement.apply(self._request.problem).stages
            return next((contender for contender in self.all if contender.problem.stages == stages), None)
        return None

    def add_new(self, placements: Iterable[Placement]) -> list[Contender]:
        """Add the placements that make other stages than those so far, and return them."""
        new, taken = list[Contender](), {contender.problem.stages for contender in self.all}
        for placement in placements:
            with suppress(InputError):  # more forward passes than a problem may have
                placed = placement.apply(self._request.problem)
                if placed.stages not in taken:
                    taken.add(placed.stages)
                    new.append(self.contender(placement, placed))
        self.all += new
        return new

    def contender(self, placement: Placement | None, placed: Problem) -> Contender:
        """A contender with the bound of its stages; that of the problem's own stages comes with their first search."""
        request = self._request.model_copy(update={"problem": placed})
        contender = Contender(placement, incumbents_of(request, lambda frame: self.handle(contender, frame)))
        if placement:
            contender.incumbents.bound_ms = lower_bound(placed, self._request.objective)
        return contender

    def _take_warm_start(self, start: Programs, placement: Placement) -> None:
        """Make a warm start that names a placement that placement's first schedule."""
        try:
            placed = placement.apply(self._request.problem)
        except InputError as error:
            self.note(f"the warm start is no schedule of this problem: {error}")
            return
        contender = self.of(placement)
        if contender is None:
            contender = self.contender(placement, placed)
            self.all.append(contender)
        contender.start = start.model_copy(update={"placement": None})

    def handle(self, contender: Contender, frame: Frame) -> None:
        """Take a frame about one placement; called from any thread."""
        with self._handling:
            if isinstance(frame, Incumbent):
                ms = contender.incumbents.best_ms
                if is_better(ms, frame.method, self.best_ms, self._best_method):
                    self.best_ms, self._best_method = ms, frame.method
                    placed = frame.schedule.model_copy(update={"placement": contender.placement})
                    self._emit(frame.model_copy(update={"schedule": placed}))
            elif isinstance(frame, Bound):
                self._raise_bound()
            elif isinstance(frame, Infeasible):
                contender.infeasible = frame.reason
                self._raise_bound()
            elif isinstance(frame, Note):
                if frame.method:
                    name = contender.placement or "the stages as given"
                    self._emit(frame.model_copy(update={"text": f"{name}: {frame.text}"}))
                else:
                    self.note(frame.text, contender.placement)

    def _raise_bound(self) -> None:
        """Emit the bound that holds for all placements if it is higher than before.

        Each placement has its bound; all partitions of layers have one together.
        """
        each = [c for c in self.all if not self.has_layers or c is self.unplaced or c.is_bidirectional]
        bound_ms = min([self._partitions_ms, *(c.incumbents.bound_ms for c in each if not c.infeasible)])
        if bound_ms < NO_SCHEDULE_MS and raises(bound_ms, self.bound_ms):
            self.bound_ms = bound_ms
            self._emit(Bound(method="all placements", lower_bound_ms=bound_ms))

    def all_are_infeasible(self) -> bool:
        """Whether none of the placements fits; says so.

        That is a proof unless there are more partitions than can be tried.
        """
        if not all(contender.infeasible for contender in self.all):
            return False
        reason = no_partition_fits(self._request.problem) if self.has_layers else self.unplaced.infeasible
        if reason:
            self._emit(Infeasible(reason=reason))
        else:
            self.note(f"no partition was found that fits; with the stages as given {self.unplaced.infeasible}")
        return True

    def note(self, text: str, placement: Placement | None = None) -> None:
        """Emit a note once, with the placement that it is about first."""
        if text not in self._notes:
            self._notes.add(text)
            self.last_note = self.last_note if placement else text
            self._emit(Note(text=f"{placement}: {text}" if placement else text))
