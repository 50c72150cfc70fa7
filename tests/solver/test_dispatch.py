"""The engine `dispatch`: what its rules lead to is valid, and its search gets ahead of published schedules."""

from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.frames import schedules
from support.oracles.plain_list_scheduler import PlainListScheduler
from support.problems import pipeline as chain_of
from support.problems import stage
from support.problems.small import problems_of_every_sort

from optpipe.dispatch.descend import change, descend
from optpipe.dispatch.descents import StageRelief, descents, first_rules, moved_rules, rules_of_schedule, spread
from optpipe.dispatch.figures import in_rows
from optpipe.dispatch.simulate import Simulator
from optpipe.evaluate.jit import plain
from optpipe.evaluate.objective import NO_SCHEDULE_MS, length_ms
from optpipe.model.ops import Kind
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.rules import Rules, RulesRecord
from optpipe.process.protocol import Frame, Programs, Request
from optpipe.schedule import Schedule, certify, check
from optpipe_solver import dispatch, systems


def pipeline(devices: int, microbatches: int, memory: int, chunks: int = 2) -> Problem:
    """Zero-bubble's costs of 8 devices a model of 24 micro-batches: F 18.5, B 18.1, W 9.3, hops of 0.6 ms."""
    whole = chain_of(devices, microbatches, memory, stage((18.522, 18.086, 9.337), (60, 22)), p2p_ms=0.601)
    return Placement(chunks=chunks, shape="v").apply(whole) if chunks > 1 else whole


def problems() -> st.SearchStrategy[Problem]:
    """Small ones of every sort, short of memory, also of nodes: levels, parts, routes, peers, unlike micro-batches."""
    limits = {"max_devices": 4, "max_stages": 6, "max_microbatches": 6}
    return st.one_of(
        problems_of_every_sort(nodes=True, **limits), problems_of_every_sort(nodes=True, beyond=True, **limits)
    )


def some_rules(simulator: Simulator, seed: int) -> list[Rules]:
    """Some twenty of the first rules; which, the seed says, so that over all examples every sort is tried."""
    rules = list(first_rules(simulator))
    step = 1 + len(rules) // 20
    return rules[seed % step :: step]


def changed(simulator: Simulator, rules: Rules, random: np.random.Generator) -> Rules:
    """Rules of which some are others."""
    other, seed = in_rows(rules).copy(), float(random.integers(1, 2**31 - 1))
    plain(change)(simulator.figures, simulator.choices, other, np.array([0.0, 0.0, 0.0, seed]))
    return other


@settings(max_examples=examples(60), deadline=None)
@given(problem=problems(), seed=st.integers(0, 99))
def test_what_rules_lead_to_is_valid_and_as_long_as_simulated(problem: Problem, seed: int) -> None:
    simulator, random = Simulator(problem), np.random.default_rng(seed)
    for rules in some_rules(simulator, seed):
        for changes in range(3):
            schedule = simulator.schedule(rules, "dispatch")
            simulated = {objective: simulator.length_ms(rules, objective) for objective in ("makespan", "span")}
            if schedule is None:
                assert set(simulated.values()) == {NO_SCHEDULE_MS}
                break
            assert check(problem, schedule) == []
            if not (
                changes or (rules.level >= 0).any() or rules.parts.any() or rules.wait_ms.any()
            ):  # in the simulation devices wait, and useless transfers are made
                lengths = {objective: length_ms(schedule, objective) for objective in simulated}
                assert simulated == pytest.approx(lengths, abs=0.01)  # what takes no time takes an instant
            assert schedule.makespan_ms <= simulated["makespan"] + 1e-6
            rules = changed(simulator, rules, random)


def require_the_plain_order(problem: Problem, seed: int) -> None:
    simulator, random = Simulator(problem), np.random.default_rng(seed)
    state = simulator.new_state()
    for rules in some_rules(simulator, seed):
        for _ in range(4):
            other = PlainListScheduler(simulator.figures, rules)
            assert (simulator.length_ms(rules, "makespan", state) < NO_SCHEDULE_MS) == other.run()
            np.testing.assert_array_equal(state.start, other.start)
            np.testing.assert_array_equal(state.moved, other.moved)
            rules = changed(simulator, rules, random)


@settings(max_examples=examples(60), deadline=None)
@given(problem=problems(), seed=st.integers(0, 99))
def test_the_compiled_clock_does_what_a_plain_list_scheduler_does(problem: Problem, seed: int) -> None:
    require_the_plain_order(problem, seed)


