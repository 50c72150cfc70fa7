"""`Profiler`: op times of real steps while training goes on, and how far they are from the profile.

    profiler = Profiler(pipe)
    for inputs, targets in batches:
        profiler.add(pipe.step(inputs, targets, trace=True))
    problem = profiler.problem()                        # the profiled one, with the times of the last steps

Times are moving medians by stage and kind: over the micro-batches of a step, then over the last steps. So neither a
single op nor a single step counts. Bytes, and times of ops that did not run, stay as profiled; a recompute that did not
run changes in proportion to its forward. A message's time is from the end of the op that sent it until it came, where
the receiver waited for it: beside all that runs in a step. Without such messages in both directions it stays as
profiled.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.records import Stage, one_for_all
from optpipe_runtime.execute.report import StepReport

FIELDS = {
    Kind.F: "forward_ms", Kind.B: "backward_input_ms", Kind.W: "backward_weight_ms", Kind.C: "recompute_ms",
    Kind.O: "offload_ms", Kind.R: "reload_ms", Kind.E: "evict_ms", Kind.L: "load_ms",
    Kind.G: "gradient_out_ms", Kind.U: "update_ms", Kind.P: "parameters_in_ms",
}  # fmt: skip
PASSING = {Kind.F: Kind.F, Kind.B: Kind.B, Kind.BW: Kind.B}  # ops with messages, by direction
WINDOW = 16  # steps
TRACED = 3  # of them, by `Follower`: the fewest whose median one slow step does not move

OpTimes = dict[tuple[int, Kind], float]  # ms of one op by stage and kind; for O and R of one part


class Passed(NamedTuple):
    """What passed in a step of one rank, by its clock: when F and B of a stage and micro-batch ended, and when the
    message came that one waited for."""

    ended: dict[tuple[Kind, int, int], float]
    came: dict[tuple[Kind, int, int], float]


class Seen(NamedTuple):
    """What a rank has seen of its last steps."""

    times: OpTimes
    passed: tuple[Passed, ...]


class Profiled(Protocol):
    """What `Profiler` uses of a `Pipeline`."""

    problem: Problem | None

    def gather(self, value: Any) -> list[Any]: ...


class Profiler:
    """Op times of this rank, as moving medians over its last steps.

    Parameters
    ----------
    pipe
        The `Pipeline` that runs the steps.
    window
        How many steps the medians are over.

    Raises
    ------
    InputError
        If `window` is less than 1.
    """

    def __init__(self, pipe: Profiled, window: int = WINDOW) -> None:
        if window < 1:
            raise InputError(f"window = {window}: must be at least 1 step")
        self._pipe = pipe
        self._seen: defaultdict[tuple[int, Kind], deque[float]] = defaultdict(lambda: deque(maxlen=window))
        self._passed: deque[Passed] = deque(maxlen=window)

    def add(self, report: StepReport) -> None:
        """Takes the trace of a step. Raises `InputError` if the step was not traced."""
        if not report.trace:
            raise InputError("Profiler.add was given a report without a trace: call step with trace=True")
        # A forward that a C repeats saves nothing, and so takes another time.
        recomputed = {(op.stage, op.microbatch) for op, *_ in report.trace if op.kind == Kind.C}
        by_op = defaultdict(list)
        for op, start_ms, end_ms, *_ in report.trace:
            if op.kind != Kind.F or (op.stage, op.microbatch) not in recomputed:
                by_op[op.stage, op.kind].append(end_ms - start_ms)
        for key, times in by_op.items():
            self._seen[key].append(median(times))
        passed = Passed({}, {})
        for op, _, end_ms, *_, message_ms in report.trace:
            if op.kind in PASSING:
                what = PASSING[op.kind], op.stage, op.microbatch
                passed.ended[what] = end_ms
                if message_ms is not None:
                    passed.came[what] = message_ms
        self._passed.append(passed)

    @property
    def seen(self) -> Seen:
        """The medians of this rank's ops, and what passed in its last steps."""
        return Seen({key: median(steps) for key, steps in self._seen.items()}, tuple(self._passed))

    def problem(self) -> Problem:
        """Collective: the pipeline's problem with the times of all ranks' last steps. Raises `InputError` if the
        pipeline has not been profiled."""
        if self._pipe.problem is None:
            raise InputError("problem was called before pipe.profile: steps show times, bytes are profiled")
        return retimed(self._pipe.problem, self._pipe.gather(self.seen))


