"""The service under load and after failures, against its targets."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from benchmarks.service import failures, load, scaling
from benchmarks.service.failures import Outage
from benchmarks.service.load import LoadFigures, StreamFigures
from benchmarks.service.processes import deployment
from optpipe.errors import InputError
from optpipe_cli.options import numbers
from optpipe_cli.output import print_table

TENANTS = 50  # each may have a hundred waiting jobs


@dataclass(frozen=True)
class Figure:
    """A measured value, and its upper target or None."""

    what: str
    target: float | None
    measured: float
    unit: str

    @property
    def held(self) -> bool | None:
        return None if self.target is None else self.measured <= self.target


def service(
    database: Annotated[
        str | None, typer.Option(help="URL of an empty PostgreSQL database. Default: a new SQLite file.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Submissions a second.", min=1)] = 50.0,
    seconds: Annotated[float, typer.Option(help="Of load, and of events.", min=1)] = 20.0,
    clients: Annotated[int, typer.Option(help="Of event streams.", min=1, max=900)] = 500,
    reconnects: Annotated[int, typer.Option(help="Clients that are cut off.", min=1)] = 100,
    workers: Annotated[
        str, typer.Option(help="How many workers solve jobs of a second each, with --database.")
    ] = "1,2,4",
    restart: Annotated[
        str | None, typer.Option(help="A command that restarts the database, to time the recovery.")
    ] = None,
) -> None:
    """Measure the service under load, after a killed worker, after a restart of the database, and at its end."""
    if restart and not database:
        raise InputError(
            f"restart = {restart!r}: SQLite has no server to restart; expected --database postgresql://..., too"
        )
    counts = numbers("workers", workers, "numbers with commas between, each at least the one before") or []
    if counts != sorted(counts) or (counts and counts[0] < 1):
        raise InputError(f"--workers = {workers!r}: numbers with commas between, each at least the one before")
    restarted = _command(restart) if restart else None
    figures = asyncio.run(measure(database, rate, seconds, clients, reconnects, restarted, counts))
    print_table(
        _table(
            figures,
            f"{'SQLite' if database is None else 'PostgreSQL'}, {os.cpu_count()} cores, {rate:g} submissions a second",
        )
    )


async def measure(
    database: str | None,
    rate: float,
    seconds: float,
    clients: int,
    reconnects: int,
    restart: Callable[[], Awaitable[None]] | None,
    workers: Sequence[int] = (),
) -> list[Figure]:
    """Return all figures in the order in which they were measured."""

    figures = []
    with tempfile.TemporaryDirectory(prefix="optpipe-bench-") as folder:
        url = database or f"sqlite:///{folder}/service.sqlite"
        async with deployment(Path(folder), url, TENANTS, os.cpu_count() or 1) as deployed:
            if not deployed.sqlite:
                rates = zip(workers, await scaling.scaling(deployed, workers), strict=True)
                figures += [
                    Figure(f"jobs of {scaling.JOB_S:g} s: {n} workers solve", None, each, "a second")
                    for n, each in rates
                ]
            job = await load.saturate(deployed)
            killed = "the service, started again" if deployed.sqlite else "a worker, another one there"
            reclaimed_s = await failures.reclaimed(deployed, job)
            figures.append(Figure(f"kill -9 of {killed}: until its job runs", 20.0, reclaimed_s, "s"))
            figures += _of_load(await load.submissions(deployed, rate, seconds))
            figures += _of_streams(await load.streams(deployed, clients, reconnects, seconds))
            if restart is not None:
                figures += _of_outage(await failures.outage(deployed, restart))
            ended_s = await failures.shutdown(deployed, clients)
            figures.append(Figure(f"SIGTERM with {clients} open streams: until it has ended", 10.0, ended_s, "s"))
    return figures


def _of_load(load: LoadFigures) -> list[Figure]:
    wrong = sum(count for status, count in load.statuses.items() if status not in (200, 201))
    return [
        Figure("POST /jobs, p50", None, _percentile(load.post_ms, 50), "ms"),
        Figure("POST /jobs, p99", 150.0, _percentile(load.post_ms, 99), "ms"),
        Figure("GET /jobs/{id}, p50", None, _percentile(load.get_ms, 50), "ms"),
        Figure("GET /jobs/{id}, p99", 20.0, _percentile(load.get_ms, 99), "ms"),
        Figure(f"replies other than 200 and 201, of {sum(load.statuses.values())}", 0, wrong, ""),
        Figure(f"replies to POST without a schedule, of {len(load.post_ms)}", 0, load.without_schedule, ""),
        Figure("solvers and first-schedule processes meanwhile", None, load.solvers_cores, "cores"),
        Figure("the process that answers meanwhile", None, load.api_cores, "cores"),
        Figure("measuring itself", None, load.own_cores, "cores"),
    ]


def _of_streams(figures: StreamFigures) -> list[Figure]:
    until = f"an incumbent written until {figures.clients} clients have it"
    missed = f"events missed, of {figures.events}, by clients cut off {figures.reconnects} times"
    return [
        Figure(f"{until}, p50", None, _percentile(figures.fan_out_ms, 50), "ms"),
        Figure(f"{until}, p99", 500.0, _percentile(figures.fan_out_ms, 99), "ms"),
        Figure(missed, 0, figures.gaps, ""),
        Figure("events received twice", 0, figures.duplicates, ""),
        Figure("measuring itself", None, figures.own_cores, "cores"),
    ]


def _of_outage(seen: Outage) -> list[Figure]:
    wrong = sum(count for status, count in seen.statuses.items() if status not in ("201", "503"))
    return [
        Figure("the database has started again: until a submission is taken in", 10.0, seen.recovery_s, "s"),
        Figure("replies other than 201 and 503 around it", 0, wrong, ""),
        Figure("jobs acknowledged around it and lost", 0, seen.lost, ""),
    ]


def _percentile(values: list[float], percent: int) -> float:
    return float(np.percentile(values, percent))


def _command(restart: str) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        process = await asyncio.create_subprocess_shell(restart)
        if status := await process.wait():
            raise InputError(f"restart = {restart!r}: it ended with {status}")

    return run


def _table(figures: list[Figure], title: str) -> Table:
    table = Table("", "at most", "measured", "", box=None, title=title, title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    for figure in figures:
        target = "" if figure.target is None else f"{figure.target:g} {figure.unit}"
        measured = f"{figure.measured:.3g}" if figure.unit else f"{figure.measured:.0f}"
        verdict = "missed" if figure.held is False else ""
        table.add_row(figure.what, target, f"{measured} {figure.unit}", verdict)
    return table
