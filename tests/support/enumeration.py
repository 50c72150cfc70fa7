"""The optimum by trying every schedule there is, for tiny problems: no solver's optimum may differ from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from optpipe import Kind, Op, Problem, Program, Schedule, Stage, certify
from optpipe.evaluate.effects import TABLE, Effect
from optpipe.evaluate.objective import Objective
from support import problems
from support.problems import pipeline
from support.timed_programs import TimedPrograms


def length(schedule: Schedule, objective: Objective) -> float:
    return schedule.makespan_ms if objective == "makespan" else schedule.span_ms


def problem_of(
    stages: list[dict[str, Any]], memory: list[int], microbatches: int, p2p_ms: float = 1.0, **fields: Any
) -> Problem:
    """A problem with a device for each budget in `memory`; `devices` may give further fields of each."""
    further = fields.pop("devices", [{}] * len(memory))
    problem = pipeline(len(memory), microbatches, memory, stages, p2p_ms=p2p_ms, **fields)
    return problem.replace(
        devices=[device.model_copy(update=more) for device, more in zip(problem.devices, further, strict=True)]
    )


def stage(
    device: int,
    ms: tuple[float, float, float],
    size: int,
    kept: int = 0,
    away: tuple[float, float, int] | None = None,
    again: tuple[float, int] | None = None,
    parts: int = 1,
) -> dict[str, Any]:
    """The fields of a stage, given by position.

    Parameters
    ----------
    ms
        Of F, B and W.
    size, kept
        Bytes of the activation, and of what stays saved for W.
    away
        (ms out, ms back, bytes) if the activation can be offloaded, in `parts` parts.
    again
        (ms, checkpoint bytes) if it can be recomputed.
    """
    more: dict[str, Any] = {"recompute": again} if again else {}
    if away:
        more |= {"offload": away, "offload_parts": parts}
    return problems.stage(ms, (size, kept), device=device, **more)


MOST_PROGRAMS, MOST_SCHEDULES = 4_000, 1_000_000  # of a device; of a problem whose links are not shared

SPLIT, FUSED = (Kind.B, Kind.W), (Kind.BW,)
AWAY = (Kind.O, Kind.D, Kind.R)


def middles(stage: Stage, s: int, j: int) -> list[tuple[Op, ...]]:
    """What may stand between a forward and its backward: nothing, a recompute, or transfers of the first parts.

    The parts are all alike, so which of them leave makes no difference.
    """
    found: list[tuple[Op, ...]] = [()]
    if stage.can_recompute:
        found.append((Op(Kind.C, s, j),))
    if stage.can_offload:
        assert np.all(np.array(stage.offload_bytes) % stage.offload_parts == 0)
        for count in range(1, stage.offload_parts + 1):
            ways = merged([tuple(Op(kind, s, j, p) for kind in AWAY) for p in range(count)])
            found += [
                ops
                for ops in ways
                if all([op.part for op in ops if op.kind == kind] == list(range(count)) for kind in AWAY)
            ]
    return found


NOTHING: dict[Op, int] = {}


def merged(
    chains: list[tuple[Op, ...]], takes: dict[Op, int] = NOTHING, frees: dict[Op, int] = NOTHING, room: int = 0
) -> Iterator[tuple[Op, ...]]:
    """Every interleaving of the chains that needs at most `room` bytes."""
    if not any(chains):
        yield ()
    for i, chain in enumerate(chains):
        if chain and takes.get(chain[0], 0) <= room:
            left = room - takes.get(chain[0], 0) + frees.get(chain[0], 0)
            for rest in merged([*chains[:i], chain[1:], *chains[i + 1 :]], takes, frees, left):
                yield (chain[0], *rest)


def programs_of(problem: Problem, device: int) -> list[Program]:
    """Every program that a device can run within its memory.

    That is every order, every choice of offload, recompute and BW, and every place of O, D and R.
    """
    passes = [
        (s, j) for j in range(problem.microbatches) for s in problem.route(j) if problem.stages[s].device == device
    ]
    backs = (SPLIT, FUSED) if problem.microbatches < 3 else (SPLIT,)  # or there are too many
    choices = [product(middles(problem.stages[s], s, j), backs) for s, j in passes]
    found = []
    for chosen in product(*choices):
        chains = [
            (Op(Kind.F, s, j), *middle, *(Op(kind, s, j) for kind in back))
            for (middle, back), (s, j) in zip(chosen, passes, strict=True)
        ]
        for ops in merged(chains, *changes(problem, device, chains), problem.devices[device].activation_budget_bytes):
            limited = problem.devices[device].host_memory_bytes is not None
            if not limited or certify(problem, alone(problem, device, ops)).fits:
                found.append(Program.from_items(ops))
            if len(found) > MOST_PROGRAMS:
                raise TooManyError
    return found


def alone(problem: Problem, device: int, ops: Iterable[Op]) -> Schedule:
    """A schedule in which only this device has ops."""
    return Schedule(problem, tuple(Program.from_items(ops if d == device else ()) for d in range(len(problem.devices))))


def changes(problem: Problem, device: int, chains: list[tuple[Op, ...]]) -> list[dict[Op, int]]:
    """What each op takes of the device's memory, and what it frees."""
    ops = [op for chain in chains for op in chain]
    effects = alone(problem, device, ops).compiled.effects
    return [dict(zip(ops, amounts.tolist(), strict=True)) for amounts in (effects.takes, effects.frees)]


