"""The key of a problem: what is alike has one key, what differs is far; one device more or less is near."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import pipeline, stage
from support.problems.chain import chain, gpipe
from support.problems.strategies import problems

from optpipe import Problem, check
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.model.placement import Placement, Shape
from optpipe.model.records import each_microbatch
from optpipe.reuse import RulesSearch, by_rules, resized
from optpipe_cache import Cache, distance, features, structure
from optpipe_cache.features import REACH

TIMES = (1.0, 1.1, 0.9)


def gpt(times: tuple[float, float, float] = TIMES, memory: int = 5500, m: int = 32) -> Problem:
    return pipeline(8, m, memory, stage(times, (1000, 400), offload=(0.8, 0.8, 1000)), p2p_ms=0.05)


def _scaled(problem: Problem, times: float = 1, sizes: int = 1, noise: Any = lambda: 1.0) -> Problem:
    """The problem with all its times and all its sizes multiplied, each time by another `noise`."""

    def scaled(name: str, value: Any) -> Any:
        if name == "ms" or name.endswith("_ms"):
            return (np.array(value) * times * noise()).tolist()
        return (np.array(value) * sizes).tolist() if name.endswith("_bytes") else value

    def fields(content: dict[str, Any]) -> dict[str, Any]:
        return {
            name: [fields(level) for level in value] if name == "levels" else scaled(name, value)
            for name, value in content.items()
        }

    content = problem.to_dict()
    names = [name for name in ("devices", "stages", "messages") if name in content]
    lists = {name: [fields(each) for each in content[name]] for name in names}
    return Problem.from_dict(fields(content) | lists)


@given(problems(), st.sampled_from([1 / 8, 1, 4]), st.sampled_from([1, 2, 1000]))
def test_scaling_all_times_or_all_sizes_changes_nothing(problem: Problem, times: float, sizes: int) -> None:
    scaled = _scaled(problem, times, sizes)
    assert structure(scaled) == structure(problem)
    if any(problem.costs.ms[:3].ravel()):
        assert distance(features(problem), features(scaled)) == 0.0


def test_two_measurements_of_one_machine_are_neighbours() -> None:
    random = np.random.default_rng(0)
    noisy = [features(_scaled(gpt(), noise=lambda: random.normal(1, 0.03))) for _ in range(142)]
    pairs = [(i, j) for i in range(len(noisy)) for j in range(i)]
    assert len(pairs) > 10_000
    assert max(distance(noisy[i], noisy[j]) for i, j in pairs) < REACH / 2


def test_what_differs_is_out_of_reach() -> None:
    base = features(gpt())
    for times in ((3.0, 1.1, 0.9), (1.0, 1.1, 4.0)):
        assert distance(base, features(gpt(times))) > REACH
    assert distance(base, features(gpt(memory=1900))) > REACH
    assert distance(base, features(gpt(memory=5000))) < REACH / 3
    more = features(gpt(m=33))
    assert structure(gpt(m=33)) == structure(gpt())
    assert 0 < distance(base, more) < 0.01
    assert list(base.terms(more)) == ["microbatches"]


def test_a_tenth_is_a_distance_of_a_tenth() -> None:
    base, less = features(gpt(memory=5000)), features(gpt(memory=4500))
    assert distance(base, less) == pytest.approx(0.1, abs=0.02)
    assert base.terms(less) == pytest.approx({"memory": distance(base, less)})
    assert distance(features(gpt(memory=16_000)), features(gpt(memory=60_000))) == 0.0, "no more memory helps"


@given(problems(), problems())
def test_terms_add_up_to_the_distance(one: Problem, other: Problem) -> None:
    if structure(one) != structure(other):
        other = one.replace(p2p_ms=each_microbatch(lambda ms: ms + 0.1, one.p2p_ms))
    a, b = features(one), features(other)
    assert sum(a.terms(b).values()) == pytest.approx(distance(a, b))
    assert distance(a, b) == distance(b, a)


def test_the_key_is_the_same_on_every_machine() -> None:
    found = features(gpt())
    assert structure(gpt()) == "5eca92882131a988a6f5259c5d5aac3c308d1171be65c16c0fbac4a2ad6e351d"
    assert found.steps[[0, 8, 16, 88, 90, 91]].tolist() == [147, 154, 139, 15, 577, 403]


def test_the_nearest_of_many_is_found(tmp_path: Any) -> None:
    cache, random = Cache(tmp_path / "cache.sqlite"), np.random.default_rng(1)
    forwards = np.exp(random.normal(0, 0.6, 60)).tolist()
    for forward in forwards:
        cache.add(gpipe(chain(forward=forward)), "feasible")
    for forward in np.exp(random.normal(0, 0.6, 20)).tolist():
        wanted = features(chain(forward=forward))
        nearest = min(distance(wanted, features(chain(forward=other))) for other in forwards)
        hit = cache.lookup(chain(forward=forward))
        assert (hit and hit.distance) == (pytest.approx(nearest) if nearest <= REACH else None)


def test_of_more_than_are_compared_those_used_last_count(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optpipe_cache.cache.MOST_COMPARED", 2)
    cache = Cache(tmp_path / "cache.sqlite")
    for forward in (1.0, 1.1, 1.2):
        cache.add(gpipe(chain(forward=forward)), "feasible")
    near = cache.neighbours(chain())
    assert [sha256 for _, sha256 in near] == [chain(forward=forward).sha256 for forward in (1.1, 1.2)]


EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
TIGHT = Problem.load(EXAMPLES / "half-memory-8x16.json")
COST = stage((1.0, 1.0, 1.0), (1000, 500))
FOUR = pipeline(4, 2, 4000, COST)


@pytest.mark.parametrize(("chunks", "shape"), [(1, "looped"), (2, "looped"), (2, "v"), (3, "v")])
@pytest.mark.parametrize("devices", [1, 3, 4, 5, 9])
def test_the_ends_of_each_chunk_stay(chunks: int, shape: Shape, devices: int) -> None:
    placement = Placement(chunks=chunks, shape=shape)
    placed = placement.apply(FOUR)
    costs = tuple(stage.model_copy(update={"forward_ms": 1.0 + s}) for s, stage in enumerate(placed.stages))
    found = resized(placed.replace(stages=costs), devices)
    assert [stage.device for stage in found.stages] == placement.along(range(devices))
    for c in range(chunks):
        own = [stage.forward_ms - 1 - 4 * c for stage in found.stages[c * devices : (c + 1) * devices]]
        assert own == sorted(own)
        assert own[0] == 0
        assert own[-1] == 3 or devices == 1


ODD = [
    {"stages": tuple(FOUR.stages[d].model_copy(update={"device": d}) for d in (0, 2, 1, 3))},
    {"devices": tuple(device.model_copy(update={"link": "one"}) for device in FOUR.devices)},
    {"devices": (FOUR.devices[0].model_copy(update={"peer": 1}), *FOUR.devices[1:])},
    {"routes": [[3, 2, 1, 0]]},
]


@pytest.mark.parametrize("odd", ODD, ids=["order", "link", "peer", "route"])
def test_stages_without_a_pattern_are_not_resized(odd: dict[str, Any]) -> None:
    assert resized(FOUR.replace(**odd), 3) is None


def test_nothing_becomes_larger_than_a_problem_may_be(tmp_path: Path) -> None:
    assert resized(pipeline(4096, 1, 4000, COST), 4097) is None
    many = pipeline(1, 1, 10**6, [stage((1.0, 1.0, 1.0), (1000, 500), device=0) for _ in range(65)])
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
    assert lengths[-1] == at_once.makespan_ms == search.ms


@pytest.mark.parametrize("devices", [7, 9])
def test_a_lookup_finds_what_is_known_of_other_devices(devices: int, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache.sqlite")
    known = by_rules(TIGHT, None, "makespan", 10**6)
    assert cache.add(known, "feasible", None)
    wanted = resized(TIGHT, devices)
    hit = cache.lookup(wanted)
    assert check(wanted, hit.schedule) == []
    assert hit.terms["devices"] == pytest.approx(abs(devices - 8) / 8, abs=0.02)
    assert not hit.exact
    alone = by_rules(wanted, None, "makespan", 10**6)
    assert hit.schedule.makespan_ms <= 1.05 * alone.makespan_ms
