"""A step as problems: the micro-batches of all replicas, whatever runs them, and what a change of division, order or
schedule makes of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from optpipe.diagnose.losses import floor_ms
from optpipe.diagnose.runs import ACTIVATION, Runs
from optpipe.errors import InputError
from optpipe.measured.steps import listed
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.records import COMPUTE_MS, EachMs, Stage, StageCosts, each_microbatch
from optpipe.reuse import by_rules
from optpipe.schedule import Schedule
from optpipe.steps.assign import assign

PIECES = 12  # of a stage of unknown layers: 2, 3, 4 and 6 chunks divide it
WORK = 50_000  # ops that a search of one replica simulates
Entry = Literal["ran", "order", "spread"]


class UserFacts(NamedTuple):
    """A user's facts of the job beside the trace."""

    layers: tuple[int, ...] = ()  # of each stage; empty if unknown
    memory: float | None = None  # activations of today's stages that a device may hold; None: as the fullest one held
    weight_share: float | None = None  # of W in a backward that was measured whole; None if unknown, counts as 0


@dataclass(frozen=True)
class Change:
    """What is done to a step."""

    healthy: bool = False  # whether slow devices are replaced
    placement: Placement | None = None  # of the layers, as stages; None for today's stages
    entry: Entry = "ran"  # micro-batches as they ran, in a better order on each replica, or spread over the replicas
    schedule: Schedule | None = None  # the order of ops; None for the one in which they ran
    own_schedules: bool = False  # whether each replica gets a schedule for its own micro-batches, in each step


class Outcome(NamedTuple):
    """A step after a change: its time, what no schedule with the same freedom falls below, and its slowest replica."""

    ms: float
    bound_ms: float
    slowest: Schedule


@dataclass(frozen=True, eq=False)
class StepBatch:
    """A step of all replicas."""

    healthy: Problem  # all micro-batches on devices that are not slow, with layers
    groups: tuple[tuple[int, ...], ...]  # by replica, the numbers of its micro-batches
    factor: Floats  # (R, D) how many times longer ops of a replica's device take
    orders: tuple[Schedule, ...]  # by replica, the order that ran
    handover_ms: Floats  # (D,) what passes on each device between ops
    apart: bool  # whether B and W ran apart

    @cached_property
    def _spread(self) -> tuple[tuple[int, ...], ...]:
        return assign(self.healthy, len(self.groups), [len(group) for group in self.groups]).microbatches

    def as_ran(self, r: int) -> Schedule:
        """The r-th replica as it ran, with its own times."""
        return self.orders[r].on(self._problem(r, self.healthy, self.groups[r], Change()))

    def predict(self, change: Change) -> Outcome:
        """The step after a change. Raises OptPipeError if it cannot be."""
        batch = change.placement.apply(self.healthy) if change.placement else self.healthy
        groups = self._spread if change.entry == "spread" else self.groups
        problems = [self._problem(r, batch, group, change) for r, group in enumerate(groups)]
        schedules = [(change.schedule or self.orders[r]).on(problem) for r, problem in enumerate(problems)]
        lengths = [self._length_ms(schedule) for schedule in schedules]
        ms, slowest = 0.0, schedules[0]
        for r in np.argsort(lengths)[::-1].tolist():
            if lengths[r] <= ms:  # and the rest are no longer, better or not
                break
            each = min(self._better(schedules[r], change), key=self._length_ms)
            if self._length_ms(each) > ms:
                ms, slowest = self._length_ms(each), each
        bound_ms = max(floor_ms(problem) for problem in problems)
        if change.entry == "spread":
            bound_ms = float(batch.costs.work_ms.sum(axis=1).max()) / len(groups)
        if change.placement:  # other divisions count, too
            bound_ms = float(batch.costs.work_ms.sum()) / len(groups) / len(batch.devices)
        return Outcome(ms, min(bound_ms, ms), slowest)

    def _problem(self, r: int, batch: Problem, group: Sequence[int], change: Change) -> Problem:
        """What a replica runs, on its devices."""
        slow = np.ones(len(batch.devices)) if change.healthy else self.factor[r]
        problem, fields = batch.entering(group), COMPUTE_MS if self.apart else COMPUTE_MS[:2]

        def on_device(stage: Stage) -> dict[str, EachMs]:
            by, more = float(slow[stage.device]), float(self.handover_ms[stage.device])
            times = {field: each_microbatch(lambda ms: by * ms, getattr(stage, field)) for field in COMPUTE_MS}
            return times | {field: each_microbatch(lambda ms: ms + more, times[field]) for field in fields}

        return problem.replace(stages=[stage.model_copy(update=on_device(stage)) for stage in problem.stages])

    def _better(self, schedule: Schedule, change: Change) -> Iterator[Schedule]:
        """Yields the schedule, and what may be better for its micro-batches."""
        yield schedule
        problem = schedule.problem
        if change.entry == "order":
            yield schedule.on(problem.entering(assign(problem, 1).microbatches[0]))
        if (
            change.own_schedules
            and (listed := by_rules(problem, schedule, "makespan", WORK))
            and not listed.compiled.complaints
        ):
            yield listed

    def _length_ms(self, schedule: Schedule) -> float:
        """Its makespan, of which the last hand-over is no part."""
        timeline = schedule.timeline
        return float((timeline.end - self.handover_ms[timeline.device]).max() - timeline.start.min())


