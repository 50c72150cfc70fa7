"""Times of programs, each combined with each: what one waits for is told in plain steps, which are then timed by
compiled loops."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from optpipe import Kind, Op, Problem, Program
from optpipe.evaluate.jit import compiled
from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Flags, Floats, Ints
from support.oracles.clock import message_ms, op_ms

Event = tuple[str, int, int, int]  # kind, stage, micro-batch and part


class Step(NamedTuple):
    """An op, its time in ms, and what it waits for: the end of an event, and a delay after it."""

    event: Event
    ms: float
    waits: tuple[tuple[Event, float], ...]


def event_of(op: Op) -> Event:
    """Who waits for a backward does not ask whether it is a B or a BW."""
    return "backward" if op.kind in (Kind.B, Kind.BW) else op.kind.name, op.stage, op.microbatch, op.part


def link_stream(problem: Problem, device: int, op: Op) -> str:
    """Transfers with the same name here run one at a time."""
    link = problem.devices[device].link
    name = link if link in problem.shared_links else f"own {device}"
    return f"{name} {op.kind.name}" if problem.transfer_mode == "full_duplex" else str(name)


def steps_of(problem: Problem, device: int, program: Program) -> list[Step]:
    """What each op of a program waits for, whatever the other devices run: the ops before it in its program, and the
    data that it needs. The order on shared links is left out."""
    steps, ops, last = [], list(program.ops()), dict[str, Event]()
    there = set(map(event_of, ops))
    shared = problem.devices[device].link in problem.shared_links
    for op in ops:
        stage, s, j = problem.stages[op.stage], op.stage, op.microbatch
        route = problem.route(j)
        k = route.index(s)
        waits = [(last["compute"], 0.0)] if "compute" in last else []
        if op.kind in (Kind.O, Kind.R):
            stream = link_stream(problem, device, op)
            waits += [(last[stream], 0.0)] if stream in last and not shared else []
        elif op.kind in (Kind.E, Kind.L):
            stream = "to the peer"
            waits += [(last[stream], 0.0)] if stream in last else []
        else:
            stream = "compute"
        if op.kind is Kind.D:
            waits.append((("E" if ("E", s, j, 0) in there else "O", s, j, op.part), 0.0))
        if op.kind in (Kind.E, Kind.V):
            waits.append((("A" if op.kind is Kind.E else "L", s, j, 0), 0.0))
        sender = route[k - 1] if op.kind is Kind.F and k else None
        if op.kind in (Kind.B, Kind.BW, Kind.C):
            returns = [("L", s, j, 0), *(("R", s, j, part) for part in range(stage.offload_parts))]
            waits += [(back, 0.0) for back in returns if back in there]
        if op.kind in (Kind.B, Kind.BW):
            sender = route[k + 1] if k + 1 < len(route) else None
        if sender is not None:
            delay = message_ms(problem, sender, s, j)
            waits.append((("F" if op.kind is Kind.F else "backward", sender, j, 0), delay))
        last[stream] = event_of(op)
        again = next((c for c in ops if (c.kind, c.stage, c.microbatch) == (Kind.C, s, j)), None)
        steps.append(Step(event_of(op), op_ms(stage.of_microbatch(j), op.kind, again), tuple(waits)))
    return steps


def waits_on_links(problem: Problem, links: dict[str, Program]) -> dict[Event, Event]:
    """The transfer before each one on a shared link."""
    before: dict[Event, Event] = {}
    for order in links.values():
        streams: dict[str, list[Event]] = {}
        for op in order.ops():
            streams.setdefault(link_stream(problem, problem.stages[op.stage].device, op), []).append(event_of(op))
        for events in streams.values():
            before |= {event: earlier for earlier, event in pairwise(events)}
    return before


MOST_WAITS = 6


class Tables(NamedTuple):
    """Programs of all devices, one row each, padded with -1."""

    events: Ints  # (P, n) the number of each step's event
    ms: Floats  # (P, n) how long each step takes
    waits: Ints  # (P, n, most) the events that each step waits for
    delays: Floats  # (P, n, most) how long after them
    rooms: Flags  # (P, n) whether it is only room for a peer, which is no part of a span


class TimedPrograms:
    """The programs among which each device has one."""

    def __init__(self, problem: Problem, groups: Sequence[Sequence[Sequence[Program]]]) -> None:
        """`groups` has the programs of each device in groups."""
        self._problem = problem
        self._programs = [program for own in groups for group in own for program in group]
        rows = [steps_of(problem, d, program) for d, own in enumerate(groups) for group in own for program in group]
        ends = iter(np.cumsum([len(group) for own in groups for group in own]).tolist())
        self._ranges = [[(end - len(group), end) for group, end in zip(own, ends, strict=False)] for own in groups]
        self._numbers = {event: n for n, event in enumerate({step.event: None for row in rows for step in row})}
        shape = len(rows), max(map(len, rows), default=0)
        self._tables = tables = Tables(
            *(np.full(shape, -1), np.zeros(shape), np.full((*shape, MOST_WAITS), -1), np.zeros((*shape, MOST_WAITS))),
            rooms=np.zeros(shape, np.bool_),
        )
        for r, row in enumerate(rows):
            for i, step in enumerate(row):
                tables.events[r, i], tables.ms[r, i] = self._numbers[step.event], step.ms
                tables.rooms[r, i] = step.event[0] in "AV"
                for w, (event, delay) in enumerate(step.waits):
                    # An event that no program has is waited for without end.
                    tables.waits[r, i, w] = self._numbers.get(event, len(self._numbers))
                    tables.delays[r, i, w] = delay

    def shortest(
        self, chosen: Sequence[int], links: dict[str, Program]
    ) -> dict[Objective, tuple[float, tuple[Program, ...]]]:
        """The shortest lengths of all programs of one group of each device, and by which programs; infinite if all wait
        for each other."""
        before = np.full(len(self._numbers) + 1, -1)
        for event, earlier in waits_on_links(self._problem, links).items():
            before[self._numbers[event]] = self._numbers[earlier]
        ranges = np.array([own[n] for own, n in zip(self._ranges, chosen, strict=True)])
        best, rows = np.full(2, np.inf), np.zeros((2, len(ranges)), dtype=np.int64)
        measure_all(self._tables, before, ranges, best, rows)
        programs = [tuple(self._programs[r] for r in row) for row in rows.tolist()]
        return {"makespan": (float(best[0]), programs[0]), "span": (float(best[1]), programs[1])}


@compiled
def measure(tables: Tables, rows: Ints, before: Ints, ends: Floats, lengths: Floats) -> None:
    """(2,) makespan and span of one program of each device, all ops as early as may be.

    `before` has the transfer before each one on a shared link; `ends` is room.
    """
    devices, longest = len(rows), tables.events.shape[1]
    ends[:] = np.inf
    place, begins, lasts = np.zeros(devices, np.int64), np.full(devices, np.inf), np.zeros(devices)
    lengths[:] = np.inf
    moved = True
    while moved:
        moved = False
        for d in range(devices):
            row = rows[d]
            while place[d] < longest and tables.events[row, place[d]] >= 0:
                i = place[d]
                event, begin = tables.events[row, i], 0.0
                for w in range(tables.waits.shape[2]):
                    if tables.waits[row, i, w] >= 0:
                        begin = max(begin, ends[tables.waits[row, i, w]] + tables.delays[row, i, w])
                if before[event] >= 0:
                    begin = max(begin, ends[before[event]])
                if begin == np.inf:
                    break
                ends[event] = begin + tables.ms[row, i]
                if not tables.rooms[row, i]:
                    begins[d], lasts[d] = min(begins[d], begin), max(lasts[d], ends[event])
                place[d] += 1
                moved = True
    for d in range(devices):
        row = rows[d]
        if place[d] < longest and tables.events[row, place[d]] >= 0:
            return
    lengths[0], lengths[1] = lasts.max() - begins.min(), 0.0
    for d in range(devices):
        if begins[d] < np.inf:
            lengths[1] = max(lengths[1], lasts[d] - begins[d])


@compiled
def measure_all(tables: Tables, before: Ints, ranges: Ints, best: Floats, shortest: Ints) -> None:
    """The (2,) best lengths of all combinations, and the (2, D) rows they have; `ranges` has (D, 2) the first row of
    each device and the one after its last."""
    devices = len(ranges)
    rows, lengths, ends = ranges[:, 0].copy(), np.zeros(2), np.zeros(len(before))
    if (ranges[:, 0] == ranges[:, 1]).any():
        return
    while True:
        measure(tables, rows, before, ends, lengths)
        for n in range(2):
            if lengths[n] < best[n]:
                best[n] = lengths[n]
                shortest[n] = rows
        d = 0
        while d < devices:
            rows[d] += 1
            if rows[d] < ranges[d, 1]:
                break
            rows[d] = ranges[d, 0]
            d += 1
        if d == devices:
            return
