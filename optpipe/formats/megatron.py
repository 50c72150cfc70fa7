"""Megatron-core's own orders (0.16.1): the arguments with which Megatron runs a schedule, if it is one of them.

Its order is that of 1F1B with one chunk a rank, and interleaved 1F1B with several, where the only choice is how many
micro-batches pass a chunk in a row. Which layers a stage has is free: `--pipeline-model-parallel-layout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile, zip_longest
from typing import NamedTuple

from optpipe.errors import InputError
from optpipe.formats.order import hint, require_one_route, require_runnable
from optpipe.model.ops import Kind, Op, Pair
from optpipe.model.placement import together
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule

OURS = "optpipe_runtime.megatron.forward_backward_func runs the schedule as it is"
EMBEDDING, DECODER, LOSS = "E", "t", "L"
NOWHERE = float("inf")
Order = Sequence[Sequence[Op]]  # by rank


def write(schedule: Schedule) -> str:
    """The arguments, one a line.

    Raises InputError if Megatron has no such order; the sentence names the first op that differs. Raises ScheduleError
    if the schedule cannot run.
    """
    problem = schedule.problem
    require_one_route(problem, "Megatron")
    require_runnable(schedule)
    ranks = len(problem.devices)
    for s, stage in enumerate(problem.stages):
        if stage.device != s % ranks:
            raise InputError(f"stages[{s}].device = {stage.device}: Megatron has stage {s} on rank {s % ranks}; {OURS}")
    if len(problem.stages) % ranks:
        raise InputError(f"{len(problem.stages)} stages on {ranks} devices: in Megatron all ranks have as many; {OURS}")
    arguments = [f"--pipeline-model-parallel-size {ranks}"]
    chunks, group = len(problem.stages) // ranks, _group(schedule)
    if problem.layers is not None:
        arguments.append(f"--pipeline-model-parallel-layout {layout(problem)}")
    elif chunks > 1:
        arguments.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
    if chunks > 1:
        arguments.append(f"--microbatch-group-size-per-virtual-pipeline-stage {group}")
    return "".join(f"{argument}\n" for argument in arguments)


def layout(problem: Problem) -> str:
    """The layers of each stage in Megatron's letters, such as `Ett|ttL`: E is the first of the problem's layers, which
    is the embedding, L the last one, the head.

    Raises InputError if the stages do not consist of the layers.
    """
    layers, first, texts = problem.layers or (), 0, []
    letters = EMBEDDING + DECODER * (len(layers) - 2) + LOSS
    for s, stage in enumerate(problem.stages):
        ends = range(first + 1, len(layers) + 1)
        end = next((end for end in ends if _consists(stage, together(layers[first:end]))), None)
        if end is None:
            raise InputError(f"stages[{s}] does not consist of layers {first} and on of the problem: leave layers out")
        texts.append(letters[first:end])
        first = end
    if first < len(layers):
        raise InputError(f"layers: {len(layers)} are there, the stages consist of {first}: leave layers out")
    return "|".join(texts)


def order(ranks: int, chunks: int, microbatches: int, group: int) -> Order:
    """Megatron's order of ops, in which `group` micro-batches pass each chunk of a rank in a row.

    With one chunk rank r begins with p - r - 1 forwards, with v of them with 2(p - r - 1) + (v - 1)·group; then come
    one forward and one backward in turn (`get_pp_rank_microbatches`, `get_schedule_table`).
    """
    table = [
        (chunk, j)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for j in range(start, min(start + group, microbatches))
    ]
    return [list(_of_rank(r, ranks, chunks, table, group)) for r in range(ranks)]


def _of_rank(r: int, ranks: int, chunks: int, table: Sequence[tuple[int, int]], group: int) -> Iterator[Op]:
    forwards = [Op(Kind.F, chunk * ranks + r, j) for chunk, j in table]
    backwards = [Op(Kind.BW, (chunks - 1 - chunk) * ranks + r, j) for chunk, j in table]
    last = ranks - r - 1
    warm_up = min(len(table), last if chunks == 1 else 2 * last + (chunks - 1) * group)
    yield from forwards[:warm_up]
    for forward, backward in zip_longest(forwards[warm_up:], backwards):
        yield from (op for op in (forward, backward) if op is not None)


def has_order(schedule: Schedule) -> bool:
    """Whether the schedule is Megatron's order, in groups of any size that it takes; one with offloads is not."""
    group = _first_group(schedule)
    return group in _groups(schedule) and _compared(schedule, group).place == NOWHERE


def _group(schedule: Schedule) -> int:
    """The size of the groups in Megatron's order that the schedule has. Raises InputError if there is none."""
    group, groups = _first_group(schedule), _groups(schedule)
    ranks, chunks = len(schedule.problem.devices), _chunks(schedule)
    if not groups:
        m = schedule.problem.microbatches
        raise InputError(f"microbatches = {m}: with {chunks} chunks a rank Megatron needs at least {ranks}; {OURS}")
    if group in groups and _compared(schedule, group).place == NOWHERE:
        return group
    differences = {group: _compared(schedule, group) for group in groups}
    group = max(groups, key=lambda group: differences[group].place)
    place, d, item, expected = differences[group]
    if place < NOWHERE:
        name = "1F1B" if chunks == 1 else f"interleaved 1F1B in groups of {group}"
        said = hint(item) if isinstance(item, Op) else ""
        raise InputError(
            f"device {d} has {item or 'no more ops'} where Megatron's {name} has {expected or 'none'}{said}; {OURS}"
        )
    return group


def _chunks(schedule: Schedule) -> int:
    return len(schedule.problem.stages) // len(schedule.problem.devices)


def _groups(schedule: Schedule) -> list[int]:
    """The sizes that Megatron takes. It refuses fewer micro-batches than ranks in a group, a smaller last one, too."""
    ranks, m = len(schedule.problem.devices), schedule.problem.microbatches
    return [1] if _chunks(schedule) == 1 else [g for g in range(ranks, m + 1) if m % g == 0 or m % g >= ranks]


def _first_group(schedule: Schedule) -> int:
    """How many micro-batches pass the first stage before its device turns to another one."""
    if _chunks(schedule) == 1:
        return 1
    first = schedule.programs[schedule.problem.stages[0].device]
    return sum(1 for _ in takewhile(lambda item: isinstance(item, Op) and item.stage == 0, first))


def _compared(schedule: Schedule, group: int) -> _Difference:
    """Where the schedule first differs from Megatron's order in groups of this size."""
    ranks, m = len(schedule.problem.devices), schedule.problem.microbatches
    return _difference(schedule, order(ranks, _chunks(schedule), m, group))


class _Difference(NamedTuple):
    """The first place of a program at which it is not as expected."""

    place: float
    device: int = 0
    item: Op | Pair | None = None
    expected: Op | None = None


def _difference(schedule: Schedule, expected: Order) -> _Difference:
    """The earliest one, of all devices."""
    least = _Difference(NOWHERE)
    for d, (program, ops) in enumerate(zip(schedule.programs, expected, strict=True)):
        for place, (item, wanted) in enumerate(zip_longest(program, ops)):
            if item != wanted and place < least.place:
                least = _Difference(place, d, item, wanted)
    return least


def _consists(stage: object, costs: dict[str, object]) -> bool:
    return all(getattr(stage, name) == cost for name, cost in costs.items())
