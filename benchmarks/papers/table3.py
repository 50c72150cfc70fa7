"""PipeOffload's Table 3: how offloads and reloads of two GPUs on one PCIe switch disturb each other.

The paper shows histograms, without figures: each GPU runs groups of alternating H2D and D2H copies, with random delays
between groups. Here copies are fluid: at every moment those that run share the links by max-min fairness. The rate of a
link in one direction is 1. A GPU that copies both ways at once is slower, as others measured on A100
(github.com/NVIDIA/nvbandwidth/issues/11: alone 25 to 26 GB/s each way; both at once 24 out, 12 to 13 in).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

from benchmarks.tables import head, line

IN, OUT = "H2D", "D2H"
LINK = 1.0  # of each GPU to the switch, and of the switch to the host, in each direction
BOTH_WAYS = {IN: 12.5 / 25.5, OUT: 24 / 25.5}  # what a GPU that copies both ways reaches of it
PAIRS = 4  # copies of a group in each direction
Copy = tuple[int, str]  # GPU and direction


@dataclass(frozen=True)
class CoSchedule:
    """How two GPUs copy: `lanes[gpu]` has the directions of each of its streams, which it repeats. `synchronized`: both
    begin a group together, and a copy waits until both have ended the one before."""

    name: str
    lanes: tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]
    synchronized: bool = False


ALTERNATING, BEGINS_OUT, DUAL = ((IN, OUT),), ((OUT, IN),), ((IN,), (OUT,))
TABLE = (
    CoSchedule("parallel", (ALTERNATING, ALTERNATING)),
    CoSchedule("interleaved", (ALTERNATING, BEGINS_OUT)),
    CoSchedule("dual stream", (DUAL, DUAL)),
    CoSchedule("parallel, synchronized", (ALTERNATING, ALTERNATING), True),
    CoSchedule("interleaved, synchronized", (ALTERNATING, BEGINS_OUT), True),
)


def table3(
    groups: Annotated[int, typer.Option(min=1, help="Groups of copies of each GPU.")] = 1000,
    delay: Annotated[
        float, typer.Option(min=0, help="The longest delay between groups, in copies at full rate; uniformly random.")
    ] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the delays.")] = 0,
) -> None:
    """PipeOffload's Table 3: the throughput of two GPUs on one PCIe switch, by how their copies are scheduled."""
    delays = np.random.default_rng(seed).uniform(0, delay, (2, groups))
    typer.echo(head(("schedule", "5 %", "median", "95 %", "mean"), "lrrrr"))
    for schedule in TABLE:
        reached = throughputs(schedule, delays)
        figures = (*np.quantile(reached, (0.05, 0.5, 0.95)), reached.mean())
        typer.echo(line((schedule.name, *(f"{figure:.2f}" for figure in figures))))


def rates(copies: Sequence[Copy]) -> dict[Copy, float]:
    """The rate of each copy that runs: what its GPU can do, and a fair share of the switch's link in its direction."""
    both_ways = {gpu for gpu, way in copies if (gpu, IN if way == OUT else OUT) in copies}
    most = {copy: LINK * (BOTH_WAYS[copy[1]] if copy[0] in both_ways else 1) for copy in copies}
    shared: dict[Copy, float] = {}
    for direction in (IN, OUT):
        left, waiting = LINK, sorted((copy for copy in copies if copy[1] == direction), key=lambda copy: most[copy])
        for number, copy in enumerate(waiting):
            shared[copy] = min(most[copy], left / (len(waiting) - number))
            left -= shared[copy]
    return shared


def throughputs(schedule: CoSchedule, delays: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> np.ndarray:
    """What each group copies in both directions, over the time from its first byte to its last: that a GPU waits for
    the other one before it begins is not counted.

    Parameters
    ----------
    delays
        How long a GPU waits before each of its groups: (2, groups), in copies at full rate.

    Returns
    -------
    (2, groups), in rates of a link in one direction.
    """
    groups = delays.shape[1]
    length = [2 * PAIRS // len(lanes) for lanes in schedule.lanes]  # copies of a lane in a group
    done = [[0] * len(lanes) for lanes in schedule.lanes]  # copies, of each lane
    left = [[1.0] * len(lanes) for lanes in schedule.lanes]  # of the lane's copy
    group, wakes = [0, 0], [float(each) for each in delays[:, 0]]
    begin: list[float | None] = [None, None]
    result, now = np.zeros(delays.shape), 0.0
    while min(group) < groups:
        heads: dict[Copy, int] = {}  # the lane of each copy that runs
        for gpu in (0, 1):
            if group[gpu] < groups and wakes[gpu] <= now:
                for lane, ways in enumerate(schedule.lanes[gpu]):
                    there = group[1 - gpu] > group[gpu] or (group[0] == group[1] and wakes[1 - gpu] <= now)
                    turn = not schedule.synchronized or (there and done[1 - gpu][lane] >= done[gpu][lane])
                    if turn and done[gpu][lane] < (group[gpu] + 1) * length[gpu]:
                        heads[gpu, ways[done[gpu][lane] % len(ways)]] = lane
        rate = rates(list(heads))
        ends = [left[gpu][lane] / rate[gpu, way] for (gpu, way), lane in heads.items()]
        step = min([*ends, *(wake - now for gpu, wake in enumerate(wakes) if wake > now and group[gpu] < groups)])
        for (gpu, way), lane in heads.items():
            begin[gpu] = now if begin[gpu] is None else begin[gpu]
            left[gpu][lane] -= step * rate[gpu, way]
            if left[gpu][lane] < 1e-9:
                done[gpu][lane], left[gpu][lane] = done[gpu][lane] + 1, 1.0
        now += step
        for gpu in (0, 1):
            start = begin[gpu]
            if start is not None and min(done[gpu]) == (group[gpu] + 1) * length[gpu]:
                result[gpu, group[gpu]] = 2 * PAIRS / (now - start)
                group[gpu], begin[gpu] = group[gpu] + 1, None
                wakes[gpu] = now + (float(delays[gpu, group[gpu]]) if group[gpu] < groups else 0)
    return result
