"""Which of the measured steps are whole training steps, and what their times show of messages, clocks and the order
of ops. Only these steps become a problem.

A profile also has evaluations, which are forwards only, and steps that were cut off at its end. Whoever took their ops
for those of training steps would pair ops of different steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from optpipe.errors import InputError
from optpipe.measured.messages import clocks_ahead, gaps
from optpipe.measured.recording import MeasuredOp, require_sizes
from optpipe.model.ops import Kind, Op

BACKWARDS = (Kind.B, Kind.W, Kind.BW)
LONGEST_MS = 1e15  # of a start, too, whatever a clock counts from
Step = Sequence[MeasuredOp]
Order = tuple[tuple[Op, ...], ...]  # by device


@dataclass(frozen=True, eq=False)
class TrainingSteps:
    """Whole training steps of one replica."""

    steps: tuple[Step, ...]  # micro-batches numbered from 0 in each
    microbatches: int
    where: tuple[int, ...]  # by stage: its device
    unused: tuple[str, ...]  # what was left out, and why, one sentence each

    @property
    def devices(self) -> int:
        return 1 + max(self.where)

    @property
    def ops(self) -> list[MeasuredOp]:
        return [each for step in self.steps for each in step]

    @cached_property
    def are_timed(self) -> bool:
        """Whether all starts were measured."""
        return all(each.start_ms is not None for each in self.ops)

    @property
    def messages_ms(self) -> list[list[float]]:
        """By step, how long messages between neighbour stages took."""
        return [[max(0.0, gap.message_ms) for gap in gaps(step) if not gap.same_device] for step in self.steps]

    @cached_property
    def ahead_ms(self) -> dict[int, float]:
        """`clocks_ahead`: of all devices where all starts were measured, as each stage has messages with the next."""
        return clocks_ahead(self.steps, self.where)

    @property
    def spans_ms(self) -> list[float]:
        """Of each step whose starts were measured, from the first start to the last end over all devices, by the clock
        of stage 0's device."""
        ahead = self.ahead_ms
        return [
            max(each.end_ms - ahead[each.device] for each in step)
            - min((each.start_ms or 0.0) - ahead[each.device] for each in step)
            for step in self.steps
        ]

    def order_of(self, step: Step) -> Order:
        """By device, the ops of a step in the order in which they began."""
        ops: list[list[Op]] = [[] for _ in range(self.devices)]
        for each in sorted(step, key=lambda each: (each.start_ms or 0.0, each.end_ms)):
            ops[each.device].append(each.op)
        return tuple(map(tuple, ops))

    @property
    def overlap(self) -> str | None:
        """A sentence about two ops of a device in the last step, one of which began before the other was half over."""
        last: dict[int, MeasuredOp] = {}
        for each in sorted(self.steps[-1], key=lambda each: each.start_ms or 0.0):
            before = last.get(each.device)
            if before and each.start_ms is not None and before.end_ms - each.start_ms > max(before.ms, each.ms) / 2 > 0:
                return (
                    f"that ops ran beside each other, such as {before.op} and {each.op}: each counts with its whole "
                    "time, one after the other"
                )
            last[each.device] = each
        return None


