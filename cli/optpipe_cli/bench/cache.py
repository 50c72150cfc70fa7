"""`optpipe bench cache`: how long it takes to find what is similar among many schedules, and what a fresh install finds
of ordinary problems."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe_cli.output import Json, print_json

if TYPE_CHECKING:
    import numpy as np

    from optpipe.model.problem import Problem
    from optpipe_cache import Cache
    from optpipe_cache.storage import FileStorage


def cache(
    entries: Annotated[int, typer.Option(min=1, max=10**6)] = 100_000,
    lookups: Annotated[int, typer.Option(min=2)] = 100,
    json: Json = False,
) -> None:
    """Time the search for the nearest of many problems of one structure: 8 devices, other times and memory. Then look
    ordinary problems up in an empty cache with the release's pack. Times are of the processor."""
    import numpy as np

    from optpipe_cache import Cache, release_pack
    from optpipe_cache.storage import FileStorage

    random = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        storage = FileStorage(Path(folder) / "cache.sqlite")
        _fill(storage, random, entries)
        store = Cache(storage)
        milliseconds, found = [], []
        for problem in [_problem(random) for _ in range(lookups)]:
            began = time.process_time()
            near = next(store.neighbours(problem), None)
            milliseconds.append(1000 * (time.process_time() - began))
            found.append(near is not None)
        fresh = Cache(Path(folder) / "fresh.sqlite", pack=release_pack())
        _looked_up(fresh, next(_ordinary(random, 1)))  # waits for what is compiled
        first = [_looked_up(fresh, problem) for problem in _ordinary(random, lookups)]
    hits = [row for row in first if row["found"]]
    figures = {
        "entries": entries,
        "median_ms": median(milliseconds),
        "p95_ms": quantiles(milliseconds, n=20)[-1],
        "found": sum(found) / lookups,
        "pack": first,
    }
    if json:
        print_json(figures)
    else:
        typer.echo(
            f"nearest of {entries} problems: median {figures['median_ms']:.2f} ms, 95% {figures['p95_ms']:.2f} ms; "
            f"{figures['found']:.0%} have one in reach"
        )
        typer.echo(f"{len(first)} ordinary problems, first lookup with the pack: {len(hits) / len(first):.0%} found")
        for name, form in (("distance", ".2f"), ("gap", ".1%"), ("ms", ".0f")):
            if len(hits) > 1:
                values = [row[name] for row in hits]
                typer.echo(f"{name}: median {median(values):{form}}, 95% {quantiles(values, n=20)[-1]:{form}}")


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


def _looked_up(cache: Cache, problem: Problem) -> dict[str, Any]:
    from optpipe.evaluate.objective import gap
    from optpipe_solver.bounds import lower_bound

    began = time.process_time()
    hit = cache.lookup(problem)
    ms = 1000 * (time.process_time() - began)
    if hit is None:
        return {"problem": problem.name, "found": False}
    share = gap(hit.schedule.makespan_ms, lower_bound(problem))
    return {"problem": problem.name, "found": True, "distance": hit.distance, "gap": share, "ms": ms}


def _ordinary(random: np.random.Generator, n: int) -> Iterator[Problem]:
    """Pipelines as they are often seen: 2 to 32 devices, up to eight micro-batches a device; backwards of an input take
    up to 1.3 forwards, those of weights 0.65 to 1, each measured with 3 % noise; memory for half as many micro-batches
    as there are devices to twice as many; an activation cannot leave, or does so in half a forward to four; some are
    computed again."""
    from optpipe.model.problem import Problem
    from optpipe.model.records import Device, Stage

    size = 10**9
    for number in range(n):
        p = int(random.choice([2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32]))
        offload, recompute, full = (
            bool(value) for value in random.choice([(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)])
        )
        backward, weight = random.uniform(1.0, 1.3), random.uniform(0.65, 1.0)
        link, fit = 2 ** random.uniform(-1, 2), p * 2 ** random.uniform(-1, 1)
        saved, m = int(random.uniform(0.8 if full else 0.4, 1.0 if full else 0.7) * size), int(p * random.uniform(1, 8))
        stages = []
        for d in range(p):
            noise = random.normal(1, 0.03, 6).tolist()
            more: dict[str, Any] = {}
            if offload:
                more |= {"offload_ms": 10 * link * noise[3], "reload_ms": 10 * link * noise[4], "offload_bytes": size}
            if recompute:
                more |= {"recompute_ms": 10 * noise[5], "checkpoint_bytes": size // 12}
            stages.append(
                Stage(
                    device=d,
                    forward_ms=10 * noise[0],
                    backward_input_ms=10 * backward * noise[1],
                    backward_weight_ms=10 * weight * noise[2],
                    activation_bytes=size,
                    saved_for_weight_bytes=saved,
                    **more,
                )
            )
        yield Problem(
            name=f"{number}: {p}x{m}",
            microbatches=m,
            p2p_ms=random.uniform(0, 0.6),
            transfer_mode="full_duplex" if full else "half_duplex",
            devices=(Device(activation_budget_bytes=int(max(1.05, fit) * size)),) * p,
            stages=tuple(stages),
        )
