"""What ran, as arrays: each whole training step of each replica is a run, with its own op times, its own messages and
the order in which its ops ran. `collect_runs` makes them of a recording: which steps count, when each began on each
device, and what passes between ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from statistics import median
from typing import NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.evaluate.timeline import timed_samples
from optpipe.formats import megatron
from optpipe.measured.estimate import NO_TIME
from optpipe.measured.messages import impossible
from optpipe.measured.recording import MeasuredOp, Recording
from optpipe.measured.steps import Order, TrainingSteps, find_training_steps
from optpipe.model.arrays import NONE, Floats, Ints
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.model.records import COMPUTE_MS
from optpipe.schedule import Schedule

ACTIVATION = 720720  # bytes that stand for one activation of a stage: up to 15 chunks divide it
AMPLE = 2**53
WARM_UP = 2.0  # a first step that takes so many times the median is one in which kernels are compiled or tuned
QUICK = 0.25  # the quantile of the gaps of a device that counts as its hand-over
ASSUMED = "Megatron's, 1F1B or interleaved 1F1B"


@dataclass(frozen=True, eq=False)
class Runs:
    """Steps of replicas, each a run, (K,); their ops, run after run, (T,), as the run's order has them."""

    orders: tuple[Schedule, ...]  # the different orders in which they ran, of a problem whose ops all take 1 ms
    order: Ints  # (K,) the place in `orders`
    step: Ints  # (K,)
    replica: Ints  # (K,)
    measured_ms: Floats  # (K,) from the first start to the last end; NaN where clocks do not show it
    message_ms: Floats  # (K,) how long a message took
    begins: Ints  # (K + 1,) where each run's ops begin
    kind: Ints  # (T,)
    stage: Ints  # (T,)
    microbatch: Ints  # (T,)
    device: Ints  # (T,)
    ms: Floats  # (T,)
    handover_ms: Floats  # (D,) what passes from the end of an op to the start of the next one, though that could run
    where: tuple[int, ...]  # by stage: its device
    unused: tuple[str, ...]  # what was not used, and why, one sentence each
    assumed: tuple[str, ...]  # what the files lack and is assumed, one sentence each

    @cached_property
    def run(self) -> Ints:
        """(T,) the run of each op."""
        return np.repeat(np.arange(len(self.step)), np.diff(self.begins))

    @cached_property
    def steps(self) -> Ints:
        """(N,) the numbers of the steps."""
        return np.unique(self.step)

    @cached_property
    def replicas(self) -> Ints:
        return np.unique(self.replica)

    @property
    def devices(self) -> int:
        return 1 + max(self.where)

    def ops_of(self, run: int) -> slice:
        return slice(int(self.begins[run]), int(self.begins[run + 1]))

    def runs_of(self, step: int) -> Ints:
        """The runs of a step: one a replica."""
        return np.flatnonzero(self.step == step)

    def longest(self, lengths_ms: Floats) -> Floats:
        """(N,) of each step the slowest replica's length; `lengths_ms` is (K,)."""
        longest = np.full(len(self.steps), -np.inf)
        np.maximum.at(longest, np.searchsorted(self.steps, self.step), lengths_ms)
        return longest

    def replay(self, ms: Floats | None = None, with_messages: bool = True) -> tuple[Floats, Floats, Floats]:
        """Each run again, its ops as early as its order, its messages and its hand-overs allow; `with_messages=False`
        takes no time for these two. `ms` is (T,) the times of the ops instead of their own.

        Returns (K,) the lengths, and (T,) the start and the end of each op.
        """
        ms = self.ms if ms is None else ms
        handover = self.handover_ms * with_messages
        starts, ends = np.empty_like(ms), np.empty_like(ms)
        for number, schedule in enumerate(self.orders):
            runs = np.flatnonzero(self.order == number)
            compiled = schedule.compiled
            device, (waits, unit) = compiled.rows.device, compiled.waits
            ops = self.begins[runs] + np.arange(len(device))[:, None]
            sender = handover[np.where(waits >= 0, device[waits], 0)]
            delay = np.maximum(0.0, self.message_ms[runs] * with_messages - sender[:, :, None]) * (unit > 0)[:, :, None]
            lasts = ms[ops] + handover[device][:, None]
            start, end = timed_samples(compiled.rows, waits, delay, lasts)
            starts[ops], ends[ops] = start, end - handover[device][:, None]
        lengths = np.full(len(self.step), -np.inf)
        np.maximum.at(lengths, self.run, ends)
        return lengths, starts, ends


