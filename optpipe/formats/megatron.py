"""Megatron-core's own orders: the arguments with which Megatron runs a schedule, if it is one of them, and
what its layouts say.

Its order is that of 1F1B with one chunk a rank, and interleaved or combined 1F1B with several, where the only choice is
how many micro-batches pass a chunk in a row. Which layers a stage has is free: `--pipeline-model-parallel-layout`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, groupby, pairwise, takewhile, zip_longest
from shlex import quote

import numpy as np

from optpipe.errors import InputError
from optpipe.formats.order import hint, require_one_route, require_runnable
from optpipe.model.arrays import Table
from optpipe.model.ops import Kind, Op, Pair
from optpipe.model.placement import Placement, together
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, STAGE, Program, of_kinds
from optpipe.model.records import Stage
from optpipe.schedule import Schedule

OURS = "optpipe_runtime.megatron.forward_backward_func runs the schedule as it is"
EMBEDDING, DECODER, PREDICTION, LOSS = "E", "t", "m", "L"
# As Megatron's scripts name arguments, and Megatron-Bridge's configurations with _ for -, by our short names.
NAMES = {
    "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "chunks",
    "virtual-pipeline-model-parallel-size": "chunks",
    "microbatch-group-size-per-virtual-pipeline-stage": "group",
    "microbatch-group-size-per-vp-stage": "group",
    "pipeline-model-parallel-layout": "layout",
    "hybrid-layer-pattern": "pattern",
}


# What a schedule's method has after 1f1b or interleaved if Megatron's own offload is in it (0.19.2; 0.16.1 has all but
# the fraction): its stages are layers.
_OFFLOAD = re.compile(
    r"\w+ (--fine-grained-activation-offloading --offload-modules [a-z_1 ]+(?: --activation-offload-fraction [\d.]+)?)"
)


def offload_arguments(schedule: Schedule) -> list[str]:
    """The arguments of Megatron's own offload, if its policy has made the schedule."""
    found = _OFFLOAD.fullmatch(schedule.method)
    return [f"--{each}" for each in found[1].removeprefix("--").split(" --")] if found else []


def in_chunks(schedule: Schedule) -> Schedule:
    """A schedule whose stages are the problem's layers, in stages as Megatron has them, and without offload.

    Raises InputError if the problem has other layers.
    """
    problem, layers = schedule.problem, schedule.problem.layers or ()
    if len(layers) != len(problem.stages):
        raise InputError(f"layers: {len(layers)} are there for {len(problem.stages)} stages, one for each was expected")
    runs = [[*run] for _, run in groupby(range(len(layers)), lambda s: problem.stages[s].device)]
    stages = [Stage(device=problem.stages[run[0]].device, **together(layers[run[0] : run[-1] + 1])) for run in runs]
    chunk = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    first, last = ([run[end] for run in runs] for end in (0, -1))

    def whole(table: Table) -> Table:
        """A chunk's forward ends with its last layer's, its backward with its first one's."""
        s = table[:, STAGE]
        ends = of_kinds(table, Kind.F) & np.isin(s, last) | of_kinds(table, Kind.BW) & np.isin(s, first)
        return np.insert(np.delete(table[ends], STAGE, 1), STAGE, chunk[s[ends]], 1)

    return replace(schedule.with_tables(whole), problem=problem.replace(stages=stages))


def write(schedule: Schedule, mtp: int = 0, letters: Sequence[str] = ()) -> str:
    """The arguments, one a line, as a shell reads them; the model has `mtp` multi-token prediction modules. With the
    `letters` of its layers it is a hybrid.

    Raises InputError if Megatron has no such order; the sentence names the first op that differs. Raises ScheduleError
    if the schedule cannot run.
    """
    offload = offload_arguments(schedule)
    schedule = in_chunks(schedule) if offload else schedule
    problem, chunks = schedule.problem, _chunks(schedule)
    require_stages(problem)
    require_runnable(schedule)
    group = require_order(schedule)
    arguments = [f"--pipeline-model-parallel-size {len(problem.devices)}"]
    if problem.layers is not None:
        counts = layer_counts(problem, mtp)
        name, text = "pipeline-model-parallel-layout", layout_of_counts(counts, mtp)
        if letters:
            name, text = "hybrid-layer-pattern", in_stages(["", *letters, ""], counts)
        arguments.append(f"--{name} {quote(text)}")
    elif chunks > 1:
        arguments.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
    if chunks > 1:
        arguments.append(f"--microbatch-group-size-per-virtual-pipeline-stage {group}")
    arguments += [f"--mtp-num-layers {mtp}"] if mtp else []
    return "".join(f"{argument}\n" for argument in [*arguments, *pair_arguments(schedule), *offload])


