"""How long to wait for a service that is away, and what the log says about it."""

from __future__ import annotations

import asyncio
import logging
import random

from optpipe_runtime.service.errors import InvalidAnswerError, ServiceError, UnauthorizedError, UnavailableError

log = logging.getLogger("optpipe.client")

FIRST_S, LONGEST_S = 0.5, 30.0


class Backoff:
    """The wait before the next try: from `FIRST_S`, doubled after each failure, up to `LONGEST_S`, with jitter. It is
    never shorter than the service asks for."""

    def __init__(self) -> None:
        self._first, self.longest = FIRST_S, LONGEST_S
        self.failures = 0  # since the last useful answer

    def reset(self) -> None:
        self.failures = 0

    async def wait(self, at_least_s: float = 0.0) -> None:
        delay = min(self.longest, self._first * 2 ** min(self.failures, 30)) * random.uniform(0.5, 1.0)
        self.failures += 1
        # With jitter, so that clients that were sent away together come back one by one.
        await asyncio.sleep(max(delay, at_least_s * random.uniform(1.0, 1.2)))


class Outages:
    """Logs one warning for each outage, however many tries it takes, and one line when it is over."""

    WORDS = {  # noqa: RUF012
        UnavailableError: ("is unavailable", "is available again"),
        InvalidAnswerError: ("gives wrong answers", "gives right answers again"),
        UnauthorizedError: ("refuses this client", "accepts this client again"),
    }

    def __init__(self, url: str) -> None:
        self._url = url
        self._now: set[type[ServiceError]] = set()

    def begin(self, error: UnavailableError | InvalidAnswerError | UnauthorizedError) -> None:
        kind = type(error)
        if kind not in self._now:
            self._now.add(kind)
            log.warning(
                "the solver service at %s %s: %s; training goes on with the schedule it has",
                self._url,
                self.WORDS[kind][0],
                error,
            )

    def end(self, *kinds: type[ServiceError]) -> None:
        for kind in self._now & {*kinds}:
            self._now.remove(kind)
            log.info("the solver service at %s %s", self._url, self.WORDS[kind][1])
