"""Times that ranks measure at once, and equally long: ops, transfers beside compute, and messages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, pairwise
from math import ceil
from typing import NamedTuple

from optpipe.model.ops import Kind
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.lowering.plan import Message
from optpipe_runtime.memory.engines import Clock
from optpipe_runtime.stage.levels import Level
from optpipe_runtime.stage.trial import OpTimer, Spread, Trial, Trials

WARM_UP = 2  # rounds
MOST_ROUNDS = 1000


def together(rank: Rank, once: Callable[[], object], timers: Sequence[OpTimer], clock: Clock, repeats: int) -> None:
    """Warms up, then calls `once` at least `repeats` times, on every rank about as long as on the slowest. What the
    timers note in the warm-up does not count."""
    rank.cpu_group.minimum(0)  # earlier measurements have ended on all ranks
    round_s = 0.0
    for timer in timers:
        timer.recording = False
    for _ in range(WARM_UP):
        start = time.perf_counter()
        once()
        clock.settle()
        round_s = time.perf_counter() - start
    for timer in timers:
        timer.recording = True
    by_peer = rank.cpu_group.gather_by_peer(round_s)  # all ranks begin here
    slowest_s = max(map(max, by_peer))
    round_s = max(seconds[rank.number] for seconds in by_peer)  # inner peers do equally many rounds
    for _ in range(min(MOST_ROUNDS, max(repeats, ceil(repeats * slowest_s / round_s)))):
        once()
    clock.settle()


def routes(rank: Rank, s: int) -> list[int]:
    """The routes over a stage that micro-batches take; the first one if they take none."""
    over = [r for r, route in enumerate(rank.layout.routes) if s in route]
    return [r for r in over if r in rank.layout.microbatch_routes] or over[:1]


def try_transfers(rank: Rank, trials: Sequence[Trial], level: Level | None, clock: Clock, repeats: int) -> None:
    """Offloads and reloads the activations of all stages, or their checkpoints at a level, one after the other, each
    while the stage computes; in full duplex one is reloaded while the next is offloaded."""
    layout, limit = rank.layout, rank.pool.limit
    fits = [[limit is None or n * trial.host_bytes(rank.pool, level) <= limit for n in (1, 2)] for trial in trials]
    by_peer = rank.cpu_group.gather_by_peer(fits)
    one_fits, two_fit = (
        [all(ranks[rank.number][k][n] for ranks in by_peer) for k in range(len(trials))] for n in (0, 1)
    )
    fitting = list(compress(trials, one_fits))
    both_ways = layout.full_duplex and bool(fitting) and all(compress(two_fit, one_fits))
    moving = [(trial, j) for j, trial in enumerate(fitting * 2 if both_ways and len(fitting) == 1 else fitting)]
    for trial, j in moving:
        trial.moved = level
        trial.forward(j)
    sharers = layout.shared_links.get(layout.link(rank.number) or "", ())
    for turn in range(max(map(len, layout.shared_links.values()), default=1)):
        own_turn = moving if not sharers or sharers[turn % len(sharers)] == rank.number else []
        ahead = own_turn[:1] if both_ways else []  # off the device before and after each round
        for trial, j in ahead:
            trial.times.recording = False  # until all have warmed up
            trial.end_out(j, trial.start_out(j))
        together(rank, partial(_move, both_ways, own_turn), [trial.times for trial, _ in own_turn], clock, repeats)
        for trial, j in ahead:
            trial.reload(j)
    for trial, j in moving:
        trial.forget(j)
        trial.moved = None


def _move(both_ways: bool, moving: Sequence[tuple[Trial, int]]) -> None:
    if both_ways:
        for (trial, j), (other, k) in pairwise([*moving, *moving[:1]]):
            returning, leaving = trial.start_back(j), other.start_out(k)
            other.beside()
            other.end_out(k, leaving)
            trial.end_back(j, returning)
        return
    for trial, j in moving:
        leaving = trial.start_out(j)
        trial.beside()
        trial.end_out(j, leaving)
        returning = trial.start_back(j)
        trial.beside()
        trial.end_back(j, returning)


LINK_ROUNDS = 3  # for each of the repeats: messages are short

Handover = dict[tuple[int, str], float]  # ms by stage and name of an op's time
LinkTimes = dict[tuple[int, int], Spread]  # from one rank to another


class Link(NamedTuple):
    """From a stage to the next one on a route, on another rank."""

    route: int
    before: int
    after: int


def message_times(rank: Rank, trials: Trials, clock: Clock, repeats: int) -> tuple[LinkTimes, Handover]:
    """The times of messages from this rank to others, and the time that F and B take to hand a message over and to post
    the next receive.

    Two ranks send a message there and back, again and again: its time is half of the time from when it was handed over
    to its answer. Pairs that have no rank in common are measured at the same time, and the other ranks compute
    meanwhile. As in a step, what is sent has just been computed, and the receiver is already waiting.
    """
    links: LinkTimes = {}
    handover: Handover = defaultdict(float)
    placement = rank.layout.placement
    rounds = WARM_UP + LINK_ROUNDS * repeats
    for at_once in _apart(rank):
        rank.cpu_group.minimum(0)  # all begin together
        link = next((link for link in at_once if rank.number in (placement[link.before], placement[link.after])), None)
        if link is None:
            for by_route in list(trials.values())[:1]:  # a rank in no pair computes
                for _ in range(rounds):
                    by_route[min(by_route)].beside()
            clock.settle()
            continue
        timer = OpTimer(clock)
        rank.messages.start_step()
        if rank.number == placement[link.before]:
            _send_first(rank, link, trials[link.before][link.route], timer, rounds)
        else:
            _answer(rank, link, timer, rounds)
        rank.messages.flush()
        clock.settle()
        op = (link.before, "forward_ms") if rank.number == placement[link.before] else (link.after, "backward_input_ms")
        handover[op] = max(timer.spreads()["handover"].ms, handover[op])
        if one_way := timer.spreads(0.5).get("answer"):
            pair = placement[link.before], placement[link.after]
            links[pair] = max(one_way, links.get(pair, one_way))
    return links, handover


def _send_first(rank: Rank, link: Link, trial: Trial, timer: OpTimer, rounds: int) -> None:
    """The side of the stage before: sends an output, and waits for it to come back."""
    other, specs = rank.layout.placement[link.after], rank.io[link.before, link.route].outputs
    for r in range(rounds):
        timer.recording = r >= WARM_UP
        there, back = Message(Kind.F, link.after, r), Message(Kind.B, link.before, r)
        tensors = trial.outputs()
        with timer.timing("handover"):
            rank.messages.post(back, other, specs)
            rank.messages.send(there, tensors, other, specs)
        with timer.timing("answer"):
            rank.messages.take(back)


def _answer(rank: Rank, link: Link, timer: OpTimer, rounds: int) -> None:
    """The side of the stage after: sends back what comes."""
    other, specs = rank.layout.placement[link.before], rank.io[link.before, link.route].outputs
    rank.messages.post(Message(Kind.F, link.after, 0), other, specs)
    for r in range(rounds):
        timer.recording = r >= WARM_UP
        received = rank.messages.take(Message(Kind.F, link.after, r))
        with timer.timing("handover"):
            if r + 1 < rounds:
                rank.messages.post(Message(Kind.F, link.after, r + 1), other, specs)
            rank.messages.send(Message(Kind.B, link.before, r), received, other, specs)


def _apart(rank: Rank) -> list[list[Link]]:
    """All links, in groups of pairs that have no rank in common; the same on every rank."""
    placement = rank.layout.placement
    groups: list[tuple[set[int], list[Link]]] = []
    for link in map(Link._make, rank.layout.neighbours()):
        pair = {placement[link.before], placement[link.after]}
        if len(pair) == 1 or link.route not in routes(rank, link.before):
            continue
        busy, group = next((others for others in groups if not others[0] & pair), (set(), []))
        if not group:
            groups.append((busy, group))
        busy |= pair
        group.append(link)
    return [group for _, group in groups]
