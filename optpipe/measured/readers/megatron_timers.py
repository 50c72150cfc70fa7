"""Megatron's log with `--timing-log-level 2 --timing-log-option all`: by rank, the ms of all forwards and of all
backwards of an iteration.

    forward-compute:
       rank  0: 470.11
       rank  1: 468.90

Ranks of a pipeline's device stand one after the other, as in Megatron's default order (tp-cp-ep-dp-pp).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from optpipe.errors import InputError
from optpipe.measured.events import read_pieces
from optpipe.measured.recording import (
    MeasuredOp,
    Recording,
    RunFacts,
    Sample,
    each_once,
    require_sizes,
    stage_of,
)
from optpipe.model.ops import Kind, Op
from optpipe.model.placement import SHAPES

TIMERS = {"forward-compute": Kind.F, "backward-compute": Kind.BW}
PIPELINE = "forward-backward"
MOST_OPS = 500_000  # of the iterations that are read, the last ones
_LINE = re.compile(  # tries no part of a line twice: one of a hostile log may have a million characters
    r"(?<![\w.-])(?P<name>[a-z][\w.-]*+):\s*$|rank\s+(?P<rank>\d{1,9}):\s+(?P<ms>\d+(?:\.\d+)?)\s*$"
)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")

Timers = Mapping[tuple[str, int], list[float]]  # by timer and rank, the ms of each iteration
Totals = dict[Kind, list[list[float]]]  # by device, of each iteration: the ms of all ops of a kind


class MegatronTimers:
    """Reads logs. Each op of an iteration has its share of the time in the log; a device with several ranks is as slow
    as the slowest of them. Its `InputError` names the times that the log lacks, or why they cannot be divided."""

    name = "megatron-timers"
    takes = RunFacts._fields

    def recognize(self, sample: Sample) -> bool:
        return any(timer in piece for piece in read_pieces(sample.file) for timer in TIMERS)

    def read(self, paths: Sequence[Path], facts: RunFacts) -> Recording:
        if facts.microbatches is None:
            raise InputError("microbatches is missing: Megatron's log does not say how many a step has")
        texts = [(str(path), "".join(read_pieces(path))) for path in each_once(paths)]
        timers, unused = _timers(texts)
        totals = _totals(timers, texts[0][0], facts.microbatches, facts.devices, facts.chunks)
        devices, shape = len(totals[Kind.F]), facts.shape or SHAPES[0]
        placed = {stage_of(d, chunk, devices, shape): d for d in range(devices) for chunk in range(facts.chunks)}
        share = facts.microbatches * facts.chunks
        steps = min(len(ms) for by_device in totals.values() for ms in by_device)
        first = max(0, steps - max(1, MOST_OPS // (2 * len(placed) * facts.microbatches)))
        if first:
            unused.append(f"the first {first} of {steps} iterations: the last ones have ops enough")
        ops = [
            MeasuredOp(Op(kind, s, j), d, step, by_device[d][step] / share, rank=d)
            for kind, by_device in totals.items()
            for s, d in sorted(placed.items())
            for step in range(first, steps)
            for j in range(facts.microbatches)
        ]
        unused.append("how times differ among the micro-batches of an iteration: the log has sums only")
        if facts.shape is None and facts.chunks > 1:
            unused.append("how chunks lie: looped; give --shape")
        whole = zip(*(ms for (name, _), ms in timers.items() if name == PIPELINE), strict=False)
        return Recording(ops, tuple(unused), spans_ms={step: max(ms) for step, ms in enumerate(whole)})


def _totals(timers: Timers, path: str, microbatches: int, devices: int | None, chunks: int) -> Totals:
    names = {name for name, _ in timers}
    for name in TIMERS:
        if name not in names:
            raise InputError(
                f"{path}: no times of {name} by rank: run Megatron with --timing-log-level 2 --timing-log-option all"
            )
    ranks = 1 + max(rank for name, rank in timers if name in TIMERS)
    devices = devices or ranks
    require_sizes(devices * chunks, devices, microbatches)
    if ranks % devices:
        raise InputError(f"devices = {devices}: the log has {ranks} ranks, which that many devices do not divide")
    totals: Totals = {kind: [] for kind in TIMERS.values()}
    for name, kind in TIMERS.items():
        for device in range(devices):
            ranks_of_device = range(device * ranks // devices, (device + 1) * ranks // devices)
            missing = next((rank for rank in ranks_of_device if (name, rank) not in timers), None)
            if missing is not None:
                raise InputError(f"{path}: no time of {name} on rank {missing}")
            totals[kind].append(
                [max(ms) for ms in zip(*(timers[name, rank] for rank in ranks_of_device), strict=False)]
            )
    return totals


def _timers(texts: Sequence[tuple[str, str]]) -> tuple[Timers, list[str]]:
    """The times in logs, each with its name, the iterations of one after those of the other; and which iterations are
    left out as lines are missing, one sentence a log.

    Raises InputError if these are not logs of one run.
    """
    timers: dict[tuple[str, int], list[float]] = defaultdict(list)
    unused = list[str]()
    logs = [(path, _iterations(text)) for path, text in texts]
    for n, (path, log) in enumerate(logs):
        keys = set[tuple[str, int]]().union(*log)
        for other, before in logs[:n]:
            if log == before:
                raise InputError(f"{path}: the same times as in {other}: each log once is expected")
            if keys != set[tuple[str, int]]().union(*before):
                raise InputError(f"{path}: not the timers and ranks of {other}: logs of one run are expected")
        whole = [iteration for iteration in log if iteration.keys() == keys]
        if left := len(log) - len(whole):
            unused.append(f"{left} of {len(log)} iterations of {path}: not all timers of all ranks have a time there")
        for key in keys:
            timers[key] += [iteration[key] for iteration in whole]
    return timers, unused


def _iterations(text: str) -> list[dict[tuple[str, int], float]]:
    """By timer and rank, the ms of each iteration of a log. A timer that was there before begins the next one."""
    iterations, names, name = [dict[tuple[str, int], float]()], set[str](), ""
    for line in _COLOUR.sub("", text).splitlines():
        if not (match := _LINE.search(line)):
            continue
        if match["name"]:
            name = match["name"]
            if name in names:
                iterations.append({})
                names = set()
            names |= {name} & {*TIMERS, PIPELINE}
        elif name in names:
            iterations[-1][name, int(match["rank"])] = float(match["ms"])
    return iterations
