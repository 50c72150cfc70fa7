"""`Batch`: what one rank has of a step, and asks of it, and how that is cut into micro-batches.

Values may be tensors, torch's `BlockMask`s, anything else, and tuples, lists and dicts of these. A tensor is cut along
its first dimension, or as a chunk spec of torch.distributed.pipelining says; every micro-batch gets what is no tensor
as it is. `Microbatches` are cut already, and may differ in shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from optpipe.errors import InputError
from optpipe_runtime.stage.io import Kwargs, Shape, tensors_in
from optpipe_runtime.torch_private.tensors import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

# As torch's `TensorChunkSpec(0)`. To import torch.distributed.pipelining takes half a second.
FIRST = SimpleNamespace(split_dim=0)


@dataclass(frozen=True)
class ChunkSpecs:
    """How arguments are cut: one spec for each. None cuts along the first dimension what has one."""

    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Microbatches(list[Any]):
    """A batch that is cut already: one entry for each micro-batch, of any shape.

    It stands where `Pipeline.step` takes a batch: as inputs, as targets, or as the value of a named argument. An entry
    is what the stage, or the loss, gets for this micro-batch: a tensor, or a tuple of tensors and other values.
    """


@dataclass(frozen=True)
class Batch:
    """The whole batch of a step on one rank, and what its report is to have."""

    inputs: Any = None  # a value, or a tuple or list of values, or `Microbatches` of them
    targets: Any = None  # the same
    kwargs: Mapping[Any, Any] = field(default_factory=dict)  # for all stages of this rank, or by number of the stage
    specs: ChunkSpecs = field(default_factory=ChunkSpecs)
    trace: bool = False  # whether to report the time of every op
    outputs: bool = False  # and what the last modules return
    weights: Sequence[float] | None = None  # how much the loss of each micro-batch counts; None: all the same
    timed: bool = False  # as `trace`, and bytes only after shapes were learned

    @property
    def count(self) -> int | None:
        """How many micro-batches there are, if this rank has any that are cut already. Raises `InputError` if inputs,
        targets and named arguments have different numbers of them."""
        values = {"inputs": self.inputs, "targets": self.targets}
        for kwargs in (self.kwargs, *(each for each in self.kwargs.values() if isinstance(each, Mapping))):
            values |= {f"kwargs[{name!r}]": value for name, value in kwargs.items()}
        counts = {name: len(value) for name, value in values.items() if isinstance(value, Microbatches)}
        first = next(iter(counts), "")
        for name, count in counts.items():
            if count != counts[first] or not count:
                raise InputError(
                    f"{name} has {count} micro-batches, {first} has {counts[first]}: all need the same number, "
                    "at least 1"
                )
        return counts.get(first)

    def only(self, chosen: Sequence[int], microbatches: int) -> Batch:
        """The batch of some of so many micro-batches."""

        def pick(value: Any, name: str, specs: Any = FIRST) -> Microbatches:
            chunks = _chunks(value, microbatches, name, specs)
            return Microbatches([chunks[j] for j in chosen])

        def named(kwargs: Mapping[Any, Any]) -> dict[Any, Any]:
            return {
                key: named(each) if isinstance(key, int) else pick(each, key, self.specs.kwargs.get(key, FIRST))
                for key, each in kwargs.items()
            }

        inputs = None if self.inputs is None else cut(self.inputs, microbatches, "inputs", self.specs.args)
        targets = None if self.targets is None else cut(self.targets, microbatches, "targets")
        inputs, targets = (rows and Microbatches([rows[j] for j in chosen]) for rows in (inputs, targets))
        return replace(self, inputs=inputs, targets=targets, kwargs=named(self.kwargs), weights=None)

    def cut(self, microbatches: int, inputs: bool, targets: bool, stages: Iterable[int]) -> Cut:
        """What a rank has of each micro-batch that takes inputs, targets, and named arguments for some stages. Raises
        `InputError` if the batch is none."""
        by_stage = all(isinstance(key, int) for key in self.kwargs)
        kwargs: dict[int, list[Kwargs]] = {}
        for s in stages if self.kwargs else ():
            chunks = {
                name: _chunks(value, microbatches, f"kwargs[{name!r}]", self.specs.kwargs.get(name, FIRST))
                for name, value in (self.kwargs.get(s, {}) if by_stage else self.kwargs).items()
            }
            kwargs[s] = [{name: chunk[j] for name, chunk in chunks.items()} for j in range(microbatches)]
        return Cut(
            cut(self.inputs, microbatches, "inputs", self.specs.args) if inputs else [],
            cut(self.targets, microbatches, "targets") if targets else [],
            kwargs,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them. Torch looks into plain lists only."""
        return tensors_in(tree_map_only(Microbatches, list, (self.inputs, self.targets, dict(self.kwargs))))


class Cut(NamedTuple):
    """What one rank has of a batch, by micro-batch; empty where it has nothing. `kwargs` also by stage."""

    inputs: list[tuple[Any, ...]]
    targets: list[tuple[Any, ...]]
    kwargs: Mapping[int, list[Kwargs]]

    def named(self, stage: int, microbatch: int) -> Kwargs:
        return self.kwargs[stage][microbatch] if self.kwargs else {}


