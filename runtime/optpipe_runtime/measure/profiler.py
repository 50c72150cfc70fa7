"""`profile`: a `Problem` measured on the user's stages, with the split backward, the hooks and the copies that training
uses.

Compute and host transfers are measured one after the other, each on all ranks at the same time and equally long on all:
faster ranks do more rounds, so that no rank is measured beside ranks that have already finished. While a transfer is
under way its stage computes another micro-batch. If transfers can run in both directions at once, they do so here;
ranks that share a link use it one after the other. The loss is part of the last stage. Messages are measured between
all ranks that can be paired at a time, while the others compute. The time that a rank needs to hand a message over is
part of the op that made it.

Times are medians in ms, after a warm-up that also allocates gradients. Bytes are counted by live storages:
`activation_bytes` after F, `checkpoint_bytes` after an F that a C repeats, `saved_for_weight_bytes` between B and W,
`offload_bytes` is what drops really freed. Parts of an activation need not be equal, but the problem takes them to be:
each counts as the smallest, so no rank holds more than certified. For a stage on several routes, a time is the mean
over the micro-batches, and a size is the one that is safe for all routes. Inner peers count as one rank, as slow and as
full as the slowest and the fullest of them."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, OFFLOAD, RECOMPUTE
from optpipe_runtime.clock import Clock
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.handler import find_feature
from optpipe_runtime.execute.messages import messages_reserve
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.features.host_updates import HostUpdates
from optpipe_runtime.measure.at_b import AtB, at_b
from optpipe_runtime.measure.copies import try_evictions, try_transfers
from optpipe_runtime.measure.links import message_times
from optpipe_runtime.measure.rounds import routes, together
from optpipe_runtime.measure.trial import OpTimer, Spread, Trial
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.stage.io import clones
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.split import main_grad

log = logging.getLogger("optpipe.runtime")

LAUNCHES = 3  # rounds that time the host
LEAST = {"offload_bytes", "evict_bytes"}  # of several measurements the least counts: what certainly leaves
SIZES = ("activation_bytes", "saved_for_weight_bytes", "checkpoint_bytes", "offload_bytes", "evict_bytes")


@dataclass(frozen=True)
class Measured:
    """What `profile` found.

    Attributes
    ----------
    problem
        It holds the medians.
    stages
        For each stage, the spread of each of its times, by name.
    links
        The spread of a message's time from one rank to another.
    launch_bound
        On GPUs, stage and name of each time that may be the host's.
    at_b
        By stage, which weight gradients come at B, and how much of its time they take.
    """

    problem: Problem
    stages: tuple[Mapping[str, Spread], ...]
    links: Mapping[tuple[int, int], Spread]
    launch_bound: tuple[tuple[int, str], ...]
    at_b: Mapping[int, AtB] = field(default_factory=dict)

    def tell(self) -> None:
        """Logs what the problem does not say."""
        for s, stage in sorted(self.at_b.items()):
            log.info("stage %d: %s", s, stage)
        if self.launch_bound:
            log.warning("these times may be those of the launches on the host (stage, time): %s", self.launch_bound)


Sizes = dict[nn.Parameter, int]  # bytes of gradients


def profile(rank: Rank, batch: Batch, given_budget: int | None, parts: int, repeats: int) -> Measured:
    """Collective: see `Pipeline.profile`. The first micro-batch of the batch is used. Without a `given_budget` it is
    `budget`."""
    m = rank.layout.microbatches
    # Clones, because a stage or the loss may change them in place in every round.
    inputs = clones(batch.cut_inputs(m)[0]) if rank.takes_inputs else ()
    targets = clones(batch.cut_targets(m)[0]) if rank.takes_targets else ()
    layout, clock = rank.layout, Clock(rank.device, rank.team.require_alive)
    named = {s: clones(batch.cut_kwargs(s, m)[0]) for s in rank.stages}
    trials = {
        s: {r: Trial(stage, r, (inputs, targets, named[s]), parts, clock) for r in routes(rank, s)}
        for s, stage in rank.stages.items()
    }
    with ExitStack() as stack:
        for stage in rank.stages.values():
            stack.enter_context(_unchanged(stage))
        everything = [trial for by_route in trials.values() for trial in by_route.values()]
        _try_compute(rank, everything, clock, repeats)
        gradients = _gradients(rank)
        left_at_b = at_b(rank, everything, clock, repeats)
        try_transfers(rank, everything, clock, repeats)
        try_evictions(rank, trials, repeats)
        links, handover = message_times(rank, trials, clock, repeats)
        updates = _try_updates(rank, clock, repeats)
    clock.settle()
    counts = Counter(layout.microbatch_routes)
    times = {s: _times(by_route, counts) | updates.get(s, {}) for s, by_route in trials.items()}
    for (s, name), ms in handover.items():
        times[s][name] = times[s][name].longer(ms)
    costs = {s: _costs(times[s], list(by_route.values()), parts) for s, by_route in trials.items()}
    host = _host_budget(rank, everything, costs)
    device = {
        "activation_budget_bytes": budget(rank, gradients) if given_budget is None else given_budget,
        "host_memory_bytes": host,
        "peer": layout.peer(rank.number),
        "link": layout.link(rank.number),
    }
    by_peer = rank.cpu_group.gather_by_peer((device, costs, times, links, _launch_bound(rank, times)))
    gathered = [_slowest(peers) for peers in zip(*by_peer, strict=True)]
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
        at_b=left_at_b,
    )


Found = tuple[
    dict[str, Any],  # of the device
    Mapping[int, dict[str, Any]],  # costs of each stage
    Mapping[int, Mapping[str, Spread]],  # times of each stage
    Mapping[tuple[int, int], Spread],  # times of messages
    Sequence[tuple[int, str]],  # what is launch-bound
]


def _slowest(peers: Sequence[Found]) -> Found:
    """What inner peers have found, as one rank: the longest times, the most bytes, but the least of what a device has
    and of what leaves it."""
    if len(peers) == 1:
        return peers[0]
    devices, costs, times, links, bounds = zip(*peers, strict=True)
    least = {"activation_budget_bytes", "host_memory_bytes"}
    device = {name: _of_all(min, devices, name) if name in least else value for name, value in devices[0].items()}
    return (
        device,
        {
            s: {
                name: _of_all(min if name in LEAST else max, [found[s] for found in costs], name)
                for name in costs[0][s]
                if all(name in found[s] for found in costs)
            }
            for s in costs[0]
        },
        {s: {name: _of_all(max, [found[s] for found in times], name) for name in times[0][s]} for s in times[0]},
        {pair: _of_all(max, links, pair) for pair in links[0]},
        sorted({found for bound in bounds for found in bound}),
    )


def _of_all(pick: Callable[..., Any], found: Sequence[Mapping[Any, Any]], name: Any) -> Any:
    values = [one[name] for one in found if one.get(name) is not None]
    return pick(values) if values else None


# Measurements. All of these are collective. Inner peers do equally many rounds of what runs their modules.


def _try_compute(rank: Rank, trials: Sequence[Trial], clock: Clock, repeats: int) -> None:
    def once() -> None:
        for trial in trials:
            trial.compute()

    times = [trial.compute_times for trial in trials]
    together(rank, once, times, clock, repeats)
    if rank.device.type == "cuda":
        with ExitStack() as stack:
            for timer in times:
                stack.enter_context(timer.launches())
            for _ in range(LAUNCHES):
                once()


def _try_updates(rank: Rank, clock: Clock, repeats: int) -> dict[int, dict[str, Spread]]:
    """Optimizers on the host, of all ranks at once. A second optimizer of each stage runs with gradients of zero, so
    that the state of the first stays."""
    on_host = find_feature(rank.features, HostUpdates)
    optimizers = {} if on_host is None else on_host.optimizers
    updates = [(OpTimer(clock), optimizer.duplicate()) for optimizer in optimizers.values()]

    def once() -> None:
        for times, second in updates:
            for name, copies in second.try_ops().items():
                times.copies(name, [copies])

    together(rank, once, [times for times, _ in updates], clock, repeats)
    return {s: times.spreads() for s, (times, _) in zip(optimizers, updates, strict=True)}


@contextmanager
def _unchanged(stage: StageRunner) -> Iterator[None]:
    """After this context gradients, buffers and random numbers are what they were."""
    gradients = [(parameter, parameter.grad) for parameter in stage.module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    with stage.replay.undisturbed():
        yield
    stage.end_step()
    for parameter, gradient in gradients:
        parameter.grad = gradient


# Results


def _times(by_route: Mapping[int, Trial], counts: Mapping[int, int]) -> dict[str, Spread]:
    """A stage's times: the mean of the medians over its routes, weighted by micro-batches, and the widest spread."""
    found: dict[str, list[tuple[int, Spread]]] = defaultdict(list)
    for route, trial in by_route.items():
        for times in (trial.compute_times, trial.copy_times, trial.eviction_times):
            for name, spread in times.spreads().items():
                found[name].append((max(1, counts[route]), spread))
    return {name: Spread.mean(spreads) for name, spreads in found.items()}


