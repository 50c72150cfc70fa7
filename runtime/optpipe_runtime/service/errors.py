"""What can go wrong between the client and the service. Their words may be the service's, and are logged."""

from __future__ import annotations

from optpipe.printable import printable

LONGEST = 300  # characters of what a service says that are repeated


class ServiceError(Exception):
    """Base of what can go wrong: one line, however much the service has said. `retry_after_s` is how long it asks to
    wait."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(printable(why, LONGEST))
        self.retry_after_s = retry_after_s


class UnavailableError(ServiceError):
    """The service does not answer, or cannot now."""


class InvalidAnswerError(ServiceError):
    """The service gives an answer that makes no sense."""


class UnauthorizedError(ServiceError):
    """The service does not accept the API key, or requires one."""


class RefusedError(ServiceError):
    """The service refuses a request: the HTTP status and its reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
