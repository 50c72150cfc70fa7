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
_RANGE = re.compile(rf"PP:({ACTION.pattern}|\({ACTION.pattern};{ACTION.pattern}\)OVERLAP_F_B)")  # an op, or a pair
_MESSAGE = re.compile(r"PP:(\d{1,9})(SEND_F|RECV_B|SEND_B|RECV_F)\d{1,9}")
_NEIGHBOUR = {"SEND_F": 1, "RECV_B": 1, "SEND_B": -1, "RECV_F": -1}
_COMMUNICATION = ("c10d::", "nccl:", "gloo:", "record_param_comms")
_AUTOGRAD = "autograd::engine::evaluate_function"


class RanOp(NamedTuple):
    """An op, when it began and how long it took; `worked` unless it certainly did nothing."""

    op: Op
    start_ms: float
    ms: float
    worked: bool = True


class Ranges(NamedTuple):
    """What a process ran, in that order."""

    ops: Sequence[RanOp]
    neighbours: set[int]  # the stages that messages went to or came from
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
    """What a thread of the host ran: operators by start, without communication, whose starts are apart, as are its
    ranges'."""

    begins: Sequence[float] = ()
    ends: Sequence[float] = ()
    autograd: Sequence[bool] = ()
    communication: Sequence[float] = ()
    ranges: Sequence[float] = ()

    def operators(self, begin: float, end: float) -> range:
        """The numbers of those that start in this time."""
        return range(bisect_left(self.begins, begin), bisect_left(self.begins, end))


def find_ranges(spans: Sequence[dict[str, Any]], path: str) -> dict[Any, Ranges]:
    """The ranges of each process that has some: of each GPU, or if none are on a GPU, of each process of the host.

    Raises InputError for a range whose ops cannot be distinguished, and for a stage that only the host has ranges of.
    """
    named = [each for each in spans if each.get("cat") in (DEVICE, HOST) and _ops_named(str(each.get("name")))]
    on_device = _by_process(each for each in named if each["cat"] == DEVICE)
    on_host = _by_process(each for each in named if each["cat"] == HOST)
    messages = [match.groups() for each in spans if (match := _MESSAGE.fullmatch(str(each.get("name"))))]
    neighbours = {int(stage) + _NEIGHBOUR[way] for stage, way in messages}
    if on_device:
        host_ops = {op for ranges in on_host.values() for each in ranges for op in each.ops}
        of_devices = [each for ranges in on_device.values() for each in ranges]
        if pair := next((each for each in of_devices if len(each.ops) > 1), None):
            raise InputError(
                f"{path}: {pair.name[:40]}: a pair has one range on a GPU, in which the times of its two ops cannot be "
                "told apart"
            )
        if missing := {op.stage for op in host_ops} - {each.ops[0].stage for each in of_devices}:
            raise InputError(
                f"{path}: stage {min(missing)} has ranges on the host and none on a GPU, where others have some"
            )
        ran = {process: _device_ops(ranges, host_ops) for process, ranges in on_device.items()}
    else:
        threads = _threads(spans)
        ran = {process: _host_ops(ranges, threads[process], path) for process, ranges in on_host.items()}
    return {process: Ranges(ops, neighbours, not on_device, unused) for process, (ops, unused) in ran.items()}


def _ops_named(name: str) -> tuple[Op, ...]:
    """The ops that a range is of; none for another name."""
    actions = ACTION.findall(name) if _RANGE.fullmatch(name) else ()
    return tuple(Op(BY_LETTER[letter], int(stage), int(microbatch)) for stage, letter, microbatch in actions)


def _by_process(spans: Iterable[dict[str, Any]]) -> dict[Any, list[_Range]]:
    by_process: dict[Any, list[_Range]] = defaultdict(list)
    for each in spans:
        begin = float(each["ts"])
        ranges = by_process[each.get("pid")]
        ranges.append(_Range(_ops_named(each["name"]), each["name"], each["tid"], begin, begin + each["dur"]))
    for ranges in by_process.values():
        ranges.sort(key=lambda each: (each.begin, each.end))
    return by_process


