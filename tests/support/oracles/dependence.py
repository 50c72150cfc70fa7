"""Which receives are posted before an own op that they depend on, by a search of the graph of all ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.lowering.plan import UNDER_WAY, Message, Plan

TRANSFERS = {Kind.O, Kind.R, Kind.G, Kind.P, Kind.E, Kind.L, Kind.U}
BACKWARD = {Kind.B, Kind.BW}
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
    """What each op waits for on its own device, on links, and on the peer."""
    problem, waits = schedule.problem, defaultdict(set)
    streams: dict[object, list[Op]] = defaultdict(list)
    everything = {op for program in schedule.programs for op in program.ops()}
    reloads, last_of_stage = defaultdict(list), defaultdict(list)
    for op in everything:
        if op.kind is Kind.R:
            reloads[op.stage, op.microbatch].append(op)
        elif op.kind in (Kind.W, Kind.BW):
            last_of_stage[op.stage].append(op)
    for d, program in enumerate(schedule.programs):
        last: Op | None = None
        for op in program.ops():
            waits[op] |= {need for need in _own_needs(op) if need in everything}
            waits[op].update(reloads[op.stage, op.microbatch] if op.kind in BACKWARD else ())
            waits[op].update(last_of_stage[op.stage] if op.kind is Kind.G else ())
            if op.kind not in TRANSFERS:
                streams["compute", d].append(op)
                last = op
            elif last is not None:
                waits[op].add(last)
            if op.kind in TRANSFERS and (stream := _stream(problem, d, op)) is not None:
                streams[stream].append(op)
    for name, order in schedule.links.items():
        for op in order.ops():
            streams["link", name, _way(problem, op)].append(op)
    for ops in streams.values():
        for before, later in pairwise(ops):
            waits[later].add(before)
    return waits


def _way(problem: Problem, op: Op) -> bool:
    return problem.transfer_mode == "full_duplex" and op.kind in (Kind.R, Kind.P)


def _stream(problem: Problem, device: int, op: Op) -> object | None:
    """What a transfer runs on; None for a link whose order stands in the schedule."""
    if op.kind in (Kind.E, Kind.L):
        return "peer", device
    if op.kind is Kind.U:
        return "host", device
    return None if problem.devices[device].link in problem.shared_links else ("own link", device, _way(problem, op))


def _own_needs(op: Op) -> list[Op]:
    kind, s, j, part = op
    match kind:
        case Kind.F:
            return [Op(Kind.P, s, 0)]
        case Kind.C | Kind.O:
            return [Op(Kind.F, s, j)]
        case Kind.E:
            return [Op(Kind.F, s, j), Op(Kind.A, s, j)]
        case Kind.D:
            return [Op(Kind.O, s, j, part), Op(Kind.E, s, j)]
        case Kind.R | Kind.L:
            return [Op(Kind.D, s, j, part)]
        case Kind.B | Kind.BW:
            return [Op(Kind.F, s, j), Op(Kind.C, s, j), Op(Kind.L, s, j)]
        case Kind.W:
            return [Op(Kind.B, s, j)]
        case Kind.V:
            return [Op(Kind.L, s, j)]
        case Kind.U:
            return [Op(Kind.G, s, 0)]
        case _:
            return []
