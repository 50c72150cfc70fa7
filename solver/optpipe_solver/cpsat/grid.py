"""A problem on a grid of integers, for CP-SAT: times in ticks, sizes in grains.

Both units follow from the data. What is not whole is rounded to the safe side: up for schedules, down for bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, gcd, lcm
from typing import Any, TypeVar

import numpy as np

from optpipe.evaluate.effects import Effects, Level
from optpipe.model.arrays import Flags
from optpipe.model.costs import FORWARDS, GRADIENTS, IN_PARTS, MS_FIELDS
from optpipe.model.ops import COMPUTE, TRANSFERS, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.records import EachMs, Stage, each_microbatch
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
        durations, messages = _durations(problem), _messages(problem)
        times = [*messages.ravel(), *(ms for of_stage in durations for each in of_stage for ms in each.values())]
        denominator = lcm(*(ms.denominator for ms in times))
        unit = Fraction(gcd(*(int(ms * denominator) for ms in times)), denominator)
        if not unit:
            return cls(problem, Fraction(1), exact=False)  # nothing takes any time
        coarsest = max(_most_work(problem, durations) / finest, _serial(problem, durations, messages) / LONGEST)
        lasting = all(ms for of_stage in durations for each in of_stage for kind, ms in each.items() if kind in COMPUTE)
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
    def _ticks(self) -> list[list[dict[Kind, int]]]:
        """By stage and class of micro-batches. Rounded up, compute takes a tick at least: starts tell no order of ops
        that take no time."""

        def ticks(kind: Kind, ms: Fraction) -> int:
            return max(self._whole(ms), int(kind in COMPUTE and not self.down))

        return [
            [{kind: ticks(kind, ms) for kind, ms in each.items()} for each in of_stage]
            for of_stage in _durations(self.problem)
        ]

    @cached_property
    def _alike(self) -> list[int]:
        """The class of each micro-batch."""
        alike: list[int] = self.problem.costs.alike.tolist()
        return alike

    def _whole(self, ms: Fraction) -> int:
        return floor(ms / self.tick) if self.down else ceil(ms / self.tick)

    @cached_property
    def rounded(self) -> Problem:
        """The problem with ticks for milliseconds: what is simulated in it falls on whole ticks."""
        stages = []
        for stage, by_class in zip(self.problem.stages, self._ticks, strict=True):
            parts = stage.offload_parts
            fields: dict[str, Any] = {
                "forward_ms": [ticks[Kind.F] for ticks in by_class],
                "backward_input_ms": [ticks[Kind.B] for ticks in by_class],
                "backward_weight_ms": [ticks[Kind.W] for ticks in by_class],
            }
            if stage.can_offload:
                fields["offload_ms"] = [ticks[Kind.O] * parts for ticks in by_class]
                fields["reload_ms"] = [ticks[Kind.R] * parts for ticks in by_class]
            if stage.can_recompute:
                fields["recompute_ms"] = [ticks[Kind.C] for ticks in by_class]
            stages.append(stage.model_copy(update={name: self._for_each(ticks) for name, ticks in fields.items()}))

        def rounded(ms: EachMs) -> EachMs:
            whole: EachMs = each_microbatch(lambda each: float(self._whole(_exact(each))), ms)
            return whole

        messages = self.problem.messages and tuple(
            message.model_copy(update={"ms": rounded(message.ms)}) for message in self.problem.messages
        )
        p2p_ms = rounded(self.problem.p2p_ms)
        return self.problem.model_copy(update={"stages": tuple(stages), "p2p_ms": p2p_ms, "messages": messages})

    def _for_each(self, ticks: list[int]) -> EachMs:
        """The figure of a problem file: by class one number, or one for each micro-batch where they differ."""
        if len(set(ticks)) == 1:
            return float(ticks[0])
        return tuple(float(ticks[c]) for c in self._alike)

    def duration(self, kind: Kind, stage: int, microbatch: int) -> int:
        """Ticks of F, B, W or C, or of one part for O and R."""
        return self._ticks[stage][self._alike[microbatch]][kind]

    @cached_property
    def serial(self) -> int:
        """Ticks of everything that could be done, one after the other: no simulated schedule is longer."""
        return _serial(self.problem, self._ticks, self._message_ticks)

    @cached_property
    def needs_fused(self) -> Flags:
        """(S,) as the function: the stages on which BW can do what B and W cannot."""
        return needs_fused(self.problem)

    @cached_property
    def _message_ticks(self) -> Any:
        return np.vectorize(self._whole, otypes=[object])(_messages(self.problem))

    def forward_delay(self, stage: int, microbatch: int) -> int:
        """Ticks of the message that a stage's forward waits for."""
        return int(self._message_ticks[FORWARDS, stage, self._alike[microbatch]])

    def gradient_delay(self, stage: int, microbatch: int) -> int:
        """Ticks of the message that a stage's backward waits for."""
        return int(self._message_ticks[GRADIENTS, stage, self._alike[microbatch]])

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
        examples = self.problem.costs.examples
        levels = (
            level.bytes
            for s in range(len(self.problem.stages))
            for j in examples.tolist()
            for kinds, recomputed in VISITS
            for level in self._effects.levels(s, j, *kinds, recomputed=recomputed)
        )
        return gcd(*levels, *self._effects.parts[:, examples].ravel().tolist())

    @cached_property
    def _roomiest(self) -> int:
        return int(self.problem.costs.activation_budget.max())

    @cached_property
    def _effects(self) -> Effects:
        return Effects(self.problem)

    @cached_property
    def _parts(self) -> list[list[list[int]]]:
        examples = self.problem.costs.examples.tolist()
        return [
            [
                [self._grains(size) for size in self._effects.parts[s, j, : stage.offload_parts].tolist()]
                if stage.can_offload
                else []
                for j in examples
            ]
            for s, stage in enumerate(self.problem.stages)
        ]

    def parts(self, stage: int, microbatch: int) -> list[int]:
        """The grains of each part of an activation that can leave."""
        return self._parts[stage][self._alike[microbatch]]

    def levels(self, stage: int, microbatch: int, *kinds: Kind, recomputed: bool = False) -> list[Level]:
        """As `Effects.levels`, in grains.

        The level that is held after F is the sum of the parts and of what stays, each rounded on its own, so that parts
        can come off it. Other levels are rounded on their own, too; higher ones are no lower than that.
        """
        takes, frees, parts = self._effects.takes, self._effects.frees, self._effects.parts
        held = int(takes[Kind.F, stage, microbatch] - frees[Kind.F, stage, microbatch])
        leaving = int(parts[stage, microbatch].sum())
        rounded = sum(self.parts(stage, microbatch)) + self._grains(held - leaving)

        def grains(size: int) -> int:
            return rounded if size == held else max(self._grains(size), rounded * (size > held))

        levels = self._effects.levels(stage, microbatch, *kinds, recomputed=recomputed)
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
                most[self.problem.stages[s].device] += int(self._effects.parts[s, j].sum())
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


