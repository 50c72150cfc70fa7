"""Figures of the papers again, by theory or simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.papers import calibration, checks, costs
from benchmarks.papers.calibration import PIPEOFFLOAD, most_held
from benchmarks.papers.checks import Check
from benchmarks.papers.costs import estimated
from benchmarks.papers.curves import chart
from benchmarks.problems import GB, all_kept, pipeline, stage_costs, with_budget
from benchmarks.results_file import Results, ResultsPath
from benchmarks.tables import head, line
from optpipe.anytime import solve
from optpipe.model.problem import Problem, write_file
from optpipe.model.program import STAGE
from optpipe.options import SolveOptions
from optpipe_cli.compare import waiting
from optpipe_cli.options import with_options
from optpipe_cli.output import require_folder
from optpipe_solver import heuristics, systems

Curves = dict[str, list[tuple[float, float]]]
UNIT = 1000  # bytes of a stage's activation
CHRONOS = {"pp": 8, "tp": 8, "sequence_parallel": False}
MESSAGE = 0.104  # ChronosPipe, section 6.1: T_c, in units of a chunk's forward


@dataclass(frozen=True)
class Figure:
    """Curves by name, each of points (x, y), and what is on the axes."""

    title: str
    x: str
    y: str
    curves: Curves
    logarithmic: bool = True


@with_options("SolveOptions", only=("time_limit_s", "threads", "memory_mib", "seed"))
def figures(
    options: SolveOptions,
    pictures: Annotated[Path | None, typer.Option(help="Write the pictures into this folder.")] = None,
    results: ResultsPath = None,
) -> None:
    """Draw figures of the papers again: ChronosPipe's 9, 13, 15, 16, PipeOffload's 10, OptPipe's 6, survey's bubbles.

    The searches are those of OptPipe's Figure 6, one for each number of micro-batches.
    """
    require_folder(pictures)
    kept = Results(results, "figures", ("microbatches",), options)
    drawings: dict[str, Callable[[], Figure]] = {
        "chronospipe-15": recomputed,
        "chronospipe-16": usable,
        "pipeoffload-10": in_flight,
        "optpipe-6": lambda: by_microbatches(options, kept),
    }
    drawn: dict[str, Figure] = {}
    for name, draw in drawings.items():
        with waiting(name):
            drawn[name] = figure = draw()
        if pictures:
            picture = chart(figure.curves, figure.title, figure.x, figure.y, figure.logarithmic)
            write_file(pictures / f"{name}.svg", picture)
    typer.echo(checks.table([*theory(), *gain(drawn["optpipe-6"].curves)]))
    for figure in drawn.values():
        typer.echo(f"\n{figure.title}, {figure.y}\n\n{table(figure)}")


def theory() -> Iterator[Check]:
    """What needs no search."""
    for figures_of in (chronos_memory, chronos_largest, chronos_messages, chronos_idle, constant, survey):
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


def survey() -> Iterator[Check]:
    """The survey's comparison of bubbles at P = 8, M = 32, as shares of an iteration; F = 1, a whole backward 2."""
    problem = all_kept([(1.0, 1.0, 1.0)] * 8, 32)
    alone = heuristics.generate("naive", problem).timeline.bubble
    yield Check("survey", "bubble of one micro-batch at a time", "%", 87.5, 100 * alone)
    pairs = problem.replace(overlap_factor=1.0)
    for name, method, published, note in (
        ("GPipe", "gpipe", 17.9, ""),
        ("1F1B", "1f1b", 17.9, ""),
        ("interleaved, V = 2", "interleaved", 10.9, "its (P-1)/(MV) is the bubble over the work, not over all time"),
        ("DualPipe", "dualpipe", 10.9, "a pair takes as long as both ops; W apart"),
    ):
        schedule = systems.generate(method, pairs if method == "dualpipe" else problem, "all")
        yield Check("survey", f"bubble of {name}", "%", published, 100 * schedule.timeline.bubble, note)


