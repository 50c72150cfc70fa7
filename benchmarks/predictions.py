"""Measured iterations, predicted: after learning from 60 of them, errors on the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import log, sqrt
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.tables import head, line
from optpipe.errors import InputError
from optpipe.files import read_text, write_file
from optpipe.transformer.calibrate import NAMES, covariance, gradient, learn, ratio_variances
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.iterations import Errors, Iteration, errors, iteration_ms, question, read_iterations
from optpipe.transformer.presets import GPUS
from optpipe_cli.options import Output

GPU = GPUS["A100-800G"]
FILES = {"one node": "vtrain-single.csv", "several nodes": "vtrain-multi.csv"}
LEARNED_FROM = {"one node": 34, "several nodes": 26}  # rows, evenly spread over the file
OUTLIER = 3  # standard deviations
DRAWS = 5  # further sets of as many rows, drawn at random
COLUMNS = ("rows", "learned from", "judged by", "mean error", "median", "ordered right, of pairs", "regret", "at most")


class Split(NamedTuple):
    """The rows of a file that parameters are learned from, and the others."""

    learned: list[Iteration]
    rest: list[Iteration]


def predictions(folder: Path, /, *, output: Output = None) -> None:
    """Predict measured iterations: from what is known of the GPU alone, and after learning from 60 rows, which are
    evenly spread over the files, the others; then the same with rows that are drawn at random.

    Parameters
    ----------
    folder
        Folder with vTrain's measured iterations: two files of CSV.
    """
    tables = read_tables(folder)
    print(head(COLUMNS, "lrrrrrrr"))
    for name, rows in tables.items():
        print(_line(name, 0, errors(rows, predicted(GPU, rows)), len(rows)))
    splits = {name: evenly(rows, LEARNED_FROM[name]) for name, rows in tables.items()}
    gpu = learned(splits.values())
    if output:
        write_file(output, json.dumps(preset(gpu), indent=1) + "\n")
    for name, split in splits.items():
        print(_line(name, 60, errors(split.rest, predicted(gpu, split.rest)), len(split.rest)))
    for name, split in splits.items():
        times = zip(split.rest, predicted(gpu, split.rest), strict=True)
        near = [row for row, ms in times if not is_outlier(gpu, row, ms)]
        print(_line(f"{name}, no outliers", 60, errors(near, predicted(gpu, near)), len(near)))
    told = {name: distinct_sizes(gpu, split.rest) for name, split in splits.items()}
    by_draw: dict[str, list[Errors]] = {name: [] for name in tables}
    for draw in range(DRAWS):
        drawn = {name: drawn_at_random(rows, LEARNED_FROM[name], draw) for name, rows in tables.items()}
        other = learned(drawn.values())
        for name, split in drawn.items():
            by_draw[name].append(errors(split.rest, predicted(other, split.rest)))
    for name, each in by_draw.items():
        means = Errors(*(mean(column) for column in zip(*each, strict=True)))
        print(_line(f"{name}, {DRAWS} draws", 60, means, len(tables[name]) - LEARNED_FROM[name]))
    print("\nlearned, with the standard deviation of each before and after:\n")
    print(head(("parameter", "assumed", "±", "learned", "±"), "lrrrr"))
    spreads = zip(*(np.sqrt(np.diag(covariance(each))) for each in (GPU, gpu)), strict=True)
    for parameter, (before, after) in zip(NAMES, spreads, strict=True):
        values = (f"{getattr(each, parameter):.3g}" for each in (GPU, gpu))
        print(line((parameter, next(values), f"{before:.0%}", next(values), f"{after:.0%}")))
    for name, (sure, right, equal, equal_right) in told.items():
        print(
            f"\n{name}: of {sure} pairs whose predictions differ by more than a standard deviation {right / sure:.1%} "
            f"are ordered right, of {equal} pairs that are called equal {equal_right / equal:.1%}"
        )
    print(f"\nleft unexplained: {gpu.unexplained:.1%} of an iteration")


def distinct_sizes(gpu: Gpu, rows: Sequence[Iteration]) -> tuple[int, int, int, int]:
    """Of plans that answer one question: pairs that predictions tell apart and how many of them are ordered right, then
    the same of pairs that they call equal."""
    by_question: dict[Any, list[tuple[Iteration, float, Any]]] = {}
    for row in rows:
        estimated = row.on(gpu)
        slopes = gradient(lambda other, made=estimated: iteration_ms(made.on(other)), gpu)  # type: ignore[misc]
        by_question.setdefault(question(row), []).append((row, iteration_ms(estimated), slopes))
    counts = [0, 0, 0, 0]
    for plans in by_question.values():
        for (one, ms, slopes), (other, other_ms, other_slopes) in combinations(plans, 2):
            spread = sqrt(sum(ratio_variances(gpu, slopes - other_slopes).values()))
            equal = abs(log(ms / other_ms)) < spread
            counts[2 * equal] += 1
            counts[2 * equal + 1] += (ms < other_ms) == (one.measured_ms < other.measured_ms)
    sure, right, same, same_right = counts
    return sure, right, same, same_right


def is_outlier(gpu: Gpu, row: Iteration, predicted_ms: float) -> bool:
    """Whether the error is larger than three standard deviations of what no parameter explains."""
    return abs(log(predicted_ms / row.measured_ms)) > OUTLIER * gpu.unexplained


def preset(gpu: Gpu) -> dict[str, Any]:
    """What was learned, in three digits."""
    values = {name: float(f"{getattr(gpu, name):.3g}") for name in (*NAMES, "unexplained")}
    return values | {"covariance": [[float(f"{each:.3g}") for each in row] for row in covariance(gpu).tolist()]}


def read_tables(folder: Path) -> dict[str, list[Iteration]]:
    """The rows of both files. Raises InputError if one is missing."""
    if missing := [file for file in FILES.values() if not (folder / file).exists()]:
        raise InputError(
            f"{folder}: no {missing[0]}; expected {' and '.join(FILES.values())}, as vTrain publishes them"
        )
    return {name: read_iterations(read_text(folder / file), file) for name, file in FILES.items()}


def predicted(gpu: Gpu, rows: Sequence[Iteration]) -> list[float]:
    return [iteration_ms(row.on(gpu)) for row in rows]


def learned(splits: Iterable[Split]) -> Gpu:
    return learn(GPU, [row for split in splits for row in split.learned])


def evenly(rows: Sequence[Iteration], count: int) -> Split:
    """The first row of each of so many parts of equal length."""
    return _split(rows, {n * len(rows) // count for n in range(count)})


def drawn_at_random(rows: Sequence[Iteration], count: int, seed: int) -> Split:
    return _split(rows, set(np.random.default_rng(seed).permutation(len(rows))[:count].tolist()))


def _split(rows: Sequence[Iteration], chosen: set[int]) -> Split:
    return Split([rows[n] for n in sorted(chosen)], [row for n, row in enumerate(rows) if n not in chosen])


def _line(name: str, learned_from: int, judged: Errors, rows: int) -> str:
    cells = (name, learned_from, rows, f"{judged.mean:.1%}", f"{judged.median:+.1%}")
    ordered = f"{judged.ordered:.1%} of {judged.pairs:.0f}"
    return line((*cells, ordered, f"{judged.regret:.1%}", f"{judged.most_regret:.1%}"))
