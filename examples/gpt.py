"""A byte-level GPT, and how it is cut into pipeline stages. It has pre-norm blocks of causal attention and MLP, and an
untied head.

A row may hold several documents one after the other, without padding. Their `lengths` are then given to each stage:
places are counted, and attention stays, within a document.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256  # the vocabulary
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Size:
    """The size of the model and of one micro-batch."""

    width: int = 256
    heads: int = 4
    blocks: int = 8
    context: int = 128
    sequences: int = 8  # per micro-batch


class Embedding(nn.Module):
    """From (n, t) bytes to (n, t, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, size.width)
        self.position = nn.Embedding(size.context, size.width)

    def forward(self, text: Tensor, lengths: Tensor | None = None) -> Tensor:
        documents = [text.shape[1]] if lengths is None else lengths.tolist()
        places = torch.cat([torch.arange(length, device=text.device) for length in documents])
        return self.token(text) + self.position(places)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention over (n, t, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        n, t, width = x.shape
        qkv = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        documents = [qkv] if lengths is None else qkv.split(lengths.tolist(), dim=3)
        seen = [functional.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in documents]
        return self.out(torch.cat(seen, dim=2).transpose(1, 2).reshape(n, t, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each with a layer norm before it and a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), lengths)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Head(nn.Module):
    """From (n, t, width) to (n, t, 256) logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.logits = nn.Linear(size.width, BYTES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


class Stage(nn.Sequential):
    """Some layers of the model."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        for layer in self:
            x = layer(x, lengths)
        return x


def stages(size: Size, count: int, seed: int = 0) -> list[nn.Module]:
    """The model as `count` stages of about equal work. The same seed gives the same parameters on every rank."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [Embedding(size), *(Block(size) for _ in range(size.blocks)), Head(size)]
    cuts = [0, *(1 + round(size.blocks * k / count) for k in range(1, count)), len(layers)]
    return [Stage(*layers[a:b]) for a, b in pairwise(cuts)]


def optimizer(stages: Iterable[nn.Module]) -> torch.optim.AdamW:
    """With which they are trained."""
    return torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=LEARNING_RATE)


def loss(logits: Tensor, text: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte: (n, t, 256) logits against (n, t) bytes."""
    return functional.cross_entropy(logits.flatten(0, 1), text.flatten())
