"""`optpipe bench scale`: how the cost of a search grows with the pipeline."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe_cli.bench.core import offloading
from optpipe_cli.bench.results import Results, ResultsFile
from optpipe_cli.options import with_options
from optpipe_cli.output import Json, print_json

if TYPE_CHECKING:
    from optpipe.model.problem import Problem
    from optpipe.options import SolveOptions

ROOM = [1, 2, 3]  # activations
COLUMNS = ("room", "steady", "p × m", "ops", "first: s", "CPU s", "gap", "5 %: s", "gap", "MB")
SLOPES = {"first_s": "first: s", "first_processor_s": "CPU s", "within_s": "5 %: s", "bytes": "MB"}
ROUNDS = 8  # micro-batches a device: up to 64 devices and 512 micro-batches
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


@with_options("SolveOptions", only=("time_limit_s", "threads", "memory_mib", "seed"))
def scale(
    options: SolveOptions,
    devices: Annotated[int, typer.Option(min=2, max=64, help="Of the largest pipeline; 2, 4, 8 and so on.")] = 64,
    room: Annotated[list[int], typer.Option(min=1, help="Activations that a device holds; repeat for several.")] = ROOM,
    results: ResultsFile = None,
    json: Json = False,
) -> None:
    """Measure how the time to a first schedule, the time to within 5 % of the bound and memory grow with the pipeline.

    Each device has eight micro-batches; there is time to offload. A search ends within 5 % of the bound. Of each memory
    there are slopes: the powers of the number of ops with which seconds and bytes grow.
    """
    kept = Results(results, "scale", ("room", "devices"), options)
    rows: list[Size] = []
    slopes: dict[int, dict[str, float | None]] = {}
    if not json:
        typer.echo(f"| {' | '.join(COLUMNS)} |\n|---:|---|{'---:|' * (len(COLUMNS) - 2)}")
    for each in dict.fromkeys(room):
        for p in (2**n for n in range(1, int(math.log2(devices)) + 1)):
            found = kept.find(each, p) or kept.add(asdict(_searched(p, ROUNDS * p, each, options)))
            rows.append(row := Size(**found))
            if not json:
                typer.echo(_line(row))
        slopes[each] = {
            name: slope([(row.ops, value) for row in rows if row.room == each and (value := getattr(row, name))])
            for name in SLOPES
        }
    if json:
        print_json({"sizes": [asdict(row) for row in rows], "slopes": slopes})
        return
    typer.echo(f"\n| room | {' | '.join(SLOPES.values())} |\n|---:{'|---:' * len(SLOPES)}|")
    for each, powers in slopes.items():
        typer.echo(f"| {each} | {' | '.join(_text(value, '.2f') for value in powers.values())} |")


def is_steady(problem: Problem) -> bool:
    """Whether memory allows a steady state, in which devices always compute although every activation leaves.

    In every F + B + W of a device one activation is held from F until it has left, and from its reload until B, and
    what W needs until W: bytes times ms, which the budget times F + B + W must admit.
    """
    stage, (device, *_) = problem.stages[0], problem.devices
    work_ms = stage.forward_ms + stage.backward_input_ms + stage.backward_weight_ms
    away_ms = (stage.offload_ms or 0.0) + (stage.reload_ms or 0.0)
    held = stage.activation_bytes * (stage.forward_ms + away_ms + stage.backward_input_ms)
    held += stage.saved_for_weight_bytes * stage.backward_weight_ms
    return held <= device.activation_budget_bytes * work_ms


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """By least squares on logarithmic axes; None for fewer than two points."""
    import numpy as np

    if len(points) < 2:
        return None
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def _searched(devices: int, microbatches: int, room: int, options: SolveOptions) -> Size:
    from optpipe.anytime import improve
    from optpipe.evaluate.objective import gap

    problem = offloading(devices, microbatches, room)
    processor_s = None
    search = improve(problem, **options.model_copy(update={"gap": ENOUGH}).arguments())
    with _watched(search.mark) as look:
        for result in search:
            if result.schedule and processor_s is None:
                processor_s = look()[1]
    most = look.most
    bound, history = result.lower_bound_ms, result.history
    gaps = [(step.time_s, gap(step.value_ms, bound)) for step in history]
    within = [at for at, left in gaps if left is not None and left <= ENOUGH]
    return Size(
        room,
        is_steady(problem),
        devices,
        microbatches,
        5 * devices * microbatches,  # F, B, W, and at most an offload and a reload
        history[0].time_s if history else None,
        processor_s,
        gaps[0][1] if gaps else None,
        min(within, default=None),
        result.gap,
        most,
    )


class _Look:
    """What the processes of a tree use: resident bytes and processor seconds, and the most bytes at any look."""

    def __init__(self, mark: str) -> None:
        self._mark, self.most = mark, 0

    def __call__(self) -> tuple[int, float]:
        import psutil

        from optpipe.process.process_tree import members

        nbytes, seconds = 0, 0.0
        for pid in members(self._mark):
            try:
                process = psutil.Process(pid)
                nbytes += process.memory_info().rss
                seconds += sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
        self.most = max(self.most, nbytes)
        return nbytes, seconds


@contextmanager
def _watched(mark: str) -> Iterator[_Look]:
    """Look at a tree of processes again and again during the block."""
    look, over = _Look(mark), threading.Event()
    thread = threading.Thread(target=_again, args=(look, over), daemon=True)
    thread.start()
    try:
        yield look
    finally:
        over.set()
        thread.join()


def _again(look: Callable[[], object], over: threading.Event) -> None:
    while not over.wait(EVERY_S):
        look()


def _line(row: Size) -> str:
    cells = (
        str(row.room),
        "yes" if row.steady else "no",
        f"{row.devices} × {row.microbatches}",
        str(row.ops),
        _text(row.first_s, ".2f"),
        _text(row.first_processor_s, ".2f"),
        _text(row.first_gap, ".1%"),
        _text(row.within_s, ".2f"),
        _text(row.gap, ".1%"),
        f"{row.bytes / 1e6:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
