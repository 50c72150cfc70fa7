"""Optimizers on the host for stages of which each rank has a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks.cases import Gradients, batch, batches, loss_fn, plain_training, problem
from support.ranks.inner import make_stages, mesh, parallel
from support.ranks.optimizer import momentum
from support.ranks.programs import SPLIT
from support.ranks.replicas import parameters
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.ranks.parts import placed


class Ran(NamedTuple):
    losses: list[list[float] | None]
    norms: list[float]
    parameters: Gradients


def trained(programs: Sequence[Sequence[str]], hosted: bool, max_norm: float, steps: int) -> Ran:
    """Both stages by tensor parallelism, updated on the host or on the device."""
    stage, m = dist.get_rank() // 2, 4
    module = parallel(make_stages()[stage], mesh()["tensor"])
    here = momentum([torch.zeros(0)] if hosted else list(module.named_parameters()))
    hosts: dict[str, Any] = {"host_optimizers": dict.fromkeys((0, 1), momentum), "clip_host_updates": max_norm > 0}
    ran = Ran([], [], {})
    groups = {"group": mesh()["pipe"].get_group(), "inner": mesh()["tensor"]}
    with Pipeline({stage: module}, [0, 1], loss_fn, m, **groups, **(hosts if hosted else {})) as pipe:
        pipe.load(Schedule.parse(problem((0, 1), m), programs))
        for step in range(steps):
            here.zero_grad()
            ran.losses.append(pipe.step(*batch(step, m)).losses)
            if max_norm:
                ran.norms.append(pipe.clip_grad_norm_(max_norm))
            for parameter in module.parameters() if not hosted else ():
                parameter.grad = placed(parameter)  # torch may leave partial sums, which an optimizer rounds otherwise
            here.step()
        pipe.synchronize()
    return ran._replace(parameters=parameters({stage: module}))


@pytest.mark.parametrize("max_norm", [0.0, 0.2])
def test_tensor_parallel_stages_are_updated_on_the_host_as_on_the_device(four_ranks: Ranks, max_norm: float) -> None:
    """To the bit; where they are clipped, to the rounding of the norm of all parts."""
    found, expected = (
        four_ranks(trained, programs=SPLIT, hosted=hosted, max_norm=max_norm, steps=3) for hosted in (True, False)
    )
    for ran, on_device in zip(found, expected, strict=True):
        if ran.losses[0] is not None:
            np.testing.assert_allclose(ran.losses, on_device.losses, rtol=1e-5 if max_norm else 0)
        assert ran.norms == pytest.approx(on_device.norms, rel=1e-6)
        rtol, atol = (1e-4, 1e-5) if max_norm else (0, 0)
        require_close(ran.parameters, on_device.parameters, rtol, atol)
    if max_norm:
        modules = make_stages()
        optimizer = momentum([p for module in modules for p in module.parameters()])
        norms = [step.norm for step in plain_training(modules, batches(3, 4), 4, optimizer, max_norm=max_norm)]
        assert min(norms) > max_norm, "each update is clipped"
        for ran in found:
            assert ran.norms == pytest.approx(norms, rel=1e-4)
