"""What the list scheduler reads of a problem and what it changes while it runs, as arrays in named tuples, which numba
takes as they are; and how many micro-batches may be in flight at each stage if stages share their device's memory.

S stages stand in `stage_order`; D devices; m micro-batches in the order in which they enter.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.lift import grain
from optpipe.model.arrays import NONE, Flags, Floats, Ints
from optpipe.model.costs import Costs
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.rules import Rules

COMPUTE = (Kind.F, Kind.B, Kind.W, Kind.C)  # rows of `takes`, `frees`, and the first of `ms`
TRANSFERS = (Kind.O, Kind.R), (Kind.E, Kind.L)  # the last rows of `ms`: of what goes to the host, of what is evicted
BEYOND_MEMORY = (0, 1, 2)  # micro-batches in flight for which there is no room: a device that waits frees them late
GIVEN_UP = (0, 1)  # micro-batches in flight that a device's first stage leaves to each of its other stages


T = TypeVar("T", "Figures", "Choices", Rules)


class Figures(NamedTuple):
    """The problem for `clock.list_all`.

    Figures of ops have one column, in the last axis, a class of equal micro-batches (`Costs.class_of`). What depends on
    how an activation is relieved has a variant in its first axis: 0 where it is not computed again, 1 + the level by
    which it is, or the last one, -1, where it is evicted; V = 2 + the most levels of a stage. Transfers to the host and
    back are of channel 0, evictions and loads of channel 1; C is 2 where some stage can evict, else 1.
    """

    ms: Floats  # (V, 6, S, classes) of each F, B, W, C, and of one part's O and R
    place: Ints  # (S, classes) of each stage on the micro-batches' route, from 0; NONE where they do not pass it
    next_stage: Ints  # (2, S, classes) the stage whose F, whose B follows that of each stage; NONE if none does
    device: Ints  # (S,)
    stages_of_device: Ints  # (D, most) the stages on each device, then NONE
    message_ms: Floats  # (2, S, classes) of the message that the F, the B of each stage waits for
    takes: Ints  # (V, 4, S, classes) bytes of each compute op, when it starts
    frees: Ints  # (V, 4, S, classes) when it ends
    memory: Ints  # (D,) bytes
    node: Ints  # (D,) number of the node whose host memory each device uses
    host_memory: Ints  # (D,) bytes of that node
    part_bytes: Ints  # (V, S, parts, classes) of each part of an activation, or of its checkpoint; of what is evicted
    links: Ints  # (C, 2, D) the link that carries what leaves each device by a channel, and what comes back, or NONE
    channel: Ints  # (links,) of each link
    links_for_room: Ints  # (D, most) the links that look for room on each device, then NONE
    peer: Ints  # (D,) the device to which each evicts, or NONE
    stages_on_link: Ints  # (links, most) the stages whose activations each link carries, then NONE
    work_ms: Floats  # (D, classes) how long each micro-batch keeps each device busy
    offset_ms: Floats  # (2, S, classes) how long after its micro-batch's begin each F, B starts at full speed
    class_of: Ints  # (m,) the column of each micro-batch

    @classmethod
    def from_problem(cls, problem: Problem) -> Figures:
        order, costs, effects = stage_order(problem), problem.costs, Effects(problem)
        device = costs.device[order]
        # An op that takes no time gets an instant, so that the order of starts shows what came first.
        examples = costs.representatives
        compute = np.ix_(np.array(COMPUTE), order)
        timed, evicted = (np.ix_(np.array((*COMPUTE, *moves)), order) for moves in TRANSFERS)
        levels = range(costs.levels.recompute_ms.shape[0])
        times = [each[..., examples][timed] for each in (costs.ms, *map(costs.level_ms, levels))]
        ms = np.maximum([*times, costs.ms[..., examples][evicted]], instant_ms(problem))
        message_ms = costs.message_ms[:, order][..., examples]
        stays = effects.takes, effects.frees
        tables = zip(stays, *effects.by_level, stays, strict=True)
        takes, frees = (np.array([table[..., examples][compute] for table in each]) for each in tables)
        evict = np.zeros_like(effects.parts)
        evict[..., 0] = costs.evict
        parts = [effects.parts * costs.can_offload[:, None, None], *effects.parts_by_level, evict]
        part_bytes = np.array([np.swapaxes(each[order][:, examples], 1, 2) for each in parts])
        ways = 1 if problem.transfer_mode == "half_duplex" else 2
        links = np.array([[ways * costs.link, ways * costs.link + ways - 1]])
        if not part_bytes.any():
            links[:] = NONE  # of all that there are the next one is sought again and again
        evicts = np.isin(np.arange(len(problem.devices)), costs.device[costs.can_evict])
        if evicts.any():
            own = np.where(evicts, links.max() + np.cumsum(evicts), NONE)
            links = np.concatenate([links, [[own, own]]])
        channel, each_link = np.zeros(links.max() + 1, dtype=np.int64), np.arange(links.max() + 1)
        channel[links[1:][links[1:] != NONE]] = 1
        carries = (links[..., None] == each_link).any(axis=1)  # (C, D, links)
        to_peer = np.array([carries[1:, costs.peer == d].any(axis=(0, 1)) for d in range(len(evicts))])
        place, next_stage, offset_ms = _along_routes(problem, order, ms[0], message_ms)
        work_ms = np.zeros((len(problem.devices), len(examples)))
        np.add.at(work_ms, device, (ms[0] * (place != NONE))[: len(COMPUTE) - 1].sum(axis=0))
        return in_rows(
            Figures(
                ms=ms,
                place=place,
                next_stage=next_stage,
                device=device,
                stages_of_device=_marked([device == d for d in range(len(problem.devices))]),
                message_ms=message_ms,
                takes=takes,
                frees=frees,
                memory=costs.activation_budget,
                node=costs.node,
                host_memory=costs.host_memory,
                part_bytes=part_bytes,
                links=links,
                channel=channel,
                links_for_room=_marked(list(carries.any(axis=0) | to_peer)),
                peer=costs.peer,
                stages_on_link=_marked([carries[:, device, n].any(axis=0) for n in each_link]),
                work_ms=work_ms,
                offset_ms=offset_ms,
                class_of=costs.class_of,
            )
        )


class Choices(NamedTuple):
    """What rules may set for each stage."""

    parts: Ints  # (V, S) in how many parts an activation can leave, or its checkpoint by each level; 0 if it cannot; as
    # the last whether it can be evicted
    can_leave: Flags  # (V,) whether any can: of each row of `parts`
    levels: Ints  # (S,) by how many levels an activation can be computed again
    most_levels: int
    chunk: Ints  # (S,) which chunk of its device each stage is, from 0
    chunks: int  # of a device at most
    marks: Flags  # (2, S) room to mark stages
    carry_ms: Floats  # (S,) how long it takes to have all of the largest activation back
    patience_ms: Floats  # (2, S) the longest F and B of each stage: nothing waits longer
    order_is_free: bool  # whether micro-batches differ and may enter in any order

    @classmethod
    def from_problem(cls, problem: Problem) -> Choices:
        order, costs = stage_order(problem), problem.costs
        parts = np.where(np.vstack([costs.can_offload, costs.levels.can_offload]), costs.parts, 0)
        parts = np.vstack([parts, costs.can_evict])[:, order]
        levels = costs.levels.count[order]
        least_ms = np.where(parts.any(axis=0) | (levels > 0), instant_ms(problem), 0.0)
        chunk = chunks_of_stages(costs.device[order])
        return in_rows(
            Choices(
                parts,
                can_leave=np.array([each.any() for each in parts]),
                levels=levels,
                most_levels=int(levels.max()),
                chunk=chunk,
                chunks=int(chunk.max()) + 1,
                marks=np.zeros((2, len(order)), dtype=np.bool_),
                carry_ms=np.maximum(carry_ms(costs, order), least_ms),
                patience_ms=np.maximum(costs.ms[: Kind.B + 1, order].max(axis=-1), instant_ms(problem)),
                order_is_free=bool(costs.class_of.max() > 0 and not problem.fixed_order),
            )
        )


class State(NamedTuple):
    """Where the list scheduler is. A time is infinity while it is open.

    Where no more parts of an activation shall leave, `parts_to_leave` is lowered to `parts_sent`.
    """

    start: Floats  # (4, S, m) when each compute op has started
    moved: Floats  # (2, S, m, parts) when each transfer of a part has started
    input_ready: Floats  # (4, S, m) when the input of an op is there
    activation_ready: Floats  # (S, m) when all of an activation, or of its checkpoint, is on the device
    computed_again: Floats  # (S, m) when the recompute of an activation ends; 0 where there is none
    next_microbatch: Ints  # (4, S) of each kind of op: none before it is to start
    in_flight: Ints  # (S,) micro-batches between the start of their F and that of their B
    begin: Floats  # (m,) the latest begin that at full speed leads to where it is now: ops are due `offset_ms` later
    forwards_left: Ints  # (D,) forwards that have not started
    work_left: Floats  # (D,) how long the F, B and W take that have not started
    held: Ints  # (D,) bytes on each device
    pinned: Ints  # (D,) bytes of host memory that each device had in use before and can use again
    unpinned: Ints  # (D,) by node: bytes of host memory that none of its devices has used
    frees: Ints  # (D,) bytes that go when the running op ends: its own, and of parts that have left meanwhile
    frees_on_host: Ints  # (D,) likewise
    running: Flags  # (D,) whether an op runs
    free_at: Floats  # (D,) when the last op ends or ended
    look_at: Floats  # (links + D,) when to look at it next; infinity if only others can make that necessary
    parts_to_leave: Ints  # (S, m) how many parts of an activation, or of its checkpoint, are to leave
    parts_sent: Ints  # (S, m) how many have begun to leave
    parts_off_device: Ints  # (S, m) how many have left
    parts_back: Ints  # (S, m) how many have begun to come back
    variant: Ints  # (S, m) of each activation, as in `Figures`
    next_to_leave: Ints  # (C, S) the oldest micro-batch with parts that are to leave by each channel
    next_to_return: Ints  # (C, S) the oldest micro-batch with parts that are to come back
    carried: Ints  # (links, 3) way, stage and micro-batch of the part on each link; NONE where a link is free
    link_free_at: Floats  # (links,) when the last transfer ends or ended
    column: Ints  # (m,) of each micro-batch in `Figures`


def new_state(figures: Figures, microbatches: int) -> State:
    """Returns room for `list_all`, which can be used again and again."""
    _, stages, parts, _ = figures.part_bytes.shape
    devices, links = len(figures.memory), len(figures.stages_on_link)

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, dtype=np.int64)

    return State(
        start=np.zeros((4, stages, microbatches)),
        moved=np.zeros((2, stages, microbatches, parts)),
        input_ready=np.zeros((4, stages, microbatches)),
        activation_ready=np.zeros((stages, microbatches)),
        computed_again=np.zeros((stages, microbatches)),
        next_microbatch=ints(4, stages),
        in_flight=ints(stages),
        begin=np.zeros(microbatches),
        forwards_left=ints(devices),
        work_left=np.zeros(devices),
        held=ints(devices),
        pinned=ints(devices),
        unpinned=ints(devices),
        frees=ints(devices),
        frees_on_host=ints(devices),
        running=np.zeros(devices, dtype=np.bool_),
        free_at=np.zeros(devices),
        look_at=np.zeros(links + devices),
        parts_to_leave=ints(stages, microbatches),
        parts_sent=ints(stages, microbatches),
        parts_off_device=ints(stages, microbatches),
        parts_back=ints(stages, microbatches),
        variant=ints(stages, microbatches),
        next_to_leave=ints(len(figures.links), stages),
        next_to_return=ints(len(figures.links), stages),
        carried=ints(links, 3),
        link_free_at=np.zeros(links),
        column=ints(microbatches),
    )


def carry_ms(costs: Costs, route: Ints) -> Floats:
    """(S,) how long it takes to have all of the largest activation back that has left or is to be computed again."""
    parts, levels = costs.parts[route], costs.levels
    reloads = [costs.can_offload[route] * parts * costs.ms[Kind.R, route].max(axis=-1)]
    reloads += [*parts * levels.reload_ms[:, route].max(axis=-1)]
    reloads += [costs.ms[Kind.L, route].max(axis=-1)]
    longest: Floats = np.max([*reloads, *levels.recompute_ms[:, route].max(axis=-1)], axis=0)
    return longest


def instant_ms(problem: Problem) -> float:
    """What an op lasts that takes no time: long enough that `lift` can order it among its neighbours."""
    return 10 * grain(np.array([problem.costs.ms.sum() + problem.costs.levels.recompute_ms.sum()]))


def in_rows(arrays: T) -> T:
    """The tuple with all arrays in row-major order: code is compiled anew for arrays of another layout."""
    values: Any = (np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value for value in arrays)
    return type(arrays)(*values)


def _along_routes(problem: Problem, order: Ints, ms: Floats, message_ms: Floats) -> tuple[Ints, Ints, Floats]:
    """`place`, `next_stage` and `offset_ms` of `Figures`."""
    costs, index = problem.costs, np.argsort(order)
    place = np.full(ms.shape[1:], NONE, dtype=np.int64)
    next_stage, offset_ms = np.full((2, *place.shape), NONE, dtype=np.int64), np.zeros((2, *place.shape))
    for r, stages in enumerate(problem.all_routes):
        route, columns = index[list(stages)], np.flatnonzero(costs.route[costs.representatives] == r)
        place[np.ix_(route, columns)] = np.arange(len(route))[:, None]
        next_stage[0][np.ix_(route[:-1], columns)] = route[1:, None]
        next_stage[1][np.ix_(route[1:], columns)] = route[:-1, None]
        forward, backward = (each[route][:, columns] for each in ms[:2])
        there, back = (each[route][:, columns] for each in message_ms)
        start = np.zeros((2, *forward.shape))
        start[0, 1:] = np.cumsum(forward[:-1] + there[1:], axis=0)
        start[1, :-1] = np.cumsum((backward[1:] + back[:-1])[::-1], axis=0)[::-1]
        start[1] += start[0, -1] + forward[-1]
        offset_ms[:, route[:, None], columns] = start
    return place, next_stage, offset_ms


def _marked(masks: list[Flags]) -> Ints:
    """(n, most) the places that each mask marks, then NONE."""
    places = [np.flatnonzero(mask) for mask in masks]
    marked = np.full((len(places), max([1, *map(len, places)])), NONE, dtype=np.int64)
    for row, items in zip(marked, places, strict=True):
        row[: len(items)] = items
    return marked


def stage_order(problem: Problem) -> Ints:
    """(S,) the stages in the order of the only route; in that of their numbers where there are several routes."""
    return np.array(problem.route(0)) if len(problem.all_routes) == 1 else np.arange(len(problem.stages))


def stages_to_end(problem: Problem) -> Ints:
    """(S,) how many stages are left from each, itself included, on the longest of its routes; in `stage_order`."""
    left = np.zeros(len(problem.stages), dtype=np.int64)
    for route in problem.all_routes:
        left[list(route)] = np.maximum(left[list(route)], np.arange(len(route), 0, -1))
    return left[stage_order(problem)]


def chunks_of_stages(device: Ints) -> Ints:
    """(S,) which chunk of its device each stage is, from 0, if stage s is on `device[s]`."""
    return np.array([(device[:s] == d).sum() for s, d in enumerate(device)], dtype=np.int64)


def memory_shares(problem: Problem) -> list[Ints]:
    """Each (S,) micro-batches in flight by one way to share memory.

    Stages share by how far they are from the end of their route: their activations are held for about so long. The
    device's first stage has what the others leave.
    """
    order, remain, costs = stage_order(problem), stages_to_end(problem), problem.costs
    device, activation = costs.device[order], costs.activation[order].mean(axis=1)
    is_later_chunk = chunks_of_stages(device) > 0
    together = np.bincount(device, remain)[device]
    fit = np.minimum(costs.activation_budget[device] / np.maximum(activation, 1), problem.microbatches).astype(np.int64)
    shares = []
    for beyond, given_up in product(BEYOND_MEMORY, GIVEN_UP):
        later = np.where(is_later_chunk, np.maximum(np.rint(remain / together * (fit + beyond)), 1) + given_up, 0)
        first = fit + beyond - np.bincount(device, later)[device]
        shares.append(np.maximum(np.where(is_later_chunk, later, first), 1).astype(np.int64))
    return shares


def evenly(mean: Any, phase: float, j: Any) -> Any:
    """How many parts of micro-batch j's activation leave if `mean`, a fraction, are to leave on average: of arrays, or
    of numbers where it is compiled."""
    return np.floor(mean * (j + 1) + phase) - np.floor(mean * j + phase)
