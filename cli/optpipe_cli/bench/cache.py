"""`optpipe bench cache`: how long it takes to find what is similar among many schedules."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe_cli.output import Json, print_json

if TYPE_CHECKING:
    import numpy as np

    from optpipe.model.problem import Problem
    from optpipe_cache.storage import FileStorage


def cache(
    entries: Annotated[int, typer.Option(min=1, max=10**6)] = 100_000,
    lookups: Annotated[int, typer.Option(min=2)] = 100,
    json: Json = False,
) -> None:
    """Time the search for the nearest of many problems of one structure: 8 devices, other times and memory."""
    import numpy as np

    from optpipe_cache import Cache
    from optpipe_cache.storage import FileStorage

    random = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        storage = FileStorage(Path(folder) / "cache.sqlite")
        _fill(storage, random, entries)
        store = Cache(storage)
        milliseconds, found = [], []
        for problem in [_problem(random) for _ in range(lookups)]:
            began = time.perf_counter()
            near = next(store.neighbours(problem), None)
            milliseconds.append(1000 * (time.perf_counter() - began))
            found.append(near is not None)
    figures = {
        "entries": entries,
        "median_ms": median(milliseconds),
        "p95_ms": quantiles(milliseconds, n=20)[-1],
        "found": sum(found) / lookups,
    }
    if json:
        print_json(figures)
    else:
        typer.echo(
            f"nearest of {entries} problems: median {figures['median_ms']:.2f} ms, 95% {figures['p95_ms']:.2f} ms; "
            f"{figures['found']:.0%} have one in reach"
        )


def _problem(random: np.random.Generator) -> Problem:
    """Eight devices whose forward, backward and offload times and whose memory are spread by about a half."""
    from optpipe.model.problem import Problem
    from optpipe.model.records import Device, Stage

    spread = random.lognormal(0, 0.4, 6).tolist()
    stages = tuple(
        Stage(
            device=d,
            forward_ms=10 * spread[0],
            backward_input_ms=10 * spread[1],
            backward_weight_ms=8 * spread[2],
            activation_bytes=10**9,
            saved_for_weight_bytes=4 * 10**8,
            offload_ms=12 * spread[3],
            reload_ms=12 * spread[3],
            offload_bytes=10**9,
        )
        for d in range(8)
    )
    device = Device(activation_budget_bytes=int(6 * 10**9 * spread[4]))
    return Problem(microbatches=32, p2p_ms=spread[5], devices=(device,) * 8, stages=stages)


def _fill(storage: FileStorage, random: np.random.Generator, entries: int) -> None:
    """Rows without schedules, written at once."""
    from optpipe_cache import features, structure
    from optpipe_cache.storage import COLUMNS, StoredRow

    same, marks = structure(_problem(random)), ", ".join(f":{name}" for name in COLUMNS)
    with closing(sqlite3.connect(storage.path)) as db, db:
        for n in range(entries):
            known_by = features(_problem(random))
            row = StoredRow(f"{n:064}", "makespan", same, known_by.packed, known_by.cell, f"{n:09}", 0, "")
            db.execute(f"INSERT INTO schedules ({', '.join(COLUMNS)}) VALUES ({marks})", row.columns)