class _Run(NamedTuple):
    """One step of one replica, before it becomes arrays."""

    ops: tuple[MeasuredOp, ...]  # device after device, in the order in which they ran
    order: Order
    measured_ms: float
    message_ms: float
    ahead_ms: tuple[float, ...]  # by device: how far its clock is ahead


def collect_runs(recording: Recording) -> Runs:
    """The whole training steps of all replicas of a recording.

    Raises InputError if no replica has a whole step, or its ops cannot have run at their times.
    """
    unused, assumed = list(recording.unused), list[str]()
    by_replica = defaultdict[int, list[MeasuredOp]](list)
    for each in recording.ops:
        by_replica[each.replica].append(each)
    if not by_replica:
        raise InputError("no op was measured")
    runs: list[_Run] = []
    errors = dict[int, InputError]()
    for number, ops in sorted(by_replica.items()):
        what = f"replica {number}: " if len(by_replica) > 1 else ""
        try:
            training = find_training_steps(ops)
            runs += _runs(training, recording.spans_ms, what, unused, assumed)
        except InputError as error:
            errors[number] = error
            unused.append(f"replica {number}: {error}: left out")
    if not runs:
        raise next(iter(errors.values()))
    where = {each.op.stage: each.device for run in runs for each in run.ops}
    if others := [run for run in runs if any(where[each.op.stage] != each.device for each in run.ops)]:
        first = others[0].ops[0]
        raise InputError(
            f"replica {first.replica}: its stages lie on other devices than those of replica {runs[0].ops[0].replica}"
        )
    kept = _comparable(runs, len(by_replica) - len(errors), unused)
    if any(not any(each.ms for each in run.ops) for run in kept):
        raise InputError(NO_TIME)
    if any(isnan(run.measured_ms) for run in kept):
        assumed.append("how long a step took: as long as in its replay, for that was not measured")
    return _as_arrays(kept, tuple(where[s] for s in range(len(where))), tuple(unused), tuple(dict.fromkeys(assumed)))


def _runs(
    training: TrainingSteps, whole_ms: Mapping[int, float], what: str, unused: list[str], assumed: list[str]
) -> list[_Run]:
    """The runs of one replica."""
    unused += [f"{what}{sentence}" for sentence in training.unused]
    if training.are_timed:
        if reason := impossible(training.steps):
            raise InputError(reason)
        if overlap := training.overlap:
            unused.append(f"{what}{overlap}")
        orders, spans_ms = [training.order_of(step) for step in training.steps], training.spans_ms
        ahead_ms = tuple(training.ahead_ms[d] for d in range(training.devices))
    else:
        orders = [_megatrons(training)] * len(training.steps)
        assumed.append(f"the order of ops: {ASSUMED}, as not all starts were measured")
        spans_ms = [whole_ms.get(step[0].step, float("nan")) for step in training.steps]
        ahead_ms = (0.0,) * training.devices
    runs = []
    for step, order, span_ms, messages_ms in zip(training.steps, orders, spans_ms, training.messages_ms, strict=True):
        at = {each.op: each for each in step}
        ops = tuple(at[op] for device in order for op in device)
        runs.append(_Run(ops, order, span_ms, median(messages_ms) if messages_ms else 0.0, ahead_ms))
    return runs


