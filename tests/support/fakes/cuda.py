"""CUDA's rules about what happens before what, without a GPU: streams and events are vector clocks, and every access
that torch makes is checked. Work runs at once, on the CPU; what is simulated is whether anything ordered it.

Two accesses to the same bytes, one of them a write, race unless the first happens before the second: on one stream in
the order of the host, from one stream to another through an event that was waited for. The caching allocator hands out
and takes back memory in the order of the host, for the stream that computes: so an allocation counts as a write by that
stream, and so does a storage's end, since whoever computes next may be given its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optpipe_runtime.memory.engines import StreamEngine
from support.ranks import cases

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = (2, cases.LENGTH, cases.WIDTH)


class Stream:
    """`clock`: for each stream, by id, how many of its accesses happen before what comes next here. No host can wait
    for it: none may."""

    def __init__(self, device: Any = None) -> None:
        self.clock: dict[int, int] = {}

    def wait_event(self, event: Event) -> None:
        for stream, count in event.clock.items():
            self.clock[stream] = max(count, self.clock.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: dict[int, int] = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)


class Access(NamedTuple):
    begin: int
    end: int
    stream: Stream
    count: int
    write: bool
    what: str


class Races(TorchDispatchMode):
    """A context in which `torch.cuda` has these streams, and `found` says what raced."""

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__()
        self.found: list[str] = []
        self._compute = self._current = Stream()
        self._storages: dict[int, tuple[StorageWeakRef, list[Access]]] = {}
        for name, fake in {
            "Stream": Stream,
            "Event": Event,
            "stream": self._on,
            "current_stream": lambda device: self._current,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._bury()
        made = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        named = [(argument.alias_info, value) for argument, value in zip(func._schema.arguments, args, strict=False)]
        looks = any(
            one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns
        )  # a view of an argument
        if not looks and not name.startswith("set_"):
            written = [t for alias, value in named if alias is not None and alias.is_write for t in _tensors(value)]
            for tensor in _tensors((args, kwargs)):
                self._access(tensor, self._current, any(tensor is one for one in written), name)
            for tensor in _tensors(made):
                if tensor.untyped_storage()._cdata not in self._storages:
                    self._access(tensor, self._compute, True, "its allocation")
                if not name.startswith("empty"):
                    self._access(tensor, self._current, True, name)
        return made

    def _access(self, tensor: Tensor, stream: Stream, write: bool, what: str) -> None:
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), []))
        whole = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        span = (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) if tensor.is_contiguous() else whole
        self._note(storage._cdata, *span, stream, write, what)

    def _note(self, key: int, begin: int, end: int, stream: Stream, write: bool, what: str) -> None:
        accesses = self._storages[key][1]
        for one in accesses:
            ordered = stream.clock.get(id(one.stream), 0) >= one.count
            if not ordered and (write or one.write) and begin < one.end and one.begin < end:
                self.found.append(f"{what} and {one.what}")
        stream.clock[id(stream)] = stream.clock.get(id(stream), 0) + 1
        accesses.append(Access(begin, end, stream, stream.clock[id(stream)], write, what))

    def _bury(self) -> None:
        """Storages that have ended, by now."""
        for key in [key for key, (memory, _) in self._storages.items() if memory.expired()]:
            self._note(key, 0, sys.maxsize, self._compute, True, "its end")
            del self._storages[key]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Unordered(StreamEngine):
    """Copies begin whenever they like."""

    def run(self, work: Any) -> Any:
        self._stream.wait_stream = lambda other: None  # type: ignore[method-assign]
        return super().run(work)
