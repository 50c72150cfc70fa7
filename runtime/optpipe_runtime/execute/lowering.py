"""From a schedule to what one rank does: its ops in order, each with the receives to post before it, what to wait for
and what to send.

Messages between two ranks have no tags: they match first in, first out, per ordered pair of ranks. Sends are issued in
the sender's program order and never block, so that order is the pair's order; a receiver posts its receives in it. Then
no rank waits for anything but data, and a schedule that `simulate` accepts cannot deadlock here.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.evaluate.memory import Certificate, held_bytes
from optpipe.model.ops import BACKWARD, HOST_LINK, OPTIMIZER, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import KIND, of_kinds
from optpipe.schedule import Schedule, certify, check
from optpipe_runtime.memory.turns import Turns, turns
from optpipe_runtime.ranks.layout import Layout

RUNS = (
    Kind.F,
    Kind.B,
    Kind.W,
    Kind.BW,
    Kind.C,
    Kind.O,
    Kind.D,
    Kind.R,
    Kind.E,
    Kind.L,
    Kind.A,
    Kind.V,
    Kind.G,
    Kind.U,
    Kind.P,
)
AHEAD = 2  # messages whose receives are posted before they are needed: one arrives while one is worked on

Visit = tuple[int, int]  # stage, micro-batch
Programs = Callable[[int], list[Op]]  # each rank's ops, made when they are asked for


class Guests(NamedTuple):
    """What a rank evicts, and what it loads, in order."""

    evicted: tuple[Visit, ...]
    loaded: tuple[Visit, ...]


class Message(NamedTuple):
    """What a stage gets for a micro-batch: its input (kind F) from the stage before it on the micro-batch's route, its
    output gradient (kind B) from the one after it."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{'input' if self.kind == Kind.F else 'gradient'} of {self.stage}{self.kind.name}{self.microbatch}"


class Action(NamedTuple):
    """One op with its communication; ranks None: a message that stays on the rank."""

    op: Op
    post: tuple[tuple[Message, int], ...]  # receives to post before the op, with the rank they come from
    receives: Message | None
    sends: Message | None
    to: int | None


@dataclass(frozen=True)
class Plan:
    """A schedule made ready for one rank by `prepare`. `digest` is the same on every rank for the same programs."""

    schedule: Schedule
    problem: Problem  # what it was checked against
    certificate: Certificate
    digest: str
    actions: tuple[Action, ...]
    certified_bytes: tuple[int, ...]  # what this rank's device holds after each action
    forwards: tuple[Action, ...]  # the actions without anything but forwards, to evaluate
    recomputed: frozenset[Visit]  # with a C
    updated: frozenset[int]  # stages with G, U and P
    guests: dict[int, Guests]  # for each rank that evicts to this one
    turns: tuple[Turns | None, ...]  # for each lane of a host link that this rank shares

    def host_peak(self, taken: Callable[[int, int], int]) -> int:
        """The most that is on this rank's host at once, where part k of a stage takes `taken(stage, k)` bytes there."""
        now = most = 0
        away: dict[Visit, int] = defaultdict(int)
        for action in self.actions:
            op = action.op
            if op.kind == Kind.O:
                away[op.stage, op.microbatch] += taken(op.stage, op.part)
                now += taken(op.stage, op.part)
                most = max(most, now)
            elif op.kind in BACKWARD:
                now -= away.pop((op.stage, op.microbatch), 0)
        return most


