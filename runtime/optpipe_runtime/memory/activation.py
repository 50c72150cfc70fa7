"""`Activation`: what one stage keeps of a micro-batch between its forward and its backward, how it leaves the device
and comes back.

`Activation.capture` takes every tensor that autograd saves, as blocks: one block a storage, with views kept as
metadata (`Saved`). The blocks are the only owners, so dropping one frees its memory. A weak reference (`StorageRef`)
shows whether it did; held bytes are counted in the same way. Parameters, buffers and the batch are not captured: they
stay in memory anyway (`Staying`). Of a DTensor the part on this rank is captured, and the result of a collective when
it is there. A tensor that was changed in place after it was saved is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.errors import InputError
from optpipe_runtime.memory.engines import Destination, Handle
from optpipe_runtime.torch_private.checkpoints import selective_checkpoints
from optpipe_runtime.torch_private.tensors import local, spec, storage_id, version


def storage_key(tensor: Tensor) -> int:
    """The identity of the storage of what this rank has of a tensor, while it lives."""
    return storage_id(local(tensor).untyped_storage())


class StorageRef:
    """A weak reference to a storage: shows whether it still takes memory."""

    __slots__ = ("_ref", "key", "nbytes")

    def __init__(self, storage: UntypedStorage) -> None:
        self.key, self.nbytes = storage_id(storage), storage.nbytes()
        self._ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def alive(self) -> bool:
        return not self._ref.expired()  # type: ignore[no-untyped-call]


def bytes_by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
    """What this rank has of tensors, by key of the storage."""
    return {storage_key(tensor): local(tensor).untyped_storage().nbytes() for tensor in tensors}


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
    """A tensor that autograd saved: a view of a block; of a DTensor the local one, and `spec` has the rest.
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
        if self.changed:
            raise changed_in_place(self.shape)
        own = _tensor(self.block.storage, self.dtype, self.block.device, self.offset, self.shape, self.stride)
        return own if self.spec is None else DTensor(own, self.spec, requires_grad=False)  # type: ignore[no-untyped-call]


