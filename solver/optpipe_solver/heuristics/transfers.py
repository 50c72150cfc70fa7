"""The transfers' side of list scheduling: each link that falls free brings back what is needed soon, else takes away
what can go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optpipe.model.ops import Kind
from optpipe_solver.bounds.least_memory import part_bytes

if TYPE_CHECKING:
    from optpipe_solver.heuristics.list_scheduling import Listing

LOOK = 200  # code of the event that a link looks for something to do
O, R = Kind.O, Kind.R
Key = tuple[int, int]  # stage, micro-batch


@dataclass(slots=True)
class Away:
    """An activation that leaves: its parts still to go, those that have gone, and how far these are."""

    waiting: list[int]
    gone: list[int] = field(default_factory=list)
    dropped: int = 0  # of those gone, in their order
    granted: int = 0
    back: int = 0
    returns: bool = False  # all of it is to come back now


class Links:
    """Transfers in flight and at rest. A reload takes its bytes when it starts; a drop takes effect when no compute op
    runs."""

    def __init__(self, listing: Listing) -> None:
        self._at = listing
        problem = listing.problem
        devices = range(len(problem.devices))
        self._link: list[int] = problem.costs.link.tolist()
        self._sharers = [[d for d in devices if self._link[d] == n] for n in range(max(self._link) + 1)]
        self._half = problem.transfer_mode == "half_duplex"
        self._busy = {O: [False] * len(self._sharers), R: [False] * len(self._sharers)}
        self._away: dict[Key, Away] = {}
        self._to_go: list[deque[tuple[float, Key]]] = [deque() for _ in devices]  # since when
        self._to_come: list[dict[int, deque[int]]] = [{} for _ in devices]  # micro-batches by stage, as they went
        self._to_drop: list[list[tuple[Key, int]]] = [[] for _ in devices]
        self._look = [float("inf")] * len(self._sharers)  # when each link will look again
        self._bytes = [part_bytes(stage) for stage in problem.stages]

    def leave(self, stage: int, j: int, parts: tuple[int, ...]) -> None:
        """A forward has ended: these parts of its activation may go."""
        d = self._at.device[stage]
        self._away[stage, j] = Away(list(parts))
        self._to_go[d].append((self._at.now, (stage, j)))
        self._to_come[d].setdefault(stage, deque()).append(j)

    def resident(self, stage: int, j: int) -> bool:
        """Whether a backward finds its activation; parts that have not begun to leave by then stay."""
        away = self._away.get((stage, j))
        return away is None or away.back == len(away.gone)

    def forget(self, stage: int, j: int) -> None:
        """The backward starts."""
        self._away.pop((stage, j), None)

    def ended(self, kind: int, stage: int, j: int, part: int) -> None:
        d = self._at.device[stage]
        self._busy[O if kind == O else R][self._link[d]] = False
        if kind == R:
            self._away[stage, j].back += 1
        else:
            self._to_drop[d].append(((stage, j), part))
            self.drop(d)

    def drop(self, d: int) -> None:
        """Lets go what has been offloaded, if the device is between two compute ops."""
        if not self._at.busy[d]:
            for (stage, j), part in self._to_drop[d]:
                self._away[stage, j].dropped += 1
                self._at.held[d] -= self._bytes[stage][part]
            self._to_drop[d].clear()

    def looked(self, d: int) -> None:
        self._look[self._link[d]] = float("inf")

    def room(self, d: int) -> int:
        """Bytes to leave free for the activation that is to come back next."""
        for stage, j in self._next(d):
            if self._wanted(stage, j) <= self._at.now:
                away = self._away[stage, j]
                return sum(self._bytes[stage][part] for part in away.gone[away.granted :])
        return 0

    def use(self, d: int) -> None:
        """Starts what the device's link is free for."""
        n = self._link[d]
        if not self._away:
            return
        if self._half:
            if not (self._busy[O][n] or self._busy[R][n] or self._reload(n)):
                self._offload(n)
        else:
            if not self._busy[R][n]:
                self._reload(n)
            if not self._busy[O][n]:
                self._offload(n)

    def _next(self, d: int) -> Iterator[Key]:
        """The activations that could come back: of each stage the one that went first, and those whose backward already
        waits."""
        for stage, queue in self._to_come[d].items():
            while queue and (
                (away := self._away.get((stage, queue[0]))) is None or (away.returns and away.granted == len(away.gone))
            ):
                queue.popleft()
            if queue:
                yield stage, queue[0]
        for _, j, stage in self._at.backwards[d]:
            if (stage, j) in self._away and self._to_come[d][stage] and self._to_come[d][stage][0] != j:
                yield stage, j

    def _wanted(self, stage: int, j: int) -> float:
        """When an activation should begin to come back."""
        away = self._away[stage, j]
        needed = (len(away.gone) - away.granted) * self._at.ms[R][stage]
        return self._at.expected(stage, j) - self._at.policy.eager * needed

    def _reload(self, n: int) -> bool:
        at, look = self._at, float("inf")
        candidates = [
            key for d in self._sharers[n] for key in self._next(d) if self._away[key].dropped > self._away[key].granted
        ]
        if len(candidates) > 1:
            candidates.sort(key=lambda key: at.expected(*key))
        for stage, j in candidates:
            away, d = self._away[stage, j], at.device[stage]
            if not away.returns and (wanted := self._wanted(stage, j)) > at.now:
                if wanted < look:
                    look, looker = wanted, stage
                continue
            part = away.gone[away.granted]
            if at.held[d] + self._bytes[stage][part] > at.memory[d] or not (
                away.returns or at.reserve.regains(stage, j)
            ):
                continue
            away.returns = True
            away.waiting.clear()
            away.granted += 1
            at.held[d] += self._bytes[stage][part]
            self._start(R, n, stage, j, part)
            return True
        if look < self._look[n]:
            self._look[n] = look
            at.at(look, LOOK, looker, 0)
        return False

    def _offload(self, n: int) -> None:
        queues = [self._to_go[d] for d in self._sharers[n]]
        while queue := min((queue for queue in queues if queue), key=lambda queue: queue[0][0], default=None):
            stage, j = key = queue[0][1]
            away = self._away.get(key)
            if away is not None and away.waiting and not self._may_stay(stage, j, away):
                part = away.waiting.pop(0)
                away.gone.append(part)
                self._start(O, n, stage, j, part)
                return
            queue.popleft()

    def _may_stay(self, stage: int, j: int, away: Away) -> bool:
        """What would not be back in time, or makes room for no forward, need not leave, if all in flight can be
        finished without that."""
        at = self._at
        n, gone = len(away.waiting), len(away.gone) - away.back
        transfers = n * at.ms[O][stage] + (n + gone) * at.ms[R][stage]
        if at.forwards_left[at.device[stage]] and at.expected(stage, j) - at.now >= transfers:
            return False
        stays = sum(self._bytes[stage][part] for part in away.waiting)
        if not at.reserve.keeps(stage, j, stays):
            return False
        away.waiting.clear()
        return True

    def _start(self, kind: Kind, n: int, stage: int, j: int, part: int) -> None:
        at = self._at
        self._busy[kind][n] = True
        at.record(kind, stage, j, part)
        at.at(at.now + at.ms[kind][stage], kind, stage, j, part)
