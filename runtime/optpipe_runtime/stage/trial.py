"""`Trial`: one stage, tried alone on one route: times of its ops, and the bytes held after each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optpipe.measured.estimate import MeasuredTimes
from optpipe.model.ops import Kind
from optpipe_runtime.memory.activation import Activation, bytes_by_storage
from optpipe_runtime.memory.engines import Clock, Handle
from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.stage.forwards import Arguments
from optpipe_runtime.stage.io import Kwargs, Spec, Tensors, tensors_in
from optpipe_runtime.stage.levels import FULL, Level
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.torch_private.pipelining import backward_input, gradients_in


class Spread(MeasuredTimes):
    """Times of one op in ms: median and interquartile range over `count` measurements."""

    @classmethod
    def mean(cls, weighed: Sequence[tuple[int, Spread]]) -> Spread:
        """The weighted mean of the medians, with the widest spread."""
        total = sum(weight for weight, _ in weighed)
        return cls(
            ms=round(sum(weight * spread.ms for weight, spread in weighed) / total, 4),
            iqr_ms=max(spread.iqr_ms for _, spread in weighed),
            count=sum(spread.count for _, spread in weighed),
        )


class OpTimer:
    """Times ops by name. Read the times when all has ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: defaultdict[str, list[list[tuple[Any, Any]]]] = defaultdict(list)
        self.recording = True  # False while all warms up

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        if not self.recording:
            yield
        else:
            start = self._clock.mark()
            yield
            self._marks[name].append([(start, self._clock.mark())])

    def copies(self, name: str, parts: Sequence[Sequence[Handle]]) -> None:
        """Notes the transfers of all parts. Their times are added up, each as in a step's trace."""
        if self.recording:
            self._marks[name].append([(handles[0].start, handles[-1].end) for handles in parts if handles])

    def spreads(self, scale: float = 1.0) -> dict[str, Spread]:
        """Of each name; times are multiplied by `scale`."""
        return {
            name: Spread.from_samples([scale * sum(self._clock.ms(a, b) for a, b in spans) for spans in marks])
            for name, marks in self._marks.items()
        }


BESIDE = -1  # the number of a micro-batch that runs beside others


