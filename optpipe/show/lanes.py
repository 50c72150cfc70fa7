"""What every picture draws: blocks on each device's compute and transfer lane, and the bytes it holds over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from optpipe.model.ops import MARKS, Kind, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule

# One colour a kind, used by every picture. Forward, backward and weight gradient must be told apart in grey, too.
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


DARKEST = 0.42  # of a device's stages the last one's colours are mixed with so much black


class Block(NamedTuple):
    """One op on a lane; times in ms. Of two that run together one takes the upper half of the lane, one the lower."""

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
    """Whether some device runs more than one, so that a legend has to say which is which."""
    return any(_depths(problem))


def _depths(problem: Problem) -> list[float]:
    """(S,) how dark a stage is: of a device's stages the first is not, the last one most."""
    own = [problem.stages_on(stage.device) for stage in problem.stages]
    return [DARKEST * stages.index(s) / max(1, len(stages) - 1) for s, stages in enumerate(own)]


def _darker(colour: str, share: float) -> str:
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * (1 - share)):02X}" for i in (1, 3, 5))


def memory_over_time(schedule: Schedule, device: int) -> list[tuple[float, int]]:
    """Steps (ms, bytes held from then on) of one device at nominal times."""
    timeline, effects = schedule.timeline, schedule.compiled.effects
    own = timeline.rows.of_device(device)
    moments = np.r_[timeline.end[own], timeline.start[own]]
    amounts = np.r_[-effects.frees[own], effects.takes[own]]
    order = np.argsort(moments, kind="stable")  # what is freed at a moment counts before what is taken then
    held = np.cumsum(amounts[order])
    last = np.r_[np.diff(moments[order]) > 0, True][: len(order)]
    return list(zip(moments[order][last].tolist(), held[last].tolist(), strict=True))


def kinds_in(schedule: Schedule) -> list[Kind]:
    """The kinds that a legend has to name."""
    found = set(np.unique(schedule.compiled.rows.kind).tolist())
    return [kind for kind in COLOURS if kind in found]
