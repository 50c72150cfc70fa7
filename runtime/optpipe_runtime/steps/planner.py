"""`StepPlanner`: plans the steps to come, on one rank of a pipeline, by what their micro-batches will cost.

Times of F, B and W follow from features of a micro-batch by a `CostModel` that learns from every step. All other
figures follow from the profiles: bytes, offloads, recomputes, messages. A micro-batch larger than all profiled ones is
profiled before it runs, so that its bytes are measured and not extrapolated. Where a step held more bytes than
certified nevertheless, all bytes are from then on as many times larger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from math import ceil
from operator import gt
from typing import Any, NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.records import of_microbatch
from optpipe.schedule import Schedule
from optpipe.steps import CostModel, StepRules, StepScheduler
from optpipe.steps.cost_model import LEARNT, WINDOW, robust_fit
from optpipe_runtime.execute.batch import BatchShapes
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.measure.measured import figure_or_nothing

TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms")
F, B, W = range(3)
HELD = ("activation_bytes", "saved_for_weight_bytes", "checkpoint_bytes")
FAIR_PART = 8  # one of so many
MOST_STEPS = 8  # whose features are kept for the times that are to come
IMPROVE_SHARE = 0.33  # of a step's time, until the next one's schedule is sent: more gains little

Features = Sequence[Mapping[str, float]]  # of each micro-batch
Row = tuple[float, ...]  # the features of one


class MeasuredStep(NamedTuple):
    number: int
    times: Mapping[int, Floats]  # by stage: `TIMES` in ms, (3, m)
    excess: float  # how many times the certified bytes it held, at least 1


class StepAnnouncement(NamedTuple):
    number: int
    shapes: BatchShapes | InputError  # what it has of the micro-batches, or why that is none
    features: Features | None  # on the rank that plans
    measured: tuple[MeasuredStep, ...]  # the steps since its last announcement


class Unmeasured(NamedTuple):
    """Instead of a plan: these of so many micro-batches must be profiled first."""

    chosen: Sequence[int]
    microbatches: int


def measured_step(number: int, report: StepReport, problem: Problem, stages: Sequence[int]) -> MeasuredStep:
    """From the report of a timed step of this problem. A fused backward counts as the problem has its halves."""
    m = problem.microbatches
    times: dict[int, Floats] = {s: np.zeros((3, m)) for s in stages}
    for op, start_ms, end_ms, *_ in report.trace:
        ms, s, j = end_ms - start_ms, op.stage, op.microbatch
        if op.kind in (Kind.F, Kind.C):  # a forward that is repeated keeps nothing, so the repetition counts
            times[s][F, j] = ms
        elif op.kind == Kind.BW:
            stage = problem.stages[s]
            b, w = (of_microbatch(figure, j) for figure in (stage.backward_input_ms, stage.backward_weight_ms))
            share = b / (b + w) if b + w else 1.0
            times[s][[B, W], j] = share * ms, (1 - share) * ms
        elif op.kind in (Kind.B, Kind.W):
            times[s][B if op.kind == Kind.B else W, j] = ms
    excess = report.excess
    return MeasuredStep(number, times, excess.held_bytes / max(excess.certified_bytes, 1) if excess else 1.0)


class StepPlanner:
    """Plans steps on the rank of the first stage, `rank`. `times`: those learnt in an earlier training."""

    def __init__(self, rank: int, times: CostModel | None) -> None:
        self._rank, self.times = rank, times  # can be kept in a file; None until a first profile
        self.step_ms = 0.0  # that the last one took
        self._lock = threading.RLock()  # a step is planned while another one's micro-batches are profiled
        self._others: CostModel | None = None
        self._template: Problem | None = None  # the first profiled problem, with one figure for all micro-batches
        self._profiled: list[Row] = []  # the features of each profiled micro-batch
        self._message_ms: list[Any] = []  # of each of them
        self._measured: list[tuple[Features, Floats]] = []  # by steps whose times the model has not learnt
        self._learnt = 0  # micro-batches in the model's window
        self._features: dict[int, Features] = {}  # of the steps whose times are not here yet
        self._margin = 1.0  # how many times the certified bytes a step has held

    def plan(self, by_rank: Sequence[StepAnnouncement], begins: threading.Event) -> Schedule | Unmeasured:
        """In a thread beside the step before: from all ranks' announcements of a step, its schedule. Looks for better
        ones until the step `begins`, or a part of its time has passed."""
        own, began = by_rank[self._rank], time.monotonic()
        assert own.features is not None
        with self._lock:
            self._learn([each.measured for each in by_rank])
            if chosen := self._unmeasured(own.features):
                return Unmeasured(chosen, len(own.features))
            self._features[own.number] = own.features
            if len(self._features) > MOST_STEPS:
                del self._features[min(self._features)]
            problem = self.problem(own.features)
        assert self._template is not None
        assert self.times is not None
        starts = [self.times.rules] if self.times.rules else []
        planned = StepScheduler(self._template).plan(problem, starts=starts)
        begins.wait(max(0.0, began + IMPROVE_SHARE * self.step_ms / 1e3 - time.monotonic()))
        best = planned.best()
        if best.rules is not None:
            self.times.rules = StepRules(best.rules, problem)
        return best

    def add(self, profiled: Problem, features: Features) -> None:
        """A profile of micro-batches with these features."""
        m, names, stages = len(features), tuple(features[0]), profiled.stages
        measured = [{name: _each(figure_or_nothing(stage, name), m) for name in LEARNT} for stage in stages]
        with self._lock:
            is_first = self._others is None
            if self._others is None:
                self._template = profiled.replace(
                    microbatches=1,
                    stages=[stage.of_microbatch(0) for stage in stages],
                    p2p_ms=of_microbatch(profiled.p2p_ms, 0),
                )
                figures = [name for name in LEARNT if all(getattr(stage, name) is not None for stage in stages)]
                self._others = CostModel(names, len(stages), [name for name in figures if name not in TIMES])
            self.times = self.times or CostModel(names, len(stages), TIMES)
            self.times.learn(features, measured)
            self._others.learn(features, measured)
            self._profiled += map(_row, features)
            self._message_ms += _each(profiled.p2p_ms, m)
        if is_first and self._template is not None:
            StepScheduler(self._template).prepare()

    def problem(self, features: Features) -> Problem:
        """The problem of micro-batches with these features. Raises `InputError` if one is missing, or nothing is
        profiled yet."""
        with self._lock:
            if self.times is None or self._template is None or self._others is None:
                raise InputError("nothing is learnt yet: call problem after the first step")
            problem = self.times.problem(self._others.problem(self._template, features), features)
            rows = [tuple(float(each[name]) for name in self.times.features) for each in features]
            message_ms = robust_fit(_with_one(self._profiled), np.array(self._message_ms))
            stages = list(problem.stages)
            for s, stage in enumerate(stages) if self._margin > 1 else ():
                held = {name: _each(figure, len(rows)) for name in HELD if (figure := getattr(stage, name)) is not None}
                more = {name: tuple(ceil(self._margin * n) for n in figures) for name, figures in held.items()}
                stages[s] = stage.model_copy(update=more)
            return problem.replace(stages=stages, p2p_ms=tuple((_with_one(rows) @ message_ms).tolist()))

    def _learn(self, by_rank: Sequence[Sequence[MeasuredStep]]) -> None:
        """What all ranks have measured in their last steps. Of inner peers the slowest counts. Times are learnt once
        they are a fair part of the model's window: a fit costs as much as a plan."""
        steps = {step.number for steps in by_rank for step in steps}
        for number in sorted(steps & self._features.keys()):
            assert self._template is not None
            times = [np.zeros((3, len(self._features[number]))) for _ in self._template.stages]
            for step in (step for steps in by_rank for step in steps if step.number == number):
                self._margin = max(self._margin, self._margin * step.excess)
                for s, measured in step.times.items():
                    times[s] = np.maximum(times[s], measured)
            self._measured.append((self._features.pop(number), np.array(times)))
        count = sum(len(features) for features, _ in self._measured)
        if self.times is None or not count or FAIR_PART * count < self._learnt:
            return
        features = [each for of_step, _ in self._measured for each in of_step]
        together = np.concatenate([times for _, times in self._measured], axis=2)
        self.times.learn(features, [dict(zip(TIMES, stage, strict=True)) for stage in together])
        self._learnt = min(WINDOW, self._learnt + count)
        self._measured.clear()

    def _unmeasured(self, features: Features) -> list[int]:
        """Which micro-batches must be profiled to plan a step: the largest and the smallest first, as few as a fit
        needs."""
        rows = [_row(each) for each in features]
        by_size = sorted(range(len(rows)), key=lambda j: (sum(rows[j]), j))
        missing = len(rows[0]) + 1 - len(set(self._profiled))  # as many as a figure has coefficients
        chosen: dict[Row, int] = {}
        for j in [*by_size[:-2:-1], *by_size[:1], *by_size[len(rows) // 2 :], *by_size]:
            largest = [max(column) for column in zip(*self._profiled, *chosen, strict=True)]
            is_new = rows[j] not in self._profiled and rows[j] not in chosen
            if is_new and (len(chosen) < missing or any(map(gt, rows[j], largest))):
                chosen[rows[j]] = j
        return list(chosen.values())


def _row(features: Mapping[str, float]) -> Row:
    return tuple(map(float, features.values()))


def _with_one(rows: Sequence[Row]) -> Floats:
    return np.array([[*row, 1.0] for row in rows])


def _each(figure: Any, m: int) -> tuple[Any, ...]:
    """With a number for each micro-batch."""
    return figure if isinstance(figure, tuple) else (figure,) * m