def _megatrons(training: TrainingSteps) -> Order:
    """The order of Megatron for these stages. Raises InputError if it has none."""
    devices, stages = training.devices, len(training.where)
    if stages % devices or list(training.where) != [s % devices for s in range(stages)]:
        raise InputError(
            "not all starts were measured, and the stages do not lie as Megatron has them: no order is known"
        )
    if any(each.op.kind not in (Kind.F, Kind.BW) for each in training.ops):
        raise InputError("not all starts were measured, and B and W are apart: no order is known")
    groups = megatron.in_groups(training.microbatches, devices)
    return tuple(map(tuple, megatron.order(devices, stages // devices, groups)))


def _comparable(runs: Sequence[_Run], replicas: int, unused: list[str]) -> list[_Run]:
    """The runs of steps that all replicas have, without first steps that take far longer than the others."""
    by_step = defaultdict[int, list[_Run]](list)
    for run in runs:
        by_step[run.ops[0].step].append(run)
    complete = {step: of_step for step, of_step in sorted(by_step.items()) if len(of_step) == replicas}
    if missing := len(by_step) - len(complete):
        unused.append(f"{missing} of {len(by_step)} steps: not all of the {replicas} replicas have them whole")
    if not complete:
        raise InputError(f"no step is whole on all of the {replicas} replicas")
    longest = {step: max(run.measured_ms for run in of_step) for step, of_step in complete.items()}
    usual = median(longest.values())
    first = next(iter(complete))
    if len(complete) > 2 and longest[first] > WARM_UP * usual:
        unused.append(
            f"step {first}: it took {longest[first]:.4g} ms, {longest[first] / usual:.1f} times the median of all "
            "steps, as a first step in which kernels are compiled or tuned"
        )
        del complete[first]
    return [run for of_step in complete.values() for run in of_step]


def _as_arrays(runs: Sequence[_Run], where: tuple[int, ...], unused: tuple[str, ...], assumed: tuple[str, ...]) -> Runs:
    orders = list(dict.fromkeys(run.order for run in runs))
    number = {order: n for n, order in enumerate(orders)}
    schedules = tuple(_schedule(order, where) for order in orders)
    ops = [each for run in runs for each in run.ops]
    arrays = Runs(
        orders=schedules,
        order=np.array([number[run.order] for run in runs]),
        step=np.array([run.ops[0].step for run in runs]),
        replica=np.array([run.ops[0].replica for run in runs]),
        measured_ms=np.array([run.measured_ms for run in runs]),
        message_ms=np.array([run.message_ms for run in runs]),
        begins=np.cumsum([0, *(len(run.ops) for run in runs)]),
        kind=np.array([int(each.op.kind) for each in ops]),
        stage=np.array([each.op.stage for each in ops]),
        microbatch=np.array([each.op.microbatch for each in ops]),
        device=np.array([each.device for each in ops]),
        ms=np.array([each.ms for each in ops]),
        handover_ms=np.zeros(1 + max(where)),
        where=where,
        unused=unused,
        assumed=assumed,
    )
    if any(each.start_ms is None for each in ops):
        return arrays
    ahead = np.concatenate([np.take(run.ahead_ms, [each.device for each in run.ops]) for run in runs])
    starts = np.array([each.start_ms or 0.0 for each in ops]) - ahead
    return replace(arrays, handover_ms=_handovers(arrays, starts))


def _schedule(order: Order, where: tuple[int, ...]) -> Schedule:
    """The order for stages whose ops take 1 ms each. Raises InputError if nothing can run in this order."""
    stage = dict.fromkeys(COMPUTE_MS, 1.0) | dict.fromkeys(("activation_bytes", "saved_for_weight_bytes"), ACTIVATION)
    problem = Problem.from_dict(
        {
            "name": "what ran",
            "microbatches": 1 + max(op.microbatch for ops in order for op in ops),
            "p2p_ms": 1.0,
            "devices": [{"activation_budget_bytes": AMPLE}] * (1 + max(where)),
            "stages": [{"device": device, **stage} for device in where],
        }
    )
    schedule = Schedule(problem, tuple(Program.from_items(ops) for ops in order), method="what ran")
    if complaints := schedule.compiled.complaints:
        raise InputError(f"the measured order: {complaints[0]}")
    return schedule


def _handovers(runs: Runs, starts: Floats) -> Floats:
    """(D,) from op to op on each device, where the next one had all it needs: a quarter of these gaps are shorter."""
    ends = starts + runs.ms
    gap, device = list[Floats](), list[Ints]()
    for number, schedule in enumerate(runs.orders):
        chosen = np.flatnonzero(runs.order == number)
        waits, unit = schedule.compiled.waits
        ops = runs.begins[chosen] + np.arange(len(waits))[:, None]
        before = waits[:, -1]  # on its stream
        rows = np.flatnonzero(before != NONE)
        ended = ends[ops][before[rows]]
        ready = np.full(ended.shape, -np.inf)
        for column in range(waits.shape[1] - 1):
            needed = waits[rows, column]
            arrived = ends[ops][needed] + runs.message_ms[chosen] * (unit[rows, column] > 0)[:, None]
            np.maximum(ready, np.where(needed[:, None] != NONE, arrived, -np.inf), out=ready)
        at_once = ready <= ended
        gap.append((starts[ops][rows] - ended)[at_once])
        device.append(np.broadcast_to(schedule.compiled.rows.device[rows][:, None], ended.shape)[at_once])
    gaps_ms, devices = np.concatenate(gap), np.concatenate(device)
    of_device = [gaps_ms[devices == d] for d in range(runs.devices)]
    return np.array([max(0.0, float(np.quantile(each, QUICK))) if len(each) else 0.0 for each in of_device])
