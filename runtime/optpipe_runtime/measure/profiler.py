"""`profile`: a `Problem` measured on the user's stages, with the split backward, the hooks and the copies that training
uses.

Compute and host transfers are measured one after the other, each on all ranks at the same time and for as long on all:
who is faster does more rounds, so that nobody is measured beside ranks that have already finished. Where transfers run
both ways at once, they do here; ranks that take turns on a link take turns here. The loss is part of the last stage.
Links between ranks are measured one after the other; what it takes a rank to hand a message over is part of the op that
made it.

Times are medians in ms, after warm-up, in which gradients are allocated, too. Bytes are counted by live storages:
`activation_bytes` after F, `checkpoint_bytes` after an F that a C repeats, `saved_for_weight_bytes` between B and W,
`offload_bytes` what drops really freed. Parts need not be equal, the problem says they are: each counts as the
smallest, so no rank holds more than certified. Of a stage that serves several routes, times are the mean over the
micro-batches, and of sizes the safe one counts.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

import torch

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, OFFLOAD, RECOMPUTE
from optpipe_runtime.execute.lowering import Guests, Message
from optpipe_runtime.execute.stage import StageRunner, Tensors
from optpipe_runtime.measure.clock import Clock
from optpipe_runtime.measure.trial import Spread, Times, Trial
from optpipe_runtime.ranks.rank import Rank

WARM_UP = 2  # rounds
MOST_ROUNDS = 1000
LINK_ROUNDS = 3  # for each of the repeats: messages are short
SIZES = ("activation_bytes", "saved_for_weight_bytes", "checkpoint_bytes", "offload_bytes", "evict_bytes")


@dataclass(frozen=True)
class Measured:
    """What `profile` found. The problem holds the medians; here is how far measurements are spread."""

    problem: Problem
    stages: tuple[Mapping[str, Spread], ...]  # by stage, of each of its times
    links: Mapping[tuple[int, int], Spread]  # of a message from one rank to another
    launch_bound: tuple[tuple[int, str], ...]  # stage and time, on GPUs


def profile(
    rank: Rank, inputs: Tensors, targets: Tensors, activation_budget_bytes: int, parts: int, repeats: int
) -> Measured:
    """Collective. `inputs` and `targets` are those of one micro-batch, on the ranks that need them. See
    `Pipeline.profile`."""
    # A stage, or the loss, may change them in place, again and again.
    inputs, targets = (tuple(tensor.clone() for tensor in given) for given in (inputs, targets))
    layout, clock = rank.layout, Clock(rank.device)
    trials = {
        s: {r: Trial(stage, r, inputs, targets, parts, clock) for r in _routes(rank, s)}
        for s, stage in rank.stages.items()
    }
    with ExitStack() as stack:
        for stage in rank.stages.values():
            stack.enter_context(_as_before(stage))
        everything = [trial for ways in trials.values() for trial in ways.values()]
        _try_compute(rank, everything, clock, repeats)
        _try_transfers(rank, everything, clock, repeats)
        _try_evictions(rank, trials, repeats)
        links, handing = _links(rank, trials, clock, repeats)
        updates = _try_updates(rank, clock, repeats)
    clock.settle()
    counts = Counter(layout.microbatch_routes)
    times = {s: _times(ways, counts) | updates.get(s, {}) for s, ways in trials.items()}
    for (s, name), ms in handing.items():
        times[s][name] = times[s][name].longer(ms)
    costs = {s: _costs(times[s], list(ways.values()), parts) for s, ways in trials.items()}
    host = _host_budget(rank, everything, costs)
    device = {
        "activation_budget_bytes": activation_budget_bytes,
        "host_memory_bytes": host,
        "peer": layout.peer(rank.number),
        "link": layout.link(rank.number),
    }
    gathered = rank.council.gather((device, costs, times, links, _launch_bound(rank, times)))
    problem = Problem.from_dict(
        {
            **layout.to_dict(),
            "p2p_ms": max((spread.ms for *_, links, _ in gathered for spread in links.values()), default=0.0),
            "transfer_mode": "full_duplex" if layout.full_duplex else "half_duplex",
            "devices": [device for device, *_ in gathered],
            "stages": [{"device": owner} | gathered[owner][1][s] for s, owner in enumerate(layout.placement)],
        },
        "the measured problem",
    )
    own = [(gathered[owner][1][s], gathered[owner][2][s]) for s, owner in enumerate(layout.placement)]
    return Measured(
        problem=problem,
        stages=tuple({k: times[k] for k in costs if k in times} for costs, times in own),
        links={pair: spread for *_, links, _ in gathered for pair, spread in links.items()},
        launch_bound=tuple(found for *_, bound in gathered for found in bound),
    )


def _routes(rank: Rank, s: int) -> list[int]:
    """Those over a stage that micro-batches take."""
    over = [r for r, route in enumerate(rank.layout.routes) if s in route]
    return [r for r in over if r in rank.layout.microbatch_routes] or over[:1]


# Trying things out. All of these are collective


def _together(rank: Rank, once: Callable[[], object], times: Iterable[Times], clock: Clock, repeats: int) -> None:
    """Warms up, then calls `once` at least `repeats` times, on every rank about as long as on the slowest."""
    rank.council.least(0)  # what was measured before is over everywhere
    own = 0.0
    for _ in range(WARM_UP):
        start = time.perf_counter()
        once()
        clock.settle()
        own = time.perf_counter() - start
    for kept in times:
        kept.clear()
    slowest = -rank.council.least(-int(1e9 * own))[0] / 1e9  # here all begin
    for _ in range(min(MOST_ROUNDS, max(repeats, ceil(repeats * slowest / own)))):
        once()
    clock.settle()


def _try_compute(rank: Rank, trials: Sequence[Trial], clock: Clock, repeats: int) -> None:
    def once() -> None:
        for trial in trials:
            trial.compute()

    _together(rank, once, [trial.computing for trial in trials], clock, repeats)


def _try_transfers(rank: Rank, trials: Sequence[Trial], clock: Clock, repeats: int) -> None:
    """Activations of all stages go out and come back, one after the other; in full duplex one comes back while the next
    goes out."""
    layout, limit = rank.layout, rank.pool.limit
    fitting = [trial for trial in trials if limit is None or trial.host_bytes(rank.pool) <= limit]
    two = 2 * max((trial.host_bytes(rank.pool) for trial in fitting), default=0)
    both_ways = layout.full_duplex and bool(fitting) and (limit is None or two <= limit)
    moving = [(trial, j) for j, trial in enumerate(fitting * 2 if both_ways and len(fitting) == 1 else fitting)]
    for trial, j in moving:
        trial.forward(j)
    sharers = layout.shared_links.get(layout.link(rank.number) or "", ())
    for turn in range(max(map(len, layout.shared_links.values()), default=1)):
        here = moving if not sharers or sharers[turn % len(sharers)] == rank.number else []
        with _one_away(here if both_ways else []):
            once = partial(_both_ways if both_ways else _one_way, here)
            _together(rank, once, [trial.moving for trial, _ in here], clock, repeats)
    for trial, j in moving:
        trial.forget(j)


def _one_way(moving: Sequence[tuple[Trial, int]]) -> None:
    for trial, j in moving:
        trial.end_out(j, trial.start_out(j))
        trial.end_back(j, trial.start_back(j))


def _both_ways(moving: Sequence[tuple[Trial, int]]) -> None:
    """The first is away, before and after."""
    for (trial, j), (other, k) in pairwise([*moving, *moving[:1]]):
        returning, leaving = trial.start_back(j), other.start_out(k)
        other.end_out(k, leaving)
        trial.end_back(j, returning)


@contextmanager
def _one_away(moving: Sequence[tuple[Trial, int]]) -> Iterator[None]:
    for trial, j in moving[:1]:
        trial.end_out(j, trial.start_out(j))
    yield
    for trial, j in moving[:1]:
        trial.come_home(j)


def _try_evictions(rank: Rank, trials: Mapping[int, Mapping[int, Trial]], repeats: int) -> None:
    """From one stage after the other, on the first route over it."""
    for s, owner in enumerate(rank.layout.placement):
        leaving = rank.passages[s, _routes(rank, s)[0]].leaving
        rank.council.least(0)  # one link at a time
        if rank.layout.peer(owner) is None or not any(leaving):
            continue
        if owner == rank.number:
            trial = trials[s][_routes(rank, s)[0]]
            freed = {trial.visit(rank.peers) for _ in range(WARM_UP)}
            trial.visiting.clear()
            freed |= {trial.visit(rank.peers) for _ in range(repeats)}
            trial.sizes["evict_bytes"] = (
                sum(leaving) if freed == {sum(leaving)} else 0
            )  # 0: a drop frees something else
        elif rank.layout.peer(owner) == rank.number:
            visits = tuple((s, r) for r in range(WARM_UP + repeats))
            rank.peers.start_step({owner: Guests(visits, visits)})
            for visit in visits:
                rank.peers.accept(owner, visit, [size for size in leaving if size])
                rank.peers.vacate(visit)


Handing = dict[tuple[int, str], float]  # by stage and the name of an op's time, ms


def _links(
    rank: Rank, trials: Mapping[int, Mapping[int, Trial]], clock: Clock, repeats: int
) -> tuple[dict[tuple[int, int], Spread], Handing]:
    """From this rank to others, what a message takes on its way: half of the time from when it was handed over to its
    answer; and what F and B take to hand one over and to ask for the next. One pair of ranks after the other. As in a
    step, what is sent has just been computed, and who receives it waits for it already."""
    found: dict[tuple[int, int], Spread] = {}
    handing: Handing = defaultdict(float)
    placement, mail = rank.layout.placement, rank.mail
    for route, s, after in rank.layout.passages():
        here, there = placement[s], placement[after]
        rank.council.least(0)  # one link at a time
        if here == there or rank.number not in (here, there) or route not in _routes(rank, s):
            continue
        times, first = Times(clock), rank.number == here
        specs, rounds = rank.passages[s, route].outputs, WARM_UP + LINK_ROUNDS * repeats
        mail.start_step()
        if not first:
            mail.post(Message(Kind.F, after, 0), here, specs)
        for r in range(rounds):
            if r == WARM_UP:
                times.clear()
            out, back = Message(Kind.F, after, r), Message(Kind.B, s, r)
            if first:
                tensors = trials[s][route].outputs()
                with times.of("handing"):
                    mail.post(back, there, specs)
                    mail.send(out, tensors, there, specs)
                with times.of("answer"):
                    mail.take(back)
            else:
                received = mail.take(out)
                with times.of("handing"):
                    if r + 1 < rounds:
                        mail.post(Message(Kind.F, after, r + 1), here, specs)
                    mail.send(back, received, here, specs)
        mail.flush()
        clock.settle()
        op = (s, "forward_ms") if first else (after, "backward_input_ms")
        handing[op] = max(times.spreads()["handing"].ms, handing[op])
        if first:
            way = times.spreads(0.5)["answer"]
            found[here, there] = max(way, found.get((here, there), way))
    return found, handing


def _try_updates(rank: Rank, clock: Clock, repeats: int) -> dict[int, dict[str, Spread]]:
    """Optimizers on the host, of all ranks at once: by a second one each, with gradients of zeros. What the first ones
    have, stays."""
    updates = [(Times(clock), host.second()) for host in rank.host_optimizers.values()]

    def once() -> None:
        for times, second in updates:
            for name, copies in second.rehearse().items():
                times.copies(name, [copies])

    _together(rank, once, [times for times, _ in updates], clock, repeats)
    return {s: times.spreads() for s, (times, _) in zip(rank.host_optimizers, updates, strict=True)}


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


# What it comes to


def _times(ways: Mapping[int, Trial], counts: Mapping[int, int]) -> dict[str, Spread]:
    """A stage's times: over the routes that it serves the mean of the medians, by micro-batches, and the widest
    spread."""
    found: dict[str, list[tuple[int, Spread]]] = defaultdict(list)
    for route, trial in ways.items():
        for times in (trial.computing, trial.moving, trial.visiting):
            for name, spread in times.spreads().items():
                found[name].append((max(1, counts[route]), spread))
    return {name: Spread.mean(spreads) for name, spreads in found.items()}


def _costs(times: Mapping[str, Spread], trials: Sequence[Trial], parts: int) -> dict[str, Any]:
    """A stage's cost fields; of what it cannot do, none."""
    least = {"offload_bytes", "evict_bytes"}
    sizes = {name: (min if name in least else max)(trial.sizes.get(name, 0) for trial in trials) for name in SIZES}
    found = {name: spread.ms for name, spread in times.items()} | sizes | {"offload_parts": parts}
    left_out: set[str] = set()
    if not sizes["offload_bytes"]:
        left_out |= {*OFFLOAD, "offload_parts"}
    if not sizes["evict_bytes"]:
        left_out |= {*EVICTION}
    if sizes["checkpoint_bytes"] >= sizes["activation_bytes"]:
        left_out |= {*RECOMPUTE}
    return {name: value for name, value in found.items() if name not in left_out}


