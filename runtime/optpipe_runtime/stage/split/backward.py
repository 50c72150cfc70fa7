"""`SplitBackward`: what the forwards and backwards of one stage run in, so that a B leaves weight gradients to its
W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from optpipe.model.ops import Kind
from optpipe_runtime.stage.split.calls import Calls
from optpipe_runtime.stage.split.layers import Casts
from optpipe_runtime.stage.split.mode import Note, Splitting
from optpipe_runtime.stage.split.modules import Delayed, delaying
from optpipe_runtime.stage.split.queue import WeightQueue, accumulated, added_at_once, main_grad

_NOTHING: AbstractContextManager[object] = nullcontext()


class SplitBackward:
    """Of one stage.

    Attributes
    ----------
    calls
        The modules and functions that `learn` has seen called; None before.
    at_b
        The names of the parameters whose gradient does not wait for W; None before the first B.
    norms_wait
        Whether norms leave their weight gradients to W.
    whole
        Whether compiled regions must not end at ops that could be split.
    noting
        Is told every call of torch, while `learn` runs.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        named_parameters: Callable[[], Mapping[str, nn.Parameter]],
        device: torch.device,
    ) -> None:
        self._named_parameters, self._device = named_parameters, device
        self._delayed, self._casts = Delayed(delaying(modules)), Casts()
        self.calls: Calls | None = None
        self.at_b: frozenset[str] | None = None
        self.norms_wait, self.whole = True, False
        self.noting: Note | None = None

    def learn_anew(self, module: nn.Module) -> None:
        """Forgets what was learned of the stage's module."""
        self.calls, self.at_b, self.norms_wait, self.whole = Calls(module), None, True, False

    @contextmanager
    def splitting(self, backward: Kind | None, as_torch: bool) -> Iterator[None]:
        """Around the user's forwards, and around backwards, which may run forwards again: lets ops leave their weight
        gradients to W, by hooks on modules where these will do, else by a mode, which sees every call. `backward` is
        the op that will come, if that is known; `as_torch` tells that torch's own graph is as small for a BW."""
        needs_mode, hooked = True, _NOTHING
        if backward == Kind.BW:
            needs_mode = not as_torch
        elif backward == Kind.B and self.calls is not None and not self.calls.computes_gradients:
            needs_mode, hooked = self.calls.need_mode(self.norms_wait), self.calls.hooked(self.norms_wait, self.mode)
        with self.mode() if needs_mode else _NOTHING, hooked, self._delayed.watched():
            yield

    def mode(self) -> Splitting:
        return Splitting(self.norms_wait, self._casts, self.noting, self.whole)

    def noting_at_b(self) -> AbstractContextManager[object]:
        """Around the first B: finds `at_b`, the parameters to whose gradients something is added in this context."""
        return self._find_at_b() if self.at_b is None else _NOTHING

    @contextmanager
    def _find_at_b(self) -> Iterator[None]:
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

    @property
    def cast_bytes(self) -> int:
        """What casts of parameters took in the last step, under autocast."""
        return self._casts.nbytes

    def end_step(self) -> None:
        self._casts.clear()

    def abandon(self) -> None:
        """After a step that was given up: drops what modules still keep for W."""
        self._delayed.drain()