def prepare(
    schedule: Schedule, rank: int, layout: Layout, problem: Problem | None = None, host_updates: Set[int] = frozenset()
) -> Plan:
    """Checks a schedule for this pipeline and lowers it for one rank. A pure function: it may run in a thread beside
    the training.

    `problem`, where given, is what was measured here: the schedule must be valid and fit for it, not only for the
    problem that it came with. `host_updates`: this rank's stages with an optimizer on the host. Raises `ScheduleError`
    with one sentence for a schedule that cannot run here.
    """
    own = problem or schedule.problem
    _require_same_pipeline(Layout.of(schedule.problem), layout)
    _require_known(schedule)
    _require_peers(schedule, layout)
    _require_links(schedule, layout)
    if complaints := check(own, schedule):
        raise ScheduleError(f"the schedule does not fit this pipeline: {complaints[0]}" + _and_more(complaints))
    programs = cache(lambda d: schedule.programs[d].ops() if d < len(schedule.programs) else [])
    ops = programs(rank)
    _require_host_optimizers(ops, rank, host_updates)
    return Plan(
        schedule=schedule,
        problem=own,
        certificate=certify(own, schedule),
        digest=_digest(schedule, own),
        actions=_actions(programs, rank, layout),
        certified_bytes=tuple(held_bytes(own, schedule.programs[rank])[1].tolist()) if ops else (),
        forwards=_actions(lambda d: [op for op in programs(d) if op.kind == Kind.F], rank, layout),
        recomputed=frozenset((op.stage, op.microbatch) for op in ops if op.kind == Kind.C),
        updated=frozenset(op.stage for op in ops if op.kind == Kind.U),
        guests=_guests(programs, rank, layout),
        turns=turns(schedule, rank, layout),
    )


def _and_more(complaints: list[str]) -> str:
    return f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""


def _require_same_pipeline(theirs: Layout, own: Layout) -> None:
    if theirs.placement != own.placement:
        there, here = list(theirs.placement), list(own.placement)
        raise ScheduleError(
            f"the schedule places its stages on devices {there}, this pipeline on {here}: stages do not move"
        )
    if theirs.microbatches != own.microbatches:
        raise ScheduleError(
            f"the schedule is for {theirs.microbatches} micro-batches, this pipeline runs {own.microbatches}"
        )
    for j in range(own.microbatches):
        if theirs.route(j) != own.route(j):
            raise ScheduleError(
                f"the schedule sends micro-batch {j} over stages {list(theirs.route(j))}, this pipeline over "
                f"{list(own.route(j))}"
            )


def _require_known(schedule: Schedule) -> None:
    """On every rank the same: an op that this executor has no code for is found before anything runs."""
    for d, program in enumerate(schedule.programs):
        if not set(np.unique(program.table[:, KIND]).tolist()) <= set(RUNS):
            op = next(op for op in program.ops() if op.kind not in RUNS)
            names = ", ".join(kind.name for kind in RUNS)
            raise ScheduleError(f"{op} in the program of device {d}: this executor runs {names}, not {op.kind.name}")


def _require_host_optimizers(ops: list[Op], rank: int, host_updates: Set[int]) -> None:
    for op in ops:
        if op.kind in OPTIMIZER and op.stage not in host_updates:
            raise ScheduleError(
                f"{op} in the program of device {rank}: stage {op.stage} has no optimizer on the host here, "
                "Pipeline's host_optimizers "
                "does not name it"
            )


def _digest(schedule: Schedule, problem: Problem) -> str:
    content = hashlib.sha256(problem.sha256.encode())
    for program in schedule.programs:
        content.update(len(program).to_bytes(8, "little") + program.table.astype("<i4").tobytes())
    for _, order in sorted(schedule.links.items()):
        content.update(len(order).to_bytes(8, "little") + order.table.astype("<i4").tobytes())
    return content.hexdigest()


def _sent(op: Op, layout: Layout) -> Message | None:
    """The message that an op makes for its neighbour stage on the micro-batch's route."""
    if op.kind == Kind.F and (after := layout.after(op.stage, op.microbatch)) is not None:
        return Message(Kind.F, after, op.microbatch)
    if op.kind in BACKWARD and (before := layout.before(op.stage, op.microbatch)) is not None:
        return Message(Kind.B, before, op.microbatch)
    return None


def _received(op: Op, layout: Layout) -> tuple[Message, int] | None:
    """The message that an op needs from its neighbour stage, and the rank that makes it."""
    if op.kind == Kind.F and (before := layout.before(op.stage, op.microbatch)) is not None:
        return Message(Kind.F, op.stage, op.microbatch), layout.placement[before]
    if op.kind in BACKWARD and (after := layout.after(op.stage, op.microbatch)) is not None:
        return Message(Kind.B, op.stage, op.microbatch), layout.placement[after]
    return None


