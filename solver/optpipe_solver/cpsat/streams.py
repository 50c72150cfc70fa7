"""One at a time: the ops of a device's compute stream, and the transfers of a link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from ortools.sat.python import cp_model

from optpipe.model.ops import COMPUTE, Kind, Op
from optpipe_solver.cpsat.variables import Choice, Moment, Variables

B, W, O, R, D = Kind.B, Kind.W, Kind.O, Kind.R, Kind.D


class Run(NamedTuple):
    """A time that a stream is busy."""

    start: Moment
    length: int  # 0 for a point at which memory changes
    presence: Choice
    end_by: cp_model.IntVar  # the device's end


def no_overlap_on_device(v: Variables) -> None:
    """No two ops of a device's compute stream overlap (Eq. 7).

    Drops, and the moments at which transfers allocate, are points on the compute stream: none lies inside an op.
    """
    started, allocated, devices = v.incumbent.start, v.incumbent.allocation, len(v.problem.devices)
    groups = (_grouped(ops, v.device, devices) for ops in (started, v.free, allocated, v.allocation))
    for d, (ops, free, allocating, open_points) in enumerate(zip(*groups, strict=True)):
        points = {x: v.allocation[x] for x in open_points if x in v.allocates_in_window}
        runs = [run for x in free for run in _compute_runs(v, x)]
        runs += [Run(at, 0, v.presence(x), v.device_end[d]) for x, at in points.items()]
        stream = [(v.incumbent_start(x), x) for x in ops if x.kind in (*COMPUTE, D)]
        later = [(at, x) for x in allocating if v.side_of_window(at := allocated[x]) > 0 and _allocates_scarce(v, x)]
        _within_surroundings(v, runs, [*stream, *later])
        if v.window.opens(d):
            _no_overlap(v, runs)
        else:
            in_window = [x for x in ops if x in points or _is_on_compute_stream(v, x)]
            starts = [points.get(x, v.start[x]) for x in in_window]
            ends = [points.get(x, v.compute_end.get(x, v.start[x])) for x in in_window]
            _in_order(v, zip(starts, ends, strict=True))


def no_overlap_on_link(v: Variables) -> None:
    """No two transfers of a link overlap (Eq. 10 to 13, 18 and 19)."""
    number = {(kind, s): n for n, (kinds, users) in enumerate(v.grid.links) for kind in kinds for s in users}
    groups = (
        _grouped(ops, lambda x: number.get((x.kind, x.stage)), len(v.grid.links)) for ops in (v.incumbent.start, v.free)
    )
    for (_, users), started, free in zip(v.grid.links, *groups, strict=True):
        runs = [Run(v.start[x], v.duration(x), v.presence(x), v.device_end[v.device(x)]) for x in free]
        _within_surroundings(v, runs, [(v.incumbent.start[x], x) for x in started])
        if any(v.window.opens(v.problem.stages[s].device) for s in users):
            _no_overlap(v, runs)
        else:
            free.sort(key=lambda x: (v.incumbent.start[x], v.duration(x)))
            _in_order(v, [(v.start[x], v.start[x] + v.duration(x)) for x in free])


def _grouped(ops: Iterable[Op], number: Callable[[Op], int | None], groups: int) -> list[list[Op]]:
    """The ops by number, without those that have none."""
    grouped: list[list[Op]] = [[] for _ in range(groups)]
    for x in ops:
        n = number(x)
        if n is not None:
            grouped[n].append(x)
    return grouped


def _compute_runs(v: Variables, x: Op) -> Iterator[Run]:
    """What an op puts on its device's compute stream: nothing for a transfer, one run of both where B and W may be
    one."""
    s, j, by = x.stage, x.microbatch, v.device_end[v.device(x)]
    fused = v.fused.get((s, j), False)
    if x.kind in (B, W) and fused is not False:
        if fused is not True:
            yield Run(v.start[x], v.duration(x), ~fused, by)
        if x.kind == B:
            yield Run(v.start[x], v.duration(x) + v.duration(Op(W, s, j)), fused, by)
    elif x.kind in (Kind.F, B, W, Kind.C, D):
        yield Run(v.start[x], v.duration(x), v.presence(x), by)


def _is_on_compute_stream(v: Variables, x: Op) -> bool:
    """Whether x is in the window and runs on a compute stream on its own; the W of a BW does not."""
    is_half = x.kind == W and v.fused.get((x.stage, x.microbatch)) is True
    return x in v.free and x.kind in (*COMPUTE, D) and not is_half


def _allocates_scarce(v: Variables, x: Op) -> bool:
    """Whether it matters between which compute ops a transfer allocates."""
    return x.kind == R or (x.kind == O and v.host_capacity(x.stage) is not None)


def _no_overlap(v: Variables, runs: list[Run]) -> None:
    """No two runs overlap, and no point lies inside a run.

    Nameless micro-batches go without points: with strong propagation (see `WindowModel.solve`) CP-SAT 9.15 refutes
    solutions in which a point touches a run.
    """
    if v.order == "ranks":
        runs = [run for run in runs if run.length > 0]
    v.model.add_no_overlap(
        [v.model.new_optional_fixed_size_interval_var(run.start, run.length, run.presence, "runs") for run in runs]
    )


def _in_order(v: Variables, runs: Iterable[tuple[Moment, Moment]]) -> None:
    """Runs, from start to end, follow one another as they are given."""
    for (_, end), (start, _) in pairwise(runs):
        v.model.add(start >= end)


def _within_surroundings(v: Variables, runs: list[Run], incumbent: Iterable[tuple[int, Op]]) -> None:
    """Runs follow what the incumbent does before the window, and leave time for what it does after."""
    done, tail = 0, 0  # the last end before the window, and the longest tail after it
    for at, x in incumbent:
        match v.side_of_window(at):
            case -1:
                done = max(done, v.incumbent.start[x] + v.duration(x))
            case 1:
                tail = max(tail, v.incumbent.tail[x])
    v.model.add(v.end >= done + tail)
    for run in runs:
        if done > v.window.begin:
            v.model.add(run.start >= done).only_enforce_if(run.presence)
        v.model.add(run.start + run.length <= run.end_by - tail).only_enforce_if(run.presence)
