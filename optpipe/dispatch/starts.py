"""Rules that a search starts from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from optpipe.dispatch.figures import Choices, carry_ms
from optpipe.dispatch.memory_shares import memory_shares, stage_order, stages_to_end
from optpipe.dispatch.simulate import Simulator
from optpipe.model.arrays import Floats, Ints
from optpipe.model.ops import BACKWARD, Kind
from optpipe.model.problem import Problem
from optpipe.model.rules import Rules, level_of, parts_of, recomputed
from optpipe.schedule import Schedule

INSTANT_MS = 1e-9  # what takes no longer takes no time
SHARES = (1.0, 3 / 4, 1 / 2, 1 / 4)  # of the activations of each stage, at first
LEADS = (1.0, 2.0)  # how early all activations that leave are to be back, in times of their transfer
# Where micro-batches differ devices wait for F and B, as shares of the longest: small ones do not slip in before.
WAITS = ((0.0, 0.0), (0.5, 0.1), (0.5, 0.2), (0.2, 0.0))


def rules_of_schedule(simulator: Simulator, schedule: Schedule | None) -> Iterator[Rules]:
    """Yields the rules of a schedule, and those that it seems to follow, for the simulator's problem."""
    if schedule is not None:
        for rules in (schedule.rules, followed_rules(schedule)):
            if rules is not None and (moved := moved_rules(simulator, rules, schedule.problem)):
                yield moved


def first_rules(simulator: Simulator) -> Iterator[Rules]:
    """Yields rules where all or some activations leave or are computed again, and where all stay.

    First those of AdaOffload (OptPipe, Algorithm 1): a stage runs all forwards that memory admits, all of its
    activations leave. Others share each device's memory among its stages.
    """
    problem, choices = simulator.problem, simulator.choices
    shares = np.unique(memory_shares(problem), axis=0)[::-1]
    to_the_end, as_memory_admits = stages_to_end(problem), np.full(simulator.stages, problem.microbatches)
    limits = [as_memory_admits, to_the_end, to_the_end + 1, 2 * to_the_end - 1, *shares]
    all_stay = np.zeros((simulator.stages, problem.microbatches), dtype=np.int64)
    reliefs = [
        (spread(simulator, relief, share), lead)
        for share in SHARES
        for relief in _reliefs(choices)
        for lead in (LEADS if share == 1 else LEADS[:1])
    ]
    waits, orders = first_waits(choices), list(entry_orders(problem))
    for in_flight in limits:
        for relief, lead in (*reliefs, (all_stay, 1.0)):
            for wait_ms in waits if relief is all_stay else waits[:1]:
                for order in orders:
                    yield Rules(in_flight, wait_ms, relief, lead * choices.carry_ms, order)


def first_waits(choices: Choices) -> list[Floats]:
    """Each (2, S) as `Rules.wait_ms`: `WAITS`; nothing waits where micro-batches are alike or their order is fixed."""
    waits = WAITS if choices.order_is_free else WAITS[:1]
    return [np.array(shares)[:, None] * choices.patience_ms for shares in waits]


def entry_orders(problem: Problem) -> Iterator[Ints]:
    """Yields orders in which micro-batches may enter: that of their numbers first.

    If they differ and the problem does not fix the order, also by their work: rising, falling, and rising to the middle
    or falling to it, so that light ones fill and empty the pipeline, or heavy ones do.
    """
    yield np.arange(problem.microbatches)
    if problem.fixed_order or problem.costs.class_of.max() == 0:
        return
    rising = _by_work(problem)
    yield rising
    yield rising[::-1]
    yield np.concatenate([rising[::2], rising[1::2][::-1]])
    yield np.concatenate([rising[::-1][::2], rising[::-1][1::2][::-1]])


def _by_work(problem: Problem) -> Ints:
    """(m,) the micro-batches, the lightest first."""
    return np.argsort(problem.costs.ms[[Kind.F, Kind.B, Kind.W]].sum(axis=(0, 1)), kind="stable")


def _reliefs(choices: Choices) -> Iterator[Ints]:
    """Yields what can become of some activations, (S,) in the numbers of `Rules.leaves`: all parts leave, or they are
    computed again by a level, of a stage with fewer levels its last one; then also while the checkpoints leave."""
    if choices.parts[0].any():
        yield choices.parts[0]
    for level in range(choices.levels.max()):
        of_stage = np.minimum(level, choices.levels - 1)
        parts = choices.parts[1 + of_stage, np.arange(len(of_stage))]
        for leaving in (np.zeros_like(parts), parts)[: 1 + parts.any()]:
            yield np.where(choices.levels > 0, recomputed(of_stage, leaving), 0)


def whole_reliefs(choices: Choices) -> list[Ints]:
    """What can become of activations, as `_reliefs`; what a stage cannot do, the first that it can is in place of.

    That makes one (S,) array of each.
    """
    reliefs = list(_reliefs(choices))
    if not reliefs:
        return []
    first = reliefs[0]
    for relief in reliefs[1:]:
        first = np.where(first == 0, relief, first)
    return [np.where(relief == 0, first, relief) for relief in reliefs]


def spread(simulator: Simulator, relief: Ints, share: float) -> Ints:
    """(S, m) what becomes of activations if of each stage's a share, evenly spread, leaves or is computed again."""
    counts = evenly((share * np.where(relief < 0, 1, relief))[:, None], 0.0, simulator.problem.microbatches)
    return np.where(relief[:, None] < 0, relief[:, None] * counts, counts)


def evenly(mean: Any, phase: float, microbatches: int) -> Ints:
    """(..., m) how many parts of each micro-batch's activation leave if `mean`, a fraction, are to leave on average."""
    counts: Ints = evenly_at(mean, phase, np.arange(microbatches)).astype(np.int64)
    return counts


