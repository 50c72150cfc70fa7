"""Iterations by 1F1B: predicted from an estimate, and measured ones, which a table has."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.evaluate.jit import LazyJit
from optpipe.model.arrays import Floats
from optpipe.transformer.estimate import Estimate, estimate
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.records import Parallelism, Run, Transformer

# The columns of a table of measured iterations, as VIA-Research/vTrain names them (MICRO 2024); others are left out.
COLUMNS = {
    "gpus": "# GPUs",
    "batch": "global batch",
    "size": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "sequence": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}
MEASURED = "iteration time (ms)"
GPT_VOCABULARY = 50257
VOCABULARY_MULTIPLE = 128  # Megatron-LM makes each rank's part of the vocabulary a multiple of it
# What vTrain's rows have in no column: Megatron-LM of 2022 with full recomputation, GPT's layers.
MEGATRON = {"attention": "unfused", "recompute": "full"}


class Iteration(NamedTuple):
    """A measured iteration: what ran, and its time in ms."""

    shape: Transformer
    parallelism: Parallelism
    run: Run
    measured_ms: float

    def on(self, gpu: Gpu) -> Estimate:
        """What a GPU would take. Raises InputError if the parallelism does not divide the model."""
        return estimate(self.shape, self.parallelism, gpu, self.run)


def iteration_ms(estimated: Estimate) -> float:
    """Predict an iteration, in ms: 1F1B, then the gradients' reduction and the optimizer's step.

    Whether the model fits into the GPUs' memory does not matter. Raises InputError if a device has several stages: 1F1B
    has one.
    """
    if estimated.parallelism.chunks > 1:
        raise InputError(f"chunks = {estimated.parallelism.chunks}: 1F1B has one stage a device")
    clock, pieces = estimated.clock, estimated.pieces
    forward = {piece: clock.forward(piece).ms for piece in set(pieces)}
    backward = {piece: clock.backward_input(piece).ms + clock.backward_weight(piece).ms for piece in forward}
    stages = [[pieces[i] for i in stage] for stage in estimated.stages]
    makespan_ms = one_f_one_b_ms(
        np.array([sum(forward[piece] for piece in stage) for stage in stages]),
        np.array([sum(backward[piece] for piece in stage) for stage in stages]),
        estimated.message_ms,
        estimated.run.microbatches,
    )
    return makespan_ms + estimated.after_ms


def one_f_one_b_ms(forward_ms: Floats, backward_ms: Floats, message_ms: float, microbatches: int) -> float:
    """The makespan of 1F1B, by stages' times of a micro-batch: what `generate("1f1b", ...)` takes, without a problem.

    Narayanan et al. 2019, "PipeDream", figure 8.
    """
    work = 2 * len(forward_ms) * microbatches
    return float(_makespan(work, forward_ms, backward_ms, message_ms, microbatches))


def _simulate(forward: Floats, backward: Floats, message: float, m: int) -> float:
    """In the order of a clock by which each op takes a unit: what an op waits for has then always run."""
    p = len(forward)
    f_end, b_end, free = np.zeros((p, m)), np.zeros((p, m)), np.zeros(p)
    for tick in range(2 * (m + p)):
        for s in range(p):
            j, is_forward = -1, True
            if 0 <= tick - s < min(m, p - s):  # warm-up
                j = tick - s
            elif (tick - s) % 2 == 0 and p - s <= (tick - s) // 2 < m:
                j = (tick - s) // 2
            elif (tick + s + 1) % 2 == 0 and 0 <= (tick + s + 1) // 2 - p < m:
                j, is_forward = (tick + s + 1) // 2 - p, False
            if j >= 0 and is_forward:
                free[s] = max(free[s], f_end[s - 1, j] + message if s > 0 else 0.0) + forward[s]
                f_end[s, j] = free[s]
            elif j >= 0:
                free[s] = max(free[s], b_end[s + 1, j] + message if s < p - 1 else 0.0) + backward[s]
                b_end[s, j] = free[s]
    return float(free.max())


_makespan = LazyJit(_simulate)


def read_iterations(text: str, what: str = "rows", vocabulary: int = GPT_VOCABULARY) -> list[Iteration]:
    """Read a table of measured iterations: CSV with the names of `COLUMNS` and `MEASURED` in its first line.

    Each row is a GPT of Megatron-LM, with learned positions, one matrix for embedding and head, dropout, unfused
    attention, full recomputation, gradients of 32 bits and no sequence parallelism.

    Parameters
    ----------
    text
        The CSV.
    what
        Its name in errors.
    vocabulary
        Its size, before Megatron-LM makes each rank's part a multiple of 128.

    Raises
    ------
    InputError
        If a column is missing, or a row has no such number, or its numbers do not belong together.
    """
    reader = csv.DictReader(StringIO(text, newline=None), skipinitialspace=True)
    try:
        names = reader.fieldnames or ()
        for name in (*COLUMNS.values(), MEASURED):
            if names.count(name) != 1:
                wrong = "is missing" if name not in names else "is there more than once"
                raise InputError(
                    f"{what}: the column {name!r} {wrong}; expected {', '.join(COLUMNS.values())}, {MEASURED}"
                )
        rows = [_iteration(row, f"{what}, line {reader.line_num}", vocabulary) for row in reader]
    except csv.Error as error:
        raise InputError(f"{what}: expected a table as CSV: {error}") from None
    if not rows:
        raise InputError(f"{what}: no rows; expected one measured iteration a line")
    return rows


def _iteration(row: Mapping[str, Any], what: str, vocabulary: int) -> Iteration:
    number = dict[str, int]()
    for name, column in COLUMNS.items():
        value = _positive(row, column, what)
        if value != int(value):
            raise InputError(f"{what}: {column} = {row[column]!r}: expected a whole number")
        number[name] = int(value)
    tp, dp, pp, size = (number[name] for name in ("tp", "dp", "pp", "size"))
    if tp * dp * pp != number["gpus"]:
        raise InputError(f"{what}: {COLUMNS['gpus']} = {number['gpus']}: expected {tp} · {dp} · {pp} = {tp * dp * pp}")
    if number["batch"] % (dp * size):
        raise InputError(f"{what}: {COLUMNS['batch']} = {number['batch']}: expected a multiple of {dp} · {size}")
    for name, multiple in (("heads", tp), ("layers", pp)):
        if number[name] % multiple:
            raise InputError(f"{what}: {COLUMNS[name]} = {number[name]}: expected a multiple of {multiple}")
    measured = _positive(row, MEASURED, what)
    shape = {name: number[name] for name in ("layers", "hidden", "heads", "sequence")}
    multiple = VOCABULARY_MULTIPLE * tp
    shape |= {"ffn": 4 * number["hidden"], "vocabulary": ceil(vocabulary / multiple) * multiple}
    shape |= {"positions": number["sequence"], "tied": True, "dropout": True}
    division = {"tp": tp, "dp": dp, "pp": pp, "sequence_parallel": False}
    run = {"microbatches": number["batch"] // (dp * size), "microbatch_size": size} | MEGATRON
    return Iteration(
        Transformer.from_dict(shape, what), Parallelism.from_dict(division, what), Run.from_dict(run, what), measured
    )


def _positive(row: Mapping[str, Any], column: str, what: str) -> float:
    try:
        number = float(row[column] or "")
    except ValueError:
        number = 0.0
    if not 0 < number < 1e12:  # not a number is in no range
        raise InputError(f"{what}: {column} = {row[column]!r}: expected a number above 0")
    return number


class Errors(NamedTuple):
    """How good predictions of iterations are.

    Attributes
    ----------
    mean, median
        Of the errors, predicted over measured less 1: the mean of their sizes, and their median.
    ordered
        Of pairs of plans that differ by more than 5 % the share that is ordered right. Plans train the same model with
        the same batch on the same number of GPUs.
    pairs
        How many pairs there are.
    regret
        How much longer the plan of the shortest prediction takes than the shortest plan, mean over such questions.
    most_regret
        The largest of these.
    """

    mean: float
    median: float
    ordered: float
    pairs: int
    regret: float
    most_regret: float


DIFFERENT = 0.05  # by how much measured iterations of a pair must differ


def question(row: Iteration) -> tuple[int, ...]:
    """What plans have in common that answer one question: the model, the batch, and the number of GPUs."""
    shape, run = row.shape, row.run
    batch = row.parallelism.dp * run.microbatches * run.microbatch_size
    return shape.layers, shape.hidden, shape.heads, shape.sequence or 0, batch, row.parallelism.gpus


def errors(rows: Sequence[Iteration], predicted_ms: Sequence[float]) -> Errors:
    """Compare predictions with what was measured."""
    ratio = np.array(predicted_ms) / [row.measured_ms for row in rows] - 1
    questions: dict[Any, list[tuple[float, float]]] = {}
    for row, predicted in zip(rows, predicted_ms, strict=True):
        questions.setdefault(question(row), []).append((predicted, row.measured_ms))
    right = [
        (predicted < other) == (measured < other_measured)
        for plans in questions.values()
        for n, (predicted, measured) in enumerate(plans)
        for other, other_measured in plans[:n]
        if max(measured, other_measured) > (1 + DIFFERENT) * min(measured, other_measured)
    ]
    regrets = [min(plans)[1] / min(ms for _, ms in plans) - 1 for plans in questions.values() if len(plans) > 1]
    return Errors(
        float(abs(ratio).mean()),
        float(np.median(ratio)),
        float(np.mean(right)) if right else 1.0,
        len(right),
        float(np.mean(regrets)) if regrets else 0.0,
        max(regrets, default=0.0),
    )
