"""Where a B leaves the weight gradients that its W computes: `WeightQueue`; `Delayed` for modules that keep them in a
queue of their own, as TransformerEngine's do with `delay_wgrad_compute=True`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe_runtime.memory.activation import StorageRef, storage_key
from optpipe_runtime.torch_private.tensors import (
    AsyncCollectiveTensor,
    has_hooks,
    local,
    saves_tensors,
    storage_id,
    version,
)

Gradients = Sequence[Tensor | None]
_LONGEST_CHAIN = 8  # views and casts between a parameter and the op that uses it


class WeightQueue:
    """What one stage and micro-batch left to W. `deferring`: the backward under way is a B."""

    def __init__(self) -> None:
        self.deferring = False
        self._jobs: list[tuple[Callable[[], None], Sequence[Tensor]]] = []
        self._watched: dict[int, StorageRef] = {}

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Wraps the stage's backward. Only one runs at a time in a process, because autograd may run it on threads of
        its own; pipelines in other threads wait."""
        global _filling
        with _one_at_a_time:
            _filling = self
            try:
                yield
            finally:
                _filling = None

    def push(self, job: Callable[[], None], holds: Sequence[Tensor] = ()) -> None:
        """`job` adds gradients to their parameters; `holds` are the tensors that it keeps until then."""
        self._jobs.append((job, holds))

    def watch(self, tensor: Tensor) -> None:
        """Counts a tensor that a module may keep until W."""
        self._watched[storage_key(tensor)] = StorageRef(local(tensor).untyped_storage())

    def held(self) -> dict[int, int]:
        """Bytes of the storages that live until W, by key."""
        storages = (local(tensor).untyped_storage() for _, holds in self._jobs for tensor in holds)
        queued = {storage_id(storage): storage.nbytes() for storage in storages}
        return queued | {key: ref.nbytes for key, ref in self._watched.items() if ref.alive}

    @torch.no_grad()
    def run(self) -> None:
        """W: does what is queued, and frees what each job needed as soon as it is done."""
        jobs = self._jobs[::-1]
        self._jobs = []
        while jobs:
            job, _ = jobs.pop()
            job()


_filling: WeightQueue | None = None
_one_at_a_time = Lock()


def filling() -> WeightQueue | None:
    """The queue of the backward under way, B or BW; None outside of a stage's backward."""
    return _filling


def weight_grads(parameters: Sequence[Tensor], compute: Callable[[], Gradients], *holds: Tensor) -> Gradients:
    """Leaves the weight gradients of your own `torch.autograd.Function` to W.

    Return its result from the function's backward, for the parameters:

        def backward(ctx, dy):
            (x,), weight = ctx.saved_tensors, ctx.weight
            return dy @ weight, *weight_grads((weight,), lambda: (dy.flatten(0, -2).t() @ x.flatten(0, -2),), x, dy)

    Parameters
    ----------
    parameters
        The parameters that the function got. Take each from an attribute of `ctx`: one unpacked from `saved_tensors`
        may be an alias, whose `.grad` would be lost.
    compute
        Returns their gradients in the same order, each a tensor or None. W calls it and adds them to `.grad`, or to a
        parameter's `main_grad`.
    holds
        The tensors, saved or computed, that `compute` needs. They count as held until W.

    Returns
    -------
    Sequence[Tensor | None]
        None for each parameter in a B; elsewhere, in a BW or without a pipeline, `compute()`.
    """
    queue = _filling
    if queue is None or not queue.deferring or not all(can_wait(parameter) for parameter in parameters):
        return compute()
    queue.push(lambda: accumulate(parameters, compute(), holds), holds)
    return (None,) * len(parameters)


def accumulate(parameters: Sequence[Tensor], gradients: Gradients, others: Sequence[Tensor] = ()) -> None:
    """Adds to `.grad` what autograd would add, or to the parameter's `main_grad`. For a leaf it does so without
    autograd, whose overhead is larger than the sum. No gradient shares memory with `others`."""
    for parameter, grad in zip(parameters, gradients, strict=True):
        if grad is None:
            continue
        if not parameter.is_leaf:
            torch.autograd.backward(parameter, grad)
        elif (buffer := main_grad(parameter)) is not None:
            buffer.add_(grad)
        elif parameter.grad is None:
            parameter.grad = _unshared(grad.to(parameter.grad_dtype), others)
            others = (*others, parameter.grad)
        else:
            parameter.grad += grad


