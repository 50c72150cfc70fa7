"""One at a time: a device's compute ops, with the points where memory changes between them, and a link's transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from optpipe.model.ops import COMPUTE, Kind, Op

if TYPE_CHECKING:
    from optpipe_solver.cpsat.whole import WindowModel

F, B, W, C, D = Kind.F, Kind.B, Kind.W, Kind.C, Kind.D
Run = tuple[Any, int, Any, Any]  # start, length, whether it takes place, and by when the end is told of it


def one_at_a_time(w: WindowModel) -> None:
    """Device by device and link by link: no overlap in the window, and all of it between what is before and what is
    after."""
    known, allocated, many = w.incumbent.start, w.incumbent.point, len(w.problem.devices)
    of_device = (_grouped(ops, w.device, many) for ops in (known, w.inside, allocated, w.point))
    for d, (own, free, begun, pointed) in enumerate(zip(*of_device, strict=True)):
        points = {x: w.point[x] for x in pointed if not isinstance(w.point[x], int)}
        runs = [run for x in free for run in _runs(w, x)]
        runs += [(at, 0, w.there(x), w.ends[d]) for x, at in points.items()]
        stream = [(w.begins(x), x) for x in own if x.kind in (*COMPUTE, D)]
        waiting = [(at, x) for x in begun if w.side(at := allocated[x]) > 0 and _matters(w, x)]
        _between(w, runs, [*stream, *waiting])
        if w.window.frees(d):
            _no_overlap(w, runs)
        else:
            _in_order(
                w,
                [
                    (points[x], points[x]) if x in points else (w.at[x], w.ended.get(x, w.at[x]))
                    for x in own
                    if _counts(w, x)
                ],
            )
    number = {(kind, s): n for n, (kinds, users) in enumerate(w.ticks.streams) for kind in kinds for s in users}
    of_link = (
        _grouped(ops, lambda x: number.get((x.kind, x.stage)), len(w.ticks.streams)) for ops in (known, w.inside)
    )
    for (_, users), link, transfers in zip(w.ticks.streams, *of_link, strict=True):
        known_at = [(known[x], x) for x in link]
        runs = [(w.at[x], w.length(x), w.there(x), w.ends[w.device(x)]) for x in transfers]
        _between(w, runs, known_at)
        if any(w.window.frees(w.problem.stages[s].device) for s in users):
            _no_overlap(w, runs)
        else:
            transfers.sort(key=lambda x: (w.incumbent.start[x], w.length(x)))
            _in_order(w, [(w.at[x], w.at[x] + w.length(x)) for x in transfers])


def _grouped(ops: Iterable[Op], number: Callable[[Op], int | None], many: int) -> list[list[Op]]:
    """By number, in their order; without those that have none."""
    groups: list[list[Op]] = [[] for _ in range(many)]
    for x in ops:
        n = number(x)
        if n is not None:
            groups[n].append(x)
    return groups


def _runs(w: WindowModel, x: Op) -> Iterator[Run]:
    """What an op puts on its device's compute stream: itself, nothing for a transfer, and one of both if B and W may be
    a BW."""
    s, j, by = x.stage, x.microbatch, w.ends[w.device(x)]
    fused = w.fused.get((s, j), False)
    if x.kind == D or (x.kind in (F, W, B, C) and (fused is False or x.kind not in (B, W))):
        yield w.at[x], w.length(x), w.there(x), by
    elif x.kind in (B, W):
        if fused is not True:
            yield w.at[x], w.length(x), ~fused, by
        if x.kind == B:
            yield w.at[x], w.length(x) + w.length(Op(W, s, j)), fused, by


def _counts(w: WindowModel, x: Op) -> bool:
    """Whether x has a place of its own in the window's part of a compute stream: the W of a BW has not."""
    inside = (
        x in w.inside and x.kind in (*COMPUTE, D) and not (x.kind == W and w.fused.get((x.stage, x.microbatch)) is True)
    )
    return inside or (_matters(w, x) and x in w.point and not isinstance(w.point[x], int))


def _matters(w: WindowModel, x: Op) -> bool:
    """Whether it matters between which compute ops a transfer stands: where it allocates what is scarce."""
    return x.kind == Kind.R or (x.kind == Kind.O and w.host_capacity(x.stage) is not None)


def _no_overlap(w: WindowModel, runs: list[Run]) -> None:
    """Those of no length may not be inside another either. Nameless micro-batches do without: with strong propagation
    (see `solve`) CP-SAT
    9.15 refutes solutions in which one of no length touches another."""
    if w.order == "ranks":
        runs = [run for run in runs if run[1] > 0]
    w.model.add_no_overlap(
        [w.model.new_optional_fixed_size_interval_var(at, length, there, "runs") for at, length, there, _ in runs]
    )


def _in_order(w: WindowModel, runs: list[tuple[Any, Any]]) -> None:
    """From start to end, one after the other as they are given."""
    for (_, end), (start, _) in pairwise(runs):
        w.model.add(start >= end)


def _between(w: WindowModel, runs: list[Run], known: Iterable[tuple[int, Op]]) -> None:
    """`runs` come after what the incumbent has done before the window, and leave time for what it does after."""
    done, tail = 0, 0  # the last end before the window, the longest tail after it
    for at, x in known:
        match w.side(at):
            case -1:
                done = max(done, w.incumbent.start[x] + w.length(x))
            case 1:
                tail = max(tail, w.incumbent.tail[x])
    w.model.add(w.end >= done + tail)
    for at, length, there, by in runs:
        if done > w.window.begin:
            w.model.add(at >= done).only_enforce_if(there)
        w.model.add(at + length <= by - tail).only_enforce_if(there)
