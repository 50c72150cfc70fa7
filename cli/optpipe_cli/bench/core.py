"""`optpipe bench core` and `bench first`: how long judging a schedule takes, and making a first one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe_cli.output import Json, print_json

if TYPE_CHECKING:
    from optpipe.model.problem import Problem
    from optpipe.schedule import Schedule


def core(
    devices: Annotated[int, typer.Option(min=1, max=256)] = 64,
    microbatches: Annotated[int, typer.Option(min=1, max=4096)] = 512,
    repeats: Annotated[int, typer.Option(min=1)] = 9,
    json: Json = False,
) -> None:
    """Time `simulate`, `certify` and `check` on a pipeline that offloads every activation, after warm-up."""
    from optpipe.schedule import certify, check, simulate

    schedule = _everything_offloaded(devices, microbatches)
    problem = schedule.problem
    texts = [program.texts() for program in schedule.programs]
    steps: dict[str, Callable[[], object]] = {
        "simulate": lambda: simulate(problem, replace(schedule)),  # a copy: a schedule keeps what it has computed
        "certify": lambda: certify(problem, replace(schedule)),
        "check": lambda: check(problem, replace(schedule)),
        "parse": lambda: [type(program).parse(text) for program, text in zip(schedule.programs, texts, strict=True)],
    }
    ops = sum(len(program) for program in schedule.programs)
    timed = ops - devices * microbatches  # drops take no time
    milliseconds = {name: [_ms(step) for _ in range(repeats + 2)][2:] for name, step in steps.items()}  # two to warm up
    if json:
        print_json(
            {
                "timed_ops": timed,
                "ops": ops,
                "median_ms": {name: median(values) for name, values in milliseconds.items()},
            }
        )
        return
    typer.echo(
        f"{devices} devices × {microbatches} micro-batches, {timed} timed ops ({ops} with drops); {repeats} runs "
        "after warm-up, ms"
    )
    for name, values in milliseconds.items():
        typer.echo(f"{name:10} median {median(values):7.1f}   min {min(values):7.1f}   max {max(values):7.1f}")


def first(
    devices: Annotated[int, typer.Option(min=1, max=256)] = 64,
    microbatches: Annotated[int, typer.Option(min=1, max=4096)] = 512,
    json: Json = False,
) -> None:
    """Time each heuristic's first schedule, verified, with memory for three activations; without the start of a
    process."""
    from optpipe.schedule import check
    from optpipe_solver.bounds import memory_bound
    from optpipe_solver.heuristics import STREAMS
    from optpipe_solver.methods import HEURISTICS

    problem = offloading(devices, microbatches)
    bound = memory_bound(problem)
    rows = []
    for name in reversed(HEURISTICS):
        began = time.perf_counter()
        schedule = next(STREAMS[name](problem, "makespan"))
        wrong = check(problem, schedule)
        rows.append(
            {"method": name, "seconds": time.perf_counter() - began, "ms": schedule.makespan_ms, "valid": not wrong}
        )
    if json:
        print_json({"bound_ms": bound, "first": rows})
        return
    typer.echo(f"{devices} devices × {microbatches} micro-batches, lower bound {bound:g} ms")
    for row in rows:
        typer.echo(
            f"{row['method']:12}{row['seconds']:7.2f} s{row['ms']:12g} ms{'' if row['valid'] else '  does not hold'}"
        )


def _ms(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) * 1000


def offloading(devices: int, microbatches: int, room: int = 3) -> Problem:
    """Memory for `room` activations. Each takes 12 ms to offload and 12 ms to reload; F + B + W take 28 ms."""
    from optpipe.model.problem import Problem
    from optpipe.model.records import Device, Stage

    stage = Stage(
        device=0,
        forward_ms=10.0,
        backward_input_ms=10.0,
        backward_weight_ms=8.0,
        activation_bytes=5 * 10**9,
        saved_for_weight_bytes=2 * 10**9,
        offload_ms=12.0,
        reload_ms=12.0,
        offload_bytes=5 * 10**9,
    )
    return Problem(
        microbatches=microbatches,
        p2p_ms=1.0,
        devices=(Device(activation_budget_bytes=room * 5 * 10**9),) * devices,
        stages=tuple(stage.model_copy(update={"device": d}) for d in range(devices)),
    )


def _everything_offloaded(devices: int, microbatches: int) -> Schedule:
    from optpipe.schedule import Schedule

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
    return Schedule.parse(offloading(devices, microbatches), programs)
