"""Who waits for whom: the stream that each op stands on, and what it needs besides its place in that stream.

Compute ops, drops, accepts and vacates stand on their device's compute stream. Offloads and reloads stand on their host
link: one stream a link where it is half duplex, one a direction where it is full duplex. Evictions and loads stand on a
stream of their own for each device that evicts, one transfer at a time. Of optimizers on the host, gradients and
parameters take the host link, and updates a stream of their own for each device. The second op of a pair stands on no
stream: it starts and ends with the first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.evaluate.rows import Index, Rows
from optpipe.model.arrays import NONE, Floats, Ints
from optpipe.model.costs import FORWARDS, GRADIENTS
from optpipe.model.ops import HOST_LINK, INWARD, KINDS, PEER_LINK, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import Program

# What an op needs besides the op before it on its stream: the columns of `Needs.rows`.
OWN = 0  # the step before of the same stage and micro-batch (`KindInfo.needs`)
ACROSS = 1  # the neighbour stage's forward or backward; of an eviction the room on the peer
RESTORED = 2  # what brings a backward's activation back, or a forward's parameters (`KindInfo.restored`)
ISSUED = 3  # the op on the compute stream after which a transfer stands in its program


class Needs(NamedTuple):
    """What each op needs."""

    rows: Ints  # (n, 4) or (n, k) rows, `NONE` for nothing
    delay_ms: Floats  # (n,) how long ago the one in column `ACROSS` must have ended


class Streams(NamedTuple):
    """The ops of each stream in their order."""

    order: Ints  # rows, stream after stream
    begins: Ints  # where each stream begins in `order`, and last its length

    def before(self, n: int) -> Ints:
        """(n,) the row before each row on its stream, `NONE` for the first."""
        before = np.full(n, NONE)
        before[self.order[1:]] = self.order[:-1]
        first = self.begins[self.begins < len(self.order)]
        before[self.order[first]] = NONE
        return before


def nominal_ms(problem: Problem, rows: Rows, index: Index) -> Floats:
    """(n,) the time of each op alone in ms."""
    costs = problem.costs
    if not costs.can_recompute.any():
        alone: Floats = costs.ms[rows.kind, rows.stage, rows.microbatch]
        return alone
    return costs.op_ms(rows.kind, rows.stage, rows.microbatch, index.level[rows.stage, rows.microbatch])


def durations(problem: Problem, rows: Rows, ms: Floats) -> Floats:
    """(n, ...) each op's time in ms, where `ms` are the ops' times alone; a pair's stands on its first op.

    The times may have further dimensions, such as samples.
    """
    ms[rows.first] = (problem.overlap_factor or 1.0) * (ms[rows.first] + ms[rows.first + 1])
    return ms


def needs_of(problem: Problem, rows: Rows, index: Index) -> Needs:
    """What each op needs. Raises ScheduleError where that is in no program."""
    collected = _Collector(problem, rows, index)
    for kind, waiting in index.present.items():
        collected.add_kind(kind, waiting)
    collected.add_neighbour_stages()
    collected.add_places_in_program()
    return Needs(collected.needs, collected.delay_ms)


class _Collector:
    """The needs of all rows."""

    def __init__(self, problem: Problem, rows: Rows, index: Index) -> None:
        self._problem, self._rows, self._index = problem, rows, index
        self.needs = np.full((len(rows), 4), NONE)
        self.delay_ms = np.zeros(len(rows))

    def _require(self, waiting: Ints, column: int, targets: Ints, what: str) -> None:
        if (targets < 0).any():
            row = int(waiting[np.flatnonzero(targets < 0)[0]])
            device = self._rows.device[row]
            raise ScheduleError(f"{self._rows.op(row)} in the program of device {device} has no {what}")
        self.needs[waiting, column] = targets

    def _last(self, kinds: Collection[Kind], waiting: Ints) -> Ints:
        last: Ints = np.max([self._index.of_same_activation(kind, waiting) for kind in kinds], axis=0)
        return last

    def add_kind(self, kind: Kind, waiting: Ints) -> None:
        """What ops of a kind need of their own activation, as `KINDS` has it."""
        info = KINDS[kind]
        if info.needs:
            self._require(waiting, OWN, self._last(info.needs, waiting), info.missing)
        if info.across is not None:
            self._require(waiting, ACROSS, self._last([info.across], waiting), KINDS[info.across].word)
        if restored := [each for each in info.restored if each in self._index.present]:
            self.needs[waiting, RESTORED] = self._last(restored, waiting)

    def add_neighbour_stages(self) -> None:
        """A forward needs that of the stage before it on the route, a backward that of the stage after it."""
        costs = self._problem.costs
        ways = (((Kind.F,), costs.before, FORWARDS), ((Kind.B, Kind.BW), costs.after, GRADIENTS))
        for kinds, neighbours, way in ways:
            waiting, targets = np.flatnonzero(self._rows.of_kinds(*kinds)), self._index.rows_of(*kinds)
            stage, microbatch = self._rows.stage[waiting], self._rows.microbatch[waiting]
            neighbour = neighbours[costs.route[microbatch], stage]
            inner = neighbour >= 0
            waiting, stage, neighbour = waiting[inner], stage[inner], neighbour[inner]
            self._require(waiting, ACROSS, targets[neighbour, microbatch[inner]], "neighbour stage's op to wait for")
            self.delay_ms[waiting] = costs.message_ms[way, stage, microbatch[inner]]

    def add_places_in_program(self) -> None:
        """A transfer needs the op on the compute stream after which it stands."""
        rows = self._rows
        leads = ~rows.transfer & ~rows.second
        last = np.maximum.accumulate(np.where(leads, np.arange(len(rows)), NONE))
        issued = np.flatnonzero(rows.transfer & (last >= 0))
        issued = issued[rows.device[last[issued]] == rows.device[issued]]
        self.needs[issued, ISSUED] = last[issued]


def streams_of(problem: Problem, links: Mapping[str, Program], rows: Rows, index: Index) -> Streams:
    """The streams' ops in their order. Raises ScheduleError where the order of a shared link is missing or wrong."""
    devices, host_links = len(problem.devices), int(problem.costs.link.max()) + 1
    inward = rows.of_kinds(*INWARD) & (problem.transfer_mode == "full_duplex")
    host_stream = devices + 2 * problem.costs.link[rows.device] + inward
    stream = np.where(rows.on_host_link, host_stream, rows.device)
    stream += rows.of_kinds(*PEER_LINK) * (devices + 2 * host_links)
    stream += rows.of_kinds(Kind.U) * 2 * (devices + host_links)
    position = np.arange(len(rows))
    for link in problem.shared_links:
        ordered = _rows_on_link(problem, links, link, rows, index)
        position[ordered] = np.arange(len(ordered))
    leads = np.flatnonzero(~rows.second)
    order = leads[np.lexsort((position[leads], stream[leads]))]
    return Streams(order, np.searchsorted(stream[order], np.arange(3 * devices + 2 * host_links + 1)))


