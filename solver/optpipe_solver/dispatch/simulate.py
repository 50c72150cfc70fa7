"""A list scheduler for one route without transfers, small enough to be compiled: what search in rules simulates.

A device that is idle starts, of the ops that are ready and that its memory admits, an input gradient before a forward
before a weight gradient; of forwards the one farthest along the route, of others the oldest micro-batch. Two rules
change that: how many micro-batches may be in flight at a stage, and how long a device that could do something of less
rank waits for an op that is about to arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.evaluate.jit import LazyJit
from optpipe.evaluate.objective import NEVER, Objective
from optpipe.model.arrays import Floats, Ints
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import KIND, MICROBATCH, STAGE
from optpipe.schedule import Schedule
from optpipe_solver.heuristics.memory_shares import visits
from optpipe_solver.systems.order import by_slot

KINDS = (Kind.F, Kind.B, Kind.W)


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth
class Rules:
    """What tells one run of the list scheduler from another; stages in the order of the route.

    Attributes
    ----------
    in_flight
        (S,) the most micro-batches between the start of their F and that of their B at each stage.
    wait_ms
        (2, S) how long a device waits for the F, the B of each stage rather than start an op of less rank.
    """

    in_flight: Ints
    wait_ms: Floats


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
        costs, effects = problem.costs, Effects(problem)
        self.ops = len(KINDS) * len(self.route) * problem.microbatches
        self.device, self.memory = costs.device[self.route], costs.activation_budget
        self.ms, self._takes, self._frees = (
            table[np.ix_(np.array(KINDS), self.route)] for table in (costs.ms, effects.takes, effects.frees)
        )
        self.visits = visits(self.device)
        self._own = np.full((len(problem.devices), self.ms.size), -1)
        for d in range(len(problem.devices)):
            own = np.flatnonzero(np.tile(self.device == d, len(KINDS)))
            self._own[d, : len(own)] = own

    def length_ms(self, rules: Rules, objective: Objective, stop_ms: float = NEVER) -> float:
        """The length of the schedule that the rules lead to; `NEVER` if it is longer than `stop_ms` or the rules lead
        to none, since what is in flight fills the memory."""
        start = self._run(rules, stop_ms if objective == "makespan" else NEVER)
        if start is None:
            return NEVER
        end = (start + self.ms[..., None]).max(axis=(0, 2))  # of the last op of each stage
        if objective == "makespan":
            return float(end.max())
        first = start.min(axis=(0, 2))
        return max(float(end[own].max() - first[own].min()) for own in map(self.device.__eq__, set(self.device)))

    def schedule(self, rules: Rules, method: str) -> Schedule | None:
        """The schedule that the rules lead to; None if they lead to none."""
        start = self._run(rules, NEVER)
        if start is None:
            return None
        table = np.zeros((*start.shape, 5), dtype=np.int32)
        kind, table[..., STAGE], table[..., MICROBATCH] = np.indices(start.shape)
        table[..., KIND], table[..., STAGE] = np.array(KINDS)[kind], self.route[table[..., STAGE]]
        rows = np.lexsort((self._sequence.ravel(),))
        by_sequence = by_slot(self.problem, table.reshape(-1, 5)[rows], np.arange(self.ops, dtype=np.float64))
        return Schedule(self.problem, by_sequence.programs, method=method)

    def _run(self, rules: Rules, stop_ms: float) -> Floats | None:
        """(3, S, m) when each op starts; None if some do not."""
        shape = (*self.ms.shape, self.problem.microbatches)
        start, self._sequence = np.empty(shape), np.empty(shape, dtype=np.int64)
        done = _list_ops(
            self.ops,
            *(self.ms, self.device, self._own, self.problem.p2p_ms, self._takes, self._frees, self.memory),
            *(rules.in_flight, rules.wait_ms, stop_ms, start, self._sequence),
        )
        return start if done == self.ops else None


def list_ops(
    ms: Floats,
    device: Ints,
    own: Ints,
    p2p_ms: float,
    takes: Ints,
    frees: Ints,
    memory: Ints,
    in_flight: Ints,
    wait_ms: Floats,
    stop_ms: float,
    start: Floats,
    sequence: Ints,
) -> int:
    """The clock, for ops of kind k (0: F, 1: B, 2: W) and place s on the route.

    Parameters
    ----------
    ms, takes, frees
        (3, S) of each op.
    device
        (S,) of each stage.
    own
        (D, 3S) the ops of each device as k·S + s, then -1.
    memory
        (D,) bytes.
    start, sequence
        (3, S, m) are filled: when each op starts, and how many started before it.

    Returns
    -------
    How many ops have started; not all if an op would end behind `stop_ms`, or nothing that is ready fits.
    """
    stages, microbatches, devices = len(device), start.shape[2], len(memory)
    ready = np.full(start.shape, np.inf)
    ready[0, 0, :] = 0.0
    following = np.zeros((3, stages), dtype=np.int64)  # the next micro-batch of each kind and stage
    held = np.zeros(devices, dtype=np.int64)
    freed = np.zeros(devices, dtype=np.int64)  # at the end of the op that runs
    free_at = np.zeros(devices)
    look_at = np.zeros(devices)  # when a device next looks for an op
    done = 0
    while True:
        d = 0
        for other in range(1, devices):
            if look_at[other] < look_at[d]:
                d = other
        now = look_at[d]
        if now == np.inf:
            return done
        held[d] -= freed[d]
        freed[d] = 0
        look_at[d] = np.inf
        best, best_rank = -1, 0
        for op in own[d]:
            if op < 0:
                break
            k, s = op // stages, op % stages
            j = following[k, s]
            if j == microbatches:
                continue
            if ready[k, s, j] > now:
                look_at[d] = min(look_at[d], ready[k, s, j])
                if k == 2 or ready[k, s, j] > now + wait_ms[k, s]:
                    continue
            if held[d] + takes[k, s] > memory[d]:
                continue
            if k == 0 and j - following[1, s] >= in_flight[s]:
                continue
            rank = j
            if k == 0:
                rank += (stages - s) * microbatches
            elif k == 2:
                rank += (stages + 1) * microbatches
            if best < 0 or rank < best_rank:
                best, best_rank = op, rank
        if best < 0:
            continue
        k, s = best // stages, best % stages
        j = following[k, s]
        if ready[k, s, j] > now:
            continue  # wait for it
        end = now + ms[k, s]
        if end > stop_ms:
            return done
        start[k, s, j], sequence[k, s, j] = now, done
        following[k, s] += 1
        held[d] += takes[k, s]
        freed[d] = frees[k, s]
        free_at[d] = look_at[d] = end
        done += 1
        if k == 1:
            ready[2, s, j] = end
        if k == 2 or (k == 1 and s == 0):
            continue
        to_kind, to = k, s + 1 - 2 * k
        if to == stages:  # behind the last stage stands its own backward
            to_kind, to = 1, s
        at = end if device[to] == d else end + p2p_ms
        ready[to_kind, to, j] = at
        if device[to] != d:
            look_at[device[to]] = min(look_at[device[to]], max(at, free_at[device[to]]))


_list_ops = LazyJit(list_ops)