class Staying:
    """A tensor that autograd saved and that this store does not own."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, version(tensor)

    def tensor(self) -> Tensor:
        if version(self._tensor) != self._version:
            raise changed_in_place(self._tensor.shape)
        return self._tensor


def changed_in_place(shape: Sequence[int]) -> InputError:
    """The error of autograd's own check, which it leaves out when hooks are set: gradients would be wrong without."""
    return InputError(
        f"a tensor of shape {list(shape)} was changed in place after it was saved for the backward; change a copy of it"
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
        raise changed_in_place([int(n) for n in match[1].split(",") if n.strip()]) from error


def _tensor(
    storage: UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)


SMALLEST = 4096  # bytes; a smaller block stays, because a copy of its own would cost more than it frees
EVERY = range(sys.maxsize)  # all blocks, by number


class OffloadedPart:
    """The blocks of one part, where they are kept, and the transfer under way."""

    def __init__(self, blocks: list[Block], destination: Destination) -> None:
        self.blocks, self.destination = blocks, destination
        self.handles: Sequence[Handle] = destination.take_out([block.view() for block in blocks])
        self.returning: list[UntypedStorage] = []

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles = ()


class Activation:
    """What a stage keeps of a micro-batch. `excluded` are keys of storages not to capture; `shared` are numbers of
    blocks that something else holds, too, so that they stay on the device; `leaving` of some that leave however small
    they are."""

    def __init__(
        self,
        device: torch.device,
        excluded: Set[int],
        shared: frozenset[int] = frozenset(),
        leaving: Container[int] = frozenset(),
    ) -> None:
        self._device, self._excluded, self._shared, self._leaving = device, excluded, shared, leaving
        self._blocks: dict[int, Block] = {}
        self._parts: dict[int, OffloadedPart] = {}
        self._released: list[StorageRef] = []  # blocks that only the graph owns since the backward began
        self._fresh: list[tuple[Saved, Tensor, int]] = []  # what this forward has saved, and its version then

    # F, C

    @contextmanager
    def capture(self) -> Iterator[None]:
        """In this context everything that autograd saves goes into this store, and what torch's selective checkpoints
        keep beside it, which stays on the device."""
        with saved_tensors_hooks(self._pack, lambda saved: saved.tensor()), selective_checkpoints() as kept:
            yield
        for tensor in kept():
            self.keep(tensor)
        for saved, tensor, before in self._fresh:
            saved.changed = version(tensor) != before
        self._fresh.clear()

    def _pack(self, tensor: Tensor) -> Saved | Staying:
        block = self.keep(tensor)
        if block is None:
            return Staying(tensor.detach())  # a node that saves its own output would be in a cycle
        saved = Saved(block, tensor)
        self._fresh.append((saved, tensor, version(tensor)))
        return saved

    def store(self, tensor: Tensor) -> Saved | Tensor:
        """Holds a tensor, as what gives it back wherever its block is then; or as it is, if this store does not own
        it."""
        block = self.keep(tensor)
        return tensor if block is None else Saved(block, tensor)

    def keep(self, tensor: Tensor) -> Block | None:
        """Holds a tensor's storage. Returns None for a tensor that this store does not own."""
        tensor = local(tensor)
        plain = (
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device == self._device
        )
        if not plain or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._excluded or storage.nbytes() == 0:
            return None
        if key not in self._blocks:
            self._blocks[key] = Block(storage)
        return self._blocks[key]

    def holds(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._blocks

    @property
    def nbytes(self) -> int:
        """Device bytes held now."""
        return sum(self.held().values())

    def held(self) -> dict[int, int]:
        """Device bytes held now, by key of the storage."""
        blocks = [block.ref for block in self._blocks.values() if block.storage is not None or block.ref.alive]
        blocks += [ref for ref in self._released if ref.alive]
        return {ref.key: ref.nbytes for ref in blocks}

    # O, D, R

    def parts(self, n: int) -> list[list[Block]]:
        """The blocks that can leave, in `n` parts of about equal bytes."""
        blocks = list(self._blocks.values())
        return [[blocks[i] for i in group] for group in balance(self.sizes(), n)]

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each block that can leave, 0 for one that stays."""
        return tuple(
            0 if i in self._shared or (b.nbytes < SMALLEST and i not in self._leaving) else b.nbytes
            for i, b in enumerate(self._blocks.values())
        )

    def offload(self, part: int, parts: int, destination: Destination) -> Sequence[Handle]:
        """O, E: starts to copy a part off the device."""
        self._parts[part] = OffloadedPart(self.parts(parts)[part], destination)
        return self._parts[part].handles

    def drop(self, part: int) -> None:
        """D: waits for the copy and frees the device memory."""
        offloaded = self._parts[part]
        offloaded.wait()
        for block in offloaded.blocks:
            block.storage = None

    def reload(self, part: int) -> Sequence[Handle]:
        """R, L: allocates device memory and starts to copy the part back. `restore` waits for it."""
        offloaded = self._parts[part]
        targets = [torch.empty(block.nbytes, dtype=torch.uint8, device=self._device) for block in offloaded.blocks]
        offloaded.returning = [target.untyped_storage() for target in targets]
        for block, storage in zip(offloaded.blocks, offloaded.returning, strict=True):
            block.ref = StorageRef(storage)
        offloaded.handles = offloaded.destination.bring_back(targets)
        return offloaded.handles

    def restore(self) -> None:
        """Before the backward or a recompute: waits for the reloads."""
        self.wait()
        for part in self._parts.values():
            # Nothing returns if the reload is missing; the backward then raises `OffloadedError`.
            for block, storage in zip(part.blocks, part.returning, strict=False):
                block.storage = storage
            part.destination.release()
        self._parts.clear()

    def wait(self) -> None:
        for part in self._parts.values():
            part.wait()

    def give_up(self) -> None:
        """Drops all blocks that can leave, of which there is no copy."""
        for block in self.parts(1)[0]:
            block.storage = None

    def shared_blocks(self) -> frozenset[int]:
        """Right after a drop: the numbers of the blocks that something else holds, so that it freed nothing."""
        blocks = enumerate(self._blocks.values())
        return frozenset(i for i, block in blocks if block.storage is None and block.ref.alive)

    def release(self) -> None:
        """When the backward or a recompute begins: what uses the blocks now owns them, and frees them."""
        self._released = [block.ref for block in self._blocks.values()]
        self._blocks.clear()


@lru_cache(maxsize=256)
def balance(sizes: tuple[int, ...], n: int) -> tuple[tuple[int, ...], ...]:
    """Divides the numbers of the non-zero sizes into `n` groups: the largest first, each to the smallest group."""
    groups: list[list[int]] = [[] for _ in range(n)]
    filled = [0] * n
    for i in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i]):
        g = filled.index(min(filled))
        groups[g].append(i)
        filled[g] += sizes[i]
    return tuple(tuple(sorted(group)) for group in groups)
