"""Runs the communication of plans by hand, without ranks, as the strictest hardware would."""

from collections import defaultdict, deque
from collections.abc import Sequence

from optpipe.model.ops import Kind
from optpipe_runtime.lowering.plan import UNDER_WAY, Message, Plan


def run_by_hand(plans: list[Plan], devices_wait: bool = False, replica: Sequence[Plan] = ()) -> dict[int, int]:
    """Executes all ranks' communication over first-in, first-out channels; returns the most messages that a rank had
    posted and not taken.

    A message passes when it is sent and its receive is posted, not earlier. With `devices_wait` every rank waits before
    every op for everything that it has begun, as a host does whose allocator frees memory, or a GPU with one queue.
    With the plans of a `replica`, every stage is sharded over both, and gathered when both have begun to gather it.
    """
    size, plans = len(plans), [*plans, *replica]
    sent: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    posted: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    arrived: list[set[Message]] = [set() for _ in plans]
    heads, most = [0] * len(plans), dict.fromkeys(range(len(plans)), 0)
    begun = [-1] * len(plans)  # the op whose receives are posted
    gathers: list[list[int]] = [[] for _ in plans]  # begun, in order

    def whole(rank: int) -> set[int]:
        """The stages that are gathered."""
        common = list(zip(*(gathers[one] for one in range(rank % size, len(plans), size)), strict=False))
        assert all(len(set(stages)) == 1 for stages in common), "replicas gather in other orders"
        return {stages[0] for stages in common}

    def passed(pair: tuple[int, int]) -> None:
        while sent[pair] and posted[pair]:
            message, expected = sent[pair].popleft(), posted[pair].popleft()
            assert message == expected, f"rank {pair[1]} takes {expected} for what is {message}"
            arrived[pair[1]].add(message)

    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            while heads[rank] < len(plan.actions):
                action = plan.actions[heads[rank]]
                if begun[rank] < heads[rank]:
                    begun[rank], moved = heads[rank], True
                    for message, source in action.post:
                        pair = source + rank // size * size, rank
                        posted[pair].append(message)
                        passed(pair)
                    gathers[rank] += action.gathers
                ahead = [pair for pair, waiting in posted.items() if pair[1] == rank and waiting]
                most[rank] = max(most[rank], len(arrived[rank]) + sum(len(posted[pair]) for pair in ahead))
                leaving = [pair for pair, waiting in sent.items() if pair[0] == rank and waiting]
                if devices_wait and (ahead or leaving or whole(rank) != set(gathers[rank])):
                    break
                if action.op.kind == Kind.F and action.op.stage not in whole(rank):
                    break
                if action.receives and action.receives not in arrived[rank]:
                    break
                pair = rank, rank if action.to is None else action.to + rank // size * size
                if len(sent[pair]) == UNDER_WAY:
                    break
                arrived[rank].discard(action.receives)
                if action.sends is not None and pair[0] == pair[1]:
                    arrived[rank].add(action.sends)
                elif action.sends is not None:
                    sent[pair].append(action.sends)
                    passed(pair)
                heads[rank] += 1
                moved = True
    assert heads == [len(plan.actions) for plan in plans], "ranks wait for each other"
    assert not any(sent.values())
    assert not any(posted.values())
    assert not any(arrived)
    return most
