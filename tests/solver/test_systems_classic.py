"""Naive, GPipe, 1F1B, interleaved, recomputation, balanced stages: their formulas in the papers' unit model."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.units import ACTIVATION, peaks, units

from optpipe import InputError, Kind, Pair, Problem, check
from optpipe.model.placement import Placement
from optpipe_solver import heuristics
from optpipe_solver.systems import generate, parse
from optpipe_solver.systems.system import even_groups

# By the survey 80 % of the bytes for 33 % of the time, 50 to 60 % for 10 to 15 %.
FULL, SELECTIVE = (1.0, ACTIVATION // 5), (0.375, ACTIVATION * 9 // 20)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_naive_has_one_device_compute_at_a_time(p, m):
    schedule = heuristics.generate("naive", units(p, m))
    assert schedule.timeline.bubble == pytest.approx((p - 1) / p)
    assert peaks(schedule) == [1] * p


@pytest.mark.parametrize("p", [1, 2, 3, 8])
@pytest.mark.parametrize("m", [1, 3, 17])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1)])
def test_gpipe_and_1f1b_have_the_published_bubble_and_peaks(p, m, times):
    problem = units(p, m, times=times)
    flush, steady = (generate(name, problem) for name in ("gpipe", "1f1b"))
    for schedule in (flush, steady):
        assert check(problem, schedule) == []
        assert schedule.makespan_ms == (p - 1 + m) * sum(times)
        assert schedule.timeline.bubble == pytest.approx((p - 1) / (p - 1 + m))
    assert peaks(flush) == [m] * p
    assert peaks(steady) == [min(m, p - s) for s in range(p)]


def test_the_phases_of_1f1b_are_the_surveys():
    """P = 4, M = 8: P - 1 - i forwards, then one forward and one backward in turn, then the backwards left."""
    kinds = [
        "".join("F" if op.kind is Kind.F else "B" for op in program.ops())
        for program in generate("1f1b", units(4, 8)).programs
    ]
    assert kinds == ["F" * w + "FB" * (8 - w) + "B" * w for w in (3, 2, 1, 0)]


def test_chunks_are_visited_in_groups():
    """Megatron's figure 4: p = 4, v = 2, m = 8."""
    first = " ".join(generate("interleaved", units(4, 8, v=2)).programs[0].texts())
    assert first.startswith("0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4BW0 0F7 4BW1 ")
    assert first.endswith(" 4BW6 4BW7 0BW4 0BW5 0BW6 0BW7")


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("v", "times"), [(2, (1, 1, 1)), (3, (1, 1, 1)), (2, (2, 3, 1)), (3, (2, 3, 1))])
def test_interleaving_divides_the_bubble_by_the_chunks(p, v, times):
    """With a device's whole times, v times a stage's: (p-1)(F+B+W)/v, also where m is no multiple of p. Where it is,
    (1 + (p-1)/(pv))·M, where M is a model's activations, and PipeOffload's count of the forwards of a warm-up. pv - 1
    messages, where one stage a device has p - 1."""
    whole, devices = v * sum(times), [stage.device for stage in units(p, 1, v=v).stages]
    assert sum(a != b for a, b in pairwise(devices)) == (p * v - 1 if p > 1 else 0)
    for m in range(1, 4 * p + 2):
        schedule = generate("interleaved", units(p, m, v=v, times=times))
        assert check(schedule.problem, schedule) == []
        if m >= p:
            assert schedule.makespan_ms == m * whole + (p - 1) * whole / v
        else:  # no shorter than a micro-batch's way through p·v stages and back, with the others m - 1 stages behind
            assert schedule.makespan_ms == sum(times) * (p * v + m - 1)
        largest = len(even_groups(m, p)[0])
        assert peaks(schedule)[0] == min(m * v, largest * (v - 1) + 2 * p - 1)
        if m % p == 0:
            assert peaks(schedule) == [min(m * v, p * v + p - 1 - 2 * i) for i in range(p)]
            kinds = [[op.kind for op in program.ops()] for program in schedule.programs]
            warm_ups = [each.index(Kind.BW) for each in kinds]
            assert warm_ups == [min(m * v, p * (v - 1) + 2 * (p - i) - 1) for i in range(p)]


@pytest.mark.parametrize(("p", "v"), [(1, 1), (1, 2), (2, 2), (3, 1), (3, 2), (4, 3), (8, 2)])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 1, 1), (1, 2, 1)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_combined_1f1b_runs_pairs_from_one_forward_more_on(p, v, times, share):
    """A pair lasts between the longer of its ops and both in turn. (p-1+w)(F+B+W) + (vm-w)·F&B with w = (v-1)g + 1,
    where g is the largest group; vp + p activations, one more than interleaved 1F1B."""
    f, b, w = times
    whole = f + b + w
    pair = max(f, b + w) + share * (whole - max(f, b + w))
    for m in range(p, 4 * p + 2):
        problem = units(p, m, v=v, times=times).replace(overlap_factor=pair / whole)
        schedule = generate("combined-1f1b", problem)
        assert check(problem, schedule) == []
        alone = min(m * v, (v - 1) * len(even_groups(m, p)[0]) + 1)
        assert schedule.makespan_ms == pytest.approx((p - 1 + alone) * whole + (m * v - alone) * pair)
        counts = [sum(isinstance(item, Pair) for item in program) for program in schedule.programs]
        assert counts == [max(0, m * v - alone - 2 * (p - 1 - i)) for i in range(p)]
        if m % p == 0:
            assert peaks(schedule)[0] == min(m * v, p * v + p)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 8), (3, 5), (4, 8), (8, 3), (8, 32)])
