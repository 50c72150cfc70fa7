"""The key of a problem: what is alike has one key, what differs is far."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import pipeline, stage
from support.problems.chain import chain, gpipe
from support.problems.strategies import problems

from optpipe import Problem
from optpipe.model.records import each_microbatch
from optpipe_cache import Cache, distance, features, lookup, structure
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
    monkeypatch.setattr(lookup, "MOST_COMPARED", 2)
    cache = Cache(tmp_path / "cache.sqlite")
    for forward in (1.0, 1.1, 1.2):
        cache.add(gpipe(chain(forward=forward)), "feasible")
    near = lookup.Lookup(cache.storage, None).neighbours(chain())
    assert [sha256 for _, sha256 in near] == [chain(forward=forward).sha256 for forward in (1.1, 1.2)]
