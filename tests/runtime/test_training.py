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
from support.close import require_close
from support.pages import DOCS
from support.ranks import cases, replicas, scripts
from support.ranks import training as rank_training
from support.ranks.programs import OFFLOADED, SPLIT
from support.ranks.worker import Ranks

from examples import reference, text
from examples.gpt import Size
from optpipe.schedule import Schedule

PAGE = (DOCS / "training.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"(?<!-->\n\n)^```python\n(.*?)^```$", PAGE, re.M | re.S)
EXAMPLES = ["examples/train_gpt_plain.py", "examples/train_gpt.py", "examples/train_packed.py"]
TEXTS = [(DOCS.parent / name).read_text(encoding="utf-8") for name in EXAMPLES]


def test_optimizers_work_as_in_a_plain_run(ranks: Ranks) -> None:
    """Those whose update of a parameter depends on that parameter alone, also every second step: the same bits."""
    (schedule,) = cases.parsed(SPLIT)
    first, last = ranks(rank_training.optimized, schedule=schedule, steps=4)
    for habits, plain in enumerate(rank_training.optimized_plainly(schedule.problem.microbatches, 4)):
        np.testing.assert_equal(first[habits] | last[habits], plain)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_uses_the_norm_of_the_whole_model(ranks: Ranks, norm_type: float) -> None:
    schedules = cases.parsed(SPLIT, OFFLOADED)
    results = ranks(rank_training.clipped, schedules=schedules, max_norm=0.3, norm_type=norm_type)
    plain = cases.plain_training(cases.make_stages(2), cases.batches(2, 4), 4, max_norm=0.3, norm_type=norm_type)
    for step, expected in enumerate(plain):
        assert [seen[step].norm for seen in results] == pytest.approx([expected.norm] * 2, rel=1e-6)
        require_close(results[0][step].gradients | results[1][step].gradients, expected.clipped)


def test_a_loss_scale_that_overflows_on_one_rank_skips_the_step_on_all(ranks: Ranks) -> None:
    (schedule,) = cases.parsed(SPLIT)
    results = ranks(rank_training.scaled, schedule=schedule, overflow=1)
    assert [scales for scales, *_ in results] == [[2.0**16, 2.0**15, 2.0**15, 2.0**15]] * 2
    modules = dict(enumerate(cases.make_stages(2)))
    plain = cases.plain_training(modules.values(), cases.batches(4, 4), 4, max_norm=0.5, skipped=1)
    require_close(
        {str(step): found for step, found in enumerate(results[1][1])},
        {str(step): found.losses for step, found in enumerate(plain)},
    )
    require_close(results[0][2] | results[1][2], replicas.parameters(modules))


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
    said = four_ranks(scripts.run, text=quickly("\n".join(PYTHON)), folder=str(tmp_path))
    assert [len(re.findall(r"step \d: loss \d+\.\d+, gradient norm \d", text)) for text in said] == [0, 3, 0, 3]


def test_ten_lines_of_a_script_are_added() -> None:
    before, after = map(str.splitlines, TEXTS[:2])
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
    texts, arguments = (TEXTS[0], quickly(TEXTS[1])), ["--steps", "3"]
    said = [ranks(scripts.run, text=each, folder=str(tmp_path), arguments=arguments) for each in texts]
    require_same_losses(*map("".join, said))


def test_packed_documents_have_the_losses_of_a_plain_run(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(scripts.run, text=TEXTS[2], folder=str(tmp_path), arguments=["--steps", "3"])
    size = Size(width=128, blocks=4, context=256)
    documents = text.documents(text.corpus(), size.context)
    plain = reference.trained(size, 2, [text.packed(documents, step, 8, 4) for step in range(3)])
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", "".join(said))]
    assert losses == pytest.approx(list(plain), abs=1e-4)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_both_examples_print_the_same_losses_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["env"] = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    runs = [subprocess.Popen([*torchrun, str(DOCS.parent / name), "--steps", "3"], **pipes) for name in EXAMPLES[:2]]
    said = [run.communicate(timeout=560) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    require_same_losses(*(out for out, _ in said))
