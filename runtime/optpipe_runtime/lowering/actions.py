"""The ops of one rank with their messages: which receives to post before an op, what it waits for, what it sends.

Messages between two ranks have no tags: they match first in, first out, per ordered pair of ranks. Sends are issued in
the sender's program order, which is the pair's order, and receives are posted in it.

All ranks follow one order of all ops (`CompiledSchedule.places`): that of their predicted ends, in which no op comes
before one that it waits for. A message stands right behind the op that sends it, and its receive is posted before the
first own op that comes later in that order. Three things follow.

- Every own op that a receive depends on, over any chain of ranks, has been issued when it is posted: each of them comes
  before the sending op. So a receive that occupies a GPU never keeps away what it waits for.
- Nothing waits for what comes later in the order: no op, no message, and no send that must end before a later one may
  begin (`Messages.make_room`). So nothing waits in a circle, whatever the ops' times: what comes first in the order, of
  all that is not done, can always go on. Ranks also issue compute and messages in this order. So the same holds where a
  host waits for its whole device, or all streams share one hardware queue; but not for transfers over shared links and
  to peers, which are issued before their turn.
- If times are as predicted, nothing waits for a receive: whatever is computed while a message is sent ends later than
  the sending op, so its receive was posted before it. The message arrives while the other op runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.evaluate.compiled import CompiledSchedule
from optpipe.model.ops import BACKWARD, Kind, Op
from optpipe_runtime.lowering.plan import Action, Message
from optpipe_runtime.ranks.layout import Layout

# The ops of a rank in program order, each with its place in the order of all ranks' ops. Made when they are asked for.
Programs = Callable[[int], Mapping[Op, int]]


def programs_of(compiled: CompiledSchedule) -> Programs:
    """The programs of a valid schedule. A rank without a program has no ops."""

    def program(rank: int) -> dict[Op, int]:
        if rank >= len(compiled.programs):
            return {}
        places = compiled.places[compiled.rows.of_device(rank)].tolist()
        return dict(zip(compiled.programs[rank].ops(), places, strict=True))

    return cache(program)


def lower_ops(programs: Programs, rank: int, layout: Layout) -> tuple[Action, ...]:
    """The rank's ops with their messages. Raises `ScheduleError` if sends and receives do not match."""
    ops = programs(rank)
    received = [_received(op, layout) for op in ops]
    senders = {message: sender for message, sender in filter(None, received) if sender != rank}
    sent = {sender: messages_between(programs(sender), rank, layout) for sender in set(senders.values())}
    _require_matched(sent, senders)
    post = _posted(list(ops.values()), sent)
    actions = []
    for op, posted, needed, gathered in zip(ops, post, received, gathers(programs, rank, layout), strict=True):
        sends = _sent(op, layout)
        to = None if sends is None else layout.placement[sends.stage]
        actions.append(Action(op, tuple(posted), None if needed is None else needed[0], sends, to, gathered))
    return tuple(actions)


def _posted(places: list[int], sent: Mapping[int, Mapping[Message, int]]) -> list[list[tuple[Message, int]]]:
    """For each op of a rank, by the ops' places, the receives to post before it; `sent` as `messages_between` gives
    it, by sender."""
    first_after = np.minimum.accumulate(np.array(places[::-1], np.int64))[::-1]  # the least place from each op on
    post: list[list[tuple[Message, int]]] = [[] for _ in places]
    expected = sorted(
        (place, message, sender) for sender, messages in sent.items() for message, place in messages.items()
    )
    before = np.searchsorted(first_after, [place for place, *_ in expected], side="right")
    for i, (_, message, sender) in zip(before.tolist(), expected, strict=True):
        post[i].append((message, sender))
    return post


def _sent(op: Op, layout: Layout) -> Message | None:
    """The message that an op makes for its neighbour stage on the micro-batch's route."""
    if op.kind == Kind.F and (after := layout.after(op.stage, op.microbatch)) is not None:
        return Message(Kind.F, after, op.microbatch)
    if op.kind in BACKWARD and (before := layout.before(op.stage, op.microbatch)) is not None:
        return Message(Kind.B, before, op.microbatch)
    return None


def _received(op: Op, layout: Layout) -> tuple[Message, int] | None:
    """The message that an op needs from its neighbour stage, and the rank that sends it."""
    if op.kind == Kind.F and (before := layout.before(op.stage, op.microbatch)) is not None:
        return Message(Kind.F, op.stage, op.microbatch), layout.placement[before]
    if op.kind in BACKWARD and (after := layout.after(op.stage, op.microbatch)) is not None:
        return Message(Kind.B, op.stage, op.microbatch), layout.placement[after]
    return None


def messages_between(ops: Mapping[Op, int], receiver: int, layout: Layout) -> dict[Message, int]:
    """The messages of one rank's ops to another, in the order in which they are sent, each with its op's place."""
    sent = ((_sent(op, layout), place) for op, place in ops.items())
    return {
        message: place for message, place in sent if message is not None and layout.placement[message.stage] == receiver
    }


def _require_matched(sent: Mapping[int, Mapping[Message, int]], senders: Mapping[Message, int]) -> None:
    """Every message is sent once and received once: a swapped one would give wrong gradients without an error."""
    for sender, messages in sent.items():
        expected = {message for message, source in senders.items() if source == sender}
        if messages.keys() != expected:
            odd = sorted(messages.keys() ^ expected)
            raise ScheduleError(
                f"rank {sender} sends {len(messages)} messages, {len(expected)} are expected: "
                f"{', '.join(map(str, odd[:3]))}"
            )


def gathers(programs: Programs, rank: int, layout: Layout) -> list[tuple[int, ...]]:
    """For each op of a rank, the stages whose sharded parameters begin to be gathered before it, in order.

    Replicas may run different schedules, and communicate in one process group for all stages. So all gather in one
    order, that of the route, and a gather waits for other replicas. It begins where the receive of the stage's first
    input is posted: before the first own op that comes later, in the order of all ranks' ops, than the first forward of
    the stage before it, whose rank has issued its own gather by then. What comes before a stage's first forward on its
    rank, and all that this needs, are forwards of earlier stages, which come before that forward in the order. So
    whatever a replica needs to begin its gathers has been issued before it waits in a later one: none waits for ever,
    even if hosts wait for their whole device. With several routes first forwards have no order that holds in every
    schedule, so all stages are gathered when the step begins.
    """
    places = list(programs(rank).values())
    begun_before: list[tuple[int, ...]] = [() for _ in places]
    before = {after: s for s, after in pairwise(layout.in_order)} if len(layout.routes) == 1 else {}
    for s in layout.in_order:
        if layout.placement[s] == rank and _first(programs(rank), s) is not None:
            ready = _first(programs(layout.placement[before[s]]), before[s]) if s in before else None
            begins = 0 if ready is None else next(i for i, place in enumerate(places) if place > ready)
            begun_before[begins] += (s,)
    return begun_before


def _first(program: Mapping[Op, int], stage: int) -> int | None:
    """The place of a stage's first forward."""
    return next((place for op, place in program.items() if op.kind == Kind.F and op.stage == stage), None)
