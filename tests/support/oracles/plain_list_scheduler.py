"""The list scheduler of `optpipe.dispatch.clock` as it would be told: devices, links and activations are objects.

Slow, and an oracle: tests compare the compiled one with it, op by op.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

import numpy as np

from optpipe.dispatch.figures import Figures
from optpipe.model.arrays import NONE, Floats
from optpipe.model.rules import Rules

F, B, W, C = range(4)
OUT, BACK = range(2)


@dataclass
class Activation:
    """What a stage saves of a micro-batch, or the checkpoint of it, in parts that leave and come back one after the
    other."""

    stage: int
    microbatch: int
    variant: int  # 0, or 1 + the level by which it is computed again, or -1 where it is evicted
    to_leave: int
    sizes: list[int]
    sent: int = 0
    off_device: int = 0
    back: int = 0
    complete_at: float = 0.0  # when all of it is on the device
    computed_at: float = 0.0  # when it has been computed again

    @property
    def has_parts_to_return(self) -> bool:
        return self.to_leave > 0 and self.back < self.to_leave

    @property
    def is_again(self) -> bool:
        return self.variant > 0

    @property
    def channel(self) -> int:
        return int(self.variant < 0)

    @property
    def has_part_in_host_memory(self) -> bool:
        return self.off_device > self.back


@dataclass
class Place:
    """A device or a host link: something that does one thing at a time."""

    look_at: float
    busy: bool = False
    free_at: float = 0.0

    def look_soon(self, moment: float) -> None:
        self.look_at = min(self.look_at, moment)


@dataclass
class Link(Place):
    carries: tuple[int, Activation] | None = None


@dataclass
class Device(Place):
    stages: list[int] = field(default_factory=list)
    links: list[list[Link]] = field(default_factory=list)  # by channel, on the way out and back
    room: int = 0
    node: int = 0
    pinned: int = 0  # bytes of host memory that it had in use before, and can use again
    peer: "Device | None" = None
    wants: list[Link] = field(default_factory=list)  # that may wait for room here, or for what has left
    frees: int = 0  # when the running op ends
    frees_on_host: int = 0


class PlainListScheduler:
    """Lists all ops of the problem that the figures are of.

    Attributes
    ----------
    start, moved
        (4, S, m) and (2, S, m, parts) as in `optpipe.dispatch.figures.State`.
    """

    def __init__(self, figures: Figures, rules: Rules) -> None:
        self.figures, self.rules = figures, rules
        self.stages, self.microbatches = rules.level.shape
        self.start: Floats = np.full((4, self.stages, self.microbatches), inf)
        self.moved: Floats = np.full((2, self.stages, self.microbatches, figures.part_bytes.shape[2]), inf)
        self.ready: Floats = np.full((4, self.stages, self.microbatches), inf)
        self.place = figures.place[:, figures.class_of[rules.order]]  # (S, m)
        self.ready[F][self.place == 0] = 0.0
        self.begin = [0.0] * self.microbatches
        self.activations = [[self.activation(s, j) for j in range(self.microbatches)] for s in range(self.stages)]
        self.links = [Link(inf) for _ in figures.stages_on_link]
        nodes = figures.node.tolist()
        self.unpinned = dict(zip(nodes, figures.host_memory.tolist(), strict=True))  # by node
        self.devices = [
            Device(
                look_at=0.0,
                stages=np.flatnonzero(figures.device == d).tolist(),
                links=[[self.links[n] for n in of_channel[:, d] if n != NONE] for of_channel in figures.links],
                room=room,
                node=node,
            )
            for d, (room, node) in enumerate(zip(figures.memory.tolist(), nodes, strict=True))
        ]
        for device, peer in zip(self.devices, figures.peer.tolist(), strict=True):
            device.peer = self.devices[peer] if peer != NONE else None
            device.wants += [link for of_channel in device.links for link in of_channel]
            if device.peer and len(device.links) > 1:
                device.peer.wants += device.links[1]
        # By kind and stage: the micro-batches whose op has not started, in order. By stage: what a forward has saved.
        self.to_start = {(k, s): self.microbatches_of(k, s) for k in (F, B, W, C) for s in range(self.stages)}
        self.saved: list[list[Activation]] = [[] for _ in range(self.stages)]
        self.started: Counter[tuple[int, int]] = Counter()  # by kind and stage
        self.next_to_return: dict[tuple[int, int], Activation] = {}  # by channel and stage, when its link last looked

    def activation(self, s: int, j: int) -> Activation:
        passes = self.passes(s, j)
        variant, parts = int((1 + self.rules.level[s, j]) * passes), int(self.rules.parts[s, j] * passes)
        return Activation(s, j, variant, parts, self.figures.part_bytes[variant, s, :, self.column(j)].tolist())

    def run(self) -> bool:
        """Returns whether all compute ops have started."""
        has_relief = any(each.to_leave or each.is_again for row in self.activations for each in row)
        while (place := min((*self.links, *self.devices), key=lambda each: each.look_at)).look_at < inf:
            now = place.look_at
            if isinstance(place, Link):
                place.look_at = inf
                self.serve(place, now)
                continue
            assert isinstance(place, Device)
            if place.busy:
                place.busy = False
                place.room += place.frees
                place.pinned += place.frees_on_host
                place.frees = place.frees_on_host = 0
                if has_relief:
                    self.look_for_room(place, None, now)
                    continue
            place.look_at = inf
            self.dispatch(place, now)
        return not any(self.to_start.values())

    def microbatches_of(self, k: int, s: int) -> list[int]:
        passing = (j for j in range(self.microbatches) if self.passes(s, j))
        return [j for j in passing if k != C or self.activations[s][j].is_again]

    def passes(self, s: int, j: int) -> bool:
        return bool(self.place[s, j] != NONE)

    def column(self, j: int) -> int:
        """Where the figures stand of the micro-batch that enters as the j-th."""
        return int(self.figures.class_of[self.rules.order[j]])

    def transfer_ms(self, way: int, activation: Activation) -> float:
        return self.ms(4 + way, activation.stage, activation.microbatch)

    def ms(self, k: int, s: int, j: int) -> float:
        return float(self.figures.ms[self.activations[s][j].variant, k, s, self.column(j)])

    def device_of(self, s: int) -> Device:
        return self.devices[self.figures.device[s]]

    def stages_served(self, link: Link, way: int) -> list[tuple[int, int]]:
        """Channel and stage of each."""
        return [
            (channel, s)
            for s in range(self.stages)
            for channel, of_channel in enumerate(self.device_of(s).links)
            if of_channel and of_channel[way] is link
        ]

    def needed_at(self, activation: Activation) -> float:
        s, j = activation.stage, activation.microbatch
        backward = self.begin[j] + float(self.figures.offset_ms[B, s, self.column(j)])
        return backward - self.ms(C, s, j) if activation.is_again else backward

    # Host links.

    def serve(self, link: Link, now: float) -> None:
        if link.carries:
            self.end_transfer(link, now)
        if moving := self.next_reload(link, now):
            way, part = BACK, moving.back
            moving.to_leave = moving.sent
            moving.back += 1
            self.device_of(moving.stage).room -= moving.sizes[part]
            if moving.back == moving.sent:
                moving.complete_at = now + self.transfer_ms(BACK, moving)
        elif moving := self.next_offload(link, now):
            way, part = OUT, moving.sent
            moving.sent += 1
            moving.complete_at = inf
            device = self.device_of(moving.stage)
            if moving.channel:
                assert device.peer
                device.peer.room -= moving.sizes[part]
            else:
                again = min(device.pinned, moving.sizes[part])
                device.pinned -= again
                self.unpinned[device.node] -= moving.sizes[part] - again
        else:
            return
        self.moved[way, moving.stage, moving.microbatch, part] = now
        link.carries = way, moving
        link.look_at = link.free_at = now + self.transfer_ms(way, moving)

    def end_transfer(self, link: Link, now: float) -> None:
        assert link.carries
        way, activation = link.carries
        link.carries, device = None, self.device_of(activation.stage)
        if way == OUT:
            size = activation.sizes[activation.off_device]
            activation.off_device += 1
            self.let_go(device, size, link, now)
        elif activation.channel:
            assert device.peer
            self.let_go(device.peer, activation.sizes[0], link, now)
        if not device.busy:
            device.look_soon(now)

    def let_go(self, device: Device, size: int, link: Link, now: float) -> None:
        if device.busy:
            device.frees += size
        else:
            device.room += size
            device.look_soon(now)
        self.look_for_room(device, link, now)

    def look_for_room(self, device: Device, but: Link | None, now: float) -> None:
        for link in device.wants:
            if link is not but:
                link.look_soon(max(now, link.free_at))

    def next_reload(self, link: Link, now: float) -> Activation | None:
        candidates = []
        for channel, s in self.stages_served(link, BACK):
            mine = (each for each in self.saved[s] if each.channel == channel)
            away = next((each for each in mine if each.has_parts_to_return), None)
            self.next_to_return.pop((channel, s), None)
            if away is None:
                continue
            self.next_to_return[channel, s] = away
            if not away.has_part_in_host_memory:
                continue
            due = self.needed_at(away) - float(self.rules.lead_ms[s])
            if away.back == 0 and due > now:
                link.look_soon(due)
            elif away.sizes[away.back] <= self.device_of(s).room:
                candidates.append(away)
        return min(candidates, key=self.needed_at, default=None)

    def next_offload(self, link: Link, now: float) -> Activation | None:
        candidates = []
        for channel, s in self.stages_served(link, OUT):
            leaving = self.next_to_leave(channel, s, now)
            if leaving is None or self.forward_end(leaving) > now:
                continue
            device, size = self.device_of(s), leaving.sizes[leaving.sent]
            on_host = device.pinned + self.unpinned[device.node]
            if size <= (device.peer.room if channel and device.peer else on_host):
                candidates.append(leaving)
        return min(candidates, key=self.forward_end, default=None)

    def forward_end(self, activation: Activation) -> float:
        s, j = activation.stage, activation.microbatch
        return float(self.start[F, s, j] + self.ms(F, s, j))

    def next_to_leave(self, channel: int, s: int, now: float) -> Activation | None:
        """The oldest activation with a part that is to leave. What would leave in vain stays: where it would not
        be back in time or no forward needs its room, unless an older one needs that to come back."""
        device = self.device_of(s)
        forwards_left = any(self.to_start[F, t] for t in device.stages)
        older = self.next_to_return.get((channel, s))
        for activation in self.saved[s]:
            if activation.sent >= activation.to_leave or activation.channel != channel:
                continue
            to_send, to_fetch = activation.to_leave - activation.sent, activation.to_leave - activation.back
            takes = to_send * self.transfer_ms(OUT, activation) + to_fetch * self.transfer_ms(BACK, activation)
            if forwards_left and self.needed_at(activation) >= now + takes:
                return activation
            waits = older is not None and older.microbatch < activation.microbatch and older.back < older.sent
            if waits and older is not None and device.room + device.frees < older.sizes[older.back]:
                return activation
            activation.to_leave = activation.sent
        return None

    # Devices.

    def dispatch(self, device: Device, now: float) -> None:
        """Start the first by rank of the ops that fit and are ready or worth waiting for, if it is ready."""
        reserved, candidates = self.bytes_to_keep_free(device, now), []
        for k, s, j in self.next_ops(device):
            ready = self.ready_at(k, s, j)
            if ready > now:
                device.look_soon(ready)
            patience = float(self.rules.wait_ms[k, s]) if k in (F, B) else 0.0
            takes = self.takes(k, s, j) + (reserved if k == F else 0)
            too_many = k == F and self.started[F, s] - self.started[B, s] >= self.rules.in_flight[s]
            if ready <= now + patience and takes <= device.room and not too_many:
                candidates.append((self.rank(k, s, j), ready, k, s, j))
        if candidates:
            _, ready, k, s, j = min(candidates, key=lambda each: each[0])
            if ready <= now:
                self.start_op(device, k, s, j, now)

    def ready_at(self, k: int, s: int, j: int) -> float:
        """When the input of an op is there and, of a B or C, what is left of its activation."""
        ready, activation = float(self.ready[k, s, j]), self.activations[s][j]
        if k in (B, C):
            ready = max(ready, activation.complete_at)
        return max(ready, activation.computed_at) if k == B else ready

    def takes(self, k: int, s: int, j: int) -> int:
        return int(self.figures.takes[self.activations[s][j].variant, k, s, self.column(j)])

    def next_ops(self, device: Device) -> list[tuple[int, int, int]]:
        return [(k, s, j) for k in (F, B, W, C) for s in device.stages for j in self.to_start[k, s][:1]]

    def rank(self, k: int, s: int, j: int) -> tuple[int, int, int]:
        """A backward or recompute before a forward before a weight gradient, the farthest forward, the oldest."""
        return {F: 1, B: 0, W: 2, C: 0}[k], -self.place[s, j] if k == F else 0, j

    def bytes_to_keep_free(self, device: Device, now: float) -> int:
        """For what is to come back or to be computed again next."""
        wanted = []
        for s in device.stages:
            for away in filter(None, (self.next_to_return.get((channel, s)) for channel in range(2))):
                if away.has_part_in_host_memory and self.needed_at(away) - self.rules.lead_ms[s] <= now:
                    wanted.append((self.needed_at(away), sum(away.sizes[away.back : away.sent])))
            for j in self.to_start[C, s][:1]:
                if self.ready_at(C, s, j) <= now:
                    wanted.append((self.ready_at(C, s, j), self.takes(C, s, j)))
        return min(wanted, key=lambda each: each[0], default=(0.0, 0))[1]

    def start_op(self, device: Device, k: int, s: int, j: int, now: float) -> None:
        column = self.column(j)
        activation, end = self.activations[s][j], now + self.ms(k, s, j)
        self.start[k, s, j] = now
        self.to_start[k, s].remove(j)
        self.started[k, s] += 1
        if k == F:
            self.saved[s].append(activation)
        device.busy, device.free_at, device.look_at = True, end, end
        device.room -= self.takes(k, s, j)
        device.frees += int(self.figures.frees[activation.variant, k, s, column])
        if k in (F, B):
            self.begin[j] = max(self.begin[j], now - float(self.figures.offset_ms[k, s, column]))
        if k == F and activation.is_again:
            activation.computed_at = inf
        if k in (B, C):
            activation.to_leave = min(activation.to_leave, activation.sent)
        if k == B:
            device.frees_on_host += 0 if activation.channel else sum(activation.sizes[: activation.sent])
            self.ready[W, s, j] = end
        if k == C:
            activation.computed_at = end
        after = int(self.figures.next_stage[k, s, column]) if k in (F, B) else NONE
        if after != NONE:
            self.arrive(k, after, j, device, now, end)
        elif k == F:
            self.arrive(B, s, j, device, now, end)

    def arrive(self, k: int, s: int, j: int, sender: Device, now: float, end: float) -> None:
        """The next stage learns when its input is there."""
        receiver = self.device_of(s)
        moment = end if receiver is sender else end + float(self.figures.message_ms[k, s, self.column(j)])
        self.ready[k, s, j] = moment
        if k == B and self.activations[s][j].is_again:
            moment = max(now, moment - float(self.rules.lead_ms[s]), self.forward_end(self.activations[s][j]))
            self.ready[C, s, j] = moment
        if receiver is not sender:
            receiver.look_soon(max(moment, receiver.free_at))