def recomputed() -> Figure:
    """ChronosPipe, Figure 15: what the fullest of 4 devices holds by the share of layers that is recomputed.

    Of 1F1B's memory, and with the activation that is in use, which the paper leaves out. 1F1B recomputes the same part
    of each activation.
    """
    curves: Curves = {
        "1F1B": [(100 * part, 100 * share("1f1b-recompute", 4, 1, part)) for part in (0, 0.25, 0.5, 0.75, 1)]
    }
    for chunks in (2, 3, 4):
        counts = range(chunks + 1)
        shares = [share(f"chronos-recomp:recomputed={n}" if n else "chronos", 4, chunks) for n in counts]
        curves[f"Chronos, {chunks} chunks"] = [
            (100 * n / chunks, 100 * part) for n, part in zip(counts, shares, strict=True)
        ]
    return Figure("Memory by layers recomputed, 4 devices", "% of layers", "% of 1F1B's", curves, logarithmic=False)


def usable() -> Figure:
    """ChronosPipe, Figure 16: the idle time in the cool-down, in which optimizers of deep chunks may run."""
    curves: Curves = {
        f"{chunks} chunks": [(devices, idle_units(devices, chunks)) for devices in (4, 8, 16)] for chunks in (2, 3, 4)
    }
    return Figure("Idle time that Chronos-Offload can use", "devices", "ops of a chunk", curves, logarithmic=False)


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


