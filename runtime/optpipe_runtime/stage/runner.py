"""`StageRunner`: one stage and its ops: F, B, W, BW and C on the user's module; O, D and R on what it keeps.
Their order and their messages are the executor's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.activation import EVERY, Activation, Saved, balance, in_place_errors
from optpipe_runtime.memory.engines import Handle
from optpipe_runtime.memory.host_pool import HostPool, OnHost
from optpipe_runtime.memory.link import Link
from optpipe_runtime.memory.storage import storage_key
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.stage.entrance import enter
from optpipe_runtime.stage.io import LossFn, StageIO, Tensors, as_tensors, clones
from optpipe_runtime.stage.levels import Keeping, Level, saving_nothing
from optpipe_runtime.stage.outside import Outside
from optpipe_runtime.stage.replay import AsFirst, Replay
from optpipe_runtime.stage.split import (
    Calls,
    Casts,
    Delayed,
    Splitting,
    WeightQueue,
    accumulated,
    added_at_once,
    delaying,
    main_grad,
)
from optpipe_runtime.stage.split.mode import Note
from optpipe_runtime.torch_private.modules import buffers_of
from optpipe_runtime.torch_private.trees import tree_map_only

_NOTHING: AbstractContextManager[object] = nullcontext()
_NONE: Mapping[str, Any] = MappingProxyType({})


class Given(NamedTuple):
    """What a forward gets: from the stage before or the batch, where the route ends for the loss, and by name."""

    inputs: Tensors
    target: Tensors
    kwargs: Mapping[str, Any]


@dataclass
class Running:
    """A micro-batch between its F and its last backward op.

    Attributes
    ----------
    activation
        What autograd has saved; with a C to come, the inputs.
    queue
        What B leaves to W.
    edges
        Where the backward enters the graph, by number of the output.
    input_gradients
        What the backward has computed for the inputs, by number. A list of none or one.
    again
        Runs the forward once more, for C.
    backward
        The op that will come, B or BW; None if that is not known.
    captured
        Whether `activation` counts and moves what autograd saves.
    saved_outputs
        The numbers of the outputs that share memory with what is saved.
    stand_ins
        Copies of buffers that C has used in their places. Like buffers they are no activations.
    """

    io: StageIO
    activation: Activation
    queue: WeightQueue = field(default_factory=WeightQueue)
    edges: dict[int, GradientEdge] = field(default_factory=dict)
    input_gradients: list[dict[int, Tensor | None]] = field(default_factory=list)
    again: Callable[[], None] | None = None
    backward: Kind | None = None
    captured: bool = True
    saved_outputs: frozenset[int] = frozenset()
    stand_ins: Sequence[Tensor] = ()


class StageRunner:
    """A module with its ops.

    Attributes
    ----------
    io
        What the stage gets and gives for each form of micro-batch: its route and its shapes. Filled in by `learn`.
    outside
        What it uses beside its module.
    calls
        The modules and functions that `learn` has seen called.
    at_b
        The names of the parameters whose gradient does not wait for W; None before the first B.
    norms_wait
        Whether norms leave their weight gradients to W.
    whole
        Whether compiled regions must not end at ops that could be split.
    noting
        Is told every call of torch, while `learn` runs.
    results
        What the module returned where the route ends, by micro-batch, if that is to be kept; else None.
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
        self._loss_fn = loss_fn
        self.io: dict[int, StageIO] = {}
        self.outside = Outside(loss_fn, module)
        self.replay = Replay(self.modules, self.parameters, device)
        self.norms_wait, self.whole = True, False
        self.calls: Calls | None = None
        self.at_b: frozenset[str] | None = None
        self.noting: Note | None = None
        self.results: dict[int, Any] | None = None
        self.loss_factors: Sequence[float] | None = None
        self._parts = 1
        # By level, "" for a whole activation: bytes of the last one's blocks, 0 for a block that stays.
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._excluded: frozenset[int] = frozenset()  # keys of storages that are no activations
        self._running: dict[int, Running] = {}
        self._delayed = Delayed(delaying(self.modules()))
        self._casts = Casts()

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
        self._excluded = frozenset(storage_key(tensor) for tensor in staying)

    def end_step(self) -> None:
        """Call it after a step, and after whatever else has run forwards."""
        self._casts.clear()
        self.replay.end_step()

    @property
    def cast_bytes(self) -> int:
        """What casts of parameters took in the last step, under autocast."""
        return self._casts.nbytes

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
        staying = self._excluded.union(map(storage_key, running.stand_ins))
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
        io, given = self.io[form], Given(inputs, target, kwargs)
        # All of a checkpoint leaves, so that bytes follow from lengths.
        activation = (
            self._new_activation(io) if recompute is None else Activation(self.device, self._excluded, leaving=EVERY)
        )
        running = Running(io, activation, backward=backward, captured=captured)
        self._running[microbatch] = running
        if recompute is None:
            return self._forward(running, microbatch, given)
        return self._forward_to_repeat(running, microbatch, given, recompute)

    @torch.no_grad()
    def evaluate(
        self,
        microbatch: int,
        inputs: Tensors,
        target: Tensors = (),
        form: int = 0,
        kwargs: Mapping[str, Any] = _NONE,
    ) -> Tensors:
        """F without a backward to follow: keeps nothing."""
        io = self.io[form]
        outputs = self.outputs(io, inputs, target, kwargs, microbatch)
        return self._detached(Running(io, self._new_activation(io)), outputs)

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
            with self._noting_at_b() if split and self.at_b is None else _NOTHING:
                self._walk(running, list(edges.values()), [by_output[k] for k in edges])
        if not split:
            self._run(running.queue)
        return self._input_gradients(running)

    def weight(self, microbatch: int) -> None:
        """W: the weight gradients that B left."""
        self._run(self._running.pop(microbatch).queue)

    def forget(self, microbatch: int) -> Running:
        """Drops a micro-batch after its F, outside of a step."""
        return self._running.pop(microbatch)

    def abandon(self) -> None:
        """Drops every micro-batch, wherever it is."""
        for running in self._running.values():
            running.activation.restore()
        self._running.clear()
        self._delayed.drain()
        self.end_step()

    def outputs(
        self, io: StageIO, inputs: Tensors, target: Tensors, kwargs: Mapping[str, Any], microbatch: int | None = None
    ) -> Tensors:
        """What the module returns, or the loss where the route ends."""
        result = self.module(*inputs, **kwargs)
        if io.ends:
            assert self._loss_fn is not None
            if self.results is not None and microbatch is not None:
                self.results[microbatch] = tree_map_only(Tensor, Tensor.detach, result)
            result = self._loss_fn(result, *target)
            if not isinstance(result, Tensor) or result.numel() != 1:
                raise InputError("loss_fn must return a tensor with one number, the loss of a micro-batch")
        return as_tensors(result, f"stage {self.index}")

    def _walk(self, running: Running, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        """Autograd's part of a backward. Checkpoints run forwards in it, so ops are split as in F."""
        with self._splitting(running), self._without_autocast(), running.queue.filling(), in_place_errors():
            torch.autograd.backward(edges, gradients)

    @contextmanager
    def _noting_at_b(self) -> Iterator[None]:
        """Finds `at_b`: the parameters to whose gradients something is added in this context."""
        parameters = self.named_parameters()
        before = {name: accumulated(parameter) for name, parameter in parameters.items()}
        in_buffers = {name: parameter for name, parameter in parameters.items() if main_grad(parameter) is not None}
        with added_at_once(in_buffers) as added:
            yield
        changed = {name for name, parameter in parameters.items() if accumulated(parameter) != before[name]}
        self.at_b = frozenset(added | changed)

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

    def _new_activation(self, io: StageIO, staying: Iterable[Tensor] = ()) -> Activation:
        excluded = self._excluded.union(map(storage_key, staying))
        return Activation(self.device, excluded, io.shared_blocks, io.large_elsewhere)

    def _forward_to_repeat(self, running: Running, microbatch: int, given: Given, level: Level) -> Tensors:
        """An F that a C repeats: keeps the inputs, and the results that the level keeps."""
        io, activation = running.io, running.activation
        stored = given._replace(inputs=tree_map_only(Tensor, activation.store, given.inputs))
        as_first = self.replay.as_now()
        # What the forward changes in place must be for C as it is now.
        used = Given(*clones((given.inputs, given.target, dict(given.kwargs)))) if io.changes_inputs else given
        repeating: AbstractContextManager[object] = _NOTHING
        if level.keeps is None:
            with torch.no_grad(), self._mode():
                outputs = self.outputs(io, *used, microbatch)
        else:  # torch chooses some kernels by whether there is a graph
            keeping = Keeping(level, self.index, self.device)
            with saving_nothing(self.index):
                outputs = self._with_graph(running, microbatch, used, keeping)
            repeating = keeping.hand_over(activation)
        running.again = partial(self._again, running, microbatch, stored, as_first, repeating, running.captured)
        running.captured = True
        self._sizes[level.name] = activation.sizes()
        self._own_results(running, microbatch)
        return self._detached(running, outputs)

    def _again(
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
            running.activation = self._new_activation(running.io, running.stand_ins)
            self._forward(running, microbatch, given, repeating)

    def _with_graph(
        self, running: Running, microbatch: int, given: Given, mode: AbstractContextManager[object]
    ) -> Tensors:
        io = running.io
        wanted = [] if io.begins else [k for k, spec in enumerate(io.inputs) if spec.requires_grad]
        with torch.enable_grad(), self._splitting(running), mode:
            entered = enter(given.inputs, wanted, running.input_gradients)
            return self.outputs(io, entered, given.target, given.kwargs, microbatch)

    def _forward(
        self, running: Running, microbatch: int, given: Given, mode: AbstractContextManager[object] = _NOTHING
    ) -> Tensors:
        """An F or a C that keeps what autograd saves."""
        io = running.io
        with running.activation.capture() if running.captured else nullcontext():
            outputs = self._with_graph(running, microbatch, given, mode)
        if any(out.requires_grad and not spec.requires_grad for out, spec in zip(outputs, io.outputs, strict=False)):
            raise InputError(
                f"stage {self.index} needs a gradient that it did not need at the start: unfreeze first, then "
                "make the Pipeline"
            )
        running.edges = {k: get_gradient_edge(outputs[k]) for k in io.needed if outputs[k].requires_grad}
        if running.captured:
            self._sizes[""] = running.activation.sizes()
            self._own_results(running, microbatch)
        return self._detached(running, outputs)

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
            out.clone() if k in saved or storage_key(out) in self._excluded else out for k, out in enumerate(outputs)
        )

    @contextmanager
    def _splitting(self, running: Running) -> Iterator[None]:
        """Around the user's forwards, and around backwards, which may run forwards again: lets ops leave their weight
        gradients to W, by hooks on modules where these will do, else by a mode, which sees every call."""
        needs_mode, hooked = True, _NOTHING
        if running.backward == Kind.BW:
            needs_mode = not running.io.as_torch  # else torch's own graph is as small
        elif running.backward == Kind.B and self.calls is not None and not self.calls.computes_gradients:
            needs_mode, hooked = self.calls.need_mode(self.norms_wait), self.calls.hooked(self.norms_wait, self._mode)
        with self._mode() if needs_mode else _NOTHING, hooked, self._delayed.watched():
            yield

    def _mode(self) -> Splitting:
        return Splitting(self.norms_wait, self._casts, self.noting, self.whole)

    def _run(self, queue: WeightQueue) -> None:
        with self._without_autocast():
            queue.run()

    def _without_autocast(self) -> AbstractContextManager[None]:
        """A backward computes in the types of its forward, so autocast around a whole step must not reach it."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    # Transfers

    def part_bytes(self, parts: int, level: str = "") -> list[int]:
        """The bytes of each of `parts` parts of an activation, or of its checkpoint at a level; zeros before the first
        forward."""
        sizes = self._sizes.get(level, ())
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