@settings(max_examples=examples(24), deadline=None)
@given(problem=problems(), seed=st.integers(0, 99))
def test_plain_loops_do_what_compiled_ones_do(problem: Problem, seed: int) -> None:
    """Heuristics use them, which wait for no compiler."""
    random, pair = np.random.default_rng(seed), (Simulator(problem), Simulator(problem))
    pair[1].descend = partial(plain(descend), pair[1].figures, pair[1].choices)
    for rules in some_rules(pair[0], seed)[:5]:
        ways = []
        for objective in ("makespan", "span"):
            at_hand = in_rows(changed(pair[0], rules, random))
            for simulator in pair:
                state, each = simulator.new_state(), [at_hand.copy() for _ in range(3)]
                ms = simulator.length_ms(at_hand, objective, state)
                progress = np.array([ms, ms, 0.0, 1.0])
                simulator.descend(*each, state, progress, 3, objective == "span")
                ways.append([ms, progress, *state, *(array for rules in each for array in rules)])
        for compiled, interpreted in (ways[:2], ways[2:]):
            for one, other in zip(compiled, interpreted, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("activations", [1.5, 2.3])
def test_it_does_so_where_much_leaves(activations: float) -> None:
    problem = Problem.load(Path(__file__).parents[2] / "examples/problems/slowlink-8x16-parts4.json")
    require_the_plain_order(problem.with_memory_for(activations), 0)


@settings(max_examples=examples(24), deadline=None)
@given(problem=problems(), seed=st.integers(0, 99))
def test_a_descent_tells_what_its_rules_lead_to(problem: Problem, seed: int) -> None:
    simulator = Simulator(problem)
    for objective in ("makespan", "span"):
        for rules, ms, tried, listed in islice(descents(simulator, objective, seed), 0, 40, 3):
            again = simulator.schedule(rules, "dispatch", listed)
            assert again == simulator.schedule(rules, "dispatch")
            assert simulator.length_ms(rules, objective) == ms
            assert tried > 0


@settings(max_examples=examples(24), deadline=None)
@given(problem=problems(), seed=st.integers(0, 99))
def test_a_schedule_brings_its_rules_along(problem: Problem, seed: int) -> None:
    """Over the wire, and with them a search begins, as long as the problem is the same."""
    simulator, random = Simulator(problem), np.random.default_rng(seed)
    for rules in some_rules(simulator, seed):
        rules = changed(simulator, rules, random)
        if schedule := simulator.schedule(rules, "dispatch"):
            read = Programs.model_validate_json(Programs.from_schedule(schedule).model_dump_json()).schedule(problem)
            began = next(rules_of_schedule(simulator, read))
            assert simulator.length_ms(began, "makespan") == pytest.approx(simulator.length_ms(rules, "makespan"))


@settings(max_examples=examples(24), deadline=None)
@given(problem=problems(), other=problems(), value=st.sampled_from((-500, -10, -2, -1, 0, 1, 2**20)))
def test_rules_that_are_no_rules_of_the_problem_are_moved_to_some_that_are(
    problem: Problem, other: Problem, value: int
) -> None:
    """As those of other costs, or of a stranger who made them up."""
    simulator, stages = Simulator(problem), len(other.stages)
    each = np.full((stages, other.microbatches), value)
    waits, leads, order = np.full((2, stages), 1e12), np.full(stages, 1e12), np.arange(other.microbatches)
    rules = Rules(np.full(stages, value), waits, each, abs(each), leads, order)
    if moved := moved_rules(simulator, rules, other):
        assert (moved.in_flight >= 1).all()
        assert ((moved.level >= -1) & (moved.level < simulator.choices.levels[:, None])).all()
        most = simulator.choices.parts[1 + moved.level, np.arange(simulator.stages)[:, None]]
        assert ((moved.parts >= 0) & (moved.parts <= most)).all()
        schedule = simulator.schedule(moved, "dispatch")
        assert schedule is None or check(problem, schedule) == []
    assert moved_rules(simulator, rules._replace(level=each[:, 1:], parts=each[:, 1:]), other) is None


@pytest.mark.parametrize("rows", [[[0], [0, 0]], [[], []], [[0]], []])
@pytest.mark.parametrize("name", ["level", "parts"])
def test_rules_on_the_wire_are_of_one_shape(name: str, rows: list[list[int]]) -> None:
    row, right = [0.0] * 2, [[0], [0]]
    wrong = {"in_flight": [1, 1], "wait_ms": [row, row], "level": right, "parts": right, "lead_ms": row, "order": [0]}
    assert RulesRecord.model_validate(wrong)
    wrong[name] = rows
    with pytest.raises(ValueError, match="2 rows of 1"):
        RulesRecord.model_validate(wrong)


def test_a_deep_pipeline_of_many_microbatches_is_searched() -> None:
    """A change takes a random number for each stage: they must not begin anew within one."""
    fields = stage((10, 10, 8), (10, 4), offload=(12, 12, 10))
    simulator = Simulator(chain_of(30, 112, 80, fields))
    assert sum(step.tried for step in islice(descents(simulator, "makespan", 0), 80)) == 80  # one at a time


def found(problem: Problem, seconds: float, **asked: object) -> list[Schedule]:
    """What the engine emits within so many counted seconds."""
    frames: list[Frame] = []
    request = Request(problem=problem, method="dispatch", time_limit_s=seconds, threads=1, **asked)
    dispatch.run(request, frames.append)
    return schedules(frames, problem)


def test_it_is_ahead_of_the_v_schedules_that_fit():
    problem = pipeline(8, 24, memory=8 * 30)
    shortest = min(
        schedule.makespan_ms
        for name in ("zb-v", "v-half", "v-min")
        if certify(problem, schedule := systems.generate(name, problem)).fits
    )
    assert shortest > 1600
    *_, schedule = found(problem, 1.0)
    assert check(problem, schedule) == []
    assert schedule.makespan_ms <= 1540


@pytest.mark.parametrize(("name", "most_ms"), [("fastlink-4x8", 266), ("recompute-4x12", 512)])
def test_what_leaves_or_is_recomputed_is_searched(name: str, most_ms: float) -> None:
    """342 and 1005 ms are the shortest that it finds where all activations stay."""
    problem = Problem.load(Path(__file__).parents[2] / f"examples/problems/{name}.json")
    *_, last = found(problem, 0.2)
    assert last.makespan_ms <= most_ms


def test_the_same_seed_finds_the_same():
    problem = pipeline(4, 8, memory=5 * 30)
    first, second = (found(problem, 0.05, seed=3) for _ in range(2))
    assert first == second != []


def test_it_gives_up_where_the_schedule_given_is_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = pipeline(2, 4, memory=1000)
    given = Programs.from_schedule(systems.generate("zb-v", problem))
    request = Request(problem=problem, method="dispatch", time_limit_s=0.05, threads=1, warm_start=given)
    assert dispatch.run(request, lambda frame: None) > 0.05
    monkeypatch.setattr(dispatch, "HOPELESS_TRIES", 10)
    monkeypatch.setattr(dispatch, "HOPELESS_LENGTH", 0.5)  # as if it were twice as long
    assert dispatch.run(request, lambda frame: None) < 0.01


def test_one_that_would_be_late_does_not_hide_the_next_to_leave() -> None:
    """When the first has left, the second would be late, the third stays by the rules, and the fourth leaves."""
    first = stage((2.75, 1.0, 1.0), (1, 0), device=0, offload=(9.0, 9.0, 1))
    last = stage((10.0, 10.0, 1.0), (1, 0), device=1)
    whole = {"devices": [{"activation_budget_bytes": 100}] * 2, "stages": [first, last], "transfer_mode": "full_duplex"}
    simulator = Simulator(Problem.from_dict({"microbatches": 7, "p2p_ms": 0.0, **whole}))
    relief = StageRelief.none(2, 7)._replace(parts=np.array([[1, 1, 0, 1, 0, 0, 0], [0] * 7]))
    rules = Rules(np.full(2, 7), np.zeros((2, 2)), *relief, np.array([9.0, 0.0]), np.arange(7))
    plain = PlainListScheduler(simulator.figures, rules)
    assert plain.run()
    starts = plain.moved[0, 0, :, 0]
    assert starts[[0, 3]].tolist() == [2.75, 11.75]
    state = simulator.new_state()
    simulator.length_ms(rules, "makespan", state)
    np.testing.assert_array_equal(state.moved, plain.moved)


def test_what_is_in_flight_and_waiting_change_the_order():
    """A device that waits for gradients runs forwards and weight gradients later."""
    problem, none = pipeline(2, 4, memory=1000, chunks=1), np.zeros((2, 2))
    waits = none.copy()
    waits[1, 0] = 30.0
    simulator, orders = Simulator(problem), []
    stay = *StageRelief.none(2, 4), np.zeros(2), np.arange(4)
    for in_flight, wait_ms in ((4, none), (4, waits), (1, none)):
        schedule = simulator.schedule(Rules(np.full(2, in_flight), wait_ms, *stay), "dispatch")
        orders.append("".join(op.kind.name for op in schedule.programs[0].ops()))
    assert orders == ["FFFFBWBWBWBW", "FFFBBBFWWWBW", "FBFWBFWBFWBW"]


def test_the_last_to_leave_makes_room_for_the_first_to_come_back():
    """Memory for fewer than two activations: what leaves last could stay if there were more. One micro-batch at a
    time takes 944 ms."""
    tight = Problem.load(Path(__file__).parents[2] / "examples/problems/fastlink-4x8.json").with_memory_for(1.8)
    simulator = Simulator(tight)
    relief = spread(simulator, StageRelief.none(4)._replace(parts=simulator.choices.parts[0]), 1.0)
    rules = Rules(np.array([4, 3, 2, 1]), np.zeros((2, 4)), *relief, simulator.choices.carry_ms, np.arange(8))
    schedule = simulator.schedule(rules, "dispatch")
    assert schedule is not None
    assert not check(tight, schedule)
    assert schedule.makespan_ms < 400


def test_ops_are_expected_when_a_micro_batch_alone_has_them() -> None:
    """`Figures.offset_ms`, with times and messages that differ by stage and direction."""
    stages = [stage((3, 5, 1)), stage((4, 2, 1)), stage((6, 7, 1))]
    problem = chain_of(3, 1, 10, stages, p2p_ms=2.0)
    timeline = systems.generate("zb-h1", problem).timeline
    rows = timeline.rows
    for way, kind in enumerate((Kind.F, Kind.B)):
        start_ms = dict(zip(rows.stage[rows.of_kinds(kind)], timeline.start[rows.of_kinds(kind)], strict=True))
        assert Simulator(problem).figures.offset_ms[way, :, 0].tolist() == [start_ms[s] for s in range(3)]
