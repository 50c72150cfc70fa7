"""The planner: its answer is that of trying everything, fits, and follows the memory; what it says of its parts, and
how sure it is of them."""

import contextlib
from dataclasses import replace
from itertools import pairwise

import pytest
from support.problems.planning import RESERVED, SMALL, every, planned, question

from optpipe import InputError, OptPipeError, Problem, Schedule, check, export_schedule
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.model.ops import Kind
from optpipe.options import SearchOptions
from optpipe.transformer.calibrate import NAMES, UNEXPLAINED
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Run
from optpipe_solver import tuning
from optpipe_solver.bounds import memory_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.planner import search, settings
from optpipe_solver.planner.candidate import Candidate, difference
from optpipe_solver.planner.candidates import Question, branches, candidates, shifted
from optpipe_solver.planner.plan import Plan
from optpipe_solver.planner.search import PlanSearch, published
from optpipe_solver.systems import generate

pytestmark = pytest.mark.usefixtures("few_choices")


@pytest.fixture(scope="module")
def found(few_choices: None) -> Plan:
    return planned(question())


def everything(asked: Question) -> float:
    """The shortest iteration that any published schedule or list scheduling has, of all candidates, without bounds."""
    best = NO_SCHEDULE_MS
    for candidate in every(asked):
        if candidate.state_bytes >= asked.gpu.memory_bytes or infeasibility(candidate.problem):
            continue
        listed = []
        with contextlib.suppress(OptPipeError, StopIteration):
            if asked.stack != "megatron":
                listed.append(next(STREAMS["adaoffload"](candidate.problem, "makespan")))
        for schedule in (*published(candidate, asked.stack), *listed):
            if not check(schedule.problem, schedule):
                best = min(best, candidate.with_step_end(schedule.makespan_ms))
    return best


def test_it_finds_what_trying_everything_finds(found: Plan) -> None:
    assert sum(found.counts) == len(found.ranked)
    assert found.counts.too_large > 0
    fewer = planned(question(), gap=0.3).counts.scheduled
    assert found.counts.ruled_out > found.counts.scheduled > fewer
    assert found.best.iteration_ms == pytest.approx(everything(question()), rel=1e-9)


def test_bounds_hold_and_schedules_fit(found: Plan) -> None:
    asked = found.question
    scheduled = [candidate for candidate in found.ranked if candidate.schedule]
    assert scheduled[0] is found.best
    for candidate in scheduled:
        assert candidate.schedule
        assert check(candidate.schedule.problem, candidate.schedule) == []
        assert max(candidate.used_bytes(candidate.schedule)) <= asked.gpu.memory_bytes
        ranges = zip(candidate.used_bytes(candidate.schedule), candidate.peak_ranges(candidate.schedule), strict=True)
        assert all(least < used < most for used, (least, most) in ranges)
        if candidate.start:  # it evicts nothing
            bound = max(candidate.bound_ms, candidate.with_step_end(memory_bound(candidate.problem)))
            assert bound <= candidate.with_step_end(candidate.start.makespan_ms) * (1 + 1e-9)
    for held, ms, candidate, method in found.frontier:
        assert candidate.lengths[method] == (ms, held)
        assert held <= asked.gpu.memory_bytes
    assert found.frontier[-1][1] == found.best.iteration_ms
    assert found.lower_bound_ms <= found.best.iteration_ms


