"""OptPipe's Table 1 as problems: times and memory are read off its columns 1F1B and PipeOffload, and off which runs end
without memory.

`table1.csv` holds the iteration times in ms (page 8), without a figure where a run ended out of memory. Columns are
named by the methods that stand for them: ZB is `zb-h2`, since its runs end where 2p - 1 activations do not fit, and
PipeOffload is `po-f`, since the paper says that it offloads every forward.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from benchmarks.papers.costs import AT_ONCE, estimated
from benchmarks.problems import pipeline, stage_costs, with_budget
from optpipe.evaluate.objective import Objective, length_ms
from optpipe.model.problem import Problem
from optpipe.model.records import one_for_all
from optpipe.schedule import Schedule
from optpipe_solver import systems

TABLE = Path(__file__).with_name("table1.csv")
PIPEOFFLOAD, ONE_F_ONE_B = "po-f", "1f1b"
BASELINES = (ONE_F_ONE_B, "interleaved", "zb-h2", "zb-v", PIPEOFFLOAD)
PREDICTED = BASELINES[1:-1]  # columns from which no time is taken
HALVINGS = 40


@dataclass(frozen=True)
class Row:
    """One row of the table: p GPUs, a model of so many 10⁹ parameters, m micro-batches of so many sequences.

    `published` has the iteration time of each column in ms, None where the run ended out of memory.
    """

    number: int
    gpus: int
    billions: float
    microbatches: int
    size: int
    published: dict[str, float | None] = field(compare=False)

    @property
    def model(self) -> tuple[int, float]:
        return self.gpus, self.billions

    @property
    def only_offload_fits(self) -> bool:
        return all(self.published[method] is None for method in BASELINES if method != PIPEOFFLOAD)

    def __str__(self) -> str:
        return f"{self.billions:g}B, {self.gpus} × {self.microbatches}, size {self.size}"


@dataclass(frozen=True)
class Posed:
    """A row as a problem of one stage a device, with every baseline's schedule, whether it fits or not.

    `work_ms` is F + B + W of a stage, `transfer_ms` the time to offload its activation, or to reload it.
    """

    row: Row
    problem: Problem
    work_ms: float
    transfer_ms: float
    baselines: dict[str, Schedule]

    @property
    def k(self) -> float:
        """Offload and reload over F + B + W (PipeOffload, section 2)."""
        return 2 * self.transfer_ms / self.work_ms

    @property
    def room(self) -> float:
        """How many activations of a stage a device can hold."""
        return float(self.problem.devices[0].activation_budget_bytes / self.problem.costs.activation[0, 0])

    def fits(self, method: str) -> bool:
        return most_held(self.baselines[method]) <= self.problem.devices[0].activation_budget_bytes

    def idle_ms(self, iteration_ms: float) -> float:
        """What an iteration of this length leaves a device without work."""
        return iteration_ms - self.row.microbatches * self.work_ms


@cache
def table() -> tuple[Row, ...]:
    """All rows, in the paper's order."""
    with TABLE.open(encoding="utf-8") as lines:
        return tuple(_row(number, cells) for number, cells in enumerate(csv.DictReader(lines), start=1))


def posed(rows: Sequence[Row], objective: Objective) -> Iterator[Posed]:
    """The rows as problems. What a model's GPUs can hold follows from all rows of that model."""
    budgets: dict[tuple[int, float], int] = {}
    for row in rows:
        if row.model not in budgets:
            alike = [timed(other, objective) for other in table() if other.model == row.model]
            budgets[row.model] = budget_bytes(
                [
                    (most_held(schedule), each.row.published[method] is not None)
                    for each in alike
                    for method, schedule in each.baselines.items()
                ]
            )
        whole = timed(row, objective)
        yield replace(whole, problem=with_budget(whole.problem, budgets[row.model]))


