"""Chronos-Pipe, Chronos-Recomp, the ZeRO-2 variant, Chronos-Offload: the paper's formulas in its unit model, and the
right ones where these are loose."""

from fractions import Fraction
from itertools import groupby, product
from math import ceil, gcd
from typing import Any

import numpy as np
import pytest
from support.problems import with_budgets
from support.problems.units import ACTIVATION, peaks, units

from benchmarks.papers.formulas import (
    bubble_share,
    fits_in_bubbles,
    idle_before_deep,
    idle_before_shallow,
    overlap,
    units_with_messages,
)
from optpipe import InputError, Kind, Problem, Schedule, check
from optpipe.lift import with_host_updates
from optpipe.model.ops import COMPUTE
from optpipe.model.program import KIND, PART, STAGE, Program, of_kinds
from optpipe_solver import heuristics
from optpipe_solver.systems import generate

AGAIN: dict[str, Any] = {"recompute": (1.0, 0)}


def gradient_windows(schedule: Schedule) -> list[list[float]]:
    """By stage, the times (ms) from the last weight gradient of a launch to the first one of the next launch.

    In such a window the gradients must be communicated. In Chronos-Pipe's unit model it is 3(v-1)g+1 for groups of g in
    a full pipeline, and less while it drains.
    """
    timeline = schedule.timeline
    gradients = np.isin(timeline.table[:, KIND], [Kind.W, Kind.BW])
    columns = (timeline.table[gradients, STAGE], timeline.start[gradients], timeline.end[gradients])
    windows: list[list[float]] = [[] for _ in schedule.problem.stages]
    ended: dict[int, float] = {}
    for s, row in groupby(zip(*(column.tolist() for column in columns), strict=True), key=lambda op: op[0]):
        launch = list(row)
        if s in ended:
            windows[s].append(launch[0][1] - ended[s])
        ended[s] = launch[-1][2]
    return windows


def most_held(p: int, v: int, g: int = 1) -> float:
    """What device 0 of Chronos-Pipe holds in chunk activations, in groups of g, by the chunks' distances in beats."""
    there, back = ceil(p / (3 * g)), ceil(2 * p / (3 * g))
    return p + g * ((v - 1) * (there + back) + gcd(there, v) + gcd(back, v) - 2) / 2


def ran_before(schedule: Any, device: int, kind: Kind, chunk: int, other: int) -> int:
    """How many ops of one chunk a device runs before the first of another one."""
    p = len(schedule.problem.devices)
    stages = [op.stage // p for op in schedule.programs[device].ops() if op.kind is kind]
    return stages[: stages.index(other)].count(chunk)


@pytest.mark.parametrize("v", [2, 3, 4, 5])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 8])
def test_chronos_pipe_is_as_long_as_1f1b(p, v):
    for m in (1, 2, 3, 7, 20):
        problem = units(p, m, v=v)
        schedule = generate("chronos", problem)
        assert check(problem, schedule) == []
        assert schedule.makespan_ms == 3 * v * (m + p - 1)


@pytest.mark.parametrize("p", [*range(1, 10), 32])
def test_two_chunks_hold_what_the_paper_says_but_for_odd_p(p):
    """The paper's peaks of chunk 1 and of chunk 2 are at one time for even p only."""
    of_1 = ceil(Fraction(2, 3) + ceil(Fraction(p - 3, 6)) + ceil(Fraction(2 * p - 3, 6)) + Fraction(p, 2))
    of_2 = ceil(Fraction(3 * p - 2, 6))
    schedule = generate("chronos", units(p, 2 * p + 1, v=2))
    assert peaks(schedule) == [of_1 + of_2 - p % 2 - s for s in range(p)]


@pytest.mark.parametrize(("p", "v"), [*product([1, 2, 3, 4, 5, 7, 8, 12], [2, 3, 4, 6])])
def test_more_chunks_hold_less(p, v):
    schedule = generate("chronos", units(p, 2 * p + v, v=v))
    assert peaks(schedule) == [most_held(p, v) - s for s in range(p)]


