"""A failure in a step is reported with rank, op, stage and micro-batch, on the rank where it happens and on those that
wait for it. An error that a rank keeps does not hold the pipeline's connections: the other ranks hear of the
failure."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.ranks.cases import batch, loss_fn, own_stages, pipeline, plain, problem
from support.ranks.worker import Ranks
from torch import Tensor, nn

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.memory.host_pool import OnHost

PROGRAMS = [["0F0", "0O0", "0D0", "0F1", "0R0", "0B0", "0W0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]
COPY = "rank 0 was at 0D0: D of stage 0, micro-batch 0; what failed is 0O0: O of stage 0, micro-batch 0"
LOSS = "rank 1 was at 1F0: F of stage 1, micro-batch 0"
WAITING = "rank 0 was at 0B0: B of stage 0, micro-batch 0, waiting for the gradient of 0B0 from rank 1"


def fail(*_: object) -> Any:
    raise ValueError("not today")


def told_of(what: str) -> list[str]:
    """What this rank is told, and what that came from, when on rank 0 a copy fails, or on the last rank the loss
    does."""
    failing, found = False, list[str]()

    def take_out(self: Any, pieces: Sequence[Tensor]) -> Any:
        return [self._link.out.run(fail)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return fail() if failing else loss_fn(output, target)

    pipe = Pipeline(own_stages([0, 1]), [0, 1], loss, 2)
    pipe.load(Schedule.parse(problem([0, 1], 2), PROGRAMS))
    pipe.step(*batch(0, 2))
    failing, copies = what == "loss", what == "copy" and dist.get_rank() == 0
    try:
        with mock.patch.object(OnHost, "take_out", take_out) if copies else nullcontext():
            pipe.step(*batch(1, 2))
    except Exception as raised:
        error: BaseException | None = raised
        while error is not None:
            found += [str(error), *getattr(error, "__notes__", [])]
            error = error.__cause__
    pipe.close()
    return found


@pytest.mark.parametrize(
    ("what", "failing", "sentence", "other"), [("copy", 0, COPY, None), ("loss", 1, LOSS, WAITING)]
)
def test_a_failure_is_named_on_every_rank(
    ranks: Ranks, what: str, failing: int, sentence: str, other: str | None
) -> None:
    told = ranks(told_of, what=what)
    assert told[failing][:2] == ["not today", sentence]
    assert told[1 - failing][0] == f"{sentence}: ValueError: not today"
    assert other is None or other in told[1 - failing]


# Errors that are kept

Result = tuple[str, list[float] | None]  # this rank's error, and its losses in a step of the next pipeline


def learning(world: int, failing: int) -> Result:
    """One stage raises when it is learned."""
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


def _in_a_row(world: int, modules: dict[int, nn.Module], failing: Callable[[Pipeline], object]) -> Result:
    placement = list(range(world))
    schedule = Schedule.parse(problem(placement, 1), [[f"{s}F0", f"{s}BW0"] for s in placement])
    kept = []
    gc.disable()
    try:
        pipe = Pipeline(modules, placement, loss_fn, 1)
        pipe.load(schedule)
        try:
            failing(pipe)
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
    assert losses[3] == pytest.approx(plain(4, 1)[0][0])


def test_the_error_of_the_rank_that_failed(ranks: Ranks) -> None:
    """In a function of torch."""
    (own, _), (heard, losses) = ranks(gathering, world=2)
    assert "<lambda>" in own
    assert heard.startswith("rank 0: ")
    assert heard.endswith(own)
    assert losses == pytest.approx(plain(2, 1)[0][0])
