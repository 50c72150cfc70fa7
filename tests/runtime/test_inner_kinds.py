"""Other stages that several ranks compute together: attention over parts of a sequence, and experts on different ranks.
Each rank has half of every sequence. The gradients of what all have are averaged over them, by DDP or `fully_shard`: a
mean over the ranks is one over the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks.cases import WIDTH, WORDS, Plain, batch, plain_training
from support.ranks.inner import Seen, mesh, step_of, two_stages
from support.ranks.programs import OFFLOADED, RECOMPUTED, SPLIT
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from optpipe.schedule import Schedule

RANKS = 2
all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class ContextAttention(nn.Module):
    """Causal attention of a part of each sequence to all that comes before; the whole sequence without a mesh."""

    def __init__(self, ranks: DeviceMesh | None) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        first = 0
        if self.ranks is not None:
            k, v = (all_gather(part.contiguous(), 2, self.ranks.get_group()) for part in (k, v))
            first = self.ranks.get_local_rank() * x.shape[1]
        seen = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(first)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Every token goes to one expert, which another rank may have. How many go where differs in every micro-batch."""

    def __init__(self, ranks: DeviceMesh | None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, RANKS)
        self.experts = nn.Parameter(torch.randn(RANKS, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.back = nn.Linear(4 * WIDTH, WIDTH)
        self.ranks = ranks
        if ranks is not None:
            own = self.experts.detach()[ranks.get_local_rank()].unsqueeze(0).clone()
            self.experts = nn.Parameter(DTensor.from_local(own, ranks, [Shard(0)]))
            self.experts.register_hook(lambda grad: grad / RANKS)  # a mean over the ranks, like the others' gradients

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1).max(-1)
        order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=RANKS)
        sent = tokens[order]
        if self.ranks is None:
            found = torch.cat([part @ self.experts[e] for e, part in enumerate(sent.split(counts.tolist()))])
        else:
            group, coming = self.ranks.get_group(), torch.empty_like(counts)
            dist.all_to_all_single(coming, counts, group=group)
            out, back = counts.tolist(), coming.tolist()
            here = collectives.all_to_all_single_autograd(sent, back, out, group)
            assert isinstance(self.experts, DTensor)
            found = collectives.all_to_all_single_autograd(here @ self.experts.to_local()[0], out, back, group)
        mixed = torch.zeros_like(found).index_copy(0, order, functional.gelu(found)) * shares.unsqueeze(-1)
        return x + self.back(mixed).view(x.shape)


KINDS = {"context": ContextAttention, "experts": Experts}


def make_stages(kind: str, ranks: DeviceMesh | None = None) -> list[nn.Module]:
    torch.manual_seed(7)
    first = nn.Sequential(nn.Embedding(WORDS, WIDTH), KINDS[kind](ranks))
    return [first, nn.Sequential(KINDS[kind](ranks), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))]


def uneven(kind: str, microbatches: int) -> tuple[Tensor, Tensor]:
    """A batch. In the first stage with experts each gets half of the tokens of the first micro-batch, and the first one
    all of the last."""
    inputs, targets = batch(0, microbatches)
    if kind == "experts":
        embedding, experts = make_stages(kind)[0].children()
        words = experts.get_submodule("router")(embedding.weight).argmax(-1)
        of_first, of_second = ((words == e).nonzero().flatten().tolist() for e in range(RANKS))
        inputs[:RANKS, ::2], inputs[:RANKS, 1::2] = of_first[0], of_second[0]
        inputs[-RANKS:] = of_first[0]
    return inputs, targets


def plain(kind: str, microbatches: int) -> Plain:
    return plain_training(make_stages(kind), [uneven(kind, microbatches)], microbatches, max_norm=0.1)[0]


def trained(kind: str, microbatches: int, programs: Sequence[Sequence[Sequence[str]]]) -> list[Seen]:
    """The same step with each of the programs, after a profile."""
    stage, peer, ranks = dist.get_rank() // 2, dist.get_rank() % 2, mesh()["tensor"]
    module: nn.Module = make_stages(kind, ranks)[stage]
    apart = {p for p in module.parameters() if isinstance(p, DTensor)}
    if apart:
        fully_shard(module, mesh=ranks, ignored_params=apart)
    else:
        module = DistributedDataParallel(module, process_group=ranks.get_group())
    given: list[Any] = [part.chunk(2, dim=1)[peer].contiguous() for part in uneven(kind, microbatches)]
    seen = []
    with two_stages({stage: module}, microbatches) as pipe:
        problem = pipe.profile(*given, activation_budget_bytes=10**9, repeats=1)
        for program in programs:
            pipe.load(Schedule.parse(problem, program))
            seen.append(step_of(pipe, {stage: module}, given)[0])
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_other_collectives_inside_a_stage(four_ranks: Ranks, kind: str) -> None:
    """Of a context-parallel attention, and of experts, whose activations differ from micro-batch to micro-batch: what a
    step holds more than the profile found is reported, and changes no gradient."""
    programs = [SPLIT, OFFLOADED, RECOMPUTED]
    ranks = four_ranks(trained, kind=kind, microbatches=4, programs=programs)
    expected = plain(kind, 4)
    for k in range(len(programs)):
        first, last = ranks[0][k], ranks[2][k]
        require_close(first.gradients | last.gradients, expected.gradients)
        assert np.mean([last.losses, ranks[3][k].losses], axis=0) == pytest.approx(expected.losses, rel=1e-5)
        for seen in ranks:
            assert seen[k].norm == pytest.approx(expected.norm, rel=1e-5)
            for name, grad in seen[k].gradients.items():
                np.testing.assert_array_equal(grad, seen[0].gradients[name], err_msg=name)
    assert all(seen[1].host_peak_bytes for seen in ranks)
    assert bool(ranks[0][0].excess) == (kind == "experts")  # the first stage's first expert gets more than ever before
