"""Local search, compiled: in rules (`descend`: change some, list the ops by them, keep what is not much longer), and in
what each replica runs (`exchange`)."""

from __future__ import annotations

import numpy as np

from optpipe.dispatch.clock import list_all, listed_ms
from optpipe.dispatch.figures import Choices, Figures, State, evenly
from optpipe.evaluate.jit import compiled, compiled_part
from optpipe.evaluate.objective import shorter
from optpipe.model.arrays import NONE, Flags, Floats, Ints
from optpipe.model.rules import EVICTED, Rules

TOLERANCE = 1e-9  # a replica is shorter only by more than rounding
SLACK = 0.001  # new rules may be about this much longer than those at hand (threshold accepting, Dueck 1990)
MODULUS = 2.0**31 - 1  # of the random numbers, whose state is at least 1 and below this
MS, SHORTEST, FAILURES, RANDOM = range(4)  # columns of a descent's progress
ALL_CHUNKS, NO_CHUNK = -1, -2  # instead of the number of a chunk

_evenly, _shorter = compiled_part(evenly), compiled_part(shorter)


@compiled
def descend(
    figures: Figures,
    choices: Choices,
    rules: Rules,
    best: Rules,
    trial: Rules,
    state: State,
    progress: Floats,
    tries: int,
    span: bool,
) -> None:
    """Try a number of changes; with 0 `tries`, list the ops by `trial` as it is.

    Single lists come from here, too: in a function of their own the clock is compiled once more, which takes seconds.

    Parameters
    ----------
    rules, best, trial
        The rules at hand, the best of this descent, and room for others; all are changed.
    state
        Room for `list_all`.
    progress
        (4,) MS and SHORTEST: the length by the rules at hand and by the best; FAILURES: changes in a row that have led
        to nothing shorter; RANDOM: the state of the random numbers. All are changed.
    span
        Whether the length is the longest span of a device, not the makespan.
    """
    for _ in range(max(tries, 1)):
        if tries > 0:
            _copy(rules, trial)
            change(figures, choices, trial, progress)
        limit_ms = progress[MS] * (1.0 + _exponential(progress) * SLACK)
        complete = list_all(figures, trial, state, np.inf if span else limit_ms)
        ms = listed_ms(figures, state, span) if complete else np.inf
        progress[FAILURES] += 1.0
        if _shorter(ms, progress[SHORTEST]):
            progress[SHORTEST] = ms
            progress[FAILURES] = 0.0
            _copy(trial, best)
        if ms <= limit_ms:
            progress[MS] = ms
            _copy(trial, rules)


@compiled_part
def change(figures: Figures, choices: Choices, rules: Rules, progress: Floats) -> None:
    """Change rules of some devices in a row, at one stage of each or at all: how many micro-batches are in flight, how
    long a device waits, or which activations leave and when they come back."""
    devices, chunks, chosen, others = len(figures.memory), choices.chunks, choices.marks[0], choices.marks[1]
    relief_possible = choices.can_leave[0] or choices.can_leave[-1] or choices.most_levels > 0
    while True:
        if choices.order_is_free and draw(progress) < 0.5:
            _move_microbatch(rules, progress)
            if draw(progress) < 0.7:
                return
        first = below(devices, progress)
        end = first + 1 + int(_exponential(progress) * devices / 4.0)
        if draw(progress) < 0.15:
            first, end = 0, devices
        chunk = below(chunks + 1, progress) + ALL_CHUNKS
        other = below(chunks + 1, progress) + ALL_CHUNKS
        _mark_stages(chosen, figures, choices, first, end, chunk)
        if relief_possible and draw(progress) < 0.6:
            _change_relief(choices, rules, chosen, progress)
        elif draw(progress) < 0.5:
            if ALL_CHUNKS in (chunk, other) or chunk == other:
                other = NO_CHUNK
            _mark_stages(others, figures, choices, first, end, other)
            _change_in_flight(rules, chosen, others, progress)
        else:
            _change_waiting(choices, rules, chosen, progress)
        if draw(progress) < 0.7:
            return


@compiled_part
def _mark_stages(mask: Flags, figures: Figures, choices: Choices, first: int, end: int, chunk: int) -> None:
    """Mark the stages that are of a chunk and lie on the devices from the first one on, before `end`."""
    for s in range(len(mask)):
        mask[s] = first <= figures.device[s] < end and chunk in (ALL_CHUNKS, choices.chunk[s])


@compiled_part
def _change_in_flight(rules: Rules, chosen: Flags, others: Flags, progress: Floats) -> None:
    """One micro-batch more in flight at the chosen stages and one less at the others, or the other way round."""
    step = 2 * below(2, progress) - 1
    for s in range(len(chosen)):
        in_flight = rules.in_flight[s] + step * (int(chosen[s]) - int(others[s]))
        rules.in_flight[s] = min(max(in_flight, 1), len(rules.order))