class Trial:
    """One stage on one route. Its activations leave in so many `parts`, and it is recomputed by these `levels`. `data`
    are the inputs, targets and named arguments of one micro-batch, the first two where the route begins or ends here.
    Times and bytes have the names of the problem's fields, those of a level with its name before (`field_of`)."""

    def __init__(
        self,
        stage: StageRunner,
        form: int,
        data: tuple[tuple[Any, ...], tuple[Any, ...], Kwargs],
        parts: int,
        levels: Sequence[Level],
        clock: Clock,
    ) -> None:
        self.levels = levels
        self.stage, self.form, self.parts = stage, form, parts
        io = stage.io[form]
        inputs, targets, self._kwargs = data
        self._inputs = inputs if io.begins else ()
        self._targets = targets if io.ends else ()
        self._gradients = () if io.ends else io.output_gradients
        self._batch = tensors_in((self._inputs, self._targets, self._kwargs))
        self.times = OpTimer(clock)
        self.sizes: dict[str, int] = {}  # bytes; where they vary, those that are safe for every round
        self.moved: Level | None = None  # whose checkpoint `forward` leaves; None: a whole activation
        self._generator = torch.Generator(stage.device).manual_seed(stage.index)
        self._outputs: Tensors = ()

    # Compute

    def compute(self) -> None:
        """Runs F, then F again with C for each level, then B and W. Notes the bytes held after each."""
        stage = self.stage
        inputs, gradients = [self._fresh_inputs() for _ in range(1 + len(self.levels))], self._fresh_gradients()
        how: dict[str, Any] = {"form": self.form, "backward": Kind.B, "kwargs": self._kwargs}
        stage.start_step(self._batch, self.parts)
        with self.times.timing("forward_ms"):
            stage.forward(0, inputs.pop(), self._targets, **how)
        saved, checkpoints = stage.held_bytes(0), {}
        for level in self.levels:
            stage.forget(0)
            stage.forward(0, inputs.pop(), self._targets, recompute=level, **how)
            checkpoints[self.field_of(level, "checkpoint_bytes")] = stage.held_bytes(0)
            with self.times.timing(self.field_of(level, "recompute_ms")):
                stage.recompute(0)
            saved = max(saved, stage.held_bytes(0))
        with self.times.timing("backward_input_ms"):
            stage.backward(0, gradients, split=True)
        kept = stage.held_bytes(0)
        with self.times.timing("backward_weight_ms"):
            stage.weight(0)
        held = {"activation_bytes": saved, "saved_for_weight_bytes": kept} | checkpoints
        self.sizes |= {name: max(nbytes, self.sizes.get(name, 0)) for name, nbytes in held.items()}

    def compute_in_torch(self) -> None:
        """Runs F and torch's I without the hooks of a split backward. Notes the bytes held after each."""
        stage, io = self.stage, self.stage.io[self.form]
        stage.start_step(self._batch, 1)
        activation = Activation(stage.device, stage.forwards.excluded)
        wanted = [not io.begins and spec.requires_grad for spec in io.inputs]
        inputs = self._fresh_inputs()
        if not io.begins:
            inputs = tuple(x.requires_grad_(is_wanted) for x, is_wanted in zip(inputs, wanted, strict=True))
        with torch.enable_grad(), activation.capture():
            outputs = stage.forwards.outputs(io, Arguments(inputs, self._targets, self._kwargs))
        saved = max(self.sizes["activation_bytes"], activation.nbytes)
        held = activation.held()
        if any(wanted):
            activation.release()
            needed = [output for output in outputs if output.requires_grad]
            groups = backward_input(needed, self._fresh_gradients(), inputs, stage.parameters())
            held = activation.held() | bytes_by_storage(gradients_in(groups))
        self.sizes |= {"activation_bytes": saved, "saved_for_weight_bytes": sum(held.values())}

    def field_of(self, level: Level | None, name: str) -> str:
        """The name of a figure of a level: with the level's before it, unless there is only the full one."""
        return name if level is None or self.levels == (FULL,) else f"{level.name}.{name}"

    def beside(self) -> None:
        """Runs F, B and W of a micro-batch of its own, without timing them."""
        stage, gradients = self.stage, self._fresh_gradients()
        stage.start_step(self._batch, self.parts)
        stage.forward(BESIDE, self._fresh_inputs(), self._targets, form=self.form, backward=Kind.B, kwargs=self._kwargs)
        stage.backward(BESIDE, gradients, split=True)
        stage.weight(BESIDE)

    def outputs(self) -> Tensors:
        """What a forward gives to the next stage, newly computed."""
        self.forward(0)
        outputs = self._outputs
        self.forget(0)
        return outputs

    def forward(self, microbatch: int) -> None:
        """Runs F without timing it. Call `forget` afterwards."""
        self.stage.start_step(self._batch, self.parts)
        self._outputs = self.stage.forward(
            microbatch, self._fresh_inputs(), self._targets, recompute=self.moved, form=self.form, kwargs=self._kwargs
        )

    def forget(self, microbatch: int) -> None:
        self._outputs = ()
        self.stage.forget(microbatch)

    # Transfers of a micro-batch after its forward. Each direction is started first and ended later.

    def start_out(self, microbatch: int) -> list[Sequence[Handle]]:
        return [self.stage.offload(microbatch, part) for part in range(self.parts)]

    def end_out(self, microbatch: int, under_way: list[Sequence[Handle]]) -> None:
        """Drops all parts, and notes the bytes that the smallest of them freed."""
        freed = []
        for part in range(self.parts):
            before = self.stage.held_bytes(microbatch)
            self.stage.drop(microbatch, part)
            freed.append(before - self.stage.held_bytes(microbatch))
        self.times.copies(self.field_of(self.moved, "offload_ms"), under_way)
        name = self.field_of(self.moved, "offload_bytes")
        self.sizes[name] = min(self.parts * min(freed), self.sizes.get(name, sum(freed)))

    def start_back(self, microbatch: int) -> list[Sequence[Handle]]:
        return [self.stage.reload(microbatch, part) for part in range(self.parts)]

    def end_back(self, microbatch: int, under_way: list[Sequence[Handle]]) -> None:
        self.stage.activation(microbatch).restore()
        self.times.copies(self.field_of(self.moved, "reload_ms"), under_way)

    def host_bytes(self, pool: HostPool, level: Level | None) -> int:
        """Host bytes that an offloaded activation takes, or its checkpoint at a level."""
        parts = self.stage.part_bytes(self.parts, "" if level is None else level.name)
        return sum(pool.size(nbytes) for nbytes in parts)

    def reload(self, microbatch: int) -> None:
        """Runs R without timing it."""
        self.start_back(microbatch)
        self.stage.activation(microbatch).restore()

    def _fresh_inputs(self) -> Tensors:
        io = self.stage.io[self.form]
        return self._inputs if io.begins else tuple(map(self._noise, io.inputs))

    def _fresh_gradients(self) -> Tensors:
        return tuple(map(self._noise, self._gradients))

    def _noise(self, spec: Spec) -> Tensor:
        """New in every round, and the same on inner peers."""
        tensor = spec.zeros(self.stage.device)
        return tensor.normal_(generator=self._generator) if tensor.is_floating_point() else tensor


Trials = Mapping[int, Mapping[int, Trial]]  # by stage and route
