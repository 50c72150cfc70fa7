"""The CP-SAT model of a window of a schedule, or of the whole problem: every choice but pairs, and the program's rule
for memory. Its relaxation for bounds is in `anonymous`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

from ortools.sat.python import cp_model

from optpipe.model.arrays import NONE
from optpipe.model.ops import COMPUTE, MARKS, TRANSFERS, Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.clock import Clock
from optpipe_solver.cpsat.grid import AT_PEER, Grid, GridSchedule, moves
from optpipe_solver.cpsat.limits import limit_device_memory, limit_host_memory, limit_spans
from optpipe_solver.cpsat.variables import Choice, Moment, Window, WindowObjective, WindowVariables

F, B, W, BW, C, R, A, V = Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.R, Kind.A, Kind.V
Starts = dict[Op, int]  # ticks of F, B, W, BW, C, O, R, E, L
COUNTED_PER_S = 0.25  # CP-SAT's deterministic seconds in one second of a quiet core


@dataclass(frozen=True)
class Answer:
    """What a search ended with."""

    starts: Starts | None  # the best, None where there are none
    value: int  # its objective, in ticks
    bound: int  # no solution of the model has a lower objective
    proven: bool  # whether the solution is optimal or, without starts, whether there is none
    used_s: float  # seconds of the clock that the search took


class BusyTime(NamedTuple):
    """A time that a stream is busy."""

    start: Moment
    length: int  # 0 for a point at which memory changes
    presence: Choice
    end_by: cp_model.IntVar  # the device's end


def order_is_free(problem: Problem, objective: WindowObjective) -> bool:
    """Whether nothing is lost if micro-batches keep their order in all stages.

    Equal ones, that is. Where none may leave or be recomputed nothing distinguishes them; otherwise it can pay that a
    later one overtakes. The span is worth an overtaking, too: a device that lets the second overtake the first starts
    later.
    """
    may_leave = (stage.can_offload or stage.can_recompute or stage.can_evict for stage in problem.stages)
    return objective == "makespan" and not any(may_leave)


class WindowModel:
    """The model of a window of an incumbent. Its variables, constraints and objective; `solve` searches.

    With `in_order` equal micro-batches keep their order in all stages, not only where they enter. The objective "span"
    is meant for a window of everything, as what is after a window cannot move on its own.
    """

    _variables: type[WindowVariables] = WindowVariables
    _has_points = True  # of no length, at which memory changes

    def __init__(
        self,
        grid: Grid,
        incumbent: GridSchedule,
        window: Window,
        in_order: bool = True,
        objective: WindowObjective = "makespan",
    ) -> None:
        self.variables = v = self._variables(grid, incumbent, window, objective)
        self.model, self.end, self._minimizes, self._in_order = v.model, v.end, objective, in_order
        self._order_gradients()
        self._wait_for_messages()
        self._order_recompute()
        self._order_transfers()
        self._end_after_everything()
        self._no_overlap_on_devices()
        self._no_overlap_on_links()
        limit_device_memory(v)
        limit_host_memory(v)
        self._order_equal_microbatches()
        self._order_equal_parts()
        self._fix_order_of_entry()
        self._relate_visits()
        if objective == "span":
            limit_spans(v)
        self.objective = v.end + sum(v.device_end) if objective == "ends" else v.span

    @property
    def is_bound(self) -> bool:
        """Whether a bound of the model holds for every schedule of the problem.

        It does if everything is free, if there can be no pairs, if no order is fixed that a schedule may gain by
        breaking, and if nothing is rounded or, for a makespan, nothing is rounded up.
        """
        v = self.variables
        any_order = not self._in_order or order_is_free(v.problem, self._minimizes)
        no_longer = v.grid.lossless or (v.grid.down and self._minimizes == "makespan")
        return v.window == Window.of_all(v.incumbent) and no_longer and v.problem.overlap_factor is None and any_order

    def solve(
        self,
        clock: Clock,
        threads: int,
        seed: int,
        seconds: float = inf,
        any_will_do: bool = False,
        on_better: Callable[[Starts], None] | None = None,
        on_bound: Callable[[int], None] | None = None,
    ) -> Answer:
        """Minimizes the objective, in so many seconds at most of those left, or ends with the first solution where
        `any_will_do`. `on_better` gets each better solution on the way, `on_bound` each better bound, perhaps from
        another thread."""
        self.model.minimize(self.objective)
        solver = cp_model.CpSolver()
        seconds = min(seconds, clock.left_s)
        solver.parameters.num_workers = threads
        solver.parameters.max_time_in_seconds = clock.wall_left_s if clock.counts else seconds
        if clock.counts:
            solver.parameters.max_deterministic_time = COUNTED_PER_S * seconds
        solver.parameters.random_seed = seed
        solver.parameters.stop_after_first_solution = any_will_do
        # With a linear relaxation the search takes several times as long, with probing a quarter longer.
        solver.parameters.linearization_level = 0
        solver.parameters.cp_model_probing_level = 0
        # With this CP-SAT 9.15 refutes solutions in which a point touches an op: some windows gain less, nothing else.
        whole = self.variables.window == Window.of_all(self.variables.incumbent)
        solver.parameters.use_strong_propagation_in_disjunctive = not (self._has_points and whole)
        if on_bound:
            solver.best_bound_callback = lambda bound: on_bound(round(bound))
        status = solver.solve(self.model, _OnSolution(self._starts, on_better) if on_better else None)
        used_s = float(solver.response_proto.deterministic_time / COUNTED_PER_S if clock.counts else solver.wall_time)
        clock.spend(used_s)
        bound = round(solver.best_objective_bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Answer(None, self.variables.incumbent.end, bound, status == cp_model.INFEASIBLE, used_s)
        value = solver.value(self.objective)
        return Answer(self._starts(solver.value), value, bound, status == cp_model.OPTIMAL, used_s)

    def _starts(self, value: Callable[[Moment | Choice], int]) -> Starts:
        """The starts of a solution, without drops and rooms on peers, which `lift` derives."""
        v, started, tail = self.variables, self.variables.incumbent.start, self.variables.incumbent.tail
        end, fused = int(value(v.end)), [at for at, choice in v.fused.items() if value(choice)]
        starts = {x: int(value(at)) for x, at in v.start.items() if x.kind not in MARKS and value(v.presence(x))}
        for x, at in started.items():  # of the passes that are not in the model
            if x not in v.start and x.kind not in MARKS:
                starts[x] = at if at < v.window.begin else end - tail[x]
        for s, j in (*fused, *(v.incumbent.fused - v.fused.keys())):
            starts[Op(BW, s, j)] = starts.pop(Op(B, s, j))
            del starts[Op(W, s, j)]
        parts = [stage.offload_parts for stage in v.problem.stages]
        return {
            x._replace(part=max(0, x.part) % parts[x.stage]) if x.kind in TRANSFERS and x.part else x: at
            for x, at in starts.items()
        }

    # --- what must have ended before an op starts

    def _order_gradients(self) -> None:
        """W follows B (Eq. 8); at once where both are one BW, which ends as one."""
        v = self.variables
        for s, j in v.passes:
            b, w = Op(B, s, j), Op(W, s, j)
            fused = v.fused.get((s, j), False)
            if fused is False:
                self._start_after(b, w)
            elif fused is True:
                if b in v.free:
                    v.model.add(v.start[w] == v.start[b] + v.duration(b))
            else:
                v.model.add(v.start[w] == v.start[b] + v.duration(b)).only_enforce_if(fused)
                v.model.add(v.compute_end[b] == v.compute_end[w]).only_enforce_if(fused)
                v.model.add(v.compute_end[b] == v.start[b] + v.duration(b)).only_enforce_if(~fused)
                v.model.add(v.compute_end[b] <= v.start[w]).only_enforce_if(~fused)

    def _wait_for_messages(self) -> None:
        """Forwards wait for the stage before, input gradients for the stage after, and for the message (Eq. 5, 6)."""
        v, costs = self.variables, self.variables.problem.costs
        for (s, i), (t, j) in pairwise(v.passes):
            if i == j and costs.before[costs.route[j], t] == s:
                self._start_after(Op(F, s, j), Op(F, t, j), v.grid.forward_delay(t, j))
                self._start_after(Op(B, t, j), Op(B, s, j), v.grid.gradient_delay(s, j))

    def _order_recompute(self) -> None:
        """F, C, backward, and C after the reloads of its checkpoint; nothing else of it is offloaded."""
        v = self.variables
        for s, j in v.passes:
            self._start_after(Op(F, s, j), v.backward(s, j))
        for (s, j), choices in v.level.items():
            for level, recomputed in choices.items():
                if level >= 0:
                    self._start_after(Op(F, s, j), Op(C, s, j, level), 0, recomputed)
                    self._start_after(Op(C, s, j, level), v.backward(s, j), 0, recomputed)
            for p in v.grid.parts(s, j) if choices.keys() != {NONE} else ():
                if (s, j, p) in v.offloaded:
                    level = v.grid.level_of_part(s, p)
                    if (is_possible := choices.get(level, False)) is not True:
                        v.model.add_implication(v.offloaded[s, j, p], is_possible)
                    if level >= 0:
                        self._start_after(Op(R, s, j, p), Op(C, s, j, level), 0, v.offloaded[s, j, p])

    def _order_transfers(self) -> None:
        """F, O, D, R, backward: each follows the one before; likewise A or F, E, D, L, V or backward. O, R and L start
        when they have allocated, or later."""
        v = self.variables
        for (s, j, p), offloaded in v.offloaded.items():
            o, d, r = (Op(kind, s, j, p) for kind in moves(p))
            if p == AT_PEER:
                self._start_after(Op(A, s, j, p), o, 0, offloaded)
                self._start_after(r, Op(V, s, j, p), 0, offloaded)
            self._start_after(Op(F, s, j), o, 0, offloaded)
            self._start_after(o, d, 0, offloaded)
            self._start_after(r, v.backward(s, j), 0, offloaded)
            if o in v.allocation:
                v.model.add(v.allocation[o] >= v.compute_end[Op(F, s, j)]).only_enforce_if(offloaded)
                v.model.add(v.start[o] >= v.allocation[o]).only_enforce_if(offloaded)
            if r in v.allocation:
                v.model.add(v.allocation[r] >= v.start[d]).only_enforce_if(offloaded)
                v.model.add(v.start[r] >= v.allocation[r]).only_enforce_if(offloaded)
            else:
                self._start_after(d, r)

    def _end_after_everything(self) -> None:
        """The schedule ends when everything has (Eq. 4): each device's end is after its last W, and its delivery."""
        v = self.variables
        for device_end in v.device_end:
            if device_end is not v.end:
                v.model.add(v.end >= device_end)
        started, delivery = v.incumbent.start, v.incumbent.delivery
        for s, j in v.passes:
            if (w := Op(W, s, j)) in v.free:
                v.model.add(v.device_end[v.device(w)] >= v.compute_end[w] + delivery[v.device(w)])
        ended = [w for w in started if w.kind == W and v.side_of_window(v.incumbent_start(w)) < 0]
        v.model.add(v.end >= max((started[w] + v.duration(w) + delivery[v.device(w)] for w in ended), default=0))

    def _start_after(self, x: Op, y: Op, delay: int = 0, presence: Choice = True) -> None:
        """y starts `delay` after x has ended, or later. Two ops before the window, or two after it, do so already."""
        v = self.variables
        x_side, y_side = (0 if z in v.free else v.side_of_window(v.incumbent_start(z)) for z in (x, y))
        if x_side == y_side != 0:
            return
        end = v.compute_end[x] if x in v.compute_end else v.start[x] + v.duration(x)
        leaves_window = x_side == 0 and y_side > 0
        start = v.device_end[v.device(x)] - v.incumbent.tail[y] if leaves_window else v.start[y]
        v.model.add(start >= end + delay).only_enforce_if(presence)

    # --- one at a time

    def _no_overlap_on_devices(self) -> None:
        """No two ops of a device's compute stream overlap (Eq. 7).

        Drops, rooms on the peer, and the moments at which transfers allocate, are points on the compute stream: none
        lies inside an op.
        """
        v = self.variables
        started, allocated, devices = v.incumbent.start, v.incumbent.allocation, len(v.problem.devices)
        halves = {Op(W, s, j) for (s, j), fused in v.fused.items() if fused is True}  # of a BW
        groups = (_grouped(ops, v.device, devices) for ops in (started, v.free, allocated, v.allocation))
        for d, (ops, free, allocating, open_points) in enumerate(zip(*groups, strict=True)):
            points = {x: v.allocation[x] for x in open_points if x in v.allocates_in_window}
            busy = [each for x in free for each in self._compute_times(x)]
            busy += [BusyTime(at, 0, v.presence(x), v.device_end[d]) for x, at in points.items()]
            stream = [(v.incumbent_start(x), x) for x in ops if x.kind in (*COMPUTE, *MARKS)]
            later = [(at, x) for x in allocating if v.side_of_window(at := allocated[x]) > 0 and v.allocates_scarce(x)]
            self._stay_within_surroundings(busy, [*stream, *later])
            if v.window.opens(d):
                self._add_no_overlap(busy)
            else:  # in the incumbent's order
                alone = [
                    x for x in ops if x in points or (x in v.free and x.kind in (*COMPUTE, *MARKS) and x not in halves)
                ]
                starts = [points.get(x, v.start[x]) for x in alone]
                ends = [points.get(x, v.compute_end.get(x, v.start[x])) for x in alone]
                for end, start in zip(ends, starts[1:], strict=False):
                    v.model.add(start >= end)

    def _no_overlap_on_links(self) -> None:
        """No two transfers of a link overlap (Eq. 10 to 13, 18 and 19)."""
        v = self.variables
        number = {(kind, s): n for n, (kinds, users) in enumerate(v.grid.links) for kind in kinds for s in users}
        groups = (
            _grouped(ops, lambda x: number.get((x.kind, x.stage)), len(v.grid.links))
            for ops in (v.incumbent.start, v.free)
        )
        for (_, users), started, free in zip(v.grid.links, *groups, strict=True):
            busy = [BusyTime(v.start[x], v.duration(x), v.presence(x), v.device_end[v.device(x)]) for x in free]
            self._stay_within_surroundings(busy, [(v.incumbent.start[x], x) for x in started])
            if any(v.window.opens(v.problem.stages[s].device) for s in users):
                self._add_no_overlap(busy)
            else:
                free.sort(key=lambda x: (v.incumbent.start[x], v.duration(x)))
                for x, y in pairwise(free):
                    v.model.add(v.start[y] >= v.start[x] + v.duration(x))

    def _compute_times(self, x: Op) -> Iterator[BusyTime]:
        """What an op puts on its device's compute stream: one time of both where B and W may be one."""
        v, s, j = self.variables, x.stage, x.microbatch
        by, fused = v.device_end[v.device(x)], v.fused.get((s, j), False)
        if x.kind in (B, W) and fused is not False:
            if fused is not True:
                yield BusyTime(v.start[x], v.duration(x), ~fused, by)
            if x.kind == B:
                yield BusyTime(v.start[x], v.duration(x) + v.duration(Op(W, s, j)), fused, by)
        elif x.kind in (F, B, W, C, *MARKS):
            yield BusyTime(v.start[x], v.duration(x), v.presence(x), by)

    def _add_no_overlap(self, busy: list[BusyTime]) -> None:
        """No two times overlap, and no point lies inside one."""
        model = self.model
        model.add_no_overlap(
            [model.new_optional_fixed_size_interval_var(x.start, x.length, x.presence, "busy") for x in busy]
        )

    def _stay_within_surroundings(self, busy: list[BusyTime], incumbent: Iterable[tuple[int, Op]]) -> None:
        """Times follow what the incumbent does before the window, and leave time for what it does after."""
        v = self.variables
        done, tail = 0, 0  # the last end before the window, and the longest tail after it
        for at, x in incumbent:
            match v.side_of_window(at):
                case -1:
                    done = max(done, v.incumbent.start[x] + v.duration(x))
                case 1:
                    tail = max(tail, v.incumbent.tail[x])
        v.model.add(v.end >= done + tail)
        for each in busy:
            if done > v.window.begin:
                v.model.add(each.start >= done).only_enforce_if(each.presence)
            v.model.add(each.start + each.length <= each.end_by - tail).only_enforce_if(each.presence)

    # --- symmetries: equal micro-batches of one route can change places, and so can equal parts of one activation

    def _order_equal_microbatches(self) -> None:
        """Micro-batches go by number (Eq. 1), where those of the incumbent do: it has to stay a solution."""
        v = self.variables
        for batches in v.problem.costs.classes:
            route = v.problem.route(batches[0])
            self._keep_order([Op(F, route[0], j) for j in batches])
            for s in route if self._in_order else ():
                # The W of a BW need not wait for that of a B before it.
                for kind in (F, B) if v.grid.needs_fused[s] else (F, B, W):
                    self._keep_order([Op(kind, s, j) for j in batches])

    def _keep_order(self, ops: list[Op]) -> None:
        """The ops of a stage run in this order if the incumbent's do."""
        v = self.variables
        free = [x for x in ops if x in v.free]
        if all(v.incumbent_start(x) <= v.incumbent_start(y) for x, y in pairwise(free)):
            for x, y in pairwise(free):
                v.model.add(v.start[y] >= v.start[x] + v.duration(x))

    def _order_equal_parts(self) -> None:
        """Of equal parts the second leaves only after the first, and comes back after it, where the incumbent has it
        so."""
        v, started, allocated = self.variables, self.variables.incumbent.start, self.variables.incumbent.allocation
        moments: list[tuple[Mapping[Op, Moment], Mapping[Op, int]]] = [(v.start, started), (v.allocation, allocated)]
        for s, j in v.passes:
            parts = v.grid.parts(s, j)
            for p, q in pairwise(parts):
                if parts[p] != parts[q] or v.grid.level_of_part(s, p) != v.grid.level_of_part(s, q):
                    continue
                pairs = [(Op(kind, s, j, p), Op(kind, s, j, q)) for kind in moves(p)]
                first, second = v.offloaded.get((s, j, p), True), v.offloaded.get((s, j, q), True)
                if first is True or second is True or (pairs[0][1] in started and pairs[0][0] not in started):
                    continue
                known = [(before[x], before[y]) for _, before in moments for x, y in pairs if {x, y} <= before.keys()]
                if all(x <= y for x, y in known):
                    v.model.add_implication(second, first)
                    for now, _ in moments:
                        for x, y in pairs:
                            if x in now:
                                v.model.add(now[x] <= now[y]).only_enforce_if(second)

    def _fix_order_of_entry(self) -> None:
        """Where the problem fixes the order of micro-batches, they enter each route in it."""
        v = self.variables
        for r, route in enumerate(v.problem.all_routes) if v.problem.fixed_order else ():
            entering = [Op(F, route[0], j) for j in range(v.problem.microbatches) if v.problem.costs.route[j] == r]
            for x, y in pairwise(entering):
                if x in v.free or y in v.free:
                    v.model.add(v.start[y] >= v.start[x] + v.duration(x))

    def _relate_visits(self) -> None:
        """Nothing here: the micro-batches of a stage's forwards and backwards have names."""


def _grouped(ops: Iterable[Op], number: Callable[[Op], int | None], groups: int) -> list[list[Op]]:
    """The ops by number, without those that have none."""
    grouped: list[list[Op]] = [[] for _ in range(groups)]
    for x in ops:
        n = number(x)
        if n is not None:
            grouped[n].append(x)
    return grouped


class _OnSolution(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    """Calls `on_better` with the starts of each solution."""

    def __init__(
        self, starts: Callable[[Callable[[Moment | Choice], int]], Starts], on_better: Callable[[Starts], None]
    ) -> None:
        super().__init__()
        self._starts, self._on_better = starts, on_better

    def on_solution_callback(self) -> None:
        self._on_better(self._starts(self.value))
