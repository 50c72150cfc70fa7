"""Megatron's own offload: its schedule on layers, what a plan chooses of it, and its arguments. `make stacks` compares
the policy with the package's manager."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.planning import RESERVED, SMALL, planned, question
from support.problems.units import units

from optpipe import InputError, certify, check, export_schedule
from optpipe.formats.megatron import offload_arguments
from optpipe.model.problem import Problem
from optpipe.transformer.estimate import estimate
from optpipe.transformer.offload import MODULES, Group, module_groups
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run
from optpipe_cli.plan_report import stack_settings
from optpipe_solver.planner import settings as written
from optpipe_solver.systems import generate
from optpipe_solver.systems.megatron_offload import offloading

MODEL = SMALL.model_copy(update={"layers": 12, "heads": 16, "sequence": 4096})


def in_layers(p: int, m: int, layers: int) -> Problem:
    """1F1B's stages, each of so many layers of 100 bytes."""
    plain = units(p, m)
    costs = {"activation_bytes": 100, "saved_for_weight_bytes": 100}
    stages = [stage.model_copy(update=costs) for stage in plain.stages for _ in range(layers)]
    return plain.replace(stages=stages, transfer_mode="full_duplex")


@settings(deadline=None, max_examples=examples(30))
@given(p=st.integers(1, 4), layers=st.integers(3, 6), share=st.integers(1, 4), more=st.integers(0, 4))
def test_all_but_some_layers_are_away_and_nothing_waits(p: int, layers: int, share: int, more: int) -> None:
    """Two modules save `share` tens of bytes each, copied in less than a layer's forward. On the device are what stays
    of all, and of what leaves at most what four layers save: two on the way, and those of the backward and the next."""
    problem, size = in_layers(p, p + more, layers), 10 * share
    groups = [[Group("core_attn", size, size), Group("attn_proj", size, size)]] * len(problem.stages)
    schedule = offloading(problem, groups, 0.4 / size)
    assert check(schedule.problem, schedule) == []
    assert schedule.makespan_ms == pytest.approx(generate("1f1b", units(p, p + more)).makespan_ms * layers, abs=4)
    for r, peak in enumerate(certify(schedule.problem, schedule).device):
        stays = (p - r) * layers * (100 - 2 * size)
        assert stays < peak.bytes <= stays + 4 * 2 * size
    kept = offloading(problem, groups, 0.4 / size, fraction=0.5)
    copied = [[sum(stage.offload_bytes) for stage in each.problem.stages] for each in (schedule, kept)]
    assert sum(copied[1]) < sum(copied[0])
    first = [s % layers == 0 for s in range(p * layers)]
    assert all(a == b for a, b, of_first in zip(*copied, first, strict=True) if of_first), "the latest groups stay"


@pytest.mark.parametrize(
    ("layers", "modules", "delta", "stops"),
    [(1, 1, 0, False), (1, 2, 0, True), (2, 2, 0, False), (2, 2, 5, True), (2, 1, 5, True)],
)
def test_what_stops_megatron_is_refused(layers: int, modules: int, delta: int, stops: bool) -> None:
    problem = in_layers(2, 4, layers)
    groups = [[Group(f"module {n}", 10, 10) for n in range(modules)]] * len(problem.stages)
    if stops:
        with pytest.raises(InputError, match=r"megatron-core 0\.19\.2 stops with a chunk mismatch"):
            offloading(problem, groups, 0.01, delta=delta)
    else:
        schedule = offloading(problem, groups, 0.01, delta=delta)
        assert check(schedule.problem, schedule) == []


def test_modules_save_what_their_tensors_are() -> None:
    """A layer of DeepSeek-V3, which has its norms apart; 4096 tokens, 16 bits, one GPU."""
    run = Run(microbatches=1, sequence=4096)
    shape = MODELS["deepseek-v3"]
    pieces = estimate(shape, Parallelism(), GPUS["H100"], run).pieces
    found = {group.module: group for group in module_groups(pieces[10], MODULES, run)}
    whole = 2 * 4096
    expected = {
        "attn_norm": 7168,
        "qkv_linear": 7168 + 2 * (1536 + 512),
        "core_attn": 128 * (192 + 192 + 128),
        "attn_proj": 128 * 128,
        "mlp_norm": 7168,
        "expert_fc1": 8 * 7168,
        "moe_act": 8 * 2 * 2048,
    }
    assert {module: group.freed / whole for module, group in found.items()} == pytest.approx(expected)
    assert found["core_attn"].copied / whole == pytest.approx(128 * (192 + 192 + 128 + 128))  # its output, too
    dense = [group.module for group in module_groups(pieces[1], MODULES, run)]
    assert dense == ["attn_norm", "qkv_linear", "core_attn", "attn_proj"]
    (fused, *_) = module_groups(estimate(MODEL, Parallelism(), GPUS["H100"], run).pieces[1], MODULES, run)
    assert fused == Group("qkv_linear", 2 * whole * 2048, 2 * whole * 2048)
    small = run.model_copy(update={"sequence": 64})
    assert not any(
        group.copied
        for group in module_groups(estimate(MODEL, Parallelism(), GPUS["H100"], small).pieces[1], MODULES, small)
    )


def test_a_plan_offloads_where_that_is_shorter_and_exports_the_arguments() -> None:
    """Between the memory that 1F1B needs and that which recomputation needs."""
    asked = question(RESERVED + 6_200_000_000, model=MODEL, stack="megatron")
    plans = [planned(each) for each in (asked, asked.model_copy(update={"offload": False}))]
    with_it, without = (plan.best for plan in plans)
    assert [plan.optpipe_ms is not None for plan in plans] == [True, False]
    assert plans[0].optpipe_ms >= with_it.work_ms
    assert with_it.iteration_ms < 0.97 * without.iteration_ms
    schedule = with_it.schedule
    assert schedule is not None
    assert check(schedule.problem, schedule) == []
    arguments = offload_arguments(schedule)
    lines = export_schedule(schedule, "megatron").splitlines()
    assert lines[0] == f"--pipeline-model-parallel-size {with_it.estimate.parallelism.pp}"
    assert lines[-len(arguments) :] == arguments
    assert {*lines} < {*written.megatron(with_it)}
    bridge = written.bridge(with_it)
    names = arguments[1].removeprefix("--offload-modules ").replace(" ", ",")
    assert {"model.fine_grained_activation_offloading=true"} < {*bridge}
    assert any(line.replace("'", "") == f"model.offload_modules=[{names}]" for line in bridge)
    assert "model.fine_grained_activation_offloading=false" in written.bridge(without)
    first = [{lines[0] for lines in stack_settings(plan).values()} for plan in plans]
    assert [any("NVTE_CPU_OFFLOAD_V1=1" in line for line in lines) for lines in first] == [True, False]


def test_a_method_that_is_no_setting_has_no_arguments() -> None:
    schedule, flags = generate("1f1b", units(2, 4)), "--fine-grained-activation-offloading --offload-modules core_attn"
    for method in ("1f1b", "1f1b --offload-modules core_attn", f"1f1b {flags}; rm"):
        assert offload_arguments(replace(schedule, method=method)) == []
    named = replace(schedule, method=f"1f1b {flags}")
    with pytest.raises(InputError, match=r"^layers: 0 are there for 2 stages, one for each was expected$"):
        export_schedule(named, "megatron")
