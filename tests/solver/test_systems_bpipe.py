"""BPipe: 1F1B's time on balanced memory, for any number of stages and micro-batches."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.oracles.enumeration import Rules, merged
from support.problems.units import paired, peaks, units

from optpipe import Kind, Op, Program, Schedule, check
from optpipe.errors import ScheduleError
from optpipe.model.arrays import Floats
from optpipe_solver.systems import generate

times = st.integers(1, 4)


def moves(schedule: Schedule, kind: Kind) -> list[Op]:
    return [op for program in schedule.programs for op in program.ops() if op.kind is kind]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize(("times", "transfer"), [((1, 1, 1), 0.5), ((2, 1, 2), 0.25), ((1, 2, 3), 0.0)])
def test_all_devices_hold_the_published_number_of_activations_in_1f1bs_time(p, rounds, times, transfer):
    limit = ceil((p + 2) / 2)
    for m in {p, 2 * p + 1, rounds * p, 3 * p - 1}:
        problem = paired(units(p, m, times=times), transfer, transfer)
        schedule, plain = generate("bpipe", problem), generate("1f1b", problem)
        assert check(problem, schedule) == []
        assert schedule.makespan_ms == plain.makespan_ms == (m + p - 1) * sum(times)
        held = peaks(schedule)
        assert max(held) <= limit
        evictors = [s for s in range(p) if p - s > limit]
        assert all(
            held[s] == limit and p - limit <= held[p - 1 - s] - 1 for s in evictors
        )  # all p + 1 of the pair are somewhere
        assert [held[s] for s in range(p) if s not in evictors and p - 1 - s not in evictors] == list(range(p, 0, -1))[
            len(evictors) : p - len(evictors)
        ]
        if p > 3 and m >= 2 * p:
            assert (held[0], held[p - 1]) == (limit, limit - p % 2)  # without, 1F1B holds p and 1


@pytest.mark.parametrize("p", [4, 7, 8])
@pytest.mark.parametrize("m", [1, 3, 5, 6, 7])
def test_few_micro_batches_hold_no_more_than_1f1b(p, m):
    problem = paired(units(p, m), 0.5, 0.5)
    schedule, plain = generate("bpipe", problem), generate("1f1b", problem)
    assert check(problem, schedule) == []
    assert peaks(schedule)[: (p + 1) // 2] == [min(held, ceil((p + 2) / 2)) for held in peaks(plain)[: (p + 1) // 2]]
    assert max(peaks(schedule)) <= ceil((p + 2) / 2)
    assert bool(moves(schedule, Kind.E)) == (m > ceil((p + 2) / 2))


def test_no_more_leaves_than_has_to():
    """Of the eight activations that stage 0 of eight has under way, three have to be away, each for twelve ops at
    most."""
    problem = paired(units(8, 512), 0.5, 0.5)
    evicted = [op for op in moves(generate("bpipe", problem), Kind.E) if op.stage == 0]
    assert len(evicted) <= 512 / 2
    assert len(evicted) == len({op.microbatch for op in evicted})


@pytest.mark.parametrize("times", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1e12, 1e-9, 0)])
@pytest.mark.parametrize("transfer", [0.0, 0.5])
def test_ops_that_take_no_time_do_not_wait_in_a_circle(times, transfer):
    """Where all happens at one time the clock does not tell what waits for what."""
    for p, m in ((4, 12), (5, 9), (8, 20)):
        problem = paired(units(p, m, times=times), transfer, transfer)
        assert check(problem, generate("bpipe", problem)) == []


def test_the_papers_example():
    """Figure of section "Solution": four stages; stage 0 would hold four activations and stage 3 one. Stage 0 holds
    three."""
    schedule = generate("bpipe", paired(units(4, 8), 0.5, 0.5))
    assert {op.stage for op in moves(schedule, Kind.E)} == {0}
    assert peaks(schedule) == [3, 3, 2, 3]
    first = schedule.programs[0].texts()
    assert first[:12] == ["0F0", "0F1", "0E1", "0F2", "0D1", "0F3", "0E3", "0BW0", "0D3", "0L1", "0F4", "0BW1"]


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(4, 5), st.lists(st.tuples(times, times), min_size=4, max_size=4), times, st.sampled_from((0, 1, 3)))
def test_the_acceptor_offers_as_few_rooms_as_the_order_and_times_need(m, costs, transfer, p2p_ms):
    """No other places of A and V in its program need less memory and keep the start of each compute op."""
    row = units(4, m).replace(p2p_ms=float(p2p_ms))
    stages = [
        stage.model_copy(update={"forward_ms": float(f), "backward_input_ms": float(b)})
        for stage, (f, b) in zip(row.stages, costs, strict=True)
    ]
    schedule = generate("bpipe", paired(row.replace(stages=stages), transfer / 4, transfer / 4))
    own = [op for op in schedule.programs[3].ops() if op.stage == 3]
    rooms = [(op, op._replace(kind=Kind.V)) for op in moves(schedule, Kind.A)]

    def with_program(ops: Iterable[Op]) -> Schedule:
        return replace(schedule, programs=(*schedule.programs[:3], Program.from_items(ops)))

    free = starts(with_program([*(a for a, _ in rooms), *own, *(v for _, v in rooms)]))
    kinds = {Kind.F: (1, 0), Kind.A: (1, 0), Kind.BW: (0, 1), Kind.V: (0, 1)}
    takes, frees = ({op: (kinds[op.kind][n], 0) for op in (*own, *chain(*rooms))} for n in range(2))
    fewer = merged([tuple(own), *rooms], Rules(takes, frees, lambda _last, _op: True), (peaks(schedule)[3] - 1, 0))
    for ops in islice(fewer, 1_000):
        with suppress(ScheduleError):  # a deadlock
            assert (starts(with_program(ops)) > free + 1e-9).any()


def starts(schedule: Schedule) -> Floats:
    """When each compute op starts."""
    timeline = schedule.timeline
    return timeline.start[timeline.rows.of_kinds(Kind.F, Kind.BW)]


def test_two_rooms_do_where_the_last_stage_has_time():
    """The paper's figure has one for its own activation and one for what is evicted."""
    row = units(4, 8)
    quick = row.stages[3].model_copy(update={"backward_input_ms": 0.25})
    schedule = generate("bpipe", paired(row.replace(stages=[*row.stages[:3], quick], p2p_ms=1.0), 0.25, 0.25))
    assert peaks(schedule) == [3, 3, 2, 2]


def test_any_order_of_devices_will_do():
    turned = [2, 0, 3, 1]
    row = units(4, 6)
    problem = paired(
        row.replace(stages=[stage.model_copy(update={"device": turned[s]}) for s, stage in enumerate(row.stages)]),
        0.5,
        0.5,
    )
    schedule = generate("bpipe", problem)
    assert check(problem, schedule) == []
    assert [op.kind.name for op in schedule.programs[1].ops() if op.kind in (Kind.A, Kind.V)][:2] == ["A", "A"]


def test_three_stages_evict_nothing_and_need_no_peers():
    assert check(units(3, 6), generate("bpipe", units(3, 6))) == []
