"""`profile`: a `Problem` measured on the user's stages, with the split backward, the hooks and the copies that training
uses.

Compute and host transfers are measured one after the other, each on all ranks at the same time and equally long on all,
and while a transfer is under way its stage computes another micro-batch (docs/profile.md). The time that a rank needs
to hand a message over is part of the op that computes it.

Times are medians in ms, bytes are counted by live storages. Parts of an activation need not be equal, but the problem
takes them to be: each counts as the smallest, so no rank holds more than certified. For a stage on several routes, a
time is the mean over the micro-batches, and a size is the one that is safe for all routes. Inner peers count as one
rank, as slow and as full as the slowest and the fullest of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, OFFLOAD, RECOMPUTE
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.learner import Learner
from optpipe_runtime.execute.messages import messages_reserve
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.measure.measured import LEAST, Figures, Measured, by_microbatch, field_name, nested, slowest
from optpipe_runtime.measure.together import message_times, routes, together, try_transfers
from optpipe_runtime.memory import pci
from optpipe_runtime.memory.engines import Clock
from optpipe_runtime.stage.io import clones
from optpipe_runtime.stage.levels import FULL, Level
from optpipe_runtime.stage.split import main_grad
from optpipe_runtime.stage.trial import Spread, Trial, Trials
from optpipe_runtime.torch_private.tensors import local

SIZES = ("activation_bytes", "saved_for_weight_bytes", "offload_bytes", "evict_bytes")


class Asked(NamedTuple):
    """Arguments of `Pipeline.profile`."""

    activation_budget_bytes: int | None
    offload_parts: int
    repeats: int
    stack: str | None = None


def profile(rank: Rank, learner: Learner, batch: Batch, asked: Asked) -> Measured:
    """Collective: see `Pipeline.profile`. By default the budget is `budget`. Of a whole batch the first micro-batch is
    used; of micro-batches that are cut already one of each form, one after the other."""
    if not learner.varies:
        with rank.team.local():
            return _profile_form(rank, batch, asked)
    forms, m = rank.forms, rank.layout.microbatches
    if len(rank.layout.routes) > 1:
        raise InputError("profile was given Microbatches: with several routes give whole batches of equal ones")
    profiles = []
    with learner.aside():
        for form in range(max(forms) + 1):
            one = batch.only([forms.index(form)], m)
            learner.learn(one)
            with rank.team.local():
                profiles.append(_profile_form(rank, one, asked))
    return by_microbatch(profiles, forms)


def _profile_form(rank: Rank, batch: Batch, asked: Asked) -> Measured:
    given_budget, parts, repeats, stack = asked
    clock = Clock(rank.device)
    data = rank.cut(batch, rank.layout.microbatches)
    # Clones, because a stage or the loss may change them in place in every round.
    inputs, targets = (clones(column[0]) if column else () for column in (data.inputs, data.targets))
    trials: Trials = {
        s: {
            r: Trial(stage, r, (inputs, targets, clones(data.named(s, 0))), parts, tuple(rank.levels.values()), clock)
            for r in routes(rank, s)
        }
        for s, stage in rank.stages.items()
    }
    in_turn = [trial for by_route in trials.values() for trial in by_route.values()]

    def compute() -> None:
        for trial in in_turn:
            trial.compute()

    # All of these are collective. Inner peers do equally many rounds of what runs their modules.
    with _unchanged(rank):
        together(rank, compute, [trial.times for trial in in_turn], clock, repeats)
        gradients = gradients_now(rank)
        for level in (None, *_moved(rank)):
            try_transfers(rank, in_turn, level, clock, repeats)
        links, handover = message_times(rank, trials, clock, repeats)
        of_features = [feature.profile(trials, clock, repeats) for feature in rank.features]
        if stack == "torch":
            for trial in in_turn:
                trial.compute_in_torch()
    clock.settle()
    times = _times(rank, trials)
    for s, spreads in (item for by_stage in of_features for item in by_stage.items()):
        times[s] |= spreads
    for (s, name), ms in handover.items():
        times[s][name] = replace(times[s][name], ms=round(times[s][name].ms + ms, 4))
    costs = {s: _costs(times[s], list(by_route.values())) for s, by_route in trials.items()}
    device = {
        "activation_budget_bytes": budget(rank, gradients) if given_budget is None else given_budget,
        "host_memory_bytes": _host_budget(rank, trials, costs),
        "peer": rank.layout.peer(rank.number),
        "link": rank.layout.link(rank.number),
    }
    by_peer = rank.cpu_group.gather_by_peer(Figures(device, pci.place(rank.device), costs, times, links))
    host_links = pci.shared_links([[figures.place for figures in by_rank] for by_rank in by_peer])
    return _measured(rank, [slowest(peers) for peers in zip(*by_peer, strict=True)], host_links, stack)


def _moved(rank: Rank) -> Sequence[Level]:
    """The levels whose checkpoints are offloaded: where there is only the full one, only whole activations are."""
    levels = tuple(rank.levels.values())
    return () if levels == (FULL,) else levels


def _measured(
    rank: Rank, by_rank: Sequence[Figures], host_links: tuple[str | None, ...], stack: str | None
) -> Measured:
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
            "stack": stack,
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


@contextmanager
def _unchanged(rank: Rank) -> Iterator[None]:
    """After this context gradients, buffers and random numbers are what they were."""
    stages = rank.stages.values()
    gradients = {parameter: parameter.grad for stage in stages for parameter in stage.parameters()}
    for parameter in gradients:
        parameter.grad = None
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(stage.replay.undisturbed())
        yield
    for stage in stages:
        stage.end_step()
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def _times(rank: Rank, trials: Trials) -> dict[int, dict[str, Spread]]:
    """Each stage's times: the mean of the medians over its routes, weighted by micro-batches, and the widest spread."""
    counts = Counter(rank.layout.microbatch_routes)
    times: dict[int, dict[str, Spread]] = {}
    for s, by_route in trials.items():
        weighed: dict[str, list[tuple[int, Spread]]] = defaultdict(list)
        for route, trial in by_route.items():
            for name, spread in trial.times.spreads().items():
                weighed[name].append((max(1, counts[route]), spread))
        times[s] = {name: Spread.mean(spreads) for name, spreads in weighed.items()}
    return times


