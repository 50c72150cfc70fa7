"""Measured ops become a `Problem`: medians for times, the shortest gaps between ops for messages.

A message from stage s to s + 1 takes at most the time from the end of s's forward to the start of s + 1's; the gradient
that comes back gives the same for the other way. In the sum of the two the difference between two devices' clocks
cancels out, so half the sum of the shortest gaps of a step is the time of a message, and half their difference is how
far the clocks are apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from statistics import median, quantiles
from typing import Any, NamedTuple

from optpipe.errors import InputError
from optpipe.evaluate.deadlock import DeadlockError
from optpipe.measured.op_times import Timed, require_sizes
from optpipe.model.ops import BACKWARD, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.schedule import Schedule, certify

NO_TIME = "a step takes 0 ms: the times of its ops are expected"
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
        It holds the medians.
    stages
        For each stage the times of its F, B, W or BW.
    message
        The times of messages; None where they are not known.
    unknown
        What the measurements do not say, and what the problem has instead, one sentence each.
    schedule
        What ran: the order of the last step; None where it is not known.
    measured_ms
        From the first start to the last end of a step, the median of all steps; None where it is not known.
    """

    problem: Problem
    stages: tuple[Mapping[Kind, MeasuredTimes], ...]
    message: MeasuredTimes | None
    unknown: tuple[str, ...]
    schedule: Schedule | None
    measured_ms: float | None

    @property
    def replayed_ms(self) -> float | None:
        """How long `schedule` takes by the problem's times."""
        return None if self.schedule is None else self.schedule.makespan_ms

    def to_dict(self) -> dict[str, Any]:
        """All of it but the schedule, as JSON has it."""
        return {
            "problem": self.problem.to_dict(),
            "stages": [{kind.name: asdict(spread) for kind, spread in times.items()} for times in self.stages],
            "message": self.message and asdict(self.message),
            "measured_ms": self.measured_ms,
            "replayed_ms": self.replayed_ms,
            "unknown": list(self.unknown),
        }


class Given(NamedTuple):
    """What a user says of the problem beside the measurements; None where nothing. See `problem_from`."""

    activation_bytes: Sequence[int] | None = None
    activation_budget_bytes: int | None = None
    weight_share: float | None = None


def estimate(timed_ops: Sequence[Timed], given: Given) -> Measurements:
    """The problem of these ops.

    Raises InputError if an op that it needs was not measured, is there twice in a step, or if a step takes no time.
    """
    stages, microbatches = _sizes(timed_ops)
    where = {each.op.stage: each.device for each in timed_ops}
    times = _times(timed_ops, stages)
    gaps = _gaps(timed_ops, where) if all(each.start_ms is not None for each in timed_ops) else {}
    ways = [(forward + backward) / 2 for pair in gaps.values() for forward, backward in pair]
    message = MeasuredTimes.from_samples([max(0.0, ms) for ms in ways]) if ways else None
    ample = _ample(times, [where[s] for s in range(stages)], microbatches, message, given)
    measured_ms = _step_ms(timed_ops, where, gaps)
    if measured_ms == 0:
        raise InputError(NO_TIME)
    return _measurements(ample, times, message, _order(timed_ops, ample), measured_ms, given)


def estimate_sums(
    times: Sequence[Mapping[Kind, MeasuredTimes]], where: Sequence[int], microbatches: int, given: Given
) -> Measurements:
    """The same where only times by stage are known, and the device of each stage."""
    return _measurements(_ample(times, where, microbatches, None, given), times, None, None, None, given)


