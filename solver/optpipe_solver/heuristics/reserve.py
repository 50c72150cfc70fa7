"""`Reserve`: what is in flight can always be finished (Dijkstra's banker's algorithm).

The bank lends a device's memory; micro-batches are the customers, in the order in which they were admitted. A loan is
safe if each customer could finish alone, one after the other in that order: with all before it gone, and all after it
keeping what they have. What an activation counts for is what it will settle at: its offloads end, and its weight
gradient runs, without asking for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import Relief
from optpipe_solver.bounds.stage_bytes import StageBytes, stage_bytes


class Loan(NamedTuple):
    """The bytes that one activation settles at, between its forward and its backward."""

    device: int
    host: int


NO_LOAN = Loan(0, 0)


class _Bank:
    """One memory of one device, and what each micro-batch has of it.

    Parameters
    ----------
    limit
        Its bytes.
    most_alone
        No micro-batch needs more than that if it has all of the memory.
    """

    def __init__(self, limit: int, most_alone: int, microbatches: int) -> None:
        self._limit, self._most_alone = limit, most_alone
        self.lent = [0] * microbatches
        self._total = 0

    def change(self, microbatch: int, by: int) -> None:
        self.lent[microbatch] += by
        self._total += by

    def is_safe(self, admitted: Sequence[int], borrower: int, peak: Callable[[int], int]) -> bool:
        """Whether the micro-batches up to the one whose loan grows can finish one after the other; those after it go on
        when its loan is gone.

        Parameters
        ----------
        peak
            The most that a micro-batch has at once from now on if it finishes alone.
        """
        total = self._total
        for j in admitted:
            if total + self._most_alone <= self._limit:
                return True  # whoever is next fits beside all that is still lent
            total -= self.lent[j]
            if total + peak(j) > self._limit:
                return False
            if j == borrower:
                break
        return True


class Reserve:
    """Device memory and pinned host memory of every device, as lent to the activations in flight.

    Parameters
    ----------
    base
        For each class of micro-batches, the relief of every stage with which one at a time fits.

    Attributes
    ----------
    in_flight
        The micro-batches with loans, in the order in which they were admitted.
    """

    def __init__(self, problem: Problem, base: Sequence[dict[int, Relief]]) -> None:
        costs = problem.costs
        examples = costs.examples.tolist()
        self._bytes = [stage_bytes(problem, j) for j in examples]  # by class and stage
        self._alike: list[int] = costs.alike.tolist()
        self._device: list[int] = costs.device.tolist()
        self._limits: list[tuple[int, int]] = list(
            zip(costs.activation_budget.tolist(), costs.host_memory.tolist(), strict=True)
        )
        devices = range(len(problem.devices))
        self._stages_on = [  # by class and device, in the order of the route
            [[s for s in problem.route(j) if self._device[s] == d] for d in devices] for j in examples
        ]
        self._base_loan = [
            {s: self.loan(s, j, relief) for s, relief in reliefs.items()}
            for j, reliefs in zip(examples, base, strict=True)
        ]
        self._stage_peak = [
            {s: held[s].levels[r.level].peak if r.is_recomputed else held[s].peak for s, r in reliefs.items()}
            for held, reliefs in zip(self._bytes, base, strict=True)
        ]
        self._most_alone = [
            (
                max(
                    sum(peaks[s] for s in stages[d])
                    for peaks, stages in zip(self._stage_peak, self._stages_on, strict=True)
                ),
                max(
                    sum(loans[s].host for s in stages[d])
                    for loans, stages in zip(self._base_loan, self._stages_on, strict=True)
                ),
            )
            for d in devices
        ]

    def begin(self) -> None:
        """Take all loans back."""
        m = len(self._alike)
        self._memory = [
            _Bank(limit, most, m) for (limit, _), (most, _) in zip(self._limits, self._most_alone, strict=True)
        ]
        self._host_memory = [
            _Bank(limit, most, m) for (_, limit), (_, most) in zip(self._limits, self._most_alone, strict=True)
        ]
        self._loans: dict[tuple[int, int], Loan] = {}  # by stage and micro-batch, also of backwards that have ended
        self._backwards_left = [[len(stages) for stages in self._stages_on[c]] for c in self._alike]  # (m, D)
        self.in_flight: list[int] = []

    def _held(self, stage: int, microbatch: int) -> StageBytes:
        return self._bytes[self._alike[microbatch]][stage]

    def loan(self, stage: int, microbatch: int, relief: Relief) -> Loan:
        """Return what an activation settles at."""
        held = self._held(stage, microbatch)
        level = held.levels[relief.level] if relief.is_recomputed else None
        stays, parts = (level.checkpoint, level.parts) if level else (held.stays, held.parts)
        away = sum(parts[part] for part in relief.parts)
        return Loan(stays - away, away)

    def recomputes_freely(self, stage: int, microbatch: int, level: int) -> bool:
        """Whether a recompute needs no more than the stage needs anyway."""
        held = self._held(stage, microbatch)
        return held.levels[level].peak <= held.peak

    def lend(self, stage: int, microbatch: int, loan: Loan) -> bool:
        """Change the loan of an activation, if that is safe; say whether it is."""
        before, d = self._loans.get((stage, microbatch)), self._device[stage]
        is_new = microbatch not in self.in_flight
        if is_new:
            self.in_flight.append(microbatch)
        self._set_loan(stage, microbatch, loan)
        grows = before is None or loan.device > before.device or loan.host > before.host
        if not grows or self._is_safe(d, microbatch):
            return True
        self._set_loan(stage, microbatch, before or NO_LOAN)
        if before is None:
            del self._loans[stage, microbatch]
        if is_new:
            self.in_flight.pop()
        return False

    def lend_for_return(self, stage: int, microbatch: int) -> bool:
        """Lend what it takes that all of an activation comes back; host memory stays lent until the backward."""
        host = self._loans[stage, microbatch].host
        return self.lend(stage, microbatch, Loan(self._held(stage, microbatch).stays, host))

    def lend_for_stay(self, stage: int, microbatch: int, stays: int) -> bool:
        """Lend what it takes that so many bytes of an activation do not leave after all."""
        device, host = self._loans[stage, microbatch]
        return self.lend(stage, microbatch, Loan(device + stays, host - stays))

    def end_backward(self, stage: int, microbatch: int) -> None:
        """Take back the loan of an activation whose backward has ended."""
        self._set_loan(stage, microbatch, NO_LOAN)
        self._backwards_left[microbatch][self._device[stage]] -= 1
        if not any(self._backwards_left[microbatch]):
            self.in_flight.remove(microbatch)

    def _set_loan(self, stage: int, microbatch: int, loan: Loan) -> None:
        d = self._device[stage]
        before = self._loans.get((stage, microbatch), NO_LOAN)
        self._loans[stage, microbatch] = loan
        self._memory[d].change(microbatch, loan.device - before.device)
        self._host_memory[d].change(microbatch, loan.host - before.host)

    def _is_safe(self, d: int, borrower: int) -> bool:
        return self._memory[d].is_safe(
            self.in_flight, borrower, lambda j: self._device_peak(d, j)
        ) and self._host_memory[d].is_safe(self.in_flight, borrower, lambda j: self._host_peak(d, j))

    def _device_peak(self, d: int, microbatch: int) -> int:
        """The most that a micro-batch has at once if it finishes alone: while a stage runs, those before it on the
        route hold their loans, or the base relief's."""
        c = self._alike[microbatch]
        stages = self._stages_on[c][d][: self._backwards_left[microbatch][d]]
        peak, held = 0, 0
        for s in stages:
            peak = max(peak, held + self._stage_peak[c][s])
            held += self._loans.get((s, microbatch), self._base_loan[c][s]).device
        return peak

    def _host_peak(self, d: int, microbatch: int) -> int:
        c = self._alike[microbatch]
        to_come = (self._base_loan[c][s].host for s in self._stages_on[c][d] if (s, microbatch) not in self._loans)
        return self._host_memory[d].lent[microbatch] + sum(to_come)
