"""A script that follows a service, or a search on its own host: its losses, what it does when a stage slows down, when
the service gets a report of a swapped-in schedule, and of which step time; what it finds in a cache and keeps there."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.fakes import service as fake
from support.fakes.scripted_solver import all_forwards_first
from support.fakes.service import Answer, Asked, fake_service
from support.problems.chain import chain, gpipe, one_by_one
from support.processes import until
from support.ranks import cases
from support.ranks.cases import batch, loss_fn, own_stages
from support.ranks.worker import Ranks
from support.service import running, settings_in, use_fake_solver
from support.service.following import news, warnings

from examples import paced
from optpipe.errors import InputError
from optpipe.evaluate import timeline
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify, check
from optpipe_cache import Cache
from optpipe_runtime import Follower, Microbatches, Pipeline, Profiler
from optpipe_runtime.lowering.prepare import one_at_a_time
from optpipe_runtime.measure.drift import drift
from optpipe_runtime.memory import engines
from optpipe_runtime.service import client as client_module
from optpipe_runtime.service.client import Offer, ScheduleClient
from optpipe_runtime.service.follow import MOST_STEPS, THRESHOLD, Adoptions

M = 4
NOWHERE = "http://127.0.0.1:1"


def follow(
    placement: list[int],
    microbatches: int,
    url: str | None,
    steps: int,
    every: int,
    begun: bool = False,
    last: int | None = None,
    cache: Path | None = None,
    method: str = "auto",
) -> tuple[list[float | None], list[int]]:
    """Trains so many steps, or until this version of the schedule; where it has `begun`, with one loaded before
    anything is measured. The losses seen here, and each step's version."""
    modules = own_stages(placement)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.1)
    losses, versions = [], []
    with (
        Pipeline(modules, placement, loss_fn, microbatches) as pipe,
        Follower(
            pipe, url, activation_budget_bytes=10**9, every=every, cache=Cache(cache) if cache else None, method=method
        ) as follower,
    ):
        if begun:
            pipe.load(one_at_a_time(pipe.layout.unmeasured()))
        for step in range(steps):
            optimizer.zero_grad()
            report = follower.step(*batch(step, microbatches))
            optimizer.step()
            assert report.excess is None
            losses.append(report.loss)
            versions.append(report.version)
            if report.version == last:
                break
            if last is not None and step == 0:
                awaited(follower, lambda client: client._newest)
    return losses, versions


def awaited(follower: Follower, holds: Callable[[ScheduleClient], object]) -> None:
    """On rank 0, until something holds of its client; the others wait for it in the next step."""
    if (client := follower._client) is not None:
        until(lambda: holds(client))


class Noisy:
    """Stands for the module `time` where ops sleep and are timed: a busy machine adds nothing; each varies."""

    def __init__(self, seed: int) -> None:
        self._now, self._chance = 0.0, random.Random(seed)

    def sleep(self, s: float) -> None:
        self._now += s * self._chance.lognormvariate(0, 0.1)

    def perf_counter(self) -> float:
        return self._now


def slows_down(
    url: str, microbatches: int, every: int, calm: int, slow: int, factor: float
) -> tuple[list[int], list[Problem | None]]:
    """Stages of a given time; after `calm` steps that of rank 1 takes `factor` times as long, for `slow` steps. Of each
    step the version, and the problem after it."""
    rank, times = torch.distributed.get_rank(), paced.Times(10.0, 10.0, 10.0, 0.0)
    module = paced.SleepingStage(times)
    x = torch.randn(microbatches * paced.SHAPE[0], paced.SHAPE[1])
    versions, problems = [], []
    noisy: Any = Noisy(rank)
    with (
        patch.object(paced, "time", noisy),
        patch.object(engines, "time", noisy),
        patch.multiple(client_module, REPORT_S=60.0, CLOSE_S=120.0),
        Pipeline({rank: module}, [0, 1], paced.loss, microbatches) as pipe,
        Follower(pipe, url, activation_budget_bytes=10**9, every=every) as follower,
    ):
        for step in range(calm + slow):
            if step == calm and rank == 1:
                module.times = paced.Times(*(factor * ms for ms in times[:4]))
            versions.append(follower.step(x, x).version)
            problems.append(pipe.problem)
            awaited(follower, lambda client: client.ended)
    return versions, problems


def regroups(url: str, microbatches: int, then: int) -> list[float]:
    """Two steps, then two of the same batch in another number of micro-batches; the losses seen here."""
    losses = []
    with (
        Pipeline(own_stages([0, 1]), [0, 1], loss_fn, microbatches) as pipe,
        Follower(pipe, url, activation_budget_bytes=10**9, every=3) as follower,
    ):
        for step in range(4):
            if step == 2:
                pipe.load(one_at_a_time(pipe.problem.replace(microbatches=then)))
            losses.append(follower.step(*batch(0, microbatches)).loss or 0.0)
            awaited(follower, lambda client: client.ended)
    return losses


def compiled() -> bool:
    """Whether what checks schedules has been compiled when the first one is loaded."""
    with Pipeline(own_stages([0, 1]), [0, 1], loss_fn, 1) as pipe:
        pipe.load(one_at_a_time(pipe.layout.unmeasured()))
    return timeline._longest_path._compiled is not None


