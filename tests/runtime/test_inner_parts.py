"""Stages of plain parameters, of which each inner peer has a part, as Megatron-LM divides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.cases import problem
from support.ranks.inner import mesh
from support.ranks.programs import SPLIT
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.nn import functional

from optpipe.errors import InputError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline


class Sliced(nn.Module):
    """A linear layer of which each rank of a group has some of the outputs, as Megatron-LM divides it, by plain
    parameters."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup, marked: bool) -> None:
        super().__init__()
        self.group, (size, rank) = group, (group.size(), group.rank())
        self.weight = nn.Parameter(whole.weight.detach().chunk(size)[rank].clone())
        self.weight.tensor_model_parallel = marked  # type: ignore[attr-defined]
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x = AllReduceBackward.apply(x, self.group)  # type: ignore[no-untyped-call]
        y: Tensor = Gather.apply(functional.linear(x, self.weight), self.group)  # type: ignore[no-untyped-call]
        return y + self.bias


class AllReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dy = dy.contiguous()
        dist.all_reduce(dy, group=ctx.group)
        return dy, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(y) for _ in range(group.size())]
        dist.all_gather(parts, y.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None


def plain_parts(marked: bool, validated: bool) -> tuple[Any, float]:
    """A step on stages of plain parameters, of which each peer has a part: the norm that clipping saw, or why it did
    not; and that of one process. `validated`: by `post_validate`."""
    stage, m = dist.get_rank() // 2, 4
    torch.manual_seed(0)
    whole = [nn.Linear(8, 8), nn.Linear(8, 8)]
    inputs, targets = torch.randn(2, 2 * m, 8)
    pipe, tensor = mesh()["pipe"], mesh()["tensor"].get_group()
    module = Sliced(whole[stage], tensor, marked)
    with Pipeline({stage: module}, [0, 1], functional.mse_loss, m, group=pipe.get_group(), inner=tensor) as pipeline:
        pipeline.load(Schedule.parse(problem((0, 1), m), SPLIT))
        pipeline.step(inputs, targets)
        try:
            if validated:
                optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
                pipeline.post_validate(optimizer, 0.1)
                optimizer.step()
                found: Any = pipeline.step(inputs, targets).grad_norm
            else:
                found = pipeline.clip_grad_norm_(0.1)
        except InputError as error:
            found = str(error)
    functional.mse_loss(whole[1](whole[0](inputs)), targets).backward()  # type: ignore[no-untyped-call]
    return found, nn.utils.clip_grad_norm_([p for layer in whole for p in layer.parameters()], 0.1).item()


@pytest.mark.parametrize("validated", [False, True])
def test_the_norm_counts_plain_parameters_once_or_as_parts(four_ranks: Ranks, validated: bool) -> None:
    """Parts must be marked: else their gradients differ between peers, and clipping is refused."""
    for found, expected in four_ranks(plain_parts, marked=True, validated=validated):
        assert found == pytest.approx(expected, rel=1e-5)
    for complaint, _ in four_ranks(plain_parts, marked=False, validated=validated):
        assert complaint.startswith("stage 0: weight has gradients of norms 0.271, 0.265 on its inner peers: average ")
