"""The table of engine runs: what runs for a method, on which problems, for what share of the time."""

from __future__ import annotations

import pytest
from support.problems.chain import chain

from optpipe_solver import tuning
from optpipe_solver.methods import ENGINES, HEURISTICS, MILP
from optpipe_solver.tuning import EngineRun, engine_runs

PROBLEM = chain(m=10)  # 20 forwards


@pytest.fixture
def table(monkeypatch):
    def set_to(*rows: EngineRun) -> None:
        monkeypatch.setattr(tuning, "AUTO", rows)

    return set_to


def shares(method: str = "auto", unfit: tuple[str, ...] = ()) -> dict[str, float]:
    return {run.engine: run.share for run in engine_runs(method, PROBLEM, lambda engine: engine not in unfit)}


def test_a_run_that_repeats_fills_the_rest(table):
    table(EngineRun("a", 0.3), EngineRun("b", 0.2, max_forwards=19), EngineRun("c", 0.1, repeat=True))
    assert shares() == {"a": 0.3, "c": 0.1}


def test_otherwise_all_time_is_shared(table):
    table(EngineRun("a", 0.3), EngineRun("b", 0.2, max_forwards=20), EngineRun("c", 0.1, repeat=True))
    assert shares(unfit=("c",)) == {"a": pytest.approx(0.6), "b": pytest.approx(0.4)}
    assert shares(unfit=("a", "b", "c")) == {}
    assert shares(unfit=("a", "b")) == {"c": 0.1}


def test_a_method_that_is_named_has_the_time_to_itself():
    assert all(shares(engine) == {engine: 1.0} for engine in ENGINES)
    assert all(shares(engine, unfit=ENGINES) == {} for engine in ENGINES)
    assert all(shares(heuristic) == {} for heuristic in HEURISTICS)


def test_the_table_itself_fits_the_time():
    assert {run.engine for run in tuning.AUTO} == {*ENGINES} - {MILP}
    assert sum(run.share for run in tuning.AUTO) <= 1.0  # runs that repeat fill the rest
    assert [tuning.heuristics_share(seconds) for seconds in (60.0, 4.0, 1.0)] == [
        tuning.HEURISTICS_SHARE,
        tuning.HEURISTICS_S / 4,
        0.5,
    ]
