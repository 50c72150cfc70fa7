"""A problem's figures as numpy arrays, for the inner loops of the core and the solver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from optpipe.model.arrays import NONE, OFF_ROUTE, UNLIMITED, Flags, Floats, Ints, Table
from optpipe.model.ops import IN_PARTS, KINDS, Kind
from optpipe.model.records import Device, EachMs, Message, Stage

FORWARDS, GRADIENTS = range(2)  # rows of `Costs.message_ms`
AMPLE = 2**50  # bytes of host memory, which never run out


@dataclass(frozen=True, eq=False)
class LevelCosts:
    """Arrays by level (length L, of the stage with most), stage and micro-batch. What a stage has not costs 0."""

    count: Ints  # (S,) how many levels each stage has
    recompute_ms: Floats  # (L, S, m) of C
    checkpoint: Ints  # (L, S, m) bytes that stay after F
    offload_ms: Floats  # (L, S, m) of O, of one part of the checkpoint
    reload_ms: Floats  # (L, S, m) of R, of one part of the checkpoint
    offload: Ints  # (L, S, m) bytes of all parts of the checkpoint
    can_offload: Flags  # (L, S)

    @classmethod
    def from_stages(cls, stages: Sequence[Stage], parts: Ints, microbatches: int) -> LevelCosts:
        levels = [stage.all_levels for stage in stages]
        count = np.array([len(each) for each in levels])

        def by_level(field: str, dtype: Any) -> Any:
            """(L, S, m) a view where all micro-batches have the same figures."""
            most = int(count.max())
            figures = [getattr(each[k], field) if k < len(each) else None for k in range(most) for each in levels]
            return _by_microbatch(figures, microbatches, dtype).reshape(most, len(stages), microbatches)

        def of_a_part(field: str) -> Floats:
            ms = by_level(field, np.float64)
            return np.broadcast_to(ms[..., : stored_width(ms)] / parts[:, None], ms.shape)

        return cls(
            count=count,
            recompute_ms=by_level("recompute_ms", np.float64),
            checkpoint=by_level("checkpoint_bytes", np.int64),
            offload_ms=of_a_part("offload_ms"),
            reload_ms=of_a_part("reload_ms"),
            offload=by_level("offload_bytes", np.int64),
            can_offload=by_level("can_offload", np.bool_)[..., 0],
        )


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth
class Costs:
    """Arrays by stage (length S) and micro-batch (length m), by route and stage, or by device (length D).

    What a stage cannot do costs 0 and is marked in `can_...`. Figures that are equal for all micro-batches take the
    memory of one: their arrays are read-only views.
    """

    device: Ints  # (S,) the device of each stage
    ms: Floats  # (len(Kind), S, m) duration by kind, stage and micro-batch; for O and R of one part; of C see `levels`
    message_ms: Floats  # (2, S, m) of the message that the F, the backward of each stage waits for; 0 where none comes
    activation: Ints  # (S, m) bytes
    saved_for_weight: Ints  # (S, m) bytes
    offload: Ints  # (S, m) bytes of all parts
    parts: Ints  # (S,)
    levels: LevelCosts  # what it costs to compute activations again
    evict: Ints  # (S, m) bytes
    lacks: Flags  # (len(Kind), S) kinds of op for which the stage has no time; for O and R its levels may have one
    can_offload: Flags  # (S,)
    can_evict: Flags  # (S,)
    can_update: Flags  # (S,)
    route: Ints  # (m,) route of each micro-batch
    before: Ints  # (routes, S) the stage before on the route, `NONE` for the first, `OFF_ROUTE` if it is not on it
    after: Ints  # (routes, S) the stage after, likewise
    activation_budget: Ints  # (D,) bytes
    node: Ints  # (D,) number of the node whose host memory each device uses
    host_memory: Ints  # (D,) bytes of that node, `UNLIMITED` where nothing limits it
    link: Ints  # (D,) number of the link that each device uses
    peer: Ints  # (D,) the device to which each may evict, or `NONE`

    @classmethod
    def from_records(
        cls,
        devices: Sequence[Device],
        stages: Sequence[Stage],
        routes: Sequence[Sequence[int]],
        microbatch_routes: Sequence[int],
        p2p_ms: EachMs,
        messages: Sequence[Message],
    ) -> Costs:
        m = len(microbatch_routes)
        before = np.full((len(routes), len(stages)), OFF_ROUTE)
        after = before.copy()
        for r, route in enumerate(routes):
            before[r, route] = (NONE, *route[:-1])
            after[r, route] = (*route[1:], NONE)
        route_of = np.array(microbatch_routes)
        node = _numbers(device.node for device in devices)
        shares = (device.host_memory_bytes for device in devices)
        hosts = by_node(node, [AMPLE if share is None else min(share, AMPLE) for share in shares])
        device_of = np.array([stage.device for stage in stages])

        def nbytes(field: str) -> Ints:
            figures: Ints = _by_microbatch([getattr(stage, field) for stage in stages], m, np.int64)
            return figures

        def marked(field: str) -> Flags:
            return np.array([getattr(stage, field) for stage in stages])

        parts = np.array([stage.offload_parts for stage in stages])
        return cls(
            device=device_of,
            ms=_durations_ms(stages, parts, m),
            message_ms=_message_ms(p2p_ms, messages, device_of, np.array([before[route_of].T, after[route_of].T])),
            activation=nbytes("activation_bytes"),
            saved_for_weight=nbytes("saved_for_weight_bytes"),
            offload=nbytes("offload_bytes"),
            parts=parts,
            levels=LevelCosts.from_stages(stages, parts, m),
            evict=nbytes("evict_bytes"),
            lacks=np.array([[_lacks(stage, kind) for stage in stages] for kind in Kind]),
            can_offload=marked("can_offload"),
            can_evict=marked("can_evict"),
            can_update=marked("can_update"),
            route=route_of,
            before=before,
            after=after,
            activation_budget=np.array([device.activation_budget_bytes for device in devices]),
            node=node,
            host_memory=np.where(hosts < AMPLE, hosts, UNLIMITED),
            link=_numbers(device.link for device in devices),
            peer=np.array([NONE if device.peer is None else device.peer for device in devices]),
        )

    @property
    def can_recompute(self) -> Flags:
        """(S,) whether the stage has levels."""
        can: Flags = self.levels.count > 0
        return can

    def level_ms(self, level: int) -> Floats:
        """(len(Kind), S, m) as `ms`, where activations are computed again by a level."""
        ms = self.ms.copy()
        levels = self.levels
        ms[[Kind.C, Kind.O, Kind.R]] = levels.recompute_ms[level], levels.offload_ms[level], levels.reload_ms[level]
        return ms

    def op_ms(self, kind: Table | Ints, stage: Table | Ints, microbatch: Table | Ints, level: Ints) -> Floats:
        """(n,) durations of ops of activations that are computed again by a level, or `NONE`. Arrays of one shape."""
        ms: Floats = self.ms[kind, stage, microbatch]
        levels = self.levels
        of_kind = {Kind.C: levels.recompute_ms, Kind.O: levels.offload_ms, Kind.R: levels.reload_ms}
        for k, by_level in of_kind.items():
            rows = np.flatnonzero((kind == k) & (level >= 0))
            ms[rows] = by_level[level[rows], stage[rows], microbatch[rows]]
        return ms

    def part_bytes(
        self, stage: Table | Ints, microbatch: Table | Ints, part: Table | Ints, level: Ints | int = NONE
    ) -> Ints:
        """Bytes of one part: equal ones that add up to `offload` exactly, to that of a level where there is one.
        Arrays of one shape."""
        n, total = self.parts[stage], self.offload[stage, microbatch]
        if np.any(np.greater_equal(level, 0)):
            total = np.where(np.greater_equal(level, 0), self.levels.offload[level, stage, microbatch], total)
        upto: Ints = total * (part + 1) // n
        return upto - total * part // n

    @property
    def host_is_scarce(self) -> Flags:
        """(D,) whether the host memory of each device's node cannot hold all that could be offloaded at once."""
        hosted, passes = np.max([self.offload, *self.levels.offload], axis=0), self.before[self.route].T != OFF_ROUTE
        most = np.zeros(len(self.node), np.int64)
        np.add.at(most, self.device, (hosted * passes).sum(axis=1))
        scarce: Flags = by_node(self.node, most) > self.host_memory
        return scarce

    @cached_property
    def class_of(self) -> Ints:
        """(m,) the class of each micro-batch: those of one class take one route and have the same figures.

        Only such micro-batches can change places in a schedule.
        """
        m = len(self.route)
        levels = self.levels
        figures: list[Floats | Ints] = [self.ms, self.message_ms, self.activation, self.saved_for_weight]
        figures += [self.offload, self.evict, levels.recompute_ms, levels.checkpoint]
        figures += [levels.offload_ms, levels.reload_ms, levels.offload]
        varying = [array.reshape(-1, m) for array in figures if stored_width(array) > 1]
        if not varying and not self.route.any():
            return np.zeros(m, np.int64)
        columns = np.concatenate([self.route[None].astype(np.float64), *varying])
        _, first, alike = np.unique(columns, axis=1, return_index=True, return_inverse=True)
        by_first = np.argsort(np.argsort(first))  # classes are numbered in the order of their first micro-batches
        classes: Ints = by_first[alike.reshape(-1)]
        return classes

    @cached_property
    def representatives(self) -> Ints:
        """(classes,) the first micro-batch of each class."""
        return np.unique(self.class_of, return_index=True)[1]

    @cached_property
    def classes(self) -> list[list[int]]:
        """The micro-batches of each class."""
        return [np.flatnonzero(self.class_of == c).tolist() for c in range(len(self.representatives))]

    @property
    def work_ms(self) -> Floats:
        """(D, m) how long each micro-batch keeps each device busy."""
        work = np.zeros((len(self.node), len(self.route)))
        np.add.at(work, self.device, self.ms[[Kind.F, Kind.B, Kind.W]].sum(axis=0))
        return work

    @property
    def are_equal(self) -> bool:
        """Whether all micro-batches of a route have the same figures."""
        return len(self.representatives) == len(np.unique(self.route))


