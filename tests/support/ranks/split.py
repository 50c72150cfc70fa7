"""What the ranks run in `test_split_stages`: pipelines of two equal stages, profiled and then trained."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import mse_loss

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from support.ranks.cases import numbers, one_at_a_time
from support.ranks.odd_stages import BATCH, STAGES, WIDTH


class Trained(NamedTuple):
    """Of one rank: the largest difference to a gradient of a plain run, as a part of the largest gradient, and what did
    not wait for W."""

    difference: float
    at_b: frozenset[str]


def trained(names: Sequence[str], microbatches: int, programs: Sequence[Sequence[str]]) -> list[Trained]:
    """By name: a step of `programs`, and one with every micro-batch offloaded, against plain autograd."""
    rank, found = torch.distributed.get_rank(), []
    for name in names:
        torch.manual_seed(1)
        modules = [STAGES[name]() for _ in range(2)]
        plain = nn.Sequential(*copy.deepcopy(modules))
        for part in plain.modules():
            part.delays = False
        inputs, targets = torch.randn(2, microbatches * BATCH, 8, WIDTH)
        with Pipeline({rank: modules[rank]}, [0, 1], mse_loss, microbatches) as pipe:
            problem = pipe.profile(inputs, targets, activation_budget_bytes=10**9, repeats=1)
            for program in (programs, [one_at_a_time(s, microbatches, 1) for s in range(2)]):
                pipe.load(Schedule.parse(problem, program))
                pipe.step(inputs, targets)
            at_b = pipe.at_b[rank]
        for _ in range(2):
            for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
                torch.autograd.backward(mse_loss(plain(x), y) / microbatches)
        expected, ours = numbers({rank: plain[rank]}), numbers({rank: modules[rank]})
        assert ours.keys() == expected.keys()
        largest = max(float(abs(grad).max()) for grad in expected.values())
        found.append(Trained(max(float(abs(grad - expected[key]).max()) for key, grad in ours.items()) / largest, at_b))
    return found
