"""Timelines of StragglerAnalysis and ndtimeline (https://github.com/ByteDance-Seed/StragglerAnalysis).

A Chrome trace, whole or only its list of events: a process is a replica ("DP rank [3]"), a thread a stream of a rank
("PP rank 1, TP rank 0, compute"). `forward-compute` and `backward-compute` are ops; their `args` have the step, the
model chunk and the micro-batch. Times are in us, and all ranks have one clock.

In files of veScale's own writer (`LocalTimelineNDHandler`, one a host) `args` have the ranks `pp` and `tp` instead of
the thread's name, and no micro-batch: those of a rank's forwards, and of its backwards, follow from their order, as
only its 1F1B times them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from optpipe.errors import InputError
from optpipe.measured.events import Events, read_pieces
from optpipe.measured.recording import ChunkOp, Recording, RunFacts, Sample, each_once, joined, require_sizes
from optpipe.model.arrays import NONE
from optpipe.model.ops import Kind

KINDS = {"forward-compute": Kind.F, "backward-compute": Kind.BW}
MOST = 10**9  # no step, rank or micro-batch has a larger number
_REPLICA = re.compile(r"DP rank ?\[?(\d{1,9})\]?", re.IGNORECASE)
_RANK = re.compile(r"PP rank (\d{1,9}), TP rank (\d{1,9})")

Thread = tuple[str, str]  # and its process before it


class _File(NamedTuple):
    """What a file has: its ops, each with its tensor parallel rank, and whether its processes have names."""

    path: str
    ops: list[tuple[int, ChunkOp]]
    named: bool


class StragglerTimeline:
    """Reads timelines: all ops of all steps and replicas, of tensor parallel ranks those of the first one. Its
    `InputError` names the event, its field, and what would be right."""

    name = "straggler"
    takes = ("shape",)

    def recognize(self, sample: Sample) -> bool:
        return any(str(event.get("name")) in KINDS for event in sample.events)

    def read(self, paths: Sequence[Path], facts: RunFacts) -> Recording:
        others = Counter[str]()
        by_file = [_read_file(read_pieces(path), str(path), others) for path in each_once(paths)]
        for before, after in pairwise(by_file):
            if before.named != after.named:
                one, other = (before, after) if after.named else (after, before)
                raise InputError(
                    f"{one.path}: no process has a name such as 'DP rank [0]', those of {other.path} have one"
                )
        tensors = [tensor for file in by_file for tensor, _ in file.ops]
        first = min(tensors)
        unused = []
        if counted := [f"{count} {name:.40}" for name, count in sorted(others.items())]:
            more = f" and {len(counted) - 20} others" if len(counted) > 20 else ""
            unused.append(f"what is no op: {', '.join(counted[:20])}{more}")
        if doubled := len(tensors) - tensors.count(first):
            unused.append(f"{doubled} ops of other tensor parallel ranks than {first}: all compute the same ops")
        kept = [(file.path, [op for tensor, op in file.ops if tensor == first]) for file in by_file]
        ops = [op for _, of_file in kept for op in of_file]
        devices, chunks = 1 + max(op.rank for op in ops), 1 + max(op.chunk for op in ops)
        require_sizes(devices * chunks, devices, 1 + max(op.microbatch for op in ops))
        shape = facts.shape or "looped"  # as Megatron's
        placed = joined((path, [op.on_stage(devices, shape) for op in of_file]) for path, of_file in kept)
        return Recording(placed, tuple(unused), steps_differ=True)


def _read_file(pieces: Iterable[str], path: str, others: Counter[str]) -> _File:
    """The ops of a file; counts what else was measured."""
    events = Events(pieces, path)
    names = list[Mapping[str, Any]]()
    read_ops = list[tuple[int, Thread, ChunkOp]]()  # with the place of the event
    threads: dict[Thread, tuple[int, int]] = {}
    for n, event in enumerate(events):
        if event.get("ph") == "X" and str(event.get("name")) in KINDS:
            what, thread = f"{path}: event {n}", _thread(event)
            read_ops.append((n, thread, _chunk_op(event, what)))
            if "pp" in event["args"]:
                rank = _count(event["args"], "pp", what), _count(event["args"], "tp", what)
                if (other := threads.setdefault(thread, rank)) != rank:
                    raise InputError(f"{what}: args.pp and args.tp = {rank}: other ops of its thread have {other}")
        elif event.get("ph") == "X":
            others[str(event.get("name"))] += 1
        elif event.get("ph") == "M" and event.get("name") in ("process_name", "thread_name"):
            names.append(event)
    if not events.listed or events.others:
        raise InputError(f"{path}: no timeline: a list of events, or an object with traceEvents, is expected")
    ranks, named = _ranks(names, threads, path)
    ops, numbers = list[tuple[int, ChunkOp]](), Counter[Hashable]()
    for n, thread, op in sorted(read_ops, key=lambda each: each[2].start_ms):
        if thread not in ranks:
            raise InputError(
                f"{path}: event {n}: thread {thread[1]:.40} of process {thread[0]:.40} has no name such as 'PP rank 0, "
                "TP rank 0, compute'"
            )
        replica, pipeline, tensor = ranks[thread]
        op = op._replace(rank=pipeline, replica=replica)
        if op.microbatch == NONE:
            like = ranks[thread], op.kind, op.chunk, op.step
            op = op._replace(microbatch=numbers[like])
            numbers[like] += 1
        ops.append((tensor, op))
    if not ops:
        raise InputError(f"{path}: no op: events of the name forward-compute and backward-compute are expected")
    return _File(path, ops, named)


def _thread(event: Mapping[str, Any]) -> Thread:
    return str(event.get("pid")), str(event.get("tid"))


def _ranks(
    events: Sequence[Mapping[str, Any]], threads: dict[Thread, tuple[int, int]], path: str
) -> tuple[dict[Thread, tuple[int, int, int]], bool]:
    """Replica, pipeline rank and tensor parallel rank of each thread that is named or in `threads`; whether processes
    have one."""
    replicas: dict[str, int] = {}
    threads = dict(threads)
    for event in events:
        args = event.get("args")
        name = str(args.get("name", "")) if isinstance(args, dict) else ""
        if event.get("name") == "process_name" and (match := _REPLICA.search(name)):
            replicas[_thread(event)[0]] = int(match[1])
        elif event.get("name") == "thread_name" and (match := _RANK.search(name)):
            threads[_thread(event)] = int(match[1]), int(match[2])
    if not threads:
        raise InputError(f"{path}: no thread has a rank: names such as 'PP rank 0, TP rank 0, compute' are expected")
    unnamed = sorted({process for process, _ in threads} - replicas.keys())
    if unnamed and replicas:
        raise InputError(f"{path}: process {unnamed[0]} has no name such as 'DP rank [0]', other processes have one")
    if unnamed:  # replicas in the order of their processes
        unnamed.sort(key=lambda process: (len(process), process))
        replicas = {process: n for n, process in enumerate(unnamed)}
    return {thread: (replicas[thread[0]], *rank) for thread, rank in threads.items()}, not unnamed


def _chunk_op(event: Mapping[str, Any], what: str) -> ChunkOp:
    """The op of an event; whoever knows the name of its thread puts in the rank."""
    args = event.get("args")
    if not isinstance(args, dict):
        raise InputError(f"{what}: args is missing: step and mb_id are expected in it")
    start_us, us = _time(event, "ts", what), _time(event, "dur", what)
    if us < 0:
        raise InputError(f"{what}: dur = {us:g}: no less than 0 is expected")
    chunk = _count(args, "model_chunk", what) if "model_chunk" in args else 0
    step = _count(args, "step", what)
    microbatch = NONE if "pp" in args and "mb_id" not in args else _count(args, "mb_id", what)
    return ChunkOp(KINDS[event["name"]], 0, chunk, microbatch, step, start_us / 1e3, us / 1e3)


def _count(args: Mapping[str, Any], name: str, what: str) -> int:
    value = args.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST:
        raise InputError(f"{what}: args.{name} = {value!r:.40}: a number from 0 is expected")
    return value


def _time(event: Mapping[str, Any], name: str, what: str) -> float:
    value = event.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise InputError(f"{what}: {name} = {value!r:.40}: a time in us is expected")
    return float(value)
