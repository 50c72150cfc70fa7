"""Private names of tensors, storages, ops, autograd, nested values, nn.Module and torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # what a collective gives before it ends
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

# Names that are imported for other modules, beside those that are defined here.
__all__ = ["GROUPED_MM", "AsyncCollectiveTensor", "tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten"]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters. An attribute takes longer to read, and may hide one of them."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of a module's own buffers. torch can set them by name, but not put another tensor in their place."""
    return module._buffers


def is_wrapped(module: nn.Module) -> bool:
    """Whether a call of this object does more than its class's forward: hooks, or a forward of its own."""
    return bool(module._forward_pre_hooks or module._forward_hooks) or "forward" in vars(module)


def compiled_call(module: nn.Module) -> Any:
    """What `module.compile()` has put in the place of its call; None if it was not compiled in place."""
    return module._compiled_call_impl


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was given this module, in place or as a module around it."""
    return compiled_call(module) is not None or hasattr(module, "_orig_mod")


def must_stay_whole(error: Exception) -> bool:
    """Whether a region was compiled with fullgraph=True and was to end in the middle. Loads no compiler."""
    dynamo = sys.modules.get("torch._dynamo.exc")
    return dynamo is not None and isinstance(error, dynamo.Unsupported)


# What functional.grouped_mm calls, and thus what a mode sees. Some releases lack it.
GROUPED_MM: Any = getattr(torch, "_grouped_mm", None)


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place. Autograd compares it only for what it has saved itself."""
    return tensor._version


def storage_id(storage: UntypedStorage) -> int:
    """The identity of a storage while it lives. Python's objects for one storage are several, and change."""
    return int(storage._cdata)


def base(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of. Changed in place, a view gets another node in the graph, its base not."""
    return tensor._base


def unview(tensor: Tensor) -> Tensor:
    """The same numbers as no view, without a copy: what an autograd function returns could not be changed otherwise."""
    result: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)
    return result


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: of a DTensor its own part (`to_local` would add a node to the graph), of a
    collective under way the result. Others are what they are."""
    while True:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        elif isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
        else:
            return tensor


def spec(tensor: DTensor) -> Any:
    """What makes a DTensor of this rank's part again, with the same placements and sizes."""
    return tensor._spec


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks of the user's wait for a parameter's gradient. torch can register them, and not list them."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def saved_tensors_hooks_in_force() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The hooks (pack, unpack) that autograd would call now for a tensor that it saves; torch can only set them."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


@lru_cache
def saves_tensors(node: type[Any]) -> bool:
    """Whether autograd nodes of this type may have saved tensors, by their attributes. Nodes in Python may always."""
    return issubclass(node, BackwardCFunction) or any(name.startswith("_raw_saved_") for name in dir(node))


def is_mapping() -> bool:
    """Whether torch.vmap or the like is at work, which accepts no autograd function that is not written for it."""
    return bool(torch._C._are_functorch_transforms_active())


def without_subclass_functions() -> AbstractContextManager[Any]:
    """In this context no `__torch_function__` of a subclass is called; the public one also turns off modes."""
    return torch._C.DisableTorchFunctionSubclass()


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
