"""The activation store: what one stage keeps of a micro-batch between its forward and its backward, how it leaves and
comes back.

`Activation.capture` takes every tensor that autograd saves, as blocks: one a storage, views kept as metadata. The
blocks are the only owners, so that dropping one frees its memory; a weak reference shows whether it did, and that is
also how held bytes are counted. Parameters, buffers and the batch itself are not captured: they stay anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.errors import InputError
from optpipe_runtime.memory.pool import Carrier, Ticket

SMALLEST = 4096  # bytes; below it a copy of its own costs more than it brings, such a block stays


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


class OffloadedError(RuntimeError):
    """A saved tensor was used while it is on the host: the program lacks its reload."""


class Memory:
    """A storage seen from afar: whether it still takes memory."""

    __slots__ = ("_ref", "key", "nbytes")

    def __init__(self, storage: UntypedStorage) -> None:
        self.key, self.nbytes = int(storage._cdata), storage.nbytes()
        self._ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def alive(self) -> bool:
        """Whether anybody holds it."""
        return not self._ref.expired()  # type: ignore[no-untyped-call]


class Block:
    """One captured storage; None while it is away. `memory` is the last one that was allocated for it."""

    __slots__ = ("device", "memory", "nbytes", "storage")

    def __init__(self, storage: UntypedStorage) -> None:
        self.nbytes, self.device = storage.nbytes(), storage.device
        self.storage: UntypedStorage | None = storage
        self.memory = Memory(storage)

    def view(self) -> Tensor:
        """All bytes."""
        assert self.storage is not None
        return _tensor(self.storage, torch.uint8, self.device, 0, (self.nbytes,), (1,))


class Saved:
    """A tensor that autograd saved: a view of a block. `changed`: in place, after it was saved."""

    __slots__ = ("block", "changed", "dtype", "offset", "shape", "stride")

    def __init__(self, block: Block, tensor: Tensor) -> None:
        self.block, self.dtype, self.changed = block, tensor.dtype, False
        self.offset, self.shape, self.stride = int(tensor.storage_offset()), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        if self.block.storage is None:
            raise OffloadedError(f"a saved tensor of shape {list(self.shape)} was used while it is offloaded")
        require_unchanged(self.changed, self.shape)
        return _tensor(self.block.storage, self.dtype, self.block.device, self.offset, self.shape, self.stride)


class Staying:
    """A tensor that autograd saved and that is not ours to hold."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def tensor(self) -> Tensor:
        require_unchanged(self._tensor._version != self._version, self._tensor.shape)
        return self._tensor


def require_unchanged(changed: bool, shape: Sequence[int]) -> None:
    """Autograd's own check, which it leaves out where hooks are set: the gradient would be wrong and nobody would
    know."""
    if changed:
        raise InputError(
            f"a tensor of shape {list(shape)} was changed in place after it was saved for the backward; change a "
            "copy of it"
        )


def _tensor(
    storage: UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)


def _unpack(saved: Saved | Staying) -> Tensor:
    return saved.tensor()


class Parcel:
    """The blocks of one part, on their way: who carries them, and the transfer under way."""

    def __init__(self, blocks: list[Block], carrier: Carrier) -> None:
        self.blocks, self.carrier = blocks, carrier
        self.tickets: Sequence[Ticket] = carrier.away([block.view() for block in blocks])
        self.returning: list[UntypedStorage] = []

    def wait(self) -> None:
        for ticket in self.tickets:
            ticket.wait()
        self.tickets = ()


