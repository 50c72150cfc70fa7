"""Stages that several ranks compute together, by torch's tensor parallelism, and the same model in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from support.ranks.cases import WIDTH, WORDS, Gradients, batch, loss_fn
from support.ranks.replicas import gradients

HEADS = 4


class Attention(nn.Module):
    """Each rank of a tensor-parallel group computes some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


def make_stages(count: int = 2) -> list[nn.Module]:
    """The same model on every rank: embedding in the first stage, head in the last, a block in each."""
    torch.manual_seed(3)
    blocks: list[list[nn.Module]] = [[Block()] for _ in range(count)]
    return [
        nn.Sequential(
            *([nn.Embedding(WORDS, WIDTH)] if s == 0 else []),
            *block,
            *([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)] if s == count - 1 else []),
        )
        for s, block in enumerate(blocks)
    ]


def parallel(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The stage by tensor and sequence parallelism. Between stages each rank has its part of the sequence."""
    whole, part = Replicate(), Shard(1)
    plan: dict[str, Any] = {}
    for name, layer in stage.named_children():
        if isinstance(layer, nn.Embedding):
            plan[name] = RowwiseParallel(input_layouts=whole, output_layouts=part)
        elif isinstance(layer, nn.LayerNorm):
            plan[name] = SequenceParallel()
        elif isinstance(layer, nn.Linear):
            plan[name] = ColwiseParallel(input_layouts=part, output_layouts=whole)
        else:
            plan |= {
                f"{name}.norm1": SequenceParallel(),
                f"{name}.attention": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
                **{f"{name}.attention.{one}": ColwiseParallel() for one in "qkv"},
                f"{name}.attention.out": RowwiseParallel(output_layouts=part),
                f"{name}.norm2": SequenceParallel(),
                f"{name}.up": ColwiseParallel(input_layouts=part),
                f"{name}.down": RowwiseParallel(output_layouts=part),
            }
    return parallelize_module(stage, mesh, plan)


@cache
def mesh() -> DeviceMesh:
    """Two stages of two ranks each: ranks 0 and 1, ranks 2 and 3."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tensor"))


class Seen(NamedTuple):
    """Of one step on one rank."""

    losses: list[float] | None
    gradients: Gradients
    norm: float
    version: int
    host_peak_bytes: int
    excess: Any


def plain(microbatches: int, steps: int) -> list[Seen]:
    """The whole model in one process, with clipping and an SGD step after each step."""
    torch.set_num_threads(1)
    modules = make_stages()
    every = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(every, lr=0.1)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for x, y in zip(*(given.chunk(microbatches) for given in batch(step, microbatches)), strict=True):
            for module in modules:
                x = module(x)
            loss = loss_fn(x, y)
            torch.autograd.backward(loss / microbatches)
            losses.append(loss.item())
        found = gradients(dict(enumerate(modules)))
        seen.append(Seen(losses, found, nn.utils.clip_grad_norm_(every, 1.0).item(), 0, 0, None))
        optimizer.step()
    return seen
