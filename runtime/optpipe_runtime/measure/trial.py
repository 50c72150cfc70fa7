"""`Trial`: one stage, tried alone on one route: its ops in turn, timed, and the bytes that it holds after each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from torch import Tensor

from optpipe_runtime.execute.stage import StageRunner, Tensors
from optpipe_runtime.measure.clock import Clock
from optpipe_runtime.memory.peers import Peers
from optpipe_runtime.memory.pool import HostPool, Ticket


@dataclass(frozen=True, order=True)
class Spread:
    """Times of one op, ms: median and interquartile range of so many; `host_ms`: the median time that the host took to
    issue it."""

    ms: float
    iqr_ms: float
    count: int
    host_ms: float = 0.0

    @classmethod
    def of(cls, times: Sequence[float], host: Sequence[float] = (0.0,)) -> Spread:
        low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
        return cls(round(median(times), 4), round(high - low, 4), len(times), round(median(host), 4))

    @classmethod
    def mean(cls, weighed: Sequence[tuple[int, Spread]]) -> Spread:
        """By weight; the widest spread counts."""
        total = sum(weight for weight, _ in weighed)
        return cls(
            ms=round(sum(weight * spread.ms for weight, spread in weighed) / total, 4),
            iqr_ms=max(spread.iqr_ms for _, spread in weighed),
            count=sum(spread.count for _, spread in weighed),
            host_ms=round(sum(weight * spread.host_ms for weight, spread in weighed) / total, 4),
        )

    def longer(self, ms: float) -> Spread:
        """With so many ms more."""
        return replace(self, ms=round(self.ms + ms, 4))

    @property
    def launch_bound(self) -> bool:
        """Of an op on a GPU: it takes about as long as the host takes to launch it, so that it may well be the host
        that is measured."""
        return self.host_ms > 0.9 * self.ms


class Times:
    """Times of ops by name, in the order in which they ran; told when all is over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: defaultdict[str, list[tuple[list[tuple[Any, Any]], float]]] = defaultdict(list)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Times what runs in here."""
        host, start = time.perf_counter(), self._clock.mark()
        yield
        self._marks[name].append(([(start, self._clock.mark())], time.perf_counter() - host))

    def copies(self, name: str, parts: Sequence[Sequence[Ticket]]) -> None:
        """Notes the transfers of all parts, whose sum counts: how long each was under way, as a step's trace tells
        it."""
        self._marks[name].append(([(tickets[0].start, tickets[-1].end) for tickets in parts if tickets], 0.0))

    def clear(self) -> None:
        self._marks.clear()

    def spreads(self, scale: float = 1.0) -> dict[str, Spread]:
        found = {}
        for name, marks in self._marks.items():
            times = [scale * sum(self._clock.ms(a, b) for a, b in spans) for spans, _ in marks]
            found[name] = Spread.of(times, [1e3 * host for _, host in marks])
        return found


class Trial:
    """`inputs`, `targets`: of one micro-batch, where the route begins or ends here. Activations leave in `parts`."""

    def __init__(
        self, stage: StageRunner, route: int, inputs: Tensors, targets: Tensors, parts: int, clock: Clock
    ) -> None:
        self.stage, self.route, self.parts = stage, route, parts
        passage = stage.passages[route]
        self._inputs = inputs if passage.begins else ()
        self._targets = targets if passage.ends else ()
        self._gradients = () if passage.ends else passage.answered
        self._batch = (*self._inputs, *self._targets)
        self.computing, self.moving, self.visiting = Times(clock), Times(clock), Times(clock)
        self.sizes: dict[str, int] = {}
        self._made: Tensors = ()

    # Compute

    def compute(self) -> None:
        """F, then the same with C, then B and W; notes the bytes that each leaves."""
        stage = self.stage
        inputs, gradients = [self._fresh_inputs(), self._fresh_inputs()], self._fresh_gradients()
        stage.start_step(self._batch, self.parts)
        with self.computing.of("forward_ms"):
            stage.forward(0, inputs.pop(), self._targets, route=self.route)
        saved = stage.held_bytes(0)
        stage.forget(0)
        stage.forward(0, inputs.pop(), self._targets, recompute=True, route=self.route)
        checkpoint = stage.held_bytes(0)
        with self.computing.of("recompute_ms"):
            stage.recompute(0)
        again = stage.held_bytes(0)
        with self.computing.of("backward_input_ms"):
            stage.backward(0, gradients, split=True)
        kept = stage.held_bytes(0)
        with self.computing.of("backward_weight_ms"):
            stage.weight(0)
        self.sizes |= {
            "activation_bytes": max(saved, again),
            "checkpoint_bytes": checkpoint,
            "saved_for_weight_bytes": kept,
        }

    def outputs(self) -> Tensors:
        """What a forward gives to the next stage, fresh."""
        self.forward(0)
        made = self._made
        self.forget(0)
        return made

    def forward(self, microbatch: int) -> None:
        """F, untimed; `forget` it afterwards."""
        self.stage.start_step(self._batch, self.parts)
        self._made = self.stage.forward(microbatch, self._fresh_inputs(), self._targets, route=self.route)

    def forget(self, microbatch: int) -> None:
        self._made = ()
        self.stage.forget(microbatch)

    # Transfers of a micro-batch after its forward; each way is started first and ended later

    def start_out(self, microbatch: int) -> list[Sequence[Ticket]]:
        return [self.stage.offload(microbatch, part) for part in range(self.parts)]

    def end_out(self, microbatch: int, under_way: list[Sequence[Ticket]]) -> None:
        """Drops; notes what they freed: of all parts the smallest counts."""
        freed = []
        for part in range(self.parts):
            before = self.stage.held_bytes(microbatch)
            self.stage.drop(microbatch, part)
            freed.append(before - self.stage.held_bytes(microbatch))
        self.moving.copies("offload_ms", under_way)
        self.sizes["offload_bytes"] = self.parts * min(freed)

    def start_back(self, microbatch: int) -> list[Sequence[Ticket]]:
        return [self.stage.reload(microbatch, part) for part in range(self.parts)]

    def end_back(self, microbatch: int, under_way: list[Sequence[Ticket]]) -> None:
        self.stage.activation(microbatch).restore()
        self.moving.copies("reload_ms", under_way)

    def host_bytes(self, pool: HostPool) -> int:
        """What an activation that is away takes of the host."""
        return sum(pool.size(nbytes) for nbytes in self.stage.part_bytes(self.parts))

    def come_home(self, microbatch: int) -> None:
        """Back, untimed."""
        self.start_back(microbatch)
        self.stage.activation(microbatch).restore()

    def visit(self, peers: Peers) -> int:
        """F, E and L; returns the bytes that the drop between them freed."""
        self.forward(0)
        held = self.stage.held_bytes(0)
        with self.visiting.of("evict_ms"):
            self.stage.evict(0, peers)
            self.stage.drop(0, 0)
        freed = held - self.stage.held_bytes(0)
        with self.visiting.of("load_ms"):
            self.stage.reload(0, 0)
            self.stage.activation(0).restore()
        self.forget(0)
        return freed

    def _fresh_inputs(self) -> Tensors:
        return self._inputs or tuple(
            _noise(spec.zeros(self.stage.device)) for spec in self.stage.passages[self.route].inputs
        )

    def _fresh_gradients(self) -> Tensors:
        return tuple(_noise(spec.zeros(self.stage.device)) for spec in self._gradients)


def _noise(tensor: Tensor) -> Tensor:
    return tensor.normal_() if tensor.is_floating_point() else tensor