def shared_orders(problem: Problem, programs: tuple[Program, ...]) -> Iterator[dict[str, Program]]:
    """Every order of the transfers on the one link that devices share, if any."""
    if not problem.shared_links:
        yield {}
        return
    ((link, sharers),) = problem.shared_links.items()
    transfers = [tuple(op for op in programs[d].ops() if op.kind in (Kind.O, Kind.R)) for d in sharers]
    for order in merged(transfers):
        yield {link: Program.from_items(order)} if order else {}


def best_of_all(problem: Problem, objective: Objective) -> tuple[float, int]:
    """The shortest length over all schedules there are, and how many schedules were tried.

    Raises TooManyError if that would take more than some seconds.
    """
    best, tried = _bests(problem, tuple(TABLE.values()))
    return best[objective], tried


class TooManyError(Exception):
    """A problem has more schedules than can be tried."""


@cache
def _bests(problem: Problem, effects: tuple[Effect, ...]) -> tuple[dict[Objective, float], int]:
    """`effects` are those of the table that is in place, by which programs fit."""
    first = problem.stages[0].device
    candidates = [programs_of(problem, d) for d in range(len(problem.devices))]
    if problem.routes is None and (problem.fixed_order or not has_lists(problem)):
        # Equal micro-batches may enter the pipeline in order.
        entries = [Op(Kind.F, 0, j) for j in range(problem.microbatches)]
        candidates[first] = [p for p in candidates[first] if [op for op in p.ops() if op in entries] == entries]
    if prod(map(len, candidates)) > MOST_SCHEDULES / (10 if problem.shared_links else 1):
        raise TooManyError
    best: dict[Objective, float] = {"makespan": float("inf"), "span": float("inf")}
    if not all(candidates):
        return best, 0
    tables = TimedPrograms(problem, candidates)
    if not problem.shared_links:
        lengths, shortest = tables.shortest()
        for ms, chosen in zip(lengths.items(), shortest, strict=True):
            programs = tuple(own[n] for own, n in zip(candidates, chosen, strict=True))
            assert ms[1] == length(Schedule(problem, programs), ms[0])
        return lengths, prod(map(len, candidates))
    tried = 0
    for chosen in product(*(range(len(own)) for own in candidates)):
        programs = tuple(own[n] for own, n in zip(candidates, chosen, strict=True))
        for links in shared_orders(problem, programs):
            tried += 1
            lengths = tables.lengths(chosen, links)
            if any(ms < best[objective] for objective, ms in lengths.items()):
                schedule = Schedule(problem, programs, links)
                assert lengths == {objective: length(schedule, objective) for objective in best}
                best = {objective: min(ms, best[objective]) for objective, ms in lengths.items()}
    return best, tried


def has_lists(problem: Problem) -> bool:
    """Whether some figure has a number for each micro-batch."""
    messages = [problem.p2p_ms, *(message.ms for message in problem.messages or ())]
    return any(isinstance(ms, tuple) for ms in messages) or any(any(stage.lists()) for stage in problem.stages)