def _launch_bound(rank: Rank, times: Mapping[int, Mapping[str, Spread]]) -> list[tuple[int, str]]:
    """On a GPU, what is launch-bound. Not measured."""
    if rank.device.type != "cuda":
        return []
    return [(s, name) for s, spreads in times.items() for name, spread in spreads.items() if spread.launch_bound]


def budget(rank: Rank) -> int:
    """What a GPU has left, less gradients that are still to come, less a tenth for workspace. Not measured."""
    device = rank.device
    if device.type != "cuda":
        raise InputError("activation_budget_bytes is missing: how many bytes of activations may this rank hold?")
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    parameters = [parameter for stage in rank.stages.values() for parameter in stage.module.parameters()]
    coming = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad and parameter.grad is None)
    return max(0, int(0.9 * (free + cached - coming)))


def _host_budget(rank: Rank, trials: Sequence[Trial], costs: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The pool's limit in the problem's bytes: pages take more than `offload_bytes` where parts are uneven or sizes
    rounded up."""
    limit = rank.pool.limit
    if limit is None:
        return None
    known = [(trial, costs[trial.stage.index].get("offload_bytes")) for trial in trials]
    return int(
        limit * min((offloaded / trial.host_bytes(rank.pool) for trial, offloaded in known if offloaded), default=1.0)
    )
