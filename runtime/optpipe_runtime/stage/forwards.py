"""`Forwards`: the forwards of one stage: F, the C that repeats an F, and what keeps nothing.

An F that a C repeats keeps its inputs, and the results of the ops that its level keeps (`levels`). C runs with the
random numbers, buffers and attributes of the first time (`replay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from optpipe.errors import InputError
from optpipe_runtime.memory.activation import EVERY, Activation
from optpipe_runtime.memory.saved import Saved
from optpipe_runtime.memory.storage import storage_key
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.stage.entrance import enter
from optpipe_runtime.stage.io import LossFn, StageIO, Tensors, as_tensors, clones
from optpipe_runtime.stage.levels import Keeping, Level, saving_nothing
from optpipe_runtime.stage.replay import AsFirst, Replay
from optpipe_runtime.stage.running import Given, Running
from optpipe_runtime.stage.split import SplitBackward
from optpipe_runtime.torch_private.trees import tree_map_only

_NOTHING: AbstractContextManager[object] = nullcontext()


class Forwards:
    """Of one stage.

    Attributes
    ----------
    excluded
        Keys of storages that are no activations.
    results
        What the module returned where the route ends, by micro-batch, if that is to be kept; else None.
    sizes
        By level, "" for a whole activation: bytes of the last one's blocks, 0 for a block that stays.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        loss_fn: LossFn | None,
        split: SplitBackward,
        replay: Replay,
    ) -> None:
        self._index, self._module, self._device, self._loss_fn = index, module, device, loss_fn
        self._split, self._replay = split, replay
        self.excluded: set[int] = set()
        self.results: dict[int, Any] | None = None
        self.sizes: dict[str, tuple[int, ...]] = {}

    def new_activation(self, io: StageIO, staying: Sequence[Tensor] = ()) -> Activation:
        excluded = self.excluded | set(map(storage_key, staying)) if staying else self.excluded
        return Activation(self._device, excluded, io.shared_blocks, io.large_elsewhere)

    def new_checkpoint(self) -> Activation:
        """All of it leaves, so that bytes follow from lengths."""
        return Activation(self._device, self.excluded, leaving=EVERY)

    def outputs(self, io: StageIO, given: Given, microbatch: int | None = None) -> Tensors:
        """What the module returns, or the loss where the route ends."""
        result = self._module(*given.inputs, **given.kwargs)
        if io.ends:
            assert self._loss_fn is not None
            if self.results is not None and microbatch is not None:
                self.results[microbatch] = tree_map_only(Tensor, Tensor.detach, result)
            result = self._loss_fn(result, *given.target)
            if not isinstance(result, Tensor) or result.numel() != 1:
                raise InputError("loss_fn must return a tensor with one number, the loss of a micro-batch")
        return as_tensors(result, f"stage {self._index}")

    @torch.no_grad()
    def evaluate(self, io: StageIO, microbatch: int, given: Given) -> Tensors:
        """F without a backward to follow: keeps nothing."""
        outputs = self.outputs(io, given, microbatch)
        return self._detached(Running(io, self.new_activation(io)), outputs)

    def run(
        self, running: Running, microbatch: int, given: Given, mode: AbstractContextManager[object] = _NOTHING
    ) -> Tensors:
        """An F or a C that keeps what autograd saves."""
        io = running.io
        with running.activation.capture() if running.captured else nullcontext():
            outputs = self._with_graph(running, microbatch, given, mode)
        if any(out.requires_grad and not spec.requires_grad for out, spec in zip(outputs, io.outputs, strict=False)):
            raise InputError(
                f"stage {self._index} needs a gradient that it did not need at the start: unfreeze first, then "
                "make the Pipeline"
            )
        running.edges = {k: get_gradient_edge(outputs[k]) for k in io.needed if outputs[k].requires_grad}
        if running.captured:
            self.sizes[""] = running.activation.sizes()
            self._own_results(running, microbatch)
        return self._detached(running, outputs)

    def run_to_repeat(self, running: Running, microbatch: int, given: Given, level: Level) -> Tensors:
        """An F that a C repeats: keeps the inputs, and the results that the level keeps."""
        io, activation = running.io, running.activation
        stored = given._replace(inputs=tree_map_only(Tensor, activation.store, given.inputs))
        as_first = self._replay.as_now()
        # What the forward changes in place must be for C as it is now.
        used = Given(*clones((given.inputs, given.target, dict(given.kwargs)))) if io.changes_inputs else given
        repeating: AbstractContextManager[object] = _NOTHING
        if level.keeps is None:
            with torch.no_grad(), self._split.splitting(None, as_torch=False):
                outputs = self.outputs(io, used, microbatch)
        else:  # torch chooses some kernels by whether there is a graph
            keeping = Keeping(level, self._index, self._device)
            with saving_nothing(self._index):
                outputs = self._with_graph(running, microbatch, used, keeping)
            repeating = keeping.hand_over(activation)
        running.again = partial(self._repeat, running, microbatch, stored, as_first, repeating, running.captured)
        running.captured = True
        self.sizes[level.name] = activation.sizes()
        self._own_results(running, microbatch)
        return self._detached(running, outputs)

    def _repeat(
        self,
        running: Running,
        microbatch: int,
        stored: Given,
        as_first: AsFirst,
        repeating: AbstractContextManager[object],
        captured: bool,
    ) -> None:
        """C"""
        running.activation.restore()
        running.activation.release()  # the graph keeps what it needs of it
        running.captured = captured
        given = stored._replace(inputs=tree_map_only(Saved, Saved.tensor, stored.inputs))
        with as_first() as running.stand_ins:
            running.activation = self.new_activation(running.io, running.stand_ins)
            self.run(running, microbatch, given, repeating)

    def _with_graph(
        self, running: Running, microbatch: int, given: Given, mode: AbstractContextManager[object]
    ) -> Tensors:
        io = running.io
        wanted = [] if io.begins else [k for k, spec in enumerate(io.inputs) if spec.requires_grad]
        with torch.enable_grad(), self._split.splitting(running.backward, io.as_torch), mode:
            entered = enter(given.inputs, wanted, running.input_gradients)
            return self.outputs(io, given._replace(inputs=entered), microbatch)

    def _own_results(self, running: Running, microbatch: int) -> None:
        """A result that is saved, too, may leave."""
        if running.io.ends and self.results is not None:
            self.results[microbatch] = tree_map_only(
                Tensor, lambda t: t.clone() if running.activation.holds(t) else t, self.results[microbatch]
            )

    def _detached(self, running: Running, outputs: Tensors) -> Tensors:
        """The outputs as tensors of their own: whoever holds them keeps no block of this stage, and not the batch."""
        outputs = tuple(local(out.detach()) for out in outputs)
        saved = running.io.saved_outputs
        if running.captured:
            saved = frozenset(k for k, out in enumerate(outputs) if running.activation.holds(out))
            running.saved_outputs = saved
        return tuple(
            out.clone() if k in saved or storage_key(out) in self.excluded else out for k, out in enumerate(outputs)
        )
