"""What offloading costs and how good predictions are, on one GPU."""

from __future__ import annotations

import os
import re

import torch
from cyclopts.types import NonNegativeFloat, PositiveInt

from benchmarks.gpu.report import judge
from benchmarks.gpu.runs import MOST_QUEUES, QUEUES, GpuSetup, measure
from examples.gpt import Size
from optpipe.errors import InputError
from optpipe_cli.options import Json
from optpipe_cli.output import echo, print_figures, print_json

HEAD = 128  # width of an attention head


def gpu(
    *,
    device: str = "cuda",
    emulate_stage: str = "0/4",
    microbatches: PositiveInt = 8,
    width: PositiveInt = 4096,
    blocks: PositiveInt = 2,
    context: PositiveInt = 8192,
    p2p_ms: NonNegativeFloat = 0.5,
    json: Json = False,
) -> None:
    """Measure on one GPU: offloading behind compute, bandwidth of copies, accuracy of predictions.

    Exit code 1 if one of them misses its target.

    Parameters
    ----------
    device
        cuda, cuda:1, or cpu, which runs the same code.
    emulate_stage
        i/p: also run stage i of p between stand-ins for its neighbours.
    width
        Width of the model; its attention heads are 128 wide.
    blocks
        Blocks per stage.
    context
        Tokens of a micro-batch, one sequence.
    p2p_ms
        Assumed time of a message to a neighbour, in ms.
    """
    os.environ.setdefault(QUEUES, str(MOST_QUEUES))  # before CUDA starts; `measure` says why
    emulated, stages = _stage(emulate_stage)
    heads = max(1, width // HEAD)
    if width % heads:
        raise InputError(f"--width = {width}: expected a multiple of {HEAD}, or less than {2 * HEAD}")
    size = Size(width, heads, blocks * stages, context, sequences=1)
    setup = GpuSetup(_device(device), size, stages, emulated, microbatches, p2p_ms)
    try:
        report = judge(setup, measure(setup))
    except torch.OutOfMemoryError as error:
        raise InputError(f"take a smaller --context, --width or --blocks: {str(error).partition('. ')[0]}") from error
    if json:
        print_json(report.to_dict())
    else:
        rows = [
            [row.what, f"{row.asked} {row.text(row.limit)}", row.text(row.reached), row.verdict] for row in report.rows
        ]
        print_figures(f"{report.device}, torch {report.torch}", ("", "asked", "reached", "verdict"), rows)
        for name, value in report.figures.items():
            echo(f"{name:50}{value:>18,.6g}")
    if not report.passed:
        raise SystemExit(1)


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
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", text)
    if not match:
        raise InputError(f"--device = {text}: expected cuda, cuda:N or cpu")
    if text == "cpu":
        return torch.device("cpu")
    if (index := int(match[1] or 0)) >= torch.cuda.device_count():
        raise InputError(
            f"--device = {text}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here; "
            "cpu runs anywhere"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
