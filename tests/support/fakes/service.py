"""A service that answers as a test wants, correctly or in any wrong way, and remembers its requests."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from optpipe.schedule import Schedule, ScheduleFile


class ResetError(Exception):
    """Raised by an answer or its body: the connection is reset."""


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    over: threading.Event = field(repr=False)  # set when the test has ended: an answer must not wait any more

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Answer:
    """The body is sent piece by piece, as long as the client takes it."""

    status: int = 200
    body: bytes | Iterable[bytes] = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Answers = Callable[[Asked], Answer]
EVENT_STREAM = {"Content-Type": "text/event-stream"}


@contextmanager
def fake_service(answers: Answers) -> Iterator[tuple[str, list[Asked]]]:
    """Yields its url, and the list of its requests so far."""
    asked: list[Asked] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # a connection a request; a body ends with it

        def handle(self) -> None:
            with suppress(OSError):  # the client may have closed the connection
                super().handle()

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(Asked(self.command, self.path, dict(self.headers), body, over))
            try:
                answer = answers(asked[-1])
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for piece in [answer.body] if isinstance(answer.body, bytes) else answer.body:
                    self.wfile.write(piece)
            except ResetError:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

        do_GET = do_POST = do_PUT = answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            over.set()
            server.shutdown()
            thread.join()


def by_path(table: Mapping[str, Answer | Answers]) -> Answers:
    """Answers by the end of the path; 404 for every other path."""

    def answers(asked: Asked) -> Answer:
        for ending, answer in table.items():
            if asked.path.endswith(ending):
                return answer if isinstance(answer, Answer) else answer(asked)
        return Answer(404)

    return answers


def one_after_the_other(*those: Answer | Answers) -> Answers:
    """Gives these answers in order, and then the last one again and again."""
    waiting = list(those)

    def answers(asked: Asked) -> Answer:
        answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return answer if isinstance(answer, Answer) else answer(asked)

    return answers


# Answers of a service that works


def as_json(content: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})


def job(name: str = "a1", version: int = 1) -> Answer:
    return as_json({"id": name, "problem_version": version}, 201)


def sent(name: str, data: Any, number: int | None = None) -> bytes:
    """A server-sent event."""
    return (b"" if number is None else b"id: %d\n" % number) + f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def one(seq: int = 1, version: int = 1) -> bytes:
    return sent("incumbent", {"seq": seq, "problem_version": version}, seq)


def end(state: str = "done", reason: str | None = None) -> bytes:
    return sent("end", {"state": state, "reason": reason})


def events(*pieces: bytes) -> Answer:
    return Answer(200, list(pieces), EVENT_STREAM)


def open_events(*pieces: bytes) -> Answers:
    """These events, and then no more, and no end."""
    return lambda asked: Answer(200, held_open(asked, *pieces), EVENT_STREAM)


def document(schedule: Schedule) -> dict[str, Any]:
    content: dict[str, Any] = ScheduleFile.from_schedule(schedule).model_dump(mode="json", exclude_none=True)
    return content


def incumbent(schedule: Schedule | dict[str, Any], seq: int = 1) -> Answer:
    return as_json({"seq": seq, "schedule": document(schedule) if isinstance(schedule, Schedule) else schedule})


# Wrong answers


def held_open(asked: Asked, *pieces: bytes) -> Iterator[bytes]:
    yield from pieces
    asked.over.wait(60)


def silent(asked: Asked) -> Answer:
    """Takes the request and never answers."""
    asked.over.wait(60)
    raise ResetError


def trickling(asked: Asked) -> Answer:
    """A byte now and then, so that no read waits long, and never enough of them."""

    def bytes_now_and_then() -> Iterator[bytes]:
        while not asked.over.wait(0.02):
            yield b"x"

    return Answer(200, bytes_now_and_then(), EVENT_STREAM)


def endless(piece: bytes) -> Answers:
    """As much as the client reads, up to a gigabyte."""
    many = piece * (2**16 // len(piece))

    def answers(asked: Asked) -> Answer:
        def flood() -> Iterator[bytes]:
            for _ in range(2**14):
                if asked.over.is_set():
                    return
                yield many

        return Answer(200, flood(), EVENT_STREAM)

    return answers


def resetting(_: Asked) -> Answer:
    raise ResetError


def resetting_in_the_middle(_: Asked) -> Answer:
    def half() -> Iterator[bytes]:
        yield b'{"id": "a'
        raise ResetError

    return Answer(201, half())
