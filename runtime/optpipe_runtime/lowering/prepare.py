"""`prepare`: from a schedule to what one rank runs, after checks that it can run in this pipeline.

The ops of one rank get their messages: which receives to post before an op, what it waits for, what it sends. Messages
between two ranks have no tags: they match first in, first out, per ordered pair of ranks. Sends are issued in
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

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.evaluate.compiled import CompiledSchedule
from optpipe.model.ops import BACKWARD, HOST_LINK, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import KIND, PART, STAGE, of_kinds
from optpipe.schedule import Schedule, check
from optpipe_runtime.lowering.plan import Action, Message, Plan, link_orders
from optpipe_runtime.ranks.layout import Layout

# Raises `ScheduleError` if a schedule cannot run in a pipeline of this layout; on every rank for the same reason.
Check = Callable[[Schedule, Layout], None]


def prepare(
    schedule: Schedule, rank: int, layout: Layout, problem: Problem | None = None, require: Check | None = None
) -> Plan:
    """Checks a schedule, from anywhere, for a pipeline of this layout, and lowers it for one rank. A pure function: it
    may run in a thread beside the training.

    The schedule must be valid and fit for the measured `problem`, by default for its own, and pass what else this
    pipeline may `require`. Raises `ScheduleError` if it cannot run here.
    """
    require_valid(schedule, layout, problem, require)
    return lower(schedule, rank, layout, problem)


def require_valid(
    schedule: Schedule, layout: Layout, problem: Problem | None = None, require: Check | None = None
) -> None:
    """Raises `ScheduleError` if the schedule is not valid or does not fit for `problem` in a pipeline of this layout.
    The answer is the same on every rank. So one rank checks a schedule and the others, which get it from that rank,
    only `lower` it."""
    scheduled = Layout.from_problem(schedule.problem)
    if scheduled.placement != layout.placement:
        theirs, ours = list(scheduled.placement), list(layout.placement)
        raise ScheduleError(
            f"the schedule places its stages on devices {theirs}, this pipeline on {ours}: stages do not move"
        )
    if scheduled.microbatches != layout.microbatches:
        raise ScheduleError(
            f"the schedule is for {scheduled.microbatches} micro-batches, this pipeline runs {layout.microbatches}"
        )
    for j in range(layout.microbatches):
        if scheduled.route(j) != layout.route(j):
            raise ScheduleError(
                f"the schedule sends micro-batch {j} over stages {list(scheduled.route(j))}, this pipeline over "
                f"{list(layout.route(j))}"
            )
    if require is not None:
        require(schedule, layout)
    _require_links(schedule, scheduled, layout)
    if complaints := check(problem or schedule.problem, schedule):
        more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
        raise ScheduleError(f"the schedule does not fit this pipeline: {complaints[0]}{more}")


def require_kinds(schedule: Schedule, kinds: Sequence[Kind]) -> None:
    """Finds an op of another kind, for which there is no code, before anything runs."""
    for d, program in enumerate(schedule.programs):
        if not set(np.unique(program.table[:, KIND]).tolist()) <= set(kinds):
            op = next(op for op in program.ops() if op.kind not in kinds)
            names = ", ".join(kind.name for kind in kinds)
            raise ScheduleError(f"{op} in the program of device {d}: this executor runs {names}, not {op.kind.name}")


def require_levels(schedule: Schedule, levels: Collection[str]) -> None:
    """Finds a recompute by a level that this pipeline does not offer, before anything runs."""
    for d, program in enumerate(schedule.programs):
        rows = program.table[of_kinds(program.table, Kind.C)]
        for s, k in np.unique(rows[:, [STAGE, PART]], axis=0).tolist():
            for level in schedule.problem.stages[s].all_levels[k : k + 1]:
                if level.name not in levels:
                    raise ScheduleError(
                        f"device {d} recomputes stage {s} by level {level.name!r}: this pipeline was made with "
                        f"recompute = {tuple(levels)}"
                    )


def lower(schedule: Schedule, rank: int, layout: Layout, problem: Problem | None = None) -> Plan:
    """The plan of a schedule that has passed `require_valid`; see `prepare`."""
    checked_on = problem or schedule.problem
    compiled = schedule.on(checked_on).compiled
    programs = programs_of(compiled)
    ops = list(programs(rank))
    return Plan(
        rank=rank,
        schedule=schedule,
        problem=checked_on,
        certificate=compiled.certificate,
        digest=digest(schedule, checked_on),
        actions=lower_ops(programs, rank, layout),
        certified_bytes=tuple(compiled.held.after[compiled.rows.of_device(rank)].tolist()),
        forwards=lower_ops(
            cache(lambda d: {op: place for op, place in programs(d).items() if op.kind == Kind.F}), rank, layout
        ),
        recomputed={
            (op.stage, op.microbatch): checked_on.stages[op.stage].all_levels[op.part].name
            for op in ops
            if op.kind == Kind.C
        },
        split=frozenset((op.stage, op.microbatch) for op in ops if op.kind == Kind.B),
        leaving=frozenset((op.stage, op.microbatch) for op in ops if op.kind in (Kind.O, Kind.E)),
        completing=frozenset({op.stage: op for op in ops if op.kind in (Kind.W, Kind.BW)}.values()),
        closing=frozenset({op.stage: op for op in ops if op.kind == Kind.F}.values()),
        link_orders=link_orders(schedule, rank, layout),
    )


def _require_links(schedule: Schedule, scheduled: Layout, layout: Layout) -> None:
    """Ranks that share a link here must share it in the schedule, which then has the order of their transfers."""
    for d, program in enumerate(schedule.programs):
        if not of_kinds(program.table, *HOST_LINK).any():
            continue
        theirs, ours = (
            f"the link {name!r}" if name else "a link of its own" for name in (scheduled.link(d), layout.link(d))
        )
        if theirs != ours:
            raise ScheduleError(
                f"the schedule transfers over {theirs} from device {d}, in this pipeline rank {d} has {ours}"
            )
        if layout.link(d) and scheduled.full_duplex != layout.full_duplex:
            there, here = ("full duplex" if each.full_duplex else "half duplex" for each in (scheduled, layout))
            raise ScheduleError(f"{theirs} is {there} in the schedule's problem, here {here}")


def digest(schedule: Schedule, problem: Problem) -> str:
    """What two schedules, or problems but for their names, have in common only if they are equal."""
    content = hashlib.sha256(problem.sha256.encode())
    for program in schedule.programs:
        content.update(len(program).to_bytes(8, "little") + program.table.astype("<i4").tobytes())
    for _, order in sorted(schedule.links.items()):
        content.update(len(order).to_bytes(8, "little") + order.table.astype("<i4").tobytes())
    return content.hexdigest()


def one_at_a_time(problem: Problem) -> Schedule:
    """The schedule that needs the least memory: each micro-batch forward and back before the next."""
    programs: list[list[str]] = [[] for _ in problem.devices]
    for j in range(problem.microbatches):
        route = problem.route(j)
        for kind, stages in (("F", route), ("BW", tuple(reversed(route)))):
            for s in stages:
                programs[problem.stages[s].device].append(f"{s}{kind}{j}")
    return Schedule.parse(problem, programs, method="one at a time")


@lru_cache(maxsize=64)
def forwards_in_order(rank: int, layout: Layout) -> Plan:
    """For an evaluation: the micro-batches' forwards, one after the other, on each stage."""
    return lower(one_at_a_time(layout.unmeasured()), rank, layout)


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
    """The rank's ops with their messages. Raises `ScheduleError` if sends and receives do not match: a swapped message
    would give wrong gradients without an error."""
    ops = programs(rank)
    received = [_received(op, layout) for op in ops]
    senders = {message: sender for message, sender in filter(None, received) if sender != rank}
    receives: list[tuple[int, Message, int]] = []  # each with the place of the op that sends it
    for sender in set(senders.values()):
        messages = messages_between(programs(sender), rank, layout)
        expected = {message for message, source in senders.items() if source == sender}
        if messages.keys() != expected:
            odd = sorted(messages.keys() ^ expected)
            raise ScheduleError(
                f"rank {sender} sends {len(messages)} messages, {len(expected)} are expected: "
                f"{', '.join(map(str, odd[:3]))}"
            )
        receives += ((place, message, sender) for message, place in messages.items())
    receives.sort()
    first_after = np.minimum.accumulate(np.array([*ops.values()][::-1], np.int64))[
        ::-1
    ]  # the least place from an op on
    before = np.searchsorted(first_after, [place for place, *_ in receives], side="right")
    post: list[list[tuple[Message, int]]] = [[] for _ in ops]
    for i, (_, message, sender) in zip(before.tolist(), receives, strict=True):
        post[i].append((message, sender))
    actions = []
    for op, posted, needed, gathered in zip(ops, post, received, gathers(programs, rank, layout), strict=True):
        sends = _sent(op, layout)
        to = None if sends is None else layout.placement[sends.stage]
        actions.append(Action(op, tuple(posted), None if needed is None else needed[0], sends, to, gathered))
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


def messages_between(ops: Mapping[Op, int], receiver: int, layout: Layout) -> dict[Message, int]:
    """The messages of one rank's ops to another, in the order in which they are sent, each with its op's place."""
    sent = ((_sent(op, layout), place) for op, place in ops.items())
    return {
        message: place for message, place in sent if message is not None and layout.placement[message.stage] == receiver
    }


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
