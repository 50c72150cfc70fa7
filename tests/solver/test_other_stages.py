"""What is told of stages that were not searched: a published schedule on others may be shorter than a proven one."""

from __future__ import annotations

import pytest
from support import problems

from optpipe import Problem, check
from optpipe.evaluate.objective import length_ms
from optpipe.options import SolveOptions
from optpipe.process.protocol import Frame, Note, Request
from optpipe.results import Result
from optpipe_solver.portfolio import Portfolio
from optpipe_solver.systems import generate

UNEVEN = problems.pipeline(
    4, 8, 100, [problems.stage(ms, (1, 0)) for ms in ((60.0, 0.0, 0.0), *[(10.0, 10.0, 0.0)] * 3)], p2p_ms=0.0
)


def told(problem: Problem, method: str = "auto", time_limit_s: float = 60.0) -> list[str]:
    """What a search says of other stages after its answer."""
    frames: list[Frame] = []
    search = Portfolio(Request(problem=problem, method=method, time_limit_s=60.0, threads=1), frames.append)
    search.run()
    if not time_limit_s:
        search.clock.stop()
    search.look_at_other_stages()
    return [frame.text for frame in frames if isinstance(frame, Note) and "on other stages" in frame.text]


def test_after_its_answer_a_search_names_a_shorter_published_schedule_on_other_stages() -> None:
    (text,) = told(UNEVEN)
    assert text.startswith("on other stages dualpipe-v takes ")
    schedule = generate("dualpipe-v", UNEVEN, "all")
    assert check(schedule.problem, schedule) == []
    assert f"{length_ms(schedule, 'makespan'):.6g} ms" in text
    assert text.endswith("V-shaped")


def test_it_says_nothing_without_time_where_none_is_shorter_or_where_another_method_was_asked_for() -> None:
    assert told(UNEVEN, time_limit_s=0.0) == []
    assert told(UNEVEN.replace(microbatches=1)) == []
    assert told(UNEVEN, "1f1b") == []


@pytest.mark.parametrize(("placements", "text"), [("keep", "the stages as given"), ("all", "all stages")])
def test_an_optimum_says_of_which_stages(placements: str, text: str) -> None:
    schedule = generate("1f1b", UNEVEN)
    options = SolveOptions.from_arguments("test", {"placements": placements})
    assert f"proven optimal for {text}" in str(Result.from_schedule(schedule, options, schedule.makespan_ms))
