"""Who waits for whom: the stream that each op stands on, and what it needs besides its place in that stream.

Compute ops, drops, accepts and vacates stand on their device's compute stream. Offloads and reloads stand on their host
link: one stream a link where it is half duplex, one a direction where it is full duplex. Evictions and loads stand on a
stream of their own for each device that evicts, one transfer at a time. Of optimizers on the host, gradients and
parameters take the host link, and updates a stream of their own for each device. The second op of a pair stands on no
stream: it starts and ends with the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.evaluate.rows import Index, Rows
from optpipe.model.arrays import NONE, Floats, Ints
from optpipe.model.ops import EVICTION, HOST_LINK, INWARD, OPTIMIZER, PEER_LINK, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import Program

# What an op needs besides the op before it on its stream: the columns of `Needs.rows`.
OWN = 0  # the step before of the same stage and micro-batch
ACROSS = 1  # the neighbour stage's forward or backward; of an eviction the room on the peer
RESTORED = 2  # the reload, load or recompute that brings a backward's activation back; of a forward its parameters
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


def durations(problem: Problem, rows: Rows, ms: Floats | None = None) -> Floats:
    """(n, ...) each op's time in ms; a pair's stands on its first op.

    `ms` are the ops' times alone, by default the nominal ones; they may have further dimensions, such as samples.
    """
    if ms is None:
        ms = problem.costs.ms[rows.kind, rows.stage]
    ms[rows.first] = (problem.overlap_factor or 1.0) * (ms[rows.first] + ms[rows.first + 1])
    return ms


def needs_of(problem: Problem, rows: Rows, index: Index) -> Needs:
    """What each op needs. Raises ScheduleError where that is in no program."""
    stage, microbatch, part = rows.stage, rows.microbatch, rows.part
    needs = np.full((len(rows), 4), NONE)
    delay = np.zeros(len(rows))
    forward, backward = index.rows_of(Kind.F), index.rows_of(Kind.B, Kind.BW)
    offload, drop = index.parts(Kind.O), index.parts(Kind.D)
    restored = index.rows_of(
        Kind.R, Kind.C, Kind.L
    )  # one of them at most; all parts' reloads stand on one stream, in order

    def where(*kinds: Kind) -> Ints:
        return np.flatnonzero(rows.of_kinds(*kinds))

    def put(waiting: Ints, column: int, targets: Ints, what: str) -> None:
        if (targets < 0).any():
            row = int(waiting[np.flatnonzero(targets < 0)[0]])
            raise ScheduleError(f"{rows.op(row)} in the program of device {rows.device[row]} has no {what}")
        needs[waiting, column] = targets

    after_forward, after_input = where(Kind.B, Kind.BW, Kind.C, Kind.O, Kind.E), where(Kind.W)
    put(after_forward, OWN, forward[stage[after_forward], microbatch[after_forward]], "forward")
    put(after_input, OWN, backward[stage[after_input], microbatch[after_input]], "input gradient")
    if rows.of_kinds(*EVICTION).any():
        evicted, vacated = where(Kind.E), where(Kind.V)
        put(evicted, ACROSS, index.rows_of(Kind.A)[stage[evicted], microbatch[evicted]], "room on the peer")
        put(vacated, OWN, index.rows_of(Kind.L)[stage[vacated], microbatch[vacated]], "load")
        offload = offload.copy()
        offload[:, :, 0] = np.maximum(offload[:, :, 0], index.rows_of(Kind.E))
    dropped, brought = where(Kind.D), where(Kind.R, Kind.L)
    put(dropped, OWN, offload[stage[dropped], microbatch[dropped], part[dropped]], "offload or eviction")
    put(brought, OWN, drop[stage[brought], microbatch[brought], part[brought]], "drop")
    if rows.of_kinds(*OPTIMIZER).any():
        sent, updated, forwards = where(Kind.G), where(Kind.U), where(Kind.F)
        put(sent, OWN, index.rows_of(Kind.W, Kind.BW).max(axis=1)[stage[sent]], "weight gradient")
        put(updated, OWN, index.rows_of(Kind.G)[stage[updated], microbatch[updated]], "gradients")
        needs[forwards, RESTORED] = index.rows_of(Kind.P)[stage[forwards], 0]

    costs = problem.costs
    for own, neighbours, found in (
        (where(Kind.F), costs.before, forward),
        (where(Kind.B, Kind.BW), costs.after, backward),
    ):
        other = neighbours[costs.route[microbatch[own]], stage[own]]
        own, other = own[other >= 0], other[other >= 0]
        put(own, ACROSS, found[other, microbatch[own]], "neighbour stage's op to wait for")
        delay[own] = np.where(costs.device[other] == costs.device[stage[own]], 0.0, problem.p2p_ms)
    gradients = where(Kind.B, Kind.BW)
    needs[gradients, RESTORED] = restored[stage[gradients], microbatch[gradients]]

    leads = ~rows.transfer & ~rows.second
    last = np.maximum.accumulate(np.where(leads, np.arange(len(rows)), NONE))
    issued = np.flatnonzero(rows.transfer & (last >= 0))
    issued = issued[rows.device[last[issued]] == rows.device[issued]]
    needs[issued, ISSUED] = last[issued]
    return Needs(needs, delay)


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
    own = np.flatnonzero(rows.on_host_link & np.isin(rows.device, problem.shared_links[link]))
    if link not in links:
        if len(own) == 0:
            return own
        sharers = list(problem.shared_links[link])
        raise ScheduleError(
            f"links[{link!r}] is missing: devices {sharers} share it, so it needs the order of its transfers"
        )
    named = Rows.from_programs([links[link]])
    known = (
        named.on_host_link
        & (named.stage < len(problem.stages))
        & (named.microbatch < problem.microbatches)
        & (named.part < int(problem.costs.parts.max()))
    )
    found = np.full(len(named), NONE)
    for kind in HOST_LINK:
        chosen = known & (named.kind == kind)
        found[chosen] = index.parts(kind)[named.stage[chosen], named.microbatch[chosen], named.part[chosen]]
    stray = ~np.isin(found, own)
    if stray.any():
        op = named.op(int(np.flatnonzero(stray)[0]))
        raise ScheduleError(f"links[{link!r}]: {op} is in no program of a device on this link")
    if len(found) != len(own) or len(np.unique(found)) != len(found):
        raise ScheduleError(
            f"links[{link!r}] has {len(found)} entries: the programs have {len(own)} transfers on it, "
            "each to be named once"
        )
    for d in problem.shared_links[link]:
        mine = found[rows.device[found] == d]
        late = np.flatnonzero(np.diff(mine) < 0)
        if len(late):
            first, second = (rows.op(row) for row in mine[late[0] : late[0] + 2].tolist())
            raise ScheduleError(
                f"links[{link!r}]: {first} stands before {second}, in the program of device {d} after it"
            )
    return found


def waits_of(rows: Rows, needs: Needs, streams: Streams) -> tuple[Ints, Floats]:
    """(n, k) the ops that each op waits for, `NONE` for none, and (n, k) how many ms ago they must have ended.

    The columns are those of `Needs.rows`, then, where there are pairs, those of the second op on its first, and last
    the op before on the stream. A pair is its first op: who needs the second waits for the first.
    """
    waits, delays = needs.rows, np.zeros(needs.rows.shape)
    delays[:, ACROSS] = needs.delay_ms
    first = rows.first
    if len(first):
        waits, delays = (
            np.concatenate([of, np.full_like(of, blank)], axis=1) for of, blank in ((waits, NONE), (delays, 0))
        )
        waits[first, 4:], delays[first, 4:] = waits[first + 1, :4], delays[first + 1, :4]
        lead = np.arange(len(rows)) - rows.second
        waits = np.where(waits >= 0, lead[waits], NONE)
    before = streams.before(len(rows))
    return np.column_stack([waits, before]), np.column_stack([delays, np.zeros(len(rows))])
