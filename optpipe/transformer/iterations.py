"""Iterations by 1F1B, plain or interleaved: predicted from an estimate, and measured ones, which a table has."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.evaluate.jit import LazyJit
from optpipe.model.arrays import Floats, Ints
from optpipe.model.records import one_for_all
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
    """A measured iteration: what ran, its time in ms, and on which GPU, if its table has several."""

    shape: Transformer
    parallelism: Parallelism
    run: Run
    measured_ms: float
    gpu: str = ""

    def on(self, gpu: Gpu) -> Estimate:
        """What a GPU would take. Raises InputError if the parallelism does not divide the model."""
        return estimate(self.shape, self.parallelism, gpu, self.run)


class Simulated(NamedTuple):
    """An iteration: its length in ms, and the most bytes of activations that each device keeps."""

    ms: float
    activation_bytes: list[float]


def iteration_ms(estimated: Estimate) -> float:
    """Predict an iteration, in ms, as `simulate` does."""
    return simulate(estimated).ms


def simulate(estimated: Estimate, away: Sequence[float] = ()) -> Simulated:
    """Predict an iteration: 1F1B, interleaved with chunks, then the gradients' reduction and the optimizer's step.
    Of each piece so many bytes of a micro-batch are `away` all the time, if any.

    Whether the model fits into the GPUs' memory does not matter. Raises InputError if the stages of a device are not
    looped.
    """
    division = estimated.parallelism
    if division.chunks > 1 and division.shape != "looped":
        raise InputError(f"shape = {division.shape}: 1F1B interleaves looped stages")
    fields = ("forward_ms",), ("backward_input_ms", "backward_weight_ms"), ("activation_bytes",)
    of = [[sum(one_for_all(getattr(each, name)) for name in names) for each in estimated.layers] for names in fields]
    of[2] = [kept - left for kept, left in zip(of[2], away, strict=True)] if away else of[2]
    forward_ms, backward_ms, kept_bytes = np.array(
        [[sum(figures[i] for i in pieces) for pieces in estimated.stages] for figures in of], float
    )
    p, m = division.pp, estimated.run.microbatches
    ms, most = one_f_one_b(forward_ms, backward_ms, kept_bytes, estimated.message_ms, p, m)
    return Simulated(ms + estimated.after_ms, most)


def one_f_one_b(
    forward_ms: Floats, backward_ms: Floats, kept_bytes: Floats, message_ms: float, devices: int, microbatches: int
) -> tuple[float, list[float]]:
    """The makespan of 1F1B and the most that each device keeps, by stages' figures of a micro-batch, without a problem.

    Device d has the stages d, d + p, ...: with several of them it is interleaved 1F1B, in groups of p
    micro-batches, or of more that are as even as they can be.

    Narayanan et al. 2019, "PipeDream", figure 8; 2021, section 2.2.
    """
    chunks, groups = len(forward_ms) // devices, max(1, microbatches // devices)
    there = np.array(
        [(c, j) for group in np.array_split(range(microbatches), groups) for c in range(chunks) for j in group]
    )
    last = devices - 1 - np.arange(devices)
    warm_up = last if chunks == 1 else 2 * last + (chunks - 1) * -(-microbatches // groups)
    makespan, most = _timeline(
        4 * len(there) * devices, forward_ms, backward_ms, kept_bytes, message_ms, there, warm_up
    )
    return float(makespan), list(map(float, most))


def _simulate(
    forward: Floats, backward: Floats, kept: Floats, message: float, there: Ints, warm_up: Ints
) -> tuple[float, Floats]:
    """Each device in turn runs its ops for as long as what they wait for has run."""
    stages, n, p = len(forward), len(there), len(warm_up)
    f_end, b_end = np.full((stages, n), -1.0), np.full((stages, n), -1.0)
    free, held, most, done = np.zeros(p), np.zeros(p), np.zeros(p), np.zeros(p, np.int64)
    while done.min() < 2 * n:
        for d in range(p):
            warm = min(n, warm_up[d])
            while done[d] < 2 * n:
                i = done[d]
                in_turn = warm <= i < 2 * n - warm
                is_forward = i < warm or (in_turn and (i - warm) % 2 == 0)
                k = i if i < warm else (i - warm) // 2 + warm * is_forward if in_turn else i - n
                chunk, j = there[k]
                s = (chunk if is_forward else stages // p - 1 - chunk) * p + d
                end, before = (f_end, s - 1) if is_forward else (b_end, s + 1)
                ready = 0.0 if is_forward else f_end[s, j]
                if 0 <= before < stages:
                    ready = end[before, j] + message if end[before, j] >= 0 else -1.0
                if ready < 0:
                    break
                free[d] = max(free[d], ready) + (forward[s] if is_forward else backward[s])
                end[s, j] = free[d]
                held[d] += kept[s] if is_forward else -kept[s]
                most[d] = max(most[d], held[d])
                done[d] += 1
    return free.max(), most


_timeline = LazyJit(_simulate)


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
        Its size, before Megatron-LM makes each rank's part a multiple of 128, if there are several.

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
    words = padded_vocabulary(vocabulary, tp) if tp > 1 else vocabulary  # their heads take as long as unpadded ones
    shape |= {"ffn": 4 * number["hidden"], "vocabulary": words}
    shape |= {"positions": number["sequence"], "tied": True, "dropout": True}
    division = {"tp": tp, "dp": dp, "pp": pp, "sequence_parallel": False}
    run = {"microbatches": number["batch"] // (dp * size), "microbatch_size": size, "padded": tp > 1} | MEGATRON
    return Iteration(
        Transformer.from_dict(shape, what), Parallelism.from_dict(division, what), Run.from_dict(run, what), measured
    )


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """The vocabulary of Megatron-LM for so many tokens."""
    return ceil(vocabulary / (VOCABULARY_MULTIPLE * tp)) * VOCABULARY_MULTIPLE * tp


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
        the same batch on as many of the same GPUs; of one that was measured several times the mean counts.
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


def question(row: Iteration) -> tuple[int | str, ...]:
    """What plans have in common that answer one question: the model, what of it is trained, the batch, and the GPUs."""
    shape, run = row.shape, row.run
    batch = row.parallelism.dp * run.microbatches * run.microbatch_size
    sequence = run.sequence or shape.sequence or 0
    trained = shape.layers, shape.hidden, shape.heads, shape.experts, run.mtp, run.lora
    return *trained, sequence, batch, row.parallelism.gpus, row.gpu


def errors(rows: Sequence[Iteration], predicted_ms: Sequence[float]) -> Errors:
    """Compare predictions with what was measured."""
    ratio = np.array(predicted_ms) / [row.measured_ms for row in rows] - 1
    measured_ms: dict[Any, dict[Any, list[float]]] = {}  # of a question's plans, each perhaps measured several times
    predictions = {}
    for row, predicted in zip(rows, predicted_ms, strict=True):
        plan = row[:3]
        measured_ms.setdefault(question(row), {}).setdefault(plan, []).append(row.measured_ms)
        predictions[question(row), plan] = predicted
    questions = [
        [(predictions[asked, plan], float(np.mean(each))) for plan, each in plans.items()]
        for asked, plans in measured_ms.items()
    ]
    right = [
        (predicted < other) == (measured < other_measured)
        for plans in questions
        for n, (predicted, measured) in enumerate(plans)
        for other, other_measured in plans[:n]
        if max(measured, other_measured) > (1 + DIFFERENT) * min(measured, other_measured)
    ]
    regrets = [min(plans)[1] / min(ms for _, ms in plans) - 1 for plans in questions if len(plans) > 1]
    return Errors(
        float(abs(ratio).mean()),
        float(np.median(ratio)),
        float(np.mean(right)) if right else 1.0,
        len(right),
        float(np.mean(regrets)) if regrets else 0.0,
        max(regrets, default=0.0),
    )
