"""Models of transformers, as they come, and the example that trains one. `make stacks` runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import table
from support.ranks import huggingface
from support.ranks.worker import Ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.stacks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize(
    ("name", "backend"), [("Llama", None), ("Qwen3", None), ("Mixtral", None), ("Llama", "aot_eager")]
)
def test_losses_are_those_of_the_model_itself(ranks: Ranks, name: str, backend: str | None) -> None:
    """With a mask and positions, to the bit, in stages of which one is the head alone; and the gradients. If layers are
    compiled one by one, only gradients of their norms come at B."""
    torch.set_num_threads(1)
    placement = [0, 1, 0]
    losses, whole = huggingface.plain(name, backend)
    (found, gradients, at_b), (_, others, also) = ranks(
        huggingface.trained, name=name, placement=placement, backend=backend
    )
    assert found == losses
    assert len([*at_b, *also]) == (8 if backend else 0)
    assert all("layernorm" in parameter for parameter in [*at_b, *also])
    table.note(f"{name}{' compiled' if backend else ''}", ranks.world, "stages_of", 0.0)
    gradients = {key.split(".model.", 1)[1]: value for key, value in (gradients | others).items()}
    for key, parameter in whole.named_parameters():
        np.testing.assert_allclose(gradients[key], parameter.grad, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.stacks
def test_the_example_learns() -> None:
    command = ["torch.distributed.run", "--nproc-per-node", "2", "examples/train_hf.py", "--steps", "12"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", ran.stdout, re.MULTILINE)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
