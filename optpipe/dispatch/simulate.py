"""A list scheduler for one route, small enough to be compiled: what search in rules simulates.

A device that is idle starts, of the ops that are ready and that its memory admits, an input gradient or a recompute
before a forward before a weight gradient; of forwards the one farthest along the route, of others the oldest
micro-batch. A host link that is free brings back the activation that is needed soonest, else it takes away the oldest
of those that are to leave. Rules change that: how many micro-batches may be in flight at a stage, how long a device
that could do something of less rank waits for an op that is about to arrive, which activations leave or are computed
again, and how early they are to be back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optpipe.dispatch.clock import listed_ops
from optpipe.dispatch.memory_shares import visits
from optpipe.evaluate.effects import Effects
from optpipe.evaluate.objective import NEVER, Objective
from optpipe.lift import grain, lift_table
from optpipe.model.arrays import Flags, Floats, Ints, Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.prune import prune
from optpipe.schedule import Schedule

COMPUTE = (Kind.F, Kind.B, Kind.W, Kind.C)
MOVES = (Kind.O, Kind.R)


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth
class Rules:
    """What tells one run of the list scheduler from another; stages in the order of the route.

    Attributes
    ----------
    in_flight
        (S,) the most micro-batches between the start of their F and that of their B at each stage.
    wait_ms
        (2, S) how long a device waits for the F, the B of each stage rather than start an op of less rank.
    leaves
        (S, m) how many parts of each activation leave, if there is time for that; `AGAIN` if it is recomputed.
    lead_ms
        (S,) how long before its backward is expected an activation begins to come back or to be recomputed.
    """

    in_flight: Ints
    wait_ms: Floats
    leaves: Ints
    lead_ms: Floats


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
        self._takes, self._frees = (
            table[np.ix_(np.array(COMPUTE), self.route)] for table in (effects.takes, effects.frees)
        )
        takes_again, frees_again = effects.recomputed
        self._takes[3], self._frees[3] = takes_again[Kind.C, self.route], frees_again[Kind.C, self.route]
        self._frees_again = frees_again[Kind.F, self.route]
        self._part_bytes = np.zeros((len(self.route), max(1, self.parts.max())), dtype=np.int64)
        for s, n in enumerate(self.parts.tolist()):
            self._part_bytes[s, :n] = effects.parts[self.route[s]]
        ways = 1 if problem.transfer_mode == "half_duplex" else 2
        self._lines = np.array([ways * costs.link, ways * costs.link + ways - 1])
        self._users = _rows([(self._lines[:, self.device] == n).any(axis=0) for n in range(self._lines.max() + 1)])
        self._own = _rows([np.tile(self.device == d, len(COMPUTE)) for d in range(len(problem.devices))])
        hop = np.where(np.diff(self.device) != 0, problem.p2p_ms, 0.0)
        ahead = np.r_[0.0, np.cumsum(self.ms[0, :-1] + hop)]
        behind = np.r_[np.cumsum((self.ms[1, 1:] + hop)[::-1])[::-1], 0.0]
        self._expected = np.array([ahead, ahead[-1] + self.ms[0, -1] + behind])
        self.visits = visits(self.device)
        self.carry_ms = np.maximum(self.parts * self.ms[5], self.can_recompute * self.ms[3])  # to have it back

    def can(self, relief: str) -> Flags:
        """(S,) whether a stage's activations can leave ("leaves") or be computed again ("again")."""
        can: Flags = self.parts > 0 if relief == "leaves" else self.can_recompute
        return can

    def length_ms(self, rules: Rules, objective: Objective, stop_ms: float = NEVER) -> float:
        """The length of the schedule that the rules lead to; `NEVER` if it is longer than `stop_ms` or the rules lead
        to none, since what is in flight fills the memory."""
        found = self._run(rules, stop_ms if objective == "makespan" else NEVER)
        if found is None:
            return NEVER
        start = found[0]
        begin = start.min(axis=(0, 2))
        end = np.where(start < NEVER, start + self.ms[: len(COMPUTE), :, None], 0.0).max(axis=(0, 2))  # of each stage
        if objective == "makespan":
            return float(end.max())
        return max(float(end[own].max() - begin[own].min()) for own in map(self.device.__eq__, set(self.device)))

    def schedule(self, rules: Rules, method: str) -> Schedule | None:
        """The schedule that the rules lead to, without useless transfers; None if they lead to none."""
        found = self._run(rules, NEVER)
        if found is None:
            return None
        start, moved = found
        (compute, begins), (moves, leaves) = self._rows_of(start[..., None], COMPUTE), self._rows_of(moved, MOVES)
        return prune(lift_table(self.problem, np.concatenate([compute, moves]), np.r_[begins, leaves], method))

    def _rows_of(self, start: Floats, kinds: tuple[Kind, ...]) -> tuple[Table, Floats]:
        """Rows of a program's table and starts of the ops, from (kinds, S, m, parts) starts."""
        started = start < NEVER
        kind, stage, j, part = np.nonzero(started)
        table = np.array([np.array(kinds)[kind], self.route[stage], j, part, np.zeros_like(j)], dtype=np.int32).T
        return table, start[started]

    def _run(self, rules: Rules, stop_ms: float) -> tuple[Floats, Floats] | None:
        """(4, S, m) when each compute op starts, and (2, S, m, parts) each transfer; None if some do not."""
        shape = (len(self.route), self.problem.microbatches)
        start, moved = np.empty((len(COMPUTE), *shape)), np.empty((len(MOVES), *shape, self._part_bytes.shape[1]))
        done = listed_ops(
            self.ops,
            *(self.ms, self.device, self._own, self.problem.p2p_ms, self._takes, self._frees, self._frees_again),
            *(self.memory, self.problem.costs.host_memory, self._part_bytes, self._lines, self._users, self._expected),
            *(rules.in_flight, rules.wait_ms, rules.leaves, rules.lead_ms, stop_ms, start, moved),
        )
        return (start, moved) if done == self.ops + int((rules.leaves < 0).sum()) else None


def _rows(members: list[Flags]) -> Ints:
    """(n, largest) the places that each mask marks, then -1."""
    found = np.full((len(members), max(1, *(int(mask.sum()) for mask in members))), -1)
    for row, mask in zip(found, members, strict=True):
        row[: mask.sum()] = np.flatnonzero(mask)
    return found
