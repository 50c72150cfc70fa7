"""Megatron's log with `--timing-log-level 2 --timing-log-option all`: by rank, the ms of all forwards and of all
backwards of an iteration.

    forward-compute:
       rank  0: 470.11
       rank  1: 468.90

Ranks of a pipeline's device stand one after the other, as in Megatron's default order (tp-cp-ep-dp-pp).
"""

from __future__ import annotations

import re

from optpipe.errors import InputError
from optpipe.measured.estimate import MeasuredTimes
from optpipe.measured.recording import require_sizes, stage_of
from optpipe.model.ops import Kind

TIMERS = {"forward-compute": Kind.F, "backward-compute": Kind.BW}
_LINE = re.compile(  # tries no part of a line twice: one of a hostile log may have a million characters
    r"(?<![\w.-])(?P<name>[a-z][\w.-]*+):\s*$|rank\s+(?P<rank>\d{1,9}):\s+(?P<ms>\d+(?:\.\d+)?)\s*$"
)


def read(
    text: str, path: str, microbatches: int, devices: int | None = None, chunks: int = 1, shape: str = "looped"
) -> tuple[list[dict[Kind, MeasuredTimes]], list[int]]:
    """By stage, the times of its F and BW, and its device. Each time in the log is divided by the micro-batches and
    chunks that it is the sum of. A device with several ranks is as slow as the slowest of them.

    Raises InputError if the log has no such times, or they cannot be divided.
    """
    by_timer = _by_timer(text)
    for name in TIMERS:
        if name not in by_timer:
            raise InputError(
                f"{path}: no times of {name} by rank: run Megatron with --timing-log-level 2 --timing-log-option all"
            )
    ranks = 1 + max(rank for times in by_timer.values() for rank in times)
    devices = devices or ranks
    require_sizes(devices * chunks, devices, microbatches)
    if ranks % devices:
        raise InputError(f"devices = {devices}: the log has {ranks} ranks, which that many devices do not divide")
    times: list[dict[Kind, MeasuredTimes]] = [{} for _ in range(devices * chunks)]
    where = [0] * (devices * chunks)
    for name, kind in TIMERS.items():
        for device in range(devices):
            ranks_of_device = range(device * ranks // devices, (device + 1) * ranks // devices)
            missing = next((rank for rank in ranks_of_device if rank not in by_timer[name]), None)
            if missing is not None:
                raise InputError(f"{path}: no time of {name} on rank {missing}")
            steps = zip(*(by_timer[name][rank] for rank in ranks_of_device), strict=False)
            each = MeasuredTimes.from_samples([max(totals) / (microbatches * chunks) for totals in steps])
            for chunk in range(chunks):
                stage = stage_of(device, chunk, devices, shape)
                times[stage][kind], where[stage] = each, device
    return times, where


def _by_timer(text: str) -> dict[str, dict[int, list[float]]]:
    """For every timer and rank the times in the log, in ms."""
    times: dict[str, dict[int, list[float]]] = {}
    name = ""
    for line in text.splitlines():
        if not (match := _LINE.search(line)):
            continue
        if match["name"]:
            name = match["name"]
        elif name in TIMERS:
            times.setdefault(name, {}).setdefault(int(match["rank"]), []).append(float(match["ms"]))
    return times
