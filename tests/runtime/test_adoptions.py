"""When the service gets a report of a swapped-in schedule, and of which step time."""

from __future__ import annotations

from typing import Any

from support.problems.chain import chain, gpipe, one_by_one

from optpipe_runtime.service.client import Offer
from optpipe_runtime.service.follow import MOST_STEPS, Adoptions

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
    adoptions.offered(client(reports), OFFER)
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
    adoptions.offered(client(reports), LATER)
    adoptions.swapped(3, LATER.schedule, 10)
    adoptions.measured([(2, 99.0), (2, 10.0), (2, 10.0), (3, 99.0), (3, 5.0)])
    assert sorted(reports[2:]) == [(3, 7, 10.0), (4, 10, 5.0)]
    adoptions.measured([(3, 5.0)])
    adoptions.finish()
    assert reports[4:] == [(4, 10, 5.0)]


def test_a_refused_or_replaced_schedule_is_not_adopted() -> None:
    adoptions, reports = Adoptions(), Reports()
    adoptions.swapped(1, LATER.schedule, 1)  # loaded
    adoptions.offered(client(reports), OFFER)
    adoptions.swapped(3, LATER.schedule, 8)  # its first step ran out of memory, and that was repeated by the one before
    adoptions.measured([(3, 10.0)] * 5)
    adoptions.finish()
    assert reports == []
