"""PipeOffload: GIS and GIS-H by their formulas, PO-H and PO-F by theirs and with every sort of link; Algorithm 1."""

import re
from itertools import pairwise, product
from math import ceil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import with_budgets
from support.problems.strategies import looped
from support.problems.units import ACTIVATION, peaks, unevenly, units
from support.tables import table

from optpipe import InputError, Kind, Op, Problem, Schedule, check
from optpipe.model.program import of_kinds
from optpipe_solver import heuristics
from optpipe_solver.systems import generate
from optpipe_solver.systems.pipeoffload import fill, pipe_offload, staggered, uniform_block

DOCS = Path(__file__).parents[2] / "docs"
SYSTEMS = ("gis", "gis-h", "po-h", "po-f")


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (4, 6, 3), (1, 1, 0)])
def test_gis_has_the_published_peaks_and_bubble_for_every_group(d, v, times):
    f, b, w = times
    for g, rounds in product(range(ceil(d / 2), d + 1), (1, 3)):
        m = rounds * g
        problem = units(d, m, v=v, times=times)
        schedule = generate(f"gis:group={g}", problem)
        assert check(problem, schedule) == []
        assert max(peaks(schedule)) == peaks(schedule)[0] == min(m * v, g * (v - 1) + d)
        if d * max(f, b) <= g * (
            f + b + w
        ):  # a forward, and a backward, passes all devices while a group takes its turn
            extra = (v - 1) * ((d - g) * f + max(0, d * b - g * (b + w)))
            assert schedule.makespan_ms == m * v * (f + b + w) + (d - 1) * (f + b) + extra


@pytest.mark.parametrize("held", [ACTIVATION, 0])  # activations that count until W, and until B
@pytest.mark.parametrize(("d", "v"), [(2, 2), (4, 1), (4, 3), (6, 4), (8, 2)])
def test_gis_and_gis_h_are_those_of_table_1(d, v, held):
    m, (f, b, w) = 2 * d, (2, 3, 1)
    gis, gis_h = (generate(name, units(d, m, v=v, times=(f, b, w), held=held)) for name in ("gis", "gis-h"))
    work = m * v * (f + b + w)
    assert gis.makespan_ms - work == (d - 1) * (f + b)
    assert gis_h.makespan_ms - work == (d - 1) * (f + b) + (v - 1) * d / 2 * (f + b - w)
    assert peaks(gis)[0] == d * v  # M
    assert peaks(gis_h)[0] == d / 2 * (v - 1) + d  # (v + 1) / 2v of it


