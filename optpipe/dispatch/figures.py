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

    The last axis of figures has a column for each class of equal micro-batches (`Costs.alike`).

    Attributes
    ----------
    ms
        (6, S, classes) of each F, B, W, C, and of one part's O and R.
    device
        (S,) of each stage.
    stages_of_device
        (D, most) the stages on each device, then -1.
    message_ms
        (2, S, classes) of the message that the F, the B of each stage waits for.
    takes, frees
        (4, S, classes) bytes of each compute op, when it starts and when it ends.
    frees_if_recomputed
        (S, classes) bytes that an F frees whose activation is computed again.
    memory, host_memory
        (D,) bytes.
    part_bytes
        (S, parts, classes) of each part of an activation.
    links
        (2, D) the host link that carries each device's offloads and reloads: one for both, or one each way.
    stages_on_link
        (links, most) the stages whose activations each link carries, then -1.
    work_ms
        (D, classes) how long each micro-batch keeps each device busy.
    offset_ms
        (2, S, classes) how long after its micro-batch's begin the F, the B of each stage starts at full speed.
    alike
        (m,) the column of each micro-batch.
    """

    ms: Floats
    device: Ints
    stages_of_device: Ints
    message_ms: Floats
    takes: Ints
    frees: Ints
    frees_if_recomputed: Ints
    memory: Ints
    host_memory: Ints
    part_bytes: Ints
    links: Ints
    stages_on_link: Ints
    work_ms: Floats
    offset_ms: Floats
    alike: Ints

    @classmethod
    def from_problem(cls, problem: Problem) -> Figures:
        route, costs, effects = np.array(problem.route(0)), problem.costs, Effects(problem)
        device = costs.device[route]
        # An op that takes no time gets an instant, so that the order of starts says what came first.
        examples = costs.examples
        compute, timed = np.ix_(np.array(COMPUTE), route), np.ix_(np.array((*COMPUTE, *TRANSFERS)), route)
        ms = np.maximum(costs.ms[..., examples][timed], instant_ms(problem))
        message_ms = costs.message_ms[:, route][..., examples]
        takes, frees = (table[..., examples][compute] for table in (effects.takes, effects.frees))
        takes_if_recomputed, frees_if_recomputed = (table[:, route][..., examples] for table in effects.recomputed)
        takes[-1], frees[-1] = takes_if_recomputed[Kind.C], frees_if_recomputed[Kind.C]
        part_bytes = np.swapaxes(effects.parts[route][:, examples] * costs.can_offload[route, None, None], 1, 2)
        ways = 1 if problem.transfer_mode == "half_duplex" else 2
        links = np.array([ways * costs.link, ways * costs.link + ways - 1])
        return in_rows(
            Figures(
                ms=ms,
                device=device,
                stages_of_device=_marked([device == d for d in range(len(problem.devices))]),
                message_ms=message_ms,
                takes=takes,
                frees=frees,
                frees_if_recomputed=frees_if_recomputed[Kind.F],
                memory=costs.activation_budget,
                host_memory=costs.host_memory,
                part_bytes=part_bytes,
                links=links,
                stages_on_link=_marked([(links[:, device] == n).any(axis=0) for n in range(links.max() + 1)]),
                work_ms=_work_ms(ms, device, len(problem.devices)),
                offset_ms=_offset_ms(ms, message_ms),
                alike=costs.alike,
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
        (S,) how long it takes to have all of the largest activation back.
    patience_ms
        (2, S) the longest F and B of each stage: nothing waits longer.
    order_is_free
        Whether micro-batches differ and may enter in any order.
    """

    parts: Ints
    recomputes: Ints
    visits: Ints
    carry_ms: Floats
    patience_ms: Floats
    order_is_free: bool

    @classmethod
    def from_problem(cls, problem: Problem) -> Choices:
        route, costs = np.array(problem.route(0)), problem.costs
        parts, recomputes = (
            np.where(costs.can_offload, costs.parts, 0)[route],
            costs.can_recompute[route].astype(np.int64),
        )
        least_ms = np.where(parts + recomputes > 0, instant_ms(problem), 0.0)
        return in_rows(
            Choices(
                parts,
                recomputes,
                visits=visits(costs.device[route]),
                carry_ms=np.maximum(carry_ms(costs, route), least_ms),
                patience_ms=np.maximum(costs.ms[: Kind.B + 1, route].max(axis=-1), instant_ms(problem)),
                order_is_free=bool(costs.alike.max() > 0 and not problem.fixed_order),
            )
        )


def carry_ms(costs: Costs, route: Ints) -> Floats:
    """(S,) how long it takes to have all of the largest activation back that has left or is to be computed again."""
    reloads = costs.can_offload[route] * costs.parts[route] * costs.ms[Kind.R, route].max(axis=-1)
    longest: Floats = np.maximum(reloads, costs.can_recompute[route] * costs.ms[Kind.C, route].max(axis=-1))
    return longest


def instant_ms(problem: Problem) -> float:
    """What an op lasts that takes no time: long enough that `lift` can tell it from its neighbours."""
    return 10 * grain(np.array([problem.costs.ms.sum()]))


def in_rows(arrays: T) -> T:
    """The tuple with all arrays in row-major order: code is compiled anew for arrays of another layout."""
    values: Any = (np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value for value in arrays)
    return type(arrays)(*values)


def _work_ms(ms: Floats, device: Ints, devices: int) -> Floats:
    work = np.zeros((devices, ms.shape[-1]))
    np.add.at(work, device, ms[: len(COMPUTE) - 1].sum(axis=0))
    return work


def _offset_ms(ms: Floats, message_ms: Floats) -> Floats:
    forward, backward = np.zeros((2, *message_ms.shape[1:]))
    forward[1:] = np.cumsum(ms[0, :-1] + message_ms[0, 1:], axis=0)
    backward[:-1] = np.cumsum((ms[1, 1:] + message_ms[1, :-1])[::-1], axis=0)[::-1]
    return np.array([forward, forward[-1] + ms[0, -1] + backward])


def _marked(masks: list[Flags]) -> Ints:
    """(n, most) the places that each mask marks, then -1."""
    places = [np.flatnonzero(mask) for mask in masks]
    marked = np.full((len(places), max(1, *map(len, places))), -1, dtype=np.int64)
    for row, items in zip(marked, places, strict=True):
        row[: len(items)] = items
    return marked
