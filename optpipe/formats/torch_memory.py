"""What a schedule holds in PyTorch's own pipelining (torch.distributed.pipelining of torch 2.11, 2.13 and 2.15), and
the schedule with whole backwards, where that must not split them.

Its I frees nothing: until W the activation stays, and beside it the gradients at the outputs of all ops with
parameters. On the first stage I does nothing and W all. Measured on CPUs, (activation + gradients) / activation: MLPs
with GELU 1.53, with ReLU 2.00, GPT-2 1.38, Llama 1.41 to 1.58, encoder layers with ReLU 1.91.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil

from optpipe.formats import torch_csv
from optpipe.model.arrays import Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, of_kinds
from optpipe.model.records import StageCosts, each_microbatch
from optpipe.schedule import Schedule

FSDP_STAGES = 3  # of a rank that torch gathers at a time where it places gathers, and one more for a pair


def as_torch_holds(problem: Problem, factor: float | None = None) -> Problem:
    """The problem with what PyTorch's own pipelining holds from B until W: the activation and gradients; on whatever is
    the first stage the activation (`Problem.costs`). Its schedules are schedules of the problem, with the same times.

    What was computed or measured for it already (`stack`) is taken as it is.

    Parameters
    ----------
    factor
        What a stage holds from B until W over its activation, if the model's is known. By default 2, the most that was
        measured without recomputation, and at least the activation and what OptPipe's runtime holds, which has what is
        computed again. `Pipeline.profile(stack="torch")` measures it.
    """

    def held(activation: int, saved: int) -> int:
        return ceil(factor * activation) if factor else activation + max(activation, saved)

    def costs(each: StageCosts) -> StageCosts:
        saved = each_microbatch(held, each.activation_bytes, each.saved_for_weight_bytes)
        return each.model_copy(update={"saved_for_weight_bytes": saved})

    if problem.stack == "torch":
        return problem
    layers = problem.layers and tuple(map(costs, problem.layers))
    return problem.replace(stages=tuple(map(costs, problem.stages)), layers=layers, stack="torch")


def in_torch(
    schedule: Schedule, form: str, rows: Sequence[Sequence[str]], message_bytes: int | None, gathered_bytes: int | None
) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule on the problem of what PyTorch holds, and a sentence for each thing that a user must know.

    Up to torch 2.13 the buffers of all messages that a device receives stay all the time. Since 2.15, by rows for it,
    each is there from its receive to its micro-batch's last backward on the stage; what the last stage gets to the end,
    by its outputs and losses. Where the size of a message or of a gathered stage is given, budgets are so much smaller.
    """
    problem, notes, is_new = as_torch_holds(schedule.problem), [], form == "torch-comms-waits"
    own = [len(problem.stages_on(d)) for d in range(len(rows))]
    if not is_new:
        ranks = [stage.device for stage in problem.stages]
        ends = [rank for pair in pairwise(ranks) if pair[0] != pair[1] for rank in pair]
        received = [problem.microbatches * ends.count(d) for d in range(len(problem.devices))]
    else:
        received = [_most_received(row, str(len(problem.stages) - 1)) for row in rows]
    devices = []
    for each, row, stages, messages in zip(problem.devices, rows, own, received, strict=True):
        changes = (cell.endswith("UNSHARD") - cell.endswith("RESHARD") for cell in row)
        gathered = min(stages, FSDP_STAGES + 1) if form == "torch-csv" else max(accumulate(changes))
        left = each.activation_budget_bytes - messages * (message_bytes or 0) - gathered * (gathered_bytes or 0)
        devices.append(each.model_copy(update={"activation_budget_bytes": max(0, left)}))
    problem = problem.replace(devices=devices)
    if message_bytes is None and (most := max(received)):
        buffers = f"up to {most} messages at once" if is_new else f"all {most} messages"
        notes.append(
            f"{'in torch 2.15' if is_new else 'up to torch 2.13'} device {received.index(most)} has buffers for "
            f"{buffers} that it receives, which are not counted: message_bytes (--message-bytes) counts them"
        )
    if form == "torch-csv" and max(own) > FSDP_STAGES:
        notes.append(
            f"torch gathers {FSDP_STAGES} stages of a rank in FSDP at a time, and others anew: in torch 2.15 "
            f"max_active_stages={max(own)} keeps all"
        )
    if is_new:
        notes.append("max_outstanding_sends and unshard_lookahead must be torch 2.15's defaults, None and 'full'")
    if any(of_kinds(program.table, Kind.B).any() for program in schedule.programs):
        notes.append(
            "backwards are split, which gives wrong gradients in DDP and where FSDP has parts of a stage: "
            "whole_backwards (--whole-backwards) is for these"
        )
    return schedule.on(problem), tuple(notes)


def _most_received(row: Sequence[str], last: str) -> int:
    """The most buffers at one time: torch keeps what F and I have used until W, and the `last` stage's inputs."""
    held, most = set[str](), 0
    for cell in row:
        if "RECV" in cell:
            held.add(cell)
            most = max(most, len(held))
        for stage, letter, microbatch in torch_csv.ACTION.findall(cell):
            if letter in "BW":
                held -= {f"{stage}RECV_{way}{microbatch}" for way in ("B" if stage == last else "FB")}
    return most


def whole_backwards(schedule: Schedule) -> Schedule:
    """The schedule with each B and its W as one BW in the place of the B. It runs if the schedule does, and holds no
    more."""

    def whole(table: Table) -> Table:
        table, weights = table.copy(), of_kinds(table, Kind.W)
        table[of_kinds(table, Kind.B), KIND] = Kind.BW
        table[:-1][weights[1:], JOINED] = 0  # what made a pair with a W is alone
        return table[~weights]

    return schedule.with_tables(whole)
