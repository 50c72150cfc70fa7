"""Bounds and the least memory hold for every schedule, and are what one computes by hand where that is easy."""

from collections.abc import Iterator
from functools import partial
from itertools import combinations, islice, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import problems
from support.examples import examples
from support.oracles.bounds import bounds_of
from support.oracles.enumeration import EXHAUSTIVE, RICHER, SPAN, best_of_all
from support.problems import with_budgets
from support.problems.strategies import factors, problems_with_schedules

from optpipe import Problem, Schedule, certify, check
from optpipe.evaluate.objective import Objective, length_ms
from optpipe_solver.bounds import deferral_bound, lower_bound, memory_bound, trivial_bound
from optpipe_solver.bounds.least_memory import Relief, host_shares, infeasibility, least_memory, reliefs
from optpipe_solver.bounds.problem_facts import one_level
from optpipe_solver.bounds.ramp import ramp_bound
from optpipe_solver.heuristics import STREAMS


def pipeline(
    devices: int,
    microbatches: int,
    ms: tuple[float, float, float],
    p2p_ms: float,
    memory: int = 1,
    size: int = 1,
    kept: int = 1,
) -> Problem:
    return problems.pipeline(devices, microbatches, memory, problems.stage(ms, (size, kept)), p2p_ms=p2p_ms)


@pytest.mark.parametrize(
    ("devices", "microbatches", "ms", "bound", "span"),
    [
        (4, 8, (10.0, 10.0, 8.0), 257.0, 8 * 20 + 2 * 33 + 8),
        (16, 64, (10.0, 10.0, 8.0), 1957.0, 64 * 28),
        (8, 16, (12.0, 12.0, 11.0), 651.0, 16 * 24 + 2 * 7 * 13 + 11),
        (3, 1, (10.0, 10.0, 8.0), 3 * 10 + 3 * 10 + 4 * 1 + 8, 72.0),
    ],
)
def test_of_plain_pipelines_it_is_the_last_devices_wait_and_work(devices, microbatches, ms, bound, span):
    problem = pipeline(devices, microbatches, ms, 1.0)
    assert trivial_bound(problem) == bound
    assert trivial_bound(problem, "span") == span


def test_pairs_take_their_share_but_the_first_forward_and_the_last_backward():
    one = pipeline(1, 2, (10.0, 10.0, 8.0), 1.0).replace(overlap_factor=0.5)
    assert trivial_bound(one) == 10 + 0.5 * (10 + 10 + 8) + 10 + 8


def test_a_weight_gradient_fused_into_a_pair_takes_its_share_only():
    stages = [problems.stage((0, 0, ms), (0, 0), device=0) for ms in (10, 0)]
    routes = {"routes": [[0], [1]], "microbatch_routes": [0, 1]}
    problem = problems.pipeline(1, 2, 0, stages, overlap_factor=0.5, **routes)
    paired = Schedule.parse(problem, [["0F0", "1F1+0BW0", "1BW1"]])
    assert check(problem, paired) == []
    for objective in ("makespan", "span"):
        bounds = {trivial_bound(problem, objective), memory_bound(problem, objective)}
        assert bounds == {length_ms(paired, objective)} == {5.0}


def orders_of_one_device() -> Iterator[list[str]]:
    """All orders of two micro-batches that pass two stages of one device, with B and W apart or as BW."""

    def of_one(j: int) -> Iterator[list[str]]:
        yield [f"0F{j}", f"1F{j}", f"1BW{j}", f"0BW{j}"]
        for at, last in ((3, 5), (4, 5), (4, 4)):
            ops = [f"0F{j}", f"1F{j}", f"1B{j}", f"0B{j}"]
            ops.insert(at, f"1W{j}")
            ops.insert(last, f"0W{j}")
            yield ops

    for first, second in product(of_one(0), of_one(1)):
        for places in combinations(range(len(first) + len(second)), len(first)):
            one, other = iter(first), iter(second)
            yield [next(one if k in places else other) for k in range(len(first) + len(second))]


ORDERS = list(orders_of_one_device())


@settings(max_examples=examples(12), deadline=None)
@given(st.tuples(*[st.tuples(*[st.sampled_from([0, 1, 2, 5])] * 3)] * 2), factors(2))
def test_no_bound_is_above_the_best_of_all_pairs(times, by_stage):
    """All orders on one device, each with those pairs that save most: nothing else there makes it shorter."""
    problem = problems.pipeline(
        1, 2, 99, [problems.stage(ms, (1, 1), device=0) for ms in times], overlap_factor=by_stage
    )
    best_ms, best = min(map(partial(in_best_pairs, times, by_stage), ORDERS))
    schedule = problems.parsed(problem, best)
    assert check(problem, schedule) == []
    assert schedule.makespan_ms == pytest.approx(best_ms)
    for objective in ("makespan", "span"):
        bounds = {trivial_bound(problem, objective), lower_bound(problem, objective)}
        assert max(bounds) <= length_ms(schedule, objective) + 1e-9


