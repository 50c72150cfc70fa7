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
from optpipe.model.ops import HOST_LINK, INWARD, KINDS, Kind, Stream
from optpipe.model.problem import Problem
from optpipe.model.program import Program

# What an op needs besides the op before it on its stream: the columns of `Needs.rows`.
OWN = 0  # the step before of the same stage and micro-batch (`KindInfo.needs`)
ACROSS = 1  # the neighbour stage's forward or backward; of an eviction the room on the peer
RESTORED = 2  # what brings a backward's activation back, or a forward's parameters (`KindInfo.restored`)
ISSUED = 3  # the op on the compute stream after which a transfer stands in its program

_STREAM = np.array([list(Stream).index(KINDS[kind].stream) for kind in Kind])  # each device has one of each


class Needs(NamedTuple):
    """What each op needs."""

    rows: Ints  # (n, 4) rows, `NONE` for nothing
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


def needs_of(problem: Problem, rows: Rows, index: Index) -> Needs:
    """What each op needs. Raises ScheduleError where that is in no program."""
    costs = problem.costs
    needs = Needs(np.full((len(rows), 4), NONE), np.zeros(len(rows)))

    def last(kinds: Collection[Kind], waiting: Ints) -> Ints:
        last: Ints = np.max([index.of_same_activation(kind, waiting) for kind in kinds], axis=0)
        return last

    def require(waiting: Ints, column: int, targets: Ints, what: str) -> None:
        if (targets < 0).any():
            row = int(waiting[np.flatnonzero(targets < 0)[0]])
            raise ScheduleError(f"{rows.op(row)} in the program of device {rows.device[row]} has no {what}")
        needs.rows[waiting, column] = targets

    for kind, waiting in index.present.items():
        info = KINDS[kind]
        if info.needs:
            missing = info.missing or KINDS[info.needs[0]].word
            require(waiting, OWN, last(info.needs, waiting), missing)
        if info.across is not None:
            require(waiting, ACROSS, last([info.across], waiting), KINDS[info.across].word)
        if restored := [each for each in info.restored if each in index.present]:
            needs.rows[waiting, RESTORED] = last(restored, waiting)
    # A forward needs that of the stage before it on the route, a backward that of the stage after it.
    for kinds, neighbours, way in (((Kind.F,), costs.before, FORWARDS), ((Kind.B, Kind.BW), costs.after, GRADIENTS)):
        waiting = np.flatnonzero(rows.of_kinds(*kinds))
        waiting = waiting[neighbours[costs.route[rows.microbatch[waiting]], rows.stage[waiting]] >= 0]
        stage, microbatch = rows.stage[waiting], rows.microbatch[waiting]
        targets = index.rows_of(*kinds)[neighbours[costs.route[microbatch], stage], microbatch]
        require(waiting, ACROSS, targets, "neighbour stage's op to wait for")
        needs.delay_ms[waiting] = costs.message_ms[way, stage, microbatch]
    # A transfer needs the op on the compute stream after which it stands in its program.
    leads = ~rows.transfer & ~rows.second
    before = np.maximum.accumulate(np.where(leads, np.arange(len(rows)), NONE))
    issued = np.flatnonzero(rows.transfer & (before >= 0))
    issued = issued[rows.device[before[issued]] == rows.device[issued]]
    needs.rows[issued, ISSUED] = before[issued]
    return needs


def streams_of(problem: Problem, links: Mapping[str, Program], rows: Rows, index: Index) -> Streams:
    """The streams' ops in their order. Raises ScheduleError where the order of a shared link is missing or wrong."""
    on_devices, host_links = len(Stream) * len(problem.devices), int(problem.costs.link.max()) + 1
    inward = rows.of_kinds(*INWARD) & (problem.transfer_mode == "full_duplex")
    on_link = on_devices + 2 * problem.costs.link[rows.device] + inward
    stream = np.where(rows.on_host_link, on_link, len(Stream) * rows.device + _STREAM[rows.kind])
    position = np.arange(len(rows))
    for link in problem.shared_links:
        ordered = _rows_on_link(problem, links, link, rows, index)
        position[ordered] = np.arange(len(ordered))
    leads = np.flatnonzero(~rows.second)
    order = leads[np.lexsort((position[leads], stream[leads]))]
    return Streams(order, np.searchsorted(stream[order], np.arange(on_devices + 2 * host_links + 1)))


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
    within = named.on_host_link & (named.stage < len(problem.stages)) & (named.microbatch < problem.microbatches)
    ordered = np.full(len(named), NONE)
    for kind in HOST_LINK:
        by_part = index.parts(kind)
        chosen = within & (named.kind == kind) & (named.part < by_part.shape[2])
        ordered[chosen] = by_part[named.stage[chosen], named.microbatch[chosen], named.part[chosen]]
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