@pytest.mark.parametrize("p", [*range(3, 10), 16])
def test_chunks_follow_each_other_as_many_rounds_later_as_the_paper_says(p):
    schedule = generate("chronos", units(p, 2 * p, v=2))
    assert ran_before(schedule, 0, Kind.F, chunk=0, other=1) == 1 + ceil(Fraction(p - 3, 6))
    assert ran_before(schedule, p - 1, Kind.BW, chunk=1, other=0) == 1 + ceil(Fraction(2 * p - 3, 6))


def test_bubbles_are_those_that_the_paper_prints():
    """Section 4.1: 8.27 and 5.37 % where a message takes 0.05 units, 4 devices run 128 micro-batches."""
    assert 100 * bubble_share(4, 128, 0.05) == pytest.approx(8.27, abs=0.01)
    assert 100 * bubble_share(4, 128, 0.05, chunks=1) == pytest.approx(5.37, abs=0.01)
    for p, m in product((2, 4, 7), (2, 9)):
        assert bubble_share(p, m, 0) == pytest.approx((p - 1) / (m + p - 1))  # 1F1B's
        schedule = generate("chronos", units(p, m, v=2))
        assert units_with_messages(p, m, 0) == schedule.makespan_ms


@pytest.mark.parametrize("p", [3, 4, 7, 8, 16])
def test_equations_4_and_6_are_what_devices_of_the_schedule_wait(p):
    """Between a device's last backward of chunk 2 and its last of chunk 1, and its first forwards of chunks 1 and 2."""
    timeline = generate("chronos", units(p, 4 * p, v=2)).timeline
    kind, stage = timeline.table[:, KIND], timeline.table[:, STAGE]
    for d in range(p):
        first = timeline.start[(kind == Kind.F) & (stage == p + d)].min()
        last = timeline.end[(kind == Kind.BW) & (stage == p + d)].max()
        here = timeline.device == d
        before, after = here & (timeline.end <= first), here & (timeline.start >= last)
        busy = [(timeline.end - timeline.start)[rows].sum() for rows in (before, after)]
        assert first - timeline.start[here].min() - busy[0] == idle_before_deep(p, 2 * p * F)
        assert timeline.end[here].max() - last - busy[1] == idle_before_shallow(p, 2 * p * BW)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: bubble_share(4, 1, 0.1), "devices = 4, microbatches = 1, chunks = 2: section 4.1 is for 2 or more"),
        (lambda: bubble_share(4, 8, 0.1, chunks=3), "chunks = 3: section 4.1 is"),
        (lambda: fits_in_bubbles(on_host(2, 4, 1, 1, 1, v=3)), "Eq. 5 and 7 are for 2 a device; here are 6 on 2"),
        (lambda: overlap(generate("chronos", units(2, 4, v=2))), "programs: no optimizer runs on the host"),
    ],
)
def test_what_the_formulas_do_not_cover_is_refused(ask, message):
    with pytest.raises(InputError, match=message):
        ask()


