"""The problem itself on CP-SAT, whole or a window of it: every F, B, W, every offload, by the program's rule for memory.

The window is what an incumbent does between two moments. What it did before stays as it is; what it does after keeps its order, so
that of an op there all that matters is its `tail`, the longest path from its start to the end: it starts at end − tail. With all of
the time free this is the whole problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from optpipe.ops import COMPUTE, Kind, Op
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import Timed

F, B, W, O, R, D = Kind.F, Kind.B, Kind.W, Kind.O, Kind.R, Kind.D
Starts = dict[Op, int]  # ticks of F, B, W, O, R
_Moment = tuple[Any, int] | None  # when, and when in the incumbent; None after the window


@dataclass(frozen=True)
class Window:
    """The ops that start in [begin, end) ticks are free."""

    begin: int
    end: int


@dataclass(frozen=True)
class Answer:
    """The best starts found, None where there are none. No solution of the model ends before `bound`."""

    starts: Starts | None
    end: int
    bound: int
    proven: bool


class WindowModel:
    """`at` is each op's start (of D and, in `point`, of R: where memory changes): a number before the window, a variable in it, and
    end − tail after it. One method a constraint family."""

    def __init__(self, ticks: Ticks, incumbent: Timed, window: Window, in_order: bool) -> None:
        self.ticks, self.incumbent, self.window = ticks, incumbent, window
        self.model = cp_model.CpModel()
        self.route = ticks.problem.all_routes[0]
        self.microbatches = range(ticks.problem.microbatches)
        self.hints: dict[int, int] = {}
        self.end: Any = self._variable(0, incumbent.end, incumbent.end, "end")
        self.at: dict[Op, Any] = {}
        self.point: dict[Op, Any] = {}
        self.leaves: dict[tuple[int, int, int], Any] = {}
        self.inside: set[Op] = set()
        self.open: set[int] = set()  # the leaves that are to be decided
        for j in self.microbatches:
            for s in self.route:
                for kind in (F, B, W):
                    self._place(Op(kind, s, j))
                for p in range(len(ticks.activations[s].parts)):
                    self._leaving(s, j, p)
        self._data()
        for d in range(len(ticks.problem.devices)):
            self._one_at_a_time(d)
            self._memory(d)
        for kinds, users in ticks.streams:
            self._link(kinds, users)
        if in_order:
            self._in_order()

    # --- when

    def _variable(self, least: int, most: int, hint: int, name: str) -> Any:
        variable = self.model.new_int_var(least, most, name)
        self.model.add_hint(variable, hint)
        self.hints[variable.index] = hint
        return variable

    def _moment(self, hint: int, name: str) -> Any:
        return self._variable(self.window.begin, self.incumbent.end, hint, name)

    def _side(self, at: int) -> int:
        """-1 before the window, 0 in it, 1 after it."""
        return (at >= self.window.end) - (at < self.window.begin)

    def _place(self, x: Op) -> None:
        known = self.incumbent
        match self._side(known.start[x]):
            case -1:
                self.at[x] = known.start[x]
            case 0:
                self.at[x] = self._moment(known.start[x], f"{x}")
                self.inside.add(x)
            case _:
                self.at[x] = self.end - known.tail[x]

    def _leaving(self, s: int, j: int, p: int) -> None:
        """Whether a part leaves is decided where all of its way is in the window; where it may, O, D and R have a place."""
        known, way = self.incumbent, [Op(kind, s, j, p) for kind in (O, D, R)]
        f, b, reload = Op(F, s, j), Op(B, s, j), way[-1]
        if way[0] in known.start:
            for x in way:
                self._place(x)
            may_stay = {f, b, *way} <= self.inside and not self._side(known.point[reload])
            self.leaves[s, j, p] = self._leaves(1, f"{s}leaves{j}.{p}") if may_stay else self.model.new_constant(1)
            if self._side(known.point[reload]) <= 0:
                at = known.point[reload]
                self.point[reload] = at if self._side(at) else self._moment(at, f"{reload}allocates")
        elif {f, b} <= self.inside:
            self.leaves[s, j, p] = self._leaves(0, f"{s}leaves{j}.{p}")
            for x in way:
                self.at[x] = self._moment(known.start[b], f"{x}")
                self.inside.add(x)
            self.point[reload] = self._moment(known.start[b], f"{reload}allocates")

    def _leaves(self, hint: int, name: str) -> Any:
        leaves = self.model.new_bool_var(name)
        self.model.add_hint(leaves, hint)
        self.open.add(leaves.index)
        return leaves

    def _length(self, x: Op) -> int:
        return 0 if x.kind == D else self.ticks.lasts(x.kind, x.stage)

    def _there(self, x: Op) -> Any:
        return self.leaves[x.stage, x.microbatch, x.part]

    def _follow(self, x: Op, y: Op, delay: int = 0, *there: Any) -> None:
        """y starts when x has ended; both before or both after the window they do already."""
        known = self.incumbent.start
        if x in self.inside or y in self.inside or self._side(known[x]) != self._side(known[y]):
            self.model.add(self.at[y] >= self.at[x] + self._length(x) + delay).only_enforce_if(*there)

    def _data(self) -> None:
        """Forwards down the route, input gradients up, W after B; O after F, D after O, R after D, B after R."""
        for j in self.microbatches:
            for s, t in pairwise(self.route):
                self._follow(Op(F, s, j), Op(F, t, j), self.ticks.delay(s, t))
                self._follow(Op(B, t, j), Op(B, s, j), self.ticks.delay(s, t))
            for s in self.route:
                self._follow(Op(F, s, j), Op(B, s, j))
                self._follow(Op(B, s, j), Op(W, s, j))
                self.model.add(self.end >= self.at[Op(W, s, j)] + self._length(Op(W, s, j)))
        for (s, j, p), leaves in self.leaves.items():
            o, d, r = (Op(kind, s, j, p) for kind in (O, D, R))
            self._follow(Op(F, s, j), o, 0, leaves)
            self._follow(o, d, 0, leaves)
            self._follow(r, Op(B, s, j), 0, leaves)
            if r in self.point:
                self.model.add(self.point[r] >= self.at[d]).only_enforce_if(leaves)
                self.model.add(self.at[r] >= self.point[r]).only_enforce_if(leaves)
            else:
                self._follow(d, r)

    # --- one at a time

    def _on(self, device: int) -> list[int]:
        return [s for s in self.route if self.ticks.problem.stages[s].device == device]

    def _one_at_a_time(self, device: int) -> None:
        """Compute ops one after the other, no drop or reload point inside one, and all between what is before and what is after."""
        model, own, known = self.model, self._on(device), self.incumbent
        free = [x for x in self.inside if x.kind in COMPUTE and x.stage in own]
        points = [(self.at[x], self._there(x)) for x in self.inside if x.kind == D and x.stage in own]
        points += [(at, self._there(x)) for x, at in self.point.items() if x.stage in own and not isinstance(at, int)]
        intervals = [model.new_fixed_size_interval_var(self.at[x], self._length(x), f"{x}") for x in free]
        intervals += [model.new_optional_fixed_size_interval_var(at, 0, there, "point") for at, there in points]
        model.add_no_overlap(intervals)
        stream = [(known.start[x], x) for x in known.start if x.stage in own and x.kind in (*COMPUTE, D)]
        done, tail = self._outside(stream + [(at, x) for x, at in known.point.items() if x.stage in own and self._side(at) > 0])
        for x in free:
            self._between(done, tail, self.at[x], self._length(x))
        for at, there in points:
            self._between(done, tail, at, 0, there)

    def _link(self, kinds: tuple[Kind, ...], users: list[int]) -> None:
        """Transfers one at a time."""
        known = self.incumbent
        free = [x for x in self.inside if x.kind in kinds and x.stage in users]
        self.model.add_no_overlap(
            [self.model.new_optional_fixed_size_interval_var(self.at[x], self._length(x), self._there(x), f"{x}") for x in free]
        )
        done, tail = self._outside((at, x) for x, at in known.start.items() if x.kind in kinds and x.stage in users)
        for x in free:
            self._between(done, tail, self.at[x], self._length(x), self._there(x))

    def _outside(self, events: Iterable[tuple[int, Op]]) -> tuple[int, int]:
        """Of ops that come one after the other: the last end before the window, the longest tail after it."""
        known, done, tail = self.incumbent, 0, 0
        for at, x in events:
            match self._side(at):
                case -1:
                    done = max(done, at + self._length(x))
                case 1:
                    tail = max(tail, known.tail[x])
        self.model.add(self.end >= done + tail)
        return done, tail

    def _between(self, done: int, tail: int, at: Any, length: int, *there: Any) -> None:
        if done > self.window.begin:
            self.model.add(at >= done).only_enforce_if(*there)
        self.model.add(at + length <= self.end - tail).only_enforce_if(*there)

    # --- memory

    def _memory(self, device: int) -> None:
        """What is alive at one time fits: a stage's activation from F to the end of B, the part that W needs from there to its end."""
        self.alive: list[tuple[Any, int]] = []  # intervals and their sizes
        for s in self._on(device):
            need = self.ticks.activations[s]
            for j in self.microbatches:
                f, b, w = Op(F, s, j), Op(B, s, j), Op(W, s, j)
                forward, backward = self._when(f), self._when(b)
                gradient, gone = self._when(b, self._length(b)), self._when(w, self._length(w))
                may_leave = [p for p in range(len(need.parts)) if (s, j, p) in self.leaves]
                self._lives(forward, gradient, need.whole - sum(need.parts[p] for p in may_leave))
                self._lives(backward, gradient, max(0, need.kept - need.whole))
                self._lives(gradient, gone, need.kept)
                for p in may_leave:
                    leaves, reload = self.leaves[s, j, p], Op(R, s, j, p)
                    self._lives(forward, self._when(Op(D, s, j, p)), need.parts[p], leaves)
                    self._lives(self._when_allocated(reload), gradient, need.parts[p], leaves)
                    if leaves.index in self.open:
                        self._lives(forward, gradient, need.parts[p], ~leaves)
        self.model.add_cumulative(*zip(*self.alive, strict=True) if self.alive else ((), ()), self.ticks.capacity(device))

    def _when(self, x: Op, after: int = 0) -> _Moment:
        if x in self.inside:
            return self.at[x] + after, self.hints[self.at[x].index] + after
        at = self.incumbent.start[x]
        return None if self._side(at) > 0 else (max(at + after, self.window.begin), max(at + after, self.window.begin))

    def _when_allocated(self, reload: Op) -> _Moment:
        if reload not in self.point:
            return None
        at = self.point[reload]
        return (self.window.begin, self.window.begin) if isinstance(at, int) else (at, self.hints[at.index])

    def _lives(self, begin: _Moment, end: _Moment, size: int, *there: Any) -> None:
        """`size` grains are alive between two moments; None is after the window."""
        if size == 0 or begin is None:
            return
        (since, known), (until, known_end) = begin, end or (self.incumbent.end, self.incumbent.end)
        lasts = self._variable(0, self.incumbent.end, max(0, known_end - known), "lasts")
        literal = there[0] if there else True
        self.alive.append((self.model.new_optional_interval_var(since, lasts, until, literal, "alive"), size))

    # --- symmetry

    def _in_order(self) -> None:
        """Micro-batches pass every stage in the order of their numbers, where those in the window do already."""
        known = self.incumbent.start
        for kind in (F, B, W):
            for s in self.route:
                ops = [x for j in self.microbatches if (x := Op(kind, s, j)) in self.inside]
                if all(known[x] <= known[y] for x, y in pairwise(ops)):
                    for x, y in pairwise(ops):
                        self.model.add(self.at[y] >= self.at[x] + self._length(x))

    # --- the answer

    def solve(self, time_limit_s: float, threads: int, seed: int, on_better: Callable[[Starts], None] | None = None) -> Answer:
        """Minimizes the end. `on_better` sees each solution on the way."""
        self.model.minimize(self.end)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.num_workers = threads
        solver.parameters.random_seed = seed
        status = solver.solve(self.model, _Watch(self, on_better) if on_better else None)
        bound = round(solver.best_objective_bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Answer(None, self.incumbent.end, bound, status == cp_model.INFEASIBLE)
        return Answer(self.starts(solver.value), solver.value(self.end), bound, status == cp_model.OPTIMAL)

    def starts(self, value: Callable[[Any], int]) -> Starts:
        """Of all ops but drops, which `lift` derives."""
        return {x: value(at) for x, at in self.at.items() if x.kind != D and (x.kind in COMPUTE or value(self._there(x)))}


class _Watch(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    def __init__(self, model: WindowModel, on_better: Callable[[Starts], None]) -> None:
        super().__init__()
        self._model, self._on_better = model, on_better

    def on_solution_callback(self) -> None:
        self._on_better(self._model.starts(self.value))