def in_best_pairs(times: Any, by_stage: Any, order: list[str]) -> tuple[float, str]:
    """The least time of an order, and its program."""

    def op(text: str) -> tuple[int, str, str, float]:
        stage, kind, microbatch = int(text[0]), text[1:-1], text[-1]
        return stage, kind, microbatch, sum(times[stage]["FBW".index(letter)] for letter in kind)

    best: list[tuple[float, str]] = [(0.0, "")]
    for k, text in enumerate(order):
        stage, kind, microbatch, ms = op(text)
        ways = [(best[-1][0] + ms, f"{best[-1][1]} {text}")]
        if k:
            other, kind_before, microbatch_before, ms_before = op(order[k - 1])
            if (
                microbatch != microbatch_before
                and (kind == "F") != (kind_before == "F")
                and "W" not in (kind, kind_before)
            ):
                factor = by_stage[stage][other] if kind == "F" else by_stage[other][stage]
                ways.append((best[-2][0] + factor * (ms + ms_before), f"{best[-2][1]} {order[k - 1]}+{text}"))
        best.append(min(ways))
    return best[-1]


@settings(max_examples=examples(200))
@given(problems_with_schedules(beyond=True))
def test_no_schedule_is_shorter_than_its_memory_allows(pair):
    problem, schedule = pair
    tight = with_budgets(problem, [peak.bytes for peak in certify(problem, schedule).device])
    for objective in ("makespan", "span"):
        assert lower_bound(tight, objective) <= length_ms(schedule, objective) + 1e-6


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("problem", [*EXHAUSTIVE.values(), *RICHER.values(), SPAN])
def test_no_bound_is_above_the_best_of_all_schedules(problem, objective):
    best, _ = best_of_all(problem, objective)
    assert max(bounds_of(problem, objective).values()) <= best + 1e-9


@settings(max_examples=examples(25))
@given(st.data())
def test_what_heuristics_find_is_no_shorter(data):
    """On pipelines of alike stages, where schedules are near the bound, by any memory and any way to do without it."""
    f, b, w, o, c = (data.draw(st.integers(0, 6)) for _ in range(5))
    size, kept = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 12))
    away = {"offload": (o, o, size), "offload_parts": data.draw(st.sampled_from([1, 3]))}
    again = {"recompute": (c, data.draw(st.integers(0, size)))}
    costs = problems.stage((f, b, w), (size, kept), **data.draw(st.sampled_from([{}, away, again, away | again])))
    memory = data.draw(st.integers(size, 5 * size))
    problem = problems.pipeline(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), memory, costs)
    for objective in ("makespan", "span"):
        for schedule in islice(STREAMS["adaoffload"](problem, objective), 25):
            assert memory_bound(problem, objective) <= length_ms(schedule, objective) + 1e-6


def test_what_is_left_of_the_memory_beside_whole_activations_is_of_no_use():
    by_bytes, by_number = (pipeline(6, 40, (10.0, 10.0, 10.0), 0.0, memory=38, size=10, kept=kept) for kept in (10, 4))
    turn = 6 * 20
    assert memory_bound(by_number, "span") >= 40 * turn / 3 > 40 * (10 * turn + 4 * 10) / 38
    assert memory_bound(by_bytes, "span") >= 40 * (turn + 10) / 3


def test_parts_of_one_activation_leave_one_after_the_other():
    """Memory for one activation, links of two ways: of its 4 parts all, then 3, 2 and 1 are there for 2 ms each on the
    way out, and as long on the way back."""
    away = problems.stage((2, 2, 0), (4, 0), offload=(8.0, 8.0, 4), offload_parts=4)
    problem = problems.pipeline(2, 100, 4, away, p2p_ms=50.0, transfer_mode="full_duplex")
    assert memory_bound(problem, "span") == pytest.approx(100 * (2 + 2 + (4 + 3 + 2 + 1) * (2 + 2) / 4), rel=0.01)


def test_beside_a_weight_gradient_that_leaves_no_room_for_an_activation_there_is_none():
    """Of five bytes an activation holds all for 10 + 12 ms until it is away, and for 12 + 10 ms when it is back, then
    two for the 8 ms of its weight gradient."""
    problem = problems.pipeline(2, 50, 5, problems.stage((10, 10, 8), (5, 2), offload=(12.0, 12.0, 5)), p2p_ms=50.0)
    assert memory_bound(problem, "span") == pytest.approx(50 * (22 + 22 + 8))
    assert memory_bound(problem) <= next(STREAMS["adaoffload"](problem, "makespan")).makespan_ms < 1.05 * 50 * 52


