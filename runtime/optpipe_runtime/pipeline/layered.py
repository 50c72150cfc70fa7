"""`profile_layers`: measures a model layer by layer, so that a search can cut it and place its stages.

problem = profile_layers(model, loss_fn, microbatches, inputs, targets, activation_budget_bytes=2 * 10**9)
schedule = on_all_ranks(optpipe.solve(problem, placements="all").schedule if dist.get_rank() == 0 else None)
stages = stages_of(model, schedule)  # as they were found
placement = [stage.device for stage in schedule.problem.stages]
with Pipeline(stages, placement, loss_fn, microbatches) as pipe:
    pipe.load(schedule)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from optpipe.errors import InputError
from optpipe.model.placement import rechunk
from optpipe.model.problem import Problem
from optpipe_runtime.models.part import evenly
from optpipe_runtime.models.stages import model_of, stages_of
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.stage.io import LossFn

T = TypeVar("T")


def profile_layers(
    model: Any,
    loss_fn: LossFn,
    microbatches: int,
    inputs: Any = None,
    targets: Any = None,
    activation_budget_bytes: int | None = None,
    offload_parts: int = 1,
    repeats: int = 7,
    kwargs: Mapping[Any, Any] | None = None,
    **options: Any,
) -> Problem:
    """Measures each layer of a model as a stage of its own. Collective.

    Parameters
    ----------
    model
        A list of layers, an nn.Sequential, or a causal language model of transformers, as for `stages_of`.
    loss_fn, microbatches, options
        As for `Pipeline`.
    inputs, targets, activation_budget_bytes, offload_parts, repeats, kwargs
        As for `Pipeline.profile`. Every rank has some layers, so inputs are needed on the first rank, targets on the
        last one, and named arguments on all.

    Returns
    -------
    Problem
        With `layers`, and one stage on each rank, as even as the layers allow; the same on every rank.
    """
    ranks, count = dist.get_world_size(options.get("group")), model_of(model).layers
    placement = [rank for rank, share in enumerate(evenly(count, ranks)) for _ in range(share)]
    stages = stages_of(model, placement, [1] * count, rank=dist.get_rank(options.get("group")))
    with Pipeline(stages, placement, loss_fn, microbatches, **options) as pipe:
        measured = pipe.profile(inputs, targets, activation_budget_bytes, offload_parts, repeats, kwargs)
    layers = [stage.model_dump(exclude={"device"}, exclude_none=True) for stage in measured.stages]
    return rechunk(measured.replace(layers=layers), 1)


def on_all_ranks(value: T | None, group: dist.ProcessGroup | None = None) -> T:
    """What rank 0 of the group gives, such as the schedule that it has found, on every rank. Collective. Raises
    `InputError` on all ranks if it is None."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    value = box[0]
    if value is None:
        raise InputError(
            "on_all_ranks was given None on rank 0; if a search found no schedule, its result has the reason"
        )
    return value
