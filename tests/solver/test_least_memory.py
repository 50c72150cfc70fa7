"""The least memory is exact: below it nothing runs, at it one micro-batch at a time does."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from support import problems
from support.examples import examples
from support.problems.strategies import problems_with_schedules

from optpipe import Problem, certify
from optpipe_solver.bounds.least_memory import Relief, infeasibility, least_memory, reliefs


def stage(activation: int, **extra: object) -> dict[str, Any]:
    return problems.stage((1, 1, 1), (activation, 1), device=0, **extra)


def on_one_device(stages: list[dict[str, Any]], memory: int, host: int | None = None) -> Problem:
    return problems.pipeline(1, 2, memory, stages, device={"host_memory_bytes": host})


def offload(size: int, parts: int = 1) -> dict[str, object]:
    return {"offload": (4, 4, size), "offload_parts": parts}


@settings(max_examples=examples(300))
@given(problems_with_schedules(beyond=True))
def test_no_schedule_needs_less(pair):
    """Nor with no more host memory than it takes."""
    problem, schedule = pair
    certificate = certify(problem, schedule)
    devices = [
        device.model_copy(update={"activation_budget_bytes": 1, "host_memory_bytes": held.bytes})
        for held, device in zip(certificate.host, problem.devices, strict=True)
    ]
    for each in (problem, problem.replace(devices=devices)):
        for needed, held in zip(least_memory(each), certificate.device, strict=True):
            assert needed <= held.bytes


def test_the_deepest_stage_needs_its_activation_and_the_residuals_before_it():
    assert least_memory(on_one_device([stage(10), stage(7), stage(9)], 100)) == [26]
    assert least_memory(on_one_device([stage(10, **offload(8)), stage(7), stage(9)], 100)) == [18]
    either = stage(10, **offload(8), recompute=(1, 1))
    assert least_memory(on_one_device([either, stage(7), stage(9)], 100)) == [17]
    assert least_memory(on_one_device([stage(10, **offload(10)), stage(7), stage(2)], 100)) == [10]
    cheap = {"name": "cheap", "recompute_ms": 1.0, "checkpoint_bytes": 4, "offload_ms": 1.0, "reload_ms": 1.0}
    leaving = stage(10, levels=[{**cheap, "offload_bytes": 3}])  # of the checkpoint one byte stays
    assert least_memory(on_one_device([leaving, stage(7), stage(9)], 100)) == [17]


def test_a_host_limit_admits_the_best_subset():
    stages = [stage(10, **offload(10)), stage(6, **offload(6)), stage(5, **offload(5)), stage(1)]
    # 10 leaves: 10, 6, 6+5, 6+5+1; 6 and 5 leave: 10+6
    assert least_memory(on_one_device(stages, 100, host=11)) == [12]
    assert least_memory(on_one_device(stages, 100, host=0)) == [22]


def test_parts_leave_one_by_one_and_to_the_byte():
    stages = [stage(10, **offload(10, parts=3)), stage(1)]  # parts of 3, 3 and 4 bytes
    least = {2: (11, 19), 3: (10, 16), 4: (10, 15), 6: (10, 13), 7: (10, 12), 10: (10, 10)}  # alone, and beside another
    for host, both in least.items():
        each = (on_one_device([*stages, *other], 100, host=host) for other in ([], [stage(8)]))
        assert tuple(least_memory(problem)[0] for problem in each) == both


def test_the_sentence_names_device_need_and_budget():
    assert infeasibility(on_one_device([stage(10), stage(7)], 17)) is None
    needs = "devices[0].activation_budget_bytes = 16 B: one micro-batch at a time needs at least 17 B"
    assert infeasibility(on_one_device([stage(10), stage(7)], 16)) == needs
    limited = infeasibility(on_one_device([stage(10, **offload(10)), stage(7)], 16, host=9))
    assert limited == f"{needs}, as its host_memory_bytes = 9 B admit no more offload"


def test_only_what_memory_demands_is_moved_and_the_cheapest_of_it():
    stages = [stage(10, **offload(10)), stage(10, **offload(10), recompute=(3, 0)), stage(10)]
    assert reliefs(on_one_device(stages, 30), 0) == dict.fromkeys(range(3), Relief())
    assert reliefs(on_one_device(stages, 29), 0) == {0: Relief(), 1: Relief(level=0), 2: Relief()}
    assert reliefs(on_one_device(stages, 10), 0) == {0: Relief((0,)), 1: Relief(level=0), 2: Relief()}
    assert least_memory(on_one_device(stages, 10**6, host=500))[0] > 0


def test_many_choices_do_not_take_forever_and_claim_nothing_unproven():
    stages = [stage(100 + 7 * k, **offload(90 + 5 * k, parts=(1, 2, 3, 64)[k % 4])) for k in range(24)]
    limited, free = on_one_device(stages, 10**6, host=500), on_one_device(stages, 10**6)
    assert least_memory(limited)[0] >= least_memory(free)[0]
