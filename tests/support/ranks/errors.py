"""What the ranks run in `test_errors`: a copy or a loss fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.memory.host_pool import OnHost
from support.ranks.cases import batch, loss_fn, own_stages


def told(schedule: Schedule, placement: Sequence[int], what: str) -> list[str]:
    """What this rank is told, and what that came from, when on rank 0 a copy fails, or on the last rank the loss
    does."""
    error: BaseException | None = _error(schedule, placement, what)
    found = []
    while error is not None:
        found += [str(error), *getattr(error, "__notes__", [])]
        error = error.__cause__
    return found


def _error(schedule: Schedule, placement: Sequence[int], what: str) -> Exception | None:
    real, rank = OnHost.take_out, torch.distributed.get_rank()

    def take_out(self: Any, pieces: Sequence[Tensor]) -> Any:
        return [self._link.out.run(_fail)] if rank == 0 else real(self, pieces)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return _fail() if failing else loss_fn(output, target)

    failing = False
    pipe = Pipeline(own_stages(placement), placement, loss, schedule.problem.microbatches)
    pipe.load(schedule)
    pipe.step(*batch(0, schedule.problem.microbatches))
    failing = what == "loss"
    if what == "copy":
        OnHost.take_out = take_out  # type: ignore[method-assign]
    try:
        pipe.step(*batch(1, schedule.problem.microbatches))
    except Exception as error:
        return error
    finally:
        OnHost.take_out = real  # type: ignore[method-assign]
        pipe.close()
    return None


def _fail() -> Any:
    raise ValueError("not today")
