"""`Plan`: what one rank runs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from optpipe.evaluate.effects import Certificate
from optpipe.model.ops import BACKWARD, INWARD, Kind, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.ranks.layout import Layout

WEIGHT = BACKWARD | {Kind.W}  # the ops that may add to weight gradients
UNDER_WAY = 2  # messages to one rank at a time: one is on its way while the next is made

StageMicrobatch = tuple[int, int]  # a stage and a micro-batch: names one activation


class Message(NamedTuple):
    """What a stage receives for a micro-batch: its input (kind F) from the previous stage on the micro-batch's route,
    or the gradient of its output (kind B) from the next one."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{'input' if self.kind == Kind.F else 'gradient'} of {self.stage}{self.kind.name}{self.microbatch}"


class Action(NamedTuple):
    """One op with its communication."""

    op: Op
    post: tuple[tuple[Message, int], ...]  # receives to post before the op, each with the rank that sends
    receives: Message | None  # also where the sender is a stage on this rank
    sends: Message | None
    to: int | None  # the rank that receives what the op sends
    gathers: tuple[int, ...] = ()  # the stages whose sharded parameters begin to be gathered before the op


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule of all ranks made ready for one rank by `prepare`. Plans are compared by identity, and by `digest`, a
    hash of the problem and the programs, the same on every rank.

    The schedule was checked on `problem`; `certificate` has the peak memory of every device. `actions` are this rank's
    ops in program order, with their messages, `forwards` those of an evaluation. `certified_bytes` are the bytes of
    activations that the rank's device may hold after each action.
    """

    rank: int
    schedule: Schedule
    problem: Problem
    certificate: Certificate
    digest: str
    actions: tuple[Action, ...]
    certified_bytes: tuple[int, ...]
    forwards: tuple[Action, ...]
    recomputed: Mapping[StageMicrobatch, str]  # the activations that a C computes again, with the name of the level
    split: frozenset[StageMicrobatch]  # the activations whose backward is B and W
    leaving: frozenset[StageMicrobatch]  # the activations that an O or E takes off the device
    completing: frozenset[Op]  # the last W or BW of each stage of this rank
    closing: frozenset[Op]  # the last F of each stage: in an evaluation, the last use of its parameters
    link_orders: tuple[LinkOrder | None, ...]  # for each channel of a shared host link; None without transfers

    @property
    def number(self) -> int:
        """The digest as a number of 60 bits, to compare plans of several ranks."""
        return int(self.digest[:15], 16)

    def host_peak(self, part_bytes: Callable[[int, int, int], int]) -> int:
        """The most bytes that this rank has on the host at once, if part k of the activation of a stage and a
        micro-batch takes `part_bytes(stage, microbatch, k)`."""
        now = most = 0
        away: dict[StageMicrobatch, int] = defaultdict(int)
        for action in self.actions:
            op = action.op
            if op.kind == Kind.O:
                nbytes = part_bytes(op.stage, op.microbatch, op.part)
                away[op.stage, op.microbatch] += nbytes
                now += nbytes
                most = max(most, now)
            elif op.kind in BACKWARD:
                now -= away.pop((op.stage, op.microbatch), 0)
        return most

    def message_peak(self, nbytes: Callable[[Message], int], evaluating: bool = False) -> int:
        """The most bytes of messages that this rank holds at once, if a message has `nbytes(message)`: each receive
        from its post until its op takes it, and the last `UNDER_WAY` sends to each rank."""
        posted: dict[Message, int] = {}
        sending: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=UNDER_WAY))
        most = 0

        def held() -> int:
            return sum(posted.values()) + sum(map(sum, sending.values()))

        for action in self.forwards if evaluating else self.actions:
            if action.post:
                posted |= {message: nbytes(message) for message, _ in action.post}
                most = max(most, held())
            if action.receives is not None:
                posted.pop(action.receives, None)
            if action.sends is not None and action.to not in (None, self.rank):
                sending[action.to].append(nbytes(action.sends))
                most = max(most, held())
        return most

    def gathered_peak(
        self,
        parameters: Callable[[int], int],
        gradients: Callable[[int], int],
        evaluating: bool = False,
        reduced: Mapping[Op, int] = MappingProxyType({}),
    ) -> int:
        """The most bytes that this rank holds at once of gathered parameters, if those of a stage take `parameters(s)`,
        and of their whole gradients, which take `gradients(s)`: parameters from the op at which they begin to be
        gathered, gradients from the stage's first backward on. A stage's reduction may take until the end of the step,
        so only an evaluation lets parameters go earlier. `reduced`: as `Windows.room`."""
        now = most = 0
        whole: set[int] = set()
        for action in self.forwards if evaluating else self.actions:
            s = action.op.stage
            now += sum(map(parameters, action.gathers))
            if action.op in reduced:
                whole.remove(reduced[action.op])
                now -= gradients(reduced[action.op])
            if action.op.kind in WEIGHT and s not in whole:
                whole.add(s)
                now += gradients(s)
            most = max(most, now)
            if evaluating and action.op in self.closing:
                now -= parameters(s)
        return most


class LinkOrder(NamedTuple):
    """One channel of a shared link in one step, as one of its ranks sees it."""

    first: int  # the rank of the first transfer on the channel
    last: int  # and of the last
    after: dict[Op, int]  # this rank's transfers that directly follow another rank's, and that rank
    before: dict[Op, int]  # this rank's transfers that another rank's directly follows, and that rank
    final: Op | None  # this rank's last transfer, if it is on one of `first` and `last` and these are two


def link_orders(schedule: Schedule, rank: int, layout: Layout) -> tuple[LinkOrder | None, ...]:
    """One entry for each channel of the rank's link, None without transfers. Empty if it shares no link."""
    if (link := layout.link(rank)) is None:
        return ()
    order = schedule.links[link].ops() if link in schedule.links else []
    outward, inward = ([op for op in order if (op.kind in INWARD) == is_inward] for is_inward in (False, True))
    return tuple(_link_order(each, rank, layout) for each in ((outward, inward) if layout.full_duplex else (order,)))


def _link_order(transfers: Sequence[Op], rank: int, layout: Layout) -> LinkOrder | None:
    if not transfers:
        return None
    owners = [layout.placement[op.stage] for op in transfers]
    first, last = owners[0], owners[-1]
    transfers_here = [op for op, owner in zip(transfers, owners, strict=True) if owner == rank]
    order = LinkOrder(first, last, {}, {}, transfers_here[-1] if first != last and rank in (first, last) else None)
    for (a, left), (b, right) in pairwise(zip(transfers, owners, strict=True)):
        if left != right and right == rank:
            order.after[b] = left
        if left != right and left == rank:
            order.before[a] = right
    return order
