"""`optpipe plan`: how to train a model on so many GPUs."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from optpipe.anytime import Search, search
from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.options import EffortOptions, Gap, SolveOptions
from optpipe.results import Result
from optpipe.schedule import Schedule
from optpipe.transformer.records import Precision, Run, RunOptions
from optpipe_cache import Cache
from optpipe_cli.model import host_bytes, read_gpu, read_model, require_use
from optpipe_cli.options import Flag, FolderOutput, Json, NoCache, Options
from optpipe_cli.output import ctrl_c_calls, echo, print_json, shown_while
from optpipe_cli.plan_report import figures, lines, progress, write
from optpipe_cli.solve import usable_cache
from optpipe_solver.planner.candidates import BY_DEFAULT, Question
from optpipe_solver.planner.plan import Plan
from optpipe_solver.planner.search import PlanSearch
from optpipe_solver.planner.today import Today

RUN = RunOptions()
PRECISIONS = f"One of {', '.join(get_args(Precision))}."
MARGIN, OFFLOAD, STACK = (Question.model_fields[name].default for name in ("margin", "offload", "stack"))


class PlanOptions(EffortOptions):
    """How long and how hard a plan is searched."""

    gap: Gap = 0.005


def plan(
    name: Annotated[str, Parameter(help="A preset, a Hugging Face config.json, or a file with a shape.")],
    /,
    *,
    gpus: Annotated[int, Parameter(help="How many GPUs there are; all are used.")],
    batch: Annotated[int, Parameter(help="Sequences of one step, on all GPUs together.")],
    gpu: Annotated[str, Parameter(help="A preset, or a file with a data sheet's fields.")] = "H100",
    sequence: Annotated[int | None, Parameter(help="Tokens of a sequence. Default: the preset's.")] = None,
    precision: Annotated[str, Parameter(help=PRECISIONS)] = RUN.precision,
    attention: Annotated[str, Parameter(help="flash or unfused.")] = RUN.attention,
    mtp: Annotated[int, Parameter(help="Multi-token prediction modules, beside the head.")] = RUN.mtp,
    lora: Annotated[int, Parameter(help="Rank of adapters, which alone are trained; 0: all weights.")] = RUN.lora,
    gradient_bytes: Annotated[int, Parameter(help="Bytes of a parameter's gradient.")] = RUN.gradient_bytes,
    optimizer_bytes: Annotated[int | None, Parameter(help="Bytes of its optimizer state.")] = RUN.optimizer_bytes,
    moe_expert_capacity_factor: Annotated[
        float | None, Parameter(help="Tokens that an expert takes at most, over the mean.")
    ] = None,
    moe_pad_expert_input_to_capacity: Annotated[Flag, Parameter(help="Every expert takes exactly so many.")] = False,
    dispatch: Annotated[str | None, Parameter(help="alltoall or once. Default: the stack's.")] = None,
    overlap: Annotated[str | None, Parameter(help="none, replicas, all or experts. Default: the stack's.")] = None,
    offload: Annotated[bool, Parameter(help="Whether activations may be offloaded to the host.")] = OFFLOAD,
    stack: Annotated[str, Parameter(help="The training stack: optpipe, torch or megatron.")] = STACK,
    today: Annotated[str | None, Parameter(allow_leading_hyphen=True, help="Today's run: 'tp 8, pp 4, 1f1b'.")] = None,
    margin: Annotated[float, Parameter(help="Share of each GPU's memory that stays free.")] = MARGIN,
    host_memory_gb: Annotated[float | None, Parameter(help="Pinned host memory of each GPU.")] = None,
    options: Annotated[Options[PlanOptions], Parameter(group="Search")] = PlanOptions(),
    no_cache: NoCache = False,
    explain: Annotated[Flag, Parameter(help="Explain why the second-best division is slower.")] = False,
    output: FolderOutput = None,
    json: Json = False,
) -> None:
    """`optpipe plan`."""
    if stack == "primus":
        raise InputError("stack = 'primus': plan for megatron, then optpipe solve problem.json --stack primus")
    run: dict[str, Any] = {"microbatches": 1, "sequence": sequence, "precision": precision, "attention": attention}
    run |= {"mtp": mtp, "lora": lora, "gradient_bytes": gradient_bytes, "optimizer_bytes": optimizer_bytes}
    run |= {"host_memory_bytes": host_bytes(host_memory_gb), "moe_expert_capacity_factor": moe_expert_capacity_factor}
    run |= {"moe_pad_expert_input_to_capacity": moe_pad_expert_input_to_capacity}
    chosen = {name: value for name, value in (("dispatch", dispatch), ("overlap", overlap)) if value is not None}
    run |= BY_DEFAULT.get(stack, {}) | chosen
    model = read_model(name)
    require_use(model, overlap, chosen)
    question = Question.from_dict(
        {
            "model": model,
            "gpu": read_gpu(gpu),
            "gpus": gpus,
            "batch": batch,
            "run": Run.from_dict(run, "plan"),
            "margin": margin,
            "offload": offload,
            "stack": stack,
        },
        "plan",
    )
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


def _search(question: Question, options: EffortOptions, no_cache: bool, quiet: bool, today: Today | None) -> Plan:
    """The best plan within the time limit, or until Ctrl-C; a second Ctrl-C ends the command."""
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

    def __init__(self, cache: Cache | None, options: EffortOptions) -> None:
        self._cache, self._options = cache, options
        self._running: list[Search] = []
        self._cancelled = False

    def __call__(self, problem: Problem, start: Schedule | None, seconds: float) -> Result:
        """Search for so many seconds."""
        asked = self._options.model_dump() | {"time_limit_s": seconds, "threads": 1, "placements": "keep"}
        running = search(problem, SolveOptions.model_validate(asked), start, self._cache)
        self._running.append(running)
        if self._cancelled:
            running.cancel()
        *_, last = running
        return last

    def cancel(self) -> None:
        """End all searches; each gives its best so far."""
        self._cancelled = True
        for running in tuple(self._running):
            running.cancel()
