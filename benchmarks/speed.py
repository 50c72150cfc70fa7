"""How long it takes to judge a schedule (`core`), and to make a first one (`first`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt
from cyclopts.validators import Number

from benchmarks.problems import offloading
from benchmarks.timing import repeated, timed
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify, check, simulate
from optpipe_solver.bounds import memory_bound
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.methods import HEURISTICS

Devices = Annotated[int, Parameter(validator=Number(gte=1, lte=256))]
Microbatches = Annotated[int, Parameter(validator=Number(gte=1, lte=4096))]


def core(*, devices: Devices = 64, microbatches: Microbatches = 512, repeats: PositiveInt = 9) -> None:
    """Time `simulate`, `certify` and `check` on a pipeline that offloads every activation, after warm-up."""
    schedule = everything_offloaded(devices, microbatches)
    problem = schedule.problem
    texts = [program.texts() for program in schedule.programs]
    steps: dict[str, Callable[[], object]] = {
        "simulate": lambda: simulate(problem, replace(schedule)),  # a copy: a schedule keeps what it has computed
        "certify": lambda: certify(problem, replace(schedule)),
        "check": lambda: check(problem, replace(schedule)),
        "parse": lambda: [type(program).parse(text) for program, text in zip(schedule.programs, texts, strict=True)],
    }
    ops = sum(len(program) for program in schedule.programs)
    timed_ops = ops - devices * microbatches  # drops take no time
    print(
        f"{devices} devices × {microbatches} micro-batches, {timed_ops} timed ops ({ops} with drops); {repeats} runs "
        "after warm-up, ms"
    )
    for name, step in steps.items():
        ms = [took for _, took in repeated(lambda step=step: timed(step), repeats)]  # type: ignore[misc]
        print(f"{name:10} median {median(ms):7.1f}   min {min(ms):7.1f}   max {max(ms):7.1f}")


def first(*, devices: Devices = 64, microbatches: Microbatches = 512) -> None:
    """Time each heuristic's first schedule, verified, with memory for three activations; without the start of a
    process."""
    problem = offloading(devices, microbatches)
    print(f"{devices} devices × {microbatches} micro-batches, lower bound {memory_bound(problem):g} ms")
    for name in reversed(HEURISTICS):
        (schedule, wrong), ms = timed(lambda name=name: first_schedule(name, problem))  # type: ignore[misc]
        verdict = "  does not hold" if wrong else ""
        print(f"{name:12}{ms / 1e3:7.2f} s{schedule.makespan_ms:12g} ms{verdict}")


def first_schedule(heuristic: str, problem: Problem) -> tuple[Schedule, list[str]]:
    """A heuristic's first schedule, and what is wrong with it."""
    schedule = next(STREAMS[heuristic](problem, "makespan"))
    return schedule, check(problem, schedule)


def everything_offloaded(devices: int, microbatches: int) -> Schedule:
    """1F1B in which each activation leaves after its forward and returns before its backward."""
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
