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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, OFFLOAD, RECOMPUTE, Stage
from optpipe.steps.cost_model import ONCE
from optpipe_runtime.clock import Clock
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.handler import find_feature
from optpipe_runtime.execute.messages import messages_reserve
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.features.host_updates import HostUpdates
from optpipe_runtime.measure.copies import try_evictions, try_transfers
from optpipe_runtime.measure.links import Handover, LinkTimes, message_times
from optpipe_runtime.measure.rounds import routes, together
from optpipe_runtime.measure.trial import OpTimer, Spread, Trial, Trials
from optpipe_runtime.memory import pci
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.stage.io import clones
from optpipe_runtime.stage.levels import FULL, Level
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.split import main_grad

# Of several measurements the least counts: what certainly leaves, and what each device has.
DEVICE_LEAST = ("activation_budget_bytes", "host_memory_bytes")
LEAST = {"offload_bytes", "evict_bytes", *DEVICE_LEAST}
SIZES = ("activation_bytes", "saved_for_weight_bytes", "offload_bytes", "evict_bytes")


@dataclass(frozen=True)
class Measured:
    """What `profile` found.

    Attributes
    ----------
    problem
        It holds the medians.
    stages
        For each stage, the spread of each of its times, by name; those of levels as `cheap.recompute_ms`.
    links
        The spread of a message's time from one rank to another.
    places
        Where the GPU of each rank is (of its first inner peer); None where the system does not tell.
    host_links
        For each rank the host link that it shares with others, as the system tells; empty if none does.
    """

    problem: Problem
    stages: tuple[Mapping[str, Spread], ...]
    links: Mapping[tuple[int, int], Spread]
    places: tuple[pci.Place | None, ...]
    host_links: tuple[str | None, ...]

    def apart(self) -> list[str]:
        """A sentence for each host link that ranks share, but not in the problem."""
        lines = []
        for name in dict.fromkeys(filter(None, self.host_links)):
            ranks = [rank for rank, link in enumerate(self.host_links) if link == name]
            links = {self.problem.devices[rank].link for rank in ranks}
            if len(links) > 1 or None in links:
                lines.append(
                    f"ranks {', '.join(map(str, ranks))} share a host link, but not in the problem: with "
                    'links = "auto" their transfers take turns'
                )
        return lines


def by_microbatch(profiles: Sequence[Measured], forms: Sequence[int]) -> Measured:
    """One profile of micro-batches that differ, from a profile of each form: figures are lists, where they differ.

    What only some can do, the others do in no time and without any effect; a spread is the widest.
    """
    problems = [profiled.problem for profiled in profiles]
    if len(problems) == 1 and len(forms) == problems[0].microbatches:
        return profiles[0]
    stages = []
    for each in zip(*(problem.stages for problem in problems), strict=True):
        figures: dict[str, Any] = {"device": each[0].device}
        figures |= {name: getattr(each[0], name) for name in ONCE}  # what micro-batches do not differ in
        by_form = [_flat(stage) for stage in each]
        for name in dict.fromkeys(name for flat in by_form for name in flat):
            values = [_figure_or_nothing(stage, flat, name) for stage, flat in zip(each, by_form, strict=True)]
            if name not in figures:
                figures[name] = values[0] if len(set(values)) == 1 else tuple(values[form] for form in forms)
        stages.append(figures)
    messages = [problem.p2p_ms for problem in problems]
    problem = problems[0].replace(
        microbatches=len(forms),
        stages=[Stage.model_validate(_nested(figures)) for figures in stages],
        p2p_ms=messages[0] if len(set(messages)) == 1 else tuple(messages[form] for form in forms),
        devices=[
            devices[0].model_copy(update={name: _pick(min, map(vars, devices), name) for name in DEVICE_LEAST})
            for devices in zip(*(problem.devices for problem in problems), strict=True)
        ],
    )
    return replace(
        profiles[0],
        problem=problem,
        stages=tuple(
            {name: max((spreads[name] for spreads in each if name in spreads), key=_iqr) for name in each[0]}
            for each in zip(*(profiled.stages for profiled in profiles), strict=True)
        ),
        links={pair: max((profiled.links[pair] for profiled in profiles), key=_iqr) for pair in profiles[0].links},
    )


def figure_or_nothing(stage: Stage, name: str) -> Any:
    """A figure of a stage; of what it cannot do, what doing nothing takes."""
    return _figure_or_nothing(stage, _flat(stage), name)


def _figure_or_nothing(stage: Stage, flat: Mapping[str, Any], name: str) -> Any:
    nothing = {"recompute_ms": stage.forward_ms, "checkpoint_bytes": stage.activation_bytes}
    return flat.get(name, nothing.get(field_name(name), 0))