def find_training_steps(ops: Sequence[MeasuredOp], only: int | None = None) -> TrainingSteps:
    """The whole training steps of these ops, which are of one replica; or the one with the number `only`.

    Raises InputError if there is none, if an op is there twice in a step, or if stages and devices have gaps.
    """
    _require_possible(ops)
    devices: dict[int, int] = {}
    for each in ops:
        if devices.setdefault(each.op.stage, each.device) != each.device:
            raise InputError(f"stage {each.op.stage} is on device {devices[each.op.stage]} and on {each.device}")
    if idle := set(range(1 + max(devices.values()))) - set(devices.values()):
        raise InputError(f"device {min(idle)} has no op: devices are numbered from 0")
    where = tuple(devices[s] for s in range(len(devices)))
    steps = divided_by_step(ops)
    training: dict[int, Step] = {
        n: step for n, step in sorted(steps.items()) if any(each.op.kind in BACKWARDS for each in step)
    }
    unused = []
    if evaluations := len(steps) - len(training):
        unused.append(f"{_steps_have(evaluations, len(steps))} forwards only, as in an evaluation: left out")
    training, renumbered = _numbered_from_0(training)
    unused += renumbered
    if only is not None:
        if only not in training:
            raise InputError(f"step = {only}: one of the training steps {listed(training)} is expected")
        training, unused = {only: training[only]}, renumbered
    missing = {n: op for n, step in training.items() if (op := _missing_op(step, len(where))) is not None}
    whole = [step for n, step in training.items() if n not in missing]
    if missing:
        n, op = next(iter(missing.items()))
        if not whole:
            raise InputError(f"no step is whole: step {n} lacks {op}; a whole training step is expected")
        unused.append(f"{_steps_have(len(missing), len(steps))} not all ops, such as {op} in step {n}: left out")
    sizes = Counter(map(_microbatches, whole))
    microbatches = max(sizes, key=lambda size: (sizes[size], size))
    usual = tuple(step for step in whole if _microbatches(step) == microbatches)
    if others := len(whole) - len(usual):
        unused.append(f"{_steps_have(others, len(steps))} other than {microbatches} micro-batches: left out")
    return TrainingSteps(usual, microbatches, where, tuple(unused))


def divided_by_step(ops: Iterable[MeasuredOp]) -> dict[int, list[MeasuredOp]]:
    """The ops of each step, by its number."""
    steps: dict[int, list[MeasuredOp]] = defaultdict(list)
    for each in ops:
        steps[each.step].append(each)
    return steps


def number_steps(ops: Iterable[Op], what: str) -> list[int]:
    """The step of each op of one rank, in the order in which they ran: an op that was already there begins the next.

    Raises InputError for a backward whose forward is not in its step, as at the beginning of a profile that starts
    within a step; the sentence begins with `what`.
    """
    numbers: list[int] = []
    step, present = 0, set[Op]()
    for op in ops:
        if op in present:
            step, present = step + 1, set()
        present.add(op)
        if op.kind in BACKWARDS and Op(Kind.F, op.stage, op.microbatch) not in present:
            raise InputError(
                f"{what}: {op} has no forward before it in its step: begin and end the profile between two steps"
            )
        numbers.append(step)
    return numbers