def _device_ops(ranges: Sequence[_Range], host_ops: set[Op]) -> tuple[list[RanOp], tuple[str, ...]]:
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


def _threads(spans: Iterable[dict[str, Any]]) -> dict[Any, dict[Any, _Thread]]:
    """By process and thread."""
    listed: dict[tuple[Any, Any], list[tuple[float, float, str]]] = defaultdict(list)
    ranges: dict[tuple[Any, Any], list[float]] = defaultdict(list)
    for each in spans:
        thread, begin, name = (each.get("pid"), each.get("tid")), float(each["ts"]), str(each.get("name"))
        if each.get("cat") == "cpu_op":
            listed[thread].append((begin, begin + each["dur"], name))
        elif each.get("cat") == HOST and name.startswith("PP:"):
            ranges[thread].append(begin)
    threads: dict[Any, dict[Any, _Thread]] = defaultdict(dict)
    for process, number in {*listed, *ranges}:
        operators = sorted(listed[process, number])
        compute = [each for each in operators if not each[2].startswith(_COMMUNICATION)]
        threads[process][number] = _Thread(
            [begin for begin, _, _ in compute],
            [end for _, end, _ in compute],
            [name.startswith(_AUTOGRAD) for *_, name in compute],
            [begin for begin, _, name in operators if name.startswith(_COMMUNICATION)],
            sorted(ranges[process, number]),
        )
    return threads


def _host_ops(ranges: Sequence[_Range], threads: dict[Any, _Thread], path: str) -> tuple[list[RanOp], tuple[str, ...]]:
    """Each op from its first operator on, where it no longer waits for its message; without one it only waits."""
    if not any(_worked(each, threads) or each.ops[1:] for each in ranges):
        ran = [RanOp(op, each.begin / 1e3, (each.end - each.begin) / 1e3) for each in ranges for op in each.ops]
        sentence = "how long ops waited for messages: the trace has no operators, so an op counts with its whole range"
        return ran, (sentence,)
    ran = []
    for each in ranges:
        thread = threads[each.thread]
        operators = thread.operators(each.begin, each.end)
        if len(each.ops) > 1:
            ran += _pair_ops(each, operators, thread, path)
        elif _worked(each, threads):
            begin = thread.begins[operators.start] if operators else each.begin
            ran.append(RanOp(each.ops[0], begin / 1e3, (_end(each, thread) - begin) / 1e3))
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


def _end(each: _Range, thread: _Thread) -> float:
    """The end of an op: of a forward behind its range, if the loss is computed there."""
    if each.ops[0].kind is not Kind.F:
        return each.end
    following = min(_first_from(thread.ranges, each.end), _first_from(thread.communication, each.end))
    loss = thread.operators(each.end, following) if following < inf else range(0)
    return max([each.end, *(thread.ends[n] for n in loss)])


def _first_from(times: Sequence[float], begin: float) -> float:
    first = bisect_left(times, begin)
    return times[first] if first < len(times) else inf


def _pair_ops(each: _Range, operators: range, thread: _Thread, path: str) -> list[RanOp]:
    """A forward and then a backward, which begins with autograd's first operator."""
    forward, backward = each.ops
    split = next((n for n in operators if thread.autograd[n]), None)
    if forward.kind is not Kind.F or split is None or split == operators.start:
        raise InputError(f"{path}: {each.name[:40]}: the times of the two ops of this pair cannot be told apart")
    begin, middle = thread.begins[operators.start], thread.begins[split]
    end = max(thread.ends[operators.start : split])
    return [RanOp(forward, begin / 1e3, (end - begin) / 1e3), RanOp(backward, middle / 1e3, (each.end - middle) / 1e3)]
