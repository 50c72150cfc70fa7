"""The anytime protocol: a solver process reads one request and writes JSON lines, each an incumbent, a bound or a note.

The same protocol joins the caller to `python -m optpipe_solver`, and that portfolio to its engines, whose processes
take one request after the other. The child's standard input stays open as long as somebody wants an answer. When it
closes, because the parent stopped or died, the child ends itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, BinaryIO, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from optpipe.errors import FrameError, input_error
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.records import Record, TotalMs
from optpipe.model.rules import RulesRecord
from optpipe.options import CompareOptions, Placements, SolveOptions, Threads
from optpipe.schedule import Schedule

Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # PostgreSQL takes no NUL
Asked = TypeVar("Asked", bound=Record)
NOTHING_MORE = b"\n"  # in place of a request: what the one before has found will do


class Programs(Record):
    """A schedule on the wire: each device's program, and each shared link's order, as one text of ops between spaces.

    With a `placement` it is a schedule for that placement of the problem. Who receives it places the problem that was
    asked about, so that a solver cannot pass off an easier one. `method` is what found it, and `rules` are those of
    `Schedule`.
    """

    method: Text = ""
    programs: tuple[str, ...]
    links: dict[str, str] = Field(default_factory=dict)
    placement: Placement | None = None
    rules: RulesRecord | None = None

    @classmethod
    def from_schedule(cls, schedule: Schedule) -> Programs:
        return cls(
            method=schedule.method,
            programs=tuple(program.text() for program in schedule.programs),
            links={link: order.text() for link, order in schedule.links.items()},
            placement=schedule.placement,
            rules=RulesRecord.from_rules(schedule.rules) if schedule.rules else None,
        )

    def schedule(self, problem: Problem, method: str = "") -> Schedule:
        """The schedule for this problem, not checked yet; by another `method` if there is one.

        Raises InputError if an op cannot be read or the placement does not suit the problem.
        """
        placed = self.placement.apply(problem) if self.placement else problem
        links = {link: texts.split() for link, texts in self.links.items()}
        schedule = Schedule.parse(
            placed, (texts.split() for texts in self.programs), links, method or self.method, self.placement
        )
        return replace(schedule, rules=self.rules.rules()) if self.rules else schedule


class Request(SolveOptions):
    """What a solver is asked: the problem, how, and for how long."""

    problem: Problem
    warm_start: Programs | None = None
    threads: Threads = 1
    placements: Placements = "keep"


class CompareRequest(CompareOptions):
    """What is asked of a process that compares methods."""

    problem: Problem


class Incumbent(Record):
    """A schedule better than those before it."""

    type: Literal["incumbent"] = "incumbent"
    method: Text
    schedule: Programs


class OtherStages(Record):
    """The shortest published schedule that fits on other stages, where the problem's own are kept."""

    type: Literal["other_stages"] = "other_stages"
    schedule: Programs


class Bound(Record):
    """No schedule is shorter than this."""

    type: Literal["bound"] = "bound"
    method: Text
    lower_bound_ms: TotalMs


class Infeasible(Record):
    """Proof that memory admits no schedule: which device, what it needs, what it has."""

    type: Literal["infeasible"] = "infeasible"
    reason: Text


class Remedy(Record):
    """A change with which a schedule fits; the length of the best one of a moment, None where none was searched."""

    change: Text
    method: Text = ""
    value_ms: TotalMs | None = None

    def __str__(self) -> str:
        return self.change if self.value_ms is None else f"{self.change} ({self.value_ms:.6g} ms by {self.method})"


class Remedies(Record):
    """What would fit, where nothing does."""

    type: Literal["remedies"] = "remedies"
    remedies: tuple[Remedy, ...]


class Refused(Record):
    """The request cannot be served as it is, such as an unknown method; the last line."""

    type: Literal["refused"] = "refused"
    reason: Text


class Note(Record):
    """A report, such as of an engine that crashed; the search goes on.

    With a `method` it is about that one, among several that were asked for (`optpipe.comparison`), or reports how its
    search ended; with `ongoing`, how far it is, which stands if the search is stopped before its next report.
    """

    type: Literal["note"] = "note"
    text: Text
    method: Text = ""
    ongoing: bool = False

    def stopped(self, seconds: float) -> Note:
        """The report on a search that was stopped before it could report its end."""
        return self.model_copy(update={"text": f"{self.text}; stopped after {seconds:.1f} s", "ongoing": False})


class Ready(Record):
    """A process has loaded and compiled what it needs, and sent what needs no search: its time begins."""

    type: Literal["ready"] = "ready"


class End(Record):
    """The last line of a search that ended by itself."""

    type: Literal["end"] = "end"
    spent_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # of its time limit, by a count of work


Frame = Incumbent | OtherStages | Bound | Infeasible | Remedies | Refused | Note | Ready | End
_FRAME: TypeAdapter[Frame] = TypeAdapter(Annotated[Frame, Field(discriminator="type")])


def parse_frame(line: bytes) -> Frame:
    """One line of a child. Raises FrameError if it is no frame."""
    try:
        return _FRAME.validate_json(line)
    except ValidationError as error:
        raise FrameError(str(input_error(error, "the solver's answer"))) from None


asked_to_end = threading.Event()  # in a child: its parent asks it to end what it does for the request soon


def read_request(model: type[Asked]) -> Asked:
    """In a child: the request from standard input. From then on the child ends as soon as that input closes."""
    return next(requests(model))


def requests(model: type[Asked]) -> Iterator[Asked]:
    """In a child: requests from standard input, one after the other. From this call on the child ends as soon as that
    input closes; by an empty line the parent asks it to end what it does for the request before."""
    keep_output_for_frames()
    lines = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
    return (model.model_validate_json(line) for line in iter(lines.get, None))


def _read_lines(lines: queue.SimpleQueue[bytes]) -> None:
    # Not by sys.stdin: its lock would make an interpreter that ends with an error abort instead.
    with os.fdopen(os.dup(0), "rb") as standard_input:
        for line in standard_input:
            if line == NOTHING_MORE:
                asked_to_end.set()
            else:
                asked_to_end.clear()
                lines.put(line)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgrp() == os.getpid():  # a child leads its own process group: nothing it started stays behind
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


_writing = threading.Lock()
_frames: BinaryIO | None = None  # where they go, if not to standard output as it is


def keep_output_for_frames() -> None:
    """In a child: keeps standard output for frames. What a library prints, as HiGHS 1.16 does, goes to stderr."""
    global _frames
    sys.stdout.flush()
    _frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)


def output() -> BinaryIO:
    """In a child: where its frames go."""
    return _frames or sys.stdout.buffer


def write_frame(frame: Frame) -> None:
    """In a child: one line to the parent."""
    with _writing:
        output().write(frame.model_dump_json(exclude_none=True).encode() + b"\n")
        output().flush()
