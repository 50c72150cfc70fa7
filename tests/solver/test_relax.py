"""The bound of one device alone: what a plain search finds, and what one computes by hand where that is easy. That no
schedule is shorter is in `test_all_bounds`."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import problems
from support.examples import examples
from support.oracles.enumeration import EXHAUSTIVE, SPAN, problem_of, stage
from support.oracles.one_device import TooManyStatesError, one_stage_end, several_stages_end
from support.problems.small import several_a_device, short_of_memory

from benchmarks.problems import offloading
from optpipe import Problem
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.model.ops import Kind
from optpipe.process.protocol import Bound, Frame, Ready, Request
from optpipe_solver import relax
from optpipe_solver.bounds import memory_bound
from optpipe_solver.bounds.problem_facts import shortest_paths
from optpipe_solver.relax import STATES_PER_S, device_bounds, searchable_devices
from optpipe_solver.relax.one_stage import meetings, one_stage_device
from optpipe_solver.relax.several_stages import several_stages_device

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
FEW = 5_000  # states of a device


@st.composite
def far_from_the_turn(draw: st.DrawFn) -> Problem:
    """A device that waits long for its input gradients, with memory for one or two of two activations that may leave
    in parts or be computed again."""
    ms, parts = st.sampled_from((1, 2, 3)), draw(st.integers(1, 2))
    size = 2 * parts
    away = (draw(ms), draw(ms), draw(st.sampled_from((parts, size))))
    again = (draw(ms), draw(st.integers(0, 1))) if draw(st.booleans()) else None
    short = stage(0, (draw(ms), draw(ms), draw(ms)), size, draw(st.integers(0, size + 1)), away, again, parts)
    slow = stage(1, (draw(ms), draw(ms), 1), 1)
    memory = [size + draw(st.integers(0, size)), 9]
    duplex = draw(st.sampled_from(("half_duplex", "full_duplex")))
    return problem_of([short, slow], memory, 2, draw(st.sampled_from((0.0, 2.0, 5.0))), transfer_mode=duplex)


# Here memory that a part takes when it comes back counts: a device with little memory, and a slow one.
BACK_IN_TIME = tuple(
    problem_of([short, slow], [memory, 9], 2, p2p_ms, transfer_mode=duplex)
    for short, slow, memory, p2p_ms, duplex in (
        (stage(0, (3, 2, 2), 4, 3, (3, 2, 4), None, 2), stage(1, (1, 2, 1), 1), 6, 0.0, "full_duplex"),
        (stage(0, (1, 1, 3), 4, 4, (1, 2, 4), (1, 0), 2), stage(1, (2, 2, 1), 1), 6, 0.0, "half_duplex"),
        (stage(0, (1, 1, 1), 2, 1, (2, 3, 2), (1, 1), 1), stage(1, (3, 1, 1), 1), 2, 2.0, "full_duplex"),
        (stage(0, (2, 1, 2), 2, 0, (4, 2, 1), None, 1), stage(1, (2, 5, 1), 1), 3, 0.0, "half_duplex"),
    )
)


@settings(max_examples=examples(40))
@example(BACK_IN_TIME[0], "span")
@example(BACK_IN_TIME[1], "span")
@example(BACK_IN_TIME[2], "span")
@example(BACK_IN_TIME[3], "makespan")
@given(
    problem=st.one_of(far_from_the_turn(), short_of_memory(2, 3), several_a_device(3)),
    objective=st.sampled_from(["makespan", "span"]),
)
def test_it_is_what_a_plain_search_finds(problem, objective):
    route, microbatches = list(problem.all_routes[0]), problem.microbatches
    for d in searchable_devices(problem):
        stages = [s for s in route if problem.stages[s].device == d]
        try:
            if len(stages) == 1:
                alone = one_stage_device(problem, 0, stages[0], microbatches, objective)
                met = alone._replace(meetings=meetings(problem, 0, stages[0]))
                plain_ms = max(one_stage_end(device, FEW) for device in (alone, met))
            else:
                device = several_stages_device(problem, 0, stages, microbatches, objective)
                plain_ms = several_stages_end(device, FEW)
        except TooManyStatesError:
            continue
        begins_ms = shortest_paths(problem).arrives[d] if objective == "makespan" else 0.0
        bounds_ms = list(device_bounds(problem, d, objective, 50_000))
        assert (bounds_ms[-1] if bounds_ms else NO_SCHEDULE_MS) == pytest.approx(begins_ms + plain_ms)


@settings(max_examples=examples(20))
@given(several_a_device(3))
def test_the_first_bound_of_several_steps_has_all_work_and_the_way_after_it(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relax, "POPS", 1)
        for d in searchable_devices(problem):
            passes = [(0, s) for s in problem.all_routes[0] if problem.stages[s].device == d]
            first_ms = next(device_bounds(problem, d), NO_SCHEDULE_MS)
            work_ms = sum(problem.costs.ms[kind, s, 0] for _, s in passes for kind in (Kind.F, Kind.B))
            paths = shortest_paths(problem)
            after_ms = paths.after[0, passes[0][1]]
            assert first_ms >= paths.arrives[d] + problem.microbatches * work_ms + after_ms - 1e-9


def test_the_first_bound_of_one_stage_counts_what_each_op_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for one activation: 4 times F, its way to the other device and back, and B."""
    monkeypatch.setattr(relax, "POPS", 1)
    problem = problems.pipeline(2, 4, 10, problems.stage((3, 4, 1), (10, 4)))
    assert next(device_bounds(problem, 0)) >= 4 * (3 + 7 + 4)