def _ample(
    times: Sequence[Mapping[Kind, MeasuredTimes]],
    where: Sequence[int],
    microbatches: int,
    message: MeasuredTimes | None,
    given: Given,
) -> Problem:
    """The problem, with more memory than anything needs."""
    sizes = given.activation_bytes or [1]
    if len(sizes) not in (1, len(times)):
        raise InputError(f"activation_bytes has {len(sizes)} entries: one, or one for each of {len(times)} stages")
    if not any(each.ms for by_kind in times for each in by_kind.values()):
        raise InputError(NO_TIME)
    return Problem.from_dict(
        {
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
                for by_kind, device, size in zip(times, where, [*sizes] * (len(times) // len(sizes)), strict=True)
            ],
        }
    )


def _measurements(
    ample: Problem,
    times: Sequence[Mapping[Kind, MeasuredTimes]],
    message: MeasuredTimes | None,
    order: Schedule | None,
    measured_ms: float | None,
    given: Given,
) -> Measurements:
    """With the budgets that are given, or those that the order needs."""
    devices = range(len(ample.devices))
    if given.activation_budget_bytes is not None:
        budgets = [given.activation_budget_bytes for _ in devices]
    elif order is not None:
        budgets = [peak.bytes for peak in certify(ample, order).device]
    else:
        sizes_by_device = [[ample.stages[s].activation_bytes for s in ample.stages_on(d)] for d in devices]
        budgets = [ample.microbatches * sum(sizes) for sizes in sizes_by_device]
    problem = ample.replace(devices=[{"activation_budget_bytes": budget} for budget in budgets])
    unknown = tuple(_unknown(times, message, order is not None, len(devices), given))
    return Measurements(problem, tuple(times), message, unknown, order and order.on(problem), measured_ms)


def _sizes(found: Sequence[Timed]) -> tuple[int, int]:
    """How many stages and micro-batches there are."""
    if not found:
        raise InputError("no op was measured")
    stages = 1 + max(each.op.stage for each in found)
    devices, microbatches = 1 + max(each.device for each in found), 1 + max(each.op.microbatch for each in found)
    require_sizes(stages, devices, microbatches)
    seen: set[tuple[int, Op]] = set()
    for each in found:
        if not (0 <= each.ms < inf and (each.start_ms is None or isfinite(each.start_ms))):
            raise InputError(
                f"{each.op} in step {each.step} starts at {each.start_ms} and takes {each.ms} ms: numbers are "
                "expected, and a time of no less than 0"
            )
        if (each.step, each.op) in seen:
            raise InputError(
                f"{each.op} is there twice in step {each.step}: an op runs once a step, so number the steps"
            )
        seen.add((each.step, each.op))
    measured = {(each.op.kind, each.op.stage) for each in found}
    for s in range(stages):
        if (Kind.F, s) not in measured:
            raise InputError(f"no forward of stage {s} was measured: {stages} stages are expected to have one")
        if (Kind.BW, s) not in measured and not {(Kind.B, s), (Kind.W, s)} <= measured:
            raise InputError(f"no backward of stage {s} was measured: a BW, or a B and a W, is expected")
    where: dict[int, int] = {}
    for each in found:
        if where.setdefault(each.op.stage, each.device) != each.device:
            raise InputError(f"stage {each.op.stage} is on device {where[each.op.stage]} and on {each.device}")
    if idle := set(range(devices)) - set(where.values()):
        raise InputError(f"device {min(idle)} has no op: devices are numbered from 0")
    return stages, microbatches


def _times(found: Sequence[Timed], stages: int) -> list[dict[Kind, MeasuredTimes]]:
    """By stage, the times of its ops."""
    by_kind: list[dict[Kind, list[float]]] = [defaultdict(list) for _ in range(stages)]
    for each in found:
        by_kind[each.op.stage][each.op.kind].append(each.ms)
    return [
        {kind: MeasuredTimes.from_samples(times) for kind, times in sorted(of_stage.items())} for of_stage in by_kind
    ]


def _ms(times: Mapping[Kind, MeasuredTimes], weight_share: float | None) -> dict[str, float]:
    """The fields of a stage. Where B and W were measured, a fused backward among them does not count."""
    if not {Kind.B, Kind.W} <= times.keys():
        share, both = weight_share or 0.0, times[Kind.BW].ms
        return {
            "forward_ms": times[Kind.F].ms,
            "backward_input_ms": (1 - share) * both,
            "backward_weight_ms": share * both,
        }
    return {field: times[kind].ms for kind, field in FIELDS.items()}


Gaps = dict[int, list[tuple[float, float]]]


def _gaps(found: Sequence[Timed], where: Mapping[int, int]) -> Gaps:
    """For stage s on another device than s + 1, and each step: the shortest gaps forward and back between the two."""
    at = {(each.step, each.op): each for each in found}
    shortest: dict[tuple[int, int], list[float]] = defaultdict(lambda: [float("inf")] * 2)
    for (step, op), here in at.items():
        s, j = op.stage, op.microbatch
        if op.kind is Kind.F:
            there, way = at.get((step, Op(Kind.F, s + 1, j))), (step, s, 0)
        elif op.kind in BACKWARD:
            there = at.get((step, Op(Kind.BW, s - 1, j))) or at.get((step, Op(Kind.B, s - 1, j)))
            way = (step, s - 1, 1)
        else:
            continue
        if there and there.device != here.device and there.start_ms is not None:
            gap = shortest[way[:2]]
            gap[way[2]] = min(gap[way[2]], there.start_ms - here.end_ms)
    gaps: Gaps = defaultdict(list)
    for (_, s), (forward, backward) in sorted(shortest.items()):
        if forward < float("inf") and backward < float("inf"):
            gaps[s].append((forward, backward))
    return gaps


def _order(found: Sequence[Timed], problem: Problem) -> Schedule | None:
    """The last step that ran, as a schedule; None if starts were not measured, or it is no whole step."""
    last = max(each.step for each in found)
    ran = [each for each in found if each.step == last and each.start_ms is not None]
    forwards = sum(each.op.kind is Kind.F for each in ran)
    if forwards < len(problem.stages) * problem.microbatches:  # a few ops may have large numbers
        return None
    ops: list[list[Op]] = [[] for _ in problem.devices]
    for each in sorted(ran, key=lambda each: each.start_ms or 0.0):
        ops[each.device].append(each.op)
    schedule = Schedule(problem, tuple(map(Program.from_items, ops)), method="measured")
    try:
        return None if schedule.compiled.complaints else schedule
    except DeadlockError:
        return None


def _step_ms(found: Sequence[Timed], where: Mapping[int, int], gaps: Gaps) -> float | None:
    """From the first start to the last end of a step over all devices, by the clock of stage 0's device."""
    ahead = {where[0]: 0.0}  # by device: how far its clock is ahead
    for s, pairs in sorted(gaps.items()):
        if where[s] in ahead and where[s + 1] not in ahead:
            ahead[where[s + 1]] = ahead[where[s]] + median((forward - backward) / 2 for forward, backward in pairs)
    spans: dict[int, list[float]] = defaultdict(lambda: [float("inf"), -float("inf")])
    for each in found:
        if each.start_ms is None or each.device not in ahead:
            return None
        begin, end = spans[each.step]
        by = ahead[each.device]
        spans[each.step] = [min(begin, each.start_ms - by), max(end, each.end_ms - by)]
    return median(end - begin for begin, end in spans.values())


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
