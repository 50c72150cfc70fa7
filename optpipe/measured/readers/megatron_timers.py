"""Megatron's log with `--timing-log-level 2 --timing-log-option all`: by rank, the ms of all forwards and of all
backwards of an iteration.

    forward-compute:
       rank  0: 470.11
       rank  1: 468.90

Ranks of a pipeline's device stand one after the other, as in Megatron's default order (tp-cp-ep-dp-pp).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from optpipe.errors import InputError
from optpipe.measured.events import read_pieces
from optpipe.measured.readers.reader import RunFacts, Sample, each_once
from optpipe.measured.recording import SHAPES, MeasuredOp, Recording, require_sizes, stage_of
from optpipe.model.ops import Kind, Op

TIMERS = {"forward-compute": Kind.F, "backward-compute": Kind.BW}
PIPELINE = "forward-backward"
MOST_OPS = 500_000  # of the iterations that are read, the last ones
_LINE = re.compile(  # tries no part of a line twice: one of a hostile log may have a million characters
    r"(?<![\w.-])(?P<name>[a-z][\w.-]*+):\s*$|rank\s+(?P<rank>\d{1,9}):\s+(?P<ms>\d+(?:\.\d+)?)\s*$"
)


Texts = Sequence[tuple[str, str]]  # of logs with their names, the iterations of one after those of the other
ByTimer = dict[str, dict[int, list[float]]]  # by timer and rank, in ms
Totals = dict[Kind, list[list[float]]]  # by device, of each iteration: the ms of all ops of a kind


class MegatronTimers:
    """Reads logs. Each op of an iteration has its share of the time in the log; a device with several ranks is as slow
    as the slowest of them. Its `InputError` says which times the log lacks, or why they cannot be divided."""

    name = "megatron-timers"

    def recognize(self, sample: Sample) -> bool:
        return any(timer in piece for piece in read_pieces(sample.file) for timer in TIMERS)

    def read(self, paths: Sequence[Path], facts: RunFacts) -> Recording:
        if facts.microbatches is None:
            raise InputError("microbatches is missing: Megatron's log does not say how many a step has")
        texts = [(str(path), "".join(read_pieces(path))) for path in each_once(paths)]
        by_timer, unused = _by_timer(texts)
        totals = _totals(by_timer, texts[0][0], facts.microbatches, facts.devices, facts.chunks)
        where = _devices_of_stages(len(totals[Kind.F]), facts.chunks, facts.shape or SHAPES[0])
        share = facts.microbatches * facts.chunks
        steps = min(len(ms) for by_device in totals.values() for ms in by_device)
        first = max(0, steps - max(1, MOST_OPS // (2 * len(where) * facts.microbatches)))
        if first:
            unused.append(f"the first {first} of {steps} iterations: the last ones have ops enough")
        ops = [
            MeasuredOp(Op(kind, s, j), d, step, by_device[d][step] / share, rank=d)
            for kind, by_device in totals.items()
            for s, d in enumerate(where)
            for step in range(first, steps)
            for j in range(facts.microbatches)
        ]
        unused.append("how times differ among the micro-batches of an iteration: the log has sums only")
        if facts.shape is None and facts.chunks > 1:
            unused.append("how chunks lie: looped; give --shape")
        whole = zip(*by_timer.get(PIPELINE, {}).values(), strict=False)
        return Recording(ops, tuple(unused), spans_ms={step: max(ms) for step, ms in enumerate(whole)})


def _devices_of_stages(devices: int, chunks: int, shape: str) -> list[int]:
    where = [0] * (devices * chunks)
    for device in range(devices):
        for chunk in range(chunks):
            where[stage_of(device, chunk, devices, shape)] = device
    return where


def _totals(by_timer: ByTimer, path: str, microbatches: int, devices: int | None, chunks: int) -> Totals:
    for name in TIMERS:
        if name not in by_timer:
            raise InputError(
                f"{path}: no times of {name} by rank: run Megatron with --timing-log-level 2 --timing-log-option all"
            )
    ranks = 1 + max(rank for name in TIMERS for rank in by_timer[name])
    devices = devices or ranks
    require_sizes(devices * chunks, devices, microbatches)
    if ranks % devices:
        raise InputError(f"devices = {devices}: the log has {ranks} ranks, which that many devices do not divide")
    totals: Totals = {kind: [] for kind in TIMERS.values()}
    for name, kind in TIMERS.items():
        for device in range(devices):
            ranks_of_device = range(device * ranks // devices, (device + 1) * ranks // devices)
            missing = next((rank for rank in ranks_of_device if rank not in by_timer[name]), None)
            if missing is not None:
                raise InputError(f"{path}: no time of {name} on rank {missing}")
            steps = zip(*(by_timer[name][rank] for rank in ranks_of_device), strict=False)
            totals[kind].append([max(ms) for ms in steps])
    return totals


def _by_timer(texts: Texts) -> tuple[ByTimer, list[str]]:
    """For every timer and rank the times in the logs, and what is left out as a log was cut off, one sentence each.

    Raises InputError if these are not logs of one run.
    """
    times: ByTimer = {}
    cut_off = list[str]()
    logs = [(path, _by_timer_of_log(text)) for path, text in texts]
    for n, (path, log) in enumerate(logs):
        for other, before in logs[:n]:
            if log == before:
                raise InputError(f"{path}: the same times as in {other}: each log once is expected")
            if _ranks(log) != _ranks(before):
                raise InputError(f"{path}: not the timers and ranks of {other}: logs of one run are expected")
        counts = {len(ms) for by_rank in log.values() for ms in by_rank.values()}
        if len(counts) > 1:
            cut_off.append(f"iterations of {path} from {1 + min(counts)} on: not all timers of all ranks have them")
        for name, by_rank in log.items():
            for rank, ms in by_rank.items():
                times.setdefault(name, {}).setdefault(rank, []).extend(ms[: min(counts)])
    return times, cut_off


def _ranks(log: ByTimer) -> dict[str, set[int]]:
    return {name: set(by_rank) for name, by_rank in log.items()}


def _by_timer_of_log(text: str) -> ByTimer:
    times: ByTimer = {}
    name = ""
    for line in text.splitlines():
        if not (match := _LINE.search(line)):
            continue
        if match["name"]:
            name = match["name"]
        elif name in TIMERS or name == PIPELINE:
            times.setdefault(name, {}).setdefault(int(match["rank"]), []).append(float(match["ms"]))
    return times
