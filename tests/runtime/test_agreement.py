"""All ranks change the schedule between steps, or none does, and an offer never stops the training. Ranks that call
different methods do not wait for each other; and no connections are left of a pipeline that has ended."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.ranks import cases
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline


def refuse_on_the_way(placement: Sequence[int], schedule: Schedule, away: Schedule) -> list[str]:
    """What a user is told who makes each of these mistakes; every rank must be told, none may wait for the others."""
    rank, m = torch.distributed.get_rank(), schedule.problem.microbatches
    (inputs, targets), stages = cases.batch(0, m), cases.own_stages(placement)

    def run(*arguments: Any, load: bool = True, then: Schedule | None = None, **data: Any) -> None:
        with Pipeline(*arguments) as pipe:
            if load:
                pipe.load(schedule)
            pipe.step(**data)
            if then is not None:
                pipe.load(then)

    fine = (stages, placement, cases.loss_fn, m)
    told = cases.refusals(
        lambda: run(*fine, inputs=(), targets=targets),
        lambda: run(*fine, inputs=inputs[:-1], targets=targets),
        lambda: run(*fine, inputs=None, targets=targets),
        lambda: run(*fine, inputs=inputs, targets=targets, load=False),
        lambda: run(stages, placement, lambda output, target: output, m, inputs=inputs, targets=targets),
        lambda: run(*fine, None if rank else 1000, inputs=inputs, targets=targets, then=away),
    )
    with Pipeline(*fine) as pipe:
        pipe.problem = cases.problem(placement, m, activation_bytes=100 + rank)
        nothing: Any = None
        return told + cases.refusals(
            lambda: pipe.load(schedule),
            lambda: pipe.load(nothing),
            lambda: pipe.offer(nothing if rank == 0 else schedule),
        )


def test_wrong_arguments_raise_a_clear_error_on_every_rank(ranks: Ranks) -> None:
    schedule, away = cases.parsed(ONE_F_ONE_B, [OFFLOADED[0], ONE_F_ONE_B[1]])
    told = ranks(refuse_on_the_way, placement=[0, 1], schedule=schedule, away=away)
    offers = [
        "offer was given a NoneType: an optpipe.Schedule can",
        "offer was called on rank 1: schedules are offered on",
    ]
    for sentences, offer in zip(told, offers, strict=True):
        expected = [
            "inputs is empty: this rank needs a tensor, or a tuple of tensors, of the whole batch",
            "inputs has shape [7, 16]: its first dimension must be a multiple of the 4 micro-batches",
            "inputs is NoneType: this rank needs a tensor",
            "no schedule is loaded: call load(schedule) before the first step",
            "loss_fn must return a tensor with one number, the loss of a micro-batch",
            "rank 0: host_memory_bytes = 1 kB:",
            "the ranks prepared different schedules: they were profiled differently",
            "rank 0: load was given no optpipe.Schedule on rank 0; if a search found none",
            offer,
        ]
        assert [sentence[: len(start)] for sentence, start in zip(sentences, expected, strict=True)] == expected


WIDTH = 8


def again(schedule: Schedule, times: int) -> list[int]:
    """Files that are open after each of so many pipelines; half of these end while another is there."""
    rank, x, found = torch.distributed.get_rank(), torch.zeros(2, WIDTH), []
    for _ in range(times // 2):
        with cases.pipeline({rank: nn.Linear(WIDTH, WIDTH)}, schedule, mse_loss) as pipe:
            pipe.step(x, x)
            with Pipeline({rank: nn.Linear(WIDTH, WIDTH)}, [0, 1], mse_loss, 2) as other:
                other.load(schedule)
                other.step(x, x)
            pipe.step(x, x)
        found.append(len(os.listdir("/proc/self/fd")))
    return found


class Views(nn.Module):
    """Two views, of a conjugate and of a negative, as torch makes them without computing anything."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(x, 2 * x).conj()
        return z, torch._neg_view(x * 3)


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.scale * torch.cat([z.real, z.imag, y], -1)


def views(schedule: Schedule) -> list[float] | None:
    rank, x = torch.distributed.get_rank(), torch.ones(2, WIDTH)
    with cases.pipeline({rank: [Views, Takes][rank]()}, schedule, mse_loss) as pipe:
        return pipe.step(x, torch.cat([x, -2 * x, -3 * x], -1)).losses


def apart(schedule: Schedule, method: str) -> str:
    """What each rank is told where rank 1 calls `step` and rank 0 another method."""
    rank, x = torch.distributed.get_rank(), torch.zeros(2, WIDTH)
    with cases.pipeline({rank: nn.Linear(WIDTH, WIDTH)}, schedule, mse_loss) as pipe:
        pipe.step(x, x)
        arguments = [x, x] if rank or method == "evaluate" else [1.0]
        return "".join(cases.refusals(lambda: getattr(pipe, "step" if rank else method)(*arguments)))


SCHEDULE = Schedule.parse(cases.problem([0, 1], 2), [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])


def test_pipelines_made_one_after_the_other_leave_no_connections_behind(ranks: Ranks) -> None:
    for opened in ranks(again, schedule=SCHEDULE, times=6):
        assert opened[2] == opened[1]


def test_conjugate_and_negative_views_arrive_resolved(ranks: Ranks) -> None:
    assert ranks(views, schedule=SCHEDULE) == [None, [0.0, 0.0]]


@pytest.mark.parametrize("method", ["evaluate", "clip_grad_norm_", "gather", "load"])
def test_a_rank_that_finds_that_another_calls_something_else_says_so(ranks: Ranks, method: str) -> None:
    """The other one, which may be in the middle of its step, then loses it."""
    told = ranks.to_the_end(apart, schedule=SCHEDULE, method=method)
    found = [sentence.partition(", and another rank something else")[0] for sentence in told]
    assert f"rank 0 has called {method}" in found or "rank 1 has called step" in found
    assert all("has called" in sentence or "lost its connection" in sentence for sentence in told)