@compiled_part
def _change_waiting(choices: Choices, rules: Rules, chosen: Flags, progress: Floats) -> None:
    """Wait for forwards or backwards for a share of what they last, or not at all."""
    kind, share = below(2, progress), draw(progress)
    share = (0.0, 0.3 * share, share)[below(3, progress)]
    for s in range(len(chosen)):
        if chosen[s]:
            rules.wait_ms[kind, s] = share * choices.patience_ms[kind, s]


@compiled_part
def _change_relief(choices: Choices, rules: Rules, chosen: Flags, progress: Floats) -> None:
    """Change when activations come back, what share of them leaves or is computed again, or what some of them do."""
    levels, offloads, evicts = choices.most_levels, choices.can_leave[0], choices.can_leave[-1]
    if evicts and (offloads or levels > 0):
        evicts = draw(progress) < 0.5
    if offloads and levels > 0 and not evicts:
        offloads = draw(progress) < 0.5
    level, with_checkpoint = NONE, False
    if evicts:
        level = EVICTED
    elif not offloads:
        level = below(levels, progress) if levels > 1 else 0
        with_checkpoint = choices.can_leave[1 + level] and draw(progress) < 0.5
    what = draw(progress)
    if what < 0.2:
        factor = (0.0, 1.0, 1.5, 4.0 * draw(progress))[below(4, progress)]
        for s in range(len(chosen)):
            if chosen[s]:
                rules.lead_ms[s] = factor * choices.carry_ms[s]  # as many times what bringing it back takes
    elif what < 0.4:
        _spread_evenly(choices, rules, chosen, level, with_checkpoint, progress)
    elif what < 0.6:
        _swap_neighbours(rules, chosen, progress)
    else:
        _change_some(choices, rules, chosen, level, with_checkpoint, progress)


@compiled_part
def _most_parts(choices: Choices, s: int, level: int) -> int:
    """In how many parts an activation can leave, or whether it can be computed again or evicted."""
    if level < 0:
        return int(choices.parts[0 if level == NONE else -1, s])
    return int(min(choices.levels[s], 1))


@compiled_part
def _relieve(choices: Choices, rules: Rules, s: int, j: int, level: int, with_checkpoint: bool, count: int) -> None:
    """So many parts of an activation leave or, if that is not 0, it is evicted or recomputed: by this level or the
    stage's last one, while all of the checkpoint leaves if `with_checkpoint`."""
    rules.level[s, j], rules.parts[s, j] = EVICTED if level == EVICTED and count > 0 else NONE, count
    if level >= 0 and count > 0:
        rules.level[s, j] = min(level, choices.levels[s] - 1)
        rules.parts[s, j] = choices.parts[1 + rules.level[s, j], s] if with_checkpoint else 0


@compiled_part
def _spread_evenly(
    choices: Choices, rules: Rules, chosen: Flags, level: int, with_checkpoint: bool, progress: Floats
) -> None:
    """A share of the chosen stages' activations leaves or is computed again, evenly spread over micro-batches."""
    share, eighths = draw(progress), (1.0 + below(7, progress)) / 8.0
    share = (0.0, 1.0, share, eighths)[below(4, progress)]
    phase = draw(progress)
    for s in range(len(chosen)):
        if chosen[s]:
            for j in range(len(rules.order)):
                count = int(_evenly(share * _most_parts(choices, s, level), phase, j))
                _relieve(choices, rules, s, j, level, with_checkpoint, count)


@compiled_part
def _move_microbatch(rules: Rules, progress: Floats) -> None:
    """A micro-batch enters at another place, or two change places; what becomes of its activations goes with it."""
    microbatches, swaps = len(rules.order), draw(progress) < 0.5
    a, b = below(microbatches, progress), below(microbatches, progress)
    move(rules.order, a, b, swaps)
    for s in range(len(rules.level)):
        move(rules.level[s], a, b, swaps)
        move(rules.parts[s], a, b, swaps)


@compiled_part
def move(row: Ints, a: int, b: int, swaps: bool) -> None:
    """What stands at place a goes to place b; what stands there goes to a, or all in between move up."""
    step = 1 if a < b else -1
    if swaps:
        row[a], row[b] = row[b], row[a]
        return
    while a != b:
        row[a], row[a + step] = row[a + step], row[a]
        a += step


@compiled_part
def _swap_neighbours(rules: Rules, chosen: Flags, progress: Floats) -> None:
    """A micro-batch does what the one before or after it does, and the other way round."""
    j = below(len(rules.order), progress)
    other = j + 2 * below(2, progress) - 1
    if 0 <= other < len(rules.order):
        for s in range(len(chosen)):
            if chosen[s]:
                rules.level[s, j], rules.level[s, other] = rules.level[s, other], rules.level[s, j]
                rules.parts[s, j], rules.parts[s, other] = rules.parts[s, other], rules.parts[s, j]


