"""The anytime protocol: a solver is a process of its own that reads one request and writes JSON lines, one line an
incumbent or a bound.

The same protocol joins the caller to `python -m optpipe_solver` and that portfolio to each of its engines. The child's
standard input stays open as long as somebody wants an answer: when it closes, by `stop` or by the parent's death
however sudden, the child ends itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from optpipe.errors import FrameError, SolverError, input_error
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem, Record, TotalMs
from optpipe.process import family
from optpipe.process.niceness import group_as_nice
from optpipe.schedule import Schedule

Objective = Literal["makespan", "span"]
Placements = Literal["keep", "all"]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # PostgreSQL takes no NUL
LONGEST_LINE = 2**26  # bytes; a schedule of 64 devices × 512 micro-batches with every activation offloaded has 2^21
ENDING_S = 5.0  # how long a child that has closed its output may take to end


class Programs(Record):
    """A schedule on the wire: each device's program and each shared link's order as one text of ops between spaces.

    Where `placement` is there, it is one for that placement of the problem; who receives it places the problem that was
    asked about.
    """

    programs: tuple[str, ...]
    links: dict[str, str] = Field(default_factory=dict)
    placement: Placement | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> Programs:
        return cls(
            programs=tuple(program.text() for program in schedule.programs),
            links={link: order.text() for link, order in schedule.links.items()},
            placement=schedule.placement,
        )

    def schedule(self, problem: Problem, method: str) -> Schedule:
        """Raises `InputError` for an op that cannot be read or a placement that is not for this problem; `check` says
        whether it is a schedule of its problem."""
        placed = self.placement.apply(problem) if self.placement else problem
        links = {link: texts.split() for link, texts in self.links.items()}
        return Schedule.parse(placed, (texts.split() for texts in self.programs), links, method, self.placement)


def _milp_solver(name: str) -> str:
    if not re.fullmatch(r"auto|highs|gurobi|pulp(:\w+)?", name):
        raise PydanticCustomError("solver", "auto, highs, gurobi, pulp or pulp:NAME was expected")
    return name


class Request(Record):
    """What a solver is asked: the problem, how, and for how long."""

    problem: Problem
    method: str = "auto"
    objective: Objective = "makespan"
    time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    warm_start: Programs | None = None
    solver: Annotated[str, AfterValidator(_milp_solver)] = "auto"  # of the MILP
    placements: Placements = "keep"  # the stages as given, or whichever split over the devices is best
    jitter: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = (
        0.0  # relative noise of op times to be robust against
    )
    memory_mib: Annotated[int, Field(ge=64)] | None = None  # of the solver's processes together


class Incumbent(Record):
    """A schedule better than those before it."""

    type: Literal["incumbent"] = "incumbent"
    method: Text
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


class Refused(Record):
    """The request cannot be served as it is, such as an unknown method; the last line."""

    type: Literal["refused"] = "refused"
    reason: Text


class Note(Record):
    """Something to tell, such as an engine that crashed; the search goes on."""

    type: Literal["note"] = "note"
    text: Text
    method: Text = ""  # the one that it is about, where several are asked for (`optpipe.comparison`)


class End(Record):
    """The last line of a search that ended by itself."""

    type: Literal["end"] = "end"
    spent_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # of its time limit, by a count of work


Frame = Incumbent | Bound | Infeasible | Refused | Note | End
_FRAME: TypeAdapter[Frame] = TypeAdapter(Annotated[Frame, Field(discriminator="type")])


class Child:
    """A solver process. Iterate `frames()`; `stop()` from any thread ends it, within moments and with its whole process
    group.

    `admit` is called with its id before it is asked anything, such as to set limits for it. What it starts is of its
    `family`.
    """

    def __init__(self, module: str, request: Request | None = None, admit: Callable[[int], None] | None = None) -> None:
        self.module = module
        self.family = family.new_mark()
        with contextlib.ExitStack() as unless_it_starts:
            self._stderr = unless_it_starts.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=family.environment(self.family),
                start_new_session=True,
            )
            unless_it_starts.pop_all()  # from here on `close` is who closes it
        self._stopped = threading.Event()
        self._gone = threading.Event()  # with its group: from then on their number may be a stranger's
        if admit is not None:
            try:
                admit(self._process.pid)
            except BaseException:
                self.close()
                raise
        group_as_nice(self._process.pid)
        if request is not None:
            threading.Thread(target=self._send, args=(request,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it was stopped or has ended by itself."""
        return self._stopped.is_set() or self._process.poll() is not None

    def _send(self, request: Request) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it died or was stopped before it had read; `frames` tells
            self._process.stdin.write(request.model_dump_json(exclude_none=True).encode() + b"\n")
            self._process.stdin.flush()

    def frames(self) -> Iterator[Frame]:
        """The frames as they come, until `End` or `Refused`. Raises `SolverError` where the child breaks the protocol
        or dies unasked."""
        try:
            yield from self._answer()
        finally:
            self.close()

    def ask(self, request: Request) -> Iterator[Frame]:
        """As `frames`, of a child that reads `requests` and was started without one: afterwards it can be asked again.

        One request at a time; where an answer raised an error or was not heard to its end, only `close` is left. Raises
        `SolverError` where it has said more than it was asked before: whose answer that is nobody knows.
        """
        if self._says_more():
            raise SolverError(f"{self.module} went on after the end of its answer")
        self._send(request)
        return self._answer()

    def _says_more(self) -> bool:
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        try:
            return bool(self._process.stdout.peek(1))  # type: ignore[attr-defined]
        finally:
            os.set_blocking(self._process.stdout.fileno(), True)

    def _answer(self) -> Iterator[Frame]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(LONGEST_LINE):
            if not line.endswith(b"\n"):
                break
            frame = _frame(line)
            yield frame
            if isinstance(frame, End | Refused):
                return
        if not self._stopped.is_set():
            raise (FrameError if line else SolverError)(f"{self.module} {self._failure(line)}")

    def _failure(self, line: bytes) -> str:
        """What it did instead of ending its protocol; `line` is the last that was read, if that was not whole."""
        if len(line) == LONGEST_LINE:
            return f"wrote a line of more than {LONGEST_LINE} bytes"
        try:
            return f"ended with exit code {self._process.wait(ENDING_S)}: {self._last_words()}"
        except subprocess.TimeoutExpired:
            return "closed its output and did not end"

    def stop(self) -> None:
        """Ends the child and all that it started."""
        self._stopped.set()
        if not self._gone.is_set():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._gone.set()

    def close(self) -> None:
        """`stop`, and the pipes closed; not while another thread reads `frames`."""
        self.stop()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read()[-2000:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _frame(line: bytes) -> Frame:
    try:
        return _FRAME.validate_json(line)
    except ValidationError as error:
        raise FrameError(str(input_error(error, "the solver's answer"))) from None


def read_request() -> Request:
    """In a child: the request from standard input. From then on the child ends as soon as that input closes."""
    line = sys.stdin.buffer.readline()
    request = Request.model_validate_json(line)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return request


def requests() -> Iterator[Request | ValidationError]:
    """In a child that answers many: one request after the other, or why a line is none. From the call on it ends when
    its input closes."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_end_with_parent, args=(lines.put,), daemon=True).start()
    return (_request(lines.get()) for _ in itertools.count())


def _request(line: bytes) -> Request | ValidationError:
    try:
        return Request.model_validate_json(line)
    except ValidationError as error:
        return error


def _end_with_parent(take: Callable[[bytes], None] = lambda _: None) -> None:
    begun = b""
    while read := os.read(
        0, 65536
    ):  # not by sys.stdin: its lock would make an interpreter that ends with an error abort instead
        *whole, begun = (begun + read).split(b"\n")
        for line in whole:
            take(line)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgrp() == os.getpid():  # a child of `Child` leads its own group: nothing it started stays behind
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


_writing = threading.Lock()


def write_frame(frame: Frame) -> None:
    """In a child: one line to the parent."""
    with _writing:
        sys.stdout.buffer.write(frame.model_dump_json(exclude_none=True).encode() + b"\n")
        sys.stdout.buffer.flush()
