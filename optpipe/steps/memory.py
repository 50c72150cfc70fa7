"""Whether each micro-batch of a step fits by itself: what no order of the step can mend is told before it."""

from __future__ import annotations

import numpy as np

from optpipe.errors import InputError
from optpipe.model.arrays import Ints
from optpipe.model.problem import Problem
from optpipe.text import distinct_sizes


class StepMemoryError(InputError):
    """A step has no schedule: a micro-batch needs more memory than a device has, in whatever order they run.

    Attributes
    ----------
    microbatch, device
        Which micro-batch and which device.
    """

    def __init__(self, message: str, microbatch: int, device: int) -> None:
        super().__init__(message)
        self.microbatch, self.device = microbatch, device

    def __reduce__(self) -> tuple[type[StepMemoryError], tuple[str, int, int]]:
        return type(self), (str(self), self.microbatch, self.device)


def require_room(problem: Problem) -> None:
    """Raises StepMemoryError, about the micro-batch that needs most, if one does not fit on a device by itself."""
    least = least_alone(problem)
    budget = problem.costs.activation_budget
    if (least.max(axis=1) <= budget).all():
        return
    device, microbatch = np.unravel_index(int((least - budget[:, None]).argmax()), least.shape)
    needed, limit = distinct_sizes(int(least[device, microbatch]), int(budget[device]))
    raise StepMemoryError(
        f"devices[{device}].activation_budget_bytes = {limit}: micro-batch {microbatch} by itself needs at least "
        f"{needed}",
        int(microbatch),
        int(device),
    )


def least_alone(problem: Problem) -> Ints:
    """(D, m) bytes that each micro-batch needs on each device in every schedule, a lower bound.

    While a stage runs F, all of its activation is there, and of each stage that the micro-batch has passed before on
    the same device what an offload, an eviction or a recompute leaves.
    """
    costs, devices = problem.costs, len(problem.devices)
    left = costs.activation.copy()
    levels = costs.levels
    has_level = levels.count > np.arange(len(levels.checkpoint))[:, None]
    for possible, kept in (
        (costs.can_offload, costs.activation - costs.offload),
        *zip(has_level, levels.checkpoint - levels.offload, strict=True),
        (costs.can_evict, costs.activation - costs.evict),
    ):
        left = np.where(possible[:, None], np.minimum(left, kept), left)
    least, passed = np.zeros((2, devices, problem.microbatches), dtype=np.int64)
    for r, route in enumerate(problem.all_routes):
        takes = costs.route == r
        for s in route:
            d = costs.device[s]
            least[d] = np.where(takes, np.maximum(least[d], passed[d] + costs.activation[s]), least[d])
            passed[d] += np.where(takes, left[s], 0)
    return least
