"""A problem's figures as numpy arrays, one place for the core's and the solver's inner loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optpipe.model.ops import Kind

if TYPE_CHECKING:
    from optpipe.model.problem import Problem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth
class Costs:
    """Arrays by stage (length S), by route and stage, or by device. What a stage cannot do costs 0 and is marked in
    `can_…`."""

    device: Ints  # (S,) the device of each stage
    ms: Floats  # (len(Kind), S) duration by kind and stage; for O and R of one part
    activation: Ints  # (S,) bytes
    saved_for_weight: Ints  # (S,) bytes
    offload: Ints  # (S,) bytes of all parts
    parts: Ints  # (S,)
    checkpoint: Ints  # (S,) bytes
    evict: Ints  # (S,) bytes
    can_offload: NDArray[np.bool_]  # (S,)
    can_recompute: NDArray[np.bool_]  # (S,)
    can_evict: NDArray[np.bool_]  # (S,)
    can_update: NDArray[np.bool_]  # (S,)
    route: Ints  # (m,) route of each micro-batch
    before: Ints  # (routes, S) the stage before on the route, -1 where it is the first, -2 where the stage is not on it
    after: Ints  # (routes, S) the stage after, likewise
    activation_budget: Ints  # (D,) bytes
    host_memory: Ints  # (D,) bytes, 2^62 where nothing limits it
    link: Ints  # (D,) number of the link that each device uses
    peer: Ints  # (D,) the device to which each may evict, -1 for none

    @classmethod
    def of(cls, problem: Problem) -> Costs:
        stages = problem.stages
        ms = np.zeros((len(Kind), len(stages)))
        for s, stage in enumerate(stages):
            ms[Kind.F, s], ms[Kind.B, s], ms[Kind.W, s] = (
                stage.forward_ms,
                stage.backward_input_ms,
                stage.backward_weight_ms,
            )
            ms[Kind.BW, s] = stage.backward_input_ms + stage.backward_weight_ms
            ms[Kind.C, s] = stage.recompute_ms or 0.0
            ms[Kind.O, s] = (stage.offload_ms or 0.0) / stage.offload_parts
            ms[Kind.R, s] = (stage.reload_ms or 0.0) / stage.offload_parts
            ms[Kind.E, s], ms[Kind.L, s] = stage.evict_ms or 0.0, stage.load_ms or 0.0
            ms[Kind.G, s], ms[Kind.U, s] = stage.gradient_out_ms or 0.0, stage.update_ms or 0.0
            ms[Kind.P, s] = stage.parameters_in_ms or 0.0
        before = np.full((len(problem.all_routes), len(stages)), -2)
        after = before.copy()
        for r, route in enumerate(problem.all_routes):
            before[r, route] = (-1, *route[:-1])
            after[r, route] = (*route[1:], -1)
        names = [device.link or f"\0{d}" for d, device in enumerate(problem.devices)]  # \0: a link of one's own
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return cls(
            device=np.array([stage.device for stage in stages]),
            ms=ms,
            activation=np.array([stage.activation_bytes for stage in stages]),
            saved_for_weight=np.array([stage.saved_for_weight_bytes for stage in stages]),
            offload=np.array([stage.offload_bytes or 0 for stage in stages]),
            parts=np.array([stage.offload_parts for stage in stages]),
            checkpoint=np.array([stage.checkpoint_bytes or 0 for stage in stages]),
            evict=np.array([stage.evict_bytes or 0 for stage in stages]),
            can_offload=np.array([stage.can_offload for stage in stages]),
            can_recompute=np.array([stage.can_recompute for stage in stages]),
            can_evict=np.array([stage.can_evict for stage in stages]),
            can_update=np.array([stage.can_update for stage in stages]),
            route=np.array(problem.microbatch_routes or [0] * problem.microbatches),
            before=before,
            after=after,
            activation_budget=np.array([device.activation_budget_bytes for device in problem.devices]),
            host_memory=np.array(
                [2**62 if d.host_memory_bytes is None else d.host_memory_bytes for d in problem.devices]
            ),
            link=np.array([number[name] for name in names]),
            peer=np.array([-1 if device.peer is None else device.peer for device in problem.devices]),
        )

    def part_bytes(self, stage: NDArray[np.int32], part: NDArray[np.int32]) -> Ints:
        """Bytes of one part: equal ones that add up to `offload_bytes` exactly. Arrays of one shape."""
        n, total = self.parts[stage], self.offload[stage]
        upto: Ints = total * (part + 1) // n
        return upto - total * part // n
