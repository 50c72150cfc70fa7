"""`optpipe bench ...`: how good predictions are on this machine, and what offloading costs on one GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.errors import InputError
from optpipe_cli import fidelity
from optpipe_cli.extras import need
from optpipe_cli.output import Json, echo, print_json, print_table, require_writable

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from optpipe_runtime.bench.gpu_verdict import Report
    from optpipe_runtime.fidelity.cases import Row, Task

PACED_RANKS, COMPUTING_RANKS = 4, 2
PACED_MICROBATCHES, COMPUTING_MICROBATCHES = 8, 4
HEAD = 128  # width of an attention head

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@app.command()
def runtime(
    steps: Annotated[int, typer.Option(help="Steps of each schedule that count.", min=2)] = 12,
    json: Json = False,
) -> None:
    """Compare steps and memory of many schedules with their predictions: first of stages that take their time without
    computing, on four ranks, then of the demo's model on two."""
    need("runtime")
    import torch

    from optpipe_runtime.demo import reference
    from optpipe_runtime.fidelity.cases import WARM_UP

    paced = fidelity.measured(paced_task(steps), PACED_RANKS)
    if not json:
        fidelity.show(paced, f"stages that sleep, {PACED_RANKS} ranks")
        echo(f"a ms more on each message: {messages_in_a_row(paced)}")
        echo()
    task = computing_task(steps)
    computed = fidelity.measured(task, COMPUTING_RANKS)
    torch.set_num_threads(1)  # as ranks have
    plain = reference.losses(task.size, COMPUTING_RANKS, task.microbatches, WARM_UP + task.steps)
    if json:
        print_json({"paced": [_figures(row) for row in paced], "computed": [_figures(row, plain) for row in computed]})
    else:
        fidelity.show(computed, f"the demo's model, {COMPUTING_RANKS} ranks", plain)


def _figures(row: Row, plain: Sequence[float] | None = None) -> dict[str, Any]:
    figures = {"measured_ms": row.measured_ms, "spread_ms": row.spread_ms, "deviation": row.deviation}
    return asdict(row) | figures | {"loss_difference": fidelity.difference(row.losses, plain) if plain else None}


def messages_in_a_row(rows: Sequence[Row]) -> str:
    """Return how much longer each schedule gets if each message takes a ms more."""
    return ", ".join(f"{row.found_by} {row.messages_in_a_row / row.predicted_ms:+.1%}" for row in rows)


def paced_task(steps: int) -> Task:
    """Return ten schedules of all placements; half of them offload."""
    from optpipe_runtime.fidelity.cases import Case, Task
    from optpipe_runtime.fidelity.paced import Times

    cases = [
        Case("1f1b"),
        Case("zb-h1"),
        Case("adaoffload", memory=2.5),
        Case("naive", memory=2.0),
        Case("interleaved", 2),
        Case("po-h", 2, memory=2.5),
        Case("po-f", 2, memory=2.5),
        Case("zb-v", 2, "v"),
        Case("v-min", 2, "v"),
        Case("lns", 2, "v", memory=1.5),
    ]
    return Task(cases, PACED_MICROBATCHES, steps, Times(20.0, 20.0, 16.0, 12.0))


def computing_task(steps: int) -> Task:
    """Return 1F1B and zero bubble with memory for all; PipeOffload and the solver with less than interleaved 1F1B
    needs."""
    from optpipe_runtime.fidelity.cases import Case, Task

    return Task(
        [Case("1f1b"), Case("zb-h1"), Case("po-f", 2, memory=1.8), Case("auto", 2, memory=1.8)],
        COMPUTING_MICROBATCHES,
        steps,
    )


@app.command()
def gpu(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, or cpu, which runs the same code.")] = "cuda",
    emulate_stage: Annotated[
        str, typer.Option(help="i/p: also run stage i of p between stand-ins for its neighbours.")
    ] = "0/4",
    microbatches: Annotated[int, typer.Option(min=1)] = 8,
    width: Annotated[int, typer.Option(min=1, help="Width of the model; its attention heads are 128 wide.")] = 4096,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks per stage.")] = 2,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch, one sequence.")] = 8192,
    p2p_ms: Annotated[float, typer.Option(min=0, help="Assumed time of a message to a neighbour, in ms.")] = 0.5,
    trace: Annotated[Path, typer.Option(help="Predicted and measured steps, for Perfetto.")] = Path(
        "bench-gpu.trace.json"
    ),
    json: Json = False,
) -> None:
    """Measure on one GPU: offloading behind compute, bandwidth of copies, accuracy of predictions.

    Exit code 1 if one of them misses its target.
    """
    need("runtime", "torch")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts; `measure` says why
    from optpipe.model.problem import write_file
    from optpipe_runtime.bench.gpu import run
    from optpipe_runtime.bench.gpu_runs import GpuSetup
    from optpipe_runtime.demo.gpt import Size

    require_writable(trace)
    emulated, stages = _stage(emulate_stage)
    heads = max(1, width // HEAD)
    if width % heads:
        raise InputError(f"--width = {width}: expected a multiple of {HEAD}, or less than {2 * HEAD}")
    size = Size(width, heads, blocks * stages, context, sequences=1)
    report = run(GpuSetup(_device(device), size, stages, emulated, microbatches, p2p_ms))
    write_file(trace, report.trace)
    if json:
        print_json(report.to_dict())
    else:
        print_table(_table(report))
        for name, value in report.figures.items():
            echo(f"{name:50}{value:>18,.6g}")
        echo(f"trace for https://ui.perfetto.dev: {trace}")
    if not report.passed:
        raise typer.Exit(1)


def _stage(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,3})/(\d{1,3})", text)
    i, p = (int(number) for number in match.groups()) if match else (0, 0)
    if not i < p or p < 2:
        raise InputError(
            f"--emulate-stage = {text}: expected i/p, a stage's number and how many there are, at least 2, like "
            "0/4 or 3/4"
        )
    return i, p


def _device(text: str) -> torch.device:
    import torch

    match = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", text)
    if not match:
        raise InputError(f"--device = {text}: expected cuda, cuda:N or cpu")
    if text == "cpu":
        return torch.device("cpu")
    index = int(match[1] or 0)
    if index >= torch.cuda.device_count():
        raise InputError(
            f"--device = {text}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here; "
            "cpu runs anywhere"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _table(report: Report) -> Table:
    from rich.table import Table

    table = Table(title=f"{report.device}, torch {report.torch}")
    for column in ("", "asked", "reached", "verdict"):
        table.add_column(column, justify="left" if column in ("", "verdict") else "right")
    for row in report.rows:
        table.add_row(row.what, f"{row.asked} {row.text(row.limit)}", row.text(row.reached), row.verdict)
    return table
