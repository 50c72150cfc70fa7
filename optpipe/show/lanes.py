"""What every picture draws: blocks on the compute and transfer lanes of each device, and its memory over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from optpipe.evaluate.effects import Peak
from optpipe.model.arrays import Floats, Ints
from optpipe.model.ops import KINDS, MARKS, Kind, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule

LIGHT, DARK = "#ffffff", "#111111"  # of text on a colour
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
    timeline, depth = schedule.timeline, depths(schedule.problem)
    rows = timeline.rows
    columns = (rows.table, rows.device, rows.transfer, rows.second, timeline.start, timeline.end)
    for (kind, stage, microbatch, part, joined), device, on_link, second, start, end in zip(
        *(c.tolist() for c in columns), strict=True
    ):
        if kind not in MARKS:
            colour = darker(colour_of(Kind(kind)), depth[stage])
            yield Block(
                Op(Kind(kind), stage, microbatch, part),
                device,
                on_link,
                start,
                end,
                colour,
                "upper" if joined else "lower" if second else "",
            )


def colour_of(kind: Kind) -> str:
    return KINDS[kind].colour or "#000000"


def several_stages(problem: Problem) -> bool:
    """Whether some device runs several stages, so that the legend must explain their shades."""
    return any(depths(problem))


def depths(problem: Problem) -> list[float]:
    """(S,) the share of black in each stage's colours: from 0 for a device's first stage to `DARKEST` for its last."""
    neighbours = [problem.stages_on(stage.device) for stage in problem.stages]
    return [DARKEST * stages.index(s) / max(1, len(stages) - 1) for s, stages in enumerate(neighbours)]


def darker(colour: str, share: float) -> str:
    """A colour mixed with a share of black."""
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * (1 - share)):02X}" for i in (1, 3, 5))


def text_colour(colour: str) -> str:
    """Dark or light, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return DARK if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.22 else LIGHT


def memory_steps(schedule: Schedule, device: int) -> tuple[Floats, Ints]:
    """What a device holds at nominal times: (k,) the moments in ms at which it changes, and the bytes from then on."""
    timeline, effects = schedule.timeline, schedule.compiled.effects
    rows = timeline.rows.of_device(device)
    moments = np.r_[timeline.end[rows], timeline.start[rows]]
    amounts = np.r_[-effects.frees[rows], effects.takes[rows]]
    order = np.argsort(moments, kind="stable")  # at the same moment bytes are freed before others are taken
    held = np.cumsum(amounts[order])
    last = np.r_[np.diff(moments[order]) > 0, True][: len(order)]
    return moments[order][last], held[last]


def memory_over_time(schedule: Schedule, device: int) -> list[tuple[float, int]]:
    """`memory_steps` as a list of (ms, bytes held from then on)."""
    moments, held = memory_steps(schedule, device)
    return list(zip(moments.tolist(), held.tolist(), strict=True))


def tallest(peak: Peak) -> int:
    """What the height of a device's memory stands for: its limit, unless it holds much less."""
    limit = peak.limit or 0
    return max(limit if limit <= 4 * peak.bytes else 0, peak.bytes, 1)


def kinds_in(schedule: Schedule) -> list[Kind]:
    """The kinds of op in a schedule that the legend names."""
    kinds = set(np.unique(schedule.compiled.rows.kind).tolist())
    return [kind for kind in KINDS if kind in kinds - MARKS]