def _actions(programs: Programs, rank: int, layout: Layout) -> tuple[Action, ...]:
    ops = programs(rank)
    received = [_received(op, layout) for op in ops]
    needed = [(i, *found) for i, found in enumerate(received) if found is not None and found[1] != rank]
    origins = {message: origin for _, message, origin in needed}
    order = {origin: _pair(programs(origin), rank, layout) for origin in set(origins.values())}
    place = {message: k for messages in order.values() for k, message in enumerate(messages)}
    _require_matched(order, origins)

    posted = dict.fromkeys(order, 0)
    upcoming = 0  # the first message in `needed` that op i or a later one waits for
    actions = []
    for i, op in enumerate(ops):
        while upcoming < len(needed) and needed[upcoming][0] < i:
            upcoming += 1
        post: list[tuple[Message, int]] = []
        for _, message, origin in needed[upcoming : upcoming + AHEAD]:
            until = max(posted[origin], place[message] + 1)  # those before it on the pair first
            post += [(earlier, origin) for earlier in order[origin][posted[origin] : until]]
            posted[origin] = until
        found, sends = received[i], _sent(op, layout)
        to = None if sends is None else layout.placement[sends.stage]
        actions.append(Action(op, tuple(post), None if found is None else found[0], sends, to))
    return tuple(actions)


def _pair(ops: list[Op], receiver: int, layout: Layout) -> list[Message]:
    """The messages of one rank's ops to another in the order in which they are sent: activations and gradients
    together."""
    sent = (_sent(op, layout) for op in ops)
    return [message for message in sent if message is not None and layout.placement[message.stage] == receiver]


def _require_matched(order: dict[int, list[Message]], origins: dict[Message, int]) -> None:
    """Every message that is sent is received, once, from the rank that sends it: a swapped one would give wrong
    gradients silently."""
    for origin, messages in order.items():
        expected = {message for message, source in origins.items() if source == origin}
        if len(messages) != len(expected) or set(messages) != expected:
            odd = sorted(set(messages) ^ expected)
            raise ScheduleError(
                f"rank {origin} sends {len(messages)} messages, {len(expected)} are expected: "
                f"{', '.join(map(str, odd[:3]))}"
            )


def _require_peers(schedule: Schedule, layout: Layout) -> None:
    """Ranks evict to the peers that this pipeline has."""
    theirs = Layout.of(schedule.problem)
    for d, program in enumerate(schedule.programs):
        if theirs.peer(d) != layout.peer(d) and Kind.E in program.table[:, KIND]:
            raise ScheduleError(
                f"the schedule evicts from device {d} to device {theirs.peer(d)}, in this pipeline the peer of "
                f"rank {d} is {layout.peer(d)}"
            )


def _require_links(schedule: Schedule, layout: Layout) -> None:
    """Ranks that share a link here share it in the schedule, which then has the order of their transfers."""
    theirs = Layout.of(schedule.problem)
    for d, program in enumerate(schedule.programs):
        if not of_kinds(program.table, *HOST_LINK).any():
            continue
        there, here = (
            f"the link {name!r}" if name else "a link of its own" for name in (theirs.link(d), layout.link(d))
        )
        if there != here:
            raise ScheduleError(
                f"the schedule transfers over {there} from device {d}, in this pipeline rank {d} has {here}"
            )
        if layout.link(d) and theirs.full_duplex != layout.full_duplex:
            modes = {True: "full duplex", False: "half duplex"}
            raise ScheduleError(
                f"{there} is {modes[theirs.full_duplex]} in the schedule's problem, here {modes[layout.full_duplex]}"
            )


def _guests(programs: Programs, rank: int, layout: Layout) -> dict[int, Guests]:
    def visits(evictor: int, wanted: Kind) -> tuple[Visit, ...]:
        return tuple((op.stage, op.microbatch) for op in programs(evictor) if op.kind == wanted)

    evictors = {layout.placement[op.stage] for op in programs(rank) if op.kind == Kind.A}
    return {d: Guests(visits(d, Kind.E), visits(d, Kind.L)) for d in evictors}
