"""A problem's figures as numpy arrays, for the inner loops of the core and the solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optpipe.model.arrays import NONE, OFF_ROUTE, UNLIMITED, Flags, Floats, Ints, Table
from optpipe.model.ops import Kind
from optpipe.model.records import Device, Stage

# The field that says how long an op of each kind takes; drops, accepts and vacates take no time.
MS_FIELDS: dict[Kind, tuple[str, ...]] = {
    Kind.F: ("forward_ms",),
    Kind.B: ("backward_input_ms",),
    Kind.W: ("backward_weight_ms",),
    Kind.BW: ("backward_input_ms", "backward_weight_ms"),
    Kind.C: ("recompute_ms",),
    Kind.O: ("offload_ms",),
    Kind.R: ("reload_ms",),
    Kind.E: ("evict_ms",),
    Kind.L: ("load_ms",),
    Kind.G: ("gradient_out_ms",),
    Kind.U: ("update_ms",),
    Kind.P: ("parameters_in_ms",),
}
IN_PARTS = (Kind.O, Kind.R)


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth
class Costs:
    """Arrays by stage (length S), by route and stage, or by device (length D).

    What a stage cannot do costs 0 and is marked in `can_...`.
    """

    device: Ints  # (S,) the device of each stage
    ms: Floats  # (len(Kind), S) duration by kind and stage; for O and R of one part
    activation: Ints  # (S,) bytes
    saved_for_weight: Ints  # (S,) bytes
    offload: Ints  # (S,) bytes of all parts
    parts: Ints  # (S,)
    checkpoint: Ints  # (S,) bytes
    evict: Ints  # (S,) bytes
    can_offload: Flags  # (S,)
    can_recompute: Flags  # (S,)
    can_evict: Flags  # (S,)
    can_update: Flags  # (S,)
    route: Ints  # (m,) route of each micro-batch
    before: Ints  # (routes, S) the stage before on the route, `NONE` for the first, `OFF_ROUTE` if it is not on it
    after: Ints  # (routes, S) the stage after, likewise
    activation_budget: Ints  # (D,) bytes
    host_memory: Ints  # (D,) bytes, `UNLIMITED` where nothing limits it
    link: Ints  # (D,) number of the link that each device uses
    peer: Ints  # (D,) the device to which each may evict, or `NONE`

    @classmethod
    def from_records(
        cls,
        devices: Sequence[Device],
        stages: Sequence[Stage],
        routes: Sequence[Sequence[int]],
        microbatch_routes: Sequence[int],
    ) -> Costs:
        ms = np.zeros((len(Kind), len(stages)))
        for kind, fields in MS_FIELDS.items():
            for s, stage in enumerate(stages):
                parts = stage.offload_parts if kind in IN_PARTS else 1
                ms[kind, s] = sum(getattr(stage, field) or 0.0 for field in fields) / parts
        before = np.full((len(routes), len(stages)), OFF_ROUTE)
        after = before.copy()
        for r, route in enumerate(routes):
            before[r, route] = (NONE, *route[:-1])
            after[r, route] = (*route[1:], NONE)
        names = [device.link or f"\0{d}" for d, device in enumerate(devices)]  # \0: a link of one's own
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}

        def by_stage(field: str) -> Ints:
            return np.array([getattr(stage, field) or 0 for stage in stages])

        def marked(field: str) -> Flags:
            return np.array([getattr(stage, field) for stage in stages])

        return cls(
            device=by_stage("device"),
            ms=ms,
            activation=by_stage("activation_bytes"),
            saved_for_weight=by_stage("saved_for_weight_bytes"),
            offload=by_stage("offload_bytes"),
            parts=by_stage("offload_parts"),
            checkpoint=by_stage("checkpoint_bytes"),
            evict=by_stage("evict_bytes"),
            can_offload=marked("can_offload"),
            can_recompute=marked("can_recompute"),
            can_evict=marked("can_evict"),
            can_update=marked("can_update"),
            route=np.array(microbatch_routes),
            before=before,
            after=after,
            activation_budget=np.array([device.activation_budget_bytes for device in devices]),
            host_memory=np.array([UNLIMITED if d.host_memory_bytes is None else d.host_memory_bytes for d in devices]),
            link=np.array([number[name] for name in names]),
            peer=np.array([NONE if device.peer is None else device.peer for device in devices]),
        )

    def part_bytes(self, stage: Table | Ints, part: Table | Ints) -> Ints:
        """Bytes of one part: equal ones that add up to `offload_bytes` exactly. Arrays of one shape."""
        n, total = self.parts[stage], self.offload[stage]
        upto: Ints = total * (part + 1) // n
        return upto - total * part // n
