"""Zero Bubble's handcrafted schedules (Qi et al. 2023, section 2): weight gradients wait for bubbles.

Stage s of p begins with k(p-s-1) forwards, then runs one forward, one input gradient; its weight gradients are k·s
micro-batches behind. So every device holds the same number of activations, counted from F to W, and, counted from its
own first op, begins and ends alike.
"""

from __future__ import annotations

from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.systems.order import in_order, warmed_up
from optpipe_solver.systems.system import published


@published("zb-h1", "Qi et al. 2023 (Zero Bubble), section 2.1")
def zb_h1(problem: Problem) -> Schedule:
    """ZB-H1 (k = 1): 1F1B's memory, min(m, p) activations on every device: p - s until B, as in 1F1B, and s from B to
    W.

    The paper's bubble, (p-1)(F + B - W), is for F = B = W. From m = p on the makespan is (p-1)·max(F, B, F + B - W)
    longer than a device's work, the span (p-1)·max(B, F + B - W): however long W lasts, the last B passes all stages.
    """
    return _zero_bubble(problem, 1)


@published("zb-h2", "Qi et al. 2023 (Zero Bubble), section 2.2")
def zb_h2(problem: Problem) -> Schedule:
    """ZB-H2 (k = 2): twice 1F1B's memory, min(m, 2p-1) activations on every device: 2(p-s)-1 until B, and 2s from B to
    W.

    The paper's bubble, (p-1)(F + B - 2W), is for F = B = W: none. From m = 2p - 1 on it is (p-1)·max(0, F + B - 2W, B -
    F) in the span: weight gradients cannot fill less than nothing, and where B lasts longer than F the forwards of the
    warm-up do not last until the first B. The makespan has no barrier to forgo: the last device begins (p-1)F
    after the first.
    """
    return _zero_bubble(problem, 2)


def _zero_bubble(problem: Problem, k: int) -> Schedule:
    p, m = len(problem.stages), problem.microbatches
    lists: list[list[Op]] = [[] for _ in problem.devices]
    for s, stage in enumerate(problem.stages):
        late = min(k * s, m)
        forwards, inputs, weights = ([Op(kind, s, j) for j in range(m)] for kind in (Kind.F, Kind.B, Kind.W))
        backwards = [[b, *weights[max(0, j - late) : max(0, j - late + 1)]] for j, b in enumerate(inputs)]
        lists[stage.device] = warmed_up(forwards, backwards, k * (p - s - 1)) + weights[m - late :]
    return in_order(problem, lists)
