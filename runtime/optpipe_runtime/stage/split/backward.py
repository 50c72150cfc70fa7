"""`SplitBackward`: what the forwards and backwards of one stage run in, so that a B leaves weight gradients to its
W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from optpipe.model.ops import Kind
from optpipe_runtime.memory.saved import storage_key
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.stage.split.hooked import SCALES, Casts, Hooked, called_by
from optpipe_runtime.stage.split.mode import LINEAR, Splitting, is_norm
from optpipe_runtime.stage.split.modules import Delayed, delaying
from optpipe_runtime.stage.split.queue import WeightQueue, accumulated, added_at_once, can_wait, main_grad
from optpipe_runtime.torch_private.modules import is_compiled, parameters_of

_NOTHING: AbstractContextManager[object] = nullcontext()


class Calls:
    """Which calls of torch a stage makes with weights, filled in by `note`.

    Attributes
    ----------
    modules
        Those whose forward can be replaced, in the order of their first calls.
    scaling
        Those that end in a product with their weight.
    takes_gradients
        Whether the stage's forward itself takes gradients. It would not get those of detached weights, so then nothing
        is split.
    """

    def __init__(self, module: nn.Module) -> None:
        self.takes_gradients = False
        self.modules: dict[nn.Module, None] = {}
        self.scaling: dict[nn.Module, None] = {}
        self._other_weights = False  # whether there are calls with weights outside of these modules
        self._other_norms = False  # the same for weights that wait only where those of norms do
        self._input_bytes: dict[int, int] = {}  # by storage
        self._output_bytes = 0
        self._by_weight = {
            id(parameters_of(part)["weight"]): part
            for part in _not_compiled(module)
            if "forward" not in vars(part) and "weight" in parameters_of(part)
        }

    @property
    def would_hold(self) -> int:
        """An upper bound on the bytes that a B leaves to W: inputs of calls, each counted once, and the gradients of
        their outputs."""
        return self._output_bytes + sum(self._input_bytes.values())

    @contextmanager
    def noting(self, whole: bool) -> Iterator[None]:
        """Around a forward, in which nothing is split."""
        with saved_tensors_hooks(lambda saved: saved, self._unpack), Splitting(note=self.note, whole=whole):
            yield

    def _unpack(self, saved: Tensor) -> Tensor:
        self.takes_gradients = True
        return saved

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """Takes one call of a function that may be split."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        weights = [tensor for tensor in tensors if can_wait(tensor)]
        if not weights:
            return
        self._output_bytes += local(result).nbytes
        for tensor in tensors:
            if tensor.requires_grad and all(tensor is not weight for weight in weights):
                nbytes = local(tensor).numel() * (result if func in LINEAR else tensor).itemsize  # autocast
                self._input_bytes[storage_key(tensor)] = nbytes
        module = self._by_weight.get(id(weights[0]))
        if module is not None and called_by(module) is func:
            self.modules[module] = None
        elif module is not None and func in SCALES and called_by(module) is None:
            self.scaling[module] = None
        elif is_norm(func):
            self._other_norms = True
        else:
            self._other_weights = True

    def need_mode(self, norms: bool) -> bool:
        """Whether there are calls that only the mode splits. `norms`: also those of norms are split."""
        return self._other_weights or (norms and self._other_norms)


def _not_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules that are not part of a compiled one: a region would be compiled again for another forward."""
    if not is_compiled(module):
        yield module
        for part in module.children():
            yield from _not_compiled(part)


class SplitBackward:
    """Of one stage.

    Attributes
    ----------
    calls
        What `learn` has seen called; None before.
    at_b
        The names of the parameters whose gradient does not wait for W; None before the first B.
    norms_wait
        Whether norms leave their weight gradients to W.
    whole
        Whether compiled regions must not end at ops that could be split.
    casts
        Of parameters, under autocast.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        named_parameters: Callable[[], Mapping[str, nn.Parameter]],
        device: torch.device,
    ) -> None:
        self._named_parameters, self._device = named_parameters, device
        self._delayed, self.casts = Delayed(delaying(modules)), Casts()
        self.calls: Calls | None = None
        self.at_b: frozenset[str] | None = None
        self.norms_wait, self.whole = True, False

    def learn_anew(self, module: nn.Module) -> None:
        """Forgets what was learned of the stage's module."""
        self.calls, self.at_b, self.norms_wait, self.whole = Calls(module), None, True, False

    @contextmanager
    def splitting(self, backward: Kind | None, as_torch: bool) -> Iterator[None]:
        """Around the user's forwards, and around backwards, which may run forwards again: lets ops leave their weight
        gradients to W, by hooks on modules where these will do, else by a mode, which sees every call. `backward` is
        the op that will come, if that is known; `as_torch` tells that torch's own graph is as small for a BW."""
        calls = self.calls
        if calls is None or calls.takes_gradients or (backward == Kind.BW and as_torch):
            splitting = _NOTHING
        elif backward == Kind.B and not calls.need_mode(self.norms_wait):
            norms = nn.LayerNorm, nn.RMSNorm
            modules = [part for part in calls.modules if self.norms_wait or not isinstance(part, norms)]
            splitting = Hooked(modules, calls.scaling if self.norms_wait else (), self.mode().run)
        else:
            splitting = self.mode()
        with splitting, self._delayed.watched():
            yield

    def mode(self) -> Splitting:
        return Splitting(self.norms_wait, self.casts, whole=self.whole)

    @contextmanager
    def finding_at_b(self) -> Iterator[None]:
        """Around the first B: finds `at_b`, the parameters to whose gradients something is added in this context."""
        parameters = self._named_parameters()
        before = {name: accumulated(parameter) for name, parameter in parameters.items()}
        in_buffers = {name: parameter for name, parameter in parameters.items() if main_grad(parameter) is not None}
        with added_at_once(in_buffers) as added:
            yield
        changed = {name for name, parameter in parameters.items() if accumulated(parameter) != before[name]}
        self.at_b = frozenset(added | changed)

    def run(self, queue: WeightQueue) -> None:
        """What B has left to W."""
        with self.without_autocast():
            queue.run()

    def without_autocast(self) -> AbstractContextManager[None]:
        """A backward computes in the types of its forward, so autocast around a whole step must not reach it."""
        kind = self._device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    def end_step(self) -> None:
        self.casts.clear()

    def abandon(self) -> None:
        """After a step that was given up: drops what modules still keep for W."""
        self._delayed.drain()
