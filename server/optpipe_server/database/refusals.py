"""What a client asks of a job and does not get, each with a sentence."""

from __future__ import annotations

CANCELLED = "the job was cancelled"
CANCELLED_DETAIL = "The job is cancelled; submit the problem as another job."
NO_JOB = "There is no such job."
NO_INCUMBENT = "The job has no such incumbent."


class MissingError(LookupError):
    """There is no such job, or the job has no such incumbent."""


class ConflictError(Exception):
    """The request contradicts the state of the job; the message says how."""


class KeyReusedError(Exception):
    """The idempotency key was used with another body before."""


class TooManyOpenError(Exception):
    """As many jobs of the key are open as may be."""


class StaleError(Exception):
    """The job has changed since the version that the client knows."""
