"""Storages of tensors, and whether they still take memory."""

from __future__ import annotations

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe_runtime.ranks.parts import local
from optpipe_runtime.torch_private.tensors import storage_id


def storage_key(tensor: Tensor) -> int:
    """The identity of the storage of what this rank has of a tensor, while it lives."""
    return storage_id(local(tensor).untyped_storage())


class StorageRef:
    """A weak reference to a storage: tells whether it still takes memory."""

    __slots__ = ("_ref", "key", "nbytes")

    def __init__(self, storage: UntypedStorage) -> None:
        self.key, self.nbytes = storage_id(storage), storage.nbytes()
        self._ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def alive(self) -> bool:
        """Whether anything refers to the storage."""
        return not self._ref.expired()  # type: ignore[no-untyped-call]
