"""`optpipe profile`: measure a user's model on ranks, and write a problem file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe_cli.output import Json, print_json, require_writable

if TYPE_CHECKING:
    from optpipe_runtime.measure.profiler import Measured

COLUMNS = {
    "F": "forward_ms", "B": "backward_input_ms", "W": "backward_weight_ms", "recompute": "recompute_ms",
    "offload": "offload_ms", "reload": "reload_ms", "after F": "activation_bytes",
    "after B": "saved_for_weight_bytes", "offloadable": "offload_bytes",
}  # fmt: skip


def profile(
    model: Annotated[
        str, typer.Option(help="MODULE:FUNCTION; called with rank and ranks, it returns an optpipe_runtime.Setup.")
    ],
    ranks: Annotated[
        int | None,
        typer.Option(help="How many ranks to start here. Without it, this is a rank that torchrun has started."),
    ] = None,
    microbatches: Annotated[int, typer.Option(min=1, help="How many micro-batches a batch has.")] = 8,
    activation_budget_bytes: Annotated[
        int | None,
        typer.Option(min=0, help="A rank's budget for activations. Default on a GPU: the memory that is left."),
    ] = None,
    offload_parts: Annotated[int, typer.Option(min=1, help="In how many parts an activation may be offloaded.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="How often each op is measured at least.")] = 7,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the problem file here.")] = None,
    json: Json = False,
) -> None:
    """Measure a model's stages, copies and messages, and make a problem of them."""
    from optpipe.errors import InputError
    from optpipe_cli.extras import need

    need("runtime")
    require_writable(output)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        measured = _measure(model, microbatches, activation_budget_bytes, offload_parts, repeats)
        if measured is not None:
            _tell(measured, output, json)
        return
    if ranks is None or ranks < 1:
        raise InputError(
            f"ranks = {ranks}: expected how many to start here; or start them by torchrun --nproc-per-node N -m "
            "optpipe_cli profile ..."
        )
    _start(ranks, model, microbatches, activation_budget_bytes, offload_parts, repeats, output, json)


def _start(
    ranks: int,
    model: str,
    microbatches: int,
    activation_budget_bytes: int | None,
    parts: int,
    repeats: int,
    *where: Any,
) -> None:
    """Run the same command on ranks that are started here."""
    from rich.console import Console

    from optpipe_cli.launch import torchrun

    output, json = where
    words = ["--model", model, "--microbatches", microbatches, "--offload-parts", parts, "--repeats", repeats]
    words += [] if activation_budget_bytes is None else ["--activation-budget-bytes", activation_budget_bytes]
    words += [] if output is None else ["--output", output]
    with Console(stderr=True).status(f"measuring on {ranks} ranks"):
        torchrun(ranks, "optpipe_cli", "profile", *words, *(["--json"] if json else []), quietly=True)


def _measure(
    model: str, microbatches: int, activation_budget_bytes: int | None, parts: int, repeats: int
) -> Measured | None:
    """Measure on every rank (collective); the result is on rank 0."""
    import torch
    import torch.distributed as dist

    from optpipe_runtime.factory import find_factory

    factory = find_factory(model)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    setup = factory(dist.get_rank(), dist.get_world_size())
    with setup.pipeline(microbatches) as pipe:
        pipe.profile(setup.inputs, setup.targets, activation_budget_bytes, parts, repeats, setup.kwargs)
        measured = pipe.measured if dist.get_rank() == 0 else None
    dist.destroy_process_group()
    return measured


def _tell(measured: Measured, output: Path | None, json: bool) -> None:
    problem = measured.problem
    if output is not None:
        problem.save(output)
    if json:
        print_json(_content(measured))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=None,
        title="times in ms: median ± interquartile range; sizes in MB, of one micro-batch",
        title_justify="left",
    )
    for name in ("stage", "rank", *COLUMNS):
        table.add_column(name, no_wrap=True, justify="right")
    for s, stage in enumerate(problem.stages):
        times = measured.stages[s]
        cells = [
            f"{times[name].ms:.3g} ± {times[name].iqr_ms:.2g}" if name in times else _megabytes(getattr(stage, name))
            for name in COLUMNS.values()
        ]
        table.add_row(str(s), str(stage.device), *cells)
    Console(width=140).print(table)
    for (here, there), spread in measured.links.items():
        typer.echo(f"a message from rank {here} to rank {there}: {spread.ms:.3f} ± {spread.iqr_ms:.3f} ms")
    if measured.launch_bound:
        typer.echo(f"stages and ops that take only as long as the host needs to launch them: {measured.launch_bound}")
    if output is not None:
        typer.echo(f"problem file: {output}")


def _megabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:.2f}"


def _content(measured: Measured) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "problem": measured.problem.to_dict(),
        "stages": [{name: asdict(spread) for name, spread in times.items()} for times in measured.stages],
        "links": [{"from": a, "to": b, **asdict(spread)} for (a, b), spread in measured.links.items()],
        "launch_bound": [list(found) for found in measured.launch_bound],
    }
