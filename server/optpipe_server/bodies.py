"""Request bodies: raw bytes with a cap, then strict JSON. FastAPI's own reader has no cap and takes NaN and duplicate names."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, ValidationError
from starlette.requests import ClientDisconnect

from optpipe.child import Objective
from optpipe.errors import input_error
from optpipe.files import ScheduleFile
from optpipe.problem import Problem, Record
from optpipe_server.replies import ReplyError

LONGEST_BODY = 2**20  # bytes
MOST_READ = 2**24  # bytes that are thrown away so that who sends too much can read why; who sends more is cut off
SLOWEST_BODY_S = 30.0


class Submission(Record):
    """`POST /v1/jobs`. `warm_start` is a schedule document, also one for costs that have since changed."""

    problem: Problem
    method: Annotated[str, Field(min_length=1, max_length=100)] = "auto"
    time_limit_s: Annotated[float, Field(strict=True, gt=0, le=3600)] = 60.0
    objective: Objective = "makespan"
    warm_start: ScheduleFile | None = None


async def read_body(request: Request) -> bytes:
    """The body of a JSON request; refuses what is too long, compressed, or said to be something else.

    A web page can send any other type than JSON to a service on this machine without being asked; so nothing else is read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ReplyError(415, "Content-Type must be application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ReplyError(415, "Content-Encoding: the body must not be compressed.")
    body = bytearray()
    read = 0
    try:
        async with asyncio.timeout(SLOWEST_BODY_S):
            async for chunk in request.stream():
                read += len(chunk)
                if read <= LONGEST_BODY:
                    body += chunk
                elif read > MOST_READ:
                    break
    except (TimeoutError, ClientDisconnect):
        raise ReplyError(408, "The body did not arrive in full.", {"Connection": "close"}) from None
    if read > LONGEST_BODY:
        raise ReplyError(413, f"The body is longer than {LONGEST_BODY} bytes.", {"Connection": "close"})
    return bytes(body)


def read_submission(body: bytes) -> Submission:
    """Raises `ReplyError` for what is no JSON, `InputError` for a wrong field."""
    try:
        submission = Submission.model_validate_json(body)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] == "json_invalid":
            raise ReplyError(400, "The body is not valid JSON.") from None
        raise input_error(error, "job") from None
    json.loads(body, object_pairs_hook=_unique)  # valid by now, so neither deep nor with numbers out of range
    return submission


def _unique(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ReplyError(400, "The body has an object with the same name twice.")
