"""Arguments of Megatron: the schedules that they say, layouts, and what is refused. `make stacks` compares orders and
layouts with the package's."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import problems
from support.examples import examples
from support.imports import imported
from support.layouts import RECIPES
from support.problems import parsed
from support.problems.units import units

from optpipe import (
    InputError,
    Schedule,
    export_schedule,
)
from optpipe.formats import megatron
from optpipe.formats.stacks import STACKS
from optpipe.model.placement import Placement
from optpipe.model.program import Program
from optpipe_solver.systems import generate

EMBEDDING, LAYER, HEAD = (problems.stage((n, n, n)) for n in (1, 4, 8))
OURS = "; optpipe_runtime.megatron.forward_backward_func runs the schedule as it is"


@pytest.mark.parametrize(("p", "m", "group"), [(2, 8, 2), (2, 8, 4), (2, 7, 5), (3, 9, 9), (2, 5, 3)])
def test_the_group_is_found_by_the_order(p: int, m: int, group: int) -> None:
    programs = tuple(map(Program.from_items, megatron.order(p, 3, megatron.in_groups(m, group))))
    found = export_schedule(Schedule(units(p, m, v=3), programs), "megatron").splitlines()
    assert found[1] == "--num-virtual-stages-per-pipeline-rank 3"
    (text,) = re.findall(r"^--microbatch-group-size-per-virtual-pipeline-stage (\d+)$", found[2])
    assert megatron.order(p, 3, megatron.in_groups(m, int(text))) == megatron.order(p, 3, megatron.in_groups(m, group))


@pytest.mark.parametrize(("p", "m", "has"), [(4, 8, True), (2, 3, True), (4, 11, True), (3, 10, False), (4, 3, False)])
def test_it_has_the_order_or_not(p: int, m: int, has: bool) -> None:
    """Groups of p, of 3, of 6 and 5; not of 4, 3 and 3, nor fewer than ranks."""
    schedule = generate("interleaved", units(p, m, v=2))
    assert (STACKS["megatron"].complaint(schedule) is None) == has
    assert export_schedule(generate("1f1b", units(p, m)), "megatron") == f"--pipeline-model-parallel-size {p}\n"
    if not has:
        refusal(schedule)


@pytest.mark.parametrize(("factor", "delayed"), [(0.6, True), (0.75, False)])
def test_combined_1f1b_is_flags_of_megatron(factor: float, delayed: bool) -> None:
    """F = B = W = 1: a pair of less than B + W has all-to-all of the backward beside its own W."""
    schedule = generate("combined-1f1b", units(4, 8, v=2).replace(overlap_factor=factor))
    assert STACKS["megatron"].complaint(schedule) is None
    flags = ["--overlap-moe-expert-parallel-comm", *["--delay-wgrad-compute"] * delayed]
    assert export_schedule(schedule, "megatron").splitlines()[3:] == flags
    assert not any("overlap" in line for line in export_schedule(generate("interleaved", units(4, 8, v=2)), "megatron"))
    plain = generate("combined-1f1b", units(4, 8).replace(overlap_factor=factor))
    with pytest.raises(InputError, match=r"^chunks = 1: Megatron's combined 1F1B needs two or more a rank"):
        export_schedule(plain, "megatron")
    other = parsed(TWO_CHUNKS, "0F0 0F1 2F0 2F1 0F2+2BW0 0F3+2BW1 2F2+0BW0 2F3+0BW1 2BW2 2BW3 0BW2 0BW3", *WAITING)
    with pytest.raises(InputError, match=r"^device \d has \S+ where Megatron's combined 1F1B in groups of 2 has"):
        export_schedule(other, "megatron")


TWO_CHUNKS = units(2, 4, v=2).replace(overlap_factor=0.8)
WAITING = ("1F0 1F1 3F0 3BW0 3F1 3BW1 1F2 1BW0 1F3 1BW1 3F2 3BW2 3F3 3BW3 1BW2 1BW3",)


@pytest.mark.parametrize(
    ("chunks", "cuts", "layout"),
    [(1, (4, 2), "Ettt|tL"), (2, (3, 1, 1, 1), "Ett|t|t|L"), (2, (1, 2, 2, 1), "E|tt|tt|L")],
)
def test_the_layout_names_the_layers_of_each_stage(chunks: int, cuts: tuple[int, ...], layout: str) -> None:
    row = problems.pipeline(2, 4, 10**9, problems.stage(), layers=[EMBEDDING, *[LAYER] * 4, HEAD])
    problem = Placement(chunks=chunks, layers=cuts).apply(row)
    found = export_schedule(generate("interleaved" if chunks > 1 else "1f1b", problem), "megatron").splitlines()
    assert found[1] == f"--pipeline-model-parallel-layout '{layout}'", "a shell takes | for a pipe"
    assert not any("num-virtual-stages" in line for line in found)


def test_an_export_says_which_layer_stands_for_prediction_modules() -> None:
    row = problems.pipeline(2, 4, 10**9, problems.stage(), layers=[EMBEDDING, *[LAYER] * 4, HEAD])
    schedule = generate("1f1b", Placement(chunks=1, layers=(4, 2)).apply(row))
    for mtp, expected in ((1, "Ettt|mL"), (2, "Ettt|mmL")):
        lines = export_schedule(schedule, "megatron", mtp=mtp).splitlines()
        assert lines[1:] == [f"--pipeline-model-parallel-layout '{expected}'", f"--mtp-num-layers {mtp}"]
    for to, problem, count in (("json", row, 1), ("megatron", row.replace(layers=None), 1), ("megatron", row, -1)):
        with pytest.raises(
            InputError, match=f"^mtp = {count}: expected a count, for megatron and a problem with layers$"
        ):
            export_schedule(generate("1f1b", problem), to, mtp=count)


def test_layers_add_up_to_their_stage_in_all_bytes() -> None:
    row = problems.pipeline(2, 4, 10**9, problems.stage(), layers=[EMBEDDING, *[LAYER] * 4, HEAD])
    placed = Placement(chunks=1, layers=(4, 2)).apply(row)
    first, last = placed.stages
    fewer = first.model_copy(update={"saved_for_weight_bytes": first.activation_bytes + 1})
    with pytest.raises(InputError, match=r"stages\[0\] does not consist of layers 0 and on"):
        megatron.layer_counts(placed.replace(stages=[fewer, last]))
    assert megatron.layer_counts(placed.replace(stages=[fewer, last], stack="torch")) == [4, 2]


@pytest.mark.parametrize("text", RECIPES)
def test_the_layouts_of_recipes_are_read_as_megatron_reads_them(text: str) -> None:
    stages = megatron.read_layout(text)
    assert [stage.count("t") for stage in stages] == RECIPES[text]
    assert "".join(stages).count("m") == text.count("m")
    if text[0] == "E":
        assert megatron.read_stages({"layout": text}, len(stages))[0] == RECIPES[text]


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        (
            "E((t|)*2t)*2L",
            1,
            r"has '\('; E, t, m, L, \|, x\*n and \(...\)\*n were expected, no parentheses alone or in others",
        ),
        ("Et*|L", 2, r"has '\*'"),
        ("Ed|L", 2, "has 'd'"),
        ("Et*99999L", 1, "repetitions of at most 4 digits were expected"),
        ("Et|tL", 3, "2 stages: expected as many on each of pp = 3 ranks"),
        ("|EtL", 2, "one E in the first stage"),
        ("Et|tL|", 3, "one L in the last stage"),
        ("Em|tL", 2, "then all t, then all m"),
        ("Et|tm|mL", 3, r"all m in one stage, the last of its rank, were expected; stages \[1, 2\] have some"),
        ("Et|tm|L|", 2, "one L in the last stage"),
        ("Ettm|||L", 2, r"the last of its rank, were expected; stages \[0\] have some"),
    ],
)
def test_a_fault_in_a_layout_is_one_sentence(text: str, ranks: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        megatron.read_stages({"layout": text}, ranks)


@settings(deadline=None, max_examples=examples(40))
@given(data=st.data(), ranks=st.integers(1, 4), chunks=st.integers(1, 3), m=st.integers(1, 9))
def test_arguments_are_read_back_as_the_schedule(data: st.DataObject, ranks: int, chunks: int, m: int) -> None:
    """Also with empty stages; the problem had other ones."""
    counts = data.draw(st.lists(st.integers(0, 3), min_size=ranks * chunks, max_size=ranks * chunks))
    counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
    count = max(sum(counts), ranks)
    counts[0] += count - sum(counts)
    layers = [EMBEDDING, *[LAYER] * (count - 2), HEAD][:count] if count > 1 else [HEAD]
    row = problems.pipeline(ranks, m, 10**9, problems.stage(), layers=layers)
    placed = Placement(chunks=chunks, layers=tuple(counts)).apply(row)
    sizes = [n for n in range(ranks, m + 1) if m % n == 0 or m % n >= ranks] if chunks > 1 else [ranks]
    if not sizes or count < 2:
        return
    group = data.draw(st.sampled_from(sizes))
    programs = tuple(map(Program.from_items, megatron.order(ranks, chunks, megatron.in_groups(m, group))))
    text = export_schedule(Schedule(placed, programs), "megatron")
    read = imported(f"torchrun train.py {text}".replace("\n", " \\\n"), row, "run.sh")
    assert (read.programs, read.problem.stages) == (programs, placed.stages)
    assert export_schedule(read, "megatron") == text


def test_the_only_stage_has_embedding_and_head() -> None:
    row = problems.pipeline(1, 2, 10**9, problems.stage(), layers=[EMBEDDING, LAYER, LAYER, HEAD])
    text = "--pipeline-model-parallel-size 1 --pipeline-model-parallel-layout EttL"
    assert imported(text, row, "run.sh").problem.stages[0].forward_ms == 1 + 2 * 4 + 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--pipeline-model-parallel-size 3", "pipeline-model-parallel-size = 3: the problem has 2 devices"),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
            "first-pipeline-num-layers: is not read",
        ),
        (
            "pipeline_model_parallel_size=2 pipeline_model_parallel_layout='Et|L'",
            "add up to 3: the problem has 4 layers",
        ),
        ("pipeline_model_parallel_size=2 hybrid_layer_pattern='M|M'", None),
        ("pipeline_model_parallel_size=2 hybrid_layer_pattern='M|-M'", "add up to 5: the problem has 4 layers"),
        (
            "pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_model_parallel_layout="
            "'E|t|t|L', microbatch_group_size_per_vp_stage=3",
            "groups of 3: Megatron takes at least 2 of 2 micro-batches",
        ),
    ],
)
def test_arguments_that_are_not_of_the_problem_are_refused(text: str, said: str | None) -> None:
    if said is None:
        assert imported(text, LAYERED, "run.txt").programs == tuple(
            map(Program.from_items, megatron.order(2, 1, megatron.in_groups(2, 1)))
        )
        return
    with pytest.raises(InputError, match=said):
        imported(text, LAYERED, "run.txt")


def test_parts_of_a_head_are_no_layers() -> None:
    again = LAYER | {"recompute_ms": 1.0, "checkpoint_bytes": 0}
    row = problems.pipeline(2, 4, 10**9, problems.stage(), layers=[EMBEDDING, *[again] * 2, HEAD, HEAD])
    with pytest.raises(InputError, match=r"layers\[3\] cannot be computed again, others can"):
        export_schedule(generate("1f1b", Placement(chunks=1, layers=(2, 3)).apply(row)), "megatron")


def refusal(schedule: Schedule) -> str:
    with pytest.raises(InputError) as refused:
        export_schedule(schedule, "megatron")
    return str(refused.value)


LEAVING = problems.pipeline(1, 1, 100, problems.stage(offload=(1, 1, 9)))
LAYERED = problems.pipeline(2, 2, 100, problems.stage((9, 9, 9)), layers=[EMBEDDING, LAYER, LAYER, HEAD])


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (generate("zb-h1", units(4, 8)), "device 3 has 3B0 where Megatron's 1F1B has 3BW0" + OURS),
        (generate("gpipe", units(2, 4)), "device 1 has 1F1 where Megatron's 1F1B has 1BW0" + OURS),
        (
            parsed(LEAVING, "0F0 0O0 0D0 0R0 0BW0"),
            "device 0 has 0O0 where Megatron's 1F1B has 0BW0; --without-offload (in Python without_offload=True) "
            "leaves offloads out" + OURS,
        ),
        (generate("zb-v", units(2, 4, v=2, shape="v")), "stages[2].device = 1: Megatron has stage 2 on rank 0" + OURS),
        (
            generate("interleaved", units(4, 3, v=2)),
            "microbatches = 3: with 2 chunks a rank Megatron needs at least 4" + OURS,
        ),
        (generate("1f1b", LAYERED), "stages[0] does not consist of layers 0 and on of the problem: leave layers out"),
    ],
)
def test_another_order_or_placement_is_refused_and_what_differs_is_named(schedule: Schedule, said: str) -> None:
    assert refusal(schedule) == said
