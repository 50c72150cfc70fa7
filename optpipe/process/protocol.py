"""The anytime protocol: a solver process reads one request and writes JSON lines, each an incumbent, a bound or a note.

The same protocol joins the caller to `python -m optpipe_solver`, and that portfolio to each of its engines. The child's
standard input stays open as long as somebody wants an answer. When it closes, because the parent stopped or died, the
child ends itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, BinaryIO, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from optpipe.errors import FrameError, input_error
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.records import Record, TotalMs
from optpipe.model.rules import RulesRecord
from optpipe.options import CompareOptions, SolveOptions, Threads
from optpipe.schedule import Schedule

Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # PostgreSQL takes no NUL
Asked = TypeVar("Asked", bound=Record)


class Programs(Record):
    """A schedule on the wire: each device's program, and each shared link's order, as one text of ops between spaces.

    With a `placement` it is a schedule for that placement of the problem. Who receives it places the problem that was
    asked about, so that a solver cannot pass off an easier one. `method` is what made it, and `rules` are those of
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
        """The schedule for this problem, not checked yet; by another method if one is given.

        Raises InputError if an op cannot be read or the placement does not suit the problem.
        """
        placed = self.placement.apply(problem) if self.placement else problem
        links = {link: texts.split() for link, texts in self.links.items()}
        schedule = Schedule.parse(
            placed, (texts.split() for texts in self.programs), links, method or self.method, self.placement
        )
        return replace(schedule, rules=self.rules.rules()) if self.rules else schedule


class Request(SolveOptions):
    """What a solver is asked: the problem, how, and for how long. `number` says which request it is, to a child that
    answers many."""

    problem: Problem
    warm_start: Programs | None = None
    threads: Threads = 1
    number: int | None = None


class CompareRequest(CompareOptions):
    """What is asked of a process that compares methods. `number` is as of `Request`."""

    problem: Problem
    number: int | None = None


class _Answer(Record):
    """A line of a child. `request` is the number of the request that it answers, if that has one."""

    request: int | None = None


class Incumbent(_Answer):
    """A schedule better than those before it."""

    type: Literal["incumbent"] = "incumbent"
    method: Text
    schedule: Programs


class Bound(_Answer):
    """No schedule is shorter than this."""

    type: Literal["bound"] = "bound"
    method: Text
    lower_bound_ms: TotalMs


class Infeasible(_Answer):
    """Proof that memory admits no schedule: which device, what it needs, what it has."""

    type: Literal["infeasible"] = "infeasible"
    reason: Text


class Refused(_Answer):
    """The request cannot be served as it is, such as an unknown method; the last line."""

    type: Literal["refused"] = "refused"
    reason: Text


class Note(_Answer):
    """Something to tell, such as an engine that crashed; the search goes on.

    With a `method` it is about that one, among several that were asked for (`optpipe.comparison`), or reports how its
    search ended. With `ongoing` it reports how far the search is; that stands if the search is stopped before its next
    report.
    """

    type: Literal["note"] = "note"
    text: Text
    method: Text = ""
    ongoing: bool = False

    def stopped(self, seconds: float) -> Note:
        """The report on a search that was stopped before it could say how it ended."""
        return self.model_copy(update={"text": f"{self.text}; stopped after {seconds:.1f} s", "ongoing": False})


class Ready(_Answer):
    """A process has loaded and compiled what it needs: an engine's time begins, and one that answers many requests
    reads the first. Between such a process and who started it only."""

    type: Literal["ready"] = "ready"


class End(_Answer):
    """The last line of a search that ended by itself."""

    type: Literal["end"] = "end"
    spent_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # of its time limit, by a count of work


Frame = Incumbent | Bound | Infeasible | Refused | Note | Ready | End
_FRAME: TypeAdapter[Frame] = TypeAdapter(Annotated[Frame, Field(discriminator="type")])


def parse_frame(line: bytes) -> Frame:
    """One line of a child. Raises FrameError if it is no frame."""
    try:
        return _FRAME.validate_json(line)
    except ValidationError as error:
        raise FrameError(str(input_error(error, "the solver's answer"))) from None


def read_request() -> Request:
    """In a child that writes frames: the request from standard input. From then on the child ends as soon as that input
    closes."""
    keep_output_for_frames()
    return read_one(Request)


def read_one(model: type[Asked]) -> Asked:
    """`read_request` of a process that answers another request."""
    line = sys.stdin.buffer.readline()
    request = model.model_validate_json(line)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return request


def requests(model: type[Asked]) -> Iterator[Asked | ValidationError]:
    """In a child that answers many requests: one after the other, or why a line is none. It is `Ready` when it asks for
    the first.

    From the call on the child ends as soon as its standard input closes.
    """
    keep_output_for_frames()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_end_with_parent, args=(lines.put,), daemon=True).start()

    def read() -> Iterator[Asked | ValidationError]:
        write_frame(Ready())
        while True:
            try:
                yield model.model_validate_json(lines.get())
            except ValidationError as error:
                yield error

    return read()


def _end_with_parent(take: Callable[[bytes], None] = lambda _: None) -> None:
    begun = b""
    # Not by sys.stdin: its lock would make an interpreter that ends with an error abort instead.
    while read := os.read(0, 65536):
        *whole, begun = (begun + read).split(b"\n")
        for line in whole:
            take(line)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgrp() == os.getpid():  # a child leads its own process group: nothing it started stays behind
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


_writing = threading.Lock()
_frames: BinaryIO | None = None  # where they go, if not to standard output as it is


def keep_output_for_frames() -> None:
    """In a child, before it writes a frame: standard output is for frames only from now on. What a library prints, as
    HiGHS 1.16 does, goes to standard error."""
    global _frames
    sys.stdout.flush()
    _frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)


def output() -> BinaryIO:
    """In a child: where its frames go."""
    return _frames or sys.stdout.buffer


def write_frame(frame: Frame, request: int | None = None) -> None:
    """In a child: one line to the parent, which answers the request of this number."""
    if request is not None:
        frame = frame.model_copy(update={"request": request})
    with _writing:
        output().write(frame.model_dump_json(exclude_none=True).encode() + b"\n")
        output().flush()
