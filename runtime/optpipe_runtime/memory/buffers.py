"""The buffers of a stage: forwards may write into them, or put other tensors in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

Place = tuple[nn.Module, str]  # the module that has the buffer itself, and its name there


def places(module: nn.Module) -> list[Place]:
    return [(part, name) for part in module.modules() for name in part._buffers]


def keep(chosen: Iterable[Place]) -> Callable[[], None]:
    """Notes what is in these places. Returns what puts it back: the same tensors, with the values that they had."""
    then = [
        (part, name, buffer, None if buffer is None else buffer.clone())
        for part, name in chosen
        for buffer in [part._buffers[name]]
    ]

    def put_back() -> None:
        for part, name, buffer, value in then:
            part._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.data.copy_(
                    value
                )  # not seen by autograd: graphs that have saved the tensor stay good, it gets back what they saw

    return put_back


def watch(module: nn.Module) -> Callable[[], list[Place]]:
    """Returns what tells which buffers belong to modules that have changed one since: by another value, by writing the
    same, or by another tensor."""
    then = {place: (buffer, _version(buffer)) for place in places(module) for buffer in [place[0]._buffers[place[1]]]}
    values = {place: buffer.clone() for place, (buffer, _) in then.items() if buffer is not None}

    def same(place: Place) -> bool:
        buffer = place[0]._buffers[place[1]]
        before, version = then.get(place, (None, -1))
        if buffer is not before or _version(buffer) != version:
            return False
        return buffer is None or bool(buffer.equal(values[place]))  # what is written by `data` has the same version

    def changed() -> list[Place]:
        own = [[(part, name) for name in part._buffers] for part in module.modules()]
        return [place for part in own if not all(map(same, part)) for place in part]

    return changed


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None else buffer._version
