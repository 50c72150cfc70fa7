"""When a rank begins to gather the parameters of its stages, where they are sharded over replicas.

Replicas may run different schedules, and communicate in one process group for all stages. So all of them gather in one
order, that of the route, and a gather waits for other replicas. It begins where the receive of the stage's first input
is posted: before the first own op that comes later, in the order of all ranks' ops, than the first forward of the stage
before it. That forward's rank has issued its own gather by then. In every schedule, what comes before a stage's first
forward on its rank, and all that this needs, are forwards of earlier stages; and in the order these come before the
first forward of the stage before. So whatever a replica needs to begin its gathers has been issued before it begins to
wait in a later one: no replica waits for ever, even if hosts wait for their whole device.

With several routes the stages' first forwards have no order that holds in every schedule. Then all stages are gathered
when the step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from optpipe.model.ops import Kind, Op
from optpipe_runtime.ranks.layout import Layout


def gathers(programs: Callable[[int], Mapping[Op, int]], rank: int, layout: Layout) -> list[tuple[int, ...]]:
    """For each op of a rank, the stages to begin to gather before it, in order. `programs` are as for `lower_ops`."""
    places = list(programs(rank).values())
    begun_before: list[tuple[int, ...]] = [() for _ in places]
    before = {after: s for s, after in pairwise(layout.in_order)} if len(layout.routes) == 1 else {}
    for s in layout.in_order:
        if layout.placement[s] == rank and _first(programs(rank), s) is not None:
            ready = _first(programs(layout.placement[before[s]]), before[s]) if s in before else None
            begins = 0 if ready is None else next(i for i, place in enumerate(places) if place > ready)
            begun_before[begins] += (s,)
    return begun_before


def _first(program: Mapping[Op, int], stage: int) -> int | None:
    """The place of a stage's first forward."""
    return next((place for op, place in program.items() if op.kind == Kind.F and op.stage == stage), None)