def stored_width(array: Any) -> int:
    """How many micro-batches an array has numbers for: all of them, or 1 where it has the same for all."""
    return int(array.shape[-1]) if array.strides[-1] and array.size else 1


def _by_microbatch(figures: Sequence[Any], microbatches: int, dtype: Any) -> Any:
    """(S, m) the figures, each a number, a tuple or None: a view of (S, 1) where none is a tuple."""
    width = microbatches if any(isinstance(figure, tuple) for figure in figures) else 1
    array = np.zeros((len(figures), width), dtype)
    for row, figure in zip(array, figures, strict=True):
        row[:] = figure or 0
    return np.broadcast_to(array, (len(figures), microbatches))


def _numbers(names: Iterable[str | None]) -> Ints:
    """(D,) a number for each name, and one for each device without."""
    own = [name or f"\0{d}" for d, name in enumerate(names)]
    number = {name: i for i, name in enumerate(dict.fromkeys(own))}
    return np.array([number[name] for name in own])


def by_node(node: Ints, figures: Sequence[int] | Ints) -> Ints:
    """(D,) the sum of figures (D,) over all devices of each one's node."""
    sums = np.zeros(len(node), np.int64)
    np.add.at(sums, node, figures)
    return sums[node]


def _durations_ms(stages: Sequence[Stage], parts: Ints, microbatches: int) -> Floats:
    """(len(Kind), S, m) by the fields of each kind. What C takes depends on the level (`LevelCosts`)."""
    fields = {
        name: _by_microbatch([getattr(stage, name) for stage in stages], microbatches, np.float64)
        for info in KINDS.values()
        for name in info.ms
    }
    width = max(map(stored_width, fields.values()))
    table = np.zeros((len(Kind), len(stages), width))
    for kind, info in KINDS.items():
        table[kind] = sum(fields[name][:, :width] for name in info.ms)
        if info.in_parts:
            table[kind] /= parts[:, None]
    return np.broadcast_to(table, (len(Kind), len(stages), microbatches))


def _lacks(stage: Stage, kind: Kind) -> bool:
    return kind not in IN_PARTS and any(getattr(stage, field) is None for field in KINDS[kind].ms)


def _message_ms(p2p_ms: EachMs, messages: Sequence[Message], device: Ints, senders: Ints) -> Floats:
    """(2, S, m) of the messages from the stages `senders` (2, S, m), which are `NONE` where no message comes."""
    is_one = isinstance(p2p_ms, float) and not messages and (senders == senders[..., :1]).all()
    width = 1 if is_one else senders.shape[2]
    sender = senders[:, :, :width]
    home, from_device = device[None, :, None], device[sender]
    crosses = (sender >= 0) & (from_device != home)
    ms = np.where(crosses, np.array(p2p_ms), 0.0)
    for message in messages:
        this = crosses & (from_device == message.sender) & (home == message.receiver)
        ms = np.where(this, np.array(message.ms), ms)
    return np.broadcast_to(ms, senders.shape)
