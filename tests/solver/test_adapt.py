"""A solved schedule for other memory or another number of micro-batches: about as long as the shortest there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optpipe import Problem, Schedule, check, reuse
from optpipe.reuse import adapt, by_rules
from optpipe_solver.systems import generate

AMPLE = Problem.load(Path(__file__).parents[2] / "examples/problems/ample-8x24.json")
SHORTER = tuple(device.model_copy(update={"activation_budget_bytes": 128 * 10**9}) for device in AMPLE.devices)


@pytest.mark.parametrize(
    ("changed", "bound_ms"),  # what the first and the last device cannot do without
    [({"devices": SHORTER}, 790), ({"microbatches": 18}, 610), ({"microbatches": 36}, 1150)],
)
def test_rules_lead_to_a_short_schedule_where_an_order_does_not(changed: dict[str, Any], bound_ms: float) -> None:
    wanted = AMPLE.replace(**changed)
    found = adapt(wanted, generate("zb-h1", AMPLE))
    assert found is not None
    assert check(wanted, found) == []
    assert bound_ms <= found.makespan_ms <= 1.05 * bound_ms


def test_rules_say_nothing_of_pairs() -> None:
    overlapping = AMPLE.replace(microbatches=2, overlap_factor=0.8)
    programs = [[f"{s}F0", f"{s}F1", f"{s}BW0", f"{s}BW1"] for s in range(8)]
    one_by_one = Schedule.parse(overlapping, programs)
    assert by_rules(overlapping, one_by_one, "makespan") is not None
    paired = Schedule.parse(overlapping, [*programs[:-1], ["7F0", "7F1+7BW0", "7BW1"]])
    assert check(overlapping, paired) == []
    assert by_rules(overlapping, paired, "makespan") is None


def test_an_order_of_many_ops_is_not_repaired_and_that_is_reported(monkeypatch: Any, caplog: Any) -> None:
    overlapping = AMPLE.replace(microbatches=2, overlap_factor=0.8)
    programs = [[f"{s}F0", f"{s}F1", f"{s}BW0", f"{s}BW1"] for s in range(8)]
    paired = Schedule.parse(overlapping, [*programs[:-1], ["7F0", "7F1+7BW0", "7BW1"]])
    slower = overlapping.replace(p2p_ms=2.0)
    assert adapt(slower, paired) is not None
    monkeypatch.setattr(reuse, "MOST_REPAIRED", 31)
    assert adapt(slower, paired) is None
    assert "not repaired: of 32 ops, more than 31 would take too long" in caplog.text
