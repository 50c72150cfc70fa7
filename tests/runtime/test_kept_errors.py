"""An error that a rank keeps does not hold the pipeline's connections: the other ranks hear of the failure."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch.distributed as dist
from support.ranks import cases
from support.ranks.cases import batch, loss_fn, own_stages, pipeline, problem
from support.ranks.worker import Ranks
from torch import nn

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline

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
        with pipeline(_own(world), schedule) as pipe:
            return str(kept[0]), pipe.step(*batch(0, 1)).losses
    finally:
        gc.enable()


def test_the_error_of_a_rank_that_lost_another(four_ranks: Ranks) -> None:
    """Rank 1 waits for what rank 2 sends by way of rank 0 or 3, which lose rank 2 and keep that error."""
    errors, losses = zip(*four_ranks(learning, world=4, failing=2), strict=True)
    why = "rank 2 was learning stage 2, by its first forward: ValueError: not today"
    assert errors == (why, why, "not today", why)
    assert losses[3] == pytest.approx(cases.plain(4, 1)[0][0])


def test_the_error_of_the_rank_that_failed(ranks: Ranks) -> None:
    """In a function of torch."""
    (own, _), (heard, losses) = ranks(gathering, world=2)
    assert "<lambda>" in own
    assert heard.startswith("rank 0: ")
    assert heard.endswith(own)
    assert losses == pytest.approx(cases.plain(2, 1)[0][0])
