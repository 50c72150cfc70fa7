"""The CP-SAT model of a problem, whole or a window of it: every choice but pairs, and the program's rule for memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from ortools.sat.python import cp_model

from optpipe.model.ops import TRANSFERS, Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.clock import Clock
from optpipe_solver.cpsat import dependencies, memory, ranks, span, streams, symmetry
from optpipe_solver.cpsat.grid import Grid
from optpipe_solver.cpsat.grid_schedule import GridSchedule
from optpipe_solver.cpsat.variables import Choice, Moment, Order, Variables, Window, WindowObjective

B, W, BW, D = Kind.B, Kind.W, Kind.BW, Kind.D
Starts = dict[Op, int]  # ticks of F, B, W, BW, C, O, R
COUNTED_PER_S = 0.25  # CP-SAT's deterministic seconds in one second of a quiet core


@dataclass(frozen=True)
class Answer:
    """What a search ended with.

    Attributes
    ----------
    starts
        The best found, None where there are none.
    value
        Its objective, in ticks.
    bound
        No solution of the model has a lower objective.
    proven
        Whether the solution is optimal or, without starts, whether there is none.
    used_s
        Seconds of the clock that the search took.
    """

    starts: Starts | None
    value: int
    bound: int
    proven: bool
    used_s: float


def order_is_free(problem: Problem, objective: WindowObjective) -> bool:
    """Whether nothing is lost if micro-batches keep their order in all stages.

    Equal ones, that is. Where none may leave or be recomputed nothing tells them apart; otherwise it can pay that a
    later one overtakes. The span is worth an overtaking, too: a device that lets the second overtake the first starts
    later.
    """
    return objective == "makespan" and not any(stage.can_offload or stage.can_recompute for stage in problem.stages)


class WindowModel:
    """The model of a window of an incumbent. Its variables, constraints and objective; `solve` searches.

    The objective "span" is meant for a window of everything, as what is after a window cannot move on its own.
    """

    def __init__(
        self,
        grid: Grid,
        incumbent: GridSchedule,
        window: Window,
        order: Order,
        objective: WindowObjective = "makespan",
    ) -> None:
        self.variables = v = Variables(grid, incumbent, window, order, objective)
        self.model, self.end, self._minimizes = v.model, v.end, objective
        dependencies.weight_gradient_after_input_gradient(v)
        dependencies.after_messages(v)
        dependencies.backward_after_forward(v)
        dependencies.recompute_between_forward_and_backward(v)
        dependencies.transfers_between_forward_and_backward(v)
        dependencies.end_after_everything(v)
        streams.no_overlap_on_device(v)
        streams.no_overlap_on_link(v)
        memory.device_memory_within_budget(v)
        memory.host_memory_within_limit(v)
        symmetry.equal_microbatches_in_order(v)
        symmetry.equal_parts_in_order(v)
        symmetry.fixed_order_of_entry(v)
        if order == "ranks":
            ranks.ranks_follow_ranks(v)
        if objective == "span":
            span.span_of_every_device(v)
        self.objective = v.end + sum(v.device_end) if objective == "ends" else v.span

    @property
    def is_bound(self) -> bool:
        """Whether a bound of the model holds for every schedule of the problem.

        It does if everything is free, if there can be no pairs, if no order is fixed that a schedule may gain by
        breaking, and if nothing is rounded or, for a makespan, nothing is rounded up.
        """
        v = self.variables
        any_order = v.order != "stages" or order_is_free(v.problem, self._minimizes)
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
        """Minimizes the objective.

        Parameters
        ----------
        seconds
            Of those left, at most.
        any_will_do
            Ends with the first solution.
        on_better
            Gets each better solution on the way.
        on_bound
            Gets each better bound, perhaps from another thread.
        """
        self.model.minimize(self.objective)
        solver = cp_model.CpSolver()
        seconds = min(seconds, clock.left_s)
        solver.parameters.num_workers = threads
        solver.parameters.max_time_in_seconds = clock.wall_left_s if clock.counts else seconds
        if clock.counts:
            solver.parameters.max_deterministic_time = COUNTED_PER_S * seconds
        solver.parameters.random_seed = seed
        solver.parameters.stop_after_first_solution = any_will_do
        # With a linear relaxation the search takes several times as long.
        solver.parameters.linearization_level = 0
        # Strong propagation refutes sooner and finds later.
        solver.parameters.use_strong_propagation_in_disjunctive = self.variables.order == "ranks"
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
        """The starts of a solution, without drops, which `lift` derives."""
        v = self.variables
        starts = {self._op(x): int(value(at)) for x, at in v.start.items() if x.kind != D and value(v.presence(x))}
        for (s, j), fused in v.fused.items():
            if value(fused):
                starts[Op(BW, s, j)] = starts.pop(Op(B, s, j))
                del starts[Op(W, s, j)]
        return starts

    def _op(self, x: Op) -> Op:
        """The op of the schedule that one of the model stands for."""
        moves = x.kind in TRANSFERS
        return x._replace(part=x.part % self.variables.problem.stages[x.stage].offload_parts) if moves else x


class _OnSolution(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    """Calls `on_better` with the starts of each solution."""

    def __init__(
        self, starts: Callable[[Callable[[Moment | Choice], int]], Starts], on_better: Callable[[Starts], None]
    ) -> None:
        super().__init__()
        self._starts, self._on_better = starts, on_better

    def on_solution_callback(self) -> None:
        self._on_better(self._starts(self.value))
