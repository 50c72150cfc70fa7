"""The pack that a release carries: a fresh install finds what was solved for problems like an ordinary one."""

import json
import logging
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.problems.chain import chain, gpipe

from benchmarks.cache import ordinary_problems
from optpipe import check
from optpipe_cache import Cache, Entry, Pack, StoredRow, features, structure, user_cache
from optpipe_cache.storage import PACK_PATH
from optpipe_cli.app import optpipe
from scripts.pack import write_pack


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """A pack of one problem."""
    solved = Cache(tmp_path / "solved.sqlite")
    solved.add(gpipe(chain(memory=4, m=4)), "feasible")
    [line], [entry] = solved.export_lines(), solved.entries()
    key = features(entry.problem).packed
    row = StoredRow(entry.problem.sha256, "makespan", structure(entry.problem), key, "", 0, line)
    write_pack(tmp_path / "pack.zip", [row])
    return Pack(tmp_path / "pack.zip")


def test_what_the_cache_lacks_is_found_in_the_pack(tmp_path: Path, pack: Pack) -> None:
    cache = Cache(tmp_path / "cache.sqlite", pack=pack)
    wanted = chain(memory=4, m=5, forward=1.1)
    hit = cache.lookup(wanted)
    assert (hit.source, hit.exact, hit.entry.problem) == ("pack", False, chain(memory=4, m=4))
    assert check(wanted, hit.schedule) == []
    assert cache.lookup(chain(memory=4, m=4)).distance == 0  # type: ignore[union-attr]
    assert cache.lookup(wanted, "span") is None
    assert cache.lookup(chain(offload=None)) is None, "another structure"
    cache.add(gpipe(chain(memory=5, m=5, forward=1.1)), "feasible")
    nearer = cache.lookup(wanted)
    assert (nearer.source, cache.entries_and_hits()[0][1]) == ("cache", 1)


@pytest.mark.parametrize("damage", ["no file", "no zip", "no rows", "other bytes"])
def test_a_damaged_pack_is_reported_and_has_nothing(tmp_path: Path, pack: Pack, damage: str, caplog: Any) -> None:
    with zipfile.ZipFile(pack.path) as intact:
        [name] = intact.namelist()
    pack.path.unlink()
    if damage == "no zip":
        pack.path.write_bytes(b"PK")
    elif damage != "no file":
        with zipfile.ZipFile(pack.path, "w", zipfile.ZIP_DEFLATED) as damaged:
            damaged.writestr(name, "[1]\n" * 99)
    if damage == "other bytes":
        whole = pack.path.read_bytes()
        at = whole.index(name.encode()) + len(name)
        pack.path.write_bytes(whole[:at] + b"\xff" * 9 + whole[at + 9 :])
    cache = Cache(tmp_path / "cache.sqlite", pack=pack)
    with caplog.at_level(logging.WARNING, "optpipe.cache"):
        assert cache.lookup(chain(memory=4, m=5)) is None
    assert "the pack cannot be read" in caplog.text


def test_the_release_has_what_this_version_finds() -> None:
    """Features and structures change with the code: then `make pack` is due."""
    assert PACK_PATH.stat().st_size < 2_000_000
    rows = 0
    with zipfile.ZipFile(PACK_PATH) as file:
        for name in file.namelist():
            lines = file.read(name).decode().splitlines()
            rows += len(lines)
            sha256, packed, text = json.loads(lines[-1])
            entry = Entry.model_validate_json(text)
            assert (entry.problem.sha256, f"{structure(entry.problem)}/{entry.objective}") == (sha256, name)
            assert features(entry.problem).packed.hex() == packed
    assert rows > 1000


def test_the_first_lookup_of_an_ordinary_problem_is_a_hit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says where it was found, and the gap."""
    for problem in ordinary_problems(np.random.default_rng(5), 8):
        hit = user_cache(tmp_path / "fresh.sqlite").lookup(problem)
        assert hit is not None, problem.name
        assert hit.source == "pack"
        assert check(problem, hit.schedule) == []
    problem.save(tmp_path / "problem.json")
    command = ["cache", "lookup", str(tmp_path / "problem.json"), "--cache", str(tmp_path / "c"), "--json"]
    optpipe()(command)
    told = json.loads(capsys.readouterr().out)
    assert (told["hit"], told["source"]) == ("nearest", "pack")
    assert told["gap"] == pytest.approx(1 - told["lower_bound_ms"] / told["makespan_ms"])
    assert 0 <= told["gap"] < 0.5
