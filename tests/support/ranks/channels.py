"""Runs the communication of plans by hand, without ranks."""

from __future__ import annotations

from collections import deque

from optpipe_runtime.lowering.plan import Message, Plan


def run_by_hand(plans: list[Plan]) -> dict[int, int]:
    """Executes all ranks' communication over first-in, first-out channels; returns the most messages that a rank had
    waiting."""
    channels: dict[tuple[int, int], deque[Message]] = {}
    posted: list[dict[tuple[int, int], list[Message]]] = [{} for _ in plans]
    arrived: list[set[Message]] = [set() for _ in plans]
    heads, most = [0] * len(plans), dict.fromkeys(range(len(plans)), 0)
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            while heads[rank] < len(plan.actions):
                action = plan.actions[heads[rank]]
                for message, source in action.post:
                    waiting = posted[rank].setdefault((source, rank), [])
                    if message not in waiting and message not in arrived[rank]:
                        waiting.append(message)
                for pair, waiting in posted[rank].items():
                    while waiting and channels.get(pair):
                        sent, expected = channels[pair].popleft(), waiting.pop(0)
                        assert sent == expected, f"rank {pair[1]} takes {expected} for what is {sent}"
                        arrived[rank].add(sent)
                most[rank] = max(most[rank], len(arrived[rank]) + sum(map(len, posted[rank].values())))
                if action.receives and action.receives not in arrived[rank]:
                    break
                arrived[rank].discard(action.receives)
                if action.sends is not None:
                    assert action.to is not None
                    if action.to == rank:
                        arrived[rank].add(action.sends)
                    else:
                        channels.setdefault((rank, action.to), deque()).append(action.sends)
                heads[rank] += 1
                moved = True
    assert heads == [len(plan.actions) for plan in plans], "ranks wait for each other"
    assert not any(channels.values())
    assert not any(arrived)
    return most
