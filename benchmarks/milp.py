"""What each practical step of OptPipe, section 4.1, is worth."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    lengths, bounds = [math.inf], [0.0]
    _, outcome = minimize(
        solver,
        Task(
            model.rows,
            model.variables.length,
            assignment(model.variables, warm) if warm else {},
            clock,
            threads=1,
            seed=0,
            on_solution=lambda x: lengths.append(float(x[model.variables.length]) / model.scale),
            on_bound=lambda bound: bounds.append(bound / model.scale),
        ),
        lambda text: print(text, file=sys.stderr),
    )
    seconds = clock.passed_s
    best, bound = min(lengths), max(bounds)
    return {
        "solver": outcome.solver,
        "variables": len(model.rows.lower),
        "rows": len(model.rows.at_least),
        "non-zeros": len(model.rows.matrix()[2]),
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
