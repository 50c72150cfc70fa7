"""`resized`: the same pipeline on more or fewer devices."""

from __future__ import annotations

import numpy as np

from optpipe.errors import InputError
from optpipe.model.placement import MOST_CHUNKS, Placement, Shape
from optpipe.model.problem import Problem

SHAPES: tuple[Shape, ...] = ("looped", "v")


def resized(problem: Problem, devices: int) -> Problem | None:
    """Returns the pipeline on so many devices: the first and the last one stay, in between some are there once more or
    are left out, each with its stages.

    None where stages do not pass the devices in looped or V-shaped chunks, where devices share links or evict, and
    where that would be more devices or stages than a problem may have.
    """
    p, order = len(problem.devices), [stage.device for stage in problem.stages]
    chunks = len(order) // p
    apart = not problem.shared_links and all(device.peer is None for device in problem.devices)
    in_order = [list(route) for route in problem.all_routes] == [list(range(len(order)))]
    if devices < 1 or not 1 <= chunks <= MOST_CHUNKS or not in_order or not apart:
        return None
    shapes = [shape for shape in SHAPES if order == Placement(chunks=chunks, shape=shape).along(range(p))]
    if not shapes:
        return None
    like = np.rint(np.linspace(0, p - 1, devices)).astype(int).tolist()
    on = Placement(chunks=chunks, shape=shapes[0]).along(range(devices))
    stages = [problem.stages[c * p + k] for c in range(chunks) for k in like]
    try:
        return problem.replace(
            devices=tuple(problem.devices[d] for d in like),
            stages=tuple(stage.model_copy(update={"device": d}) for stage, d in zip(stages, on, strict=True)),
            routes=None,
            layers=None,
        )
    except InputError:
        return None
