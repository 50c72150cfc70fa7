"""A script that follows the service: its losses, what it does when a stage slows down, and when the service gets a
report of a swapped-in schedule, and of which step time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fakes import service as fake
from support.fakes.service import Answer, Asked, fake_service
from support.problems.chain import chain, gpipe, one_by_one
from support.ranks import cases, follow
from support.ranks.worker import Ranks
from support.service import running, settings_in, use_fake_solver

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify, check
from optpipe_runtime import Follower, Microbatches
from optpipe_runtime.lowering.prepare import one_at_a_time
from optpipe_runtime.measure.drift import drift
from optpipe_runtime.service.client import Offer
from optpipe_runtime.service.follow import MOST_STEPS, THRESHOLD, Adoptions

M = 4
NOWHERE = "http://127.0.0.1:1"


@pytest.mark.parametrize(("begun", "versions"), [(False, [1] * 6), (True, [2] * 2)])
def test_without_a_service_it_trains_as_a_plain_run(ranks: Ranks, begun: bool, versions: list[int]) -> None:
    """Begun by a schedule loaded before the profile, it goes on by its programs on the measured problem."""
    how = {"url": NOWHERE, "steps": len(versions), "every": 4, "begun": begun}
    (_, ran), (losses, _) = ranks(follow.follow, placement=[0, 1], microbatches=M, **how)
    plain, _ = cases.plain(2, M, len(versions))
    assert losses == [pytest.approx(sum(own) / M) for own in plain]
    assert ran == versions


def test_schedules_of_the_service_are_swapped_in(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_solver(monkeypatch)
    with running(settings_in(tmp_path)) as (url, _):
        (_, versions), (losses, _) = ranks(
            follow.follow, placement=[0, 1], microbatches=M, url=url, steps=5000, every=10_000, until=2
        )
    plain, _ = cases.plain(2, M, len(losses))
    assert losses == [pytest.approx(sum(own) / M, rel=1e-4) for own in plain]
    assert (versions[0], versions[-1]) == (1, 2)


def test_no_step_waits_for_a_compiler(ranks: Ranks) -> None:
    assert ranks(follow.compiled) == [True, True]


def test_the_loop_in_the_docs_runs(ranks: Ranks) -> None:
    page = (Path(__file__).parents[2] / "docs" / "profile.md").read_text(encoding="utf-8")
    (profiled, problem), (_, other) = ranks(follow.script, text=page.split("```python\n")[2].split("```")[0])
    assert problem == other
    assert [(stage.activation_bytes, stage.offload_ms) for stage in problem.stages] == [
        (stage.activation_bytes, stage.offload_ms) for stage in profiled.stages
    ]
    for old, new in zip(profiled.stages, problem.stages, strict=True):
        assert 0 < new.forward_ms != old.forward_ms


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
    with answering(lambda problem, number: (one_at_a_time if number == 1 else gpipe)(problem)) as (url, posed, asked):
        results = ranks(follow.slows_down, url=url, microbatches=M, every=every, calm=calm, slow=slow, factor=1.5)
    (versions, problems), (_, others) = results
    assert problems == others, "on every rank at the same step"
    assert problems[0] == problems[calm - 1], "noise alone is no drift"
    changes = [k for k in range(1, calm + slow) if problems[k] != problems[k - 1]]
    assert calm <= changes[0] < calm + 3 * every
    before, after = problems[0], problems[-1]
    times = ("forward_ms", "backward_input_ms", "backward_weight_ms")
    both = zip(after.stages, (10, 15), strict=True)
    exact = before.replace(stages=[stage.model_copy(update=dict.fromkeys(times, ms)) for stage, ms in both])
    assert drift(before, exact) > THRESHOLD > drift(after, exact)
    for old, new in zip(before.stages, after.stages, strict=True):
        assert all(getattr(old, f) == getattr(new, f) for f in type(old).model_fields if f.endswith("bytes"))
    assert [Problem.from_dict(body["problem"]) for body in posed] == [before, *(problems[k] for k in changes)]
    assert versions[0] == versions[calm] < versions[-1]
    swapped = next(k for k, version in enumerate(versions, 1) if version != versions[0])
    told = [request for request in asked if "/adoptions/" in request.path]
    paths = {request.path for request in told}
    assert paths == {f"/v1/jobs/a1/adoptions/{len(posed)}"}, "of the one offer that was better than what ran"
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
        ({"every": 0}, "at least 1 step, and more than 0"),
        ({"threshold": float("nan")}, "at least 1 step, and more than 0"),
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


OFFER = Offer(1, gpipe(chain()), "a1", 3)
LATER = Offer(2, one_by_one(chain()), "a1", 4)
Reports = list[tuple[int, int, float | None]]  # incumbent, step, and what was measured


def client(reports: Reports) -> Any:
    class Client:
        def adopted(self, offer: Offer, step: int, measured_iteration_ms: float | None = None) -> None:
            reports.append((offer.seq, step, measured_iteration_ms))

    return Client()


def begun() -> tuple[Adoptions, Reports]:
    """The first offer runs since step 7, as version 2."""
    adoptions, reports = Adoptions(), Reports()
    adoptions.offered = client(reports), OFFER
    adoptions.swapped(2, OFFER.schedule, 7)
    return adoptions, reports


def test_a_swap_is_reported_at_once_and_its_first_step_is_not_measured() -> None:
    adoptions, reports = begun()
    assert reports == [(3, 7, None)]
    adoptions.measured([(1, 50.0), (1, 60.0), (2, 99.0)])
    assert len(reports) == 1, "a step of the schedule before, and the first one, say nothing"
    adoptions.measured([(2, 10.0), (2, 12.0), (2, 11.0)])
    assert reports[1:] == [(3, 7, 11.0)]


def test_a_median_is_reported_again_after_twice_as_many_steps_and_at_the_end() -> None:
    adoptions, reports = begun()
    for _ in range(3000):
        adoptions.measured([(2, 10.0)])
    adoptions.finish()
    adoptions.finish()
    assert len(reports) == 1 + 11, "1, 2, 4, ... 1024 steps"
    assert MOST_STEPS == 2**10
    adoptions, reports = begun()
    adoptions.measured([(2, 99.0), *[(2, 10.0)] * 8])
    adoptions.measured([(2, 20.0)] * 9)
    adoptions.measured([(3, 5.0)])
    adoptions.finish()
    assert reports[1:] == [(3, 7, 10.0), (3, 7, 20.0)], "over all 17 steps"


def test_each_schedule_has_its_own_median() -> None:
    adoptions, reports = begun()
    adoptions.offered = client(reports), LATER
    adoptions.swapped(3, LATER.schedule, 10)
    adoptions.measured([(2, 99.0), (2, 10.0), (2, 10.0), (3, 99.0), (3, 5.0)])
    assert sorted(reports[2:]) == [(3, 7, 10.0), (4, 10, 5.0)]
    adoptions.measured([(3, 5.0)])
    adoptions.finish()
    assert reports[4:] == [(4, 10, 5.0)]


def test_a_refused_or_replaced_schedule_is_not_adopted() -> None:
    adoptions, reports = Adoptions(), Reports()
    adoptions.swapped(1, LATER.schedule, 1)  # loaded
    adoptions.offered = client(reports), OFFER
    adoptions.swapped(3, LATER.schedule, 8)  # its first step ran out of memory, and that was repeated by the one before
    adoptions.measured([(3, 10.0)] * 5)
    adoptions.finish()
    assert reports == []