def test_it_is_what_one_device_takes() -> None:
    """Fractions of activations, and their sum over time, allow for less: 458.5 ms."""
    problem = Problem.load(EXAMPLES / "recompute-4x12.json")
    assert list(device_bounds(problem, 2))[-1] == pytest.approx(501.0)
    assert memory_bound(problem) < 501.0


def test_micro_batches_meet_as_trains_on_a_single_track() -> None:
    """Each way takes 6 ms. The second one's forward finds the first one's input gradient on the last device, or begins
    a ms later: the first device is done after 8 ms, not 7."""
    problem = problems.pipeline(3, 2, 100, problems.stage((1, 1, 0), (10, 0)), p2p_ms=0)
    assert list(device_bounds(problem, 0))[-1] == pytest.approx(8.0)


def test_a_backward_in_one_holds_no_more_than_its_activation() -> None:
    """Where W alone would hold four times as much, transfers run beside BW: the best known schedule takes 96 ms."""
    stages = [
        problems.stage((1, 1, 10), (10, 40), offload=(6, 6, 10), offload_parts=2),
        problems.stage((1, 1, 0), (10, 0)),
    ]
    problem = problems.pipeline(2, 6, [30, 1000], [s | {"device": d} for d, s in enumerate(stages)], p2p_ms=12)
    assert list(device_bounds(problem, 0))[-1] == pytest.approx(93.0)


def test_memory_changes_between_ops_only() -> None:
    """Memory for two activations. F, B and W take 28 ms and both transfers 24, but an activation that leaves is gone
    only when the op that runs then has ended, and one comes back only after such an op: so a period takes 30 ms."""
    problem = offloading(4, 32, room=2)
    found = max(list(device_bounds(problem, d))[-1] for d in searchable_devices(problem))
    assert memory_bound(problem) == pytest.approx(32 * 28 + 46)
    assert found == pytest.approx(32 * 30 + 30)


def test_it_rises_while_it_searches_and_ends_with_the_states_that_it_may_keep() -> None:
    problem = Problem.load(EXAMPLES / "slowlink-8x16.json")
    few = list(device_bounds(problem, 0, most_states=30_000))
    assert few == sorted(few)
    assert few[0] < few[-1] < 868.0


def test_stages_of_a_device_share_its_memory() -> None:
    """Which is for two activations. So a forward follows the input gradient of the stage behind, 6 ms after the forward
    of the micro-batch before; the last one's way is 8 ms, and its weight gradient takes 1 ms."""
    each = problems.stage((1, 1, 1), (10, 0))
    problem = problems.pipeline(2, 4, [20, 80], [each | {"device": s % 2} for s in range(4)])
    assert searchable_devices(problem) == [0, 1]
    assert list(device_bounds(problem, 0))[-1] == pytest.approx(3 * 6 + 8 + 1)
    assert list(device_bounds(problem, 0, "span"))[-1] == pytest.approx(3 * 6 + 8 + 1)
    assert memory_bound(problem) < 27.0


def test_rounding_of_long_times_makes_no_bound_longer() -> None:
    """One device with memory enough works all the time; what rounding leaves of a weight gradient takes none."""
    each = problems.stage((2e8 / 3, 2e8 / 3, 1e8 / 3), (1, 1))
    problem = problems.pipeline(1, 4, 5, [each | {"device": 0}] * 3)
    assert list(device_bounds(problem, 0))[-1] == pytest.approx(4 * 3 * 5e8 / 3, rel=1e-12)


def test_one_device_is_searched_at_a_time_the_one_with_the_highest_bound_first(monkeypatch: pytest.MonkeyPatch) -> None:
    each = {0: [3.0, 4.0, 9.0], 1: [5.0, 6.0], 2: []}
    monkeypatch.setattr(relax, "searchable_devices", lambda problem: list(each))
    alive: set[int] = set()

    def search(problem: Problem, d: int, objective: str) -> Iterator[float]:
        alive.add(d)
        assert alive == {d}, "its states take much memory"
        try:
            yield from each[d]
        finally:
            alive.remove(d)

    monkeypatch.setattr(relax, "device_bounds", search)
    frames: list[Frame] = []
    relax.run(Request(problem=SPAN, method="auto"), frames.append)
    assert [frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)] == [5.0, 6.0, 9.0]
    assert isinstance(frames[0], Ready)


def test_it_stops_by_its_own_count_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relax, "searchable_devices", lambda problem: [0])
    monkeypatch.setattr(relax, "device_bounds", lambda problem, d, objective: count(1.0))
    frames: list[Frame] = []
    spent_s = relax.run(Request(problem=SPAN, method="auto", time_limit_s=0.5), frames.append)
    assert 0.5 < spent_s <= 0.5 + relax.POPS / STATES_PER_S


def test_what_it_cannot_search_is_left_to_others_and_said() -> None:
    assert searchable_devices(EXHAUSTIVE["two chunks"]) == [1]
    looped = problems.pipeline(2, 4, 40, [problems.stage() | {"device": s % 2} for s in range(4)])
    assert searchable_devices(looped) == [0, 1]
    why = {
        "it has no pairs": problems.pipeline(2, 4, 20, problems.stage(), overlap_factor=0.8),
        "of more than 512 micro-batches": problems.pipeline(2, 513, 20, problems.stage()),
        "micro-batches, which differ here": problems.pipeline(2, 2, 20, problems.stage() | {"forward_ms": [1.0, 2.0]}),
        "it needs a device with one stage on one route": EXHAUSTIVE["two directions"],
    }
    for reason, problem in why.items():
        assert searchable_devices(problem) == []
        assert reason in str(relax.unsupported(problem))