def pair_arguments(schedule: Schedule) -> list[str]:
    """The arguments of a schedule in Megatron's order for its pairs, if it has any."""
    rows, costs = schedule.compiled.rows, schedule.problem.costs
    if not len(rows.first):
        return []
    backward = rows.first + 1
    backward_ms = costs.ms[Kind.BW][rows.stage[backward], rows.microbatch[backward]]
    delays = (schedule.compiled.durations_ms[rows.first] < backward_ms).any()  # B's all-to-all hides beside its own W
    return ["--overlap-moe-expert-parallel-comm", *["--delay-wgrad-compute"] * bool(delays)]


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
    m, ranks = schedule.problem.microbatches, len(schedule.problem.devices)
    combined = any(program.table[:, JOINED].any() for program in schedule.programs)
    if combined and chunks == 1 < ranks:
        raise InputError(f"chunks = 1: Megatron's combined 1F1B needs two or more a rank; {OURS}")
    if difference := _difference(schedule, (combined_order if combined else order)(ranks, chunks, in_groups(m, group))):
        d, item, expected = difference
        name = "1F1B" if chunks == 1 else f"{'combined' if combined else 'interleaved'} 1F1B in groups of {group}"
        advice = hint(item) if isinstance(item, Op) else ""
        raise InputError(
            f"device {d} has {item or 'no more ops'} where Megatron's {name} has {expected or 'none'}{advice}; {OURS}"
        )
    return group


def layer_counts(problem: Problem, mtp: int = 0) -> list[int]:
    """How many of the problem's layers each stage has. Raises InputError if the stages do not consist of them, or a
    decoder layer cannot be recomputed as the others can."""
    layers, first, counts = problem.layers or (), 0, list[int]()
    again = [layer.can_recompute for layer in layers[1 : -2 if mtp else -1]]
    if any(again) and not all(again):
        raise InputError(
            f"layers[{1 + again.index(False)}] cannot be computed again, others can: between embedding and head "
            "other stacks have decoder layers, no parts of a head"
        )
    for s, stage in enumerate(problem.stages):
        for end in (*range(first + 1, len(layers) + 1), first):  # at last an empty stage
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
    """Stages of so many layers each in Megatron's letters, such as `Ett||tmL`: E is the first layer, the embedding, L
    the last one, the head, and `mtp` times m the one before it, multi-token prediction modules."""
    decoders = sum(counts) - 2 - (mtp > 0)
    return in_stages([EMBEDDING, *DECODER * decoders, *[PREDICTION * mtp] * (mtp > 0), LOSS], counts)


def in_stages(letters: Sequence[str], counts: Sequence[int]) -> str:
    """The letters of a row of layers with | between stages of so many layers each."""
    return "|".join("".join(letters[a:b]) for a, b in pairwise((0, *accumulate(counts))))


def take_arguments(text: str, names: Mapping[str, str] = NAMES) -> tuple[dict[str, str], str]:
    """The arguments of these names in a text, by our short names, and the text without them.

    A value is after spaces, = or a colon, a number also alone; commas within a layout belong to it. Raises InputError
    if an argument has two values.
    """
    argument = re.compile(
        rf"(?<![\w.-])-*(?:\w+\.)*((?i:{'|'.join(names).replace('-', '[-_]')}|layout|pattern))"
        r"(?:['\"]?\s*[=:]\s*|\s+|(?=\d))['\"]?([^\s,'\"]+(?:,[EtmL|()*\d]+(?![^\s,'\"]))*)['\"]?"
    )
    found = dict[str, str]()
    for name, value in argument.findall(text):
        short = names.get(name.lower().replace("_", "-"), name.lower())
        if found.setdefault(short, value) != value:
            raise InputError(f"{name} = {value}: {short} is {found[short]} already")
    return found, argument.sub("", text)


def read(found: dict[str, str], rest: str, problem: Problem) -> Schedule:
    """The schedule that Megatron runs by these arguments, with the problem's layers in stages as they say. In a hybrid
    each of them is one letter.

    Raises InputError if they are for other devices or layers, or divide a pipeline in another way.
    """
    if others := re.findall(r"[\w-]*pipeline[\w-]*", rest):
        raise InputError(f"{others[0]}: is not read; expected {', '.join(NAMES)}")
    ranks, m = len(problem.devices), problem.microbatches
    numbers = {name: int(word) if word.isdigit() else 0 for name, word in found.items()}
    chunks, group, layers = numbers.get("chunks", 1), numbers.get("group", ranks), None
    if numbers["pp"] != ranks:
        raise InputError(f"pipeline-model-parallel-size = {found['pp']}: the problem has {ranks} devices")
    if "layout" in found or "pattern" in found:
        layers = [n + (modules > 0) for n, modules in zip(*read_stages(found, ranks), strict=True)]
        layers[0] += 1
        layers[-1] += 1  # of one stage both
        chunks = len(layers) // ranks
    placed = Placement.from_dict({"chunks": chunks, "layers": layers}, "arguments").apply(problem)
    if chunks > 1 and group not in _groups(ranks, m):
        raise InputError(f"groups of {group}: Megatron takes at least {ranks} of {m} micro-batches, the last ones, too")
    programs = tuple(map(Program.from_items, order(ranks, chunks, in_groups(m, group))))
    return Schedule(placed, programs, method="interleaved" if chunks > 1 else "1f1b")


