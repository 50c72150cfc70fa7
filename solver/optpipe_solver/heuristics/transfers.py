"""Transfers in list scheduling: each link that falls free reloads what is needed soon, else offloads what can go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optpipe.model.ops import Kind
from optpipe_solver.heuristics.state import LOOK

if TYPE_CHECKING:
    from optpipe_solver.heuristics.state import SchedulingState

O, R = Kind.O, Kind.R
Activation = tuple[int, int]  # stage, micro-batch


@dataclass(slots=True)
class Away:
    """An activation that leaves.

    Attributes
    ----------
    waiting
        Parts that are to leave.
    sent
        Parts whose offload has started, in order.
    dropped, reloading, back
        How many of these, in the same order, have left the device, have begun to come back, are back.
    returns
        Whether all of it is to come back now.
    """

    waiting: list[int]
    sent: list[int] = field(default_factory=list)
    dropped: int = 0
    reloading: int = 0
    back: int = 0
    returns: bool = False


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
        self._away: dict[Activation, Away] = {}
        self._to_offload: list[deque[tuple[float, Activation]]] = [deque() for _ in devices]  # since when
        self._to_reload: list[dict[int, deque[int]]] = [{} for _ in devices]  # micro-batches by stage, as they left
        self._to_drop: list[list[tuple[Activation, int]]] = [[] for _ in devices]
        self._next_look = [float("inf")] * len(self._devices_on)  # when each link will look again

    def _size(self, stage: int, j: int, part: int) -> int:
        level = self._state.relief[stage, j].level
        parts = self._state.parts if level < 0 else self._state.level_parts[level]
        return parts[stage][self._state.alike[j]][part]

    def _needed_ms(self, stage: int, j: int) -> float:
        """When what leaves is needed again: by the backward, or by the recompute before it."""
        expected = self._state.backward_expected(stage, j)
        return expected - (self._ms(Kind.C, stage, j) if self._state.relief[stage, j].is_recomputed else 0.0)

    def _ms(self, kind: Kind, stage: int, j: int) -> float:
        return self._state.op_ms(kind, stage, j)

    def queue_offload(self, stage: int, j: int, parts: tuple[int, ...]) -> None:
        """Queue the parts of an activation whose forward has ended."""
        d = self._state.device[stage]
        self._away[stage, j] = Away(list(parts))
        self._to_offload[d].append((self._state.now, (stage, j)))
        self._to_reload[d].setdefault(stage, deque()).append(j)

    def is_resident(self, stage: int, j: int) -> bool:
        """Whether all of an activation is on its device; parts that have not begun to leave stay there."""
        away = self._away.get((stage, j))
        return away is None or away.back == len(away.sent)

    def forget(self, stage: int, j: int) -> None:
        """Forget an activation whose backward starts."""
        self._away.pop((stage, j), None)

    def end(self, kind: int, stage: int, j: int, part: int) -> None:
        """Take note that an offload or a reload has ended."""
        d = self._state.device[stage]
        self._busy[O if kind == O else R][self._link[d]] = False
        if kind == R:
            self._away[stage, j].back += 1
        else:
            self._to_drop[d].append(((stage, j), part))
            self.drop(d)

    def drop(self, d: int) -> None:
        """Free what has been offloaded if the device is between two compute ops."""
        if not self._state.busy[d]:
            for (stage, j), part in self._to_drop[d]:
                self._away[stage, j].dropped += 1
                self._state.held[d] -= self._size(stage, j, part)
            self._to_drop[d].clear()

    def note_look(self, d: int) -> None:
        """Take note that the device's link looks for something to do now."""
        self._next_look[self._link[d]] = float("inf")

    def room_for_return(self, d: int) -> int:
        """Return the bytes to leave free for the activation that is to come back next."""
        for stage, j in self._candidates_to_reload(d):
            if self._reload_due(stage, j) <= self._state.now:
                away = self._away[stage, j]
                return sum(self._size(stage, j, part) for part in away.sent[away.reloading :])
        return 0

    def start_on(self, d: int) -> None:
        """Start what the device's link is free for."""
        n = self._link[d]
        if not self._away:
            return
        if self._half_duplex:
            if not (self._busy[O][n] or self._busy[R][n] or self._start_reload(n)):
                self._start_offload(n)
        else:
            if not self._busy[R][n]:
                self._start_reload(n)
            if not self._busy[O][n]:
                self._start_offload(n)

    def _candidates_to_reload(self, d: int) -> Iterator[Activation]:
        """Yield what could come back: of each stage the first that left, and all whose backward waits."""
        for stage, queue in self._to_reload[d].items():
            while queue and self._all_reloads_started(stage, queue[0]):
                queue.popleft()
            if queue:
                yield stage, queue[0]
        for _, j, stage in self._state.backwards[d]:
            if (stage, j) in self._away and self._to_reload[d][stage] and self._to_reload[d][stage][0] != j:
                yield stage, j

    def _all_reloads_started(self, stage: int, j: int) -> bool:
        away = self._away.get((stage, j))
        return away is None or (away.returns and away.reloading == len(away.sent))

    def _reload_due(self, stage: int, j: int) -> float:
        """The moment at which an activation should begin to come back."""
        away = self._away[stage, j]
        reload_ms = (len(away.sent) - away.reloading) * self._ms(R, stage, j)
        return self._needed_ms(stage, j) - self._state.policy.eager * reload_ms

    def _start_reload(self, n: int) -> bool:
        """Start the reload that is needed soonest, if one is due and fits; else look again when one is due."""
        state = self._state
        candidates = [
            activation
            for d in self._devices_on[n]
            for activation in self._candidates_to_reload(d)
            if self._away[activation].dropped > self._away[activation].reloading
        ]
        due_ms, due_stage = float("inf"), -1
        for stage, j in sorted(candidates, key=lambda activation: state.backward_expected(*activation)):
            away, d = self._away[stage, j], state.device[stage]
            if not away.returns and (ms := self._reload_due(stage, j)) > state.now:
                if ms < due_ms:
                    due_ms, due_stage = ms, stage
                continue
            part = away.sent[away.reloading]
            size = self._size(stage, j, part)
            fits = state.held[d] + size <= state.memory[d]
            if fits and (away.returns or state.reserve.lend_for_return(stage, j)):
                away.returns = True
                away.waiting.clear()
                away.reloading += 1
                state.held[d] += size
                self._start(R, n, stage, j, part)
                return True
        if due_ms < self._next_look[n]:
            self._next_look[n] = due_ms
            state.foresee(due_ms, LOOK, due_stage, 0)
        return False

    def _start_offload(self, n: int) -> None:
        """Start the offload that waits longest."""
        queues = [self._to_offload[d] for d in self._devices_on[n]]
        while queue := min((queue for queue in queues if queue), key=lambda queue: queue[0][0], default=None):
            stage, j = activation = queue[0][1]
            away = self._away.get(activation)
            if away is not None and away.waiting and not self._keep_if_useless_to_leave(stage, j, away):
                part = away.waiting.pop(0)
                away.sent.append(part)
                self._start(O, n, stage, j, part)
                return
            queue.popleft()

    def _keep_if_useless_to_leave(self, stage: int, j: int, away: Away) -> bool:
        """Keep what waits to leave if it would not be back in time, or would make room for no forward.

        Returns False, and keeps nothing, if what is in flight could not be finished then.
        """
        state = self._state
        waiting, gone = len(away.waiting), len(away.sent) - away.back
        transfer_ms = waiting * self._ms(O, stage, j) + (waiting + gone) * self._ms(R, stage, j)
        is_back_in_time = self._needed_ms(stage, j) - state.now >= transfer_ms
        if state.forwards_left[state.device[stage]] and is_back_in_time:
            return False
        stays = sum(self._size(stage, j, part) for part in away.waiting)
        if not state.reserve.lend_for_stay(stage, j, stays):
            return False
        away.waiting.clear()
        return True

    def _start(self, kind: Kind, n: int, stage: int, j: int, part: int) -> None:
        self._busy[kind][n] = True
        self._state.record_start(kind, stage, j, part)
