"""The page of a diagnosis: losses as a waterfall, devices by steps as a heat map, and the cures with their lines. Each
of them shows what it is about in the picture of the measured and the cured step. `show/web/diagnosis.js` draws it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from optpipe.diagnose.batches import UserFacts, batch_of
from optpipe.diagnose.losses import Loss, excess_of
from optpipe.diagnose.report import Diagnosis
from optpipe.model.arrays import Floats
from optpipe.schedule import Schedule
from optpipe.show.figure import changes, side_by_side
from optpipe.show.page import Picture, page

MOST_ROWS, MOST_STEPS = 64, 100  # of the heat map
MOST_OPS = 30_000  # of all runs that can be shown in the picture: about 2 MB
SLOW = 1.05  # times as long as others with the same work: listed first
HEIGHT = 2400


def picture(diagnosis: Diagnosis) -> Picture:
    """The page."""
    return page(document(diagnosis), HEIGHT)


def document(diagnosis: Diagnosis) -> dict[str, Any]:
    """What the page draws: the document of a figure, whose schedules are the step as it ran, the same step after each
    cure, and further runs; and as `diagnosis` all figures, with

    - `heat`: the rows (replica, device), how many times as long as others with the same work each took by step, and how
      many rows and steps are left out;
    - `runs`: (step, replica, number of its schedule) of those that can be shown;
    - `places`: by loss, the run where it is largest, and the device, the stage or the micro-batch that it is due to.
    """
    cures, excess = diagnosis.cures, np.exp(excess_of(diagnosis.runs))
    runs, ms, rows = diagnosis.runs, diagnosis.runs.replay()[0], _rows(diagnosis, excess)
    slowest = {
        step: int(runs.replica[max(runs.runs_of(step), key=lambda run: ms[run])]) for step in runs.steps.tolist()
    }
    before = replace(cures.before, method=f"step {cures.steps[-1]} as it ran")
    after = [replace(cure.schedule, method=cure.title) for cure in cures.cures]
    ran = list(_drawn(diagnosis, rows, slowest))
    schedules = [before, *after, *(schedule for _, schedule in ran)]
    marks = [None, *(changes(each, before) for each in after), *(None for _ in ran)]
    name = f"What a trace loses: {diagnosis.form}"
    named = [replace(each, problem=each.problem.replace(name=name)) for each in schedules]
    figure = side_by_side(named, marks, memory=False)
    return figure | {
        "diagnosis": diagnosis.to_dict()
        | {
            "heat": _heat(diagnosis, excess, rows),
            "runs": [(*run, 1 + len(after) + n) for n, (run, _) in enumerate(ran)],
            "places": [_place(diagnosis, slowest, part) for part in diagnosis.losses.parts],
        }
    }


def _rows(diagnosis: Diagnosis, excess: Floats) -> list[tuple[int, int]]:
    """The (replica, device) of the heat map: those that are slow first."""
    runs = diagnosis.runs
    median = {
        (replica, device): float(np.median(excess[runs.replica == replica, device]))
        for replica in runs.replicas.tolist()
        for device in range(runs.devices)
    }
    rows = sorted(median, key=lambda row: -median[row])[:MOST_ROWS]
    return sorted(rows, key=lambda row: (median[row] <= SLOW, row))


def _heat(diagnosis: Diagnosis, excess: Floats, rows: list[tuple[int, int]]) -> dict[str, Any]:
    runs = diagnosis.runs
    steps = runs.steps[:MOST_STEPS].tolist()
    factor = {
        (replica, step): excess[run].round(3).tolist()
        for run, (replica, step) in enumerate(zip(runs.replica.tolist(), runs.step.tolist(), strict=True))
    }
    return {
        "steps": steps,
        "rows": rows,
        "factors": [[factor[replica, step][device] for step in steps] for replica, device in rows],
        "left_out": [len(runs.replicas) * runs.devices - len(rows), len(runs.steps) - len(steps)],
    }


def _drawn(
    diagnosis: Diagnosis, rows: list[tuple[int, int]], slowest: dict[int, int]
) -> Iterator[tuple[tuple[int, int], Schedule]]:
    """Each (step, replica) that can be shown, as it ran: first the slowest replica of each step."""
    runs = diagnosis.runs
    steps = runs.steps[:MOST_STEPS].tolist()
    wanted = [(step, slowest[step]) for step in steps]
    wanted += [(step, replica) for replica, _ in rows for step in steps]
    chosen, ops = list[tuple[int, int]](), 0
    for step, replica in dict.fromkeys(wanted):
        ops += int(np.diff(runs.begins)[(runs.step == step) & (runs.replica == replica)].sum())
        if ops > MOST_OPS:
            break
        chosen.append((step, replica))
    for step in dict.fromkeys(step for step, _ in chosen):
        batch = batch_of(runs, runs.ms, step, UserFacts())
        replicas = runs.replica[runs.runs_of(step)].tolist()
        for r, replica in enumerate(replicas):
            if (step, replica) in chosen:
                name = f"step {step}{f', replica {replica}' * (len(runs.replicas) > 1)} as it ran"
                yield (step, replica), replace(batch.as_ran(r), method=name)


def _place(diagnosis: Diagnosis, slowest: dict[int, int], part: Loss) -> dict[str, int | None]:
    """Where a loss is largest."""
    runs, losses = diagnosis.runs, diagnosis.losses
    step = int(runs.steps[np.argmax(part.ms[:MOST_STEPS])])
    place: dict[str, int | None] = {"step": step, "replica": slowest[step]}
    place |= dict.fromkeys(("device", "stage", "microbatch"))
    if part.name == "far-ops" and losses.far_ops:
        far = losses.far_ops[0]
        place |= {"step": far.step, "replica": far.replica, "stage": far.op.stage, "microbatch": far.op.microbatch}
    if part.name == "slow-device" and losses.slow_devices:
        place |= {"replica": losses.slow_devices[0].replica, "device": losses.slow_devices[0].device}
    if part.name == "stages" and losses.uneven_stages:
        place["stage"] = losses.uneven_stages[0][0]
    if part.name == "micro-batches":
        (run,) = np.flatnonzero((runs.step == step) & (runs.replica == slowest[step])).tolist()
        ops = runs.ops_of(run)
        place["microbatch"] = int(np.argmax(np.bincount(runs.microbatch[ops], runs.ms[ops])))
    return place