def _costs(times: Mapping[str, Spread], trials: Sequence[Trial], parts: int) -> dict[str, Any]:
    """A stage's cost fields, without those of what it cannot do."""
    sizes = {name: (min if name in LEAST else max)(trial.sizes.get(name, 0) for trial in trials) for name in SIZES}
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
    """On a GPU, the times that are launch-bound. Not measured."""
    if rank.device.type != "cuda":
        return []
    return [(s, name) for s, spreads in times.items() for name, spread in spreads.items() if spread.launch_bound]


def _gradients(rank: Rank) -> Sizes:
    """What the gradients take that backwards have left, which may be less spread over inner peers than their parameters
    are. Those of gathered parameters are noted where these are (`Sharded.gradient_bytes`)."""
    rank.replicas.held_bytes()
    parameters = [parameter for stage in rank.stages.values() for parameter in stage.module.parameters()]
    return {p: _gradient_bytes(p) for p in parameters if p.grad is not None and not p.grad.is_sparse}


def _gradient_bytes(parameter: nn.Parameter) -> int:
    """What its gradient takes. That of a sparse one depends on the batch, so it counts as if it was still to come."""
    gradient = parameter.grad
    return 0 if gradient is None or gradient.is_sparse else local(gradient).untyped_storage().nbytes()


