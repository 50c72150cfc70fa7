"""Whole training steps as they ran become a `Problem`, and the order in which they ran a `Schedule`: medians for times,
the shortest gaps between ops for messages (`optpipe.measured.messages`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.measured.messages import gaps, impossible, spans_ms
from optpipe.measured.recording import MeasuredOp, Recording
from optpipe.measured.steps import Step, TrainingSteps, find_training_steps, listed
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.model.records import EachMs, each_microbatch, one_for_all
from optpipe.schedule import Schedule, ScheduleFile, certify

NO_TIME = "a step takes 0 ms: the times of its ops are expected"
Figures = Mapping[Kind, EachMs]  # of a stage
FIELDS = {Kind.F: "forward_ms", Kind.B: "backward_input_ms", Kind.W: "backward_weight_ms"}


@dataclass(frozen=True)
class MeasuredTimes:
    """Median and interquartile range of `count` times, in ms."""

    ms: float
    iqr_ms: float
    count: int

    @classmethod
    def from_samples(cls, times: Sequence[float]) -> MeasuredTimes:
        low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
        return cls(round(median(times), 4), round(high - low, 4), len(times))


@dataclass(frozen=True)
class Measurements:
    """A problem made of measurements.

    Attributes
    ----------
    problem
        It holds the medians, or of one step each micro-batch's own times.
    stages
        For each stage the times of its F, B, W or BW.
    message
        The times of messages; None where they are not known.
    unknown
        What the measurements do not say, and what the problem has instead, one sentence each.
    unused
        What was measured or given and is not in the problem, and why, one sentence each: steps, figures, the order.
    schedule
        What ran: the order of the last whole step, or of the one that was asked for; None where it is not known, which
        `unused` gives the reason for.
    measured_ms
        From the first start to the last end of a step, the median of all steps; None where it is not known.
    """

    problem: Problem
    stages: tuple[Mapping[Kind, MeasuredTimes], ...]
    message: MeasuredTimes | None
    unknown: tuple[str, ...]
    unused: tuple[str, ...]
    schedule: Schedule | None
    measured_ms: float | None

    @property
    def replayed_ms(self) -> float | None:
        """How long `schedule` takes by the problem's times."""
        return None if self.schedule is None else self.schedule.makespan_ms

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it; the schedule as its file has it."""
        return {
            "problem": self.problem.to_dict(),
            "stages": [{kind.name: asdict(spread) for kind, spread in times.items()} for times in self.stages],
            "message": self.message and asdict(self.message),
            "measured_ms": self.measured_ms,
            "replayed_ms": self.replayed_ms,
            "unknown": list(self.unknown),
            "unused": list(self.unused),
            "schedule": self.schedule
            and ScheduleFile.from_schedule(self.schedule).model_dump(mode="json", exclude_none=True),
        }


class Given(NamedTuple):
    """What a user says of the problem beside the measurements; None where nothing. See `problem_from`."""

    activation_bytes: Sequence[int] | None = None
    activation_budget_bytes: int | None = None
    weight_share: float | None = None
    step: int | None = None
    replica: int | None = None


def estimate(recording: Recording, given: Given) -> Measurements:
    """The problem of the whole training steps in a recording, or of one of them.

    Raises InputError if there is no whole step, an op is there twice in a step, or a step takes no time.
    """
    ops, left_out = _of_replica(recording.ops, given.replica)
    training = find_training_steps(ops, given.step)
    is_one_step = given.step is not None or recording.steps_differ
    if is_one_step:
        training, others = _one_step(training, {each.step for each in ops})
        left_out += others
    times = _times(training)
    figures: Sequence[Figures] = [{kind: each.ms for kind, each in by_kind.items()} for by_kind in times]
    if is_one_step:
        figures = _of_each_microbatch(training, figures)
    message = _message(training)
    ample = _ample(figures, training.where, training.microbatches, message, given)
    spans = spans_ms(training.steps, training.where)
    measured_ms = median(spans) if spans else None
    if measured_ms == 0:
        raise InputError(NO_TIME)
    order, reasons = _order(training, ample)
    unused = (
        *recording.unused,
        *left_out,
        *training.unused,
        *_unused_times(times, training, given, is_one_step),
        *reasons,
    )
    return _measurements(ample, times, message, given, unused, order, measured_ms, recording.on_host)


def estimate_sums(
    times: Sequence[Mapping[Kind, MeasuredTimes]], where: Sequence[int], microbatches: int, given: Given
) -> Measurements:
    """The same where only times by stage are known, and the device of each stage."""
    unused = ("the measured order: only sums of times were measured",)
    figures = [{kind: each.ms for kind, each in by_kind.items()} for by_kind in times]
    return _measurements(_ample(figures, where, microbatches, None, given), times, None, given, unused)


def _of_replica(ops: Sequence[MeasuredOp], replica: int | None) -> tuple[Sequence[MeasuredOp], list[str]]:
    """The ops of one replica, by default the first; and that others are left out, as a sentence."""
    replicas = sorted({each.replica for each in ops})
    if not replicas:
        return ops, []
    chosen = replicas[0] if replica is None else replica
    if chosen not in replicas:
        raise InputError(f"replica = {chosen}: one of the replicas {listed(replicas)} is expected")
    told = [] if len(replicas) == 1 else [f"{len(replicas) - 1} of {len(replicas)} replicas: this is replica {chosen}"]
    return [each for each in ops if each.replica == chosen], told


def _one_step(training: TrainingSteps, steps: Collection[int]) -> tuple[TrainingSteps, list[str]]:
    """The last of the steps, and how many are left out, as a sentence."""
    step = training.steps[-1]
    told = [] if len(steps) == 1 else [f"{len(steps) - 1} of {len(steps)} steps: this is step {step[0].step}"]
    return training._replace(steps=(step,)), told


def _message(training: TrainingSteps) -> MeasuredTimes | None:
    ways = [gap.message_ms for gap in gaps(training.steps) if not gap.same_device]
    return MeasuredTimes.from_samples([max(0.0, ms) for ms in ways]) if ways else None


def _of_each_microbatch(training: TrainingSteps, medians: Sequence[Figures]) -> list[Figures]:
    """By stage, the times of each micro-batch's ops in the only step; one number where they are equal.

    Where some micro-batches have B and W apart and one has them fused, its backward divides as the medians do.
    """
    (step,) = training.steps
    ms = {each.op: round(each.ms, 4) for each in step}
    figures: list[Figures] = []
    for s, median_ms in enumerate(medians):
        apart = {Kind.B, Kind.W} <= median_ms.keys()
        b_and_w = sum(one_for_all(median_ms[kind]) for kind in (Kind.B, Kind.W)) if apart else 0.0
        of_stage: dict[Kind, EachMs] = {}
        for kind in (Kind.F, Kind.B, Kind.W) if apart else (Kind.F, Kind.BW):
            share = one_for_all(median_ms[kind]) / b_and_w if b_and_w else 0.5
            each = tuple(
                ms[op] if (op := Op(kind, s, j)) in ms else round(share * ms[Op(Kind.BW, s, j)], 4)
                for j in range(training.microbatches)
            )
            of_stage[kind] = each if len(set(each)) > 1 else each[0]
        figures.append(of_stage)
    return figures


def _ample(
    figures: Sequence[Figures],
    where: Sequence[int],
    microbatches: int,
    message: MeasuredTimes | None,
    given: Given,
) -> Problem:
    """The problem, with more memory than anything needs."""
    sizes = given.activation_bytes or [1]
    if len(sizes) not in (1, len(figures)):
        raise InputError(f"activation_bytes has {len(sizes)} entries: one, or one for each of {len(figures)} stages")
    if not any(np.any(ms) for by_kind in figures for ms in by_kind.values()):
        raise InputError(NO_TIME)
    return Problem.from_dict(
        {
            "name": "" if given.activation_bytes else "1 B is one activation",  # where the bytes are drawn
            "microbatches": microbatches,
            "p2p_ms": message.ms if message else 0.0,
            "devices": [{"activation_budget_bytes": 2**53}] * (1 + max(where)),
            "stages": [
                {
                    "device": device,
                    **_ms(by_kind, given.weight_share),
                    "activation_bytes": size,
                    "saved_for_weight_bytes": size,
                }
                for by_kind, device, size in zip(figures, where, [*sizes] * (len(figures) // len(sizes)), strict=True)
            ],
        }
    )


def _measurements(
    ample: Problem,
    times: Sequence[Mapping[Kind, MeasuredTimes]],
    message: MeasuredTimes | None,
    given: Given,
    unused: tuple[str, ...],
    order: Schedule | None = None,
    measured_ms: float | None = None,
    on_host: bool = False,
) -> Measurements:
    """With the budgets that are given, or those that the order needs."""
    devices = range(len(ample.devices))
    needed = [peak.bytes for peak in certify(ample, order).device] if order else None
    if given.activation_budget_bytes is not None:
        budgets = [given.activation_budget_bytes for _ in devices]
        if needed and max(needed) > given.activation_budget_bytes:
            d = needed.index(max(needed))
            unused += (
                f"what the measured order holds: {needed[d]} bytes on device {d}, more than the budget that was given, "
                f"{budgets[d]}",
            )
    elif needed is not None:
        budgets = needed
    else:
        held = ample.costs.activation.sum(axis=1)
        budgets = [int(held[ample.stages_on(d)].sum()) for d in devices]
    problem = ample.replace(devices=[{"activation_budget_bytes": budget} for budget in budgets])
    unknown = tuple(_unknown(times, message, needed is not None, len(devices), given))
    if on_host:
        unknown = ("times of a device: these are the host's", *unknown)
    return Measurements(problem, tuple(times), message, unknown, unused, order and order.on(problem), measured_ms)


def _times(training: TrainingSteps) -> list[dict[Kind, MeasuredTimes]]:
    """By stage, the times of its ops."""
    by_kind: list[dict[Kind, list[float]]] = [defaultdict(list) for _ in training.where]
    for each in training.ops:
        by_kind[each.op.stage][each.op.kind].append(each.ms)
    return [
        {kind: MeasuredTimes.from_samples(times) for kind, times in sorted(of_stage.items())} for of_stage in by_kind
    ]


def _unused_times(
    times: Sequence[Mapping[Kind, MeasuredTimes]], training: TrainingSteps, given: Given, is_one_step: bool
) -> list[str]:
    """What of the times and of what is given is not in the problem, or counts otherwise than it ran."""
    said = []
    fused = [s for s, by_kind in enumerate(times) if {Kind.B, Kind.W, Kind.BW} <= by_kind.keys()]
    if fused and not is_one_step:
        said.append(
            f"the times of BW on stage {fused[0]}{' and others' if fused[1:] else ''}: B and W were measured apart, "
            "and a BW takes the sum of the two"
        )
    if given.weight_share is not None and all(Kind.W in by_kind for by_kind in times):
        said.append("the share of W that was given: B and W were measured apart")
    if overlapping := overlapping_ops(training.steps[-1]):
        said.append(
            "that ops ran beside each other, such as {} and {}: each counts with its whole time, one after the "
            "other".format(*overlapping)
        )
    return said


def overlapping_ops(step: Step) -> tuple[Op, Op] | None:
    """Two ops of a device one of which began before the other was half over."""
    last: dict[int, MeasuredOp] = {}
    for each in sorted(step, key=lambda each: each.start_ms or 0.0):
        before = last.get(each.device)
        if before and each.start_ms is not None and before.end_ms - each.start_ms > max(before.ms, each.ms) / 2 > 0:
            return before.op, each.op
        last[each.device] = each
    return None


def _ms(figures: Figures, weight_share: float | None) -> dict[str, EachMs]:
    """The fields of a stage. Where B and W were measured, a fused backward among them does not count."""
    if {Kind.B, Kind.W} <= figures.keys():
        return {field: figures[kind] for kind, field in FIELDS.items()}
    share, both = weight_share or 0.0, figures[Kind.BW]
    return {
        "forward_ms": figures[Kind.F],
        "backward_input_ms": each_microbatch(lambda ms: (1 - share) * ms, both),
        "backward_weight_ms": each_microbatch(lambda ms: share * ms, both),
    }


def _order(training: TrainingSteps, problem: Problem) -> tuple[Schedule | None, list[str]]:
    """The last whole step as a schedule, and why it is not used, or not all of it."""
    why = "the measured order: {}"
    if any(each.start_ms is None for each in training.ops):
        return None, [why.format("not all starts were measured")]
    if reason := impossible(training.steps):
        return None, [why.format(reason)]
    orders = [programs_of(step, len(problem.devices)) for step in training.steps]
    schedule = Schedule(problem, tuple(map(Program.from_items, orders[-1])), method="measured")
    if complaints := schedule.compiled.complaints:
        return None, [why.format(complaints[0])]
    others = sum(order != orders[-1] for order in orders)
    return schedule, [f"the order of {others} of {len(orders)} steps: the last one ran in another"] if others else []


def programs_of(step: Step, devices: int) -> tuple[tuple[Op, ...], ...]:
    """By device, its ops in the order in which they began."""
    ops: list[list[Op]] = [[] for _ in range(devices)]
    for each in sorted(step, key=lambda each: (each.start_ms or 0.0, each.end_ms)):
        ops[each.device].append(each.op)
    return tuple(map(tuple, ops))


def _unknown(
    times: Sequence[Mapping[Kind, Any]],
    message: MeasuredTimes | None,
    ordered: bool,
    devices: int,
    given: Given,
) -> list[str]:
    """What the measurements do not say, and what the problem has instead."""
    said = []
    if given.activation_bytes is None:
        said.append("the bytes of activations: each counts as 1 byte; give --activation-bytes")
    said.append("what stays saved from B until W: the whole activation; edit saved_for_weight_bytes")
    if given.activation_budget_bytes is None:
        said.append(
            f"the activation budget: {'what the measured order holds' if ordered else 'no limit'}; "
            "give --activation-budget-bytes"
        )
    if given.weight_share is None and any(Kind.W not in each for each in times):
        said.append(
            "how a backward divides into B and W: all of it is B, so a split gains nothing; give --weight-share"
        )
    if message is None and devices > 1:
        said.append("the time of messages: 0; edit p2p_ms")
    said.append(
        "offloading and recomputing: impossible; add offload_ms, reload_ms, offload_bytes, or recompute_ms, ..."
    )
    return said
