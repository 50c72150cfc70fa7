"""`Reserve`: what is in flight can always be finished (Dijkstra's banker's algorithm; micro-batches are the customers).

Micro-batches stand in the order in which they were admitted. A grant of memory is safe as long as each of them, in that
order, could run to its end alone, with all before it gone and all behind it holding what they hold. What counts is what
an activation settles at: its offloads end and its weight gradient runs without asking anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import Relief
from optpipe_solver.bounds.stage_bytes import stage_bytes

Peak = Callable[[int, int], int]


class Reserve:
    """Device memory and pinned host memory of every device, as promised to the micro-batches in flight.

    `begin` comes before the first promise, and takes all of them back.

    Parameters
    ----------
    base
        For each route, the relief of every stage with which one micro-batch at a time fits.
    """

    def __init__(self, problem: Problem, base: Sequence[dict[int, Relief]]) -> None:
        costs = problem.costs
        devices = len(problem.devices)
        self._limit: list[int] = costs.activation_budget.tolist()
        self._host_limit: list[int] = costs.host_memory.tolist()
        self._bytes = stage_bytes(problem)
        self._route: list[int] = costs.route.tolist()
        self._device = [stage.device for stage in problem.stages]
        self._own = [
            [[s for s in route if self._device[s] == d] for d in range(devices)] for route in problem.all_routes
        ]
        settled = [{s: self.settled(s, relief) for s, relief in reliefs.items()} for reliefs in base]
        self._residual = [{s: held for s, (held, _) in own.items()} for own in settled]
        self._host_need = [{s: host for s, (_, host) in own.items()} for own in settled]
        self._peaks = [
            {s: self._bytes[s].recomputed_peak if r.recompute else self._bytes[s].peak for s, r in reliefs.items()}
            for reliefs in base
        ]
        self._largest = [  # upper bounds of `_peak`
            max((sum(peaks[s] for s in own[d]) for peaks, own in zip(self._peaks, self._own, strict=True)), default=0)
            for d in range(devices)
        ]
        self._most_hosted = [
            max(sum(need[s] for s in own[d]) for need, own in zip(self._host_need, self._own, strict=True))
            for d in range(devices)
        ]

    def begin(self) -> None:
        """Nothing is promised."""
        devices, m = len(self._limit), len(self._route)
        self._to_go = [[len(own) for own in self._own[r]] for r in self._route]  # (m, D) backwards
        self._holds = [[0] * m for _ in range(devices)]
        self._hosts = [[0] * m for _ in range(devices)]
        self._total, self._host_total = [0] * devices, [0] * devices
        self._of: dict[tuple[int, int], tuple[int, int]] = {}  # stage, micro-batch: device and host bytes
        self.active: list[int] = []

    def settled(self, stage: int, relief: Relief) -> tuple[int, int]:
        """Return the device and host bytes of an activation between forward and backward, once its offloads ended."""
        if relief.recompute:
            return self._bytes[stage].checkpoint, 0
        away = sum(self._bytes[stage].parts[part] for part in relief.parts)
        return self._bytes[stage].stays - away, away

    def recomputes_freely(self, stage: int) -> bool:
        """Whether a recompute needs no more than the stage needs anyway."""
        return self._bytes[stage].recomputed_peak <= self._bytes[stage].peak

    def admits(self, stage: int, j: int, held: int, host: int) -> bool:
        """Book that an activation settles at so many device and host bytes; False, and nothing, if that is unsafe."""
        before = self._of.get((stage, j))
        new = j not in self.active
        if new:
            self.active.append(j)
        self._book(stage, j, (held, host))
        d = self._device[stage]
        grows = before is None or held > before[0] or host > before[1]
        if not grows or self._is_safe(d, j):
            return True
        if new:
            self.active.pop()
        self._book(stage, j, before or (0, 0))
        if before is None:
            del self._of[stage, j]
        return False

    def regains(self, stage: int, j: int) -> bool:
        """Book that all of an activation comes back, if that is safe; host memory stays taken until the backward."""
        return self.admits(stage, j, self._bytes[stage].stays, self._of[stage, j][1])

    def keeps(self, stage: int, j: int, stays: int) -> bool:
        """Book that so many bytes of an activation do not leave after all, if that is safe."""
        held, host = self._of[stage, j]
        return self.admits(stage, j, held + stays, host - stays)

    def backward_done(self, stage: int, j: int) -> None:
        """Book that a backward has ended: its bytes are as good as free."""
        self._book(stage, j, (0, 0))
        d = self._device[stage]
        self._to_go[j][d] -= 1
        if not any(self._to_go[j]):
            self.active.remove(j)

    def _book(self, stage: int, j: int, amount: tuple[int, int]) -> None:
        d = self._device[stage]
        held, host = self._of.get((stage, j), (0, 0))
        self._of[stage, j] = amount
        self._holds[d][j] += amount[0] - held
        self._total[d] += amount[0] - held
        self._hosts[d][j] += amount[1] - host
        self._host_total[d] += amount[1] - host

    def _is_safe(self, d: int, newest: int) -> bool:
        device = (self._limit[d], self._total[d], self._holds[d], self._largest[d])
        host = (self._host_limit[d], self._host_total[d], self._hosts[d], self._most_hosted[d])
        return self._can_end(d, newest, self._peak, *device) and self._can_end(d, newest, self._host_peak, *host)

    def _can_end(self, d: int, newest: int, peak: Peak, limit: int, total: int, holds: list[int], largest: int) -> bool:
        """Whether all micro-batches up to the newest can run to their end on device d, one after the other.

        Parameters
        ----------
        peak
            The most that a micro-batch still holds at once if it runs to its end alone; `largest` is an upper bound.
        limit, total, holds
            The memory, how much of it is promised, and how much to each micro-batch.
        """
        for i in self.active:
            if total + largest <= limit:
                return True
            total -= holds[i]
            if total + peak(d, i) > limit:
                return False
            if i == newest:
                break
        return True

    def _peak(self, d: int, i: int) -> int:
        r = self._route[i]
        own = self._own[r][d][: self._to_go[i][d]]
        if len(own) == 1:
            return self._peaks[r][own[0]]
        peak, before = 0, 0
        for s in own:
            peak = max(peak, before + self._peaks[r][s])
            before += self._of.get((s, i), (self._residual[r][s], 0))[0]
        return peak

    def _host_peak(self, d: int, i: int) -> int:
        r = self._route[i]
        return self._hosts[d][i] + sum(self._host_need[r][s] for s in self._own[r][d] if (s, i) not in self._of)