def evenly_at(mean: Any, phase: float, j: Any) -> Any:
    """How many parts of micro-batch j's activation leave by `evenly`; of arrays, or of numbers where it is compiled."""
    return np.floor(mean * (j + 1) + phase) - np.floor(mean * j + phase)


def followed_rules(schedule: Schedule) -> Rules:
    """The rules that a schedule seems to follow: most micro-batches in flight, and what leaves."""
    costs, stages = schedule.problem.costs, stage_order(schedule.problem)
    leaves = np.zeros((len(stages), schedule.problem.microbatches), dtype=np.int64)
    now_in_flight, in_flight = np.zeros(len(stages), dtype=np.int64), np.ones(len(stages), dtype=np.int64)
    place = {s: k for k, s in enumerate(stages.tolist())}
    order = _entry_order(schedule)
    enters = np.argsort(order)
    for program in schedule.programs:
        for op in program.ops():
            k = place[op.stage]
            if op.kind == Kind.F:
                now_in_flight[k] += 1
                in_flight[k] = max(in_flight[k], now_in_flight[k])
            elif op.kind in BACKWARD:
                now_in_flight[k] -= 1
            elif op.kind == Kind.O:
                j = enters[op.microbatch]
                leaves[k, j] = min(leaves[k, j] + 1, costs.parts[op.stage])
            elif op.kind == Kind.C:  # its offloads stand before it
                j = enters[op.microbatch]
                leaves[k, j] = recomputed(op.part, leaves[k, j])
    return Rules(in_flight, np.zeros((2, len(stages))), leaves, carry_ms(costs, stages), order)


def _entry_order(schedule: Schedule) -> Ints:
    """(m,) the micro-batches in the order in which their first forwards start."""
    problem, timeline = schedule.problem, schedule.timeline
    first = np.array([problem.route(j)[0] for j in range(problem.microbatches)])
    rows = timeline.rows
    entering = rows.of_kinds(Kind.F) & (rows.stage == first[rows.microbatch])
    order: Ints = rows.microbatch[entering][np.argsort(timeline.start[entering], kind="stable")].astype(np.int64)
    return order


def moved_rules(simulator: Simulator, rules: Rules, problem: Problem) -> Rules | None:
    """Rules of a problem for the simulator's; None if they are not of its stages and micro-batches, or if there are
    several routes and others.

    Times keep their proportion to those of the ops, and micro-batches enter as those with the same place by their work.
    Where there are more or fewer stages, each one follows the stage at the same place of the route.
    """
    choices, route = simulator.choices, stage_order(problem)
    stages, microbatches = simulator.stages, simulator.problem.microbatches
    if rules.leaves.shape != (len(route), problem.microbatches):
        return None
    routes = problem.all_routes, simulator.problem.all_routes
    if max(map(len, routes)) > 1 and (routes[0] != routes[1] or microbatches != problem.microbatches):
        return None
    source = np.rint(np.linspace(0, len(route) - 1, stages)).astype(int)
    leaves = rules.leaves[source][:, _source_microbatches(problem.microbatches, microbatches)]
    old_ms = problem.costs.ms[: Kind.B + 1, route[source]].max(axis=-1)
    old_carry_ms = carry_ms(problem.costs, route[source])
    return Rules(
        in_flight=np.ceil(rules.in_flight[source] * stages / len(route)).clip(1, microbatches).astype(np.int64),
        wait_ms=_scaled(rules.wait_ms[:, source], old_ms, choices.patience_ms, np.zeros_like(old_ms)),
        leaves=_possible(choices, leaves),
        lead_ms=_scaled(rules.lead_ms[source], old_carry_ms, choices.carry_ms, choices.carry_ms),
        order=_moved_order(simulator.problem, rules.order, problem)
        if choices.order_is_free
        else np.arange(microbatches),
    )


def _moved_order(problem: Problem, order: Ints, old: Problem) -> Ints:
    """(m,) the order of entry with which light and heavy micro-batches take turns as in the old problem."""
    places = np.argsort(_by_work(old))[order]
    followed = places[np.rint(np.linspace(0, old.microbatches - 1, problem.microbatches)).astype(int)]
    return _by_work(problem)[np.argsort(np.argsort(followed, kind="stable"))]


def _possible(choices: Choices, leaves: Ints) -> Ints:
    """(S, m) what can become of activations, nearest to this: no more parts than there are, no higher level."""
    stage, again = np.arange(len(leaves))[:, None], leaves < 0
    level = np.minimum(np.where(again, level_of(leaves), -1), choices.levels[:, None] - 1)
    parts = np.minimum(np.where(again, parts_of(leaves), leaves), choices.parts[1 + level, stage])
    return np.where(again & (level >= 0), recomputed(level, parts), np.where(again, 0, parts))


def _scaled(value: Floats, old: Floats, new: Floats, default: Floats) -> Floats:
    """The value in its proportion to `old`, for `new`; the default where `old` takes no time."""
    lasts = old > INSTANT_MS
    return np.where(lasts, value * (new / np.where(lasts, old, 1.0)), default)


def _source_microbatches(old: int, new: int) -> Ints:
    """(new,) which of the old micro-batches each new one follows: the first and the last ones stay what they are, in
    between some are repeated or left out."""
    if new <= old:
        return np.concatenate([np.arange(new - new // 2), np.arange(old - new // 2, old)])
    period = max(1, old // 2)
    first = (old - period) // 2
    repeated = first + np.arange(new - old) % period
    return np.concatenate([np.arange(first + period), repeated, np.arange(first + period, old)])
