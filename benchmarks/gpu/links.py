"""PipeOffload's Table 3: six ways in which two GPUs on one PCIe switch copy to the host and back.

Each GPU runs groups of copies, both ways in turn or at once, with random delays between groups, as two devices of a
pipeline would start theirs at different times. The paper shows histograms without figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from cyclopts.types import NonNegativeFloat, PositiveInt

from benchmarks.tables import head, line
from optpipe.errors import InputError
from optpipe.model.arrays import Floats

IN, OUT = "H2D", "D2H"
CYCLES_PER_MS = 1e6  # of a delay, at 1 GHz
BARS = " ▁▂▃▄▅▆▇█"
Lanes = tuple[tuple[str, ...], ...]  # of a GPU: the directions of each of its streams, which it repeats


class CoSchedule(NamedTuple):
    """How both GPUs copy. `synchronized`: before each copy both wait until both have ended the one before."""

    name: str
    lanes: tuple[Lanes, Lanes]
    synchronized: bool = False


_IN_FIRST, _OUT_FIRST, _DUAL = ((IN, OUT),), ((OUT, IN),), ((IN,), (OUT,))
_WAYS = {"parallel": (_IN_FIRST,) * 2, "interleaved": (_IN_FIRST, _OUT_FIRST), "dual stream": (_DUAL,) * 2}
TABLE = (
    *(CoSchedule(name, lanes) for name, lanes in _WAYS.items()),
    *(CoSchedule(f"{name}, synchronized", lanes, True) for name, lanes in _WAYS.items()),
)


class Step(NamedTuple):
    """What a stream of a GPU does after what it did before, and after the steps of these numbers.

    `way` is None for the delay before a group.
    """

    gpu: int
    lane: int
    group: int
    way: str | None
    waits: tuple[int, ...]


def links(
    *,
    gpus: tuple[int, int] = (0, 1),
    megabytes: PositiveInt = 64,
    pairs: PositiveInt = 4,
    groups: PositiveInt = 200,
    delay_ms: NonNegativeFloat = 10.0,
    seed: int = 0,
) -> None:
    """Measure how two GPUs on one PCIe switch disturb each other's copies, by six ways to schedule them.

    Prints quantiles and a histogram, from 0 to the fastest, of what a GPU copies both ways in a group.

    Parameters
    ----------
    gpus
        Numbers of two GPUs; `nvidia-smi topo -m` says which share a switch (PIX).
    megabytes
        Bytes of a copy, in 10⁶.
    pairs
        Copies of a group in each direction.
    groups
        Groups of each GPU.
    delay_ms
        The longest delay before a group; uniformly random.
    """
    if (count := torch.cuda.device_count()) <= max(gpus) or gpus[0] == gpus[1] or min(gpus) < 0:
        raise InputError(
            f"--gpus = {gpus[0]} {gpus[1]}: torch {torch.__version__} sees {count} CUDA devices here; two of them on "
            "one PCIe switch were expected"
        )
    delays = np.random.default_rng(seed).uniform(0, delay_ms, (2, groups))
    reached = {each.name: measure(plan(each, groups, pairs), gpus, megabytes * 10**6, delays) for each in TABLE}
    fastest = max(float(rates.max()) for rates in reached.values())
    print(head(("GB/s of a GPU", "5 %", "median", "95 %", "mean", f"0 to {fastest:.1f}"), "lrrrrl"))
    for name, rates in reached.items():
        figures = (*np.quantile(rates, (0.05, 0.5, 0.95)), rates.mean())
        print(line((name, *(f"{figure:.1f}" for figure in figures), histogram(rates, fastest))))


def plan(schedule: CoSchedule, groups: int, pairs: int) -> list[Step]:
    """The steps of both GPUs in an order in which the host can enqueue them: none waits for a later one."""
    steps: list[Step] = []
    ends: list[list[int]] = [[], []]  # by GPU, the last steps of its streams in the group before
    for group in range(groups):
        delays = []
        for gpu in (0, 1):
            delays.append(len(steps))
            steps.append(Step(gpu, 0, group, None, tuple(ends[gpu])))
        before = [[delay] for delay in delays]  # by GPU
        for k in range(2 * pairs // len(schedule.lanes[0])):
            both = (*before[0], *before[1])
            now: list[list[int]] = [[], []]
            for gpu, lanes in enumerate(schedule.lanes):
                for lane, ways in enumerate(lanes):
                    waits = both if schedule.synchronized else (delays[gpu],) * (k == 0)
                    now[gpu].append(len(steps))
                    steps.append(Step(gpu, lane, group, ways[k % len(ways)], waits))
            before = now
        ends = before
    return steps


def measure(steps: Sequence[Step], gpus: tuple[int, int], nbytes: int, delays_ms: Floats) -> Floats:
    """What each GPU copies in each group, over the time from its first byte to its last: (2, groups), in GB/s."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    streams, buffers, bases = [], [], []
    for gpu in gpus:
        device = torch.device("cuda", gpu)
        streams.append([torch.cuda.Stream(device) for _ in (IN, OUT)])  # type: ignore[no-untyped-call]
        on_gpu = {way: torch.empty(nbytes, dtype=torch.uint8, device=device) for way in (IN, OUT)}
        on_host = {way: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for way in (IN, OUT)}
        buffers.append({IN: (on_gpu[IN], on_host[IN]), OUT: (on_host[OUT], on_gpu[OUT])})
        bases.append(_recorded(streams[-1][0]))
    for step in steps:
        stream = streams[step.gpu][step.lane]
        for earlier in step.waits:
            stream.wait_event(events[earlier][1])
        begin = _recorded(stream)
        with torch.cuda.stream(stream):
            if step.way is None:
                cycles = int(delays_ms[step.gpu, step.group] * CYCLES_PER_MS)
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            else:
                to, of = buffers[step.gpu][step.way]
                to.copy_(of, non_blocking=True)
        events.append((begin, _recorded(stream)))
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    times = [
        (bases[step.gpu].elapsed_time(begin), bases[step.gpu].elapsed_time(end))
        for step, (begin, end) in zip(steps, events, strict=True)
    ]
    return rates(steps, times, nbytes)


def rates(steps: Sequence[Step], times_ms: Sequence[tuple[float, float]], nbytes: int) -> Floats:
    """GB/s of each GPU and group, by the begin and the end of each step."""
    groups = steps[-1].group + 1
    begin, end, copies = np.full((2, groups), np.inf), np.zeros((2, groups)), np.zeros((2, groups))
    for step, (begins, ends) in zip(steps, times_ms, strict=True):
        if step.way is not None:
            place = step.gpu, step.group
            begin[place], end[place] = min(begin[place], begins), max(end[place], ends)
            copies[place] += 1
    found: Floats = copies * nbytes / (end - begin) / 1e6
    return found


def histogram(values: Floats, most: float, bins: int = 20) -> str:
    """How often values from 0 to `most` occur, a bar for each bin."""
    counts, _ = np.histogram(values, bins, (0, most))
    return "".join(BARS[int(np.ceil(count / counts.max() * (len(BARS) - 1)))] for count in counts)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
