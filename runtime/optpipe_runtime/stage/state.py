"""What forwards change beside gradients: buffers, tensors and numbers that modules keep as attributes, and random
numbers. Any micro-batch may be the first to change one, so all of them are saved."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optpipe_runtime.torch_private.tensors import buffers_of, local, version

# A larger tensor is not copied again while it has not changed. To find that out, a GPU's host waits.
SMALL_BYTES = 64 * 2**10
MOST_ENTRIES = 64  # of a container whose contents are saved, too
CONTAINERS = (list, dict, deque, OrderedDict, defaultdict, Counter)
MISSING = object()

Restore = Callable[[], object]


class _Copy(NamedTuple):
    """Of a large tensor, when it had this version."""

    tensor: Tensor
    version: int
    value: Tensor

    @property
    def is_current(self) -> bool:
        """Whether the tensor has not changed since; a write by `data` does not change the version."""
        return self.version == version(self.tensor) and local(self.tensor).equal(local(self.value))


class Entry(NamedTuple):
    """One attribute, buffer, or entry of a container: where it is, what it was, and its contents: of a tensor a
    copy, of a container its entries, None for what cannot change."""

    place: Any
    name: Any
    value: Any
    contents: Any


@contextmanager
def _standing_in(entries: Sequence[Entry]) -> Iterator[list[Tensor]]:
    """In this context the modules have copies with the values of then, so that a graph may hold them. Yields those
    copies that are tensors. Large tensors that have not changed since stay where they are."""
    stand_ins: dict[int, Any] = {}
    unchanged: list[_Copy] = []
    before = [(entry.place, entry.name, entry.place.get(entry.name, MISSING)) for entry in entries]
    try:
        for entry in entries:
            _set(entry.place, entry.name, _stand_in(entry, stand_ins, unchanged))
        yield [value for value in stand_ins.values() if isinstance(value, Tensor)]
    finally:
        for place in before:
            _set(*place)
        for copied in unchanged:
            if not copied.is_current:
                # Not by `data`: if the graph has saved the tensor, its backward fails and does not use this value.
                with torch.no_grad():
                    copied.tensor.copy_(copied.value)


def _put_back(entries: Sequence[Entry]) -> None:
    """The same objects with the same values."""
    for place, name, value, contents in entries:
        _set(place, name, value)
        if contents is None:
            continue
        if type(value) in CONTAINERS:
            value.clear()
            if not isinstance(value, dict):
                value.extend(entry.value for entry in contents)
            _put_back(contents)
        elif isinstance(contents, torch.Generator):
            value.set_state(contents.get_state())
        else:
            # By `data`, which autograd does not see: a graph that has saved the tensor gets back what it saved.
            value.data.copy_(contents.value if isinstance(contents, _Copy) else contents)


def _stand_in(entry: Entry, stand_ins: dict[int, Any], unchanged: list[_Copy]) -> Any:
    """What has an entry's contents of then in its place; one for each object."""
    value, contents = entry.value, entry.contents
    if contents is None:
        return value
    if isinstance(contents, _Copy) and contents.is_current:
        unchanged.append(contents)
        return value
    if id(value) not in stand_ins:
        if isinstance(contents, _Copy):
            contents = contents.value.clone()
        elif type(value) in CONTAINERS:
            contents = copy(value)
            contents.clear()
            if not isinstance(value, dict):
                contents.extend(entry.contents)
            for inner in entry.contents:
                contents[inner.name] = _stand_in(inner, stand_ins, unchanged)
        stand_ins[id(value)] = contents
    return stand_ins[id(value)]


def _set(place: Any, name: Any, value: Any) -> None:
    if value is MISSING:
        place.pop(name, None)
    else:
        place[name] = value


def save_random(device: torch.device) -> Restore:
    """Saves random numbers of torch, Python, and of numpy and Megatron if these are in use. Returns what restores
    them."""
    cpu, python = torch.get_rng_state(), random.getstate()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    numpy = sys.modules.get("numpy.random")
    of_numpy = None if numpy is None else numpy.get_state()
    megatron = getattr(sys.modules.get("megatron.core.tensor_parallel.random"), "_CUDA_RNG_STATE_TRACKER", None)
    of_megatron = {} if megatron is None else megatron.get_states()

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        if numpy is not None:
            numpy.set_state(of_numpy)
        if megatron is not None:
            megatron.set_states(dict(of_megatron))  # which it changes

    return restore