def batch_of(runs: Runs, healthy_ms: Floats, step: int, facts: UserFacts) -> StepBatch:
    """The step of these runs. `healthy_ms` is (T,) the time of each op without slow devices."""
    chosen = runs.runs_of(step)
    counts = [runs.orders[runs.order[run]].problem.microbatches for run in chosen]
    first = np.cumsum([0, *counts])
    stages, devices = len(runs.where), runs.devices
    ms = np.zeros((3, stages, int(first[-1])))
    factor = np.ones((len(chosen), devices))
    share = facts.weight_share or 0.0
    parts = np.zeros((len(Kind), 3))  # of an op's time, those of F, B and W
    parts[[Kind.F, Kind.B, Kind.W], [0, 1, 2]] = 1.0
    parts[Kind.BW] = 0.0, 1 - share, share
    for r, run in enumerate(chosen.tolist()):
        ops = runs.ops_of(run)
        own_ms, device = healthy_ms[ops], runs.device[ops]
        lasts = parts[runs.kind[ops]].T * own_ms
        for row in range(3):
            np.add.at(ms[row], (runs.stage[ops], runs.microbatch[ops] + first[r]), lasts[row])
        spent, healthy = (np.bincount(device, each, devices) for each in (runs.ms[ops], own_ms))
        factor[r] = np.divide(spent, healthy, out=np.ones(devices), where=healthy > 0)
    orders = tuple(runs.orders[runs.order[run]] for run in chosen)
    held = max(peak.bytes for order in orders for peak in order.compiled.certificate.device)
    budgets = [held if facts.memory is None else max(ACTIVATION, round(facts.memory * ACTIVATION))] * devices
    apart = bool((runs.kind == int(Kind.W)).any())
    problem = _problem(ms, runs, float(np.median(runs.message_ms[chosen])), budgets, facts.layers)
    groups = tuple(tuple(range(a, b)) for a, b in zip(first[:-1].tolist(), first[1:].tolist(), strict=True))
    return StepBatch(problem, groups, factor, orders, runs.handover_ms, apart)


def typical(batch: StepBatch, placement: Placement | None) -> Problem:
    """A problem whose micro-batches are all the mean one of a step, on devices that are not slow."""
    placed = placement.apply(batch.healthy) if placement else batch.healthy
    return placed.replace(
        microbatches=len(batch.groups[0]),
        stages=[stage.model_copy(update=_mean(stage)) for stage in placed.stages],
        layers=placed.layers and [layer.model_copy(update=_mean(layer)) for layer in placed.layers],
    )


def evenly(batch: StepBatch, placement: Placement) -> Placement | None:
    """The placement with as many layers in each stage, as stacks divide them by default; what the first and the last
    stage take beyond usual layers stays there. None where that is not possible."""
    layers = len(batch.healthy.layers or ()) - 2
    stages = placement.chunks * len(batch.healthy.devices)
    if placement.shape == "bidirectional" or layers % stages:
        return None
    counts = [layers // stages] * stages
    counts[0] += 1
    counts[-1] += 1
    return placement.model_copy(update={"layers": tuple(counts)})


def _mean(costs: StageCosts) -> dict[str, float]:
    return {field: float(np.mean(getattr(costs, field))) for field in COMPUTE_MS}


def _problem(ms: Floats, runs: Runs, message_ms: float, budgets: Sequence[int], layers: Sequence[int]) -> Problem:
    where, handover = runs.where, runs.handover_ms
    pieces = _layers(ms, list(layers) or [PIECES] * len(where))
    pairs = {(a, b) for a, b in pairwise(where) if a != b}
    pairs |= {(b, a) for a, b in pairs} | {(where[-1], where[0])} | {(where[0], where[-1])}
    return Problem.from_dict(
        {
            "name": "a measured step; 720.72 kB is one activation of a stage",
            "microbatches": ms.shape[2],
            "p2p_ms": message_ms,
            "messages": [
                {"sender": a, "receiver": b, "ms": max(0.0, message_ms - float(handover[a]))}
                for a, b in sorted(pairs)
                if a != b
            ],
            "devices": [{"activation_budget_bytes": budget} for budget in budgets],
            "stages": [{"device": d, **_costs(ms[:, s], ACTIVATION)} for s, d in enumerate(where)],
            "layers": [_costs(piece, held) for piece, held in pieces],
        }
    )


def _costs(ms: Floats, held: int) -> dict[str, object]:
    times = {field: row.tolist() for field, row in zip(COMPUTE_MS, ms, strict=True)}
    return {**times, "activation_bytes": held, "saved_for_weight_bytes": held}


def _layers(ms: Floats, counts: Sequence[int]) -> list[tuple[Floats, int]]:
    """The layers of all stages, each with its (3, m) times and the bytes that it saves. What the first stage takes
    beyond usual layers is the first layer, as an embedding is, what the last one does the last layer, as a head is;
    the rest of a stage divides evenly.

    Raises InputError if there are not as many numbers as stages.
    """
    stages = ms.shape[1]
    if len(counts) != stages or min(counts) < 1:
        raise InputError(f"layers = {listed(counts)}: a number of at least 1 for each of {stages} stages is expected")
    mean = ms.mean(axis=2)  # (3, stages)
    usual = np.sort(mean / np.array(counts), axis=1)[:, (stages - 1) // 2]
    beyond = np.clip((mean - usual[:, None] * counts) / np.maximum(mean, 1e-12), 0.0, 1.0)
    beyond[:, 1 : stages - 1] = 0.0
    if stages == 1:
        beyond[:] = 0.0
    ends = [(ms[:, s] * beyond[:, s, None], 0) for s in (0, -1)]
    inner = [
        (ms[:, s] * ((1 - beyond[:, s, None]) / count), -(-ACTIVATION // count))
        for s, count in enumerate(counts)
        for _ in range(count)
    ]
    return [ends[0], *inner, ends[1]]
