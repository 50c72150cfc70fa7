"""The buffers of a stage: forwards may write into them, or put other tensors in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from optpipe_runtime.torch_private.modules import buffers_of
from optpipe_runtime.torch_private.tensors import version

Buffer = tuple[nn.Module, str]  # the module that has the buffer itself, and its name there


def all_buffers(module: nn.Module) -> list[Buffer]:
    return [(part, name) for part in module.modules() for name in buffers_of(part)]


def save(chosen: Iterable[Buffer]) -> Callable[[], None]:
    """Saves these buffers. Returns a function that restores the same tensors with the same values."""
    saved = [
        (part, name, buffer, None if buffer is None else buffer.clone())
        for part, name in chosen
        for buffer in [buffers_of(part)[name]]
    ]

    def restore() -> None:
        for part, name, buffer, value in saved:
            buffers_of(part)[name] = buffer
            if buffer is not None and value is not None:
                # By `data`, which autograd does not see: a graph that has saved the tensor gets back what it saved.
                buffer.data.copy_(value)

    return restore


def watch(module: nn.Module) -> Callable[[], list[Buffer]]:
    """Returns a function that tells which buffers belong to modules that have changed one since now: by another value,
    by writing the same value, or by another tensor."""
    before = {at: (buffer, _version(buffer)) for at in all_buffers(module) for buffer in [buffers_of(at[0])[at[1]]]}
    values = {at: buffer.clone() for at, (buffer, _) in before.items() if buffer is not None}

    def same(at: Buffer) -> bool:
        buffer = buffers_of(at[0])[at[1]]
        old, was = before.get(at, (None, -1))
        if buffer is not old or _version(buffer) != was:
            return False
        return buffer is None or bool(buffer.equal(values[at]))  # a write by `data` does not change the version

    def changed() -> list[Buffer]:
        by_module = [[(part, name) for name in buffers_of(part)] for part in module.modules()]
        return [at for own in by_module if not all(map(same, own)) for at in own]

    return changed


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None else version(buffer)
