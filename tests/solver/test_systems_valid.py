"""Every published schedule is valid on stages of any times, on any devices, and holds what it holds on even ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.units import ACTIVATION, paired, unevenly, units

from optpipe import Problem, Schedule, certify, check
from optpipe.model.placement import rechunk
from optpipe_solver.systems import SYSTEMS, System, generate

COSTS: dict[str, Any] = {"recompute_ms": 1.0, "checkpoint_bytes": 0, "offload": (0.5, 0.5, ACTIVATION)}
COSTS |= {"gradient_out_ms": 1.0, "update_ms": 2.0, "parameters_in_ms": 1.0}
METHODS = [*SYSTEMS, "1f1b-recompute:every=2", "algorithm-1:tolerance=9", "chronos-recomp:recomputed=2"]
METHODS += ["chronos-zero2:group=5"]
ORDERED_BY_TIMES = ("po-h", "po-f", "algorithm-1", "v-auto")


def stages_for(system: System, draw: Any, p: int, m: int) -> tuple[Problem, Problem]:
    """Even and uneven stages as the system needs them, on some of the devices in any order."""
    p = 2 * p if system.shape == "bidirectional" else p
    v, order = draw(st.integers(system.least, system.most or 4)), draw(st.permutations(range(p + 1)))
    even = units(p, m, v=v, shape="looped" if system.shape == "bidirectional" else system.shape, **COSTS)
    links = (None,) if system.name == "algorithm-1" else (None, "pcie0")  # it gives a shared link no order
    device = even.devices[0].model_copy(update={"link": draw(st.sampled_from(links))})
    even = even.replace(
        devices=[device] * (p + 1),
        stages=[stage.model_copy(update={"device": order[stage.device]}) for stage in even.stages],
        overlap_factor=draw(st.sampled_from([None, 0.75, 1.0])),
    )
    if system.name == "bpipe":
        even = paired(even, *draw(st.tuples(*[st.sampled_from([0.0, 0.5, 9.0])] * 2)))
    uneven = unevenly(draw, even)
    if system.shape != "bidirectional":
        return even, uneven
    ways = draw(st.lists(st.integers(0, 1), min_size=m, max_size=m))
    both = (rechunk(each, 1, "bidirectional").replace(microbatch_routes=ways) for each in (even, uneven))
    return next(both), next(both)


def peak_bytes(schedule: Schedule) -> int:
    return max(peak.bytes for peak in certify(schedule.problem, schedule).device)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), p=st.integers(1, 6), m=st.integers(1, 16))
def test_any_stages_have_a_valid_schedule(method: str, data: Any, p: int, m: int) -> None:
    name = method.partition(":")[0]
    even, uneven = stages_for(SYSTEMS[name], data.draw, p, m)
    schedule = generate(method, uneven)
    assert check(uneven, schedule) == []
    if name not in ORDERED_BY_TIMES:
        assert peak_bytes(schedule) <= peak_bytes(generate(method, even))
