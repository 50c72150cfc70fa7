"""Building blocks: what they repeat, what they refuse, where their W stand."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems.units import peaks, units

from optpipe import Kind, check
from optpipe_solver.systems import generate
from optpipe_solver.systems.block import Block, collisions, reordered, repeat, slots, with_weights
from optpipe_solver.systems.system import by_slot
from optpipe_solver.systems.zero_bubble import v_path


def one_f_one_b(p):
    """1F1B's block (Qi et al. 2024): F one slot, the fused backward two, a micro-batch every three."""
    return Block(forward=range(p), backward=[p + 2 * (p - 1 - s) for s in range(p)], lasts=(1, 2, 0))


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_the_block_of_1f1b_repeated_is_1f1b(p, m):
    problem = units(p, m)
    assert repeat(problem, one_f_one_b(p), range(0, 3 * m, 3)).programs == generate("1f1b", problem).programs


def test_ops_in_one_slot_are_refused_or_wait():
    problem, launches = units(3, 4), range(0, 8, 2)
    block = one_f_one_b(3)
    with pytest.raises(ValueError, match=r"^block: 0BW0 and 0F4 collide in slot 8"):
        repeat(units(3, 5), block, [0, 3, 6, 9, 8])
    placed = slots(block, launches)
    assert collisions(problem, block, *placed)
    schedule = by_slot(problem, *placed)
    assert check(problem, schedule) == []
    assert schedule.makespan_ms < repeat(problem, block, range(0, 40, 10)).makespan_ms


def test_weights_stand_in_the_first_free_slot():
    """Three devices, a micro-batch every four slots: F take slots 0, 1, 2 of four, B what is said."""
    problem = units(3, 9)
    block = with_weights(problem, Block(forward=(0, 1, 2), backward=(9, 4, 3)), 4)
    assert block.weight == [10, 6, 4]  # behind the B of device 1 stands an F
    assert check(problem, repeat(problem, block, range(0, 36, 4))) == []


def test_a_block_repeated_holds_its_lifespan_over_the_interval():
    """Qi et al. 2024, section 2: the peak is the lifespan, from F to the end of W, over the interval, rounded up."""
    problem = units(3, 20)
    for late in range(0, 24, 4):
        block = with_weights(problem, Block(forward=(0, 1, 2), backward=(9 + late, 4 + late, 3 + late)), 4)
        lives = [weight + 1 - forward for forward, weight in zip(block.forward, block.weight, strict=True)]
        assert peaks(repeat(problem, block, range(0, 80, 4))) == [-(-life // 4) for life in lives]


@pytest.mark.parametrize(("there", "back"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 5)])
@pytest.mark.parametrize("p", [1, 2, 3, 6])
@pytest.mark.parametrize("m", [1, 4, 15])
def test_reordered_ops_wait_for_less_and_hold_no_more(there, back, p, m):
    problem, launches = units(p, m), range(0, 3 * m, 3)
    forward = range(0, there * p, there)
    turn = there * (p - 1) + 1
    block = with_weights(problem, Block(forward, [turn + back * (p - 1 - s) for s in range(p)]), 3)
    before, (table, slot) = repeat(problem, block, launches), slots(block, launches)
    moved = reordered(problem, table, slot)
    assert not collisions(problem, block, table, moved)
    assert all((moved <= slot)[table[:, 0] != Kind.W])
    after = by_slot(problem, table, moved)
    assert check(problem, after) == []
    at = {tuple(row): to for row, to in zip(table.tolist(), moved.tolist(), strict=True)}
    assert all(
        after.timeline.start <= np.array([at[tuple(row)] for row in after.timeline.table.tolist()])
    )  # no slot is before its needs
    assert after.makespan_ms <= before.makespan_ms
    assert after.span_ms <= before.span_ms
    assert max(peaks(after)) <= max(peaks(before))


def test_reordering_fills_warm_up_and_cool_down():
    """V-Half on four devices: the bubble falls from 12 slots to 5, at the same peak."""
    problem, launches = units(4, 8, v=2, shape="v"), range(0, 48, 6)
    block = with_weights(problem, v_path([2] * 3, [1] * 3, (1, 4, 2)), 6)
    table, slot = slots(block, launches)
    before, after = repeat(problem, block, launches), by_slot(problem, table, reordered(problem, table, slot))
    assert (before.span_ms, after.span_ms) == (48 + 12, 48 + 5)
    assert max(peaks(before)) == max(peaks(after)) == 6
