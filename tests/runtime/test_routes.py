"""Routes: micro-batches pass the stages in different orders, or different stages. Losses and gradients are those of a
plain run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.ranks import cases
from support.ranks import routes as rank_routes
from support.ranks.channels import run_by_hand
from support.ranks.worker import Ranks
from support.strategies import schedules

from optpipe.errors import ScheduleError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Layout, prepare

M = 3
BOTH_WAYS: dict[str, Any] = {"routes": [[0, 1], [2, 3]], "microbatch_routes": [0, 1, 0]}


@st.composite
def problems(draw: Any, placements: tuple[tuple[int, ...], ...]) -> Problem:
    """Two routes over some of the stages each, in any order; all stages are on one."""
    placement = draw(st.sampled_from(placements))
    stages = range(len(placement))
    first, second = draw(st.permutations(stages)), draw(st.permutations(stages))
    routes = [first[: draw(st.integers(1, len(first)))], second]
    chosen = draw(st.lists(st.integers(0, 1), min_size=M, max_size=M))
    problem = cases.problem(placement, M, offload_parts=2)
    return problem.replace(routes=routes, microbatch_routes=chosen, overlap_factor=draw(st.sampled_from([None, 0.8])))


@settings(max_examples=examples(100))
@given(st.data())
def test_messages_match_on_any_routes(data: Any) -> None:
    problem = data.draw(problems(((0, 1), (0, 1, 1, 0), (0, 1, 2), (0, 1, 2, 2, 1, 0), (0, 0, 1))))
    schedule = data.draw(schedules(problem))
    run_by_hand([prepare(schedule, rank, Layout.from_problem(problem)) for rank in range(len(problem.devices))])


@settings(max_examples=examples(12))
@given(st.data())
def test_any_routes_give_the_same_sums(ranks: Ranks, data: Any) -> None:
    problem = data.draw(problems(((0, 1), (0, 1, 1, 0), (1, 0, 1))))
    layout, schedule = Layout.from_problem(problem), data.draw(schedules(problem))
    results = ranks(rank_routes.train, schedule=schedule)
    losses, gradients = rank_routes.plain(layout)
    for rank, (ours, _) in enumerate(results):
        assert ours == [losses[j] for j in range(M) if layout.placement[layout.route(j)[-1]] == rank]
    found = {name: grad for _, by_name in results for name, grad in by_name.items()}
    assert found.keys() == gradients.keys()
    for name, grad in found.items():
        np.testing.assert_allclose(grad, gradients[name], rtol=1e-4, atol=1e-7, err_msg=name)


def test_a_pipeline_with_routes_is_profiled_with_them(ranks: Ranks) -> None:
    layout = Layout.make([0, 1, 1, 0], M, **BOTH_WAYS)
    problem, same = ranks(rank_routes.profile, layout=layout)
    assert problem == same
    assert Layout.from_problem(problem) == layout
    assert all(stage.activation_bytes > 0 and stage.forward_ms > 0 for stage in problem.stages)
    assert problem.p2p_ms > 0


def test_invalid_routes_are_refused(ranks: Ranks) -> None:
    mistakes: dict[str, dict[str, Any]] = {
        "the pipeline: routes[0][1] = 7: there are 2 stages": {"routes": [[0, 7]]},
        "the pipeline: stages[1] is on no route": {"routes": [[0]]},
        "the pipeline: microbatch_routes is missing": {"routes": [[0, 1], [1, 0]]},
        "the pipeline: microbatch_routes has 1 entries": {"routes": [[0, 1], [1, 0]], "microbatch_routes": [0]},
    }
    for told in ranks(rank_routes.refusals, mistakes=list(mistakes.values())):
        assert len(told) == len(mistakes)
        for sentence, start in zip(told, mistakes, strict=True):
            assert sentence.startswith(start), sentence


def test_a_schedule_with_other_routes_is_refused() -> None:
    problem = cases.problem([0, 1, 1, 0], 1).replace(routes=[[0, 1], [2, 3]], microbatch_routes=[1])
    schedule = Schedule.parse(problem, [["3F0", "3BW0"], ["2F0", "2BW0"]])
    with pytest.raises(ScheduleError, match=r"sends micro-batch 0 over stages \[2, 3\], this pipeline over \[0, 1\]"):
        prepare(schedule, 0, Layout.make([0, 1, 1, 0], 1, [[0, 1], [2, 3]], [0]))


def test_invalid_ties_are_refused(ranks: Ranks) -> None:
    assert set(ranks(rank_routes.tie_nothing)) == {"tie: every rank passed None, so there is nothing to tie"}
    (told,) = set(ranks(rank_routes.tie_unlike))
    assert told.startswith("tie: ranks 0 and 1 hold copies of shapes [[3, 2], [3]] and [[32], [32],")
