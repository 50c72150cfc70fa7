"""The optimum by trying every schedule there is, for tiny problems: no solver's optimum may differ from it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from optpipe import Kind, Op, Problem, Program, Schedule, Stage
from optpipe.evaluate.effects import TABLE
from optpipe.evaluate.objective import Objective
from optpipe.model.ops import Effect
from optpipe.model.records import OFFLOAD, Level
from support import problems
from support.oracles.timed_programs import TimedPrograms
from support.problems import pipeline


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
    levels: Sequence[tuple[float, int, tuple[float, float, int] | None]] = (),
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
    levels
        The same of each level, and (ms out, ms back, bytes) if its checkpoint can be offloaded.
    """
    more: dict[str, Any] = {"recompute": again} if again else {}
    more |= {"offload": away} if away else {}
    for k, (ms_again, checkpoint, moved) in enumerate(levels):
        level = {"name": str(k), "recompute_ms": float(ms_again), "checkpoint_bytes": checkpoint}
        level |= dict(zip(OFFLOAD, (*map(float, moved[:2]), moved[2]), strict=True)) if moved else {}
        more.setdefault("levels", []).append(level)
    if away or any(moved for *_, moved in levels):
        more["offload_parts"] = parts
    return problems.stage(ms, (size, kept), device=device, **more)


MOST_PROGRAMS, MOST_SCHEDULES = 4_000, 1_000_000  # of a device; of a problem whose links are not shared

Kinds = tuple[Kind, ...]
SPLIT, FUSED = (Kind.B, Kind.W), (Kind.BW,)
AWAY = (Kind.O, Kind.D, Kind.R)


def middles(stage: Stage, s: int, j: int) -> list[tuple[Op, ...]]:
    """What may stand between a forward and its backward: nothing, transfers of the first parts, a recompute by each
    level, or both.

    The parts are all alike, so which of them leave makes no difference.
    """
    each: list[tuple[Op, ...]] = [()]
    for k, level in enumerate(stage.all_levels):
        each += [(*ops, Op(Kind.C, s, j, k)) for ops in [(), *transfers_of(level, stage.offload_parts, s, j)]]
    return each + transfers_of(stage, stage.offload_parts, s, j)


def transfers_of(costs: Stage | Level, parts: int, s: int, j: int) -> list[tuple[Op, ...]]:
    """The transfers of the first parts of an activation, or of a checkpoint, in every order."""
    if not costs.can_offload:
        return []
    assert np.all(np.array(costs.offload_bytes) % parts == 0)
    return [
        ops
        for count in range(1, parts + 1)
        for ops in merged([tuple(Op(kind, s, j, p) for kind in AWAY) for p in range(count)])
        if all([op.part for op in ops if op.kind == kind] == list(range(count)) for kind in AWAY)
    ]


class Rules(NamedTuple):
    """What an order of ops must satisfy: bytes on the device and on the host, and which op may follow which."""

    takes: dict[Op, tuple[float, float]]
    frees: dict[Op, tuple[float, float]]
    may_follow: Callable[[Op, Op], bool]


def merged(
    chains: Sequence[tuple[Op, ...]],
    rules: Rules | None = None,
    room: tuple[float, float] = (0, 0),
    last: Op | None = None,
) -> Iterator[tuple[Op, ...]]:
    """Every interleaving of the chains that the rules allow in `room` bytes after the op `last`."""
    if not any(chains):
        yield ()
    for i, chain in enumerate(chains):
        left = room
        if not chain or (rules and last and not rules.may_follow(last, chain[0])):
            continue
        if rules:
            taken, freed = rules.takes[chain[0]], rules.frees[chain[0]]
            if taken[0] > room[0] or taken[1] > room[1]:
                continue
            left = room[0] - taken[0] + freed[0], room[1] - taken[1] + freed[1]
        for rest in merged([*chains[:i], chain[1:], *chains[i + 1 :]], rules, left, chain[0]):
            yield (chain[0], *rest)


