"""What a client asks of a job and does not get, each with a sentence."""

from __future__ import annotations

CANCELLED = "the job was cancelled"
STREAM = "the training schedules each step itself; nothing is searched here"
STREAM_DETAIL = f"The job is a stream: {STREAM}."
CANCELLED_DETAIL = "The job is cancelled; submit the problem as another job."
NO_JOB = "There is no such job."
NO_INCUMBENT = "The job has no such incumbent."
NO_STREAM = "The job is no stream: it has schedules, and no rules."


class MissingError(LookupError):
    """The tenant has no such job, or the job no such incumbent."""


class ConflictError(Exception):
    """The request contradicts the state of the job; the message says how."""


class KeyReusedError(Exception):
    """The idempotency key was used with another body before."""


class QueueFullError(Exception):
    """The tenant has as many waiting jobs as it may have."""


class StaleError(Exception):
    """The job has changed since the version that the client knows."""
