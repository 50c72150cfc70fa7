"""How the cost of a search grows with the pipeline."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import psutil
from cyclopts import Parameter
from cyclopts.types import PositiveInt
from cyclopts.validators import Number

from benchmarks.problems import offloading
from benchmarks.results_file import KeepOptions, Results, ResultsPath
from benchmarks.tables import head, line, text
from optpipe.anytime import improve
from optpipe.evaluate.objective import gap
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.records import one_for_all
from optpipe.options import SolveOptions
from optpipe.process.process_tree import members
from optpipe_cli.options import Options

ROOM = (1, 2, 3)  # activations
COLUMNS = ("room", "steady", "p × m", "ops", "first: s", "CPU s", "gap", "5 %: s", "gap", "MB")
SLOPES = {"first_s": "first: s", "first_processor_s": "CPU s", "within_s": "5 %: s", "bytes": "MB"}
ROUNDS = 8  # micro-batches a device: up to 128 devices and 1,024 micro-batches
ENOUGH = 0.05  # of a schedule: the gap to the bound at which a search ends
EVERY_S = 0.2  # between two looks at the processes


@dataclass(frozen=True)
class Size:
    """A search: `ops` are the compute ops, and the transfers if everything leaves.

    `room` is how many activations a device's memory holds, `steady` whether that allows a steady state (`is_steady`).
    `first_s` is the time to the first schedule and `first_processor_s` what all processes of the search had computed by
    then; `first_gap` and `gap` are the first and the last gap to the final bound; `within_s` is the time to a gap of at
    most 5 %, None if it was not reached; `bytes` the most resident memory of all processes together.
    """

    room: int
    steady: bool
    devices: int
    microbatches: int
    ops: int
    first_s: float | None
    first_processor_s: float | None
    first_gap: float | None
    within_s: float | None
    gap: float | None
    bytes: int


def scale(
    *,
    options: Options[KeepOptions] = KeepOptions(),
    devices: Annotated[int, Parameter(validator=Number(gte=2, lte=128))] = 64,
    room: tuple[PositiveInt, ...] = ROOM,
    results: ResultsPath = None,
) -> None:
    """Measure how the time to a first schedule, the time to within 5 % of the bound and memory grow with the pipeline.

    Each device has eight micro-batches; there is time to offload. A search ends within 5 % of the bound. Of each memory
    there are slopes: the powers of the number of ops with which seconds and bytes grow.

    Parameters
    ----------
    devices
        Of the largest pipeline; 2, 4, 8 and so on.
    room
        Activations that a device holds; repeat for several.
    """
    kept = Results(results, "scale", ("room", "devices"), options)
    sizes: dict[int, list[Size]] = {each: [] for each in room}
    print(head(COLUMNS, "rl" + "r" * (len(COLUMNS) - 2)))
    for each, rows in sizes.items():
        for p in (2**n for n in range(1, int(math.log2(devices)) + 1)):
            row = kept.find(each, p) or kept.add(asdict(searched(p, ROUNDS * p, each, options)))
            rows.append(Size(**row))
            print(_line(rows[-1]))
    print("\n" + head(("room", *SLOPES.values()), "r" * (1 + len(SLOPES))))
    for each, rows in sizes.items():
        powers = [
            slope([(row.ops, value) for row in rows if (value := getattr(row, figure)) is not None])
            for figure in SLOPES
        ]
        print(line((each, *(text(power, ".2f") for power in powers))))


def is_steady(problem: Problem) -> bool:
    """Whether memory allows a steady state, in which devices always compute although every activation leaves.

    In every F + B + W of a device one activation is held from F until it has left, and from its reload until B, and
    what W needs until W: bytes times ms, which the budget times F + B + W must admit.
    """
    stage, (device, *_) = problem.stages[0], problem.devices
    ms = problem.costs.ms[:, 0, 0]
    away_ms = float(ms[Kind.O] + ms[Kind.R]) * stage.offload_parts
    work_ms = float(ms[[Kind.F, Kind.B, Kind.W]].sum())
    held = one_for_all(stage.activation_bytes) * (float(ms[Kind.F] + ms[Kind.B]) + away_ms)
    held += one_for_all(stage.saved_for_weight_bytes) * float(ms[Kind.W])
    return held <= device.activation_budget_bytes * work_ms


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """By least squares on logarithmic axes; None for fewer than two points."""
    if len(points) < 2:
        return None
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def searched(devices: int, microbatches: int, room: int, options: SolveOptions) -> Size:
    """Run one search and watch its processes."""
    problem = offloading(devices, microbatches, room)
    first_processor_s = None
    search = improve(problem, **options.model_copy(update={"gap": ENOUGH}).arguments())
    with _watched(search.mark) as usage:
        for result in search:
            if result.schedule and first_processor_s is None:
                first_processor_s = usage.look()
    history = result.history
    gaps = [(step.time_s, gap(step.value_ms, result.lower_bound_ms)) for step in history]
    return Size(
        room=room,
        steady=is_steady(problem),
        devices=devices,
        microbatches=microbatches,
        ops=5 * devices * microbatches,  # F, B, W, and at most an offload and a reload
        first_s=history[0].time_s if history else None,
        first_processor_s=first_processor_s,
        first_gap=gaps[0][1] if gaps else None,
        within_s=min((at for at, left in gaps if left is not None and left <= ENOUGH), default=None),
        gap=result.gap,
        bytes=usage.most_bytes,
    )


class _Usage:
    """What the processes of a search use."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.most_bytes = 0  # resident, of all processes together, at any look

    def look(self) -> float:
        """Note what they hold; return the processor seconds that the living ones have used."""
        held, seconds = 0, 0.0
        for pid in members(self._mark):
            try:
                process = psutil.Process(pid)
                held += process.memory_info().rss
                seconds += sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
        self.most_bytes = max(self.most_bytes, held)
        return seconds


@contextmanager
def _watched(mark: str) -> Iterator[_Usage]:
    """Look at a search's processes again and again during the block."""
    usage, over = _Usage(mark), threading.Event()
    thread = threading.Thread(target=_look_until, args=(usage.look, over), daemon=True)
    thread.start()
    try:
        yield usage
    finally:
        over.set()
        thread.join()


def _look_until(look: Callable[[], object], over: threading.Event) -> None:
    while not over.wait(EVERY_S):
        look()


def _line(row: Size) -> str:
    return line(
        (
            row.room,
            "yes" if row.steady else "no",
            f"{row.devices} × {row.microbatches}",
            row.ops,
            text(row.first_s, ".2f"),
            text(row.first_processor_s, ".2f"),
            text(row.first_gap, ".1%"),
            text(row.within_s, ".2f"),
            text(row.gap, ".1%"),
            f"{row.bytes / 1e6:.0f}",
        )
    )