class Activation:
    """What a stage keeps of a micro-batch. `excluded`: keys of storages not to capture; `stuck`: numbers of blocks that
    others hold."""

    def __init__(self, device: torch.device, excluded: frozenset[int], stuck: frozenset[int] = frozenset()) -> None:
        self._device, self._excluded, self._stuck = device, excluded, stuck
        self._blocks: dict[int, Block] = {}
        self._parcels: dict[int, Parcel] = {}
        self._left: list[Memory] = []  # what the graph has had since the backward began
        self._fresh: list[tuple[Saved, Tensor, int]] = []  # what this forward has saved, with its version then

    # F, C

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A context in which everything that autograd saves goes into this store."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        for saved, tensor, version in self._fresh:
            saved.changed = tensor._version != version
        self._fresh.clear()

    def _pack(self, tensor: Tensor) -> Saved | Staying:
        block = self.keep(tensor)
        if block is None:
            return Staying(tensor)
        saved = Saved(block, tensor)
        self._fresh.append((saved, tensor, tensor._version))
        return saved

    def keep(self, tensor: Tensor) -> Block | None:
        """Holds a tensor's storage; None where it is not ours to hold."""
        plain = (
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device == self._device
        )
        if not plain or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._excluded or storage.nbytes() == 0:
            return None
        if key not in self._blocks:
            self._blocks[key] = Block(storage)
        return self._blocks[key]

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is one of these blocks."""
        return storage_key(tensor) in self._blocks

    @property
    def nbytes(self) -> int:
        """Device bytes held now."""
        return sum(self.held().values())

    def held(self) -> dict[int, int]:
        """The same by storage, by its key."""
        here = [block.memory for block in self._blocks.values() if block.storage is not None or block.memory.alive]
        here += [memory for memory in self._left if memory.alive]
        return {memory.key: memory.nbytes for memory in here}

    # O, D, R

    def parts(self, n: int) -> list[list[Block]]:
        """The blocks that can leave, in `n` groups of about equal bytes."""
        blocks = list(self._blocks.values())
        return [[blocks[i] for i in group] for group in balance(self.sizes(), n)]

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each block that can leave, 0 for one that stays."""
        return tuple(
            0 if i in self._stuck or b.nbytes < SMALLEST else b.nbytes for i, b in enumerate(self._blocks.values())
        )

    def offload(self, part: int, parts: int, carrier: Carrier) -> Sequence[Ticket]:
        """O, E: starts to take a part away."""
        self._parcels[part] = Parcel(self.parts(parts)[part], carrier)
        return self._parcels[part].tickets

    def drop(self, part: int) -> None:
        """D: waits until it is there and lets the device memory go."""
        parcel = self._parcels[part]
        parcel.wait()
        for block in parcel.blocks:
            block.storage = None

    def reload(self, part: int) -> Sequence[Ticket]:
        """R, L: allocates here and starts to bring it back; `restore` waits for it."""
        parcel = self._parcels[part]
        homes = [torch.empty(block.nbytes, dtype=torch.uint8, device=self._device) for block in parcel.blocks]
        parcel.returning = [home.untyped_storage() for home in homes]
        for block, storage in zip(parcel.blocks, parcel.returning, strict=True):
            block.memory = Memory(storage)
        parcel.tickets = parcel.carrier.back(homes)
        return parcel.tickets

    def restore(self) -> None:
        """Before the backward: waits for what comes back."""
        self.wait()
        for parcel in self._parcels.values():
            for block, storage in zip(
                parcel.blocks, parcel.returning, strict=False
            ):  # nothing returns where the reload is missing
                block.storage = storage
            parcel.carrier.end()
        self._parcels.clear()

    def wait(self) -> None:
        """Waits for the transfers under way."""
        for parcel in self._parcels.values():
            parcel.wait()

    def stuck(self) -> frozenset[int]:
        """Right after a drop: the numbers of the blocks whose memory somebody else holds, so that dropping them freed
        nothing."""
        return frozenset(
            i for i, block in enumerate(self._blocks.values()) if block.storage is None and block.memory.alive
        )

    def release(self) -> None:
        """As the backward begins: from here on the graph alone owns the blocks and frees them as it goes."""
        self._left = [block.memory for block in self._blocks.values()]
        self._blocks.clear()


@lru_cache(maxsize=256)
def balance(sizes: tuple[int, ...], n: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of the non-zero sizes in `n` groups: the largest first, each to the group with the least so far."""
    groups: list[list[int]] = [[] for _ in range(n)]
    filled = [0] * n
    for i in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i]):
        g = filled.index(min(filled))
        groups[g].append(i)
        filled[g] += sizes[i]
    return tuple(tuple(sorted(group)) for group in groups)
