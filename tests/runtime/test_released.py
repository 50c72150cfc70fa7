"""What is offloaded leaves the process, too: its own memory, as the kernel counts it, falls at D and grows at R.

Blocks are larger than glibc ever keeps for itself (32 MiB), so what is freed goes back at once. Host pages are mapped
as shared memory, which the kernel counts apart from what stands in for the device's here: so neither can hide the
other.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optpipe_runtime.memory.host_pool import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.learn import learn
from optpipe_runtime.stage.runner import StageRunner

CPU = torch.device("cpu")
BLOCK, BLOCKS = 36 << 20, 4  # bytes, and how many of them a forward saves
SLACK = BLOCK // 4  # what else comes and goes in the process


class Large(nn.Module):
    """Saves each of its steps, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(BLOCKS):
            x = torch.exp(x * 0.1)
        return x.sum()


def resident(kind: str) -> int:
    """Bytes of this process in memory: `Anon` is what programs allocate, `Shmem` what is mapped as shared."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"Rss{kind}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("split", [False, True])
def test_each_op_allocates_and_frees_the_bytes_it_should(link: Link, split: bool) -> None:
    gc.collect()  # what earlier tests left
    pool = HostPool(CPU)
    stage = StageRunner(0, Large(), CPU, link, pool)
    x = torch.ones(BLOCK // 4)
    learn(stage, (x[:2048].clone().requires_grad_(),))
    stage.start_step((x,), BLOCKS)
    stage.forward(0, (x[:2048].clone(),))
    stage.backward(0, (torch.ones(()),), split=False)  # torch loads what it needs
    device, host = resident("Anon"), resident("Shmem")

    def require(blocks: int, pages: int, where: str) -> None:
        assert abs(resident("Anon") - device - blocks * BLOCK) < SLACK, (
            f"{where}: {(resident('Anon') - device) / BLOCK} blocks"
        )
        assert abs(resident("Shmem") - host - pages * BLOCK) < SLACK, (
            f"{where}: {(resident('Shmem') - host) / BLOCK} blocks on the host"
        )
        assert stage.held_bytes(0) == blocks * BLOCK

    stage.forward(0, (x.requires_grad_(),))
    require(BLOCKS, 0, "F")
    for k in range(BLOCKS):
        for handle in stage.offload(0, k):
            handle.wait()
        require(BLOCKS - k, k + 1, f"O.{k}")
        stage.drop(0, k)
        require(BLOCKS - k - 1, k + 1, f"D.{k}")
    for k in range(BLOCKS):
        for handle in stage.reload(0, k):
            handle.wait()
        require(k + 1, BLOCKS, f"R.{k}")
    stage.backward(0, (torch.ones(()),), split)
    require(0, BLOCKS, "B")  # where W is still to come, it needs nothing
    again = pool.take(BLOCKS * BLOCK)
    again[-1].zero_()
    require(0, BLOCKS, "pages are used again")
    stage = StageRunner(0, Large(), CPU, link, HostPool(CPU))
    del pool, again
    require(0, 0, "pages go with their pool")
