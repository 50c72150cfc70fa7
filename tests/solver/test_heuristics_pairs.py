"""Pairs save time where there is a factor for them, and never break memory or order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from support import problems
from support.examples import examples
from support.problems.strategies import problems_with_schedules

from optpipe import Problem, check
from optpipe.process.protocol import Note, Request
from optpipe_solver.heuristics import STREAMS, generate
from optpipe_solver.heuristics.pairs import join_pairs
from optpipe_solver.portfolio import Portfolio
from optpipe_solver.schedule_facts import is_modelled


def pipeline(factor: float | None, memory: int = 100) -> Problem:
    return problems.pipeline(3, 12, memory, problems.stage((10, 10, 10), (5, 5)), overlap_factor=factor)


@settings(max_examples=examples(200), deadline=None)
@given(problems_with_schedules())
def test_what_is_paired_is_valid(pair):
    problem, schedule = pair
    together = join_pairs(schedule)
    assert together is None or check(problem, together) == []


def test_pairs_shorten_what_can_run_together():
    apart, together = (generate("adaoffload", pipeline(factor)) for factor in (None, 0.7))
    assert any("+" in text for program in together.programs for text in program.texts())
    assert together.makespan_ms < 0.9 * apart.makespan_ms


def test_without_a_factor_or_room_nothing_is_joined():
    for problem in (pipeline(None), pipeline(0.7, memory=5)):
        assert join_pairs(next(STREAMS["adaoffload"](problem, "makespan"))) is None


def test_engines_start_from_the_best_without_pairs():
    split, joined = (generate("adaoffload", pipeline(factor)) for factor in (None, 0.7))
    apart = replace(split, problem=joined.problem)
    assert joined.makespan_ms < apart.makespan_ms
    incumbents = Portfolio(Request(problem=joined.problem), print).incumbents
    for schedule in (joined, apart):
        assert incumbents.offer(schedule) is None
    assert incumbents.best == joined
    assert incumbents.best_of(is_modelled) == apart


@pytest.mark.parametrize("engine", ["dispatch", "lns", "cpsat", "milp"])
def test_an_engine_asked_for_by_name_says_that_it_makes_no_pairs(engine):
    notes: list[object] = []
    assert Portfolio(Request(problem=pipeline(None), method=engine), notes.append).supports(engine)
    assert notes == []
    assert Portfolio(Request(problem=pipeline(0.8), method=engine), notes.append).supports(engine)
    assert notes == [Note(text=f"{engine} makes no pairs: some heuristics and published schedules do")]
