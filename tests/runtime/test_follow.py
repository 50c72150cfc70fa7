"""A script that follows the service: its losses, and what it does when a stage slows down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fakes import service as fake
from support.fakes.service import Answer, Asked, fake_service
from support.problems.chain import gpipe
from support.ranks import cases, follow
from support.ranks.worker import Ranks
from support.service import running, settings_in, use_fake_solver

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify, check
from optpipe_runtime import Follower, Microbatches
from optpipe_runtime.lowering.prepare import one_at_a_time
from optpipe_runtime.measure.drift import drift
from optpipe_runtime.service.follow import THRESHOLD

M = 4
NOWHERE = "http://127.0.0.1:1"


def test_without_a_service_it_trains_as_a_plain_run(ranks: Ranks) -> None:
    steps = 6
    (_, versions), (losses, _) = ranks(
        follow.follow, placement=[0, 1], microbatches=M, url=NOWHERE, steps=steps, every=4
    )
    plain, _ = cases.plain(2, M, steps)
    assert losses == [pytest.approx(sum(own) / M) for own in plain]
    assert versions == [1] * steps


def test_schedules_of_the_service_are_swapped_in(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_solver(monkeypatch)
    with running(settings_in(tmp_path)) as (url, _):
        (_, versions), (losses, _) = ranks(
            follow.follow, placement=[0, 1], microbatches=M, url=url, steps=5000, every=10_000, until=2
        )
    plain, _ = cases.plain(2, M, len(losses))
    assert losses == [pytest.approx(sum(own) / M, rel=1e-4) for own in plain]
    assert (versions[0], versions[-1]) == (1, 2)


def test_a_schedule_loaded_before_the_profile_runs_on(ranks: Ranks) -> None:
    (_, versions), (losses, _) = ranks(
        follow.follow, placement=[0, 1], microbatches=M, url=NOWHERE, steps=2, every=4, begun=True
    )
    plain, _ = cases.plain(2, M, 2)
    assert losses == [pytest.approx(sum(own) / M) for own in plain]
    assert versions == [2, 2], "the same programs, as a schedule of the measured problem"


def test_no_step_waits_for_a_compiler(ranks: Ranks) -> None:
    assert ranks(follow.compiled) == [True, True]


def test_the_loop_in_the_docs_runs(ranks: Ranks) -> None:
    page = (Path(__file__).parents[2] / "docs" / "profile.md").read_text(encoding="utf-8")
    (profiled, problem), (_, other) = ranks(follow.script, text=page.split("```python\n")[2].split("```")[0])
    assert problem == other
    assert [(stage.activation_bytes, stage.offload_ms) for stage in problem.stages] == [
        (stage.activation_bytes, stage.offload_ms) for stage in profiled.stages
    ]
    assert all(
        new.forward_ms > 0 and new.forward_ms != old.forward_ms
        for old, new in zip(profiled.stages, problem.stages, strict=True)
    )


# A service that answers as the test wants


@contextmanager
def answering(answer: Callable[[Problem, int], Schedule]) -> Iterator[tuple[str, list[dict[str, Any]], list[Asked]]]:
    """Its url, the problems that were posed, and all requests. The answer to each problem is one schedule."""
    posed: list[dict[str, Any]] = []

    def answers(asked: Asked) -> Answer:
        if asked.method == "POST":
            posed.append(asked.json())
            return fake.job(version=len(posed))
        if asked.path.endswith("/events"):
            return fake.events(fake.one(len(posed), len(posed)), fake.end())
        if "/adoptions/" in asked.path:
            return fake.as_json({})
        return fake.incumbent(answer(Problem.from_dict(posed[-1]["problem"]), len(posed)))

    with fake_service(answers) as (url, asked):
        yield url, posed, asked


def test_a_stage_that_slows_down_is_noticed_and_a_better_schedule_swapped_in(ranks: Ranks) -> None:
    """While all is as profiled nothing is asked again; when the ops of one stage take half as long again, that is
    noticed within 3 × `every` steps, and the answer to the new problem is run."""
    every, calm, slow = 4, 26, 40
    with answering(lambda problem, number: one_at_a_time(problem) if number == 1 else gpipe(problem)) as (
        url,
        posed,
        asked,
    ):
        results = ranks(follow.slows_down, url=url, microbatches=M, every=every, calm=calm, slow=slow, factor=1.5)
    (versions, problems), (_, others) = results
    assert problems == others, "on every rank at the same step"
    assert problems[0] == problems[calm - 1], "noise alone is no drift"
    changes = [k for k in range(1, calm + slow) if problems[k] != problems[k - 1]]
    assert calm <= changes[0] < calm + 3 * every
    before, after = problems[0], problems[-1]
    times = ("forward_ms", "backward_input_ms", "backward_weight_ms")
    exact = [
        stage.model_copy(update=dict.fromkeys(times, ms)) for stage, ms in zip(after.stages, (10, 15), strict=True)
    ]
    assert drift(before, before.replace(stages=tuple(exact))) > THRESHOLD
    assert drift(after, after.replace(stages=tuple(exact))) < THRESHOLD
    for old, new in zip(before.stages, after.stages, strict=True):
        assert {f: getattr(old, f) for f in type(old).model_fields if f.endswith("bytes")} == {
            f: getattr(new, f) for f in type(new).model_fields if f.endswith("bytes")
        }
    assert [Problem.from_dict(body["problem"]) for body in posed] == [before, *(problems[k] for k in changes)]
    assert versions[0] == versions[calm] < versions[-1]
    swapped = next(k for k, version in enumerate(versions, 1) if version != versions[0])
    told = [request for request in asked if "/adoptions/" in request.path]
    assert {request.path for request in told} == {f"/v1/jobs/a1/adoptions/{len(posed)}"}, (
        "of the one offer that was better than what ran"
    )
    assert told[0].json() == {"step": swapped}
    figures = [request.json()["measured_iteration_ms"] for request in told[1:]]
    assert figures
    assert {request.json()["step"] for request in told} == {swapped}
    assert all(figure > 0 for figure in figures)


def test_the_service_gets_another_number_of_microbatches(ranks: Ranks) -> None:
    with answering(lambda problem, number: one_at_a_time(problem)) as (url, posed, _):
        _, losses = ranks(follow.regroups, url=url, microbatches=M, then=M // 2)
    assert losses == [pytest.approx(losses[0])] * 4
    assert [body["problem"]["microbatches"] for body in posed] == [M, M // 2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        *(
            ({"every": e, "threshold": t}, "at least 1 step, and more than 0")
            for e, t in ((0, 0.2), (16, float("nan")))
        ),
        ({"placements": "all"}, "^placements = 'all': a training keeps its stages"),
        ({"url": "localhost"}, "must be http://HOST:PORT"),
        ({"key": "two words"}, "^key: must be an API key of the service"),
        ({"methud": "auto"}, r"^Follower: methud is not an option; did you mean method\?$"),
    ],
)
def test_invalid_arguments_are_refused_at_once(arguments: dict[str, Any], sentence: str) -> None:
    nothing: Any = None
    with pytest.raises(InputError, match=sentence):
        Follower(nothing, **{"url": NOWHERE, **arguments})


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (1, 0)])
def test_one_at_a_time_needs_one_activation_wherever_stages_are(placement: tuple[int, ...]) -> None:
    problem = cases.problem(placement, M)
    schedule = one_at_a_time(problem)
    assert check(problem, schedule) == []
    assert [peak.bytes for peak in certify(problem, schedule).device] == [100 * len(placement) // 2] * 2


def test_one_at_a_time_on_two_routes() -> None:
    problem = cases.problem((0, 1, 1, 0), M).replace(routes=[[0, 1], [2, 3]], microbatch_routes=[0, 1, 1, 0])
    assert check(problem, one_at_a_time(problem)) == []


def test_micro_batches_that_are_cut_already_are_refused() -> None:
    nothing: Any = None
    with pytest.raises(InputError, match=r"^Follower.step was given Microbatches: .* PlannedSteps makes one for each$"):
        Follower(nothing, NOWHERE).step(Microbatches([nothing]))
