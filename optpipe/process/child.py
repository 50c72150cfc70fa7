"""`Child`: a solver as a process of its own, which can crash or hang without harm to its caller."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

from optpipe.errors import FrameError, SolverError
from optpipe.options import SearchOptions
from optpipe.process import process_tree
from optpipe.process.background import group_as_nice
from optpipe.process.protocol import NOTHING_MORE, End, Frame, Refused, parse_frame

LONGEST_LINE = 2**26  # bytes; a schedule of 64 devices × 512 micro-batches with every activation offloaded has 2^21
WAITS = "waits"  # the argument of a child that may load what it takes before it is asked
ENDING_S = 5.0  # how long a child that has closed its output may take to end
LOADING_S = 120.0  # how long one may take to be ready on a busy machine: its time limit begins then


class Child:
    """A solver process: iterate `frames()`; `stop()` from any thread ends it and its whole process group at once."""

    def __init__(self, module: str, request: SearchOptions | None, admit: Callable[[int], None] | None = None) -> None:
        """Starts `python -m module`, without a request as one that `waits` for it: with the argument `WAITS`. `admit`
        gets its process id before the request is sent, to set limits for it."""
        self.module = module
        self.mark = process_tree.new_mark()
        with contextlib.ExitStack() as unless_it_starts:
            self._stderr = unless_it_starts.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *([] if request else [WAITS])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=process_tree.environment(self.mark),
                start_new_session=True,
            )
            unless_it_starts.pop_all()  # from here on `close` is who closes it
        self._waits = request is None
        self._said = 0  # bytes on stderr before the request
        self._sending: threading.Thread | None = None  # the last that was begun
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
            self.ask(request)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def waits(self) -> bool:
        """Whether it waits for a request, and lives."""
        return self._waits and self._process.poll() is None

    def ask(self, request: SearchOptions) -> None:
        """Sends a child that `waits` its next request."""
        self._waits, self._said = False, os.fstat(self._stderr.fileno()).st_size
        self._send_later(request.model_dump_json(exclude_none=True).encode() + b"\n")

    def end_soon(self) -> None:
        """Asks the child for `End`. Its time may be up in the midst of something, so that this takes a while."""
        self._send_later(NOTHING_MORE)

    def _send_later(self, line: bytes) -> None:
        self._sending = threading.Thread(target=self._send, args=(line, self._sending), daemon=True)
        self._sending.start()

    def _send(self, line: bytes, before: threading.Thread | None) -> None:
        assert self._process.stdin is not None
        if before is not None:
            before.join()
        with contextlib.suppress(OSError, ValueError):  # it died or was stopped before it had read; `frames` reports it
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def frames(self, stays: bool = False) -> Iterator[Frame]:
        """The frames as they come, until `End` or `Refused`. Raises `SolverError` where the child breaks the protocol
        or dies unasked. One that `stays` is not closed at `End`, but waits for another request."""
        assert self._process.stdout is not None
        try:
            while line := self._process.stdout.readline(LONGEST_LINE):
                if not line.endswith(b"\n"):
                    break
                frame = parse_frame(line)
                self._waits = stays and isinstance(frame, End)
                yield frame
                if isinstance(frame, End | Refused):
                    return
            if not self._stopped.is_set():
                raise (FrameError if line else SolverError)(f"{self.module} {self._failure(line)}")
        finally:
            if not self.waits:
                self.close()

    def _failure(self, line: bytes) -> str:
        """What it did instead of ending its protocol; `line` is the last that was read, if that was not whole."""
        if len(line) == LONGEST_LINE:
            return f"wrote a line of more than {LONGEST_LINE} bytes"
        try:
            code = self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            return "closed its output and did not end"
        self._stderr.seek(self._said)
        lines = self._stderr.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}: {lines[-1] if lines else 'it said nothing'}"

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
