"""OptPipe's mixed-integer linear program (Appendix C.1) for any solver: one function for each family of rows.

docs/milp.md has the equations, where their print is wrong, and what is not of the paper.

Memory follows the program: what comes before an op in its list counts, whatever the clock shows. That takes two
variables more than the paper has: `reload_allocation`, and `away_at_reload` for the memory at such a moment. Only where
something is allocated is there a row. What ops take and free is read from `optpipe.evaluate.effects`.

The paper fixes the order of the micro-batches "without affecting optimality". Without offload that is so: number the
k-th F, B and W of every stage k, and what they wait for still comes in time. With offload an activation's F, O, R and B
belong together, and a backward that overtakes another one can hide its reload. Nor is it so of the span: a device that
lets micro-batch 2 overtake micro-batch 1 starts later. Hence `Switches.order`: fixed in all stages is quick and good,
but its optimum is no lower bound where offload or the span matters.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product

import numpy as np

from optpipe.evaluate.objective import TOLERANCE, Objective
from optpipe.model.arrays import Floats, Ints
from optpipe.model.costs import FORWARDS
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.bounds import lower_bound
from optpipe_solver.exact import serial_ms
from optpipe_solver.milp.paths import Activation, LongestPaths, compute_ops, equal_microbatches, fixed_order
from optpipe_solver.milp.reading import Window
from optpipe_solver.milp.rows import FALSE, TRUE, Literal, Rows, Term
from optpipe_solver.milp.variables import Switches, Units, Variables, stages_that_may_offload
from optpipe_solver.schedule_facts import needs_fused

Precedences = dict[tuple[Hashable, Hashable], Literal]  # by two nodes: whether the first precedes the second
LARGEST = 1024.0  # the horizon in the model's unit of time, so that the solver's absolute tolerances fit every problem


class Model:
    """The program for one problem. Build it, solve `rows`, read `starts(x)`.

    Solutions longer than `horizon_ms` are cut off. If none can be as short, `possible` is False, and there are no rows.
    Sizes in bytes that have to be rounded are rounded up or, for a bound, `down` (`Units`). With a `window` of a
    schedule only what is free in it is decided.
    """

    def __init__(
        self,
        problem: Problem,
        objective: Objective,
        horizon_ms: float,
        switches: Switches,
        down: bool = False,
        window: Window | None = None,
    ) -> None:
        if window:
            switches = replace(switches, order="none")  # what equal micro-batches keep of it is an arc of the window
        self.problem, self.objective, self._order, self._window = problem, objective, switches.order, window
        self.units = Units(problem, down, window.reading.level if window else {})
        self.scale = 2.0 ** np.floor(np.log2(LARGEST / horizon_ms))  # a power of two: times stay exact
        fixed = chain(fixed_order(problem, switches.order), window.arcs if window else ())
        ops = window.reading.compute if window else compute_ops(problem)
        self.paths = LongestPaths(problem, ops, horizon_ms * self.scale, self.scale, fixed, switches.determined)
        self.rows = Rows(None if switches.tight else (horizon_ms + serial_ms(problem)) * self.scale)
        self.possible = self.paths.possible
        if not self.possible:
            return
        self.variables = v = Variables(problem, self.paths, switches, self.rows, window)
        dependencies(v)
        no_overlap_on_device(v)
        if objective == "makespan":
            makespan(v)
        else:
            span(v)
            first_forward_at_once(v)
        if switches.workload:
            work_before_and_after(v, objective)
        forward_offload_reload_backward(v)
        no_overlap_on_link(v)
        reloads_allocate_in_link_order(v)
        activation_budget(v, self.units)
        orders = {"none": lambda _: [], "compute": compute_orders, "all": all_orders}
        for order in orders[switches.triangles](v):
            no_cycles_of_three(self.rows, order)

    @property
    def is_bound(self) -> bool:
        """Whether its optimum bounds every schedule of the problem: the model can express all, in any order that may be
        worth something, and no size is rounded up."""
        any_order = self._order != "stages" or order_is_free(self.problem, self.objective)
        fits_all = self.units.down or self.units.lossless
        is_whole = self._window is None and self.problem.layers is None
        return is_whole and not inexpressible(self.problem) and any_order and fits_all

    @cached_property
    def reduced(self) -> tuple[Rows, Ints]:
        """What a solver gets, and the numbers that its variables have in `rows`."""
        return self.rows.reduced(self.variables.length)

    def starts(self, x: Floats) -> dict[Op, float]:
        """The start in ms of every op, in the schedule that the binaries of a solution describe, exact and as early as
        can be."""
        v, paths = self.variables, self.paths
        times = (self.rows.earliest(x) / self.scale).tolist()
        lasts = (paths.time / self.scale).tolist()
        starts = {op: times[end] - ms for op, end, ms in zip(paths.ops, v.end, lasts, strict=True)}
        for kind, moments in ((Kind.O, v.offload_start), (Kind.R, v.reload_start)):
            for a, moment in moments.items():
                if self.rows.holds(v.offloaded[a], x):
                    parts = v.parts(a)
                    part_ms = v.transfer_span(kind, a)[0] / self.scale / len(parts)
                    for n, part in enumerate(parts):
                        starts[Op(kind, *a[:2], part)] = times[moment] + n * part_ms
        return starts


def order_is_free(problem: Problem, objective: Objective) -> bool:
    """Whether nothing is lost if equal micro-batches keep their order in all stages."""
    return objective == "makespan" and not stages_that_may_offload(problem)


def inexpressible(problem: Problem) -> str:
    """What schedules of the problem may do and the model lacks, in words; empty if it lacks nothing. B followed
    by W does all that BW does, earlier for the stage before, and only on some stages more memory (`needs_fused`)."""
    lacks = {
        "no recompute": problem.costs.can_recompute.any(),
        "no single parts of activations": (problem.costs.parts > 1).any(),
        "BW only as B and W": needs_fused(problem).any(),
        "no pairs": problem.overlap_factor is not None,
    }
    return ", ".join(what for what, needed in lacks.items() if needed)


def dependencies(v: Variables) -> None:
    """Eq. 5, 6 and 8, and the order of Eq. 1: `LongestPaths.arcs`."""
    for x, y, delay in v.paths.arcs:
        v.rows.add_follows(v.end[y], v.end[x], v.paths.time[y] + delay)


def no_overlap_on_device(v: Variables) -> None:
    """Eq. 7: a device computes one op at a time."""
    for (x, y), is_before in v.op_before.items():
        if is_before != TRUE:
            v.rows.add_follows(v.end[y], v.end[x], v.paths.time[y], when=(is_before,))


def makespan(v: Variables) -> None:
    """Eq. 4. The first forward of all starts at 0, so its start needs no term."""
    precedes_some = (v.paths.lag > -np.inf).any(axis=1)
    for x in np.flatnonzero(~precedes_some).tolist():
        v.rows.add_follows(v.length, v.end[x])


def span(v: Variables) -> None:
    """Eq. 3: device by device, from the first start to the last end, of any op that may be first and any that may be
    last."""
    paths = v.paths
    follows_on_device = (paths.lag > -np.inf) & (paths.device[:, None] == paths.device)
    firsts, lasts = ~follows_on_device.any(axis=0), ~follows_on_device.any(axis=1)
    for x, y in product(np.flatnonzero(firsts).tolist(), np.flatnonzero(lasts).tolist()):
        if paths.device[x] == paths.device[y]:
            v.rows.add([(1.0, v.length), (1.0, v.end[x]), (-1.0, v.end[y])], (), paths.time[x])


def first_forward_at_once(v: Variables) -> None:
    """Not of the paper: Eq. 3 must not gain by starting a device late. What it computes first, a forward of the first
    stage that it has on a route, starts in any simulated schedule as soon as it has arrived."""
    paths, number = v.paths, v.paths.number
    arrivals: dict[int, int | None] = {}  # by a forward that a device may compute first: the forward that it waits for
    for route, batches in equal_microbatches(v.problem):
        devices = [v.problem.stages[s].device for s in route]
        for k, s in enumerate(route):
            if devices[k] not in devices[:k]:
                for j in batches:
                    arrivals[number[Op(Kind.F, s, j)]] = number[Op(Kind.F, route[k - 1], j)] if k else None
    for x, before in arrivals.items():
        others = [y for y in arrivals if y != x and paths.device[y] == paths.device[x]]
        _, stage, microbatch, _ = paths.ops[x]
        gap = float(paths.time[x] + v.costs.message_ms[FORWARDS, stage, microbatch] * paths.scale)
        arrives = [(1.0, v.end[before])] if before is not None else []
        late = max(0.0, v.rows.upper[v.end[x]] - gap)
        v.rows.add([(-1.0, v.end[x]), *arrives], [(late, v.op_before[y, x]) for y in others], -gap)


def work_before_and_after(v: Variables, objective: Objective) -> None:
    """Valid cuts: an op waits for all the work of its device that precedes it, and all that follows it comes before the
    end; nothing beats the bound of work and memory."""
    paths, add = v.paths, v.rows.add
    least = lower_bound(v.problem, objective) * paths.scale * (1 - TOLERANCE)
    v.rows.lower[v.length] = max(v.rows.lower[v.length], least)
    for y, end in enumerate(v.end):
        same_device = paths.device == paths.device[y]
        others = [x for x in np.flatnonzero(same_device).tolist() if x != y]
        soonest = float(paths.head[same_device].min() + paths.time[y])
        rest = float((paths.tail - paths.time)[same_device].min())
        before = [(-float(paths.time[x]), v.op_before[x, y]) for x in others]
        after = [(-float(paths.time[x]), v.op_before[y, x]) for x in others]
        if all(literal.var < 0 for _, literal in before):
            v.rows.lower[end] = max(v.rows.lower[end], soonest - sum(ms for ms, holds in before if holds == TRUE))
            if objective == "makespan":
                v.rows.add_follows(v.length, end, rest - sum(ms for ms, holds in after if holds == TRUE))
            continue
        add([(1.0, end)], before, soonest)
        if objective == "makespan":
            add([(1.0, v.length), (-1.0, end)], after, rest)


def forward_offload_reload_backward(v: Variables) -> None:
    """F, then O, its drop, R, then B (section 3.3)."""
    for a in v.activations:
        F, B = v.number(Kind.F, a), v.number(Kind.B, a)
        when = () if v.keeps_place(a) else (v.offloaded[a],)
        v.rows.add_follows(v.offload_start[a], v.end[F])
        v.rows.add_follows(v.reload_allocation[a], v.offload_start[a], span=v.transfer_span(Kind.O, a))
        v.rows.add_follows(v.reload_start[a], v.reload_allocation[a])
        v.rows.add_follows(v.end[B], v.reload_start[a], float(v.paths.time[B]), v.transfer_span(Kind.R, a), when)


def no_overlap_on_link(v: Variables) -> None:
    """Eq. 10 to 13, 18 and 19: transfers on a link run one at a time; that of what stays has no length."""
    for a, b in v.offload_before:
        offload, reload = v.transfer_span(Kind.O, a), v.transfer_span(Kind.R, a)
        v.rows.add_follows(
            v.offload_start[b], v.offload_start[a], span=offload, when=(v.offload_before[a, b],)
        )  # Eq. 10
        v.rows.add_follows(v.reload_start[b], v.reload_start[a], span=reload, when=(v.reload_before[a, b],))  # Eq. 11
        if first := v.offload_before_reload.get((a, b)):  # Eq. 12 and 13, where the link is half duplex
            v.rows.add_follows(v.reload_start[b], v.offload_start[a], span=offload, when=(first,))
            v.rows.add_follows(v.offload_start[a], v.reload_start[b], span=v.transfer_span(Kind.R, b), when=(~first,))


def reloads_allocate_in_link_order(v: Variables) -> None:
    """Not of the paper: reloads of a device allocate in the order that they have on the link."""
    for (a, b), is_before in v.reload_before.items():
        if v.costs.device[a[0]] == v.costs.device[b[0]]:
            v.rows.add_follows(
                v.reload_allocation[b], v.reload_allocation[a], when=(is_before, v.offloaded[a], v.offloaded[b])
            )


@dataclass(frozen=True)
class _DeviceMemory:
    """What takes part in the memory of one device, in units."""

    ops: list[int]  # its compute ops, by their numbers
    leaving: dict[Activation, int]  # its activations that can leave, with Γ
    limit: int  # of what its activations hold
    takes: list[int]  # by op of any device, as `Units.takes_and_leaves`
    leaves: list[int]


def activation_budget(v: Variables, units: Units) -> None:
    """All rows of memory, for each device that could hold too much."""
    takes, leaves = map(list, zip(*map(units.takes_and_leaves, v.paths.ops), strict=True))
    for d, device in enumerate(v.problem.devices):
        ops = np.flatnonzero(v.paths.device == d).tolist()
        leaving = {a: units.offloaded(a) for a in v.activations if v.costs.device[a[0]] == d}
        memory = _DeviceMemory(ops, leaving, device.activation_budget_bytes // units.unit, takes, leaves)
        if sum(takes[x] for x in ops) > memory.limit:
            v.create_away_literals(ops, list(leaving), takes)
            _drop_after_offload(v, memory)
            _reload_before_or_after_op(v, memory)
            _away_only_between_forward_and_backward(v, memory)
            _memory_of_ops(v, memory)
            _memory_of_reloads(v, memory)


def _drop_after_offload(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 14: an op that a drop comes before starts when the offload has ended."""
    for a, y in product(memory.leaving, memory.ops):
        if drops := v.drop_before.get((a, y)):
            span = v.transfer_span(Kind.O, a)
            v.rows.add_follows(v.end[y], v.offload_start[a], float(v.paths.time[y]), span, when=(drops,))


