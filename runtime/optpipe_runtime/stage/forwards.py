"""`Forwards`: the forwards of one stage: F, the C that repeats an F, and what keeps nothing.

An F that a C repeats keeps its inputs, and the results of the ops that its level keeps (`levels`). C runs with the
random numbers, buffers and attributes of the first time (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.activation import EVERY, Activation, Saved, storage_key
from optpipe_runtime.stage.io import LossFn, StageIO, Tensors, as_tensors, clones, enter
from optpipe_runtime.stage.levels import Keeping, Level, saving_nothing
from optpipe_runtime.stage.split import SplitBackward, WeightQueue
from optpipe_runtime.stage.state import Replay
from optpipe_runtime.torch_private.tensors import local, tree_map_only


class Arguments(NamedTuple):
    """What a forward gets: from the stage before or the batch, where the route ends for the loss, and by name."""

    inputs: Tensors
    target: Tensors
    kwargs: Mapping[str, Any]


@dataclass
class Running:
    """What a stage has of a micro-batch."""

    io: StageIO
    activation: Activation  # what autograd has saved; with a C to come, the inputs
    queue: WeightQueue = field(default_factory=WeightQueue)  # what B leaves to W
    edges: dict[int, GradientEdge] = field(default_factory=dict)  # where the backward enters the graph, by output
    input_gradients: list[dict[int, Tensor | None]] = field(default_factory=list)  # by input; none or one of them
    again: Callable[[], None] | None = None  # runs the forward once more, for C
    backward: Kind | None = None  # the op that will come, B or BW, if it is known
    captured: bool = True  # `activation` counts and moves what autograd saves
    saved_outputs: frozenset[int] = frozenset()  # those that share memory with what is saved
    stand_ins: Sequence[Tensor] = ()  # copies that C has used in the places of buffers, and like these no activations


_NOTHING: AbstractContextManager[object] = nullcontext()


class Forwards:
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
        self.excluded: set[int] = set()  # keys of storages that are no activations
        self.results: dict[int, Any] | None = None  # by micro-batch, what the module returned where the route ends
        # By level, "" for a whole activation: bytes of the last one's blocks, 0 for a block that stays.
        self.sizes: dict[str, tuple[int, ...]] = {}

    def new_activation(self, io: StageIO, staying: Sequence[Tensor] = (), checkpoint: bool = False) -> Activation:
        """Of a checkpoint all leaves, so that bytes follow from lengths."""
        if checkpoint:
            return Activation(self._device, self.excluded, leaving=EVERY)
        excluded = self.excluded | set(map(storage_key, staying)) if staying else self.excluded
        return Activation(self._device, excluded, io.shared_blocks, io.large_elsewhere)

    def outputs(self, io: StageIO, arguments: Arguments, microbatch: int | None = None) -> Tensors:
        """What the module returns, or the loss where the route ends."""
        result = self._module(*arguments.inputs, **arguments.kwargs)
        if io.ends:
            assert self._loss_fn is not None
            if self.results is not None and microbatch is not None:
                self.results[microbatch] = tree_map_only(Tensor, Tensor.detach, result)
            result = self._loss_fn(result, *arguments.target)
            if not isinstance(result, Tensor) or result.numel() != 1:
                raise InputError("loss_fn must return a tensor with one number, the loss of a micro-batch")
        return as_tensors(result, f"stage {self._index}")

    @torch.no_grad()
    def evaluate(self, io: StageIO, microbatch: int, arguments: Arguments) -> Tensors:
        """F without a backward to follow: keeps nothing."""
        outputs = self.outputs(io, arguments, microbatch)
        return self._detached(Running(io, self.new_activation(io)), outputs)

    def run(
        self, running: Running, microbatch: int, arguments: Arguments, mode: AbstractContextManager[object] = _NOTHING
    ) -> Tensors:
        """An F or a C that keeps what autograd saves."""
        io = running.io
        with running.activation.capture() if running.captured else nullcontext():
            outputs = self._with_graph(running, microbatch, arguments, mode)
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

    def run_to_repeat(self, running: Running, microbatch: int, arguments: Arguments, level: Level) -> Tensors:
        """An F that a C repeats: keeps the inputs, and the results that the level keeps."""
        io, activation = running.io, running.activation
        stored = arguments._replace(inputs=tree_map_only(Tensor, activation.store, arguments.inputs))
        as_first = self._replay.as_now()
        # What the forward changes in place must be for C as it is now.
        used = (
            Arguments(*clones((arguments.inputs, arguments.target, dict(arguments.kwargs))))
            if io.changes_inputs
            else arguments
        )
        repeating = _NOTHING
        if level.keeps is None:
            with torch.no_grad(), self._split.splitting(None, as_torch=False):
                outputs = self.outputs(io, used, microbatch)
        else:  # torch chooses some kernels by whether there is a graph
            keeping = Keeping(level, self._index, self._device)
            with saving_nothing(self._index):
                outputs = self._with_graph(running, microbatch, used, keeping)
            repeating = keeping.hand_over(activation)
        captured, running.captured = running.captured, True

        def repeat() -> None:
            running.activation.restore()
            running.activation.release()  # the graph keeps what it needs of it
            running.captured = captured
            inputs = tree_map_only(Saved, Saved.tensor, stored.inputs)
            with as_first() as running.stand_ins:
                running.activation = self.new_activation(io, running.stand_ins)
                self.run(running, microbatch, stored._replace(inputs=inputs), repeating)

        running.again = repeat
        self.sizes[level.name] = activation.sizes()
        self._own_results(running, microbatch)
        return self._detached(running, outputs)

    def _with_graph(
        self, running: Running, microbatch: int, arguments: Arguments, mode: AbstractContextManager[object]
    ) -> Tensors:
        io = running.io
        wanted = [] if io.begins else [k for k, spec in enumerate(io.inputs) if spec.requires_grad]
        with torch.enable_grad(), self._split.splitting(running.backward, io.as_torch), mode:
            entered = enter(arguments.inputs, wanted, running.input_gradients)
            return self.outputs(io, arguments._replace(inputs=entered), microbatch)

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
