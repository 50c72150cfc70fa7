"""The problem itself on CP-SAT, whole or a window of it: every choice that it leaves but pairs, by the program's rule
for memory.

The window is what an incumbent does between two moments. What it did before stays as it is; what it does after keeps
its order, so that of an op there all that matters is its `tail`, the longest path from its start to the end: it starts
at end − tail. With all of the time free this is the whole problem. Here are the ops, their choices and what they wait
for; `streams`, `memory`, `symmetry` and `span` hold one family of constraints each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, Literal

from ortools.sat.python import cp_model

from optpipe.evaluate.objective import Objective
from optpipe.model.ops import COMPUTE, Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat import memory, ranks, span, streams, symmetry
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import Timed

F, B, W, C, O, R, D, BW = Kind.F, Kind.B, Kind.W, Kind.C, Kind.O, Kind.R, Kind.D, Kind.BW
Starts = dict[Op, int]  # ticks of F, B, W, BW, C, O, R
Order = Literal[
    "stages", "entry", "ranks"
]  # micro-batches keep theirs in all stages, or where they enter, or are nameless (`ranks`)


@dataclass(frozen=True)
class Window:
    """The ops that start in [begin, end) ticks are free: in time, and on these devices in order and choices, too; None
    is all devices."""

    begin: int
    end: int
    devices: frozenset[int] | None = None

    def frees(self, device: int) -> bool:
        return self.devices is None or device in self.devices


def everything(known: Timed) -> Window:
    return Window(0, known.end + 1)


@dataclass(frozen=True)
class Answer:
    """The best starts found, None where there are none, and their value by the model. No solution of the model is below
    `bound`."""

    starts: Starts | None
    end: int
    bound: int
    proven: bool
    used_s: float  # of the budget


def order_is_free(problem: Problem, objective: Objective | Literal["ends"]) -> bool:
    """Whether micro-batches that keep their order in all stages lose nothing. They are alike where none may leave or be
    recomputed: else a later one can be worth an overtaking. The span is worth one, too: a device that lets the second
    overtake the first starts later."""
    return objective == "makespan" and not any(stage.can_offload or stage.can_recompute for stage in problem.stages)


class WindowModel:
    """`at` is each op's start (of D and, in `point`, of O and R: where memory changes): a number before the window, a
    variable in it, and end − tail after it. A choice is a literal, or True where the incumbent has made it outside the
    window; one not there is not open.

    The objective `span` is meant for all of the problem: what is after a window is not free to move on its own. `ends`
    is meant for windows: to the end it adds, device by device, when the longest path that leaves the window there would
    end. So a window that cannot end sooner still makes room for others.
    """

    def __init__(
        self,
        ticks: Ticks,
        incumbent: Timed,
        window: Window,
        order: Order,
        objective: Objective | Literal["ends"] = "makespan",
    ) -> None:
        self.ticks, self.incumbent, self.window, self.order, self.minimizes = ticks, incumbent, window, order, objective
        self.problem = ticks.problem
        self._device: list[int] = ticks.problem.costs.device.tolist()
        self.model = cp_model.CpModel()
        self.hints: dict[int, int] = {}
        self.latest = ticks.serial if objective == "span" else incumbent.end
        self.end: Any = self.variable(0, self.latest, incumbent.end, "end")
        self.ends = [self._end_by(d) if objective == "ends" else self.end for d in range(len(self.problem.devices))]
        self.at: dict[Op, Any] = {}
        self.ended: dict[Op, Any] = {}  # of F, B, W, C
        self.point: dict[Op, Any] = {}
        self.leaves: dict[tuple[int, int, int], Any] = {}  # (stage, micro-batch, part): is it offloaded?
        self.again: dict[tuple[int, int], Any] = {}  # (stage, micro-batch): is it recomputed?
        self.fused: dict[tuple[int, int], Any] = {}  # (stage, micro-batch): is the backward a BW?
        self.inside: set[Op] = set()
        self.passes = [(s, j) for j in range(self.problem.microbatches) for s in self.problem.route(j)]
        for s, j in self.passes:
            self._compute(s, j)
            self._relief(s, j)
        self._data()
        streams.one_at_a_time(self)
        memory.fits(self)
        symmetry.breaks(self)
        if order == "ranks":
            ranks.relate(self)
        self.objective = (
            span.longest(self) if objective == "span" else self.end + (sum(self.ends) if objective == "ends" else 0)
        )

    @property
    def is_bound(self) -> bool:
        """Whether its bound holds for every schedule of the problem: all is free, nothing is rounded, or of a makespan
        nothing but down, pairs are none, and if micro-batches keep their order in all stages, that loses nothing."""
        ticks, known = self.ticks, self.incumbent
        free = self.window.begin == 0 and self.window.end > known.end and self.window.devices is None
        any_order = self.order != "stages" or order_is_free(self.problem, self.minimizes)
        no_longer = ticks.lossless or (ticks.down and self.minimizes == "makespan")
        return free and no_longer and self.problem.overlap_factor is None and any_order

    # --- when

    def variable(self, least: int, most: int, hint: int, name: str) -> Any:
        variable = self.model.new_int_var(least, most, name)
        self.model.add_hint(variable, hint)
        self.hints[variable.index] = hint
        return variable

    def _choice(self, hint: bool, name: str) -> Any:
        literal = self.model.new_bool_var(name)
        self.model.add_hint(literal, hint)
        return literal

    def _end_by(self, device: int) -> Any:
        by = self.variable(0, self.latest, self.latest, f"end{device}")
        self.model.add(self.end >= by)
        return by

    def device(self, x: Op) -> int:
        return self._device[x.stage]

    def _moment(self, hint: int, name: str) -> Any:
        return self.variable(self.window.begin, self.latest, hint, name)

    def side(self, at: int) -> int:
        """-1 before the window, 0 in it, 1 after it."""
        return (at >= self.window.end) - (at < self.window.begin)

    def begins(self, x: Op) -> int:
        """When x starts in the incumbent: the W of a BW with its B."""
        return self.incumbent.start[
            x._replace(kind=B) if x.kind == W and (x.stage, x.microbatch) in self.incumbent.fused else x
        ]

    def _place(self, x: Op, hint: int | None = None) -> None:
        """Gives x its time; free where there is a hint, for what the incumbent may lack."""
        known = self.incumbent
        match 0 if hint is not None else self.side(self.begins(x)):
            case -1:
                self.at[x] = known.start[x]
            case 0:
                self.at[x] = self._moment(known.start.get(x, hint or 0), f"{x}")
                self.inside.add(x)
            case _:
                self.at[x] = self.end - known.tail[x]

    def _compute(self, s: int, j: int) -> None:
        """F, B and W, which follows B; where BW needs less memory, B and W may be one, and B ends with it."""
        f, b, w = (Op(kind, s, j) for kind in (F, B, W))
        for x in (f, b, w):
            self._place(x)
            self.ended[x] = self.at[x] + self.length(x)
        if self.order == "ranks":
            ranks.place(self, s, j)
        fused = (s, j) in self.incumbent.fused
        if self.ticks.may_fuse(s) and {b, w} <= self.inside and self.window.frees(self.device(b)):
            hint = self.incumbent.start[b] + self.length(b) + fused * self.length(w)
            literal = self.fused[s, j] = self._choice(fused, f"{s}BW{j}")
            self.ended[b] = self._moment(hint, f"{b}ends")
            self.model.add(self.at[w] == self.at[b] + self.length(b)).only_enforce_if(literal)
            self.model.add(self.ended[b] == self.ended[w]).only_enforce_if(literal)
            self.model.add(self.ended[b] == self.at[b] + self.length(b)).only_enforce_if(~literal)
            self.model.add(self.ended[b] <= self.at[w]).only_enforce_if(~literal)
        elif fused:
            self.fused[s, j] = True
            self.ended[b] = self.ended[w]
            if b in self.inside:
                self.model.add(self.at[w] == self.at[b] + self.length(b))
        else:
            self._follow(b, w)

    def _relief(self, s: int, j: int) -> None:
        """An activation stays, or parts of it leave, or it is recomputed: decided where its forward and its backward
        are in the window, and with them all that may be between."""
        known, needed = self.incumbent, self.incumbent.start[Op(B, s, j)]
        free = {Op(F, s, j), Op(B, s, j)} <= self.inside and self.window.frees(self.problem.stages[s].device)
        for p in range(len(self.ticks.activations[s].parts)):
            o, d, r = (Op(kind, s, j, p) for kind in (O, D, R))
            if free or o in known.start:
                for x in (o, d, r):
                    self._place(x, needed if free else None)
                self.leaves[s, j, p] = self._choice(o in known.start, f"{s}leaves{j}.{p}") if free else True
                self._allocates(r, needed)
                if self.host_capacity(s) is not None:
                    self._allocates(o, needed)
        c = Op(C, s, j)
        if c in known.start or (free and self.problem.stages[s].can_recompute):
            self._place(c, needed if free else None)
            self.ended[c] = self.at[c] + self.length(c)
            self.again[s, j] = self._choice(c in known.start, f"{s}again{j}") if free else True
            for p in range(len(self.ticks.activations[s].parts)):
                if (s, j, p) in self.leaves:
                    self.model.add_implication(self.leaves[s, j, p], ~self.again[s, j])

    def _allocates(self, x: Op, hint: int) -> None:
        """Where a transfer's bytes are allocated: no later than it starts, and not inside a compute op."""
        at = self.incumbent.point.get(x, hint)
        if self.side(at) <= 0:
            self.point[x] = at if self.side(at) else self._moment(at, f"{x}allocates")

    def length(self, x: Op) -> int:
        return 0 if x.kind == D else self.ticks.lasts(B if x.kind == BW else x.kind, x.stage)  # BW: see `backward`

    def there(self, x: Op) -> Any:
        """Whether x takes place: a literal, or True."""
        if x.kind == C:
            return self.again[x.stage, x.microbatch]
        return True if x.kind in COMPUTE else self.leaves[x.stage, x.microbatch, x.part]

    def backward(self, s: int, j: int) -> Op:
        """That of the activation of a stage's forward j: a B, or what `ranks` put in its place."""
        return Op(BW if self.order == "ranks" else B, s, j)

    def host_capacity(self, stage: int) -> int | None:
        return self.ticks.host_capacities[self._device[stage]]

    # --- what waits for what

    def _follow(self, x: Op, y: Op, delay: int = 0, there: Any = True) -> None:
        """y starts when x has ended; both before or both after the window they do already."""
        if x in self.inside or y in self.inside or self.side(self.begins(x)) != self.side(self.begins(y)):
            ended = self.ended[x] if x in self.ended else self.at[x] + self.length(x)
            leaves_window = x in self.inside and y not in self.inside and self.side(self.begins(y)) > 0
            at = self.ends[self.device(x)] - self.incumbent.tail[y] if leaves_window else self.at[y]
            self.model.add(at >= ended + delay).only_enforce_if(there)

    def _data(self) -> None:
        """Forwards down the route, input gradients up; O and C after F, D after O, R after D, B after R and C."""
        for j in range(self.problem.microbatches):
            for s, t in pairwise(self.problem.route(j)):
                self._follow(Op(F, s, j), Op(F, t, j), self.ticks.delay(s, t))
                if self.order != "ranks":
                    self._follow(Op(B, t, j), Op(B, s, j), self.ticks.delay(s, t))
        for s, j in self.passes:
            self._follow(Op(F, s, j), self.backward(s, j))
            w = Op(W, s, j)
            self.model.add((self.ends[self.device(w)] if w in self.inside else self.end) >= self.ended[w])
        for (s, j), again in self.again.items():
            self._follow(Op(F, s, j), Op(C, s, j), 0, again)
            self._follow(Op(C, s, j), self.backward(s, j), 0, again)
        for (s, j, p), leaves in self.leaves.items():
            o, d, r = (Op(kind, s, j, p) for kind in (O, D, R))
            self._follow(Op(F, s, j), o, 0, leaves)
            self._follow(o, d, 0, leaves)
            self._follow(r, self.backward(s, j), 0, leaves)
            if o in self.point:
                self.model.add(self.point[o] >= self.ended[Op(F, s, j)]).only_enforce_if(leaves)
                self.model.add(self.at[o] >= self.point[o]).only_enforce_if(leaves)
            if r in self.point:
                self.model.add(self.point[r] >= self.at[d]).only_enforce_if(leaves)
                self.model.add(self.at[r] >= self.point[r]).only_enforce_if(leaves)
            else:
                self._follow(d, r)

    # --- the answer

    def solve(
        self,
        budget: Budget,
        seed: int,
        seconds: float = inf,
        any_will_do: bool = False,
        on_better: Callable[[Starts], None] | None = None,
        on_bound: Callable[[int], None] | None = None,
    ) -> Answer:
        """Minimizes the objective, for so many seconds of the budget at most, or finds a first solution. `on_better`
        sees each one on the way, `on_bound` each bound, perhaps from another thread."""
        self.model.minimize(self.objective)
        solver = cp_model.CpSolver()
        budget.allot(solver, seconds)
        solver.parameters.random_seed = seed
        solver.parameters.stop_after_first_solution = any_will_do
        solver.parameters.linearization_level = 0  # with a relaxation by lines it takes several times as long
        solver.parameters.use_strong_propagation_in_disjunctive = self.order == "ranks"  # refutes sooner, finds later
        if on_bound:
            solver.best_bound_callback = lambda bound: on_bound(round(bound))
        status = solver.solve(self.model, _Watch(self, on_better) if on_better else None)
        used_s = budget.ran(solver)
        bound = round(solver.best_objective_bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Answer(None, self.incumbent.end, bound, status == cp_model.INFEASIBLE, used_s)
        return Answer(
            self.starts(solver.value), solver.value(self.objective), bound, status == cp_model.OPTIMAL, used_s
        )

    def starts(self, value: Callable[[Any], int]) -> Starts:
        """Of all ops but drops, which `lift` derives."""

        def holds(choice: Any) -> bool:
            return choice is True or bool(value(choice))

        starts = {x: int(value(at)) for x, at in self.at.items() if x.kind != D and holds(self.there(x))}
        for (s, j), fused in self.fused.items():
            if holds(fused):
                starts[Op(BW, s, j)] = starts.pop(Op(B, s, j))
                del starts[Op(W, s, j)]
        return starts


class _Watch(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    def __init__(self, model: WindowModel, on_better: Callable[[Starts], None]) -> None:
        super().__init__()
        self._model, self._on_better = model, on_better

    def on_solution_callback(self) -> None:
        self._on_better(self._model.starts(self.value))
