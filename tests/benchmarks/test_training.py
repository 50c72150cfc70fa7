"""Trainings on ranks: measurements against predictions, steps in a row, swaps, what the executor costs the host; and
the demo's gain."""

import pytest
from support.problems import pipeline, stage
from support.problems.chain import chain, gpipe, one_by_one
from support.ranks.worker import Ranks

from benchmarks.training import fidelity, on_ranks
from benchmarks.training.fidelity import Case, MeasuredCase, Task
from benchmarks.training.overhead import TORCHS_ON_ONE_RANK, beside, lowering, overhead
from examples import reference
from examples.demo import __main__ as demo
from examples.demo.train import Step
from examples.gpt import Size
from examples.paced import Times
from optpipe.reuse import MOST_SIMULATED, by_rules
from optpipe_solver.systems import generate

SMALL = Size(width=32, heads=2, blocks=4, context=16, sequences=2)


def test_paced_stages_take_their_time_and_no_more_memory_than_predicted(ranks: Ranks) -> None:
    nothing_fits = Case("1f1b", memory=0.5)
    task = Task([Case("1f1b"), nothing_fits, Case("po-f", 2, memory=1.8)], 4, 3, Times(4.0, 3.0, 2.0, 1.0))
    (first, interleaved), _ = ranks(fidelity.run, task=task)
    assert (first.schedule.method, interleaved.schedule.method) == ("1f1b", "po-f")
    # Who sleeps is never early: all micro-batches, one F and B on the other rank.
    for row, least in ((first, 4 * 9 + 4 + 3), (interleaved, 2 * 4 * 9)):
        assert len(row.steps_ms) == 3
        assert min(row.schedule.makespan_ms, *row.steps_ms) >= least
        assert row.measured_peak == row.predicted_peak


def test_the_gpt_has_the_losses_of_a_plain_run(ranks: Ranks) -> None:
    task = Task([Case("zb-h1"), Case("po-f", 2, memory=1.8)], 4, 2, size=SMALL)
    plain = reference.losses(SMALL, 2, 4, fidelity.WARM_UP + 2)
    for row in ranks(fidelity.run, task=task)[0]:
        assert reference.difference(row.losses, plain) < 1e-5
        assert row.measured_peak == row.predicted_peak


def test_the_gain_with_little_memory_is_large_by_prediction() -> None:
    """Of the stages with little memory, two a rank, as a quiet machine measures them: each op takes a bit longer than
    it sleeps, W also needs the gradient that came in, and the input of the first stage is not the pipeline's."""
    task = fidelity.with_little_memory(3)[1]
    times, piece, ranks = task.paced_ms, 2**16, 5
    ms = times.forward + 0.4, times.backward_input + 0.7, times.backward_weight + 0.3
    held, copy_ms = times.saved * piece, times.copy + 0.2
    more = [{"recompute": (times.forward + 0.6, piece if s else 0), "device": s % ranks} for s in range(2 * ranks)]
    stages = [stage(ms, (held, held + piece), offload=(copy_ms, copy_ms, held), **each) for each in more]
    problem = pipeline(ranks, task.microbatches, 0, stages, p2p_ms=0.4).with_memory_for(1.6)
    before, after = generate(fidelity.RECOMPUTED, problem), by_rules(problem, None, "makespan", MOST_SIMULATED)
    assert after.makespan_ms <= 0.77 * before.makespan_ms, "by simple rules, before any engine"
    best = fidelity.published(problem).best_published
    assert best.method == fidelity.RECOMPUTED, "no published schedule that fits is shorter"


@pytest.mark.parametrize(("slowest", "verdict"), [(1100.0, "a gain"), (1501.0, "no gain beyond chance")])
def test_a_gain_is_reported_only_beyond_the_spread(slowest: float, verdict: str) -> None:
    slow, fast = one_by_one(chain()), gpipe(chain())
    theirs, ours = [1500.0, 1520.0, 1510.0], [1050.0, 1060.0, slowest]
    measured = (slow, theirs), (slow, theirs), (fast, ours)
    rows = [MeasuredCase(Case("1f1b"), schedule, ms, [0], [0], []) for schedule, ms in measured]
    text = fidelity.gain(rows)
    assert f"a step takes {1 - 1060 / 1510:.1%} less than by naive" in text
    assert text.endswith(verdict)
    assert "nothing is compared" in fidelity.gain(rows[1:])


