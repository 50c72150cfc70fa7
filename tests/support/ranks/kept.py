"""What the ranks run in `test_kept_errors`: each keeps the error of a pipeline while it makes the next one."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from support.ranks.cases import batch, loss_fn, own_stages, problem

Result = tuple[str, list[float] | None]  # this rank's error, and its losses in a step of the next pipeline


def learning(world: int, failing: int) -> Result:
    """One stage raises when it is learned."""

    def fail(*_: object) -> None:
        raise ValueError("not today")

    modules = _own(world)
    if failing in modules:
        modules[failing].register_forward_pre_hook(fail)
    return _in_a_row(world, modules, lambda pipe: pipe.step(*batch(0, 1)))


def gathering(world: int) -> Result:
    """Rank 0 gives what cannot be pickled."""
    value = (lambda: None) if dist.get_rank() == 0 else None
    return _in_a_row(world, _own(world), lambda pipe: pipe.gather(value))


def _own(world: int) -> dict[int, nn.Module]:
    return dict(own_stages(range(world)))


def _in_a_row(world: int, modules: dict[int, nn.Module], fail: Callable[[Pipeline], object]) -> Result:
    placement = list(range(world))
    schedule = Schedule.parse(problem(placement, 1), [[f"{s}F0", f"{s}BW0"] for s in placement])
    kept = []
    gc.disable()
    try:
        pipe = Pipeline(modules, placement, loss_fn, 1)
        pipe.load(schedule)
        try:
            fail(pipe)
        except Exception as error:
            kept.append(error)
        pipe.close()
        with Pipeline(_own(world), placement, loss_fn, 1) as pipe:
            pipe.load(schedule)
            return str(kept[0]), pipe.step(*batch(0, 1)).losses
    finally:
        gc.enable()
