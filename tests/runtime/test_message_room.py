"""A schedule that lets more messages wait than are set aside needs that much less for activations, or is refused."""

from __future__ import annotations

from support.problems import pipeline, stage
from support.ranks import message_room
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule, certify

MICROBATCHES = 8


def test_messages_above_those_set_aside_count_as_activations(ranks: Ranks) -> None:
    """The second stage is slow: all outputs of the first wait for it."""
    slow = [stage((1, 1, 1)), stage((20, 1, 1))]
    problem = pipeline(2, MICROBATCHES, 10**9, slow, p2p_ms=0.1)
    ops = [[f"{s}{kind}{j}" for kind in ("F", "BW") for j in range(MICROBATCHES)] for s in range(2)]
    in_turn = [[f"{s}{kind}{j}" for j in range(MICROBATCHES) for kind in ("F", "BW")] for s in range(2)]
    first, piles = Schedule.parse(problem, in_turn), Schedule.parse(problem, ops)
    (complaint, log, above, _), (complaint1, log1, above1, report) = ranks(
        message_room.piled_up, first=first, piles=piles
    )
    held = certify(problem, piles).device[1].bytes
    assert above <= 0 < above1
    assert complaint == complaint1
    said = (
        f"the schedule holds up to {report.buffer_certified_bytes} bytes of messages, and "
        f"{report.buffer_certified_bytes - above1} are set aside for them: {above1} more and {held} bytes of "
        f"activations are above activation_budget_bytes = {above1 + held - 1}"
    )
    assert complaint == f"rank 1: {said}"
    refusal = "a schedule was offered and refused, training goes on with the one it has: "
    assert [line for line in log1 if refusal in line] == [refusal + said]
    assert not [line for line in log if refusal in line], "it fits on the other rank"
    assert report.buffer_peak_bytes == report.buffer_certified_bytes
    assert report.version == 2, "with one byte more it runs"
