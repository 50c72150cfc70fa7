"""Op times of steps: medians that noise does not move, and the problem made of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.problems.chain import chain

from optpipe.errors import InputError
from optpipe.model.arrays import NONE
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.records import Level
from optpipe_runtime import Profiler
from optpipe_runtime.execute.report import OpTime, StepReport
from optpipe_runtime.measure.drift import drift, retimed
from optpipe_runtime.service.follow import THRESHOLD

M = 8
PROBLEM = chain(m=M, memory=M, scale=10.0, offload=2.0)  # F, B, W 10 ms, offload and reload 20 ms


class Pipe:
    """One rank that has all stages."""

    problem: Problem | None = PROBLEM

    def gather(self, value: Any) -> list[Any]:
        return [value]


def ran(op: Op, ms: float) -> OpTime:
    return OpTime(op, 0.0, ms, 0, 0, None)


def report(times: dict[Kind, float], stretch: Any = lambda s, kind: 1.0) -> StepReport:
    """A step in which each micro-batch has these ops on both stages, lasting so long."""
    trace = [
        ran(Op(kind, s, j), ms * stretch(s, kind)) for j in range(M) for s in range(2) for kind, ms in times.items()
    ]
    return StepReport(None, 1.0, 0, 0, 0, 0, None, trace=tuple(trace))


def measured(*reports: StepReport, problem: Problem | None = PROBLEM, window: int = 16) -> Problem:
    pipe: Any = Pipe()
    pipe.problem = problem
    profiler = Profiler(pipe, window)
    for found in reports:
        profiler.add(found)
    return profiler.problem()


AS_PROFILED = {Kind.F: 10.0, Kind.B: 10.0, Kind.W: 10.0, Kind.O: 20.0, Kind.R: 20.0}


def test_unchanged_times_are_no_drift() -> None:
    assert measured(report(AS_PROFILED)) == PROBLEM
    assert drift(PROBLEM, PROBLEM) == 0


def test_noise_is_no_drift() -> None:
    """Every op varies by a fifth, one in twenty takes five times as long, and one step in ten three times."""
    chance = random.Random(5)

    def noisy() -> StepReport:
        slow = 3.0 if chance.random() < 0.1 else 1.0
        return report(
            AS_PROFILED, lambda s, kind: slow * chance.lognormvariate(0, 0.2) * (5.0 if chance.random() < 0.05 else 1.0)
        )

    for _ in range(50):
        assert drift(PROBLEM, measured(*(noisy() for _ in range(16)))) < THRESHOLD


def test_a_stage_that_becomes_slower_is_drift_and_its_times_are_right() -> None:
    slower = [report(AS_PROFILED, lambda s, kind: 1.5 if s == 1 and kind in (Kind.F, Kind.B, Kind.W) else 1.0)] * 9
    found = measured(*[report(AS_PROFILED)] * 7, *slower)
    assert drift(PROBLEM, found) == pytest.approx(0.5)
    assert drift(PROBLEM, found) > THRESHOLD
    assert found.stages[0] == PROBLEM.stages[0]
    assert found.stages[1] == PROBLEM.stages[1].model_copy(
        update={"forward_ms": 15.0, "backward_input_ms": 15.0, "backward_weight_ms": 15.0}
    )


def test_only_the_last_steps_count() -> None:
    old = [report({kind: 3 * ms for kind, ms in AS_PROFILED.items()})] * 30
    assert measured(*old, *[report(AS_PROFILED)] * 4, window=4) == PROBLEM


def test_a_fused_backward_stretches_both_halves() -> None:
    uneven = PROBLEM.replace(stages=[stage.model_copy(update={"backward_weight_ms": 5.0}) for stage in PROBLEM.stages])
    found = measured(report({Kind.F: 10.0, Kind.BW: 30.0}), problem=uneven)
    assert (found.stages[0].backward_input_ms, found.stages[0].backward_weight_ms) == (20.0, 10.0)


def test_ops_that_did_not_run_keep_their_times_but_a_recompute_follows_its_forward() -> None:
    stages = [stage.model_copy(update={"recompute_ms": 9.0, "checkpoint_bytes": 10}) for stage in PROBLEM.stages]
    found = measured(report({Kind.F: 20.0}), problem=PROBLEM.replace(stages=stages))
    assert found.stages[0] == stages[0].model_copy(update={"forward_ms": 20.0, "recompute_ms": 18.0})


def test_forwards_that_save_nothing_do_not_count() -> None:
    forwards = [ran(Op(Kind.F, 0, j), 4.0 if j < 6 else 11.0) for j in range(M)]
    again = [ran(Op(Kind.C, 0, j), 10.0) for j in range(6)]
    stages = [stage.model_copy(update={"recompute_ms": 9.0, "checkpoint_bytes": 10}) for stage in PROBLEM.stages]
    step = StepReport(None, 1.0, 0, 0, 0, 0, None, trace=tuple(forwards + again))
    found = measured(step, problem=PROBLEM.replace(stages=stages)).stages[0]
    assert (found.forward_ms, found.recompute_ms) == (11.0, 10.0)


def test_parts_add_up() -> None:
    stages = [stage.model_copy(update={"offload_parts": 4}) for stage in PROBLEM.stages]
    found = measured(report({Kind.O: 5.0, Kind.R: 6.0}), problem=PROBLEM.replace(stages=stages))
    assert (found.stages[0].offload_ms, found.stages[0].reload_ms) == (20.0, 24.0)
    assert drift(PROBLEM.replace(stages=stages), found) == pytest.approx(4 / 30)


def test_times_of_each_level_are_told_apart() -> None:
    """In turns, micro-batches of stage 0 are recomputed by the first level, recomputed by the second, whose checkpoint
    leaves, and offloaded."""
    level = Level(name="cheap", recompute_ms=2.0, checkpoint_bytes=10)
    moved = {"name": "full", "recompute_ms": 9.0, "offload_ms": 4.0, "reload_ms": 4.0, "offload_bytes": 4}
    stages = [stage.model_copy(update={"levels": (level, level.model_copy(update=moved))}) for stage in PROBLEM.stages]
    trace = [ran(op, 30.0) for j in range(M) for op in (Op(Kind.F, 0, j), Op(Kind.O, 0, j))[: 1 + j % 3]]
    trace += [ran(Op(Kind.C, 0, j, j % 3), 3.0 + j % 3) for j in range(M) if j % 3 < 2]
    problem = PROBLEM.replace(stages=stages)
    found = measured(StepReport(None, 1.0, 0, 0, 0, 0, None, trace=tuple(trace)), problem=problem)
    assert found.stages[0].levels is not None
    cheap, full = found.stages[0].levels
    assert (cheap.recompute_ms, full.recompute_ms) == (3.0, 4.0)
    assert (found.stages[0].forward_ms, found.stages[0].offload_ms) == (30.0, 30.0)
    assert (full.offload_ms, full.reload_ms) == (30.0, 4.0)
    assert found.stages[1] == stages[1]
    assert drift(problem, found) == pytest.approx(26 / 30)


def test_times_of_all_ranks_are_combined() -> None:
    found = retimed(PROBLEM, [{(0, Kind.F, NONE): 11.0}, {(1, Kind.F, NONE): 12.0, (1, Kind.O, NONE): 21.0}])
    assert [stage.forward_ms for stage in found.stages] == [11.0, 12.0]
    assert [stage.offload_ms for stage in found.stages] == [20.0, 21.0]
    assert found.devices == PROBLEM.devices


@pytest.mark.parametrize(
    "changes",
    [
        {"p2p_ms": [1.0] * PROBLEM.microbatches},
        {"messages": [{"sender": 0, "receiver": 1, "ms": 2.0}]},
        {"stages": [each.model_copy(update={"offload_ms": (1.0,) * PROBLEM.microbatches}) for each in PROBLEM.stages]},
    ],
)
def test_times_by_micro_batch_are_not_replaced_by_one(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="figures by micro-batch or by pair"):
        retimed(PROBLEM.replace(**changes), [])


def test_times_without_a_profile_are_an_error() -> None:
    with pytest.raises(InputError, match=r"before pipe\.profile"):
        measured(report(AS_PROFILED), problem=None)
