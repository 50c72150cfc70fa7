"""What `check` accepts can run and fits; whatever is broken it finds and says in words. Texts of ops read back."""

import tracemalloc
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.problems import pipeline, stage
from support.problems.strategies import problems_with_schedules

from optpipe import InputError, Kind, Op, Pair, Problem, Program, Schedule, ScheduleFile, certify, check, simulate
from optpipe.model.ops import MARKS, parse_item


def rebuilt(problem: Problem, programs: list[list[Op | Pair]], schedule: Schedule) -> Schedule:
    return Schedule(problem, tuple(map(Program.from_items, programs)), schedule.links)


@given(problems_with_schedules(beyond=True))
def test_a_schedule_that_check_accepts_runs_and_fits_and_its_file_reads_back(pair):
    problem, schedule = pair
    assert check(problem, schedule) == []
    assert simulate(problem, schedule).makespan_ms >= 0
    assert certify(problem, schedule).fits
    file = ScheduleFile.from_schedule(schedule)
    again = ScheduleFile.from_json(file.to_json())
    assert again == file
    assert again.schedule() == schedule
    assert again.schedule().makespan_ms == file.makespan_ms
    assert len(file.ops) == sum(op.kind not in MARKS for program in schedule.programs for op in program.ops())


DEPENDENT = {  # by kind of op what waits for it
    Kind.F: {Kind.B, Kind.BW, Kind.O, Kind.C, Kind.E},
    Kind.B: {Kind.W},
    Kind.O: {Kind.D},
    Kind.D: {Kind.R, Kind.L},
    Kind.R: {Kind.B, Kind.BW},
    Kind.C: {Kind.B, Kind.BW},
    Kind.E: {Kind.D},
    Kind.L: {Kind.B, Kind.BW},
    Kind.A: {Kind.V},
    Kind.G: {Kind.U},
}


@given(problems_with_schedules(beyond=True), st.randoms(use_true_random=True))
def test_swapping_two_dependent_ops_is_caught(pair, random: Random):
    problem, schedule = pair
    programs = [list(program) for program in schedule.programs]
    candidates = [
        (d, a, b)
        for d, program in enumerate(programs)
        for a, first in enumerate(program)
        for b, second in enumerate(program)
        if isinstance(first, Op) and isinstance(second, Op) and second.kind in DEPENDENT.get(first.kind, ())
        if first[1:3] == second[1:3]
        and (first.part == second.part or not {Kind.F, Kind.B, Kind.BW}.isdisjoint({first.kind, second.kind}))
    ]
    assume(candidates)
    d, a, b = random.choice(candidates)
    programs[d][a], programs[d][b] = programs[d][b], programs[d][a]
    assert check(problem, rebuilt(problem, programs, schedule))


@given(problems_with_schedules(beyond=True), st.randoms(use_true_random=True))
def test_removing_or_doubling_an_op_is_caught(pair, random: Random):
    problem, schedule = pair
    for change in ("remove", "double"):
        programs = [list(program) for program in schedule.programs]
        d = random.choice([d for d, program in enumerate(programs) if program])
        i = random.randrange(len(programs[d]))
        if change == "remove" and isinstance(programs[d][i], Op) and programs[d][i].kind is Kind.C:
            continue  # valid: without a recompute the forward keeps all it saved
        if change == "remove":
            del programs[d][i]
        else:
            programs[d].insert(random.randrange(len(programs[d]) + 1), programs[d][i])
        assert check(problem, rebuilt(problem, programs, schedule))


