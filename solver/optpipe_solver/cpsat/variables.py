"""The variables of a CP-SAT model: when each op starts, and which choices are open.

A model is of a window: what an incumbent does between two moments. What it did before stays as it is. What it does
after keeps its order, so all that matters of an op there is its tail, the longest path from its start to the end: the
op starts at `end - tail`. A window of all of the time is the whole problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ortools.sat.python import cp_model

from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import NONE
from optpipe.model.ops import COMPUTE, MARKS, Kind, Op
from optpipe.model.rules import EVICTED
from optpipe_solver.cpsat.grid import AT_PEER, Grid, GridSchedule, moves

F, B, W, C, O, A, V = Kind.F, Kind.B, Kind.W, Kind.C, Kind.O, Kind.A, Kind.V

# In ticks: a constant before the window, a variable in it, `end - tail` after it.
Moment: TypeAlias = cp_model.LinearExpr
# A literal where the model decides, True where the incumbent has decided, False where it cannot be.
Choice: TypeAlias = cp_model.LiteralT

# "ends" is for windows: the makespan, and device by device when the longest path that leaves the window there would
# end. A window that cannot end sooner then still makes room for others.
WindowObjective: TypeAlias = Objective | Literal["ends"]


@dataclass(frozen=True)
class Window:
    """The part of a schedule that is decided anew: ops that start in [begin, end) may move in time."""

    begin: int  # in ticks
    end: int
    devices: frozenset[int] | None = None  # where the order of ops and the choices are open, too; None: everywhere

    @classmethod
    def of_all(cls, incumbent: GridSchedule) -> Window:
        """The window that leaves nothing as it is."""
        return cls(0, incumbent.end + 1)

    def opens(self, device: int) -> bool:
        """Whether the order on a device is open."""
        return self.devices is None or device in self.devices


class WindowVariables:
    """The variables of a window's model, and the figures that its constraints need."""

    def __init__(self, grid: Grid, incumbent: GridSchedule, window: Window, objective: WindowObjective) -> None:
        self.grid, self.incumbent, self.window = grid, incumbent, window
        self.problem = grid.problem
        self.model = cp_model.CpModel()
        self._device: list[int] = self.problem.costs.device.tolist()
        self._peer: list[int] = self.problem.costs.peer[self._device].tolist()  # of each stage's device, or `NONE`
        # No moment is later, in ticks.
        self.latest = grid.serial if objective == "span" else incumbent.end
        # When the schedule ends.
        self.end = self.new_int(0, self.latest, incumbent.end, "end")
        # By device: what ends in the window there reaches the end by then. `end` itself but for the objective "ends".
        self.device_end = [
            self.new_int(0, self.latest, self.latest, f"end{d}") if objective == "ends" else self.end
            for d in range(len(self.problem.devices))
        ]
        # When each F, B, W, C, O, D, R, E, L, A and V starts. Parts are numbered as in the grid (`Grid.level_of_part`).
        self.start: dict[Op, Moment] = {}
        # When each F, B, W and C ends; B together with its W where both are one BW.
        self.compute_end: dict[Op, Moment] = {}
        # When O, R and L allocate their bytes; none of those that do so after the window.
        self.allocation: dict[Op, cp_model.IntVar] = {}
        self.allocates_in_window: set[Op] = set()
        # By stage, micro-batch and part: whether the part is offloaded or evicted. What is not in it is not.
        self.offloaded: dict[tuple[int, int, int], Choice] = {}
        # By stage and micro-batch: whether the activation is recomputed by each level, `EVICTED`, or neither (`NONE`):
        # one of them.
        self.level: dict[tuple[int, int], dict[int, Choice]] = {}
        # By stage and micro-batch: whether B and W are one BW. What is not in it is not.
        self.fused: dict[tuple[int, int], Choice] = {}
        # The ops that start in the window.
        self.free: set[Op] = set()
        # Stage and micro-batch of each forward whose ops the window may touch, and of its neighbours on the route.
        self.passes = list(self._touched())
        for s, j in self.passes:
            self._create_compute(s, j)
            self._create_transfers(s, j)
            self._create_recompute(s, j)
        # The objective "span", or `end` where that is not asked for.
        self.span = self.end
        if objective == "span":
            spans = []
            for d in range(len(self.problem.devices)):
                starts = {x: at for x, at in incumbent.start.items() if self.device(x) == d}
                last = max((at + self.duration(x) for x, at in starts.items()), default=0)
                spans.append(last - min(starts.values(), default=0))
            self.span = self.new_int(0, self.latest, max(spans), "span")

    def _touched(self) -> Iterator[tuple[int, int]]:
        """Yield each pass with an op in the window, or ops before and after it; and the passes next to it."""
        start, window = self.incumbent.start, self.window
        for j in range(self.problem.microbatches):
            route = self.problem.route(j)
            touched = [start[Op(F, s, j)] < window.end and start[Op(W, s, j)] >= window.begin for s in route]
            near = zip(route, touched, [False, *touched], [*touched[1:], False], strict=False)
            yield from ((s, j) for s, *neighbours in near if any(neighbours))

    # --- new variables

    def new_int(self, least: int, most: int, hint: int, name: str) -> cp_model.IntVar:
        """A variable with its value in the incumbent as a hint."""
        variable = self.model.new_int_var(least, most, name)
        self.model.add_hint(variable, hint)
        return variable

    def _new_choice(self, hint: bool, name: str) -> cp_model.IntVar:
        literal = self.model.new_bool_var(name)
        self.model.add_hint(literal, hint)
        return literal

    def _new_moment(self, hint: int, name: str) -> cp_model.IntVar:
        return self.new_int(self.window.begin, self.latest, hint, name)

    # --- the variables of one stage and micro-batch

    def _create_compute(self, s: int, j: int) -> None:
        """F, B and W. Where BW needs less memory, B and W may be one; B then ends with W."""
        b, w = Op(B, s, j), Op(W, s, j)
        for x in (Op(F, s, j), b, w):
            self._set_start(x)
            self.compute_end[x] = self.start[x] + self.duration(x)
        self._create_backward(s, j)
        fused = (s, j) in self.incumbent.fused
        if self.grid.needs_fused[s] and {b, w} <= self.free and self.window.opens(self._device[s]):
            self.fused[s, j] = self._new_choice(fused, f"{s}BW{j}")
            hint = self.incumbent.start[b] + self.duration(b) + fused * self.duration(w)
            self.compute_end[b] = self._new_moment(hint, f"{b}ends")
        elif fused:
            self.fused[s, j] = True
            self.compute_end[b] = self.compute_end[w]

    def _create_backward(self, s: int, j: int) -> None:
        """Nothing here: the backward of a forward is its B."""

    def _create_transfers(self, s: int, j: int) -> None:
        """O, D and R of each part: open where F and B are in the window, as then all is that may be between them. E, D,
        L, A and V likewise, if the window opens the peer."""
        b_start = self.incumbent.start[Op(B, s, j)]
        for p in self.grid.parts(s, j):
            o, d, r = (Op(kind, s, j, p) for kind in moves(p))
            is_open = self._relief_is_open(s, j) and (p != AT_PEER or self.window.opens(self._peer[s]))
            if is_open or o in self.incumbent.start:
                for x in (o, d, r, *((Op(A, s, j, p), Op(V, s, j, p)) if p == AT_PEER else ())):
                    self._set_start(x, b_start if is_open else None)
                offloaded = o in self.incumbent.start
                self.offloaded[s, j, p] = self._new_choice(offloaded, f"{s}leaves{j}.{p}") if is_open else True
                for x in (r, o):
                    if self.allocates_scarce(x):
                        self._set_allocation(x, b_start)

    def _create_recompute(self, s: int, j: int) -> None:
        """C by each level, open where O, D and R are; and whether the activation is evicted instead."""
        is_open, choices = self._relief_is_open(s, j), dict[int, Choice]()
        for k in range(len(self.problem.stages[s].all_levels)):
            c = Op(C, s, j, k)
            if is_open or c in self.incumbent.start:
                self._set_start(c, self.incumbent.start[Op(B, s, j)] if is_open else None)
                self.compute_end[c] = self.start[c] + self.duration(c)
                recomputed = c in self.incumbent.start
                choices[k] = self._new_choice(recomputed, f"{s}again{j}.{k}") if is_open else True
        hint = not any(Op(C, s, j, k) in self.incumbent.start for k in choices)
        if (evicted := self.offloaded.get((s, j, AT_PEER))) is not None:
            choices[EVICTED] = evicted
            hint &= Op(Kind.E, s, j, AT_PEER) not in self.incumbent.start
        if is_open and len(choices) == 1:
            (only,) = choices.values()
            choices = {NONE: ~only, **choices}
        elif is_open and choices:
            choices = {NONE: self._new_choice(hint, f"{s}kept{j}"), **choices}
            self.model.add_exactly_one(choices.values())
        self.level[s, j] = choices or {NONE: True}

    def _relief_is_open(self, s: int, j: int) -> bool:
        """Whether the window decides all that may be between F and B. Of what is evicted that is on the peer, too."""
        places = [self.incumbent.start.get(Op(kind, s, j, AT_PEER)) for kind in (A, V)]
        rooms = [at for at in places if at is not None]
        with_rooms = not rooms or (self.window.opens(self._peer[s]) and not any(map(self.side_of_window, rooms)))
        return {Op(F, s, j), Op(B, s, j)} <= self.free and self.window.opens(self._device[s]) and with_rooms

    def _set_start(self, x: Op, hint: int | None = None) -> None:
        """Gives x its start. With a hint it is free, for what the incumbent may lack."""
        incumbent = self.incumbent
        match 0 if hint is not None else self.side_of_window(self.incumbent_start(x)):
            case -1:
                self.start[x] = self.model.new_constant(incumbent.start[x])
            case 0:
                self.start[x] = self._new_moment(incumbent.start.get(x, hint or 0), f"{x}")
                self.free.add(x)
            case _:
                self.start[x] = self.end - incumbent.tail[x]

    def _set_allocation(self, x: Op, hint: int) -> None:
        """Gives x the moment at which its bytes are allocated, no later than it starts and not inside a compute op."""
        at = self.incumbent.allocation.get(x, hint)
        match self.side_of_window(at):
            case -1:
                self.allocation[x] = self.model.new_constant(at)
            case 0:
                self.allocation[x] = self._new_moment(at, f"{x}allocates")
                self.allocates_in_window.add(x)

    # --- what constraints ask

    def passes_on(self, device: int) -> list[tuple[int, int]]:
        """Stage and micro-batch of each forward of a device."""
        return [(s, j) for s, j in self.passes if self._device[s] == device]

    def side_of_window(self, at: int) -> int:
        """-1 before the window, 0 in it, 1 after it."""
        return (at >= self.window.end) - (at < self.window.begin)

    def incumbent_start(self, x: Op) -> int:
        """When x starts in the incumbent; the W of a BW with its B."""
        is_fused = x.kind == W and (x.stage, x.microbatch) in self.incumbent.fused
        return self.incumbent.start[x._replace(kind=B) if is_fused else x]

    def duration(self, x: Op) -> int:
        """Ticks of an op; of a BW, which stands for a B (`backward`), those of B."""
        return 0 if x.kind in MARKS else self.grid.duration(x._replace(kind=B) if x.kind == Kind.BW else x)

    def presence(self, x: Op) -> Choice:
        """Whether x takes place."""
        if x.kind == C:
            return self.level[x.stage, x.microbatch][x.part]
        return True if x.kind in COMPUTE else self.offloaded[x.stage, x.microbatch, x.part]

    def device(self, x: Op) -> int:
        """The device that x runs on."""
        return self.peer(x.stage) if x.kind in (A, V) else self._device[x.stage]

    def peer(self, stage: int) -> int:
        """The device to which a stage may evict."""
        return self._peer[stage]

    def backward(self, s: int, j: int) -> Op:
        """The backward of a stage's forward j: its B or, of anonymous micro-batches, the BW that stands for it."""
        return Op(B, s, j)

    def allocates_scarce(self, x: Op) -> bool:
        """Whether it matters between which compute ops a transfer allocates."""
        return x.kind in (Kind.R, Kind.L) or (x.kind == O and self.host_capacity(x.stage) is not None)

    def host_capacity(self, stage: int) -> int | None:
        """Grains of host memory of the stage's device; None where everything fits."""
        return self.grid.host_capacities[self._device[stage]]
