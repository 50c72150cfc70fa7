"""Why an op starts when it starts, and why a device waits.

An op starts at the end of the last of all that it waits for (`graph.waits_of`). Followed back from the end of a
schedule, these ops are a critical path; followed back from the op behind a gap, they say what the device waited for.

Memory delays no op by itself: it decides in which order a program may stand. So a gap also has the later ops of its
device that could have run in it by their inputs, each with what speaks against it (`Hindrance`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property

import numpy as np

from optpipe.evaluate.compiled import CompiledSchedule
from optpipe.evaluate.graph import ACROSS, ISSUED, OWN, RESTORED
from optpipe.evaluate.objective import TOLERANCE
from optpipe.model.arrays import NONE, Flags, Floats, Ints
from optpipe.model.ops import COMPUTE
from optpipe.model.program import JOINED


class Cause(IntEnum):
    """What an op waited for last."""

    BEGIN = 0  # nothing: the schedule begins
    STREAM = 1  # the op before it on its stream
    OWN = 2  # the step before of the same stage and micro-batch
    ACROSS = 3  # the neighbour stage's op, with its message; of an eviction the room on the peer
    RESTORED = 4  # what brings its activation or its parameters back
    ISSUED = 5  # of a transfer: the compute op behind which it stands in its program


class Hindrance(IntEnum):
    """What speaks against an op that stood ready while its device waited."""

    ORDER = 0  # only the program's order: it would have fitted, in time and memory
    LENGTH = 1  # it takes longer than the rest of the gap
    MEMORY = 2  # the device would hold more than it may


_OF_COLUMN = {OWN: Cause.OWN, ACROSS: Cause.ACROSS, RESTORED: Cause.RESTORED, ISSUED: Cause.ISSUED}
# Of several that end at the same moment, the first of these: a path stays on one stream where it can.
_PREFERRED = (Cause.STREAM, Cause.RESTORED, Cause.OWN, Cause.ISSUED, Cause.ACROSS)


@dataclass(frozen=True, eq=False)
class Gaps:
    """The times in which devices do not compute, device after device, (g,) each."""

    device: Ints
    begin_ms: Floats
    end_ms: Floats
    row: Ints  # the op that ends the gap; behind a device's last op the one that ends the schedule
    place: Ints  # the row of the program at which the gap lies: the one behind the compute op before
    last: Flags  # whether the gap is behind a device's last op

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, eq=False)
class ReadyOps:
    """Ops that stood ready in a gap, (k,) each: for each gap and kind of compute op the first one of the program."""

    gap: Ints
    row: Ints
    since_ms: Floats  # when it could have started
    held_bytes: Ints  # what the device would hold at most if it had run there
    hindrance: Ints


class Causes:
    """Why ops of a schedule start when they do.

    Attributes
    ----------
    row
        (n,) the op that each op waited for last, `NONE` where it starts with the schedule. A pair is its first.
    why
        (n,) how it waited for it: a `Cause`.
    """

    def __init__(self, compiled: CompiledSchedule) -> None:
        self._compiled, self._timeline = compiled, compiled.timeline
        self._tolerance = TOLERANCE * (1.0 + self._timeline.makespan_ms)
        waits, delays = compiled.waits
        n, columns = waits.shape
        ended = np.where(waits >= 0, self._timeline.end[waits] + delays, -np.inf)
        kinds = [_OF_COLUMN[column % 4] for column in range(columns - 1)] + [Cause.STREAM]
        order = sorted(range(columns), key=lambda column: _PREFERRED.index(kinds[column]))
        late = ended[:, order] >= ended.max(axis=1, initial=-np.inf)[:, None] - self._tolerance
        chosen = np.array(order)[late.argmax(axis=1)]
        self.row: Ints = waits[np.arange(n), chosen]
        self.why: Ints = np.where(self.row >= 0, np.array(kinds, np.int64)[chosen], int(Cause.BEGIN))
        second = np.flatnonzero(self._timeline.rows.second)
        self.row[second], self.why[second] = self.row[second - 1], self.why[second - 1]

    def chain(self, row: int, begin_ms: float) -> list[int]:
        """The ops from `row` back, each waited for by the one before; the last one runs at `begin_ms` or earlier."""
        start, chain = self._timeline.start, [row]
        while start[chain[-1]] > begin_ms + self._tolerance and self.row[chain[-1]] != NONE:
            chain.append(int(self.row[chain[-1]]))
        return chain

    @cached_property
    def critical_path(self) -> list[int]:
        """A chain of ops, none of which waits for anything else, from the first start to the last end."""
        timeline = self._timeline
        return self.chain(int(timeline.end.argmax()), -np.inf)[::-1] if len(timeline.end) else []

    @cached_property
    def gaps(self) -> Gaps:
        """All gaps, from the start of the schedule to its end; devices without compute ops have none."""
        timeline = self._timeline
        rows = timeline.rows
        computing = np.flatnonzero(rows.of_kinds(*COMPUTE) & ~rows.second)
        if not len(computing):
            rowless, timeless = np.empty(0, np.int64), np.empty(0)
            return Gaps(rowless, timeless, timeless, rowless, rowless, np.empty(0, np.bool_))
        first, final = timeline.start.min(), int(timeline.end.argmax())
        device, start, end = rows.device[computing], timeline.start[computing], timeline.end[computing]
        new = np.r_[True, device[1:] != device[:-1]]
        before = np.where(new, first, np.r_[first, end[:-1]])
        closing = np.flatnonzero(np.r_[new[1:], True])
        next_row = computing + 1 + (rows.table[computing, JOINED] == 1)
        place = np.where(new, np.searchsorted(rows.device, device), np.r_[0, next_row[:-1]])
        gaps = Gaps(
            np.r_[device, device[closing]],
            np.r_[before, end[closing]],
            np.r_[start, np.full(len(closing), timeline.end[final])],
            np.r_[computing, np.full(len(closing), final)],
            np.r_[place, next_row[closing]],
            np.r_[np.zeros(len(computing), np.bool_), np.ones(len(closing), np.bool_)],
        )
        kept = np.flatnonzero(gaps.end_ms > gaps.begin_ms + self._tolerance)
        kept = kept[np.lexsort((gaps.begin_ms[kept], gaps.device[kept]))]
        return Gaps(*(getattr(gaps, field.name)[kept] for field in fields(gaps)))

    @cached_property
    def ready(self) -> ReadyOps:
        """What stood ready in the gaps: ops that come later in the program and whose inputs were there before the gap
        ended. The op that ends the gap is one of them where it only waited for a drop."""
        gaps, compiled, timeline = self.gaps, self._compiled, self._timeline
        needs, device = compiled.needs, timeline.rows.device
        ended = np.where(needs.rows >= 0, timeline.end[needs.rows], -np.inf)
        ended[:, ACROSS] += needs.delay_ms
        since = np.maximum(ended[:, [OWN, ACROSS, RESTORED]].max(axis=1), timeline.start.min())
        pairs = self._ready_in_gaps(since)
        which, ready = np.array(pairs, np.int64).reshape(-1, 2).T
        begin = np.maximum(since[ready], gaps.begin_ms[which])
        held = np.array([self._held_if_moved(row, int(gaps.place[gap])) for gap, row in pairs], np.int64)
        long = timeline.end[ready] - timeline.start[ready] > gaps.end_ms[which] - begin + self._tolerance
        hindrance = np.where(long, int(Hindrance.LENGTH), int(Hindrance.ORDER))
        hindrance[held > compiled.problem.costs.activation_budget[device[ready]]] = Hindrance.MEMORY
        return ReadyOps(which, ready, begin, held, hindrance)

    def _ready_in_gaps(self, since: Floats) -> list[tuple[int, int]]:
        """(gap, row) of the first later op of each kind whose inputs are there (n,) before the gap ends."""
        gaps, rows = self.gaps, self._timeline.rows
        pairs: list[tuple[int, int]] = []
        for kind in sorted(COMPUTE):
            alone = rows.of_kinds(kind) & ~rows.second
            alone[rows.first] = False  # a pair stands where both of its ops can run
            of_kind = np.flatnonzero(alone)
            later = np.searchsorted(of_kind, gaps.row)
            stop = np.searchsorted(of_kind, np.searchsorted(rows.device, gaps.device, side="right"))
            for gap in np.flatnonzero((later < stop) & ~gaps.last).tolist():
                candidates = of_kind[later[gap] : stop[gap]]
                first = int(np.argmax(since[candidates] < gaps.end_ms[gap] - self._tolerance))
                if since[candidates[first]] < gaps.end_ms[gap] - self._tolerance:
                    pairs.append((gap, int(candidates[first])))
        return sorted(pairs)

    def _held_if_moved(self, row: int, place: int) -> int:
        """The most bytes that the device holds if `row` runs at `place`, from then until it has its old place."""
        effects, held = self._compiled.effects, self._compiled.held
        takes, frees = int(effects.takes[row]), int(effects.frees[row])
        before = int(held.during[place] - effects.takes[place])
        return max(before + takes, int(held.during[place:row].max(initial=0)) + takes - frees)