@given(problems_with_schedules(beyond=True))
def test_less_memory_than_certified_is_caught(pair):
    problem, schedule = pair
    certificate = certify(problem, schedule)
    d = max(range(len(problem.devices)), key=lambda d: certificate.device[d].bytes)
    assume(certificate.device[d].bytes > 0)
    for spare, fits in ((0, True), (-1, False)):
        devices = list(problem.devices)
        devices[d] = devices[d].model_copy(update={"activation_budget_bytes": certificate.device[d].bytes + spare})
        tight = problem.replace(devices=devices)
        assert (check(tight, schedule) == []) is fits


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("0F0 0BW0", "0F1 is missing"),
        ("0F0 0F1 0BW0", "stage 0, micro-batch 1 has no backward"),
        ("0F0 0F1 0BW0 0B1", "0B1 has no 0W1"),
        ("0F0 0F1 0BW0 0BW1 0W1", "0W1 has no 0B1"),
        ("0F0 0F1 0BW0 0BW1 0B1 0W1", "either split or fused"),
        ("0F0 0F1 0BW0 0BW1 0BW1", "0BW1 stands 2 times"),
        ("0F0 0O0 0F1 0R0 0BW0 0BW1", "0O0 has no 0D0: its device copy is never let go"),
        ("0F0 0D0 0F1 0BW0 0BW1", "0D0 has no 0O0 or 0E0: nothing has left"),
        ("0F0 0F1 0O0 0D0 0R0 0C0 0BW0 0BW1", "offloaded or recomputed, not both"),
        ("0F0 0F1+0BW0 0BW1", ""),
        ("0F0+0BW0 0F1 0BW1", "another micro-batch"),
        ("0F0+0F1 0BW0 0BW1", "only a forward and a backward"),
    ],
)
def test_by_hand(program, message):
    costs = stage(sizes=(10, 5), offload=(1, 1, 10), recompute=(1, 1))
    problem = pipeline(1, 2, 100, costs, overlap_factor=0.9)
    wrong = check(problem, Schedule.parse(problem, [program.split()]))
    assert any(message in text for text in wrong) if message else wrong == []


def test_a_missing_program_is_reported():
    problem = pipeline(2, 1, 1, [stage(sizes=(1, 1))])
    complaints = check(problem, Schedule.parse(problem, [["0F0", "0BW0"]]))
    assert complaints == ["there are 1 programs: the problem has 2 devices"]


def test_an_empty_schedule_takes_little_memory_however_many_parts_there_could_be():
    """A table of 16,777,216 parts for each of the 15 kinds would take 2 GB."""
    parted = stage(sizes=(64, 1), offload=(1, 1, 64), offload_parts=64, device=0)
    posed = pipeline(1, 4096, 2**40, [parted] * 64)
    tracemalloc.start()
    try:
        assert "0F0 is missing" in check(posed, Schedule.parse(posed, [[]]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 * 2**20


numbers = st.integers(0, 10**9 - 1)
compute = st.builds(Op, st.sampled_from([Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C]), numbers, numbers, st.just(0))
PARTED = [Kind.O, Kind.D, Kind.R]
parted = st.builds(Op, st.sampled_from(PARTED), numbers, numbers, st.integers(0, 63))
whole = st.builds(Op, st.sampled_from([kind for kind in Kind if kind not in PARTED]), numbers, numbers, st.just(0))
items = st.one_of(whole, parted, st.builds(Pair, compute, compute))


@given(st.lists(items, max_size=30))
def test_a_program_reads_back_what_it_prints(listed):
    program = Program.from_items(listed)
    assert Program.parse(program.texts()) == program
    assert list(program) == listed
    assert program.texts() == [str(item) for item in listed]
    assert [parse_item(str(item)) for item in listed] == listed


WRONG = "F0|0F|0X0|00F1|0F01|-1F0|0F3.1|0E3.1|0f3|0F3 |0F3+|0F3+0B1+0F2|0O1.|٣F0|0F1 0F2"


@pytest.mark.parametrize("text", ["", *WRONG.split("|")])
def test_a_wrong_text_is_refused_and_quoted(text):
    with pytest.raises(InputError, match=r"op '|program entry"):
        Program.parse(["0F0", text])


def test_the_message_lists_the_kinds_and_part_0_may_be_written():
    kinds = "F, B, W, BW, C, O, D, R, E, L, A, V"
    with pytest.raises(InputError, match=rf"op '0X0': expected stage, kind \({kinds}.*\), micro-batch and"):
        Op.parse("0X0")
    assert Op.parse("0O3.0") == Op.parse("0O3") == Op(Kind.O, 0, 3, 0)
