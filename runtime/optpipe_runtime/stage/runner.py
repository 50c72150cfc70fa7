"""`StageRunner`: one stage and its ops: F, B, W, BW and C on the user's module; O, D and R on what it keeps. Order and
messages are the executor's. `learn` finds out what a stage gets and gives, by forwards that it forgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.activation import Activation, balance, in_place_errors, storage_key
from optpipe_runtime.memory.engines import Handle
from optpipe_runtime.memory.host_memory import HostPool, OnHost
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.forwards import Arguments, Forwards, Running
from optpipe_runtime.stage.io import LossFn, Spec, StageIO, Tensors, clones, reached_leaves, tensors_in
from optpipe_runtime.stage.levels import Level
from optpipe_runtime.stage.outside import Outside
from optpipe_runtime.stage.split import SplitBackward
from optpipe_runtime.stage.state import Replay
from optpipe_runtime.torch_private.tensors import buffers_of, must_stay_whole, version

_NONE: Mapping[str, Any] = MappingProxyType({})


class StageRunner:
    """A module with its ops, and where a route ends the `loss_fn`."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        link: Link,
        pool: HostPool,
        loss_fn: LossFn | None = None,
    ) -> None:
        self.index, self.module, self.device = index, module, device
        self._link, self._pool = link, pool
        self.io: dict[int, StageIO] = {}  # for each form of micro-batch, its route and shapes; filled in by `learn`
        self.outside = Outside(loss_fn, module)
        self.replay = Replay(self.modules, self.parameters, device)
        self.split = SplitBackward(self.modules(), self.named_parameters, device)
        self.forwards = Forwards(index, module, device, loss_fn, self.split, self.replay)
        self.loss_factors: Sequence[float] | None = None  # of each micro-batch, for its backward; None: one
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
        self.split.casts.clear()
        self.replay.end_step()

    @property
    def buffer_bytes(self) -> int:
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
        activation = forwards.new_activation(io, checkpoint=recompute is not None)
        running = self._running[microbatch] = Running(io, activation, backward=backward, captured=captured)
        if recompute is None:
            return forwards.run(running, microbatch, arguments)
        return forwards.run_to_repeat(running, microbatch, arguments, recompute)

    def recompute(self, microbatch: int) -> None:
        """C: the forward again, with the first time's random numbers and buffers; keeps what backwards need."""
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
            with (
                self.split.finding_at_b() if split and self.split.at_b is None else nullcontext(),
                self.split.splitting(running.backward, io.as_torch),  # checkpoints run forwards in a backward
                self.split.without_autocast(),
                running.queue.filling(),
                in_place_errors(),
            ):
                torch.autograd.backward(list(edges.values()), [by_output[k] for k in edges])
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
        self.split.delayed.drain()
        self.end_step()

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
        """Bytes of each part of an activation, or of its checkpoint at a level; zeros before the first forward."""
        sizes = self.forwards.sizes.get(level, ())
        return [sum(sizes[i] for i in group) for group in balance(sizes, parts)]

    def offload(self, microbatch: int, part: int) -> Sequence[Handle]:
        return self._running[microbatch].activation.offload(part, self._parts, OnHost(self._link, self._pool))

    def drop(self, microbatch: int, part: int) -> None:
        self._running[microbatch].activation.drop(part)

    def reload(self, microbatch: int, part: int) -> Sequence[Handle]:
        return self._running[microbatch].activation.reload(part)

    def activation(self, microbatch: int) -> Activation:
        """What the stage keeps of a micro-batch."""
        return self._running[microbatch].activation


