"""What `optpipe profile --model` makes of a model that is named: its stages in a row, and its problem."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from optpipe import Problem
from optpipe_runtime.profiles import Setup


def in_a_row(setups: list[Setup], **named: Tensor) -> Tensor:
    """What the stages make of the first setup's batch."""
    value = setups[0].inputs
    for rank, setup in enumerate(setups):
        assert torch.equal(setup.inputs, setup.targets)
        assert list(setup.placement) == list(range(len(setups)))
        value = setup.stages[rank](value, **named)
    return value


def profiled(model: str, folder: Path, *words: str) -> Problem:
    path = folder / "problem.json"
    command = [sys.executable, "-m", "optpipe_cli", "profile", "--ranks", "2", "--model", model, "-o", str(path)]
    command += ["--microbatches", "4", "--activation-budget-bytes", "50000000", "--repeats", "1", *words]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    problem = Problem.load(path)
    assert problem.name in done.stdout
    assert [stage.device for stage in problem.stages] == [0, 1]
    assert problem.microbatches == 4
    for stage in problem.stages:
        assert min(stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms) > 0
        assert 0 < (stage.saved_for_weight_bytes or 0) < stage.activation_bytes
    return problem
