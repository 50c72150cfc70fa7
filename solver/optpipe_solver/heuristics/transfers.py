"""Transfers in list scheduling: each link that falls free reloads what is needed soon, else offloads what can go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from optpipe.model.ops import Kind
from optpipe_solver.heuristics.state import LOOK, SchedulingState

O, R = Kind.O, Kind.R
Key = tuple[int, int]  # stage, micro-batch


@dataclass(slots=True)
class Away:
    """An activation that leaves: its parts still to go, those that have gone, and how far these are."""

    waiting: list[int]
    gone: list[int] = field(default_factory=list)
    dropped: int = 0  # of those gone, in their order
    reloading: int = 0  # likewise: reloads that have started
    back: int = 0  # reloads that have ended
    returns: bool = False  # all of it is to come back now


class Transfers:
    """What is in flight on the links, and what waits for them.

    A reload takes its bytes when it starts; a drop takes effect when no compute op runs on the device.
    """

    def __init__(self, state: SchedulingState) -> None:
        self._state = state
        problem = state.problem
        devices = range(len(problem.devices))
        self._link: list[int] = problem.costs.link.tolist()
        self._devices_on = [[d for d in devices if self._link[d] == n] for n in range(max(self._link) + 1)]
        self._half_duplex = problem.transfer_mode == "half_duplex"

    def begin(self) -> None:
        """Go back to the time before the first op."""
        devices = range(len(self._link))
        self._busy = {O: [False] * len(self._devices_on), R: [False] * len(self._devices_on)}
        self._away: dict[Key, Away] = {}
        self._leaving: list[deque[tuple[float, Key]]] = [deque() for _ in devices]  # since when
        self._gone: list[dict[int, deque[int]]] = [{} for _ in devices]  # micro-batches by stage, as they went
        self._offloaded: list[list[tuple[Key, int]]] = [[] for _ in devices]
        self._next_look = [float("inf")] * len(self._devices_on)  # when each link will look again

    def leave(self, stage: int, j: int, parts: tuple[int, ...]) -> None:
        """Queue the parts of an activation whose forward has ended."""
        d = self._state.device[stage]
        self._away[stage, j] = Away(list(parts))
        self._leaving[d].append((self._state.now, (stage, j)))
        self._gone[d].setdefault(stage, deque()).append(j)

    def is_resident(self, stage: int, j: int) -> bool:
        """Whether all of an activation is on its device; parts that have not begun to leave stay there."""
        away = self._away.get((stage, j))
        return away is None or away.back == len(away.gone)

    def forget(self, stage: int, j: int) -> None:
        """Forget an activation whose backward starts."""
        self._away.pop((stage, j), None)

    def ended(self, kind: int, stage: int, j: int, part: int) -> None:
        """Take note that an offload or a reload has ended."""
        d = self._state.device[stage]
        self._busy[O if kind == O else R][self._link[d]] = False
        if kind == R:
            self._away[stage, j].back += 1
        else:
            self._offloaded[d].append(((stage, j), part))
            self.drop(d)

    def drop(self, d: int) -> None:
        """Free what has been offloaded if the device is between two compute ops."""
        if not self._state.busy[d]:
            for (stage, j), part in self._offloaded[d]:
                self._away[stage, j].dropped += 1
                self._state.held[d] -= self._state.parts[stage][part]
            self._offloaded[d].clear()

    def looked(self, d: int) -> None:
        """Take note that the device's link looks for something to do now."""
        self._next_look[self._link[d]] = float("inf")

    def room(self, d: int) -> int:
        """Return the bytes to leave free for the activation that is to come back next."""
        for stage, j in self._next(d):
            if self._reload_due(stage, j) <= self._state.now:
                away = self._away[stage, j]
                return sum(self._state.parts[stage][part] for part in away.gone[away.reloading :])
        return 0

    def start_on(self, d: int) -> None:
        """Start what the device's link is free for."""
        n = self._link[d]
        if not self._away:
            return
        if self._half_duplex:
            if not (self._busy[O][n] or self._busy[R][n] or self._reload(n)):
                self._offload(n)
        else:
            if not self._busy[R][n]:
                self._reload(n)
            if not self._busy[O][n]:
                self._offload(n)

    def _next(self, d: int) -> Iterator[Key]:
        """Yield what could come back: of each stage the first that left, and all whose backward waits."""
        for stage, queue in self._gone[d].items():
            while queue and self._is_back(stage, queue[0]):
                queue.popleft()
            if queue:
                yield stage, queue[0]
        for _, j, stage in self._state.backwards[d]:
            if (stage, j) in self._away and self._gone[d][stage] and self._gone[d][stage][0] != j:
                yield stage, j

    def _is_back(self, stage: int, j: int) -> bool:
        """Whether nothing of an activation is left to reload."""
        away = self._away.get((stage, j))
        return away is None or (away.returns and away.reloading == len(away.gone))

    def _reload_due(self, stage: int, j: int) -> float:
        """The moment at which an activation should begin to come back."""
        away = self._away[stage, j]
        needed = (len(away.gone) - away.reloading) * self._state.ms[R][stage]
        return self._state.backward_expected(stage, j) - self._state.policy.eager * needed

    def _reload(self, n: int) -> bool:
        state, look = self._state, float("inf")
        candidates = [
            key
            for d in self._devices_on[n]
            for key in self._next(d)
            if self._away[key].dropped > self._away[key].reloading
        ]
        if len(candidates) > 1:
            candidates.sort(key=lambda key: state.backward_expected(*key))
        for stage, j in candidates:
            away, d = self._away[stage, j], state.device[stage]
            if not away.returns and (wanted := self._reload_due(stage, j)) > state.now:
                if wanted < look:
                    look, looker = wanted, stage
                continue
            part = away.gone[away.reloading]
            size = state.parts[stage][part]
            if state.held[d] + size > state.memory[d] or not (away.returns or state.reserve.regains(stage, j)):
                continue
            away.returns = True
            away.waiting.clear()
            away.reloading += 1
            state.held[d] += size
            self._start(R, n, stage, j, part)
            return True
        if look < self._next_look[n]:
            self._next_look[n] = look
            state.expect(look, LOOK, looker, 0)
        return False

    def _offload(self, n: int) -> None:
        queues = [self._leaving[d] for d in self._devices_on[n]]
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
        """Keep what waits to leave if it would not be back in time, or would make room for no forward.

        Returns False, and keeps nothing, if what is in flight could not be finished then.
        """
        state = self._state
        n, gone = len(away.waiting), len(away.gone) - away.back
        transfers = n * state.ms[O][stage] + (n + gone) * state.ms[R][stage]
        if state.forwards_left[state.device[stage]] and state.backward_expected(stage, j) - state.now >= transfers:
            return False
        stays = sum(self._state.parts[stage][part] for part in away.waiting)
        if not state.reserve.keeps(stage, j, stays):
            return False
        away.waiting.clear()
        return True

    def _start(self, kind: Kind, n: int, stage: int, j: int, part: int) -> None:
        state = self._state
        self._busy[kind][n] = True
        state.record(kind, stage, j, part)
        state.expect(state.now + state.ms[kind][stage], kind, stage, j, part)
