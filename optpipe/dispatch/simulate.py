"""A list scheduler for one route, small enough to be compiled: what search in rules simulates.

A device that is idle starts, of the ops that are ready and that its memory admits, an input gradient or a recompute
before a forward before a weight gradient; of forwards the one farthest along the route, of others the oldest
micro-batch. A host link that is free brings back the activation that is needed soonest, else it takes away the oldest
of those that are to leave. Rules change that: how many micro-batches may be in flight at a stage, how long a device
that could do something of less rank waits for an op that is about to arrive, which activations leave or are computed
again, and how early they are to be back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from optpipe.dispatch.clock import listed_ms, listed_ops
from optpipe.dispatch.memory_shares import visits
from optpipe.evaluate.effects import Effects
from optpipe.evaluate.objective import NEVER, Objective
from optpipe.lift import grain, lift_table
from optpipe.model.arrays import Flags, Floats, Ints, Table
from optpipe.model.costs import Costs
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.rules import Rules
from optpipe.prune import prune
from optpipe.schedule import Schedule

COMPUTE = (Kind.F, Kind.B, Kind.W, Kind.C)
MOVES = (Kind.O, Kind.R)


class Simulator:
    """The list scheduler on one problem.

    Parameters
    ----------
    problem
        One with a single route.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.route = np.array(problem.route(0))
        costs, effects, m = problem.costs, Effects(problem), problem.microbatches
        self.ops = 3 * len(self.route) * m
        self.device, self.memory = costs.device[self.route], costs.activation_budget
        self.parts = np.where(costs.can_offload, costs.parts, 0)[self.route]
        self.can_recompute = costs.can_recompute[self.route]
        instant = 10 * grain(np.array([costs.ms.sum() * m]))  # what takes no time takes this, to show what came first
        self.ms = np.maximum(costs.ms[np.ix_(np.array((*COMPUTE, *MOVES)), self.route)], instant)
        takes, frees = (table[np.ix_(np.array(COMPUTE), self.route)] for table in (effects.takes, effects.frees))
        takes_again, frees_again = effects.recomputed
        takes[3], frees[3] = takes_again[Kind.C, self.route], frees_again[Kind.C, self.route]
        self._part_bytes = np.zeros((len(self.route), max(1, self.parts.max())), dtype=np.int64)
        for s, n in enumerate(self.parts.tolist()):
            self._part_bytes[s, :n] = effects.parts[self.route[s]]
        ways = 1 if problem.transfer_mode == "half_duplex" else 2
        lines = np.array([ways * costs.link, ways * costs.link + ways - 1])
        users = _rows([(lines[:, self.device] == n).any(axis=0) for n in range(lines.max() + 1)])
        own = _rows([np.tile(self.device == d, len(COMPUTE)) for d in range(len(problem.devices))])
        hop = np.where(np.diff(self.device) != 0, problem.p2p_ms, 0.0)
        ahead = np.r_[0.0, np.cumsum(self.ms[0, :-1] + hop)]
        behind = np.r_[np.cumsum((self.ms[1, 1:] + hop)[::-1])[::-1], 0.0]
        expected = np.array([ahead, ahead[-1] + self.ms[0, -1] + behind])
        self.visits = visits(self.device)
        self.carry_ms = np.maximum(carry_ms(costs, self.route), np.where(self.parts + self.can_recompute, instant, 0.0))
        times = (self.ms, self.device, own, problem.p2p_ms)
        sizes = (takes, frees, frees_again[Kind.F, self.route], self.memory, costs.host_memory, self._part_bytes)
        # What `list_ops` is given beside rules, and beside that `descend`. Compiled code is made anew for arrays of
        # another layout.
        self._fixed = _in_rows(*times, *sizes, lines, users, expected)
        self.of_descent = (self._fixed, *_in_rows(self.parts, self.can_recompute, self.visits, self.carry_ms))

    def can(self, relief: str) -> Flags:
        """(S,) whether a stage's activations can leave ("leaves") or be computed again ("again")."""
        can: Flags = self.parts > 0 if relief == "leaves" else self.can_recompute
        return can

    def length_ms(self, rules: Rules, objective: Objective) -> float:
        """The length of the schedule that the rules lead to; `NEVER` if they lead to none, since what is in flight
        fills the memory."""
        found = self._run(rules)
        if found is None:
            return NEVER
        return float(listed_ms(self.ops, self.ms, self.device, len(self.memory), found[0], objective == "span"))

    def schedule(self, rules: Rules, method: str) -> Schedule | None:
        """The schedule that the rules lead to, without useless transfers; None if they lead to none."""
        found = self._run(rules)
        if found is None:
            return None
        start, moved = found
        (compute, begins), (moves, leaves) = self._rows_of(start[..., None], COMPUTE), self._rows_of(moved, MOVES)
        listed = lift_table(self.problem, np.concatenate([compute, moves]), np.r_[begins, leaves], method)
        return prune(replace(listed, rules=rules))

    def room(self) -> tuple[Floats, Floats]:
        """(4, S, m) for when each compute op starts, and (2, S, m, parts) each transfer."""
        shape = (len(self.route), self.problem.microbatches)
        return np.empty((len(COMPUTE), *shape)), np.empty((len(MOVES), *shape, self._part_bytes.shape[1]))

    def _rows_of(self, start: Floats, kinds: tuple[Kind, ...]) -> tuple[Table, Floats]:
        """Rows of a program's table and starts of the ops, from (kinds, S, m, parts) starts."""
        started = start < NEVER
        kind, stage, j, part = np.nonzero(started)
        table = np.array([np.array(kinds)[kind], self.route[stage], j, part, np.zeros_like(j)], dtype=np.int32).T
        return table, start[started]

    def _run(self, rules: Rules) -> tuple[Floats, Floats] | None:
        """(4, S, m) when each compute op starts, and (2, S, m, parts) each transfer; None if some do not."""
        start, moved = self.room()
        done = listed_ops(self.ops, *self._fixed, *_in_rows(*rules.arrays), NEVER, start, moved)
        return (start, moved) if done == self.ops + int((rules.leaves < 0).sum()) else None


def carry_ms(costs: Costs, route: Ints) -> Floats:
    """(S,) how long it takes to have all of an activation back that has left or is to be computed again."""
    back = costs.can_offload[route] * costs.parts[route] * costs.ms[Kind.R, route]
    found: Floats = np.maximum(back, costs.can_recompute[route] * costs.ms[Kind.C, route])
    return found


def _in_rows(*values: Any) -> tuple[Any, ...]:
    """The values; arrays are copied to row-major order where they have another."""
    return tuple(np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value for value in values)


def _rows(members: list[Flags]) -> Ints:
    """(n, largest) the places that each mask marks, then -1."""
    found = np.full((len(members), max(1, *(int(mask.sum()) for mask in members))), -1)
    for row, mask in zip(found, members, strict=True):
        row[: mask.sum()] = np.flatnonzero(mask)
    return found
