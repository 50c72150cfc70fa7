"""`optpipe cache ...`: solved schedules, found again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt

from optpipe.errors import InputError
from optpipe.evaluate.objective import Objective, gap, length_ms, shorter
from optpipe.files import read_file, write_file
from optpipe.model.problem import Problem
from optpipe.schedule import Found, ScheduleFile, check
from optpipe_cache import user_cache
from optpipe_cli.compare import best_published
from optpipe_cli.options import Json, Output, ProblemPath, require_writable
from optpipe_cli.output import echo, print_json, print_rows
from optpipe_solver.bounds import lower_bound

At = Annotated[Path | None, Parameter(help="Its file. Default: $OPTPIPE_CACHE, or one in the user's cache folder.")]


def lookup(
    problem: ProblemPath,
    /,
    *,
    objective: Annotated[Objective, Parameter(help="makespan, or span: the longest time of one device.")] = "makespan",
    cache: At = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """`optpipe cache lookup`."""
    wanted = Problem.load(problem)
    hit = user_cache(cache).lookup(wanted, objective)
    if hit is None:
        print_json({"hit": None}) if json else echo("no schedule in the cache is valid for this problem")
        raise SystemExit(1)
    bound_ms = max(hit.lower_bound_ms or 0.0, lower_bound(wanted, objective))
    ms = length_ms(hit.schedule, objective)
    share = gap(ms, bound_ms)
    published = None if hit.exact else best_published(wanted, "keep", objective)
    published_ms = length_ms(published, objective)
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
                "shorter_published": published.method if published and shorter(published_ms, ms) else None,
            }
        )
        return
    terms = ", ".join(f"{name} {value:.2g}" for name, value in list(hit.terms.items())[:3])
    near = "exact hit" if hit.exact else f"nearest hit at distance {hit.distance:.2g} ({terms or 'the same'})"
    proven = "proven optimal" if share == 0 else f"gap {share:.1%} to the lower bound {bound_ms:.6g} ms"
    echo(
        f"{near}: {ms:.6g} ms by {hit.schedule.method} from the {hit.source}, "
        f"{'re-checked for' if hit.exact else 'adapted, not searched, to'} this problem, {proven}"
    )
    if published and shorter(published_ms, ms):
        echo(
            f"note: {published.method} takes {published_ms:.6g} ms; optpipe solve begins with the shorter one", err=True
        )


def add(
    schedules: Annotated[list[Path], Parameter(help="Schedule files.")], /, *, cache: At = None, json: Json = False
) -> None:
    """`optpipe cache add`."""
    files = [ScheduleFile.load(path) for path in schedules]
    loaded = [file.schedule() for file in files]
    for path, file, schedule in zip(schedules, files, loaded, strict=True):
        if wrong := check(file.problem, schedule):
            raise InputError(f"{path}: not a schedule that runs and fits: {wrong[0]}")
    store = user_cache(cache)
    added = sum(store.add(schedule, "feasible", verified=True) for schedule in loaded)
    if json:
        print_json({"added": added, "known_better": len(loaded) - added})
    else:
        echo(f"{added} added, {len(loaded) - added} already known as good or better")


def list_(*, cache: At = None, json: Json = False) -> None:
    """`optpipe cache list`."""
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
        for entry, hits in user_cache(cache).entries_and_hits()
    ]
    print_json(rows) if json else print_rows(rows, "the cache is empty")


def export(
    output: Annotated[Path, Parameter(validator=require_writable, help="The file to write, of JSON lines.")],
    /,
    *,
    cache: At = None,
) -> None:
    """`optpipe cache export`."""
    lines = list(user_cache(cache).export_lines())
    write_file(output, "".join(f"{line}\n" for line in lines))
    echo(f"{len(lines)} schedules written to {output}")


def import_(source: Annotated[Path, Parameter(help="A file that `export` wrote.")], /, *, cache: At = None) -> None:
    """`optpipe cache import`."""
    echo(f"{user_cache(cache).import_lines(read_file(source).splitlines())} added")


def prune(
    keep: Annotated[NonNegativeInt | None, Parameter(help="How many to keep, the last used. Default: all.")] = None,
    /,
    *,
    days: Annotated[NonNegativeFloat | None, Parameter(help="Delete what was not used for this many days.")] = None,
    cache: At = None,
) -> None:
    """`optpipe cache prune`."""
    echo(f"{user_cache(cache).prune(keep, days)} deleted")
