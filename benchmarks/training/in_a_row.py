"""How long steps in a row take, with an optimizer step after each: if no rank waits for the others between them, a span
each and one fill and drain of the pipeline; else a makespan each. `executor` starts this by torchrun."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from optpipe.anytime import solve
from optpipe_runtime.demo.on_ranks import measure_on_ranks
from optpipe_runtime.fidelity import paced
from optpipe_runtime.pipeline import Pipeline

WARM_UP, STEPS = 3, 20
TIMES = paced.Times(20.0, 20.0, 20.0, 0.0)
METHOD, MICROBATCHES = "zb-h2", 8  # a schedule without bubbles: its makespan is longer than its span by 3 forwards
MAX_NORM = 1e6


@dataclass(frozen=True)
class InARow:
    """Times in ms, by the host's clock: from the begin of the first of `steps` on any rank to the end of the last
    optimizer step on any rank."""

    steps: int
    span_ms: float  # as predicted, of one step
    makespan_ms: float
    post_validated_ms: float  # measured, with `post_validate`
    clipped_ms: float  # with `clip_grad_norm_` before each optimizer step

    @property
    def spans_ms(self) -> float:
        """As many spans, one fill and one drain."""
        return self.steps * self.span_ms + self.makespan_ms - self.span_ms

    @property
    def deviation(self) -> float:
        """The measured time relative to the predicted one, less 1."""
        return self.post_validated_ms / self.spans_ms - 1


def in_a_row(times: paced.Times = TIMES, steps: int = STEPS) -> InARow:
    """Collective: measures on paced stages, one on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = paced.Stage(times)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0)
    x = torch.zeros(MICROBATCHES * paced.SHAPE[0], *paced.SHAPE[1:])
    with Pipeline({rank: stage}, range(ranks), paced.loss, MICROBATCHES) as pipe:
        problem = pipe.profile(x, x, activation_budget_bytes=2**50)
        pipe.load(solve(problem, method=METHOD, time_limit_s=10).schedule if rank == 0 else None)
        assert pipe.schedule is not None
        span_ms, makespan_ms = pipe.schedule.span_ms, pipe.schedule.makespan_ms

        def run(clipping: bool, steps: int) -> float:
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(steps):
                pipe.step(x, x)
                stage.weight.grad = torch.ones_like(stage.weight)  # a paced stage computes none
                if clipping:
                    pipe.clip_grad_norm_(MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            seen: list[tuple[float, float]] = pipe.gather((begun, time.perf_counter()))
            return 1e3 * (max(end for _, end in seen) - min(begin for begin, _ in seen))

        run(True, WARM_UP)
        clipped_ms = run(True, steps)
        pipe.post_validate(optimizer, MAX_NORM)
        run(False, WARM_UP)
        return InARow(steps, span_ms, makespan_ms, run(False, steps), clipped_ms)


def main() -> None:
    """`python -m benchmarks.training.in_a_row ANSWER`, under torchrun."""
    measure_on_ranks(lambda: asdict(in_a_row()), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
