"""Levels of recomputation: what an F keeps beside its inputs where a C repeats it.

Such an F builds the graph of a plain one, which saves nothing, under `Keeping`: that holds the results of the ops that
the level keeps. C builds the graph again under `Repeating`, which returns these results in the place of calls. So C
computes the other ops alone, and leaves what a plain F saves; B and W do not know the difference.

A compiled region keeps nothing inside. Where a split backward ends it at an op, that op's result can be kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from optpipe.errors import InputError
from optpipe.model.records import MOST_LEVELS
from optpipe_runtime.memory.activation import Activation, Saved, storage_key
from optpipe_runtime.stage.io import tensors_in
from optpipe_runtime.stage.state import Restore, save_random
from optpipe_runtime.torch_private.tensors import makes_new, tree_map_only, version, written

aten = torch.ops.aten
# Whether the result of an op, such as torch.ops.aten.mm.default, is kept.
Policy = Callable[[Any], bool | CheckpointPolicy]

_PRODUCTS = {aten.mm, aten.addmm, aten._addmm_activation, aten._scaled_mm, aten._grouped_mm, aten.convolution}
_BATCHED = {aten.bmm, aten.baddbmm}  # those of an attention that is written out


def _keeps_products(op: Any) -> bool:
    return op.overloadpacket in _PRODUCTS


def _keeps_attention(op: Any) -> bool:
    return op.overloadpacket in _PRODUCTS | _BATCHED or "attention" in op.name() or "attn" in op.name()


class Level(NamedTuple):
    """`keeps` is asked about each op; None: nothing is kept but the inputs."""

    name: str
    keeps: Policy | None = None

    @classmethod
    def by_policy(cls, name: str, policy: Policy) -> Level:
        """Of what the policy wants to keep, no views, nothing that is changed in place, and no casts, which are made
        once for several micro-batches."""

        @cache
        def keeps(op: Any) -> bool:
            is_new = isinstance(op, torch._ops.OpOverload) and makes_new(op)
            return is_new and op.overloadpacket is not aten._to_copy and _is_kept(name, op, policy(op))

        return cls(name, keeps)


def _is_kept(name: str, op: Any, answer: bool | CheckpointPolicy) -> bool:
    """What a policy says of an op. Of torch's own enumeration each member is true."""
    if not isinstance(answer, CheckpointPolicy):
        return bool(answer)
    if "OFFLOAD" in answer.name:
        raise InputError(
            f"recompute has {name!r}: {answer} for {op}: a schedule offloads, a policy keeps or recomputes"
        )
    return answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


FULL = Level("full")
LEVELS = {
    "cheap": Level.by_policy("cheap", _keeps_attention),
    "selective": Level.by_policy("selective", _keeps_products),
    "full": FULL,
}


def as_levels(entries: Sequence[str | Policy]) -> dict[str, Level]:
    """By name: from the names of levels and the user's policies. Raises `InputError`."""
    if isinstance(entries, str):
        raise InputError(f"recompute = {entries!r}: must be a sequence, such as ({entries!r},)")
    if len(entries) > MOST_LEVELS:
        raise InputError(f"recompute has {len(entries)} entries: a stage has at most {MOST_LEVELS} levels")
    levels: dict[str, Level] = {}
    for entry in entries:
        if not callable(entry) and entry not in LEVELS:
            raise InputError(
                f"recompute has {entry!r}: it must be {', '.join(map(repr, LEVELS))}, or a function of an op of torch "
                "that returns whether its result is kept"
            )
        name = getattr(entry, "__name__", type(entry).__name__) if callable(entry) else entry
        if name in levels:
            raise InputError(f"recompute has {name!r} twice: each level needs a name of its own")
        levels[name] = Level.by_policy(name, entry) if callable(entry) else LEVELS[name]
    return levels


class _Result:
    """What an op returned. `saved` is None if that was changed, so that C computes it; `random` is the state after the
    op."""

    __slots__ = ("op", "random", "saved", "version")

    def __init__(self, op: Any, value: Any, device: torch.device) -> None:
        self.op, self.saved = op, value
        self.version = sum(map(version, tensors_in(value)))
        self.random: Restore | None = save_random(device) if torch.Tag.nondeterministic_seeded in op.tags else None


class _Mode(TorchDispatchMode):
    """Sees each op of torch below autograd."""

    supports_higher_order_operators = True

    def __init__(self, level: Level, stage: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._level, self._stage = level, stage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch.compile would compile nothing in this mode."""
        return True

    def _keeps(self, op: Any, kwargs: Mapping[str, Any]) -> bool:
        """A user's generator must go on as without."""
        keeps = self._level.keeps
        return keeps is not None and keeps(op) and kwargs.get("generator") is None


class Keeping(_Mode):  # type: ignore[no-untyped-call]
    """While active, holds what the level keeps."""

    def __init__(self, level: Level, stage: int, device: torch.device) -> None:
        super().__init__(level, stage)
        self._device = device
        self._results: list[_Result] = []
        self._by_storage: dict[int, _Result] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        if self._keeps(func, kwargs):
            result = _Result(func, value, self._device)
            self._results.append(result)
            self._by_storage |= {storage_key(tensor): result for tensor in tensors_in(value)}
        elif isinstance(func, torch._ops.OpOverload):
            for tensor in written(func, args, kwargs):  # also by `data`, which changes no version
                if (changed := self._by_storage.pop(storage_key(tensor), None)) is not None:
                    changed.saved = None
        return value

    def hand_over(self, activation: Activation) -> Repeating:
        """After F: all results that are as they were go into the store of the micro-batch."""
        for result in self._results:
            if sum(map(version, tensors_in(result.saved))) != result.version:
                result.saved = None
            result.saved = tree_map_only(Tensor, lambda tensor: activation.store(tensor.detach()), result.saved)
        return Repeating(self._level, self._stage, self._results)


class Repeating(_Mode):  # type: ignore[no-untyped-call]
    """While active, ops return what was kept of them in F."""

    def __init__(self, level: Level, stage: int, results: Sequence[_Result]) -> None:
        super().__init__(level, stage)
        self._results = deque(results)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._keeps(func, kwargs):
            return func(*args, **kwargs)
        result = self._results.popleft() if self._results else None
        if result is None or result.op is not func:
            raise self._differs()
        if result.saved is None:
            return func(*args, **kwargs)
        if result.random is not None:
            result.random()
        return tree_map_only(Saved, Saved.tensor, result.saved)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and self._results:
            raise self._differs()

    def _differs(self) -> InputError:
        return InputError(
            f"stage {self._stage} calls other ops when it is recomputed than in its forward, so level "
            f"{self._level.name!r} cannot take what it has kept: take level 'full'"
        )


def saving_nothing(stage: int) -> saved_tensors_hooks:
    def refuse(nothing: None) -> Tensor:
        raise InputError(f"stage {stage} takes a gradient in its forward: only level 'full' recomputes such a stage")

    return saved_tensors_hooks(lambda tensor: None, refuse)
