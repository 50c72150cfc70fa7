"""Where a B leaves the weight gradients that its W computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from optpipe_runtime.memory.store import Memory, storage_key

Gradients = Sequence[Tensor | None]
_LONGEST_CHAIN = 8  # views and casts between a parameter and the op that uses it


class WeightQueue:
    """What one stage and micro-batch left for W. `deferring`: the backward under way is a B."""

    def __init__(self) -> None:
        self.deferring = False
        self._jobs: list[tuple[Callable[[], None], Sequence[Tensor]]] = []
        self._watched: dict[int, Memory] = {}

    @contextmanager
    def filling(self) -> Iterator[None]:
        """While the stage's backward runs, one at a time in a process: autograd may run it on threads of its own.
        Pipelines in other threads wait."""
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
        """A tensor that somebody else may keep until W."""
        self._watched[storage_key(tensor)] = Memory(tensor.untyped_storage())

    def held(self) -> dict[int, int]:
        """Bytes of the storages that live until W, by key."""
        storages = (tensor.untyped_storage() for _, holds in self._jobs for tensor in holds)
        found = {int(storage._cdata): storage.nbytes() for storage in storages}
        return found | {key: memory.nbytes for key, memory in self._watched.items() if memory.alive}

    @torch.no_grad()
    def run(self) -> None:
        """W: does what is queued, and lets go of what each job needed as soon as it is done."""
        jobs = self._jobs[::-1]
        self._jobs = []
        while jobs:
            job, _ = jobs.pop()
            job()


_filling: WeightQueue | None = None
_one_at_a_time = Lock()


def filling() -> WeightQueue | None:
    """The queue of the backward under way, B or BW; None outside a pipeline."""
    return _filling


def weight_grads(parameters: Sequence[Tensor], compute: Callable[[], Gradients], *holds: Tensor) -> Gradients:
    """What the backward of a `torch.autograd.Function` returns for the parameters that it got: in a B None for each,
    otherwise `compute()`.

    `compute` returns their gradients, in order, or None; W calls it and adds them to `.grad`. `holds`
    are the tensors, saved or computed, that it needs for that: they count as held until then. For an own linear layer,
    without bias:

        def backward(ctx, dy):
            (x,), weight = ctx.saved_tensors, ctx.weight
            return dy @ weight, *weight_grads((weight,), lambda: (dy.flatten(0, -2).t() @ x.flatten(0, -2),), x, dy)

    Take the parameter from an attribute of `ctx`: one unpacked from `saved_tensors` may be an alias, whose `.grad`
    would be lost.
    """
    queue = _filling
    if queue is None or not queue.deferring or not all(can_wait(parameter) for parameter in parameters):
        return compute()
    queue.push(lambda: accumulate(parameters, compute(), holds), holds)
    return (None,) * len(parameters)


def accumulate(parameters: Sequence[Tensor], gradients: Gradients, others: Sequence[Tensor] = ()) -> None:
    """Adds to `.grad` what autograd would add; for a leaf without autograd, which takes longer than the sum. No
    gradient keeps the memory of `others`."""
    for parameter, grad in zip(parameters, gradients, strict=True):
        if grad is None:
            continue
        if not parameter.is_leaf:
            torch.autograd.backward(parameter, grad)
        elif parameter.grad is None:
            parameter.grad = _apart(grad.to(parameter.dtype), others)
            others = (*others, parameter.grad)
        else:
            parameter.grad += grad


def _apart(grad: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Itself, where the next one may be added to it in place: not an output's gradient, which others have, nor one that
    is expanded."""
    if not plain(grad):
        return grad
    key, nbytes = storage_key(grad), grad.untyped_storage().nbytes()
    alone = nbytes == grad.nbytes and all(storage_key(other) != key for other in others if plain(other))
    return grad if alone else grad.clone(memory_format=torch.contiguous_format)


def accumulated(parameter: Tensor) -> tuple[int, int]:
    """What tells whether a gradient has been added since."""
    return (0, 0) if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


def can_wait(weight: Tensor) -> bool:
    """Whether the gradient may come later: of a parameter, or of one seen through views and casts, whose backward needs
    nothing saved.

    What is computed of parameters otherwise, as by weight norm, has a graph that can be walked once only; something
    else may do so at B. Where a parameter has hooks they are called at B, so its gradient has to be there.
    """
    if not weight.requires_grad:
        return False
    leaf, node = weight if weight.is_leaf else None, weight.grad_fn
    for _ in range(_LONGEST_CHAIN):
        if leaf is not None:
            return type(leaf) is nn.Parameter and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks
        if node is None or _saves(type(node)) or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
        leaf = getattr(node, "variable", None)
    return False


def plain(tensor: Tensor) -> bool:
    """Whether it is numbers in one storage: not a tensor of several, of a mesh or of a user's kind, whose ops are their
    own affair."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


_SAVES: dict[type, bool] = {}


def _saves(kind: type[Any]) -> bool:
    """Whether nodes of this kind have saved tensors; of those in Python nobody knows."""
    if kind not in _SAVES:
        _SAVES[kind] = issubclass(kind, BackwardCFunction) or any(name.startswith("_raw_saved_") for name in dir(kind))
    return _SAVES[kind]


def own(y: Tensor) -> Tensor:
    """The result of an autograd function: a view, as y may be, could not be changed in place by what follows."""
    result: Tensor = y if y._base is None else torch.ops.aten._unsafe_view.default(y, y.shape)
    return result