def _rows_on_link(problem: Problem, links: Mapping[str, Program], link: str, rows: Rows, index: Index) -> Ints:
    """The rows of a shared link's transfers in the order that the schedule gives, which keeps each program's order."""
    transfers = np.flatnonzero(rows.on_host_link & np.isin(rows.device, problem.shared_links[link]))
    if link not in links:
        if len(transfers) == 0:
            return transfers
        sharers = list(problem.shared_links[link])
        raise ScheduleError(
            f"links[{link!r}] is missing: devices {sharers} share it, so it needs the order of its transfers"
        )
    named = Rows.from_programs([links[link]])
    ordered = _find_rows(problem, named, index)
    stray = ~np.isin(ordered, transfers)
    if stray.any():
        op = named.op(int(np.flatnonzero(stray)[0]))
        raise ScheduleError(f"links[{link!r}]: {op} is in no program of a device on this link")
    if len(ordered) != len(transfers) or len(np.unique(ordered)) != len(ordered):
        raise ScheduleError(
            f"links[{link!r}] has {len(ordered)} entries: the programs have {len(transfers)} transfers on it, "
            "each to be named once"
        )
    for d in problem.shared_links[link]:
        of_device = ordered[rows.device[ordered] == d]
        late = np.flatnonzero(np.diff(of_device) < 0)
        if len(late):
            first, second = (rows.op(row) for row in of_device[late[0] : late[0] + 2].tolist())
            raise ScheduleError(
                f"links[{link!r}]: {first} stands before {second}, in the program of device {d} after it"
            )
    return ordered


def _find_rows(problem: Problem, named: Rows, index: Index) -> Ints:
    """The row of each named transfer in the programs, NONE where it is in none."""
    within = named.on_host_link & (named.stage < len(problem.stages)) & (named.microbatch < problem.microbatches)
    rows = np.full(len(named), NONE)
    for kind in HOST_LINK:
        by_part = index.parts(kind)
        chosen = within & (named.kind == kind) & (named.part < by_part.shape[2])
        rows[chosen] = by_part[named.stage[chosen], named.microbatch[chosen], named.part[chosen]]
    return rows


def waits_of(rows: Rows, needs: Needs, streams: Streams) -> tuple[Ints, Floats]:
    """(n, k) the ops that each op waits for, `NONE` for none, and (n, k) how many ms ago they must have ended.

    The columns are those of `Needs.rows`, then, where there are pairs, those of the second op on its first, and last
    the op before on the stream. A pair is its first op: who needs the second waits for the first.
    """
    waits, delays = needs.rows, np.zeros(needs.rows.shape)
    delays[:, ACROSS] = needs.delay_ms
    first = rows.first
    if len(first):
        waits = np.concatenate([waits, np.full_like(waits, NONE)], axis=1)
        delays = np.concatenate([delays, np.zeros_like(delays)], axis=1)
        waits[first, 4:] = waits[first + 1, :4]
        delays[first, 4:] = delays[first + 1, :4]
        lead = np.arange(len(rows)) - rows.second
        waits = np.where(waits >= 0, lead[waits], NONE)
    before = streams.before(len(rows))
    return np.column_stack([waits, before]), np.column_stack([delays, np.zeros(len(rows))])
