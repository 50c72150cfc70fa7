"""What is known of a pipeline on one device more or less is adapted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.problems import pipeline, stage

from optpipe import Problem, check
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.model.placement import Placement, Shape
from optpipe.reuse import RulesSearch, by_rules, resized
from optpipe_cache import Cache

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
TIGHT = Problem.load(EXAMPLES / "half-memory-8x16.json")


@pytest.mark.parametrize(("chunks", "shape"), [(1, "looped"), (2, "looped"), (2, "v"), (3, "v")])
@pytest.mark.parametrize("devices", [1, 3, 4, 5, 9])
def test_the_ends_of_each_chunk_stay(chunks: int, shape: Shape, devices: int) -> None:
    placement = Placement(chunks=chunks, shape=shape)
    four = pipeline(4, 2, 4000, stage((1.0, 1.0, 1.0), (1000, 500)))
    costs = [stage.model_copy(update={"forward_ms": 1.0 + s}) for s, stage in enumerate(placement.apply(four).stages)]
    found = resized(placement.apply(four).replace(stages=tuple(costs)), devices)
    assert found is not None
    assert [stage.device for stage in found.stages] == placement.along(range(devices))
    for c in range(chunks):
        own = [stage.forward_ms - 1 - 4 * c for stage in found.stages[c * devices : (c + 1) * devices]]
        assert own == sorted(own)
        assert own[0] == 0
        assert own[-1] == 3 or devices == 1


def test_stages_without_a_pattern_are_not_resized() -> None:
    four = pipeline(4, 2, 4000, stage((1.0, 1.0, 1.0), (1000, 500)))
    stages = [stage.model_copy(update={"device": d}) for stage, d in zip(four.stages, (0, 2, 1, 3), strict=True)]
    shared = tuple(device.model_copy(update={"link": "one"}) for device in four.devices)
    evicting = (four.devices[0].model_copy(update={"peer": 1}), *four.devices[1:])
    backwards = four.replace(routes=[[3, 2, 1, 0]])
    for odd in (
        four.replace(stages=tuple(stages)),
        four.replace(devices=shared),
        four.replace(devices=evicting),
        backwards,
    ):
        assert resized(odd, 3) is None


def test_nothing_becomes_larger_than_a_problem_may_be(tmp_path: Path) -> None:
    most = pipeline(4096, 1, 4000, stage((1.0, 1.0, 1.0), (1000, 500)))
    assert resized(most, 4097) is None
    on_one = [stage((1.0, 1.0, 1.0), (1000, 500), device=0) for _ in range(65)]
    many = pipeline(1, 1, 10**6, on_one)
    assert resized(many, 2) is None
    assert Cache(tmp_path / "cache.sqlite").lookup(many) is None


def test_a_search_in_rules_goes_on_where_it_ended() -> None:
    row = Problem.load(EXAMPLES / "zero-bubble" / "zb-8x24-half.json")
    problem = Placement.balanced(row, 3, "looped").apply(row)
    search = RulesSearch(problem, None, "makespan")
    assert search.go_on(10**6, until=time.monotonic()) is None
    assert search.ms == NO_SCHEDULE_MS
    lengths = [schedule.makespan_ms for most in (10**5, 5 * 10**5, 2 * 10**6) if (schedule := search.go_on(most))]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) == 3
    at_once = by_rules(problem, None, "makespan", 2 * 10**6)
    assert at_once is not None
    assert lengths[-1] == at_once.makespan_ms == search.ms


@pytest.mark.parametrize("devices", [7, 9])
def test_a_lookup_finds_what_is_known_of_other_devices(devices: int, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache.sqlite")
    known = by_rules(TIGHT, None, "makespan", 10**6)
    assert known is not None
    assert cache.add(known, "feasible", None)
    wanted = resized(TIGHT, devices)
    assert wanted is not None
    hit = cache.lookup(wanted)
    assert hit is not None
    assert check(wanted, hit.schedule) == []
    assert hit.terms["devices"] == pytest.approx(abs(devices - 8) / 8, abs=0.02)
    assert not hit.exact
    alone = by_rules(wanted, None, "makespan", 10**6)
    assert alone is not None
    assert hit.schedule.makespan_ms <= 1.05 * alone.makespan_ms
