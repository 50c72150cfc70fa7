"""The one place where tests build problems: `pipeline(4, 8, 20, stage((10, 10, 8), (5, 2), offload=(12, 12, 5)))`."""

from collections.abc import Mapping, Sequence
from typing import Any

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule

GROUPS = {
    "offload": ("offload_ms", "reload_ms", "offload_bytes"),
    "recompute": ("recompute_ms", "checkpoint_bytes"),
    "evict": ("evict_ms", "load_ms", "evict_bytes"),
    "update": ("gradient_out_ms", "update_ms", "parameters_in_ms"),
}


def stage(times: Sequence[float] = (1, 1, 1), sizes: Sequence[int] = (10, 4), **more: Any) -> dict[str, Any]:
    """The fields of a stage: ms of F, B and W; bytes of the activation, and of what stays saved for W; and `more`.

    Groups of fields are `offload=(ms out, ms back, bytes)`, `recompute=(ms, checkpoint bytes)`,
    `evict=(ms out, ms back, bytes)` and `update=(ms out, ms, ms in)`.
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
    """A problem with so many bytes of memory on every device or on each.

    `stages` is one `stage` for all devices, or a list, in which stage s is on device s unless it says another. `fields`
    are the problem's, such as `p2p_ms=1.0`; `device={...}` are further fields of every device.
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


def parsed(problem: Problem, *programs: str, **fields: Any) -> Schedule:
    """The schedule of these programs: `parsed(problem, "0F0 0BW0", "1F0 1BW0")`."""
    return Schedule.parse(problem, [program.split() for program in programs], **fields)


def with_budgets(problem: Problem, memory: int | Sequence[int]) -> Problem:
    """The problem with another activation budget in bytes, of every device or of each."""
    budgets = [memory] * len(problem.devices) if isinstance(memory, int) else memory
    devices = [
        device.model_copy(update={"activation_budget_bytes": budget})
        for device, budget in zip(problem.devices, budgets, strict=True)
    ]
    return problem.replace(devices=devices)
