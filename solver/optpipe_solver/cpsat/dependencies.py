"""What must have ended before an op starts."""

from __future__ import annotations

from itertools import pairwise

from optpipe.model.arrays import NONE
from optpipe.model.ops import Kind, Op
from optpipe_solver.cpsat.variables import Choice, Variables

F, B, W, C, O, R, D = Kind.F, Kind.B, Kind.W, Kind.C, Kind.O, Kind.R, Kind.D


def weight_gradient_after_input_gradient(v: Variables) -> None:
    """W follows B (Eq. 8); at once where both are one BW, which ends as one."""
    for s, j in v.passes:
        b, w = Op(B, s, j), Op(W, s, j)
        fused = v.fused.get((s, j), False)
        if fused is False:
            _starts_after(v, b, w)
        elif fused is True:
            if b in v.free:
                v.model.add(v.start[w] == v.start[b] + v.duration(b))
        else:
            v.model.add(v.start[w] == v.start[b] + v.duration(b)).only_enforce_if(fused)
            v.model.add(v.compute_end[b] == v.compute_end[w]).only_enforce_if(fused)
            v.model.add(v.compute_end[b] == v.start[b] + v.duration(b)).only_enforce_if(~fused)
            v.model.add(v.compute_end[b] <= v.start[w]).only_enforce_if(~fused)


def after_messages(v: Variables) -> None:
    """Forwards wait for the stage before, input gradients for the stage after, and for the message (Eq. 5 and 6)."""
    for j in range(v.problem.microbatches):
        for s, t in pairwise(v.problem.route(j)):
            _starts_after(v, Op(F, s, j), Op(F, t, j), v.grid.forward_delay(t, j))
            if v.order != "ranks":
                _starts_after(v, Op(B, t, j), Op(B, s, j), v.grid.gradient_delay(s, j))


def backward_after_forward(v: Variables) -> None:
    """A backward follows its forward."""
    for s, j in v.passes:
        _starts_after(v, Op(F, s, j), v.backward(s, j))


def recompute_between_forward_and_backward(v: Variables) -> None:
    """F, C, backward, and C after the reloads of its checkpoint. Of what is recomputed nothing else is offloaded, not
    even in part."""
    for (s, j), choices in v.level.items():
        for level, recomputed in choices.items():
            if level != NONE:
                _starts_after(v, Op(F, s, j), Op(C, s, j, level), 0, recomputed)
                _starts_after(v, Op(C, s, j, level), v.backward(s, j), 0, recomputed)
        for p in v.grid.parts(s, j) if choices.keys() != {NONE} else ():
            if (s, j, p) in v.offloaded:
                if (is_possible := v.offload_choice(s, j, p)) is not True:
                    v.model.add_implication(v.offloaded[s, j, p], is_possible)
                if (level := v.grid.level_of_part(s, p)) != NONE:
                    _starts_after(v, Op(R, s, j, p), Op(C, s, j, level), 0, v.offloaded[s, j, p])


def transfers_between_forward_and_backward(v: Variables) -> None:
    """F, O, D, R, backward: each follows the one before. O and R start when they have allocated, or later."""
    for (s, j, p), offloaded in v.offloaded.items():
        o, d, r = (Op(kind, s, j, p) for kind in (O, D, R))
        _starts_after(v, Op(F, s, j), o, 0, offloaded)
        _starts_after(v, o, d, 0, offloaded)
        _starts_after(v, r, v.backward(s, j), 0, offloaded)
        if o in v.allocation:
            v.model.add(v.allocation[o] >= v.compute_end[Op(F, s, j)]).only_enforce_if(offloaded)
            v.model.add(v.start[o] >= v.allocation[o]).only_enforce_if(offloaded)
        if r in v.allocation:
            v.model.add(v.allocation[r] >= v.start[d]).only_enforce_if(offloaded)
            v.model.add(v.start[r] >= v.allocation[r]).only_enforce_if(offloaded)
        else:
            _starts_after(v, d, r)


def end_after_everything(v: Variables) -> None:
    """The schedule ends when everything has (Eq. 4): each device's end is after its last W, and its delivery."""
    for device_end in v.device_end:
        if device_end is not v.end:
            v.model.add(v.end >= device_end)
    for s, j in v.passes:
        w = Op(W, s, j)
        end = v.device_end[v.device(w)] if w in v.free else v.end
        v.model.add(end >= v.compute_end[w] + v.incumbent.delivery[v.device(w)])


def _starts_after(v: Variables, x: Op, y: Op, delay: int = 0, presence: Choice = True) -> None:
    """y starts `delay` after x has ended, or later. Two ops before the window, or two after it, do so already."""
    x_side, y_side = (0 if z in v.free else v.side_of_window(v.incumbent_start(z)) for z in (x, y))
    if x_side == y_side != 0:
        return
    end = v.compute_end[x] if x in v.compute_end else v.start[x] + v.duration(x)
    leaves_window = x_side == 0 and y_side > 0
    start = v.device_end[v.device(x)] - v.incumbent.tail[y] if leaves_window else v.start[y]
    v.model.add(start >= end + delay).only_enforce_if(presence)