def programs_of(
    problem: Problem, device: int, all_of_them: bool = False, evicted: Collection[tuple[int, int]] = ()
) -> list[Program]:
    """The programs that a device can run within its memory: every order, every choice of offload, recompute and BW, and
    every place of O, D and R. Unless `all_of_them` are asked for, those are left out than which another is no worse.
    What is `evicted`, stage and micro-batch, is so, and has its room on the peer.

    Raises TooManyError beyond `MOST_PROGRAMS`.
    """
    everywhere = ((s, j) for j in range(problem.microbatches) for s in problem.route(j))
    passes = [(s, j) for s, j in everywhere if problem.stages[s].device == device]
    gone = {(s, j): tuple(Op(kind, s, j) for kind in (Kind.E, Kind.D, Kind.L)) for s, j in evicted}
    choices = [
        product(
            [gone[s, j]] if (s, j) in gone else middles(problem.stages[s], s, j),
            backwards(problem, device, s, j, all_of_them),
        )
        for s, j in passes
    ]
    hosted = [(s, j) for s, j in gone if problem.devices[problem.stages[s].device].peer == device]
    rooms = [(Op(Kind.A, s, j), Op(Kind.V, s, j)) for s, j in hosted]
    budgets = problem.devices[device]
    room = budgets.activation_budget_bytes, inf if budgets.host_memory_bytes is None else budgets.host_memory_bytes
    programs: list[Program] = []
    for chosen in product(*choices):
        chains = [
            (Op(Kind.F, s, j), *middle, *(Op(kind, s, j) for kind in back))
            for (middle, back), (s, j) in zip(chosen, passes, strict=True)
        ] + rooms
        rules = rules_of(problem, device, chains, all_of_them)
        for ops in merged(chains, rules, room):
            programs.append(Program.from_items(ops))
            if len(programs) > MOST_PROGRAMS:
                raise TooManyError
    return programs


def backwards(problem: Problem, device: int, s: int, j: int, all_of_them: bool) -> tuple[Kinds, ...]:
    """B and W, or BW. BW is no better where B and W in a row need no more: the gradient leaves earlier."""
    if problem.microbatches > 2:  # with BW there are too many
        return (SPLIT,)
    f, b, w, joint = (Op(kind, s, j) for kind in (Kind.F, *SPLIT, *FUSED))
    split, fused = effects_of(problem, device, [(f, b, w)]), effects_of(problem, device, [(f, joint)])
    needs = max(split.takes[b][0], split.takes[b][0] - split.frees[b][0] + split.takes[w][0])
    return (SPLIT,) if needs <= fused.takes[joint][0] and not all_of_them else (SPLIT, FUSED)


def rules_of(problem: Problem, device: int, chains: Sequence[tuple[Op, ...]], all_of_them: bool) -> Rules:
    """What ops take and free, and which op follows another in some best program.

    An offload or eviction takes no bytes of the device, so it goes before all compute ops that it may go before. A drop
    waits for it, and the end of a room on the peer for a load, so it stands where its bytes are needed next. That room
    is made as early as bytes allow. All that makes no op later.
    """
    effects = effects_of(problem, device, chains)
    on_host = problem.devices[device].host_memory_bytes is not None

    def may_follow(last: Op, op: Op) -> bool:
        if last.kind in (Kind.D, Kind.V) and effects.takes[last][0] == 0:
            return op.kind in (Kind.D, Kind.V) or effects.takes[op][0] > 0
        if op.kind in (Kind.O, Kind.E) and effects.takes[op][0] == 0:
            same = (last.stage, last.microbatch) == (op.stage, op.microbatch)
            moves = (Kind.O, Kind.R, Kind.E, Kind.L)
            return same or last.kind in moves or (on_host and last.kind in (Kind.B, Kind.BW))
        if op.kind is Kind.A:
            return last.kind is Kind.A or effects.frees[last][0] > 0
        return True

    return effects._replace(may_follow=lambda last, op: all_of_them or may_follow(last, op))


def effects_of(problem: Problem, device: int, chains: Iterable[tuple[Op, ...]]) -> Rules:
    """What each op takes and frees, of the device and of its host memory."""
    ops = [op for chain in chains for op in chain]
    programs = (Program.from_items(ops if d == device else ()) for d in range(len(problem.devices)))
    effects = Schedule(problem, tuple(programs)).compiled.effects
    takes, frees = (
        dict(zip(ops, zip(here.tolist(), there.tolist(), strict=True), strict=True))
        for here, there in ((effects.takes, effects.takes_on_host), (effects.frees, effects.frees_on_host))
    )
    return Rules(takes, frees, lambda _last, _op: True)


def shared_orders(problem: Problem, transfers: Sequence[tuple[Op, ...]]) -> Iterator[dict[str, Program]]:
    """Every order of the transfers of each device on the one link that devices share, if any."""
    if not problem.shared_links:
        yield {}
        return
    ((link, sharers),) = problem.shared_links.items()
    for order in merged([transfers[d] for d in sharers]):
        yield {link: Program.from_items(order)} if order else {}


def by_transfers(problem: Problem, programs: Iterable[Program]) -> dict[tuple[Op, ...], list[Program]]:
    """The programs of a device by their transfers in order, where links are shared; else all as one."""
    groups: dict[tuple[Op, ...], list[Program]] = {}
    for program in programs:
        ops = program.ops() if problem.shared_links else ()
        groups.setdefault(tuple(op for op in ops if op.kind in (Kind.O, Kind.R)), []).append(program)
    return groups