def budget_bytes(cells: Sequence[tuple[int, bool]]) -> int:
    """The activation budget that agrees with most cells, each the peak of a schedule and whether the run had memory.

    Between two peaks all budgets agree alike: the middle; of equally good ones the lowest.
    """
    peaks = sorted({peak for peak, _ in cells})
    low, high = max(
        pairwise([*peaks, 2 * peaks[-1]]), key=lambda budgets: sum((peak <= budgets[0]) == ran for peak, ran in cells)
    )
    return (low + high) // 2


def iteration_ms(row: Row) -> float:
    """The time of 1F1B, were there memory: as published, else on the line through the two largest sizes that fit.

    A size that does not fit takes no less than the largest one that does.
    """
    published = row.published[ONE_F_ONE_B]
    if published is not None:
        return published
    (small, before), (large, after) = [
        (other.size, ms)
        for other in table()
        if (other.model, other.microbatches) == (row.model, row.microbatches)
        and (ms := other.published[ONE_F_ONE_B]) is not None
    ][-2:]
    return after + max(0.0, after - before) / (large - small) * (row.size - large)


def most_held(schedule: Schedule) -> int:
    """Bytes of the device that holds most."""
    return max(peak.bytes for peak in schedule.compiled.certificate.device)


def where_it_reaches(target: float, at: Callable[[float], float], most: float) -> float:
    """The x from 0 to `most` at which a function that never falls reaches the target: 0 if it begins above it."""
    low, high = 0.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle) >= target else (middle, high)
    return high if low else 0.0


def in_its_time(planned: Schedule, problem: Problem) -> Schedule:
    """The same programs on a problem that differs in times or memory only."""
    return planned.on(planned.placement.apply(problem) if planned.placement else problem)


@cache
def timed(row: Row, objective: Objective) -> Posed:
    """A row with its times, and memory for everything."""
    work_ms = iteration_ms(row) / (row.microbatches + row.gpus - 1)  # of 1F1B: (m + p - 1)(F + B + W)
    planned = systems.generate(PIPEOFFLOAD, _problem(row, work_ms, work_ms / 2), "all")  # as if k were 1

    def offloaded(transfer_ms: float) -> Schedule:
        return in_its_time(planned, _problem(row, work_ms, transfer_ms))

    published = row.published[PIPEOFFLOAD] or 0.0
    transfer_ms = where_it_reaches(published, lambda ms: length_ms(offloaded(ms), objective), published)
    problem = _problem(row, work_ms, transfer_ms)
    baselines = {method: systems.generate(method, problem, "all") for method in BASELINES if method != PIPEOFFLOAD}
    return Posed(row, problem, work_ms, transfer_ms, baselines | {PIPEOFFLOAD: offloaded(transfer_ms)})


def _problem(row: Row, work_ms: float, transfer_ms: float) -> Problem:
    """p equal stages; how F, B and W share their time, and all bytes, are those of the cost model's second stage."""
    shares, activation, saved = _stage(row.gpus, row.billions, row.size)
    forward, backward, weight = (work_ms * share for share in shares)
    stage = stage_costs((forward, backward, weight), activation, saved, transfer_ms)
    return pipeline([stage] * row.gpus, row.microbatches, activation * row.microbatches, name=str(row))


@cache
def _stage(gpus: int, billions: float, size: int) -> tuple[tuple[float, float, float], int, int]:
    """Of a stage without embedding and head: the shares of F, B and W, what F saves, and what of it W needs."""
    run = {"microbatch_size": size}
    stage = estimated(f"optpipe-{billions:g}b", {"pp": gpus}, "H100", run, AT_ONCE).problem.stages[1]
    times = [one_for_all(ms) for ms in (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)]
    forward, backward, weight = (ms / sum(times) for ms in times)
    return (forward, backward, weight), one_for_all(stage.activation_bytes), one_for_all(stage.saved_for_weight_bytes)


def _row(number: int, cells: dict[str, str]) -> Row:
    published = {method: float(cells[method]) if cells[method] else None for method in (*BASELINES, "optpipe")}
    gpus, microbatches, size = (int(cells[name]) for name in ("gpus", "microbatches", "size"))
    return Row(number, gpus, float(cells["billions"]), microbatches, size, published)