def test_memory_fills_forward_by_forward_and_empties_backward_by_backward():
    """A weight gradient frees a quarter in 10 ms, and 20 ms of a backward may have passed already: half is full."""
    problem = pipeline(12, 100, (10.0, 10.0, 10.0), 0.0, memory=4)
    filling, emptying = (3 + 2 + 1) * 10 / 4, 20 * 0.5 / 2
    assert memory_bound(problem, "span") == pytest.approx(100 * 250 / 4 + filling + emptying)


def test_the_memory_bound_is_bytes_times_ms():
    """Memory for one activation, held at stage 0 for 80 ms and a weight gradient's 10."""
    assert memory_bound(pipeline(4, 8, (10.0, 10.0, 10.0), 0.0)) == 8 * 90.0
    countless = problems.pipeline(2, 4, 2**53, problems.stage((1e-9, 1e9, 1.0), (1, 1)))
    for ample in (pipeline(4, 8, (10.0, 10.0, 10.0), 0.0, memory=1000), countless):
        assert memory_bound(ample) == pytest.approx(trivial_bound(ample))


def test_until_a_backward_frees_memory_it_limits_what_a_device_computes():
    """A V on two devices with memory for two activations. Device 1 runs two forwards, and waits until 50 ms, when its
    first backward can begin. W holds nothing, so that all can wait until the end."""
    stages = [problems.stage((10, 10, 10), (1, 0), device=d) for d in (0, 1, 1, 0)]
    v = problems.pipeline(2, 8, 2, stages)
    assert (trivial_bound(v), memory_bound(v), ramp_bound(v)) == (8 * 60 + 10, 8 * 60 + 10, 8 * 60 + 30)


def test_before_the_end_memory_limits_what_is_left_to_compute():
    """The same without W: of the last 50 ms device 1 computes for two backwards alone."""
    stages = [problems.stage((10, 10, 0), (1, 0), device=d) for d in (0, 1, 1, 0)]
    assert ramp_bound(problems.pipeline(2, 8, 2, stages)) == pytest.approx(8 * 40 + 30 + 30)


def test_memory_limits_how_many_weight_gradients_wait_for_the_last_input_gradient():
    two_wait, all_wait = (pipeline(4, 8, (10.0, 10.0, 8.0), 1.0, memory=memory) for memory in (3, 8))
    assert deferral_bound(two_wait) == 3 * 11 + 8 * 28 - 3 * 8 + 3 * 11 + 8  # beside the activation, and its own
    assert deferral_bound(all_wait) == 3 * 11 + 8 * 20 + 3 * 11 + 8
    # Where all enter on one device, it starts at 0, and its last weight gradient waits for all last input gradients.
    assert deferral_bound(two_wait, "span") == deferral_bound(two_wait)
    both_ways = two_wait.replace(routes=[[0, 1, 2, 3], [3, 2, 1, 0]], microbatch_routes=[0, 1] * 4)
    assert deferral_bound(both_ways, "span") == 0.0
    assert trivial_bound(pipeline(4, 2, (10.0, 1.0, 1.0), 0.0), "span") == 30 + 2 * 11 + 3 + 1


def test_chunks_of_one_device_share_what_can_wait():
    """After the last B of stage 1: all that device 1 does but three Ws that wait and its own; then stage 0."""
    stages = [problems.stage((2, 2, 1), (2, 1), device=d) for d in (0, 1, 1, 0)]
    assert deferral_bound(problems.pipeline(2, 6, 5, stages)) == 2 + 6 * 2 * 5 - 4 + 2 + 1


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_after_a_frozen_stages_last_forward_the_other_stages_have_theirs(at: int, objective: Objective) -> None:
    """Before its first forward and after its last one a micro-batch passes three stages of 10 ms each way."""
    costs = [problems.stage((60.0, 0.0, 0.0) if d == at else (10.0, 10.0, 0.0), (int(d != at), 0)) for d in range(4)]
    problem = problems.pipeline(4, 8, 100, costs, p2p_ms=0.0)
    schedule = next(STREAMS["adaoffload"](problem, "makespan"))
    assert trivial_bound(problem, objective) == 540.0 == length_ms(schedule, objective)


# The least memory is exact: below it nothing runs, at it one micro-batch at a time does.


def stage(activation: int, **extra: object) -> dict[str, Any]:
    return problems.stage((1, 1, 1), (activation, 1), device=0, **extra)


def on_one_device(stages: list[dict[str, Any]], memory: int, host: int | None = None) -> Problem:
    return problems.pipeline(1, 2, memory, stages, device={"host_memory_bytes": host})


