"""Nested tuples, lists and dicts of tensors. torch has no public functions for them."""

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten"]
