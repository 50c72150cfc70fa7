"""Best-first search over what a device with several stages can do, where all activations stay on it."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled
from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Flags, Floats, Ints
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.length import measures, shortest_paths, shortest_times
from optpipe_solver.bounds.stage_bytes import stage_bytes
from optpipe_solver.relax.known import add, read, take
from optpipe_solver.relax.layout import DONE, FULL, LENGTH, MOST_VISITS, NOW, ROWS, TAKEN, Known
from optpipe_solver.relax.queues import Trip

# Columns of a state, which is always one in which compute is free: behind the time micro-batches started; how many of
# them are between two of the device's ops; weight gradients that wait, by group; when the last micro-batch in the
# queue behind each step can be back; then of each of these micro-batches when its next op may start, and which that is.
STARTED, FLYING, WAITING = 1, 2, 3


class SeveralStages(NamedTuple):
    """A device that each micro-batch passes on several stages, c; all others only take time, `queues` for one
    micro-batch after the other.

    A micro-batch has 2c ops here, `steps`: its forwards on the way there, its input gradients on the way back. Weight
    gradients that are alike are one group.

    Attributes
    ----------
    ms
        (2c,) of each step.
    way
        (2c,) from the end of each step to the start of the next one at least; after the last one to the end.
    queues
        (2c, 2) behind each step the device with most work until the next one: ms of the way by this device's own work,
        and the ms of that work, which it does for one micro-batch after the other.
    rest
        (2c,) from the start of each step to the end at least.
    weight
        (groups,) ms of a weight gradient.
    group
        (2c,) of the weight gradient that follows a step, or -1.
    rules
        Micro-batches, and bytes of the memory.
    held
        (2c + 1,) bytes that a micro-batch holds before each step, and after the last.
    during
        (2c,) bytes that a step takes beside what its micro-batch holds after it.
    waits
        (groups,) bytes of an activation that waits for its weight gradient.
    work
        (2c,) ms of a micro-batch's steps from this one on.
    worth
        (measures, 2c + 1) what a micro-batch's bytes between steps are worth of the memory, a ms.
    area
        (measures, 2c + 1) what a micro-batch is worth from the start of a step on, over time; without weight gradients
        that wait, but while they run.
    gradients
        (measures, groups) what a ms of a weight gradient is worth while it runs.
    alone
        (measures,) what one activation is worth at most, but while it waits for its weight gradient.
    shortest
        ms of the shortest input gradient.
    """

    ms: Floats
    way: Floats
    queues: Floats
    rest: Floats
    weight: Floats
    group: Ints
    rules: Ints
    held: Ints
    during: Ints
    waits: Ints
    work: Floats
    worth: Floats
    area: Floats
    gradients: Floats
    alone: Floats
    shortest: float


def of(problem: Problem, passes: list[tuple[int, int]], m: int, objective: Objective) -> SeveralStages:
    """The device that micro-batches pass on these stages of one route, in this order."""
    paths, times, held = shortest_paths(problem), shortest_times(problem), stage_bytes(problem)
    stages, c = [s for _, s in passes], len(passes)
    trip, reaches = (np.array([each[at] for at in passes]) for each in (paths.round_trip, paths.reaches))
    ms = np.array([*times[Kind.F, stages], *times[Kind.B, stages[::-1]]])
    on = np.diff(reaches) - ms[: c - 1]
    turn = trip[-1] - ms[c - 1] - ms[c]
    back = (-np.diff(trip) - np.diff(reaches))[::-1] - ms[c + 1 :]
    tail = paths.after[passes[0]] if objective == "makespan" else float(times[Kind.W, stages[0]])
    way = np.maximum(0.0, [*on, turn, *back, tail])
    one, route = Trip(problem, passes[0][0]), problem.all_routes[passes[0][0]]
    places = [*map(route.index, stages), *(2 * len(route) - 1 - route.index(s) for s in reversed(stages))]
    queues = [max(one.queues(a, b), key=lambda queue: queue[::-1], default=(0.0, 0.0)) for a, b in pairwise(places)]
    kinds = [(float(times[Kind.W, s]), held[s].waiting, held[s].weight) for s in stages]
    groups = sorted({kind for kind in kinds if kind[0] > 0.0})
    group = [-1] * c + [groups.index(kind) if kind in groups else -1 for kind in kinds[::-1]]

    # Of each activation: from the end of its forward, step k, to the start of its backward, step 2c - 1 - k.
    stays = np.array([[k < step <= 2 * c - 1 - k for k in range(c)] for step in range(2 * c + 1)])
    sizes = np.array([held[s].stays for s in stages])
    beside = [held[s].forward - held[s].stays for s in stages] + [held[s].backward for s in stages[::-1]]
    memory = problem.devices[problem.stages[stages[0]].device].activation_budget_bytes
    worth, area, gradients, alone = [], [], [], []
    for number, measure in enumerate(measures(memory, [held[s] for s in stages])):
        for weighs in (False, True) if number == 0 else (True,):
            value = stays @ [measure(int(size)) for size in sizes]
            forward = [measure(held[s].forward) - measure(held[s].stays) for s in stages]
            run = np.array([*forward, *(measure(held[s].backward) for s in stages[::-1])])
            weight = np.array([measure(size) if weighs else 0.0 for *_, size in groups])
            each = ms * (run + value[1:]) + way * value[1:]
            each += [weight[g] * groups[g][0] if g >= 0 else 0.0 for g in group]
            worth.append(value)
            area.append([*np.cumsum(each[::-1])[::-1], 0.0])
            gradients.append(weight)
            alone.append(max(measure(max(held[s].forward, held[s].stays, held[s].backward)) for s in stages))
    return SeveralStages(
        ms,
        way,
        np.array([*queues, (0.0, 0.0)]),
        np.cumsum((ms + way)[::-1])[::-1],
        np.array([kind[0] for kind in groups]),
        np.array(group, dtype=np.int64),
        np.array([m, memory], dtype=np.int64),
        stays @ sizes,
        np.array(beside, dtype=np.int64),
        np.array([kind[1] for kind in groups], dtype=np.int64),
        np.cumsum(ms[::-1])[::-1],
        np.array(worth),
        np.array(area),
        np.array(gradients),
        np.array(alone),
        float(ms[c:].min()),
    )


def same(device: SeveralStages) -> Flags:
    """(columns,) whether one is alike in two states of which one stands for the other; in the others it is no later."""
    first = WAITING + len(device.weight) + len(device.ms)
    found = np.zeros(first + 2 * min(int(device.rules[0]), MOST_VISITS), dtype=bool)
    found[[STARTED, FLYING]] = True
    found[first + 1 :: 2] = True
    return found


@compiled
def _places(device: SeveralStages) -> tuple[int, int]:
    """The columns of the first queue and of the first micro-batch."""
    queue = WAITING + len(device.weight)
    return queue, queue + len(device.ms)


@compiled
def _used(row: Floats, device: SeveralStages) -> int:
    """The bytes that are held between ops."""
    (_, first), used = _places(device), 0
    for i in range(int(row[FLYING])):
        used += device.held[int(row[first + 2 * i + 1])]
    for g in range(len(device.weight)):
        used += device.waits[g] * int(row[WAITING + g])
    return used


@compiled
def _start(row: Floats, step: int, device: SeveralStages, used: int) -> bool:
    """Start a step of the micro-batch that can have it first. False if none can now, or it does not fit."""
    (queue, first), flying, steps = _places(device), int(row[FLYING]), len(device.ms)
    place = flying  # of the micro-batch among those that are under way, which are in the order of their next steps
    if step == 0:
        if row[STARTED] == device.rules[0]:
            return False
        row[STARTED] += 1.0
    else:
        place = 0
        while place < flying and row[first + 2 * place + 1] < step:
            place += 1
        if place == flying or row[first + 2 * place + 1] > step or row[first + 2 * place] > row[NOW]:
            return False
        used -= device.held[step]
        flying -= 1
        for at in range(first + 2 * place, first + 2 * flying):
            row[at] = row[at + 2]
        row[first + 2 * flying] = row[first + 2 * flying + 1] = 0.0
    if used + device.held[step + 1] + device.during[step] > device.rules[1]:
        return False
    row[NOW] += device.ms[step]
    if device.group[step] >= 0:
        row[WAITING + device.group[step]] += 1.0
    if step + 1 < steps:
        passes, lasts = device.queues[step]
        row[queue + step] = max(row[queue + step] + lasts, row[NOW] + passes)
        ready, place = max(row[NOW] + device.way[step], row[queue + step]), flying
        while place and (
            row[first + 2 * place - 1] > step + 1
            or (row[first + 2 * place - 1] == step + 1 and row[first + 2 * place - 2] > ready)
        ):
            row[first + 2 * place], row[first + 2 * place + 1] = row[first + 2 * place - 2], row[first + 2 * place - 1]
            place -= 1
        row[first + 2 * place], row[first + 2 * place + 1] = ready, step + 1.0
        flying += 1
    row[FLYING] = flying
    return True


@compiled
def _finish(row: Floats, group: int, device: SeveralStages) -> bool:
    """Run a weight gradient of a group. False if none waits."""
    if row[WAITING + group] == 0.0:
        return False
    row[WAITING + group] -= 1.0
    row[NOW] += device.weight[group]
    return True


@compiled
def _wait(row: Floats, device: SeveralStages) -> bool:
    """Go to the next event. False if there is none."""
    (_, first), now, event = _places(device), row[NOW], np.inf
    for i in range(int(row[FLYING])):
        if row[first + 2 * i] > now:
            event = min(event, row[first + 2 * i])
    row[NOW] = event
    return bool(event < np.inf)


@compiled
def _settle(row: Floats, device: SeveralStages) -> None:
    """Forget when a queue has passed its last micro-batch where the next one cannot be there sooner."""
    (queue, first), behind = _places(device), device.rules[0] - row[STARTED]
    for step in range(len(device.ms) - 1):
        for i in range(int(row[FLYING])):
            behind += row[first + 2 * i + 1] == step
        passes, lasts = device.queues[step]
        soonest = row[NOW] + device.ms[step] + passes - lasts
        row[queue + step] = max(row[queue + step], soonest) if behind and lasts else 0.0


@compiled
def _least_end(row: Floats, device: SeveralStages) -> float:
    """No schedule that begins like this ends sooner: by compute, by the way back, by memory."""
    (queue, first), flying, now = _places(device), int(row[FLYING]), row[NOW]
    steps, coming = len(device.ms), device.rules[0] - row[STARTED]
    half, tail = steps // 2, device.way[steps - 1]
    inputs, gradients, left = coming * device.work[0], 0.0, coming * half
    end = now + (coming - 1.0) * device.ms[0] + device.rest[0] if coming else now
    for i in range(flying):
        step = int(row[first + 2 * i + 1])
        end = max(end, row[first + 2 * i] + device.rest[step])
        inputs += device.work[step]
        left += steps - max(step, half)
        for later in range(max(step, half), steps):
            gradients += device.weight[device.group[later]] if device.group[later] >= 0 else 0.0
    for step in range(half, steps):
        gradients += coming * device.weight[device.group[step]] if device.group[step] >= 0 else 0.0
    for g in range(len(device.weight)):
        gradients += row[WAITING + g] * device.weight[g]
    end = max(end, now + inputs + gradients)
    behind = coming  # micro-batches that are still to pass the queue
    for step in range(steps - 1):
        for i in range(flying):
            behind += row[first + 2 * i + 1] == step
        if behind:
            passes, lasts = device.queues[step]
            last = max(row[queue + step] + lasts, now + device.ms[step] + passes) + (behind - 1.0) * lasts
            end = max(end, last + device.rest[step + 1])
    if left == 0.0:
        return float(end)
    end = max(end, now + inputs + tail)
    for f in range(len(device.worth)):
        area, by_weight = coming * device.area[f, 0], False
        for i in range(flying):
            step = int(row[first + 2 * i + 1])
            area += (row[first + 2 * i] - now) * device.worth[f, step] + device.area[f, step]
        for g in range(len(device.weight)):
            area += row[WAITING + g] * device.weight[g] * device.gradients[f, g]
            by_weight = by_weight or device.gradients[f, g] > 0.0
        if not by_weight:
            # While the last but n input gradient runs, n + 1 activations are there at most.
            n = 1.0
            while n < left and n * device.alone[f] < 1.0:
                area += device.shortest * (1.0 - n * device.alone[f])
                n += 1.0
            area += tail
        end = max(end, now + area)
    return float(end)


@compiled
def expand(device: SeveralStages, known: Known, pops: int) -> float:
    """Take the best state and put in its place those that follow from it, `pops` times or until one is complete.

    Compute runs an op, or waits until one may start. Of micro-batches before the same step the one that can have it
    first has it first: their further ways can be exchanged. A state is left out for one that is as far and later in
    nothing.

    Returns
    -------
    The least end in ms: no schedule's is below; that of the complete state if there is one, as `tally[DONE]` then says.
    """
    bound, heap, count = known.bound, known.heap, known.tally
    groups, (queue, first) = len(device.weight), _places(device)
    row, child = np.zeros(len(known.same)), np.zeros(len(known.same))
    if count[ROWS] == 0:
        add(row, first, False, _least_end(row, device), known)
    for _ in range(pops):
        if count[LENGTH] == 0 or count[FULL]:
            break
        top = heap[0]
        least = bound[top]
        read(top, row, known)
        if row[STARTED] == device.rules[0] and row[FLYING] == 0.0 and not row[WAITING:queue].any():
            count[DONE] = 1
            break
        take(known)
        count[TAKEN] += 1
        if row[STARTED] < device.rules[0] and first + 2 * int(row[FLYING]) == len(row):  # no column is left
            count[FULL] = 1
            break
        used = _used(row, device)
        # Compute runs nothing, a weight gradient of a group, or a step.
        for choice in range(-1 - groups, len(device.ms)):
            child[:] = row
            waits = choice < -groups
            if choice >= 0:
                possible = _start(child, choice, device, used)
            else:
                possible = _wait(child, device) if waits else _finish(child, choice + groups, device)
            if not possible:
                continue
            for i in range(int(child[FLYING])):
                child[first + 2 * i] = max(child[first + 2 * i], child[NOW])
            _settle(child, device)
            end = max(least, _least_end(child, device))
            add(child, first + 2 * int(child[FLYING]), waits, end, known)
            if count[FULL]:
                return float(least)
    if count[FULL]:
        return float(least)
    return float(bound[heap[0]]) if count[LENGTH] else np.inf
