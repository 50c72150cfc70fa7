"""One stage and its ops: F, B, W, BW, C on the user's module, O, D, R on what it keeps. Their order and messages are
the executor's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optpipe.errors import InputError
from optpipe_runtime.execute.split import Delayed, Splitting, WeightQueue, accumulated, delaying, would_hold
from optpipe_runtime.memory import buffers
from optpipe_runtime.memory.pool import Carrier, HostPool, Link, Nowhere, OnHost, Ticket
from optpipe_runtime.memory.store import Activation, balance, storage_key

Tensors = tuple[Tensor, ...]
LossFn = Callable[..., Tensor]  # (output, *targets) -> the mean loss of a micro-batch


class Spec(NamedTuple):
    """One tensor that passes between two stages; the gradient comes back where `requires_grad`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def as_tensors(value: Any, what: str) -> Tensors:
    """A tensor or a tuple of tensors as a tuple."""
    tensors = value if isinstance(value, tuple | list) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"{what} is a {type(tensor).__name__}: a tensor or a tuple of tensors is what passes between stages"
            )
    return tuple(tensors)


@dataclass(frozen=True)
class Passage:
    """What a stage gets and gives on one route; on its first stage, `begins`, it gets the batch, on its last, `ends`,
    it gives the loss.

    Gradients come back for the outputs `needed`, by number: those that require one and that a later stage uses for the
    loss. Of the blocks that a forward saves some are `stuck`, by number: others hold them, too, so that offloading them
    frees nothing.
    """

    inputs: tuple[Spec, ...]
    begins: bool
    ends: bool
    outputs: tuple[Spec, ...] = ()
    reached: tuple[frozenset[int], ...] = ()  # for each output, the inputs that get a part of its gradient
    needed: tuple[int, ...] = ()
    changes_inputs: bool = False  # in place, or the target
    stuck: frozenset[int] = frozenset()
    leaving: tuple[int, ...] = ()  # bytes of each block, 0 where it stays

    @cached_property
    def asked(self) -> tuple[int, ...]:
        """The inputs whose gradients go back to the stage before, by number."""
        return tuple(sorted({i for k in self.needed for i in self.reached[k]}))

    @property
    def answers(self) -> tuple[Spec, ...]:
        """What goes back to the stage before."""
        return tuple(self.inputs[i] for i in self.asked)

    @property
    def answered(self) -> tuple[Spec, ...]:
        """What comes back from the stage after."""
        return tuple(self.outputs[k] for k in self.needed)


@dataclass
class _Microbatch:
    """A micro-batch between its F and its last backward op."""

    passage: Passage
    activation: Activation
    queue: WeightQueue = field(default_factory=WeightQueue)
    edges: dict[int, GradientEdge] = field(default_factory=dict)  # by number of the output
    input_gradients: list[dict[int, Tensor | None]] = field(
        default_factory=list
    )  # by number of the input; caught by `_Entrance`
    again: Callable[[], None] | None = None  # runs the forward once more, for C


