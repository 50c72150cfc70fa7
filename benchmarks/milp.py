"""What each practical step of OptPipe, section 4.1, is worth; and two builds, or triangle cuts, side by side."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from typing import Any

from cyclopts.types import PositiveFloat, PositiveInt

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe_solver.clock import Clock
from optpipe_solver.exact import serial_ms
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.methods import milp_complaint
from optpipe_solver.milp.backends import Task, minimize
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.variables import ALL, WITHOUT_STEPS, Switches, assignment

SIZES = ((2, 4), (3, 6), (4, 8))  # devices, micro-batches
STEPS = {
    "corrected, no steps": WITHOUT_STEPS,
    "order of entry": replace(WITHOUT_STEPS, order="entry"),
    "fixed order": replace(WITHOUT_STEPS, order="stages"),
    "one variable a pair": replace(WITHOUT_STEPS, one_per_pair=True),
    "no determined ones": replace(WITHOUT_STEPS, determined=True),
    "triangles": replace(WITHOUT_STEPS, triangles="compute"),
    "all triangles": replace(WITHOUT_STEPS, triangles="all"),
    "warm start": replace(WITHOUT_STEPS, warm_start=True),
    "tight big-M": replace(WITHOUT_STEPS, tight=True),
    "workload": replace(WITHOUT_STEPS, workload=True),
    "all of the paper": replace(ALL, workload=False),
    "all, no triangles": replace(ALL, triangles="none"),
    "all, all triangles": replace(ALL, triangles="all"),
    "all": ALL,
}
COLUMNS = ("size", "switches", "solver", "variables", "rows", "non-zeros", "seconds", "ms", "bound", "gap")


def milp(problem: Path, /, *, solver: str = "highs", time_limit_s: float = 60.0) -> None:
    """Measure each practical step of OptPipe, section 4.1: the model's size, and how far a solver gets in each search's
    time limit.

    Parameters
    ----------
    problem
        Problem file; smaller ones are cut from it.
    time_limit_s
        Of each search, in seconds.
    """
    if complaint := milp_complaint(solver):
        raise InputError(f"solver = {solver!r}: {complaint}")
    whole = Problem.load(problem)
    if whole.routes is not None or whole.layers is not None:
        raise InputError(
            "routes, layers: a problem without either was expected, so that smaller ones can be cut from it"
        )
    sizes = [(p, m) for p, m in SIZES if p <= len(whole.devices) and m <= whole.microbatches]
    if not sizes:
        raise InputError(f"devices × microbatches: {SIZES[0][0]} × {SIZES[0][1]} at least were expected")
    print(line(dict(zip(COLUMNS, COLUMNS, strict=True))))
    for devices, microbatches in sizes:
        part = cut(whole, devices, microbatches)
        for name, switches in STEPS.items():
            row = solved(part, switches, solver, time_limit_s)
            print(line({"size": f"{devices}x{microbatches}", "switches": name} | row))


def cut(problem: Problem, devices: int, microbatches: int) -> Problem:
    """The problem's first devices with their stages, for fewer micro-batches."""
    content = problem.model_dump(mode="json", exclude_none=True)
    content |= {
        "devices": content["devices"][:devices],
        "stages": [s for s in content["stages"] if s["device"] < devices],
    }
    return type(problem).from_dict(content | {"microbatches": microbatches})


def solved(problem: Problem, switches: Switches, solver: str, time_limit: float) -> dict[str, Any]:
    """The size of a model with its cuts, and how far a solver gets with it on one thread.

    AdaOffload's schedule is the warm start. `solver` is the one that solved it: HiGHS if another has no licence for the
    size.
    """
    warm = next(STREAMS["adaoffload"](problem, "makespan")) if switches.warm_start else None
    clock = Clock(time_limit)
    model = Model(problem, "makespan", warm.makespan_ms if warm else serial_ms(problem), switches)
    rows, kept = model.reduced
    number = {var: k for k, var in enumerate(kept.tolist())}
    start = assignment(model.variables, warm) if warm else {}
    length = number[model.variables.length]
    lengths, bounds = [math.inf], [0.0]
    _, outcome = minimize(
        solver,
        Task(
            rows,
            length,
            {number[var]: value for var, value in start.items() if var in number},
            clock,
            threads=1,
            seed=0,
            on_solution=lambda x: lengths.append(float(x[length]) / model.scale),
            on_bound=lambda bound: bounds.append(bound / model.scale),
        ),
        lambda text: print(text, file=sys.stderr),
    )
    seconds = clock.passed_s
    best, bound = min(lengths), max(bounds)
    return {
        "solver": outcome.solver,
        "variables": len(rows.lower),
        "rows": len(rows.at_least),
        "non-zeros": len(rows.matrix()[2]),
        "seconds": seconds,
        "ms": best if best < math.inf else None,
        "bound": bound,
        "gap": max(0.0, 1 - bound / best) if best < math.inf else None,
    }


def line(row: dict[str, Any]) -> str:
    *figures, gap = ("–" if row[column] is None else row[column] for column in COLUMNS[3:])
    shown = [f"{x if isinstance(x, str | int) else f'{x:.5g}':>10}" for x in figures]
    shown.append(f"{gap if isinstance(gap, str) else f'{gap:.1%}':>8}")
    return f"{row['size']:6}{row['switches']:22}{row['solver']:12}{''.join(shown)}"


