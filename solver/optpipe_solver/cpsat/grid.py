"""A problem on a grid of integers, for CP-SAT: times in ticks, sizes in grains.

Both units follow from the data. What is not whole is rounded to the safe side: up for schedules, down for bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from math import ceil, floor, gcd, lcm
from typing import Any, TypeAlias, TypeVar

import numpy as np

from optpipe.evaluate.effects import Effects, Holding
from optpipe.model.arrays import NONE, Flags
from optpipe.model.costs import FORWARDS, GRADIENTS, IN_PARTS, MS_FIELDS
from optpipe.model.ops import COMPUTE, TRANSFERS, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.records import EachMs, Level, Stage, StageCosts, each_microbatch, of_microbatch
from optpipe_solver.paths import needs_fused

# Ticks that the busiest device's work on one micro-batch may last before times are rounded. With more, windows gain
# less.
FINEST = 2000
# Ticks that everything, one after the other, may last: what CP-SAT adds up stays far below 2^63.
LONGEST = 2**40
# Grains of the roomiest device before sizes are rounded.
FULL = 100_000
BACKWARDS = ((Kind.B, Kind.W), (Kind.BW,))

Number = TypeVar("Number", int, Fraction)
# Of each kind of op, of C by each level, and of O and R of the activation (`NONE`) or of a level's checkpoint.
Times: TypeAlias = dict[tuple[Kind, int], Number]


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
        computing = (ms for of_stage in durations for each in of_stage for (k, _), ms in each.items() if k in COMPUTE)
        lasting = all(computing)
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
    def _ticks(self) -> list[list[Times[int]]]:
        """By stage and class of micro-batches. Rounded up, compute takes a tick at least: starts tell no order of ops
        that take no time."""

        def ticks(kind: Kind, ms: Fraction) -> int:
            return max(self._whole(ms), int(kind in COMPUTE and not self.down))

        return [
            [{what: ticks(what[0], ms) for what, ms in each.items()} for each in of_stage]
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

            def ms(kind: Kind, level: int = NONE, by_class: list[Times[int]] = by_class, of: Stage = stage) -> EachMs:
                parts = of.offload_parts if kind in IN_PARTS else 1
                return self._for_each([ticks[kind, level] * parts for ticks in by_class])

            fields: dict[str, Any] = {MS_FIELDS[kind][0]: ms(kind) for kind in (Kind.F, Kind.B, Kind.W)}
            if stage.can_offload:
                fields |= {"offload_ms": ms(Kind.O), "reload_ms": ms(Kind.R)}
            if stage.levels is None and stage.can_recompute:
                fields["recompute_ms"] = ms(Kind.C, 0)
            levels = []
            for k, level in enumerate(stage.levels or ()):
                moved = {"offload_ms": ms(Kind.O, k), "reload_ms": ms(Kind.R, k)} if level.can_offload else {}
                levels.append(level.model_copy(update={"recompute_ms": ms(Kind.C, k), **moved}))
            stages.append(stage.model_copy(update={**fields, "levels": tuple(levels) or None}))

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

    def duration(self, op: Op) -> int:
        """Ticks of an F, B, W, C, O or R."""
        level = op.part if op.kind == Kind.C else self.level_of_part(op.stage, op.part)
        return self._ticks[op.stage][self._alike[op.microbatch]][op.kind, level]

    def level_of_part(self, stage: int, part: int) -> int:
        """The level of whose checkpoint this is a part, `NONE` for a part of the activation: the parts of checkpoints
        are numbered after those of the activation, level after level."""
        return part // self.problem.stages[stage].offload_parts - 1

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
        holdings = (
            each.bytes
            for s, stage in enumerate(self.problem.stages)
            for j in examples.tolist()
            for kinds in BACKWARDS
            for level in range(NONE, len(stage.all_levels))
            for each in self._effects.holdings(s, j, Kind.F, Kind.C, *kinds, level=level)
        )
        parts = (each[:, examples].ravel().tolist() for each in (self._effects.parts, *self._effects.parts_by_level))
        return gcd(*holdings, *chain(*parts))

    @cached_property
    def _roomiest(self) -> int:
        return int(self.problem.costs.activation_budget.max())

    @cached_property
    def _effects(self) -> Effects:
        return Effects(self.problem)

    @cached_property
    def _parts(self) -> list[list[dict[int, int]]]:
        examples = self.problem.costs.examples.tolist()
        by_stage: list[list[dict[int, int]]] = []
        for s, stage in enumerate(self.problem.stages):
            n = stage.offload_parts
            leaving = [self._effects.parts] * stage.can_offload
            first = [0] * stage.can_offload
            for k, level in enumerate(stage.all_levels):
                if level.can_offload:
                    leaving.append(self._effects.parts_by_level[k])
                    first.append((1 + k) * n)
            by_stage.append(
                [
                    {
                        at + p: self._grains(size)
                        for at, nbytes in zip(first, leaving, strict=True)
                        for p, size in enumerate(nbytes[s, j, :n].tolist())
                    }
                    for j in examples
                ]
            )
        return by_stage

    def parts(self, stage: int, microbatch: int) -> dict[int, int]:
        """The grains of each part of an activation that can leave, or of its checkpoints (`level_of_part`)."""
        return self._parts[stage][self._alike[microbatch]]

    def holdings(self, stage: int, microbatch: int, *kinds: Kind, level: int = NONE) -> list[Holding]:
        """As `Effects.holdings`, in grains.

        What is held after F is the sum of the parts and of what stays, each rounded on its own, so that parts can come
        off it. All else is rounded on its own, too; what is more is no lower than that.
        """
        activation = self._sum_of_parts(stage, microbatch, NONE)
        after = dict([self._sum_of_parts(stage, microbatch, level), activation])

        def grains(size: int) -> int:
            least = max((rounded for held, rounded in after.items() if held < size), default=0)
            return after.get(size, max(self._grains(size), least))

        holdings = self._effects.holdings(stage, microbatch, *kinds, level=level)
        return [each._replace(bytes=grains(each.bytes)) for each in holdings]

    def _sum_of_parts(self, stage: int, microbatch: int, level: int) -> tuple[int, int]:
        """The bytes after F, and their grains, each part rounded on its own; of an activation, rounded up, no fewer
        than those of any of its checkpoints."""
        effects = self._effects
        (takes, frees), nbytes = (
            ((effects.takes, effects.frees), effects.parts)
            if level == NONE
            else (effects.by_level[level], effects.parts_by_level[level])
        )
        held = int(takes[Kind.F, stage, microbatch] - frees[Kind.F, stage, microbatch])
        moving = {p: x for p, x in self.parts(stage, microbatch).items() if self.level_of_part(stage, p) == level}
        leaving = int(nbytes[stage, microbatch].sum()) if moving else 0
        rounded = sum(moving.values()) + self._grains(held - leaving)
        if level == NONE and not self.down:
            levels = range(len(self.problem.stages[stage].all_levels))
            rounded = max(rounded, *(self._sum_of_parts(stage, microbatch, k)[1] for k in levels), rounded)
        return held, rounded

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
        costs = self.problem.costs
        hosted = np.max([costs.offload, *costs.levels.offload], axis=0)
        for j in range(self.problem.microbatches):
            for s in self.problem.route(j):
                most[self.problem.stages[s].device] += int(hosted[s, j])
        limits = [device.host_memory_bytes for device in self.problem.devices]
        return [
            None if limit is None or size <= limit else limit // self.grain
            for size, limit in zip(most, limits, strict=True)
        ]

    @cached_property
    def _link_users(self) -> list[list[int]]:
        """By link: the stages that can offload over it, activations or checkpoints."""
        costs = self.problem.costs
        users: list[list[int]] = [[] for _ in range(int(costs.link.max()) + 1)]
        for s, stage in enumerate(self.problem.stages):
            if stage.can_offload or stage.can_offload_checkpoints:
                users[int(costs.link[stage.device])].append(s)
        return users

    @cached_property
    def links(self) -> list[tuple[tuple[Kind, ...], list[int]]]:
        """The transfers that run one at a time: their kinds, and the stages that they are of."""
        together = [(Kind.O, Kind.R)] if self.problem.transfer_mode == "half_duplex" else [(Kind.O,), (Kind.R,)]
        return [(kinds, stages) for stages in self._link_users if stages for kinds in together]


def _exact(ms: float) -> Fraction:
    return Fraction(repr(float(ms)))  # what the file says, not its nearest float


def _durations(problem: Problem) -> list[list[Times[Fraction]]]:
    """By stage and class of micro-batches."""
    return [[_of_microbatch(stage, j) for j in problem.costs.examples.tolist()] for stage in problem.stages]


def _of_microbatch(stage: Stage, j: int) -> Times[Fraction]:
    parts = stage.offload_parts

    def exact(ms: EachMs | None) -> Fraction:
        return _exact(of_microbatch(ms or 0.0, j))

    def moved(costs: StageCosts | Level) -> list[Fraction]:
        return [exact(ms) / parts for ms in (costs.offload_ms, costs.reload_ms)]

    ms = {(kind, NONE): exact(getattr(stage, MS_FIELDS[kind][0])) for kind in (Kind.F, Kind.B, Kind.W)}
    ms |= dict(zip(((Kind.O, NONE), (Kind.R, NONE)), moved(stage), strict=True))
    for k, level in enumerate(stage.all_levels):
        ms[Kind.C, k] = exact(level.recompute_ms)
        if level.can_offload:
            ms |= dict(zip(((Kind.O, k), (Kind.R, k)), moved(level), strict=True))
    return ms


def _messages(problem: Problem) -> Any:
    """(2, S, classes) of the message that the F, the backward of each stage waits for, as exact fractions."""
    return np.vectorize(_exact, otypes=[object])(problem.costs.message_ms[..., problem.costs.examples])


def _most_work(problem: Problem, durations: list[list[Times[Fraction]]]) -> Fraction:
    """Time of compute of the busiest device on one micro-batch."""
    kinds = Kind.F, Kind.B, Kind.W
    compute = [[sum((times[k, NONE] for k in kinds), Fraction(0)) for times in by_class] for by_class in durations]
    work = [
        sum((compute[s][c] for s in problem.stages_on(d)), Fraction(0))
        for d in range(len(problem.devices))
        for c in range(len(compute[0]))
    ]
    return max(work)


def _serial(problem: Problem, durations: list[list[Times[Number]]], messages: Any) -> Number:
    """Time of everything that could be done, one after the other."""
    total: Any = 0
    for c, batches in enumerate(problem.costs.classes):
        once = messages[:, :, c].sum()
        for stage, by_class in zip(problem.stages, durations, strict=True):
            times = by_class[c].items()
            once += sum(time * (stage.offload_parts if kind in TRANSFERS else 1) for (kind, _), time in times)
        total += len(batches) * once
    serial: Number = total
    return serial
