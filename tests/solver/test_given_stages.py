"""The stages given, where placements are searched: they must be what the layers make, and say why nothing was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import optpipe
from optpipe import InputError, Problem, Schedule
from optpipe.errors import ScheduleError
from optpipe.process.protocol import Frame, Note, Request
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.portfolio import PlacementSearch
from optpipe_solver.portfolio.partitions import mismatch

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "problems").glob("*.json"))
LAYER = {
    "forward_ms": 1.25,
    "backward_input_ms": 1.5,
    "backward_weight_ms": 1.0,
    "activation_bytes": 1001,
    "saved_for_weight_bytes": 301,
}


def layered(**changes: Any) -> Problem:
    """Six layers in two stages of three; the first layer changed."""
    stage = {name: 3 * value for name, value in LAYER.items()}
    stages = [{"device": d, **stage} for d in range(2)]
    return Problem.from_dict(
        {
            "microbatches": 3,
            "devices": [{"activation_budget_bytes": 9000}] * 2,
            "stages": stages,
            "layers": [LAYER | changes, *[LAYER] * 5],
        }
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_what_their_layers_make(path: Path) -> None:
    problem = Problem.load(path)
    assert problem.layers is None or mismatch(problem) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"backward_weight_ms": 0.0}, "layers: their backward_weight_ms add up to 5, those of the stages to 6; "),
        ({"activation_bytes": 2001}, "layers: their activation_bytes add up to 7006, those of the stages to 6006; "),
        (
            {"saved_for_weight_bytes": 101},
            "layers: their saved_for_weight_bytes add up to 1606, those of the stages to 1806; ",
        ),
        (
            {"forward_ms": [1.25, 0.1, 2.4]},
            "layers: their forward_ms of micro-batch 1 add up to 6.35, those of the stages to 7.5; ",
        ),
    ],
)
def test_layers_of_another_model_are_no_partition(changes: dict[str, Any], told: str) -> None:
    reason = mismatch(layered(**changes))
    assert reason
    assert reason.startswith(told)


def test_a_search_of_placements_says_so() -> None:
    with pytest.raises(InputError) as raised:
        optpipe.solve(layered(forward_ms=5.0), placements="all", time_limit_s=10.0)
    assert str(raised.value) == (
        "layers: their forward_ms add up to 11.25, those of the stages to 7.5; the stages given must be made of these "
        "layers"
    )


def test_layers_count_only_where_placements_are_searched() -> None:
    others = {"forward_ms": 5.0, "backward_weight_ms": 0.0, "activation_bytes": 2001, "saved_for_weight_bytes": 101}
    assert optpipe.solve(layered(**others), time_limit_s=60.0).status == "optimal"


@pytest.mark.parametrize(
    "changes", [{}, {"forward_ms": 1.3}, {"forward_ms": [1.3, 1.25, 1.2]}, {"activation_bytes": 1003}]
)
def test_what_was_measured_apart_may_differ_a_little(changes: dict[str, Any]) -> None:
    assert mismatch(layered(**changes)) is None


def test_where_no_placement_has_a_schedule_the_reason_is_that_of_the_stages_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(problem: Problem, objective: str, deadline: float) -> Iterator[Schedule]:
        raise ScheduleError(f"{len(problem.stages)} stages")
        yield

    monkeypatch.setitem(STREAMS, "naive", broken)
    frames: list[Frame] = []
    PlacementSearch(Request(problem=layered(), placements="all", method="naive", time_limit_s=5.0), frames.append).run()
    notes = [frame.text for frame in frames if isinstance(frame, Note)]
    assert "2 chunks a device, looped, layers 1 1 2 2: naive gives no schedule: 4 stages" in notes
    assert notes[-1] == "naive gives no schedule: 2 stages"