def _durations(problem: Problem) -> list[list[dict[Kind, Fraction]]]:
    """By stage and class of micro-batches."""
    return [[_of_microbatch(stage, j) for j in problem.costs.examples.tolist()] for stage in problem.stages]


def _of_microbatch(stage: Stage, j: int) -> dict[Kind, Fraction]:
    figures = stage.of_microbatch(j).model_dump()

    def exact(kind: Kind) -> Fraction:
        (field,) = MS_FIELDS[kind]
        return _exact(figures[field] or 0.0) / (stage.offload_parts if kind in IN_PARTS else 1)

    recompute = (Kind.C,) if stage.can_recompute else ()
    return {kind: exact(kind) for kind in (Kind.F, Kind.B, Kind.W, *IN_PARTS, *recompute)}


def _messages(problem: Problem) -> Any:
    """(2, S, classes) of the message that the F, the backward of each stage waits for, as exact fractions."""
    return np.vectorize(_exact, otypes=[object])(problem.costs.message_ms[..., problem.costs.examples])


def _most_work(problem: Problem, durations: list[list[dict[Kind, Fraction]]]) -> Fraction:
    """Time of compute of the busiest device on one micro-batch."""
    compute = [[times[Kind.F] + times[Kind.B] + times[Kind.W] for times in by_class] for by_class in durations]
    work = [
        sum((compute[s][c] for s in problem.stages_on(d)), Fraction(0))
        for d in range(len(problem.devices))
        for c in range(len(compute[0]))
    ]
    return max(work)


def _serial(problem: Problem, durations: list[list[dict[Kind, Number]]], messages: Any) -> Number:
    """Time of everything that could be done, one after the other."""
    total: Any = 0
    for c, batches in enumerate(problem.costs.classes):
        once = messages[:, :, c].sum()
        for stage, by_class in zip(problem.stages, durations, strict=True):
            times = by_class[c].items()
            once += sum(time * (stage.offload_parts if kind in TRANSFERS else 1) for kind, time in times)
        total += len(batches) * once
    serial: Number = total
    return serial
