"""Times of messages, and of handing them over."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from optpipe.model.ops import Kind
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.lowering.plan import Message
from optpipe_runtime.measure.rounds import WARM_UP, routes
from optpipe_runtime.memory.clock import Clock
from optpipe_runtime.stage.timer import OpTimer, Spread
from optpipe_runtime.stage.trial import Trial, Trials

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
            _compute_beside(trials, clock, rounds)
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


def _compute_beside(trials: Trials, clock: Clock, rounds: int) -> None:
    """What a rank does that is in no pair."""
    for by_route in list(trials.values())[:1]:
        for _ in range(rounds):
            by_route[min(by_route)].beside()
    clock.settle()


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