def retimed(problem: Problem, by_rank: Sequence[Seen]) -> Problem:
    """The problem with these times; `by_rank` is what each has seen. Of inner peers the slowest counts.

    Raises InputError if micro-batches or pairs of devices differ: times are learnt by stage.
    """
    if problem.messages or isinstance(problem.p2p_ms, tuple) or any(any(stage.lists()) for stage in problem.stages):
        raise InputError(
            "the problem has figures by micro-batch or by pair of devices: steps show one time for each stage"
        )
    of_stage: defaultdict[int, dict[Kind, float]] = defaultdict(dict)
    for times, _ in by_rank:
        for (s, kind), ms in times.items():
            of_stage[s][kind] = max(ms, of_stage[s].get(kind, ms))
    p2p_ms = message_ms(problem, [passed for _, passed in by_rank])
    return problem.replace(
        stages=[stage.model_copy(update=_fields(stage, of_stage[s])) for s, stage in enumerate(problem.stages)],
        p2p_ms=problem.p2p_ms if p2p_ms is None else round(p2p_ms, 4),
    )


def message_ms(problem: Problem, by_rank: Sequence[Sequence[Passed]]) -> float | None:
    """The time of a message between two ranks: the median over steps, of the slowest pair; None if it was not seen.

    What a message seems to take has the difference of two clocks in it, which in the other direction has the other
    sign. So each step gives the mean of both directions, and the clocks fall out (as in Mills 1991, "Internet Time
    Synchronization").
    """
    if len({len(steps) for steps in by_rank}) != 1:  # not the same steps on every rank
        return None
    by_pair: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for ranks in zip(*by_rank, strict=True):
        # Of inner peers the first: all times of a device are by one clock.
        ended = {what: ms for rank in reversed(ranks) for what, ms in rank.ended.items()}
        came = {what: rank.came.get(what) for rank in reversed(ranks) for what in rank.ended}
        delays: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for (kind, s, j), ms in came.items():
            if ms is None or j >= problem.microbatches:  # not waited for, or of a step with more of them
                continue
            route = problem.route(j)
            source = route[route.index(s) + (-1 if kind == Kind.F else 1)]
            if (kind, source, j) in ended:
                delays[problem.stages[source].device, problem.stages[s].device].append(ms - ended[kind, source, j])
        for (a, b), there in delays.items():
            if a < b and (b, a) in delays:
                by_pair[a, b].append(max(0.0, (median(there) + median(delays[b, a])) / 2))
    return max((median(steps) for steps in by_pair.values()), default=None)


def _fields(stage: Stage, ms: Mapping[Kind, float]) -> dict[str, float]:
    """The new times of a stage, from the kinds of op that have run."""
    new: dict[Kind, float] = {kind: ms[kind] for kind in ms.keys() & FIELDS.keys()}
    for kind in new.keys() & {Kind.O, Kind.R}:
        new[kind] *= stage.offload_parts
    old = {kind: one_for_all(getattr(stage, FIELDS[kind])) for kind in (Kind.F, Kind.B, Kind.W)}
    fused = old[Kind.B] + old[Kind.W]
    if Kind.BW in ms and Kind.B not in ms:
        share = old[Kind.B] / fused if fused else 1.0
        new |= {Kind.B: share * ms[Kind.BW], Kind.W: (1 - share) * ms[Kind.BW]}
    if stage.recompute_ms is not None and Kind.C not in ms and Kind.F in ms and old[Kind.F]:
        new[Kind.C] = one_for_all(stage.recompute_ms) * ms[Kind.F] / old[Kind.F]
    return {FIELDS[kind]: round(value, 4) for kind, value in new.items()}


def drift(old: Problem, new: Problem) -> float:
    """How far times have changed: the largest change of any time of a stage, or of its F + B + W together, as a share
    of its F + B + W before; or that of a message's time, as a share of a mean stage's."""
    before, after = old.costs, new.costs
    change: Any = (after.ms - before.ms) * np.where(
        np.isin(np.arange(len(Kind)), (Kind.O, Kind.R))[:, None, None], before.parts[:, None], 1
    )
    work = before.ms[Kind.F] + before.ms[Kind.BW]
    together = change[Kind.F] + change[Kind.BW]
    message: float = np.abs(after.message_ms - before.message_ms).max() / max(float(work.mean()), 1e-9)
    return max(message, float((np.abs(np.concatenate((change, together[None]))) / np.maximum(work, 1e-9)).max()))
