"""What a training script does around a pipeline, against the same training in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import rank_cases
import rank_training
from rank_worker import Ranks
from test_executor import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT

from optpipe.schedule import Schedule


def parsed(*programs: list[list[str]], placement: tuple[int, ...] = (0, 1)) -> list[Schedule]:
    m = sum(text.startswith("0F") for program in programs[0] for text in program)
    return [Schedule.parse(rank_cases.problem(placement, m), program) for program in programs]


def close(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-4, atol: float = 1e-7) -> None:
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        np.testing.assert_allclose(grad, expected[name], rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_gradients_are_the_mean_over_the_replicas(four_ranks: Ranks, how: str) -> None:
    """Those of a plain run over the whole batch, with the float32 sums in another order; and the replicas' schedules may differ."""
    schedules = [parsed(ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED), parsed(SPLIT, SPLIT, RECOMPUTED, OFFLOADED)]
    results = four_ranks(rank_training.replicated, schedules=schedules, how=how)
    _, gradients, _ = rank_training.plain(2, 8, steps=4)
    for step in range(4):
        for ranks in ((0, 1), (2, 3)):
            close(results[ranks[0]][step].gradients | results[ranks[1]][step].gradients, gradients[step])


def test_replicas_without_a_wrapper_train_apart(four_ranks: Ranks) -> None:
    """Each to the bit as a plain run over its own half of the batch."""
    schedules = [parsed(SPLIT, OFFLOADED), parsed(OFFLOADED, SPLIT)]
    results = four_ranks(rank_training.replicated, schedules=schedules, how="alone")
    for replica in range(2):
        losses, gradients, _ = rank_training.plain(2, 4, steps=2, replica=replica)
        first, last = results[2 * replica : 2 * replica + 2]
        for step in range(2):
            assert last[step].losses == losses[step]
            found = first[step].gradients | last[step].gradients
            assert found.keys() == gradients[step].keys()
            for name, grad in found.items():
                np.testing.assert_array_equal(grad, gradients[step][name], err_msg=name)
