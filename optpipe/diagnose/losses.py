"""Where the time of a step goes: replays in which one thing after the other is ideal. Each loss is the difference of
two replays, so together with the work they are exactly the step.

A far op took a multiple of what is usual for its kind, its replica's stage and its work, though neither the device's
other ops in that run did, nor that op in other steps. Nothing else is judged by it, and no cure predicted with it.

Which devices are slower than others with the same work, and since when: the work of a micro-batch is what its faster
stages show. A stage's usual time for it is that of the faster ones of all micro-batches with about as much work, in all
runs: as they are long, attention grows faster than the rest of a stage. A device's excess in a run is what its
micro-batches take beyond that. So a stage that is long in all replicas is no slow device, nor is a replica whose
micro-batches are all long. With one replica, only a device that becomes slower can be distinguished from a long stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from optpipe.diagnose.runs import Runs
from optpipe.model.arrays import Floats, Ints
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem

CAUSE = 0.03  # of the step: what costs less is no cause
NOTHING = 1e-9  # ms, less than any clock resolves
UNEVEN = 0.05  # how much more than the mean a stage must take to be named
LEAST = 0.05  # of its time a slow device must take more
CLEAR = 4.0  # times the usual spread, too
FEWEST = 3  # steps, or half of them
FAR = 2.0  # times as long as usual an op must take to be named
MOST_FAR = 3  # such ops are named
FAST = 0.25  # the quantile of a stage's times that counts as its usual time
ALIKE, MOST_GROUPS = 50, 20  # micro-batches with about as much work that are compared, and into how many groups at most
ROUNDS = 5
DEVIATION = 1.4826  # of a normal distribution, for a median of absolute deviations


class FarOp(NamedTuple):
    """An op that took far longer than usual."""

    op: Op
    replica: int
    step: int
    ms: float
    usual_ms: float
    lost_ms: float  # how much shorter its step would have been


class SlowDevice(NamedTuple):
    """A device of a replica that is slower than others with the same work."""

    replica: int
    device: int
    first_step: int
    last_step: int
    since: bool  # whether it was not slow before `first_step`
    factor: float  # how many times longer its ops take, the median of these steps


class Loss(NamedTuple):
    """A part of each step."""

    name: str  # one of `NAMES`
    ms: Floats  # (N,) of each step; below 0 where the step would have been longer

    @property
    def avoidable(self) -> bool:
        """Whether something of it could be spared: not of the work, nor what no schedule can avoid."""
        return self.name not in ("unexplained", "bubble", "work")

    @property
    def mean_ms(self) -> float:
        """The mean over the steps; those of all parts are together the mean step."""
        return float(np.mean(self.ms))


# In this order things become ideal; what they are is the end of a sentence.
NAMES = {
    "unexplained": "what a replay does not explain",
    "far-ops": "single ops far longer than usual",
    "slow-device": "a device slower than others with the same work",
    "replicas": "replicas with more work than others",
    "micro-batches": "micro-batches of a replica that differ",
    "stages": "stages that are uneven",
    "scatter": "op times that scatter",
    "messages": "messages, and what passes between ops",
    "order": "the order of ops",
    "bubble": "what no schedule can avoid, stages being even",
    "work": "work",
}


@dataclass(frozen=True, eq=False)
class Losses:
    """The parts of each step, (N,)."""

    steps: Ints  # (N,) their numbers
    measured_ms: Floats  # (N,) how long they took; as replayed, where clocks do not show it
    replayed_ms: Floats  # (N,)
    parts: tuple[Loss, ...]
    far_ops: tuple[FarOp, ...]  # those that were longest beyond usual, what cost most first
    slow_devices: tuple[SlowDevice, ...]  # the slowest first
    uneven_stages: tuple[tuple[int, float], ...]  # longer than the mean, by how many times, the longest first
    usual: Runs  # with the usual times of far ops
    healthy_ms: Floats  # (T,) these times without slow devices

    @property
    def causes(self) -> list[Loss]:
        """The avoidable parts that are a cause, the largest first; far ops are one if one of them cost so much of its
        step."""
        least_ms = CAUSE * float(np.mean(self.measured_ms))
        lost_ms = {"far-ops": max((each.lost_ms for each in self.far_ops), default=0.0)}
        large = [p for p in self.parts if p.avoidable and max(p.mean_ms, lost_ms.get(p.name, 0.0)) > least_ms]
        return sorted(large, key=lambda part: -part.mean_ms)

    @property
    def replay_error(self) -> float:
        """The mean error of a step, as a share of it."""
        return float(np.abs(self.replayed_ms / self.measured_ms - 1).mean())


def explain(runs: Runs) -> Losses:
    """Replay each step, then without one cause after the other."""
    replayed, usual = runs.longest(runs.replay()[0]), replace(runs, ms=usual_times(runs))
    measured = runs.longest(np.nan_to_num(runs.measured_ms, nan=-np.inf))
    measured = np.where(np.isfinite(measured), measured, replayed)
    slow, left = find_slow_devices(usual)
    step, healthy = runs.step[runs.run], usual.ms * left
    kind_in_step = _key(step, runs.kind)
    even = {"far-ops": usual.ms, "slow-device": healthy}
    even["replicas"] = _even(healthy, runs.run, step)
    even["micro-batches"] = _even(even["replicas"], _key(runs.run, runs.microbatch), runs.run)
    even["stages"] = _even(even["micro-batches"], _key(kind_in_step, runs.stage), kind_in_step, by_median=True)
    even["scatter"] = _even(even["stages"], np.arange(len(step)), kind_in_step)
    lengths = [measured, replayed, *(runs.longest(runs.replay(ms)[0]) for ms in even.values())]
    ideal = even["scatter"]
    lengths.append(runs.longest(runs.replay(ideal, with_messages=False)[0]))
    busy_ms = np.zeros((len(runs.step), runs.devices))
    np.add.at(busy_ms, (runs.run, runs.device), ideal)
    work = runs.longest(busy_ms.mean(axis=1))
    floors_ms = np.array([_floor_of_run(runs, run, ideal) for run in range(len(runs.step))])
    lengths += [np.minimum(runs.longest(floors_ms), lengths[-1]), work, np.zeros(len(work))]
    parts = tuple(Loss(name, before - after) for name, (before, after) in zip(NAMES, pairwise(lengths), strict=True))
    times = np.median(_by_microbatch(runs, even["micro-batches"])[0], axis=0)
    times /= max(times.mean(), NOTHING)
    longest = [(s, float(times[s])) for s in np.argsort(-times, kind="stable").tolist()]
    uneven = tuple((s, factor) for s, factor in longest if factor > 1 + UNEVEN)
    far = _far_ops(runs, usual.ms, replayed)
    return Losses(runs.steps, measured, replayed, parts, far, tuple(slow), uneven, usual, healthy)


def usual_times(runs: Runs) -> Floats:
    """(T,) the times of the ops; of far ops, what is usual for as much work."""
    log = np.log(np.maximum(runs.ms, np.finfo(float).tiny))
    like = _key(_key(runs.kind, runs.stage), runs.replica[runs.run])  # others may be slower
    microbatch = _key(runs.run, runs.microbatch)
    over = log - _median_of(log, like)
    work = _median_of(over, microbatch)
    excess = over - work
    excess -= np.maximum(0.0, _median_of(excess, _key(runs.run, runs.device)))  # of a device that is slower in all
    if len(runs.steps) >= FEWEST:  # what happens in most steps, as to a first micro-batch
        place = _key(_key(runs.replica[runs.run], runs.microbatch), like)
        excess -= np.maximum(0.0, _median_of(excess, place))
    spread = DEVIATION * _median_of(np.abs(excess), like)
    far = excess > np.maximum(np.log(FAR), CLEAR * spread)
    return np.where(far, runs.ms * np.exp(-excess), runs.ms)


def _far_ops(runs: Runs, usual_ms: Floats, replayed_ms: Floats) -> tuple[FarOp, ...]:
    """The far ops that took most beyond their usual time, each with what it cost its step."""
    far = []
    for n in np.argsort(usual_ms - runs.ms, kind="stable")[:MOST_FAR].tolist():
        if usual_ms[n] < runs.ms[n]:
            run, ms = int(runs.run[n]), runs.ms.copy()
            ms[n] = usual_ms[n]
            op = Op(Kind(int(runs.kind[n])), int(runs.stage[n]), int(runs.microbatch[n]))
            at = int(runs.replica[run]), int(runs.step[run]), float(runs.ms[n]), float(ms[n])
            lost_ms = (replayed_ms - runs.longest(runs.replay(ms)[0])).max()  # no other step differs
            far.append(FarOp(op, *at, float(lost_ms)))
    return tuple(sorted(far, key=lambda each: -each.lost_ms))


def find_slow_devices(runs: Runs) -> tuple[list[SlowDevice], Floats]:
    """The slow devices, the slowest first, and (T,) the share of each op's time that is left without them."""
    excess = excess_of(runs)  # (K, D), logarithms
    spread = DEVIATION * float(np.median(np.abs(excess - np.median(excess))))
    least = max(np.log1p(LEAST), CLEAR * spread)
    left = np.ones(len(runs.ms))
    slow = []
    for replica in runs.replicas.tolist():
        of_replica = np.flatnonzero(runs.replica == replica)
        of_replica = of_replica[np.argsort(runs.step[of_replica])]
        for device in range(runs.devices):
            over = excess[of_replica, device]
            first, last = _longest_phase(over - least)
            enough = min(FEWEST, -(-len(over) // 2))
            if last - first < enough or np.median(over[first:last]) <= least:
                continue
            phase = of_replica[first:last]
            factors = np.ones(len(runs.step))
            factors[phase] = np.exp(np.maximum(0.0, over[first:last]))
            left /= np.where(runs.device == device, factors[runs.run], 1.0)
            steps = runs.step[phase]
            median = float(np.exp(np.median(over[first:last])))
            slow.append(SlowDevice(replica, device, int(steps[0]), int(steps[-1]), first > 0, median))
    return sorted(slow, key=lambda each: -each.factor), left


def excess_of(runs: Runs) -> Floats:
    """(K, D) by how much longer a device takes than its stages and its run's work predict, as a logarithm."""
    stages, (totals, run) = len(runs.where), _by_microbatch(runs, runs.ms)
    log = np.log(np.maximum(totals, np.finfo(float).tiny))
    usual = np.broadcast_to(np.quantile(log, FAST, axis=0), log.shape)
    groups: list[Ints] = [np.arange(len(log))]
    for _ in range(ROUNDS):
        work = np.sort(log - usual, axis=1)[:, (stages - 1) // 2]
        usual = np.empty_like(log)
        for alike in groups:
            usual[alike] = np.quantile(log[alike] - work[alike, None], FAST, axis=0)
        # Where works differ by less than what is looked for, their order is noise.
        wanted = min(MOST_GROUPS, len(log) // ALIKE, int(np.diff(np.quantile(work, (0.05, 0.95)))[0] / LEAST))
        groups = np.array_split(np.argsort(work, kind="stable"), max(1, wanted))
    excess = log - usual - work[:, None]
    of_runs = np.split(excess, np.flatnonzero(np.diff(run)) + 1)
    of_stages = np.array([np.median(of_run, axis=0) for of_run in of_runs])
    on = [[s for s, device in enumerate(runs.where) if device == d] for d in range(runs.devices)]
    return np.column_stack([np.median(of_stages[:, stages], axis=1) for stages in on])


def _longest_phase(over: Floats) -> tuple[int, int]:
    """The begin and the end of the part whose sum is largest (Kadane); (0, 0) if no sum is positive."""
    best, total, begin, phase = 0.0, 0.0, 0, (0, 0)
    for n, each in enumerate(over.tolist()):
        if total <= 0:
            total, begin = 0.0, n
        total += each
        if total > best:
            best, phase = total, (begin, n + 1)
    return phase


def _floor_of_run(runs: Runs, run: int, ms: Floats) -> float:
    ops = runs.ops_of(run)
    microbatch = runs.microbatch[ops]
    cost = np.zeros((len(Kind), len(runs.where), 1 + int(microbatch.max())))
    cost[runs.kind[ops], runs.stage[ops], microbatch] = ms[ops]
    return _floor_of(cost[Kind.F], cost[Kind.B] + cost[Kind.BW], cost[Kind.W], runs.where)


def floor_ms(problem: Problem) -> float:
    """`_floor_of` a problem of one route."""
    ms = problem.costs.ms
    return _floor_of(ms[Kind.F], ms[Kind.B], ms[Kind.W], [stage.device for stage in problem.stages])


def _floor_of(forward: Floats, backward: Floats, weight: Floats, where: Sequence[int]) -> float:
    """What no order of a step's ops falls below: on some device what must run before its first op, then its ops, and
    what must run after its last backward. Times of F, of B or BW, and of W are (S, m); messages are left out."""
    before, after = (np.cumsum(each, axis=0) - each for each in (forward, backward))
    head, tail = before.min(axis=1), after.min(axis=1)
    chain = (forward + backward).sum(axis=1)
    work, floor = chain + weight.sum(axis=1), 0.0
    for d in range(1 + max(where)):
        on = [s for s, device in enumerate(where) if device == d]
        if on:
            floor = max(floor, head[on].min() + max(work[on].sum(), chain[on].sum() + tail[on].min()))
    return float(floor)


def _by_microbatch(runs: Runs, ms: Floats) -> tuple[Floats, Ints]:
    """(M, S) what each micro-batch of each run takes on each stage, and (M,) its run."""
    key, number = np.unique(_key(runs.run, runs.microbatch), return_inverse=True)
    totals, run = np.zeros((len(key), len(runs.where))), np.empty(len(key), np.int64)
    np.add.at(totals, (number, runs.stage), ms)
    run[number] = runs.run
    return totals, run


def _median_of(values: Floats, group: Ints) -> Floats:
    """(T,) the median of the values in the group of each, of two in the middle the lower one, which is usual."""
    _, group, count = np.unique(group, return_inverse=True, return_counts=True)
    ordered = values[np.lexsort((values, group))]
    medians: Floats = ordered[np.cumsum(count) - count + (count - 1) // 2][group]
    return medians


def _even(ms: Floats, one: Ints, among: Ints, by_median: bool = False) -> Floats:
    """The times with each group `one` of them taking the mean of all such groups in `among`."""
    _, one = np.unique(one, return_inverse=True)
    _, among = np.unique(among, return_inverse=True)
    of_group = np.zeros(one.max() + 1, np.int64)
    of_group[one] = among
    totals = np.bincount(one, _median_of(ms, one) if by_median else ms)
    means = np.bincount(of_group, totals) / np.bincount(of_group)
    some = totals > NOTHING
    evened: Floats = np.where(some[one], ms * (means[of_group] / np.where(some, totals, 1.0))[one], 0.0)
    return evened


def _key(major: Ints, minor: Ints) -> Ints:
    """A number for each pair."""
    key: Ints = major * (int(minor.max()) + 1) + minor
    return key
