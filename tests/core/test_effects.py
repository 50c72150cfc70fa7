"""The table of effects is the one memory rule: certificates, levels and pictures follow a change of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.problems import pipeline, stage

from optpipe import Kind, Schedule, certify
from optpipe.evaluate.effects import TABLE, Effects, Holding
from optpipe.show.lanes import memory_over_time

WORKSPACE = 7
COSTS = stage(sizes=(10, 4), recompute=(1, 3), offload=(1, 1, 5), offload_parts=2)
ONE = pipeline(1, 1, 100, COSTS)


@pytest.fixture
def with_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """B also needs a workspace."""
    rule = TABLE[Kind.B]
    grown = replace(rule, takes=lambda x: rule.takes(x) + WORKSPACE, frees=lambda x: rule.frees(x) + WORKSPACE)
    monkeypatch.setitem(TABLE, Kind.B, grown)


def test_every_kind_has_its_rule():
    assert set(TABLE) == set(Kind)


def test_parts_add_up_and_transfers_move_them():
    assert Effects(ONE).parts.tolist() == [[[2, 3]]]
    compiled = Schedule.parse(ONE, [["0F0", "0O0", "0O0.1", "0D0", "0D0.1", "0R0", "0R0.1", "0B0", "0W0"]]).compiled
    assert compiled.effects.takes_on_host.tolist()[1:3] == Effects(ONE).parts[0, 0].tolist()


def test_levels_say_what_an_activation_holds_op_by_op():
    effects = Effects(ONE)
    assert effects.holdings(0, 0, Kind.F, Kind.B, Kind.W) == [
        Holding(Kind.F, False, 10),
        Holding(Kind.B, True, 4),
        Holding(Kind.W, True, 0),
    ]
    assert effects.holdings(0, 0, Kind.F, Kind.BW) == [Holding(Kind.F, False, 10), Holding(Kind.BW, True, 0)]
    assert effects.holdings(0, 0, Kind.F, Kind.C, Kind.BW, level=0) == [
        Holding(Kind.F, False, 10),
        Holding(Kind.F, True, 3),
        Holding(Kind.C, False, 10),
        Holding(Kind.BW, True, 0),
    ]


@pytest.mark.usefixtures("with_workspace")
def test_a_changed_rule_changes_certificate_levels_and_picture():
    schedule = Schedule.parse(ONE, [["0F0", "0B0", "0W0"]])
    assert certify(ONE, schedule).device[0].bytes == 10 + WORKSPACE
    assert certify(ONE, schedule).device[0].at == "0B0"
    assert max(size for _, size in memory_over_time(schedule, 0)) == 10 + WORKSPACE
    assert Holding(Kind.B, False, 10 + WORKSPACE) in Effects(ONE).holdings(0, 0, Kind.F, Kind.B, Kind.W)
