"""The ranges of one trace of `torch.profiler`, by process: which op ran when.

On a GPU the range on the device counts: from the first kernel that the action launched to the end of the last one. On
a CPU it is the host's, from its first operator: before that, inside the range, the host waits for the action's message.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from optpipe.errors import InputError
from optpipe.formats.torch_csv import ACTION, BY_LETTER
from optpipe.model.ops import Kind, Op

DEVICE, HOST = "gpu_user_annotation", "user_annotation"
_RANGE = re.compile(rf"PP:{ACTION.pattern}")
_PAIR = re.compile(rf"PP:\({ACTION.pattern};{ACTION.pattern}\)OVERLAP_F_B")
_GPIPE = re.compile(r"(Forward|Backward) (\d{1,9})")  # ScheduleGPipe names no stage
_MESSAGE = re.compile(r"PP:(\d{1,9})(SEND_F|RECV_B|SEND_B|RECV_F)\d{1,9}")
_NEIGHBOUR = {"SEND_F": 1, "RECV_B": 1, "SEND_B": -1, "RECV_F": -1}
_COMMUNICATION = ("c10d::", "nccl:", "gloo:", "record_param_comms")
_AUTOGRAD = "autograd::engine::evaluate_function"
NO_STAGE = 0


class RanOp(NamedTuple):
    """An op, when it began and how long it took; `worked` unless it is known to have done nothing."""

    op: Op
    start_ms: float
    ms: float
    worked: bool = True


class Ranges(NamedTuple):
    """What a process ran, in that order."""

    ops: Sequence[RanOp]
    neighbours: set[int]  # the stages that messages went to or came from
    stage_unnamed: bool  # by ScheduleGPipe: the one stage of each rank has no number, and is 0 here
    on_host: bool
    unused: tuple[str, ...]


class _Range(NamedTuple):
    """A range of the trace, in us."""

    ops: tuple[Op, ...]  # two of a pair
    name: str
    thread: Any  # or stream
    begin: float
    end: float


class _Thread(NamedTuple):
    """What a thread of the host ran: its operators by start, without communication; when its communication, its
    sends, its receives and its ranges started."""

    begins: Sequence[float] = ()
    ends: Sequence[float] = ()
    autograd: Sequence[bool] = ()
    communication: Sequence[float] = ()
    sends: Sequence[float] = ()
    receives: Sequence[float] = ()
    ranges: Sequence[float] = ()

    def operators(self, begin: float, end: float) -> range:
        """The numbers of those that start in this time."""
        return range(bisect_left(self.begins, begin), bisect_left(self.begins, end))


def find_ranges(events: Sequence[Any], path: str) -> dict[Any, Ranges]:
    """The ranges of each process that has some: of each GPU, or if none are on a GPU, of each process of the host.

    Raises InputError for a range whose ops cannot be told apart, and for a stage that only the host has ranges of.
    """
    spans = [each for each in events if isinstance(each, dict) and each.get("ph") == "X" and "dur" in each]
    named = [each for each in spans if each.get("cat") in (DEVICE, HOST) and _ops_named(str(each.get("name")))]
    unnamed = not any(str(each["name"]).startswith("PP:") for each in named)
    named = [each for each in named if unnamed or str(each["name"]).startswith("PP:")]
    on_device = _by_process(each for each in named if each["cat"] == DEVICE)
    on_host = _by_process(each for each in named if each["cat"] == HOST)
    threads = _threads(spans)
    messages = [match.groups() for each in spans if (match := _MESSAGE.fullmatch(str(each.get("name"))))]
    neighbours = {int(stage) + _NEIGHBOUR[way] for stage, way in messages}
    if unnamed:
        neighbours = _neighbours_in_gpipe(on_host, threads)
    if on_device:
        _require_device_ranges(on_device, on_host, path)
        host_ops = {op for ranges in on_host.values() for each in ranges for op in each.ops}
        found = {process: _of_device(ranges, host_ops) for process, ranges in on_device.items()}
    else:
        found = {
            process: _of_host(
                ranges, {thread: each for (owner, thread), each in threads.items() if owner == process}, path
            )
            for process, ranges in on_host.items()
        }
    told = {process: (*_as_now_lettered(ops), unused) for process, (ops, unused) in found.items()}
    return {
        process: Ranges(
            ops, neighbours, unnamed, not on_device, (*unused, *letters, *_loss(unnamed and bool(on_device)))
        )
        for process, (ops, letters, unused) in told.items()
    }


def _neighbours_in_gpipe(on_host: dict[Any, list[_Range]], threads: dict[tuple[Any, Any], _Thread]) -> set[int]:
    """A forward that sends has a stage behind it, one that receives a stage before it."""
    forwards = [
        (each, threads[process, each.thread])
        for process, ranges in on_host.items()
        for each in ranges
        if each.ops[0].kind is Kind.F
    ]
    sends = any(_first_from(thread.sends, each.begin) < each.end for each, thread in forwards)
    receives = any(_first_from(thread.receives, each.begin) < each.end for each, thread in forwards)
    return {1 for _ in range(sends)} | {-1 for _ in range(receives)}


def _ops_named(name: str) -> tuple[Op, ...]:
    """The ops that a range is of; none for another name."""
    if match := _RANGE.fullmatch(name):
        return (_op(*match.groups()),)
    if match := _PAIR.fullmatch(name):
        return _op(*match.groups()[:3]), _op(*match.groups()[3:])
    if match := _GPIPE.fullmatch(name):
        return (Op(Kind.F if match[1] == "Forward" else Kind.BW, NO_STAGE, int(match[2])),)
    return ()


def _op(stage: str, letter: str, microbatch: str) -> Op:
    return Op(BY_LETTER[letter], int(stage), int(microbatch))


def _by_process(spans: Iterable[dict[str, Any]]) -> dict[Any, list[_Range]]:
    by_process: dict[Any, list[_Range]] = defaultdict(list)
    for each in spans:
        begin = float(each["ts"])
        ranges = by_process[each.get("pid")]
        ranges.append(_Range(_ops_named(each["name"]), each["name"], each["tid"], begin, begin + each["dur"]))
    for ranges in by_process.values():
        ranges.sort(key=lambda each: (each.begin, each.end))
    return by_process


def _require_device_ranges(on_device: dict[Any, list[_Range]], on_host: dict[Any, list[_Range]], path: str) -> None:
    for each in (each for ranges in on_device.values() for each in ranges if len(each.ops) > 1):
        raise InputError(
            f"{path}: {each.name[:40]}: a pair has one range on a GPU, in which the times of its two ops cannot be "
            "told apart"
        )
    stages = [
        {op.stage for ranges in side.values() for each in ranges for op in each.ops} for side in (on_host, on_device)
    ]
    if missing := stages[0] - stages[1]:
        raise InputError(
            f"{path}: stage {min(missing)} has ranges on the host and none on a GPU, where others have some"
        )


def _of_device(ranges: Sequence[_Range], host_ops: set[Op]) -> tuple[list[RanOp], tuple[str, ...]]:
    """Each stage's ranges on the stream on which most of its time is spent: a range is there once for each stream that
    it uses. A B that launches no kernel has a range on the host only, as that of a first stage, whose W does all."""
    spent: dict[int, dict[Any, float]] = defaultdict(lambda: defaultdict(float))
    for each in ranges:
        spent[each.ops[0].stage][each.thread] += each.end - each.begin
    main = {s: max(streams, key=lambda stream: streams[stream]) for s, streams in spent.items()}
    ran, idle = list[RanOp](), set[int]()
    kinds = {(each.ops[0].kind, each.ops[0].stage) for each in ranges}
    for each in ranges:
        op = each.ops[0]
        if each.thread != main[op.stage]:
            continue
        if op.kind is Kind.W and (Kind.B, op.stage) not in kinds and op._replace(kind=Kind.B) in host_ops:
            ran.append(RanOp(op._replace(kind=Kind.B), each.begin / 1e3, 0.0))
            idle.add(op.stage)
        ran.append(RanOp(op, each.begin / 1e3, (each.end - each.begin) / 1e3))
    return ran, _without_b(idle)


def _threads(spans: Iterable[dict[str, Any]]) -> dict[tuple[Any, Any], _Thread]:
    """By process and thread."""
    listed: dict[tuple[Any, Any], list[tuple[float, float, str]]] = defaultdict(list)
    ranges: dict[tuple[Any, Any], list[float]] = defaultdict(list)
    for each in spans:
        thread, begin, name = (each.get("pid"), each.get("tid")), float(each["ts"]), str(each.get("name"))
        if each.get("cat") == "cpu_op":
            listed[thread].append((begin, begin + each["dur"], name))
        elif each.get("cat") == HOST and (name.startswith("PP:") or _GPIPE.fullmatch(name)):
            ranges[thread].append(begin)
    threads = {}
    for thread in {*listed, *ranges}:
        operators = sorted(listed[thread])
        compute = [each for each in operators if not each[2].startswith(_COMMUNICATION)]
        threads[thread] = _Thread(
            [begin for begin, _, _ in compute],
            [end for _, end, _ in compute],
            [name.startswith(_AUTOGRAD) for *_, name in compute],
            [begin for begin, _, name in operators if name.startswith(_COMMUNICATION)],
            [begin for begin, _, name in operators if name == "c10d::send"],
            [begin for begin, _, name in operators if name == "c10d::recv_"],
            sorted(ranges[thread]),
        )
    return threads


def _of_host(ranges: Sequence[_Range], threads: dict[Any, _Thread], path: str) -> tuple[list[RanOp], tuple[str, ...]]:
    """Each op from its first operator on, where it no longer waits for its message; without one it only waits."""
    if not any(_worked(each, threads) or each.ops[1:] for each in ranges):
        ran = [RanOp(op, each.begin / 1e3, (each.end - each.begin) / 1e3) for each in ranges for op in each.ops]
        told = "how long ops waited for messages: the trace has no operators, so an op counts with its whole range"
        return ran, (told,)
    ran = []
    for each in ranges:
        thread = threads[each.thread]
        operators = thread.operators(each.begin, each.end)
        if len(each.ops) > 1:
            ran += _of_pair(each, operators, thread, path)
        elif _worked(each, threads):
            begin = thread.begins[operators.start] if operators else each.begin
            ran.append(RanOp(each.ops[0], begin / 1e3, (_end(each, begin, thread) - begin) / 1e3))
        else:
            ran.append(RanOp(each.ops[0], each.end / 1e3, 0.0, worked=False))
    working = {(each.op.kind, each.op.stage) for each in ran if each.worked}
    idle = {s for kind, s in working if kind is Kind.W and (Kind.B, s) not in working}
    return ran, _without_b(idle)


def _without_b(stages: set[int]) -> tuple[str, ...]:
    return tuple(f"the times of B on stage {s}: there it runs nothing, so they are 0" for s in sorted(stages))


def _worked(each: _Range, threads: dict[Any, _Thread]) -> bool:
    """Whether its thread ran an operator, or another one autograd, as for backwards on a GPU."""
    return bool(threads[each.thread].operators(each.begin, each.end)) or any(
        other.autograd[n] for other in threads.values() for n in other.operators(each.begin, each.end)
    )


def _end(each: _Range, begin: float, thread: _Thread) -> float:
    """The end of an op: of one of torch's GPipe where it sends, inside its range; of a forward behind its range, if the
    loss is computed there."""
    end = each.end
    if _GPIPE.fullmatch(each.name):
        end = min(end, _first_from(thread.sends, begin))
    if each.ops[0].kind is Kind.F:
        following = min(_first_from(thread.ranges, each.end), _first_from(thread.communication, each.end))
        loss = thread.operators(each.end, following) if following < inf else range(0)
        end = max([end, *(thread.ends[n] for n in loss)])
    return end


def _first_from(times: Sequence[float], begin: float) -> float:
    first = bisect_left(times, begin)
    return times[first] if first < len(times) else inf


def _of_pair(each: _Range, operators: range, thread: _Thread, path: str) -> list[RanOp]:
    """A forward and then a backward, which begins with autograd's first operator."""
    forward, backward = each.ops
    split = next((n for n in operators if thread.autograd[n]), None)
    if forward.kind is not Kind.F or split is None or split == operators.start:
        raise InputError(f"{path}: {each.name[:40]}: the times of the two ops of this pair cannot be told apart")
    begin, middle = thread.begins[operators.start], thread.begins[split]
    end = max(thread.ends[operators.start : split])
    return [
        RanOp(forward, begin / 1e3, (end - begin) / 1e3),
        RanOp(backward, middle / 1e3, (each.end - middle) / 1e3),
    ]


def _as_now_lettered(ops: Sequence[RanOp]) -> tuple[list[RanOp], tuple[str, ...]]:
    """Older versions of torch call the gradient of the inputs B: there it stands beside a W of its micro-batch."""
    present = {each.op for each in ops}
    older = {
        op
        for op in present
        if op.kind is Kind.BW and op._replace(kind=Kind.W) in present and op._replace(kind=Kind.B) not in present
    }
    if not older:
        return list(ops), ()
    renamed = [each._replace(op=each.op._replace(kind=Kind.B)) if each.op in older else each for each in ops]
    return renamed, ("the letter B of older versions of PyTorch: beside a W it is the gradient of the inputs only",)


def _loss(left_out: bool) -> tuple[str, ...]:
    return ("the time of the loss: ScheduleGPipe computes it outside its ranges",) if left_out else ()
