"""The ten lines of `optpipe_runtime.pipeline`'s docstring, as a script under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from optpipe import Schedule
from optpipe_runtime import Pipeline

dist.init_process_group("gloo")
rank, placement = dist.get_rank(), [0, 1]
torch.manual_seed(0)
model = [nn.Sequential(nn.Linear(64, 256), nn.GELU()), nn.Linear(256, 10)]
stages = {s: model[s] for s, owner in enumerate(placement) if owner == rank}
optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.1)
inputs, targets = torch.randn(64, 64), torch.randint(10, (64,))
with Pipeline(stages, placement, F.cross_entropy, microbatches=2) as pipe:
    problem = pipe.profile(inputs, targets, memory_bytes=10**9)
    pipe.load(Schedule.parse(problem, [["0F0", "0O0", "0D0", "0F1", "0R0", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1B1", "1W1"]]))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(pipe.step(inputs, targets).loss)
        optimizer.step()
if rank == 1:
    print(json.dumps(losses))
dist.destroy_process_group()
"""


@pytest.mark.timeout(90)
def test_a_users_script_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