# Two builds, or kinds of triangle cuts, side by side

PARTS = (  # of examples, with their devices and micro-batches: 72 to 384 compute ops
    *(("fastlink-8x16", 4, 6), ("slowlink-8x16", 4, 6), ("uneven-6x12", 4, 6), ("shared-pcie-4x8", 4, 6)),
    *(("shared-pcie-4x8", 4, 8), ("fastlink-8x16", 5, 8), ("slowlink-8x16", 5, 8), ("slowlink-8x16", 6, 8)),
    *(("half-memory-8x16", 6, 10), ("half-memory-8x16", 8, 16)),
)
TRACED = """
import json, sys, time
from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, Incumbent, Programs, Request
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.milp import search
from optpipe_solver.milp.variables import Switches

path, seconds, seed, triangles = sys.argv[1:]
problem = Problem.load(path)
warm = next(STREAMS["adaoffload"](problem, "makespan"))
ms, bound_ms, steps = warm.makespan_ms, trivial_bound(problem), []

def emit(frame):
    global ms, bound_ms
    if isinstance(frame, Incumbent):
        ms = min(ms, frame.schedule.schedule(problem).makespan_ms)
    elif isinstance(frame, Bound):
        bound_ms = max(bound_ms, frame.lower_bound_ms)
    steps.append((time.process_time() - began, max(0.0, 1 - bound_ms / ms)))

asked = {"time_limit_s": float(seconds), "threads": 1, "seed": int(seed), "solver": "highs"}
began = time.process_time()
request = Request(problem=problem, method="milp", warm_start=Programs.from_schedule(warm), **asked)
search.solve(request, emit, Switches(**({"triangles": triangles} if triangles else {})))
print(json.dumps([len(search.compute_ops(problem)), [(0.0, max(0.0, 1 - trivial_bound(problem) / warm.makespan_ms)),
                                                     *steps, (time.process_time() - began, -1.0)]]))
"""
Trace = list[tuple[float, float]]  # processor time and gap, and at last the whole time, with a gap of -1


def gaps(
    before: Path,
    after: Path,
    /,
    *,
    triangles: bool = False,
    time_limit: PositiveFloat = 60,
    repeat: PositiveInt = 3,
    first: PositiveInt = len(PARTS),
) -> None:
    """Processor time of the MILP to one gap, by two folders of OptPipe in turn: HiGHS, one thread, from AdaOffload's
    schedule.

    The gap is the least that all searches reach. Of times the median counts.

    Parameters
    ----------
    triangles
        Instead of two builds, the triangle cuts of `after`: `none` beside `compute`, and `none` beside `all`.
    time_limit
        Of each search, in seconds.
    repeat
        How many times, each with another seed.
    first
        How many problems.
    """
    sides = [(before, ""), (after, "")] if not triangles else [(after, each) for each in ("none", "compute", "all")]
    print(
        f"{'problem':24}{'ops':>5}{'gap':>9}"
        + "".join(f"{each or folder.absolute().name:>12}" for folder, each in sides)
        + "   ratios"
    )
    ratios: list[list[float]] = [[] for _ in sides[1:]]
    with TemporaryDirectory(prefix="optpipe-") as temporary:
        for name, devices, microbatches in PARTS[:first]:
            path = Path(temporary) / "problem.json"
            cut(Problem.load(Path(f"examples/problems/{name}.json")), devices, microbatches).save(path)
            traces: list[list[Trace]] = [[] for _ in sides]
            for seed in range(repeat):
                for (folder, kind), each in zip(sides, traces, strict=True):
                    ops, trace = traced(folder, [str(path), str(time_limit), str(seed), kind])
                    each.append(trace)
            gap = max(min(g for _, g in trace if g >= 0) for each in traces for trace in each)
            seconds = [median(time_to(gap, trace) for trace in each) for each in traces]
            for found, s in zip(ratios, seconds[1:], strict=True):
                found.append(max(s, LEAST_S) / max(seconds[0], LEAST_S))
            shown = "".join(f"{s:>10.2f} s" for s in seconds) + "".join(f"{found[-1]:>9.2f}" for found in ratios)
            print(f"{f'{name} {devices}x{microbatches}':24}{ops:>5}{gap:>9.2%}{shown}", flush=True)
    print("geometric mean of ratios:", *(f"{geometric_mean(found):.3f}" for found in ratios))


LEAST_S = 0.05  # what is reached sooner takes so long


def time_to(gap: float, trace: Trace) -> float:
    """The processor time after which a search had closed the gap so far."""
    return next(seconds for seconds, reached in trace if reached <= gap + 1e-6)


def traced(folder: Path, arguments: Sequence[str]) -> tuple[int, Trace]:
    """The compute ops of a problem, and how a folder's MILP closes its gap."""
    folders = ("", "solver", "runtime", "server", "cache", "cli")
    paths = os.pathsep.join(str(folder.absolute() / each) for each in folders)
    done = subprocess.run(
        [sys.executable, "-c", TRACED, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise InputError(f"{folder}: {done.stderr.strip()[-500:]}")
    ops, trace = json.loads(done.stdout)
    return ops, trace