def read_stages(found: Mapping[str, str], ranks: int, letters: Sequence[str] = ()) -> tuple[list[int], list[int]]:
    """How many layers and how many multi-token prediction modules each stage of a layout has, or of a pattern for
    layers of these letters; by default each has one.

    Raises InputError if so many ranks do not take the stages (rank r those numbered r, r + ranks, and on).
    """
    if "layout" in found:
        texts = read_layout(found["layout"])
        require_ends(texts, ranks)
        layers, modules = ([text.count(letter) for text in texts] for letter in (DECODER, PREDICTION))
    else:
        layers, modules = _read_pattern(found["pattern"], letters)
    if len(layers) % ranks:
        raise InputError(f"{len(layers)} stages: expected as many on each of pp = {ranks} ranks")
    return layers, modules


def uneven_layers(layers: int, ranks: int, chunks: int, ends: Mapping[str, int]) -> list[int]:
    """The layers of each stage with so many on the `first` and `last` rank, or where an embedding or a loss (1 each)
    counts as a layer (`get_num_layers_to_build`). Raises InputError if Megatron has no such division."""
    of_rank = {rank: ends[name] for name, rank in (("first", 0), ("last", ranks - 1)) if name in ends}
    beside = {name: ends[name] for name in ("embedding", "loss") if ends.get(name)}
    rest, others = layers + sum(beside.values()) - sum(of_rank.values()), ranks - len(of_rank)
    each = rest // others if others else 0
    counts = [of_rank.get(rank, each) for rank in range(ranks)]
    wrong = ranks < 2 or (of_rank and beside) or each < 0 or each * others != rest or any(n % chunks for n in counts)
    stages = [n // chunks for n in counts * chunks]
    stages[0], stages[-1] = stages[0] - beside.get("embedding", 0), stages[-1] - beside.get("loss", 0)
    if wrong or min(stages) < 0:
        said = ", ".join(f"{name} = {number}" for name, number in ends.items())
        raise InputError(
            f"{said}: expected numbers that leave the others of {ranks} ranks equal shares of {layers} layers, and all "
            f"ranks multiples of {chunks} (chunks of a rank)"
        )
    return stages


def read_layout(text: str) -> list[str]:
    """The letters of each stage of a `--pipeline-model-parallel-layout`, such as `Et*2|(tt|)*3mL`, as Megatron-core
    repeats them: first what is in parentheses, then single letters; commas say nothing.

    Raises InputError if a letter is none of Megatron's.
    """
    letters = text.replace(",", "")
    if any(len(times) > 4 for times in re.findall(r"\*(\d+)", letters)):
        raise InputError(f"layout = {text!r}: repetitions of at most 4 digits were expected")
    for repetition in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        letters = re.sub(repetition, lambda found: found[1] * int(found[2]), letters)
    if wrong := re.search(r"[^EtmL|]", letters):
        nested = ", no parentheses alone or in others" if wrong[0] in "()" else ""
        raise InputError(f"layout = {text!r}: has {wrong[0]!r}; E, t, m, L, |, x*n and (...)*n were expected{nested}")
    return letters.split("|")


def require_ends(stages: Sequence[str], ranks: int) -> None:
    """Raises InputError unless embedding, layers, modules and loss are in the order in which Megatron has them."""
    letters, what = "".join(stages), f"layout {'|'.join(stages)!r}"
    if not re.fullmatch("Et*m*L", letters) or not stages[0] or not stages[-1]:
        raise InputError(f"{what}: one E in the first stage, then all t, then all m, and one L in the last stage")
    having = [s for s, stage in enumerate(stages) if PREDICTION in stage]
    if len(having) > 1 or any(s < len(stages) - ranks for s in having):
        raise InputError(f"{what}: all m in one stage, the last of its rank, were expected; stages {having} have some")


def _read_pattern(text: str, letters: Sequence[str]) -> tuple[list[int], list[int]]:
    main, *predicting = text.split("/")
    own, layers = list(letters or main.replace("|", "")), list[int]()
    for s, stage in enumerate(main.split("|")):
        left, before = stage, len(own)
        while own and left.startswith(own[0]):
            left = left.removeprefix(own.pop(0))
        if left:
            raise InputError(f"pattern = {text!r}: stage {s} has {left!r}, the model {''.join(own) or 'no more'!r}")
        layers.append(before - len(own))
    return layers, [*[0] * (len(layers) - 1), len(predicting)]


def order(ranks: int, chunks: int, groups: Sequence[Sequence[int]]) -> list[list[Op]]:
    """Megatron's order of ops, in which each group of micro-batches, the largest first, passes each chunk of a rank in
    a row.

    With one chunk rank r begins with p - r - 1 forwards, with v of them with 2(p - r - 1) + (v - 1)·group; then come
    one forward and one backward in turn (`get_pp_rank_microbatches`, `get_schedule_table`).
    """
    table, programs = visits(groups, range(chunks)), []
    for r in range(ranks):
        forwards = [Op(Kind.F, chunk * ranks + r, j) for chunk, j in table]
        backwards = [Op(Kind.BW, (chunks - 1 - chunk) * ranks + r, j) for chunk, j in table]
        last = ranks - r - 1
        warm_up = min(len(table), last if chunks == 1 else 2 * last + (chunks - 1) * len(groups[0]))
        in_turn = chain.from_iterable(zip_longest(forwards[warm_up:], backwards))
        programs.append([*forwards[:warm_up], *(op for op in in_turn if op is not None)])
    return programs


def combined_order(ranks: int, chunks: int, groups: Sequence[Sequence[int]]) -> list[list[Op | Pair]]:
    """That of `overlap_moe_expert_parallel_comm`: rank r begins with 2(p - r - 1) + (v - 1)·group + 1 forwards, then
    come pairs of a forward and a backward, then the backwards left."""
    lists: list[list[Op | Pair]] = []
    for r, ops in enumerate(order(ranks, chunks, groups)):
        forwards, backwards = ([op for op in ops if op.kind is kind] for kind in (Kind.F, Kind.BW))
        alone = min(len(forwards), 2 * (ranks - r - 1) + (chunks - 1) * len(groups[0]) + 1)
        pairs = map(Pair, forwards[alone:], backwards)
        lists.append([*forwards[:alone], *pairs, *backwards[len(forwards) - alone :]])
    return lists


def in_groups(microbatches: int, size: int) -> list[range]:
    """The micro-batches in groups of this size; the last one may have fewer."""
    return [range(start, min(start + size, microbatches)) for start in range(0, microbatches, size)]


def visits(groups: Iterable[Sequence[int]], chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Interleave: group by group, chunk by chunk, the group's micro-batches. Returns chunk and micro-batch."""
    return [(c, j) for group in groups for c in chunks for j in group]


def _chunks(schedule: Schedule) -> int:
    return len(schedule.problem.stages) // len(schedule.problem.devices)


def _group(schedule: Schedule) -> int:
    """How many micro-batches pass the first stage before its device turns to another one, if Megatron takes groups of
    this size: not fewer micro-batches than ranks, nor a smaller last group. Else `least_group`."""
    ranks, m = len(schedule.problem.devices), schedule.problem.microbatches
    first = schedule.programs[schedule.problem.stages[0].device]
    passed = sum(1 for _ in takewhile(lambda item: isinstance(item, Op) and item.stage == 0, first))
    least = least_group(ranks, _chunks(schedule), m)
    return passed if _chunks(schedule) > 1 and passed in _groups(ranks, m) else least


def least_group(ranks: int, chunks: int, microbatches: int) -> int:
    """The fewest micro-batches that pass a chunk in a row. Raises InputError if Megatron takes more of them only."""
    sizes = _groups(ranks, microbatches) if chunks > 1 else [1]
    if not sizes:
        raise InputError(
            f"microbatches = {microbatches}: with {chunks} chunks a rank Megatron needs at least {ranks}; {OURS}"
        )
    return min(sizes)


def _groups(ranks: int, microbatches: int) -> list[int]:
    sizes = range(ranks, microbatches + 1)
    return [size for size in sizes if microbatches % size == 0 or microbatches % size >= ranks]


def _difference(
    schedule: Schedule, expected_order: Sequence[Sequence[Op | Pair]]
) -> tuple[int, Op | Pair | None, Op | Pair | None] | None:
    """Where the schedule first differs from Megatron's order: the device, what stands there, and what is expected. None
    if it is that order."""
    differing = [
        (place, d, item, expected)
        for d, (program, ops) in enumerate(zip(schedule.programs, expected_order, strict=True))
        for place, (item, expected) in enumerate(zip_longest(program, ops))
        if item != expected
    ]
    return min(differing, key=lambda each: each[0])[1:] if differing else None
