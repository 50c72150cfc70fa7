"""Several processes use one cache file."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from support.problems.chain import chain, gpipe

from optpipe import InputError
from optpipe_cache import Cache
from optpipe_cache.storage import Retention


def _create(paths: list[Path], start: Any) -> None:
    schedule = gpipe(chain())
    try:
        for path in paths:
            start.wait(60)
            Cache(path).add(schedule, "feasible")
    except InputError:
        start.abort()  # the others need not wait
        raise


def test_several_processes_create_one_cache_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / f"{k}.sqlite" for k in range(20)]
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(6)
    creators = [spawn.Process(target=_create, args=(paths, start)) for _ in range(6)]
    for creator in creators:
        creator.start()
    for creator in creators:
        creator.join()
    codes = [creator.exitcode for creator in creators]
    for creator in creators:
        creator.close()
    assert codes == [0] * 6


def _add_endlessly(path: Path, first: int, added: Any) -> None:
    cache = Cache(path, kept=Retention(keep=10_000))
    for k in range(first, first + 100_000):
        problem = chain(forward=1.0 + k / 64)
        cache.add(gpipe(problem), "feasible")
        added.send(problem.sha256)
        cache.lookup(problem)  # which counts the hit


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_what_a_killed_process_has_added_is_there(tmp_path: Path, kills: int) -> None:
    path, spawn = tmp_path / "cache.sqlite", multiprocessing.get_context("spawn")
    added: set[str] = set()
    for n in range(kills):
        receiver, sender = spawn.Pipe(duplex=False)
        writer = spawn.Process(target=_add_endlessly, args=(path, 100_000 * n, sender))
        writer.start()
        sender.close()
        added |= {receiver.recv() for _ in range(5 + n)}
        writer.kill()
        writer.join()
        while True:  # what it said before
            try:
                added.add(receiver.recv())
            except EOFError:
                break
        receiver.close()
        writer.close()
        known = {entry.problem.sha256 for entry in Cache(path).entries()}
        assert added <= known
        assert len(known) <= len(added) + n + 1, "each of them may have added one that it could not tell of"
