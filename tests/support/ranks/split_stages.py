"""Stages of the tests of the split backward, and their ops one after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.levels import FULL, LEVELS
from optpipe_runtime.stage.runner import StageRunner, learn
from support.ranks.odd_modules import BATCH, WIDTH, linear

CPU = torch.device("cpu")
RECOMPUTED = {"C": FULL, "K": LEVELS["cheap"]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), linear()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        result: Tensor = x + self.narrow(functional.gelu(self.wide(self.norm2(x))))
        return result


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(BATCH, 8, WIDTH) for _ in range(count)]


def runner(module: nn.Module, link: Link) -> StageRunner:
    stage = StageRunner(0, module, CPU, link, HostPool(CPU))
    learn(stage, (torch.zeros(BATCH, 8, WIDTH, requires_grad=True),))
    stage.start_step((), 1)
    return stage


def run(stage: StageRunner, program: str, inputs: list[Tensor]) -> dict[int, Tensor]:
    """Ops as in "F0 B0 W0", with gradients of one; returns input gradients. C and K are an F with its C, in full and
    cheap."""
    found: dict[int, Tensor] = {}
    for op in program.split():
        kind, j = op[:-1], int(op[-1])
        if kind == "F":
            stage.forward(j, (inputs[j].clone(),))
        elif kind in RECOMPUTED:
            stage.forward(j, (inputs[j].clone(),), recompute=RECOMPUTED[kind])
            stage.recompute(j)
        elif kind == "O":
            stage.offload(j, 0)
            stage.drop(j, 0)
            stage.reload(j, 0)
        elif kind == "W":
            stage.weight(j)
        else:
            (found[j],) = stage.backward(j, (torch.ones(BATCH, 8, WIDTH),), split=kind == "B")
    return found


def require_as_plain(module: nn.Module, plain: nn.Module, inputs: list[Tensor], found: dict[int, Tensor]) -> None:
    for j, x in enumerate(inputs):
        leaf = x.clone().requires_grad_()
        torch.autograd.backward(plain(leaf), torch.ones_like(x))
        assert torch.equal(found[j], leaf.grad)  # type: ignore[arg-type]
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
