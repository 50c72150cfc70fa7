"""Problems of equal or nearly equal stages, as benchmarks measure them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optpipe.model.problem import Problem
from optpipe.model.records import Device, Stage

GB = 10**9
Times = tuple[float, float, float]  # of F, B and W in ms


def stage_costs(times: Times, size: int, saved: int | None = None, transfer_ms: float | None = None) -> dict[str, Any]:
    """The costs of a stage or a layer.

    Parameters
    ----------
    size
        Bytes of its activation.
    saved
        Bytes of it that W needs; all of them by default.
    transfer_ms
        How long it takes to offload the activation, or to reload it; None: it stays.
    """
    forward, backward, weight = times
    fields = {
        "forward_ms": forward,
        "backward_input_ms": backward,
        "backward_weight_ms": weight,
        "activation_bytes": size,
        "saved_for_weight_bytes": size if saved is None else saved,
    }
    if transfer_ms is not None:
        fields |= {"offload_ms": transfer_ms, "reload_ms": transfer_ms, "offload_bytes": size}
    return fields


def pipeline(
    stages: Sequence[dict[str, Any]], microbatches: int, budget: int, devices: int | None = None, **fields: Any
) -> Problem:
    """The problem of these stages.

    Parameters
    ----------
    stages
        Costs of each. They go to the devices in turns.
    budget
        Bytes of activations that each device can hold.
    devices
        As many as stages by default.
    fields
        Further fields of the problem.
    """
    count = devices or len(stages)
    return Problem(
        microbatches=microbatches,
        devices=(Device(activation_budget_bytes=budget),) * count,
        stages=tuple(Stage(device=s % count, **each) for s, each in enumerate(stages)),
        **fields,
    )


def all_kept(times: Sequence[Times], microbatches: int, size: int = 1) -> Problem:
    """One stage a device with these times, which saves `size` bytes, all of them until W; memory for everything."""
    return pipeline([stage_costs(each, size) for each in times], microbatches, size * microbatches)


def with_budget(problem: Problem, budget: int) -> Problem:
    """The problem with as many bytes of activations on each device."""
    devices = [device.model_copy(update={"activation_budget_bytes": budget}) for device in problem.devices]
    return problem.replace(devices=devices)


def offloading(devices: int, microbatches: int, room: int = 3) -> Problem:
    """Memory for `room` activations. Each takes 12 ms to offload and 12 ms to reload; F + B + W take 28 ms."""
    stage = stage_costs((10.0, 10.0, 8.0), 5 * GB, saved=2 * GB, transfer_ms=12.0)
    return pipeline([stage] * devices, microbatches, room * 5 * GB, p2p_ms=1.0)
