"""`optpipe plan`: how to train a model on so many GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe_cli.model import host_bytes, read_gpu, read_model
from optpipe_cli.options import with_options
from optpipe_cli.output import Json, echo, print_json, require_folder
from optpipe_cli.solve import usable_cache

if TYPE_CHECKING:
    from optpipe.anytime import Search
    from optpipe.model.problem import Problem
    from optpipe.options import SearchOptions
    from optpipe.results import Result
    from optpipe.schedule import Schedule
    from optpipe.transformer.gpu import Gpu
    from optpipe_cache import Cache
    from optpipe_solver.planner.candidates import Question
    from optpipe_solver.planner.search import Plan
    from optpipe_solver.planner.today import Today


@with_options("SearchOptions", only=("time_limit_s", "gap", "threads", "seed"), gap=0.005)
def plan(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset, a Hugging Face config.json, or a file with a shape.")
    ],
    options: SearchOptions,
    gpus: Annotated[int, typer.Option(help="How many GPUs there are; all are used.")],
    batch: Annotated[int, typer.Option(help="Sequences of one step, on all GPUs together.")],
    gpu: Annotated[str, typer.Option(help="A preset, or a file with a data sheet's fields.")] = "H100",
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence. Default: the preset's.")] = None,
    precision: Annotated[str, typer.Option(help="bf16, fp8 or fp32.")] = "bf16",
    attention: Annotated[str, typer.Option(help="flash or unfused.")] = "flash",
    offload: Annotated[bool, typer.Option(help="Whether activations may be offloaded to the host.")] = True,
    stack: Annotated[str, typer.Option(help="The training stack: optpipe, torch or megatron.")] = "optpipe",
    today: Annotated[
        str | None,
        typer.Option(help="What runs today, such as 'tp 8, pp 4, 1f1b': the plan starts there and says what it gains."),
    ] = None,
    margin: Annotated[float, typer.Option(help="Share of each GPU's memory that stays free.")] = 0.05,
    host_memory_gb: Annotated[float | None, typer.Option(help="Pinned host memory of each GPU.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither look schedules up nor store them.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Explain why the second-best division is slower.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write problem, schedule, picture and settings to this folder."),
    ] = None,
    json: Json = False,
) -> None:
    """Plan how to train a model: divide it over GPUs, and schedule it, as fast as their memory allows. Ctrl-C ends the
    search and keeps the best so far."""
    from optpipe.transformer.records import Run
    from optpipe_cli.plan_report import figures, lines, write
    from optpipe_solver.planner.candidates import Question
    from optpipe_solver.planner.today import Today

    run: dict[str, Any] = {"microbatches": 1, "sequence": sequence, "precision": precision, "attention": attention}
    run |= {"host_memory_bytes": host_bytes(host_memory_gb)}
    question = Question.from_dict(
        {
            "model": read_model(name),
            "gpu": _with_margin(read_gpu(gpu), margin),
            "gpus": gpus,
            "batch": batch,
            "run": Run.from_dict(run, "options"),
            "offload": offload,
            "stack": stack,
        },
        "options",
    )
    require_folder(output)
    start = Today.read(today) if today is not None else None
    answer = _search(question, options, no_cache, json, start)
    if json:
        print_json(figures(answer))
    else:
        for line in lines(answer, explain):
            echo(line)
        for note in answer.notes:
            echo(f"note: {note}", err=True)
    if output:
        write(answer, output)
        if not json:
            echo(f"written to {output}")


def _with_margin(gpu: Gpu, share: float) -> Gpu:
    """The GPU with a share of its memory counted to what the driver and the allocator's fragments take."""
    from optpipe.errors import InputError

    if not 0 <= share < 1:
        raise InputError(f"margin = {share}: a share of 0 or more and less than 1, such as 0.05, was expected")
    return gpu.model_copy(update={"reserved_bytes": gpu.reserved_bytes + round(share * gpu.memory_bytes)})


def _search(
    question: Question,
    options: SearchOptions,
    no_cache: bool,
    quiet: bool,
    today: Today | None,
) -> Plan:
    """The best plan within the time limit, or until Ctrl-C; a second Ctrl-C ends the command."""
    from optpipe.errors import InputError
    from optpipe_cli.live import ctrl_c_calls, shown_while
    from optpipe_cli.plan_report import progress
    from optpipe_solver.planner.search import PlanSearch

    solve = Here(None if no_cache else usable_cache(), options)
    search = PlanSearch(question, solve, options, options.threads or os.cpu_count() or 1, today)

    def cancel() -> None:
        search.cancel()
        solve.cancel()

    on_terminal = not quiet and sys.stderr.isatty()
    try:
        with ctrl_c_calls(cancel), shown_while(lambda: progress(search), on_terminal):
            return search.run()
    except InputError:
        if search.cancelled:  # before there was any schedule
            raise KeyboardInterrupt from None
        raise


class Here:
    """Searches on this machine, each with one thread, from what the cache has if that is better; finds go there."""

    def __init__(self, cache: Cache | None, options: SearchOptions) -> None:
        self._cache, self._options = cache, options
        self._running: list[Search] = []
        self._cancelled = False

    def __call__(self, problem: Problem, start: Schedule | None, seconds: float) -> Result:
        """Search for so many seconds."""
        from optpipe.anytime import improve

        asked = self._options.search() | {"time_limit_s": seconds, "threads": 1}
        search = improve(problem, warm_start=start, cache=self._cache, **asked)
        self._running.append(search)
        if self._cancelled:
            search.cancel()
        *_, last = search
        return last

    def cancel(self) -> None:
        """End all searches; each gives its best so far."""
        self._cancelled = True
        for search in list(self._running):
            search.cancel()
