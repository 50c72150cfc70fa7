"""One clock for a search and its parts: by the wall, or by counted work with the wall as a backstop."""

import time
from types import SimpleNamespace

import pytest
from support.problems.chain import chain

from optpipe.process.protocol import Request
from optpipe_solver import clock, tuning
from optpipe_solver.clock import Clock


@pytest.fixture
def passes(monkeypatch):
    """Lets seconds of wall time pass; none passes otherwise."""
    now = [100.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_(seconds: float) -> None:
        now[0] += seconds

    return pass_


def test_by_the_wall_work_is_not_counted(passes):
    whole = Clock.for_request(Request(problem=chain(), time_limit_s=10.0, threads=2))
    whole.spend(9.0)
    assert (whole.left_s, whole.spent_s, whole.over) == (10.0, None, False)
    passes(4.0)
    part = whole.share(0.5)
    assert (whole.left_s, whole.passed_s, part.left_s, whole.share(0.7).left_s) == (6.0, 4.0, 5.0, 6.0)
    passes(5.0)
    assert (part.over, whole.over, part.left_s) == (True, False, 0.0)
    assert whole.moment(0.5) - 109.0 == 0.5
    assert whole.moment(5.0) == whole.until


def test_counted_work_is_what_ends_it_unless_the_wall_takes_much_longer(passes):
    whole = Clock.for_request(Request(problem=chain(), time_limit_s=10.0, threads=1))
    whole.count(2 * tuning.OPS_PER_S)
    whole.count(30, ops_per_s=10)
    assert (whole.left_s, whole.spent_s) == (5.0, 5.0)
    part = whole.share(0.1)
    passes(10.0 * tuning.COUNTED_TIMEOUT - 0.5)
    assert (whole.left_s, part.left_s, part.wall_left_s) == (5.0, 1.0, 0.5), "a busy machine changes nothing"
    part.spend(1.0)
    assert part.over
    assert not whole.over
    passes(0.5)
    assert (whole.over, whole.left_s, whole.spent_s) == (True, 0.0, 5.0)


def test_without_end_it_is_never_over():
    assert Clock().until > time.monotonic() + 1e9
    assert not Clock().over
