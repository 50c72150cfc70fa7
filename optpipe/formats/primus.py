"""AMD Primus' pipeline launcher: a table of nodes for each rank, with all sends and receives, as JSON.

Read from its sources (AMD-AGI/Primus, `primus/core/pipeline_parallel` and `primus/backends/megatron/core/
pipeline_parallel/primuspipe`, August 2026). F, B, W and BW are our letters. Their forward itself starts to offload,
their O waits for that copy and frees, which is our D, and their R starts the reload.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from optpipe.errors import InputError
from optpipe.formats.order import (
    WAYS,
    forwards_of,
    hint,
    in_one_order,
    numbered_as_computed,
    receiver,
    require_one_route,
    require_runnable,
)
from optpipe.model.ops import Kind, Op, Pair
from optpipe.model.problem import Problem
from optpipe.model.program import Program, of_kinds
from optpipe.schedule import Schedule

FORMAT = "optpipe.primus/1"
NAMES = {Kind.F: "F", Kind.B: "B", Kind.W: "W", Kind.BW: "BW", Kind.D: "O", Kind.R: "R"}
Node = list[Any]  # func_type, mini_batch, chunk, args


def write(schedule: Schedule) -> str:
    """The table. Raises InputError if the launcher has no node for an op, ScheduleError if the schedule cannot run."""
    chunks = Chunks(schedule.problem)
    require_runnable(schedule)
    schedule = numbered(schedule)
    document = {
        "format": FORMAT,
        "pp_size": chunks.ranks,
        "vpp_size": chunks.count,
        "micro_batches": schedule.problem.microbatches,
        "first_pp_stage_rank": chunks.rank[0],
        "last_pp_stage_rank": chunks.rank[-1],
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in document.items()]
    directions = [[{"F": chunks.direction(s, 1), "B": chunks.direction(s, -1)} for s in on] for on in chunks.on]
    lines += [f'"directions": [{_rows(directions)}]', f'"table": [{_rows(_table(schedule, chunks))}]']
    return "{\n" + ",\n".join(lines) + "\n}\n"


def numbered(schedule: Schedule) -> Schedule:
    """The schedule with its micro-batches numbered as each stage takes them from the data: the next one at each
    forward. Raises InputError if two stages differ, or micro-batches that differ would change names."""
    schedule = numbered_as_computed(schedule, 0, "Primus takes the data of")
    for s in range(1, len(schedule.problem.stages)):
        order = forwards_of(schedule, s)
        if (later := np.flatnonzero(np.diff(order) < 0)).size:
            first, second = order[later[0] : later[0] + 2].tolist()
            raise InputError(
                f"stage {s} computes micro-batch {first} before {second}, stage 0 after it: in Primus each forward "
                "takes the next batch of the data, so all stages need one order"
            )
    return schedule


def require_order(schedule: Schedule) -> None:
    """Raises InputError unless all stages have one order, and several looped ones of a rank whole backwards."""
    numbered(schedule)
    ranks, p = [stage.device for stage in schedule.problem.stages], len(schedule.problem.devices)
    if ranks[:p] == ranks[p : 2 * p] and any(of_kinds(each.table, Kind.B).any() for each in schedule.programs):
        raise InputError("Primus' 1f1b-interleaved, which has several looped stages a rank, splits no backward")


def as_run(schedule: Schedule) -> Schedule:
    """The schedule as the launcher runs it: offloads begin with the end of their forwards."""
    programs = []
    for program in schedule.programs:
        leaving = {(op.stage, op.microbatch): op for op in program.ops() if op.kind == Kind.O}
        items: list[Op | Pair] = []
        for item in program:
            if not isinstance(item, Op) or item.kind != Kind.O:
                items.append(item)
            if isinstance(item, Op) and item.kind == Kind.F and (item.stage, item.microbatch) in leaving:
                items.append(leaving[item.stage, item.microbatch])
        programs.append(Program.from_items(items))
    return replace(schedule, programs=tuple(programs))


class Chunks:
    """Stages as Primus numbers them: by rank and chunk. Raises InputError if it has no such stages."""

    def __init__(self, problem: Problem) -> None:
        require_one_route(problem, "Primus")
        on = [problem.stages_on(d) for d in range(len(problem.devices))]
        self.ranks, self.count = len(on), len(on[0])
        self.rank = [stage.device for stage in problem.stages]
        self.chunk = [on[rank].index(s) for s, rank in enumerate(self.rank)]
        self.on = on
        if other := [d for d, stages in enumerate(on) if len(stages) != self.count]:
            raise InputError(
                f"device {other[0]} has {len(on[other[0]])} stages, device 0 has {self.count}: in Primus all ranks "
                "have as many"
            )

    def direction(self, s: int, step: int) -> list[Any]:
        """As in `direction_map`: prev rank, next rank, recv_from_chunk, send_to_chunk."""
        ends = range(len(self.rank))
        return [of[s + to] if s + to in ends else None for of in (self.rank, self.chunk) for to in (-step, step)]


def _table(schedule: Schedule, chunks: Chunks) -> list[list[Node]]:
    """A message's two nodes stand at one place of the order that all ranks follow, behind its op, and have the number
    of the message as `time_step`: what differs in it the launcher does not send as one batch, whose order would be its
    own."""
    table: list[list[Node]] = [[] for _ in schedule.programs]
    messages = 0
    leaving = {(op.stage, op.microbatch) for program in schedule.programs for op in program.ops() if op.kind == Kind.O}
    for rank, op in in_one_order(schedule):
        if isinstance(op, Pair) or op.kind not in (*NAMES, Kind.O):
            only = "Primus has nodes for F, B, W, BW, O, D and R, each alone"
            raise InputError(f"{op} in the program of device {rank}: {only}")
        parts = schedule.problem.stages[op.stage].offload_parts
        if op.kind in (Kind.O, Kind.D, Kind.R) and parts > 1:
            only = f"Primus offloads in one part, stage {op.stage} has offload_parts = {parts}"
            raise InputError(f"{op} in the program of device {rank}: {only}{hint(op)}")
        if op.kind == Kind.O:
            continue  # begins with the end of its F
        chunk, to = chunks.chunk[op.stage], receiver(op, len(chunks.rank))
        offloads = op.kind == Kind.F and (op.stage, op.microbatch) in leaving
        table[rank].append([NAMES[op.kind], op.microbatch, chunk, {"should_offload": True} if offloads else None])
        if to is not None:
            way, ends = WAYS[op.kind], {"from_pp_rank": rank, "to_pp_rank": chunks.rank[to], "time_step": messages}
            there = chunks.chunk[to]
            table[rank].append([f"S{way}", op.microbatch, chunk, ends | {"send_to_chunk": there}])
            table[chunks.rank[to]].append([f"R{way}", op.microbatch, there, ends | {"recv_from_chunk": chunk}])
            messages += 1
    return table


def _rows(rows: list[list[Any]]) -> str:
    """One line a rank."""
    return ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
