"""Where the time of a step goes: replays in which one thing after the other is made ideal. Each loss is the difference
of two replays, so together with the work they are exactly the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from optpipe.diagnose.runs import Runs
from optpipe.diagnose.slow import SlowDevice, find_slow_devices
from optpipe.model.arrays import Floats, Ints
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem

CAUSE = 0.03  # of the step: what costs less is no cause
NOTHING = 1e-9  # ms that no clock tells from 0
UNEVEN = 0.05  # how much more than the mean a stage must take to be named


class Loss(NamedTuple):
    """A part of each step.

    Attributes
    ----------
    name
        One of `NAMES`.
    ms
        (N,) of each step; below 0 where the step would have been longer.
    avoidable
        Whether something of it could be spared: all but the work, and what no schedule can avoid.
    """

    name: str
    ms: Floats
    avoidable: bool = True

    @property
    def mean_ms(self) -> float:
        """The mean over the steps; those of all parts are together the mean step."""
        return float(np.mean(self.ms))


# In this order things are made ideal; what they are is said as the end of a sentence.
NAMES = {
    "unexplained": "what a replay does not explain",
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
    """The parts of each step, (N,).

    Attributes
    ----------
    steps, measured_ms, replayed_ms
        (N,) the numbers of the steps, how long they took, and how long they take in a replay. Where clocks do not tell
        how long they took, that is the replay.
    parts
        What they consist of.
    slow_devices
        The slow ones, the slowest first.
    uneven_stages
        The stages that take longer than the mean, with how many times as long, the longest first.
    healthy_ms
        (T,) the times of the ops without slow devices.
    """

    steps: Ints
    measured_ms: Floats
    replayed_ms: Floats
    parts: tuple[Loss, ...]
    slow_devices: tuple[SlowDevice, ...]
    uneven_stages: tuple[tuple[int, float], ...]
    healthy_ms: Floats

    @property
    def causes(self) -> list[Loss]:
        """The avoidable parts that are a cause, the largest first."""
        step_ms = float(np.mean(self.measured_ms))
        large = [part for part in self.parts if part.avoidable and part.mean_ms > CAUSE * step_ms]
        return sorted(large, key=lambda part: -part.mean_ms)

    @property
    def replay_error(self) -> float:
        """The mean error of a step, as a share of it."""
        return float(np.abs(self.replayed_ms / self.measured_ms - 1).mean())


def explain(runs: Runs) -> Losses:
    """Replay each step, then without one cause after the other."""
    replayed = runs.longest(runs.replay()[0])
    measured = runs.longest(np.nan_to_num(runs.measured_ms, nan=-np.inf))
    measured = np.where(np.isfinite(measured), measured, replayed)
    slow, left = find_slow_devices(runs)
    step, healthy = runs.step[runs.run], runs.ms * left
    kind_in_step = _key(step, runs.kind)
    even = {"slow-device": healthy}
    even["replicas"] = _even(healthy, runs.run, step)
    even["micro-batches"] = _even(even["replicas"], _key(runs.run, runs.microbatch), runs.run)
    even["stages"] = _even(even["micro-batches"], _key(kind_in_step, runs.stage), kind_in_step)
    even["scatter"] = _even(even["stages"], np.arange(len(step)), kind_in_step)
    lengths = [measured, replayed, *(runs.longest(runs.replay(ms)[0]) for ms in even.values())]
    ideal = even["scatter"]
    lengths.append(runs.longest(runs.replay(ideal, with_messages=False)[0]))
    work = runs.longest(_busy_ms(runs, ideal).mean(axis=1))
    lengths += [np.minimum(runs.longest(_floors_ms(runs, ideal)), lengths[-1]), work]
    parts = [
        Loss(name, before - after, name not in ("unexplained", "bubble"))
        for name, before, after in zip(NAMES, lengths, lengths[1:], strict=False)
    ]
    stages = tuple(_uneven(runs, even["micro-batches"]))
    return Losses(runs.steps, measured, replayed, (*parts, Loss("work", work, False)), tuple(slow), stages, healthy)


def _floors_ms(runs: Runs, ms: Floats) -> Floats:
    """(K,) what no order of a run's ops falls below (`floor_of`)."""
    floors = []
    for run in range(len(runs.step)):
        ops = runs.ops_of(run)
        kind, stage, microbatch = runs.kind[ops], runs.stage[ops], runs.microbatch[ops]
        cost = np.zeros((len(Kind), len(runs.where), 1 + int(microbatch.max())))
        cost[kind, stage, microbatch] = ms[ops]
        floors.append(floor_of(cost[Kind.F], cost[Kind.B] + cost[Kind.BW], cost[Kind.W], runs.where))
    return np.array(floors)


def floor_of(forward: Floats, backward: Floats, weight: Floats, where: Sequence[int]) -> float:
    """What no order of a step's ops falls below: on some device what must run before its first op, then its ops, and
    what must run after its last backward.

    Parameters
    ----------
    forward, backward, weight
        (S, m) the times of F, of B or BW, and of W, in ms. Messages are left out.
    where
        By stage: its device.
    """
    before, after = (np.cumsum(each, axis=0) - each for each in (forward, backward))
    head, tail = before.min(axis=1), after.min(axis=1)
    chain = (forward + backward).sum(axis=1)
    work, floor = chain + weight.sum(axis=1), 0.0
    for d in range(1 + max(where)):
        on = [s for s, device in enumerate(where) if device == d]
        if on:
            floor = max(floor, head[on].min() + max(work[on].sum(), chain[on].sum() + tail[on].min()))
    return float(floor)


def floor_ms(problem: Problem) -> float:
    """`floor_of` a problem of one route."""
    ms = problem.costs.ms
    return floor_of(ms[Kind.F], ms[Kind.B], ms[Kind.W], [stage.device for stage in problem.stages])


def _even(ms: Floats, one: Ints, among: Ints) -> Floats:
    """The times with each group `one` of them taking the mean of all such groups in `among`."""
    _, one = np.unique(one, return_inverse=True)
    _, among = np.unique(among, return_inverse=True)
    of_group = np.zeros(one.max() + 1, np.int64)
    of_group[one] = among
    totals = np.bincount(one, ms)
    means = np.bincount(of_group, totals) / np.bincount(of_group)
    some = totals > NOTHING
    evened: Floats = np.where(some[one], ms * (means[of_group] / np.where(some, totals, 1.0))[one], 0.0)
    return evened


def _key(major: Ints, minor: Ints) -> Ints:
    """A number for each pair."""
    key: Ints = major * (int(minor.max()) + 1) + minor
    return key


def _busy_ms(runs: Runs, ms: Floats) -> Floats:
    """(K, D) how long each device computes."""
    busy = np.zeros((len(runs.step), runs.devices))
    np.add.at(busy, (runs.run, runs.device), ms)
    return busy


def _uneven(runs: Runs, ms: Floats) -> list[tuple[int, float]]:
    """Stages that take longer than the mean stage, by how many times, the longest first."""
    totals = np.zeros((len(runs.step), len(runs.where)))
    np.add.at(totals, (runs.run, runs.stage), ms)
    times = np.median(totals / totals.mean(axis=1, keepdims=True), axis=0)
    long = [(s, float(times[s])) for s in np.argsort(-times, kind="stable").tolist()]
    return [(s, factor) for s, factor in long if factor > 1 + UNEVEN]
