"""`profile`: a `Problem` measured on the user's stages, with the split backward, the hooks and the copies that training uses.

All ranks measure at the same time, as they will work; links between ranks are measured one after the other. Times are medians in ms, after
warm-up. Bytes are counted by live storages: `activation_bytes` after F, `checkpoint_bytes` after an F that a C repeats, `weight_grad_bytes`
between B and W, `offload_bytes` what drops really freed. Parts need not be equal, the problem says they are: each counts as the smallest,
so no rank holds more than certified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe.ops import Kind
from optpipe.problem import Problem
from optpipe_runtime.clock import Clock
from optpipe_runtime.lowering import Guests, Message
from optpipe_runtime.rank import Rank
from optpipe_runtime.stage import StageRunner, Tensors

WARM_UP = 2


def profile(rank: Rank, inputs: Tensors, targets: Tensors, memory_bytes: int | None, parts: int, repeats: int) -> Problem:
    """Collective. `inputs` and `targets` are those of one micro-batch, on the ranks that need them. See `Pipeline.profile`."""
    if memory_bytes is None:
        memory_bytes = _budget(rank.device)
    rank.council.least(0)  # start together
    inputs = tuple(tensor.clone() for tensor in inputs)  # a stage may change them in place, again and again
    layout = rank.layout
    measurements = {s: _Measurement(rank, s, inputs, targets, parts) for s in rank.stages}
    costs = {s: measurement(repeats) for s, measurement in measurements.items()}
    for s in range(len(layout.placement)):
        if evicted := _evicted(rank, s, measurements.get(s), repeats):
            costs[s] |= evicted
    p2p_ms = max((_p2p_ms(rank, *passage, repeats) for passage in layout.passages()), default=0.0)
    host = _host_budget(rank, costs)
    device = {"memory_bytes": memory_bytes, "host_memory_bytes": host, "peer": layout.peer(rank.number)}
    gathered = rank.council.gather((device, costs, p2p_ms))
    return Problem.from_dict(
        {
            **layout.to_dict(),
            "p2p_ms": max(ms for *_, ms in gathered),
            "transfer_mode": "full_duplex" if rank.full_duplex else "half_duplex",
            "devices": [device for device, *_ in gathered],
            "stages": [{"device": owner} | gathered[owner][1][s] for s, owner in enumerate(layout.placement)],
        },
        "the measured problem",
    )


class _Measurement:
    """One stage, run alone on the first route over it: F, the same with C, then out and back, then B and W, again and again."""

    def __init__(self, rank: Rank, s: int, inputs: Tensors, targets: Tensors, parts: int) -> None:
        self._stage, self._pool, self._peers, self._parts = rank.stages[s], rank.pool, rank.peers, parts
        self._route, passage = min(self._stage.passages.items())
        self._inputs = inputs if passage.begins else ()
        self._targets = targets if passage.ends else ()
        self._gradients = () if passage.ends else passage.answered
        self._batch = (*self._inputs, *self._targets)
        self._clock = Clock(rank.device)
        self._times: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def __call__(self, repeats: int) -> dict[str, Any]:
        """The stage's cost fields."""
        with _as_before(self._stage):
            sizes = [self._once() for _ in range(WARM_UP + repeats)][-1]
        found = self._ms() | sizes | {"offload_parts": self._parts}
        left_out = {"offload_bytes", "offload_ms", "reload_ms", "offload_parts"} if not sizes["offload_bytes"] else set()
        if sizes["checkpoint_bytes"] >= sizes["activation_bytes"]:
            left_out |= {"checkpoint_bytes", "recompute_ms"}
        return {name: value for name, value in found.items() if name not in left_out}

    def evicted(self, repeats: int) -> dict[str, Any]:
        """The fields of eviction; none where a drop frees something else than what the peer holds."""
        stage, freed = self._stage, set()
        self._times.clear()
        with _as_before(stage):
            for _ in range(WARM_UP + repeats):
                stage.start_step(self._batch, 1)
                stage.forward(0, self._fresh_inputs(), self._targets, route=self._route)
                held = stage.held_bytes(0)
                with self._timed("evict_ms"):
                    stage.evict(0, self._peers)
                    stage.drop(0, 0)
                freed.add(held - stage.held_bytes(0))
                with self._timed("load_ms"):
                    stage.reload(0, 0)
                    stage.activation(0).wait()
                stage.backward(0, self._fresh_gradients(), split=False)
        nbytes = sum(stage.passages[self._route].leaving)
        return self._ms() | {"evict_bytes": nbytes} if freed == {nbytes} else {}

    def _ms(self) -> dict[str, float]:
        self._clock.settle()
        return {name: _rounded([self._clock.ms(a, b) for a, b in marks[WARM_UP:]]) for name, marks in self._times.items()}

    def _may_leave(self, parts: int) -> bool:
        """Whether the host takes one micro-batch's activation at all."""
        limit = self._pool.limit
        return limit is None or sum(self._pool.size(nbytes) for nbytes in self._stage.part_bytes(parts)) <= limit

    def _once(self) -> dict[str, int]:
        """One micro-batch, timed; returns the bytes it held."""
        stage = self._stage
        stage.start_step(self._batch, self._parts)
        inputs, gradients = [self._fresh_inputs(), self._fresh_inputs()], self._fresh_gradients()
        with self._timed("forward_ms"):
            stage.forward(0, inputs.pop(), self._targets, route=self._route)
        saved = stage.held_bytes(0)
        stage.forget(0)
        stage.forward(0, inputs.pop(), self._targets, recompute=True, route=self._route)
        checkpoint = stage.held_bytes(0)
        with self._timed("recompute_ms"):
            stage.recompute(0)
        held = [stage.held_bytes(0)]
        if self._may_leave(self._parts):
            self._out_and_back(held)
        with self._timed("backward_input_ms"):
            stage.backward(0, gradients, split=True)
        kept = stage.held_bytes(0)
        with self._timed("backward_weight_ms"):
            stage.weight(0)
        least = min((before - after for before, after in pairwise(held)), default=0)
        return {
            "activation_bytes": max(saved, held[0]),
            "weight_grad_bytes": kept,
            "offload_bytes": least * self._parts,
            "checkpoint_bytes": checkpoint,
        }

    def _out_and_back(self, held: list[int]) -> None:
        """O, D and R of all parts; adds to `held` what is left after each drop."""
        stage, parts = self._stage, range(self._parts)
        with self._timed("offload_ms"):
            for part in parts:
                stage.offload(0, part)
            for part in parts:
                stage.drop(0, part)
                held.append(stage.held_bytes(0))
        with self._timed("reload_ms"):
            for part in parts:
                stage.reload(0, part)
            stage.activation(0).wait()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self._times[name].append((start, self._clock.mark()))

    def _fresh_inputs(self) -> Tensors:
        return self._inputs or tuple(_noise(spec.zeros(self._stage.device)) for spec in self._stage.passages[self._route].inputs)

    def _fresh_gradients(self) -> Tensors:
        return tuple(_noise(spec.zeros(self._stage.device)) for spec in self._gradients)