def _costs(times: Mapping[str, Spread], trials: Sequence[Trial]) -> dict[str, Any]:
    """A stage's cost fields, without those of what it cannot do."""
    levels = [partial(trials[0].field_of, level) for level in trials[0].levels]
    one = trials[0].levels == (FULL,)  # which moves no checkpoints
    names = [*SIZES, *(field(name) for field in levels for name in ("checkpoint_bytes", "offload_bytes"))]
    names += [name for trial in trials for name in trial.sizes]  # those of features, too
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
    """The pool's limit in the problem's bytes. Pages take more: parts are uneven, and sizes are rounded up."""
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


def gradients_now(rank: Rank) -> dict[nn.Parameter, int]:
    """The bytes of gradients that backwards have left, which may be less spread over inner peers than their parameters
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


def budget(rank: Rank, gradients: Mapping[nn.Parameter, int]) -> int:
    """The free memory of a GPU, less what else a step allocates: gradients, as large as they were found to be, casts of
    weights, copies of buffers, and messages; less a tenth for workspace."""
    free, _ = torch.cuda.mem_get_info(rank.device)
    cached = torch.cuda.memory_reserved(rank.device) - torch.cuda.memory_allocated(rank.device)
    still_to_come = messages_reserve(rank.number, rank.layout, rank.io)
    for s, stage in rank.stages.items():
        still_to_come += stage.split.casts.nbytes + stage.buffer_bytes + rank.replicas.sharded[s].gradient_bytes
        for parameter in (*rank.replicas.sharded[s].parameters(), *stage.outside.named_parameters().values()):
            if parameter.requires_grad and main_grad(parameter) is None:  # whose buffer is there
                still_to_come += max(0, gradients.get(parameter, local(parameter).nbytes) - _gradient_bytes(parameter))
    return max(0, int(0.9 * (free + cached - still_to_come)))