def steps(ms: dict[int, list[float]], rounds: int) -> list[Step]:
    """A live phase, then rounds of two settled steps by version 0 and 2 each, and one after each swap."""
    found = [Step(1, True, True, 1.0, 1.0, [], []), Step(2, False, True, 1.0, 1.0, [], [])]
    for k in range(rounds):
        for version, times in ms.items():
            found += [
                Step(version, False, settled, 1.0, took, [], [])
                for settled, took in ((False, 99.0), (True, times[k]), (True, times[k]))
            ]
    return found


@pytest.mark.parametrize(("best", "sure"), [([9.0, 9.5, 8.0, 9.0, 9.2], True), ([9.0, 12.0, 8.0, 13.0, 9.2], False)])
def test_the_gain_of_the_demo_is_computed_round_by_round(best: list[float], sure: bool) -> None:
    found = demo.rounds(steps({0: [10.0] * 5, 2: best}, 5), 2, 5)
    assert found == pytest.approx([1 - ms / 10 for ms in best])
    gain = demo.gain_of(found)
    assert gain.low <= gain.median <= gain.high
    assert (gain.low > 0) == sure
    assert demo.gain_of(demo.rounds(steps({0: [10.0] * 5}, 5), 0, 5)) == (0.0, 0.0, 0.0), "without a better schedule"


def test_steps_in_a_row_are_compared_with_spans(ranks: Ranks) -> None:
    times, m, steps = Times(1.0, 1.0, 1.0, 0.0), on_ranks.MICROBATCHES, 2
    row, other = ranks(on_ranks.in_a_row, times=times, steps=steps)
    assert row == other
    assert row.spans_ms == pytest.approx(2 * row.span_ms + row.makespan_ms - row.span_ms)
    assert row.post_validated_ms >= steps * m * sum(times[:4]) + times.forward, "who sleeps is never early"
    assert row.clipped_ms >= steps * (m * sum(times[:4]) + times.forward)


@pytest.mark.soak
def test_steps_in_a_row_take_a_span_each(four_ranks: Ranks) -> None:
    """And those that wait for each other a makespan. On a busy machine everything takes longer, so this is a soak; that
    no rank waits, test_post_validation shows without a clock."""
    rows = [four_ranks(on_ranks.in_a_row, times=Times(20.0, 20.0, 20.0, 0.0), steps=10)[0] for _ in range(3)]
    assert any(row.deviation < 0.08 and row.post_validated_ms < row.clipped_ms for row in rows), rows


def test_what_a_swap_costs_is_measured(ranks: Ranks) -> None:
    first, second = ranks(on_ranks.swap_cost, swaps=3)
    assert first == second
    assert first.swaps == 3
    assert min(first.step_ms, first.prepared_ms, first.swapped_ms) > 0


def test_a_schedule_for_every_step_is_measured_against_loaded_ones(ranks: Ranks) -> None:
    times, size = Times(2.0, 2.0, 2.0, 0.0, saved=2), {"microbatches": 2, "together": 1}
    first, second = ranks(on_ranks.own_steps, times=times, rounds=1, **size)
    assert first == second
    assert first.steps == on_ranks.BATCH_STEPS * on_ranks.BATCHES
    each = [times.of_documents(lengths) for _, _, named in on_ranks.batches(**size) for lengths in named["lengths"]]
    work_ms = sum(sum(ms[:3]) for ms in each) / on_ranks.BATCHES
    assert min(first.planned_ms, first.loaded_ms, first.fixed_ms) >= work_ms, "who sleeps is never early"


def test_an_op_is_measured_against_a_plain_run() -> None:
    measured = overhead(stages=2, microbatches=3, steps=3)
    assert measured.ops == 2 * 3 * 3
    assert min(measured.step_ms, measured.plain_ms, measured.traced_ms) > 0
    assert measured.followed_ratio - 1 == pytest.approx((measured.traced_ratio - 1) * 3 / 16)


def test_a_step_is_measured_beside_torchs_pipelines() -> None:
    measured = beside(microbatches=2, steps=2)
    torchs = {"torch's Interleaved1F1B", "torch's InterleavedZeroBubble"} if TORCHS_ON_ONE_RANK else set()
    assert set(measured.ratios) == {"F BW", "F B W"} | torchs
    assert min(measured.plain_ms, *measured.ratios.values()) > 0


def test_lowering_is_measured() -> None:
    small, large = lowering(2, 4), lowering(4, 64)
    assert (small.ops, large.ops) == (24, 768)
    assert 0 < small.prepare_ms < large.prepare_ms