def _noise(tensor: Tensor) -> Tensor:
    return tensor.normal_() if tensor.is_floating_point() else tensor


def _rounded(times: list[float]) -> float:
    return round(median(times), 4)


@contextmanager
def _as_before(stage: StageRunner) -> Iterator[None]:
    """Gradients, buffers and random numbers are afterwards what they were."""
    gradients = [(parameter, parameter.grad) for parameter in stage.module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    with stage.undisturbed():
        yield
    for parameter, gradient in gradients:
        parameter.grad = gradient


def _evicted(rank: Rank, s: int, measurement: _Measurement | None, repeats: int) -> dict[str, Any]:
    """Collective: what it costs to evict from stage s; nothing on other ranks than its own, and where nothing is evicted."""
    owner = rank.layout.placement[s]
    leaving = rank.passages[s, min(route for stage, route in rank.passages if stage == s)].leaving
    rank.council.least(0)  # one link at a time
    if rank.layout.peer(owner) is None or not any(leaving):
        return {}
    if measurement is not None:
        return measurement.evicted(repeats)
    if rank.layout.peer(owner) == rank.number:
        visits = tuple((s, r) for r in range(WARM_UP + repeats))
        rank.peers.start_step({owner: Guests(visits, visits)})
        for visit in visits:
            rank.peers.accept(owner, visit, [size for size in leaving if size])
            rank.peers.vacate(visit)
    return {}


def _p2p_ms(rank: Rank, route: int, s: int, after: int, repeats: int) -> float:
    """Half of the time that what passes from stage s to the next takes there and back; 0 on ranks that have neither."""
    here, there = rank.layout.placement[s], rank.layout.placement[after]
    rank.council.least(0)  # one link at a time
    if here == there or rank.number not in (here, there):
        return 0.0
    sends, mail = rank.number == here, rank.mail
    specs = rank.stages[s].passages[route].outputs if sends else rank.stages[after].passages[route].inputs
    other = there if sends else here
    clock, marks = Clock(rank.device), []
    for r in range(WARM_UP + repeats):
        out, back = Message(Kind.F, after, r), Message(Kind.B, s, r)
        if sends:
            mail.post(back, other, specs)
            tensors = tuple(spec.zeros(rank.device) for spec in specs)
            start = clock.mark()
            mail.send(out, tensors, other, specs)
            mail.take(back)
            marks.append((start, clock.mark()))
        else:
            mail.post(out, other, specs)
            mail.send(back, mail.take(out), other, specs)
    mail.flush()
    clock.settle()
    return _rounded([clock.ms(a, b) / 2 for a, b in marks[WARM_UP:]]) if marks else 0.0


def _budget(device: torch.device) -> int:
    """What a GPU has left, less a tenth for workspace. Not measured."""
    if device.type != "cuda":
        raise InputError("memory_bytes is missing: how many bytes of activations may this rank hold?")
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(0.9 * (free + cached))


def _host_budget(rank: Rank, costs: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The pool's limit in the problem's bytes: slots take more than `offload_bytes` where parts are uneven or pinned sizes rounded up."""
    limit = rank.pool.limit
    if limit is None:
        return None
    shares = [1.0]
    for s, cost in costs.items():
        if "offload_bytes" in cost:
            taken = sum(rank.pool.size(nbytes) for nbytes in rank.stages[s].part_bytes(cost["offload_parts"]))
            shares.append(cost["offload_bytes"] / taken)
    return int(limit * min(shares))