def _reload_before_or_after_op(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 15 and 16: a reload allocates before an op, or after it."""
    for a, y in product(memory.leaving, memory.ops):
        if returns := v.return_before.get((a, y)):
            v.rows.add_follows(v.end[y], v.reload_allocation[a], float(v.paths.time[y]), when=(returns,))
            v.rows.add_follows(v.reload_allocation[a], v.end[y], when=(v.offloaded[a], ~returns))


def _away_only_between_forward_and_backward(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 17: no drop and no reload comes before anything unless a leaves. Besides, a drop comes after F and before the
    reload, the reload before B, and what comes before an op comes before the next one."""
    for a, y in product(memory.leaving, memory.ops):
        if returns := v.return_before.get((a, y)):
            after_forward, after_backward = v.op_before[v.number(Kind.F, a), y], v.op_before[v.number(Kind.B, a), y]
            v.rows.add_clause(~returns, v.offloaded[a])
            v.rows.add_clause(~returns, after_forward)
            v.rows.add_clause(~v.offloaded[a], returns, ~after_backward)
            if drops := v.drop_before.get((a, y)):
                v.rows.add_clause(~drops, v.offloaded[a])
                v.rows.add_clause(~returns, drops)
                v.rows.add_clause(~drops, after_forward)
    for a, before_op in product(memory.leaving, (v.drop_before, v.return_before)):
        for x, y, _ in v.paths.arcs:
            if (a, x) in before_op and (a, y) in before_op:
                v.rows.add_clause(~before_op[a, x], before_op[a, y])


def _memory_of_ops(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 9: the memory during every op y that takes some: what y takes at its start, and what the others leave."""
    for y in memory.ops:
        if memory.takes[y]:
            held = [(memory.leaves[x], v.op_before[x, y]) for x in memory.ops if x != y]
            for a, size in memory.leaving.items():
                if (a, y) in v.drop_before:
                    held += [(-size, v.drop_before[a, y]), (size, v.return_before[a, y])]
            v.rows.add_capacity(held, memory.limit - memory.takes[y])


def _memory_of_reloads(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 9 where a reload allocates: between two compute ops, after some drops and before others. Not of the paper.

    Without it a reload could take the bytes that an offload, still under way, frees just in time for the next op.
    """
    for b in memory.leaving:
        held: list[Term] = []
        for x in memory.ops:
            if (b, x) in v.return_before:
                held.append((memory.leaves[x], ~v.return_before[b, x]))
            elif x == v.number(Kind.F, b) or v.paths.precedes(x, v.number(Kind.F, b)):
                held.append((memory.leaves[x], TRUE))
        most = sum(size if literal == TRUE else max(0, size) for size, literal in held)
        if most > memory.limit:
            held += _away_at_reload(v, memory, b)
            v.rows.add_capacity([*held, (most - memory.limit, v.offloaded[b])], most)


def _away_at_reload(v: Variables, memory: _DeviceMemory, b: Activation) -> list[Term]:
    """What is away when the reload of b allocates: c if its drop comes before that and its reload after."""
    away: list[Term] = []
    for c, size in memory.leaving.items():
        if c != b and not (v.keep_order(c, b) or v.is_over_before(c, b) or v.is_over_before(b, c)):
            is_away = v.create_away_at_reload(c, b)
            v.rows.add_clause(~is_away, v.offloaded[c])
            v.rows.add_clause(~is_away, v.reload_before[b, c])
            v.rows.add_clause(~is_away, ~v.return_before.get((b, v.number(Kind.F, c)), FALSE))
            span = v.transfer_span(Kind.O, c)
            v.rows.add_follows(v.reload_allocation[b], v.offload_start[c], span=span, when=(is_away,))
            away.append((-size, is_away))
    return away


def no_cycles_of_three(rows: Rows, order: Precedences) -> None:
    """Of any three nodes, not all of x before y, y before z, and z before x; nor the other way round.

    Where x before y is fixed, a row is needed only if no node is fixed to be between both: others follow from those.
    """
    open_with: dict[Hashable, dict[Hashable, None]] = {}  # by node those of which the order is yet to be decided
    for (x, y), is_before in order.items():
        if is_before not in (TRUE, FALSE):
            open_with.setdefault(x, {})[y] = None
    follows = {x: {y for y in open_with if order.get((x, y)) == TRUE} for x in open_with}
    for x, later in follows.items():
        for y in later.difference(*(follows[z] for z in later)):
            for z in open_with[x] | open_with[y]:
                if (x, z) in order and (y, z) in order:
                    rows.add_clause(~order[y, z], order[x, z])
    for x, y, z in combinations(open_with, 3):
        if y in open_with[x] and z in open_with[x] and z in open_with[y]:
            rows.add_clause(~order[x, y], ~order[y, z], ~order[z, x])
            rows.add_clause(~order[x, z], ~order[z, y], ~order[y, x])


def compute_orders(v: Variables) -> list[Precedences]:
    """An order of ops for each device."""
    orders: list[Precedences] = [{} for _ in v.problem.devices]
    for (x, y), is_before in v.op_before.items():
        orders[v.paths.device[x]][x, y] = is_before
    return orders


def all_orders(v: Variables) -> list[Precedences]:
    """For each device an order of ops, drops and reloads; for each link one of transfers."""
    devices = compute_orders(v)
    for kind, away in ((Kind.D, v.drop_before), (Kind.R, v.return_before)):
        for (a, y), before in away.items():
            order = devices[v.paths.device[y]]
            order[(kind, a), y], order[y, (kind, a)] = before, ~before
    links: dict[tuple[int, bool], Precedences] = {}
    half_duplex = v.problem.transfer_mode == "half_duplex"
    for kind, literals in ((Kind.O, v.offload_before), (Kind.R, v.reload_before)):
        for (a, b), before in literals.items():
            link = int(v.costs.link[v.costs.device[a[0]]])
            links.setdefault((link, half_duplex or kind == Kind.O), {})[(kind, a), (kind, b)] = before
    for (a, b), before in v.offload_before_reload.items():
        order = links[int(v.costs.link[v.costs.device[a[0]]]), True]
        order[(Kind.O, a), (Kind.R, b)], order[(Kind.R, b), (Kind.O, a)] = before, ~before
        for c in (a, b):
            order[(Kind.O, c), (Kind.R, c)], order[(Kind.R, c), (Kind.O, c)] = TRUE, ~TRUE
    return [*devices, *links.values()]
