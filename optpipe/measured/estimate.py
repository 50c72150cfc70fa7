"""Whole training steps as they ran become a `Problem`, and the order in which they ran a `Schedule`: medians for times,
the shortest gaps between ops for messages (`optpipe.measured.messages`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from optpipe.errors import InputError
from optpipe.measured.measurements import MeasuredTimes, Measurements, ProblemOptions, unknown_sentences
from optpipe.measured.messages import impossible
from optpipe.measured.recording import MeasuredOp, Recording
from optpipe.measured.steps import find_training_steps, listed
from optpipe.measured.training import TrainingSteps
from optpipe.model.figures import EachMs, each_microbatch, one_for_all
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.model.records import COMPUTE_MS
from optpipe.schedule import Schedule, certify

NO_TIME = "a step takes 0 ms: the times of its ops are expected"
Figures = Mapping[Kind, EachMs]  # of a stage
FIELDS = dict(zip((Kind.F, Kind.B, Kind.W), COMPUTE_MS, strict=True))


def estimate(recording: Recording, options: ProblemOptions) -> Measurements:
    """The problem of the whole training steps in a recording, or of one of them.

    Raises InputError if there is no whole step, an op is there twice in a step, or a step takes no time.
    """
    ops, left_out = _choose_replica(recording.ops, options.replica)
    training = find_training_steps(ops, options.step)
    is_one_step = options.step is not None or recording.steps_differ
    if is_one_step:
        training, others = _take_last_step(training, {each.step for each in ops})
        left_out += others
    times = _times(training)
    figures: Sequence[Figures] = [{kind: each.ms for kind, each in by_kind.items()} for by_kind in times]
    if is_one_step:
        figures = _step_figures(training, figures)
    messages_ms = [ms for of_step in training.messages_ms for ms in of_step]
    message = MeasuredTimes.from_samples(messages_ms) if messages_ms else None
    ample = _roomy_problem(figures, training.where, training.microbatches, message, options)
    if training.are_timed:
        spans_ms = training.spans_ms
    else:
        spans_ms = [recording.spans_ms[n] for step in training.steps if (n := step[0].step) in recording.spans_ms]
    measured_ms = median(spans_ms) if spans_ms else None
    if measured_ms == 0:
        raise InputError(NO_TIME)
    order, reasons = _order_that_ran(training, ample)
    unused = (
        *recording.unused,
        *left_out,
        *training.unused,
        *_unused_times(times, training, options, is_one_step),
        *reasons,
    )
    return _measurements(ample, times, message, options, unused, order, measured_ms, recording.on_host)


def _choose_replica(ops: Sequence[MeasuredOp], replica: int | None) -> tuple[Sequence[MeasuredOp], list[str]]:
    """The ops of one replica, by default the first; and that others are left out, as a sentence."""
    replicas = sorted({each.replica for each in ops})
    if not replicas:
        return ops, []
    chosen = replicas[0] if replica is None else replica
    if chosen not in replicas:
        raise InputError(f"replica = {chosen}: one of the replicas {listed(replicas)} is expected")
    others = len(replicas) - 1
    left_out = [f"{others} of {len(replicas)} replicas: this is replica {chosen}"] if others else []
    return [each for each in ops if each.replica == chosen], left_out


def _take_last_step(training: TrainingSteps, steps: Collection[int]) -> tuple[TrainingSteps, list[str]]:
    """The last of the steps, and how many are left out, as a sentence."""
    step = training.steps[-1]
    others = len(steps) - 1
    left_out = [f"{others} of {len(steps)} steps: this is step {step[0].step}"] if others else []
    return replace(training, steps=(step,)), left_out


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
    figures: Sequence[Figures],
    where: Sequence[int],
    microbatches: int,
    message: MeasuredTimes | None,
    options: ProblemOptions,
) -> Problem:
    """The problem, with more memory than anything needs."""
    sizes = options.activation_bytes or [1]
    if len(sizes) not in (1, len(figures)):
        raise InputError(f"activation_bytes has {len(sizes)} entries: one, or one for each of {len(figures)} stages")
    if not any(np.any(ms) for by_kind in figures for ms in by_kind.values()):
        raise InputError(NO_TIME)
    return Problem.from_dict(
        {
            "name": "" if options.activation_bytes else "1 B is one activation",  # where the bytes are drawn
            "microbatches": microbatches,
            "p2p_ms": message.ms if message else 0.0,
            "devices": [{"activation_budget_bytes": 2**53}] * (1 + max(where)),
            "stages": [
                {
                    "device": device,
                    **_stage_times(by_kind, options.weight_share),
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
    options: ProblemOptions,
    unused: tuple[str, ...],
    order: Schedule | None = None,
    measured_ms: float | None = None,
    on_host: bool = False,
) -> Measurements:
    """With the budgets that are given, or those that the order needs."""
    devices = range(len(ample.devices))
    needed = [peak.bytes for peak in certify(ample, order).device] if order else None
    if options.activation_budget_bytes is not None:
        budgets = [options.activation_budget_bytes for _ in devices]
        if needed and max(needed) > options.activation_budget_bytes:
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
    unknown = tuple(unknown_sentences(times, message, needed is not None, len(devices), options))
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
    times: Sequence[Mapping[Kind, MeasuredTimes]], training: TrainingSteps, options: ProblemOptions, is_one_step: bool
) -> list[str]:
    """What of the times and of what is given is not in the problem, or counts otherwise than it ran."""
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


def _stage_times(figures: Figures, weight_share: float | None) -> dict[str, EachMs]:
    """The fields of a stage. Where B and W were measured, a fused backward among them does not count."""
    if {Kind.B, Kind.W} <= figures.keys():
        return {field: figures[kind] for kind, field in FIELDS.items()}
    share, both = weight_share or 0.0, figures[Kind.BW]
    return {
        "forward_ms": figures[Kind.F],
        "backward_input_ms": each_microbatch(lambda ms: (1 - share) * ms, both),
        "backward_weight_ms": each_microbatch(lambda ms: share * ms, both),
    }