@compiled_part
def _change_some(
    choices: Choices, rules: Rules, chosen: Flags, level: int, with_checkpoint: bool, progress: Floats
) -> None:
    """Some micro-batches in a row leave or are computed again, or no longer do."""
    first = below(len(rules.order), progress)
    end = min(len(rules.order), first + 1 + int(_exponential(progress)))
    for s in range(len(chosen)):
        count = below(_most_parts(choices, s, level) + 1, progress)
        if chosen[s]:
            for j in range(first, end):
                _relieve(choices, rules, s, j, level, with_checkpoint, count)


@compiled_part
def _copy(source: Rules, target: Rules) -> None:
    stages, microbatches = source.level.shape  # loops: numba compiles them in a tenth of the time of slices
    for s in range(stages):
        target.in_flight[s], target.lead_ms[s] = source.in_flight[s], source.lead_ms[s]
        for kind in range(len(source.wait_ms)):
            target.wait_ms[kind, s] = source.wait_ms[kind, s]
        for j in range(microbatches):
            target.level[s, j], target.parts[s, j] = source.level[s, j], source.parts[s, j]
    for j in range(microbatches):
        target.order[j] = source.order[j]


@compiled_part
def draw(progress: Floats) -> float:
    """The next random number between 0 and 1 (Park and Miller 1988, with the factor of 1993): the same whether compiled
    or not."""
    progress[RANDOM] = (48_271.0 * progress[RANDOM]) % MODULUS
    return float(progress[RANDOM] / MODULUS)


@compiled_part
def below(n: int, progress: Floats) -> int:
    """A random number of 0, 1, ..., n - 1."""
    return int(n * draw(progress))


@compiled_part
def _exponential(progress: Floats) -> float:
    """A random number with the mean 1."""
    return float(-np.log(1.0 - draw(progress)))


@compiled
def exchange(
    figures: Figures, like: Rules, state: State, order: Ints, counts: Ints, ms: Floats, tries: int, free: bool
) -> None:
    """Try a number of changes of the slowest replica: one of its micro-batches changes places within it, with one of
    another replica, or moves there.

    Parameters
    ----------
    like
        Rules of a replica, by which the same becomes of all activations of a stage; their order is not read.
    state
        Room for `list_all`.
    order
        (R, most) the micro-batches of each replica in the order in which they enter, then anything; changed.
    counts
        (R,) how many each replica has; changed where `free`.
    ms
        (R,) becomes how long each replica takes.
    free
        Whether replicas may have other numbers of micro-batches.
    """
    replicas, most = order.shape
    for r in range(replicas):
        ms[r] = _replica_ms(figures, like, state, order[r], counts[r], np.inf)
    random = np.ones(RANDOM + 1)  # as a descent's progress
    mine, others = np.zeros(most, np.int64), np.zeros(most, np.int64)
    for _ in range(tries):
        slowest = int(ms.argmax())
        n = counts[slowest]
        mine[:n] = order[slowest, :n]
        other = below(replicas, random)
        rival = below(replicas, random)  # of two replicas the faster one
        if ms[rival] < ms[other]:
            other = rival
        if other == slowest or draw(random) < 0.3:
            move(mine, below(n, random), below(n, random), draw(random) < 0.5)
            changed = _replica_ms(figures, like, state, mine, n, ms[slowest])
            if changed < ms[slowest] * (1 - TOLERANCE):
                order[slowest, :n], ms[slowest] = mine[:n], changed
            continue
        k = counts[other]
        others[:k] = order[other, :k]
        a = below(n, random)
        new_n, new_k = n, k
        if free and n > 1 and k < most and draw(random) < 0.4:
            others[k] = mine[a]
            new_n, new_k = n - 1, k + 1
            mine[a:new_n] = order[slowest, a + 1 : n]
            move(others, k, below(new_k, random), False)
        else:
            b = below(k, random)
            mine[a], others[b] = others[b], mine[a]
            if draw(random) < 0.3:
                move(mine, a, below(n, random), False)
            if draw(random) < 0.3:
                move(others, b, below(k, random), False)
        mine_ms = _replica_ms(figures, like, state, mine, new_n, ms[slowest])
        if mine_ms >= ms[slowest] * (1 - TOLERANCE):
            continue
        others_ms = _replica_ms(figures, like, state, others, new_k, ms[slowest])
        if others_ms < ms[slowest] * (1 - TOLERANCE):
            order[slowest, :new_n], order[other, :new_k] = mine[:new_n], others[:new_k]
            counts[slowest], counts[other] = new_n, new_k
            ms[slowest], ms[other] = mine_ms, others_ms


@compiled
def _replica_ms(figures: Figures, like: Rules, state: State, order: Ints, n: int, stop_ms: float) -> float:
    """How long the first n micro-batches of an order take by the rules; infinite where that is more than `stop_ms`, or
    they do not fit."""
    rules = Rules(like.in_flight, like.wait_ms, like.level, like.parts, like.lead_ms, order[:n])
    if list_all(figures, rules, state, stop_ms):
        return float(listed_ms(figures, state, False))
    return float(np.inf)
