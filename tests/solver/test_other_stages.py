"""What is told of stages that were not searched: a published schedule on others may be shorter than a proven one."""

from __future__ import annotations

from math import inf

import pytest
from support import problems

from optpipe import Problem, check
from optpipe.evaluate.objective import length_ms
from optpipe.options import SolveOptions
from optpipe.process.protocol import Frame, Note, Request
from optpipe.results import Result
from optpipe_solver.portfolio import Portfolio
from optpipe_solver.portfolio.other_stages import shorter_on_other_stages
from optpipe_solver.systems import generate

UNEVEN = problems.pipeline(
    4, 8, 100, [problems.stage(ms, (1, 0)) for ms in ((60.0, 0.0, 0.0), *[(10.0, 10.0, 0.0)] * 3)], p2p_ms=0.0
)


def test_a_shorter_published_schedule_on_other_stages_is_named() -> None:
    text = shorter_on_other_stages(UNEVEN, "makespan", 540.0, inf)
    assert text is not None
    assert text.startswith("on other stages dualpipe-v takes ")
    schedule = generate("dualpipe-v", UNEVEN, "all")
    assert check(schedule.problem, schedule) == []
    assert f"{length_ms(schedule, 'makespan'):.6g} ms" in text
    assert text.endswith("V-shaped")


@pytest.mark.parametrize(("problem", "until"), [(UNEVEN, -inf), (UNEVEN.replace(microbatches=1), inf)])
def test_nothing_is_said_without_time_or_where_none_is_shorter(problem: Problem, until: float) -> None:
    assert shorter_on_other_stages(problem, "makespan", 540.0 if until < 0 else 1.0, until) is None


@pytest.mark.parametrize(("method", "told"), [("auto", 1), ("1f1b", 0)])
def test_a_search_says_so_after_its_answer(method: str, told: int) -> None:
    frames: list[Frame] = []
    search = Portfolio(Request(problem=UNEVEN, method=method, time_limit_s=60.0, threads=1), frames.append)
    search.run()
    search.tell_of_other_stages()
    assert sum(isinstance(frame, Note) and "on other stages" in frame.text for frame in frames) == told


@pytest.mark.parametrize(("placements", "text"), [("keep", "the stages as given"), ("all", "all stages")])
def test_an_optimum_says_of_which_stages(placements: str, text: str) -> None:
    schedule = generate("1f1b", UNEVEN)
    options = SolveOptions.from_arguments("test", {"placements": placements})
    assert f"proven optimal for {text}" in str(Result.from_schedule(schedule, options, schedule.makespan_ms))
