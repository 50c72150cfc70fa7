"""Private names of torch's ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from optpipe_runtime.torch_private.trees import tree_leaves


@lru_cache
def makes_new(op: Any) -> bool:
    """Whether all that an op returns is new, no view and nothing that it has changed, by its schema."""
    schema = op._schema
    return not schema.is_mutable and all(result.alias_info is None for result in schema.returns)


def written(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments that an op changes in place."""
    if op._schema.is_mutable:
        for k, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[k] if k < len(args) else kwargs.get(argument.name)
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
