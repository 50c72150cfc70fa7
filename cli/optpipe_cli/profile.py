"""`optpipe profile`: measure a user's model on ranks, and write a problem file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from optpipe.errors import InputError, OptPipeError
from optpipe.model.records import Level, Stage
from optpipe.text import printable
from optpipe_cli.options import Json, Output, need
from optpipe_cli.output import echo, new_console, print_figures, print_json

if TYPE_CHECKING:
    from optpipe_runtime.measure.measured import Measured
    from optpipe_runtime.stage.trial import Spread

MODULE = "optpipe_cli"  # which the ranks run
TITLE = "times in ms: median ± interquartile range; sizes in MB, of one micro-batch"
COLUMNS = {
    "F": "forward_ms", "B": "backward_input_ms", "W": "backward_weight_ms", "recompute": "recompute_ms",
    "offload": "offload_ms", "reload": "reload_ms", "after F": "activation_bytes",
    "after B": "saved_for_weight_bytes", "offloadable": "offload_bytes",
}  # fmt: skip
OF_LEVEL = ["checkpoint_bytes" if name == "activation_bytes" else name for name in COLUMNS.values()]


def profile(
    *,
    model: Annotated[str, Parameter(help="MODULE:FUNCTION(rank, ranks) that returns a Setup; or a config.json.")],
    ranks: Annotated[int | None, Parameter(help="How many to start here. Default: torchrun has started them.")] = None,
    microbatches: Annotated[PositiveInt, Parameter(help="How many micro-batches a batch has.")] = 8,
    microbatch_size: Annotated[PositiveInt | None, Parameter(help="Sequences, of a config. Default: 1.")] = None,
    sequence: Annotated[PositiveInt | None, Parameter(help="Tokens. Default: a config's longest.")] = None,
    activation_budget_bytes: Annotated[NonNegativeInt | None, Parameter(help="Default on a GPU: what is left.")] = None,
    offload_parts: Annotated[PositiveInt, Parameter(help="In how many parts an activation may be offloaded.")] = 1,
    repeats: Annotated[PositiveInt, Parameter(help="How often each op is measured at least.")] = 7,
    stack: Annotated[Literal["torch"] | None, Parameter(help="torch: the sizes in PyTorch's own pipelining.")] = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """`optpipe profile`."""
    need("runtime")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        measured = _measure(
            model,
            (microbatches, microbatch_size, sequence),
            activation_budget_bytes=activation_budget_bytes,
            offload_parts=offload_parts,
            repeats=repeats,
            stack=stack,
        )
        if measured is not None:
            _print(measured, output, json)
    elif ranks is None or ranks < 1:
        raise InputError(
            f"--ranks {'is missing' if ranks is None else f'= {ranks}'}: how many ranks to start here, such as 4; or "
            "start them by torchrun --nproc-per-node N -m optpipe_cli profile ..."
        )
    else:
        _start(ranks)


def _start(ranks: int) -> None:
    """Run the same command on ranks started here, a thread each; of their stderr only a command's message is shown."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with new_console(stderr=True).status(f"measuring on {ranks} ranks"):
        done = subprocess.run(
            [*torchrun, MODULE, *sys.argv[1:]], env=environment, check=False, text=True, stderr=subprocess.PIPE
        )
    if done.returncode != 0:
        for line in done.stderr.splitlines():
            if line.startswith("error: "):
                raise InputError(line.removeprefix("error: "))
        sys.stderr.write(done.stderr)
        raise OptPipeError("the profile failed under torchrun; its output is above")


def _measure(model: str, sizes: tuple[int, int | None, int | None], **options: Any) -> Measured | None:
    """Measure on every rank (collective); the result is on rank 0."""
    import torch
    import torch.distributed as dist

    from optpipe_runtime.profiles import BatchSizes, find_factory

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    factory = find_factory(model, BatchSizes(*sizes))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    setup = factory(dist.get_rank(), dist.get_world_size())
    with setup.pipeline(sizes[0]) as pipe:
        pipe.profile(setup.inputs, setup.targets, kwargs=setup.kwargs, **options)
        measured = pipe.measured if dist.get_rank() == 0 else None
    dist.destroy_process_group()
    return None if measured is None else replace(measured, problem=measured.problem.replace(name=setup.name))


def _print(measured: Measured, output: Path | None, json: bool) -> None:
    problem = measured.problem
    if output is not None:
        problem.save(output)
    if json:
        print_json(
            {
                "problem": problem.to_dict(),
                "stages": [{name: asdict(spread) for name, spread in times.items()} for times in measured.stages],
                "links": [{"from": a, "to": b, **asdict(spread)} for (a, b), spread in measured.links.items()],
                "places": [place and place._asdict() for place in measured.places],
                "host_links": list(measured.host_links),
            }
        )
        return
    rows = []
    for s, stage in enumerate(problem.stages):
        times = measured.stages[s]
        rows.append([str(s), str(stage.device), *_cells(stage, times, COLUMNS.values())])
        for level in stage.levels or ():
            before = f"{level.name}."
            of_level = {name.removeprefix(before): spread for name, spread in times.items() if name.startswith(before)}
            rows.append([f"{s} {printable(level.name)}", "", *_cells(level, of_level, OF_LEVEL)])
    title = "\n".join(filter(None, (printable(problem.name), TITLE)))
    print_figures(title, ("stage", "rank", *COLUMNS), rows, names=0)
    for (source, target), spread in measured.links.items():
        echo(f"a message from rank {source} to rank {target}: {spread.ms:.3f} ± {spread.iqr_ms:.3f} ms")
    for rank, place in enumerate(measured.places):
        if place is not None:
            echo(f"rank {rank}: {place}")
    for line in measured.apart():
        echo(line)
    if output is not None:
        echo(f"problem file: {output}")


def _cells(record: Stage | Level, times: Mapping[str, Spread], names: Iterable[str]) -> list[str]:
    """A time with its spread, or a size in MB."""
    cells = []
    for name in names:
        size = getattr(record, name, None)
        missing = "–" if size is None else f"{size / 1e6:.2f}"
        cells.append(f"{times[name].ms:.3g} ± {times[name].iqr_ms:.2g}" if name in times else missing)
    return cells
