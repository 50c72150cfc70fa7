"""`StageRunner`: one stage and its ops: F, B, W, BW and C on the user's module; O, D and R on what it keeps. Order and
messages are the executor's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.activation import Activation, balance
from optpipe_runtime.memory.engines import Handle
from optpipe_runtime.memory.host_pool import HostPool, OnHost
from optpipe_runtime.memory.link import Link
from optpipe_runtime.memory.saved import in_place_errors, storage_key
from optpipe_runtime.stage.forwards import Arguments, Forwards, Running
from optpipe_runtime.stage.io import LossFn, StageIO, Tensors
from optpipe_runtime.stage.levels import Level
from optpipe_runtime.stage.outside import Outside
from optpipe_runtime.stage.split import SplitBackward
from optpipe_runtime.stage.state import Replay
from optpipe_runtime.torch_private.modules import buffers_of

_NONE: Mapping[str, Any] = MappingProxyType({})


class StageRunner:
    """A module with its ops.

    Attributes
    ----------
    io
        What the stage gets and gives for each form of micro-batch: its route and its shapes. Filled in by `learn`.
    outside
        What it uses beside its module.
    split
        How its Bs leave weight gradients to Ws.
    forwards
        Its F and C, with what modules returned.
    loss_factors
        By what the loss of each micro-batch is multiplied for its backward, where the route ends; None: by one.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        link: Link,
        pool: HostPool,
        loss_fn: LossFn | None = None,
    ) -> None:
        """`loss_fn`: where a route ends."""
        self.index, self.module, self.device = index, module, device
        self._link, self._pool = link, pool
        self.io: dict[int, StageIO] = {}
        self.outside = Outside(loss_fn, module)
        self.replay = Replay(self.modules, self.parameters, device)
        self.split = SplitBackward(self.modules(), self.named_parameters, device)
        self.forwards = Forwards(index, module, device, loss_fn, self.split, self.replay)
        self.loss_factors: Sequence[float] | None = None
        self._parts = 1
        self._running: dict[int, Running] = {}

    def modules(self) -> list[nn.Module]:
        """All modules of the stage, those of `loss_fn` among them."""
        return list(dict.fromkeys([*self.module.modules(), *self.outside.modules()]))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters()) | self.outside.named_parameters()

    def parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys([*self.module.parameters(), *self.outside.named_parameters().values()]))

    def _buffers(self) -> set[Tensor]:
        # By torch's own table: a module may have a `buffers` of its own, as Megatron's DistributedDataParallel has.
        return {buffer for part in self.modules() for buffer in buffers_of(part).values() if buffer is not None}

    def start_step(self, batch: Iterable[Tensor], parts: int) -> None:
        """Call it before a step. The batch, parameters and buffers stay in memory anyway: they are no activations.
        Offloads go in `parts` parts."""
        self._parts = parts
        staying = (*self.parameters(), *self._buffers(), *batch)
        excluded = {storage_key(tensor) for tensor in staying} | self.split.casts.storages()
        self.forwards.excluded = self.split.casts.staying = excluded

    def end_step(self) -> None:
        """Call it after a step, and after whatever else has run forwards."""
        self.split.end_step()
        self.replay.end_step()

    @property
    def buffer_bytes(self) -> int:
        """What its buffers take, and a copy of them."""
        return sum(buffer.nbytes for buffer in self._buffers())

    @property
    def idle(self) -> bool:
        return not self._running

    def held_bytes(self, microbatch: int) -> int:
        """Device bytes that the micro-batch holds: saved tensors, and after B what its weight gradients need."""
        if microbatch not in self._running:
            return 0
        running = self._running[microbatch]
        held = running.activation.held() | running.queue.held()
        staying = self.forwards.excluded.union(map(storage_key, running.stand_ins))
        return sum(nbytes for key, nbytes in held.items() if key not in staying)

    # Compute

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        target: Tensors = (),
        recompute: Level | None = None,
        form: int = 0,
        backward: Kind | None = None,
        captured: bool = True,
        kwargs: Mapping[str, Any] = _NONE,
    ) -> Tensors:
        """F: the outputs for the next stage, or the loss. With `recompute` only what this level keeps stays, and C
        repeats the forward. Host time is saved if it is known which `backward` op will come, B or BW, and if what
        autograd saves need not be `captured`, because it is neither counted nor moved."""
        io, arguments, forwards = self.io[form], Arguments(inputs, target, kwargs), self.forwards
        activation = forwards.new_activation(io) if recompute is None else forwards.new_checkpoint()
        running = self._running[microbatch] = Running(io, activation, backward=backward, captured=captured)
        if recompute is None:
            return forwards.run(running, microbatch, arguments)
        return forwards.run_to_repeat(running, microbatch, arguments, recompute)

    def evaluate(
        self,
        microbatch: int,
        inputs: Tensors,
        target: Tensors = (),
        form: int = 0,
        kwargs: Mapping[str, Any] = _NONE,
    ) -> Tensors:
        """F without a backward to follow: keeps nothing."""
        return self.forwards.evaluate(self.io[form], microbatch, Arguments(inputs, target, kwargs))

    def recompute(self, microbatch: int) -> None:
        """C: the forward again, with the random numbers and buffers of the first time, and now keeping what the
        backward needs."""
        running = self._running[microbatch]
        again, running.again = running.again, None
        assert again is not None
        again()

    def backward(self, microbatch: int, gradients: Tensors, split: bool) -> Tensors:
        """B (`split`) or BW: takes the gradients of the outputs (none for the loss), and returns those of the inputs
        that go back to the previous stage."""
        running = self._running[microbatch] if split else self._running.pop(microbatch)
        edges, running.edges = running.edges, {}
        running.activation.restore()
        running.activation.release()
        running.queue.deferring = split
        io = running.io
        if io.ends:
            factor = 1.0 if self.loss_factors is None else self.loss_factors[microbatch]
            gradients = tuple(
                torch.full(spec.shape, factor, dtype=spec.dtype, device=self.device) for spec in io.outputs
            )
        if edges:
            by_output = dict(zip(io.needed, gradients, strict=True))
            with self.split.finding_at_b() if split and self.split.at_b is None else nullcontext():
                self._walk(running, list(edges.values()), [by_output[k] for k in edges])
        if not split:
            self.split.run(running.queue)
        return self._input_gradients(running)

    def weight(self, microbatch: int) -> None:
        """W: the weight gradients that B left."""
        self.split.run(self._running.pop(microbatch).queue)

    def forget(self, microbatch: int) -> Running:
        """Drops a micro-batch after its F, outside of a step."""
        return self._running.pop(microbatch)

    def abandon(self) -> None:
        """Drops every micro-batch, wherever it is."""
        for running in self._running.values():
            running.activation.restore()
        self._running.clear()
        self.split.abandon()
        self.end_step()

    def _walk(self, running: Running, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        """Autograd's part of a backward. Checkpoints run forwards in it, so ops are split as in F."""
        splitting = self.split.splitting(running.backward, running.io.as_torch)
        with splitting, self.split.without_autocast(), running.queue.filling(), in_place_errors():
            torch.autograd.backward(edges, gradients)

    def _input_gradients(self, running: Running) -> Tensors:
        """Those that the previous stage waits for: zeros where this micro-batch has none."""
        io, computed = running.io, running.input_gradients.pop() if running.input_gradients else {}
        for i, gradient in computed.items():
            if gradient is not None and i not in io.asked:
                raise InputError(
                    f"stage {self.index} has a gradient for its input {i}, which had none at the start, so that no "
                    "stage waits for it: a stage must use the same inputs for the loss in every micro-batch"
                )
        return tuple(
            io.inputs[i].zeros(self.device) if (gradient := computed.get(i)) is None else gradient for i in io.asked
        )

    # Transfers

    def part_bytes(self, parts: int, level: str = "") -> list[int]:
        """The bytes of each of `parts` parts of an activation, or of its checkpoint at a level; zeros before the first
        forward."""
        sizes = self.forwards.sizes.get(level, ())
        return [sum(sizes[i] for i in group) for group in balance(sizes, parts)]

    def offload(self, microbatch: int, part: int) -> Sequence[Handle]:
        """O"""
        return self._running[microbatch].activation.offload(part, self._parts, OnHost(self._link, self._pool))

    def drop(self, microbatch: int, part: int) -> None:
        """D"""
        self._running[microbatch].activation.drop(part)

    def reload(self, microbatch: int, part: int) -> Sequence[Handle]:
        """R"""
        return self._running[microbatch].activation.reload(part)

    def activation(self, microbatch: int) -> Activation:
        """What the stage keeps of a micro-batch."""
        return self._running[microbatch].activation
