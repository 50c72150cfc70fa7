"""PyTorch's pipelining: one row of actions a rank, separated by commas, as `_PipelineScheduleRuntime._load_csv` reads
them (torch.distributed.pipelining, torch 2.11, 2.13 and 2.15).

Their `I` is our `B`, their `B` our `BW`, and a pair is written `(0F3;4B1)OVERLAP_F_B`. With messages a row also has the
actions SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, REDUCE_GRAD and RESHARD; torch 2.15 also wants WAIT_SEND_F, WAIT_SEND_B
and WAIT_REDUCE_GRAD, which torch 2.13 does not know.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from math import inf

import numpy as np

from optpipe.errors import InputError
from optpipe.formats.order import (
    OFFLOAD,
    WAYS,
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

LETTER = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
BY_LETTER = {letter: kind for kind, letter in LETTER.items()}
WEIGHTS = (Kind.W, Kind.BW)

ACTION = re.compile(r"(\d{1,9})([FIBW])(\d{1,9})")
_OTHER = re.compile(r"\d+(?:(?:SEND|RECV|WAIT_SEND)_[FB]\d+|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def schedule_placing(chunks: int, shape: str) -> str:
    """The schedule of PyTorch that has so many chunks a device, looped or in a v: it places the stages of rows."""
    if chunks == 1:
        return "1F1B"
    return "ZBVZeroBubble" if shape == "v" else "Interleaved1F1B"


def rows(
    schedule: Schedule, messages: bool, waits: bool = False, gather_ms: float = inf, offloads: bool = False
) -> list[list[str]]:
    """The actions of each device, as texts. Whether the schedule fits the memory does not matter.

    All devices follow one order of all ops (`in_one_order`). A message is sent behind its op, and its receive posted at
    that place of the order. A rank waits for what it has sent behind its first op that this order has behind the op
    that the message is for: by the predicted times it has arrived then.

    Raises InputError if the rows cannot express what the schedule does, and names the op; ScheduleError if the schedule
    cannot run.

    Parameters
    ----------
    messages
        Also write sends and receives, UNSHARD, REDUCE_GRAD and RESHARD; torch then runs the rows as they are
        (`compute_comms`). Without them it places its own, as if all ops took the same time (`compute_only`).
    waits
        With messages, also write where a rank waits for what it has sent, and for its reductions.
    gather_ms
        How long it takes to gather the parameters of a stage in FSDP. Gathers end, one at a time on a device, when
        their stage begins, and a stage is sharded again where it could be gathered once more in time. By default all
        are gathered first and stay until their last gradients.
    offloads
        Let O, D and R stand among them in our own text form, such as `0O3.1`, for a runtime that knows them.
    """
    problem = schedule.problem
    require_stages(problem)
    for d, program in enumerate(schedule.programs):
        if (unsaid := ~of_kinds(program.table, *LETTER, *(OFFLOAD if offloads else ()))).any():
            op = program.ops()[int(np.flatnonzero(unsaid)[0])]
            raise InputError(
                f"{op} in the program of device {d}: PyTorch's rows say F, B, W and BW, they have no action for "
                f"{op.kind.name}{hint(op)}"
            )
    require_runnable(schedule)
    schedule = numbered(schedule)
    devices = [stage.device for stage in problem.stages]
    texts, shards = _gathers(schedule, gather_ms) if messages else ([[] for _ in schedule.programs], {})
    ops_of = [program.ops() if messages else () for program in schedule.programs]
    last = {op for ops in ops_of for op in {op.stage: op for op in ops if op.kind in WEIGHTS}.values()}
    sent: dict[str, tuple[int, str]] = {}  # by receive: who waits for it, and its wait
    arrived: list[list[str]] = [[] for _ in texts]
    for device, item in in_one_order(schedule):
        ops = item if isinstance(item, Pair) else (item,)
        cells = texts[device]
        cells += [_text(item), *arrived[device]]
        arrived[device].clear()
        for op in ops:
            received = f"{op.stage}RECV_{WAYS.get(op.kind)}{op.microbatch}"
            if got := sent.pop(received, None):
                arrived[got[0]].append(got[1])
        for op in ops if messages else ():
            to = receiver(op, len(devices))
            if to is not None and devices[to] != device:
                way, j = WAYS[op.kind], op.microbatch
                send, receive = f"{op.stage}SEND_{way}{j}", f"{to}RECV_{way}{j}"
                cells.append(send)
                texts[devices[to]].append(receive)
                if waits:
                    sent[receive] = device, send.replace("SEND", "WAIT_SEND")
        for op in ops:
            if op in last:
                cells += [f"{op.stage}REDUCE_GRAD", *[f"{op.stage}WAIT_REDUCE_GRAD"] * waits, f"{op.stage}RESHARD"]
        cells += sorted(shards.get(item, ()), key=lambda cell: cell.endswith("UNSHARD"))  # first what makes room
    return [cells + left for cells, left in zip(texts, arrived, strict=True)]


def _gathers(schedule: Schedule, ms: float) -> tuple[list[list[str]], dict[Op | Pair, list[str]]]:
    """Which stages each device gathers first, and what it gathers, in so long, or shards again behind an op or a pair.

    From the last use on, so that each gather ends before the next begins.
    """
    rows, start_ms = schedule.compiled.rows, schedule.timeline.start
    first: list[list[str]] = [[] for _ in schedule.programs]
    behind = defaultdict[Op | Pair, list[str]](list)
    for device, at_first in enumerate(first):
        alone = np.arange(len(rows))[rows.of_device(device)]
        alone = alone[~(rows.transfer | rows.second)[alone]]
        items, starts = [rows.item(row) for row in alone.tolist()], start_ms[alone].tolist()
        last: dict[int, int] = {}  # by stage the item that uses it before
        uses = []
        for i, item in enumerate(items):
            stages = {op.stage for op in (item if isinstance(item, Pair) else (item,))}
            uses += [(i, s, last.get(s)) for s in sorted(stages)]
            last |= dict.fromkeys(stages, i)
        free = inf
        for i, s, previous in reversed(uses):
            begin = min(starts[i], free) - ms
            place = max(0, min(i, bisect_right(starts, begin) - 1))
            if previous is None or place > previous + 1:
                free = begin
                (behind[items[place - 1]] if place else at_first).insert(0, f"{s}UNSHARD")
                if previous is not None:
                    behind[items[previous]].insert(0, f"{s}RESHARD")
    return first, behind


require_stages = partial(require_one_route, where="PyTorch's pipelining")


def numbered(schedule: Schedule) -> Schedule:
    """The schedule with its micro-batches numbered as PyTorch numbers losses: the j-th that the last stage computes has
    number j. Raises InputError if micro-batches that differ would change names."""
    return numbered_as_computed(schedule, len(schedule.problem.stages) - 1, "PyTorch finds the loss of")


def read(text: str, problem: Problem, what: str) -> Schedule:
    """The schedule of a file with or without messages. They are left out: here they follow from the ops.

    Raises InputError that names the line, the action, and what would be right.
    """
    lines = text.rstrip().splitlines()
    if len(lines) != len(problem.devices):
        raise InputError(
            f"{what}: {len(lines)} rows, the problem has {len(problem.devices)} devices: one row is expected for each"
        )
    programs = [Program.from_items(_items(line, f"{what}, line {n}")) for n, line in enumerate(lines, 1)]
    for n, program in enumerate(programs, 1):
        ops = set(program.ops())
        if older := [op for op in program.ops() if op.kind is Kind.W and op._replace(kind=Kind.BW) in ops]:
            s, j = older[0].stage, older[0].microbatch
            raise InputError(
                f"{what}, line {n}: {s}W{j} beside {s}B{j}, which is the whole backward: before PyTorch 2.5, B was the "
                f"gradient of the inputs, which is I now: write {s}I{j}"
            )
    return Schedule(problem, tuple(programs))


def _text(item: Op | Pair) -> str:
    if isinstance(item, Pair):
        return f"({_text(item.first)};{_text(item.second)})OVERLAP_F_B"
    return f"{item.stage}{LETTER[item.kind]}{item.microbatch}" if item.kind in LETTER else str(item)


def _items(line: str, what: str) -> Iterator[Op | Pair]:
    """The ops and pairs of a row; empty cells are idle time."""
    for cell in map(str.strip, line.split(",")):
        if pair := _PAIR.fullmatch(cell):
            yield Pair(*(_op(part.strip(), what) for part in pair.groups()))
        elif cell and not _OTHER.fullmatch(cell):
            yield _op(cell, what)


def _op(cell: str, what: str) -> Op:
    match = ACTION.fullmatch(cell)
    if match is None:
        raise InputError(
            f"{what}: {cell[:40]!r} is no action of PyTorch's pipelining: stage, one of F, I, B, W, micro-batch are "
            "expected, such as 0F3, or (0F3;4B1)OVERLAP_F_B, 0SEND_F3, 0UNSHARD"
        )
    stage, letter, microbatch = match.groups()
    return Op(BY_LETTER[letter], int(stage), int(microbatch))
