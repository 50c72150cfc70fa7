"""Search in rules: from the rules of some schedules, one change after the other (Storer, Wu and Vaccari 1992).

They call it search in heuristic space: not the order of ops is changed but the rules of a list scheduler that makes it.
So the space is as large as the pipeline is deep, however many micro-batches there are, and one change acts on all of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from optpipe.dispatch.figures import (
    Choices,
    State,
    carry_ms,
    evenly,
    in_rows,
    memory_shares,
    stage_order,
    stages_to_end,
)
from optpipe.dispatch.simulate import Simulator
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective
from optpipe.model.arrays import NONE, Floats, Ints
from optpipe.model.ops import BACKWARD, Kind
from optpipe.model.problem import Problem
from optpipe.model.rules import EVICTED, Rules
from optpipe.schedule import Schedule

MOST_FAILURES = 1500  # changes in a row without a shorter schedule, after which the search starts anew
AT_A_TIME = 100  # most changes before the caller is asked whether to go on
OPS_AT_A_TIME = 20_000  # about the most simulated ops before that
HEATS = (8, 4, 2, 1)  # how many starts race in each
LOOPS = ("optpipe.dispatch.descend:descend",)

INSTANT_MS = 1e-9  # what takes no longer takes no time
SHARES = (1.0, 3 / 4, 1 / 2, 1 / 4)  # of the activations of each stage, at first
LEADS = (1.0, 2.0)  # how early all activations that leave are to be back, in times of their transfer
# Where micro-batches differ devices wait for F and B, as shares of the longest: small ones do not slip in before.
WAITS = ((0.0, 0.0), (0.5, 0.1), (0.5, 0.2), (0.2, 0.0))


class SearchProgress(NamedTuple):
    """How far a search in rules has come."""

    rules: Rules  # the best ones of this descent
    ms: float  # the length that they lead to; `NO_SCHEDULE_MS` where they lead to no schedule
    tried: int  # how many rules were simulated since the last one
    listed: State | None = None  # the list of a schedule by the rules; None where others were simulated after them


def descents(
    simulator: Simulator, objective: Objective, seed: int, given_rules: Iterable[Rules] = (), race: int = 0
) -> Iterator[SearchProgress]:
    """Yields the progress of descents from one start after the other, the best first: `given_rules` and `first_rules`.
    Ends if no start leads to a schedule.

    Before that the best starts share `race` tries: after each quarter of them the better half goes on (successive
    halving, Karnin, Koren and Somekh 2013).
    """
    state = simulator.new_state()
    starts: list[tuple[float, int, Rules]] = []
    for n, rules in enumerate(chain(given_rules, first_rules(simulator))):
        ms = simulator.length_ms(rules, objective, state)
        yield SearchProgress(rules, ms, 1, state if ms < NO_SCHEDULE_MS else None)
        if ms < NO_SCHEDULE_MS:
            starts.append((ms, n, rules))
    starts.sort()
    different = list({ms: rules for ms, _, rules in starts}.items())[: HEATS[0]] if race else []
    descent = partial(_Descent, simulator, state, objective == "span", np.random.default_rng(seed))
    racing = [descent(ms, rules) for ms, rules in different]
    for left in HEATS:
        racing = sorted(racing, key=lambda each: each.ms)[:left]
        for each in racing:
            yield each.go_on(race // len(HEATS) // len(racing))
    for each in racing:
        yield from each
    while starts:
        for ms, _, rules in starts:
            yield from descent(ms, rules)


class _Descent:
    """Changes of rules, one after the other, that begin with some rules. `state` is room, shared with others."""

    def __init__(
        self, simulator: Simulator, state: State, span: bool, random: np.random.Generator, ms: float, rules: Rules
    ) -> None:
        from optpipe.dispatch import descend  # imports numba

        self._simulator, self._state, self._span, self._loops = simulator, state, span, descend
        self._at_hand, self._best, self._trial = (in_rows(rules).copy() for _ in range(3))
        self._progress = np.array([ms, ms, 0.0, random.integers(1, int(descend.MODULUS))])

    @property
    def ms(self) -> float:
        """Of the best rules."""
        return float(self._progress[self._loops.SHORTEST])

    def go_on(self, tries: int) -> SearchProgress:
        rules = self._at_hand, self._best, self._trial
        self._simulator.descend(*rules, self._state, self._progress, tries, self._span)
        return SearchProgress(self._best.copy(), self.ms, tries)

    def __iter__(self) -> Iterator[SearchProgress]:
        """Yields the best rules after each few changes, until many in a row have led to nothing shorter."""
        simulator = self._simulator
        tries = min(AT_A_TIME, max(1, OPS_AT_A_TIME // simulator.ops)) if simulator.is_compiled else 1
        while self._progress[self._loops.FAILURES] < MOST_FAILURES:
            yield self.go_on(tries)


def compile_descents(simulator: Simulator) -> None:
    """Compile what descents take: some seconds the first time on a machine, later a moment."""
    simulator.length_ms(next(first_rules(simulator)), "makespan")


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
    with fewer levels its last one; then also while the checkpoints leave; last, they are evicted."""
    stays = StageRelief.none(len(choices.levels))
    if choices.parts[0].any():
        yield stays._replace(parts=choices.parts[0])
    for level in range(choices.levels.max()):
        of_stage = np.minimum(level, choices.levels - 1)  # `NONE` where there is none
        parts = np.where(of_stage >= 0, choices.parts[1 + of_stage, np.arange(len(of_stage))], 0)
        for leaving in (stays.parts, parts)[: 1 + parts.any()]:
            yield StageRelief(of_stage, leaving)
    if (evicted := choices.parts[-1]).any():
        yield StageRelief(np.where(evicted > 0, EVICTED, NONE), evicted)


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
    mean, microbatches = share * np.where(level == NONE, parts, 1), simulator.problem.microbatches
    counts = evenly(mean, 0.0, np.arange(microbatches)).astype(np.int64)
    return StageRelief(np.where(counts > 0, level, NONE), np.where(level == NONE, counts, parts * counts))


