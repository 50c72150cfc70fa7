"""Whole training steps as they ran become a `Problem`, and the order in which they ran a `Schedule`: medians for times,
the shortest gaps between ops for messages (`optpipe.measured.messages`). `Measurements` also have the spreads of times,
and what was not measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median, quantiles
from typing import Any, NamedTuple, Self

import numpy as np

from optpipe.errors import InputError
from optpipe.measured.messages import impossible
from optpipe.measured.recording import Recording
from optpipe.measured.steps import TrainingSteps, find_training_steps, listed
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.model.records import COMPUTE_MS, EachMs, each_microbatch, one_for_all
from optpipe.schedule import Schedule, ScheduleFile, certify

NO_TIME = "a step takes 0 ms: the times of its ops are expected"
ACTIVATION_BYTES = 12  # of an activation of unknown size: up to four chunks divide it
Figures = Mapping[Kind, EachMs]  # of a stage
FIELDS = dict(zip((Kind.F, Kind.B, Kind.W), COMPUTE_MS, strict=True))


@dataclass(frozen=True, order=True)
class MeasuredTimes:
    """Median and interquartile range of `count` times, in ms."""

    ms: float
    iqr_ms: float
    count: int

    @classmethod
    def from_samples(cls, times: Sequence[float]) -> Self:
        low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
        return cls(round(median(times), 4), round(high - low, 4), len(times))


@dataclass(frozen=True)
class Measurements:
    """A problem with the spreads of its times, and what measurements lack.

    Attributes
    ----------
    problem
        It holds the medians, or of one step each micro-batch's own times.
    stages
        For each stage the times of its F, B, W or BW.
    message
        The times of messages; None where they are unknown.
    unknown
        What the measurements lack, and what the problem has instead, one sentence each.
    unused
        What was measured or given and is not in the problem, and why, one sentence each: steps, figures, the order.
    schedule
        What ran: the order of the last whole step, or of the one that was asked for; None where it is unknown, with
        the reason in `unused`.
    measured_ms
        From the first start to the last end of a step, the median of all steps; None where it is unknown.
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


class ProblemOptions(NamedTuple):
    """A user's facts of the problem beside the measurements; None where unknown. See `problem_from`."""

    activation_bytes: Sequence[int] | None = None
    activation_budget_bytes: int | None = None
    weight_share: float | None = None
    step: int | None = None
    replica: int | None = None


def estimate(recording: Recording, options: ProblemOptions) -> Measurements:
    """The problem of the whole training steps in a recording, or of one of them.

    Raises InputError if there is no whole step, an op is there twice in a step, or a step takes no time.
    """
    replicas = sorted({each.replica for each in recording.ops}) or [0]
    replica = replicas[0] if options.replica is None else options.replica
    if recording.ops and replica not in replicas:
        raise InputError(f"replica = {replica}: one of the replicas {listed(replicas)} is expected")
    unused = list(recording.unused)
    if others := len(replicas) - 1:
        unused.append(f"{others} of {len(replicas)} replicas: this is replica {replica}")
    ops = [each for each in recording.ops if each.replica == replica]
    training = find_training_steps(ops, options.step)
    is_one_step = options.step is not None or recording.steps_differ
    if is_one_step:
        training = replace(training, steps=training.steps[-1:])
        all_steps = {each.step for each in ops}
        if others := len(all_steps) - 1:
            unused.append(f"{others} of {len(all_steps)} steps: this is step {training.steps[0][0].step}")
    by_kind: list[dict[Kind, list[float]]] = [defaultdict(list) for _ in training.where]
    for each in training.ops:
        by_kind[each.op.stage][each.op.kind].append(each.ms)
    times = tuple({kind: MeasuredTimes.from_samples(ms) for kind, ms in sorted(each.items())} for each in by_kind)
    figures: Sequence[Figures] = [{kind: each.ms for kind, each in of_stage.items()} for of_stage in times]
    if is_one_step:
        figures = _step_figures(training, figures)
    messages_ms = [ms for of_step in training.messages_ms for ms in of_step]
    message = MeasuredTimes.from_samples(messages_ms) if messages_ms else None
    ample = _roomy_problem(figures, training, message, options)
    if training.are_timed:
        spans_ms = training.spans_ms
    else:
        spans_ms = [recording.spans_ms[n] for step in training.steps if (n := step[0].step) in recording.spans_ms]
    measured_ms = median(spans_ms) if spans_ms else None
    if measured_ms == 0:
        raise InputError(NO_TIME)
    schedule, reasons = _order_that_ran(training, ample)
    problem, exceeded = _with_budgets(ample, schedule, options.activation_budget_bytes)
    unused += [*training.unused, *_unused_times(times, training, options, is_one_step), *reasons, *exceeded]
    unknown = ["times of a device: these are the host's"] if recording.on_host else []
    held = max(device.activation_budget_bytes for device in problem.devices) if schedule else None
    unknown += _unknown(times, message, held, len(problem.devices), options)
    ran = schedule and schedule.on(problem)
    return Measurements(problem, times, message, tuple(unknown), tuple(unused), ran, measured_ms)


