"""`optpipe cache ...`: solved schedules, found again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe_cli.options import register, with_options
from optpipe_cli.output import Json, ProblemPath, ScheduleOutput, echo, print_json, print_rows, require_writable

if TYPE_CHECKING:
    from optpipe.options import SearchOptions
    from optpipe.schedule import Found
    from optpipe_cache import Cache, Hit

app = typer.Typer(help="Solved schedules, found again.", no_args_is_help=True)

At = Annotated[
    Path | None,
    typer.Option("--cache", help="The cache's file. Default: $OPTPIPE_CACHE, or one in the user's cache folder."),
]


@with_options("SearchOptions", only=("objective",))
def lookup(
    problem: ProblemPath,
    options: SearchOptions,
    cache: At = None,
    output: ScheduleOutput = None,
    json: Json = False,
) -> None:
    """Find the schedule of this problem, or of the most similar one whose schedule is valid; exit code 1 if there
    is none."""
    from optpipe.evaluate.objective import gap, length_ms
    from optpipe.model.problem import Problem
    from optpipe.schedule import ScheduleFile
    from optpipe_solver.bounds import lower_bound

    require_writable(output)
    wanted, objective = Problem.load(problem), options.objective
    hit = _open(cache).lookup(wanted, objective)
    if hit is None:
        print_json({"hit": None}) if json else echo("no schedule in the cache is valid for this problem")
        raise typer.Exit(1)
    bound_ms = max(hit.lower_bound_ms or 0.0, lower_bound(wanted, objective))
    share = gap(length_ms(hit.schedule, objective), bound_ms)
    if output:
        status: Found = "optimal" if share == 0 else "feasible"
        of_makespan = (status, bound_ms) if objective == "makespan" else ()  # so is a file's bound
        ScheduleFile.from_schedule(hit.schedule, *of_makespan).save(output)
    if json:
        print_json(
            {
                "hit": "exact" if hit.exact else "nearest",
                "source": hit.source,
                "distance": hit.distance,
                "terms": hit.terms,
                "method": hit.schedule.method,
                "makespan_ms": hit.schedule.makespan_ms,
                "span_ms": hit.schedule.span_ms,
                "lower_bound_ms": bound_ms,
                "gap": share,
            }
        )
        return
    proven = "proven optimal" if share == 0 else f"gap {share:.1%} to the lower bound {bound_ms:.6g} ms"
    echo(
        f"{_kind(hit)}: {length_ms(hit.schedule, objective):.6g} ms by {hit.schedule.method} from the {hit.source}, "
        f"re-checked for this problem, {proven}"
    )


def _kind(hit: Hit) -> str:
    """Whether the hit is exact, or how far away it is and what differs most."""
    if hit.exact:
        return "exact hit"
    terms = ", ".join(f"{name} {value:.2g}" for name, value in list(hit.terms.items())[:3])
    return f"nearest hit at distance {hit.distance:.2g} ({terms or 'the same'})"


register(app, None, lookup)


@app.command()
def add(
    schedules: Annotated[list[Path], typer.Argument(help="Schedule files.")],
    cache: At = None,
    json: Json = False,
) -> None:
    """Add schedules. Each is checked, and the better one of a problem is kept, without its bound; nothing is added if
    one is not valid."""
    from optpipe.errors import InputError
    from optpipe.schedule import ScheduleFile, check

    files = [ScheduleFile.load(path) for path in schedules]
    loaded = [file.schedule() for file in files]
    for path, file, schedule in zip(schedules, files, loaded, strict=True):
        if wrong := check(file.problem, schedule):
            raise InputError(f"{path}: not a schedule that runs and fits: {wrong[0]}")
    store = _open(cache)
    added = sum(store.add(schedule, "feasible", verified=True) for schedule in loaded)
    if json:
        print_json({"added": added, "known_better": len(loaded) - added})
    else:
        echo(f"{added} added, {len(loaded) - added} already known as good or better")


@app.command(name="list")
def list_(cache: At = None, json: Json = False) -> None:
    """List the schedules in the cache."""
    rows = [
        {
            "name": entry.problem.name,
            "devices": len(entry.problem.devices),
            "stages": len(entry.problem.stages),
            "microbatches": entry.problem.microbatches,
            "objective": entry.objective,
            "ms": entry.objective_ms,
            "hits": hits,
            "status": entry.status,
            "method": entry.method,
        }
        for entry, hits in _open(cache).entries_and_hits()
    ]
    print_json(rows) if json else print_rows(rows, "the cache is empty")


@app.command(name="export")
def export(
    output: Annotated[Path, typer.Argument(help="The file to write, of JSON lines.")],
    cache: At = None,
) -> None:
    """Write all entries to a file for `import`."""
    from optpipe.files import write_file

    require_writable(output)
    lines = list(_open(cache).export_lines())
    write_file(output, "".join(f"{line}\n" for line in lines))
    echo(f"{len(lines)} schedules written to {output}")


@app.command(name="import")
def import_(
    source: Annotated[Path, typer.Argument(help="A file that `export` wrote.")],
    cache: At = None,
) -> None:
    """Read a file that `export` has written. Each schedule is checked, and the better one of a problem is kept, without
    its bound: only what a search here proves is called optimal."""
    from optpipe.files import read_file

    echo(f"{_open(cache).import_lines(read_file(source).splitlines())} added")


@app.command()
def prune(
    keep: Annotated[
        int | None, typer.Argument(min=0, help="How many to keep: the most recently used. Default: all.")
    ] = None,
    days: Annotated[float | None, typer.Option(min=0, help="Delete what was not used for this many days.")] = None,
    cache: At = None,
) -> None:
    """Delete all but the entries that were used last."""
    echo(f"{_open(cache).prune(keep, days)} deleted")


def _open(path: Path | None) -> Cache:
    from optpipe_cache import user_cache

    return user_cache(path)
