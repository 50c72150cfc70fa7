"""`Reserve`: what is in flight can always be finished (the banker's algorithm, with micro-batches as customers).

Micro-batches stand in the order in which they were admitted. A grant of memory is safe as long as each of them, in that
order, could run to its end alone, with all before it gone and all behind it holding what they hold. Counted is what an
activation settles at: its offloads drain and its weight gradient runs without asking anyone.
"""

from __future__ import annotations

from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import Relief, part_bytes


class Reserve:
    """Device memory and pinned host memory of every device, as promised to the micro-batches in flight."""

    def __init__(
        self, problem: Problem, limit: list[int], host_limit: list[int], base: list[dict[int, Relief]]
    ) -> None:
        devices, m = len(problem.devices), problem.microbatches
        self._limit, self._host_limit = limit, host_limit
        self._route: list[int] = problem.costs.route.tolist()
        self._activation: list[int] = [stage.activation_bytes for stage in problem.stages]
        self._device = [stage.device for stage in problem.stages]
        self._own = [
            [[s for s in route if self._device[s] == d] for d in range(devices)] for route in problem.all_routes
        ]
        self._residual: list[dict[int, int]] = [
            {s: settled(problem, s, relief)[0] for s, relief in reliefs.items()} for reliefs in base
        ]
        self._host_need = [{s: settled(problem, s, relief)[1] for s, relief in reliefs.items()} for reliefs in base]
        self._to_go = [[len(own) for own in self._own[r]] for r in self._route]  # (m, D) backwards
        self._holds = [[0] * m for _ in range(devices)]
        self._hosts = [[0] * m for _ in range(devices)]
        self._total, self._host_total = [0] * devices, [0] * devices
        self._of: dict[tuple[int, int], tuple[int, int]] = {}  # stage, micro-batch: device and host bytes
        self._largest = [
            max((sum(self._activation[s] for s in own[d]) for own in self._own), default=0) for d in range(devices)
        ]
        self._most_hosted = [
            max(sum(need[s] for s in own[d]) for need, own in zip(self._host_need, self._own, strict=True))
            for d in range(devices)
        ]
        self.active: list[int] = []

    def admits(self, stage: int, j: int, held: int, host: int) -> bool:
        """Books that a micro-batch's activation of a stage settles at so many device and host bytes, if that is
        safe."""
        before = self._of.get((stage, j))
        new = j not in self.active
        if new:
            self.active.append(j)
        self._book(stage, j, (held, host))
        d = self._device[stage]
        grows = before is None or held > before[0] or host > before[1]
        if not grows or (self._safe(d, j) and self._host_safe(d, j)):
            return True
        if new:
            self.active.pop()
        self._book(stage, j, before or (0, 0))
        if before is None:
            del self._of[stage, j]
        return False

    def regains(self, stage: int, j: int) -> bool:
        """Books that an activation comes back whole, if that is safe; its host memory stays taken until the
        backward."""
        return self.admits(stage, j, self._activation[stage], self._of[stage, j][1])

    def keeps(self, stage: int, j: int, stays: int) -> bool:
        """Books that so many bytes of an activation do not leave after all, if that is safe."""
        held, host = self._of[stage, j]
        return self.admits(stage, j, held + stays, host - stays)

    def backward_done(self, stage: int, j: int) -> None:
        """A backward has ended: its bytes are as good as free."""
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

    def _safe(self, d: int, newest: int) -> bool:
        limit, holds, others = self._limit[d], self._holds[d], self._total[d]
        for i in self.active:
            if others + self._largest[d] <= limit:
                return True
            others -= holds[i]
            if others + self._peak(d, i) > limit:
                return False
            if i == newest:
                break
        return True

    def _peak(self, d: int, i: int) -> int:
        """The most bytes that a micro-batch still holds at once on a device if it runs to its end alone."""
        r = self._route[i]
        own = self._own[r][d][: self._to_go[i][d]]
        if len(own) == 1:
            return self._activation[own[0]]
        peak, before = 0, 0
        for s in own:
            peak = max(peak, before + self._activation[s])
            before += self._of.get((s, i), (self._residual[r][s], 0))[0]
        return peak

    def _host_safe(self, d: int, newest: int) -> bool:
        others, limit = self._host_total[d], self._host_limit[d]
        for i in self.active:
            if others + self._most_hosted[d] <= limit:
                return True
            r = self._route[i]
            need = sum(self._host_need[r][s] for s in self._own[r][d] if (s, i) not in self._of)
            if others + need > limit:
                return False
            if i == newest:
                break
            others -= self._hosts[d][i]
        return True


def settled(problem: Problem, stage: int, relief: Relief) -> tuple[int, int]:
    """Device and host bytes of an activation between its forward and its backward, once its offloads have ended."""
    cost = problem.stages[stage]
    if relief.recompute:
        return cost.checkpoint_bytes or 0, 0
    size = part_bytes(cost)
    away = sum(size[p] for p in relief.parts)
    return cost.activation_bytes - away, away
