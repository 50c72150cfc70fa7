"""Rules that a search starts from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from optpipe.dispatch.figures import Choices, carry_ms, memory_shares, stage_order, stages_to_end
from optpipe.dispatch.simulate import Simulator
from optpipe.model.arrays import NONE, Floats, Ints
from optpipe.model.ops import BACKWARD, Kind
from optpipe.model.problem import Problem
from optpipe.model.rules import Rules
from optpipe.schedule import Schedule

INSTANT_MS = 1e-9  # what takes no longer takes no time
SHARES = (1.0, 3 / 4, 1 / 2, 1 / 4)  # of the activations of each stage, at first
LEADS = (1.0, 2.0)  # how early all activations that leave are to be back, in times of their transfer
# Where micro-batches differ devices wait for F and B, as shares of the longest: small ones do not slip in before.
WAITS = ((0.0, 0.0), (0.5, 0.1), (0.5, 0.2), (0.2, 0.0))


class StageRelief(NamedTuple):
    """What becomes of activations, (S,) or (S, m), as `Rules.level` and `Rules.parts`."""

    level: Ints
    parts: Ints

    @classmethod
    def none(cls, *shape: int) -> StageRelief:
        """All activations stay."""
        return cls(np.full(shape, NONE, dtype=np.int64), np.zeros(shape, dtype=np.int64))

    def of_each(self, microbatches: int) -> StageRelief:
        """(S, m) the same for all micro-batches."""
        return StageRelief(*(np.repeat(each[:, None], microbatches, axis=1) for each in self))


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
    all_stay = StageRelief.none(simulator.stages, problem.microbatches)
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
                    yield Rules(in_flight, wait_ms, *relief, lead * choices.carry_ms, order)


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


def _reliefs(choices: Choices) -> Iterator[StageRelief]:
    """Yields what can become of some activations, (S,): all parts leave, or they are recomputed by a level, of a stage
    with fewer levels its last one; then also while the checkpoints leave."""
    stays = StageRelief.none(len(choices.levels))
    if choices.parts[0].any():
        yield stays._replace(parts=choices.parts[0])
    for level in range(choices.levels.max()):
        of_stage = np.minimum(level, choices.levels - 1)  # `NONE` where there is none
        parts = np.where(of_stage >= 0, choices.parts[1 + of_stage, np.arange(len(of_stage))], 0)
        for leaving in (stays.parts, parts)[: 1 + parts.any()]:
            yield StageRelief(of_stage, leaving)


def whole_reliefs(choices: Choices) -> list[StageRelief]:
    """What can become of activations, as `_reliefs`; what a stage cannot do, the first that it can is in place of."""
    reliefs = list(_reliefs(choices))
    first = StageRelief.none(len(choices.levels))
    for relief in reliefs:
        first = _or_else(first, relief)
    return [_or_else(relief, first) for relief in reliefs]


def _or_else(relief: StageRelief, other: StageRelief) -> StageRelief:
    """The other's on stages where all activations stay."""
    stays = (relief.level == NONE) & (relief.parts == 0)
    return StageRelief(*(np.where(stays, b, a) for a, b in zip(relief, other, strict=True)))


def spread(simulator: Simulator, relief: StageRelief, share: float) -> StageRelief:
    """(S, m) what becomes of activations if of each stage's a share, evenly spread, leaves or is recomputed."""
    level, parts = (each[:, None] for each in relief)
    counts = evenly(share * np.where(level == NONE, parts, 1), 0.0, simulator.problem.microbatches)
    return StageRelief(np.where(counts > 0, level, NONE), np.where(level == NONE, counts, parts * counts))


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
    relief = StageRelief.none(len(stages), schedule.problem.microbatches)
    now_in_flight, in_flight = np.zeros(len(stages), dtype=np.int64), np.ones(len(stages), dtype=np.int64)
    place = {s: k for k, s in enumerate(stages.tolist())}
    first = np.array([schedule.problem.route(j)[0] for j in range(schedule.problem.microbatches)])
    rows, start = schedule.timeline.rows, schedule.timeline.start
    entering = rows.of_kinds(Kind.F) & (rows.stage == first[rows.microbatch])
    order: Ints = rows.microbatch[entering][np.argsort(start[entering], kind="stable")].astype(np.int64)
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
                relief.parts[k, j] = min(relief.parts[k, j] + 1, costs.parts[op.stage])
            elif op.kind == Kind.C:
                relief.level[k, enters[op.microbatch]] = op.part
    return Rules(in_flight, np.zeros((2, len(stages))), *relief, carry_ms(costs, stages), order)


def moved_rules(simulator: Simulator, rules: Rules, problem: Problem) -> Rules | None:
    """Rules of a problem for the simulator's; None if they are not of its stages and micro-batches, or if there are
    several routes and others.

    Times keep their proportion to those of the ops, and micro-batches enter as those with the same place by their work.
    Where there are more or fewer stages, each one follows the stage at the same place of the route.
    """
    choices, route = simulator.choices, stage_order(problem)
    stages, microbatches = simulator.stages, simulator.problem.microbatches
    if rules.level.shape != (len(route), problem.microbatches):
        return None
    routes = problem.all_routes, simulator.problem.all_routes
    if max(map(len, routes)) > 1 and (routes[0] != routes[1] or microbatches != problem.microbatches):
        return None
    source = np.rint(np.linspace(0, len(route) - 1, stages)).astype(int)
    like = _source_microbatches(problem.microbatches, microbatches)
    relief = StageRelief(rules.level[source][:, like], rules.parts[source][:, like])
    old_ms = problem.costs.ms[: Kind.B + 1, route[source]].max(axis=-1)
    old_carry_ms = carry_ms(problem.costs, route[source])
    is_free = choices.order_is_free
    return Rules(
        np.ceil(rules.in_flight[source] * stages / len(route)).clip(1, microbatches).astype(np.int64),
        _scaled(rules.wait_ms[:, source], old_ms, choices.patience_ms, np.zeros_like(old_ms)),
        *_possible(choices, relief),
        _scaled(rules.lead_ms[source], old_carry_ms, choices.carry_ms, choices.carry_ms),
        _moved_order(simulator.problem, rules.order, problem) if is_free else np.arange(microbatches),
    )


def _moved_order(problem: Problem, order: Ints, old: Problem) -> Ints:
    """(m,) the order of entry with which light and heavy micro-batches take turns as in the old problem."""
    places = np.argsort(_by_work(old))[order]
    followed = places[np.rint(np.linspace(0, old.microbatches - 1, problem.microbatches)).astype(int)]
    return _by_work(problem)[np.argsort(np.argsort(followed, kind="stable"))]


def _possible(choices: Choices, relief: StageRelief) -> StageRelief:
    """(S, m) what can become of activations, nearest to this: no more parts than there are, no higher level."""
    level = relief.level.clip(NONE, choices.levels[:, None] - 1)
    parts = np.where((relief.level != NONE) & (level == NONE), 0, relief.parts)
    return StageRelief(level, parts.clip(0, choices.parts[1 + level, np.arange(len(level))[:, None]]))


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
