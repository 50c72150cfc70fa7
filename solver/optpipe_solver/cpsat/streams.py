"""One at a time: a device's compute ops, with the points where memory changes between them, and a link's transfers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from optpipe.ops import COMPUTE, Kind, Op

if TYPE_CHECKING:
    from optpipe_solver.cpsat.whole import WindowModel

B, W, D, BW = Kind.B, Kind.W, Kind.D, Kind.BW
Run = tuple[Any, int, Any]  # start, length, and whether it takes place


def one_at_a_time(w: WindowModel) -> None:
    """Device by device and link by link: no overlap in the window, and all of it between what is before and what is after."""
    for d in range(len(w.problem.devices)):
        own = w.problem.stages_on(d)
        runs = [run for x in w.inside if x.stage in own for run in _runs(w, x)]
        runs += [(at, 0, w.there(x)) for x, at in w.point.items() if x.stage in own and not isinstance(at, int)]
        stream = [(w.begins(x), x) for x in w.incumbent.start if x.stage in own and x.kind in (*COMPUTE, D)]
        waiting = [(at, x) for x, at in w.incumbent.point.items() if x.stage in own and w.side(at) > 0 and _matters(w, x)]
        _in_turn(w, runs, [*stream, *waiting])
    for kinds, users in w.ticks.streams:
        transfers = [x for x in w.inside if x.kind in kinds and x.stage in users]
        known = [(at, x) for x, at in w.incumbent.start.items() if x.kind in kinds and x.stage in users]
        _in_turn(w, [(w.at[x], w.length(x), w.there(x)) for x in transfers], known)


def _runs(w: WindowModel, x: Op) -> Iterator[Run]:
    """What an op puts on its device's compute stream: itself, nothing for a transfer, and one of both if B and W may be a BW."""
    s, j = x.stage, x.microbatch
    fused = w.fused.get((s, j), False)
    if x.kind == D or (x.kind in COMPUTE and (fused is False or x.kind not in (B, W))):
        yield w.at[x], w.length(x), w.there(x)
    elif x.kind in (B, W):
        if fused is not True:
            yield w.at[x], w.length(x), ~fused
        if x.kind == B:
            yield w.at[x], w.length(x) + w.length(Op(W, s, j)), fused


def _matters(w: WindowModel, x: Op) -> bool:
    """Whether it matters between which compute ops a transfer stands: where it allocates what is scarce."""
    return x.kind == Kind.R or w.host_capacity(x.stage) is not None


def _in_turn(w: WindowModel, runs: list[Run], known: Iterable[tuple[int, Op]]) -> None:
    """`runs`, of which those of no length may not be inside another, come after what the incumbent has done before the window, and leave
    time for what it does after."""
    done, tail = 0, 0  # the last end before the window, the longest tail after it
    for at, x in known:
        match w.side(at):
            case -1:
                done = max(done, w.incumbent.start[x] + w.length(x))
            case 1:
                tail = max(tail, w.incumbent.tail[x])
    w.model.add(w.end >= done + tail)
    w.model.add_no_overlap([w.model.new_optional_fixed_size_interval_var(at, length, there, "runs") for at, length, there in runs])
    for at, length, there in runs:
        if done > w.window.begin:
            w.model.add(at >= done).only_enforce_if(there)
        w.model.add(at + length <= w.end - tail).only_enforce_if(there)