FAR = (2, 3, 1), (3, 2, 2)
EXHAUSTIVE: dict[str, Problem] = {
    "memory for one, one device can offload": problem_of(
        [stage(0, (2, 2, 1), 1, 1, (3, 3, 1)), stage(1, (2, 2, 1), 1, 1)], [1, 2], 2
    ),
    "both offload": problem_of([stage(0, FAR[0], 2, 1, (2, 2, 2)), stage(1, FAR[1], 2, 1, (4, 1, 2))], [2, 2], 2, 3.0),
    "full duplex": problem_of(
        [stage(0, FAR[0], 2, 1, (2, 2, 2)), stage(1, FAR[1], 2, 1, (4, 1, 2))],
        [2, 2],
        2,
        3.0,
        transfer_mode="full_duplex",
    ),
    "a shared link": problem_of(
        [
            stage(0, (1, 1, 1), 1, 1, (6, 6, 1)),
            stage(0, (2, 1, 1), 1, 1),
            stage(1, (1, 2, 1), 1, 1, (4, 9, 1)),
            stage(1, (2, 1, 2), 1),
        ],
        [1, 1],
        1,
        routes=[[0, 2, 1, 3]],
        devices=[{"link": "pcie"}] * 2,
    ),
    "a slow offload of a part": problem_of([stage(0, FAR[0], 3, 1, (6, 1, 2)), stage(1, FAR[1], 2, 1)], [4, 2], 2, 3.0),
    "three micro-batches, no offload": problem_of([stage(0, (2, 3, 1), 3, 2), stage(1, (1, 2, 2), 1, 1)], [6, 1], 3),
    "two chunks": problem_of(
        [stage(0, (2, 2, 1), 1, 1, (2, 2, 1)), stage(1, (3, 2, 1), 1, 1), stage(0, (1, 3, 1), 1, 1, (2, 3, 1))],
        [1, 1],
        1,
    ),
    "two directions": problem_of(
        [stage(0, (2, 2, 1), 1), stage(1, (3, 2, 1), 1), stage(1, (2, 2, 1), 1), stage(0, (1, 3, 1), 1)],
        [1, 2],
        2,
        routes=[[0, 1], [2, 3]],
        microbatch_routes=[0, 1],
    ),
}
SPAN = problem_of([stage(0, (1, 3, 2), 1, 1, (2, 5, 1)), stage(1, (5, 2, 9), 1)], [1, 2], 2, 4.0)
LATE_START = problem_of(  # a span of 20 ms where device 1 starts with micro-batch 1, else of 21 ms
    [stage(0, (2, 1, 1), 1), stage(1, (1, 2, 1), 1), stage(2, (1, 1, 1), 1), stage(1, (1, 1, 4), 1)], [9] * 3, 2, 0.0
)
RICHER: dict[str, Problem] = {  # for solvers that choose between offload, recompute and BW
    "recompute": problem_of(
        [stage(0, (2, 2, 1), 3, 1, None, (2, 1)), stage(1, (2, 3, 1), 2, 2, None, (1, 1))], [4, 2], 2
    ),
    "recompute or offload": problem_of(
        [stage(0, (2, 2, 1), 3, 1, (3, 1, 2), (1, 2)), stage(1, (3, 2, 1), 2, 2)], [5, 2], 2, 3.0
    ),
    "parts": problem_of(
        [stage(0, (1, 2, 1), 4, 1, (6, 4, 4), None, 2), stage(1, (3, 2, 2), 1), stage(0, (2, 1, 1), 1, 1)], [4, 1], 1
    ),
    "parts of two": problem_of([stage(0, (1, 2, 1), 4, 4, (6, 4, 2), None, 2), stage(1, (1, 2, 1), 1, 1)], [6, 1], 2),
    "host memory for one": problem_of(
        [stage(0, (1, 1, 1), 2, 1, (2, 2, 2)), stage(1, (2, 3, 1), 1)],
        [2, 2],
        2,
        2.0,
        devices=[{"host_memory_bytes": 3}, {}],
    ),
    "only BW fits": problem_of([stage(0, (2, 2, 3), 2, 3, (2, 2, 1)), stage(1, (2, 1, 1), 1, 4)], [3, 3], 2),
    "two directions, recompute": problem_of(
        [
            stage(0, (2, 2, 1), 2, 1, None, (1, 1)),
            stage(1, (3, 2, 1), 1),
            stage(1, (2, 2, 1), 2, 1),
            stage(0, (1, 3, 1), 1),
        ],
        [2, 3],
        2,
        routes=[[0, 1], [2, 3]],
        microbatch_routes=[0, 1],
    ),
    "one stage on two routes": problem_of(
        [stage(0, (2, 2, 1), 2, 1, (2, 1, 2)), stage(1, (3, 1, 1), 2, 1)],
        [3, 3],
        2,
        routes=[[0, 1], [1, 0]],
        microbatch_routes=[1, 0],
    ),
}