def followed_rules(schedule: Schedule) -> Rules:
    """The rules that a schedule seems to follow: most micro-batches in flight, and what leaves."""
    problem, rows, start = schedule.problem, schedule.timeline.rows, schedule.timeline.start
    stages, first = stage_order(problem), np.array([problem.route(j)[0] for j in range(problem.microbatches)])
    entering = rows.of_kinds(Kind.F) & (rows.stage == first[rows.microbatch])
    order = rows.microbatch[entering][np.argsort(start[entering], kind="stable")]
    place, enters = np.argsort(stages)[rows.stage], np.argsort(order)[rows.microbatch]
    level, parts = StageRelief.none(len(stages), problem.microbatches)
    again, leaving = np.flatnonzero(rows.of_kinds(Kind.C)), np.flatnonzero(rows.of_kinds(Kind.O, Kind.E))
    evicted = np.flatnonzero(rows.of_kinds(Kind.E))
    level[place[again], enters[again]] = rows.part[again]
    level[place[evicted], enters[evicted]] = EVICTED
    np.add.at(parts, (place[leaving], enters[leaving]), 1)
    step = rows.of_kinds(Kind.F).astype(np.int64) - rows.of_kinds(*BACKWARD)
    in_flight = np.array([np.cumsum(step[rows.stage == s]).max(initial=1) for s in stages])
    parts = np.minimum(parts, problem.costs.parts[stages][:, None])
    return Rules(in_flight, np.zeros((2, len(stages))), level, parts, carry_ms(problem.costs, stages), order)


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
    old_level, parts = rules.level[source][:, like], rules.parts[source][:, like]
    # What can become of activations, nearest to that: no higher level, no more parts than there are.
    evicted = (old_level == EVICTED) & (choices.parts[-1] > 0)[:, None]
    level = np.where(evicted, EVICTED, old_level.clip(NONE, choices.levels[:, None] - 1))
    parts = np.where((old_level != NONE) & (level == NONE), 0, parts)
    parts = parts.clip(0, choices.parts[1 + level, np.arange(stages)[:, None]])
    old_ms = problem.costs.ms[: Kind.B + 1, route[source]].max(axis=-1)
    old_carry_ms = carry_ms(problem.costs, route[source])
    return Rules(
        np.ceil(rules.in_flight[source] * stages / len(route)).clip(1, microbatches).astype(np.int64),
        _scaled(rules.wait_ms[:, source], old_ms, choices.patience_ms, np.zeros_like(old_ms)),
        level,
        parts,
        _scaled(rules.lead_ms[source], old_carry_ms, choices.carry_ms, choices.carry_ms),
        _moved_order(simulator.problem, rules.order, problem) if choices.order_is_free else np.arange(microbatches),
    )


def _moved_order(problem: Problem, order: Ints, old: Problem) -> Ints:
    """(m,) the order of entry with which light and heavy micro-batches take turns as in the old problem."""
    places = np.argsort(_by_work(old))[order]
    followed = places[np.rint(np.linspace(0, old.microbatches - 1, problem.microbatches)).astype(int)]
    return _by_work(problem)[np.argsort(np.argsort(followed, kind="stable"))]


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
