"""A training without a service: it searches on its own host, finds what a cache has, and keeps what it finds."""

from pathlib import Path

import pytest
from support.fakes.scripted_solver import all_forwards_first
from support.problems.chain import chain
from support.processes import until
from support.ranks import cases, follow
from support.ranks.worker import Ranks
from support.service.following import news, warnings

from optpipe.errors import InputError
from optpipe_cache import Cache
from optpipe_runtime.service.client import ScheduleClient


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
    path, m = tmp_path / "cache.sqlite", 4
    (_, versions), (losses, _) = ranks(
        follow.follow,
        placement=[0, 1],
        microbatches=m,
        url=None,
        steps=500,
        every=1000,
        until=2,
        cache=path,
        method="gpipe",
    )
    plain, _ = cases.plain(2, m, len(losses))
    assert losses == [pytest.approx(sum(own) / m, rel=1e-4) for own in plain]
    assert (versions[0], versions[-1]) == (1, 2)
    assert [entry.method for entry in Cache(path).entries()] == ["gpipe"]
