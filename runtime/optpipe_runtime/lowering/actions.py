"""The ops of one rank with their messages: which receives to post before an op, what it waits for, what it sends.

Messages between two ranks have no tags: they match first in, first out, per ordered pair of ranks. Sends are issued in
the sender's program order and never block, so that is the pair's order, and the receiver posts its receives in it. Then
no rank waits for anything but data, and a schedule that `simulate` accepts cannot deadlock here.
"""

from __future__ import annotations

from collections.abc import Callable

from optpipe.errors import ScheduleError
from optpipe.model.ops import BACKWARD, Kind, Op
from optpipe_runtime.lowering.plan import Action, Message
from optpipe_runtime.ranks.layout import Layout

AHEAD = 2  # receives posted before they are needed: one message arrives while another is worked on

Programs = Callable[[int], list[Op]]  # the ops of a rank, made when they are asked for


def lower_ops(programs: Programs, rank: int, layout: Layout) -> tuple[Action, ...]:
    """The rank's ops with their messages. Raises `ScheduleError` if sends and receives do not match."""
    ops = programs(rank)
    received = [_received(op, layout) for op in ops]
    needed = [(i, *found) for i, found in enumerate(received) if found is not None and found[1] != rank]
    senders = {message: sender for _, message, sender in needed}
    orders = {sender: _messages_between(programs(sender), rank, layout) for sender in set(senders.values())}
    position = {message: k for messages in orders.values() for k, message in enumerate(messages)}
    _require_matched(orders, senders)

    posted = dict.fromkeys(orders, 0)
    upcoming = 0  # the first entry of `needed` that op i or a later one waits for
    actions = []
    for i, op in enumerate(ops):
        while upcoming < len(needed) and needed[upcoming][0] < i:
            upcoming += 1
        post: list[tuple[Message, int]] = []
        for _, message, sender in needed[upcoming : upcoming + AHEAD]:
            until = max(posted[sender], position[message] + 1)  # the pair's earlier messages first
            post += [(earlier, sender) for earlier in orders[sender][posted[sender] : until]]
            posted[sender] = until
        found, sends = received[i], _sent(op, layout)
        to = None if sends is None else layout.placement[sends.stage]
        actions.append(Action(op, tuple(post), None if found is None else found[0], sends, to))
    return tuple(actions)


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


def _messages_between(ops: list[Op], receiver: int, layout: Layout) -> list[Message]:
    """The messages of one rank's ops to another, in the order in which they are sent."""
    sent = (_sent(op, layout) for op in ops)
    return [message for message in sent if message is not None and layout.placement[message.stage] == receiver]


def _require_matched(orders: dict[int, list[Message]], senders: dict[Message, int]) -> None:
    """Every message is sent once and received once: a swapped one would give wrong gradients without an error."""
    for sender, messages in orders.items():
        expected = {message for message, source in senders.items() if source == sender}
        if len(messages) != len(expected) or set(messages) != expected:
            odd = sorted(set(messages) ^ expected)
            raise ScheduleError(
                f"rank {sender} sends {len(messages)} messages, {len(expected)} are expected: "
                f"{', '.join(map(str, odd[:3]))}"
            )
