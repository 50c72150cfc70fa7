"""Private names of torch.utils.checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import _CachingTorchDispatchMode, _VersionWrapper

from optpipe_runtime.torch_private.tensors import tree_leaves

_Mode: Any = _CachingTorchDispatchMode
_enter = _Mode.__enter__
_noted: dict[int, list[Mapping[Any, Any]]] = {}  # storages of modes, by thread, while a context below is open there
_lock = threading.Lock()


@contextmanager
def selective_checkpoints() -> Iterator[Callable[[], Iterator[Tensor]]]:
    """Yields what gives the tensors that selective checkpoints of this thread keep in this context. Their forwards have
    a mode that keeps results aside, where no hook for saved tensors sees them. Without such a context torch is as it
    was."""
    thread, storages = threading.get_ident(), list[Mapping[Any, Any]]()

    def noting(mode: Any) -> Any:
        _noted.get(threading.get_ident(), []).append(mode.storage)
        return _enter(mode)

    def kept() -> Iterator[Tensor]:
        for results in (results for storage in storages for results in storage.values()):
            for each in tree_leaves(list(results.values()) if isinstance(results, Mapping) else results):
                if isinstance(each, _VersionWrapper) and isinstance(each.val, Tensor):
                    yield each.val

    with _lock:
        _noted[thread] = storages
        _Mode.__enter__ = noting
    try:
        yield kept
    finally:
        with _lock:
            del _noted[thread]
            if not _noted:
                _Mode.__enter__ = _enter