def match_steps(ranks: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """The ops of all ranks with steps numbered alike: in their order where all ranks have equally many, otherwise those
    that ran at the same time belong together.

    Raises InputError if the clocks do not show which those are; the sentence has two of `names`.
    """
    counts = [1 + max(each.step for each in rank) for rank in ranks]
    if len(set(counts)) == 1:
        return list(ranks)
    most, least = counts.index(max(counts)), counts.index(min(counts))
    longest = _spans(ranks[most])
    matched: list[Step] = []
    for rank in ranks:
        overlaps = [
            [min(end, other_end) - max(begin, other_begin) for other_begin, other_end in longest]
            for begin, end in _spans(rank)
        ]
        partners = [each.index(max(each)) for each in overlaps]
        if any(max(each) <= 0 for each in overlaps) or any(one >= other for one, other in pairwise(partners)):
            raise InputError(
                f"{names[most]} has {counts[most]} steps, {names[least]} has {counts[least]}, and their clocks do not "
                "say which belong together: profile the same steps on all ranks"
            )
        matched.append([each._replace(step=partners[each.step]) for each in rank])
    return matched


def _spans(rank: Step) -> list[tuple[float, float]]:
    """By step of a rank, its first start and last end."""
    spans: dict[int, tuple[float, float]] = {}
    for each in rank:
        begin, end = spans.get(each.step, (inf, -inf))
        spans[each.step] = min(begin, each.start_ms or 0.0), max(end, each.end_ms)
    return [spans[n] for n in sorted(spans)]


def _require_possible(ops: Sequence[MeasuredOp]) -> None:
    """Raises InputError where no problem can have these ops, before anything of their numbers' size is allocated."""
    if not ops:
        raise InputError("no op was measured")
    stages = 1 + max(each.op.stage for each in ops)
    require_sizes(stages, 1 + max(each.device for each in ops), 1 + max(each.op.microbatch for each in ops))
    seen: set[tuple[int, Op]] = set()
    for each in ops:
        if not (0 <= each.ms <= LONGEST_MS and abs(each.start_ms or 0.0) <= LONGEST_MS):
            raise InputError(
                f"{each.op} in step {each.step} starts at {each.start_ms} and takes {each.ms} ms: numbers up to "
                f"{LONGEST_MS:g} are expected, and a time of no less than 0"
            )
        if (each.step, each.op) in seen:
            raise InputError(
                f"{each.op} is there twice in step {each.step}: an op runs once a step, so number the steps"
            )
        seen.add((each.step, each.op))
    for step, op in seen:
        if op.kind is Kind.W and (step, whole := op._replace(kind=Kind.BW)) in seen:
            raise InputError(
                f"{op} is there beside {whole} in step {step}, which is the whole backward: older versions of PyTorch "
                "call the gradient of the inputs B, which is I in later ones"
            )
    measured = {(each.op.kind, each.op.stage) for each in ops}
    for s in range(stages):
        if (Kind.F, s) not in measured:
            raise InputError(
                f"no forward of stage {s} was measured: {stages} stages are expected to have one, so the file of a "
                "rank may be missing"
            )
        if (Kind.BW, s) not in measured and not {(Kind.B, s), (Kind.W, s)} <= measured:
            forwards = all(kind is Kind.F for kind, _ in measured)
            hint = "; these are forwards only, as in an evaluation" if forwards else ""
            raise InputError(f"no backward of stage {s} was measured: a BW, or a B and a W, is expected{hint}")


def _numbered_from_0(steps: Mapping[int, Step]) -> tuple[dict[int, Step], list[str]]:
    """Micro-batches numbered from 0 in each step, and, as a sentence, whether they were not."""
    firsts = [min(each.op.microbatch for each in step) for step in steps.values()]
    ends = [_microbatches(step) for step in steps.values()]
    if set(firsts) == {1}:
        sentence = "the numbers of micro-batches: they begin with 1, which is micro-batch 0 here"
    elif any(firsts) and firsts == [0, *ends[:-1]]:
        sentence = "the numbers of micro-batches: they go on from step to step, and begin with 0 in each step here"
    else:
        return dict(steps), []
    return {
        n: [each._replace(op=each.op._replace(microbatch=each.op.microbatch - first)) for each in step]
        for (n, step), first in zip(steps.items(), firsts, strict=True)
    }, [sentence]


def _microbatches(step: Step) -> int:
    return 1 + max(each.op.microbatch for each in step)


def _missing_op(step: Step, stages: int) -> Op | None:
    """An op that a training step with these micro-batches would have; None if it is whole."""
    present = {each.op for each in step}
    apart = {op.stage for op in present if op.kind is Kind.W}
    for j in range(_microbatches(step)):
        for s in range(stages):
            both = [Op(Kind.B, s, j), Op(Kind.W, s, j)] if s in apart else [Op(Kind.BW, s, j)]
            expected = [Op(Kind.F, s, j), *([] if Op(Kind.BW, s, j) in present else both)]
            if missing := [op for op in expected if op not in present]:
                return missing[0]
    return None


def listed(numbers: Iterable[int]) -> str:
    """The numbers with commas between, of many only the first and the last one."""
    first, last = list(numbers)[:20], list(numbers)[20:]
    return ", ".join(map(str, first)) + (f", ..., {last[-1]}" if last else "")


def _steps_have(some: int, all_steps: int) -> str:
    return f"{some} of {all_steps} steps {'has' if some == 1 else 'have'}"
