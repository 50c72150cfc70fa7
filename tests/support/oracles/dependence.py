"""Which receives are posted before an own op that they depend on, by a search of the graph of all ops."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from optpipe.model.ops import Kind, Op
from optpipe.schedule import Schedule
from optpipe_runtime.lowering.plan import UNDER_WAY, Message, Plan

TRANSFERS = {Kind.O, Kind.R, Kind.G, Kind.P, Kind.E, Kind.L, Kind.U}
Graph = dict[Op, set[Op]]  # what each op waits for


def premature(schedule: Schedule, plans: Sequence[Plan]) -> list[tuple[Message, Op, Op]]:
    """Receives that are posted before an op although they wait for a later op of the same rank: the message, the op
    before which its receive is posted, and the latest op that it waits for."""
    waits = _waits(schedule)
    for before, later in _by_messages(plans):
        waits[later].add(before)
    senders = {action.sends: action.op for plan in plans for action in plan.actions if action.sends}
    found = []
    for plan in plans:
        ops = [action.op for action in plan.actions]
        place = {op: i for i, op in enumerate(ops)}
        for i, action in enumerate(plan.actions):
            for message, _ in action.post:
                latest = max((place.get(op, -1) for op in _before(waits, senders[message])), default=-1)
                if latest >= i:
                    found.append((message, action.op, ops[latest]))
    return found


def _before(waits: Graph, op: Op) -> set[Op]:
    """All that an op waits for, over any number of steps, and itself."""
    seen, ahead = {op}, [op]
    while ahead:
        new = waits[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def _by_messages(plans: Sequence[Plan]) -> Iterator[tuple[Op, Op]]:
    """What messages add: an op waits for the sender of what it receives; and the sender of a message waits until the
    message so many before has arrived, so until its receiver has run what stands before the post."""
    posts, sent = {}, defaultdict(list)
    for rank, plan in enumerate(plans):
        last = None
        for action in plan.actions:
            posts |= {message: last for message, _ in action.post}
            last = last if action.op.kind in TRANSFERS else action.op
            if action.sends and action.to != rank:
                sent[rank, action.to].append(action)
    senders = {action.sends: action.op for plan in plans for action in plan.actions if action.sends}
    for plan in plans:
        yield from ((senders[action.receives], action.op) for action in plan.actions if action.receives)
    for actions in sent.values():
        for earlier, later in zip(actions, actions[UNDER_WAY:], strict=False):
            yield earlier.op, later.op
            if (before := posts[earlier.sends]) is not None:
                yield before, later.op


def _waits(schedule: Schedule) -> Graph:
    """What each op waits for on its own device, on links, and on the peer; the second op of a pair, for the first."""
    rows, (waits, _) = schedule.compiled.rows, schedule.compiled.waits
    ops = [rows.op(row) for row in range(len(rows))]
    graph = defaultdict(
        set, {op: {ops[row] for row in needs if row >= 0} for op, needs in zip(ops, waits.tolist(), strict=True)}
    )
    for first in rows.first.tolist():
        graph[ops[first + 1]].add(ops[first])
    return graph
