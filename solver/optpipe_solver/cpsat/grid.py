"""A problem on a grid of integers, for CP-SAT: times in ticks, sizes in grains.

Both units follow from the data. What is not whole is rounded to the safe side: up for schedules, down for bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, gcd, lcm
from typing import TypeVar

from optpipe.evaluate.effects import Effects, Level
from optpipe.model.arrays import Flags
from optpipe.model.ops import COMPUTE, TRANSFERS, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.records import Stage
from optpipe_solver.paths import needs_fused

# Ticks that the busiest device's work on one micro-batch may last before times are rounded. With more, windows gain
# less.
FINEST = 2000
# Ticks that everything, one after the other, may last: what CP-SAT adds up stays far below 2^63.
LONGEST = 2**40
# Grains of the roomiest device before sizes are rounded.
FULL = 100_000
# What an activation goes through, and whether it is recomputed.
VISITS = (
    ((Kind.F, Kind.B, Kind.W), False),
    ((Kind.F, Kind.BW), False),
    ((Kind.F, Kind.C, Kind.B, Kind.W), True),
    ((Kind.F, Kind.C, Kind.BW), True),
)


Number = TypeVar("Number", int, Fraction)


@dataclass(frozen=True)
class Grid:
    """A problem on a grid.

    Durations and needs of memory are rounded up, capacities down, so what fits on the grid fits. With `down` durations
    and needs are rounded down: every program of the problem fits on the grid and has no longer makespan there, so a
    bound on the grid's makespan is one on the problem's. (Not on the span: a device whose work comes sooner starts
    sooner, too.)

    Attributes
    ----------
    tick
        In ms.
    exact
        Whether no duration was rounded.
    """

    problem: Problem
    tick: Fraction
    exact: bool
    down: bool = False

    @classmethod
    def for_problem(cls, problem: Problem, finest: int = FINEST) -> Grid:
        """A grid on which every duration is whole, if the busiest device's work on one micro-batch then takes `finest`
        ticks at most; else a coarser one on which it takes that many."""
        durations = [_durations(stage) for stage in problem.stages]
        p2p = _exact(problem.p2p_ms)
        times = [p2p, *(ms for of_stage in durations for ms in of_stage.values())]
        denominator = lcm(*(ms.denominator for ms in times))
        unit = Fraction(gcd(*(int(ms * denominator) for ms in times)), denominator)
        if not unit:
            return cls(problem, Fraction(1), exact=False)  # nothing takes any time
        coarsest = max(max(_work(problem, durations)) / finest, _serial(problem, durations, p2p) / LONGEST)
        lasting = all(ms for of_stage in durations for kind, ms in of_stage.items() if kind in COMPUTE)
        return cls(problem, max(unit, coarsest), exact=unit >= coarsest and lasting)

    @cached_property
    def relaxed(self) -> Grid:
        """The same grid for bounds."""
        return self if self.lossless else replace(self, down=True)

    @property
    def lossless(self) -> bool:
        """Whether nothing was rounded."""
        return self.exact and self.grain == max(self._common, 1)

    @cached_property
    def _ticks(self) -> list[dict[Kind, int]]:
        """By stage. Rounded up, compute takes a tick at least: starts tell no order of ops that take no time."""
        return [
            {
                kind: max(self._whole(ms), int(kind in COMPUTE and not self.down))
                for kind, ms in _durations(stage).items()
            }
            for stage in self.problem.stages
        ]

    def _whole(self, ms: Fraction) -> int:
        return floor(ms / self.tick) if self.down else ceil(ms / self.tick)

    @cached_property
    def rounded(self) -> Problem:
        """The problem with ticks for milliseconds: what is simulated in it falls on whole ticks."""
        stages = [
            stage.model_copy(
                update={
                    "forward_ms": float(ticks[Kind.F]),
                    "backward_input_ms": float(ticks[Kind.B]),
                    "backward_weight_ms": float(ticks[Kind.W]),
                    "offload_ms": float(ticks[Kind.O] * stage.offload_parts) if stage.can_offload else None,
                    "reload_ms": float(ticks[Kind.R] * stage.offload_parts) if stage.can_offload else None,
                    "recompute_ms": float(ticks[Kind.C]) if stage.can_recompute else None,
                }
            )
            for stage, ticks in zip(self.problem.stages, self._ticks, strict=True)
        ]
        return self.problem.model_copy(update={"stages": tuple(stages), "p2p_ms": float(self.p2p)})

    def duration(self, kind: Kind, stage: int) -> int:
        """Ticks of F, B, W or C, or of one part for O and R."""
        return self._ticks[stage][kind]

    @cached_property
    def serial(self) -> int:
        """Ticks of everything that could be done, one after the other: no simulated schedule is longer."""
        return _serial(self.problem, self._ticks, self.p2p)

    @cached_property
    def needs_fused(self) -> Flags:
        """(S,) as the function: the stages on which BW can do what B and W cannot."""
        return needs_fused(self.problem)

    @cached_property
    def p2p(self) -> int:
        return self._whole(_exact(self.problem.p2p_ms))

    def delay(self, stage: int, other: int) -> int:
        """Ticks from one stage to another."""
        return 0 if self.problem.stages[stage].device == self.problem.stages[other].device else self.p2p

    def ms(self, ticks: int) -> float:
        return float(ticks * self.tick)

    def starts_ms(self, starts: dict[Op, int]) -> dict[Op, float]:
        return {op: self.ms(at) for op, at in starts.items()}

    @cached_property
    def grain(self) -> int:
        """Bytes in which memory is counted: as many as divide every level, or a small part of the roomiest device."""
        return max(self._common, self._roomiest // FULL, 1)

    @cached_property
    def _common(self) -> int:
        stages = range(len(self.problem.stages))
        levels = (
            level.bytes
            for s in stages
            for kinds, recomputed in VISITS
            for level in self._effects.levels(s, *kinds, recomputed=recomputed)
        )
        return gcd(*levels, *(size for sizes in self._effects.parts for size in sizes))

    @cached_property
    def _roomiest(self) -> int:
        return int(self.problem.costs.activation_budget.max())

    @cached_property
    def _effects(self) -> Effects:
        return Effects(self.problem)

    @cached_property
    def parts(self) -> list[list[int]]:
        """By stage the grains of each part that can leave."""
        return [
            [self._grains(size) for size in sizes] if stage.can_offload else []
            for stage, sizes in zip(self.problem.stages, self._effects.parts, strict=True)
        ]

    def levels(self, stage: int, *kinds: Kind, recomputed: bool = False) -> list[Level]:
        """As `Effects.levels`, in grains.

        The level that is held after F is the sum of the parts and of what stays, each rounded on its own, so that parts
        can come off it. Other levels are rounded on their own, too; higher ones are no lower than that.
        """
        held = int(self._effects.takes[Kind.F, stage] - self._effects.frees[Kind.F, stage])
        rounded = sum(self.parts[stage]) + self._grains(held - sum(self._effects.parts[stage]))

        def grains(size: int) -> int:
            return rounded if size == held else max(self._grains(size), rounded * (size > held))

        levels = self._effects.levels(stage, *kinds, recomputed=recomputed)
        return [level._replace(bytes=grains(level.bytes)) for level in levels]

    def _grains(self, size: int) -> int:
        """More than any device has room for need not be counted further."""
        grains = size // self.grain if self.down else -(-size // self.grain)
        return min(grains, self._roomiest // self.grain + 1)

    def capacity(self, device: int) -> int:
        return self.problem.devices[device].activation_budget_bytes // self.grain

    @cached_property
    def host_capacities(self) -> list[int | None]:
        """By device, in grains; None where all that could be offloaded fits at once."""
        most = [0] * len(self.problem.devices)
        for j in range(self.problem.microbatches):
            for s in self.problem.route(j):
                most[self.problem.stages[s].device] += sum(self._effects.parts[s])
        limits = [device.host_memory_bytes for device in self.problem.devices]
        return [
            None if limit is None or size <= limit else limit // self.grain
            for size, limit in zip(most, limits, strict=True)
        ]

    @cached_property
    def _link_users(self) -> list[list[int]]:
        """By link: the stages that can offload over it."""
        costs = self.problem.costs
        users: list[list[int]] = [[] for _ in range(int(costs.link.max()) + 1)]
        for s, stage in enumerate(self.problem.stages):
            if stage.can_offload:
                users[int(costs.link[stage.device])].append(s)
        return users

    @cached_property
    def links(self) -> list[tuple[tuple[Kind, ...], list[int]]]:
        """The transfers that run one at a time: their kinds, and the stages that they are of."""
        together = [(Kind.O, Kind.R)] if self.problem.transfer_mode == "half_duplex" else [(Kind.O,), (Kind.R,)]
        return [(kinds, stages) for stages in self._link_users if stages for kinds in together]


def _exact(ms: float) -> Fraction:
    return Fraction(repr(float(ms)))  # what the file says, not its nearest float


def _durations(stage: Stage) -> dict[Kind, Fraction]:
    return {
        Kind.F: _exact(stage.forward_ms),
        Kind.B: _exact(stage.backward_input_ms),
        Kind.W: _exact(stage.backward_weight_ms),
        Kind.O: _exact(stage.offload_ms or 0.0) / stage.offload_parts,
        Kind.R: _exact(stage.reload_ms or 0.0) / stage.offload_parts,
        **({Kind.C: _exact(stage.recompute_ms)} if stage.recompute_ms is not None else {}),
    }


def _work(problem: Problem, durations: list[dict[Kind, Number]]) -> list[Number]:
    """By device: time of compute on one micro-batch."""
    compute = [times[Kind.F] + times[Kind.B] + times[Kind.W] for times in durations]
    stages_on = (problem.stages_on(d) for d in range(len(problem.devices)))
    return [sum((compute[s] for s in stages), 0 * compute[0]) for stages in stages_on]


def _serial(problem: Problem, durations: list[dict[Kind, Number]], p2p: Number) -> Number:
    """Time of everything that could be done, one after the other."""
    once = 2 * len(durations) * p2p
    for stage, times in zip(problem.stages, durations, strict=True):
        once += sum(time * (stage.offload_parts if kind in TRANSFERS else 1) for kind, time in times.items())
    return problem.microbatches * once
