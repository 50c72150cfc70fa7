"""Private names of torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import _CachingTorchDispatchMode, _VersionWrapper

from optpipe_runtime.torch_private.tensors import tree_leaves


@contextmanager
def selective_checkpoints() -> Iterator[Callable[[], Iterator[Tensor]]]:
    """Yields what gives the tensors that selective checkpoints in this context keep. Their forwards have a mode that
    keeps results aside, where no hook for saved tensors sees them."""
    storages: list[Mapping[Any, Any]] = []
    mode_class: Any = _CachingTorchDispatchMode
    enter = mode_class.__enter__

    def noting(mode: Any) -> Any:
        storages.append(mode.storage)
        return enter(mode)

    def kept() -> Iterator[Tensor]:
        for results in (results for storage in storages for results in storage.values()):
            for each in tree_leaves(list(results.values()) if isinstance(results, Mapping) else results):
                if isinstance(each, _VersionWrapper) and isinstance(each.val, Tensor):
                    yield each.val

    mode_class.__enter__ = noting
    try:
        yield kept
    finally:
        mode_class.__enter__ = enter