def _flat(stage: Stage) -> dict[str, Any]:
    """What a stage can do, each figure by one name, those of its levels as `cheap.recompute_ms`."""
    records = {"": stage} | {f"{level.name}.": level for level in stage.levels or ()}
    return {
        before + name: value
        for before, record in records.items()
        for name, value in record
        if value is not None and name not in ("levels", "name")
    }


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stage, from what `_flat` returns."""
    fields: dict[str, Any] = {}
    levels: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        level, _, field = name.rpartition(".")
        target = levels.setdefault(level, {"name": level}) if level else fields
        target[field] = value
    return fields | ({"levels": list(levels.values())} if levels else {})


def field_name(name: str) -> str:
    """Without the level that may stand before it."""
    return name.rpartition(".")[2]


def _iqr(spread: Spread) -> float:
    return spread.iqr_ms


Sizes = dict[nn.Parameter, int]  # bytes of gradients


def profile(rank: Rank, batch: Batch, given_budget: int | None, parts: int, repeats: int) -> Measured:
    """Collective: see `Pipeline.profile`. The first micro-batch of the batch is used. Without a `given_budget` it is
    `budget`."""
    clock = Clock(rank.device, rank.team.require_alive)
    trials = _trials(rank, batch, parts, clock)
    in_turn = [trial for by_route in trials.values() for trial in by_route.values()]
    with ExitStack() as stack:
        for stage in rank.stages.values():
            stack.enter_context(_unchanged(stage))
        _try_compute(rank, in_turn, clock, repeats)
        gradients = _gradients(rank)
        for level in (None, *_moved(rank)):
            try_transfers(rank, in_turn, level, clock, repeats)
        try_evictions(rank, trials, repeats)
        links, handover = message_times(rank, trials, clock, repeats)
        updates = _try_updates(rank, clock, repeats)
    clock.settle()
    budget_bytes = budget(rank, gradients) if given_budget is None else given_budget
    figures = _figures(rank, trials, budget_bytes, links, handover, updates)
    by_peer = rank.cpu_group.gather_by_peer(figures)
    host_links = pci.shared_links([[figures.place for figures in by_rank] for by_rank in by_peer])
    return _measured(rank, [_slowest(peers) for peers in zip(*by_peer, strict=True)], host_links)


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


class Figures(NamedTuple):
    """What one rank has found."""

    device: dict[str, Any]  # fields of the problem's device
    place: pci.Place | None
    costs: Mapping[int, dict[str, Any]]  # fields of each stage
    times: Mapping[int, Mapping[str, Spread]]  # of each stage, by field
    links: LinkTimes


def _figures(
    rank: Rank,
    trials: Trials,
    budget_bytes: int,
    links: LinkTimes,
    handover: Handover,
    updates: Mapping[int, Mapping[str, Spread]],
) -> Figures:
    counts = Counter(rank.layout.microbatch_routes)
    times = {s: {**_times(by_route, counts), **updates.get(s, {})} for s, by_route in trials.items()}
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
            "stages": [{"device": owner, **_nested(costs[s])} for s, owner in enumerate(layout.placement)],
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


def _slowest(peers: Sequence[Figures]) -> Figures:
    """What inner peers have found, as one rank: the longest times, the most bytes, but the least of what a device has
    and of what leaves it."""
    if len(peers) == 1:
        return peers[0]
    first = peers[0]
    return Figures(
        device={
            name: _pick(min, (peer.device for peer in peers), name) if name in LEAST else value
            for name, value in first.device.items()
        },
        place=first.place,
        costs={
            s: {
                name: _pick(min if field_name(name) in LEAST else max, (peer.costs[s] for peer in peers), name)
                for name in fields
                if all(name in peer.costs[s] for peer in peers)
            }
            for s, fields in first.costs.items()
        },
        times={
            s: {name: _pick(max, (peer.times[s] for peer in peers), name) for name in spreads}
            for s, spreads in first.times.items()
        },
        links={pair: _pick(max, (peer.links for peer in peers), pair) for pair in first.links},
    )


def _pick(least_or_most: Callable[..., Any], figures: Iterable[Mapping[Any, Any]], name: Any) -> Any:
    values = [figure[name] for figure in figures if figure.get(name) is not None]
    return least_or_most(values) if values else None


# Measurements. All of these are collective. Inner peers do equally many rounds of what runs their modules.


def _try_compute(rank: Rank, trials: Sequence[Trial], clock: Clock, repeats: int) -> None:
    def once() -> None:
        for trial in trials:
            trial.compute()

    together(rank, once, [trial.times for trial in trials], clock, repeats)


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


def _gradients(rank: Rank) -> Sizes:
    """What the gradients take that backwards have left, which may be less spread over inner peers than their parameters
    are. Those of gathered parameters are noted where these are (`Sharded.gradient_bytes`)."""
    rank.replicas.held_bytes()
    parameters = [parameter for stage in rank.stages.values() for parameter in stage.parameters()]
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
    weights, copies of buffers, and messages; less a tenth for workspace."""
    free, _ = torch.cuda.mem_get_info(rank.device)
    cached = torch.cuda.memory_reserved(rank.device) - torch.cuda.memory_allocated(rank.device)
    still_to_come = messages_reserve(rank.number, rank.layout, rank.io)
    for s, stage in rank.stages.items():
        still_to_come += stage.cast_bytes + stage.buffer_bytes + rank.replicas.gradient_bytes(s)
        for parameter in (*rank.replicas.parameters(s), *stage.outside.named_parameters().values()):
            if parameter.requires_grad and main_grad(parameter) is None:  # whose buffer is there
                still_to_come += max(0, gradients.get(parameter, local(parameter).nbytes) - _gradient_bytes(parameter))
    return max(0, int(0.9 * (free + cached - still_to_come)))


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
