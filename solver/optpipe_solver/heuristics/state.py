"""`SchedulingState`: where the list scheduler is; its rules are in `list_scheduling` and `transfers`."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from optpipe.dispatch.figures import instant_ms
from optpipe.evaluate.effects import Effects
from optpipe.model.arrays import OFF_ROUTE
from optpipe.model.costs import FORWARDS, GRADIENTS
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import Relief, reliefs
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.reserve import Reserve

# Codes of events. The end of an op is its kind; the arrival of its input is its kind and ARRIVAL.
ARRIVAL = 100
LOOK = 200  # a link looks for something to do
STAYS = Relief()


class Event(NamedTuple):
    """Something that happens at a moment. Of several at one moment those come first that were foreseen first."""

    ms: float
    number: int
    code: int
    stage: int
    microbatch: int
    part: int


class FullSpeed(NamedTuple):
    """By stage: how long after a micro-batch's begin its forward and its backward start if nothing is in their way."""

    forward: dict[int, float]
    backward: dict[int, float]


class SchedulingState:
    """The clock, its events, the ops that have started, and what each device holds and waits for.

    What belongs to the problem is computed once; each schedule of it begins with `begin`.

    Attributes
    ----------
    ms, takes, frees
        By kind, stage and class of micro-batches: how long an op takes, and its bytes (`Effects`).
    level_ms, level_takes, level_frees
        By level, and so on: the same of an activation that is recomputed by it.
    parts, level_parts
        By stage and class the bytes of each part of an activation, of its checkpoint by each level.
    alike
        (m,) the class of each micro-batch (`Costs.alike`).
    position
        By micro-batch the place of each stage on its route.
    base
        By class: what becomes of each stage's activation if one micro-batch runs at a time.
    held
        (D,) bytes, those of the running op included.
    busy
        (D,) whether a compute op runs.
    forwards
        By device and stage, forwards whose input is there: a heap of rank and micro-batch.
    backwards
        By device, backwards whose gradient is there: rank, micro-batch and stage, sorted.
    gradient_arrivals
        By device a heap of the moments when gradients arrive that are under way.
    place
        (m,) the place of each micro-batch in the policy's order.
    rank
        (m,) the order in which micro-batches were admitted.
    forwards_left
        (D,) forwards that have not started.
    begin_ms
        (m,) when a micro-batch would have begun, had it come to where it is at full speed.
    relief
        By stage and micro-batch: what becomes of the activation between forward and backward.
    rows, starts
        The ops that have started, as rows of a program's table, and when.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        costs, m = problem.costs, problem.microbatches
        instant = instant_ms(problem)  # what takes no time takes this, to show what came first
        self.alike: list[int] = costs.alike.tolist()
        examples = costs.examples
        self.ms: list[list[list[float]]] = np.maximum(costs.ms[..., examples], instant).tolist()
        self.level_ms: list[list[list[list[float]]]] = [
            np.maximum(costs.level_ms(k)[..., examples], instant).tolist() for k in range(costs.levels.count.max())
        ]
        self._message_ms: list[list[list[float]]] = costs.message_ms[..., examples].tolist()
        self.device: list[int] = costs.device.tolist()
        effects = Effects(problem)
        self.takes: list[list[list[int]]] = effects.takes[..., examples].tolist()
        self.frees: list[list[list[int]]] = effects.frees[..., examples].tolist()
        by_level = [[sizes[..., examples].tolist() for sizes in tables] for tables in effects.by_level]
        self.level_takes: list[list[list[list[int]]]] = [takes for takes, _ in by_level]
        self.level_frees: list[list[list[list[int]]]] = [frees for _, frees in by_level]
        self.parts: list[list[list[int]]] = effects.parts[:, examples].tolist()
        self.level_parts: list[list[list[list[int]]]] = [each[:, examples].tolist() for each in effects.parts_by_level]
        self.route = [problem.route(j) for j in range(m)]
        self.position = [{s: k for k, s in enumerate(route)} for route in self.route]
        self._full_speed = [self._at_full_speed(j) for j in examples.tolist()]
        self.base = [reliefs(problem, j) for j in examples.tolist()]
        self.memory = [d.activation_budget_bytes for d in problem.devices]
        self.reserve = Reserve(problem, self.base)
        passing = (costs.before[costs.route] != OFF_ROUTE).sum(axis=0)  # (S,) micro-batches
        forwards = np.bincount(costs.device, weights=passing, minlength=len(problem.devices))
        self._forwards: list[int] = forwards.astype(int).tolist()

    def begin(self, policy: Policy) -> None:
        """Go back to the time before the first op."""
        self.policy = policy
        m, devices = self.problem.microbatches, len(self.problem.devices)
        self.reserve.begin()
        self.held = [0] * devices
        self.busy = [False] * devices
        self.forwards: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(devices)]
        self.backwards: list[list[tuple[int, int, int]]] = [[] for _ in range(devices)]
        self.gradient_arrivals: list[list[float]] = [[] for _ in range(devices)]
        self.place = np.argsort(policy.order).tolist() if policy.order else list(range(m))
        self.rank = [m + place for place in self.place]
        self.forwards_left = self._forwards.copy()
        self.begin_ms = [0.0] * m
        self.relief: dict[tuple[int, int], Relief] = {}
        self.events: list[Event] = []
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.starts: list[float] = []
        self.now = 0.0

    def foresee(self, ms: float, code: int, stage: int, microbatch: int, part: int = 0) -> None:
        """Add an event."""
        heapq.heappush(self.events, Event(ms, len(self.rows), code, stage, microbatch, part))

    def record_start(self, kind: Kind, stage: int, microbatch: int, part: int = 0) -> None:
        """Note that an op starts now, and foresee its end."""
        self.rows.append((kind, stage, microbatch, part, 0))
        self.starts.append(self.now)
        self.foresee(self.now + self.op_ms(kind, stage, microbatch), kind, stage, microbatch, part)

    def op_ms(self, kind: Kind, stage: int, microbatch: int) -> float:
        """How long an op takes, by what becomes of the activation."""
        level = self.relief.get((stage, microbatch), STAYS).level
        ms = self.ms if level < 0 else self.level_ms[level]
        return ms[kind][stage][self.alike[microbatch]]

    def note_pace(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Take note how far a micro-batch has come: its F, or its backward, of this stage starts now."""
        full_speed = self._full_speed[self.alike[microbatch]]
        after = full_speed.forward[stage] if kind == Kind.F else full_speed.backward[stage]
        self.begin_ms[microbatch] = max(self.begin_ms[microbatch], self.now - after)

    def backward_expected(self, stage: int, microbatch: int) -> float:
        """The moment at which the backward will be able to start if all goes at full speed from here."""
        return self.begin_ms[microbatch] + self._full_speed[self.alike[microbatch]].backward[stage]

    def message_ms(self, way: int, stage: int, microbatch: int) -> float:
        """How long the message takes that a stage's forward (`FORWARDS`) or backward (`GRADIENTS`) waits for."""
        return self._message_ms[way][stage][self.alike[microbatch]]

    def _at_full_speed(self, microbatch: int) -> FullSpeed:
        route, alike = self.route[microbatch], self.alike[microbatch]
        now, starts = 0.0, FullSpeed({}, {})
        for s in route:
            starts.forward[s] = now = now + self.message_ms(FORWARDS, s, microbatch)
            now += self.ms[Kind.F][s][alike]
        for s in reversed(route):
            starts.backward[s] = now = now + self.message_ms(GRADIENTS, s, microbatch)
            now += self.ms[Kind.B][s][alike]
        return starts