def test_gis_begins_with_the_published_number_of_forwards():
    d, v, m = 4, 3, 8
    for i, program in enumerate(generate("gis", units(d, m, v=v)).programs):
        texts = program.texts()
        assert next(n for n, text in enumerate(texts) if "B" in text) == d * (v - 1) + d - i
        assert texts[:5] == [f"{i}F0", f"{i}F1", f"{i}F2", f"{i}F3", f"{d + i}F0"]


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_the_last_group_may_be_smaller(data):
    d, v, m = (data.draw(st.integers(1, most)) for most in (9, 4, 20))
    g = data.draw(st.integers(ceil(d / 2), d))
    problem = units(d, m, v=v, times=data.draw(st.sampled_from([(1, 1, 1), (3, 1, 2), (1, 4, 0)])))
    schedule = generate(f"gis:group={g}", problem)
    assert check(problem, schedule) == []
    full = generate(f"gis:group={g}", problem.replace(microbatches=-(-m // g) * g))
    assert schedule.makespan_ms <= full.makespan_ms
    assert peaks(schedule)[0] <= peaks(full)[0] <= g * (v - 1) + d


def offloading(
    d: int, m: int, v: int = 1, k: float = 1.0, times: tuple[float, float, float] = (1, 1, 1), **costs: object
) -> Problem:
    """The paper's unit model with a link whose round trip takes k times F + B + W."""
    return units(d, m, v=v, times=times, offload=(k * sum(times) / 2, k * sum(times) / 2, ACTIVATION), **costs)


def fullest(schedule: Schedule) -> float:
    return max(peaks(schedule))


def transfers_ms(schedule: Schedule) -> list[float]:
    """How long each offload and reload lasts."""
    timeline = schedule.timeline
    return (timeline.end - timeline.start)[of_kinds(timeline.table, Kind.O, Kind.R)].tolist()


def fits(d: int, times: tuple[float, float, float]) -> bool:
    """Whether d forwards and d backwards, each in whole slots, fit in d slots."""
    f, b, _ = times
    return -(-d * f // sum(times)) - (-d * b // sum(times)) <= d


def bubble(schedule: Schedule) -> float:
    """In slots."""
    slot = sum(float(schedule.problem.costs.ms[kind, 0, 0]) for kind in (Kind.F, Kind.B, Kind.W))
    return schedule.makespan_ms / slot - schedule.problem.microbatches * len(schedule.problem.stages) / len(
        schedule.problem.devices
    )


@settings(max_examples=examples(120), deadline=None)
@given(
    st.integers(1, 11),
    st.integers(1, 9),
    st.integers(1, 25),
    st.sampled_from([0.2, 0.7, 1.0]),
    st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12)),
)
@example(2, 8, 5, 1.0, (3, 1, 1))
@example(3, 2, 6, 1.0, (2, 3, 1))
@example(3, 8, 6, 1.0, (2, 3, 1))
@example(3, 8, 6, 1.0, (10, 10, 1))
@example(5, 6, 8, 1.0, (10, 10, 1))
@example(2, 12, 5, 1.0, (1, 1, 1))
def test_po_h_and_po_f_hold_what_the_paper_says_where_k_is_at_most_1(d, v, m, k, times):
    problem = offloading(d, m, v, k, times)
    half, full = (generate(name, problem) for name in ("po-h", "po-f"))
    inside = fits(d, times)
    for schedule in (half, full):
        assert check(problem, schedule) == []
        assert bubble(schedule) <= v * d - 1 + 1e-6
        assert bubble(schedule) <= v * (d - 1) + 1e-6 or not inside or (d, v) == (3, 2)
    assert fullest(half) <= (v + 2) / 8 * d + (3.5 if inside else 3 + 3 / 8 * max(0, v - 2))
    assert fullest(full) <= 3


def test_where_the_bubble_is_the_bound():
    for v in (2, 5):
        for d in (2, 4, 6):
            assert bubble(generate("po-f", offloading(d, d + 3, v, times=(1, 1, 0)))) == v * (d - 1)
        assert bubble(generate("po-f", offloading(1, 4, v, times=(1, 1, 0)))) == v - 1


def staying(schedule: Schedule, first: int) -> int:
    """The most activations that a device holds of stages from this one on."""
    most = 0
    for program in schedule.programs:
        held = 0
        for op in program.ops():
            if op.stage >= first and op.kind in (Kind.F, Kind.W):
                held += 1 if op.kind is Kind.F else -1
            most = max(most, held)
    return most


@pytest.mark.parametrize("d", [8, 16, 32])
@pytest.mark.parametrize("v", [2, 4, 8])
def test_in_po_h_the_published_share_stays_and_few_are_in_use(d, v):
    """Table 1: d(v+2)/8 of d v; without offloads GIS-H's d(v+1)/2. Both have limits: large d, and for the share of the
    fullest device a link that is fast enough not to hold an activation for longer than an op."""
    assert fullest(pipe_offload(units(d, d + 8, v=v), 0)) == d * (v + 1) / 2
    for k, beside in ((0.1, (1, 2)), (2 / 3, (1, 2)), (1.0, (2, 3))):
        schedule = generate("po-h", offloading(d, d + 8, v, k))
        assert staying(schedule, d * v // 2) == d * (v + 2) / 8
        assert fullest(schedule) - d * (v + 2) / 8 in beside


@pytest.mark.parametrize(
    ("k", "of_page", "held"),
    [(1 / 9, "1/3", (8, 6, 5)), (1 / 3, "1/3", (8, 6, 5)), (2 / 3, "2/3", (9, 7, 5)), (1.0, "1", (11, 8, 6))],
)
def test_offloading_stage_0_of_2_saves_what_figure_2_says(k, of_page, held):
    """Of M = 16: half with interleaving, and three quarters with uniform repetition but for what is in use."""
    problem = offloading(8, 32, 2, k)
    schedules = [*(generate(f"{name}:leaving=1", problem) for name in ("gis", "gis-h")), pipe_offload(problem, 1)]
    assert fullest(generate("gis", problem)) == 16
    assert tuple(map(fullest, schedules)) == held
    assert [staying(schedule, 8) for schedule in schedules] == [8, 4, 4]
    page = (DOCS / "systems" / "pipeoffload.md").read_text()
    assert f"\n| {of_page} | {' | '.join(map(str, held))} |\n" in page


def test_figure_4():
    """Of the same six activations stage 0 counts three with interleaving, four with uniform repetition."""
    problem = offloading(3, 12, 2, 1 / 3)
    assert fullest(generate("gis", problem)) == 6
    assert 6 - staying(generate("gis:leaving=1", problem), 3) == 3 == 6 - fullest(generate("gis:leaving=1", problem))
    assert 6 - staying(pipe_offload(problem, 1), 3) == 4


def test_one_by_one_interleaved_stages_save_alike_and_uniform_ones_less_and_less():
    """Figure 9."""
    problem = offloading(8, 32, 4, 1 / 3)
    interleaved = [fullest(generate(f"gis-h:leaving={n}", problem)) for n in range(5)]
    assert interleaved == [20, 14, 10, 6, 2]
    assert [fullest(pipe_offload(problem, n)) for n in range(5)] == [20, 13, 8, 4, 2]


@settings(max_examples=examples(60), deadline=None)
@given(looped(), st.data())
def test_nothing_waits_for_what_leaves_an_interleaved_schedule(problem, data):
    v = len(problem.stages) // len(problem.devices)
    plain = generate("gis-h", problem)
    for leaving in range(1, v + 1):
        try:
            schedule = generate(f"gis-h:leaving={leaving}", problem)
        except InputError:
            assert not problem.costs.can_offload.any()
            continue
        assert check(problem, schedule) == []
        assert schedule.makespan_ms <= plain.makespan_ms + 1e-6
        gone = {op.stage for program in schedule.programs for op in program if op.kind is Kind.O}
        assert all(len(gone & set(problem.stages_on(d))) <= leaving for d in range(len(problem.devices)))


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_gis_takes_the_largest_group_that_fits(data):
    """Section 3.2; activations of different sizes."""
    d, v, m = (data.draw(st.integers(*sizes)) for sizes in ((1, 9), (1, 4), (1, 20)))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=v, max_size=v))
    ample = units(d, m, v=v)
    held = [{"activation_bytes": sizes[s // d], "saved_for_weight_bytes": sizes[s // d]} for s in range(d * v)]
    ample = ample.replace(
        stages=[stage.model_copy(update=bytes_) for stage, bytes_ in zip(ample.stages, held, strict=True)]
    )
    groups = range(ceil(d / 2), d + 1)
    needs = [max(peaks(generate(f"gis:group={g}", ample))) for g in groups]
    assert needs == sorted(needs)
    problem = with_budgets(ample, data.draw(st.integers(0, round(max(needs) * ACTIVATION) + 1)))
    fitting = [g for g in groups if check(problem, generate(f"gis:group={g}", problem)) == []]
    largest = generate(f"gis:group={max(fitting, default=groups[0])}", problem)
    assert generate("gis", problem).programs == largest.programs


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (4, 6, 3), (1, 1, 0)])
@pytest.mark.parametrize(("d", "m"), [(4, 8), (5, 8), (8, 16)])
def test_on_one_stage_a_device_po_f_is_1f1b_with_everything_offloaded(d, m, times):
    """Figure 14 (appendix A)."""
    problem = offloading(d, m, 1, times=times)
    plain, full = generate("1f1b", problem), generate("po-f", problem)
    for one, other in zip(plain.programs, full.programs, strict=True):
        compute = [op for op in other.ops() if op.kind in (Kind.F, Kind.B, Kind.W)]
        pairs = [(op.kind is Kind.F, op.microbatch) for op in compute if op.kind is not Kind.W]
        assert pairs == [(op.kind is Kind.F, op.microbatch) for op in one.ops()]
        assert [op.microbatch for op in compute if op.kind is Kind.W] == list(range(m))
    assert len(transfers_ms(full)) > 0
    assert fullest(full) <= 3


def test_what_lives_longest_leaves_first():
    able = offloading(4, 8, 3)
    stay = {"offload_ms": None, "reload_ms": None, "offload_bytes": None}
    stuck = able.replace(stages=[stage.model_copy(update=stay if s < 4 else {}) for s, stage in enumerate(able.stages)])
    gone, then = (
        {op.stage for program in generate("po-h", problem).programs for op in program if op.kind is Kind.O}
        for problem in (able, stuck)
    )
    assert gone == set(range(8))  # two of three stages a device, the first ones
    assert set(range(4, 8)) <= then <= set(range(4, 12))


def test_half_of_the_stages_offloaded_leaves_about_a_quarter():
    most = [fullest(pipe_offload(offloading(8, 8, 16, 0.2), leaving)) for leaving in range(17)]
    assert 0.2 < most[8] / most[0] < 0.3
    line = [most[0] + (most[-1] - most[0]) * n / 16 for n in range(17)]
    assert all(at < straight - 2 for at, straight in zip(most[1:-1], line[1:-1], strict=True) if straight > 6)
    saved = [a - b for a, b in pairwise(most)]
    assert all(a + 1 >= b for a, b in pairwise(saved))  # each stage saves less than the one before
    assert saved[0] > 4 * saved[-1] > 0


def test_the_page_tells_the_peaks():
    page = (DOCS / "systems" / "pipeoffload.md").read_text()
    for row in re.findall(r"^\| (\d) ((?:\| \d+(?:/\d+){3} )+)\|$", page, re.MULTILINE):
        for d, cell in zip((4, 8, 16, 32), row[1].strip("| ").split("|"), strict=True):
            problem = offloading(d, d + 2, int(row[0]))
            assert [f"{fullest(generate(name, problem)):g}" for name in SYSTEMS] == cell.strip().split("/")
    assert len(re.findall(r"(?:\d+/){3}3 \|", page)) == 16


@pytest.mark.parametrize("mode", ["half_duplex", "full_duplex"])
def test_devices_on_one_link_take_complementary_slots(mode):
    problem = offloading(4, 8, 2, 0.5)
    problem = problem.replace(
        devices=[{"activation_budget_bytes": 10**9, "link": f"pcie{d // 2}"} for d in range(4)], transfer_mode=mode
    )
    schedule = generate("po-f", problem)
    assert check(problem, schedule) == []
    own = generate("po-f", offloading(4, 8, 2, 0.5))
    assert fullest(schedule) <= fullest(own) + 1
    (first, there), (second, back) = staggered([(2, 3), (2, 3)], 10.0, 12.0, mode == "half_duplex")
    assert (first.first, second.first) == (10, 16)
    assert (back.first, there.first) == (13, 19)  # each reload ends where the next one's offload begins
    assert {slot.pitch for slot in (first, there, second, back)} == {12}


def test_slots_are_filled_from_both_ends():
    ((offloads, reloads),) = staggered([(1, 1)], 0.0, 2.0, half_duplex=True)
    stays = [(0.0, 12.0), (0.5, 12.0), (1.0, 14.0), (5.0, 14.0), (6.0, 10.0)]  # the last one has no time for both
    assert fill(offloads, reloads, stays, patience=4.0, away=2.0) == [(0, 7), (2, 9), (4, 11), (6, 13), None]
    ((offloads, reloads),) = staggered([(1, 1)], 0.0, 2.0, half_duplex=True)
    assert fill(offloads, reloads, [(0.0, 99.0)] * 4, patience=4.0, away=2.0) == [(0, 93), (2, 95), (4, 97), None]


@pytest.mark.parametrize("v", [1, 2, 3])
def test_on_a_slow_link_what_finds_no_slot_stays(v):
    shares, most = [], []
    for k in (1.0, 1.25, 2.0, 3.0, 40.0):
        schedule = generate("po-f", offloading(8, 24, v, k))
        assert check(schedule.problem, schedule) == []
        shares.append(len(transfers_ms(schedule)) / (2 * 8 * 24 * v))
        most.append(fullest(schedule))
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0.0  # nobody lives for so long
    assert v == 1 or all(share > 0.8 / k for share, k in zip(shares, (1.0, 1.25, 2.0, 3.0), strict=False))
    assert max(most[:3]) < most[-1] == fullest(generate("po-f", units(8, 24, v=v)))


def test_parts_leave_one_by_one():
    whole, parts = (generate("po-f", offloading(8, 16, 2, 1.5, offload_parts=n)) for n in (1, 3))
    assert check(parts.problem, parts) == []
    assert fullest(parts) < fullest(whole)
    assert {round(ms, 6) for ms in transfers_ms(parts)} == {1.5 * 3 / 2 / 3}


@settings(max_examples=examples(60), deadline=None)
@given(looped())
def test_any_stages_have_a_schedule_and_transfers_delay_nothing_beyond_the_block(problem):
    for name in SYSTEMS:
        schedule = generate(name, problem)
        assert check(problem, schedule) == []
        if name.startswith("po"):
            block, slot_ms = uniform_block(problem)
            v = len(problem.stages) // len(problem.devices)
            launched = (problem.microbatches - 1) * v * slot_ms
            end = max(block.weight or []) + float(problem.costs.ms[Kind.W].max()) + launched
            assert schedule.makespan_ms <= end + 1e-6


@pytest.mark.parametrize(
    ("tolerance", "expected"),
    [
        # By hand, F = B = W = 1 and offloads of 0.5: EstStart(B_{s,0}) is 7, 6, 5, 4. A stage's forwards start every
        # 1.5, as each waits for the offload before it, and the m-th is refused when 1.5 m + 0.5 + s >= EstStart + T.
        (0, [5, 3, 2, 1]),
        (1, [5, 4, 3, 1]),
        (3, [7, 5, 4, 3]),
        (100, [9, 9, 9, 9]),
    ],
)
def test_steps_1_and_2_of_algorithm_1_by_hand(tolerance: int, expected: list[int]) -> None:
    assert fills(generate(f"algorithm-1:tolerance={tolerance}", offloading(4, 9, k=1 / 3))) == expected


def fills(schedule: Schedule) -> list[int]:
    """The forwards of each device before its first backward."""
    kinds = ([op.kind for op in program.ops() if op.kind in (Kind.F, Kind.B)] for program in schedule.programs)
    return [each.index(Kind.B) for each in kinds]


def printed_fills(problem: Problem, tolerance: float) -> list[int]:
    """Lines 13 to 22, one forward after the other until line 17 breaks; no stage fills further than the one before."""
    stages, message, counts = problem.stages, problem.p2p_ms, list[int]()
    there = sum(stage.forward_ms for stage in stages) + (len(stages) - 1) * message
    arrived = [0.0] * problem.microbatches
    for s, stage in enumerate(stages):
        start = there + sum(message + after.backward_input_ms for after in stages[s + 1 :])
        completed, left = [0.0], 0.0
        for j, at in enumerate(arrived):
            if j and max(completed[-1], left + stage.offload_ms) >= start + tolerance:
                break
            completed.append(max(completed[-1], left, at) + stage.forward_ms)
            left = completed[-1] + stage.offload_ms
        arrived = [end + message for end in completed[1:]]
        counts.append(len(arrived))
    return counts


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_algorithm_1_is_no_worse_without_a_tolerance_than_with_0(data: st.DataObject) -> None:
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    problem = unevenly(data.draw, offloading(p, m, k=data.draw(st.sampled_from([0.0, 1 / 3, 1.0, 2.0]))))
    searched, usual = generate("algorithm-1", problem), generate("algorithm-1:tolerance=0", problem)
    assert check(problem, searched) == []
    assert searched.makespan_ms <= usual.makespan_ms


def test_algorithm_1_finds_the_best_tolerance_of_figure_4() -> None:
    problem = Problem.load(DOCS.parent / "examples" / "problems" / "figure4-4x6.json")
    each = [generate(f"algorithm-1:tolerance={T}", problem).makespan_ms for T in range(100)]
    assert generate("algorithm-1", problem).makespan_ms == min(each) == generate("po-f", problem, "all").makespan_ms
    assert (min(each), max(each)) == (24, each[0]) == (24, 34)


def test_the_page_has_what_algorithm_1_takes() -> None:
    rows = table("systems/pipeoffload.md", "problem")
    assert len(rows) == 2
    for name, *shown in rows:
        problem = Problem.load(DOCS.parent / "examples" / "problems" / f"{name}.json")
        schedules = [generate(each, problem, "all") for each in ("algorithm-1:tolerance=0", "algorithm-1", "po-f")]
        schedules.append(heuristics.generate("adaoffload", problem))
        assert shown == [f"{schedule.makespan_ms:g}" for schedule in schedules]


def test_a_tolerance_whose_schedule_fits_comes_before_a_shorter_one_that_does_not() -> None:
    problem = offloading(2, 12, k=1.0)
    short, long = generate("algorithm-1", problem), generate("algorithm-1:tolerance=0", problem)
    assert short.makespan_ms < long.makespan_ms
    assert fullest(long) < fullest(short)
    tight = with_budgets(problem, int(fullest(long) * ACTIVATION))
    assert check(tight, generate("algorithm-1", tight)) == []


def test_algorithm_1_says_that_it_orders_no_shared_link() -> None:
    problem = Problem.load(DOCS.parent / "examples" / "problems" / "shared-pcie-4x8.json")
    with pytest.raises(
        InputError, match=r"^algorithm-1 does not order the transfers of a shared link: links\['pcie0'\]"
    ):
        generate("algorithm-1", problem)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_algorithm_1_runs_whatever_the_times_and_the_tolerance(data: st.DataObject) -> None:
    p, m, T = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 20))
    problem = unevenly(data.draw, offloading(p, m, k=data.draw(st.sampled_from([0.0, 1 / 3, 2.0]))))
    schedule = generate(f"algorithm-1:tolerance={T}", problem)
    assert check(problem, schedule) == []
    assert fullest(schedule) <= 4
    assert fills(schedule) == printed_fills(problem, T)
    timeline = schedule.timeline
    at = {timeline.rows.op(row): row for row in range(len(timeline.rows))}
    for s, count in enumerate(fills(schedule)):
        for j, after in pairwise(range(count)):  # line 18
            offload = Op(Kind.O, s, j)
            if offload in at:
                assert timeline.start[at[Op(Kind.F, s, after)]] >= timeline.end[at[offload]] - 1e-9


def test_where_nothing_can_leave_algorithm_1_is_1f1b_with_a_longer_warm_up() -> None:
    problem = units(4, 9)
    assert fills(generate("algorithm-1:tolerance=0", problem)) == [7, 5, 3, 1]
    assert not [
        op for program in generate("algorithm-1", problem).programs for op in program.ops() if op.kind == Kind.O
    ]
