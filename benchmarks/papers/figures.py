"""Figures of the papers again, by theory or simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from benchmarks.papers import calibration, checks, costs
from benchmarks.papers.calibration import PIPEOFFLOAD, most_held
from benchmarks.papers.checks import Check
from benchmarks.papers.costs import estimated
from benchmarks.problems import GB, pipeline, stage_costs, with_budget
from benchmarks.results_file import KeepOptions, Results, ResultsPath
from benchmarks.tables import head, line, text
from optpipe.anytime import solve
from optpipe.model.problem import Problem
from optpipe.model.program import STAGE
from optpipe.options import SolveOptions
from optpipe_cli.options import Options
from optpipe_cli.output import waiting
from optpipe_solver import heuristics, systems

UNIT = 1000  # bytes of a stage's activation
CHRONOS = {"pp": 8, "tp": 8, "sequence_parallel": False}
MESSAGE = 0.104  # ChronosPipe, section 6.1: T_c, in units of a chunk's forward
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
    """Compare figures of the papers with ours: ChronosPipe's 9, 13, 16, PipeOffload's 10, OptPipe's 6.

    OptPipe's Figure 6 is a curve, with a search for each of its points; the others need none.
    """
    kept = Results(results, "figures", ("microbatches",), options)
    with waiting("figure 6"):
        points = list(curve(options, kept))
    print(checks.table([*theory(), *gain(points), *why_not_matched()]))
    print(f"\n{curve_table(points)}")


def theory() -> Iterator[Check]:
    """What needs no search."""
    for figures_of in (chronos_memory, chronos_largest, chronos_messages, chronos_idle, constant):
        yield from figures_of()


def chronos_memory() -> Iterator[Check]:
    """ChronosPipe, Figure 9(a): activations of 48 layers on the first device."""
    run = {"microbatch_size": 2, "recompute": "cheap"}
    model = estimated("llama-2-70b", CHRONOS, "A100", run, layers=48)
    whole = 8 * sum(model.pieces[i].activation_bytes("cheap") for i in model.stages[0]) / GB
    for name, method, published in (
        ("1F1B, half recomputed", "1f1b-recompute", 10.6),
        ("Chronos-Pipe", "chronos", 17.23),
        ("Chronos-Recomp", "chronos-recomp", 6.63),
    ):
        note = f"{of_eight(method):.2%} of the memory of 1F1B"
        yield Check("ChronosPipe, Figure 9(a)", f"{name}: activations", "GB", published, whole * of_eight(method), note)


def chronos_largest() -> Iterator[Check]:
    """ChronosPipe, Figure 9(b): the most layers in 32 GB.

    With Chronos-Offload the deep half's optimizer is on the host, so a third of that half's state stays (section 5.1).
    """
    for name, method, step, state, printed, published in (
        ("1F1B", "1f1b", 8, 1.0, 1.0, 40),
        ("1F1B, half recomputed", "1f1b-recompute", 8, 1.0, 0.5, 64),
        ("Chronos-Pipe", "chronos", 16, 1.0, 0.75, 48),
        ("Chronos-Recomp", "chronos-recomp", 16, 1.0, 0.25, 80),
        ("Chronos-Recomp with Chronos-Offload", "chronos-recomp", 16, 2 / 3, 0.25, 96),
    ):
        ours, theirs = (costs.largest_model(part, step, state) for part in (of_eight(method), printed))
        note = f"{of_eight(method):.2%} of 1F1B's activations; by the paper's {printed:.0%} it is {theirs}"
        yield Check("ChronosPipe, Figure 9(b)", f"{name}: largest model", "layers", published, ours, note)


def chronos_messages() -> Iterator[Check]:
    """ChronosPipe, Figure 13: how much less of its time Chronos-Pipe computes than 1F1B; messages keep devices busy."""
    p, m = 4, 64
    alone = 6 * (m + p - 1)
    steady = alone + (2 * p + 4 * (m - 2)) * MESSAGE
    chronos = alone + (4 * p + 8 * (m - 2) + 2) * MESSAGE
    note = "by the formulas of section 4.1; messages that occupy both devices"
    what = "Chronos-Pipe computes less of its time than 1F1B"
    yield Check("ChronosPipe, Figure 13", what, "%", 6.0, 100 * (1 - steady / chronos), note)


def chronos_idle() -> Iterator[Check]:
    """ChronosPipe, Figure 16: how much more idle time Chronos-Offload can use on 4 devices with more chunks."""
    for chunks, published in ((3, 50.0), (4, 50.0)):
        extra = 100 * (idle_units(4, chunks) / idle_units(4, 2) - 1)
        what = f"{chunks} chunks have more usable idle time than 2"
        note = "in ops of a chunk, behind the deepest chunk's last backward"
        yield Check("ChronosPipe, Figure 16", what, "%", published, extra, note)


@cache
def idle_units(devices: int, chunks: int) -> float:
    """How long a device of Chronos-Pipe is idle behind the last backward of its deepest chunk, F = B = W = 1.

    The least of all devices. With two chunks it is Eq. 4: (p - ⌈(2p - 3)/6⌉ - 1) backwards of a chunk.
    """
    timeline = systems.generate("chronos", _alike(devices, chunks, 1.0)).timeline
    idle = []
    for d in range(devices):
        of_device = timeline.device == d
        over = timeline.end[of_device & (timeline.table[:, STAGE] == devices * (chunks - 1) + d)].max()
        later = of_device & (timeline.start >= over)
        idle.append(timeline.end[of_device].max() - over - (timeline.end - timeline.start)[later].sum())
    return float(min(idle))


def constant() -> Iterator[Check]:
    """PipeOffload, section 5.3: PO-F holds about four activations, however many stages there are."""
    for devices, chunks in ((4, 2), (16, 2), (8, 8)):
        held = most_held(systems.generate(PIPEOFFLOAD, looped(devices, chunks))) / UNIT
        yield Check("PipeOffload, Figure 10", f"PO-F, {devices} × {chunks}: activations held", "", 4.0, held, "k = 1")


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


@cache
def of_eight(method: str) -> float:
    """What the fullest of 8 devices holds, of what 1F1B holds, with half of the layers recomputed, if any are: half of
    each stage, or one of two chunks."""
    chunks, kept = (1, 0.5) if method.startswith("1f1b") else (2, 0.0)
    problem = _alike(8, chunks, 2.0, recompute_ms=1.0, checkpoint_bytes=round(UNIT * kept))
    return most_held(systems.generate(method, problem)) / (8 * chunks * UNIT)


def looped(devices: int, chunks: int) -> Problem:
    """Stages that are alike, F = B = W, with enough micro-batches for a steady state, and k = 1."""
    return _alike(devices, chunks, 1.0, rounds=4, offload_ms=1.5, reload_ms=1.5, offload_bytes=UNIT)


def _alike(devices: int, chunks: int, each: float, rounds: int = 8, **fields: Any) -> Problem:
    """Looped stages whose F, B and W take `each`, so many micro-batches a device, and memory for all."""
    stage = stage_costs((each, each, each), UNIT) | fields
    microbatches = rounds * devices
    return pipeline([stage] * (devices * chunks), microbatches, UNIT * microbatches, devices)
