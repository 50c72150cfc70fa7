"""Devices of one node share its host memory, and the first and the last stages of a pipeline share nodes."""

import re
from itertools import combinations, islice
from typing import Any

import pytest
from hypothesis import given, settings
from ortools.sat.python import cp_model
from support.examples import examples
from support.frames import schedules
from support.oracles.enumeration import best_of_all, problem_of, stage
from support.problems import pipeline
from support.problems import stage as costs_of
from support.problems.small import problems_of_every_sort
from support.problems.units import units

from optpipe import InputError, Kind, Problem, Schedule, certify, check
from optpipe.model.placement import Placement, folded, on_devices
from optpipe.process.protocol import Request
from optpipe_solver import tuning
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.clock import Clock
from optpipe_solver.cpsat.grid import Grid, GridSchedule, place_on_grid
from optpipe_solver.cpsat.model import WindowModel
from optpipe_solver.cpsat.variables import Window
from optpipe_solver.heuristics import STREAMS, generate
from optpipe_solver.portfolio import PlacementSearch
from optpipe_solver.portfolio.portfolio import Portfolio
from optpipe_solver.schedule_facts import split_backwards
from optpipe_solver.systems import generate as published

LEAVING = [stage(d, (2, 2, 1), 2, 0, (1, 1, 2)) for d in range(2)]