def _order_that_ran(training: TrainingSteps, problem: Problem) -> tuple[Schedule | None, list[str]]:
    """The last whole step as a schedule, and why it is not used, or not all of it."""
    reason = impossible(training.steps) if training.are_timed else "not all starts were measured"
    if reason is None:
        orders = [training.order_of(step) for step in training.steps]
        schedule = Schedule(problem, tuple(map(Program.from_items, orders[-1])), method="measured")
        others = sum(order != orders[-1] for order in orders)
        if not (complaints := schedule.compiled.complaints):
            ignored = f"the order of {others} of {len(orders)} steps: the last one ran in another"
            return schedule, [ignored] if others else []
        reason = complaints[0]
    return None, [f"the measured order: {reason}"]


def _step_figures(training: TrainingSteps, medians: Sequence[Figures]) -> list[Figures]:
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


def _roomy_problem(
    figures: Sequence[Figures], training: TrainingSteps, message: MeasuredTimes | None, options: ProblemOptions
) -> Problem:
    """The problem, with more memory than anything needs."""
    sizes = options.activation_bytes or [ACTIVATION_BYTES]
    if len(sizes) not in (1, len(figures)):
        raise InputError(f"activation_bytes has {len(sizes)} entries: one, or one for each of {len(figures)} stages")
    if not any(np.any(ms) for by_kind in figures for ms in by_kind.values()):
        raise InputError(NO_TIME)
    sizes, share = [*sizes] * (len(figures) // len(sizes)), options.weight_share or 0.0
    held = ("activation_bytes", "saved_for_weight_bytes")
    return Problem.from_dict(
        {
            # where the bytes are drawn
            "name": "" if options.activation_bytes else f"{ACTIVATION_BYTES} B is one activation",
            "microbatches": training.microbatches,
            "p2p_ms": message.ms if message else 0.0,
            "devices": [{"activation_budget_bytes": 2**53}] * training.devices,
            "stages": [
                {"device": device, **_stage_times(by_kind, share), **dict.fromkeys(held, size)}
                for by_kind, device, size in zip(figures, training.where, sizes, strict=True)
            ],
        }
    )


def _stage_times(figures: Figures, weight_share: float) -> dict[str, EachMs]:
    """The fields of a stage. Where B and W were measured, a fused backward among them does not count."""
    if {Kind.B, Kind.W} <= figures.keys():
        return {field: figures[kind] for kind, field in FIELDS.items()}
    return {
        "forward_ms": figures[Kind.F],
        "backward_input_ms": each_microbatch(lambda ms: (1 - weight_share) * ms, figures[Kind.BW]),
        "backward_weight_ms": each_microbatch(lambda ms: weight_share * ms, figures[Kind.BW]),
    }


def _with_budgets(ample: Problem, order: Schedule | None, budget: int | None) -> tuple[Problem, list[str]]:
    """The problem with this budget, or with those that the order needs; and a sentence if it needs more."""
    devices, exceeded = range(len(ample.devices)), list[str]()
    needed = [peak.bytes for peak in certify(ample, order).device] if order else None
    if budget is not None:
        budgets = [budget for _ in devices]
        if needed and max(needed) > budget:
            d = needed.index(max(needed))
            exceeded.append(
                f"what the measured order holds: {needed[d]} bytes on device {d}, more than the budget that was given, "
                f"{budget}"
            )
    elif needed is not None:
        budgets = needed
    else:
        held = ample.costs.activation.sum(axis=1)
        budgets = [int(held[ample.stages_on(d)].sum()) for d in devices]
    return ample.replace(devices=[{"activation_budget_bytes": each} for each in budgets]), exceeded


def _unused_times(
    times: Sequence[Mapping[Kind, MeasuredTimes]], training: TrainingSteps, options: ProblemOptions, is_one_step: bool
) -> list[str]:
    """Times and options that are not in the problem, or count otherwise than they ran."""
    sentences = []
    fused = [s for s, by_kind in enumerate(times) if {Kind.B, Kind.W, Kind.BW} <= by_kind.keys()]
    if fused and not is_one_step:
        sentences.append(
            f"the times of BW on stage {fused[0]}{' and others' if fused[1:] else ''}: B and W were measured apart, "
            "and a BW takes the sum of the two"
        )
    if options.weight_share is not None and all(Kind.W in by_kind for by_kind in times):
        sentences.append("the share of W that was given: B and W were measured apart")
    if overlap := training.overlap:
        sentences.append(overlap)
    return sentences


def _unknown(
    times: Sequence[Mapping[Kind, MeasuredTimes]],
    message: MeasuredTimes | None,
    held: int | None,
    devices: int,
    options: ProblemOptions,
) -> list[str]:
    """What the measurements lack, and what the problem has instead. `held` is what the fullest device held."""
    sentences = []
    if options.activation_bytes is None:
        sentences.append(f"the bytes of activations: each counts as {ACTIVATION_BYTES}; give --activation-bytes")
    sentences.append("what stays saved from B until W: the whole activation; edit saved_for_weight_bytes")
    if options.activation_budget_bytes is None:
        give = "give --activation-budget-bytes"
        sentences.append(
            f"the activation budget: no limit; {give}"
            if held is None
            else f"the activation budget: what each device held; {give}, {held} for what the fullest held, as diagnose"
        )
    if options.weight_share is None and any(Kind.W not in each for each in times):
        sentences.append(
            "how a backward divides into B and W: all of it is B, so a split gains nothing; give --weight-share"
        )
    if message is None and devices > 1:
        sentences.append("the time of messages: 0; edit p2p_ms")
    sentences.append(
        "offloading and recomputing: impossible; add offload_ms, reload_ms, offload_bytes, or recompute_ms, ..."
    )
    return sentences