def require_budget(rank: Rank) -> None:
    """Raises `InputError` on CPU, which has no `budget`."""
    if rank.device.type != "cuda":
        raise InputError("activation_budget_bytes is missing: how many bytes of activations may this rank hold?")


def budget(rank: Rank, gradients: Sizes) -> int:
    """The free memory of a GPU, less what else a step allocates: gradients, as large as they were found to be, casts of
    weights, and messages; less a tenth for workspace."""
    free, _ = torch.cuda.mem_get_info(rank.device)
    cached = torch.cuda.memory_reserved(rank.device) - torch.cuda.memory_allocated(rank.device)
    coming = messages_reserve(rank.number, rank.layout, rank.io)
    for s, stage in rank.stages.items():
        coming += stage.cast_bytes + rank.replicas.gradient_bytes(s)
        for parameter in rank.replicas.parameters(s):
            if parameter.requires_grad and main_grad(parameter) is None:  # whose buffer is there
                coming += max(0, gradients.get(parameter, local(parameter).nbytes) - _gradient_bytes(parameter))
    return max(0, int(0.9 * (free + cached - coming)))


def _host_budget(rank: Rank, trials: Sequence[Trial], costs: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The pool's limit in the problem's bytes. Pages take more than `offload_bytes`, because parts are uneven and sizes
    are rounded up."""
    limit = rank.pool.limit
    if limit is None:
        return None
    known = [(trial, costs[trial.stage.index].get("offload_bytes")) for trial in trials]
    return int(
        limit * min((offloaded / trial.host_bytes(rank.pool) for trial, offloaded in known if offloaded), default=1.0)
    )
