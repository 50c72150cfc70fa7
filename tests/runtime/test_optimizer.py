"""Optimizers on the host: the training is bit by bit that of a plain run with the same optimizer for every stage."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.close import joined, require_close
from support.examples import examples
from support.problems.strategies import schedules
from support.ranks import cases, replicas
from support.ranks import optimizer as rank_optimizer
from support.ranks.worker import Ranks

from optpipe.model.ops import OPTIMIZER, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule

M = 4
ON_HOST = {"gradient_out_ms": 1.0, "update_ms": 1.0, "parameters_in_ms": 1.0}
# stages 0 and 2 on rank 0, 1 and 3 on rank 1; the deep ones are updated on the host, while the last of the others are
# worked on
WAVE = [
    ["2P0", *(f"{op}{j}" for j in range(M) for op in ("0F", "2F", "2B", "0B", "2W", "0W"))],
    ["3P0", *(f"{op}{j}" for j in range(M) for op in ("1F", "3F", "3BW", "1BW"))],
]
for program, stage in zip(WAVE, (2, 3), strict=True):
    program[-1:] = [f"{stage}G0", f"{stage}U0", program[-1]]


def problem(placement: list[int], microbatches: int = M) -> Problem:
    return cases.problem(placement, microbatches, **ON_HOST)


def wave() -> Schedule:
    return Schedule.parse(problem([0, 1, 0, 1]), WAVE)


def without_updates(schedule: Schedule) -> Schedule:
    programs = [
        [str(op) for op in program if isinstance(op, Op) and op.kind not in OPTIMIZER] for program in schedule.programs
    ]
    return Schedule.parse(schedule.problem, programs)


def require_plain(results: list[Any], steps: int, stages: int = 4) -> None:
    losses, expected = rank_optimizer.plain(stages, M, steps)
    assert [report.losses for report in results[1][0]] == losses
    np.testing.assert_equal(joined(values for _, values, _ in results), expected)


def test_four_steps_are_those_of_a_plain_run_to_the_bit(ranks: Ranks) -> None:
    results = ranks(rank_optimizer.train, schedules=[wave()] * 4, hosted=[2, 3])
    require_plain(results, 4)
    for rank, (reports, _, gradients) in enumerate(results):
        assert {name.split(".")[0] for name in gradients} == {str(rank)}, "gradients of stages on the host have left"
        for report in reports:
            assert [str(time.op) for time in report.trace] == WAVE[rank]
            at = {time.op.kind.name: time for time in report.trace if time.op.kind in OPTIMIZER}
            assert at["G"].end_ms <= at["U"].start_ms <= at["U"].end_ms <= report.step_ms


@pytest.mark.parametrize("mode", ["half_duplex", "full_duplex"])
def test_gradients_and_parameters_use_a_shared_link_in_order(ranks: Ranks, mode: str) -> None:
    own = problem([0, 1, 0, 1])
    shared = own.replace(
        devices=[device.model_copy(update={"link": "pcie0"}) for device in own.devices], transfer_mode=mode
    )
    orders = (["2P0", "3P0", "2G0", "3G0"], ["3P0", "2P0", "3G0", "2G0"])
    first, second = (Schedule.parse(shared, WAVE, {"pcie0": order}) for order in orders)
    require_plain(ranks(rank_optimizer.train, schedules=[first, second, second, first], hosted=[2, 3]), 4)


@pytest.mark.parametrize("hosted", [[2, 3], [0, 1, 2, 3], [2]])
def test_swaps_between_schedules_with_and_without_updates_do_not_change_results(
    ranks: Ranks, hosted: list[int]
) -> None:
    """A stage that the schedule does not update is updated at the end of the step."""
    steps = [wave(), without_updates(wave()), without_updates(wave()), wave(), without_updates(wave())]
    if 3 not in hosted:
        programs = [
            program if rank == 0 else [op for op in program if op[1] not in "GUP"] for rank, program in enumerate(WAVE)
        ]
        steps[0] = steps[3] = Schedule.parse(problem([0, 1, 0, 1]), programs)
    require_plain(ranks(rank_optimizer.train, schedules=steps, hosted=hosted), len(steps))


@settings(max_examples=examples(10))
@given(st.data(), st.sampled_from([[0, 1], [0, 1, 1, 0], [1, 0, 1]]))
def test_any_valid_schedules_train_as_a_plain_run(ranks: Ranks, data: Any, placement: list[int]) -> None:
    drawn = [data.draw(schedules(problem(placement, 3))) for _ in range(3)]
    losses, expected = rank_optimizer.plain(len(placement), 3, len(drawn), rank_optimizer.momentum)
    results = ranks(
        rank_optimizer.train, schedules=drawn, hosted=range(len(placement)), factory=rank_optimizer.momentum
    )
    np.testing.assert_allclose([report.losses for report in results[placement[-1]][0]], losses, rtol=1e-4)
    require_close(joined(values for _, values, _ in results), expected, rtol=1e-3, atol=1e-5)


TURNS = [replicas.Turn(load=k) for k in range(4)]


def require_equal(hosted: list[Any], on_device: list[Any]) -> None:
    for found, expected in zip(hosted, on_device, strict=True):
        assert found.losses == expected.losses
        assert found.norms == expected.norms
        np.testing.assert_equal(found.parameters, expected.parameters)


@pytest.mark.parametrize(
    ("how", "max_norm"),
    [
        ("ddp", 0.0),
        pytest.param("fsdp", 0.0, marks=pytest.mark.soak),
        pytest.param("ddp", 0.2, marks=pytest.mark.soak),
        ("fsdp", 0.2),
    ],
    ids=["ddp", "fsdp", "ddp, clipped", "fsdp, clipped"],
)
def test_with_replicas_gradients_leave_when_they_are_reduced(four_ranks: Ranks, how: str, max_norm: float) -> None:
    """Updates are to the bit those on the device, though the replicas' schedules differ in some steps. Clipped shards
    are to the rounding of the norm, which is of shards on the host and on the device."""
    plainly = without_updates(wave())
    steps = [[wave(), wave(), plainly, wave()], [wave(), plainly, wave(), wave()]]
    rounded = how == "fsdp" and max_norm > 0
    kind = {"how": how, "max_norm": max_norm, "factory": rank_optimizer.momentum if rounded else rank_optimizer.adam}
    hosted, on_device = (
        four_ranks(replicas.trained, schedules=own, turns=TURNS, hosted=stages, profiles=bool(stages), **kind)
        for own, stages in ((steps, [2, 3]), ([[plainly] * 4] * 2, []))
    )
    if rounded:
        for ran, expected in zip(hosted, on_device, strict=True):
            assert ran.norms == pytest.approx(expected.norms, rel=1e-6)
            assert min(ran.norms) > max_norm
            require_close(ran.parameters, expected.parameters, atol=1e-5)
    else:
        require_equal(hosted, on_device)
    for rank, ran in enumerate(hosted):
        for events in ran.events:
            deep = 2 + rank % 2
            assert events.index(f"ended {deep}") < events.index(f"out {deep}"), "G is after the reduction"


@pytest.mark.parametrize("hosted", [[2, 3], [0, 1, 2, 3], [2]])
def test_clipped_updates_wait_for_the_norm(ranks: Ranks, hosted: list[int]) -> None:
    """That of all stages, wherever they are updated: to the bit as on the device."""
    plainly = without_updates(wave())
    steps = [wave() if {2, 3} <= set(hosted) else plainly, plainly, plainly]
    how = {"how": "alone", "max_norm": 0.2, "factory": rank_optimizer.adam}
    found, expected = (
        ranks(replicas.trained, schedules=[own], turns=TURNS[:3], hosted=stages, **how)
        for own, stages in ((steps, hosted), ([plainly] * 3, []))
    )
    require_equal(found, expected)
    assert min(found[0].norms) > 0.2, "each update is clipped"


@pytest.mark.parametrize("module_first", [True, False])
def test_a_saved_state_resumes_bit_by_bit(ranks: Ranks, module_first: bool) -> None:
    results = ranks(rank_optimizer.resume, schedule=wave(), hosted=[2, 3], at=2, steps=4, module_first=module_first)
    losses, expected = rank_optimizer.plain(4, M, 4)
    assert results[1][0] == losses[2:]
    np.testing.assert_equal(joined(values for _, values in results), expected)


def test_the_host_keeps_more_precision_than_the_device(ranks: Ranks) -> None:
    for device, host in ranks(rank_optimizer.low_precision, schedule=wave(), steps=3):
        for name, value in host.items():
            assert value.dtype == np.float32
            np.testing.assert_array_equal(device[name], rank_optimizer.rounded(value), err_msg=name)
        moved = [name for name, value in host.items() if np.any(value != rank_optimizer.rounded(value))]
        assert moved, "updates below bfloat16's grain are kept in float32"


def test_a_state_loaded_into_the_module_reaches_the_host(ranks: Ranks) -> None:
    for loaded, told, evaluated in ranks(rank_optimizer.load_between_steps, schedule=wave()):
        assert loaded == 0.0, "one step of learning rate 0 leaves what was loaded"
        assert "parameters were changed while their update was waiting on the host" in told
        assert evaluated


def test_wrong_uses_of_a_host_optimizer_are_refused(ranks: Ranks) -> None:
    for rank, told in enumerate(ranks(rank_optimizer.mistakes, schedule=wave())):
        expected = [
            f"host_optimizers[{2 + rank}] returned a int: must be a torch.optim.Optimizer",
            f"host_optimizers[{2 + rank}]: no parameter of stage {2 + rank} requires a gradient",
            f"host_optimizers[{2 + rank}]: weight is in stage {rank}, too, which adds to its gradient",
            "rank 0: 2P0 in the program of device 0: stage 2 has no optimizer on the host here",
            "tie: stage 2 has a copy, and updates it on the host before gradients are summed over the copies: "
            "leave the stage out of "
            "host_optimizers",
            "clip_grad_norm_: stages with host_optimizers are updated inside the step",
            f"stage {2 + rank}: what was saved is no state_dict of an optimizer on the host, it has ['",
            f"stage {2 + rank}: what was saved has no ",
            f"stage {2 + rank}: its gradients wait on the host to be clipped: with clip_host_updates, call ",
        ]
        assert [sentence[: len(start)] for sentence, start in zip(told, expected, strict=True)] == expected


def test_a_failure_in_an_update_is_named(ranks: Ranks) -> None:
    notes = ranks(rank_optimizer.failing_update, schedule=wave())[0]
    assert any("rank 0 was at the end of the step; what failed is 2U0: U of stage 2" in note for note in notes)


def test_profiled_times_of_the_host(ranks: Ranks) -> None:
    for measured, unchanged in ranks(rank_optimizer.profiled, placement=[0, 1, 0, 1], microbatches=M, hosted=[2, 3]):
        assert unchanged
        for s, stage in enumerate(measured.stages):
            times = [getattr(stage, name) for name in ON_HOST]
            assert all(ms is not None and ms > 0 for ms in times) if s in (2, 3) else times == [None] * 3
