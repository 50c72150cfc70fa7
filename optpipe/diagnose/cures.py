"""What to change: each cure with its predicted time, what no schedule with the same freedom falls below, the memory it
needs, and the lines to write; and the cures that go together, predicted together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from optpipe.anytime import solve
from optpipe.comparison import compare
from optpipe.diagnose.batches import Change, Outcome, StepBatch, UserFacts, batch_of, evenly, typical
from optpipe.diagnose.lines import file_of, lines_of
from optpipe.diagnose.losses import Losses
from optpipe.diagnose.runs import ACTIVATION, Runs
from optpipe.errors import OptPipeError
from optpipe.formats.stacks import STACKS
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind
from optpipe.model.placement import Placement
from optpipe.options import SolveArguments, StackName
from optpipe.schedule import Schedule

SAMPLED = 5  # steps on which cures are predicted
LEAST = 0.01  # of the step a cure gains
Progress = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Cure:
    """Something to change.

    `name` is `device`, `layers`, `order`, `spread`, `steps`, `published` (on today's stages), `chunks` (on others),
    `ours`, or `together` for those that go together.
    """

    name: str
    title: str  # what is done
    ms: Floats  # (n,) of the sampled steps: how long each takes
    bound_ms: Floats  # (n,) what it does not fall below with the same freedom
    before_ms: Floats  # (n,) how long they take as they ran, in a replay
    activations: tuple[float, ...]  # by device, how many activations of one of today's stages it holds at most
    lines: tuple[str, ...]  # what to write, and where
    file: tuple[str, str] | None  # the name and the text of a file that goes with it
    schedule: Schedule  # the slowest replica's in the last sampled step

    @property
    def gain(self) -> float:
        """The share of the time that is spared, of all sampled steps."""
        return 1 - float(self.ms.sum() / self.before_ms.sum())

    @property
    def most(self) -> float:
        """The largest such share that the bound leaves open."""
        return 1 - float(self.bound_ms.sum() / self.before_ms.sum())


class Cures(NamedTuple):
    """What to change, and how it was predicted."""

    steps: tuple[int, ...]  # the numbers of the sampled steps
    cures: tuple[Cure, ...]  # that gain something, the best first; the one that joins several is the first
    before: Schedule  # the slowest replica of the last sampled step, as it ran
    held: tuple[float, ...]  # by device, how many activations it held as it ran
    asked: tuple[str, ...]  # what would help, one sentence each


def find_cures(
    runs: Runs, losses: Losses, facts: UserFacts, stack: StackName, limits: SolveArguments | None, report: Progress
) -> Cures:
    """Try what may cure the causes of the losses, published schedules of the stack among it.

    `limits` are those of the search of a schedule, None for no search; `report` is called with what is tried. Raises
    InputError if the facts do not fit the runs.
    """
    ran, runs = runs, losses.usual
    chosen = runs.steps[np.unique(np.linspace(0, len(runs.steps) - 1, SAMPLED).astype(int))].tolist()
    batches = [batch_of(runs, losses.healthy_ms, step, facts) for step in chosen]
    search = _Search(runs, losses, facts, stack, batches, [batch.predict(Change()) for batch in batches])
    causes = {part.name for part in losses.causes}
    tried = search.changes(causes)
    if runs.devices > 1:
        report(f"schedules for {stack}")
        tried |= search.schedules(tried["layers"].placement if "layers" in tried else None, limits)
    cures = []
    for name, change in tried.items():
        report(name)
        if (cure := search.cure(name, change)) and cure.gain > LEAST:
            cures.append(cure)
    cures.sort(key=lambda cure: -cure.gain)
    most = max((cure.gain for cure in cures), default=0.0)
    if (together := search.together({cure.name: tried[cure.name] for cure in cures})) and together.gain >= LEAST + most:
        cures.insert(0, together)
    before = batch_of(ran, ran.ms, chosen[-1], facts).predict(Change()).slowest
    return Cures(tuple(chosen), tuple(cures), before, _activations(before), tuple(search.asked(causes)))


class _Search(NamedTuple):
    runs: Runs
    losses: Losses
    facts: UserFacts
    stack: StackName
    batches: Sequence[StepBatch]
    today: Sequence[Outcome]

    def changes(self, causes: set[str]) -> dict[str, Change]:
        """What may cure these causes, apart from schedules."""
        changes = {"device": Change(healthy=True)} if self.losses.slow_devices else {}
        if "stages" in causes and self.facts.layers:
            chunks = len(self.runs.where) // self.runs.devices
            placement = Placement.balanced(typical(self.batches[-1], None), chunks)
            if placement.along(self.runs.where) == list(self.runs.where):
                changes["layers"] = Change(placement=placement)
        if causes & {"micro-batches", "replicas"}:
            changes |= {"order": Change(entry="order"), "steps": Change(own_schedules=True)}
            if len(self.runs.replicas) > 1:
                changes["spread"] = Change(entry="spread")
        return changes

    def schedules(self, placement: Placement | None, limits: SolveArguments | None) -> dict[str, Change]:
        """For micro-batches all alike: the best published schedules of the stack, on any stages, and the solver's."""
        batch = self.batches[len(self.batches) // 2]
        problem, ran = typical(batch, placement), self.today[-1].slowest
        keep = not self.facts.layers and len(self.runs.where) > self.runs.devices  # chunks of unknown layers
        rows = compare(problem, tuple(STACKS[self.stack].own), placements="keep" if keep else "all").rows
        published = [
            Change(placement=schedule.placement, schedule=schedule)
            for row in rows
            if row.schedule and (row.fits or self.facts.memory is None)  # the report shows what it needs
            for schedule in self._divided(batch, row.schedule)
            if schedule.placement or schedule.programs != ran.programs
        ]
        changes = {}
        for name, in_chunks in (("published", False), ("chunks", True)):
            if of_kind := [each for each in published if (each.placement is not None) == in_chunks]:
                changes[name] = min(of_kind, key=lambda change: batch.predict(change).ms)
        if limits:
            limits = {**limits, "placements": "all" if self.facts.layers else "keep"}
            ours = solve(problem, warm_start=ran.on(problem), **limits).schedule
            if ours and (ours.placement or ours.programs != ran.programs):
                changes["ours"] = Change(placement=ours.placement, schedule=ours)
        return changes

    def _divided(self, batch: StepBatch, schedule: Schedule) -> Iterator[Schedule]:
        """Yields the schedule on its stages, if their layers are known, and on even ones."""
        if self.facts.layers or schedule.placement is None:
            yield schedule
        if schedule.placement and (even := evenly(batch, schedule.placement)):
            yield replace(schedule, problem=even.apply(typical(batch, None)), placement=even)

    def cure(self, name: str, change: Change) -> Cure | None:
        """The cure; None if it cannot be."""
        try:
            outcomes = [batch.predict(change) for batch in self.batches]
            file = file_of(change.schedule, self.stack, name) if change.schedule else None
            layered = bool(self.facts.layers)
            title, lines = lines_of(change, self.runs, self.losses, self.stack, layered, file[0] if file else "")
        except OptPipeError:
            return None
        return Cure(
            name,
            title,
            np.array([outcome.ms for outcome in outcomes]),
            np.array([outcome.bound_ms for outcome in outcomes]),
            np.array([outcome.ms for outcome in self.today]),
            _activations(outcomes[-1].slowest),
            lines,
            file,
            outcomes[-1].slowest,
        )

    def together(self, changes: dict[str, Change]) -> Cure | None:
        """The cures that go together, with the better of two where one excludes the other; None if none can be."""
        joined = Change(
            healthy="device" in changes,
            placement=changes["layers"].placement if "layers" in changes else None,
            entry="spread" if "spread" in changes else "order" if "order" in changes else "ran",
        )
        ways = [joined, *[replace(joined, own_schedules=True)] * ("steps" in changes)]
        for name in ("published", "chunks", "ours"):
            if name in changes:
                ways.append(replace(joined, schedule=changes[name].schedule, placement=changes[name].placement))
        cures = [cure for way in ways if (cure := self.cure("together", way))]
        return min(cures, key=lambda cure: float(cure.ms.sum()), default=None)

    def asked(self, causes: set[str]) -> list[str]:
        """Unknown facts that would help."""
        asked = []
        if "stages" in causes and not self.facts.layers:
            spared = next(part for part in self.losses.parts if part.name == "stages").mean_ms
            asked.append(
                "--layers N,N,... how many layers each stage has: other divisions can spare up to "
                f"{spared:.4g} ms a step"
            )
        if self.facts.memory is None:
            held = max(_activations(self.today[-1].slowest))
            asked.append(
                f"--memory N: how many activations of a stage a device may hold; the fullest held {held:g}, and a "
                "schedule of OptPipe holds no more on any device"
            )
        if self.facts.weight_share is None and not (self.runs.kind == int(Kind.W)).any():
            asked.append(
                "--weight-share X: the share of W in a backward, which was measured whole; without it a split backward "
                "gains nothing"
            )
        return asked


def _activations(schedule: Schedule) -> tuple[float, ...]:
    return tuple(round(peak.bytes / ACTIVATION, 2) for peak in schedule.compiled.certificate.device)
