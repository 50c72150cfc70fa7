"""`profile`: a `Problem` measured on the user's stages, with the split backward, the hooks and the copies that training
uses.

Compute and host transfers are measured one after the other, each on all ranks at the same time and equally long on all,
and while a transfer is under way its stage computes another micro-batch (docs/profile.md). The time that a rank needs
to hand a message over is part of the op that made it.

Times are medians in ms, bytes are counted by live storages. Parts of an activation need not be equal, but the problem
takes them to be: each counts as the smallest, so no rank holds more than certified. For a stage on several routes, a
time is the mean over the micro-batches, and a size is the one that is safe for all routes. Inner peers count as one
rank, as slow and as full as the slowest and the fullest of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, OFFLOAD, RECOMPUTE
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.learner import Learner
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.measure.budget import budget, gradients_now
from optpipe_runtime.measure.copies import try_transfers
from optpipe_runtime.measure.links import Handover, LinkTimes, message_times
from optpipe_runtime.measure.measured import LEAST, Figures, Measured, by_microbatch, field_name, nested, slowest
from optpipe_runtime.measure.rounds import routes, together
from optpipe_runtime.memory import pci
from optpipe_runtime.memory.clock import Clock
from optpipe_runtime.stage.io import clones
from optpipe_runtime.stage.levels import FULL, Level
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.timer import Spread
from optpipe_runtime.stage.trial import Trial, Trials

SIZES = ("activation_bytes", "saved_for_weight_bytes", "offload_bytes", "evict_bytes")


def profile(rank: Rank, learner: Learner, batch: Batch, given_budget: int | None, parts: int, repeats: int) -> Measured:
    """Collective: see `Pipeline.profile`. Without a `given_budget` it is `budget`. Of a whole batch the first
    micro-batch is used; of micro-batches that are cut already one of each form, one after the other."""
    if not learner.varies:
        with rank.team.local():
            return _profile_form(rank, batch, given_budget, parts, repeats)
    forms, m = rank.forms, rank.layout.microbatches
    if len(rank.layout.routes) > 1:
        raise InputError("profile was given Microbatches: with several routes give whole batches of equal ones")
    profiles = []
    with learner.aside():
        for form in range(max(forms) + 1):
            one = batch.only([forms.index(form)], m)
            learner.learn(one)
            with rank.team.local():
                profiles.append(_profile_form(rank, one, given_budget, parts, repeats))
    return by_microbatch(profiles, forms)


def _profile_form(rank: Rank, batch: Batch, given_budget: int | None, parts: int, repeats: int) -> Measured:
    clock = Clock(rank.device, rank.team.require_alive)
    trials = _trials(rank, batch, parts, clock)
    in_turn = [trial for by_route in trials.values() for trial in by_route.values()]
    with ExitStack() as stack:
        for stage in rank.stages.values():
            stack.enter_context(_unchanged(stage))
        _try_compute(rank, in_turn, clock, repeats)
        gradients = gradients_now(rank)
        for level in (None, *_moved(rank)):
            try_transfers(rank, in_turn, level, clock, repeats)
        links, handover = message_times(rank, trials, clock, repeats)
        times_of_features = [feature.profile(trials, clock, repeats) for feature in rank.features]
    clock.settle()
    budget_bytes = budget(rank, gradients) if given_budget is None else given_budget
    figures = _figures(rank, trials, budget_bytes, links, handover, times_of_features)
    by_peer = rank.cpu_group.gather_by_peer(figures)
    host_links = pci.shared_links([[figures.place for figures in by_rank] for by_rank in by_peer])
    return _measured(rank, [slowest(peers) for peers in zip(*by_peer, strict=True)], host_links)


def _trials(rank: Rank, batch: Batch, parts: int, clock: Clock) -> Trials:
    m = rank.layout.microbatches
    # Clones, because a stage or the loss may change them in place in every round.
    inputs = clones(batch.cut_inputs(m)[0]) if rank.takes_inputs else ()
    targets = clones(batch.cut_targets(m)[0]) if rank.takes_targets else ()
    named = {s: clones(batch.cut_kwargs(s, m)[0]) for s in rank.stages}
    return {
        s: {
            r: Trial(stage, r, (inputs, targets, named[s]), parts, tuple(rank.levels.values()), clock)
            for r in routes(rank, s)
        }
        for s, stage in rank.stages.items()
    }


def _moved(rank: Rank) -> Sequence[Level]:
    """The levels whose checkpoints are offloaded: where there is only the full one, only whole activations are."""
    levels = tuple(rank.levels.values())
    return () if levels == (FULL,) else levels


def _figures(
    rank: Rank,
    trials: Trials,
    budget_bytes: int,
    links: LinkTimes,
    handover: Handover,
    times_of_features: Sequence[Mapping[int, Mapping[str, Spread]]],
) -> Figures:
    counts = Counter(rank.layout.microbatch_routes)
    times = {s: _times(by_route, counts) for s, by_route in trials.items()}
    for by_stage in times_of_features:
        for s, spreads in by_stage.items():
            times[s] |= spreads
    for (s, name), ms in handover.items():
        times[s][name] = times[s][name].longer(ms)
    costs = {s: _costs(times[s], list(by_route.values())) for s, by_route in trials.items()}
    device = {
        "activation_budget_bytes": budget_bytes,
        "host_memory_bytes": _host_budget(rank, trials, costs),
        "peer": rank.layout.peer(rank.number),
        "link": rank.layout.link(rank.number),
    }
    return Figures(device, pci.place(rank.device), costs, times, links)


def _measured(rank: Rank, by_rank: Sequence[Figures], host_links: tuple[str | None, ...]) -> Measured:
    layout = rank.layout
    messages = {pair: spread for figures in by_rank for pair, spread in figures.links.items()}
    costs = [by_rank[owner].costs[s] for s, owner in enumerate(layout.placement)]
    times = [by_rank[owner].times[s] for s, owner in enumerate(layout.placement)]
    problem = Problem.from_dict(
        {
            **layout.to_dict(),
            "p2p_ms": max((spread.ms for spread in messages.values()), default=0.0),
            "transfer_mode": "full_duplex" if layout.full_duplex else "half_duplex",
            "devices": [figures.device for figures in by_rank],
            "stages": [{"device": owner, **nested(costs[s])} for s, owner in enumerate(layout.placement)],
        },
        "the measured problem",
    )
    return Measured(
        problem=problem,
        stages=tuple(
            {name: spreads[name] for name in fields if name in spreads}
            for fields, spreads in zip(costs, times, strict=True)
        ),
        links=messages,
        places=tuple(figures.place for figures in by_rank),
        host_links=host_links,
    )


# Measurements. All of these are collective. Inner peers do equally many rounds of what runs their modules.


def _try_compute(rank: Rank, trials: Sequence[Trial], clock: Clock, repeats: int) -> None:
    def once() -> None:
        for trial in trials:
            trial.compute()

    together(rank, once, [trial.times for trial in trials], clock, repeats)


@contextmanager
def _unchanged(stage: StageRunner) -> Iterator[None]:
    """After this context gradients, buffers and random numbers are what they were."""
    gradients = [(parameter, parameter.grad) for parameter in stage.parameters()]
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
    weighed: dict[str, list[tuple[int, Spread]]] = defaultdict(list)
    for route, trial in by_route.items():
        for name, spread in trial.times.spreads().items():
            weighed[name].append((max(1, counts[route]), spread))
    return {name: Spread.mean(spreads) for name, spreads in weighed.items()}


def _costs(times: Mapping[str, Spread], trials: Sequence[Trial]) -> dict[str, Any]:
    """A stage's cost fields, without those of what it cannot do."""
    levels = [partial(trials[0].field_of, level) for level in trials[0].levels]
    one = trials[0].levels == (FULL,)  # which moves no checkpoints
    names = dict.fromkeys(
        [*SIZES, *(field(name) for field in levels for name in ("checkpoint_bytes", "offload_bytes"))]
    )
    sizes = {
        name: (min if field_name(name) in LEAST else max)(trial.sizes.get(name, 0) for trial in trials)
        for name in names
    }
    fields = {name: spread.ms for name, spread in times.items()} | sizes | {"offload_parts": trials[0].parts}
    left_out: set[str] = set()
    if not sizes["offload_bytes"]:
        left_out |= {*OFFLOAD, "offload_parts"}
    if not sizes["evict_bytes"]:
        left_out |= {*EVICTION}
    for field in levels:
        if not sizes[field("offload_bytes")]:
            left_out |= set(map(field, OFFLOAD))
        if sizes[field("checkpoint_bytes")] >= sizes["activation_bytes"]:
            left_out |= set(map(field, RECOMPUTE if one else (*RECOMPUTE, *OFFLOAD)))
    return {name: value for name, value in fields.items() if name not in left_out}


def _host_budget(rank: Rank, trials: Trials, costs: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The pool's limit in the problem's bytes. Pages take more than `offload_bytes`, because parts are uneven and sizes
    are rounded up."""
    limit = rank.pool.limit
    if limit is None:
        return None
    shares = [
        offloaded / trial.host_bytes(rank.pool, level)
        for s, by_route in trials.items()
        for trial in by_route.values()
        for level in (None, *_moved(rank))
        if (offloaded := costs[s].get(trial.field_of(level, "offload_bytes")))
    ]
    return int(limit * min(shares, default=1.0))
