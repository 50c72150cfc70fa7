"""`OpTimer`: times ops by name, again and again; `Spread`: what comes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from optpipe.measured.measurements import MeasuredTimes
from optpipe_runtime.memory.clock import Clock
from optpipe_runtime.memory.engines import Handle


class Spread(MeasuredTimes):
    """Times of one op in ms: median and interquartile range over `count` measurements."""

    @classmethod
    def mean(cls, weighed: Sequence[tuple[int, Spread]]) -> Spread:
        """The weighted mean of the medians, with the widest spread."""
        total = sum(weight for weight, _ in weighed)
        return cls(
            ms=round(sum(weight * spread.ms for weight, spread in weighed) / total, 4),
            iqr_ms=max(spread.iqr_ms for _, spread in weighed),
            count=sum(spread.count for _, spread in weighed),
        )

    def longer(self, ms: float) -> Spread:
        """The same with so many ms more."""
        return replace(self, ms=round(self.ms + ms, 4))


class OpTimer:
    """Times ops by name. Read the times when all has ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: defaultdict[str, list[list[tuple[Any, Any]]]] = defaultdict(list)
        self.recording = True  # False while all warms up

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Times what runs in this context."""
        if not self.recording:
            yield
        else:
            start = self._clock.mark()
            yield
            self._marks[name].append([(start, self._clock.mark())])

    def copies(self, name: str, parts: Sequence[Sequence[Handle]]) -> None:
        """Notes the transfers of all parts. Their times are added up, each as a step's trace tells it."""
        if self.recording:
            self._marks[name].append([(handles[0].start, handles[-1].end) for handles in parts if handles])

    def spreads(self, scale: float = 1.0) -> dict[str, Spread]:
        """Of each name; times are multiplied by `scale`."""
        return {
            name: Spread.from_samples([scale * sum(self._clock.ms(a, b) for a, b in spans) for spans in marks])
            for name, marks in self._marks.items()
        }
