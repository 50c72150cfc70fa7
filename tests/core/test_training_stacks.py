"""`STACKS`: a stack runs what its form can say; whole backwards; and lists of modules, written and checked."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import parsed, pipeline, stage

from optpipe import InputError, check, export_schedule
from optpipe.formats.modules import AUTOMODEL, TORCHTITAN, complaints, parts_of, read_parts
from optpipe.formats.stacks import STACKS, with_whole_backwards
from optpipe.formats.torch_memory import whole_backwards
from optpipe.model.ops import Kind
from optpipe.model.placement import rechunk
from optpipe_solver.systems import SYSTEMS, generate

RICH = stage((3, 4, 2), (10, 4), offload=(1, 1, 9), recompute=(1, 2), update=(1, 1, 1), offload_parts=3)


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_runs_what_it_makes_itself_and_all_that_its_problem_allows(name):
    """What `restrict` leaves has no op that the form refuses."""
    stack = STACKS[name]
    for method in stack.own:
        system = SYSTEMS[method]
        assert stack.places(system.chunks, system.shape)
        factor = 0.8 if method == "combined-1f1b" else None
        problem = pipeline(2, 4, 1000, RICH, overlap_factor=factor)
        problem = stack.restrict(rechunk(problem, system.chunks, system.shape))
        if method != "dualpipe-v":  # torch has no pairs in its rows
            assert stack.complaint(generate(method, problem)) is None
        costs = problem.stages[0]
        has = {Kind.O: costs.can_offload, Kind.C: costs.can_recompute, Kind.G: costs.can_update}
        assert {kind for kind, can in has.items() if can} == stack.kinds & has.keys()
    offloading = parsed(pipeline(1, 1, 100, stage(offload=(1, 1, 9))), "0F0 0O0 0D0 0R0 0BW0")
    assert (stack.complaint(offloading) is None) == (Kind.O in stack.kinds)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_schedule_with_whole_backwards_takes_as_long_as_it_was_searched_for(data):
    times = st.tuples(*[st.integers(1, 9)] * 3)
    stages = [stage(data.draw(times), (10, data.draw(st.integers(0, 16)))) for _ in range(3)]
    problem = pipeline(3, 5, 1000, stages, p2p_ms=float(data.draw(st.integers(0, 3))))
    method = data.draw(st.sampled_from(["1f1b", "zb-h1", "zb-h2", "gpipe"]))
    searched = generate(method, with_whole_backwards(problem))
    schedule = whole_backwards(searched).on(problem)
    assert check(problem, schedule) == []
    assert schedule.makespan_ms == pytest.approx(searched.makespan_ms)
    held = [[peak.bytes for peak in each.compiled.certificate.device] for each in (schedule, searched)]
    assert held[0] == held[1]
    assert "I" not in export_schedule(schedule, "torch-csv")


COUNTS = st.lists(st.integers(0, 4), min_size=2, max_size=6).filter(lambda counts: sum(counts) > 1)


@settings(max_examples=examples(40))
@given(COUNTS, st.sampled_from([TORCHTITAN, AUTOMODEL]), st.data())
def test_a_module_that_is_forgotten_misspelled_or_elsewhere_is_found(counts, names, data):
    known = TORCHTITAN, AUTOMODEL
    parts = parts_of(names, counts)
    assert complaints(parts, counts, known) == []
    as_flag = f"--x.module_fqns_per_model_part {' '.join(map(','.join, parts))}\nactivation-checkpoint:none"
    as_yaml = "module_fqns_per_model_part:\n" + "".join(f"- [{', '.join(part)}]\n" for part in parts)
    quoted = as_flag.replace(names.last[0], f"'{names.last[0]}'").replace("\n", " \\\n --steps 5")
    as_json = json.dumps({"module_fqns_per_model_part": parts, "other": [["a"]]}, separators=(",", ":"))
    if all(parts):
        for text in (as_flag, quoted, as_yaml, f"{as_yaml}other: [a, b]\n", as_json):
            assert read_parts(text, "f") == parts
    of = data.draw(st.sampled_from([s for s, count in enumerate(counts) if count]))
    name = next(name for name in parts[of] if name.startswith(names.layer))
    without = [[each for each in part if each != name] for part in parts]
    assert complaints(without, counts, known) == [f"{name} is in no part: it would be left out of the model"]
    wrong = [[f"{each}x" if each == name else each for each in part] for part in parts]
    assert complaints(wrong, counts, known)[0].startswith(f"part {of}: {name}x is no module of the model")
    to = data.draw(st.sampled_from([s for s in range(len(counts)) if s != of]))
    without[to].append(name)
    assert complaints(without, counts, known) == [f"part {to}: {name} belongs to stage {of}"]
    parts[to].append(name)
    assert f"{name} is in 2 parts" in complaints(parts, counts, known)
    assert complaints(parts[1:], counts, known)[0] == f"{len(counts) - 1} parts: the schedule has {len(counts)} stages"


def test_a_file_without_lists_is_refused():
    for text in ("", "a: [b]", "module_fqns_per_model_part:"):
        with pytest.raises(InputError, match=r"^f: no module_fqns_per_model_part: torchtitan"):
            read_parts(text, "f")