class StageRunner:
    """A module with its ops. `passages` say what it gets and gives on each route, learned by `learn`."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        link: Link,
        pool: HostPool,
        loss: tuple[LossFn, float] | None = None,
    ) -> None:
        self.index, self.module, self.device = index, module, device
        self._link, self._pool = link, pool
        self._loss_fn: LossFn | None
        self._loss_fn, self._loss_scale = loss or (
            None,
            1.0,
        )  # where a route ends, and what one micro-batch's loss counts in the mean
        self._parts = 1
        self._sizes: tuple[int, ...] = ()  # bytes of the last forward's blocks, 0 where one cannot leave
        self.passages: dict[int, Passage] = {}
        self._excluded: frozenset[int] = frozenset()
        self._changing: list[
            buffers.Place
        ] = []  # those of modules that change one in a forward, such as a running mean
        self._running: dict[int, _Microbatch] = {}
        self._norms = True  # whether layer norms wait for W, too
        self.at_b: frozenset[str] | None = (
            None  # the parameters whose gradient does not wait for W, by name; known after the first B
        )
        self._delayed = Delayed(delaying(module))

    def start_step(self, batch: Iterable[Tensor], parts: int) -> None:
        """Before a step. The batch, parameters and buffers stay in memory anyway: they are no activations. Offloads go
        in `parts`."""
        self._parts = parts
        staying = (*self.module.parameters(), *self.module.buffers(), *batch)
        self._excluded = frozenset(storage_key(tensor) for tensor in staying)

    def weigh(self, loss_scale: float) -> None:
        """Between two steps: what one micro-batch's loss counts in the mean from now on, where a route ends here."""
        self._loss_scale = loss_scale

    @property
    def idle(self) -> bool:
        return not self._running

    def held_bytes(self, microbatch: int) -> int:
        """Device bytes that the micro-batch holds: saved tensors, and after B what its weight gradients wait for."""
        if microbatch not in self._running:
            return 0
        running = self._running[microbatch]
        held = running.activation.held() | running.queue.held()
        return sum(nbytes for key, nbytes in held.items() if key not in self._excluded)

    # Compute

    def forward(
        self, microbatch: int, inputs: Tensors, target: Tensors = (), recompute: bool = False, route: int = 0
    ) -> Tensors:
        """F: the outputs for the next stage, or the loss. With `recompute` only the inputs are kept, and C runs it
        again."""
        passage = self.passages[route]
        running = _Microbatch(passage, self._new_activation(passage))
        self._running[microbatch] = running
        if not recompute:
            return self._forward(running, inputs, target)
        for tensor in inputs:
            running.activation.keep(tensor)
        running.again = self._replay(running, inputs, target)
        given, asked = (_copies(inputs), _copies(target)) if passage.changes_inputs else (inputs, target)
        with torch.no_grad():
            return self._leaving(running.activation, self._outputs(passage, given, asked))

    @torch.no_grad()
    def evaluate(self, inputs: Tensors, target: Tensors = (), route: int = 0) -> Tensors:
        """F where no backward follows: nothing is kept."""
        passage = self.passages[route]
        return self._leaving(self._new_activation(passage), self._outputs(passage, inputs, target))

    def recompute(self, microbatch: int) -> None:
        """C: the forward again, with the random numbers and buffers of the first time, now keeping what the backward
        needs."""
        running = self._running[microbatch]
        again, running.again = running.again, None
        assert again is not None
        running.activation = self._new_activation(running.passage)  # of the inputs, the graph keeps what it needs
        again()

    def backward(self, microbatch: int, gradients: Tensors, split: bool) -> Tensors:
        """B (`split`) or BW: takes the gradients of the outputs needed (none for the loss), returns those of the inputs
        asked for."""
        running = self._running[microbatch]
        if not split:
            del self._running[microbatch]
        edges, running.edges = running.edges, {}
        running.activation.restore()
        running.activation.release()
        running.queue.deferring = split
        passage = running.passage
        if passage.ends:
            gradients = tuple(
                torch.full(spec.shape, self._loss_scale, dtype=spec.dtype, device=self.device)
                for spec in passage.outputs
            )
        if edges:
            given = dict(zip(passage.needed, gradients, strict=True))
            before = self._gradients() if split and self.at_b is None else None
            with (
                self._splitting(),
                self._without_autocast(),
                running.queue.filling(),
            ):  # checkpoints run forwards in here, as in F
                torch.autograd.backward(list(edges.values()), [given[k] for k in edges])
            if before is not None:
                self.at_b = frozenset(name for name, state in self._gradients().items() if state != before[name])
        if not split:
            self._run(running.queue)
        found = running.input_gradients.pop() if running.input_gradients else {}
        for i, grad in found.items():
            if grad is not None and i not in passage.asked:
                raise InputError(
                    f"stage {self.index} has a gradient for its input {i}, which had none at the start, so that "
                    "no stage waits for it: "
                    "what a stage uses for the loss is the same in every micro-batch"
                )
        # Zeros where this micro-batch has none: the stage before waits for them.
        return tuple(
            passage.inputs[i].zeros(self.device) if (grad := found.get(i)) is None else grad for i in passage.asked
        )

    def weight(self, microbatch: int) -> None:
        """W: the weight gradients that B left."""
        self._run(self._running.pop(microbatch).queue)

    def _gradients(self) -> dict[str, tuple[int, int]]:
        return {name: accumulated(parameter) for name, parameter in self.module.named_parameters()}

    def forget(self, microbatch: int) -> None:
        """Lets go of a micro-batch after its F, for the profiler."""
        del self._running[microbatch]

    def abandon(self) -> None:
        """Lets go of every micro-batch, wherever it is."""
        for running in self._running.values():
            running.activation.restore()
        self._running.clear()
        self._delayed.drain()

    def _new_activation(self, passage: Passage) -> Activation:
        return Activation(self.device, self._excluded, passage.stuck)

    def _replay(self, running: _Microbatch, inputs: Tensors, target: Tensors) -> Callable[[], None]:
        devices = self._cuda_devices()
        cpu = torch.get_rng_state()
        on_device = [torch.cuda.get_rng_state(device) for device in devices]
        as_then = buffers.keep(self._changing)

        def again() -> None:
            with torch.random.fork_rng(devices):
                torch.set_rng_state(cpu)
                for device, state in zip(devices, on_device, strict=True):
                    torch.cuda.set_rng_state(state, device)
                as_now = buffers.keep(self._changing)
                as_then()
                self._forward(running, inputs, target)
                as_now()

        return again

    def _forward(self, running: _Microbatch, inputs: Tensors, target: Tensors) -> Tensors:
        with torch.enable_grad(), running.activation.capture(), self._splitting():
            outputs = self._outputs(running.passage, self._enter(running, inputs), target)
        if any(
            out.requires_grad and not spec.requires_grad
            for out, spec in zip(outputs, running.passage.outputs, strict=False)
        ):
            raise InputError(
                f"stage {self.index} needs a gradient that it did not need at the start: unfreeze first, then "
                "make the Pipeline"
            )
        running.edges = {k: get_gradient_edge(outputs[k]) for k in running.passage.needed if outputs[k].requires_grad}
        self._sizes = running.activation.sizes()
        return self._leaving(running.activation, outputs)

    def _leaving(self, activation: Activation, outputs: Tensors) -> Tensors:
        """The outputs as tensors of their own: a neighbour that holds them keeps no block of ours, and not the
        batch."""
        ours = [activation.holds(out) or storage_key(out) in self._excluded for out in outputs]
        return tuple(out.detach().clone() if own else out.detach() for own, out in zip(ours, outputs, strict=True))

    def _enter(self, running: _Microbatch, inputs: Tensors) -> Tensors:
        wanted = [k for k, spec in enumerate(running.passage.inputs) if spec.requires_grad]
        if not wanted:
            return inputs
        token = torch.empty(0, device=self.device, requires_grad=True)
        entered = _Entrance.apply(  # type: ignore[no-untyped-call]
            token, running.input_gradients, wanted, *(inputs[k] for k in wanted)
        )
        replaced = dict(zip(wanted, entered, strict=True))
        return tuple(replaced.get(k, tensor) for k, tensor in enumerate(inputs))

    def _outputs(self, passage: Passage, inputs: Tensors, target: Tensors) -> Tensors:
        result = self.module(*inputs)
        if passage.ends:
            assert self._loss_fn is not None
            result = self._loss_fn(result, *target)
            if not isinstance(result, Tensor) or result.numel() != 1:
                raise InputError("loss_fn must return a tensor with one number, the mean loss of a micro-batch")
        return as_tensors(result, f"what stage {self.index} returns")

    def learn(self, inputs: Tensors, target: Tensors | None = None, route: int = 0, begins: bool = False) -> Passage:
        """Runs a forward, twice, and forgets it; with `target` the route ends here. All outputs that require a gradient
        count as needed."""
        passage = Passage(tuple(Spec.of(tensor) for tensor in inputs), begins, ends=target is not None)
        self.at_b = None
        if route <= min(self.passages, default=route):  # else a route learned before has its say
            self._norms = True
        with self.undisturbed(), torch.enable_grad():
            copies, asked, changed = _copies(inputs), _copies(target or ()), buffers.watch(self.module)
            outputs = self._outputs(passage, copies, asked)
            if passage.ends and not outputs[0].requires_grad:
                raise InputError(
                    "the loss requires no gradient: loss_fn must compute it, by torch, from the output of the "
                    "last stage"
                )
            self._changing = list(dict.fromkeys((*self._changing, *changed())))
        self.passages[route] = passage = replace(
            passage,
            outputs=tuple(Spec.of(output) for output in outputs),
            reached=tuple(_reached(output, inputs) for output in outputs),
            needed=tuple(k for k, output in enumerate(outputs) if output.requires_grad),
            changes_inputs=any(tensor._version for tensor in (*copies, *asked)),
        )
        with self.undisturbed():
            self.passages[route] = self._with_blocks(passage, inputs, _copies(target or ()), route)
        return self.passages[route]

    def _with_blocks(self, passage: Passage, inputs: Tensors, target: Tensors, route: int) -> Passage:
        """The passage with what a forward saves, and which of it a drop frees."""
        batch = _copies(inputs) if passage.begins else ()
        self.start_step((*batch, *target), 1)
        self.forward(0, batch or tuple(tensor.detach().clone() for tensor in inputs), target, route=route)
        running = self._running.pop(0)  # its graph stays until the end of this
        if self._norms and would_hold(running.edges.values()) > running.activation.nbytes:
            self._norms = (
                False  # their products take less time than any other, and a B should not need more memory than its F
            )
        running.activation.offload(0, 1, Nowhere())
        running.activation.drop(0)
        stuck = running.activation.stuck()
        return replace(
            passage,
            stuck=stuck,
            leaving=tuple(0 if i in stuck else n for i, n in enumerate(running.activation.sizes())),
        )

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What runs in here leaves buffers and random numbers as they were."""
        put_back = buffers.keep(buffers.places(self.module))
        try:
            with torch.random.fork_rng(self._cuda_devices()):
                yield
        finally:
            put_back()

    def snapshot(self) -> Callable[[], None]:
        """What a step changes in the module: gradients, and buffers that forwards write. Returns what puts it back."""
        grads = [
            (p, p.grad, None if p.grad is None else p.grad.detach().to("cpu", copy=True))
            for p in self.module.parameters()
        ]
        put_back = buffers.keep(self._changing)

        def restore() -> None:
            for parameter, grad, value in grads:
                parameter.grad = grad
                if grad is not None and value is not None:
                    grad.detach().copy_(value)
            put_back()

        return restore

    def _cuda_devices(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    @contextmanager
    def _splitting(self) -> Iterator[None]:
        """Around the user's forwards and what may run them again, a backward."""
        with Splitting(self._norms), self._delayed.watched():
            yield

    def _run(self, queue: WeightQueue) -> None:
        with self._without_autocast():
            queue.run()

    def _without_autocast(self) -> AbstractContextManager[None]:
        """A backward computes in the types of its forward: autocast around a whole step is one around its forwards."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    # Transfers

    def part_bytes(self, parts: int) -> list[int]:
        """What each of `parts` parts takes on the host; zeros before the first forward."""
        return [sum(self._sizes[i] for i in group) for group in balance(self._sizes, parts)]

    def offload(self, microbatch: int, part: int) -> Sequence[Ticket]:
        """O"""
        return self._running[microbatch].activation.offload(part, self._parts, OnHost(self._link, self._pool))

    def evict(self, microbatch: int, carrier: Carrier) -> Sequence[Ticket]:
        """E: the whole activation, whose blocks the peer expects as they were learned."""
        running = self._running[microbatch]
        if running.activation.sizes() != running.passage.leaving:
            raise InputError(
                f"stage {self.index} saves {sum(running.activation.sizes())} bytes for micro-batch {microbatch}, "
                "at the start it saved "
                f"{sum(running.passage.leaving)}: what is evicted has the same sizes in every micro-batch"
            )
        return running.activation.offload(0, 1, carrier)

    def drop(self, microbatch: int, part: int) -> None:
        """D"""
        self._running[microbatch].activation.drop(part)

    def reload(self, microbatch: int, part: int) -> Sequence[Ticket]:
        """R, L"""
        return self._running[microbatch].activation.reload(part)

    def activation(self, microbatch: int) -> Activation:
        """What the stage keeps of a micro-batch, for the profiler."""
        return self._running[microbatch].activation


def _reached(output: Tensor, inputs: Tensors) -> frozenset[int]:
    """The inputs, leaves of the graph, that a gradient of the output may reach, by number."""
    number = {id(tensor): i for i, tensor in enumerate(inputs)}
    seen, waiting = {output.grad_fn}, [output.grad_fn]
    found = set()
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        found.add(number.get(id(getattr(node, "variable", None)), -1))
        fresh = {after for after, _ in node.next_functions} - seen
        seen |= fresh
        waiting += fresh
    return frozenset(found - {-1})


def _copies(tensors: Iterable[Tensor]) -> Tensors:
    return tuple(tensor.clone() for tensor in tensors)


class _Entrance(torch.autograd.Function):
    """The inputs of a stage, as part of its graph, without a leaf that would hold them in memory; catches their
    gradients."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, caught: list[dict[int, Tensor | None]], numbers: list[int], *inputs: Tensor
    ) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.caught, ctx.numbers = caught, numbers
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.caught.append(dict(zip(ctx.numbers, gradients, strict=True)))
        return (None,) * (3 + len(gradients))
