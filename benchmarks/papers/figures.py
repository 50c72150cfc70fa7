"""OptPipe's Figure 6 again, by simulation and search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.papers import calibration, checks
from benchmarks.papers.calibration import PIPEOFFLOAD
from benchmarks.papers.checks import Check
from benchmarks.problems import with_budget
from benchmarks.results_file import KeepOptions, Results, ResultsPath
from benchmarks.tables import head, line, text
from optpipe.anytime import solve
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe_cli.options import Options
from optpipe_cli.output import waiting
from optpipe_solver import heuristics, systems

MICROBATCHES = (16, 32, 64, 128, 256)  # OptPipe, Figure 6
LESS_AT_256 = 0.17  # of its time, in the text


class Point(NamedTuple):
    """OptPipe, Figure 6 at a number of micro-batches. Spans in ms: PipeOffload's and OptPipe's by Table 1, where it has
    them, PipeOffload's by simulation, ours and its bound."""

    microbatches: int
    pipeoffload: float | None
    simulated: float
    optpipe: float | None
    ours: float | None
    bound: float | None


def figures(*, options: Options[KeepOptions] = KeepOptions(), results: ResultsPath = None) -> None:
    """Compare OptPipe's Figure 6 with ours: a curve, with a search for each of its points."""
    kept = Results(results, "figures", ("microbatches",), options)
    with waiting("figure 6"):
        points = list(curve(options, kept))
    print(checks.table([*gain(points), *why_not_matched()]))
    print(f"\n{curve_table(points)}")


def curve(options: SolveOptions, kept: Results) -> Iterator[Point]:
    """OptPipe, Figure 6: more and more micro-batches, with the times and the memory of Table 1's 32."""
    published = {row.microbatches: row for row in _figure_6_rows()}
    (posed,) = calibration.posed([published[32]], "span")
    free = {"offload_ms": posed.work_ms / 2, "reload_ms": posed.work_ms / 2}  # k = 1, as PipeOffload plans
    stages = [stage.model_copy(update=free) for stage in posed.problem.stages]
    for m in MICROBATCHES:
        problem = posed.problem.replace(microbatches=m)
        planned = systems.generate(PIPEOFFLOAD, problem.replace(stages=stages), "all")
        row = kept.find(m)
        if row is None:
            result = solve(problem, **options.model_copy(update={"objective": "span"}).arguments())
            row = kept.add({"microbatches": m, "ours": result.span_ms, "bound": result.lower_bound_ms})
        theirs = published[m].published if m in published else {}
        simulated = calibration.in_its_time(planned, problem).span_ms
        yield Point(m, theirs.get(PIPEOFFLOAD), simulated, theirs.get("optpipe"), row["ours"], row["bound"])


def curve_table(points: Sequence[Point]) -> str:
    """The curve: spans in ms, and what OptPipe takes less than PipeOffload."""
    columns = ("micro-batches", "PipeOffload", "simulated", "OptPipe", "ours", "bound", "less: paper", "less: ours")
    rows = (
        (
            point.microbatches,
            *(text(ms, ".0f") for ms in point[1:]),
            text(LESS_AT_256 if point.microbatches == 256 else less(point.pipeoffload, point.optpipe), ".1%"),
            text(less(point.simulated, point.ours), ".1%"),
        )
        for point in points
    )
    return "\n".join((head(columns, "r" * len(columns)), *map(line, rows)))


def less(before: float | None, after: float | None) -> float | None:
    """How much less time that takes; None where a time is not there."""
    return 1 - after / before if before and after else None


def gain(points: Sequence[Point]) -> Iterator[Check]:
    """The gain that the paper's text has: that of 256 micro-batches."""
    if ours := less(points[-1].simulated, points[-1].ours):
        note = "simulated: with the memory of Table 1 hardly anything has to leave"
        yield Check("OptPipe, Figure 6", "less time than PipeOffload", "%", 100 * LESS_AT_256, 100 * ours, note)


def why_not_matched() -> Iterator[Check]:
    """Why ours is not the paper's gain in Figure 6: what a further micro-batch costs both by Table 1, and how long ours
    takes with hardly any memory."""
    few, many = _figure_6_rows()
    further = many.microbatches - few.microbatches
    slow, fast = (
        ((many.published[who] or 0.0) - (few.published[who] or 0.0)) / further for who in (PIPEOFFLOAD, "optpipe")
    )
    posed = calibration.timed(many, "span")
    note = f"a further micro-batch takes {fast:.0f} ms against {slow:.0f}, of which {posed.work_ms:.0f} are computing; "
    note += f"its offload and reload take {2 * posed.transfer_ms:.0f}"
    what = "less time for a further micro-batch, by Table 1"
    yield Check("OptPipe, Figure 6", what, "%", 17.0, 100 * (1 - fast / slow), note)
    note = "list scheduling with memory for two activations a device, where almost all leave"
    ours = with_room(posed.problem, 2)
    yield Check("OptPipe, Figure 6", f"{many}", "ms", many.published["optpipe"] or 0.0, ours, note)


def with_room(problem: Problem, activations: int) -> float:
    """The span (ms) of list scheduling where each device has memory for so many activations of its stage."""
    short = with_budget(problem, activations * int(problem.costs.activation[0, 0]))
    return heuristics.generate("adaoffload", short, "span").span_ms


def _figure_6_rows() -> list[calibration.Row]:
    """The rows of Table 1 that have the model of Figure 6, the fewest micro-batches first."""
    table1 = (row for row in calibration.table() if (row.billions, row.size) == (7.1, 8))
    return sorted(table1, key=lambda row: row.microbatches)