@pytest.mark.parametrize(("p", "v"), [*((p, v) for p in (2, 4, 5, 8) for v in (1, 2)), (4, 3), (8, 3), (5, 4), (8, 4)])
@pytest.mark.parametrize("c", [1 / 64, 1 / 4])
def test_messages_that_block_nobody_take_less(p, v, c):
    """The way there and back of the first micro-batch, and less than 2v for each further one: v times what 1F1B
    needs."""
    for m in (1, 2, 3, 9, 24):
        schedule = generate("chronos" if v > 1 else "1f1b", units(p, m, v=v).replace(p2p_ms=c))
        messages = (schedule.makespan_ms - 3 * v * (m + p - 1)) / c
        asked = 2 * v * p - 2 + 2 * (v * (p - 1) * (m - 1) // p)
        assert messages == pytest.approx(asked) if v < 3 else asked - 2 <= messages <= asked
        if v == 2 and m > 1:
            assert schedule.makespan_ms <= units_with_messages(p, m, c)


@pytest.mark.parametrize("p", [3, 9, 15])
def test_where_chunk_2_follows_at_once_messages_take_longer_but_not_longer_than_published(p):
    for m in (2, 3, 20):
        schedule = generate("chronos", units(p, m, v=2).replace(p2p_ms=1 / 64))
        freely = 6 * (m + p - 1) + (4 * p - 2 + 2 * (2 * (p - 1) * (m - 1) // p)) / 64
        assert freely <= schedule.makespan_ms <= units_with_messages(p, m, 1 / 64)
    assert schedule.makespan_ms > freely


def rounds_later(p: int) -> int:
    """Appendix A, Eq. 8: the least k."""
    interval = 3 + 6 * ceil(Fraction(p - 3, 6)) - p
    shorter = ceil(Fraction(p - 1, 2)) - ceil(Fraction(p - 3, 6)) - 1
    return next(k for k in range(p) if interval - shorter + 7 * k >= 0)


@pytest.mark.parametrize("p", [*range(1, 12), 16, 20])
def test_chronos_recomp_is_as_long_as_the_paper_says_or_shorter(p):
    """Shorter by the time that chunk 1's first backward waits for its beat, and one."""
    waits = 4 + 7 * ceil(Fraction(2 * p - 4, 7)) - 2 * p
    for m in (1, 2, 5, 2 * p, 2 * p + 7):
        problem = units(p, m, v=2, **AGAIN)
        schedule = generate("chronos-recomp", problem)
        assert check(problem, schedule) == []
        asked = 6 * p + 7 * (m - 1) + (p == 1)  # a single device has nothing to wait for while it recomputes
        assert asked - 7 <= schedule.makespan_ms <= asked
        if m == 1 or (waits == 0 and m >= 2 * p):
            assert schedule.makespan_ms == asked
        elif p > 13 and m >= 2 * p:
            assert schedule.makespan_ms == asked - waits - 1


@pytest.mark.parametrize("p", [*range(1, 14), 32])
def test_chronos_recomp_holds_a_quarter_and_what_it_recomputes(p):
    schedule = generate("chronos-recomp", units(p, 2 * p, v=2, **AGAIN))
    assert peaks(schedule) == [(p - s) // 2 + 1 for s in range(p)]
    chunk_2 = [
        stage.model_copy(update={} if s >= p else {"activation_bytes": 0})
        for s, stage in enumerate(schedule.problem.stages)
    ]
    alone = Schedule(schedule.problem.replace(stages=chunk_2), schedule.programs)
    assert peaks(alone) == [ceil(Fraction(p - s, 2)) for s in range(p)]


@pytest.mark.parametrize("c", [0, 1 / 8, 1 / 4, 1 / 2, 3 / 4])
@pytest.mark.parametrize("p", [*range(1, 12), 16, 20])
def test_what_is_recomputed_in_part_takes_shorter_beats(p, c):
    """Section 4.2: partial recomputation by a shorter interval. A further micro-batch takes 6 + c units, and no device
    holds more than where all is recomputed."""
    levels = [{"name": str(ms), "recompute_ms": float(ms), "checkpoint_bytes": 0} for ms in (1, c)]
    problem = units(p, 2 * p + 3, v=2, levels=levels)
    schedule = generate("chronos-recomp:level=1", problem)
    assert check(problem, schedule) == []
    assert [op.part for op in schedule.programs[0].ops() if op.kind is Kind.C] == [1] * problem.microbatches
    asked = 6 * p + (6 + c) * (problem.microbatches - 1)
    assert asked - 7 <= schedule.makespan_ms <= asked + c * (p < 3)
    longer = generate("chronos-recomp:level=1", problem.replace(microbatches=2 * p + 4))
    assert longer.makespan_ms - schedule.makespan_ms == 6 + c
    in_full_order = generate("chronos-recomp", problem).with_tables(lambda table: at_level(table, 1))
    assert schedule.makespan_ms <= in_full_order.makespan_ms + c * (p < 3)
    assert peaks(schedule) == [(p - s) // 2 + 1 for s in range(p)]


def at_level(table: Any, level: int) -> Any:
    return np.where((table[:, KIND] == Kind.C)[:, None] & (np.arange(table.shape[1]) == PART), level, table)


@pytest.mark.parametrize(("p", "c", "less"), [(16, 0, 50), (16, 1 / 2, 28), (8, 1 / 4, 3.25), (5, 1 / 4, 5.25)])
def test_the_order_of_a_shorter_level_is_shorter(p, c, less):
    """Than the order for a full recomputation, where chunks wait a round longer."""
    short, full = (units(p, 3 * p + 5, v=2, recompute=(ms, 0)) for ms in (c, 1.0))
    schedules = generate("chronos-recomp", full).on(short), generate("chronos-recomp", short)
    assert schedules[0].makespan_ms - schedules[1].makespan_ms == less


@pytest.mark.parametrize("p", [3, 4, 7, 8, 10, 12, 16, 27, 36])
def test_chunk_2_is_delayed_by_the_rounds_of_equation_8(p):
    schedule = generate("chronos-recomp", units(p, 2 * p, v=2, **AGAIN))
    assert ran_before(schedule, 0, Kind.F, chunk=0, other=1) == 1 + ceil(Fraction(p - 3, 6)) + rounds_later(p)


def test_the_papers_measurements_are_these_counts():
    """Figure 9: 17.23 and 6.63 GB of activations where 1F1B with R = 50 % has 10.6, p = 8. Section 6.2: 12.5 % and 25 %
    less at p = 4. Figure 15: 43.75 % at p = v = 4 with a quarter of the layers recomputed, the one that is recomputed
    not counted."""
    at_8 = {name: peaks(generate(name, units(8, 16, v=2, **AGAIN)))[0] for name in ("chronos", "chronos-recomp")}
    assert at_8 == {
        "chronos": pytest.approx(8 * 17.23 / 10.6, rel=1e-3),
        "chronos-recomp": pytest.approx(8 * 6.63 / 10.6, rel=1e-3),
    }
    at_4 = [peaks(generate(name, units(4, 8, v=2, **AGAIN)))[0] for name in ("chronos", "chronos-recomp")]
    assert at_4 == [0.875 * 8, 0.75 * 4]
    assert (peaks(generate("chronos-recomp", units(4, 8, v=4, **AGAIN)))[0] - 1) / 16 == 0.4375


@pytest.mark.parametrize(("v", "g"), [*product([2, 3], [1, 2, 3, 4, 8])])
def test_groups_take_at_most_as_long_and_hold_whole_groups_more(v, g):
    """How much shorter it is, the last group's size says."""
    for p in (1, 2, 3, 4, 5, 8):
        for m in (1, 7, 18, 24, 25):
            problem = units(p, m, v=v)
            schedule = generate(f"chronos-zero2:group={g}", problem)
            assert check(problem, schedule) == []
            shorter, last = 3 * v * (m + p - 1) - schedule.makespan_ms, (m - 1) % g + 1
            assert 0 <= shorter <= 3 * (v - 1) * (min(last, p) - 1)
            if p % g == 0 or (g >= p and m % g == 0):
                assert shorter == 3 * (v - 1) * (min(last, p) - 1)
        schedule = generate(f"chronos-zero2:group={g}", units(p, 4 * p + 4 * v * g, v=v))
        assert peaks(schedule) == [most_held(p, v, g) - s for s in range(p)]


@pytest.mark.parametrize(("v", "g"), [*product([2, 3], [1, 2, 3, 4])])
def test_each_launch_is_a_whole_group_and_its_window_that_of_the_other_chunks(v, g):
    p, m = 4, 24 * g
    schedule = generate(f"chronos-zero2:group={g}", units(p, m, v=v))
    windows = gradient_windows(schedule)
    for s, found in enumerate(windows):
        full = 3 * (v - 1) * g + 1
        assert max(found) == full
        assert found.count(full) >= 0.7 * len(found)
        ops = [op for op in schedule.programs[s % p].ops() if op.kind is Kind.BW]
        launches = [len(list(run)) for stage, run in groupby(ops, key=lambda op: op.stage) if stage == s]
        assert len(launches) == len(found) + 1
        assert set(launches) <= {g, 2 * g}  # two in a row before the next chunk's turn comes, and behind its last


# --- Chronos-Offload
# ----------------------------------------------------------------------------------------------------------------------

F, BW = 1, 2  # units of a chunk


def on_host(p: int, m: int, out: float, update: float, back: float, v: int = 2) -> Problem:
    return units(p, m, v=v, update=(out, update, back))


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 4, 13])
def test_an_iteration_is_longer_by_what_does_not_hide(p, m):
    for back, step in product((0.5, p * F, p * F + 1.5, 3 * p), (0.5, p * BW, p * BW + 2, 5 * p)):
        problem = on_host(p, m, step / 4, 3 * step / 4, back)
        schedule, plain = generate("chronos-offload", problem), generate("chronos", problem)
        assert check(problem, schedule) == []
        grown = max(0.0, back - p * F) + max(0.0, step - p * BW)
        assert schedule.makespan_ms == pytest.approx(plain.makespan_ms + grown)
        assert overlap(schedule) == pytest.approx(1 - grown / (back + step))
        assert peaks(schedule) == peaks(plain)


@pytest.mark.parametrize("p", [3, 4, 7, 8, 16])
def test_where_equations_5_and_7_hold_all_of_it_hides(p):
    step, back = idle_before_shallow(p, 2 * p * BW), idle_before_deep(p, 2 * p * F)
    problem = on_host(p, 2 * p, step / 2, step / 2, back)
    assert fits_in_bubbles(problem)
    assert overlap(generate("chronos-offload", problem)) == 1.0
    assert not fits_in_bubbles(on_host(p, 2 * p, step / 2, step / 2 + 0.01, back))
    assert not fits_in_bubbles(on_host(p, 2 * p, step / 2, step / 2, back + 0.01))


def test_programs_as_in_the_figure():
    schedule = generate("chronos-offload", on_host(2, 1, 1, 1, 1))
    assert [program.texts() for program in schedule.programs] == [
        ["2P0", "0F0", "2F0", "2BW0", "2G0", "2U0", "0BW0"],
        ["3P0", "1F0", "3F0", "3BW0", "3G0", "3U0", "1BW0"],
    ]


@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("k", [1 / 2, 3 / 2, 3])
def test_activations_leave_beside_host_optimizers(p, v, k):
    """Section 5.2: compatible with activation offload. A copy of k forwards and one back of as many make nothing wait,
    nor do the optimizers. On a fast link all but the activation in use and one on its way is on the host; where one
    chunk leaves, it is chunk 1, and chunk 2 holds what the paper says."""
    problem = units(p, 4 * p, v=v, offload=(k, k, ACTIVATION), update=(1, 1, 1))
    plain = generate("chronos", problem)
    for leaving in range(1, v + 1):
        alone, both = (generate(f"{name}:leaving={leaving}", problem) for name in ("chronos", "chronos-offload"))
        for schedule in (alone, both):
            assert check(problem, schedule) == []
            assert schedule.makespan_ms == plain.makespan_ms
            assert without_transfers(schedule) == plain.programs
        assert overlap(both) == 1.0
        assert peaks(both) == peaks(alone) <= peaks(plain)
        if (v, k) == (2, 1 / 2):
            assert max(peaks(both)) == (2 if leaving == v else 1 + ceil(Fraction(3 * p - 2, 6)))


def without_transfers(schedule: Schedule) -> tuple[Program, ...]:
    return tuple(Program(program.table[of_kinds(program.table, *COMPUTE)]) for program in schedule.programs)


@pytest.mark.parametrize("method", ["1f1b", "adaoffload"])
def test_what_a_search_finds_takes_host_optimizers(method):
    """The list scheduler places G, U and P in it: valid, and as long as what does not hide makes it."""
    problem = with_budgets(units(4, 8, offload=(1, 1, ACTIVATION), update=(1, 2, 1)), 3 * ACTIVATION)
    if method == "1f1b":
        problem = with_budgets(problem, 4 * ACTIVATION)
    schedule = generate(method, problem) if method == "1f1b" else heuristics.generate(method, problem)
    placed = with_host_updates(schedule)
    assert check(problem, placed) == []
    # The first stage's parameters are used at once, and its gradients are the last.
    assert placed.makespan_ms == pytest.approx(schedule.makespan_ms + 1 + 1 + 2)
    assert without_transfers(placed) == without_transfers(schedule)
