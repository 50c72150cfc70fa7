"""Hypothesis strategies: problems of every kind, and schedules that are valid by construction."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from optpipe import Device, Kind, Op, Pair, Problem, Program, Schedule, Stage
from optpipe.model.records import Level
from support.problems import GROUPS, pipeline, stage

times = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 7.25])
AMPLE = 10**6


@st.composite
def stages(draw: Any, device: int, evicting: bool = False, updating: bool = False) -> Stage:
    activation = draw(st.integers(0, 20))
    extra: dict[str, Any] = {}
    if draw(st.booleans()):
        extra = {"offload": (draw(times), draw(times), draw(st.integers(0, activation)))}
        extra["offload_parts"] = draw(st.integers(1, 3))
    if draw(st.booleans()):
        extra |= {"recompute": (draw(times), draw(st.integers(0, activation)))}
    elif draw(st.booleans()):
        extra["levels"] = [draw(levels(name, activation)) for name in "ab"[: draw(st.integers(1, 2))]]
    if evicting and draw(st.booleans()):
        extra |= {"evict": (draw(times), draw(times), draw(st.integers(0, activation)))}
    if updating and draw(st.booleans()):
        extra |= {"update": (draw(times), draw(times), draw(times))}
    of_ops = draw(times), draw(times), draw(times)
    return Stage(device=device, **stage(of_ops, (activation, draw(st.integers(0, 25))), **extra))


@st.composite
def levels(draw: Any, name: str, activation: int) -> dict[str, Any]:
    """A level of recomputation; of some the checkpoint can leave."""
    size = draw(st.integers(0, activation))
    level: dict[str, Any] = {"name": name, "recompute_ms": draw(times), "checkpoint_bytes": size}
    if draw(st.booleans()):
        level |= {"offload_ms": draw(times), "reload_ms": draw(times), "offload_bytes": draw(st.integers(0, size))}
    return level


def factors(stages: int) -> st.SearchStrategy[list[list[float]]]:
    """`overlap_factor` by the stages of a pair."""
    row = st.lists(st.sampled_from([0.25, 0.5, 0.75, 1.0]), min_size=stages, max_size=stages)
    return st.lists(row, min_size=stages, max_size=stages)


@st.composite
def problems(
    draw: Any, max_devices: int = 3, max_stages: int = 4, max_microbatches: int = 4, beyond: bool = False
) -> Problem:
    """Problems with any placement, one or two routes, shared links, parts and recompute. Memory is ample.

    With `beyond` also with what the core has and the solver does not choose: evictions and optimizers on the host.
    """
    count = draw(st.integers(1, max_devices))
    placement = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=max_stages))
    m = draw(st.integers(1, max_microbatches))
    links = draw(st.sampled_from([None, "pcie0"]))
    peers = [
        draw(st.sampled_from([None, *(e for e in range(count) if e != d)])) if beyond else None for d in range(count)
    ]
    devices = [
        Device(activation_budget_bytes=AMPLE, link=links if draw(st.booleans()) else None, peer=peer) for peer in peers
    ]
    routes: dict[str, Any] = {}
    if draw(st.booleans()):
        routes = {
            "routes": [list(range(len(placement))), draw(st.permutations(range(len(placement))))],
            "microbatch_routes": draw(st.lists(st.integers(0, 1), min_size=m, max_size=m)),
        }
    problem = Problem(
        microbatches=m,
        p2p_ms=draw(times),
        transfer_mode=draw(st.sampled_from(["half_duplex", "full_duplex"])),
        devices=devices,
        stages=[draw(stages(device, evicting=peers[device] is not None, updating=beyond)) for device in placement],
        overlap_factor=draw(st.one_of(st.sampled_from([None, 0.75]), factors(len(placement)))),
        **routes,
    )
    return draw(differing(problem)) if draw(st.booleans()) else problem


@st.composite
def differing(draw: Any, problem: Problem) -> Problem:
    """The problem with other figures for some micro-batches: in some stages, of some kinds, no larger than before."""
    m = problem.microbatches
    shares = st.lists(st.sampled_from((0.0, 0.25, 0.5, 1.0)), min_size=m, max_size=m)
    work, size, message = draw(shares), draw(shares), draw(st.none() | shares)

    def each(stage: Stage, costs: Stage | Level, name: str) -> tuple[float, ...]:
        whole = getattr(costs, name)
        if name.endswith("_ms"):
            return tuple(whole * x for x in work)
        unit = stage.offload_parts if name == "offload_bytes" else 1  # parts stay equal
        return tuple(int(whole / unit * x) * unit for x in size)

    figures = [n for n in Stage.model_fields if n.endswith(("_ms", "_bytes")) and n not in GROUPS["update"]]
    stages = []
    for costs in problem.stages:
        names = [name for name in figures if getattr(costs, name) is not None] if draw(st.integers(0, 3)) else []
        of_stage: dict[str, Any] = {name: each(costs, costs, name) for name in names}
        if names and costs.levels:
            of_stage["levels"] = tuple(
                x.model_copy(update={name: each(costs, x, name) for name in figures if getattr(x, name, None)})
                for x in costs.levels
            )
        stages.append(costs.model_copy(update=of_stage))
    update: dict[str, Any] = {"stages": stages}
    if message is not None:
        update["p2p_ms"] = tuple(problem.p2p_ms * share for share in message)
        if len(problem.devices) > 1:
            update["messages"] = [{"sender": 1, "receiver": 0, "ms": draw(times)}]
    return problem.replace(**update)


@st.composite
def looped(draw: Any) -> Problem:
    """Problems of one to three uneven stages a device, looped; some can be offloaded. Any links, ample memory."""
    d, v, m = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    costs = []
    for s in range(d * v):
        leave = {"offload": (draw(times), draw(times), 900), "offload_parts": draw(st.integers(1, 3))}
        sizes = 1000, draw(st.integers(0, 1500))
        of_ops = draw(times), draw(times), draw(times)
        costs.append(stage(of_ops, sizes, device=s % d, **(leave if draw(st.booleans()) else {})))
    fields = {"p2p_ms": draw(times), "transfer_mode": draw(st.sampled_from(["half_duplex", "full_duplex"]))}
    problem = pipeline(d, m, AMPLE, costs, **fields)
    links = [draw(st.sampled_from([None, "a", "b"])) for _ in range(d)]
    return problem.replace(
        devices=[each.model_copy(update={"link": link}) for each, link in zip(problem.devices, links, strict=True)]
    )


@st.composite
def schedules(draw: Any, problem: Problem) -> Schedule:
    """Any valid schedule. One draw, of a seed: a draw for each op takes many times longer than the check of the
    schedule."""
    return arranged(problem, draw(st.randoms(use_true_random=True)).choice)


def arranged(problem: Problem, pick: Callable[[Sequence[Any]], Any]) -> Schedule:
    """A schedule in which `pick` chooses the order of all ops among those that keep every dependency.

    It is valid whatever time its ops take.
    """
    after: dict[Op, set[Op]] = {}

    def add(op: Op, *before: Op | None) -> Op:
        after[op] = {b for b in before if b is not None}
        return op

    passed = {s for j in range(problem.microbatches) for s in problem.route(j)}
    parameters: dict[int, Op] = {}
    gradients: dict[int, set[Op]] = {s: set() for s in passed}
    for s in sorted(passed):
        if problem.stages[s].can_update and pick([False, True]):
            parameters[s] = add(Op(Kind.P, s, 0))
    for j in range(problem.microbatches):
        route = problem.route(j)
        forwards: dict[int, Op] = {}
        for k, s in enumerate(route):
            forwards[s] = add(Op(Kind.F, s, j), forwards[route[k - 1]] if k else None, parameters.get(s))
        upstream: Op | None = None
        for s in reversed(route):
            stage = problem.stages[s]
            ready = [forwards[s]]
            choice = pick(["keep", "offload", "recompute", *(["evict"] if stage.can_evict else [])])
            level = pick(range(len(stage.all_levels))) if choice == "recompute" and stage.can_recompute else None
            leaves = choice == "offload" and stage.can_offload if level is None else stage.all_levels[level].can_offload
            for part in range(stage.offload_parts if leaves else 0):
                if pick([False, True]):
                    out = add(Op(Kind.O, s, j, part), forwards[s])
                    ready.append(add(Op(Kind.R, s, j, part), add(Op(Kind.D, s, j, part), out)))
            if level is not None:
                ready.append(add(Op(Kind.C, s, j, level), *ready))
            if choice == "evict":
                gone = add(Op(Kind.D, s, j), add(Op(Kind.E, s, j), forwards[s], add(Op(Kind.A, s, j))))
                ready.append(add(Op(Kind.L, s, j), gone))
                add(Op(Kind.V, s, j), ready[-1])
            if pick([False, True]):
                upstream = add(Op(Kind.BW, s, j), upstream, *ready)
                gradients[s].add(upstream)
            else:
                upstream = add(Op(Kind.B, s, j), upstream, *ready)
                gradients[s].add(add(Op(Kind.W, s, j), upstream))
    for s in parameters:
        add(Op(Kind.U, s, 0), add(Op(Kind.G, s, 0), *gradients[s]))
    order: list[Op] = []
    pending = dict(after)
    while pending:
        free = [op for op, before in pending.items() if not before & pending.keys()]
        op = pick(free)
        order.append(op)
        del pending[op]
    return deal(problem, order)


def deal(problem: Problem, order: list[Op]) -> Schedule:
    """The programs and link orders that follow from one order of all ops; neighbours run as a pair where possible."""
    programs: list[list[Op | Pair]] = [[] for _ in problem.devices]
    previous: Op | None = None
    for op in order:
        own = programs[where(problem, op)]
        if problem.overlap_factor and own and own[-1] is previous and _may_join(previous, op):
            own[-1] = Pair(previous, op)
            previous = None
        else:
            own.append(op)
            previous = op
    links = {
        link: Program.from_items(
            op
            for op in order
            if op.kind in (Kind.O, Kind.R, Kind.G, Kind.P) and problem.stages[op.stage].device in devices
        )
        for link, devices in problem.shared_links.items()
    }
    return Schedule(problem, tuple(Program.from_items(items) for items in programs), links)


def where(problem: Problem, op: Op) -> int:
    """The device whose program has the op."""
    device = problem.stages[op.stage].device
    return problem.devices[device].peer if op.kind in (Kind.A, Kind.V) else device


def _may_join(a: Op, b: Op) -> bool:
    kinds = {a.kind, b.kind}
    return Kind.F in kinds and bool(kinds & {Kind.B, Kind.BW}) and a.microbatch != b.microbatch


@st.composite
def problems_with_schedules(draw: Any, **limits: Any) -> tuple[Problem, Schedule]:
    problem = draw(problems(**limits))
    return problem, draw(schedules(problem))
