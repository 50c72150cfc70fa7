"""`optpipe bench …`: the figures in the docs, printed again on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.bench_milp import milp
from optpipe.cli.output import Json, print_json

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure on this machine."""


app.command()(milp)


@app.command()
def core(
    devices: Annotated[int, typer.Option(min=1, max=256)] = 64,
    microbatches: Annotated[int, typer.Option(min=1, max=4096)] = 512,
    repeats: Annotated[int, typer.Option(min=1)] = 9,
    json: Json = False,
) -> None:
    """Time `simulate`, `certify` and `check` on a pipeline that offloads every activation, after warm-up."""
    from optpipe.memory import certify
    from optpipe.timeline import simulate
    from optpipe.validity import check

    schedule = _everything_offloaded(devices, microbatches)
    problem = schedule.problem
    texts = [program.texts() for program in schedule.programs]
    steps: dict[str, Callable[[], object]] = {
        "simulate": lambda: simulate(problem, schedule),
        "certify": lambda: certify(problem, schedule),
        "check": lambda: check(problem, schedule),
        "parse": lambda: [type(program).parse(text) for program, text in zip(schedule.programs, texts, strict=True)],
    }
    ops = sum(len(program) for program in schedule.programs)
    timed = ops - devices * microbatches  # drops take no time
    milliseconds = {name: [_ms(step) for _ in range(repeats + 2)][2:] for name, step in steps.items()}  # two to warm up
    if json:
        print_json({"timed_ops": timed, "ops": ops, "median_ms": {name: median(values) for name, values in milliseconds.items()}})
        return
    typer.echo(f"{devices} devices × {microbatches} micro-batches, {timed} timed ops ({ops} with drops); {repeats} runs after warm-up, ms")
    for name, values in milliseconds.items():
        typer.echo(f"{name:10} median {median(values):7.1f}   min {min(values):7.1f}   max {max(values):7.1f}")


@app.command()
def solver(
    problems: Annotated[list[Path], typer.Argument(help="Problem files.")],
    time_limit: Annotated[float, typer.Option(help="Seconds for each.")] = 60.0,
    json: Json = False,
) -> None:
    """What `solve` reaches and when: first schedule, best after 1 s, 10 s and at the end, bound. Start of processes included."""
    from optpipe.problem import Problem

    loaded = [Problem.load(path) for path in problems]
    rows = []
    if not json:
        typer.echo(f"{'problem':18}{'first: s':>9}{'ms':>10}{'1 s':>10}{'10 s':>10}{f'{time_limit:g} s':>10}{'bound':>10}{'gap':>7}  by")
    for problem in loaded:
        rows.append(row := _progress(problem, time_limit))
        if not json:
            figures = (row[name] for name in ("first_ms", "ms_after_1_s", "ms_after_10_s", "best_ms", "bound_ms"))
            shown = "".join(f"{'–' if value is None else f'{value:.6g}':>10}" for value in figures)
            first, gap = row["first_s"], row["gap"]
            end = f"{'–' if gap is None else f'{gap:.1%}':>7}  {row['method'] or row['reason']}"
            typer.echo(f"{problem.name[:17]:18}{'–' if first is None else f'{first:.2f}':>9}{shown}{end}")
    if json:
        print_json(rows)


def _progress(problem: Problem, time_limit: float) -> dict[str, Any]:
    """One search, and what it had when."""
    from optpipe.anytime import improve

    results = list(improve(problem, time_limit=time_limit))
    found = [(result.time_s, result.makespan_ms) for result in results if result.makespan_ms is not None]
    last = results[-1]

    def after(seconds: float) -> float | None:
        return min((ms for moment, ms in found if moment <= seconds), default=None)

    return {
        "problem": problem.name,
        "first_s": found[0][0] if found else None,
        "first_ms": found[0][1] if found else None,
        "ms_after_1_s": after(1.0),
        "ms_after_10_s": after(10.0),
        "best_ms": last.makespan_ms,
        "bound_ms": last.lower_bound_ms,
        "gap": last.gap,
        "status": last.status,
        "method": last.method,
        "reason": last.reason,
    }


def _ms(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) * 1000


def _everything_offloaded(devices: int, microbatches: int) -> Schedule:
    from optpipe.problem import Device, Problem, Stage
    from optpipe.schedule import Schedule

    stage = Stage(
        device=0,
        forward_ms=10.0,
        backward_input_ms=10.0,
        backward_weight_ms=8.0,
        activation_bytes=5 * 10**9,
        weight_grad_bytes=2 * 10**9,
        offload_ms=12.0,
        reload_ms=12.0,
        offload_bytes=5 * 10**9,
    )
    problem = Problem(
        microbatches=microbatches,
        p2p_ms=1.0,
        devices=(Device(memory_bytes=15 * 10**9),) * devices,
        stages=tuple(stage.model_copy(update={"device": d}) for d in range(devices)),
    )
    programs = []
    for s in range(devices):
        warmup = min(devices - s, microbatches) - 1
        program = []
        for step in range(microbatches + warmup):
            if step < microbatches:
                program += [f"{s}F{step}", f"{s}O{step}", f"{s}D{step}"]
            if (j := step - warmup) >= 0:
                program += [f"{s}R{j}", f"{s}B{j}", f"{s}W{j}"]
        programs.append(program)
    return Schedule.parse(problem, programs)
