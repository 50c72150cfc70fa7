"""`Profiler`: op times of real steps while training goes on, and how far they are from the profile.

    profiler = Profiler(pipe)
    for inputs, targets in batches:
        profiler.add(pipe.step(inputs, targets, trace=True))
    problem = profiler.problem()                        # the profiled one, with the times of the last steps

Times are moving medians by stage and kind: over the micro-batches of a step, then over the last steps. So neither a
single op nor a single step counts. Bytes, and times of messages and of ops that did not run, stay as profiled; a
recompute that did not run changes in proportion to its forward.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Protocol

import numpy as np

from optpipe.errors import InputError
from optpipe.model.arrays import NONE
from optpipe.model.ops import KINDS, Kind
from optpipe.model.problem import Problem
from optpipe.model.records import Level, Stage, one_for_all
from optpipe_runtime.execute.report import StepReport

FIELDS = {kind: info.ms[0] for kind, info in KINDS.items() if len(info.ms) == 1}
WINDOW = 16  # steps
OF_LEVEL = {Kind.C: "recompute_ms", Kind.O: "offload_ms", Kind.R: "reload_ms"}  # of a level of recomputation
TRACED = 3  # of them, by `Follower`: the fewest whose median one slow step does not move

# ms of one op by stage, kind and, for C and what moves a checkpoint, level, else NONE; for O and R of one part
OpTimes = dict[tuple[int, Kind, int], float]


class Profiled(Protocol):
    """What `Profiler` uses of a `Pipeline`."""

    problem: Problem | None

    def gather(self, value: Any) -> list[Any]: ...


class Profiler:
    """Op times of this rank, as moving medians over the last `window` steps of a `Pipeline`. Raises `InputError` if
    `window` is less than 1."""

    def __init__(self, pipe: Profiled, window: int = WINDOW) -> None:
        if window < 1:
            raise InputError(f"window = {window}: must be at least 1 step")
        self._pipe = pipe
        self._steps_ms: defaultdict[tuple[int, Kind, int], deque[float]] = defaultdict(lambda: deque(maxlen=window))

    def add(self, report: StepReport) -> None:
        """Takes the trace of a step. Raises `InputError` if the step was not traced."""
        if not report.trace:
            raise InputError("Profiler.add was given a report without a trace: call step with trace=True")
        # A forward that a C repeats saves nothing, and so takes another time.
        levels = {(op.stage, op.microbatch): op.part for op, *_ in report.trace if op.kind == Kind.C}
        by_op = defaultdict(list)
        for op, start_ms, end_ms, *_ in report.trace:
            level = levels.get((op.stage, op.microbatch), NONE)
            if op.kind != Kind.F or level == NONE:
                by_op[op.stage, op.kind, level if op.kind in OF_LEVEL else NONE].append(end_ms - start_ms)
        for key, times in by_op.items():
            self._steps_ms[key].append(median(times))

    @property
    def times(self) -> OpTimes:
        """The medians of this rank's ops."""
        return {key: median(steps) for key, steps in self._steps_ms.items()}

    def problem(self) -> Problem:
        """Collective: the pipeline's problem with the times of all ranks' last steps. Raises `InputError` if the
        pipeline has not been profiled."""
        if self._pipe.problem is None:
            raise InputError("problem was called before pipe.profile: steps show times, bytes are profiled")
        return retimed(self._pipe.problem, self._pipe.gather(self.times))


def retimed(problem: Problem, by_rank: Sequence[OpTimes]) -> Problem:
    """The problem with these times; `by_rank`: what each has measured. Of inner peers the slowest counts. Raises
    InputError if micro-batches or pairs of devices differ: times are learnt by stage."""
    if problem.messages or isinstance(problem.p2p_ms, tuple) or any(any(stage.lists()) for stage in problem.stages):
        raise InputError(
            "the problem has figures by micro-batch or by pair of devices: steps show one time for each stage"
        )
    of_stage: defaultdict[int, dict[tuple[Kind, int], float]] = defaultdict(dict)
    for times in by_rank:
        for (s, kind, level), ms in times.items():
            of_stage[s][kind, level] = max(ms, of_stage[s].get((kind, level), ms))
    return problem.replace(
        stages=[stage.model_copy(update=_fields(stage, of_stage[s])) for s, stage in enumerate(problem.stages)]
    )


def _fields(stage: Stage, times: Mapping[tuple[Kind, int], float]) -> dict[str, Any]:
    """The new times of a stage, from the kinds of op that have run."""
    whole = {key: ms * (stage.offload_parts if key[0] in (Kind.O, Kind.R) else 1) for key, ms in times.items()}
    ms = {kind: value for (kind, level), value in whole.items() if level == NONE}
    new: dict[Kind, float] = {kind: ms[kind] for kind in ms.keys() & FIELDS.keys()}
    old = {kind: one_for_all(getattr(stage, FIELDS[kind])) for kind in (Kind.F, Kind.B, Kind.W)}
    fused = old[Kind.B] + old[Kind.W]
    if Kind.BW in ms and Kind.B not in ms:
        share = old[Kind.B] / fused if fused else 1.0
        new |= {Kind.B: share * ms[Kind.BW], Kind.W: (1 - share) * ms[Kind.BW]}
    fields: dict[str, Any] = {FIELDS[kind]: round(value, 4) for kind, value in new.items()}
    longer = ms[Kind.F] / old[Kind.F] if Kind.F in ms and old[Kind.F] else 1.0
    levels: list[Level] = []
    for k, level in enumerate(stage.all_levels):
        of_level = {OF_LEVEL[kind]: value for (kind, of), value in whole.items() if of == k}
        if "recompute_ms" not in of_level and longer != 1.0:  # C has not run: it changes as F does
            of_level["recompute_ms"] = longer * one_for_all(level.recompute_ms)
        levels.append(level.model_copy(update={name: round(value, 4) for name, value in of_level.items()}))
    if stage.levels is not None:
        fields["levels"] = tuple(levels)
    elif levels:
        fields["recompute_ms"] = levels[0].recompute_ms
    return fields


def drift(old: Problem, new: Problem) -> float:
    """How far times have changed: the largest change of any time of a stage, or of its F + B + W together, as a share
    of its F + B + W before."""
    before, after = old.costs, new.costs
    parts = before.parts[:, None]
    change: Any = (after.ms - before.ms) * np.where(
        np.isin(np.arange(len(Kind)), (Kind.O, Kind.R))[:, None, None], parts, 1
    )
    of_levels = [
        (getattr(after.levels, name) - getattr(before.levels, name)) * (1 if kind == Kind.C else parts)
        for kind, name in OF_LEVEL.items()
    ]
    work = before.ms[Kind.F] + before.ms[Kind.BW]
    together = change[Kind.F] + change[Kind.BW]
    return float((np.abs(np.concatenate((change, *of_levels, together[None]))) / np.maximum(work, 1e-9)).max())
