"""A list scheduler, small enough to be compiled: what search in rules simulates.

A device that is idle starts, of the ops that are ready and that its memory admits, an input gradient or a recompute
before a forward before a weight gradient; of forwards the one farthest along the route, of others the oldest
micro-batch. A host link that is free brings back the activation that is needed soonest, else it takes away the oldest
of those that are to leave. Rules change that: how many micro-batches may be in flight at a stage, how long a device
that could do something of lower priority waits for an op that is about to arrive, which activations leave or are
computed again, and how early they are to be back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from optpipe.dispatch.figures import COMPUTE, TRANSFERS, Choices, Figures, State, in_rows, new_state, stage_order
from optpipe.evaluate.jit import plain
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective
from optpipe.lift import lift_table, prune
from optpipe.model.arrays import NONE, Floats, Ints, Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.rules import EVICTED, Rules
from optpipe.schedule import Schedule


class Simulator:
    """The list scheduler on one problem.

    Its loops are compiled, which takes some seconds once on a machine, or not: they find the same.
    """

    def __init__(self, problem: Problem, is_compiled: bool = True) -> None:
        self.problem, self.is_compiled = problem, is_compiled
        self.figures, self.choices = Figures.from_problem(problem), Choices.from_problem(problem)
        self.stages = len(self.figures.device)
        self.ops = 3 * int((self.figures.place[:, self.figures.class_of] != NONE).sum())

    @cached_property
    def descend(self) -> Callable[..., None]:
        """`descend` of this problem, compiled or not."""
        from optpipe.dispatch.descend import descend  # imports numba

        return partial(descend if self.is_compiled else plain(descend), self.figures, self.choices)

    def length_ms(self, rules: Rules, objective: Objective, room: State | None = None) -> float:
        """The length of the schedule that rules lead to; `NO_SCHEDULE_MS` if they lead to none, since what is in flight
        fills the memory. `room` is used anew, if given."""
        return self._run(rules, room or self.new_state(), objective == "span")

    def schedule(self, rules: Rules, method: str, listed: State | None = None) -> Schedule | None:
        """The schedule that the rules lead to, without useless transfers; None if they lead to none. `listed` is what
        they have led to just now, if given."""
        state = listed or self.new_state()
        if listed is None and self._run(rules, state) == NO_SCHEDULE_MS:
            return None
        order, level = rules.order, state.variant - 1
        compute, compute_start = self._rows_of(state.start[..., None], (COMPUTE, COMPUTE), order, level)
        transfers, transfer_start = self._rows_of(state.moved, TRANSFERS, order, level)
        table, start = np.concatenate([compute, transfers]), np.concatenate([compute_start, transfer_start])
        return prune(replace(lift_table(self.problem, table, start, method), rules=rules))

    def new_state(self) -> State:
        """Returns room for the clock."""
        return new_state(self.figures, self.problem.microbatches)

    def _run(self, rules: Rules, state: State, span: bool = False) -> float:
        """Fill in when ops and transfers start. Returns the length; `NO_SCHEDULE_MS` if some compute ops do not."""
        rows, progress = in_rows(rules), np.array([NO_SCHEDULE_MS, NO_SCHEDULE_MS, 0.0, 1.0])
        self.descend(rows, rows, rows, state, progress, 0, span)
        return float(progress[0])

    def _rows_of(
        self, start: Floats, kinds: tuple[tuple[Kind, ...], ...], order: Ints, level: Ints
    ) -> tuple[Table, Floats]:
        """Rows of a program's table and starts of the ops, from (kinds, S, m, parts) starts and (S, m) levels in the
        order of entry. `kinds` are those of what stays or goes to the host, and of what is evicted."""
        started = start < NO_SCHEDULE_MS
        row, stage, j, part = np.nonzero(started)
        kind = np.array(kinds)[(level[stage, j] == EVICTED).astype(int), row]
        part = np.where(kind == Kind.C, level[stage, j], part)
        table = np.array([kind, stage_order(self.problem)[stage], order[j], part, np.zeros_like(j)], dtype=np.int32).T
        return table, start[started]
