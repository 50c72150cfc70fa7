"""The table of turns: what runs for a method, on which problems, for what share of the time."""

from __future__ import annotations

import pytest
from support.chain import chain

from optpipe_solver.methods import ENGINES, HEURISTICS
from optpipe_solver.portfolio import plan
from optpipe_solver.portfolio.plan import Turn, turns

PROBLEM = chain(m=10)  # 20 passes of a micro-batch through a stage


@pytest.fixture
def table(monkeypatch):
    def set_to(*rows: Turn) -> None:
        monkeypatch.setattr(plan, "AUTO", rows)

    return set_to


def shares(method: str = "auto", jitter: float = 0.0, unfit: tuple[str, ...] = ()) -> dict[str, float]:
    return {turn.engine: turn.share for turn in turns(method, jitter, PROBLEM, lambda engine: engine not in unfit)}


def test_where_a_turn_comes_again_it_fills_the_rest(table):
    table(Turn("a", 0.3), Turn("b", 0.2, most_passes=19), Turn("c", 0.1, again=True))
    assert shares() == {"a": 0.3, "c": 0.1}
    assert shares(jitter=0.1) == {"a": 0.3, "c": 0.1, "robust": plan.ROBUST.share}


def test_otherwise_the_time_is_dealt_out(table):
    table(Turn("a", 0.3), Turn("b", 0.2, most_passes=20), Turn("c", 0.1, again=True))
    assert shares(unfit=("c",)) == {"a": pytest.approx(0.6), "b": pytest.approx(0.4)}
    assert shares(unfit=("a", "b", "c")) == {}
    assert shares(unfit=("a", "b")) == {"c": 0.1}


def test_a_method_that_is_named_has_the_time_to_itself():
    assert all(shares(engine) == {engine: 1.0} for engine in ENGINES)
    assert all(shares(engine, unfit=ENGINES) == {} for engine in ENGINES)
    assert all(shares(heuristic) == {} for heuristic in HEURISTICS)


def test_the_table_itself_fits_the_time():
    assert {turn.engine for turn in plan.AUTO} == set(ENGINES)
    assert sum(turn.share for turn in (*plan.AUTO, plan.ROBUST)) <= 1.0
    assert [plan.heuristics_share(seconds) for seconds in (60.0, 4.0, 1.0)] == [
        plan.HEURISTICS_SHARE,
        plan.HEURISTICS_S / 4,
        0.5,
    ]
