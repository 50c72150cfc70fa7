"""The loop is closed: a trace of a real run, its diagnosis, its cure applied, and the gain measured."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from support.ranks.worker import Ranks

from examples import paced
from optpipe.anytime import solve
from optpipe.diagnose import diagnose
from optpipe.measured.recording import MeasuredOp, Recording
from optpipe.model.ops import Op
from optpipe_runtime.pipeline import Pipeline

LAYER_MS = 15.0  # of F, of B and of W: slept, and long beside what a busy machine adds to each op
MICROBATCHES, STEPS = 8, 2


class Traced(NamedTuple):
    step_ms: float
    ops: list[tuple[Op, float, float]]


def train(layers: Sequence[int], head: int) -> list[Traced]:
    """Collective: steps of 1F1B with so many layers in each stage; the head takes as long as `head` layers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each_ms = LAYER_MS * (layers[rank] + head * (rank == ranks - 1))
    stage = paced.SleepingStage(paced.Times(1.0, 1.0, 1.0, 1.0))
    x = torch.zeros(MICROBATCHES * paced.SHAPE[0], *paced.SHAPE[1:])
    reports = []
    with Pipeline({rank: stage}, list(range(ranks)), paced.loss, MICROBATCHES) as pipe:
        pipe.problem = pipe.profile(x, x, activation_budget_bytes=2**50)
        pipe.load(solve(pipe.problem, method="1f1b").schedule if rank == 0 else None)
        stage.times = paced.Times(each_ms, each_ms, each_ms, 1.0)  # 1F1B is the same for all times
        for _ in range(1 + STEPS):
            dist.barrier()
            reports.append(pipe.step(x, x, trace=True))
    return [
        Traced(report.step_ms, [(each.op, each.start_ms, each.end_ms) for each in report.trace])
        for report in reports[1:]
    ]


LAYERS, HEAD = (4, 4, 4, 4), 4
STEP_APART_MS = 1e5


def step_ms(ranks: Sequence[Sequence[Traced]]) -> float:
    """The quickest step of the slowest rank: others were held up by what else runs here."""
    return min(max(rank.step_ms for rank in step) for step in zip(*ranks, strict=True))


def recording(ranks: Sequence[Sequence[Traced]]) -> Recording:
    return Recording(
        [
            MeasuredOp(op, device, step, end - start, STEP_APART_MS * step + start, rank=device)
            for device, steps in enumerate(ranks)
            for step, traced in enumerate(steps)
            for op, start, end in traced.ops
        ]
    )


def test_a_cure_that_is_applied_gains_what_was_predicted(four_ranks: Ranks) -> None:
    before = four_ranks(train, layers=LAYERS, head=HEAD)
    found = diagnose("csv", recording(before), layers=LAYERS, time_limit_s=0.0)
    assert [part.name for part in found.losses.causes][:1] == ["stages"]
    assert [s for s, _ in found.losses.uneven_stages] == [3]
    assert found.losses.replay_error < 0.05
    cure = next(cure for cure in found.cures.cures if cure.name == "layers")
    (line,) = cure.lines
    layers = [int(word) for word in line.split() if word.isdigit()]  # without the embedding and the head
    assert sum(layers) == sum(LAYERS)
    predicted_ms = float((cure.before_ms - cure.ms).mean())
    assert predicted_ms > 0.2 * step_ms(before)
    # In turns, so that both have the same share of what else runs here.
    turns = [
        (four_ranks(train, layers=layers, head=HEAD), four_ranks(train, layers=LAYERS, head=HEAD)) for _ in range(2)
    ]
    after_ms, before_ms = (min(map(step_ms, runs)) for runs in zip(*turns, strict=True))
    assert before_ms - after_ms >= 0.9 * predicted_ms
