"""The percentile under noise: every sample agrees with an independent clock, and the noise belongs to the op."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from support.examples import examples
from support.oracles import clock
from support.problems.chain import chain, gpipe, one_by_one
from support.problems.strategies import problems_with_schedules

from optpipe import DeadlockError, Op, Schedule
from optpipe.evaluate.jitter import CUT, MOST_SAMPLES, POSITIVE, Noise
from optpipe.evaluate.rows import Rows
from optpipe.model.ops import Kind
from optpipe.model.program import JOINED


def all_ops(schedule: Schedule) -> list[Op]:
    return [op for program in schedule.programs for op in program.ops()]


@given(problems_with_schedules(beyond=True))
@settings(max_examples=examples(60))
def test_every_sample_agrees_with_an_independent_event_clock(pair):
    problem, schedule = pair
    noise = Noise(problem, 0.2, seed=3)
    rows = schedule.compiled.rows
    alone = rows.table.copy()
    alone[:, JOINED] = 0  # the time of each op alone: the clock joins pairs itself
    ops = all_ops(schedule)
    makespans, spans = noise.lengths_ms(schedule.compiled), noise.lengths_ms(schedule.compiled, "span")
    for sample in (0, noise.samples - 1):
        ms = dict(zip(ops, noise.durations_ms(Rows(alone, rows.device))[:, sample].tolist(), strict=True))
        seen = clock.run(problem, schedule, ms.__getitem__, lambda op: clock.nominal_message_ms(problem, op))
        assert makespans[sample] == pytest.approx(seen.makespan)
        assert spans[sample] <= makespans[sample] + 1e-9


@given(problems_with_schedules(beyond=True))
@settings(max_examples=examples(40))
def test_without_noise_the_percentile_is_the_nominal_length(pair):
    problem, schedule = pair
    for objective, ms in (("makespan", schedule.makespan_ms), ("span", schedule.span_ms)):
        assert Noise(problem, 0.0).percentile_ms(schedule.compiled, objective) == pytest.approx(ms)


def test_the_time_of_an_op_is_normal_and_cut():
    problem = chain(m=40)
    rows = gpipe(problem).compiled.rows
    nominal = problem.costs.ms[rows.kind, rows.stage, rows.microbatch, None]
    factors = Noise(problem, 0.05).durations_ms(rows) / nominal
    assert factors.shape == (len(rows), MOST_SAMPLES)
    assert factors.mean() == pytest.approx(1.0, abs=0.001)
    assert factors.std() == pytest.approx(0.05, rel=0.02)
    assert np.percentile(factors, 95) == pytest.approx(1 + 0.05 * 1.645, rel=0.002)
    assert factors.min() == pytest.approx(1 - 0.05 * CUT)
    wild = Noise(problem, 1.0).durations_ms(rows) / nominal
    assert wild.min() == pytest.approx(1 - POSITIVE)
    assert wild.mean() == pytest.approx(1.0, abs=0.02)


def test_the_noise_of_an_op_does_not_depend_on_its_place():
    problem = chain()
    noise = Noise(problem, 0.1, seed=1)
    of = [
        dict(zip(all_ops(schedule), noise.durations_ms(schedule.compiled.rows), strict=True))
        for schedule in (gpipe(problem), one_by_one(problem))
    ]
    same = of[0].keys() & of[1].keys()
    assert Op(Kind.F, 1, 1) in same
    assert all(np.array_equal(of[0][op], of[1][op]) for op in same)
    assert len({of[0][op].tobytes() for op in of[0]}) == len(of[0])  # no two ops have the same noise


def test_the_noise_depends_on_the_seed():
    compiled = gpipe(chain(m=4)).compiled
    one, again, other = (Noise(compiled.problem, 0.1, seed).percentile_ms(compiled) for seed in (1, 1, 2))
    assert one == again != other


def test_the_percentile_of_a_sum_of_times():
    """With one micro-batch the makespan is a sum of independent times, whose percentile is that of a normal one."""
    problem = chain(m=1)
    schedule = Schedule.parse(problem, [["0F0", "0BW0"], ["1F0", "1BW0"]])
    ms = [1.0, 1.0, 2.0, 2.0]  # F, F, BW, BW, and 0.1 ms twice in between
    expected = sum(ms) + 0.2 + 1.645 * 0.1 * np.sqrt(np.sum(np.square(ms)))
    assert Noise(problem, 0.1).percentile_ms(schedule.compiled) == pytest.approx(expected, rel=0.01)


def test_a_deadlock_is_raised():
    stuck = Schedule.parse(chain(m=1), [["0BW0", "0F0"], ["1F0", "1BW0"]])
    with pytest.raises(DeadlockError):
        Noise(stuck.problem, 0.1).percentile_ms(stuck.compiled)
