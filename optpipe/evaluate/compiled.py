"""`CompiledSchedule`: everything that follows from a problem and programs, each part computed once, on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.evaluate import graph, timeline, validity
from optpipe.evaluate.effects import Certificate, Effects, Held, RowEffects
from optpipe.evaluate.graph import Needs, Streams
from optpipe.evaluate.rows import Index, Rows
from optpipe.evaluate.timeline import Timeline
from optpipe.model.arrays import Floats, Ints
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import Program


class CompiledSchedule:
    """One program a device, and the order of all transfers on each shared link, compiled for their problem.

    Simulation, certificate, validity, the picture of a deadlock, the solver's windows and the runtime's lowering read
    the same rows, index, needs, streams and effects. Every property raises ScheduleError if the programs are not of
    this problem; `complaints` says so instead.
    """

    def __init__(self, problem: Problem, programs: Sequence[Program], links: Mapping[str, Program]) -> None:
        self.problem, self.programs, self.links = problem, programs, links

    @cached_property
    def rows(self) -> Rows:
        """All ops, device after device in program order."""
        rows = Rows.from_programs(self.programs)
        rows.require_known(self.problem)
        return rows

    @cached_property
    def index(self) -> Index:
        """Where each op is."""
        return Index(self.problem, self.rows)

    @cached_property
    def needs(self) -> Needs:
        """What each op needs besides its place on its stream."""
        return graph.needs_of(self.problem, self.rows, self.index)

    @cached_property
    def streams(self) -> Streams:
        """The order of the ops on each stream."""
        return graph.streams_of(self.problem, self.links, self.rows, self.index)

    @cached_property
    def waits(self) -> tuple[Ints, Floats]:
        """All that each op waits for, its stream included, and how many ms ago that must have ended (`waits_of`)."""
        return graph.waits_of(self.rows, self.needs, self.streams)

    @cached_property
    def durations_ms(self) -> Floats:
        """(n,) nominal times; a pair's stands on its first op."""
        ms, first = graph.nominal_ms(self.problem, self.rows, self.index), self.rows.first
        stage, in_order = self.rows.stage, self.rows.kind[first] == Kind.F
        ms[first] = self.problem.pair_factors[stage[first + ~in_order], stage[first + in_order]] * (
            ms[first] + ms[first + 1]
        )
        return ms

    @cached_property
    def timeline(self) -> Timeline:
        """When each op runs. Raises DeadlockError where ops wait for each other."""
        return timeline.timed(self.rows, self.needs, self.streams, self.durations_ms)

    @cached_property
    def places(self) -> Ints:
        """(n,) each op's place in one order of all ops: by their ends, and at one moment behind what they wait for. The
        second op of a pair comes after its first."""
        rows, n = self.rows, len(self.rows)
        depth, places = timeline.depths(self.waits[0], np.flatnonzero(~rows.second)), np.empty(n, np.int64)
        depth[rows.first + 1] = depth[rows.first]
        places[np.lexsort((np.arange(n), depth, self.timeline.end))] = np.arange(n)
        return places

    @cached_property
    def effects(self) -> RowEffects:
        """What each op takes and frees, on the device and on the host."""
        return Effects(self.problem).by_row(self.rows, self.index)

    @cached_property
    def held(self) -> Held:
        """What is held during each op and after it, in bytes."""
        return Held.scan(self.effects, self.rows, len(self.problem.devices))

    @cached_property
    def certificate(self) -> Certificate:
        """The peaks of device and host memory."""
        return Certificate.from_held(self.problem, self.rows, self.held)

    @cached_property
    def complaints(self) -> list[str]:
        """Everything that is wrong, one sentence each; empty if the schedule runs and fits."""
        problem = self.problem
        if len(self.programs) != len(problem.devices):
            return [f"there are {len(self.programs)} programs: the problem has {len(problem.devices)} devices"]
        try:
            rows = self.rows
        except ScheduleError as error:
            return [str(error)]
        wrong = validity.complaints(problem, self.links, rows, self.index)
        if wrong:
            return wrong
        try:
            _ = self.timeline
        except ScheduleError as error:
            wrong = [str(error)]
        return wrong + self.certificate.complaints()