def learn(
    stage: StageRunner,
    inputs: Tensors,
    target: Tensors | None = None,
    form: int = 0,
    begins: bool = False,
    kwargs: Mapping[str, Any] = _NONE,
    anew: bool = True,
) -> StageIO:
    """Fills in the stage's `io` of a form, and returns it. All outputs that require a gradient count as needed.

    The inputs, the target (where the route ends here), and the named arguments are those of one micro-batch. Where the
    route `begins` here, inputs may be other values than tensors. `anew`: all else of the stage is learned, too: which
    calls it makes. Other forms only add theirs.
    """
    io = StageIO(tuple(Spec.from_tensor(tensor) for tensor in tensors_in(inputs)), begins, ends=target is not None)
    if anew:
        stage.split.learn_anew(stage.module)
    arguments = Arguments(inputs, target or (), dict(kwargs))
    try:
        io, leaves = _run_noting(stage, io, arguments)
    except Exception as error:
        if not must_stay_whole(error):
            raise
        stage.split.whole = True
        io, leaves = _run_noting(stage, io, arguments)
    stage.outside.note(leaves)
    stage.io[form] = io
    stage.io[form] = _with_blocks(stage, io, arguments, form)
    return stage.io[form]


def _run_noting(stage: StageRunner, io: StageIO, arguments: Arguments) -> tuple[StageIO, list[ReferenceType[Tensor]]]:
    """A forward of torch's own: notes the stage's calls, and adds what it gives. Returns the leaves of its graph, too,
    without inputs and the module's parameters."""
    assert stage.split.calls is not None
    with stage.replay.undisturbed(), torch.enable_grad(), stage.split.calls.noting(stage.split.whole):
        copies = clones(arguments)
        outputs = stage.forwards.outputs(io, copies)
        if io.ends and not outputs[0].requires_grad:
            raise InputError(
                "the loss requires no gradient: loss_fn must compute it, by torch, from the output of the last stage"
            )
        reached = [list(reached_leaves(output)) for output in outputs]
    given = {id(tensor): i for i, tensor in enumerate(tensors_in(arguments.inputs))}
    own = {id(tensor) for tensor in (*tensors_in(arguments), *stage.module.parameters())}
    others = {id(leaf): ref(leaf) for leaves in reached for leaf in leaves if id(leaf) not in own}
    io = replace(
        io,
        outputs=tuple(Spec.from_tensor(output) for output in outputs),
        reached=tuple(frozenset(given[id(leaf)] for leaf in leaves if id(leaf) in given) for leaves in reached),
        needed=tuple(k for k, output in enumerate(outputs) if output.requires_grad),
        changes_inputs=any(version(tensor) for tensor in tensors_in(copies)),
    )
    return io, list(others.values())


def _with_blocks(stage: StageRunner, io: StageIO, arguments: Arguments, form: int) -> StageIO:
    """Adds the sizes of the blocks that a forward saves, which of them a drop does not free, and whether torch's own
    graph saves as little."""
    assert stage.split.calls is not None
    running = _run(stage, arguments, form)  # with the graph
    activation = running.activation
    nbytes = activation.nbytes
    if stage.split.norms_wait and stage.split.calls.would_hold > nbytes:
        # W gains least by the products of layer norms, and a B should not need more memory than its F.
        stage.split.norms_wait = False
    activation.give_up()
    stage.end_step()
    shared = activation.shared_blocks()
    io = replace(
        io,
        saved_outputs=running.saved_outputs,
        shared_blocks=shared,
        block_bytes=tuple(0 if i in shared else n for i, n in enumerate(activation.sizes())),
        as_torch=True,
    )
    del running, activation
    stage.io[form] = io
    of_torch = _run(stage, arguments, form, Kind.BW).activation
    stage.end_step()
    return replace(io, as_torch=of_torch.nbytes <= nbytes)


def _run(stage: StageRunner, arguments: Arguments, form: int, backward: Kind | None = None) -> Running:
    """Runs a forward for which this backward op is known to come, and forgets it."""
    with stage.replay.undisturbed():
        batch, target, named = clones(arguments if stage.io[form].begins else arguments._replace(inputs=()))
        stage.start_step(tensors_in((batch, target, named)), 1)
        inputs = batch if stage.io[form].begins else tuple(tensor.detach().clone() for tensor in arguments.inputs)
        stage.forward(0, inputs, target, form=form, backward=backward, kwargs=named)
        return stage.forget(0)
