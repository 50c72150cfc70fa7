"""What a swap costs a step. The same schedule is offered again and again while a pipeline trains by it, so that only
the swap makes a difference.

During one or more steps an offer is shared and prepared, in a thread of each rank. At the boundary before the last of
these steps it is swapped in, and that step is on trial. `executor` starts this by torchrun.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from optpipe.anytime import solve
from optpipe_runtime.demo.on_ranks import measure_on_ranks
from optpipe_runtime.fidelity import paced
from optpipe_runtime.pipeline import Pipeline

WARM_UP, BETWEEN, SWAPS = 3, 3, 15
TIMES = paced.Times(4.0, 4.0, 3.0, 0.0)
MICROBATCHES = 8


@dataclass(frozen=True)
class SwapCost:
    """Medians in ms of whole calls of `Pipeline.step` on the slowest rank. `outside_ms` is the part of a call outside
    the step itself: the boundary before it, and on trial the snapshot before and the vote after it."""

    swaps: int
    step_ms: float  # of steps without an offer
    prepared_ms: float  # of steps during which the offer was shared and prepared
    swapped_ms: float  # of the first step by the new schedule
    outside_ms: float
    prepared_outside_ms: float
    swapped_outside_ms: float

    @property
    def ratio(self) -> float:
        """The time of a step with a swap relative to one without."""
        return self.swapped_ms / self.step_ms

    @property
    def prepared_ratio(self) -> float:
        return self.prepared_ms / self.step_ms


def swap_cost(pipe: Pipeline, inputs: Any, targets: Any, swaps: int) -> SwapCost:
    """Collective. A schedule must be loaded."""
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "prepared": [], "swapped": []}

    def step() -> tuple[float, float]:
        begun = time.perf_counter()
        step_ms = pipe.step(inputs, targets).step_ms
        whole_ms = (time.perf_counter() - begun) * 1e3
        of_ranks = pipe.gather((whole_ms, whole_ms - step_ms))
        return max(ms for ms, _ in of_ranks), max(ms for _, ms in of_ranks)

    for _ in range(WARM_UP):
        step()
    assert pipe.schedule is not None
    for _ in range(swaps):
        times["plain"] += [step() for _ in range(BETWEEN)]
        version = pipe.version
        if pipe.number == 0:
            pipe.offer(pipe.schedule)
        times["prepared"].append(step())
        while pipe.preparing:
            took = step()
            times["swapped" if pipe.version != version else "prepared"].append(took)
    whole, outside = ({kind: median(pair[k] for pair in pairs) for kind, pairs in times.items()} for k in (0, 1))
    return SwapCost(
        len(times["swapped"]),
        *(whole[kind] for kind in ("plain", "prepared", "swapped")),
        *(outside[kind] for kind in ("plain", "prepared", "swapped")),
    )


def run(swaps: int = SWAPS) -> SwapCost:
    """Collective: measures on paced stages, one on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(MICROBATCHES * paced.SHAPE[0], *paced.SHAPE[1:])
    with Pipeline({rank: paced.Stage(TIMES)}, range(ranks), paced.loss, MICROBATCHES) as pipe:
        problem = pipe.profile(x, x, activation_budget_bytes=2**50)
        pipe.load(solve(problem, method="zb-h1", time_limit_s=10).schedule if rank == 0 else None)
        return swap_cost(pipe, x, x, swaps)


def main() -> None:
    """`python -m benchmarks.training.swap ANSWER`, under torchrun."""
    measure_on_ranks(lambda: asdict(run()), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
