"""Exported schedules in the training stacks of others: ten steps have the losses of those stacks' own 1F1B.

`make stacks` runs it, each test in an environment with the package that it names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import table
from support.problems.published import published
from support.ranks import stacks
from support.ranks.stacks import Config
from support.ranks.worker import Ranks

from optpipe import export_schedule

# Which of torch's schedules places the stages as ours does.
PLACED_BY = {"zb-h1": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}


@pytest.mark.stacks
@pytest.mark.parametrize("train", [stacks.torchtitan, stacks.automodel], ids=["torchtitan", "automodel"])
def test_ten_steps_by_their_own_builders(train: Callable[..., Any], ranks: Ranks, tmp_path: Path) -> None:
    configs = [Config("1F1B", None)]
    for case in published(ranks.world, (stacks.MICROBATCHES,)):
        if case.name in PLACED_BY:
            path = tmp_path / f"{case.name}.csv"
            path.write_text(export_schedule(case.schedule, "torch-csv"))
            configs.append(Config(PLACED_BY[case.name], str(path)))
    assert len(configs) == 1 + len(PLACED_BY)

    by_config = [
        max(losses) for losses in zip(*ranks(train, timeout=3000, configs=configs), strict=True)
    ]  # one rank has them
    theirs, ours = by_config[0], by_config[1:]
    assert [len(losses) for losses in theirs] == [stacks.MICROBATCHES] * stacks.STEPS
    assert sum(theirs[-1]) < sum(theirs[0]), "it has learned"
    for config, losses in zip(configs[1:], ours, strict=True):
        name = Path(config.csv or "").stem
        difference = max(
            abs(a - b) for one, other in zip(losses, theirs, strict=True) for a, b in zip(one, other, strict=True)
        )
        table.note(name, ranks.world, "torch-csv", difference)
        assert difference < 1e-5, name
