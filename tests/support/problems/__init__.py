"""The one place where tests build problems: `pipeline(4, 8, 20, stage((10, 10, 8), (5, 2), offload=(12, 12, 5)))`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optpipe.model.problem import Problem

GROUPS = {
    "offload": ("offload_ms", "reload_ms", "offload_bytes"),
    "recompute": ("recompute_ms", "checkpoint_bytes"),
    "evict": ("evict_ms", "load_ms", "evict_bytes"),
    "update": ("gradient_out_ms", "update_ms", "parameters_in_ms"),
}


def stage(times: Sequence[float] = (1, 1, 1), sizes: Sequence[int] = (10, 4), **more: Any) -> dict[str, Any]:
    """The fields of a stage.

    Parameters
    ----------
    times
        Of F, B and W, in ms.
    sizes
        Bytes of the activation, and of what stays saved for W.
    more
        Further fields, or whole groups of them: `offload=(ms out, ms back, bytes)`, `recompute=(ms, checkpoint bytes)`,
        `evict=(ms out, ms back, bytes)`, `update=(ms out, ms, ms in)`.
    """
    fields = dict(zip(("forward_ms", "backward_input_ms", "backward_weight_ms"), map(float, times), strict=True))
    fields |= dict(zip(("activation_bytes", "saved_for_weight_bytes"), sizes, strict=True))
    for name, value in more.items():
        group = dict(zip(GROUPS[name], value, strict=True)) if name in GROUPS else {name: value}
        fields |= {key: float(x) if key.endswith("_ms") and x is not None else x for key, x in group.items()}
    return fields


def pipeline(
    devices: int,
    microbatches: int,
    memory: int | Sequence[int],
    stages: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    **fields: Any,
) -> Problem:
    """A problem of one stage a device, or of the stages given, which then name their devices.

    Parameters
    ----------
    memory
        The activation budget in bytes, of every device or of each.
    stages
        One `stage` for all devices, or a list; in a list of `devices` stages each is on its own device by default.
    fields
        Of the problem, such as `p2p_ms=1.0`; `device={...}` are further fields of every device.
    """
    device = fields.pop("device", {})
    budgets = [memory] * devices if isinstance(memory, int) else list(memory)
    each = [stages] * devices if isinstance(stages, Mapping) else list(stages)
    content = {
        "microbatches": microbatches,
        "devices": [{"activation_budget_bytes": budget, **device} for budget in budgets],
        "stages": [{"device": d, **costs} for d, costs in enumerate(each)],
        **fields,
    }
    return Problem.from_dict(content)


def with_budgets(problem: Problem, memory: int | Sequence[int]) -> Problem:
    """The problem with another activation budget in bytes, of every device or of each."""
    budgets = [memory] * len(problem.devices) if isinstance(memory, int) else memory
    devices = [
        device.model_copy(update={"activation_budget_bytes": budget})
        for device, budget in zip(problem.devices, budgets, strict=True)
    ]
    return problem.replace(devices=devices)
