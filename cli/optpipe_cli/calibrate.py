"""`optpipe calibrate`: a GPU's parameters in the cost model, from kernels or from measured iterations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from cyclopts.types import PositiveInt
from rich.table import Table

from optpipe.errors import InputError
from optpipe.files import read_text, write_file
from optpipe.transformer.calibrate import NAMES, Observation, covariance, learn
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.iterations import Iteration, errors, iteration_ms, read_iterations
from optpipe.transformer.kernels import read_kernels
from optpipe_cli.model import read_gpu
from optpipe_cli.options import Json, Output, need
from optpipe_cli.output import echo, print_json, print_table


def calibrate(
    *,
    gpu: Annotated[str, Parameter(help="What is known before: a preset, or a file with a data sheet's fields.")],
    measured: Annotated[
        list[Path] | None,
        Parameter(name="--from", help="Iterations to learn from, or kernels (a .json of SimuMax's form); repeatable."),
    ] = None,
    check: Annotated[list[Path] | None, Parameter(help="Measured iterations to predict; repeatable.")] = None,
    device: Annotated[str, Parameter(help="Without tables, measure kernels here: cuda, cuda:1, or cpu.")] = "cuda",
    vocabulary: Annotated[PositiveInt, Parameter(help="Of the models of the tables.")] = 50257,
    output: Output = None,
    json: Json = False,
) -> None:
    """`optpipe calibrate`."""
    before = read_gpu(gpu)
    rows, kernels = list[Iteration](), list[Observation]()
    for path in measured or ():
        if path.suffix == ".json":
            kernels += read_kernels(read_text(path), str(path))
        else:
            rows += read_iterations(read_text(path), str(path), vocabulary)
    tables = {str(path): read_iterations(read_text(path), str(path), vocabulary) for path in check or ()}
    after = learn(before, rows, kernels) if rows or kernels else before if tables else _measured(before, device)
    predicted = {name: [iteration_ms(row.on(after)) for row in table] for name, table in tables.items()}
    if output:
        write_file(output, after.model_dump_json(indent=1) + "\n")
    if json:
        judged = {name: errors(table, predicted[name])._asdict() for name, table in tables.items()}
        checks = {name: {"predicted_ms": predicted[name]} | judged[name] for name in tables}
        learned = {"rows": len(rows), "kernels": len(kernels)}
        print_json({"gpu": after.model_dump(mode="json"), **learned, "checks": checks})
        return
    for name, table in tables.items():
        print_table(_rows(table, predicted[name]))
        each = errors(table, predicted[name])
        echo(
            f"{name}: {len(table)} rows, mean error {each.mean:.1%}, median {each.median:+.1%}; of {each.pairs} pairs "
            f"of plans more than 5 % apart {each.ordered:.1%} ordered right; the shortest prediction takes "
            f"{each.regret:.1%} longer than the shortest plan on average, at most {each.most_regret:.1%}"
        )
    if after is not before:
        parameters = Table("parameter", "before", "±", "after", "±", box=None)
        spreads = zip(*(np.sqrt(np.diag(covariance(each))) for each in (before, after)), strict=True)
        for name, (wide, narrow) in zip(NAMES, spreads, strict=True):
            values = [f"{getattr(each, name):.3g}" for each in (before, after)]
            parameters.add_row(name, values[0], f"{wide:.0%}", values[1], f"{narrow:.0%}")
        print_table(parameters)
        echo(f"left unexplained: {after.unexplained:.1%} of an iteration")
    if output:
        echo(f"written to {output}")


def _measured(gpu: Gpu, device: str) -> Gpu:
    need("runtime", "torch")
    import torch

    from optpipe_runtime.measure.kernels import measure

    match = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", device)
    if not match:
        raise InputError(f"--device = {device}: expected cuda, cuda:N or cpu")
    if device != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device = {device}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here; "
            "cpu runs anywhere"
        )
    return measure(gpu, torch.device(device))


def _rows(table: Sequence[Iteration], predicted: Sequence[float]) -> Table:
    shown = Table(*("layers", "hidden", "tp", "dp", "pp", "micro-batches", "sequences"), box=None)
    for column in ("predicted ms", "measured ms", "error"):
        shown.add_column(column, justify="right")
    for row, ms in zip(table, predicted, strict=True):
        shape, division, run = row.shape, row.parallelism, row.run
        cells: list[Any] = [shape.layers, shape.hidden, division.tp, division.dp, division.pp]
        cells += [run.microbatches, run.microbatch_size, f"{ms:.1f}", f"{row.measured_ms:.1f}"]
        shown.add_row(*map(str, cells), f"{ms / row.measured_ms - 1:+.1%}")
    return shown
