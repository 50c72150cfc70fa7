"""OptPipe's mixed-integer linear program (Appendix C.1), in the paper's letters, for any solver.

The paper fixes the order of the micro-batches "without affecting optimality". Without offload that is so: number the
k-th F, B and W of every stage k, and what they wait for still comes in time. With offload an activation's F, O, R and B
belong together, and a backward that overtakes another one can hide its reload. Nor is it so of the span: a device that
lets micro-batch 2 overtake micro-batch 1 starts later. Hence `Switches.order`: fixed in all stages is quick and good,
but its optimum is no lower bound where offload or the span matters.
"""

from __future__ import annotations

import numpy as np

from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.exact import serial_ms
from optpipe_solver.milp import memory, streams
from optpipe_solver.milp.precedences import LongestPaths
from optpipe_solver.milp.rows import Rows
from optpipe_solver.milp.switches import Switches
from optpipe_solver.milp.variables import Variables, stages_that_may_offload
from optpipe_solver.schedule_facts import needs_fused

LARGEST = 1024.0  # the horizon in the model's unit of time, so that the solver's absolute tolerances fit every problem


class Model:
    """The program for one problem. Build it, solve `rows`, read `starts(x)`.

    Solutions longer than `horizon_ms` are cut off. If none can be as short, `possible` is False, and there are no rows.
    """

    def __init__(self, problem: Problem, objective: Objective, horizon_ms: float, switches: Switches) -> None:
        self.problem, self.objective, self._order = problem, objective, switches.order
        self.scale = 2.0 ** np.floor(np.log2(LARGEST / horizon_ms))  # a power of two: times stay exact
        self.paths = LongestPaths(
            problem, horizon_ms * self.scale, self.scale, switches.order, determined=switches.determined
        )
        self.rows = Rows(None if switches.tight else (horizon_ms + serial_ms(problem)) * self.scale)
        self.possible = self.paths.possible
        if not self.possible:
            return
        self.variables = v = Variables(problem, self.paths, switches, self.rows)
        self.C = v.C
        streams.dependencies(v)
        streams.no_overlap_on_device(v)
        if objective == "makespan":
            streams.makespan(v)
        else:
            streams.span(v)
            streams.first_forward_at_once(v)
        if switches.workload:
            streams.work_before_and_after(v, objective)
        streams.forward_offload_reload_backward(v)
        streams.no_overlap_on_link(v)
        streams.reloads_allocate_in_link_order(v)
        memory.activation_budget(v)
        orders = {"none": lambda _: [], "compute": streams.compute_orders, "all": streams.all_orders}
        for order in orders[switches.triangles](v):
            streams.no_cycles_of_three(self.rows, order)

    @property
    def is_bound(self) -> bool:
        """Whether its optimum bounds every schedule of the problem, not only those that it can express (no recompute,
        no pairs, whole activations, B and W apart). B followed by W does all that BW does, earlier for the stage
        before, and only on some stages more memory (`needs_fused`)."""
        # A device has a shorter span where it starts later.
        order_is_free = self.objective == "makespan" and not stages_that_may_offload(self.problem)
        any_order = self._order != "stages" or order_is_free
        return not self.inexpressible and self.problem.layers is None and any_order

    @property
    def inexpressible(self) -> str:
        """What schedules of the problem may do and the model does not know, in words; nothing if it knows all."""
        problem, costs = self.problem, self.problem.costs
        lacks = {
            "no recompute": costs.can_recompute.any(),
            "no single parts of activations": (costs.parts > 1).any(),
            "BW only as B and W": needs_fused(problem).any(),
            "no pairs": problem.overlap_factor is not None,
        }
        return ", ".join(what for what, needed in lacks.items() if needed)

    def starts(self, x: Floats) -> dict[Op, float]:
        """The start in ms of every op, in the schedule that the binaries of a solution describe, exact and as early as
        can be."""
        v, costs = self.variables, self.problem.costs
        times = (self.rows.earliest(x) / self.scale).tolist()
        starts = {op: times[E] - float(costs.ms[op[:3]]) for op, E in zip(self.paths.ops, v.E, strict=True)}
        for kind, moments in ((Kind.O, v.O), (Kind.R, v.R)):
            for a, moment in moments.items():
                if self.rows.holds(v.W[a], x):
                    part_ms = float(costs.ms[kind, *a])
                    for part in range(costs.parts[a[0]]):
                        starts[Op(kind, *a, part)] = times[moment] + part * part_ms
        return starts