# A context in which all that forwards change is as it was at some forward; its value are the tensors that stand in.
AsFirst = Callable[[], AbstractContextManager[list[Tensor]]]


class Replay:
    """Random numbers, gradients and what else forwards change, of one stage."""

    def __init__(
        self,
        modules: Callable[[], Iterable[nn.Module]],
        parameters: Callable[[], Iterable[nn.Parameter]],
        device: torch.device,
    ) -> None:
        self._modules, self._parameters, self._device = modules, parameters, device
        self._copies: dict[int, _Copy] = {}  # of large tensors, by identity
        # Those that are there before any forward: later ones may be activations. torch's own modules change none.
        self._attributes = [
            (vars(part), name)
            for part in modules()
            if not type(part).__module__.startswith("torch.nn.modules.")
            for name, value in vars(part).items()
            if value is None or isinstance(value, Tensor | int | float | torch.Generator) or type(value) in CONTAINERS
            if name not in vars(nn.Module())
        ]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What runs in this context leaves all but gradients as it was."""
        entries, restore_random = self._save(), save_random(self._device)
        try:
            yield
        finally:
            _put_back(entries)
            restore_random()

    def as_now(self) -> AsFirst:
        """Returns a context in which random numbers, buffers and attributes are what they are now. It leaves them as it
        finds them. Its value are the tensors that stand in for others meanwhile."""
        entries, restore_random = self._save(), save_random(self._device)

        @contextmanager
        def again() -> Iterator[list[Tensor]]:
            restore_later = save_random(self._device)
            try:
                with _standing_in(entries) as stand_ins:
                    restore_random()
                    yield stand_ins
            finally:
                restore_later()

        return again

    def snapshot(self) -> Restore:
        """Saves what a step changes in the modules. Returns a function that restores it."""
        gradients = [
            (p, p.grad, None if p.grad is None else p.grad.detach().to("cpu", copy=True)) for p in self._parameters()
        ]
        entries = self._save()

        def restore() -> None:
            for parameter, gradient, value in gradients:
                parameter.grad = gradient
                if gradient is not None and value is not None:
                    gradient.detach().copy_(value)
            _put_back(entries)

        return restore

    def end_step(self) -> None:
        self._copies.clear()

    def _save(self) -> list[Entry]:
        copied: dict[int, Any] = {}  # contents by identity, because several modules may have one tensor
        places = [(table, name) for part in self._modules() for table in [buffers_of(part)] for name in table]
        values = [(*place, place[0].get(place[1], MISSING)) for place in (*places, *self._attributes)]
        return [
            Entry(table, name, value, self._contents(value, copied))
            for table, name, value in values
            # To save a tensor that a forward has left with its graph would hold all that the graph has saved.
            if not isinstance(value, Tensor) or value.grad_fn is None
        ]

    def _contents(self, value: Any, copied: dict[int, Any]) -> Any:
        if id(value) not in copied:
            if isinstance(value, Tensor):
                copied[id(value)] = self._copy(value)
            elif isinstance(value, torch.Generator):
                copied[id(value)] = value.clone_state()
            elif type(value) in CONTAINERS:
                copied[id(value)] = None  # for one that contains itself
                pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
                few = len(pairs) <= MOST_ENTRIES
                copied[id(value)] = [Entry(value, k, v, self._contents(v, copied) if few else None) for k, v in pairs]
            else:
                return None
        return copied[id(value)]

    def _copy(self, tensor: Tensor) -> Tensor | _Copy | None:
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.is_meta:
            return None  # a copy would be in no graph
        part = local(tensor)
        if part.layout is torch.strided and any(
            n > 1 and not stride for n, stride in zip(part.shape, part.stride(), strict=True)
        ):
            return None  # into an expanded tensor nothing can be written
        if tensor.nbytes <= SMALL_BYTES:
            return tensor.detach().clone()
        last = self._copies.get(id(tensor))
        if last is None or not last.is_current:
            last = self._copies[id(tensor)] = _Copy(tensor, version(tensor), tensor.detach().clone())
        return last