def offloading(host: int | None, devices: int = 8, budget: int = 300, **further: Any) -> Problem:
    """Memory for three activations; two nodes, each with the host memory of all its devices."""
    costs = costs_of((1, 1, 1), (100, 0), offload=(0.5, 0.5, 100))
    problem = pipeline(devices, 2 * devices, budget, costs, p2p_ms=0.1, transfer_mode="full_duplex", **further)
    return in_nodes(problem, [str(2 * d // devices) for d in range(devices)], host)


def in_nodes(problem: Problem, nodes: list[str | None], host: int | None) -> Problem:
    devices = zip(problem.devices, nodes, strict=True)
    return problem.replace(
        devices=[each.model_copy(update={"node": node, "host_memory_bytes": host}) for each, node in devices]
    )


def folded_problem(problem: Problem) -> Problem:
    return on_devices(problem, folded([str(device.node) for device in problem.devices]))


def test_the_papers_assignment() -> None:
    """PipeOffload, appendix C: of 16 stages 0 to 3 and 12 to 15 are in the first node, 4 to 11 in the second one."""
    order = folded([0] * 8 + [1] * 8)
    assert [s for s, d in enumerate(order) if d < 8] == [0, 1, 2, 3, 12, 13, 14, 15]
    assert order == [*range(4), *range(8, 16), *range(4, 8)]
    assert folded(["a"] * 4 + ["b"] * 2) == [0, 1, 4, 5, 2, 3]
    assert folded([0] * 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(("p", "least"), [(4, 1), (8, 1), (8, 3), (12, 2)])
def test_no_assignment_to_two_nodes_has_a_lower_sum_on_the_fuller(p: int, least: int) -> None:
    """Of loads that fall evenly along the pipeline, by trying every assignment."""
    load = [least + p - 1 - s for s in range(p)]
    order = folded([2 * d // p for d in range(p)])
    fuller = max(sum(load[s] for s, d in enumerate(order) if 2 * d // p == node) for node in range(2))
    halves = (sum(load[s] for s in half) for half in combinations(range(p), p // 2))
    assert fuller == min(max(half, sum(load) - half) for half in halves)


@settings(max_examples=examples(60), deadline=None)
@given(problem=problems_of_every_sort(max_devices=4, max_stages=6, nodes=True))
def test_a_node_holds_what_its_devices_pin_at_most_together(problem: Problem) -> None:
    """By the scan of each device alone, without a limit."""
    free = problem.replace(devices=[each.model_copy(update={"host_memory_bytes": None}) for each in problem.devices])
    schedule = next(STREAMS["adaoffload"](free, "makespan"), None)
    if schedule is None:
        return
    pinned = [peak.bytes for peak in certify(free, schedule).host]
    fits = True
    for d, device in enumerate(problem.devices):
        mates = [e for e, other in enumerate(problem.devices) if e == d or (device.node and other.node == device.node)]
        shares = [problem.devices[e].host_memory_bytes for e in mates]
        limit = None if None in shares else sum(filter(None, shares))
        peak = certify(problem, schedule).host[d]
        assert peak.bytes == pinned[d]
        others = sum(pinned[e] for e in mates) - pinned[d]
        assert peak.limit == (None if limit is None else max(0, limit - others))
        fits &= limit is None or others + pinned[d] <= limit
    assert certify(problem, schedule).fits == fits
    assert (check(problem, schedule) == []) == fits


def test_what_a_node_lacks_is_said_of_its_devices() -> None:
    schedule = generate("adaoffload", offloading(None))
    pinned = [peak.bytes for peak in certify(offloading(None), schedule).host]
    host = sum(pinned[:4]) // 4
    assert check(offloading(host), schedule) == []
    (first, *_) = check(offloading(host - 1), schedule)
    assert first.startswith("device 0 needs 1.3 kB of host memory during ")
    assert first.endswith(f" and has {(4 * (host - 1) - sum(pinned[1:4])) / 1000} kB")


@pytest.mark.parametrize("whole", [2, 3, 4, 6])
def test_the_optimum_divides_a_nodes_memory_as_is_best(whole: int) -> None:
    """CP-SAT's, and its bound, by trying every division and every schedule of each."""
    hosts = range(whole + 1)
    divided = {
        host: problem_of(LEAVING, [2, 2], 2, devices=[{"host_memory_bytes": each} for each in (host, whole - host)])
        for host in hosts
    }
    best = min(best_of_all(problem, "makespan")[0] for problem in divided.values())
    shared = problem_of(LEAVING, [2, 2], 2, devices=[{"host_memory_bytes": each, "node": "a"} for each in (0, whole)])
    frames: list[Any] = []
    request = Request(problem=shared, method="cpsat", time_limit_s=60.0, threads=1, placements="keep")
    Portfolio(request, frames.append).run()
    found = schedules(frames, shared)
    assert all(check(shared, each) == [] for each in found)
    assert found[-1].makespan_ms == pytest.approx(best)
    assert best < best_of_all(divided[0], "makespan")[0]  # the shares that the devices name


def short_of_host_memory() -> tuple[Grid, GridSchedule, Schedule]:
    tight = folded_problem(offloading(None))
    pinned = [peak.bytes for peak in certify(tight, generate("adaoffload", tight)).host]
    problem = in_nodes(tight, [each.node for each in tight.devices], max(sum(pinned[:4]), sum(pinned[4:])) // 8)
    schedule = split_backwards(generate("adaoffload", problem))
    assert check(problem, schedule) == []
    grid = Grid.for_problem(problem)
    return grid, place_on_grid(grid, schedule), schedule


def test_the_schedule_at_hand_is_a_hint_that_holds() -> None:
    """CP-SAT drops a hint that is no solution, and with it the schedule."""
    grid, incumbent, _ = short_of_host_memory()
    model, solver = WindowModel(grid, incumbent, Window.of_all(incumbent)).model, cp_model.CpSolver()
    solver.parameters.fix_variables_to_their_hinted_value = True
    assert solver.solve(model) == cp_model.OPTIMAL


def test_a_window_leaves_the_node_what_is_pinned_outside_of_it() -> None:
    """The first half of a schedule that fills its node: what a model of the second half finds fits with it."""
    grid, incumbent, schedule = short_of_host_memory()
    problem = schedule.problem
    assert incumbent.pinned == tuple(peak.bytes // grid.grain for peak in certify(problem, schedule).host)
    model = WindowModel(grid, incumbent, Window(incumbent.end // 2, incumbent.end + 1))
    assert model.solve(Clock(20.0, counts=True), 1, 0, any_will_do=True).starts is not None


def test_stages_take_their_budget_and_their_peer_to_another_device() -> None:
    eight = offloading(7)
    budgets = [each.model_copy(update={"activation_budget_bytes": 300 + d}) for d, each in enumerate(eight.devices)]
    problem = eight.replace(devices=[each.model_copy(update={"peer": 7 - d}) for d, each in enumerate(budgets)])
    moved = Placement(chunks=1, devices=(0, 1, 4, 5, 6, 7, 2, 3)).apply(problem)
    assert [each.device for each in moved.stages] == [0, 1, 4, 5, 6, 7, 2, 3]
    assert [each.node for each in moved.devices] == [each.node for each in problem.devices]
    assert [moved.devices[each.device].activation_budget_bytes for each in moved.stages] == list(range(300, 308))
    peers = [moved.devices[each.device].peer for each in moved.stages]
    assert peers == [each.device for each in reversed(moved.stages)]
    back = on_devices(moved, range(8))
    assert (back.devices, back.stages) == (problem.devices, problem.stages)


@pytest.mark.parametrize("devices", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4)])
def test_stages_move_to_no_other_devices(devices: tuple[int, ...]) -> None:
    wrong = f"placement.devices = {list(devices)}: the stages are on devices [0, 1, 2, 3]"
    with pytest.raises(InputError, match=f"^{re.escape(wrong)}$"):
        Placement(chunks=1, devices=devices).apply(units(4, 8))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_where_devices_are_alike_their_order_changes_no_time(name: str) -> None:
    problem = in_nodes(units(8, 16), ["a"] * 4 + ["b"] * 4, 10**9).replace(p2p_ms=0.5)
    moved = folded_problem(problem)
    before, after = published(name, problem), published(name, moved)
    assert after.makespan_ms == before.makespan_ms
    peaks = certify(moved, after).device
    assert [peaks[each.device].bytes for each in moved.stages] == [x.bytes for x in certify(problem, before).device]


@pytest.mark.parametrize("host", [300, 350, 400])
def test_folded_stages_need_a_fifth_less_time_where_host_memory_is_short(host: int) -> None:
    """At every size: 60 to 63 ms against 78 to 81, whether the devices share their nodes' memory or not."""
    problem = offloading(host)
    alone = in_nodes(problem, [None] * 8, host)
    shared, apart, across = (generate("adaoffload", each) for each in (problem, alone, folded_problem(problem)))
    assert all(check(each.problem, each) == [] for each in (shared, apart, across))
    assert across.makespan_ms < 0.8 * min(shared.makespan_ms, apart.makespan_ms)


def begun(problem: Problem, frames: list[Any], **asked: Any) -> PlacementSearch:
    request = Request(problem=problem, placements="all", threads=1, **({"time_limit_s": 1.0} | asked))
    search = PlacementSearch(request, frames.append)
    search.clock.last(search.clock.seconds + 100.0)  # one thread counts: a busy machine's clock ends nothing
    search.begin()
    return search


def test_the_placement_search_finds_the_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its first two phases of 20 seconds: 60.2 ms against 73.4 in the order of the devices, 65.2 on other stages."""
    monkeypatch.setattr(tuning, "CHUNKS", 2)
    frames: list[Any] = []
    search = begun(offloading(300), frames, time_limit_s=20.0)
    for phase in islice(search.phases(), 2):
        phase.run(phase.share)
    best = schedules(frames, offloading(300))[-1]
    assert check(best.problem, best) == []
    assert best.placement is not None
    assert best.placement.devices == (0, 1, 4, 5, 6, 7, 2, 3)
    assert best.problem == best.placement.apply(offloading(300))
    assert str(best.placement).endswith(" on devices 0 1 4 5 6 7 2 3 in this order")


@pytest.mark.parametrize(
    ("problem", "asked"),
    [
        (offloading(1600), {}),
        (offloading(None), {}),
        (in_nodes(offloading(300), [None] * 8, 300), {}),
        (in_nodes(offloading(300), ["a"] * 7 + [None], 300), {}),
        (offloading(300), {"stack": "primus"}),
    ],
    ids=["ample", "no limit", "no nodes", "a device without node", "Primus"],
)
def test_it_looks_for_none_where_that_changes_nothing_or_is_not_possible(problem: Problem, asked: Any) -> None:
    for each, folds in ((problem, False), (offloading(300), True)):
        search = begun(each, [], **(asked if each is problem else {}))
        assert any(other.placement and other.placement.devices for other in search.contenders.all) == folds


def test_what_no_nodes_memory_admits_is_infeasible() -> None:
    """Each of two stages on a device must leave: 4 bytes of host memory do, wherever they are."""
    two = [stage(d, (1, 1, 1), 2, 0, (1, 1, 2)) for d in (0, 1, 1, 0)]
    admitted = problem_of(two, [3, 3], 1, devices=[{"host_memory_bytes": each, "node": "a"} for each in (0, 4)])
    assert infeasibility(admitted) is None
    schedule = generate("naive", admitted)
    assert check(admitted, schedule) == []
    assert any(op.kind == Kind.O for program in schedule.programs for op in program.ops())
    short = problem_of(two, [3, 3], 1, devices=[{"host_memory_bytes": each, "node": "a"} for each in (0, 1)])
    assert infeasibility(short) == (
        "devices[0].activation_budget_bytes = 3 B: one micro-batch at a time needs at least 4 B, as its node's "
        "host_memory_bytes = 1 B admit no more offload"
    )
    for each, host in ((1, 2), (0, 3)):  # enough for one of the devices
        short = problem_of(two, [3, 3], 1, devices=[{"host_memory_bytes": h, "node": "a"} for h in (each, host)])
        assert infeasibility(short) == (
            "devices[0].host_memory_bytes: those of node 'a' add up to 3 B, and one micro-batch at a time needs at "
            "least 4 B there"
        )


@pytest.mark.parametrize("first", [0, 1])
def test_one_device_leaves_the_others_what_they_need(first: int) -> None:
    """The first stage may leave or be recomputed, which takes longer; that of the other device can only leave."""
    plain, leaving = stage(first, (1, 1, 1), 2), stage(1 - first, (1, 1, 1), 2, 0, (1, 1, 2))
    either = stage(first, (1, 1, 1), 2, 0, (1, 1, 2), (9, 0))
    devices = [{"host_memory_bytes": 1, "node": "a"}] * 2
    problem = problem_of([either, leaving, {**plain, "device": 1 - first}, plain], [3, 3], 1, devices=devices)
    assert infeasibility(problem) is None
    for name in STREAMS:
        assert check(problem, generate(name, problem)) == []


def test_micro_batches_that_pin_on_different_devices_need_the_sum() -> None:
    """The first has to leave one device, the second the other one: what is pinned stays with its device."""
    sizes = [2, 1], [1, 2], [1, 2], [2, 1]
    costs = [stage(d, (1, 1, 1), 2) | {"activation_bytes": size} for d, size in zip((0, 1, 1, 0), sizes, strict=True)]
    for each in costs[:2]:
        each |= {"offload_ms": 1.0, "reload_ms": 1.0, "offload_bytes": each["activation_bytes"]}
    for host, fits in ((3, False), (4, True)):
        problem = problem_of(costs, [3, 3], 2, devices=[{"host_memory_bytes": h, "node": "a"} for h in (0, host)])
        assert (infeasibility(problem) is None) == fits
        assert (check(problem, generate("naive", problem)) == []) == fits


def test_a_file_without_nodes_reads_as_before() -> None:
    problem = units(4, 8)
    assert "node" not in problem.to_json()
    assert Problem.from_json(problem.to_json()) == problem
    named = in_nodes(problem, ["a", "a", "b", "b"], 5)
    assert Problem.from_json(named.to_json()) == named
    assert named.sha256 != problem.sha256
    placed = Placement(chunks=1, devices=(0, 2, 3, 1))
    assert Placement.from_dict(placed.model_dump(mode="json", exclude_none=True)) == placed
    assert isinstance(published("1f1b", placed.apply(named)), Schedule)