def test_activations_may_be_evicted_to_other_devices() -> None:
    """With a byte less than 1F1B needs; no search begins with what evicts, as none evicts."""

    def one_stage_a_device(memory_bytes: int) -> Candidate:
        asked = question(memory_bytes, model=SMALL.model_copy(update={"layers": 8}), gpus=8, batch=16)
        return next(c for c in every(asked) if c.division[1] == c.estimate.parallelism.stages == 8)

    ample = one_stage_a_device(80_000_000_000)
    tight = one_stage_a_device(max(ample.used_bytes(generate("1f1b", ample.problem))) - 1)
    found = {schedule.method: schedule for schedule in published(tight, "optpipe")}
    assert not tight.take(found["1f1b"])
    assert tight.take(found["bpipe"])
    assert tight.schedule is not None
    assert tight.start is None
    assert not tight.take(found["gpipe"])
    stages, links = tight.schedule.problem.stages, tight.estimate.clock.links
    first = stages[0]
    assert [stage.device // 2 for stage in stages] == [0, 1, 2, 3, 3, 2, 1, 0]  # two devices a node: each pair's
    assert first.evict_ms == links.ring_ms(first.activation_bytes, 2, 1, 1) < links.message_ms(first.activation_bytes)
    assert tight.used_bytes(tight.schedule) == [
        tight.estimate.gpu.memory_bytes - memory.budget + tight.schedule.compiled.certificate.device[stage.device].bytes
        for memory, stage in zip(tight.estimate.devices, stages, strict=True)
    ]
    assert "bpipe" not in {schedule.method for schedule in published(tight, "torch")}


def test_torch_splits_no_backward_of_replicas_and_holds_gradients_until_w() -> None:
    plan = planned(question(9 * RESERVED, stack="torch", batch=16))
    seen = set()
    for candidate in plan.ranked:
        if candidate.schedule:
            parallelism = candidate.estimate.parallelism
            whole = parallelism.dp * parallelism.cp > 1 or candidate.estimate.run.recompute == "full"
            split = any(op.kind is Kind.W for program in candidate.schedule.programs for op in program.ops())
            seen.add((whole, split))
            problem = candidate.schedule.problem
            assert problem.stack == "torch"
            for s, stage in enumerate(problem.stages):
                factor = candidate.estimate.torch_factor if s else 1.0
                held = problem.costs.saved_for_weight[s, 0]
                assert held == pytest.approx(factor * stage.activation_bytes, rel=1e-6)
    assert (True, False) in seen
    assert (True, True) not in seen
    alone = next(c for c in every(question(9 * RESERVED, stack="torch")) if c.division == (1, 4, 1, 1, 1))
    tried = [alone.take(each) for each in published(alone, "torch")]
    assert any(tried)
    assert any(method.startswith("zb-") for method in alone.lengths)


def test_more_memory_is_never_slower() -> None:
    """But for a percent: list scheduling may find less in more memory."""
    sizes = [RESERVED + size for size in (3_000_000_000, 3_200_000_000, 3_500_000_000, 4_000_000_000, 9_000_000_000)]
    plans = [planned(question(size)) for size in sizes]
    iterations = [plan.best.iteration_ms for plan in plans]
    assert all(more <= 1.01 * less for less, more in pairwise(iterations))
    assert iterations[0] > 1.3 * iterations[-1]


def test_a_search_of_its_own_takes_the_place_of_what_it_beats(found: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of searches become smaller, and what comes to nothing changes nothing."""
    asked: list[float] = []

    def solve(problem, start, seconds):
        asked.append(seconds)

    options = SearchOptions(time_limit_s=10_000.0, gap=0.0)
    monkeypatch.setattr(PlanSearch, "_is_open", lambda self, candidate: candidate.method is not None)
    plan = PlanSearch(question(), solve, options, 5).run()
    rounds = [asked.count(seconds) for seconds in dict.fromkeys(asked)]
    assert rounds == [5, 2]  # with cores to spare they become smaller, too
    assert plan.searched == 5
    assert len(asked) >= plan.searched
    assert plan.best.iteration_ms == found.best.iteration_ms


def test_parts_add_up(found: Plan) -> None:
    for candidate in (found.best, *found.other_divisions):
        divided = candidate.parts_ms
        assert sum(divided.values()) == pytest.approx(max(candidate.least_ms, candidate.work_ms))
        assert min(divided.values()) > -1e-6 * candidate.least_ms
    assert {c.division for c in found.other_divisions}.isdisjoint({found.best.division})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpus": 7}, "batch = 8: 7 GPUs make 7 replicas of the model, a multiple of 7 sequences would be right"),
        ({"gpus": 8191}, "gpus = 8191: cannot be divided into stages of 6 layers"),
        (
            {"gpus": 64, "batch": 9, "run": Run(microbatches=1, attention="unfused")},
            "batch = 9: 64 GPUs make 8 or 16 or 32 or 64 replicas",
        ),
        (
            {"gpu": GPUS["A100"].model_copy(update={"memory_bytes": RESERVED + 10**9, "gpus_per_node": 2})},
            "no division fits: with tp 2, pp 2, dp 1, .* a GPU needs 7.3 GB for one micro-batch at a time, 7.0 of it "
            "without any activation, and has 5.3",
        ),
        ({"model": SMALL.model_copy(update={"sequence": None})}, "sequence is missing"),
    ],
)
def test_what_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        planned(question(**fields))
    assert "\n" not in str(error.value)


def test_what_is_told_to_be_nearest_misses_by_least() -> None:
    """Long sequences: the division with the smallest state needs the most for activations."""
    model = SMALL.model_copy(update={"sequence": 2**17, "vocabulary": 1000})
    asked = question(RESERVED + 10**8, model=model, stack="megatron")
    needed = {str(c): (c.needed_bytes, c.state_bytes) for c in every(asked)}
    least, state = min(needed.values())
    assert state > min(state for _, state in needed.values())
    with pytest.raises(InputError) as told:
        planned(asked)
    (nearest,) = (name for name in needed if f"with {name}, a GPU needs {least / 1e9:.1f} GB" in str(told.value))
    assert needed[nearest][0] == least


def test_a_stack_whose_schedules_do_not_fit_is_told() -> None:
    model = MODELS["llama-3-8b"].model_copy(update={"layers": 4, "vocabulary": 1000, "sequence": 65535})
    gpu = GPUS["H100"].model_copy(update={"memory_bytes": 26_600_000_000, "gpus_per_node": 1})
    with pytest.raises(InputError, match=r"one micro-batch fits, but no schedule that megatron has"):
        planned(question(model=model, gpu=gpu, batch=7, stack="megatron"))


def test_too_little_time_is_said() -> None:
    options = SearchOptions(time_limit_s=1e-6)
    with pytest.raises(InputError, match="a longer time would be right"):
        PlanSearch(question(RESERVED + 3_000_000_000), lambda *_: None, options, 1).run()


def test_other_stacks_run_what_they_have() -> None:
    megatron = planned(question(stack="megatron"))
    assert {method for c in megatron.ranked for method in c.lengths} <= {"1f1b", "interleaved"}
    assert megatron.counts.left_open == 0
    assert megatron.best.iteration_ms == pytest.approx(everything(question(stack="megatron")), rel=1e-9)
    assert {c.estimate.parallelism.shape for c in megatron.ranked} == {"looped"}
    torch = planned(question(stack="torch"))
    assert torch.best.schedule
    assert export_schedule(torch.best.schedule, "torch-csv")
    assert {c.estimate.run.recompute for c in torch.ranked} == {"none", "full"}
    ample = [planned(question(10 * RESERVED, stack=stack)).best.iteration_ms for stack in ("torch", "megatron")]
    assert ample[0] <= ample[1]  # where torch's buffers do not matter


def test_in_megatron_layers_move_as_long_as_that_gains() -> None:
    """A head as long as three layers: neither even stages nor those of which the longest is shortest are best, but two
    without any layer."""
    asked = question(model=SMALL.model_copy(update={"vocabulary": 50_000}), stack="megatron")
    plan = planned(asked)
    best = plan.best
    assert "--pipeline-model-parallel-layout 'E|ttt|ttt|L'" in settings.megatron(best)
    assert plan.lower_bound_ms == best.iteration_ms, "Megatron has no other schedule of these stages"
    assert best.iteration_ms < 0.98 * everything(asked)
    others = [*shifted(asked, best)]
    assert {other.estimate.parallelism.layers for other in others} >= {(1, 2, 3, 0), (0, 3, 2, 1), (0, 4, 2, 0)}
    for other in others:
        schedule = generate("interleaved", other.problem)
        assert check(other.problem, schedule) or other.with_step_end(schedule.makespan_ms) >= best.iteration_ms


def test_layers_move_from_the_busiest_device_first() -> None:
    """Of many stages not all pairs can be tried."""
    asked = question(model=SMALL.model_copy(update={"vocabulary": 50_000, "layers": 8}), gpus=4, stack="megatron")
    for candidate in every(asked):
        counts, busy = candidate.estimate.parallelism.layers, candidate.estimate.busy_ms
        if counts and len(counts) == len(busy) == 4:
            layers = next(shifted(asked, candidate)).estimate.parallelism.layers
            moved = [after - before for before, after in zip(counts, layers, strict=True)]
            assert (busy[moved.index(-1)], busy[moved.index(1)]) == (max(busy), min(busy))


def test_torch_has_no_pipeline_for_tied_models() -> None:
    tied = SMALL.model_copy(update={"tied": True, "name": "small"})
    plan = planned(question(9 * RESERVED, model=tied, stack="torch"))
    assert {c.estimate.parallelism.pp for c in plan.ranked} == {1}
    with pytest.raises(InputError, match=r"a GPU needs .*; embedding and head of small are tied, which torchtitan"):
        planned(question(RESERVED + 10**9, model=tied, stack="torch"))
    assert any(c.estimate.parallelism.pp > 1 for c in every(question(model=tied, stack="megatron")))


def test_what_stands_for_its_branches_is_no_longer_than_any() -> None:
    asked = question(stack="megatron")
    for root in candidates(asked):
        assert root.bound_ms <= min(each.work_ms for each in (root, *branches(asked, root)))


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_schedule_is_as_long_and_as_large_as_the_formula_says(gpus: int) -> None:
    """So that plans by it are those by schedules."""
    for candidate in every(question(9 * RESERVED, gpus=gpus, batch=12, stack="megatron")):
        division, run = candidate.estimate.parallelism, candidate.estimate.run
        if division.chunks == 1 or run.microbatches % division.pp == 0:
            schedule = generate("1f1b" if division.chunks == 1 else "interleaved", candidate.problem)
            held = max(candidate.used_bytes(schedule))
            assert candidate.looped() == (pytest.approx(candidate.with_step_end(schedule.makespan_ms)), held)


def test_no_schedule_is_made_where_the_formula_says_that_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def noted(name: str, problem: Problem) -> Schedule:
        made.append(generate(name, problem))
        return made[-1]

    monkeypatch.setattr(search, "generate", noted)
    planned(question(RESERVED + 4_000_000_000, batch=16, stack="megatron"))
    in_groups = [s for s in made if s.problem.microbatches % len(s.problem.devices) == 0]
    assert in_groups
    assert not any(schedule.compiled.complaints for schedule in in_groups)


@pytest.mark.parametrize(
    ("layers", "pp", "expected"), [(80, 4, (1, 2, 3, 4, 5, 7, 10, 20)), (126, 16, (1, 2, 3, 4, 8))]
)
def test_chunks_are_as_many_as_make_stages_shorter(
    layers: int, pp: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Megatron-Bridge's recipes for Llama 3 among them: 5 and 20, 4 and 8."""
    monkeypatch.setattr(tuning, "LOOPED_CHUNKS", 24)
    asked = question(model=SMALL.model_copy(update={"layers": layers}), gpus=pp, stack="megatron")
    (root,) = (c for c in candidates(asked) if c.division == (1, pp, 1, 1, 1) and str(c).endswith("8 × 1 sequence"))
    assert tuple(dict.fromkeys(c.estimate.parallelism.chunks for c in (root, *branches(asked, root)))) == expected


def test_plans_are_equal_within_what_is_not_known(found: Plan) -> None:
    """What both depend on in the same way does not count; better known parameters tell more of them apart."""
    best, other = found.best, found.other_divisions[0]
    itself = difference(best, best)
    gpu = best.estimate.gpu
    assert itself.longer == 0
    assert itself.spread == pytest.approx(2**0.5 * gpu.unexplained)
    assert itself.largest == UNEXPLAINED
    vague = difference(best, other)
    assert vague.spread >= itself.spread
    assert sum(vague.variance.values()) == pytest.approx(1)
    sure = gpu.model_copy(update={"covariance": [[0.0] * len(NAMES)] * len(NAMES), "unexplained": 1e-6})
    known = difference(replace(best, estimate=best.estimate.on(sure)), other)
    assert known.longer == pytest.approx(vague.longer)
    assert not known.is_open
    assert difference(best, other)._replace(spread=2 * abs(vague.longer)).is_open


@pytest.mark.parametrize(("tie", "division"), [(0.01, (2, 4, 1, 1, 2)), (0.1, (2, 4, 2, 1, 1))])
def test_less_context_parallelism_wins_where_it_takes_hardly_longer(
    monkeypatch: pytest.MonkeyPatch, tie: float, division: tuple[int, ...]
) -> None:
    """Replicas take 6.5 % longer here, which is a tie only in the second case."""
    monkeypatch.setattr(tuning, "PLAN_TIE", tie)
    plan = planned(question(2 * RESERVED, gpus=16, batch=4, stack="megatron"))
    assert (plan.best.division, plan.shortest.division) == (division, (2, 4, 1, 1, 2))
    near = [c for c in plan.ranked if c.method and c.iteration_ms < plan.shortest.iteration_ms * (1 + tie)]
    assert plan.best.estimate.parallelism.cp == min(c.estimate.parallelism.cp for c in near)
    assert plan.best.schedule
    assert plan.best.schedule.method == plan.best.method
    assert plan.counts.left_open == 0
