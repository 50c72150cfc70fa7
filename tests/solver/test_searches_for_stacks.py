"""Searches for a training stack: what they find exports there, and what it cannot run is refused before they begin."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.frames import schedules
from support.problems import parsed, pipeline, stage, strategies, with_budgets
from support.problems.units import units

from optpipe import InputError, as_torch_holds, check, compare, export_schedule, solve
from optpipe.anytime import Keeper
from optpipe.formats import export
from optpipe.formats.stacks import STACKS
from optpipe.model.placement import Placement, rechunk
from optpipe.options import SolveOptions
from optpipe.process.protocol import Incumbent, Programs, Request
from optpipe_solver import first
from optpipe_solver.systems import generate

FORM = {"torch": "torch-csv", "megatron": "megatron", "primus": "primus"}
RICH = stage((3, 4, 2), (60, 24), offload=(2, 2, 57), recompute=(1, 6), offload_parts=3)


# Their best published schedules recompute, or split backwards.
RECOMPUTED = pipeline(3, 6, 100, stage((3, 4, 2), (60, 24), recompute=(1, 6)))
REFUSED = {"torch": RECOMPUTED, "primus": RECOMPUTED, "megatron": pipeline(3, 6, 240, RICH)}


@pytest.mark.parametrize("stack", FORM)
def test_what_is_found_for_a_stack_exports_to_it(stack):
    """Of a problem whose unrestricted answer is refused there."""
    problem = REFUSED[stack]
    free = solve(problem, time_limit_s=2, threads=1).schedule
    with pytest.raises(InputError, match=r"PyTorch's rows|Megatron's 1F1B|Primus has nodes"):
        export_schedule(free, FORM[stack])
    found = solve(problem, stack=stack, time_limit_s=2, threads=1)
    assert export(found.schedule, FORM[stack]).misfits == ()
    assert found.makespan_ms >= free.makespan_ms
    assert found.lower_bound_ms <= found.makespan_ms
    posed = found.schedule.problem
    assert posed == STACKS[stack].restrict(problem)
    assert check(problem, found.schedule) == [], "it is a schedule of the problem, too"
    assert posed.stages[1].saved_for_weight_bytes == (120 if stack == "torch" else 24)


@pytest.mark.parametrize("stack", FORM)
def test_so_do_other_stages_where_all_are_searched(stack):
    layers = [stage((1, 1, 1), (4, 2)), *[RICH] * 10, stage((5, 4, 3), (9, 8))]
    row = pipeline(3, 6, 10**4, RICH, layers=layers, overlap_factor=0.8)
    problem = Placement.balanced(row, 1).apply(row)
    found = solve(problem, stack=stack, time_limit_s=2, threads=1).schedule
    assert export(found, FORM[stack]).misfits == ()
    chunks = len(found.problem.stages) // 3
    assert STACKS[stack].places(chunks, found.placement.shape if found.placement else "looped")


@pytest.mark.parametrize("stack", FORM)
@settings(deadline=None, max_examples=examples(40))
@given(data=st.data())
def test_every_first_schedule_is_one_for_the_stack(stack, data):
    """Micro-batches that differ included, which torch numbers by its last stage and Primus by its data."""
    problem = data.draw(strategies.problems() | strategies.looped().flatmap(strategies.differing))
    try:
        posed = STACKS[stack].restrict(problem)
    except InputError:
        assume(False)
    assert STACKS[stack].restrict(posed) == posed
    placements = data.draw(st.sampled_from(["keep", "all"]))
    frames = []
    first.answer(Request(problem=posed, stack=stack, placements=placements, time_limit_s=0.1), frames.append)
    found = schedules(frames, posed)
    assert found or STACKS[stack].only_own
    for schedule in found:
        assert check(schedule.problem, schedule) == []
        assert export_schedule(schedule, FORM[stack])


def test_primus_has_looped_stages_with_whole_backwards_only():
    problem = units(2, 8, v=2)
    split = parsed(units(2, 1, v=2), "0F0 2F0 2BW0 0B0 0W0", "1F0 3F0 3BW0 1BW0")
    assert STACKS["primus"].complaint(split) == (
        "Primus' 1f1b-interleaved, which has several looped stages a rank, splits no backward"
    )
    found = solve(problem, stack="primus", placements="keep", time_limit_s=1, threads=1).schedule
    assert {op.kind.name for program in found.programs for op in program.ops()} == {"F", "BW"}
    v_shaped = solve(problem, stack="primus", method="zb-v", placements="all").schedule
    assert STACKS["primus"].complaint(v_shaped) is None


@pytest.mark.parametrize(
    ("problem", "options", "said"),
    [
        (rechunk(units(2, 4), 1, "bidirectional"), {"stack": "torch"}, "routes: one is .* in PyTorch's pipelining"),
        (
            rechunk(units(2, 4), 2, "v"),
            {"stack": "megatron"},
            r"stages\[2\].device = 1: Megatron has stage 2 on rank 0",
        ),
        (
            units(2, 4),
            {"stack": "megatron", "method": "lns"},
            "method = 'lns': megatron has its own schedules only: auto",
        ),
        (
            units(2, 4),
            {"stack": "megatron", "method": "zb-h1"},
            "method = 'zb-h1': megatron has its own schedules only",
        ),
        (
            units(2, 4, v=2).replace(overlap_factor=0.9),
            {"stack": "torch", "method": "dualpipe", "placements": "all"},
            "method = 'dualpipe': routes: one is",
        ),
        (
            units(4, 3, v=2),
            {"stack": "megatron", "method": "interleaved"},
            "with 2 chunks a rank Megatron needs at least",
        ),
        (units(2, 4), {"stack": "jax"}, "stack = 'jax'"),
    ],
)
def test_what_a_stack_cannot_run_is_refused_at_once(problem, options, said):
    with pytest.raises(InputError, match=said):
        solve(problem, **options)


@pytest.mark.parametrize("placements", ["keep", "all"])
def test_megatron_gets_an_answer_in_a_moment_or_a_reason(placements):
    """Its own orders are few: an hour would not be used."""
    asked = {"stack": "megatron", "placements": placements, "time_limit_s": 3600, "threads": 1}
    found = solve(units(4, 8), **asked)
    assert found.method == {"keep": "1f1b", "all": "interleaved"}[placements]
    assert export_schedule(found.schedule, "megatron")
    none = solve(with_budgets(units(4, 8), 3 * units(4, 8).stages[0].activation_bytes), **asked)
    assert (none.schedule, none.status) == (None, "unknown")
    assert "megatron runs 1f1b, interleaved, combined-1f1b only, none of which fits these stages" in none.reason


def test_a_solver_that_sends_another_stacks_schedule_is_not_believed():
    problem = STACKS["megatron"].restrict(units(2, 4))
    frame = Incumbent(method="zb-h1", schedule=Programs.from_schedule(generate("zb-h1", problem)))
    for stack, rejected in (("megatron", 1), ("torch", 0)):
        keeper = Keeper(problem, SolveOptions(stack=stack))
        keeper.take(frame)
        assert (keeper.result.rejected, keeper.result.schedule is None) == (rejected, bool(rejected))


def test_nor_is_a_cached_one_its_answer():
    proven = generate("zb-h1", units(2, 4))
    hit = SimpleNamespace(schedule=proven, status="optimal", lower_bound_ms=proven.makespan_ms, source="pack")
    cache = Mock(lookup=Mock(return_value=hit))
    asked = {"cache": cache, "time_limit_s": 5, "placements": "keep"}
    assert solve(units(2, 4), **asked).method == "zb-h1 (cached)"
    found = solve(units(2, 4), stack="megatron", **asked)
    assert (found.method, [note for note in found.notes if "pack" in note]) == ("1f1b", [])


def test_a_comparison_names_what_a_stack_cannot_run():
    comparison = compare(units(2, 4), ["1f1b", "zb-h1", "auto"], stack="megatron", time_limit_s=1, threads=1)
    rows = {(row.method, row.placements): row for row in comparison.rows}
    assert rows["1f1b", "all"].fits
    assert rows["zb-h1", "all"].schedule is None
    assert "B0 where Megatron's 1F1B has" in rows["zb-h1", "all"].reason
    assert {row.schedule.method for row in comparison.rows if row.schedule} <= {"1f1b", "interleaved"}
    assert comparison.best_own is not None
    assert as_torch_holds(units(2, 4)) == compare(units(2, 4), ["1f1b"], stack="torch").problem
