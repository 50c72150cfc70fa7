"""`Plan`: what one rank is given to run."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from optpipe.evaluate.memory import Certificate
from optpipe.model.ops import BACKWARD, Kind, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.lowering.link_order import LinkOrder

WEIGHT = BACKWARD | {Kind.W}  # the ops that may add to weight gradients
NOTHING_REDUCED: Mapping[Op, int] = MappingProxyType({})
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
    """A schedule made ready for one rank by `prepare`. Plans are compared by identity, and by `digest`.

    Attributes
    ----------
    rank
        The rank that it is for.
    schedule
        The schedule of all ranks.
    problem
        The problem that the schedule was checked on.
    certificate
        The peak memory of every device.
    digest
        A hash of the problem and the programs: the same on every rank for the same schedule.
    actions
        This rank's ops in program order, with their messages.
    certified_bytes
        For each action, the bytes of activations that this rank's device may hold after it.
    forwards
        The actions of an evaluation: forwards only.
    recomputed
        The activations that a C computes again, each with the name of its level.
    split
        The activations whose backward is B and W.
    leaving
        The activations that an O or E takes off the device.
    completing
        The last W or BW of each stage of this rank.
    closing
        The last F of each stage of this rank: in an evaluation, the last use of its parameters.
    link_orders
        For each channel of a host link that this rank shares, the order of transfers; None if there is none.
    """

    rank: int
    schedule: Schedule
    problem: Problem
    certificate: Certificate
    digest: str
    actions: tuple[Action, ...]
    certified_bytes: tuple[int, ...]
    forwards: tuple[Action, ...]
    recomputed: Mapping[StageMicrobatch, str]
    split: frozenset[StageMicrobatch]
    leaving: frozenset[StageMicrobatch]
    completing: frozenset[Op]
    closing: frozenset[Op]
    link_orders: tuple[LinkOrder | None, ...]

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
        reduced: Mapping[Op, int] = NOTHING_REDUCED,
    ) -> int:
        """The most bytes that this rank holds at once of gathered parameters, if those of a stage take `parameters(s)`,
        and of their whole gradients, which take `gradients(s)`: parameters from the op at which they begin to be
        gathered, gradients from the stage's first backward on. A stage's reduction may take until the end of the step,
        so only an evaluation lets parameters go earlier, behind the stage's last F. `reduced`:
        the stage whose whole gradients have left before an op (`Feature.reduced_before`)."""
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
