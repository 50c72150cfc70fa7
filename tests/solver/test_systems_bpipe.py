"""BPipe: 1F1B's time on balanced memory, for any number of stages and micro-batches."""

from math import ceil

import pytest
from support.problems.units import paired, peaks, units

from optpipe import Kind, Op, Schedule, check
from optpipe_solver.systems import generate


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
            assert held[0] == held[p - 1] == limit  # without, 1F1B holds p and 1


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
