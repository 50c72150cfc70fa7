"""A training script around a pipeline compared with the same training in one process; and docs/training.md, whose
script runs."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.close import require_close
from support.pages import DOCS
from support.ranks import cases, replicas, scripts
from support.ranks import training as rank_training
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.training import Habits
from support.ranks.worker import Ranks
from torch.distributed.fsdp import MixedPrecisionPolicy

from optpipe.schedule import Schedule

PAGE = (DOCS / "training.md").read_text(encoding="utf-8")
EXAMPLES = ["examples/train_gpt_plain.py", "examples/train_gpt.py"]


def parsed(*programs: list[list[str]], placement: tuple[int, ...] = (0, 1)) -> list[Schedule]:
    m = sum(text.startswith("0F") for program in programs[0] for text in program)
    return [Schedule.parse(cases.problem(placement, m), program) for program in programs]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_gradients_are_the_mean_over_the_replicas(four_ranks: Ranks, how: str) -> None:
    """Those of a plain run over the whole batch, with the float32 sums in another order; and the replicas' schedules
    may differ."""
    schedules = [parsed(ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED), parsed(SPLIT, SPLIT, RECOMPUTED, OFFLOADED)]
    results = four_ranks(replicas.replicated, schedules=schedules, how=how)
    _, gradients, _ = rank_training.plain(2, 8, steps=4)
    for step in range(4):
        for ranks in ((0, 1), (2, 3)):
            require_close(results[ranks[0]][step].gradients | results[ranks[1]][step].gradients, gradients[step])


def test_replicas_without_a_wrapper_train_separately(four_ranks: Ranks) -> None:
    """Each to the bit as a plain run over its own half of the batch."""
    schedules = [parsed(SPLIT, OFFLOADED), parsed(OFFLOADED, SPLIT)]
    results = four_ranks(replicas.replicated, schedules=schedules, how="alone")
    for replica in range(2):
        losses, gradients, _ = rank_training.plain(2, 4, steps=2, replica=replica)
        first, last = results[2 * replica : 2 * replica + 2]
        for step in range(2):
            assert last[step].losses == losses[step]
            np.testing.assert_equal(first[step].gradients | last[step].gradients, gradients[step])


WRAPPERS = {
    "ddp": ("ddp", {"find_unused_parameters": True}),
    "bucket views": ("ddp", {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "fsdp": ("fsdp", {}),
    "replicate": ("replicate", {}),
    "float64 reduction": ("fsdp", {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_other_calls_do_not_disturb_a_wrapper(four_ranks: Ranks, wrapper: str) -> None:
    """Neither a profile, evaluations, accumulation, a tie, unused layers nor buffers; what it adds is no activation."""
    how, options = WRAPPERS[wrapper]
    (schedule,) = parsed(OFFLOADED)
    alone = four_ranks(replicas.odds, schedule=schedule, how="alone")
    results = four_ranks(replicas.odds, schedule=schedule, how=how, **options)
    gradients, norm, clipped = replicas.plain_odds(8)
    for rank, seen in enumerate(results):
        assert seen.sizes == alone[rank].sizes
        assert seen.norm == pytest.approx(norm, rel=1e-5)
    for first, last in ((results[0], results[1]), (results[2], results[3])):
        require_close(first.gradients | last.gradients, gradients)
        require_close(first.clipped | last.clipped, clipped)
    assert all(results[rank].losses == alone[rank].losses for rank in (0, 1))  # in training mode buffers change no loss
    assert (results[0].means == results[2].means) == (how == "ddp")  # which alone keeps buffers equal


def test_replicas_may_run_different_schedules(four_ranks: Ranks) -> None:
    """Nor swap or learn together: what they exchange, they exchange once a step, in one order."""
    (first,), (better,) = parsed(ONE_F_ONE_B), parsed(OFFLOADED)
    results = four_ranks(replicas.uneven, first=first, better=better)
    assert [versions[-1] for versions, *_ in results] == [2, 2, 1, 1]
    for rank, (_, found, made) in enumerate(results):
        layers = len({name.split(".")[1] for name in found[0]})
        assert made == [{"allgather": layers, "reduce_scatter": layers}] * len(made)
        for name, grad in found[-1].items():
            np.testing.assert_array_equal(grad, results[rank % 2][1][-1][name], err_msg=name)
    _, (expected,), _ = rank_training.plain(2, 8, steps=1)
    require_close(results[0][1][0] | results[1][1][0], expected)


def test_a_communication_hook_of_ddp_reduces_each_gradient_once_a_step(four_ranks: Ranks) -> None:
    (schedule,) = parsed(SPLIT)
    for seen, numbers in four_ranks(replicas.hooked, schedule=schedule, steps=3):
        assert sum(seen) == 3 * numbers


@pytest.mark.parametrize("wrapper", ["fsdp", "float64 reduction", "bucket views"])
def test_a_step_that_is_undone_leaves_nothing_in_a_wrapper(four_ranks: Ranks, wrapper: str) -> None:
    how, options = WRAPPERS[wrapper]
    (first,), (larger,) = parsed(ONE_F_ONE_B), parsed(SPLIT)
    options = {name: value for name, value in options.items() if name != "find_unused_parameters"}
    results = four_ranks(replicas.undone, first=first, larger=larger, how=how, **options)
    assert [versions for versions, _ in results] == [[1, 3], [1, 3], [1, 2], [1, 2]]
    modules = dict(enumerate(cases.make_stages(2)))
    for x, y in zip(*(part.chunk(8) for part in cases.batch(1, 8)), strict=True):
        torch.autograd.backward(cases.loss_fn(modules[1](modules[0](x)), y) / 8)
    for ranks in ((0, 1), (2, 3)):
        require_close(results[ranks[0]][1] | results[ranks[1]][1], replicas.gradients(modules))


def test_a_lost_replica_is_reported(ranks: Ranks) -> None:
    (told,) = ranks.survivors(replicas.bereft, dying=0, schedule=gpipe([0, 0], 2), how="fsdp")
    assert "another replica has failed, or the communication with it" in told


def test_wrappers_that_cannot_work_are_refused(four_ranks: Ranks) -> None:
    of_these = "spans ranks [0, 1, 2, 3], of which [{a}, {b}] are in the same pipeline: give it the "
    parts = [
        "stage {s}: its DistributedDataParallel " + of_these + "process_group",
        "stage {s}: its fully_shard " + of_these + "mesh",
        "stage {s} has a DistributedDataParallel inside: wrap the stage as a whole, and outside of torch.compile",
        "stage {s}: DistributedDataParallel with static_graph counts on one backward a step: leave it out",
        "stage {s}: unused.weight and 1 other parameters got no gradient in this step: make its "
        "DistributedDataParallel with find_unused",
    ]
    (schedule,) = parsed(SPLIT)
    for rank, told in enumerate(four_ranks(replicas.refused, schedule=schedule)):
        names = {"s": rank % 2, "a": rank // 2 * 2, "b": rank // 2 * 2 + 1}
        for message, part in zip(told, parts, strict=True):
            assert message.startswith(part.format(**names))


def test_optimizers_work_as_in_a_plain_run(ranks: Ranks) -> None:
    """Any whose update of a parameter depends on that parameter alone: the same bits."""
    habits = [
        *map(Habits, rank_training.OPTIMIZERS),
        Habits("adamw", accumulate=2),
        Habits("momentum", accumulate=2, to_none=False),
    ]
    (schedule,) = parsed(SPLIT)
    first, last = ranks(rank_training.habitual, schedule=schedule, all_habits=habits, steps=4)
    for habit, *found in zip(habits, first, last, strict=True):
        np.testing.assert_equal(found[0] | found[1], rank_training.plainly(habit, 4, 4), err_msg=str(habit))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_uses_the_norm_of_the_whole_model(ranks: Ranks, norm_type: float) -> None:
    schedules = parsed(SPLIT, OFFLOADED)
    results = ranks(rank_training.clipped, schedules=schedules, max_norm=0.3, norm_type=norm_type)
    _, gradients, norms = rank_training.plain(2, 4, steps=2, max_norm=0.3, norm_type=norm_type)
    for step in range(2):
        assert [seen[step].norm for seen in results] == pytest.approx([norms[step]] * 2, rel=1e-6)
        require_close(results[0][step].gradients | results[1][step].gradients, gradients[step])


def test_a_loss_scale_that_overflows_on_one_rank_skips_the_step_on_all(ranks: Ranks) -> None:
    (schedule,) = parsed(SPLIT)
    results = ranks(rank_training.scaled, schedule=schedule, overflow=1)
    assert [scales for scales, *_ in results] == [[2.0**16, 2.0**15, 2.0**15, 2.0**15]] * 2
    modules = dict(enumerate(cases.make_stages(2)))
    plain = cases.plain_training(modules.values(), cases.batches(4, 4), 4, max_norm=0.5, skipped=1)
    require_close(
        {str(step): found for step, found in enumerate(results[1][1])},
        {str(step): found.losses for step, found in enumerate(plain)},
    )
    require_close(results[0][2] | results[1][2], replicas.parameters(modules))


def test_autocast_may_change_between_steps(ranks: Ranks) -> None:
    states = [False, True, False]
    (schedule,) = parsed(SPLIT)
    (_, first), (losses, last) = ranks(rank_training.autocast, schedule=schedule, states=states)
    expected, gradients = rank_training.plain_autocast(4, states)
    assert losses == expected
    require_close(first | last, gradients, rtol=0, atol=0)


def gpipe(placement: list[int], m: int) -> Schedule:
    """All forwards, then all backwards: the same sums in the same order on any placement."""
    programs = []
    for rank in range(max(placement) + 1):
        own = [s for s, owner in enumerate(placement) if owner == rank]
        programs.append(
            [f"{s}F{j}" for s in own for j in range(m)] + [f"{s}BW{j}" for s in reversed(own) for j in range(m)]
        )
    return Schedule.parse(cases.problem(placement, m), programs)


def checkpointed(pool: Ranks, schedule: Schedule, steps: range, folder: object = "", **options: Any) -> list[Any]:
    options = {"resume": False, "save": False} | options
    return pool(rank_training.checkpointed, schedule=schedule, folder=str(folder), steps=steps, **options)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_checkpoint_is_resumed(ranks: Ranks, four_ranks: Ranks, tmp_path: Path, dropout: float) -> None:
    """Two ranks train, save and go on; these and, without random numbers, four ranks resume: the same bits in every
    loss and parameter afterwards."""
    two, four = gpipe([0, 1, 1, 0], 2), gpipe([0, 1, 2, 3], 2)
    checkpointed(ranks, two, range(2), tmp_path, save=True, dropout=dropout)
    whole = checkpointed(ranks, two, range(4), dropout=dropout)
    for pool, schedule, last in ((ranks, two, 0), (four_ranks, four, 3))[: 1 if dropout else 2]:
        again = checkpointed(pool, schedule, range(2, 4), tmp_path, resume=True, dropout=dropout)
        assert again[last][0] == whole[0][0][2:]
        found = {name: parameter for _, own in again for name, parameter in own.items()}
        np.testing.assert_equal(found, whole[0][1] | whole[1][1])


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_a_checkpoint_of_replicas_is_resumed_without_them(
    ranks: Ranks, four_ranks: Ranks, tmp_path: Path, how: str
) -> None:
    schedule = gpipe([0, 1], 2)
    saved = checkpointed(four_ranks, schedule, range(2), tmp_path, save=True, how=how)
    loaded = checkpointed(ranks, schedule, range(0), tmp_path, resume=True)
    for rank in range(2):
        np.testing.assert_equal(loaded[rank][1], saved[rank][1])


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def quickly(script: str) -> str:
    """The script, content with the first schedule that a search finds, and with times that are measured once."""
    quick, searches = re.subn(
        r"solve\(problem, time_limit_s=\d+\)", "solve(problem, time_limit_s=100, gap=1.0)", script
    )
    quick, profiles = re.subn(r"(\.profile\(.*), (activation_budget_bytes=)", r"\1, repeats=1, \2", quick)
    assert searches
    assert profiles
    return quick


def test_the_script_in_the_docs_runs(four_ranks: Ranks, tmp_path: Path) -> None:
    said = four_ranks(scripts.run, text=quickly("\n".join(blocks("python"))), folder=str(tmp_path))
    assert [len(re.findall(r"step \d: loss \d+\.\d+, gradient norm \d", text)) for text in said] == [0, 3, 0, 3]


def test_the_diff_in_the_docs_is_that_of_the_examples() -> None:
    before, after = ((DOCS.parent / name).read_text(encoding="utf-8").splitlines() for name in EXAMPLES)
    diff = list(difflib.unified_diff(before, after, *EXAMPLES, n=1, lineterm=""))
    assert blocks("diff") == ["\n".join(diff) + "\n"]
    added = [
        line[2:]
        for line in difflib.ndiff(*(lines[lines.index("import argparse") :] for lines in (before, after)))
        if line[:2] == "+ "
    ]
    assert len(list(filter(None, added))) == 10


def require_same_losses(*said: str) -> None:
    plain, ours = ([float(loss) for loss in re.findall(r"step \d: loss (\S+)", text)] for text in said)
    assert len(plain) == 3
    assert plain == pytest.approx(
        ours, abs=1.5e-4
    )  # the last of four digits may be rounded up in one and down in the other


def test_both_examples_print_the_same_losses(ranks: Ranks, tmp_path: Path) -> None:
    plain, ours = ((DOCS.parent / name).read_text(encoding="utf-8") for name in EXAMPLES)
    texts, arguments = (plain, quickly(ours)), ["--steps", "3"]
    said = [ranks(scripts.run, text=text, folder=str(tmp_path), arguments=arguments) for text in texts]
    require_same_losses(*map("".join, said))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_both_examples_print_the_same_losses_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["env"] = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    runs = [subprocess.Popen([*torchrun, str(DOCS.parent / name), "--steps", "3"], **pipes) for name in EXAMPLES]
    said = [run.communicate(timeout=560) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    require_same_losses(*(out for out, _ in said))