def main_grad(parameter: Tensor) -> Tensor | None:
    """The buffer in which Megatron sums a parameter's gradients, in a type of its own: its hooks add what autograd has
    put into `.grad`, and clear that."""
    return getattr(parameter, "main_grad", None)


def _unshared(grad: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The gradient itself if the next one may be added to it in place; else a copy, as something else may hold it."""
    part = local(grad)
    if not plain(part):
        return grad
    fills_storage = part.untyped_storage().nbytes() == part.nbytes
    is_shared = any(storage_key(other) == storage_key(part) for other in others if plain(local(other)))
    return grad if fills_storage and not is_shared else grad.clone(memory_format=torch.contiguous_format)


def accumulated(parameter: Tensor) -> tuple[int, int]:
    """Changes whenever a gradient is added."""
    return (0, 0) if parameter.grad is None else (id(parameter.grad), version(parameter.grad))


def can_wait(weight: Tensor) -> bool:
    """Whether the gradient may come at W: that of a parameter, or of views and casts of one, or one plus a constant,
    whose backward needs nothing saved.

    A weight that is computed from parameters otherwise, as by weight norm, has a graph that can be walked only once,
    and something else may walk it at B. A parameter's hooks are called at B, so its gradient must be there then.
    """
    if not weight.requires_grad:
        return False
    leaf, node = weight if weight.is_leaf else None, weight.grad_fn
    for _ in range(_LONGEST_CHAIN):
        if leaf is not None:
            is_parameter = type(leaf) in (nn.Parameter, DTensor) and isinstance(leaf, nn.Parameter)
            return is_parameter and not has_hooks(leaf)
        if node is None or saves_tensors(type(node)):
            return False
        after = [n for n, _ in node.next_functions if n is not None]
        if len(after) != 1:
            return False
        node = after[0]
        leaf = getattr(node, "variable", None)
    return False


def plain(tensor: Tensor) -> bool:
    """Whether a tensor is numbers in one storage: not nested, not of a device mesh, and of no subclass with ops of its
    own. The result of a collective is, once it is there."""
    kinds = Tensor, nn.Parameter, AsyncCollectiveTensor
    return type(tensor) in kinds and tensor.layout is torch.strided and not tensor.is_nested


class Delayed:
    """The modules of a stage that delay weight gradients. While `watched`, what they leave behind in a B is queued for
    its W: each `backward_dw()` computes the weight gradients of one backward, the oldest first. If the Ws of two
    micro-batches come in another order than their Bs, a W does the other's work: equally much, and the sum is the same.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        any_modules: list[Any] = [part for part in modules if hasattr(part, "need_backward_dw")]
        self._modules: list[nn.Module] = [part for part in any_modules if part.need_backward_dw()]
        self._pending: Counter[nn.Module] = Counter()  # backwards whose weight gradients are still to be computed
        self._at_b: set[Tensor] = set()  # their parameters whose gradient autograd adds at B nevertheless

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Wraps the stage's forwards, and its backwards, because a checkpoint runs forwards in a backward."""
        handles = [module.register_forward_hook(self._watch) for module in self._modules]
        before = {parameter: accumulated(parameter) for module in self._modules for parameter in module.parameters()}
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._at_b |= {parameter for parameter, state in before.items() if accumulated(parameter) != state}

    def drain(self) -> None:
        """After a step that was abandoned: computes and drops what the modules still keep."""
        for module in self._modules:
            while self._pending[module]:
                self._oldest(module)

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) else output
        node = getattr(first, "grad_fn", None)
        if node is not None and any(parameter.requires_grad for parameter in module.parameters()):
            node.register_prehook(partial(self._ran, module))

    def _ran(self, module: nn.Module, gradients: Sequence[Tensor | None]) -> None:
        queue = filling()
        if queue is None:
            return
        for gradient in gradients:
            if gradient is not None:
                # The module may keep it. It may also keep its input, which the stage's activation counts.
                queue.watch(gradient)
        self._pending[module] += 1
        queue.push(lambda: accumulate(*self._oldest(module)))

    def _oldest(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor | None]]:
        """The gradients of its oldest backward, with `.grad` put aside, which TransformerEngine sets."""
        self._pending[module] -= 1
        aside = {parameter: parameter.grad for parameter in module.parameters() if parameter not in self._at_b}
        for parameter in aside:
            parameter.grad = None
        module.backward_dw()  # type: ignore[operator]
        gradients = [parameter.grad for parameter in aside]
        for parameter, before in aside.items():
            parameter.grad = before
        return list(aside), gradients
