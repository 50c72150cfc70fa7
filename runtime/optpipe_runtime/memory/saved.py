"""Storages of tensors, and whether they still take memory (`StorageRef`). What autograd has saved: `Saved` in an
activation's blocks, `Staying` elsewhere. Both refuse a tensor that was changed in place afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.errors import InputError
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.torch_private.tensors import spec, storage_id, version


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


class OffloadedError(RuntimeError):
    """A saved tensor was used while it is on the host: its reload is missing in the program."""


class Block:
    """One captured storage, None while it is off the device. `ref` is the last storage that was allocated for it."""

    __slots__ = ("device", "nbytes", "ref", "storage")

    def __init__(self, storage: UntypedStorage) -> None:
        self.nbytes, self.device = storage.nbytes(), storage.device
        self.storage: UntypedStorage | None = storage
        self.ref = StorageRef(storage)

    def view(self) -> Tensor:
        """All its bytes."""
        assert self.storage is not None
        return _tensor(self.storage, torch.uint8, self.device, 0, (self.nbytes,), (1,))


class Saved:
    """A tensor that autograd saved: a view of a block; of a DTensor the local one, and `spec` tells the rest.
    `changed`: in place, after it was saved."""

    __slots__ = ("block", "changed", "dtype", "offset", "shape", "spec", "stride")

    def __init__(self, block: Block, tensor: Tensor) -> None:
        self.block, self.dtype, self.changed = block, tensor.dtype, False
        self.spec = spec(tensor) if isinstance(tensor, DTensor) else None
        own = local(tensor)
        self.offset, self.shape, self.stride = int(own.storage_offset()), own.shape, own.stride()

    def tensor(self) -> Tensor:
        if self.block.storage is None:
            raise OffloadedError(f"a saved tensor of shape {list(self.shape)} was used while it is offloaded")
        require_unchanged(self.changed, self.shape)
        own = _tensor(self.block.storage, self.dtype, self.block.device, self.offset, self.shape, self.stride)
        return own if self.spec is None else DTensor(own, self.spec, requires_grad=False)  # type: ignore[no-untyped-call]


class Staying:
    """A tensor that autograd saved and that this store does not own."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, version(tensor)

    def tensor(self) -> Tensor:
        require_unchanged(version(self._tensor) != self._version, self._tensor.shape)
        return self._tensor


def require_unchanged(changed: bool, shape: Sequence[int]) -> None:
    """Autograd's own check, which it leaves out when hooks are set. Without it gradients would be wrong without an
    error."""
    if changed:
        raise InputError(
            f"a tensor of shape {list(shape)} was changed in place after it was saved for the backward; change a "
            "copy of it"
        )


@contextmanager
def in_place_errors() -> Iterator[None]:
    """Autograd's own check, where no hooks are set, with the same error."""
    try:
        yield
    except RuntimeError as error:
        match = re.search(r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\]", str(error))
        if match is None:
            raise
        shape = [int(n) for n in match[1].split(",") if n.strip()]
        try:
            require_unchanged(True, shape)
        except InputError as clear:
            raise clear from error


def _tensor(
    storage: UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)
