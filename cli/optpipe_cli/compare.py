"""`optpipe compare`, and `optpipe try`: the same for an example whose memory binds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from optpipe import solvers
from optpipe.anytime import search
from optpipe.comparison import SOLVER, Comparison, Row, fullest, is_search
from optpipe.comparison import compare as compared
from optpipe.evaluate.objective import Objective, length_ms
from optpipe.files import read_text, write_file
from optpipe.model.ops import Kind
from optpipe.model.placement import NAMES
from optpipe.model.problem import Problem, offload_ratio
from optpipe.options import CompareOptions, Placements, SolveOptions, StackName
from optpipe.schedule import Schedule
from optpipe.show.page import plot
from optpipe.show.pareto import Point, chart
from optpipe.show.svg import gantt
from optpipe.text import bytes_text, distinct_sizes, printable
from optpipe_cli.options import Flag, Json, NewFolder, Options, require_writable
from optpipe_cli.output import echo, print_json, print_table, sizes_text, waiting
from optpipe_solver.clock import FirstClock
from optpipe_solver.engines import waits_for_compiler
from optpipe_solver.systems import SYSTEMS, fitting, on_other_stages

TIGHT = Path(__file__).parent / "tight-4x8.json"
SEARCH_S = 4.0  # of the example's search
CURVE_S = 6.0  # likewise at each memory of the curve
CURVE = (1.6, 1.8, 2, 2.5, 3, 4, 8)  # its memory, in activations of a device's stages: 1F1B needs 4
SAME = 5e-4  # a share of a length that is no difference


def compare(
    problem: Annotated[Path, Parameter(help="A problem file, or a schedule file: its problem is compared.")],
    /,
    *,
    options: Annotated[Options[CompareOptions], Parameter(group="Search")] = CompareOptions(),
    pictures: Annotated[NewFolder, Parameter(help="Write a picture of each schedule into this folder.")] = None,
    json: Json = False,
) -> None:
    """`optpipe compare`."""
    is_schedule = '"optpipe.schedule/' in read_text(problem)[:100]  # as every schedule file begins
    filed = Schedule.load(problem) if is_schedule else None
    posed = filed.problem if filed else Problem.load(problem)
    comparison = watched(posed, options, quiet=json)
    for row in comparison.rows if pictures else ():
        if row.schedule and pictures:
            name = re.sub(r"[^a-z0-9]+", "-", title(row))
            write_file(pictures / f"{name}.svg", gantt(row.schedule, f"{posed.name} · {label(row)}".lstrip(" ·")))
    if json:
        print_json(comparison.to_dict())
        return
    for line in lines(comparison, posed.name or problem.stem):
        print_table(line)
    if filed:
        echo(f"{problem.name}: {filed.makespan_ms:.5g} ms, by {filed.method or 'hand'}")
    for row in comparison.rows:
        for note in row.result.notes:
            if note != row.reason:
                echo(f"note: {title(row)}: {note}", err=True)


def watched(
    problem: Problem, options: CompareOptions, quiet: bool = False, starts: Sequence[Schedule] = ()
) -> Comparison:
    """Run `optpipe.compare` with a line on stderr that shows the progress."""
    with waiting("comparing", quiet) as show:

        def report(row: Row) -> None:
            value = f"{row.result.value_ms:.5g} ms" if row.result.value_ms is not None else "no schedule"
            show(f"comparing, after {label(row)}: {value}")

        return compared(problem, options.methods, starts=starts, report=report, **options.search())


def lines(comparison: Comparison, name: str) -> Iterator[str | Table]:
    """What people read, 80 columns wide: the schedules, what the best one gains and why, and what does not apply."""
    ratios = sorted({round(ratio, 9) for ratio in offload_ratio(comparison.problem) if ratio is not None})
    least_and_most = " to ".join(f"{ratio:.3g}" for ratio in dict.fromkeys((*ratios[:1], *ratios[-1:])))
    k = f"k = {least_and_most}" if ratios else "no stage can be offloaded"
    yield f"{printable(name)}: {sizes_text(comparison.problem)}, {k}"
    if any(row.schedule for row in comparison.rows):
        yield table(comparison)
        yield ""
        yield "ms; peak of the device whose memory is fullest, where it does not fit: > limit;"
        yield "gap to the bound beside it, which holds for the row's stages, in a row `any` for all"
    before, after = comparison.best_published, comparison.best_own
    if before and before.schedule and after and after.schedule:
        yield from gain_lines(before.schedule, after.schedule, comparison.options.objective)
    if missing := [row for row in comparison.rows if row.schedule is None]:
        yield ""
        yield "no schedule:"
        reasons = Table.grid(padding=(0, 2))
        for row in missing:
            reasons.add_row(title(row), printable(row.reason or ""))
        yield reasons


def table(comparison: Comparison) -> Table:
    """Return the table of all schedules. Rows that do not fit have the figures that they would have."""
    table = Table(box=None, pad_edge=False)
    for name in ("method", comparison.options.objective, "bubble", "peak", "gap", "bound", "stages"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("method", "stages") else "right")
    for row in comparison.rows:
        if row.schedule:
            placement, stages = row.schedule.placement, "as given"
            if placement is not None:
                one = placement.chunks == 1 and placement.shape != "bidirectional"
                stages = "1" if one else f"{placement.chunks} {NAMES[placement.shape]}"
            table.add_row(
                label(row),
                f"{row.result.value_ms:.5g}",
                f"{row.result.bubble:.1%}",
                _peak(row),
                *(("", "") if row.gap is None else (f"{row.gap:.1%}", f"{row.result.lower_bound_ms:.5g}")),
                stages,
                style=None if row.fits else "dim",
            )
    return table


def _peak(row: Row) -> str:
    """The memory of the fullest device; where it, or its host memory, does not suffice also the limit."""
    assert row.certificate is not None
    peak, host = (fullest(peaks)[1] for peaks in (row.certificate.device, row.certificate.host))
    if row.fits or (peak.fits and host.fits):
        return bytes_text(peak.bytes)
    needed, limit = distinct_sizes(*(host.bytes, host.limit or 0) if peak.fits else (peak.bytes, peak.limit or 0))
    number, unit = needed.split()
    return f"{'host ' if peak.fits else ''}{number if limit.endswith(f' {unit}') else needed} > {limit}"


def label(row: Row) -> str:
    """Return for example `auto, any (lns)`: rows of searches also name the engine that found the schedule."""
    return f"{title(row)} ({row.schedule.method})" if row.schedule and is_search(row.method) else title(row)


def title(row: Row) -> str:
    """Return the method, and for rows of searches whether the stages were free."""
    return f"{row.method}, any" if is_search(row.method) and row.placements == "all" else row.method


def gain_lines(before: Schedule, after: Schedule, objective: Objective = "makespan", where: str = "") -> Iterator[str]:
    """How much shorter or longer the second schedule is than a published one, and why it is shorter."""
    published = f"{before.method}, the best published one that fits{where}"
    ratio = length_ms(after, objective) / length_ms(before, objective)
    shorter, longer = (
        f"{ms:.4g}" if ms < 1000 else f"{ms:.0f}" for ms in (length_ms(each, objective) for each in (after, before))
    )
    if abs(ratio - 1) <= SAME:
        yield f"OptPipe found nothing shorter than {published}: {longer} ms."
        return
    stages = ", on other stages" if after.placement != before.placement else ""
    change = abs(ratio - 1)
    much = f"{change:.{0 if change > 0.1 else 1}%} {'less' if ratio < 1 else 'more'} time"
    yield f"OptPipe's schedule takes {much} than {published}: {shorter} instead of {longer} ms{stages}."
    if ratio > 1:
        return

    def share(schedule: Schedule, kind: Kind) -> float:
        rows = schedule.timeline.rows
        return float((rows.of_kinds(kind) & (rows.part == 0)).sum() / rows.of_kinds(Kind.F).sum())

    facts = [
        f"{does} {share(after, kind):.0%} of all activations instead of {share(before, kind):.0%}"
        for kind, does in ((Kind.C, "recomputes"), (Kind.O, "offloads"))
        if share(before, kind) != share(after, kind)
    ]
    does_otherwise = f"it {', '.join(facts)}, and its" if facts else "its"
    waiting = f"devices wait {after.timeline.bubble:.0%} of the time instead of {before.timeline.bubble:.0%}"
    yield f"Why: within the same memory {does_otherwise} {waiting}."


def best_published(
    problem: Problem, placements: Placements, objective: Objective, stack: StackName = "optpipe"
) -> Schedule | None:
    """The shortest schedule of the other papers that fits a problem on the stages that may be used, and that the
    training stack runs; None also where a moment is too short to try all of them."""
    own, clock = solvers.installed().OWN, FirstClock()
    others = [name for name, _ in on_other_stages(problem)] if placements == "all" else []
    schedules = chain(fitting(SYSTEMS, problem, "keep", clock, stack), fitting(others, problem, "all", clock, stack))
    fit = [each for each in schedules if each.method not in own]
    return min(fit, key=lambda each: length_ms(each, objective), default=None) if not clock.over else None


def try_(
    *,
    html: Annotated[
        Path, Parameter(validator=require_writable, help="Where the page with both schedules is written.")
    ] = Path("optpipe-try.html"),
    curve: Annotated[Flag, Parameter(help="Compare at less and more memory: takes a minute or two.")] = False,
) -> None:
    """`optpipe try`."""
    problem = Problem.load(TIGHT)
    if curve:
        _print_curve(problem, html)
        return
    (budget,) = {device.activation_budget_bytes for device in problem.devices}
    echo(
        f"{len(problem.devices)} devices with {bytes_text(budget)} for activations, {len(problem.stages)} stages, "
        f"{problem.microbatches} micro-batches"
    )
    echo()
    comparison = _searched_once(problem, SEARCH_S)
    print_table(_example_table(comparison))
    (before, _), (after, bound_ms) = (
        (row.schedule, row.result.lower_bound_ms)
        for row in (comparison.best_published, comparison.best)
        if row and row.schedule  # naive and AdaOffload always fit
    )
    echo()
    for line in gain_lines(before, after):
        print_table(line)
    plot(after, before, bound_ms).save(html)
    echo()
    echo(f"Both on one time scale, with their memory: {html.resolve()}")
    echo("What is gained at less and more memory, in a minute or two: optpipe try --curve")


def _searched_once(problem: Problem, seconds: float, start: Schedule | None = None) -> Comparison:
    """Published schedules and AdaOffload's, and beside them one search on any stages, which may begin with another.

    Sooner than `optpipe.compare`, which searches on the problem's own stages before, and after the rest.
    """
    searching = search(problem, SolveOptions(time_limit_s=seconds, placements="all"), start)  # from here on
    options = CompareOptions(methods=(*SYSTEMS, "naive", "adaoffload"))
    rows = watched(problem, options).rows
    with waiting("searching"):
        *_, found = searching
    return Comparison.from_rows(problem, options, [*rows, Row(SOLVER, "all", found)])


def _print_curve(problem: Problem, html: Path) -> None:
    """Compare from little memory to much, print a row for each, and draw them on a page.

    What searches run is compiled before, once on a machine: each of them ends too soon for that.
    """
    if waits_for_compiler("dispatch"):
        echo("compiling, once on a machine", err=True)
        subprocess.run([sys.executable, "-m", solvers.installed().COMPILE], check=False)
    table = Table(box=None, pad_edge=False)
    for name in ("memory", "best published", "OptPipe", "less"):
        table.add_column(name, no_wrap=True, justify="right")
    published, own = list[Point](), list[Point]()
    schedule: Schedule | None = None  # with the memory before, which is less
    for activations in CURVE:
        posed = problem.with_memory_for(activations)
        comparison = _searched_once(posed, CURVE_S, schedule)
        (_, before), (schedule, after) = (
            (row.schedule, Point(row.schedule.method, row.peak[1].bytes, row.schedule.makespan_ms))
            for row in (comparison.best_published, comparison.best_own)
            if row and row.schedule and row.peak  # naive and AdaOffload always fit
        )
        published.append(before)
        own.append(after)
        lengths = (f"{point.ms:.0f} ms by {point.name}" for point in (before, after))
        table.add_row(bytes_text(posed.devices[0].activation_budget_bytes), *lengths, f"{1 - after.ms / before.ms:.0%}")
    print_table(table)
    chart(published, {"OptPipe": own}, {}, "Memory against an iteration", "best published").save(html)
    echo(f"Drawn: {html.resolve()}")


def _example_table(comparison: Comparison) -> Table:
    """A row for each schedule that applies: its time, how much of it devices wait, its memory. What fits is first."""
    table = Table(box=None, pad_edge=False)
    for name in ("schedule", "iteration", "waiting", "memory", ""):
        table.add_column(name, no_wrap=True, justify="left" if name in ("schedule", "") else "right")
    best = comparison.best
    for row in comparison.rows:
        if row.schedule is None or row.peak is None or (row.method in solvers.installed().OWN and row is not best):
            continue
        peak = row.peak[1]
        table.add_row(
            f"OptPipe ({row.schedule.method})" if row is best else row.method,
            f"{row.makespan_ms:.0f} ms",
            f"{row.result.bubble:.0%}",
            bytes_text(peak.bytes),
            "" if row.fits else f"does not fit in {bytes_text(peak.limit or 0)}",
            style="bold" if row is best else None if row.fits else "dim",
        )
    return table
