"""The service under load, after a failure and at its end, against its targets."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt
from cyclopts.validators import Number
from rich.table import Table

from benchmarks.service import failures, load
from benchmarks.service.load import LoadFigures, StreamFigures
from benchmarks.service.processes import deployment
from optpipe_cli.output import print_table

SMALL_OPS = 1000  # compute ops of a small problem
KEYS = 50  # each may have a hundred open jobs


@dataclass(frozen=True)
class Figure:
    """A measured value, and its target or None: the most, or the least, that it may be."""

    what: str
    target: float | None
    measured: float
    unit: str
    is_least: bool = False

    @property
    def held(self) -> bool | None:
        if self.target is None:
            return None
        return self.measured >= self.target if self.is_least else self.measured <= self.target


def service(
    *,
    database: str | None = None,
    rate: float = 50.0,
    seconds: float = 20.0,
    clients: Annotated[int, Parameter(validator=Number(gte=1, lte=900))] = 500,
    reconnects: PositiveInt = 100,
    each: PositiveInt = 5,
    busy: NonNegativeInt = 0,
) -> None:
    """Measure the service under load, after a killed worker, and at its end.

    Parameters
    ----------
    database
        URL of an empty PostgreSQL database. Default: a new SQLite file.
    rate
        Submissions a second.
    seconds
        Of load, and of events.
    clients
        Of event streams.
    reconnects
        Clients that are cut off.
    each
        Problems of each size that get a first schedule.
    busy
        Processes that compute beside the start of a service on an empty machine.
    """
    figures = asyncio.run(measure(database, rate, seconds, clients, reconnects, each, busy))
    print_table(
        _table(
            figures,
            f"{'SQLite' if database is None else 'PostgreSQL'}, {os.cpu_count()} cores, {rate:g} submissions a second",
        )
    )


async def measure(
    database: str | None, rate: float, seconds: float, clients: int, reconnects: int, each: int, busy: int = 0
) -> list[Figure]:
    """Return all figures in the order in which they were measured."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="optpipe-bench-") as folder:
        beside = f", beside {busy} others" if busy else ""
        cold_s = await failures.cold_start(Path(folder), busy)
        figures.append(Figure(f"an empty machine{beside}: to a first schedule", 15.0 if busy else 5.0, cold_s, "s"))
        url = database or f"sqlite:///{folder}/service.sqlite"
        async with deployment(Path(folder), url, KEYS, os.cpu_count() or 1) as deployed:
            figures += _of_first_schedules(await load.first_schedules(deployed, each))
            rate_at_once = await load.burst(deployed, each)
            what = f"POST /jobs of {load.BURST_CLIENTS} clients at once"
            figures.append(Figure(what, 20.0, rate_at_once, "a second", is_least=True))
            job = await load.saturate(deployed)
            killed = "the service, started again" if deployed.sqlite else "a worker, another one there"
            reclaimed_s = await failures.reclaimed(deployed, job)
            figures.append(Figure(f"kill -9 of {killed}: until its job runs", 20.0, reclaimed_s, "s"))
            figures += _of_load(await load.submissions(deployed, rate, seconds))
            figures += _of_streams(await load.streams(deployed, clients, reconnects, seconds))
            ended_s = await failures.shutdown(deployed, clients)
            figures.append(Figure(f"SIGTERM with {clients} open streams: until it has ended", 10.0, ended_s, "s"))
    return figures


def _of_first_schedules(figures: list[tuple[int, float]]) -> list[Figure]:
    small, large = ([s for ops, s in figures if (ops <= SMALL_OPS) == small] for small in (True, False))
    most = max(ops for ops, _ in figures)
    return [
        Figure(
            f"POST /jobs on an idle service, up to {SMALL_OPS:,} ops: slowest of {len(small)}", 0.3, max(small), "s"
        ),
        Figure(f"POST /jobs, idle, up to {most:,} ops: slowest of {len(large)}", 1.0, max(large), "s"),
    ]


def _of_load(load: LoadFigures) -> list[Figure]:
    wrong = sum(count for status, count in load.statuses.items() if status not in (200, 201))
    return [
        Figure("POST /jobs, p50", None, _percentile(load.post_ms, 50), "ms"),
        Figure("POST /jobs, p99", 150.0, _percentile(load.post_ms, 99), "ms"),
        Figure("GET /jobs/{id}, p50", None, _percentile(load.get_ms, 50), "ms"),
        Figure("GET /jobs/{id}, p99", 20.0, _percentile(load.get_ms, 99), "ms"),
        Figure(f"replies other than 200 and 201, of {sum(load.statuses.values())}", 0, wrong, ""),
        Figure(f"replies to POST without a schedule, of {len(load.post_ms)}", 0, load.without_schedule, ""),
    ]


def _of_streams(figures: StreamFigures) -> list[Figure]:
    until = f"an incumbent written until {figures.clients} clients have it"
    missed = f"events missed, of {figures.events}, by clients cut off {figures.reconnects} times"
    return [
        Figure(f"{until}, p50", None, _percentile(figures.fan_out_ms, 50), "ms"),
        Figure(f"{until}, p99", 500.0, _percentile(figures.fan_out_ms, 99), "ms"),
        Figure(missed, 0, figures.gaps, ""),
        Figure("events received twice", 0, figures.duplicates, ""),
    ]


def _percentile(values: list[float], percent: int) -> float:
    return float(np.percentile(values, percent))


def _table(figures: list[Figure], title: str) -> Table:
    table = Table("", "target", "measured", "", box=None, title=title, title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    for figure in figures:
        target = "" if figure.target is None else f"{'≥' if figure.is_least else '≤'} {figure.target:g} {figure.unit}"
        measured = f"{figure.measured:.3g}" if figure.unit else f"{figure.measured:.0f}"
        verdict = "missed" if figure.held is False else ""
        table.add_row(figure.what, target, f"{measured} {figure.unit}", verdict)
    return table