def require_weights(weights: Sequence[float], microbatches: int) -> None:
    """Raises `InputError` if these cannot be the weights of so many losses."""
    if len(weights) != microbatches:
        raise InputError(f"weights has {len(weights)} entries: there are {microbatches} micro-batches, one entry each")
    for j, weight in enumerate(weights):
        if not isfinite(weight) or weight < 0:
            raise InputError(f"weights[{j}] = {weight!r}: must be a finite number, at least 0")
    if not sum(weights) > 0:
        raise InputError(f"weights = {list(weights)}: the loss of at least one micro-batch must count")


def cut(batch: Any, microbatches: int, name: str, specs: tuple[Any, ...] | None = None) -> list[tuple[Any, ...]]:
    """The micro-batches, each a tuple of values. Raises `InputError` if there is no tensor or it does not divide."""
    if isinstance(batch, Microbatches):
        rows = [tuple(row) if isinstance(row, tuple | list) else (row,) for row in _counted(batch, microbatches, name)]
        for j, row in enumerate(rows):
            if not (tensors := tensors_in(row)):
                raise InputError(
                    f"{name}[{j}] has no tensor: each micro-batch is a tensor, or a tuple of tensors and other values"
                )
            for tensor in tensors:
                _require_no_gradient(tensor, f"{name}[{j}]")
        return rows
    values = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if not tensors_in(values):
        what = type(values[0]).__name__ if values else "empty"
        raise InputError(f"{name} is {what}: this rank needs a tensor, or a tuple of tensors, of the whole batch")
    specs = specs or (FIRST,) * len(values)
    if len(specs) != len(values):
        raise InputError(f"args_chunk_spec has {len(specs)} entries: {name} has {len(values)}, one entry each")
    columns = [_chunks(value, microbatches, name, spec) for value, spec in zip(values, specs, strict=True)]
    return list(zip(*columns, strict=True))


def _counted(batch: Microbatches, microbatches: int, name: str) -> Microbatches:
    if len(batch) != microbatches:
        raise InputError(f"{name} has {len(batch)} micro-batches: this step has {microbatches}")
    return batch


def _require_no_gradient(tensor: Tensor, name: str) -> None:
    if tensor.requires_grad:
        raise InputError(f"{name} requires a gradient, and a step computes those of parameters only: detach it")


def _chunks(value: Any, microbatches: int, name: str, spec: Any) -> list[Any]:
    if isinstance(value, Microbatches):
        return list(_counted(value, microbatches, name))
    leaves, shape = tree_flatten(value, is_leaf=lambda found: isinstance(found, BlockMask))
    specs, _ = tree_flatten(spec)
    if len(specs) == 1:
        specs *= len(leaves)
    if len(specs) != len(leaves):
        raise InputError(f"the chunk spec of {name} has {len(specs)} entries: there are {len(leaves)} values")
    parts = [_leaf_chunks(leaf, microbatches, name, one) for leaf, one in zip(leaves, specs, strict=True)]
    return [tree_unflatten([part[j] for part in parts], shape) for j in range(microbatches)]


def _leaf_chunks(leaf: Any, microbatches: int, name: str, spec: Any) -> list[Any]:
    if isinstance(leaf, Tensor):
        _require_no_gradient(leaf, name)
    dim: int | None = getattr(spec, "split_dim", None)
    if dim is None:  # None itself, or torch's own class for it
        return [leaf] * microbatches
    if isinstance(leaf, BlockMask):
        from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

        chunks, _ = split_args_kwargs_into_chunks((leaf,), None, microbatches)
        if len(chunks) != microbatches:
            raise InputError(
                f"{name} is a BlockMask of {leaf.kv_num_blocks.size(0)}: there are {microbatches} micro-batches"
            )
        return [chunk[0] for chunk in chunks]
    if not isinstance(leaf, Tensor):
        return [leaf] * microbatches
    size = leaf.shape[dim] if -leaf.dim() <= dim < leaf.dim() else 0
    if not size or size % microbatches:
        which = "first dimension" if dim == 0 else f"dimension {dim}"
        raise InputError(
            f"{name} has shape {list(leaf.shape)}: its {which} must be a multiple of the {microbatches} micro-batches"
        )
    # By `data`, so that a change of one micro-batch in place does not count as a change of the others.
    return [part.data for part in leaf.split(size // microbatches, dim)]  # type: ignore[no-untyped-call]


class BatchShapes(NamedTuple):
    """What one rank has of a step's micro-batches."""

    microbatches: int | None  # that are cut already; None if this rank cuts a whole batch, or has nothing of it
    shapes: tuple[Shape, ...]  # of each micro-batch, or one for all; empty if the rank has nothing of it
    autocast: torch.dtype | None  # if it is on
    modes: int  # the number of its modules' modes, and of what is trained

    def of_microbatch(self, j: int) -> Shape | None:
        return self.shapes[j if len(self.shapes) > 1 else 0] if self.shapes else None


def shape_of(values: Any) -> Shape:
    kinds: list[Hashable] = [tuple(sorted(each)) for each in values if isinstance(each, Mapping)]
    sizes: list[int] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            kinds.append((leaf.dtype, leaf.dim()))
            sizes += leaf.shape
        else:
            kinds.append(type(leaf))  # type: ignore[arg-type]
    return Shape(tuple(kinds), tuple(sizes))


def together(by_rank: Sequence[BatchShapes], j: int) -> Shape:
    """What all ranks have of micro-batch j."""
    shapes = [each.of_microbatch(j) for each in by_rank]
    kinds = tuple((shape and shape.kind, each.autocast) for shape, each in zip(shapes, by_rank, strict=True))
    return Shape(kinds, tuple(size for shape in shapes if shape for size in shape.sizes))
