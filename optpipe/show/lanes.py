"""What every picture draws: blocks on the compute and transfer lanes of each device, and its memory over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from optpipe.model.ops import MARKS, Kind, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule

# The colour of each kind in every picture. Forward, backward and weight gradient differ in grey print, too.
COLOURS = {
    Kind.F: "#4C78C8",
    Kind.B: "#E8A33D",
    Kind.W: "#7FB77E",
    Kind.BW: "#D9822B",
    Kind.C: "#9AA5B1",
    Kind.O: "#B65FCF",
    Kind.R: "#2FA7A0",
    Kind.E: "#C2557A",
    Kind.L: "#5B8F3C",
    Kind.G: "#8C6BB1",
    Kind.U: "#B08D57",
    Kind.P: "#4E9DB0",
}
NAMES = {
    Kind.F: "forward",
    Kind.B: "input gradient",
    Kind.W: "weight gradient",
    Kind.BW: "backward",
    Kind.C: "recompute",
    Kind.O: "offload",
    Kind.R: "reload",
    Kind.E: "evict",
    Kind.L: "load",
    Kind.G: "gradients out",
    Kind.U: "update on the host",
    Kind.P: "parameters in",
}
DARKEST = 0.42  # the share of black in the colours of a device's last stage


class Block(NamedTuple):
    """One op on a lane; times in ms. The ops of a pair take the upper and the lower half of the lane."""

    op: Op
    device: int
    transfer: bool
    start: float
    end: float
    colour: str
    half: Literal["", "upper", "lower"] = ""


def blocks(schedule: Schedule) -> Iterator[Block]:
    """Every op that takes time, device after device."""
    timeline, depth = schedule.timeline, _depths(schedule.problem)
    rows = timeline.rows
    columns = (rows.table, rows.device, rows.transfer, rows.second, timeline.start, timeline.end)
    for (kind, stage, microbatch, part, joined), device, on_link, second, start, end in zip(
        *(c.tolist() for c in columns), strict=True
    ):
        if kind not in MARKS:
            colour = _darker(COLOURS[Kind(kind)], depth[stage])
            yield Block(
                Op(Kind(kind), stage, microbatch, part),
                device,
                on_link,
                start,
                end,
                colour,
                "upper" if joined else "lower" if second else "",
            )


def several_stages(problem: Problem) -> bool:
    """Whether some device runs several stages, so that the legend must explain their shades."""
    return any(_depths(problem))


def _depths(problem: Problem) -> list[float]:
    """(S,) the share of black in each stage's colours: from 0 for a device's first stage to `DARKEST` for its last."""
    neighbours = [problem.stages_on(stage.device) for stage in problem.stages]
    return [DARKEST * stages.index(s) / max(1, len(stages) - 1) for s, stages in enumerate(neighbours)]


def _darker(colour: str, share: float) -> str:
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * (1 - share)):02X}" for i in (1, 3, 5))


def memory_over_time(schedule: Schedule, device: int) -> list[tuple[float, int]]:
    """What a device holds at nominal times: (ms, bytes held from then on) at each change."""
    timeline, effects = schedule.timeline, schedule.compiled.effects
    rows = timeline.rows.of_device(device)
    moments = np.r_[timeline.end[rows], timeline.start[rows]]
    amounts = np.r_[-effects.frees[rows], effects.takes[rows]]
    order = np.argsort(moments, kind="stable")  # at the same moment bytes are freed before others are taken
    held = np.cumsum(amounts[order])
    last = np.r_[np.diff(moments[order]) > 0, True][: len(order)]
    return list(zip(moments[order][last].tolist(), held[last].tolist(), strict=True))


def kinds_in(schedule: Schedule) -> list[Kind]:
    """The kinds of op in a schedule that the legend names."""
    found = set(np.unique(schedule.compiled.rows.kind).tolist())
    return [kind for kind in COLOURS if kind in found]
