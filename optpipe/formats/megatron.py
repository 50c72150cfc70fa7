"""Megatron-core's own orders (0.16.1): the arguments with which Megatron runs a schedule, if it is one of them.

Its order is that of 1F1B with one chunk a rank, and interleaved 1F1B with several, where the only choice is how many
micro-batches pass a chunk in a row. Which layers a stage has is free: `--pipeline-model-parallel-layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise, takewhile, zip_longest
from shlex import quote

from optpipe.errors import InputError
from optpipe.formats.order import hint, require_one_route, require_runnable
from optpipe.model.ops import Kind, Op, Pair
from optpipe.model.placement import together
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule

OURS = "optpipe_runtime.megatron.forward_backward_func runs the schedule as it is"
EMBEDDING, DECODER, PREDICTION, LOSS = "E", "t", "m", "L"
Order = Sequence[Sequence[Op]]  # by rank


def write(schedule: Schedule, mtp: int = 0) -> str:
    """The arguments, one a line, as a shell reads them; the model has `mtp` multi-token prediction modules.

    Raises InputError if Megatron has no such order; the sentence names the first op that differs. Raises ScheduleError
    if the schedule cannot run.
    """
    problem, chunks = schedule.problem, _chunks(schedule)
    require_stages(problem)
    require_runnable(schedule)
    group = require_order(schedule)
    arguments = [f"--pipeline-model-parallel-size {len(problem.devices)}"]
    if problem.layers is not None:
        arguments.append(f"--pipeline-model-parallel-layout {quote(layout(problem, mtp))}")
    elif chunks > 1:
        arguments.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
    if chunks > 1:
        arguments.append(f"--microbatch-group-size-per-virtual-pipeline-stage {group}")
    return "".join(f"{argument}\n" for argument in arguments)


def require_stages(problem: Problem) -> None:
    """Raises InputError unless stages are looped, as many on each rank."""
    require_one_route(problem, "Megatron")
    ranks = len(problem.devices)
    for s, stage in enumerate(problem.stages):
        if stage.device != s % ranks:
            raise InputError(f"stages[{s}].device = {stage.device}: Megatron has stage {s} on rank {s % ranks}; {OURS}")
    if len(problem.stages) % ranks:
        raise InputError(f"{len(problem.stages)} stages on {ranks} devices: in Megatron all ranks have as many; {OURS}")


def require_order(schedule: Schedule) -> int:
    """The size of the groups in whose order the schedule is Megatron's. Raises InputError that names the first op that
    differs, such as an offload."""
    chunks, group = _chunks(schedule), _group(schedule)
    if group is None:
        m, ranks = schedule.problem.microbatches, len(schedule.problem.devices)
        raise InputError(f"microbatches = {m}: with {chunks} chunks a rank Megatron needs at least {ranks}; {OURS}")
    if difference := _difference(schedule, group):
        d, item, expected = difference
        name = "1F1B" if chunks == 1 else f"interleaved 1F1B in groups of {group}"
        advice = hint(item) if isinstance(item, Op) else ""
        raise InputError(
            f"device {d} has {item or 'no more ops'} where Megatron's {name} has {expected or 'none'}{advice}; {OURS}"
        )
    return group


def layout(problem: Problem, mtp: int = 0) -> str:
    """The layers of each stage in Megatron's letters, such as `Ett|tmL`: E is the first of the problem's layers, which
    is the embedding, L the last one, the head, and each m before it a multi-token prediction module.

    Raises InputError if the stages do not consist of the layers.
    """
    return layout_of_counts(layer_counts(problem), mtp)


def layer_counts(problem: Problem) -> list[int]:
    """How many of the problem's layers each stage has. Raises InputError if the stages do not consist of them, or a
    layer between the first and the last one cannot be recomputed as the others can."""
    layers, first, counts = problem.layers or (), 0, list[int]()
    again = [layer.can_recompute for layer in layers[1:-1]]
    if any(again) and not all(again):
        raise InputError(
            f"layers[{1 + again.index(False)}] cannot be computed again, others can: between embedding and head "
            "other stacks have decoder layers, no parts of a head"
        )
    for s, stage in enumerate(problem.stages):
        for end in range(first + 1, len(layers) + 1):
            sums = together(layers[first:end])
            if problem.stack == "torch":  # rounded, or doubled, by stages and by layers
                del sums["saved_for_weight_bytes"]
            if all(getattr(stage, name) == cost for name, cost in sums.items()):
                break
        else:
            raise InputError(f"stages[{s}] does not consist of layers {first} and on of the problem: leave layers out")
        counts.append(end - first)
        first = end
    if first < len(layers):
        raise InputError(f"layers: {len(layers)} are there, the stages consist of {first}: leave layers out")
    return counts


def layout_of_counts(counts: Sequence[int], mtp: int = 0) -> str:
    """The same for stages of so many layers each."""
    cuts = [0, *accumulate(counts)]
    letters = EMBEDDING + DECODER * (cuts[-1] - 2) + PREDICTION * mtp + LOSS
    cuts[-1] += mtp
    return "|".join(letters[a:b] for a, b in pairwise(cuts))


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
    programs = []
    for r in range(ranks):
        forwards = [Op(Kind.F, chunk * ranks + r, j) for chunk, j in table]
        backwards = [Op(Kind.BW, (chunks - 1 - chunk) * ranks + r, j) for chunk, j in table]
        last = ranks - r - 1
        warm_up = min(len(table), last if chunks == 1 else 2 * last + (chunks - 1) * group)
        in_turn = chain.from_iterable(zip_longest(forwards[warm_up:], backwards))
        programs.append([*forwards[:warm_up], *(op for op in in_turn if op is not None)])
    return programs


def _chunks(schedule: Schedule) -> int:
    return len(schedule.problem.stages) // len(schedule.problem.devices)


def _group(schedule: Schedule) -> int | None:
    """How many micro-batches pass the first stage before its device turns to another one, if Megatron takes groups of
    this size: not fewer micro-batches than ranks, nor a smaller last group. Else the smallest that it takes, if any."""
    ranks, m = len(schedule.problem.devices), schedule.problem.microbatches
    if _chunks(schedule) == 1:
        return 1
    first = schedule.programs[schedule.problem.stages[0].device]
    passed = sum(1 for _ in takewhile(lambda item: isinstance(item, Op) and item.stage == 0, first))
    sizes = [size for size in range(ranks, m + 1) if m % size == 0 or m % size >= ranks]
    return passed if passed in sizes else min(sizes, default=None)


def _difference(schedule: Schedule, group: int) -> tuple[int, Op | Pair | None, Op | None] | None:
    """Where the schedule first differs from Megatron's order in groups of this size: the device, what stands there, and
    what is expected. None if it is that order."""
    ranks, m = len(schedule.problem.devices), schedule.problem.microbatches
    expected_order = order(ranks, _chunks(schedule), m, group)
    differing = [
        (place, d, item, expected)
        for d, (program, ops) in enumerate(zip(schedule.programs, expected_order, strict=True))
        for place, (item, expected) in enumerate(zip_longest(program, ops))
        if item != expected
    ]
    return min(differing, key=lambda each: each[0])[1:] if differing else None