def script(text: str) -> tuple[Problem, Problem]:
    """Runs it, with a pipeline and batches; the problem as profiled, and as the script has it."""
    inputs, targets = batch(0, 2)
    with Pipeline(own_stages([0, 1]), [0, 1], loss_fn, 2) as pipe:
        profiled = pipe.profile(inputs, targets, activation_budget_bytes=10**9, repeats=3)
        pipe.load(one_at_a_time(profiled))
        scope: dict[str, Any] = {"pipe": pipe, "batches": [(inputs, targets)] * 3, "Profiler": Profiler}
        exec(compile(text, "docs/profile.md", "exec"), scope)
    return profiled, scope["problem"]


@pytest.mark.parametrize(("begun", "versions"), [(False, [1] * 6), (True, [2] * 2)])
def test_without_a_service_it_trains_as_a_plain_run(ranks: Ranks, begun: bool, versions: list[int]) -> None:
    """Begun by a schedule loaded before the profile, it goes on by its programs on the measured problem."""
    how = {"url": NOWHERE, "steps": len(versions), "every": 4, "begun": begun}
    (_, ran), (losses, _) = ranks(follow, placement=[0, 1], microbatches=M, **how)
    plain, _ = cases.plain(2, M, len(versions))
    assert losses == [pytest.approx(sum(own) / M) for own in plain]
    assert ran == versions


def test_schedules_of_the_service_are_swapped_in(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_solver(monkeypatch)
    with running(settings_in(tmp_path)) as (url, _):
        (_, versions), (losses, _) = ranks(
            follow, placement=[0, 1], microbatches=M, url=url, steps=5000, every=10_000, last=2
        )
    plain, _ = cases.plain(2, M, len(losses))
    assert losses == [pytest.approx(sum(own) / M, rel=1e-4) for own in plain]
    assert (versions[0], versions[-1]) == (1, 2)


def test_no_step_waits_for_a_compiler(ranks: Ranks) -> None:
    assert ranks(compiled) == [True, True]


def test_the_loop_in_the_docs_runs(ranks: Ranks) -> None:
    page = (Path(__file__).parents[2] / "docs" / "profile.md").read_text(encoding="utf-8")
    (profiled, problem), (_, other) = ranks(script, text=page.split("```python\n")[2].split("```")[0])
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
        results = ranks(slows_down, url=url, microbatches=M, every=every, calm=calm, slow=slow, factor=1.5)
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
        _, losses = ranks(regroups, url=url, microbatches=M, then=M // 2)
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
    if placement == (0, 1, 1, 0):
        both = problem.replace(routes=[[0, 1], [2, 3]], microbatch_routes=[0, 1, 1, 0])
        assert check(both, one_at_a_time(both)) == []


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


def test_why_there_was_no_adoption_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "optpipe.follow")
    adoptions, _ = begun()
    adoptions.log_if_none(9, "none is better")
    none, refused = Adoptions(), Adoptions()
    none.log_if_none(9, "none is better")
    refused.offered = client([]), OFFER
    refused.log_if_none(9, "none is better")
    assert [record.getMessage() for record in caplog.records] == [
        "no schedule was adopted in 9 steps: none is better",
        "no schedule was adopted in 9 steps: the one that was offered was refused, or came too late",
    ]


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


# On its own host


@pytest.mark.usefixtures("scripted_solver")
def test_better_schedules_are_offered_and_kept(tmp_path: Path) -> None:
    problem, cache = chain(), Cache(tmp_path / "cache.sqlite")
    with ScheduleClient(None, problem, cache=cache, method="good") as client:
        until(lambda: client.ended)
        offer = client.poll()
    best_ms = all_forwards_first(problem).makespan_ms
    assert (offer.version, offer.seq, offer.makespan_ms) == (2, 2, best_ms)
    [entry] = cache.entries()
    assert (entry.objective_ms, entry.status) == (best_ms, "optimal")
    with ScheduleClient(None, problem, cache=cache, warm_start=offer.schedule) as client:
        until(lambda: client.ended)
        assert client.poll() is None, "what runs is proven, and no solver was asked"
    with ScheduleClient(None, problem, cache=cache) as client:
        assert until(client.poll).schedule.programs == offer.schedule.programs
        client.adopted(offer, 1)


@pytest.mark.usefixtures("scripted_solver")
def test_what_goes_wrong_is_logged_and_nothing_is_offered(caplog: pytest.LogCaptureFixture) -> None:
    for method, told in ("infeasible", "ended as infeasible"), ("unknown", "there is no search for schedules"):
        with ScheduleClient(None, chain(), method=method) as client:
            until(lambda: client.ended)
            assert client.poll() is None
        assert told in warnings(caplog)[-1]


@pytest.mark.usefixtures("scripted_solver")
def test_how_a_method_ended_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with ScheduleClient(None, chain(), method="reports") as client:
        until(lambda: client.ended)
    assert "the search for schedules: milp: 3 windows" in news(caplog)
    assert warnings(caplog) == ["the search for schedules: something else"]


def test_a_service_has_its_own_cache(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the service has its own"):
        ScheduleClient("http://127.0.0.1:1", chain(), cache=Cache(tmp_path / "cache.sqlite"))


def test_two_ranks_train_by_a_search_of_their_own_and_keep_its_schedule(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    (_, versions), (losses, _) = ranks(
        follow, placement=[0, 1], microbatches=M, url=None, steps=500, every=1000, last=2, cache=path, method="gpipe"
    )
    plain, _ = cases.plain(2, M, len(losses))
    assert losses == [pytest.approx(sum(own) / M, rel=1e-4) for own in plain]
    assert (versions[0], versions[-1]) == (1, 2)
    assert [entry.method for entry in Cache(path).entries()] == ["gpipe"]