def in_flight() -> Figure:
    """PipeOffload, Figure 10: the fullest device's activations over all stages d·v, the least of 4, 8 and 16 devices.

    Offloads and reloads take as long as there is time for, k = 1.
    """
    curves: Curves = {}
    for method in ("interleaved", "gis", "gis-h", "po-h", "po-f"):
        for stages in (8, 16, 32):
            model = estimated("pipeoffload-5.8b", {"pp": stages}, "A100", {"recompute": "cheap"})
            size = float(model.problem.costs.activation[1, 0]) / GB
            placed = (looped(d, stages // d) for d in (4, 8, 16) if stages >= 2 * d)
            held = min(most_held(systems.generate(method, problem)) for problem in placed)
            curves.setdefault(method, []).append((stages, held / UNIT * size))
    return Figure("Activations held, 5.8B", "stages in all", "GB", curves)


def constant() -> Iterator[Check]:
    """PipeOffload, section 5.3: PO-F holds about four activations, however many stages there are."""
    for devices, chunks in ((4, 2), (16, 2), (8, 8)):
        held = most_held(systems.generate(PIPEOFFLOAD, looped(devices, chunks))) / UNIT
        yield Check("PipeOffload, Figure 10", f"PO-F, {devices} × {chunks}: activations held", "", 4.0, held, "k = 1")


def by_microbatches(options: SolveOptions, kept: Results) -> Figure:
    """OptPipe, Figure 6: PipeOffload and ours with 16 to 256 micro-batches, times and memory as in its Table 1."""
    (posed,) = calibration.posed(_figure_6_rows()[-1:], "span")
    free = {"offload_ms": posed.work_ms / 2, "reload_ms": posed.work_ms / 2}  # k = 1, as PipeOffload plans
    stages = [stage.model_copy(update=free) for stage in posed.problem.stages]
    curves: Curves = {"PipeOffload": [], "ours": [], "bound": []}
    for m in (16, 32, 64, 128, 256):
        problem = posed.problem.replace(microbatches=m)
        planned = systems.generate(PIPEOFFLOAD, problem.replace(stages=stages), "all")
        offloaded = calibration.in_its_time(planned, problem)
        row = kept.find(m)
        if row is None:
            result = solve(problem, **options.model_copy(update={"objective": "span"}).arguments())
            row = kept.add({"microbatches": m, "ours": result.span_ms, "bound": result.lower_bound_ms})
        curves["PipeOffload"].append((m, offloaded.span_ms))
        for name in ("ours", "bound"):
            if row[name]:
                curves[name].append((m, row[name]))
    return Figure("7.1B, 8 GPUs, size 8", "micro-batches", "ms", curves)


def gain(curves: Curves) -> Iterator[Check]:
    """What the paper says of Figure 6: at 256 micro-batches OptPipe takes 17 % less time than PipeOffload.

    And why ours is not that: what a further micro-batch costs both by Table 1, and how long it takes with hardly any
    memory.
    """
    theirs, ours = (dict(curves[name]).get(256) for name in ("PipeOffload", "ours"))
    if theirs and ours:
        note = "simulated: with the memory of Table 1 hardly anything has to leave"
        yield Check("OptPipe, Figure 6", "less time than PipeOffload", "%", 17.0, 100 * (1 - ours / theirs), note)
    few, many = _figure_6_rows()
    rows = few.published, many.published
    further = many.microbatches - few.microbatches
    slow, fast = (((rows[1][who] or 0.0) - (rows[0][who] or 0.0)) / further for who in (PIPEOFFLOAD, "optpipe"))
    posed = calibration.timed(many, "span")
    note = f"a further micro-batch takes {fast:.0f} ms against {slow:.0f}, of which {posed.work_ms:.0f} are computing"
    what = "less time for a further micro-batch, by Table 1"
    yield Check("OptPipe, Figure 6", what, "%", 17.0, 100 * (1 - fast / slow), note)
    note = "list scheduling with memory for two activations a device, where almost all leave"
    yield Check("OptPipe, Figure 6", f"{many}", "ms", rows[1]["optpipe"] or 0.0, with_room(posed.problem, 2), note)


def with_room(problem: Problem, activations: int) -> float:
    """The span (ms) of list scheduling where each device has memory for so many activations of its stage."""
    short = with_budget(problem, activations * int(problem.costs.activation[0, 0]))
    return heuristics.generate("adaoffload", short, "span").span_ms


def _figure_6_rows() -> list[calibration.Row]:
    """The rows of Table 1 that have the model of Figure 6, the fewest micro-batches first."""
    table1 = (row for row in calibration.table() if (row.billions, row.size) == (7.1, 8))
    return sorted(table1, key=lambda row: row.microbatches)


def of_eight(method: str) -> float:
    """`share` on 8 devices with half of the layers recomputed, if any are: half of each stage, or one of two chunks."""
    return share(method, 8, 1, 0.5) if method.startswith("1f1b") else share(method, 8, 2)


@cache
def share(method: str, devices: int, chunks: int, recomputed: float = 1.0) -> float:
    """What the fullest device holds, of what 1F1B holds. `recomputed` is the part of a stage that may be dropped."""
    problem = _alike(devices, chunks, 2.0, recompute_ms=1.0, checkpoint_bytes=round(UNIT * (1 - recomputed)))
    return most_held(systems.generate(method, problem)) / (devices * chunks * UNIT)


def looped(devices: int, chunks: int) -> Problem:
    """Stages that are alike, F = B = W, with enough micro-batches for a steady state, and k = 1."""
    return _alike(devices, chunks, 1.0, rounds=4, offload_ms=1.5, reload_ms=1.5, offload_bytes=UNIT)


def _alike(devices: int, chunks: int, each: float, rounds: int = 8, **fields: Any) -> Problem:
    """Looped stages whose F, B and W take `each`, so many micro-batches a device, and memory for all."""
    stage = stage_costs((each, each, each), UNIT) | fields
    microbatches = rounds * devices
    return pipeline([stage] * (devices * chunks), microbatches, UNIT * microbatches, devices)


def table(figure: Figure) -> str:
    """The curves of a figure, a line each."""
    sizes = sorted({size for curve in figure.curves.values() for size, _ in curve})
    lines = [head((figure.x, *(f"{size:.3g}" for size in sizes)), "l" + "r" * len(sizes))]
    for name, curve in figure.curves.items():
        values = dict(curve)
        lines.append(line((name, *(_cell(values.get(size)) for size in sizes))))
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "–" if value is None else format(value, ".4g" if value < 1000 else ".0f")
