"""Times of messages, and of handing them over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from optpipe.model.ops import Kind
from optpipe_runtime.clock import Clock
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.lowering.plan import Message
from optpipe_runtime.measure.rounds import WARM_UP, routes
from optpipe_runtime.measure.trial import OpTimer, Spread, Trial

LINK_ROUNDS = 3  # for each of the repeats: messages are short

Handover = dict[tuple[int, str], float]  # ms by stage and name of an op's time


class Link(NamedTuple):
    """From a stage to the next one on a route, on another rank."""

    route: int
    before: int
    after: int


def message_times(
    rank: Rank, trials: Mapping[int, Mapping[int, Trial]], clock: Clock, repeats: int
) -> tuple[dict[tuple[int, int], Spread], Handover]:
    """The time of a message from this rank to others: half of the time from when it was handed over to its answer. And
    the time that F and B take to hand a message over and to post the next receive. Pairs that have no rank in common
    are measured at the same time, and the other ranks compute meanwhile. As in a step, what is sent has just been
    computed, and the receiver is already waiting."""
    found: dict[tuple[int, int], Spread] = {}
    handover: Handover = defaultdict(float)
    placement, messages = rank.layout.placement, rank.messages
    rounds = WARM_UP + LINK_ROUNDS * repeats
    for at_once in _apart(rank):
        rank.cpu_group.minimum(0)  # all begin together
        own = next((link for link in at_once if rank.number in (placement[link.before], placement[link.after])), None)
        if own is None:
            for trial in [by_route[min(by_route)] for by_route in trials.values()][:1] * rounds:
                trial.beside()
            clock.settle()
            continue
        route, s, after = own
        here, there = placement[s], placement[after]
        times, first = OpTimer(clock), rank.number == here
        specs = rank.io[s, route].outputs
        messages.start_step()
        if not first:
            messages.post(Message(Kind.F, after, 0), here, specs)
        for r in range(rounds):
            if r == WARM_UP:
                times.clear()
            out, back = Message(Kind.F, after, r), Message(Kind.B, s, r)
            if first:
                tensors = trials[s][route].outputs()
                with times.of("handover"):
                    messages.post(back, there, specs)
                    messages.send(out, tensors, there, specs)
                with times.of("answer"):
                    messages.take(back)
            else:
                received = messages.take(out)
                with times.of("handover"):
                    if r + 1 < rounds:
                        messages.post(Message(Kind.F, after, r + 1), here, specs)
                    messages.send(back, received, here, specs)
        messages.flush()
        clock.settle()
        op = (s, "forward_ms") if first else (after, "backward_input_ms")
        handover[op] = max(times.spreads()["handover"].ms, handover[op])
        if first:
            one_way = times.spreads(0.5)["answer"]
            found[here, there] = max(one_way, found.get((here, there), one_way))
    return found, handover


def _apart(rank: Rank) -> list[list[Link]]:
    """All links, in groups of pairs that have no rank in common; the same on every rank."""
    placement = rank.layout.placement
    groups: list[tuple[set[int], list[Link]]] = []
    for link in map(Link._make, rank.layout.neighbours()):
        pair = {placement[link.before], placement[link.after]}
        if len(pair) == 1 or link.route not in routes(rank, link.before):
            continue
        busy, group = next((known for known in groups if not known[0] & pair), (set(), []))
        if not group:
            groups.append((busy, group))
        busy |= pair
        group.append(link)
    return [group for _, group in groups]
