"""`Schedule`: who does what in which order, one program a device, for one problem. When it happens is
`schedule.timeline`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from optpipe.evaluate.timeline import Timeline, simulate
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.program import Program, parse_programs


@dataclass(frozen=True)
class Schedule:
    """Programs by device and, for links that several devices share, the order of all transfers on them.

    `placement` says how `problem` came from the one that was asked about, where its stages are others.
    """

    problem: Problem
    programs: tuple[Program, ...]
    links: Mapping[str, Program] = field(default_factory=dict)
    method: str = ""
    placement: Placement | None = None

    @classmethod
    def parse(
        cls,
        problem: Problem,
        programs: Iterable[Iterable[str]],
        links: Mapping[str, Iterable[str]] | None = None,
        method: str = "",
        placement: Placement | None = None,
    ) -> Schedule:
        """From op texts, e.g. `Schedule.parse(problem, [["0F0", "0BW0"]])`; raises `InputError` for what is no op."""
        orders = {link: parse_programs([texts], f"links[{link!r}]")[0] for link, texts in (links or {}).items()}
        return cls(problem, parse_programs(programs, "programs"), orders, method, placement)

    @cached_property
    def timeline(self) -> Timeline:
        """`simulate(self.problem, self)`, kept."""
        return simulate(self.problem, self)

    @property
    def makespan_ms(self) -> float:
        return self.timeline.makespan_ms

    @property
    def span_ms(self) -> float:
        return self.timeline.span_ms

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Reads a schedule file; see `optpipe.files` for all that stands in one."""
        from optpipe.files import ScheduleFile

        return ScheduleFile.load(path).schedule()

    def save(self, path: str | Path) -> None:
        from optpipe.files import ScheduleFile

        ScheduleFile.of(self).save(path)
