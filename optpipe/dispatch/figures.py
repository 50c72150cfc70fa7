"""What the list scheduler reads of a problem, as arrays in named tuples, which numba takes as they are."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np

from optpipe.dispatch.memory_shares import visits
from optpipe.evaluate.effects import Effects
from optpipe.lift import grain
from optpipe.model.arrays import Flags, Floats, Ints
from optpipe.model.costs import Costs
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.rules import Rules

COMPUTE = (Kind.F, Kind.B, Kind.W, Kind.C)  # rows of `takes`, `frees`, and the first of `ms`
TRANSFERS = (Kind.O, Kind.R)  # the last rows of `ms`


T = TypeVar("T", "Figures", "Choices", Rules)


class Figures(NamedTuple):
    """The problem for `clock.list_ops`. S stages stand in the order of the only route.

    Attributes
    ----------
    ms
        (6, S) of each F, B, W, C, and of one part's O and R.
    device
        (S,) of each stage.
    stages_of_device
        (D, most) the stages on each device, then -1.
    p2p_ms
        From one device to another.
    takes, frees
        (4, S) bytes of each compute op, when it starts and when it ends.
    frees_if_recomputed
        (S,) bytes that an F frees whose activation is computed again.
    memory, host_memory
        (D,) bytes.
    part_bytes
        (S, parts) of each part of an activation.
    links
        (2, D) the host link that carries each device's offloads and reloads: one for both, or one each way.
    stages_on_link
        (links, most) the stages whose activations each link carries, then -1.
    offset_ms
        (2, S) how long after its micro-batch's begin the F, the B of each stage starts at full speed.
    """

    ms: Floats
    device: Ints
    stages_of_device: Ints
    p2p_ms: float
    takes: Ints
    frees: Ints
    frees_if_recomputed: Ints
    memory: Ints
    host_memory: Ints
    part_bytes: Ints
    links: Ints
    stages_on_link: Ints
    offset_ms: Floats

    @classmethod
    def from_problem(cls, problem: Problem) -> Figures:
        route, costs, effects = np.array(problem.route(0)), problem.costs, Effects(problem)
        device = costs.device[route]
        # An op that takes no time gets an instant, so that the order of starts says what came first.
        ms = np.maximum(costs.ms[np.ix_(np.array((*COMPUTE, *TRANSFERS)), route)], instant_ms(problem))
        takes, frees = (table[np.ix_(np.array(COMPUTE), route)] for table in (effects.takes, effects.frees))
        takes_if_recomputed, frees_if_recomputed = effects.recomputed
        takes[-1] = takes_if_recomputed[Kind.C, route]
        frees[-1] = frees_if_recomputed[Kind.C, route]
        sizes = [np.array(effects.parts[s] if costs.can_offload[s] else [], dtype=np.int64) for s in route]
        ways = 1 if problem.transfer_mode == "half_duplex" else 2
        links = np.array([ways * costs.link, ways * costs.link + ways - 1])
        return in_rows(
            Figures(
                ms=ms,
                device=device,
                stages_of_device=_marked([device == d for d in range(len(problem.devices))]),
                p2p_ms=problem.p2p_ms,
                takes=takes,
                frees=frees,
                frees_if_recomputed=frees_if_recomputed[Kind.F, route],
                memory=costs.activation_budget,
                host_memory=costs.host_memory,
                part_bytes=_padded(sizes, 0),
                links=links,
                stages_on_link=_marked([(links[:, device] == n).any(axis=0) for n in range(links.max() + 1)]),
                offset_ms=_offset_ms(ms, device, problem.p2p_ms),
            )
        )


class Choices(NamedTuple):
    """What rules may say of each stage.

    Attributes
    ----------
    parts
        (S,) in how many parts an activation can leave; 0 if it cannot.
    recomputes
        (S,) 1 where an activation can be computed again, else 0.
    visits
        (S,) how often the route was at the stage's device before.
    carry_ms
        (S,) how long it takes to have all of an activation back.
    """

    parts: Ints
    recomputes: Ints
    visits: Ints
    carry_ms: Floats

    @classmethod
    def from_problem(cls, problem: Problem) -> Choices:
        route, costs = np.array(problem.route(0)), problem.costs
        parts, recomputes = (
            np.where(costs.can_offload, costs.parts, 0)[route],
            costs.can_recompute[route].astype(np.int64),
        )
        least_ms = np.where(parts + recomputes > 0, instant_ms(problem), 0.0)
        return in_rows(
            Choices(parts, recomputes, visits(costs.device[route]), np.maximum(carry_ms(costs, route), least_ms))
        )


def carry_ms(costs: Costs, route: Ints) -> Floats:
    """(S,) how long it takes to have all of an activation back that has left or is to be computed again."""
    reloads = costs.can_offload[route] * costs.parts[route] * costs.ms[Kind.R, route]
    longest: Floats = np.maximum(reloads, costs.can_recompute[route] * costs.ms[Kind.C, route])
    return longest


def instant_ms(problem: Problem) -> float:
    """What an op lasts that takes no time: long enough that `lift` can tell it from its neighbours."""
    return 10 * grain(np.array([problem.costs.ms.sum() * problem.microbatches]))


def in_rows(arrays: T) -> T:
    """The tuple with all arrays in row-major order: code is compiled anew for arrays of another layout."""
    values: Any = (np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value for value in arrays)
    return type(arrays)(*values)


def _offset_ms(ms: Floats, device: Ints, p2p_ms: float) -> Floats:
    hop = np.where(np.diff(device) != 0, p2p_ms, 0.0)
    forward = np.r_[0.0, np.cumsum(ms[0, :-1] + hop)]
    from_the_end = np.r_[np.cumsum((ms[1, 1:] + hop)[::-1])[::-1], 0.0]
    return np.array([forward, forward[-1] + ms[0, -1] + from_the_end])


def _marked(masks: list[Flags]) -> Ints:
    """(n, most) the places that each mask marks, then -1."""
    return _padded([np.flatnonzero(mask) for mask in masks], -1)


def _padded(rows: list[Ints], value: int) -> Ints:
    """The rows, filled up with a value to one length, at least 1."""
    padded = np.full((len(rows), max(1, *map(len, rows))), value, dtype=np.int64)
    for row, items in zip(padded, rows, strict=True):
        row[: len(items)] = items
    return padded