def offload(size: int, parts: int = 1) -> dict[str, object]:
    return {"offload": (4, 4, size), "offload_parts": parts}


@settings(max_examples=examples(300))
@given(problems_with_schedules(beyond=True))
def test_no_schedule_needs_less(pair):
    """Nor with no more host memory than it takes."""
    problem, schedule = pair
    certificate = certify(problem, schedule)
    devices = [
        device.model_copy(update={"activation_budget_bytes": 1, "host_memory_bytes": held.bytes})
        for held, device in zip(certificate.host, problem.devices, strict=True)
    ]
    for each in (problem, problem.replace(devices=devices)):
        for needed, held in zip(least_memory(each), certificate.device, strict=True):
            assert needed <= held.bytes


def test_the_deepest_stage_needs_its_activation_and_the_residuals_before_it():
    assert least_memory(on_one_device([stage(10), stage(7), stage(9)], 100)) == [26]
    assert least_memory(on_one_device([stage(10, **offload(8)), stage(7), stage(9)], 100)) == [18]
    either = stage(10, **offload(8), recompute=(1, 1))
    assert least_memory(on_one_device([either, stage(7), stage(9)], 100)) == [17]
    assert least_memory(on_one_device([stage(10, **offload(10)), stage(7), stage(2)], 100)) == [10]
    cheap = {"name": "cheap", "recompute_ms": 1.0, "checkpoint_bytes": 4, "offload_ms": 1.0, "reload_ms": 1.0}
    leaving = stage(10, levels=[{**cheap, "offload_bytes": 3}])  # of the checkpoint one byte stays
    assert least_memory(on_one_device([leaving, stage(7), stage(9)], 100)) == [17]


def test_one_level_is_as_quick_and_as_small_as_any():
    levels = [{"name": f"{ms} ms", "recompute_ms": ms, "checkpoint_bytes": kept} for ms, kept in ((1.0, 6), (2.0, 4))]
    (one,) = one_level(on_one_device([stage(10, levels=levels)], 100)).stages
    assert (one.recompute_ms, one.checkpoint_bytes) == (1.0, 4)


def test_a_host_limit_admits_the_best_subset():
    stages = [stage(10, **offload(10)), stage(6, **offload(6)), stage(5, **offload(5)), stage(1)]
    # 10 leaves: 10, 6, 6+5, 6+5+1; 6 and 5 leave: 10+6
    assert least_memory(on_one_device(stages, 100, host=11)) == [12]
    assert least_memory(on_one_device(stages, 100, host=0)) == [22]


def test_parts_leave_one_by_one_and_to_the_byte():
    stages = [stage(10, **offload(10, parts=3)), stage(1)]  # parts of 3, 3 and 4 bytes
    least = {2: (11, 19), 3: (10, 16), 4: (10, 15), 6: (10, 13), 7: (10, 12), 10: (10, 10)}  # alone, and beside another
    for host, both in least.items():
        each = (on_one_device([*stages, *other], 100, host=host) for other in ([], [stage(8)]))
        assert tuple(least_memory(problem)[0] for problem in each) == both


def test_the_sentence_names_device_need_and_budget():
    assert infeasibility(on_one_device([stage(10), stage(7)], 17)) is None
    needs = "devices[0].activation_budget_bytes = 16 B: one micro-batch at a time needs at least 17 B"
    assert infeasibility(on_one_device([stage(10), stage(7)], 16)) == needs
    limited = infeasibility(on_one_device([stage(10, **offload(10)), stage(7)], 16, host=9))
    assert limited == f"{needs}, as its host_memory_bytes = 9 B admit no more offload"


def test_only_what_memory_demands_is_moved_and_the_cheapest_of_it():
    def relieved(problem: Problem) -> dict[int, Relief]:
        return reliefs(problem, 0, host_shares(problem))

    stages = [stage(10, **offload(10)), stage(10, **offload(10), recompute=(3, 0)), stage(10)]
    assert relieved(on_one_device(stages, 30)) == dict.fromkeys(range(3), Relief())
    assert relieved(on_one_device(stages, 29)) == {0: Relief(), 1: Relief(level=0), 2: Relief()}
    assert relieved(on_one_device(stages, 10)) == {0: Relief((0,)), 1: Relief(level=0), 2: Relief()}
    assert least_memory(on_one_device(stages, 10**6, host=500))[0] > 0


def test_many_choices_do_not_take_forever_and_claim_nothing_unproven():
    stages = [stage(100 + 7 * k, **offload(90 + 5 * k, parts=(1, 2, 3, 64)[k % 4])) for k in range(24)]
    limited, free = on_one_device(stages, 10**6, host=500), on_one_device(stages, 10**6)
    assert least_memory(limited)[0] >= least_memory(free)[0]
