"""DualPipe (DeepSeek-V3) and DualPipeV: micro-batches run in two directions, forwards together with backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from optpipe.errors import InputError
from optpipe.model.ops import Kind, Op, Pair
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.systems.system import in_order, published


class Chunk(NamedTuple):
    """A device's stage in one direction, and the micro-batches that pass it, in order."""

    stage: int
    microbatches: Sequence[int]


@published("dualpipe", "DeepSeek-V3, section 3.2.1; survey", shape="bidirectional")
def dualpipe(problem: Problem) -> Schedule:
    """DualPipe (DeepSeek-V3, section 3.2.1): device d runs stage d of the one direction and stage p-1-d of the other.

    Published: a bubble of (p/2-1)(F&B + B - 3W), where B is the full backward (here B + W) and F&B the time of a pair;
    p + 1 activations of one direction's stage; parameters twice. In our terms that is (p/2-1)(F&B + B - 2W), and it
    holds where F = B >= W; docs/systems/dualpipe.md has the bubble for any times. Without `overlap_factor` the same
    order runs unpaired. No op waits for both inputs of a pair then, so the bubble is shorter: half of it at F = B = W.

    p is even. The paper's m is even and at least 2p; for other m the schedule leaves out the micro-batches that are not
    there.
    """
    p = len(problem.stages) // 2
    if p % 2:
        raise InputError(f"stages: {p} devices in a row, dualpipe needs an even number of them (dualpipe-v any)")
    routes = problem.costs.route.tolist()
    ways = [[j for j, route in enumerate(routes) if route == way] for way in (0, 1)]
    lists: list[list[Op | Pair]] = [[] for _ in problem.devices]
    for d in range(p):
        chunks = Chunk(d, ways[0]), Chunk(2 * p - 1 - d, ways[1])
        near, far = chunks if d < p // 2 else chunks[::-1]
        lists[problem.stages[d].device] = _device(problem, p // 2, min(d, p - 1 - d), near, far)
    return in_order(problem, lists)


@published("dualpipe-v", "DualPipeV (DeepSeek; Qi et al., cut-in-half)", least=2, most=2, chunks=2, shape="v")
def dualpipe_v(problem: Problem) -> Schedule:
    """DualPipeV, the cut-in-half form: n devices run what the first half of a DualPipe with p = 2n devices runs.

    What would go on to the second half comes back on the second chunk of the V. So one direction is left, and
    parameters are held once. The formulas are DualPipe's, with m of one direction; n may be odd.
    """
    n = len(problem.stages) // 2
    every = range(problem.microbatches)
    lists: list[list[Op | Pair]] = [[] for _ in problem.devices]
    for r in range(n):
        lists[problem.stages[r].device] = _device(problem, n, r, Chunk(r, every), Chunk(2 * n - 1 - r, every))
    return in_order(problem, lists)


def _device(problem: Problem, n: int, r: int, near: Chunk, far: Chunk) -> list[Op | Pair]:
    """Return the ops of device r of n, counted from the end where direction 0 (`near`) enters."""
    m = max(2 * n, len(near.microbatches), len(far.microbatches))
    chunks = {"0": near, "1": far}
    following = {(step, way): count() for step in "FB" for way in chunks}
    weights: deque[Op | None] = deque()

    def op(word: str) -> Op | None:
        """Return the op for the next micro-batch; None if there is none."""
        if word == "W":
            return weights.popleft()
        kind, chunk, number = Kind[word[:-1]], chunks[word[-1]], next(following[word[0], word[-1]])
        there = number < len(chunk.microbatches)
        if kind is Kind.B:
            weights.append(Op(Kind.W, chunk.stage, chunk.microbatches[number]) if there else None)
        return Op(kind, chunk.stage, chunk.microbatches[number]) if there else None

    items: list[Op | Pair] = []
    for entry in _steps(n, r, m).split():
        ops = [found for word in entry.split("+") if (found := op(word))]
        items += [Pair(*ops)] if len(ops) == 2 and problem.overlap_factor is not None else ops
    return items


def _steps(n: int, r: int, m: int) -> str:
    """Write down the eight steps of a device, for m >= 2n micro-batches each way.

    0 is the direction that enters at this end, 1 the other. W is the weight gradient that has waited longest. Comments
    name the steps as DeepSeek's code does, where B is the full backward.
    """
    outer, inner = n - r - 1, r + 1
    pairs = "F0+BW1 F1+BW0 "
    first = pairs if outer else "F0 BW1 F1+BW0 "  # the innermost sends F0 on before BW1, for which nobody has to wait
    ends = "".join(f"{'BW' if k < inner else 'B'}{1 - k % 2} " for k in range(2 * inner))
    steps = (
        "F0 " * (2 * outer),  # Step 1: nF0
        "F0 F1 " * inner,  # Step 2: nF0F1
        "B1 W F1 " * outer,  # Step 3: nB1W1F1, split, so that the next device has its gradient sooner
        first + pairs * (m - 2 * n + inner - 1),  # Step 4 (main step): nF0B1F1B0
        "BW1 F1+BW0 " * outer,  # Step 5: nB1F1B0
        ends,  # Step 6: nB1B0, the second half of them split
        "W B0 " * outer,  # Step 7: nWB0
        "W " * inner,  # Step 8: nW
    )
    return "".join(steps)
