"""`Given`: what one rank has of a step's micro-batches, which the ranks tell each other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.stage.shapes import Shape
from optpipe_runtime.torch_private.trees import tree_leaves


class Given(NamedTuple):
    """What one rank has of a step's micro-batches."""

    microbatches: int | None  # that are cut already; None if this rank cuts a whole batch, or has nothing of it
    shapes: tuple[Shape, ...]  # of each micro-batch, or one for all; empty if the rank has nothing of it
    autocast: torch.dtype | None  # if it is on
    modes: int  # the number of its modules' modes, and of what is trained

    def of_microbatch(self, j: int) -> Shape | None:
        return self.shapes[j if len(self.shapes) > 1 else 0] if self.shapes else None


def describe(rank: Rank, batch: Batch, modes: int) -> Given:
    """Raises `InputError` if the batch is none."""
    count = batch.count
    m = count or rank.microbatches
    columns: list[Sequence[Any]] = []
    if rank.takes_inputs:
        columns.append(batch.cut_inputs(m))
    if rank.takes_targets:
        columns.append(batch.cut_targets(m))
    if batch.kwargs:
        columns += [batch.cut_kwargs(s, m) for s in rank.stages]
    kind = rank.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    shapes = tuple(_shape(row) for row in zip(*columns, strict=True)) if columns else ()
    return Given(count, shapes if count else shapes[:1], autocast, modes)


def _shape(values: Any) -> Shape:
    """Of what one rank has of a micro-batch."""
    leaves = tree_leaves(values)
    kinds: list[Hashable] = [tuple(sorted(each)) for each in values if isinstance(each, Mapping)]
    for leaf in leaves:
        kinds.append((leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else type(leaf))  # type: ignore[arg-type]
    sizes = tuple(size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape)
    return Shape(tuple(kinds), sizes)


def together(by_rank: Sequence[Given], j: int) -> Shape:
    """What all ranks have of micro-batch j."""
    shapes = [given.of_microbatch(j) for given in by_rank]
    kinds = tuple((shape and shape.kind, given.autocast) for shape, given in zip(shapes, by_rank, strict=True))
    return Shape(kinds, tuple(size for shape in shapes if shape for size in shape.sizes))