@pytest.mark.parametrize("every", [1, 2, 3, 9])
@pytest.mark.parametrize(("again_ms", "kept"), [FULL, SELECTIVE])
def test_recomputation_costs_its_time_and_saves_its_bytes(p, m, every, again_ms, kept):
    problem = units(p, m, recompute=(again_ms, kept))
    schedule = generate(f"1f1b-recompute:every={every}", problem)
    assert check(problem, schedule) == []
    assert schedule.makespan_ms == (m + p - 1) * 3 + (m // every) * again_ms
    waiting = [min(m, p - s) - 1 for s in range(p)]  # behind the activation that is in use
    assert peaks(schedule) == [1 + w - w // every + w // every * kept / ACTIVATION for w in waiting]


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 5), (3, 9), (4, 7), (4, 12), (8, 16)])
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("again_ms", "kept"), [FULL, SELECTIVE])
def test_interleaved_1f1b_recomputes_for_its_time_too(p, m, v, again_ms, kept):
    problem = units(p, m, v=v, recompute=(again_ms, kept))
    plain, whole = generate("interleaved", problem), generate("interleaved-recompute", problem)
    for recomputed in range(1, v + 1):
        schedule = generate(f"interleaved-recompute:recomputed={recomputed}", problem)
        assert check(problem, schedule) == []
        assert schedule.makespan_ms == plain.makespan_ms + m * recomputed * again_ms
        again = {op.stage for program in schedule.programs for op in program.ops() if op.kind is Kind.C}
        assert again == set(range(recomputed * p))
    assert schedule.programs == whole.programs
    assert peaks(whole) == [pytest.approx(1 + (n - 1) * kept / ACTIVATION) for n in peaks(plain)]
    if v == 2 and m % p == 0 and m > p:  # Lin et al., R = 50 %
        full = [min(p + 1, n - p) for n in peaks(plain)]
        half = generate("interleaved-recompute:recomputed=1", problem)
        assert peaks(half) == [
            pytest.approx(f + (n - f) * kept / ACTIVATION) for f, n in zip(full, peaks(plain), strict=True)
        ]


@pytest.mark.parametrize("p", [2, 4, 8, 64])
def test_with_every_second_layer_recomputed_half_stays(p):
    """Lin et al., 1F1B with R = 50 %: half of M and half of the activation in use; 7(m+p-1) units at most.

    Every second layer has the level `second`, all of them `full`.
    """
    m, size = p + 4, ACTIVATION // 2
    full = {"name": "full", "recompute_ms": 0.5, "checkpoint_bytes": 0}
    layer = {"forward_ms": 1.0, "backward_input_ms": 1.0, "backward_weight_ms": 1.0, "activation_bytes": size}
    layer |= {"saved_for_weight_bytes": size}
    second = {"name": "second", "recompute_ms": 1.0, "checkpoint_bytes": 0}
    layers = [layer | {"levels": [second, full] if k % 2 == 0 else [full]} for k in range(2 * p)]
    posed = units(p, m).replace(layers=layers)
    problem = Placement.balanced(posed, 1).apply(posed)
    assert [level.name for level in problem.stages[0].levels or ()] == ["second", "full"]
    schedule = generate("1f1b-recompute", problem)
    assert max(peaks(schedule)) == (p + 1) / 2 == p * (0.5 + 1 / (2 * p))
    assert schedule.makespan_ms == 6 * (m + p - 1) + m <= 7 * (m + p - 1)
    assert max(peaks(generate("1f1b-recompute:every=2", units(p, m, recompute=(1, 0))))) > (p + 1) / 2 or p == 2


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=12), st.integers(1, 4))
def test_balanced_stages_are_the_surveys_dynamic_program(layers, stages):
    """Its recurrence: dp[s][j] = min over k of max(dp[s-1][k], time of layers k to j - 1)."""
    best = {(0, 0): 0}
    for s in range(1, stages + 1):
        for j in range(s, len(layers) + 1):
            best[s, j] = min(max(best[s - 1, k], sum(layers[k:j])) for k in range(s - 1, j) if (s - 1, k) in best)
    placed = Placement.balanced(layered(stages, layers), 1).apply(layered(stages, layers))
    assert max(stage.forward_ms for stage in placed.stages) == best[stages, len(layers)]


def layered(p: int, forward_ms: list[int]) -> Problem:
    costs = {"backward_input_ms": 0.0, "backward_weight_ms": 0.0, "activation_bytes": 1, "saved_for_weight_bytes": 1}
    return units(p, 4).replace(layers=[{"forward_ms": float(ms), **costs} for ms in forward_ms])


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("chronos-zero:group=2", r"method = 'chronos-zero:group=2': .*; did you mean chronos-zero2\?$"),
        ("1f1b-recompute:every_n=2", r".*1f1b-recompute has no parameter every_n \(its parameters: every, level\)$"),
        ("2f2b", r"method = '2f2b': the published schedules are gpipe, 1f1b"),
        ("1f1b:group=2", r"method = '1f1b:group=2': 1f1b has no parameter group \(its parameters: none\)"),
        (
            "1f1b:",
            r"method = '1f1b:': '' is no parameter: write .* a whole number of up to nine digits, such as group=5$",
        ),
        ("gis:group=1234567890", r"method = 'gis:group=1234567890': 'group=1234567890' is no parameter: write a name"),
        ("gis:group=2,group=3", r"method = 'gis:group=2,group=3': group is given twice, a parameter is given once$"),
    ],
)
def test_what_is_no_system_is_one_sentence(method, told):
    with pytest.raises(InputError, match=f"^{told}"):
        parse(method)
