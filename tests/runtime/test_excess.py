"""Bytes held after every op compared with the certificate. A step that holds more says after which op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from support.ranks.swaps import heard
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.nn import functional

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, StepReport

WIDTH, ROWS = 256, 8


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).tanh()
        return y.tanh().tanh() if x[0, 0] > 100 else y


def inputs(microbatches: int, large: Sequence[int] = ()) -> Tensor:
    torch.manual_seed(0)
    batch = torch.randn(microbatches * ROWS, WIDTH)
    batch[[j * ROWS for j in large], 0] = 1000.0
    return batch


def profiled_then_large(
    programs: Sequence[Sequence[str]], large: Sequence[int]
) -> tuple[Problem, list[StepReport], list[str]]:
    """Profiles with a usual batch; then a usual step, two with `large` micro-batches, and one of them after a swap.
    What the log says."""
    microbatches = sum(text.startswith("0F") for text in programs[0])
    rank = torch.distributed.get_rank()
    with Pipeline({rank: Sometimes()}, [0, 1], functional.mse_loss, microbatches) as pipe, heard() as told:
        usual, targets = inputs(microbatches), torch.zeros(microbatches * ROWS, WIDTH)
        problem = pipe.profile(usual, targets, activation_budget_bytes=10**9, repeats=1)
        told.clear()
        pipe.load(Schedule.parse(problem, programs))
        reports = [pipe.step(usual, targets, trace=True)]
        reports += [pipe.step(inputs(microbatches, large), targets, trace=True) for _ in range(2)]
        stays = [[text for text in program if text[1] not in "ODR"] for program in programs]
        pipe.load(Schedule.parse(problem, stays))
        reports.append(pipe.step(inputs(microbatches, large), targets, trace=True))
        return problem, reports, [line for line in told if "certified" in line]


PROGRAMS = [
    ["0F0", "0O0", "0F1", "0D0", "0F2", "0B1", "0R0", "0W1", "0BW0", "0BW2"],
    ["1F0", "1F1", "1BW1", "1BW0", "1F2", "1BW2"],
]


def test_a_microbatch_that_saves_more_than_was_profiled_is_named(ranks: Ranks) -> None:
    more = 2 * ROWS * WIDTH * 4  # bytes: the results of two tanh
    (problem, reports, told), (_, others, nothing) = ranks(profiled_then_large, programs=PROGRAMS, large=[2])
    usual, first, again, swapped = (report.excess for report in reports)
    assert usual is None
    assert (str(first.op), first.held_bytes - first.certified_bytes) == ("0F2", more)
    assert again == first
    assert str(swapped.op) == "0F2"
    assert told == [
        f"rank 0 holds {found.held_bytes} bytes after 0F2, {found.certified_bytes} are certified"
        for found in (first, swapped)
    ], "once for each schedule"
    assert [report.excess for report in others] == [None] * 4
    assert nothing == []
    for report in reports[:3]:
        assert [time.certified_bytes for time in report.trace] == certified(problem)
    assert [time.held_bytes for time in reports[0].trace] == certified(problem), (
        "the profile's batch holds what was profiled"
    )
    extra = [time.held_bytes - time.certified_bytes for time in reports[1].trace]
    assert extra == [0, 0, 0, 0, *[more] * 5, 0], "from 0F2 to its backward"


def certified(problem: Problem) -> list[int]:
    compiled = Schedule.parse(problem, PROGRAMS).compiled
    return compiled.held.after[compiled.rows.of_device(0)].tolist()