def best_of_all(problem: Problem, objective: Objective, all_of_them: bool = False) -> tuple[float, int]:
    """The shortest length over all schedules there are, and how many schedules were tried: `all_of_them`, or those of
    which `programs_of` says that no other is better.

    Raises TooManyError if that would take more than some seconds.
    """
    best, tried = _bests(problem, tuple(TABLE.values()), all_of_them)
    return best[objective], tried


class TooManyError(Exception):
    """A problem has more schedules than can be tried."""


@cache
def _bests(problem: Problem, effects: tuple[Effect, ...], all_of_them: bool) -> tuple[dict[Objective, float], int]:
    """`effects` are those of the table that is in place, by which programs fit."""
    may = [(s, j) for j in range(problem.microbatches) for s in problem.route(j) if problem.stages[s].can_evict]
    each = [
        _bests_where(problem, all_of_them, evicted) for n in range(len(may) + 1) for evicted in combinations(may, n)
    ]
    objectives: tuple[Objective, ...] = ("makespan", "span")
    return {name: min(best[name] for best, _ in each) for name in objectives}, sum(tried for _, tried in each)


def _bests_where(
    problem: Problem, all_of_them: bool, evicted: Collection[tuple[int, int]]
) -> tuple[dict[Objective, float], int]:
    first = problem.stages[0].device
    candidates = [programs_of(problem, d, all_of_them, evicted) for d in range(len(problem.devices))]
    if problem.routes is None and (problem.fixed_order or not has_lists(problem)):
        # Equal micro-batches may enter the pipeline in order.
        entries = [Op(Kind.F, 0, j) for j in range(problem.microbatches)]
        candidates[first] = [p for p in candidates[first] if [op for op in p.ops() if op in entries] == entries]
    if prod(map(len, candidates)) > MOST_SCHEDULES / (10 if problem.shared_links else 1):
        raise TooManyError
    groups = [by_transfers(problem, own) for own in candidates]
    tables = TimedPrograms(problem, [[list(same) for same in each.values()] for each in groups])
    best: dict[Objective, float] = {"makespan": inf, "span": inf}
    tried = 0
    for chosen in product(*map(enumerate, groups)):
        numbers, transfers = zip(*chosen, strict=True)
        for links in shared_orders(problem, transfers):
            tried += prod(len(each[same]) for each, same in zip(groups, transfers, strict=True))
            for objective, (ms, programs) in tables.shortest(numbers, links).items():
                if ms < best[objective]:
                    assert ms == length(Schedule(problem, programs, links), objective)
                    best[objective] = ms
    return best, tried


def has_lists(problem: Problem) -> bool:
    """Whether some figure has a number for each micro-batch."""
    messages = [problem.p2p_ms, *(message.ms for message in problem.messages or ())]
    return any(isinstance(ms, tuple) for ms in messages) or any(any(stage.lists()) for stage in problem.stages)


FAR = (2, 3, 1), (3, 2, 2)
BOTH_OFFLOAD = [stage(0, FAR[0], 2, 1, (2, 2, 2)), stage(1, FAR[1], 2, 1, (4, 1, 2))]
TWO_WAYS = {"routes": [[0, 1], [2, 3]], "microbatch_routes": [0, 1]}
EXHAUSTIVE: dict[str, Problem] = {
    "memory for one, one device can offload": problem_of(
        [stage(0, (2, 2, 1), 1, 1, (3, 3, 1)), stage(1, (2, 2, 1), 1, 1)], [1, 2], 2
    ),
    "both offload": problem_of(BOTH_OFFLOAD, [2, 2], 2, 3.0),
    "full duplex": problem_of(BOTH_OFFLOAD, [2, 2], 2, 3.0, transfer_mode="full_duplex"),
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
        **TWO_WAYS,
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
    "levels": problem_of(
        [stage(0, (2, 2, 1), 4, 1, None, levels=[(0.5, 3, (2, 1, 2)), (2, 1, None)]), stage(1, (2, 3, 1), 2, 1)],
        [7, 4],
        2,
    ),
    "levels or offload": problem_of(
        [stage(0, (2, 2, 1), 4, 1, (3, 3, 3), levels=[(1, 2, (1, 1, 2)), (2, 1, None)]), stage(1, (2, 3, 1), 1, 1)],
        [6, 2],
        2,
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
        **TWO_WAYS,
    ),
    "one stage on two routes": problem_of(
        [stage(0, (2, 2, 1), 2, 1, (2, 1, 2)), stage(1, (3, 1, 1), 2, 1)],
        [3, 3],
        2,
        routes=[[0, 1], [1, 0]],
        microbatch_routes=[1, 0],
    ),
}
