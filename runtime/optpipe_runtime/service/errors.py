"""What can go wrong between the client and the service."""

from __future__ import annotations


class UnavailableError(Exception):
    """The service does not answer, or cannot now. `retry_after_s` is how long it asks to wait."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class InvalidAnswerError(Exception):
    """The service gives an answer that makes no sense."""


class UnauthorizedError(Exception):
    """The service does not accept the API key, or requires one."""


class RefusedError(Exception):
    """The service refuses a request: the HTTP status and its reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
